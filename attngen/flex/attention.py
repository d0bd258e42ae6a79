"""`flex_attention` and `from_python`: FlexAttention's arguments, attngen's kernels."""

from __future__ import annotations

import sys
from collections.abc import Iterable, Mapping, Sequence
from copy import copy
from functools import lru_cache
from typing import Any, Final, final

from attngen.api import Engine, Kernel
from attngen.binding_errors import GroupMismatch, ReservedArgument, ShapeMismatch
from attngen.diagnostics.diagnostic import AttnError
from attngen.flex.captured import Captured, element_of, is_array, is_torch
from attngen.flex.numbers_seen import NumbersSeen
from attngen.flex.origins import note_python_lines
from attngen.flex.remembered import Traces
from attngen.flex.trace import Trace, trace
from attngen.flex.write import write_file
from attngen.frontend import ast
from attngen.frontend.format import format_file
from attngen.frontend.load import load_text

__all__ = ["Prepared", "flex_attention", "from_python", "prepare"]

_NO_BLOCKS: Final = 1 << 30
"""The block size that PyTorch gives a block mask which stands for none."""

_MOST_KERNELS: Final = 256

_numbers = NumbersSeen()


def from_python(score_mod: Any = None, mask_mod: Any = None) -> str:
    """The `.attn` text of FlexAttention's functions, as `flex_attention` compiles it at first.

    score_mod:  a function (score, b, h, q_idx, kv_idx) that gives the new score; None: `s`.
    mask_mod:   a function (b, h, q_idx, kv_idx) that gives whether the pair attends; None: all.
    Errors:     AttnError A26x at the Python line that cannot be expressed.
    """
    return format_file(write_file(trace(score_mod, mask_mod)))


def flex_attention(
    query: Any,
    key: Any,
    value: Any,
    score_mod: Any = None,
    block_mask: Any = None,
    scale: float | None = None,
    enable_gqa: bool = False,
    return_lse: bool = False,
    kernel_options: Any = None,
    *,
    mask_mod: Any = None,
    sinks: Any = None,
    return_aux: Any = None,
    engine: Engine = "auto",
    schedule: str | None = None,
    check: bool = False,
) -> Any:
    """Attention with FlexAttention's arguments.

    Shapes:  query [B, Hq, Sq, Dqk], key [B, Hkv, Skv, Dqk], value [B, Hkv, Skv, Dv], output
             [B, Hq, Sq, Dv], lse [B, Hq, Sq] float32, a natural logarithm.  One sequence of
             keys serves all of B where a `block_mask` is given, as in PyTorch.
    block_mask:      used for its `mask_mod` alone, and for the lengths it was made for.
    sinks:           [Hq], a logit of each head that joins the softmax's sum, as in gpt-oss; None
                     where there is none.  The lse counts it.
    kernel_options:  hints for PyTorch's own kernels; they have no effect.
    return_aux:      PyTorch's `AuxRequest`; then the second result is its `AuxOutput`.
    engine, schedule, check:  as for `attngen.compile` and its kernels.
    Errors:  AttnError A26x about the functions, A606 a tensor that requires a gradient, A60x,
             A62x and A63x about arguments.
    """
    mask_mod = _one_mask(mask_mod, block_mask, query, key)
    key, value = _share_batch(query, key, value, block_mask)
    if not enable_gqa and query.shape[1] != key.shape[1]:
        raise _refuse_shared_heads(query.shape[1], key.shape[1])
    if return_lse and return_aux is not None:
        raise _refuse("return_lse", "`return_aux` says the same")
    wants_lse = return_lse or bool(return_aux and return_aux.lse)
    wants_max = bool(return_aux and return_aux.max_scores)

    sink = None if sinks is None else _sink_element(sinks, query.shape[1])
    outputs = ("o", "row_max") if wants_max else ("o",)
    device, has_scale = getattr(query, "device", None), scale is not None
    place = device if device.__hash__ is not None else str(device)  # CuPy's has no hash
    prepared, arrays = _traces.find(
        (score_mod, mask_mod),
        (outputs, has_scale, sink, place, _default_dtype()),
        lambda: trace(score_mod, mask_mod, device=device),
        lambda traced: _write(traced, outputs, has_scale, sink),
    )
    results = prepared(
        query,
        key,
        value,
        scale,
        sinks,
        arrays=arrays,
        return_lse=wants_lse,
        engine=engine,
        schedule=schedule,
        check=check,
    )
    return _as_pytorch_returns(results, return_aux, wants_lse, wants_max)


