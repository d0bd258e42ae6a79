"""Mutants: which are made of a text, and that a check's verdict on each is told apart."""

from __future__ import annotations

import os
from collections import Counter
from functools import partial
from pathlib import Path

import numpy as np
import pytest

from attngen.cpu.build import CppCompiler
from attngen.cpu.mutate import MARKER, Mutant, MutantKind, Verdict, main, mutants, run_mutants
from attngen.cpu.run import Mode
from tests.cpu.host_kernels import CASES, gemm_case, kernel_text, reduce_case

TEXT = f"""
AG_DEVICE int before(int i) {{ return i < 7 ? 1 : 2; }}
{MARKER} ----
constexpr int kTile = 0x1f;
constexpr int kPad = 1;  // free: only the banks of shared memory see it
#pragma unroll 4
#line 9 "x.attn"
/* if (a < 3) ag_sync(); */
template <class T> AG_DEVICE T f(T x) {{
    ag_shared<T> a(buffer, 16, kTile);
    if (x >= 2u && x != 1.5f) ag_sync();
    ag_copy_async(to(x), from, true);
    ag_copy_commit();
    ag_copy_wait<1>();
    float y = ag_from_float<T>(g(x, 1e-3f)) >> 3;
    return ag_max(y, ag_shuffle_xor(h(y, 4), kTile / 2)) + '3' + "a < 5"[0];
}}
"""


def changes(kind: MutantKind) -> list[tuple[str, str]]:
    return [(m.before, m.after) for m in mutants(TEXT) if m.kind is kind]


def test_barriers_are_deleted() -> None:
    assert changes(MutantKind.BARRIER) == [("ag_sync()", "")]


def test_copies_and_waits_are_deleted_or_weakened() -> None:
    assert changes(MutantKind.COPY) == [
        ("ag_copy_async(to(x), from, true)", ""),
        ("ag_copy_commit()", ""),
        ("1", "2"),
        ("ag_copy_wait<1>()", ""),
    ]


def test_the_instructions_of_warp_groups_are_left_out() -> None:
    text = """
        ag_barrier_init(b, n); ag_barrier_init_fence(); ag_async_fence(); ag_wgmma_fence();
        ag_barrier_arrive_expect(b, n); ag_barrier_wait(b, p); if (ag_barrier_try_wait(b, p)) f();
        ag_named_arrive(x, n); ag_tensor_load(to, map, b, x, y); ag_tensor_store(map, from, x, y);
        ag_tensor_store_commit(); ag_wgmma_commit(); ag_wgmma_wait<1>();
        ag_tensor_store_wait_read<0>();
    """
    made: dict[MutantKind, list[str]] = {}
    for mutant in mutants(text):
        made.setdefault(mutant.kind, []).append(mutant.after or mutant.before.split("(")[0])
    assert made == {
        MutantKind.BARRIER: [
            *("ag_barrier_init", "ag_barrier_arrive_expect", "ag_barrier_wait", "ag_named_arrive"),
        ],
        MutantKind.FENCE: ["ag_barrier_init_fence", "ag_async_fence", "ag_wgmma_fence"],
        MutantKind.COPY: [
            *("ag_tensor_load", "ag_tensor_store", "ag_tensor_store_commit", "ag_wgmma_commit"),
            *("2", "ag_wgmma_wait<1>", "1", "ag_tensor_store_wait_read<0>"),
        ],
    }


def test_the_functions_of_tensor_cores_are_device_functions() -> None:
    first = mutants(kernel_text("mma_gemm"))[0]
    assert first.source.startswith("constexpr int kThreads")


def test_shuffles_become_their_argument() -> None:
    assert changes(MutantKind.SHUFFLE) == [("ag_shuffle_xor(h(y, 4), kTile / 2)", "(h(y, 4))")]


def test_integers_move_by_one() -> None:
    expected = [("0x1f", "0x20"), ("16", "17"), ("2u", "3u"), ("3", "4"), ("4", "5"), ("2", "3")]
    expected += [("0", "1")]
    assert changes(MutantKind.LITERAL) == expected


def test_declared_lengths_are_shortened() -> None:
    text = """
        float x[2], y[2];
        RowParts rows[2];
        ag_shared<int> a(memory, 0, 2 * n);
        Board(unsigned char* memory) : b(memory, kAt, 2 * (n + 1)), c(memory, 4, 4) {}
    """
    before_after = [(m.before, m.after) for m in mutants(text)]
    lengths = [*[("2", "1")] * 3, ("0", "1"), ("2", "1"), ("2", "1"), ("1", "0")]
    assert before_after == [*lengths, ("4", "5"), ("4", "3")]


def test_comparisons_change_but_template_brackets_do_not() -> None:
    assert changes(MutantKind.COMPARISON) == [(">=", ">"), ("!=", "==")]


def test_a_mutant_is_one_change_at_the_place_it_says() -> None:
    for mutant in mutants(TEXT):
        line = TEXT.splitlines()[mutant.line - 1]
        assert line[mutant.column - 1 :].startswith(mutant.before)
        assert line.strip() == mutant.source
        assert len(mutant.text) == len(TEXT) - len(mutant.before) + len(mutant.after)
        assert mutant.text.count("\n") == TEXT.count("\n")


def test_without_a_marker_the_whole_text_is_changed() -> None:
    assert [m.before for m in mutants("int f() { return 3; }")] == ["3"]


# ---- running them -----------------------------------------------------------------------------


