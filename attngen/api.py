"""What users import: `compile`, `compile_text` and the `Kernel` they give.

kernel = attngen.compile("gemma2_local.attn")
o, lse = kernel(q, k, v, doc=doc, cap=50.0, return_lse=True)
"""

from __future__ import annotations

import threading
import warnings
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal, TypeAlias, final

import numpy as np

from attngen import options, targets
from attngen.analysis.ranges import compile_time_ranges, exceeding_int64
from attngen.backend.device import (
    ArrayView,
    Device,
    allocate,
    current_stream,
    find_common_device,
    view,
)
from attngen.binding import Binding, bind, split_arguments
from attngen.binding_errors import ReservedArgument, ShapeMismatch
from attngen.compiler import Rendered, plan_for_numpy, render_program
from attngen.diagnostics.diagnostic import AttnError
from attngen.engines.outputs import Outputs, workspace_shape
from attngen.frontend.check import Checked, check
from attngen.frontend.load import Unit, load_file, load_text
from attngen.frontend.schedule_text import override_schedule
from attngen.ir.attention import Attention
from attngen.ir.program import Program
from attngen.ir.semantics import evaluate
from attngen.ir.types import FLOATING, Element
from attngen.partial import PartialState
from attngen.targets.base import Target

__all__ = ["Engine", "Kernel", "Layout", "compile", "compile_text"]

Engine: TypeAlias = Literal["auto", "cuda", "cpu", "numpy"]
Layout: TypeAlias = Literal["bhsd", "bshd"]
Array: TypeAlias = Any

_DEFAULT_CPU_TARGET = "sm_80"
"""The text that the CPU run executes is the one for this target, unless another is asked for."""


def compile(
    path: str | Path,
    *,
    consts: Mapping[str, bool | int | float] | None = None,
    dtype: str | None = None,
    head_dim: int | tuple[int, int] | None = None,
    arch: str | None = None,
    engine: Engine = "auto",
    schedule: str | None = None,
) -> Kernel:
    """A callable for the attention variant of a `.attn` file.

    consts:    values for `const` declarations, as `-D` gives on the command line.
    dtype:     fp16, bf16 or fp32; left out, the declaration's or the first call's.
    head_dim:  D, or (Dqk, Dv); left out, likewise.
    arch:      a target such as "sm_90a"; left out, that of the arrays' GPU.
    engine:    "cuda", "cpu" (the CUDA text on the CPU), "numpy" (the loop nest in NumPy), or
               "auto": where the arrays are, and NumPy where there is no C++ compiler.
    schedule:  lines of a schedule block that win over the file's, "passes two; tile q = 16".
    Errors:    AttnError with every fault of the file, each at its place.
    """
    return Kernel(load_file(Path(path)), consts, dtype, head_dim, arch, engine, schedule)


def compile_text(
    text: str,
    *,
    name: str = "<text>",
    consts: Mapping[str, bool | int | float] | None = None,
    dtype: str | None = None,
    head_dim: int | tuple[int, int] | None = None,
    arch: str | None = None,
    engine: Engine = "auto",
    schedule: str | None = None,
) -> Kernel:
    """`compile` for a text; `name` is what errors call it."""
    return Kernel(load_text(text, name=name), consts, dtype, head_dim, arch, engine, schedule)


@final
@dataclass(frozen=True, slots=True)
class _Key:
    """What a compilation depends on."""

    dtype: str
    head_dims: tuple[int, int]
    target: str | None


@dataclass(slots=True)
class _Compiled:
    """One specialisation: its program and text, and what was made of them so far.

    There is no text for the NumPy executor.
    """

    program: Program
    rendered: Rendered | None = None
    module: Any = None
    library: Path | None = None
    lock: threading.Lock = field(default_factory=threading.Lock)


