"""Results as plots: SVG files that need nothing else, on light and dark pages.

    python -m benchmarks.plots FILE.jsonl [--out DIR]

writes, beside the file or to DIR,

| file                  | what it shows |
| --------------------- | ------------- |
| `<stem>-forward.svg`  | TFLOP/s by sequence length, a panel for each mask and head dim |
| `<stem>-ratio.svg`    | attngen's speed relative to the best peer, a dot for each cell |
| `<stem>-roofline.svg` | TFLOP/s of attngen's lanes by arithmetic intensity |

What the file has no times for is not drawn, and the command says so.  Cold starts are not drawn.
"""

from __future__ import annotations

import argparse
import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from html import escape
from itertools import product
from pathlib import Path
from typing import Any, Final, TypeAlias, final

from attngen.record import record
from benchmarks.report import Row, geometric_mean, make_rows, order_lanes, read_records

__all__ = ["Axis", "draw_forward", "draw_ratio", "draw_roofline", "find_intensity", "main"]

Record: TypeAlias = Mapping[str, Any]
Point: TypeAlias = tuple[float, float]
Box: TypeAlias = tuple[float, float, float, float]

_SUITES: Final = ("forward", "gqa", "variants")
_OWN: Final = "attngen"
_ELEMENT_BYTES: Final = 2  # bf16 and fp16; nothing else is timed

_ROOFS: Final[Mapping[str, Point]] = {"NVIDIA H200": (989, 4.8)}
"""Dense bf16 and fp16 TFLOP/s and memory TB/s of a GPU, by the name that its driver gives.

Source:  NVIDIA H200 data sheet, H200 SXM: 1979 TFLOP/s with sparsity, half of them dense.
"""

PANEL_WIDTH, PANEL_HEIGHT = 300, 220
RATIO_WIDTH, ROOF_WIDTH, ROOF_HEIGHT = 420, 700, 400
"""What the axes span, in pixels."""
LEFT, TOP, RIGHT, HEAD, BELOW = 76, 52, 28, 28, 64
"""Margins: of the page, above a panel for its name, and below an axis for its numbers."""
LINE, CHARACTER, HEAD_CHARACTER, TITLE_CHARACTER = 20, 7.5, 8.5, 9
"""The distance of two lines of text, and what a character takes in each style, in pixels."""
GAP: Final = 14
"""The least distance of two labels, in pixels."""

_RATIO_TICKS: Final = (0.05, 0.1, 0.2, 0.3, 0.5, 0.7, 0.8, 0.9, 1, 1.2, 1.5, 2, 3, 5, 10, 20)
_RANKS: Final = ("", "second", "third")
"""CSS classes of attngen's lanes, which share a colour; a fourth looks like the first."""
_STYLE: Final = """\
text { font-family: system-ui, sans-serif; font-size: 13px; fill: #1f2328; }
.title { font-size: 15px; font-weight: 600; }
.head { font-weight: 600; }
.page { fill: #ffffff; }
.axis { fill: none; stroke: #59636e; }
.grid { fill: none; stroke: #d9dee4; }
.tie { fill: none; stroke: #9aa4ae; }
.roof, .one { fill: none; stroke: #59636e; stroke-width: 2; }
.attngen { fill: #2563a8; stroke: #2563a8; }
.fa2 { fill: #b35900; stroke: #b35900; }
.fa3 { fill: #c0262d; stroke: #c0262d; }
.fa4 { fill: #8b3fb0; stroke: #8b3fb0; }
.cudnn { fill: #2e7d32; stroke: #2e7d32; }
.flex { fill: #7a6a00; stroke: #7a6a00; }
.flex_flash { fill: #007a87; stroke: #007a87; }
text.label { stroke: none; }
path.line { fill: none; stroke-width: 1.75; }
circle.second { fill: #ffffff; stroke-width: 1.75; }
circle.third { fill-opacity: 0.4; }
path.second { stroke-dasharray: 7 3; }
path.third { stroke-dasharray: 2 3; }
@media (prefers-color-scheme: dark) {
  text { fill: #e6edf3; }
  .page { fill: #0d1117; }
  .axis { stroke: #9198a1; }
  .grid { stroke: #2a313a; }
  .tie { stroke: #59636e; }
  .roof, .one { stroke: #9198a1; }
  .attngen { fill: #6cb0f5; stroke: #6cb0f5; }
  .fa2 { fill: #f0a63a; stroke: #f0a63a; }
  .fa3 { fill: #ff7b72; stroke: #ff7b72; }
  .fa4 { fill: #d2a8ff; stroke: #d2a8ff; }
  .cudnn { fill: #56d364; stroke: #56d364; }
  .flex { fill: #d8d04a; stroke: #d8d04a; }
  .flex_flash { fill: #39c5cf; stroke: #39c5cf; }
  circle.second { fill: #0d1117; }
}"""


