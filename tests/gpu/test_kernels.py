"""Whole kernels on a real GPU: the conformance cases, in arrays of CuPy and of PyTorch.

    pytest tests/gpu -m gpu

Every output is NaN before a launch, and every comparison says which case it is.
"""

from __future__ import annotations

import os
import subprocess
import sys
import threading
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from functools import lru_cache
from itertools import pairwise
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np
import pytest

import attngen
from attngen.api import Kernel
from attngen.backend.device import view
from attngen.backend.launch import load_driver
from attngen.diagnostics.diagnostic import AttnError
from attngen.kernels import all_families, forward_mma
from tests.api.texts import catch, words
from tests.conformance.cases import Case, Inputs, numeric_cases
from tests.conformance.expected import Answer, expected
from tests.conformance.specs import SPECS, VARIATIONS, Spec, arguments, source
from tests.conformance.test_behaviours import LAYOUTS, misalign

from .libraries import Cupy, Library, Torch, digest
from .test_launch import explain_missing_gpu, needs_two_gpus

_reason = explain_missing_gpu()
pytestmark = [pytest.mark.gpu, pytest.mark.skipif(_reason is not None, reason=str(_reason))]

Array = Any
SIMT = "kernel forward_simt"
PLAIN = "attention plain {\n    mask kv <= q\n}\n"
"""Its only output is o, so a call with `out=` allocates nothing."""


LIBRARIES = {"cupy": Cupy, "torch": Torch}


@pytest.fixture(params=LIBRARIES)
def library(request: pytest.FixtureRequest) -> Library:
    found: Library = LIBRARIES[request.param]()
    return found


@pytest.fixture
def cupy_library() -> Cupy:
    return Cupy()


@pytest.fixture
def torch_library() -> Torch:
    return Torch()


@pytest.fixture(autouse=True)
def give_memory_back() -> Iterator[None]:
    """Two libraries share the GPU, so each gives back what it keeps for later."""
    yield
    cupy, torch = (sys.modules.get(name) for name in ("cupy", "torch"))
    if cupy is not None:
        cupy.get_default_memory_pool().free_all_blocks()
    if torch is not None and torch.cuda.is_available():
        torch.cuda.empty_cache()


def first_case(id_: str, **dims: int) -> Case:
    case = numeric_cases(id_)[0]
    return Case(case.id, case.variant, case.record, {**case.dims, **dims})


def compile_case(case: Case, spec: Spec | None = None, **options: Any) -> Kernel:
    spec = spec or SPECS[case.id]
    consts = arguments(case.inputs(), spec).consts if spec.consts else {}
    text = source(case, spec)
    return attngen.compile_text(text, name=f"{case}.attn", engine="cuda", consts=consts, **options)


def tensors_on_gpu(library: Library, inputs: Inputs, spec: Spec) -> dict[str, Any]:
    given = arguments(inputs, spec)
    on_gpu = {name: library.asarray(np.asarray(x)) for name, x in given.tensors.items()}
    return {**on_gpu, **given.params}


def make_nan(library: Library, shape: tuple[int, ...], dtype: Any) -> Array:
    made = library.asarray(np.zeros(shape, dtype))
    library.poison(made)
    return made


def run(
    library: Library,
    kernel: Kernel,
    case: Case,
    inputs: Inputs,
    named: Mapping[str, Any],
    operands: tuple[Array, ...] | None = None,
) -> tuple[Array, Array]:
    """o and lse on the GPU, where NaN was before."""
    shape = tuple(case.dims[name] for name in ("B", "Hq", "Sq", "Dv"))
    out = make_nan(library, shape, inputs.q.dtype)
    q, k, v = operands or (library.asarray(x) for x in (inputs.q, inputs.k, inputs.v))
    make_nan(library, shape[:3], np.float32)  # freed at once: the next array of this size, the LSE
    o, lse = kernel(q, k, v, out=out, **named)
    assert o is out
    assert type(lse) is type(q)
    return o, lse


def pick(case: Case, x: Array) -> Array:
    """The rows that a case compares."""
    return x if case.rows is None else x[:, :, case.rows]


def assert_right(library: Library, case: Case, right: Answer, o: Array, lse: Array) -> None:
    assert case.tolerance.accepts(pick(case, library.asnumpy(o)), right.o).all()
    assert case.lse_tolerance.accepts(pick(case, library.asnumpy(lse)), right.lse).all()


def text_for(kernel: Kernel, operands: Sequence[Array]) -> tuple[str, bool]:
    """The family that runs these q, k and v, and whether with its text for aligned ones.

    By the rules of the families; the first call had operands that the chosen one takes.
    """
    family = all_families()[kernel.programs[0].main.family]
    views = {n: view(x, n) for n, x in zip("qkv", operands, strict=True)}
    if family.stand_in is not None and family.why_unaligned(views) is not None:
        family = all_families()[family.stand_in]
    return family.name, family.why_unaligned(views) is None