def check_case(name: str, library: Path) -> None:
    case = CASES[name]()
    for mode in (Mode.RING, Mode.EAGER_LAST):
        case.run(library, mode=mode, workers=1)


def check_gemm(library: Path) -> None:
    check_case("mma_gemm", library)
    case = gemm_case(32, 32, 96)  # whole steps
    case.run(library, workers=1)
    assert case.report is not None
    assert case.report.shared_wavefronts == case.report.shared_wavefronts_least


CHECKS = {name: partial(check_case, name) for name in CASES} | {"mma_gemm": check_gemm}


def check_strangely(library: Path) -> None:
    """A check that behaves as wrong kernels do: by what the library's kernel computes."""
    case = reduce_case(blocks=1)
    case.launch(library, check=False)
    answer = int(np.asarray(case.arguments["out"])[0])
    while answer == 1:
        pass
    if answer == 2:
        os.abort()
    if answer == 3:
        raise AssertionError("three")


def returning(value: str) -> str:
    return kernel_text("reduce").replace("ag_block(), total)", f"ag_block(), {value})")


def by_hand(text: str) -> Mutant:
    return Mutant(MutantKind.LITERAL, 1, 1, "", "", "", text)


def test_verdicts(compiler: CppCompiler) -> None:
    deep = "static int deep(int n) { volatile int x[99]; x[0] = n; return deep(n + 1) + x[0]; }\n"
    texts = [returning(x) for x in ("1.0f", "2.0f", "3.0f", "4.0f", "0.0f + 0.0f", "oops")]
    texts.append(returning("(float)deep(0)").replace("AG_KERNEL(kT", deep + "AG_KERNEL(kT"))
    outcomes = run_mutants(
        returning("0.0f"),
        [by_hand(text) for text in texts],
        check_strangely,
        limit_s=2.0,
        jobs=2,
        compiler=compiler,
    )
    assert [(o.verdict, o.how.split(":")[0]) for o in outcomes[:5]] == [
        (Verdict.KILLED, "hangs"),
        (Verdict.KILLED, "crashes"),
        (Verdict.KILLED, "AssertionError"),
        (Verdict.SURVIVED, "the check passes"),
        (Verdict.EQUIVALENT, "the same machine code"),
    ]
    assert outcomes[1].how == "crashes: SIGABRT"
    assert outcomes[5].verdict is Verdict.UNBUILDABLE
    assert "oops" in outcomes[5].how
    assert outcomes[6].how == "crashes: SIGSEGV"  # a stack that grows without end


def test_a_check_that_the_kernel_fails_is_no_check(compiler: CppCompiler) -> None:
    with pytest.raises(ValueError, match="does not pass the check: AssertionError: three"):
        run_mutants(returning("3.0f"), [], check_strangely, compiler=compiler)


# Changes that change nothing: any lane may speak for its warp and any warp for the block, and
# the masks 17, 8, 4, 2, 1 reach all lanes as 16, 8, 4, 2, 1 do.
SAME_REDUCE = {
    "`16` becomes `17` in `for (int mask = 16; mask > 0; mask /= 2) x += ag_shuffle_xor(x, mask);`",
    "`32` becomes `33` in `int warp = ag_thread() / 32, lane = ag_thread() % 32;`",
    "`0` becomes `1` in `if (lane == 0) partial[warp] = sum;`",
    "`0` becomes `1` in `if (warp == 0) {`",
    "`0` becomes `1` in `if (lane == 0) ag_store(args.out + ag_block(), total);`",
}
# One more tile behind the last one is masked as a whole.
SAME_ATTENTION = {
    "`<` becomes `<=` in `for (int first_key = 0; first_key < args.keys; first_key += kTile) {`",
}
ALL_KINDS = set(MutantKind)
QUICK_KINDS = ALL_KINDS - {MutantKind.LITERAL}


@pytest.mark.parametrize(
    ("name", "kinds", "same"),
    [
        ("reduce", ALL_KINDS, SAME_REDUCE),
        ("transpose", ALL_KINDS, set()),
        ("diffuse", ALL_KINDS, set()),
        ("rotate", ALL_KINDS, set()),
        ("halves", ALL_KINDS, set()),
        ("workspace", ALL_KINDS, set()),
        ("attention", QUICK_KINDS, SAME_ATTENTION),
        ("mma_gemm", QUICK_KINDS, set()),
    ],
)
def test_mutants_of_a_kernel_are_noticed(
    name: str, kinds: set[MutantKind], same: set[str], compiler: CppCompiler
) -> None:
    text = kernel_text(name)
    chosen = [m for m in mutants(text) if m.kind in kinds]
    outcomes = run_mutants(text, chosen, CHECKS[name], compiler=compiler)
    by_verdict = Counter(o.verdict for o in outcomes)
    survivors = {o.mutant.description for o in outcomes if o.verdict is Verdict.SURVIVED}
    assert {text.split(": ", 1)[1] for text in survivors} == same
    assert by_verdict[Verdict.UNBUILDABLE] == 0
    assert by_verdict[Verdict.EQUIVALENT] == 0


def test_command_line_lists(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = tmp_path / "kernel.cu"
    path.write_text(TEXT)
    assert main([str(path), "--kind", "barrier"]) == 0
    assert capsys.readouterr().out == (
        "barrier    11:31: no `ag_sync()` in `if (x >= 2u && x != 1.5f) ag_sync();`\n"
    )
