"""The attention variants that are timed, each in every form that a peer wants.

A variant is one record: its text for attngen; the same mask and score as functions of indices,
which FlexAttention takes and NumPy counts pairs with; and, where there is one, the option of the
FlashAttention packages that means the same.  A test proves that the forms agree.

Sizes in a variant follow the length, so that a short one is the same picture: at 8192 tokens the
window is 1024, the prefix 2048, a document 1000 tokens and a block 128.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Final, TypeAlias, final

import numpy as np
from numpy.typing import NDArray

from attngen.record import record

if TYPE_CHECKING:
    from benchmarks.cells import Cell

__all__ = ["VARIANTS", "Native", "Variant", "attended_pairs", "make_variant"]

Array: TypeAlias = Any
Tensors: TypeAlias = Mapping[str, Array]
Mask: TypeAlias = Callable[[Array, Array, Array, Tensors], Array]
Score: TypeAlias = Callable[[Array, Array, Array, Array, Tensors], Array]

_ROWS_AT_ONCE: Final = 512


@final
@record
class Native:
    """A variant as options of `flash_attn_func`: everything there is beside softmax.

    window:     how many keys a row sees, its own included.
    documents:  the lengths of packed documents, over all sequences of the batch.
    """

    causal: bool = False
    window: int | None = None
    softcap: float = 0.0
    documents: tuple[int, ...] | None = None

    @property
    def is_plain(self) -> bool:
        """Whether causal or not is all there is to say."""
        return self.window is None and not self.softcap and self.documents is None


@final
@dataclass(frozen=True, eq=False)
class Variant:
    """One attention variant at one size.

    text:     the `.attn` text.
    tensors:  NumPy arrays that the text captures, by name.
    tables:   NumPy arrays that only `mask` and `score` read.
    mask:     `mask(b, q, kv, tensors)`, true where a pair attends, for indices of NumPy or
              PyTorch that broadcast; None where every pair does.  No mask here depends on the
              head.
    score:    `score(s, h, q, kv, tensors)` of PyTorch; None where the score is s.
    softmax:  False for sigmoid weights.
    batched:  whether the mask depends on b.
    """

    name: str
    mask_name: str
    text: str
    mask: Mask | None = None
    score: Score | None = None
    tensors: Mapping[str, NDArray[Any]] = field(default_factory=dict)
    tables: Mapping[str, NDArray[Any]] = field(default_factory=dict)
    native: Native | None = None
    softmax: bool = True
    batched: bool = False


def make_variant(cell: Cell) -> Variant:
    """The variant of a cell, at its size."""
    return VARIANTS[cell.variant](cell)


def attended_pairs(cell: Cell, variant: Variant) -> float:
    """Pairs of a row and a key that count as work, over all sequences, for one head.

    In the suites of full and causal attention a causal mask counts as half of all pairs, as is
    the custom; elsewhere the pairs that attend are counted.
    """
    if variant.mask is None:
        return float(cell.B * cell.S**2)
    if cell.suite != "variants":
        return cell.B * cell.S**2 / 2
    if not variant.batched:
        return float(cell.B * _count_visible(variant, cell.S, 0))
    return float(sum(_count_visible(variant, cell.S, b) for b in range(cell.B)))


def _count_visible(variant: Variant, S: int, b: int) -> int:
    assert variant.mask is not None
    tensors = {**variant.tensors, **variant.tables}
    keys, total = np.arange(S, dtype=np.int32)[None, :], 0
    for first in range(0, S, _ROWS_AT_ONCE):
        rows = np.arange(first, min(first + _ROWS_AT_ONCE, S), dtype=np.int32)[:, None]
        total += int(np.count_nonzero(variant.mask(b, rows, keys, tensors)))
    return total


def _text(name: str, *lines: str) -> str:
    return "\n".join((f"attention {name} {{", *(f"    {line}" for line in lines), "}", ""))


def _is_causal(b: Array, q: Array, kv: Array, tensors: Tensors) -> Array:
    return kv <= q


def _in_window(size: int) -> Mask:
    return lambda b, q, kv, tensors: (kv <= q) & (q - kv < size)


def _capped(cap: float) -> Score:
    return lambda s, h, q, kv, tensors: cap * (s / cap).tanh()


# ---- the variants --------------------------------------------------------------------------


def _full(cell: Cell) -> Variant:
    return Variant("full", "full", _text("full"), native=Native())


def _causal(cell: Cell) -> Variant:
    text = _text("causal_attention", "mask causal")
    return Variant("causal", "causal", text, _is_causal, native=Native(causal=True))


def _window(cell: Cell) -> Variant:
    size = cell.S // 8
    text = _text("sliding_window", f"mask window(left = {size - 1})")
    native = Native(causal=True, window=size)
    return Variant("window", "window", text, _in_window(size), native=native)


def _prefix_lm(cell: Cell) -> Variant:
    text = _text("prefix_lm", "tensor prompt_length : int32[B]", "mask prefix(prompt_length[b])")
    tensors = {"prompt_length": np.full(cell.B, cell.S // 4, np.int32)}

    def mask(b: Array, q: Array, kv: Array, tensors: Tensors) -> Array:
        return (kv <= q) | (kv < tensors["prompt_length"][b])

    return Variant("prefix_lm", "prefix", text, mask, tensors=tensors, batched=True)


def _documents(cell: Cell) -> Variant:
    """Documents of one length; those of the second sequence begin in the middle of one."""
    length = max(1, 1000 * cell.S // 8192)
    text = _text("packed_documents", "tensor doc : int32[B, Skv]", "mask causal and document(doc)")
    starts = np.arange(cell.B)[:, None] % 2 * (length // 2)
    doc = ((starts + np.arange(cell.S)) // length).astype(np.int32)

    def mask(b: Array, q: Array, kv: Array, tensors: Tensors) -> Array:
        doc = tensors["doc"]
        return (kv <= q) & (doc[b, q] == doc[b, kv])

    lengths = tuple(int(n) for row in doc for n in np.unique(row, return_counts=True)[1])
    native = Native(causal=True, documents=lengths)
    return Variant(
        "documents", "causal, document", text, mask, None, {"doc": doc}, {}, native, batched=True
    )


def _alibi(cell: Cell) -> Variant:
    """The head count is a power of two here, for which all slopes follow one rule."""
    text = _text("alibi_attention", "score alibi(s)", "mask causal")
    slopes = np.exp2(-8.0 * np.arange(1, cell.Hq + 1) / cell.Hq).astype(np.float32)

    def score(s: Array, h: Array, q: Array, kv: Array, tensors: Tensors) -> Array:
        return s + tensors["slopes"][h] * (kv - q)

    return Variant("alibi", "causal", text, _is_causal, score, tables={"slopes": slopes})


def _softcap(cell: Cell) -> Variant:
    text = _text("softcap_attention", "score softcap(s, 30.0)", "mask causal")
    native = Native(causal=True, softcap=30.0)
    return Variant("softcap", "causal", text, _is_causal, _capped(30.0), native=native)


def _relative(cell: Cell) -> Variant:
    text = _text("relative_position", "score s + (kv - qpos)", "mask causal")

    def score(s: Array, h: Array, q: Array, kv: Array, tensors: Tensors) -> Array:
        return s + (kv - q)

    return Variant("relative", "causal", text, _is_causal, score)


def _gemma2(cell: Cell) -> Variant:
    """The local layer of Gemma 2: capped scores, and a window of half the length."""
    size = cell.S // 2
    text = _text("gemma2_local", "score softcap(s, 50.0)", f"mask window(left = {size - 1})")
    native = Native(causal=True, window=size, softcap=50.0)
    return Variant("gemma2", "window", text, _in_window(size), _capped(50.0), native=native)


def _natten_2d(cell: Cell) -> Variant:
    """Neighbourhoods of 7 x 7 pixels in a picture about as high as wide."""
    columns = 1 << (cell.S.bit_length() // 2)
    rows, radius = cell.S // columns, 3
    text = _text(
        "natten_2d",
        f"mask neighborhood(qpos // {columns}, kv // {columns}, {rows}, 7)",
        f"mask neighborhood(qpos % {columns}, kv % {columns}, {columns}, 7)",
    )

    def is_near(i: Array, j: Array, n: int) -> Array:
        return abs(i.clip(radius, n - 1 - radius) - j) <= radius

    def mask(b: Array, q: Array, kv: Array, tensors: Tensors) -> Array:
        near = is_near(q // columns, kv // columns, rows)
        return near & is_near(q % columns, kv % columns, columns)

    return Variant("natten_2d", "neighborhood", text, mask)


def _longformer(cell: Cell) -> Variant:
    """A window on both sides, and a few tokens that see and are seen by all."""
    reach = cell.S // 32
    text = _text(
        "longformer",
        "tensor marked : bool[B, Skv]",
        f"mask window(left = {reach}, right = {reach}) or global_tokens(marked)",
    )
    marked = np.zeros((cell.B, cell.S), np.bool_)
    for b in range(cell.B):
        marked[b, np.random.default_rng(b).integers(0, cell.S, max(1, cell.S // 512))] = True

    def mask(b: Array, q: Array, kv: Array, tensors: Tensors) -> Array:
        marked = tensors["marked"]
        return (abs(kv - q) <= reach) | marked[b, kv] | marked[b, q]

    return Variant(
        "longformer", "window, global", text, mask, tensors={"marked": marked}, batched=True
    )


def _block_sparse(cell: Cell) -> Variant:
    """A quarter of the blocks, chosen at random, and those on the diagonal."""
    block = max(8, cell.S // 64)
    text = _text(
        "block_sparse_attention",
        "tensor select : bool[NB, NB]",
        f"mask causal and qpos >= 0 and select[qpos // {block}, kv // {block}]",
    )
    count = -(-cell.S // block)
    select = np.random.default_rng(0).random((count, count)) < 0.25
    np.fill_diagonal(select, True)

    def mask(b: Array, q: Array, kv: Array, tensors: Tensors) -> Array:
        return (kv <= q) & tensors["select"][q // block, kv // block]

    return Variant("block_sparse", "causal, blocks", text, mask, tensors={"select": select})


def _sigmoid(cell: Cell) -> Variant:
    text = _text("sigmoid_attention", "score s - log(Skv)", "mask causal", "weights sigmoid")
    return Variant("sigmoid", "causal", text, _is_causal, softmax=False)


VARIANTS: Final[Mapping[str, Callable[[Cell], Variant]]] = {
    "full": _full,
    "causal": _causal,
    "window": _window,
    "prefix_lm": _prefix_lm,
    "documents": _documents,
    "alibi": _alibi,
    "softcap": _softcap,
    "relative": _relative,
    "gemma2": _gemma2,
    "natten_2d": _natten_2d,
    "longformer": _longformer,
    "block_sparse": _block_sparse,
    "sigmoid": _sigmoid,
}
