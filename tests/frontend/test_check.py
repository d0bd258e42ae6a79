"""What the checker makes of a text: names, types, constants, definitions, lets, schedules."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from attngen.diagnostics.diagnostic import AttnError
from attngen.diagnostics.span import Source
from attngen.frontend import load
from attngen.frontend.check import Checked, check
from attngen.frontend.load import load_file, load_text
from attngen.frontend.parse import parse
from attngen.ir.attention import Bound
from attngen.ir.digest import digest_attention
from attngen.ir.expr import Binary, Const, Let, Symbol, ToFloat
from attngen.ir.printer import print_attention, print_expr
from attngen.ir.row_state import SIGMOID, SOFTMAX, SOFTMAX_WITH_SINK
from attngen.ir.schedule import LoopOrder, Normalize, Passes, Schedule
from attngen.ir.traverse import postorder
from attngen.ir.types import BF16, FP16, ScalarType
from attngen.ir.verify import verify_attention

DATA = Path(__file__).parent.parent / "data"


def checked(body: str, *, before: str = "", after: str = "", **given: Any) -> Checked:
    result = check(load_text(f"{before}\nattention a {{\n{body}\n}}\n{after}"), **given)
    assert verify_attention(result.attention) == []
    return result


def mask_of(line: str, body: str = "", before: str = "", **given: Any) -> str:
    attention = checked(f"{body}\nmask {line}", before=before, **given).attention
    assert attention.mask is not None
    return print_expr(attention.mask)


def score_of(line: str, body: str = "", before: str = "", **given: Any) -> str:
    attention = checked(f"{body}\nscore {line}", before=before, **given).attention
    return print_expr(attention.scores[0])


def test_the_example_of_the_design() -> None:
    result = check(load_file(DATA / "format" / "gemma2_local.attn"))
    a = result.attention
    assert (a.name, a.dtype, a.head_dim_qk, a.head_dim_v) == ("gemma2_local", BF16, 256, 256)
    assert (a.heads_q, a.heads_kv, a.outputs) == (16, 8, ("o", "lse"))
    assert a.row_state is SOFTMAX
    assert (
        print_attention(a)
        == """attention gemma2_local {
    dtype     bf16
    head_dim  qk = 256, v = 256
    heads     q = 16, kv = 8
    param     cap : float = 50.0
    tensor    doc : int32[B, Skv]
    scale     1.0 / sqrt(float(Dqk))
    score     cap * tanh(s / cap)
    let       same_doc = doc[b, qpos] == doc[b, kv]
    mask      -4095 <= kv - qpos and kv - qpos <= 0 and same_doc
    weights   softmax
    output    o, lse
}
"""
    )
    assert result.schedule_for("sm_80") == Schedule()
    assert result.schedule_for("sm_90a") == Schedule(tile_q=128, tile_kv=128, stages=2)


def test_the_smallest_program() -> None:
    a = checked("").attention
    assert (a.dtype, a.head_dim_qk, a.heads_q, a.mask, a.sink) == (None,) * 5
    assert (a.scores, a.params, a.tensors, a.outputs) == ((), (), (), ("o",))
    assert print_expr(a.scale) == "1.0 / sqrt(float(Dqk))"


# ---- constants ---------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("text", "value"),
    [
        ("2**31", "2147483648"),
        ("2**64 // 2**60", "16"),
        ("-7 // 2", "-4"),
        ("-7 % 3", "2"),
        ("7 % -3", "-2"),
        ("-(3 - 5) * 4", "8"),
        ("0**0", "1"),
        ("(-2)**3", "-8"),
        ("-2**2", "-4"),
        ("2**3**2", "512"),
        ("min(5, 3, 4) + max(1, 2) + abs(-3) + clamp(9, 0, 5)", "13"),
        ("floor(7)", "7"),
        ("where(1 < 2 <= 2, 10, 20)", "10"),
        ("where(not (1 == 2) and true, 10, 20)", "10"),
        ("W * 2 - 1", "127"),
    ],
)
def test_integers_fold_exactly(text: str, value: str) -> None:
    assert mask_of(f"kv < {text}", "const W = 64") == f"kv < {value}"


def test_consts() -> None:
    body = """const A = 4
        const B1 : float = A
        const C = 1 / 3
        const D1 = A > 3
        const E = 2 ** -1
        const F = floor(2.5 * A)
        const G : int
        score where(D1, s * B1, s) + C + E + F + G"""
    a = checked(body, consts={"G": 7}).attention
    assert print_expr(a.scores[0]) == "s * 4.0 + 0.33333334 + 0.5 + 10.0 + 7.0"
    a = checked(body, consts={"G": 7, "A": 2}).attention
    assert print_expr(a.scores[0]) == "s + 0.33333334 + 0.5 + 5.0 + 7.0"
    a = checked(body, consts={"G": 7, "C": 3}).attention
    assert print_expr(a.scores[0]) == "s * 4.0 + 3.0 + 0.5 + 10.0 + 7.0"


def test_floats_are_printed_as_short_as_they_are_exact() -> None:
    assert score_of("s * 0.1 + 1e-20 + inf + -inf") == "s * 0.1 + 1e-20 + inf + -inf"


def test_what_is_decided_disappears() -> None:
    assert mask_of("(true and kv < 3) or false or q < 2") == "kv < 3 or q < 2"
    assert mask_of("kv < 3 and false and q < 2") == "kv < 3 and false"
    assert mask_of("false and kv < 3") == "false"
    assert checked("mask true or kv < 3").attention.mask is None


# ---- types -------------------------------------------------------------------------------


def test_promotion_is_explicit() -> None:
    assert score_of("s + kv") == "s + float(kv)"
    assert score_of("q / 2 + 1") == "float(q) / 2.0 + 1.0"
    assert score_of("where(kv > 3, 1, s)") == "where(kv > 3, 1.0, s)"
    assert score_of("max(kv, s, 2)") == "max(max(float(kv), s), 2.0)"
    assert score_of("exp(q)") == "exp(float(q))"
    assert mask_of("kv < 2.5") == "float(kv) < 2.5"
    assert mask_of("q // 2 == kv % 3") == "q // 2 == kv % 3"
    assert score_of("kv") == "float(kv)"
    assert score_of("+s") == "s"


def test_large_integers_become_floats_where_they_are_used() -> None:
    (score,) = checked("score s + (2**53 + 1)").attention.scores
    assert isinstance(score, Binary)
    assert isinstance(score.right, ToFloat)
    (score,) = checked("score s + 2**52").attention.scores
    assert isinstance(score, Binary)
    assert isinstance(score.right, Const)


def test_symbols_keep_their_place() -> None:
    (score,) = checked("score s + hkv\nscore Dqk + Dv + s").attention.scores[:1]
    nodes = [node for node in postorder(score) if isinstance(node, Symbol)]
    assert [(n.name, n.role.value, n.span.text) for n in nodes if n.span] == [
        ("s", "score", "s"),
        ("hkv", "index", "hkv"),
    ]


def test_comparison_chains() -> None:
    assert mask_of("0 <= kv - q < 3") == "0 <= kv - q and kv - q < 3"
    assert mask_of("q < kv == 3 > b") == "q < kv and kv == 3 and 3 > b"
    assert mask_of("0 <= kv % 7 - q < 3") == ("let middle = kv % 7 - q\n0 <= middle and middle < 3")
    assert mask_of("0 <= kv < 2.5") == "0 <= kv and float(kv) < 2.5"
    assert mask_of("(kv < 3) == (q < 3)") == "(kv < 3) == (q < 3)"


def test_powers() -> None:
    assert score_of("s ** 0 + s ** 1 + s ** 2") == "1.0 + s + s * s"
    assert score_of("exp(s) ** 3") == "let base = exp(s)\nbase * (base * base)"
    assert mask_of("kv ** 2 < q") == "kv * kv < q"
    assert score_of("2 ** s + 2 ** h + 2.0 ** -3") == "exp2(s) + exp2(float(h)) + 0.125"
    assert score_of("s + x ** n", "const n = 3\nparam x : float") == "s + x * (x * x)"
    long = score_of("tanh(s) ** 64")
    assert long.count("*") <= 9


def test_nested_powers_stay_small() -> None:
    text = "s"
    for _ in range(60):
        text = f"({text} + kv) ** 2"
    assert len(score_of(text)) < 10_000


# ---- definitions -------------------------------------------------------------------------


def test_hygiene() -> None:
    before = """define f(x : int) : int = g(x + 1) * x
        define g(y : int) : int = y - kv"""
    assert mask_of("f(x) < W", "param x : int\nparam y : int\nconst W = 3", before) == (
        "(x + 1 - kv) * x < 3"
    )
    assert mask_of("f(y + q) < 3", "param y : int", before) == ("(y + q + 1 - kv) * (y + q) < 3")


def test_an_argument_that_is_used_often_is_shared() -> None:
    before = "define f(x : float) : float = x * x + x"
    assert score_of("f(exp(s)) + f(exp(s))", before=before) == (
        "let x = exp(s)\nlet x_2 = exp(s)\nx * x + x + (x_2 * x_2 + x_2)"
    )
    assert score_of("f(s)", before=before) == "s * s + s"
    assert score_of("f(f(exp(s)))", before=before) == (
        "let x = exp(s)\n(x * x + x) * (x * x + x) + (x * x + x)"
    )
    assert score_of("f(f(f(s)))", before=before).startswith("let x = ")


def test_generated_lets_avoid_declared_names() -> None:
    before = "define f(x : float) : float = x * x"
    body = "param x : float\nlet x_2 = s * s + x"
    assert score_of("f(exp(x)) + x_2", body, before) == (
        "let x_3 = exp(x)\nlet x_2 = s * s + x\nx_3 * x_3 + x_2"
    )


def test_flags() -> None:
    assert mask_of("causal") == "kv <= qpos"
    assert mask_of("causal()") == "kv <= qpos"
    assert mask_of("causal(top_left)") == "kv <= q"
    assert mask_of("causal(top_left = 1 > 2)") == "kv <= qpos"
    before = "define near(n : int = 3, both : flag, far : flag = true) : bool = (\n"
    before += " where(both, abs(kv - qpos), where(far, qpos - kv, kv)) < n)"
    assert mask_of("near", before=before) == "qpos - kv < 3"
    assert mask_of("near(both, 4)", before=before) == "abs(kv - qpos) < 4"
    assert mask_of("near(far = false)", before=before) == "kv < 3"


def test_a_flag_can_be_handed_on() -> None:
    before = "define mine(top_left : flag) : bool = causal(top_left = top_left)"
    assert mask_of("mine", before=before) == "kv <= qpos"
    assert mask_of("mine(top_left)", before=before) == "kv <= q"


def test_what_a_flag_turns_off_may_be_hidden() -> None:
    before = "define slope(by_key : flag) : float = where(by_key, kv, h) + 1"
    a = checked("scale slope", before=before).attention
    assert print_expr(a.scale) == "float(h + 1)"


def test_defaults_and_named_arguments() -> None:
    before = "define f(x : float, y : float = 2 ** 3, z : int = Hq) : float = x - y - z"
    assert score_of("f(s)", before=before) == "s - 8.0 - float(Hq)"
    assert score_of("f(s, z = 3)", before=before) == "s - 8.0 - 3.0"
    assert score_of("f(z = 1, y = 2, x = s)", before=before) == "s - 2.0 - 1.0"


def test_tensors_are_handed_on_by_name() -> None:
    before = "define at(t : tensor, i : int) : int = t[b, i]\n"
    before += "define both(u : tensor) : bool = at(u, q) == at(t = u, i = kv)"
    assert mask_of("both(doc)", "tensor doc : int[B, Skv]", before) == "doc[b, q] == doc[b, kv]"


def test_spans_of_an_expansion_lie_in_the_block() -> None:
    unit = load_text("attention a {\n tensor doc : int[B, Skv]\n mask causal and document(doc)\n}")
    mask = check(unit).attention.mask
    assert mask is not None
    source = unit.main.span.source
    texts = {n.span.text for n in postorder(mask) if n.span and n.span.source is source}
    assert texts == {"causal", "document(doc)", "causal and document(doc)"}


# ---- lets --------------------------------------------------------------------------------


def test_a_let_is_one_object() -> None:
    a = checked("let x = q * kv + b\nscore s + x\nmask x < 3").attention
    lets = {id(n) for e in a.expressions() for n in postorder(e) if isinstance(n, Let)}
    assert len(lets) == 1


def test_each_score_line_has_its_own_score() -> None:
    body = """let x = s * s + kv
        let y = exp(x)
        let z = q * kv + 1
        score x + y + z
        score x + z
        score x * y"""
    a = checked(body).attention
    assert [print_expr(e) for e in a.scores] == [
        "let x = s * s + float(kv)\nlet y = exp(x)\nlet z = q * kv + 1\nx + y + float(z)",
        "let x_2 = s * s + float(kv)\nlet z = q * kv + 1\nx_2 + float(z)",
        "let x_3 = s * s + float(kv)\nlet y_2 = exp(x_3)\nx_3 * y_2",
    ]


def test_a_let_of_a_constant_is_the_constant() -> None:
    assert mask_of("kv < n", "let n = 4 * 4") == "kv < 16"


def test_an_unused_let_may_be_anything() -> None:
    checked("let x = s\nlet y = kv * s\nmask causal")


# ---- statements --------------------------------------------------------------------------


def test_masks_are_joined() -> None:
    assert mask_of("kv < 3\nmask q > 1 and b == 0\nmask h > 0 or kv > 1") == (
        "kv < 3 and q > 1 and b == 0 and (h > 0 or kv > 1)"
    )


def test_weights() -> None:
    assert checked("weights softmax").attention.row_state is SOFTMAX
    sink = checked("tensor t : bf16[Hq]\nweights softmax(sink = t[h])").attention
    assert sink.row_state is SOFTMAX_WITH_SINK
    assert sink.sink is not None
    assert print_expr(sink.sink) == "t[h]"
    zero = checked("weights softmax(sink = 0)").attention
    assert zero.sink is not None
    assert print_expr(zero.sink) == "0.0"
    assert checked("weights sigmoid").attention.row_state is SIGMOID
    assert checked("weights sigmoid\noutput o").attention.outputs == ("o",)
    assert checked("output row_max, o, lse").attention.outputs == ("row_max", "o", "lse")


def test_params_and_their_ranges() -> None:
    body = """const N = 8
        param a : int = N where 1 <= a < 2**31
        param c : float where c > 0
        param d : float = 1 where 0.5 <= d and d < N and 0 < d
        param e : bool = true
        param f : int where 3 == f
        param g : float where g < inf"""
    params = {p.name: p for p in checked(body).attention.params}
    assert params["a"].default == 8
    assert params["a"].bound == Bound(1, 2**31, False, True)
    assert params["c"].bound == Bound(0.0, None, True, False)
    assert (params["d"].default, params["d"].bound) == (1.0, Bound(0.5, 8.0, False, True))
    assert isinstance(params["d"].default, float)
    assert (params["e"].type, params["e"].default) == (ScalarType.BOOL, True)
    assert params["f"].bound == Bound(3, 3)
    assert params["g"].bound == Bound(None, math.inf, False, True)


def test_tensors() -> None:
    body = """const R = 5
        tensor a : float[B?, Hq?, Sq, Skv]
        tensor b1 : int[R, NW, 7]
        tensor c : bool[NW?, Hkv]
        mask c[NW - 1, hkv] and kv < NW"""
    attention = checked(body).attention
    a, b1, c = attention.tensors
    assert a.element.name == "fp32"
    assert [(d.size, d.optional) for d in a.dims] == [
        ("B", True), ("Hq", True), ("Sq", False), ("Skv", False),
    ]  # fmt: skip
    assert (b1.element.name, [d.size for d in b1.dims]) == ("int32", [5, "NW", 7])
    assert c.dims[0].optional
    assert attention.named_sizes == ("NW",)


def test_lengths() -> None:
    a = checked("tensor n : int64[B]\nparam m : int\nlength q = n[b], kv = n[b] + m").attention
    assert a.length_q is not None
    assert a.length_kv is not None
    assert (print_expr(a.length_q), print_expr(a.length_kv)) == ("n[b]", "n[b] + m")
    assert checked("tensor n : int[B]\nlength kv = n[b]").attention.length_q is None


def test_scale_may_be_anything_of_a_head() -> None:
    a = checked("tensor t : float[Hq]\nparam x : float\nscale -t[h] * x / (Skv + b)").attention
    assert print_expr(a.scale) == "-t[h] * x / float(Skv + b)"
    assert print_expr(checked("scale -2").attention.scale) == "-2.0"


def test_what_the_caller_decides() -> None:
    a = checked("", dtype="fp16", head_dim=(64, 32)).attention
    assert (a.dtype, a.head_dim_qk, a.head_dim_v) == (FP16, 64, 32)
    a = checked("dtype bf16\nhead_dim 64", dtype="bf16", head_dim=(64, 64)).attention
    assert (a.dtype, a.head_dim_v) == (BF16, 64)


def test_names_are_visible_in_the_whole_block() -> None:
    assert mask_of("kv < W + w and t[b] < NW\nconst W = 3\nparam w : int\ntensor t : int[B, NW]"
                   .replace("t[b]", "t[b, 0]")) == "kv < 3 + w and t[b, 0] < NW"  # fmt: skip


# ---- schedules ---------------------------------------------------------------------------


def test_schedules_are_merged_key_by_key() -> None:
    after = """schedule {
            loop kv, q
            passes two
            normalize every_tile
            tile q = 64, kv = auto
            warps 4
            kernel forward_simt
        }
        schedule sm_80 {
            tile kv = 32
            kernel auto
        }
        schedule sm_90a {
            loop q, kv
            stages W // 2
            splits auto
        }"""
    result = checked("const W = 8", after=after)
    base = Schedule(
        LoopOrder.KV_Q, Passes.TWO, Normalize.EVERY_TILE, 64, None, None, 4, None, "forward_simt"
    )
    assert result.schedule_for("sm_120") == base
    assert result.schedule_for("sm_80").tile_q == 64
    assert result.schedule_for("sm_80").tile_kv == 32
    assert result.schedule_for("sm_80").kernel is None
    assert result.schedule_for("sm_90a").loop is LoopOrder.Q_KV
    assert result.schedule_for("sm_90a").stages == 4
    assert set(result.schedules["sm_90a"]) == {"loop", "stages", "splits"}


def test_a_schedule_does_not_change_the_digest() -> None:
    plain = checked("mask causal").attention
    tuned = checked("mask causal", after="schedule {\n warps 4\n}").attention
    assert digest_attention(plain) == digest_attention(tuned)
    assert plain.source == tuned.source


# ---- files and the library ---------------------------------------------------------------


def test_own_definitions_come_before_the_library() -> None:
    before = "define window(n : int) : bool = kv < n\ndefine causal : bool = kv < 7"
    assert mask_of("window(3) and causal", before=before) == "kv < 3 and kv < 7"


def test_a_library_definition_never_sees_ours() -> None:
    before = "define slope(n : int) : float = 0.0\ndefine power_of_two_below(n : int) : int = 0"
    text = f"{before}\nattention a {{\n score alibi(s) + slope(3)\n}}"
    unit = load_text(text)
    assert {"alibi__slope", "alibi__power_of_two_below", "slope", "alibi"} <= set(unit.definitions)
    assert "exp2" in print_expr(check(unit).attention.scores[0])


def test_helpers_of_the_library_are_not_visible() -> None:
    with pytest.raises(AttnError) as caught:
        checked("score alibi(s) + slope(3)")
    assert [d.code for d in caught.value.diagnostics] == ["A202"]


def test_declared_names_come_before_the_library() -> None:
    assert mask_of("kv < causal + window", "param causal : int\nlet window = q * kv") == (
        "let window = q * kv\nkv < causal + window"
    )


def test_only_what_is_used_is_read(monkeypatch: pytest.MonkeyPatch) -> None:
    read: list[str] = []

    def spy(source: Source) -> Any:
        read.append(source.name)
        return parse(source)

    load._library_module.cache_clear()
    monkeypatch.setattr(load, "parse", spy)
    load_text("attention a {\n param window : int\n mask causal and kv < window\n}")
    assert read == ["<text>", "attngen/library/causal.attn"]


def test_imports(tmp_path: Path) -> None:
    (tmp_path / "sub").mkdir()
    (tmp_path / "masks.attn").write_text(
        'import "sub/deep.attn"\n'
        "define near(n : int) : bool = within(n) and helper\n"
        "define helper : bool = kv > 0\n"
        "define unused : bool = kv > 9\n"
    )
    (tmp_path / "sub" / "deep.attn").write_text(
        "define within(n : int) : bool = abs(kv - qpos) <= n\nattention ignored {\n}\n"
    )
    main = tmp_path / "main.attn"
    main.write_text(
        'import "masks.attn"\ndefine helper : bool = kv > 1\n'
        "attention a {\n mask near(3) and helper\n}\n"
    )
    unit = load_file(main)
    mask = check(unit).attention.mask
    assert mask is not None
    assert print_expr(mask) == "abs(kv - qpos) <= 3 and kv > 0 and kv > 1"
    assert set(unit.definitions) == {"near", "helper", "masks__helper", "deep__within"}
    main.write_text('import "masks.attn"\nattention a {\n mask within(3)\n}\n')
    with pytest.raises(AttnError) as caught:
        check(load_file(main))
    assert [d.code for d in caught.value.diagnostics] == ["A202"]


# ---- the canonical text ------------------------------------------------------------------


CANONICAL = """attention a {
    const     W = 64
    score     softcap(s, 5.0)
    mask      near(W)
}

