"""`attngen run`: run a variant on real or made-up inputs, and prove the result."""

from __future__ import annotations

import io
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, Final, Literal, TypeAlias

import click
import numpy as np

from attngen.api import Kernel
from attngen.backend.device import numpy_dtype
from attngen.backend.errors import GpuUnavailable
from attngen.backend.launch import load_driver
from attngen.cli.compare import Comparison, Errors, choose_rows, compare
from attngen.cli.console import progress, say, table
from attngen.cli.errors import BadOption, CannotMake
from attngen.cli.files import require_file, require_writable, write_together
from attngen.cli.inputs import make_operands, read_inputs, to_bhsd
from attngen.cli.option_types import (
    ROWS,
    consts_option,
    dtype_option,
    head_dim_option,
    input_option,
    inputs_option,
    schedule_option,
    seed_option,
    set_option,
    shape_option,
    spec_argument,
    unique,
)
from attngen.cli.problem import Input, Problem, make_problem
from attngen.cpu.build import find_compiler
from attngen.diagnostics.diagnostic import AttnError
from attngen.executor.errors import LengthOutside, ReadOutside
from attngen.frontend.load import load_file
from attngen.ir.types import ScalarType
from attngen.oracle.errors import IndexOutside
from attngen.oracle.errors import LengthOutside as OracleLengthOutside

__all__ = ["command"]

Array: TypeAlias = Any

DEVICES: Final = ("auto", "cuda", "cpu", "numpy")
DEFAULT_SIZES: Final[Mapping[str, int]] = {"B": 2, "Hq": 4, "Sq": 128}


@click.command(
    "run",
    epilog="Example:  attngen run causal.attn --shape B=2,Hq=8,Sq=512,Skv=512 --dtype bf16"
    " --head-dim 64 --device cpu",
)
@spec_argument
@shape_option
@dtype_option
@head_dim_option
@consts_option
@click.option(
    "--device", type=click.Choice(DEVICES), default="auto", show_default=True,
    help="cuda: a GPU; cpu: the CUDA text on the CPU; numpy: the loop nest in NumPy.",
)  # fmt: skip
@inputs_option
@input_option
@set_option
@click.option(
    "--save", type=click.Path(path_type=Path), metavar="FILE.npz",
    help="Write the outputs; bf16 is widened to float32.",
)  # fmt: skip
@seed_option
@click.option("--rows", type=ROWS, help="Compute only these query rows.")
@click.option(
    "--layout", type=click.Choice(("bhsd", "bshd")), default="bhsd", show_default=True,
    help="Order of batch, head and token in q, k, v and o.",
)  # fmt: skip
@schedule_option
@click.option("--arch", help="The target; by default that of the GPU.")
def command(
    spec: Path,
    shape: Mapping[str, int] | None,
    dtype: str | None,
    head_dim: tuple[int, int] | None,
    consts: tuple[tuple[str, Any], ...],
    device: str,
    archive: Path | None,
    files: tuple[tuple[str, Path], ...],
    values: tuple[tuple[str, Any], ...],
    save: Path | None,
    seed: int,
    rows: tuple[int, int] | None,
    layout: str,
    schedule: str | None,
    arch: str | None,
) -> int:
    """Run a file on inputs from files or made up, and compare with a float64 oracle.

    Inputs that no file has are made up: normal q, k and v, and tensors with valid values,
    from how the file uses them.  The exit code is 1 when an output is outside its error bound.
    """
    require_file(spec)
    if save is not None:
        require_writable(save)
    given_consts = unique("-D", consts)
    engine, device_name = _choose_device(device)
    kernel = Kernel(load_file(spec), given_consts, dtype, head_dim, arch, engine, schedule)
    attention = kernel.attention
    inputs = to_bhsd(read_inputs(attention, archive, unique("--input", files)), layout)
    with progress("making inputs"):
        problem = make_problem(
            attention,
            shape=shape or {},
            values=unique("--set", values),
            inputs=inputs,
            defaults=DEFAULT_SIZES,
            seed=seed,
        )
        covered = _check_rows(rows, problem.sizes["Sq"])
        operands = make_operands(problem, inputs, seed=seed)
    say((f"attention {kernel.name}", "bold"), f"  {spec}")
    for line in table(_inputs_in_words(problem, operands)):
        say(line)
    part = None if rows is None else covered
    start = time.perf_counter()
    with progress(f"running on {device_name}"):
        try:
            outputs = _run(kernel, problem, operands, engine, layout, part)
        except AttnError as error:
            raise _explain(error, problem) from None
    seconds = time.perf_counter() - start
    say(f"  {'ran on':<8}{device_name}, {_how(kernel)}; {seconds:.2f} s with compilation")
    if save is not None:
        _save(save, outputs, layout)
    with progress("comparing with the oracle") as shown:
        try:
            found = compare(
                kernel.unit,
                {name: given.array for name, given in operands.items()},
                outputs,
                tensors={name: given.array for name, given in problem.tensors.items()},
                params=problem.params,
                consts=given_consts,
                dtype=problem.dtype.name,
                covered=covered,
                rows=choose_rows(problem.sizes, covered),
                tell=shown.update,
            )
        except AttnError as error:
            raise _explain(error, problem) from None
    _say_comparison(found, covered)
    return 0 if found.is_right else 1