def assert_same_or_right(
    library: Library,
    case: Case,
    kernel: Kernel,
    first: Sequence[Array],
    right: tuple[Array, Array],
    operands: Sequence[Array],
    found: tuple[Array, Array],
) -> None:
    """The bits of the first operands where the same family runs, else within tolerance."""
    if text_for(kernel, operands)[0] != text_for(kernel, first)[0]:
        assert_right(library, case, expected(case, case.inputs()), *found)
        return
    for one, same in zip(found, right, strict=True):
        assert library.bits(one) == library.bits(same)


@lru_cache(maxsize=1)
def answer(number: int) -> tuple[Inputs, Answer]:
    """Inputs and answer of one numeric case, computed once for both libraries."""
    case = numeric_cases()[number]
    inputs = case.inputs()
    return inputs, expected(case, inputs)


# ---- every numeric case ------------------------------------------------------------------

CASES = list(enumerate(numeric_cases()))


@pytest.mark.parametrize(("number", "case"), CASES, ids=[str(case) for _, case in CASES])
@pytest.mark.parametrize("library", LIBRARIES, indirect=True)
def test_case(library: Library, number: int, case: Case) -> None:
    if case.error is not None:
        with pytest.raises(AttnError, match=rf"\b{case.error}\b"):
            compile_case(case)
        return
    inputs, right = answer(number)
    kernel = compile_case(case)
    named = tensors_on_gpu(library, inputs, SPECS[case.id])
    assert_right(library, case, right, *run(library, kernel, case, inputs, named))
    assert kernel.compilations == 1


@pytest.mark.parametrize(("number", "case"), CASES, ids=[str(case) for _, case in CASES])
@pytest.mark.parametrize("family", all_families())
def test_case_with_every_family(cupy_library: Cupy, number: int, case: Case, family: str) -> None:
    if case.error is not None:
        pytest.skip("has no answer")
    inputs, right = answer(number)
    named = tensors_on_gpu(cupy_library, inputs, SPECS[case.id])
    try:
        kernel = compile_case(case, schedule=f"kernel {family}")
        found = run(cupy_library, kernel, case, inputs, named)
    except AttnError as error:
        if "A452" not in str(error):
            raise
        pytest.skip(f"{family} does not take it")
    assert_right(cupy_library, case, right, *found)


VARIATION_NUMBERS = [
    (id_, i)
    for id_, specs in VARIATIONS.items()
    for i in range(len(specs))
    if (id_, i) != ("O40", 0)  # NVRTC takes minutes over one `||` chain of 2000 terms
]


@pytest.mark.parametrize(("id_", "number"), VARIATION_NUMBERS)
def test_another_text_of_the_same_meaning(cupy_library: Cupy, id_: str, number: int) -> None:
    case, spec = first_case(id_), VARIATIONS[id_][number]
    inputs = case.inputs()
    named = tensors_on_gpu(cupy_library, inputs, spec)
    found = run(cupy_library, compile_case(case, spec), case, inputs, named)
    assert_right(cupy_library, case, expected(case, inputs), *found)


SCHEDULES = (
    "passes three",
    "passes two",
    "normalize every_tile",
    "loop kv, q",
    "loop kv, q; normalize every_tile",
    "tile q = 4, kv = 8",
    "tile q = 64, kv = 64",
)


@pytest.mark.parametrize("schedule", SCHEDULES)
@pytest.mark.parametrize("id_", ["O01", "O02", "O13", "O18", "O24", "O25", "O41"])
def test_a_schedule_changes_no_answer(cupy_library: Cupy, id_: str, schedule: str) -> None:
    case = numeric_cases(id_)[-1]
    inputs = case.inputs()
    kernel = compile_case(case, schedule=f"{schedule}; {SIMT}")
    named = tensors_on_gpu(cupy_library, inputs, SPECS[id_])
    found = run(cupy_library, kernel, case, inputs, named)
    assert_right(cupy_library, case, expected(case, inputs), *found)


# ---- O05, O35: large ones ----------------------------------------------------------------