@final
class Prepared:
    """Functions that were traced, for calls with any q, k and v: `captured` is read at each."""

    def __init__(
        self, text: str, file: ast.File, params: Mapping[str, Any], captured: Sequence[Captured]
    ) -> None:
        self.text = text
        self.file = file
        self.params = params
        self.arrays = tuple(each.array for each in captured)
        self._cut = _Cuts(captured, file)

    def __call__(
        self,
        query: Any,
        key: Any,
        value: Any,
        scale: float | None = None,
        sinks: Any = None,
        *,
        arrays: Sequence[Any] | None = None,
        return_lse: bool = False,
        engine: Engine = "auto",
        schedule: str | None = None,
        check: bool = False,
    ) -> Any:
        """The kernel's results; `scale` and `sinks` are there when they were to be.

        arrays:  others like the captured ones, in their order, in their place.
        """
        named = self._cut(self.arrays if arrays is None else arrays, query, key)
        named.update(self.params)
        if scale is not None:
            named["qk_scale"] = _as_number(scale)
        if sinks is not None:
            named["qk_sink"] = sinks
        try:
            kernel = _kernel(self.text, engine, schedule)
            return kernel(query, key, value, return_lse=return_lse, check=check, **named)
        except AttnError as error:
            note_python_lines(error, self.file)
            raise

    def without_arrays(self) -> Prepared:
        """The same, which keeps no array alive; each call has to bring its own."""
        lone = copy(self)
        lone.arrays = ()
        return lone


def prepare(
    score_mod: Any,
    mask_mod: Any,
    *,
    device: Any = None,
    outputs: tuple[str, ...] = ("o",),
    has_scale: bool = False,
    sink: str | None = None,
) -> Prepared:
    """Trace the functions and write them down; see `write_file` for `has_scale` and `sink`."""
    traced = trace(score_mod, mask_mod, device=device)
    return _write(traced, outputs, has_scale, sink)


def _write(traced: Trace, outputs: tuple[str, ...], has_scale: bool, sink: str | None) -> Prepared:
    settled = _numbers.settle(write_file(traced, outputs=outputs, has_scale=has_scale, sink=sink))
    return Prepared(_canonical_text(settled.file), settled.file, settled.params, traced.captured)


_canonical: Final[dict[str, str]] = {}
"""Canonical texts by the same without line ends inside of statements, which takes half the time."""


def _canonical_text(file: ast.File) -> str:
    wide = format_file(file, width=None)
    found = _canonical.get(wide)
    if found is None:
        if len(_canonical) >= _MOST_KERNELS:
            _canonical.clear()
        found = _canonical[wide] = format_file(file)
    return found


_traces: Final[Traces[Prepared]] = Traces()


@lru_cache(maxsize=_MOST_KERNELS)
def _kernel(text: str, engine: Engine, schedule: str | None) -> Kernel:
    """One kernel for one text: a new closure of the same code compiles nothing."""
    return Kernel(load_text(text, name="<traced>"), engine=engine, schedule=schedule)


def _default_dtype() -> Any:
    """Of a tensor that a function makes of numbers; None while PyTorch is not loaded."""
    torch = sys.modules.get("torch")
    return None if torch is None else torch.get_default_dtype()


# ---- arguments ---------------------------------------------------------------------------


def _refuse(argument: str, reason: str) -> AttnError:
    return AttnError(ReservedArgument(None, argument, reason))


def _refuse_shared_heads(heads: int, shared: int) -> AttnError:
    if shared and heads % shared == 0:
        reason = f"{heads} query heads share {shared} of k and v; give `enable_gqa=True`"
        return _refuse("enable_gqa=False", reason)
    return AttnError(GroupMismatch(None, heads, shared))


def _as_number(scale: Any) -> float:
    try:
        return float(scale)
    except (TypeError, ValueError):
        raise _refuse(f"scale={scale!r}", "it is one number") from None


def _sink_element(sinks: Any, heads: int) -> str:
    """How the sinks are stored, in the language's word."""
    element = element_of(sinks) if is_array(sinks) else None
    if element is None:
        raise _refuse("sinks", "it is an array of a logit for each head")
    if tuple(sinks.shape) != (heads,):
        raise AttnError(ShapeMismatch(None, "sinks", str(tuple(sinks.shape)), f"({heads},)"))
    return element


