"""What users import: `compile`, `compile_text` and the `Kernel` they give.

kernel = attngen.compile("gemma2_local.attn")
o, lse = kernel(q, k, v, doc=doc, cap=50.0, return_lse=True)
"""

from __future__ import annotations

import math
import sys
import threading
import warnings
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from hashlib import sha256
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal, NamedTuple, TypeAlias, final, get_args

import numpy as np

from attngen import options, targets
from attngen.backend.device import (
    CPU,
    ArrayView,
    Device,
    allocate,
    cuda_device,
    current_stream,
    find_common_device,
    may_be_freed_in_capture,
    view,
)
from attngen.backend.errors import GpuUnavailable, NotPrepared
from attngen.binding import (
    Binding,
    IntegerCheck,
    Layout,
    bind,
    is_int,
    require_free_names,
    split_arguments,
)
from attngen.binding_errors import OutputOverlaps, ReservedArgument, ShapeMismatch
from attngen.compiler import (
    Lowered,
    Rendered,
    lower_program,
    plan_for_numpy,
    reasons_against,
    render_lowered,
    render_program,
)
from attngen.diagnostics.diagnostic import AttnError
from attngen.engines.call_plan import Call, CallPlans, DoneCall, NewArray
from attngen.engines.outputs import (
    Outputs,
    due_workspaces,
    find_overlap,
    why_no_tile_map,
    workspace_shape,
)
from attngen.executor.errors import ReadOutside
from attngen.frontend.check import Checked, check
from attngen.frontend.load import Unit, load_file, load_text
from attngen.frontend.schedule_text import override_schedule
from attngen.ir.attention import Attention
from attngen.ir.digest import digest_attention, digest_operation
from attngen.ir.program import Program, Workspace
from attngen.ir.schedule import Schedule
from attngen.ir.types import Element
from attngen.partial import PartialState
from attngen.targets.base import Target

if TYPE_CHECKING:
    from attngen.engines.cuda_engine import Launched
    from attngen.tuning.device_class import DeviceClass
    from attngen.tuning.lookup import Answer, Lookup, Question
    from attngen.tuning.problem import Problem

__all__ = ["Engine", "Kernel", "Layout", "Tune", "compile", "compile_text"]

Engine: TypeAlias = Literal["auto", "cuda", "cpu", "numpy"]
Tune: TypeAlias = Literal["auto", "cached", "off"] | float
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
    tune: Tune = "auto",
) -> Kernel:
    """A callable for the attention variant of a `.attn` file.

    consts:    values for `const` declarations, as `-D` gives on the command line.
    dtype:     fp16, bf16 or fp32; left out, the declaration's or the first call's.
    head_dim:  D, or (Dqk, Dv); left out, likewise.
    arch:      a target such as "sm_90a"; left out, that of the arrays' GPU.
    engine:    "cuda", "cpu" (the CUDA text on the CPU), "numpy" (the loop nest in NumPy), or
               "auto": where the arrays are, and NumPy where there is no C++ compiler.
    schedule:  lines of a schedule block that win over the file's, "passes two; tile q = 16".
    tune:      who chooses, on a GPU, what the schedule leaves open.  "cached": tuning records, and
               the kernel family where there are none; "auto": the best that is known without
               measuring; "off": the kernel family.  A number: the first call of a problem that
               has no record searches for so many seconds, and keeps what it measured.
    Errors:    AttnError with every fault of the file, each at its place.
    """
    return Kernel(load_file(Path(path)), consts, dtype, head_dim, arch, engine, schedule, tune)


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
    tune: Tune = "auto",
) -> Kernel:
    """`compile` for a text; `name` is what errors call it."""
    unit = load_text(text, name=name)
    return Kernel(unit, consts, dtype, head_dim, arch, engine, schedule, tune)


class _Key(NamedTuple):
    """What a compilation depends on; a named tuple, because every call makes one."""

    dtype: str
    head_dims: tuple[int, int]
    target: str | None
    is_checked: bool
    is_aligned: bool = True  # the layout class
    schedule: Schedule | None = None  # complete, with its family


_LoweredKey: TypeAlias = tuple[str, tuple[int, int], str, str | None, Schedule | None]
"""Element type, head dims, target, and a family or a schedule that has to run it."""