define near(n : int) : bool = abs(kv - qpos) <= n
define softcap(x : float, cap : float) : float = cap * tanh(x / cap)
"""


def test_canonical_text() -> None:
    text = """# a comment
        define near(n : int) : bool = abs(kv - qpos) <= n  # here
        define unused : bool = kv < 3
        attention a {
            const W = 64  # too

            # and here
            score softcap(s, 5.0)
            mask near(W)
        }
        schedule {
            warps 4
        }"""
    unit = load_text(text)
    assert unit.canonical_text() == CANONICAL
    again = load_text(unit.canonical_text())
    assert again.canonical_text() == CANONICAL
    assert digest_attention(check(again).attention) == digest_attention(check(unit).attention)
    assert check(unit).attention.source == CANONICAL


def test_the_source_states_what_the_caller_chose() -> None:
    body = "const W = 64\nconst x : float\nmask kv < W"
    given: dict[str, Any] = {"consts": {"W": -8, "x": 0.5}, "dtype": "bf16", "head_dim": (64, 64)}
    source = checked(body, **given).attention.source
    assert source == (
        "attention a {\n    dtype     bf16\n    head_dim  64\n    const     W = -8\n"
        "    const     x : float = 0.5\n    mask      kv < W\n}\n"
    )
    again = check(load_text(source)).attention
    assert digest_attention(again) == digest_attention(checked(body, **given).attention)


def test_digests_tell_variants_apart() -> None:
    texts = ["", "mask causal", "mask causal(top_left)", "weights sigmoid", "score s", "scale 1.0"]
    digests = [digest_attention(checked(text).attention) for text in texts]
    assert len(set(digests)) == len(texts)
    assert all(len(digest) == 64 for digest in digests)


def test_consts_may_be_numbers_of_numpy() -> None:
    given = {"W": np.int64(9), "x": np.float32(0.5), "on": np.bool_(True)}
    body = "const W = 1\nconst x = 2.0\nconst on = false\nmask kv < W and on\nscore s * x"
    a = checked(body, consts=given).attention
    assert "const     W = 9" in a.source
    assert print_expr(a.scores[0]) == "s * 0.5"


def test_a_const_beyond_64_bits() -> None:
    with pytest.raises(AttnError) as caught:
        checked("const W = 1\nmask kv < W", consts={"W": 2**63})
    assert [d.code for d in caught.value.diagnostics] == ["A216"]
