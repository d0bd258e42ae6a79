"""`attngen bench`: time a variant beside the attention libraries that are installed."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, Final, Literal

import click
import numpy as np

from attngen.api import Kernel
from attngen.bench.libraries import LIBRARIES
from attngen.bench.machines import Machine, open_machine
from attngen.bench.spec import OWN, Found, SpecProblem, time_spec
from attngen.bench.timing import Plan
from attngen.cli.console import progress, say, say_json, table
from attngen.cli.errors import BadOption
from attngen.cli.files import require_file
from attngen.cli.inputs import make_operands, read_inputs
from attngen.cli.option_types import (
    Names,
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
from attngen.cli.problem import make_problem
from attngen.cpu.build import find_compiler
from attngen.diagnostics.diagnostic import AttnError
from attngen.frontend.load import load_file

__all__ = ["command"]

DEVICES: Final = ("cuda", "cpu", "numpy")
DEFAULT_SIZES: Final[Mapping[str, Mapping[str, int]]] = {
    "cuda": {"B": 2, "Hq": 16, "Sq": 8192},
    "cpu": {"B": 1, "Hq": 2, "Sq": 64},
    "numpy": {"B": 1, "Hq": 2, "Sq": 64},
}
_DRY_PLAN: Final = Plan(min_rounds=3, max_rounds=3, sample_ms=0.0)
_NAMES: Final = {
    OWN: "attngen",
    "fa2": "FlashAttention-2",
    "fa3": "FlashAttention-3",
    "fa4": "FlashAttention-4",
    "cudnn": "cuDNN",
    "flex": "FlexAttention, Triton",
    "flex_flash": "FlexAttention, FLASH",
}


@click.command(
    "bench",
    epilog="Example:  attngen bench gemma2_local.attn --shape B=2,Hq=16,Hkv=8,Sq=8192",
)
@spec_argument
@shape_option
@dtype_option
@head_dim_option
@consts_option
@click.option(
    "--device", type=click.Choice(DEVICES), default="cuda", show_default=True,
    help="cuda: a GPU; cpu, numpy: a dry run, whose times mean nothing.",
)  # fmt: skip
@inputs_option
@input_option
@set_option
@click.option(
    "--peers", type=Names(LIBRARIES), default=LIBRARIES, metavar="NAME,…",
    help=f"The libraries beside it, of {', '.join(LIBRARIES)}.",
)  # fmt: skip
@seed_option
@schedule_option
@click.option("--json", "as_json", is_flag=True, help="The result for tools.")
def command(
    spec: Path,
    shape: Mapping[str, int] | None,
    dtype: str | None,
    head_dim: tuple[int, int] | None,
    consts: tuple[tuple[str, Any], ...],
    device: Literal["cuda", "cpu", "numpy"],
    archive: Path | None,
    files: tuple[tuple[str, Path], ...],
    values: tuple[tuple[str, Any], ...],
    peers: tuple[str, ...],
    seed: int,
    schedule: str | None,
    as_json: bool,
) -> int:
    """Time a file beside the attention libraries that are installed.

    FlexAttention gets the same mask and scores; the others compute full or causal attention of the
    same shape.  Results are checked first; times are medians of interleaved samples.
    The exit code is 1 when attngen's output is outside its error bound.
    """
    require_file(spec)
    machine = _open(device)
    given_consts = unique("-D", consts)
    kernel = Kernel(load_file(spec), given_consts, dtype, head_dim, None, device, schedule)
    inputs = read_inputs(kernel.attention, archive, unique("--input", files))
    with progress("making inputs"):
        made = make_problem(
            kernel.attention,
            shape=shape or {},
            values=unique("--set", values),
            inputs=inputs,
            defaults=DEFAULT_SIZES[device],
            seed=seed,
        )
        operands = make_operands(made, inputs, seed=seed)
        # In memory [B, S, H, D], which every library reads without a copy.
        q, k, v = (
            np.ascontiguousarray(operands[name].array.swapaxes(1, 2)) for name in ("q", "k", "v")
        )
    problem = SpecProblem(
        kernel,
        given_consts,
        made.dtype.name,
        made.sizes,
        q,
        k,
        v,
        {name: np.ascontiguousarray(given.array) for name, given in made.tensors.items()},
        made.params,
    )
    plan = Plan() if device == "cuda" else _DRY_PLAN
    with progress(f"timing on {machine.name}"):
        found = time_spec(problem, machine, peers, plan)
    if as_json:
        say_json(_as_json(problem, machine, found))
    else:
        _say(spec, problem, machine, found)
    return int(found[0].times is None)


def _open(device: Literal["cuda", "cpu", "numpy"]) -> Machine:
    """Errors:  A711 no PyTorch or no GPU; A541 no C++ compiler."""
    if device == "cpu":
        find_compiler()
    try:
        return open_machine("cuda" if device == "cuda" else "cpu")
    except RuntimeError as error:
        advice = "--device cpu is a dry run, whose times mean nothing"
        raise AttnError(BadOption(None, "--device", device, str(error), advice)) from None


# ---- the result ----------------------------------------------------------------------------------


def _as_json(problem: SpecProblem, machine: Machine, found: Sequence[Found]) -> dict[str, Any]:
    return {
        "format": "attngen-bench/1",
        "attention": problem.kernel.name,
        "device": machine.name,
        "dtype": problem.dtype,
        "sizes": dict(problem.sizes),
        "params": dict(problem.params),
        "results": [each.as_json(problem.sizes) for each in found],
    }


def _say(spec: Path, problem: SpecProblem, machine: Machine, found: Sequence[Found]) -> None:
    sizes = ", ".join(f"{name} {size}" for name, size in problem.sizes.items())
    say((f"attention {problem.kernel.name}", "bold"), f"  {spec}")
    say(f"  {problem.dtype}, {sizes}")
    if machine.kind == "cpu":
        say("  a dry run on the CPU: these times mean nothing")
    own = found[0]
    groups = {
        "spec": f"the spec itself, on {machine.name}",
        "causal": "causal attention of the same shape, and nothing more",
        "full": "full attention of the same shape, and nothing more",
    }
    for computes, title in groups.items():
        lines = [_line(e, own, problem.sizes) for e in found if e.computes == computes and e.times]
        if lines:
            say()
            say(title)
            for line in table(lines):
                say(line)
    missing = [[_NAMES[e.library], e.reason or ""] for e in found if e.times is None]
    if missing:
        say()
        say("not timed")
        for line in table(missing):
            say(line)


def _line(each: Found, own: Found, sizes: Mapping[str, int]) -> list[str]:
    assert each.times is not None
    speed = each.tflops(sizes)
    cells = [
        _NAMES[each.library],
        f"{each.times.ms:.4f} ms",
        f"{speed:.1f} TFLOP/s",
    ]
    if each is own:
        cells.append(each.how)
    elif own.times is not None:
        cells.append(f"attngen is {each.times.ms / own.times.ms:.2f} times as fast")
    if each.mask_ms is not None:
        cells.append(f"and its block mask {each.mask_ms:.2f} ms, not counted")
    return cells
