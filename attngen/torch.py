"""A kernel as an operator of PyTorch: under `torch.compile`, in CUDA graphs, with any strides.

    attend = attngen.torch.operator(attngen.compile("gemma2_local.attn"))
    o = attend(q, k, v, doc=doc, cap=50.0)

Needs PyTorch, which nothing else in attngen imports.
"""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import Any, Final, TypeAlias, final, get_args

import torch
from torch.overrides import has_torch_function_variadic

from attngen.api import Kernel, Layout
from attngen.backend.errors import GradientRequired
from attngen.binding import split_arguments
from attngen.binding_errors import ReservedArgument
from attngen.diagnostics.diagnostic import AttnError
from attngen.ir.types import ScalarType

__all__ = ["Operator", "operator"]

Tensor: TypeAlias = Any
"""A `torch.Tensor`; PyTorch is not there when types are checked."""

_NAMESPACE: Final = "attngen"
_LIBRARY: Final = torch.library.Library(_NAMESPACE, "FRAGMENT")
_SCHEMA_TYPES: Final = {
    ScalarType.INT: "SymInt",
    ScalarType.FLOAT: "float",
    ScalarType.BOOL: "bool",
}
_PLAIN_TYPES: Final = frozenset({torch.Tensor, torch.nn.Parameter})
_defined: Final[dict[str, Any]] = {}
"""The operators of this process by name; PyTorch takes each name once."""
_lock: Final = threading.Lock()


def operator(kernel: Kernel, *, layout: Layout = "bhsd") -> Operator:
    """The kernel as an operator `torch.ops.attngen.<name>_<digest>`.

    layout:  of q, k, v and o in all calls: "bhsd" is [B, H, S, D], "bshd" [B, S, H, D].
    """
    if layout not in get_args(Layout):
        reason = f"it is one of {', '.join(get_args(Layout))}"
        raise AttnError(ReservedArgument(None, f"layout={layout!r}", reason))
    return Operator(kernel, layout)


@final
class Operator:
    """What `operator` gives; it is called like its kernel, with tensors of PyTorch.

    Two operators of equal kernels are one for PyTorch, so that what `torch.compile` made of one
    serves the other.  A call that nobody watches goes to the kernel at once: PyTorch's dispatcher
    would get there too, after 8 microseconds.
    """

    def __init__(self, kernel: Kernel, layout: Layout) -> None:
        self.kernel = kernel
        self.layout = layout
        attention = kernel.attention
        self._tensors = tuple(tensor.name for tensor in attention.tensors)
        self._params = tuple((param.name, param.default) for param in attention.params)
        self._named = frozenset((*self._tensors, *(name for name, _ in self._params)))
        self._plain = _define(kernel, layout, attention.outputs)
        has_lse = "lse" in attention.outputs or attention.row_state.lse is None
        self._with_lse = None if has_lse else _define(kernel, layout, (*attention.outputs, "lse"))

    def __call__(
        self, q: Tensor, k: Tensor, v: Tensor, *, return_lse: bool = False, **named: Any
    ) -> Any:
        """Attention of q over k and v: shapes, results and errors are those of the kernel.

        named:   the captured tensors and params of the variant, by name.
        Errors:  A606 while gradients are recorded and an argument requires one.
        """
        if not named.keys() <= self._named:
            split_arguments(self.kernel.attention, named)  # raises
        if not torch.compiler.is_compiling() and not _is_watched(q, k, v, *named.values()):
            return self.kernel(q, k, v, return_lse=return_lse, layout=self.layout, **named)
        for name, x in (("q", q), ("k", k), ("v", v), *named.items()):
            if torch.is_grad_enabled() and isinstance(x, torch.Tensor) and x.requires_grad:
                raise AttnError(GradientRequired(None, name))
        call = self._plain
        if return_lse and "lse" not in self.kernel.attention.outputs:
            if self._with_lse is None:
                reason = f"`weights {self.kernel.attention.row_state.name}` has no log-sum-exp"
                raise AttnError(ReservedArgument(None, "return_lse", reason))
            call = self._with_lse
        given: list[Any] = []
        for name in self._tensors:
            if name not in named:
                split_arguments(self.kernel.attention, named)  # raises
            given.append(named[name])
        for name, default in self._params:
            if name not in named and default is None:
                split_arguments(self.kernel.attention, named)  # raises
            given.append(named.get(name, default))
        results = call(q, k, v, *given)
        return results[0] if len(results) == 1 else tuple(results)