def _choose_device(device: str) -> tuple[Literal["cuda", "cpu", "numpy"], str]:
    """The engine, and the device in words.

    Errors:  A611 no GPU, A541 no C++ compiler, where one was asked for.
    """
    if device in ("auto", "cuda"):
        try:
            return "cuda", _name_gpu()
        except AttnError:
            if device == "cuda":
                raise
    if device in ("auto", "cpu"):
        try:
            find_compiler()
            return "cpu", "the CPU (the CUDA text, one fiber a thread)"
        except AttnError:
            if device == "cpu":
                raise
    return "numpy", "the CPU (the loop nest in NumPy)"


def _name_gpu() -> str:
    if load_driver().count_devices() == 0:
        raise AttnError(GpuUnavailable(None, "there is no CUDA device", None))
    import cupy

    properties = cupy.cuda.runtime.getDeviceProperties(cupy.cuda.runtime.getDevice())
    name = properties["name"]
    return name.decode("utf-8", "replace") if isinstance(name, bytes) else str(name)


def _check_rows(rows: tuple[int, int] | None, size: int) -> tuple[int, int]:
    if rows is None:
        return 0, size
    begin, end = rows
    if not begin <= end <= size:
        problem = f"this is no range of the rows [0, {size})"
        raise AttnError(BadOption(None, "--rows", f"{begin}:{end}", problem))
    return rows


def _inputs_in_words(problem: Problem, operands: Mapping[str, Input]) -> list[list[str]]:
    lines = []
    for name, given in {**operands, **problem.tensors}.items():
        shape = ", ".join(map(str, given.array.shape))
        tensor = next((t for t in problem.attention.tensors if t.name == name), None)
        element = problem.dtype if tensor is None else tensor.element
        lines.append([name, f"{element.name}[{shape}]", given.origin])
    lines += [[name, str(value), "param"] for name, value in problem.params.items()]
    return lines


# ---- running -----------------------------------------------------------------------------------


def _run(
    kernel: Kernel,
    problem: Problem,
    operands: Mapping[str, Input],
    engine: str,
    layout: Any,
    part: tuple[int, int] | None,
) -> dict[str, Array]:
    """Outputs as NumPy arrays [B, Hq, rows, …] of all rows, or of a part of them."""
    move, fetch = _movers(engine)
    # An array that came in another layout was turned by a view, and is turned back by one.
    turned = [_turn(operands[name].array, layout) for name in "qkv"]
    q, k, v = (move(array) for array in turned)
    named = {name: move(given.array) for name, given in problem.tensors.items()}
    named |= problem.params
    has_lse = kernel.attention.row_state.lse is not None
    if part is not None:
        state = kernel.partial(q, k, v, q_range=part, layout=layout, **named)
        o, lse = state.finalize()
        outputs = {"o": fetch(o).astype(numpy_dtype(problem.dtype.name))}
        if lse is not None:
            outputs["lse"] = fetch(lse)
        if "row_max" in kernel.attention.outputs:
            outputs["row_max"] = fetch(state.m)
        return outputs
    result = kernel(q, k, v, return_lse=has_lse, layout=layout, **named)
    results = result if isinstance(result, tuple) else (result,)
    names = kernel.attention.outputs
    if has_lse and "lse" not in names:
        names = (*names, "lse")
    outputs = {name: fetch(array) for name, array in zip(names, results, strict=True)}
    outputs["o"] = _turn(outputs["o"], layout)
    return outputs


