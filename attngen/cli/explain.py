"""`attngen explain`: what a variant computes, which pairs attend, and what a kernel costs."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any, Final, final

import click

from attngen import targets
from attngen.analysis.cubes import DECIDED_BY_THE_KERNEL
from attngen.analysis.key_bounds import split_mask
from attngen.analysis.key_ranges import derive_key_ranges
from attngen.analysis.tile_classes import classify_tiles
from attngen.analysis.tile_map import TileMap
from attngen.api import Kernel
from attngen.api import compile as compile_spec
from attngen.backend.nvrtc import spills_from_log
from attngen.cli.conditions import condition_rows, range_rows, unknown_parts
from attngen.cli.console import can_show, progress, say, table
from attngen.cli.errors import BadOption
from attngen.cli.files import require_file, require_writable, write_together
from attngen.cli.inputs import read_inputs
from attngen.cli.option_types import (
    Names,
    consts_option,
    dtype_option,
    head_dim_option,
    input_option,
    schedule_option,
    seed_option,
    set_option,
    shape_option,
    spec_argument,
    unique,
)
from attngen.cli.pairs import CELLS, Count, Pairs, count_pairs, draw_rows
from attngen.cli.problem import Problem, make_problem
from attngen.cli.tile_svg import draw_svg
from attngen.cli.tiles import TileMaps, count_rows, draw_map, make_maps, remarks
from attngen.compiler import Rendered, render_program
from attngen.diagnostics.diagnostic import AttnError, Diagnostic
from attngen.engines.cuda_engine import compile_rendered, resources_of
from attngen.frontend import ast
from attngen.frontend.format import format_expr
from attngen.ir.attention import Param
from attngen.ir.printer import print_expr
from attngen.kernels import all_families
from attngen.kernels.base import list_arrays
from attngen.record import record
from attngen.targets.base import Target
from attngen.tuning.device_class import DeviceClass
from attngen.tuning.space import describe

__all__ = ["command"]

DEFAULT_TARGETS: Final = ("sm_80", "sm_86", "sm_89", "sm_90a", "sm_100a", "sm_120")
DEFAULT_SIZES: Final[Mapping[str, int]] = {"B": 1, "Hq": 8, "Sq": 1024}


@click.command(
    "explain",
    epilog="Example:  attngen explain prefix.attn --shape B=2,Hq=16,Sq=8192,Skv=8192 --set plen=5",
)
@spec_argument
@shape_option
@click.option(
    "--rows", type=click.IntRange(0, 200), default=12, show_default=True,
    help="So many rows of the mask are drawn.",
)  # fmt: skip
@dtype_option
@head_dim_option
@consts_option
@set_option
@input_option
@schedule_option
@click.option(
    "--arch", "archs", type=Names(), default=",".join(DEFAULT_TARGETS), show_default=True,
    help="Targets.",
)  # fmt: skip
@click.option(
    "--device", metavar="NAME",
    help="Say which schedule calls of this shape get on a GPU, such as h200, and why.",
)  # fmt: skip
@click.option(
    "--svg", type=click.Path(path_type=Path), metavar="FILE",
    help="Write the map of tiles as a picture.",
)  # fmt: skip
@click.option("--no-compile", is_flag=True, help="Do not ask the CUDA compiler for registers.")
@seed_option
def command(
    spec: Path,
    shape: Mapping[str, int] | None,
    rows: int,
    dtype: str | None,
    head_dim: tuple[int, int] | None,
    consts: tuple[tuple[str, Any], ...],
    values: tuple[tuple[str, Any], ...],
    files: tuple[tuple[str, Path], ...],
    schedule: str | None,
    archs: tuple[str, ...],
    device: str | None,
    svg: Path | None,
    no_compile: bool,
    seed: int,
) -> int:
    """Say what a file computes, draw its mask, and count the work of one problem.

    What is left open is made up, and said: sizes, the dtype, captured tensors.
    """
    require_file(spec)
    if svg is not None:
        require_writable(svg)
    chosen = [targets.get(name) for name in archs]
    known = None if device is None else DeviceClass.named(device)
    kernel = compile_spec(
        spec, consts=unique("-D", consts), dtype=dtype, head_dim=head_dim, schedule=schedule
    )
    attention = kernel.attention
    inputs = read_inputs(attention, None, unique("--input", files))
    say((f"attention {kernel.name}", "bold"), f"  {spec}")
    _say_block("computes", _computes(kernel))
    given = {*dict(values), *inputs}
    missing = [p for p in attention.params if p.default is None and p.name not in given]
    if missing:
        needs = " ".join(f"--set {param.name}=…" for param in missing)
        _say_block("mask", [[f"it needs a value: pass {needs}"]])
        values += tuple((p.name, _any_value(p)) for p in missing)
    problem = make_problem(
        attention,
        shape=shape or {},
        values=unique("--set", values),
        inputs=inputs,
        defaults=DEFAULT_SIZES,
        seed=seed,
    )
    _say_block("for", _problem(problem, kernel))
    count = None
    if not missing:
        try:
            pairs = Pairs(problem)
            _draw(pairs, problem, rows)
            count = _count(pairs, problem)
        except AttnError as error:
            _say_block("mask", [["it cannot be drawn:"]])
            for diagnostic in error.diagnostics:
                say(f"  {diagnostic.message()}")
                if diagnostic.hint_text():
                    say(f"  {diagnostic.hint_text()}")
    plans = [_plan(kernel, problem, target) for target in chosen]
    tile_map = _say_tiles(problem, plans, is_mapped=count is not None and count.total > 0)
    if svg is not None:
        _write_svg(svg, tile_map, problem)
    _say_block("work", _work(problem, count))
    _say_kernels(plans, not no_compile)
    if known is not None:
        _say_block("schedule", _answer(kernel, problem, known))
    return 0


def _any_value(param: Param) -> Any:
    """A value inside a param's range, where only its type matters."""
    bound = param.bound
    for value in (1, 0, bound.low, bound.high, (bound.low or 0) + 1, (bound.high or 0) - 1):
        if value is not None and bound.contains(value):
            return float(value) if param.type.value == "float" else value
    return 1