def test_a_mask_of_more_than_2_to_the_32_elements(cupy_library: Cupy) -> None:
    """O05: 4.3 GB of uint8 on the GPU, against the formula and the oracle."""
    cupy = cupy_library.cupy
    case = first_case("O05")
    size = case.dims["Sq"]
    assert size * size > 2**32
    free, _ = cupy.cuda.runtime.memGetInfo()
    if free < 8 * 2**30:
        pytest.skip("needs 8 GiB of GPU memory")
    keep = cupy.empty((size, size), cupy.uint8)
    kv = cupy.arange(size, dtype=cupy.int32)
    for first in range(0, size, 2048):
        q = cupy.arange(first, min(first + 2048, size), dtype=cupy.int32)[:, None]
        keep[first : first + 2048] = (kv <= q) & ((q * 7 + kv * 13) % 5 < 3)
    inputs = case.inputs()
    spec = Spec("tensor keep : uint8[Sq, Skv]\nmask keep[q, kv] != 0")
    same = "kernel forward_mma; tile q = 64, kv = 64; warps 4"  # so that bits can be
    captured = compile_case(case, spec, schedule=same)
    found = run(cupy_library, captured, case, inputs, {"keep": keep})
    assert_right(cupy_library, case, expected(case, inputs), *found)
    formula = run(cupy_library, compile_case(case, schedule=same), case, inputs, {})
    for one, other in zip(found, formula, strict=True):
        assert cupy_library.bits(one) == cupy_library.bits(other)


DOCUMENTS = """attention documents {
    tensor doc : int32[B, Skv]
    mask causal and doc[b, qpos] == doc[b, kv]
    output o, lse
}
"""