@final
@record
class Axis:
    """Values from `low` to `high` at the pixels from `start` to `end`."""

    low: float
    high: float
    start: float
    end: float
    is_log: bool = True

    def at(self, value: float) -> float:
        """The pixel of a value."""
        if self.is_log:
            share = math.log(value / self.low) / math.log(self.high / self.low)
        else:
            share = (value - self.low) / (self.high - self.low)
        return self.start + share * (self.end - self.start)


# ---- the plots -----------------------------------------------------------------------------


def draw_forward(records: Sequence[Record]) -> str | None:
    """TFLOP/s by sequence length, with a panel for each mask (columns) and head dim (rows).

    None where the suite `forward` has no times.
    """
    found = _timed(records, ["forward"])
    if not found:
        return None
    lanes, styles = order_lanes(found), _styles(found)
    masks, dims = list(dict.fromkeys(r["mask"] for r in found)), sorted({r["D"] for r in found})
    x = Axis(*_doubling_range(r["S"] for r in found), 0, PANEL_WIDTH)
    ticks = _round_ticks(max(r["tflops"] for r in found))
    y = Axis(0, ticks[-1], PANEL_HEIGHT, 0, is_log=False)
    width, height = LEFT + PANEL_WIDTH + 16 + _text_width(lanes), HEAD + PANEL_HEIGHT + BELOW
    body = []
    for (row, D), (column, mask) in product(enumerate(dims), enumerate(masks)):
        inside = [r for r in found if (r["mask"], r["D"]) == (mask, D)]
        if inside:
            corner = f"{_px(LEFT + column * width)} {TOP + HEAD + row * height}"
            body += [
                f'<g class="panel" transform="translate({corner})">',
                _text("head", 0, -12, f"{mask}, D {D}"),
                *_x_axis(x, y, _doublings(x, 6), "tokens, S"),
                *_y_axis(x, y, ticks),
                *_forward_lines(inside, styles, x, y),
                "</g>",
            ]
    bottom = TOP + len(dims) * height
    body += _legend(lanes, styles, bottom)
    title = f"Forward on {_device(records)}: TFLOP/s by sequence length"
    return _page(title, len(masks) * width + RIGHT, bottom + LINE * len(lanes), body)


def draw_ratio(records: Sequence[Record]) -> str | None:
    """attngen's speed relative to the best peer: a row for each cell, with a dot where both ran.

    None where no cell has both.
    """
    suites = {suite: make_rows(records, suite) for suite in _SUITES}
    rows = [row for found in suites.values() for row in found]
    ratios = [row.ratio for row in rows if row.ratio is not None]
    if not ratios:
        return None
    x = _ratio_axis(ratios)
    heads = {suite: _describe_suite(suite, found) for suite, found in suites.items() if found}
    left = 18 + max(_text_width(row.cell for row in rows), _head_width(heads.values()))
    body: list[str] = []
    height = 0
    for suite, head in heads.items():
        body.append(_text("head", 18 - left, height + 15, head))
        height += LINE
        for row in suites[suite]:
            body += _ratio_row(row, x, height + LINE / 2)
            height += LINE
    y = Axis(0, 1, height, 0, is_log=False)
    ticks = [tick for tick in _RATIO_TICKS if x.low <= tick <= x.high]
    body = [
        f'<g transform="translate({_px(left)} {TOP})">',
        *_x_axis(x, y, ticks, "attngen / best peer; 1: equally fast"),
        f'<path class="one" d="M{_px(x.at(1))} 0V{height}"/>',
        *body,
        "</g>",
    ]
    notes = max(_text_width(_ratio_note(row) for row in rows), RIGHT)
    title = f"attngen beside the best peer on {_device(records)}: speed ratio"
    return _page(title, left + RATIO_WIDTH + notes, TOP + height + BELOW, body)


