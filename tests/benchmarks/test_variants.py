"""The forms of a variant agree: its text, its mask and score as functions, its native options."""

from __future__ import annotations

from itertools import accumulate, pairwise
from typing import Any

import numpy as np
import pytest
from numpy.typing import NDArray

import attngen
from attngen.bench.machines import NumpyMachine, TorchMachine
from benchmarks.cells import Cell, make_cells
from benchmarks.peers import Inputs, make_peer
from benchmarks.run_cell import make_inputs
from benchmarks.variants import VARIANTS, Native, Variant, attended_pairs, make_variant

LENGTHS = (64, 96, 256)
WITH_NATIVE = ("full", "causal", "window", "documents", "softcap", "gemma2")


def small_cell(name: str, S: int) -> Cell:
    return Cell("variants", name, "fp32", B=2, S=S, Hq=4, Hkv=2, D=16, Dv=16)


def mask_of(variant: Variant, cell: Cell) -> NDArray[np.bool_]:
    """[B, S, S], by the function."""
    b, q, kv = np.ogrid[: cell.B, : cell.S, : cell.S]
    if variant.mask is None:
        return np.ones((cell.B, cell.S, cell.S), np.bool_)
    found = variant.mask(b, q, kv, {**variant.tensors, **variant.tables})
    return np.broadcast_to(found, (cell.B, cell.S, cell.S))


def oracle(variant: Variant, inputs: Inputs, machine: Any) -> attngen.Reference:
    q, k, v = (machine.asnumpy(x).transpose(0, 2, 1, 3) for x in (inputs.q, inputs.k, inputs.v))
    unit = attngen.load_text(variant.text)
    return attngen.reference(unit, q, k, v, tensors=variant.tensors, dtype="fp32")


@pytest.mark.parametrize("S", LENGTHS)
@pytest.mark.parametrize("name", VARIANTS)
def test_the_function_says_what_the_text_says(name: str, S: int) -> None:
    cell = small_cell(name, S)
    variant, machine = make_variant(cell), NumpyMachine()
    expected = oracle(variant, make_inputs(cell, variant, machine, 0), machine)
    mask = mask_of(variant, cell)
    np.testing.assert_array_equal(expected.visible, np.broadcast_to(mask[:, None], (2, 4, S, S)))
    assert attended_pairs(cell, variant) == np.count_nonzero(mask)
    assert mask.any(-1).all(), "a row without keys would be the same for every peer"


@pytest.mark.parametrize("name", [n for n in VARIANTS if n != "full"])
def test_a_mask_that_does_not_read_b_is_counted_once(name: str) -> None:
    cell = small_cell(name, 96)
    variant = make_variant(cell)
    first, second = mask_of(variant, cell)
    assert variant.batched or np.array_equal(first, second)


@pytest.mark.parametrize("name", VARIANTS)
def test_attngen_computes_it(name: str) -> None:
    cell = small_cell(name, 64)
    variant, machine = make_variant(cell), NumpyMachine()
    inputs = make_inputs(cell, variant, machine, 0)
    prepared = make_peer("attngen", machine, None).prepare(cell, variant, inputs)
    found = prepared.read(prepared.call()).transpose(0, 2, 1, 3)
    assert oracle(variant, inputs, machine).accepts_o(found).all()


@pytest.mark.parametrize("name", WITH_NATIVE)
def test_native_options_mean_the_same_mask(name: str) -> None:
    cell = small_cell(name, 96)
    variant = make_variant(cell)
    assert variant.native is not None
    np.testing.assert_array_equal(mask_of(variant, cell), native_mask(variant.native, cell))


def test_no_other_variant_has_native_options() -> None:
    found = {n for n in VARIANTS if make_variant(small_cell(n, 96)).native is not None}
    assert found == set(WITH_NATIVE)


def native_mask(native: Native, cell: Cell) -> NDArray[np.bool_]:
    """[B, S, S], from what the FlashAttention packages say about their options."""
    q, kv = np.ogrid[: cell.S, : cell.S]
    mask = np.ones((cell.B, cell.S, cell.S), np.bool_)
    if native.causal:
        mask &= kv <= q
    if native.window is not None:
        mask &= kv >= q - (native.window - 1)
    if native.documents is not None:
        tokens = cell.B * cell.S
        together = np.zeros((tokens, tokens), np.bool_)
        for first, last in pairwise(accumulate(native.documents, initial=0)):
            together[first:last, first:last] = True
        blocks = together.reshape(cell.B, cell.S, cell.B, cell.S)
        for b in range(cell.B):
            assert blocks[b].sum() == blocks[b, :, b].sum(), "a document in two sequences"
            mask[b] &= blocks[b, :, b]
    return mask


def test_sizes_at_full_length_are_those_of_the_literature() -> None:
    made = {c.variant: make_variant(c) for c in make_cells(["variants"])}
    assert "window(left = 1023)" in made["window"].text
    assert "window(left = 4095)" in made["gemma2"].text
    assert set(made["prefix_lm"].tensors["prompt_length"]) == {2048}
    documents = made["documents"].native
    assert documents is not None
    assert documents.documents is not None
    assert max(documents.documents) == 1000
    assert sum(documents.documents) == 2 * 8192
    assert made["block_sparse"].tensors["select"].shape == (64, 64)
    assert "(qpos // 128, kv // 128, 64, 7)" in made["natten_2d"].text


def test_work_of_full_and_causal_suites_is_all_pairs_and_half_of_them() -> None:
    for cell in (*make_cells(["forward"]), *make_cells(["gqa"])):
        share = 1.0 if cell.variant == "full" else 0.5
        assert attended_pairs(cell, make_variant(cell)) == share * cell.B * cell.S**2


@pytest.mark.parametrize("name", VARIANTS)
@pytest.mark.filterwarnings("ignore::UserWarning")
def test_flex_attention_computes_it(name: str) -> None:
    pytest.importorskip("torch", reason="FlexAttention is part of PyTorch, which is not installed")
    cell = small_cell(name, 64)
    variant, machine = make_variant(cell), TorchMachine("cpu")
    if not variant.softmax:
        pytest.skip("FlexAttention has softmax weights only")
    inputs = make_inputs(cell, variant, machine, 0)
    prepared = make_peer("flex", machine).prepare(cell, variant, inputs)
    found = machine.asnumpy(prepared.read(prepared.call())).transpose(0, 2, 1, 3)
    expected = oracle(variant, inputs, machine)
    assert (np.abs(found - expected.o) <= 4 * expected.bound).all()


@pytest.mark.parametrize("name", [n for n in VARIANTS if n != "full"])
def test_mask_mod_is_the_mask(name: str) -> None:
    torch = pytest.importorskip("torch", reason="create_mask is part of PyTorch, not installed")
    from torch.nn.attention.flex_attention import create_mask

    cell = small_cell(name, 96)
    variant, machine = make_variant(cell), TorchMachine("cpu")
    mask, host = variant.mask, {**variant.tensors, **variant.tables}
    assert mask is not None
    tensors = {n: machine.asarray(x) for n, x in host.items()}
    found = create_mask(
        lambda b, h, q, kv: mask(b, q, kv, tensors), cell.B, 1, cell.S, cell.S, device="cpu"
    )
    assert found.dtype == torch.bool
    np.testing.assert_array_equal(found[:, 0].numpy(), mask_of(variant, cell))