def _say_block(title: str, rows: list[list[str]]) -> None:
    say()
    say((title, "bold"))
    for line in table(rows):
        say(line)


# ---- what is computed --------------------------------------------------------------------------


def _computes(kernel: Kernel) -> list[list[str]]:
    """The block, statement by statement, in the order in which a pair goes through it."""
    attention = kernel.attention
    statements = kernel.unit.attention.statements

    def lines(kind: type[Any], otherwise: str) -> Iterator[str]:
        found = [format_expr(s.value) for s in statements if isinstance(s, kind)]
        yield from found or [otherwise]

    rows = [["scale", text] for text in lines(ast.Scale, "1 / sqrt(Dqk)")]
    rows += [["score", text] for text in lines(ast.Score, "s, unchanged")]
    rows += [["mask", text] for text in lines(ast.Mask, "none: every pair attends")]
    rows.append(["weights", _weights(statements, attention.row_state.name)])
    rows.append(["output", ", ".join(_OUTPUTS[name] for name in attention.outputs)])
    lets = [s for s in statements if isinstance(s, ast.Let)]
    rows += [["let", f"{let.name} = {format_expr(let.value)}"] for let in lets]
    for name, e in (("q", attention.length_q), ("kv", attention.length_kv)):
        if e is not None:
            what = "rows" if name == "q" else "keys"
            rows.append(["length", f"sequence b has {print_expr(e).splitlines()[-1]} {what}"])
    return rows


_OUTPUTS: Final = {
    "o": "o",
    "lse": "lse (natural logarithm, after scale, score, mask and sink)",
    "row_max": "row_max (largest score of an attending pair)",
}


def _weights(statements: tuple[ast.Statement, ...], name: str) -> str:
    if name == "sigmoid":
        return "sigmoid: o = Σ sigmoid(s) v over the attending keys, with nothing to divide by"
    sinks = [s.sink for s in statements if isinstance(s, ast.Weights) and s.sink is not None]
    sink = f", and exp({format_expr(sinks[-1])}) joins the sum once" if sinks else ""
    return f"softmax: exp(s) over its sum along the attending keys{sink}"