def draw_roofline(records: Sequence[Record]) -> str | None:
    """TFLOP/s of attngen's lanes by arithmetic intensity, below the roof where it is known.

    None where attngen has no times.
    """
    found = [r for r in _timed(records, _SUITES) if r["peer"] == _OWN]
    if not found:
        return None
    lanes, styles = order_lanes(found), _styles(found)
    roof = _ROOFS.get(_environment(records).get("gpu", ""))
    points = [(find_intensity(r), float(r["tflops"])) for r in found]
    seen = [*points, *([] if roof is None else _corners(roof))]
    x = Axis(*_doubling_range(at for at, _ in seen), 0, ROOF_WIDTH)
    y = Axis(*_doubling_range(speed for _, speed in seen), ROOF_HEIGHT, 0)
    body = [
        f'<g transform="translate({LEFT} {TOP})">',
        *_x_axis(x, y, _doublings(x, 9), "FLOPs per byte of q, k, v and o"),
        *_y_axis(x, y, _doublings(y, 9)),
        *([] if roof is None else _roof(roof, x, y)),
    ]
    places = [(x.at(at), y.at(speed)) for at, speed in points]
    for r, (at, _), place in zip(found, points, places, strict=True):
        tip = f"{r['lane']}, {r['cell']}: {r['tflops']:g} TFLOP/s at {at:.4g} FLOPs per byte"
        body.append(_dot(styles[r["lane"]], place, tip))
    taken = [] if roof is None else _slope_boxes(roof, x, y)
    names = [r["variant"] if r["suite"] == "variants" else r["cell"] for r in found]
    body += [*_point_labels(names, places, taken), "</g>"]
    bottom = TOP + ROOF_HEIGHT + BELOW
    body += _legend(lanes, styles, bottom)
    title = f"attngen on {_device(records)}: TFLOP/s by arithmetic intensity"
    return _page(title, LEFT + ROOF_WIDTH + RIGHT, bottom + LINE * len(lanes), body)


def find_intensity(record: Record) -> float:
    """FLOPs of a record for each byte of q, k, v and o, which are read or written once.

    The FLOPs are those that its `tflops` count.
    """
    width = (record["Hq"] + record["Hkv"]) * (record["D"] + record["Dv"])  # q and o, k and v
    moved_bytes = record["B"] * record["S"] * width * _ELEMENT_BYTES
    return float(record["tflops"] * 1e12 * record["ms"] * 1e-3 / moved_bytes)


# ---- what is drawn inside of them ----------------------------------------------------------


def _forward_lines(
    found: Sequence[Record], styles: Mapping[str, str], x: Axis, y: Axis
) -> list[str]:
    """A line for each lane, its points, and its name behind the last one."""
    lines: list[str] = []
    ends: dict[str, Point] = {}
    for lane in order_lanes(found):
        mine = sorted((r for r in found if r["lane"] == lane), key=lambda r: int(r["S"]))
        places = [(x.at(r["S"]), y.at(r["tflops"])) for r in mine]
        lines.append(f'<path class="line {styles[lane]}" d="M{_pairs(places)}"/>')
        for r, place in zip(mine, places, strict=True):
            tip = f"{lane}, S {r['S']}: {r['tflops']:g} TFLOP/s"
            lines.append(_dot(styles[lane], place, tip))
        ends[lane] = places[-1]
    levels = _spread({lane: level for lane, (_, level) in ends.items()}, PANEL_HEIGHT)
    for lane, level in levels.items():
        tie = _pairs([(ends[lane][0] + 5, ends[lane][1]), (PANEL_WIDTH + 16, level)])
        lines.append(f'<path class="tie" d="M{tie}"/>')
        lines.append(_text(f"label {styles[lane]}", PANEL_WIDTH + 19, level + 4, lane))
    return lines


