"""`attngen run`: run a variant on real or made-up inputs, and prove the result."""

from __future__ import annotations

import io
import time
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final, TypeAlias

import click

from attngen.cli.console import note, progress, say, table
from attngen.cli.option_types import (
    FILE_ASSIGNMENT,
    LIST_ASSIGNMENT,
    ROWS,
    consts_option,
    dtype_option,
    head_dim_option,
    schedule_option,
    shape_option,
    spec_argument,
    unique,
)

if TYPE_CHECKING:
    from attngen.api import Kernel
    from attngen.cli.compare import Comparison, Errors
    from attngen.cli.problem import Input, Problem

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
@click.option(
    "--inputs", "archive", type=click.Path(path_type=Path), metavar="FILE.npz",
    help="Arrays by name: q, k, v, tensors, params.",
)  # fmt: skip
@click.option(
    "--input", "files", type=FILE_ASSIGNMENT, multiple=True,
    help="A .npy file for one array; wins over --inputs.  May be repeated.",
)  # fmt: skip
@click.option(
    "--set", "values", type=LIST_ASSIGNMENT, multiple=True,
    help="A value for a param, or one for a whole tensor.  May be repeated.",
)  # fmt: skip
@click.option(
    "--save", type=click.Path(path_type=Path), metavar="FILE.npz",
    help="Write the outputs; bf16 is widened to float32.",
)  # fmt: skip
@click.option("--seed", type=click.IntRange(0), default=0, help="For inputs that are made up.")
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
    from how the file uses them.  The exit code is 1 when an output is not within the error
    bound that docs/numbers.md explains.
    """
    from attngen.api import Kernel
    from attngen.cli.compare import choose_rows, compare
    from attngen.cli.files import require_file
    from attngen.cli.inputs import make_operands, read_inputs, to_bhsd
    from attngen.cli.problem import make_problem
    from attngen.frontend.load import load_file

    require_file(spec)
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
    say((f"attention {kernel.name}", "bold"), f"  {spec}, {problem.dtype.name}")
    for line in table(_inputs_in_words(problem, operands, layout)):
        say(line)
    arrays = {name: given.array for name, given in operands.items()}
    tensors = {name: given.array for name, given in problem.tensors.items()}
    with progress(f"running on {device_name}"):
        start = time.perf_counter()
        outputs = _run(kernel, problem, arrays, tensors, covered, layout, engine, rows is not None)
        seconds = time.perf_counter() - start
    target = next(iter(kernel._compiled.values())).rendered
    for text in target.notes:
        note(text)
    say(f"  ran on {device_name} in {seconds:.2f} s, compiling included: {_schedule(target)}")
    if save is not None:
        _save(save, outputs, layout)
    chosen = choose_rows(problem.sizes, covered)
    with progress("comparing with the oracle") as shown:
        found = compare(
            kernel.unit, (arrays["q"], arrays["k"], arrays["v"]), outputs,
            tensors=tensors, params=problem.params, consts=given_consts,
            dtype=problem.dtype.name, covered=covered, rows=chosen, tell=shown.update,
        )  # fmt: skip
    _say_comparison(found, covered)
    return 0 if found.is_right else 1