def _one_mask(mask_mod: Any, block_mask: Any, query: Any, key: Any) -> Any:
    if block_mask is None:
        return mask_mod
    if mask_mod is not None:
        raise _refuse("mask_mod", "`block_mask` has one already; join them by `and_masks`")
    if not callable(getattr(block_mask, "mask_mod", None)):
        reason = "it has no `mask_mod`, and nothing else of it is used"
        if callable(block_mask):
            reason = "it is a function; give it as `mask_mod=`"
        elif is_array(block_mask):
            reason = "it is an array; give a function that reads it as `mask_mod=`"
        raise _refuse("block_mask", reason)
    made_for = getattr(block_mask, "seq_lengths", None)
    lengths = query.shape[2], key.shape[2]
    blocks = getattr(block_mask, "BLOCK_SIZE", None)
    if made_for is not None and tuple(made_for) != lengths and blocks != (_NO_BLOCKS, _NO_BLOCKS):
        has, expected = f"made for {tuple(made_for)}", f"one for {lengths} rows and keys"
        raise AttnError(ShapeMismatch(None, "block_mask", has, expected))
    return block_mask.mask_mod


def _share_batch(query: Any, key: Any, value: Any, block_mask: Any) -> tuple[Any, Any]:
    """One sequence of keys for every sequence of rows, without a copy."""
    for name, x in (("query", query), ("key", key), ("value", value)):
        if len(getattr(x, "shape", ())) != 4:
            has = str(tuple(getattr(x, "shape", ())))
            raise AttnError(ShapeMismatch(None, name, has, "(B, H, S, D)"))
    if block_mask is None or key.shape[0] != 1 or query.shape[0] == 1:
        return key, value
    return _repeated(key, query.shape[0]), _repeated(value, query.shape[0])


def _repeated(x: Any, count: int) -> Any:
    shape = (count, *x.shape[1:])
    return x.expand(shape) if is_torch(x) else x.__array_namespace__().broadcast_to(x, shape)


# ---- captured arrays ---------------------------------------------------------------------


@final
class _Cuts:
    """What every call does to the captured arrays, to pass them as the file declares them.

    A longer array, of which only the first part is read, is cut; nothing is copied.
    """

    def __init__(self, captured: Iterable[Captured], file: ast.File) -> None:
        block = file.items[-1]
        assert isinstance(block, ast.Attention)
        tensors = [s for s in block.statements if isinstance(s, ast.Tensor)]
        dims = {t.name: tuple(dim.size for dim in t.dims) for t in tensors}
        self._declared = [
            (at, each.name, dims[each.name], each.shape)
            for at, each in enumerate(captured)
            if each.name in dims
        ]
        self._cuts: dict[tuple[int, ...], list[tuple[int, str, Any]]] = {}

    def __call__(self, arrays: Sequence[Any], query: Any, key: Any) -> dict[str, Any]:
        """The arrays by name."""
        if not self._declared:
            return {}
        sizes = (*query.shape[:3], key.shape[2])
        cuts = self._cuts.get(sizes)
        if cuts is None:
            cuts = [
                (at, name, self._cut(dims, shape, sizes))
                for at, name, dims, shape in self._declared
            ]
            if len(self._cuts) >= _MOST_KERNELS:
                self._cuts.clear()
            self._cuts[sizes] = cuts
        return {
            name: arrays[at] if cut is None
            else arrays[at].reshape(1) if cut == ()
            else arrays[at][cut]
            for at, name, cut in cuts
        }  # fmt: skip

    @staticmethod
    def _cut(
        dims: tuple[str | int, ...], shape: tuple[int, ...], sizes: tuple[int, ...]
    ) -> tuple[slice, ...] | None:
        """The part that is read; None for all of it, `()` for the one of no dimensions."""
        known: dict[str | int, int] = dict(zip(("B", "Hq", "Sq", "Skv"), sizes, strict=True))
        if not shape:
            return ()
        wanted = tuple(min(has, known.get(dim, has)) for dim, has in zip(dims, shape, strict=True))
        return None if wanted == shape else tuple(slice(0, size) for size in wanted)


# ---- results -----------------------------------------------------------------------------


def _as_pytorch_returns(results: Any, request: Any, wants_lse: bool, wants_max: bool) -> Any:
    if request is None:
        return results
    o, *others = results if isinstance(results, tuple) else (results,)
    row_max = others.pop(0) if wants_max else None
    lse = others.pop(0) if wants_lse else None
    return o, sys.modules[type(request).__module__].AuxOutput(lse=lse, max_scores=row_max)