class _Compiled:
    """One specialisation: its program and text, and what was made of them so far.

    There is no text for the NumPy executor.
    """

    def __init__(
        self, program: Program, rendered: Rendered | None = None, module: Any = None
    ) -> None:
        self.program = program
        self.rendered = rendered
        self.module = module
        self.loaded: set[int] = set()  # indices of GPUs
        self.libraries: dict[int, Path] = {}  # for the CPU, by how much they are optimised
        self.lock = threading.Lock()

    @property
    def is_ready(self) -> bool:
        """Whether the compiler has run, where there is a text for it."""
        return self.rendered is None or self.module is not None or bool(self.libraries)


@final
class Kernel:
    """One attention variant, compiled for each dtype, head dim and GPU at its first use.

    With a fixed schedule a new length, batch, head count or param never compiles.  Where the
    schedule leaves something open, tuning records may choose differently for other lengths, and
    there is one compilation for each schedule that they choose.  A stride or
    address does once, in kernel families that copy 16 bytes at a time: the first q, k or v that
    has an address or stride for which that is not possible gets a second, slower text, and a
    warning says so.  `compilations` counts.  Threads may share a kernel.
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
        tune: Tune = "auto",
    ) -> None:
        _require_choice("engine", engine, Engine)
        _require_tune(tune)
        if schedule is not None:
            unit = override_schedule(unit, schedule)
        self.unit = unit
        self._text = unit.main.span.source.text
        self._consts, self._dtype, self._head_dims = consts, dtype, _pair(head_dim)
        self.checked: Checked = check(unit, consts=consts, dtype=dtype, head_dim=self._head_dims)
        require_free_names(self.checked.attention)
        self._arch = None if arch is None else targets.get(arch)
        self._engine = engine
        self._tune = tune
        self._targets: dict[int, Target] = {}  # by index of GPU
        self._classes: dict[int, DeviceClass | None] = {}  # likewise
        self._lookup: Lookup | None = None
        self._searched: set[Problem] = set()
        self._operations: dict[tuple[str, tuple[int, int]], str] = {}  # digests
        self._lowered: dict[_LoweredKey, Lowered] = {}
        self._compiled: dict[_Key, _Compiled] = {}
        self._lock = threading.Lock()
        self._integers = IntegerCheck(self.checked.attention)
        self._plans = CallPlans(self.checked.attention, self._integers)

    @property
    def attention(self) -> Attention:
        """What is computed, checked and typed."""
        return self.checked.attention

    @property
    def name(self) -> str:
        return self.attention.name

    @property
    def digest(self) -> str:
        """The same for kernels that compute the same, in the same way, on the same machine."""
        arch = self._arch and self._arch.name
        chosen = (self._dtype, self._head_dims, arch, self._engine, self._tune)
        text = f"{digest_attention(self.attention)}\n{self.checked.schedules}\n{chosen}"
        return sha256(text.encode()).hexdigest()

    @property
    def compilations(self) -> int:
        """How many specialisations were compiled so far."""
        return len(self.programs)

    @property
    def programs(self) -> tuple[Program, ...]:
        """What was compiled so far, in order."""
        return tuple(each.program for each in list(self._compiled.values()) if each.is_ready)

    # ---- calls ----

    def __call__(
        self,
        /,
        q: Array,
        k: Array,
        v: Array,
        *,
        return_lse: bool = False,
        out: Array | None = None,
        layout: Layout = "bhsd",
        check: bool = False,
        **named: Any,
    ) -> Array:
        """Attention of q over k and v.

        Shapes:  layout "bhsd": q [B, Hq, Sq, Dqk], k [B, Hkv, Skv, Dqk], v [B, Hkv, Skv, Dv],
                 o [B, Hq, Sq, Dv]; "bshd": heads and tokens swapped.  lse, row_max [B, Hq, Sq],
                 float32; the LSE is a natural logarithm.  Any strides; nothing is copied.
        check:   report a read outside of a captured tensor, which otherwise gives the nearest
                 element; waits for the launch, and compiles a variant of its own.
        named:   the captured tensors and params of the variant, by name.
        Returns: o; with `return_lse` or several `output`s a tuple, in order.
        Errors:  AttnError A60x, A62x about an argument, A61x about the launch.
        """
        call = None if check else self._plans.read(q, k, v, named, out, layout, return_lse)
        if call is not None and call.plan is not None:
            results = call.plan.repeat(call, like=q, out=out)
            if results is not None:
                return results
        return self._call_in_full(q, k, v, return_lse, out, layout, check, named, call)

    def partial(
        self,
        /,
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
        compiled = self._specialise_for(binding, device)
        self._make_ready(compiled, device, binding, like=q)
        rows = binding.sizes["B"], binding.sizes["Hq"], binding.rows[1] - binding.rows[0]
        state = _State.allocate(rows, binding.sizes["Dv"], q)
        written = state.arrays
        is_ahead = _may_launch_ahead(compiled.program, device, like=q)
        workspaces = due_workspaces(compiled.program, binding, with_ahead=is_ahead)
        written |= _allocate([w for w in workspaces if w.name not in written], binding, q)
        self._run(compiled, binding, Outputs(**_views(written)), device, like=q)
        m, l, acc = (_to_array(a, device) for a in (state.m, state.l, state.acc))  # noqa: E741
        row_state = self.attention.row_state
        if not row_state.running_max:
            m[...], l[...] = -np.inf, 0.0
        sink = self._sink(compiled, binding, device, like=q) if row_state.has_sink else None
        return PartialState(row_state, m, l, acc, sink)

    def prepare(
        self,
        *,
        dtype: str | None = None,
        head_dim: int | tuple[int, int] | None = None,
        devices: Sequence[int] = (0,),
        shapes: Sequence[Mapping[str, int]] = (),
    ) -> None:
        """Compile and load ahead of the first call, for the given GPUs.

        With engine "cpu" or "numpy" it does the same for the CPU.  Where a kernel family has a
        text of its own for q, k and v that cannot be copied 16 bytes at a time, this is not it.

        dtype, head_dim:  needed where the variant leaves them to the first call.
        shapes:           sizes (B, Hq, Hkv, Sq, Skv) of the calls to come, where tuning records
                          may choose a schedule for each.
        """
        element, dims = self._decided(dtype, head_dim)
        for shape in shapes:
            _require_sizes(shape)
        on_cpu = self._engine in ("cpu", "numpy")
        for device in (CPU,) if on_cpu else map(cuda_device, devices):
            self._make_ready(self._specialise(element, dims, device), device)
            for shape in shapes:
                schedule = self._tuned(element, dims, device, shape)
                compiled = self._specialise(element, dims, device, schedule=schedule)
                self._make_ready(compiled, device)

    def find_schedule(
        self,
        device: DeviceClass,
        shape: Mapping[str, int],
        *,
        dtype: str | None = None,
        head_dim: int | tuple[int, int] | None = None,
    ) -> Answer:
        """Which schedule calls of one shape have on a class of GPU, and where it comes from.

        This needs no GPU.

        shape:   sizes B, Hq, Hkv, Sq and Skv.
        Errors:  A491 no target for the device; A632 a size is missing; those of `render`.
        """
        _require_sizes(shape)
        element, dims = self._decided(dtype, head_dim)
        lowered = self._lower(element, dims, targets.get(device.arch))
        return self._ask(lowered, shape, device, is_aligned=True)

    def render(
        self,
        target: str = _DEFAULT_CPU_TARGET,
        *,
        dtype: str | None = None,
        head_dim: int | tuple[int, int] | None = None,
        schedule: Schedule | None = None,
    ) -> Rendered:
        """The program and its CUDA text for a target, without compiling or running anything.

        schedule:  a complete one, as `find_schedule` gives it.
        """
        element, dims = self._decided(dtype, head_dim)
        return render_program(self.checked, element, dims, targets.get(target), schedule=schedule)

    # ---- one call, step by step ----

    def _call_in_full(
        self,
        q: Array,
        k: Array,
        v: Array,
        return_lse: bool,
        out: Array | None,
        layout: Layout,
        check: bool,
        named: Mapping[str, Any],
        call: Call | None,
    ) -> Array:
        """A call with all its checks; where it launches on a GPU, `call` gets a plan."""
        tensors, params = split_arguments(self.attention, named)
        binding, device = self._bind(q, k, v, tensors, params, layout)
        wanted = self._wanted(return_lse)
        out_view = None if out is None else view(out, "out", is_output=True)
        if out_view is not None:
            _check_out(out_view, _out_shape(binding, layout), binding)
        if check and _is_capturing(device, q):
            reason = "it waits for the launch, which would break the capture of a graph"
            raise AttnError(ReservedArgument(None, "check=True", reason))
        compiled = self._specialise_for(binding, device, is_checked=check)
        if not check and compiled.rendered is not None:
            self._say_what_has_no_map(compiled.program, binding)
        self._make_ready(compiled, device, binding, like=q)
        is_ahead = _may_launch_ahead(compiled.program, device, like=q)
        workspaces = due_workspaces(compiled.program, binding, with_ahead=is_ahead)
        new = {
            array: array.allocate(like=q)
            for array in self._new_arrays(wanted, binding, out, layout, workspaces)
        }
        arrays = {array.member: x for array, x in new.items()} | ({} if out is None else {"o": out})
        views = {name: view(x, name, is_output=True) for name, x in arrays.items()}
        views["o"] = _in_bhsd(views["o"], layout)
        if check and compiled.rendered is not None:
            report = allocate((1,), "int32", q)
            report[...] = 0
            views["report"] = view(report, "report", is_output=True)
        launched = self._run(compiled, binding, Outputs(**views), device, like=q)
        if "report" in views:
            self._raise_report(int(report[0]), binding)
        rendered = compiled.rendered
        if call is not None and is_ahead and launched is not None and rendered is not None:
            program, fields = rendered.program, rendered.arguments.fields
            boxes = program.boxes, program.tile_boxes
            done = DoneCall(launched, *boxes, fields, binding, new, out_view, wanted)
            self._plans.keep(call, done)
        results = tuple(arrays[name] for name in wanted)
        return results[0] if len(results) == 1 else results

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
        _require_choice("layout", layout, Layout)
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
            layout=layout,
            integers=self._integers,
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

    def _new_arrays(
        self,
        wanted: tuple[str, ...],
        binding: Binding,
        out: Array | None,
        layout: Layout,
        workspaces: Sequence[Workspace],
    ) -> list[NewArray]:
        """What a call allocates: its outputs, then its workspaces."""
        per_row = tuple(binding.sizes[n] for n in ("B", "Hq", "Sq"))
        new = [NewArray(name, per_row, "fp32") for name in wanted if name != "o"]
        if out is None:
            new.insert(0, NewArray("o", _out_shape(binding, layout), binding.dtype.name))
        return new + [NewArray(w.name, workspace_shape(w, binding), w.element) for w in workspaces]

    def _raise_report(self, number: int, binding: Binding) -> None:
        """Raise what a checked kernel reported, if anything."""
        if number:
            tensor = self.attention.tensors[number - 1]
            shape = binding.tensors[tensor.name].shape
            raise AttnError(ReadOutside(tensor.span, tensor.name, shape))

    def _specialise_for(
        self, binding: Binding, device: Device, *, is_checked: bool = False
    ) -> _Compiled:
        operands = {"q": binding.q, "k": binding.k, "v": binding.v}
        dims = binding.sizes["Dqk"], binding.sizes["Dv"]
        schedule = self._tuned(binding.dtype, dims, device, binding.sizes, operands, binding)
        compiled = self._specialise(
            binding.dtype, dims, device, operands, schedule=schedule, is_checked=is_checked
        )
        if schedule is None or device.index in compiled.loaded:
            return compiled
        if not _is_capturing(device, binding.q.owner):
            return compiled
        # Nothing can be loaded in a capture; what `prepare` has loaded serves as well.
        plain = self._specialise(binding.dtype, dims, device, operands, is_checked=is_checked)
        return plain if device.index in plain.loaded else compiled

    def _tuned(
        self,
        dtype: Element,
        dims: tuple[int, int],
        device: Device,
        sizes: Mapping[str, int],
        operands: Mapping[str, ArrayView] | None = None,
        binding: Binding | None = None,
    ) -> Schedule | None:
        """What tuning chooses for a call of these sizes; None where it chooses nothing."""
        target = self._target(device)
        if target is None or device.kind != "cuda" or self._tune == "off":
            return None
        known = self._class_of(device)
        if known is None or known.arch != target.name:
            return None  # `arch` asks for a text that is not the GPU's own
        lowered = self._lower(dtype, dims, target)
        is_aligned = operands is None or lowered.family.why_unaligned(operands) is None
        answer = self._ask(lowered, sizes, known, is_aligned=is_aligned)
        if isinstance(self._tune, int | float) and is_aligned and binding is not None:
            question = self._question(lowered, sizes, known, is_aligned=is_aligned)
            if self._search(question.problem, answer, lowered, binding, device):
                answer = self._ask(lowered, sizes, known, is_aligned=is_aligned)
        return answer.schedule

    def _search(
        self,
        problem: Problem,
        answer: Answer,
        lowered: Lowered,
        binding: Binding,
        device: Device,
    ) -> bool:
        """Measure schedules for a problem that has no record yet, once; whether it was done."""
        from attngen.tuning.call import Call, Subject
        from attngen.tuning.lookup import Grade
        from attngen.tuning.tune import cuda_machine, improve

        is_whole = binding.rows == (0, binding.sizes["Sq"])
        is_whole &= binding.keys == (0, binding.sizes["Skv"])
        if answer.grade is Grade.EXACT or problem in self._searched or not is_whole:
            return False
        if _is_capturing(device, binding.q.owner):
            return False
        self._searched.add(problem)
        dims, target = (binding.sizes["Dqk"], binding.sizes["Dv"]), lowered.target
        subject = Subject.of(self.unit, self.checked, binding.dtype, dims, target, self._consts)
        try:
            machine = cuda_machine(device.index)
            improve(subject, Call.of(binding), machine, float(self._tune))
        except AttnError as error:
            _say_once(f"{self.name}: {error.diagnostics[0].message()}")
            return False
        if self._lookup is not None:
            self._lookup.forget()
        return True

    def _class_of(self, device: Device) -> DeviceClass | None:
        """The class of a GPU; None, with a warning, where the driver does not tell."""
        if device.index not in self._classes:
            from attngen.tuning.device_class import DeviceClass

            try:
                self._classes[device.index] = DeviceClass.of(device)
            except RuntimeError as error:  # CuPy's own classes, whose home is private
                self._classes[device.index] = None
                _say_once(f"no tuning records for {device}: {error}")
        return self._classes[device.index]

    def _ask(
        self, lowered: Lowered, sizes: Mapping[str, int], device: DeviceClass, *, is_aligned: bool
    ) -> Answer:
        """`lowered` is what runs with the schedule as it is written."""
        from attngen.tuning.lookup import open_lookup

        self._lookup = lookup = self._lookup or open_lookup()
        attention, target = lowered.program.attention, lowered.target
        question = self._question(lowered, sizes, device, is_aligned=is_aligned)

        def choose(question: Question) -> Schedule | None:
            from attngen.tuning.model_choice import choose_by_model

            return choose_by_model(attention, question)

        answer = lookup.find(
            question,
            lambda s: reasons_against(attention, s, target),
            None if self._tune == "cached" else choose,
        )
        if answer.notes:
            _say_once(f"{self.name}: {'; '.join(answer.notes)}")
        return answer

    def _question(
        self, lowered: Lowered, sizes: Mapping[str, int], device: DeviceClass, *, is_aligned: bool
    ) -> Question:
        from attngen.tuning.lookup import Question
        from attngen.tuning.problem import LayoutClass, Problem

        attention = lowered.program.attention
        element, qk, v = attention.dtype, attention.head_dim_qk, attention.head_dim_v
        assert element is not None
        assert qk is not None
        assert v is not None
        op = self._operations.get((element.name, (qk, v)))
        if op is None:
            op = self._operations[element.name, (qk, v)] = digest_operation(attention)
        problem = Problem.of(
            element.name,
            {**sizes, "Dqk": qk, "Dv": v},
            device.sm_count,
            layout=LayoutClass.ALIGNED if is_aligned else LayoutClass.ANY,
        )
        return Question(op, problem, device, self.checked.schedule_for(lowered.target.name))

    def _specialise(
        self,
        dtype: Element,
        dims: tuple[int, int],
        device: Device,
        operands: Mapping[str, ArrayView] | None = None,
        *,
        schedule: Schedule | None = None,
        is_checked: bool = False,
    ) -> _Compiled:
        """What runs operands like these; without any, what runs aligned ones."""
        target = self._target(device)
        if target is None:
            key = _Key(dtype.name, dims, None, is_checked)
            return self._find_or_make(
                key, lambda: _Compiled(plan_for_numpy(self.checked, dtype, dims))
            )
        lowered, obstacle = self._lower_for(dtype, dims, target, operands, schedule)
        family, complete = lowered.family, lowered.program.schedule
        key = _Key(dtype.name, dims, target.name, is_checked, obstacle is None, complete)

        def make() -> _Compiled:
            rendered = render_lowered(lowered, is_checked=is_checked, is_aligned=key.is_aligned)
            if obstacle is not None:
                slower = f"{family.name} runs its slower text for any address and stride"
                _say_once(f"{self.name}: {slower}: {obstacle}")
            return _Compiled(rendered.program, rendered)

        return self._find_or_make(key, make)

    def _find_or_make(self, key: _Key, make: Callable[[], _Compiled]) -> _Compiled:
        found = self._compiled.get(key)
        if found is None:
            with self._lock:
                found = self._compiled.get(key)
                if found is None:
                    found = self._compiled[key] = make()
        return found

    def _lower_for(
        self,
        dtype: Element,
        dims: tuple[int, int],
        target: Target,
        operands: Mapping[str, ArrayView] | None,
        schedule: Schedule | None,
    ) -> tuple[Lowered, str | None]:
        """The program of the family that takes operands like these, or of the one that stands in.

        With it what stands against its text for aligned operands.
        """
        lowered = self._lower(dtype, dims, target, schedule=schedule)
        if operands is None or (obstacle := lowered.family.why_unaligned(operands)) is None:
            return lowered, None
        stand_in = lowered.family.stand_in
        if stand_in is None:
            return lowered, obstacle
        _say_once(f"{self.name}: {stand_in} stands in for {lowered.family.name}: {obstacle}")
        lowered = self._lower(dtype, dims, target, family=stand_in)
        return lowered, lowered.family.why_unaligned(operands)

    def _lower(
        self,
        dtype: Element,
        dims: tuple[int, int],
        target: Target,
        *,
        family: str | None = None,
        schedule: Schedule | None = None,
    ) -> Lowered:
        key = dtype.name, dims, target.name, family, schedule
        found = self._lowered.get(key)
        if found is None:
            with self._lock:
                found = self._lowered.get(key)
                if found is None:
                    found = lower_program(
                        self.checked, dtype, dims, target, family=family, schedule=schedule
                    )
                    if found.notes:
                        _say_once(f"{self.name}: {'; '.join(found.notes)}")
                    self._lowered[key] = found
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
        if self._arch is not None:
            return self._arch
        found = self._targets.get(device.index)
        if found is None:
            found = self._targets[device.index] = _target_of_gpu(device.index)
        return found

    def _make_ready(
        self,
        compiled: _Compiled,
        device: Device,
        binding: Binding | None = None,
        like: Array = None,
    ) -> None:
        """Build and load what a run on a device needs, before anything is allocated for it.

        Without a binding it is for calls of any size.  `like` is an array of the call, whose stream
        must not be capturing a graph.

        Errors:  A613 when it is.
        """
        if compiled.rendered is None or (like is not None and device.index in compiled.loaded):
            return
        if device.kind == "cpu":
            self._library(compiled, binding)
            return
        if like is not None and _is_capturing(device, like):
            raise AttnError(NotPrepared(None, compiled.rendered.launch.kernel, str(device)))
        from attngen.engines.cuda_engine import prepare_on_gpu

        prepare_on_gpu(compiled.program, self._module(compiled), device)
        compiled.loaded.add(device.index)

    def _say_what_has_no_map(self, program: Program, binding: Binding) -> None:
        for box in program.tile_boxes:
            reason = why_no_tile_map(box, binding.tensors[box.tensor])
            if reason is not None:
                slowly = f"`{box.tensor}` is copied by a warp, and not by tensor copies"
                _say_once(f"{self.name}: {slowly}: {reason}")

    def _run(
        self, compiled: _Compiled, binding: Binding, outputs: Outputs, device: Device, like: Array
    ) -> Launched | None:
        """What was queued on a GPU; None elsewhere, and for an empty problem."""
        if compiled.rendered is None:
            from attngen.engines.numpy_engine import run_in_numpy

            run_in_numpy(compiled.program, binding, outputs)
            return None
        if device.kind == "cuda":
            from attngen.engines.cuda_engine import launch_on_gpu

            module = self._module(compiled)
            stream = current_stream(device, like)
            return launch_on_gpu(
                compiled.rendered, module, binding, outputs, device=device, stream=stream
            )
        from attngen.engines.cpu_engine import run_on_host

        run_on_host(compiled.rendered, binding, outputs, self._library(compiled, binding))
        return None

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

    def _library(self, compiled: _Compiled, binding: Binding | None) -> Path:
        """One that is there already and optimised enough, or a new one."""
        from attngen.cpu.build import build_library
        from attngen.engines.cpu_engine import optimization_for

        assert compiled.rendered is not None
        least = optimization_for(compiled.rendered, binding)
        with compiled.lock:
            found = max(compiled.libraries, default=-1)
            if found < least:
                source, folder = compiled.rendered.source, options.host_cache_dir()
                library = build_library(source, cache_dir=folder, optimization=least)
                compiled.libraries[least] = library
            return compiled.libraries[max(found, least)]

    def _module(self, compiled: _Compiled) -> Any:
        if compiled.module is None:
            from attngen.backend.launch import CudaModule
            from attngen.engines.cuda_engine import compile_rendered

            assert compiled.rendered is not None
            with compiled.lock:
                if compiled.module is None:
                    target = compiled.rendered.target.name
                    cubin = compile_rendered(compiled.rendered, self._text).binary
                    compiled.module = CudaModule(cubin, name=f"{self.name} for {target}")
        return compiled.module

    def _decided(
        self, dtype: str | None, head_dim: int | tuple[int, int] | None
    ) -> tuple[Element, tuple[int, int]]:
        """What `prepare` and `render` compile for: as declared, given to `compile`, or here."""
        dtype = _agreed("dtype", self._dtype, dtype)
        dims = _agreed("head_dim", self._head_dims, _pair(head_dim))
        attention = self.attention
        if (dtype, dims) != (self._dtype, self._head_dims):
            attention = check(self.unit, consts=self._consts, dtype=dtype, head_dim=dims).attention
        if attention.dtype is None:
            missing = "dtype"
        elif attention.head_dim_qk is None or attention.head_dim_v is None:
            missing = "head_dim"
        else:
            return attention.dtype, (attention.head_dim_qk, attention.head_dim_v)
        reason = f"`{self.name}` leaves it open, so it must be given here"
        raise AttnError(ReservedArgument(None, missing, reason))

    def _sink(self, compiled: _Compiled, binding: Binding, device: Device, like: Array) -> Array:
        """The sink's logit per (batch, head), for a later `finalize`: a row's LSE without keys."""
        B, Hq, Dv = (binding.sizes[n] for n in ("B", "Hq", "Dv"))
        (begin, end), (key, _) = binding.rows, binding.keys
        lse = allocate((B, Hq, 1), "fp32", like)
        if begin < end:
            one_row = replace(binding, rows=(begin, begin + 1), keys=(key, key))
            o = allocate((B, Hq, 1, Dv), binding.dtype.name, like)
            written = {"o": o, "lse": lse}
            workspaces = due_workspaces(compiled.program, one_row, with_ahead=False)
            written |= _allocate(workspaces, one_row, like)
            self._run(compiled, one_row, Outputs(**_views(written)), device, like)
        return _to_array(lse, device)


class _State(NamedTuple):
    """Arrays of a row state."""

    m: Array
    l: Array  # noqa: E741
    acc: Array

    @staticmethod
    def allocate(rows: tuple[int, int, int], head_dim_v: int, like: Array) -> _State:
        return _State(
            allocate(rows, "fp32", like),
            allocate(rows, "fp32", like),
            allocate((*rows, head_dim_v), "fp32", like),
        )

    @property
    def arrays(self) -> dict[str, Array]:
        """By the names of the argument struct."""
        return {f"state_{name}": array for name, array in self._asdict().items()}


def _allocate(workspaces: Sequence[Workspace], binding: Binding, like: Array) -> dict[str, Array]:
    """Scratch arrays of one call, by name."""
    return {w.name: allocate(workspace_shape(w, binding), w.element, like) for w in workspaces}


def _may_launch_ahead(program: Program, device: Device, like: Array) -> bool:
    """Whether launches that a call can do without may run: their workspaces go with the call."""
    has_ahead = any(launch.when for launch in program.launches)
    return not has_ahead or not _is_capturing(device, like) or may_be_freed_in_capture(like)


def _views(arrays: Mapping[str, Array]) -> dict[str, ArrayView]:
    return {name: view(x, name, is_output=True) for name, x in arrays.items()}


def _require_choice(name: str, value: Any, choices: Any) -> None:
    if value not in get_args(choices):
        reason = f"it is one of {', '.join(get_args(choices))}"
        raise AttnError(ReservedArgument(None, f"{name}={value!r}", reason))


def _require_sizes(shape: Mapping[str, int]) -> None:
    """A shape names every size of a call but the head dims."""
    names = ("B", "Hq", "Hkv", "Sq", "Skv")
    if not all(is_int(shape.get(name)) and shape[name] >= 0 for name in names):
        reason = f"it has a size for each of {', '.join(names)}"
        raise AttnError(ReservedArgument(None, "shape", reason))


def _require_tune(tune: Any) -> None:
    """A word, or seconds."""
    if isinstance(tune, int | float) and not isinstance(tune, bool) and 0 < tune < math.inf:
        return
    words = get_args(get_args(Tune)[0])
    if tune not in words:
        reason = f"it is one of {', '.join(words)}, or a number of seconds"
        raise AttnError(ReservedArgument(None, f"tune={tune!r}", reason))


def _pair(head_dim: int | tuple[int, int] | None) -> tuple[int, int] | None:
    """(Dqk, Dv)."""
    match head_dim:
        case None:
            return None
        case (qk, v) if is_int(qk) and is_int(v):
            return int(qk), int(v)
        case _ if is_int(head_dim):
            return int(head_dim), int(head_dim)
    reason = "it is an integer, or a pair of them for q and k, and for v"
    raise AttnError(ReservedArgument(None, f"head_dim={head_dim!r}", reason))


def _agreed(name: str, of_compile: Any, given: Any) -> Any:
    """What `compile` was given holds for the whole kernel."""
    if of_compile is not None and given not in (None, of_compile):
        reason = f"the kernel was compiled for {name}={of_compile}"
        raise AttnError(ReservedArgument(None, f"{name}={given}", reason))
    return given if of_compile is None else of_compile


def _in_bhsd(x: ArrayView, layout: Layout) -> ArrayView:
    """The same array seen as [B, H, S, D]."""
    if layout == "bhsd" or len(x.shape) != 4:
        return x
    b, s, h, d = range(4)
    order = (b, h, s, d)
    return x._replace(
        shape=tuple(x.shape[i] for i in order), strides=tuple(x.strides[i] for i in order)
    )


def _out_shape(binding: Binding, layout: Layout) -> tuple[int, ...]:
    b, h, s, d = (binding.sizes[n] for n in ("B", "Hq", "Sq", "Dv"))
    return (b, h, s, d) if layout == "bhsd" else (b, s, h, d)


def _check_out(out: ArrayView, shape: tuple[int, ...], binding: Binding) -> None:
    dtype = binding.dtype.name
    if out.shape != shape or out.dtype != dtype:
        has = f"{tuple(out.shape)} of {out.dtype}"
        raise AttnError(ShapeMismatch(None, "out", has, f"{shape} of {dtype}"))
    find_common_device({"q": binding.q, "out": out})
    inputs = {"q": binding.q, "k": binding.k, "v": binding.v, **binding.tensors}
    if (name := find_overlap(out, inputs)) is not None:
        raise AttnError(OutputOverlaps(None, name))


def _to_array(x: Array, device: Device) -> Array:
    """NumPy for CPU memory, CuPy for a GPU: the libraries that row states merge with."""
    if device.kind == "cpu":
        return x if isinstance(x, np.ndarray) else np.from_dlpack(x)
    import cupy

    return x if isinstance(x, cupy.ndarray) else cupy.from_dlpack(x)


def _is_capturing(device: Device, like: Array) -> bool:
    """Whether the stream that a call would use is recorded into a CUDA graph just now."""
    if device.kind == "cpu":
        return False
    from attngen.backend.launch import load_driver

    return load_driver().is_capturing(current_stream(device, like))


def _target_of_gpu(index: int) -> Target:
    from attngen.backend.launch import load_driver
    from attngen.backend.nvrtc import select_target

    driver = load_driver()
    count = driver.count_devices()
    if not (is_int(index) and 0 <= index < count):
        reason = f"there is no device {index!r} among {count} CUDA device(s)"
        raise AttnError(GpuUnavailable(None, reason, "devices are counted from 0"))
    return select_target(driver.capability(index))


_said: set[str] = set()


def _say_once(text: str) -> None:
    if text not in _said:
        _said.add(text)
        warnings.warn(text, stacklevel=_depth_of_caller())


def _depth_of_caller() -> int:
    """Frames from `_say_once` to the first one outside of this module, as `warn` counts them."""
    frame, depth = sys._getframe(1), 1
    while frame.f_back is not None and frame.f_code.co_filename == __file__:
        frame, depth = frame.f_back, depth + 1
    return depth