def _problem(problem: Problem, kernel: Kernel) -> list[list[str]]:
    """Sizes, params and tensors, and which of them are made up."""
    sizes = problem.sizes
    rows = [["shape", ", ".join(f"{name} = {size}" for name, size in sizes.items())]]
    is_open = "" if kernel.attention.dtype else ", which the file leaves open"
    rows.append(["dtype", f"{problem.dtype.name}{is_open}"])
    for name, value in problem.params.items():
        rows.append(["param", f"{name} = {value}"])
    for name, given in problem.tensors.items():
        shape = ", ".join(map(str, given.array.shape))
        element = problem.attention.tensor(name).element.name
        rows.append(["tensor", f"{name} : {element}[{shape}]  {given.origin}"])
    return rows


# ---- the mask ----------------------------------------------------------------------------------


def _draw(pairs: Pairs, problem: Problem, rows: int) -> None:
    if not rows or 0 in (problem.sizes["B"], problem.sizes["Sq"], problem.sizes["Skv"]):
        return
    marks = "█·?" if can_show("█·") else "#.?"
    picture = draw_rows(pairs, problem, rows, marks)
    about = "" if pairs.heads == 1 and pairs.batches <= 1 else " of batch 0, head 0"
    say()
    say((f"mask, first rows{about}", "bold"), f"  {marks[0]} attends")
    say(f"  {picture.heading}")
    for line in picture.lines:
        say(f"  {line}")
    if any(marks[2] in line for line in picture.lines):
        say(f"  {marks[2]} depends on the score")