def long_documents(keys: int = 70_000, rows: int = 300) -> list[Array]:
    """q of the last rows, k, v and doc: sequences of documents of 1 to 5000 keys."""
    rng = np.random.default_rng(keys)
    shapes = (2, 4, rows, 64), (2, 2, keys, 64), (2, 2, keys, 64)
    operands = [rng.standard_normal(s, dtype=np.float32).astype(np.float16) for s in shapes]
    ends = np.cumsum(rng.integers(1, 5000, (2, keys // 1000)), axis=1)
    doc = np.stack([np.searchsorted(row, np.arange(keys), side="right") for row in ends])
    return [*operands, doc.astype(np.int32)]


def test_keys_summarised_ahead_change_no_bit(
    library: Library, monkeypatch: pytest.MonkeyPatch
) -> None:
    q, k, v, doc = (library.asarray(x) for x in long_documents())
    ahead, inside = (attngen.compile_text(DOCUMENTS, engine="cuda") for _ in range(2))
    ahead.prepare(dtype="fp16", head_dim=64)
    with monkeypatch.context() as patch:
        patch.setattr(forward_mma, "PREPASS_KEYS", 2**30)
        inside.prepare(dtype="fp16", head_dim=64)
    expected = [library.bits(x) for x in inside(q, k, v, doc=doc)]
    for _ in range(3):
        assert [library.bits(x) for x in ahead(q, k, v, doc=doc)] == expected
    for kv_range in ((0, 33_000), (33_000, 70_000)):
        one, two = (x.partial(q, k, v, kv_range=kv_range, doc=doc) for x in (ahead, inside))
        for name in ("m", "l", "acc"):
            parts = [Cupy().bits(getattr(state, name)) for state in (one, two)]
            assert parts[0] == parts[1], (name, kv_range)


def test_keys_summarised_ahead_in_a_graph(torch_library: Torch) -> None:
    """Every replay summarises what the tensor holds then."""
    torch = torch_library.torch
    *operands, doc = long_documents()
    q, k, v = (torch_library.asarray(x) for x in operands)
    ids = torch_library.asarray(doc)
    kernel = attngen.compile_text(DOCUMENTS, engine="cuda")
    kernel.prepare(dtype="fp16", head_dim=64)
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        o, lse = kernel(q, k, v, doc=ids)
    for turn in (0, 777, 40_000):
        ids.copy_(torch_library.asarray(np.roll(doc, turn, axis=1)))
        graph.replay()
        torch.cuda.synchronize()
        fresh, fresh_lse = kernel(q, k, v, doc=ids)
        assert torch.equal(fresh, o)
        assert torch.equal(fresh_lse, lse)


# ---- O09, O10: memory layouts ------------------------------------------------------------


@pytest.mark.parametrize("layout", LAYOUTS)
def test_a_layout_changes_no_bit_of_a_family(library: Library, layout: str) -> None:
    case = first_case("O09")
    inputs = case.inputs()
    kernel = compile_case(case)
    right = run(library, kernel, case, inputs, {})
    assert_right(library, case, expected(case, inputs), *right)
    seen = tuple(library.mirror(LAYOUTS[layout](x)) for x in (inputs.q, inputs.k, inputs.v))
    plain = tuple(library.asarray(x) for x in (inputs.q, inputs.k, inputs.v))
    calls = (seen, (seen[0], *plain[1:]), (*plain[:2], seen[2]))
    for operands in calls:
        found = run(library, kernel, case, inputs, {}, operands)
        assert_same_or_right(library, case, kernel, plain, right, operands, found)
    assert kernel.compilations == len({text_for(kernel, call) for call in (plain, *calls)})


def test_keys_broadcast_over_heads_change_no_bit_of_a_family(library: Library) -> None:
    case = first_case("O09")
    inputs = case.inputs()
    kernel = compile_case(case)
    shared = [np.broadcast_to(x[:, :1], x.shape) for x in (inputs.k, inputs.v)]
    q = library.asarray(inputs.q)
    views = (q, *(library.mirror(x) for x in shared))
    copies = (q, *(library.asarray(np.ascontiguousarray(x)) for x in shared))
    right, found = (run(library, kernel, case, inputs, {}, x) for x in (copies, views))
    same_keys = replace(
        inputs, k=np.ascontiguousarray(shared[0]), v=np.ascontiguousarray(shared[1])
    )
    if text_for(kernel, views)[0] != text_for(kernel, copies)[0]:
        assert_right(library, case, expected(case, same_keys), *found)
        return
    for one, same in zip(found, right, strict=True):
        assert library.bits(one) == library.bits(same)


def test_out_is_written_between_its_guards_and_nowhere_else(library: Library) -> None:
    case = first_case("O09")
    inputs = case.inputs()
    kernel = compile_case(case)
    right, _ = run(library, kernel, case, inputs, {})
    B, H, S, D = right.shape
    guard = 3 * D
    memory = library.asarray(np.full(B * S * H * D + 2 * guard, 12345.0, np.float16))
    middle = memory[guard:-guard]
    library.poison(middle)
    out = middle.reshape(B, S, H, D)
    q, k, v = (library.asarray(x) for x in (inputs.q, inputs.k, inputs.v))
    kernel(q, k, v, out=out.swapaxes(1, 2))
    found = library.asnumpy(out).swapaxes(1, 2)
    assert digest(found) == library.bits(right)
    library.poison(middle)
    operands = [library.asarray(x.swapaxes(1, 2)) for x in (inputs.q, inputs.k, inputs.v)]
    kernel(*operands, out=out, layout="bshd")
    found = library.asnumpy(out).swapaxes(1, 2)
    assert digest(found) == library.bits(right)
    for outside in (memory[:guard], memory[-guard:]):
        assert (library.asnumpy(outside) == np.float16(12345.0)).all()


def test_misaligned_operands_and_bias(library: Library) -> None:
    """O10: first aligned, then misaligned, then aligned again."""
    case = first_case("O10")
    inputs = case.inputs()
    kernel = compile_case(case)
    bias = library.asarray(inputs.aux["bias"])
    right = run(library, kernel, case, inputs, {"bias": bias})
    assert_right(library, case, expected(case, inputs), *right)
    odd = tuple(library.mirror(misalign(x)) for x in (inputs.q, inputs.k, inputs.v))
    plain = tuple(library.asarray(x) for x in (inputs.q, inputs.k, inputs.v))
    odd_bias = library.mirror(misalign(inputs.aux["bias"]))
    for operands, given in ((odd, odd_bias), (plain, bias)):
        found = run(library, kernel, case, inputs, {"bias": given}, operands)
        assert_same_or_right(library, case, kernel, plain, right, operands, found)
    assert kernel.compilations == len({text_for(kernel, call) for call in (plain, odd)})


def test_nothing_is_copied(library: Library) -> None:
    """A strided call allocates what it returns, and with `out=` nothing at all."""
    kernel = attngen.compile_text(PLAIN, engine="cuda")
    x = library.asarray(np.zeros((2, 300, 4, 64), np.float16)).swapaxes(1, 2)
    out = library.asarray(np.zeros((2, 4, 300, 64), np.float16))
    kernel(x, x, x, out=out)
    before = library.used_bytes()
    for _ in range(3):
        kernel(x, x, x, out=out)
        assert library.used_bytes() == before
    o, lse = kernel(x, x, x, return_lse=True)
    outputs = 2 * 4 * 300 * (64 * 2 + 4)
    assert outputs <= library.used_bytes() - before < outputs + 4096
    assert (o.shape, lse.shape) == ((2, 4, 300, 64), (2, 4, 300))


# ---- O26: the same bits ------------------------------------------------------------------


@pytest.mark.parametrize("is_causal", [False, True], ids=["full", "causal"])
@pytest.mark.parametrize(
    "schedule", [None, SIMT, f"tile q = 32, kv = 64; {SIMT}", f"loop kv, q; {SIMT}"]
)
def test_fifty_runs_give_the_same_bits(
    cupy_library: Cupy, schedule: str | None, is_causal: bool
) -> None:
    (case,) = numeric_cases("O26", reduced=False)
    spec = Spec("mask kv <= q") if is_causal else SPECS["O26"]
    inputs = case.inputs()
    kernel = compile_case(case, spec, schedule=schedule)
    dirt = attngen.compile_text(PLAIN, engine="cuda", schedule=SIMT)
    rng = np.random.default_rng(1)
    noise = cupy_library.asarray(1e4 * rng.standard_normal((4, 8, 200, 96)).astype(np.float32))
    operands = tuple(cupy_library.asarray(x) for x in (inputs.q, inputs.k, inputs.v))
    first: list[str] = []
    for _ in range(50):
        dirt(noise, noise, noise)  # leaves its numbers in shared memory
        found = run(cupy_library, kernel, case, inputs, {}, operands)
        bits = [cupy_library.bits(x) for x in found]
        first = first or bits
        assert bits == first
    record = {**case.record, "mask_np": "kv <= q" if is_causal else None}
    one = Case(case.id, 0, record, {**case.dims, "B": 1})
    some = Inputs(inputs.q[:1], inputs.k[:1], inputs.v[:1], inputs.aux)
    assert_right(cupy_library, one, expected(one, some), *(x[:1] for x in found))


# ---- O22, O24, O25: captured tensors and partial results ---------------------------------


def test_an_index_out_of_range_is_reported_on_request(library: Library) -> None:
    case = first_case("O22")
    inputs = case.inputs()
    spec = Spec("tensor buf : float[L]\nscore s + buf[kv]", tensors={"buf": "buf"})
    kernel = compile_case(case, spec)
    short = inputs.aux["buf"]
    behind = library.asarray(np.append(short, np.full(64, np.nan, np.float32)))
    clamped = library.asarray(np.append(short, short[-1]))
    found = run(library, kernel, case, inputs, {"buf": behind[: short.size]})
    right = run(library, kernel, case, inputs, {"buf": clamped})
    for one, same in zip(found, right, strict=True):
        assert library.bits(one) == library.bits(same)
    q, k, v = (library.asarray(x) for x in (inputs.q, inputs.k, inputs.v))
    error = catch(kernel, q, k, v, buf=behind[: short.size], check=True)
    assert error.code == "A661"
    assert "`buf`" in error.message()
    kernel(q, k, v, buf=clamped, check=True)


def test_partial_results_merge(library: Library, cupy_library: Cupy) -> None:
    case = first_case("O25")
    inputs = case.inputs()
    kernel = compile_case(case)
    right = expected(case, inputs)
    q, k, v = (library.asarray(x) for x in (inputs.q, inputs.k, inputs.v))
    for cuts in ((0, 90, 200), (0, 1, 64, 64, 199, 200)):
        parts = [kernel.partial(q, k, v, kv_range=keys) for keys in pairwise(cuts)]
        for order in (parts, parts[::-1]):
            total = order[0]
            for part in order[1:]:
                total = total.merge(part)
            assert_right(cupy_library, case, right, *total.finalize())
    held = kernel.partial(
        q[:, :, 10:30], k[:, :, 90:], v[:, :, 90:],
        q_range=(10, 30), kv_range=(90, 200), Sq=64, Skv=200,
    )  # fmt: skip
    same = kernel.partial(q, k, v, q_range=(10, 30), kv_range=(90, 200))
    for name in ("m", "l", "acc"):
        one, other = getattr(held, name), getattr(same, name)
        assert cupy_library.bits(one) == cupy_library.bits(other)
    assert kernel.compilations == 1


@pytest.mark.parametrize("dtype", ["fp32", "bf16"])
@pytest.mark.parametrize("schedule", [None, "loop kv, q"])
def test_a_sink_joins_partial_results_once(
    library: Library, cupy_library: Cupy, dtype: str, schedule: str | None
) -> None:
    case = first_case("O24")
    inputs = case.inputs()
    spec = SPECS["O24"]
    body = spec.body.replace("float[Hq]", f"{dtype}[Hq]")
    kernel = compile_case(case, Spec(body, tensors=spec.tensors), schedule=schedule)
    sink = inputs.aux["sink"]  # -inf, 0, 5 and 100 are exact in bf16
    if dtype == "bf16":
        sink = sink.astype(ml_dtypes.bfloat16)
    named = {"sink": library.asarray(sink)}
    q, k, v = (library.asarray(x) for x in (inputs.q, inputs.k, inputs.v))
    parts = [kernel.partial(q, k, v, kv_range=keys, **named) for keys in ((0, 7), (7, 40))]
    assert_right(cupy_library, case, expected(case, inputs), *parts[0].merge(parts[1]).finalize())
    found = cupy_library.asnumpy(parts[0].sink)[0, :, 0]
    assert found.tolist() == [-np.inf, 0.0, 5.0, 100.0]


def test_the_weights_of_sigmoid_are_merged_by_adding(cupy_library: Cupy) -> None:
    kernel = attngen.compile_text(
        "attention s {\n    mask kv <= qpos\n    weights sigmoid\n}\n", engine="cuda"
    )
    rng = np.random.default_rng(0)
    q, k, v = (
        cupy_library.asarray(rng.standard_normal((1, 2, 50, 32)).astype(np.float32))
        for _ in range(3)
    )
    whole = cupy_library.asnumpy(kernel(q, k, v))
    parts = [kernel.partial(q, k, v, kv_range=keys) for keys in ((0, 20), (20, 50))]
    o, lse = parts[0].merge(parts[1]).finalize()
    assert lse is None
    assert np.allclose(cupy_library.asnumpy(o), whole, atol=1e-5)


# ---- O29: one compilation ----------------------------------------------------------------


def test_lengths_and_params_take_one_compilation(library: Library) -> None:
    case = first_case("O29")
    kernel = compile_case(case)
    for number, length in enumerate(np.unique(np.linspace(1, 520, 40).astype(int))):
        W = (256, 16)[number % 2]
        dims = {**case.dims, "Sq": int(length), "Skv": int(length)}
        one = Case(case.id, 0, {**case.record, "aux": {"W": str(W)}}, dims)
        inputs = one.inputs()
        found = run(library, kernel, one, inputs, {"W": W})
        assert_right(library, one, expected(one, inputs), *found)
    assert kernel.compilations == 1


# ---- O36: devices, threads, forks --------------------------------------------------------


def draw_problem(case: Case, seed: int) -> tuple[Inputs, Answer]:
    inputs = case.inputs(seed)
    return inputs, expected(case, inputs)


STREAMS = Case("O09", 0, numeric_cases("O09")[0].record, {
    "B": 2, "Hq": 4, "Hkv": 2, "Sq": 257, "Skv": 257, "Dqk": 64, "Dv": 64,
})  # fmt: skip
"""The problem of O36 to O38: causal, fp16."""


@needs_two_gpus
def test_the_device_that_owns_the_arrays(library: Library) -> None:
    import cupy

    inputs, right = draw_problem(STREAMS, 0)
    kernel = compile_case(STREAMS)
    before = load_driver().current_device()
    for index in (1, 0, 1):
        operands = [move(library, x, index) for x in (inputs.q, inputs.k, inputs.v)]
        o, lse = kernel(*operands)
        assert load_driver().current_device() == before
        with cupy.cuda.Device(index):
            assert_right(library, STREAMS, right, o, lse)
    q, k, v = (move(library, x, 0) for x in (inputs.q, inputs.k, inputs.v))
    error = catch(kernel, q, move(library, inputs.k, 1), v)
    assert error.code == "A608"
    assert "cuda:1" in error.message()
    assert "cuda:0" in error.message()
    assert catch(kernel, q, k, v, out=move(library, inputs.q, 1)).code == "A608"


def move(library: Library, host: Array, index: int) -> Array:
    if isinstance(library, Torch):
        return library.asarray(host).to(f"cuda:{index}")
    assert isinstance(library, Cupy)
    with library.cupy.cuda.Device(index):
        return library.asarray(host)


def test_arrays_of_the_cpu_are_refused(library: Library) -> None:
    inputs, _ = draw_problem(STREAMS, 0)
    kernel = compile_case(STREAMS)
    q, k, v = (library.asarray(x) for x in (inputs.q, inputs.k, inputs.v))
    for operands in ((q, inputs.k, v), (inputs.q, k, v)):
        error = catch(kernel, *operands)
        assert error.code == "A608"
        assert "cpu" in error.message()
    assert catch(kernel, q, k, v, out=np.zeros_like(inputs.q)).code == "A608"
    assert kernel.compilations == 0


def test_both_libraries_in_one_call(cupy_library: Cupy, torch_library: Torch) -> None:
    inputs, right = draw_problem(STREAMS, 0)
    kernel = compile_case(STREAMS)
    q = torch_library.asarray(inputs.q)
    k, v = (cupy_library.asarray(x) for x in (inputs.k, inputs.v))
    cupy_library.cupy.cuda.Device().synchronize()
    o, lse = kernel(q, k, v)
    assert_right(torch_library, STREAMS, right, o, lse)


def test_gradients_are_refused(torch_library: Torch) -> None:
    inputs, right = draw_problem(STREAMS, 0)
    kernel = compile_case(STREAMS)
    q, k, v = (torch_library.asarray(x) for x in (inputs.q, inputs.k, inputs.v))
    q.requires_grad_()
    error = catch(kernel, q, k, v)
    assert error.code == "A606"
    assert "q.detach()" in words(error)
    assert_right(torch_library, STREAMS, right, *kernel(q.detach(), k, v))


def test_threads_share_a_kernel_on_streams_of_their_own(cupy_library: Cupy) -> None:
    cupy = cupy_library.cupy
    kernel = compile_case(STREAMS)
    start = threading.Barrier(4)

    def work(thread: int) -> None:
        inputs, right = draw_problem(STREAMS, thread)
        start.wait(120)
        with cupy.cuda.Stream(non_blocking=True) as stream:
            q, k, v = (cupy_library.asarray(x) for x in (inputs.q, inputs.k, inputs.v))
            for _ in range(20):
                found = kernel(q, k, v)
            stream.synchronize()
            assert_right(cupy_library, STREAMS, right, *found)

    with ThreadPoolExecutor(4) as pool:
        list(pool.map(work, range(4)))
    assert kernel.compilations == 1


FORK = """
import os
import attngen
from attngen.diagnostics.diagnostic import AttnError

kernel = attngen.compile_text("attention a {\\n    mask kv <= q\\n}\\n")

def use():
    import cupy
    x = cupy.ones((1, 1, 4, 8), cupy.float32)
    return float(kernel(x, x, x).sum())

def prepare():
    try:
        kernel.prepare(dtype="fp32", head_dim=8)
        return "fine"
    except AttnError as error:
        return error.diagnostics[0].code

BEFORE
child = os.fork()
if child == 0:
    print(IN_CHILD, flush=True)
    os._exit(0)
os.waitpid(child, 0)
print(use(), flush=True)
"""


@pytest.mark.parametrize(
    ("before", "in_child", "answer"),
    [("", "use()", "32.0"), ("use()", "prepare()", "A612")],
    ids=["defined before the fork", "used before the fork"],
)
def test_a_forked_child(before: str, in_child: str, answer: str) -> None:
    root = str(Path(__file__).parents[2])
    script = FORK.replace("BEFORE", before).replace("IN_CHILD", in_child)
    done = subprocess.run(
        [sys.executable, "-c", script],
        capture_output=True,
        text=True,
        timeout=240,
        cwd=root,
        env=os.environ | {"PYTHONPATH": root + os.pathsep + os.environ.get("PYTHONPATH", "")},
        check=True,
    )
    assert done.stdout.split() == [answer, "32.0"], done.stderr


# ---- O37: streams ------------------------------------------------------------------------


@pytest.mark.parametrize("schedule", [None, f"loop kv, q; {SIMT}"], ids=["default", "workspace"])
def test_work_is_queued_on_the_current_stream_of_cupy(
    cupy_library: Cupy, schedule: str | None
) -> None:
    cupy = cupy_library.cupy
    kernel = compile_case(STREAMS, schedule=schedule)
    problems = [draw_problem(STREAMS, seed) for seed in (0, 1)]
    sources = [[cupy_library.asarray(x) for x in (i.q, i.k, i.v)] for i, _ in problems]
    operands = [cupy.zeros_like(x) for x in sources[0]]
    busy = cupy.ones((4096, 4096), cupy.float32)
    product = busy @ busy
    stream = cupy.cuda.Stream(non_blocking=True)
    cupy.cuda.Device().synchronize()
    for repetition in range(50):
        with stream:
            for _ in range(3):
                cupy.matmul(busy, busy, out=product)
            for target, value in zip(operands, sources[repetition % 2], strict=True):
                target[...] = value
            found = kernel(*operands)
            copied = [x.copy() for x in found]
            for target in operands:
                target.fill(float("nan"))
            stream.synchronize()
            assert_right(cupy_library, STREAMS, problems[repetition % 2][1], *copied)


@pytest.mark.parametrize("schedule", [None, f"loop kv, q; {SIMT}"], ids=["default", "workspace"])
def test_work_is_queued_on_the_current_stream_of_torch(
    torch_library: Torch, schedule: str | None
) -> None:
    torch = torch_library.torch
    kernel = compile_case(STREAMS, schedule=schedule)
    problems = [draw_problem(STREAMS, seed) for seed in (0, 1)]
    sources = [[torch_library.asarray(x) for x in (i.q, i.k, i.v)] for i, _ in problems]
    operands = [torch.zeros_like(x) for x in sources[0]]
    busy = torch.ones(4096, 4096, device="cuda")
    stream = torch.cuda.Stream()
    torch.cuda.synchronize()
    for repetition in range(50):
        with torch.cuda.stream(stream):
            for _ in range(3):
                torch.matmul(busy, busy)
            for target, value in zip(operands, sources[repetition % 2], strict=True):
                target.copy_(value)
            found = kernel(*operands)
            copied = [x.clone() for x in found]
            for target in operands:
                target.fill_(float("nan"))
            stream.synchronize()
            assert_right(torch_library, STREAMS, problems[repetition % 2][1], *copied)


class ForeignStream:
    """What CuPy takes a stream of another library from."""

    def __init__(self, stream: Any) -> None:
        self.handle = int(stream.cuda_stream)

    def __cuda_stream__(self) -> tuple[int, int]:
        return 0, self.handle


def test_a_stream_of_torch_as_a_foreign_stream_of_cupy(
    cupy_library: Cupy, torch_library: Torch
) -> None:
    cupy, torch = cupy_library.cupy, torch_library.torch
    kernel = compile_case(STREAMS)
    inputs, right = draw_problem(STREAMS, 0)
    sources = [cupy_library.asarray(x) for x in (inputs.q, inputs.k, inputs.v)]
    operands = [cupy.zeros_like(x) for x in sources]
    busy = torch.ones(4096, 4096, device="cuda")
    stream = torch.cuda.Stream()
    torch.cuda.synchronize()
    cupy.cuda.Device().synchronize()
    for _ in range(50):
        with torch.cuda.stream(stream), cupy.cuda.Stream.from_external(ForeignStream(stream)):
            for _ in range(3):
                torch.matmul(busy, busy)
            for target, value in zip(operands, sources, strict=True):
                target[...] = value
            copied = [x.copy() for x in kernel(*operands)]
            for target in operands:
                target.fill(float("nan"))
            stream.synchronize()
            assert_right(cupy_library, STREAMS, right, *copied)


# ---- O38: graphs -------------------------------------------------------------------------


def test_a_call_is_captured_and_replayed_by_torch(torch_library: Torch) -> None:
    torch = torch_library.torch
    kernel = compile_case(STREAMS)
    problems = [draw_problem(STREAMS, seed) for seed in range(3)]
    first, _ = problems[0]
    q, k, v = (torch_library.asarray(x) for x in (first.q, first.k, first.v))
    out = torch.empty_like(q)
    kernel(q, k, v, out=out)
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        captured, lse = kernel(q, k, v, out=out)
    assert captured is out
    for repetition in range(10):
        inputs, right = problems[repetition % 3]
        for target, value in ((q, inputs.q), (k, inputs.k), (v, inputs.v)):
            target.copy_(torch_library.asarray(value))
        torch_library.poison(out)
        torch_library.poison(lse)
        graph.replay()
        torch.cuda.synchronize()
        assert_right(torch_library, STREAMS, right, out, lse)
        fresh, fresh_lse = kernel(q, k, v)
        assert torch.equal(fresh, out)
        assert torch.equal(fresh_lse, lse)


def test_a_call_is_captured_and_replayed_by_cupy(cupy_library: Cupy) -> None:
    cupy = cupy_library.cupy
    kernel = attngen.compile_text(PLAIN, engine="cuda")
    kernel.prepare(dtype="fp16", head_dim=64)
    problems = [draw_problem(STREAMS, seed) for seed in range(3)]
    first, _ = problems[0]
    q, k, v = (cupy_library.asarray(x) for x in (first.q, first.k, first.v))
    out = cupy.empty_like(q)
    stream = cupy.cuda.Stream(non_blocking=True)
    cupy.cuda.Device().synchronize()
    with stream:
        stream.begin_capture()
        kernel(q, k, v, out=out)
        graph = stream.end_capture()
        for repetition in range(10):
            inputs, right = problems[repetition % 3]
            for target, value in ((q, inputs.q), (k, inputs.k), (v, inputs.v)):
                target[...] = cupy_library.asarray(value)
            cupy_library.poison(out)
            graph.launch(stream)
            stream.synchronize()
            assert STREAMS.tolerance.accepts(cupy_library.asnumpy(out), right.o).all()
            assert cupy_library.bits(kernel(q, k, v)) == cupy_library.bits(out)
    assert kernel.compilations == 1


def test_the_first_call_in_a_capture_leaves_the_capture_whole(torch_library: Torch) -> None:
    torch = torch_library.torch
    inputs, right = draw_problem(STREAMS, 0)
    q, k, v = (torch_library.asarray(x) for x in (inputs.q, inputs.k, inputs.v))
    prepared, fresh = compile_case(STREAMS), compile_case(STREAMS)
    out = torch.empty_like(q)
    prepared(q, k, v, out=out)
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        for call in (fresh, fresh.partial):
            with pytest.raises(AttnError) as caught:
                call(q, k, v)
            (error,) = caught.value.diagnostics
            assert error.code == "A613"
            assert "prepare" in words(error)
        prepared(q, k, v, out=out)
    torch_library.poison(out)
    graph.replay()
    torch.cuda.synchronize()
    assert STREAMS.tolerance.accepts(torch_library.asnumpy(out), right.o).all()
    assert_right(torch_library, STREAMS, right, *fresh(q, k, v))