def _ratio_row(row: Row, x: Axis, level: float) -> list[str]:
    lines = [
        _text("", -10, level + 4, row.cell, "end"),
        _text("", RATIO_WIDTH + 10, level + 4, _ratio_note(row)),
    ]
    if row.ratio is not None:
        lines.append(
            f'<path class="attngen" d="M{_px(x.at(1))} {_px(level)}H{_px(x.at(row.ratio))}"/>'
        )
        lines.append(_dot("attngen", (x.at(row.ratio), level), f"{row.cell}: {_ratio_note(row)}"))
    return lines


def _ratio_note(row: Row) -> str:
    """The ratio in words, or why there is none."""
    if row.own is None:
        return "attngen has no time"
    if row.ratio is None or row.best_other is None:
        return "no peer has a time"
    return f"{row.ratio:.3f} of {row.best_other['lane']}"


def _describe_suite(suite: str, rows: Sequence[Row]) -> str:
    mean = geometric_mean([row.ratio for row in rows if row.ratio is not None])
    return suite if mean is None else f"{suite}: geometric mean {mean:.3f}"


def _corners(roof: Point) -> tuple[Point, Point]:
    """Two points of a roof: the knee, and a quarter of its intensity, so that the slope is seen."""
    peak, bandwidth = roof
    return (peak / bandwidth / 4, peak / 4), (peak / bandwidth, peak)


def _slope(roof: Point, x: Axis, y: Axis) -> tuple[Point, Point]:
    """The pixels where the slope leaves the axes, and of the knee."""
    peak, bandwidth = roof
    begin = max(x.low, y.low / bandwidth)
    return (x.at(begin), y.at(begin * bandwidth)), (x.at(peak / bandwidth), y.at(peak))


def _roof(roof: Point, x: Axis, y: Axis) -> list[str]:
    """Memory bandwidth up to the knee, and the peak of the products from there."""
    peak, bandwidth = roof
    low, knee = _slope(roof, x, y)
    middle = (low[0] + knee[0]) / 2, (low[1] + knee[1]) / 2
    return [
        f'<path class="roof" d="M{_pairs([low, knee, (x.end, knee[1])])}"/>',
        _text("", x.end - 6, knee[1] - 7, f"{peak:g} TFLOP/s, dense bf16", "end"),
        _text("", middle[0] - 10, middle[1] - 4, f"{bandwidth:g} TB/s", "end"),
    ]


def _slope_boxes(roof: Point, x: Axis, y: Axis, count: int = 64) -> list[Box]:
    """Boxes that cover the slope, for labels to keep off."""
    low, knee = _slope(roof, x, y)
    width, height = (knee[0] - low[0]) / count, (low[1] - knee[1]) / count
    return [
        (
            *(low[0] + width * i, low[1] - height * (i + 1)),
            *(low[0] + width * (i + 1), low[1] - height * i),
        )
        for i in range(count)
    ]


def _point_labels(names: Sequence[str], places: Sequence[Point], taken: Iterable[Box]) -> list[str]:
    """Each name once beside one of its points, where there is room; the tips have them all."""
    boxes = [*taken, *((at - 6, level - 6, at + 6, level + 6) for at, level in places)]
    lines: dict[str, str] = {}
    for name, (at, level) in zip(names, places, strict=True):
        width = CHARACTER * len(name)
        for left, anchor in ((at + 8, "start"), (at - 8 - width, "end")):
            box = (left, level - 8, left + width, level + 8)
            is_free = not any(_overlaps(box, other) for other in boxes)
            if name not in lines and is_free and left >= 0 and box[2] <= ROOF_WIDTH:
                boxes.append(box)
                near = box[0] if anchor == "start" else box[2]
                lines[name] = _text("", near, level + 4, name, anchor)
    return list(lines.values())


