"""attngen and the libraries beside it, each behind the same three questions.

Is it here?  Can it run this cell?  What is the call to time?  Everything that happens once (text to
kernel, block masks, offsets of documents) happens in `prepare`; the call only computes.

All take the same q, k and v, [B, S, H, D] in memory, which the FlashAttention packages read as they
are and the others as a transposed view.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from importlib import import_module
from itertools import accumulate
from typing import Any, Final, Protocol, final

from attngen.bench.libraries import (
    FLASH,
    build_block_mask,
    call_flash,
    call_flex,
    call_sdpa,
    first_of,
    swap,
    why_missing,
    why_not_importable,
)
from attngen.bench.machines import Array, Machine
from attngen.record import record
from benchmarks.cells import Cell
from benchmarks.variants import Native, Variant

__all__ = [
    "DEFAULT_SCHEDULE",
    "PEERS",
    "Attngen",
    "Inputs",
    "Peer",
    "Prepared",
    "RefusedError",
    "make_peer",
]

DEFAULT_SCHEDULE: Final = "auto"
"""What a user gets."""

PEERS: Final = ("attngen", "fa2", "fa3", "fa4", "cudnn", "flex", "flex_flash")


class RefusedError(Exception):
    """A peer that does not take a cell; the text says why."""


@final
@record(eq=False)
class Inputs:
    """q, k, v [B, S, H, D] and the variant's arrays, all on the machine."""

    q: Array
    k: Array
    v: Array
    tensors: Mapping[str, Array]
    tables: Mapping[str, Array]


@final
@record(eq=False)
class Prepared:
    """A call that is ready.

    call:      computes the attention and returns the library's own output.
    read:      that output as [B, S, H, D].
    kernel:    what the library calls the code that runs.
    schedule:  attngen's schedule lines.
    mask_ms:   what building the mask took, which the library needs before each new mask.
    """

    call: Callable[[], Array]
    read: Callable[[Array], Array]
    kernel: str
    schedule: str | None = None
    mask_ms: float | None = None


class Peer(Protocol):
    name: str

    def missing(self) -> str | None:
        """Why it cannot run here; None where it can."""

    def prepare(self, cell: Cell, variant: Variant, inputs: Inputs) -> Prepared:
        """The call for a cell.  Errors: RefusedError, or whatever the library raises."""


def make_peer(name: str, machine: Machine, schedule: str | None = None) -> Peer:
    """The peer of a name; `schedule` is for attngen, None where it chooses."""
    match name:
        case "attngen":
            return Attngen(machine, schedule)
        case "fa2" | "cudnn":
            return _Sdpa(name, machine)
        case "fa3" | "fa4":
            return _FlashAttention(name, machine)
        case "flex" | "flex_flash":
            return _Flex(name, machine)
    raise ValueError(f"no peer {name!r}; there are {', '.join(PEERS)}")


def _as_is(output: Array) -> Array:
    return output


# ---- attngen -------------------------------------------------------------------------------


@final
class Attngen:
    name = "attngen"

    def __init__(self, machine: Machine, schedule: str | None) -> None:
        self._machine = machine
        self._schedule = schedule
        self._kernels: dict[tuple[str, str], Any] = {}

    def missing(self) -> str | None:
        return None if self._machine.kind == "cpu" else why_not_importable("cupy")

    def prepare(self, cell: Cell, variant: Variant, inputs: Inputs) -> Prepared:
        kernel = self._kernel(variant.text, cell.dtype)
        out = self._machine.poisoned((cell.B, cell.S, cell.Hq, cell.Dv), cell.dtype)
        q, k, v, tensors = inputs.q, inputs.k, inputs.v, inputs.tensors

        def call() -> Array:
            return kernel(q, k, v, layout="bshd", out=out, **tensors)

        call()
        self._machine.poison(out)
        family = kernel.programs[-1].main.family
        return Prepared(call, _as_is, family, self._schedule)

    def _kernel(self, text: str, dtype: str) -> Any:
        """One kernel a text, as a program that calls it would hold."""
        found = self._kernels.get((text, dtype))
        if found is None:
            import attngen

            engine: Any = "auto" if self._machine.kind == "cuda" else "numpy"
            found = attngen.compile_text(text, dtype=dtype, engine=engine, schedule=self._schedule)
            self._kernels[text, dtype] = found
        return found


# ---- PyTorch's scaled_dot_product_attention ------------------------------------------------