def _is_watched(*arguments: Any) -> bool:
    """Whether a call has to be an operator's: for a mode, a transform or a tensor of another type.

    Dispatch modes, `vmap`, `jit.trace` and the like add keys to those that this thread includes
    in every dispatch.
    """
    if _EAGER_KEYS is None or _included_keys().raw_repr() not in _EAGER_KEYS:
        return True
    if has_torch_function_variadic(*arguments):
        return True
    return any(isinstance(x, torch.Tensor) and type(x) not in _PLAIN_TYPES for x in arguments)


def _find_eager_keys() -> frozenset[int] | None:
    """The keys that eager mode includes, with and without `inference_mode`.

    They are private to PyTorch.  None where it has others; then every call is the operator's.
    """
    try:
        torch._C._dispatch_tls_local_include_set().raw_repr()  # what `_is_watched` asks
        eager = torch._C.DispatchKeySet(torch._C.DispatchKey.BackendSelect)
        views = torch._C.DispatchKey.ADInplaceOrView
        return frozenset({eager.raw_repr(), eager.add(views).raw_repr()})
    except AttributeError:
        return None


_EAGER_KEYS: Final = _find_eager_keys()
_included_keys: Final[Any] = getattr(torch._C, "_dispatch_tls_local_include_set", None)


def _define(kernel: Kernel, layout: Layout, wanted: tuple[str, ...]) -> Any:
    """The operator that returns `wanted`, a list of tensors in order; defined at most once."""
    name = "_".join((kernel.name, kernel.digest[:16], layout, *wanted))
    with _lock:
        if name not in _defined:
            _register(name, kernel, layout, wanted)
            _defined[name] = getattr(getattr(torch.ops, _NAMESPACE), name).default
        return _defined[name]


def _register(name: str, kernel: Kernel, layout: Layout, wanted: tuple[str, ...]) -> None:
    attention = kernel.attention
    # With a letter in front, since a name of the language may mean something in a schema.
    tensors = [f"Tensor t_{tensor.name}" for tensor in attention.tensors]
    params = [f"{_SCHEMA_TYPES[param.type]} p_{param.name}" for param in attention.params]
    arguments = ", ".join(("Tensor q", "Tensor k", "Tensor v", *tensors, *params))
    _LIBRARY.define(f"{name}({arguments}) -> Tensor[]", tags=(torch.Tag.pt2_compliant_tag,))
    qualified = f"{_NAMESPACE}::{name}"
    for device in ("cpu", "cuda"):
        torch.library.impl(qualified, device, _make_run(kernel, layout, wanted), lib=_LIBRARY)
    torch.library.register_fake(qualified, _make_fake(layout, wanted), lib=_LIBRARY)
    torch.library.register_autograd(qualified, _refuse_backward, lib=_LIBRARY)


def _make_run(kernel: Kernel, layout: Layout, wanted: tuple[str, ...]) -> Callable[..., Any]:
    """What runs on a device, below autograd."""
    attention = kernel.attention
    names = [tensor.name for tensor in attention.tensors]
    names += [param.name for param in attention.params]
    return_lse = "lse" in wanted and "lse" not in attention.outputs

    def run(q: Tensor, k: Tensor, v: Tensor, *given: Any) -> list[Tensor]:
        named = dict(zip(names, given, strict=True))
        found = kernel(q, k, v, return_lse=return_lse, layout=layout, **named)
        return list(found) if isinstance(found, tuple) else [found]

    return run


def _make_fake(layout: Layout, wanted: tuple[str, ...]) -> Callable[..., Any]:
    """Shapes and dtypes of the results, from those of the arguments alone."""

    def fake(q: Tensor, k: Tensor, v: Tensor, *given: Any) -> list[Tensor]:
        B, Hq, Sq = (q.shape[i] for i in ((0, 1, 2) if layout == "bhsd" else (0, 2, 1)))
        shape = (*q.shape[:3], v.shape[3])
        per_row = {"dtype": torch.float32}
        return [
            q.new_empty(shape) if name == "o" else q.new_empty((B, Hq, Sq), **per_row)
            for name in wanted
        ]

    return fake


def _refuse_backward(ctx: Any, *gradients: Any) -> Any:
    raise AttnError(GradientRequired(None, "q"))