def _overlaps(a: Box, b: Box) -> bool:
    return a[0] < b[2] and b[0] < a[2] and a[1] < b[3] and b[1] < a[3]


def _spread(levels: Mapping[str, float], bottom: float) -> dict[str, float]:
    """The levels of labels moved apart to `GAP`, in their order, and none below the bottom."""
    names = sorted(levels, key=lambda name: levels[name])
    moved: list[float] = []
    for name in names:
        moved.append(max(levels[name], moved[-1] + GAP) if moved else levels[name])
    limit = bottom
    for i in reversed(range(len(moved))):
        moved[i] = min(moved[i], limit)
        limit = moved[i] - GAP
    return dict(zip(names, moved, strict=True))


# ---- axes ----------------------------------------------------------------------------------


def _x_axis(x: Axis, y: Axis, ticks: Sequence[float], name: str) -> list[str]:
    lines = [_text("", (x.start + x.end) / 2, y.start + 38, name, "middle")]
    for tick in ticks:
        at = _px(x.at(tick))
        lines.append(f'<path class="grid" d="M{at} {_px(y.start)}V{_px(y.end)}"/>')
        lines.append(_text("", x.at(tick), y.start + 18, f"{tick:g}", "middle"))
    return [*lines, f'<path class="axis" d="M{_px(x.start)} {_px(y.start)}H{_px(x.end)}"/>']


def _y_axis(x: Axis, y: Axis, ticks: Sequence[float]) -> list[str]:
    lines = []
    for tick in ticks:
        level = y.at(tick)
        lines.append(f'<path class="grid" d="M{_px(x.start)} {_px(level)}H{_px(x.end)}"/>')
        lines.append(_text("", x.start - 9, level + 4, f"{tick:g}", "end"))
    middle = f"{_px(x.start - 48)} {_px((y.start + y.end) / 2)}"
    lines.append(
        f'<text text-anchor="middle" transform="translate({middle}) rotate(-90)">TFLOP/s</text>'
    )
    return [*lines, f'<path class="axis" d="M{_px(x.start)} {_px(y.start)}V{_px(y.end)}"/>']


def _doubling_range(values: Iterable[float]) -> tuple[float, float]:
    """The powers of two around the values; never one and the same."""
    logs = [math.log2(value) for value in values]
    low, high = math.floor(min(logs)), math.ceil(max(logs))
    return (2.0**low, 2.0**high) if low < high else (2.0 ** (low - 1), 2.0 ** (high + 1))


def _doublings(axis: Axis, most: int) -> list[float]:
    """Powers of two from the low end of an axis, at most so many."""
    count = round(math.log2(axis.high / axis.low)) + 1
    return [axis.low * 2.0**i for i in range(0, count, math.ceil(count / most))]


def _round_ticks(largest: float) -> list[float]:
    """0 and at most five multiples of 1, 2 or 5 times a power of ten; the last is not smaller."""
    power = 10.0 ** math.floor(math.log10(largest / 5))
    step = next(power * n for n in (1, 2, 5, 10) if power * n * 5 >= largest)
    return [step * i for i in range(math.ceil(largest / step) + 1)]


def _ratio_axis(ratios: Sequence[float]) -> Axis:
    """From the tick below all ratios and 1 to the tick above them."""
    low, high = min(1.0, *ratios), max(1.0, *ratios)
    below = max((tick for tick in _RATIO_TICKS if tick <= low and tick < 1), default=low)
    above = min((tick for tick in _RATIO_TICKS if tick >= high), default=high)
    return Axis(below, above, 0, RATIO_WIDTH)


# ---- the page ------------------------------------------------------------------------------


def _page(title: str, width: float, height: float, body: Sequence[str]) -> str:
    page = f"{math.ceil(max(width, 24 + TITLE_CHARACTER * len(title)))}", f"{math.ceil(height)}"
    lines = [
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {page[0]} {page[1]}"'
        f' width="{page[0]}" height="{page[1]}" role="img" aria-labelledby="title">',
        f'<title id="title">{escape(title)}</title>',
        f"<style>\n{_STYLE}\n</style>",
        f'<rect class="page" width="{page[0]}" height="{page[1]}"/>',
        _text("title", 18, 28, title),
        *body,
    ]
    return "\n".join([*lines, "</svg>\n"])


