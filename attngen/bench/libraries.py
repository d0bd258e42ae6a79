"""The attention libraries beside attngen, as calls on tensors of PyTorch.

| name         | what it is                                      | takes                      |
| ------------ | ----------------------------------------------- | -------------------------- |
| `fa2`        | FlashAttention-2, in PyTorch                    | full and causal            |
| `cudnn`      | cuDNN, through PyTorch                          | full and causal            |
| `fa3`        | FlashAttention-3, `flash_attn_interface`        | its own options            |
| `fa4`        | FlashAttention-4, `flash_attn.cute`             | its own options            |
| `flex`       | FlexAttention, compiled by Triton               | `score_mod` and `mask_mod` |
| `flex_flash` | FlexAttention with its backend FLASH, over FA4  | `score_mod` and `mask_mod` |

q, k and v are [B, S, H, D] in memory, which the FlashAttention packages read as they are and the
others as a transposed view.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable
from functools import cache
from importlib import import_module
from typing import Any, Final

from attngen.bench.machines import Array, Machine

__all__ = [
    "FLASH",
    "LIBRARIES",
    "build_block_mask",
    "call_flash",
    "call_flex",
    "call_sdpa",
    "compiled_flex_attention",
    "first_of",
    "swap",
    "time_once_more",
    "why_missing",
    "why_not_importable",
]

LIBRARIES: Final = ("fa2", "fa3", "fa4", "cudnn", "flex", "flex_flash")
FLASH: Final = {"fa3": "flash_attn_interface", "fa4": "flash_attn.cute"}
"""The module of each FlashAttention package; their functions have the same names and options."""
_SDPA: Final = {"fa2": "FLASH_ATTENTION", "cudnn": "CUDNN_ATTENTION"}
_FLEX_OPTIONS: Final = {"flex": None, "flex_flash": {"BACKEND": "FLASH"}}


def why_missing(name: str, machine: Machine) -> str | None:
    """Why a library cannot run here; None where it can."""
    if not machine.has_torch:
        return "PyTorch is not installed"
    if machine.kind == "cpu":
        return None if name in ("fa2", "flex") else "it needs a GPU"
    if name == "flex_flash":
        return why_not_importable(FLASH["fa4"])
    return why_not_importable(FLASH[name]) if name in FLASH else None


def why_not_importable(module: str) -> str | None:
    try:
        import_module(module)
    except Exception as error:  # a package that does not fit raises what it likes
        return f"{module}: {type(error).__name__}: {str(error).partition(chr(10))[0]}"
    return None


def swap(array: Array) -> Array:
    """[B, S, H, D] as [B, H, S, D], and back; a view."""
    return array.transpose(1, 2)


def first_of(result: Any) -> Array:
    """The output of a function that may return the log-sum-exp beside it."""
    return result[0] if isinstance(result, tuple) else result


def call_sdpa(
    name: str, q: Array, k: Array, v: Array, *, causal: bool, scale: float | None = None
) -> Callable[[], Array]:
    """PyTorch's function with one backend; its output is [B, H, S, D].

    causal:  row 0 sees key 0 alone, however many keys there are.
    scale:   None: 1 / sqrt(D).
    """
    from torch.nn.attention import SDPBackend, sdpa_kernel
    from torch.nn.functional import scaled_dot_product_attention

    q, k, v = (swap(x) for x in (q, k, v))
    backend, enable_gqa = getattr(SDPBackend, _SDPA[name]), q.shape[1] != k.shape[1]

    def call() -> Array:
        with sdpa_kernel(backend):
            return scaled_dot_product_attention(
                q, k, v, is_causal=causal, scale=scale, enable_gqa=enable_gqa
            )

    return call


def call_flash(name: str, q: Array, k: Array, v: Array, **options: Any) -> Callable[[], Array]:
    """A FlashAttention package with its own options; its output is [B, S, H, D]."""
    module = import_module(FLASH[name])
    return lambda: first_of(module.flash_attn_func(q, k, v, **options))


def call_flex(
    name: str,
    machine: Machine,
    q: Array,
    k: Array,
    v: Array,
    score_mod: Any,
    block_mask: Any,
    scale: float | None = None,
) -> Callable[[], Array]:
    """FlexAttention; its output is [B, H, S, D]."""
    attend = compiled_flex_attention(machine)
    q, k, v = (swap(x) for x in (q, k, v))
    enable_gqa, options = q.shape[1] != k.shape[1], _FLEX_OPTIONS[name]

    def call() -> Array:
        return attend(
            q,
            k,
            v,
            score_mod=score_mod,
            block_mask=block_mask,
            scale=scale,
            enable_gqa=enable_gqa,
            kernel_options=options,
        )

    return call


def compiled_flex_attention(machine: Machine) -> Any:
    """FlexAttention as it runs on a machine: without its compiler on a CPU."""
    if machine.kind == "cuda":
        return _compile_flex_attention()
    from torch.nn.attention.flex_attention import flex_attention

    return flex_attention


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


def build_block_mask(
    mask_mod: Any, B: int | None, H: int | None, rows: int, keys: int, machine: Machine
) -> tuple[Any, float]:
    """The block mask, and the milliseconds to make it once more.

    B, H:  None where all sequences, or heads, have the same mask.  Where each head has its own,
           the function is compiled, as the mask of all pairs at once would not fit.
    """
    from torch.nn.attention.flex_attention import create_block_mask

    create: Any = create_block_mask
    if H is not None and machine.kind == "cuda":
        import torch

        create = torch.compile(create_block_mask)

    def build() -> Any:
        return create(mask_mod, B, H, rows, keys, device=machine.kind)

    return build(), time_once_more(build, machine)


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
