"""attngen and the libraries beside it, each behind the same three questions.

Is it here?  Can it run this cell?  What is the call to time?  Everything that happens once (text to
kernel, block masks, offsets of documents) happens in `prepare`; the call only computes.

All take the same q, k and v, [B, S, H, D] in memory, which the FlashAttention packages read as they
are and the others as a transposed view.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Mapping
from functools import cache
from importlib import import_module
from itertools import accumulate
from typing import Any, Final, Protocol, final

from attngen.record import record
from benchmarks.cells import Cell
from benchmarks.machines import Array, Machine
from benchmarks.variants import Native, Variant

__all__ = [
    "DEFAULT_SCHEDULE",
    "PEERS",
    "Attngen",
    "Inputs",
    "Peer",
    "Prepared",
    "RefusedError",
    "compiled_flex_attention",
    "make_peer",
    "time_once_more",
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
        case "fa2":
            return _Sdpa("fa2", machine, "FLASH_ATTENTION")
        case "cudnn":
            return _Sdpa("cudnn", machine, "CUDNN_ATTENTION")
        case "fa3":
            return _FlashAttention("fa3", machine, "flash_attn_interface")
        case "fa4":
            return _FlashAttention("fa4", machine, "flash_attn.cute")
        case "flex":
            return _Flex("flex", machine, None)
        case "flex_flash":
            return _Flex("flex_flash", machine, "FLASH")
    raise ValueError(f"no peer {name!r}; there are {', '.join(PEERS)}")


def _as_is(output: Array) -> Array:
    return output


def _swap(array: Array) -> Array:
    """[B, S, H, D] as [B, H, S, D], and back; a view."""
    return array.transpose(1, 2)


def _why_not_importable(module: str) -> str | None:
    try:
        import_module(module)
    except Exception as error:  # a package that does not fit raises what it likes
        return f"{module}: {type(error).__name__}: {str(error).partition(chr(10))[0]}"
    return None


# ---- attngen -------------------------------------------------------------------------------


@final
class Attngen:
    name = "attngen"

    def __init__(self, machine: Machine, schedule: str | None) -> None:
        self._machine = machine
        self._schedule = schedule
        self._kernels: dict[tuple[str, str], Any] = {}

    def missing(self) -> str | None:
        return None if self._machine.kind == "cpu" else _why_not_importable("cupy")

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
    def __init__(self, name: str, machine: Machine, backend: str) -> None:
        self.name = name
        self._machine = machine
        self._backend = backend

    def missing(self) -> str | None:
        if not self._machine.has_torch:
            return "PyTorch is not installed"
        if self._machine.kind == "cpu" and self.name == "cudnn":
            return "cuDNN needs a GPU"
        return None

    def prepare(self, cell: Cell, variant: Variant, inputs: Inputs) -> Prepared:
        native = variant.native
        if native is None or not native.is_plain:
            raise RefusedError("scaled_dot_product_attention is full or causal here")
        from torch.nn.attention import SDPBackend, sdpa_kernel
        from torch.nn.functional import scaled_dot_product_attention

        q, k, v = (_swap(x) for x in (inputs.q, inputs.k, inputs.v))
        backend, is_causal = getattr(SDPBackend, self._backend), native.causal
        enable_gqa = cell.Hq != cell.Hkv

        def call() -> Array:
            with sdpa_kernel(backend):
                return scaled_dot_product_attention(
                    q, k, v, is_causal=is_causal, enable_gqa=enable_gqa
                )

        return Prepared(call, _swap, f"sdpa {self._backend.lower()}")


# ---- the FlashAttention packages -----------------------------------------------------------


@final
class _FlashAttention:
    """FA3 and FA4, whose functions have the same names and options."""

    def __init__(self, name: str, machine: Machine, module: str) -> None:
        self.name = name
        self._machine = machine
        self._module = module

    def missing(self) -> str | None:
        if self._machine.kind == "cpu":
            return "it needs a GPU"
        return _why_not_importable(self._module)

    def prepare(self, cell: Cell, variant: Variant, inputs: Inputs) -> Prepared:
        native = variant.native
        if native is None:
            raise RefusedError(f"{self._module} has no option for {variant.name}")
        module, options = import_module(self._module), _flash_options(native)
        if native.documents is not None:
            return self._prepare_documents(module, native.documents, options, inputs)

        def call() -> Array:
            return _first(module.flash_attn_func(inputs.q, inputs.k, inputs.v, **options))

        return Prepared(call, _as_is, f"{self._module}.flash_attn_func")

    def _prepare_documents(
        self, module: Any, documents: tuple[int, ...], options: dict[str, Any], inputs: Inputs
    ) -> Prepared:
        """Packed documents are sequences of their own, all tokens in one row: [tokens, H, D]."""
        import numpy as np

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
            return _first(module.flash_attn_varlen_func(q, k, v, **options))

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


def _first(result: Any) -> Array:
    """The output of a function that may return the log-sum-exp beside it."""
    return result[0] if isinstance(result, tuple) else result


# ---- FlexAttention -------------------------------------------------------------------------


@final
class _Flex:
    """FlexAttention through Triton, or through FA4 with the backend "FLASH".

    On a CPU it runs without the compiler: a dry run of the same functions.
    """

    def __init__(self, name: str, machine: Machine, backend: str | None) -> None:
        self.name = name
        self._machine = machine
        self._options = None if backend is None else {"BACKEND": backend}

    def missing(self) -> str | None:
        if not self._machine.has_torch:
            return "PyTorch is not installed"
        if self._options is not None:
            if self._machine.kind == "cpu":
                return "it needs a GPU"
            return _why_not_importable("flash_attn.cute")
        return None

    def prepare(self, cell: Cell, variant: Variant, inputs: Inputs) -> Prepared:
        if not variant.softmax:
            raise RefusedError("FlexAttention has softmax weights only")
        attend = compiled_flex_attention(self._machine)
        block_mask, mask_ms = self._block_mask(cell, variant, inputs)
        score_mod = _score_mod(variant, inputs)
        q, k, v = (_swap(x) for x in (inputs.q, inputs.k, inputs.v))
        enable_gqa, options = cell.Hq != cell.Hkv, self._options

        def call() -> Array:
            return attend(
                q,
                k,
                v,
                score_mod=score_mod,
                block_mask=block_mask,
                enable_gqa=enable_gqa,
                kernel_options=options,
            )

        kernel = "flex_attention" if options is None else "flex_attention FLASH"
        return Prepared(call, _swap, kernel, mask_ms=mask_ms)

    def _block_mask(self, cell: Cell, variant: Variant, inputs: Inputs) -> tuple[Any, float | None]:
        """The block mask, and the milliseconds to make it once more."""
        mask_mod = _mask_mod(variant, inputs)
        if mask_mod is None:
            return None, None
        from torch.nn.attention.flex_attention import create_block_mask

        B, S = (cell.B if variant.batched else None), cell.S

        def build() -> Any:
            return create_block_mask(mask_mod, B, None, S, S, device=self._machine.kind)

        return build(), time_once_more(build, self._machine)


@cache
def _compile_flex_attention() -> Any:
    """`flex_attention`, compiled for each shape and function.

    After some compilations PyTorch gives up and computes every pair without a fused kernel;
    the limit is raised, and with `fullgraph` reaching it is an error.
    """
    import torch
    import torch._dynamo
    from torch.nn.attention.flex_attention import flex_attention

    torch._dynamo.config.recompile_limit = 1000
    torch._dynamo.config.accumulated_recompile_limit = 10000
    return torch.compile(flex_attention, dynamic=False, fullgraph=True)


def compiled_flex_attention(machine: Machine) -> Any:
    """FlexAttention as it runs on a machine: without its compiler on a CPU."""
    if machine.kind == "cuda":
        return _compile_flex_attention()
    from torch.nn.attention.flex_attention import flex_attention

    return flex_attention


def time_once_more(build: Callable[[], object], machine: Machine) -> float:
    """Milliseconds to build something once more: the median of three."""
    times = []
    for _ in range(3):
        machine.synchronize()
        start = time.perf_counter()
        build()
        machine.synchronize()
        times.append((time.perf_counter() - start) * 1e3)
    return statistics.median(times)


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