def _movers(engine: str) -> tuple[Callable[[Array], Array], Callable[[Array], Array]]:
    """How arrays get to the device and back."""
    if engine != "cuda":
        return (lambda array: array), np.asarray
    import cupy

    return cupy.asarray, cupy.asnumpy


def _turn(array: Array, layout: str) -> Array:
    """[B, H, S, D] to the layout, or back."""
    return array if layout == "bhsd" else np.swapaxes(array, 1, 2)


def _explain(error: AttnError, problem: Problem) -> AttnError:
    """The same error, or, when a made-up tensor may be to blame, one that says so."""
    blamed = (IndexOutside, ReadOutside, LengthOutside, OracleLengthOutside)
    first = error.diagnostics[0]
    if not isinstance(first, blamed):
        return error
    made = [
        problem.attention.tensor(name)
        for name, given in problem.tensors.items()
        if given.origin.startswith("made")
    ]
    read = getattr(first, "tensor", None)
    # The tensor that is read outside of itself is too small, or another holds a wrong index.
    guilty = [t for t in made if t.name == read] or [t for t in made if _is_integer(t)]
    if not guilty:
        return error
    reason = "with these sizes it is read outside of its shape"
    if read not in {tensor.name for tensor in guilty}:
        reason = first.message()
    errors = (CannotMake(t.span, t.name, reason, ", or other sizes") for t in guilty)
    return AttnError(*errors)


def _is_integer(tensor: Any) -> bool:
    return bool(tensor.element.scalar is ScalarType.INT)


def _how(kernel: Kernel) -> str:
    """Family and schedule of what ran."""
    program = kernel.programs[-1]
    schedule, launch = program.schedule, program.main
    family = "" if launch.family == "numpy" else f"{launch.family}, "
    return (
        f"{family}loop {schedule.loop.value}, passes {schedule.passes.value},"
        f" tile q = {launch.tiles.tile_q}, kv = {launch.tiles.tile_kv}"
    )


def _save(path: Path, outputs: Mapping[str, Array], layout: str) -> None:
    """The outputs as one `.npz`, written whole."""
    arrays = {}
    for name, array in outputs.items():
        turned = _turn(array, layout) if name == "o" else array
        is_bf16 = turned.dtype.name == "bfloat16"  # a type that `numpy.load` alone does not know
        arrays[name] = turned.astype(np.float32) if is_bf16 else turned
    buffer = io.BytesIO()
    np.savez(buffer, **arrays)
    write_together({path: buffer.getvalue()})
    say(f"  {'saved':<8}{path}: {', '.join(arrays)}")


# ---- the result --------------------------------------------------------------------------------


def _say_comparison(found: Comparison, covered: tuple[int, int]) -> None:
    count = covered[1] - covered[0]
    if len(found.rows) == count:
        rows = f"all {count} rows"
    else:
        rows = f"{len(found.rows)} of {count} rows, evenly spaced,"
    share = f"{found.visible:,} of {found.pairs:,} pairs attend"
    empty = f"; {found.empty_rows} rows see no key" if found.empty_rows else ""
    say()
    say(f"compared {rows} with the float64 oracle: {share}{empty}")
    for line in table([_errors_in_words(name, errors) for name, errors in found.errors.items()]):
        say(line)
    if found.is_right:
        say(("right", "bold green"), ": every element is within its bound")
        return
    for name, errors in found.errors.items():
        if errors.outside:
            say(("wrong", "bold red"), f": {errors.outside} of {errors.count} elements of {name}"
                " are outside their bound")  # fmt: skip


def _errors_in_words(name: str, errors: Errors) -> list[str]:
    if errors.worst is None:
        return [name, "no elements"]
    place = ", ".join(
        f"{axis} {i}" for axis, i in zip(("b", "h", "row", "d"), errors.worst, strict=False)
    )
    value, right = errors.worst_values
    return [
        name,
        f"max error {errors.largest:.2e}",
        f"rms {errors.rms:.2e}",
        f"{errors.fraction:.1%} of the bound at [{place}]: {value:.6g}, right is {right:.6g}",
    ]