def _legend(lanes: Sequence[str], styles: Mapping[str, str], top: float) -> list[str]:
    lines = []
    for i, lane in enumerate(lanes):
        level = top + LINE * i
        style = styles[lane]
        lines.append(f'<path class="line {style}" d="M{LEFT} {level - 4}H{LEFT + 40}"/>')
        lines.append(_dot(style, (LEFT + 20, level - 4)))
        lines.append(_text("", LEFT + 50, level, lane))
    return lines


def _styles(found: Iterable[Record]) -> dict[str, str]:
    """The CSS classes of each lane: its peer, and of several lanes of attngen which one it is."""
    records = list(found)
    peers = {r["lane"]: r["peer"] for r in records}
    own = [lane for lane in order_lanes(records) if peers[lane] == _OWN]
    ranks = {lane: _RANKS[i % len(_RANKS)] for i, lane in enumerate(own)}
    return {lane: f"{peer} {ranks.get(lane, '')}".strip() for lane, peer in peers.items()}


def _dot(style: str, place: Point, tip: str = "") -> str:
    at = f'cx="{_px(place[0])}" cy="{_px(place[1])}" r="3.5"'
    inside = f"<title>{escape(tip)}</title>" if tip else ""
    return f'<circle class="{style}" {at}>{inside}</circle>'


def _text(style: str, x: float, y: float, text: str, anchor: str = "start") -> str:
    named = f' class="{style}"' if style else ""
    anchored = f' text-anchor="{anchor}"' if anchor != "start" else ""
    return f'<text{named} x="{_px(x)}" y="{_px(y)}"{anchored}>{escape(text)}</text>'


def _text_width(texts: Iterable[str]) -> float:
    """What the longest takes with the space beside it, in pixels."""
    return 16 + CHARACTER * max(map(len, texts), default=0)


def _head_width(texts: Iterable[str]) -> float:
    return 16 + HEAD_CHARACTER * max(map(len, texts), default=0)


def _pairs(places: Iterable[Point]) -> str:
    return " ".join(f"{_px(x)} {_px(y)}" for x, y in places)


def _px(value: float) -> str:
    return f"{round(value, 2):g}"


# ---- records -------------------------------------------------------------------------------


def _timed(records: Sequence[Record], suites: Iterable[str]) -> list[Record]:
    """The records of the suites that have a time."""
    rows = [row for suite in suites for row in make_rows(records, suite)]
    return [r for row in rows for r in row.records.values()]


def _environment(records: Sequence[Record]) -> Record:
    return next((r for r in records if r["suite"] == "environment"), {})


def _device(records: Sequence[Record]) -> str:
    return str(_environment(records).get("gpu", "an unknown device"))


def main(arguments: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.plots",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("file", type=Path)
    parser.add_argument("--out", type=Path, metavar="DIR", help="left out, the folder of the file")
    given = parser.parse_args(arguments)
    records = read_records(given.file.read_text(encoding="utf-8"))
    folder: Path = given.file.parent if given.out is None else given.out
    folder.mkdir(parents=True, exist_ok=True)
    for name, (draw, reason) in _PLOTS.items():
        path = folder / f"{given.file.stem}-{name}.svg"
        picture = draw(records)
        if picture is None:
            print(f"{path.name} is not written: {reason}")
        else:
            path.write_text(picture, encoding="utf-8", newline="\n")
            print(f"{path.name} is written")


_PLOTS: Final[Mapping[str, tuple[Callable[[Sequence[Record]], str | None], str]]] = {
    "forward": (draw_forward, "the suite forward has no times"),
    "ratio": (draw_ratio, "no cell has times of attngen and of a peer"),
    "roofline": (draw_roofline, "attngen has no times"),
}


if __name__ == "__main__":
    main()