@final
class _Sdpa:
    def __init__(self, name: str, machine: Machine) -> None:
        self.name = name
        self._machine = machine

    def missing(self) -> str | None:
        return why_missing(self.name, self._machine)

    def prepare(self, cell: Cell, variant: Variant, inputs: Inputs) -> Prepared:
        native = variant.native
        if native is None or not native.is_plain:
            raise RefusedError("scaled_dot_product_attention is full or causal here")
        call = call_sdpa(self.name, inputs.q, inputs.k, inputs.v, causal=native.causal)
        backend = {"fa2": "flash_attention", "cudnn": "cudnn_attention"}[self.name]
        return Prepared(call, swap, f"sdpa {backend}")


# ---- the FlashAttention packages -----------------------------------------------------------


@final
class _FlashAttention:
    """FA3 and FA4."""

    def __init__(self, name: str, machine: Machine) -> None:
        self.name = name
        self._machine = machine
        self._module = FLASH[name]

    def missing(self) -> str | None:
        return why_missing(self.name, self._machine)

    def prepare(self, cell: Cell, variant: Variant, inputs: Inputs) -> Prepared:
        native = variant.native
        if native is None:
            raise RefusedError(f"{self._module} has no option for {variant.name}")
        options = _flash_options(native)
        if native.documents is not None:
            return self._prepare_documents(native.documents, options, inputs)
        call = call_flash(self.name, inputs.q, inputs.k, inputs.v, **options)
        return Prepared(call, _as_is, f"{self._module}.flash_attn_func")

    def _prepare_documents(
        self, documents: tuple[int, ...], options: dict[str, Any], inputs: Inputs
    ) -> Prepared:
        """Packed documents are sequences of their own, all tokens in one row: [tokens, H, D]."""
        import numpy as np

        module = import_module(self._module)
        q, k, v = (x.flatten(0, 1) for x in (inputs.q, inputs.k, inputs.v))
        ends = np.array([0, *accumulate(documents)], np.int32)
        offsets = self._machine.asarray(ends)
        options = {
            **options,
            "cu_seqlens_q": offsets,
            "cu_seqlens_k": offsets,
            "max_seqlen_q": max(documents),
            "max_seqlen_k": max(documents),
        }

        def call() -> Array:
            return first_of(module.flash_attn_varlen_func(q, k, v, **options))

        def read(output: Array) -> Array:
            return output.unflatten(0, inputs.q.shape[:2])

        return Prepared(call, read, f"{self._module}.flash_attn_varlen_func")


def _flash_options(native: Native) -> dict[str, Any]:
    """What is left out keeps its default, since not every build knows every option."""
    options: dict[str, Any] = {"causal": native.causal}
    if native.window is not None:
        options["window_size"] = (native.window - 1, 0)
    if native.softcap:
        options["softcap"] = native.softcap
    return options


# ---- FlexAttention -------------------------------------------------------------------------


@final
class _Flex:
    """FlexAttention through Triton, or through FA4 with the backend FLASH.

    On a CPU it runs without the compiler: a dry run of the same functions.
    """

    def __init__(self, name: str, machine: Machine) -> None:
        self.name = name
        self._machine = machine

    def missing(self) -> str | None:
        return why_missing(self.name, self._machine)

    def prepare(self, cell: Cell, variant: Variant, inputs: Inputs) -> Prepared:
        if not variant.softmax:
            raise RefusedError("FlexAttention has softmax weights only")
        block_mask, mask_ms = self._block_mask(cell, variant, inputs)
        q, k, v, score_mod = inputs.q, inputs.k, inputs.v, _score_mod(variant, inputs)
        call = call_flex(self.name, self._machine, q, k, v, score_mod, block_mask)
        kernel = {"flex": "flex_attention", "flex_flash": "flex_attention FLASH"}[self.name]
        return Prepared(call, swap, kernel, mask_ms=mask_ms)

    def _block_mask(self, cell: Cell, variant: Variant, inputs: Inputs) -> tuple[Any, float | None]:
        """The block mask, and the milliseconds to make it once more."""
        mask_mod = _mask_mod(variant, inputs)
        if mask_mod is None:
            return None, None
        B = cell.B if variant.batched else None
        return build_block_mask(mask_mod, B, None, cell.S, cell.S, self._machine)


def _mask_mod(variant: Variant, inputs: Inputs) -> Callable[..., Array] | None:
    mask, tensors = variant.mask, {**inputs.tensors, **inputs.tables}
    if mask is None:
        return None
    return lambda b, h, q, kv: mask(b, q, kv, tensors)


def _score_mod(variant: Variant, inputs: Inputs) -> Callable[..., Array] | None:
    score, tensors = variant.score, {**inputs.tensors, **inputs.tables}
    if score is None:
        return None
    return lambda s, b, h, q, kv: score(s, h, q, kv, tensors)