@final
class Kernel:
    """One attention variant, compiled for each dtype, head dim and GPU at its first use.

    With a fixed schedule a new length, batch, head count, stride or param never compiles;
    `compilations` counts.  Threads may share a kernel.
    """

    def __init__(
        self,
        unit: Unit,
        consts: Mapping[str, bool | int | float] | None = None,
        dtype: str | None = None,
        head_dim: int | tuple[int, int] | None = None,
        arch: str | None = None,
        engine: Engine = "auto",
        schedule: str | None = None,
    ) -> None:
        dims = (head_dim, head_dim) if isinstance(head_dim, int) else head_dim
        if schedule is not None:
            unit = override_schedule(unit, schedule)
        self.unit = unit
        self.checked: Checked = check(unit, consts=consts, dtype=dtype, head_dim=dims)
        self._arch = None if arch is None else targets.get(arch)
        self._engine = engine
        self._compiled: dict[_Key, _Compiled] = {}
        self._lock = threading.Lock()
        attention = self.checked.attention
        ranges = compile_time_ranges(attention)
        self._may_exceed_int64 = next(exceeding_int64(attention, ranges), None) is not None

    @property
    def attention(self) -> Attention:
        """What is computed, checked and typed."""
        return self.checked.attention

    @property
    def name(self) -> str:
        return self.attention.name

    @property
    def compilations(self) -> int:
        """How many specialisations were compiled so far."""
        return len(self._compiled)

    # ---- calls ----

    def __call__(
        self,
        q: Array,
        k: Array,
        v: Array,
        *,
        return_lse: bool = False,
        out: Array | None = None,
        layout: Layout = "bhsd",
        **named: Any,
    ) -> Array:
        """Attention of q over k and v.

        Shapes:  layout "bhsd": q [B, Hq, Sq, Dqk], k [B, Hkv, Skv, Dqk], v [B, Hkv, Skv, Dv],
                 o [B, Hq, Sq, Dv]; "bshd": heads and tokens swapped.  lse, row_max [B, Hq, Sq],
                 float32; the LSE is a natural logarithm.  Any strides; nothing is copied.
        named:   the captured tensors and params of the variant, by name.
        Returns: o; with `return_lse` or several `output`s a tuple, in order.
        Errors:  AttnError A60x, A62x about an argument, A61x about the launch.
        """
        tensors, params = split_arguments(self.attention, named)
        binding, device = self._bind(q, k, v, tensors, params, layout)
        compiled = self._specialise(binding.dtype, _head_dims(binding), device)
        wanted = self._wanted(return_lse)
        arrays = self._allocate_outputs(wanted, binding, q, out, layout)
        views = {name: view(array, name, is_output=True) for name, array in arrays.items()}
        views["o"] = _in_bhsd(views["o"], layout)
        state = self._workspaces(compiled.program, binding, q)
        self._run(compiled, binding, Outputs(**views, **state.views), device, like=q)
        results = tuple(arrays[name] for name in wanted)
        return results[0] if len(results) == 1 else results

    def partial(
        self,
        q: Array,
        k: Array,
        v: Array,
        *,
        q_range: tuple[int, int] | None = None,
        kv_range: tuple[int, int] | None = None,
        Sq: int | None = None,
        Skv: int | None = None,
        layout: Layout = "bhsd",
        **named: Any,
    ) -> PartialState:
        """The row state over a part of the problem, to be merged with others.

        q_range, kv_range:  half-open ranges of rows and keys of the logical problem; indices
                            in masks and scores stay those of the whole problem.
        Sq, Skv:            the whole problem's lengths, when q (k and v) hold only the range;
                            left out, the arrays hold everything and the range is cut out.
        """
        tensors, params = split_arguments(self.attention, named)
        binding, device = self._bind(q, k, v, tensors, params, layout, q_range, kv_range, (Sq, Skv))
        compiled = self._specialise(binding.dtype, _head_dims(binding), device)
        rows = binding.sizes["B"], binding.sizes["Hq"], binding.rows[1] - binding.rows[0]
        state = _State.allocate(rows, binding.sizes["Dv"], q)
        self._run(compiled, binding, Outputs(**state.views), device, like=q)
        m, l, acc = (_to_array(a, device) for a in (state.m, state.l, state.acc))  # noqa: E741
        row_state = self.attention.row_state
        if not row_state.running_max:
            m[...], l[...] = -np.inf, 0.0
        return PartialState(row_state, m, l, acc, self._sink(binding))

    def prepare(
        self,
        *,
        dtype: str | None = None,
        head_dim: int | tuple[int, int] | None = None,
        devices: Sequence[int] = (0,),
    ) -> None:
        """Compile and load ahead of the first call, for the given GPUs.

        dtype, head_dim:  needed where the variant leaves them to the first call.
        """
        element, dims = self._decided(dtype, head_dim)
        for index in devices:
            device = Device("cuda", index)
            compiled = self._specialise(element, dims, device)
            launch = compiled.program.launches[0]
            self._module(compiled).prepare(launch.kernel, device, shared_bytes=launch.shared_bytes)

    def render(
        self,
        target: str = _DEFAULT_CPU_TARGET,
        *,
        dtype: str | None = None,
        head_dim: int | tuple[int, int] | None = None,
    ) -> Rendered:
        """The program and its CUDA text for a target, without compiling or running anything."""
        element, dims = self._decided(dtype, head_dim)
        return render_program(self.checked, element, dims, targets.get(target))

    # ---- one call, step by step ----

    def _bind(
        self,
        q: Array,
        k: Array,
        v: Array,
        tensors: Mapping[str, Any],
        params: Mapping[str, Any],
        layout: Layout,
        q_range: tuple[int, int] | None = None,
        kv_range: tuple[int, int] | None = None,
        logical: tuple[int | None, int | None] = (None, None),
    ) -> tuple[Binding, Device]:
        if layout not in ("bhsd", "bshd"):
            raise AttnError(ReservedArgument(None, f"layout={layout!r}", "it is bhsd or bshd"))
        operands = {name: view(x, name) for name, x in (("q", q), ("k", k), ("v", v))}
        captured = {name: view(x, name) for name, x in tensors.items()}
        device = find_common_device({**operands, **captured})
        binding = bind(
            self.attention,
            _in_bhsd(operands["q"], layout),
            _in_bhsd(operands["k"], layout),
            _in_bhsd(operands["v"], layout),
            captured,
            params,
            q_range=q_range,
            kv_range=kv_range,
            logical=logical,
            check_integers=self._may_exceed_int64,
        )
        return binding, device

    def _wanted(self, return_lse: bool) -> tuple[str, ...]:
        outputs = self.attention.outputs
        if not return_lse or "lse" in outputs:
            return outputs
        if self.attention.row_state.lse is None:
            reason = f"`weights {self.attention.row_state.name}` has no log-sum-exp"
            raise AttnError(ReservedArgument(None, "return_lse", reason))
        return (*outputs, "lse")

    def _allocate_outputs(
        self,
        wanted: tuple[str, ...],
        binding: Binding,
        like: Array,
        out: Array | None,
        layout: Layout,
    ) -> dict[str, Array]:
        B, Hq, rows, Dv = (*(binding.sizes[n] for n in ("B", "Hq", "Sq")), binding.sizes["Dv"])
        shape = (B, Hq, rows, Dv) if layout == "bhsd" else (B, rows, Hq, Dv)
        arrays = {"o": allocate(shape, binding.dtype.name, like) if out is None else out}
        if out is not None:
            _check_out(view(out, "out", is_output=True), shape, binding.dtype)
        for name in wanted:
            if name != "o":
                arrays[name] = allocate((B, Hq, rows), "fp32", like)
        return arrays

    def _workspaces(self, program: Program, binding: Binding, like: Array) -> _State:
        arrays = {
            w.name.removeprefix("state_"): allocate(workspace_shape(w, binding), "fp32", like)
            for w in program.launches[0].workspaces
        }
        return _State(**arrays)

    def _specialise(self, dtype: Element, dims: tuple[int, int], device: Device) -> _Compiled:
        target = self._target(device)
        key = _Key(dtype.name, dims, target and target.name)
        found = self._compiled.get(key)
        if found is None:
            with self._lock:
                found = self._compiled.get(key)
                if found is None:
                    if target is None:
                        found = _Compiled(plan_for_numpy(self.checked, dtype, dims))
                    else:
                        rendered = render_program(self.checked, dtype, dims, target)
                        found = _Compiled(rendered.program, rendered)
                        if rendered.notes:
                            _say_once(f"{self.name}: {'; '.join(rendered.notes)}")
                    self._compiled[key] = found
        return found

    def _target(self, device: Device) -> Target | None:
        """The target whose text runs on a device; None for the NumPy executor."""
        if device.kind == "cpu":
            if not self._runs_on_host():
                return None
            return self._arch or targets.get(_DEFAULT_CPU_TARGET)
        if self._engine in ("cpu", "numpy"):
            reason = f"the arrays are on {device}; move them to the CPU"
            raise AttnError(ReservedArgument(None, f"engine={self._engine}", reason))
        return self._arch or _target_of_gpu(device.index)

    def _run(
        self, compiled: _Compiled, binding: Binding, outputs: Outputs, device: Device, like: Array
    ) -> None:
        if compiled.rendered is None:
            from attngen.engines.numpy_engine import run_in_numpy

            run_in_numpy(compiled.program, binding, outputs)
        elif device.kind == "cuda":
            from attngen.engines.cuda_engine import launch_on_gpu

            module = self._module(compiled)
            stream = current_stream(device, like)
            launch_on_gpu(compiled.rendered, module, binding, outputs, device=device, stream=stream)
        else:
            from attngen.cpu.build import build_library
            from attngen.engines.cpu_engine import run_on_host

            with compiled.lock:
                if compiled.library is None:
                    compiled.library = build_library(
                        compiled.rendered.source, cache_dir=options.host_cache_dir()
                    )
            run_on_host(compiled.rendered, binding, outputs, compiled.library)

    def _runs_on_host(self) -> bool:
        """Whether arrays on the CPU go to the CUDA text, and not to the NumPy executor."""
        if self._engine == "numpy":
            return False
        if self._engine == "cuda":
            reason = "the arrays are on the CPU; move them to a GPU"
            raise AttnError(ReservedArgument(None, "engine=cuda", reason))
        from attngen.cpu.build import find_compiler

        try:
            find_compiler()
        except AttnError:
            if self._engine == "cpu":
                raise
            _say_once("no C++ compiler: arrays on the CPU run in the NumPy executor")
            return False
        if self._engine == "auto":
            _say_once(
                "arrays on the CPU: the generated CUDA text runs there, for checking, not speed"
            )
        return True

    def _module(self, compiled: _Compiled) -> Any:
        if compiled.module is None:
            from attngen.backend.launch import CudaModule
            from attngen.engines.cuda_engine import compile_rendered

            assert compiled.rendered is not None
            with compiled.lock:
                if compiled.module is None:
                    target = compiled.rendered.target.name
                    cubin = compile_rendered(compiled.rendered).binary
                    compiled.module = CudaModule(cubin, name=f"{self.name} for {target}")
        return compiled.module

    def _decided(
        self, dtype: str | None, head_dim: int | tuple[int, int] | None
    ) -> tuple[Element, tuple[int, int]]:
        attention = self.attention
        if isinstance(head_dim, int):
            head_dim = (head_dim, head_dim)
        declared = attention.head_dim_qk, attention.head_dim_v
        dims = head_dim or (declared if None not in declared else None)
        element = attention.dtype or (FLOATING[dtype] if dtype else None)
        if element is None or dims is None:
            missing = "dtype" if element is None else "head_dim"
            reason = f"`{self.name}` leaves it open, so it must be given here"
            raise AttnError(ReservedArgument(None, missing, reason))
        return element, dims  # type: ignore[return-value]

    def _sink(self, binding: Binding) -> Array | None:
        """The sink's logit per (batch, head), for a later `finalize`."""
        sink = self.attention.sink
        if sink is None:
            return None
        from attngen.engines.numpy_engine import as_numpy

        B, Hq, Hkv = (binding.sizes[n] for n in ("B", "Hq", "Hkv"))
        b, h = np.arange(B)[:, None], np.arange(Hq)[None, :]
        symbols = {**binding.sizes, **binding.params, "b": b, "h": h, "hkv": h // (Hq // Hkv)}
        if binding.q.device.kind == "cpu":
            tensors = {name: as_numpy(x) for name, x in binding.tensors.items()}
        else:
            import cupy

            tensors = {n: cupy.asarray(x.owner) for n, x in binding.tensors.items()}
        value = evaluate(sink, symbols, tensors).data
        return (value + np.zeros((B, Hq), np.float32))[..., None]


@dataclass(slots=True)
class _State:
    """Arrays of a row state, and their views."""

    m: Array = None
    l: Array = None  # noqa: E741
    acc: Array = None

    @staticmethod
    def allocate(rows: tuple[int, int, int], head_dim_v: int, like: Array) -> _State:
        return _State(
            allocate(rows, "fp32", like),
            allocate(rows, "fp32", like),
            allocate((*rows, head_dim_v), "fp32", like),
        )

    @property
    def views(self) -> dict[str, ArrayView]:
        named = {"state_m": self.m, "state_l": self.l, "state_acc": self.acc}
        return {n: view(x, n, is_output=True) for n, x in named.items() if x is not None}


def _head_dims(binding: Binding) -> tuple[int, int]:
    return binding.sizes["Dqk"], binding.sizes["Dv"]


def _in_bhsd(x: ArrayView, layout: Layout) -> ArrayView:
    """The same array seen as [B, H, S, D]."""
    if layout == "bhsd" or len(x.shape) != 4:
        return x
    b, s, h, d = range(4)
    order = (b, h, s, d)
    return x._replace(
        shape=tuple(x.shape[i] for i in order), strides=tuple(x.strides[i] for i in order)
    )


def _check_out(out: ArrayView, shape: tuple[int, ...], dtype: Element) -> None:
    if out.shape != shape or out.dtype != dtype.name:
        has = f"{tuple(out.shape)} of {out.dtype}"
        raise AttnError(ShapeMismatch(None, "out", has, f"{shape} of {dtype.name}"))


def _to_array(x: Array, device: Device) -> Array:
    """NumPy for CPU memory, CuPy for a GPU: the libraries that row states merge with."""
    if device.kind == "cpu":
        return x if isinstance(x, np.ndarray) else np.from_dlpack(x)
    import cupy

    return x if isinstance(x, cupy.ndarray) else cupy.from_dlpack(x)


def _target_of_gpu(index: int) -> Target:
    from attngen.backend.launch import load_driver
    from attngen.backend.nvrtc import select_target

    return select_target(load_driver().capability(index))


_said: set[str] = set()


def _say_once(text: str) -> None:
    if text not in _said:
        _said.add(text)
        warnings.warn(text, stacklevel=4)