def _count(pairs: Pairs, problem: Problem) -> Count:
    with progress("counting pairs") as shown:
        count = count_pairs(pairs, problem, shown.update)
    sizes = problem.sizes
    is_larger = sizes["Sq"] > CELLS[0] or sizes["Skv"] > CELLS[1]
    if count.cells is not None and is_larger:
        shades = "·░▒▓█" if can_show("·░▒▓█") else ".-+x#"
        q, kv = (-(-sizes[name] // n) for name, n in zip(("Sq", "Skv"), CELLS, strict=True))
        say()
        say(
            ("mask, all of it", "bold"),
            f"  up to {q} x {kv} pairs a character, {shades[-1]} all attend",
        )
        for row in count.cells:
            say("  " + "".join(_shade(float(share), shades) for share in row))
    return count


def _shade(share: float, shades: str) -> str:
    if share <= 0:
        return shades[0]
    if share >= 1 - 1e-9:
        return shades[-1]
    return shades[1 + min(2, int(share * 3))]


# ---- the work ----------------------------------------------------------------------------------


def _work(problem: Problem, count: Count | None) -> list[list[str]]:
    sizes = problem.sizes
    bytes_moved, tensor_bytes = _bytes(problem)
    rows: list[list[str]] = []
    if count is not None:
        attend = (
            f"about {count.pairs:.4g} of {count.total:.4g}"
            if count.sample
            else (f"{count.pairs:,} of {count.total:,}")
        )
        share = f", {count.pairs / count.total:.2%}" if count.total else ""
        rows.append(["pairs", f"{attend} attend{share} ({count.sample or 'counted'})"])
        if count.by_score:
            rows.append(["", "a score line masks by its value: such pairs count as attending"])
        flops = 2 * count.pairs * (sizes["Dqk"] + sizes["Dv"])
        rows.append(["FLOPs", f"{_scaled(flops)} = 2 · pairs · (Dqk + Dv)"])
    formula = "q, k, v read once, o written once"
    if tensor_bytes:
        formula += f", and {_scaled(tensor_bytes, 'B')} of tensors"
    rows.append(["bytes", f"{_scaled(bytes_moved, 'B')}: {formula}"])
    if count is not None and bytes_moved:
        rows.append(["intensity", f"{flops / bytes_moved:.1f} FLOPs a byte"])
    return rows


def _bytes(problem: Problem) -> tuple[int, int]:
    """Bytes that must move at least once, and those of captured tensors among them."""
    s = problem.sizes
    queries = s["B"] * s["Hq"] * s["Sq"] * (s["Dqk"] + s["Dv"])
    keys = s["B"] * s["Hkv"] * s["Skv"] * (s["Dqk"] + s["Dv"])
    rows = 4 * s["B"] * s["Hq"] * s["Sq"] * (len(problem.attention.outputs) - 1)
    tensors = sum(given.array.nbytes for given in problem.tensors.values())
    return (queries + keys) * problem.dtype.bytes + rows + tensors, tensors


def _scaled(number: float, unit: str = "") -> str:
    for prefix in ("", "k", "M", "G", "T"):
        if number < 1000:
            return f"{number:.4g} {prefix}{unit}".rstrip()
        number /= 1000
    return f"{number:.4g} P{unit}"


# ---- tiles -------------------------------------------------------------------------------------


def _say_tiles(problem: Problem, plans: list[_Plan], *, is_mapped: bool) -> TileMap | None:
    """When a tile is skipped or full, the map of one head, and its numbers.

    Returns the map with the tiles of the first target; None where there is none.
    """
    rendered = [plan.rendered for plan in plans if plan.rendered is not None]
    if not rendered:
        return None
    attention = rendered[0].program.attention
    classes = classify_tiles(attention)
    has_mask = attention.mask is not None
    always = [["full", "always: there is no mask"]]
    ranges = derive_key_ranges(attention)
    conditions = condition_rows(classes, split_mask(attention).bounds)
    _say_block("tiles", [*range_rows(ranges), *conditions] if has_mask else always)
    lost = [note for note in ranges.notes if not note.endswith(DECIDED_BY_THE_KERNEL)]
    for text in (*lost, *unknown_parts(attention, classes)):
        say(f"  note: {text}")
    if not is_mapped:
        return None
    with progress("classifying tiles") as shown:
        maps = make_maps(problem, rendered, shown.update)
    if not maps.first.tiles:
        return None
    if has_mask:
        _say_map(maps, problem)
        for text in remarks(maps, attention, classes):
            say(f"  {text}")
    return maps.first


def _say_map(maps: TileMaps, problem: Problem) -> None:
    marks = "·▒█░" if can_show("·▒█░") else ".+#-"
    say()
    say(("map of tiles", "bold"), f" of {_tiles_in_words(maps.first, problem)}")
    for line in draw_map(maps.first, marks):
        say("  ", *line)
    _say_block("tiles in numbers", count_rows(maps))


def _tiles_in_words(tile_map: TileMap, problem: Problem) -> str:
    about = "" if problem.sizes["B"] * problem.sizes["Hq"] == 1 else ", batch 0, head 0"
    return f"{tile_map.tile_q} rows x {tile_map.tile_kv} keys{about}"


def _write_svg(path: Path, tile_map: TileMap | None, problem: Problem) -> None:
    """Errors:  A711 where there is nothing to draw; A713 where it cannot be written."""
    if tile_map is None:
        why = "this problem has no map of tiles"
        raise AttnError(BadOption(None, "--svg", str(path), why))
    title = f"{problem.attention.name}: tiles of {_tiles_in_words(tile_map, problem)}"
    write_together({path: draw_svg(title, tile_map).encode()})
    say(f"  the map is in {path}")


# ---- the schedule ------------------------------------------------------------------------------


def _answer(kernel: Kernel, problem: Problem, device: DeviceClass) -> list[list[str]]:
    """What tuning chooses on a class of GPU, and how good the answer is."""
    sizes = problem.sizes
    dims = sizes["Dqk"], sizes["Dv"]
    answer = kernel.find_schedule(device, sizes, dtype=problem.dtype.name, head_dim=dims)
    schedule = answer.schedule
    if schedule is None:
        target = targets.get(device.arch)
        schedule = render_program(kernel.checked, problem.dtype, dims, target).program.schedule
    rows = [
        ["device", device.name],
        ["runs", describe(schedule)],
        ["grade", f"{answer.grade.value}: {answer.sentence}"],
    ]
    return rows + [["note", text] for text in answer.notes]


# ---- kernels -----------------------------------------------------------------------------------


@final
@record(eq=False)
class _Plan:
    """What a target would run; None where that is not possible, and why."""

    target: Target
    rendered: Rendered | None
    remarks: tuple[str, ...]


def _plan(kernel: Kernel, problem: Problem, target: Target) -> _Plan:
    dims = problem.sizes["Dqk"], problem.sizes["Dv"]
    try:
        rendered = render_program(kernel.checked, problem.dtype, dims, target)
    except AttnError as error:
        return _Plan(target, None, tuple(d.message() for d in error.diagnostics))
    return _Plan(target, rendered, rendered.notes)


def _say_kernels(plans: list[_Plan], with_compiler: bool) -> None:
    """Schedule, shared memory and registers for each target."""
    # NVRTC lets go of the interpreter, so targets compile side by side.
    with progress("compiling"), ThreadPoolExecutor() as pool:
        jobs = [pool.submit(_examine, plan, with_compiler) for plan in plans]
        found = [job.result() for job in jobs]
    rows = [["target", "family", "tile q", "tile kv", "threads", "shared", *_COMPILED_HEADINGS]]
    rows += [row for row, _ in found]
    remarks = dict.fromkeys(remark for _, remarks in found for remark in remarks)
    schedules: dict[str, list[str]] = {}
    for plan in plans:
        if plan.rendered is not None:
            schedules.setdefault(_schedule(plan.rendered), []).append(plan.target.name)
    if not any(len(row) == len(rows[0]) for row in rows[1:]):
        rows[0] = rows[0][: -len(_COMPILED_HEADINGS)]
    _say_block("kernels", rows)
    for text, names in schedules.items():
        say(f"  {', '.join(names)}: {text}" if len(schedules) > 1 else f"  {text}")
    for text in remarks:
        say(f"  note: {text}")


def _examine(plan: _Plan, with_compiler: bool) -> tuple[list[str], list[str]]:
    """The line of one target, and remarks."""
    remarks = list(plan.remarks)
    if plan.rendered is None:
        return [plan.target.name, "not possible"], remarks
    launch = plan.rendered.launch
    row = [
        plan.target.name, launch.family, str(launch.tiles.tile_q), str(launch.tiles.tile_kv),
        str(launch.threads), f"{launch.shared_bytes / 1024:.1f} KiB",
    ]  # fmt: skip
    if with_compiler:
        try:
            row += _resources(plan.rendered)
        except AttnError as error:
            remarks += [_short(diagnostic) for diagnostic in error.diagnostics]
    return row, remarks


_COMPILED_HEADINGS: Final = ("registers", "stack", "spills")


def _resources(rendered: Rendered) -> list[str]:
    compiled = compile_rendered(rendered)
    found = resources_of(rendered, compiled)
    spills = spills_from_log(compiled.log).get(rendered.launch.kernel)
    spilled = 0 if spills is None else spills.store_bytes + spills.load_bytes
    return [str(found.registers), f"{found.stack_bytes} B", f"{spilled} B" if spilled else "none"]


def _short(diagnostic: Diagnostic) -> str:
    return f"no registers: {diagnostic.message()} ({diagnostic.hint_text() or diagnostic.code})"


def _schedule(rendered: Rendered) -> str:
    """The schedule, and the sum of what a block keeps in shared memory."""
    schedule, attention = rendered.program.schedule, rendered.program.attention
    family = all_families()[rendered.launch.family]
    arrays = family.shared_arrays(attention, schedule)
    parts = list_arrays(arrays)
    total = sum(array.bytes for array in arrays) / 1024
    return (
        f"loop {schedule.loop.value}; passes {schedule.passes.value};"
        f" normalize {schedule.normalize.value}; shared memory {parts} = {total:.1f} KiB"
    )
