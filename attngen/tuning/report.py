"""What a search found, as one HTML page that needs nothing else, light or dark.

For each call: the candidates by measured time with what was predicted, all of them as measured
against predicted time, the winner below the roof of its GPU, and everything that has no time, with
its reason.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from html import escape
from typing import Final, TypeAlias, final

from attngen.record import record
from attngen.tuning.cost_model import Roof
from attngen.tuning.search import Discarded, Findings, Measured, Stage
from attngen.tuning.space import describe

__all__ = ["STYLE", "Section", "draw_bars", "draw_roof", "draw_scatter", "render_page"]

Scale: TypeAlias = Callable[[float], float]

STYLE: Final = """\
:root { color-scheme: light dark; }
body { font: 15px/1.5 system-ui, sans-serif; max-width: 62rem; margin: 2rem auto; padding: 0 1rem;
       background: #ffffff; color: #1f2328; }
table { border-collapse: collapse; font-size: 13px; }
td, th { text-align: left; padding: 2px 1rem 2px 0; vertical-align: top; }
svg { display: block; max-width: 100%; height: auto; margin: 1rem 0; }
svg text { font-family: system-ui, sans-serif; font-size: 12px; fill: #1f2328; }
svg .quiet { fill: #59636e; }
svg .axis, svg .line { fill: none; stroke: #8c959f; }
svg .roof { fill: none; stroke: #59636e; stroke-width: 2; }
svg .forward_wgmma { fill: #2563a8; }
svg .forward_mma { fill: #c2570c; }
svg .forward_simt { fill: #6e7781; }
svg .whisker { stroke: #1f2328; fill: none; }
svg .predicted { stroke: #1f2328; stroke-width: 2; fill: none; }
svg .ring { fill: none; stroke: #1f2328; stroke-width: 2; }
@media (prefers-color-scheme: dark) {
  body { background: #0d1117; color: #e6edf3; }
  svg text { fill: #e6edf3; }
  svg .quiet { fill: #9198a1; }
  svg .roof { stroke: #9198a1; }
  svg .forward_wgmma { fill: #6cb0f5; }
  svg .forward_mma { fill: #f0883e; }
  svg .forward_simt { fill: #8b949e; }
  svg .whisker, svg .predicted, svg .ring { stroke: #e6edf3; }
}
"""

_MOST_BARS: Final = 30
_BAR, _LABEL, _WIDTH, _MARGIN = 20, 450, 1000, 70
"""Height of a bar, width of its label (of a schedule with its order inside a step), width of a
picture and a margin, in pixels."""
_SCATTER, _ROOF_HEIGHT = 420, 300

_STAGES: Final = {
    Stage.RESOURCES: "does not fit",
    Stage.MODEL: "not compiled",
    Stage.COMPILER: "refused after compiling",
    Stage.EXAM: "wrong, or did harm",
    Stage.RACE: "did harm while timed",
    Stage.BUDGET: "no time left",
}


@final
@record(eq=False)
class Section:
    """One call: what it is, what was found, and what its GPU could do."""

    title: str
    findings: Findings
    roof: Roof


def render_page(title: str, sections: Sequence[Section]) -> str:
    """The page."""
    body = "\n".join(_section(each) for each in sections)
    return (
        f'<!doctype html>\n<html lang="en">\n<head>\n<meta charset="utf-8">\n'
        f'<meta name="viewport" content="width=device-width">\n<title>{escape(title)}</title>\n'
        f"<style>\n{STYLE}</style>\n</head>\n<body>\n<h1>{escape(title)}</h1>\n{body}\n"
        "</body>\n</html>\n"
    )


def _section(section: Section) -> str:
    found = section.findings
    parts = [f"<h2>{escape(section.title)}</h2>", f"<p>{_summary(section)}</p>"]
    if found.measured:
        parts += [
            "<h3>Candidates by time</h3>",
            draw_bars(found),
            "<h3>Measured and predicted</h3>",
            draw_scatter(found),
            "<h3>Below the roof</h3>",
            draw_roof(section),
        ]
    parts += ["<h3>Without a time</h3>", *_tables(found.discarded)]
    return "\n".join(parts)


def _summary(section: Section) -> str:
    found, best, default = section.findings, section.findings.best, section.findings.default
    if best is None:
        return "Nothing was timed."
    words = [
        f"<b>{escape(describe(best.schedule))}</b> takes {_ms(best.times.ms)},"
        f" {section.roof.tflops(1e3 * best.times.ms):.0f} TFLOP/s."
    ]
    if best is default:
        words.append("It is what runs where nothing is tuned.")
    elif default is not None:
        gain = default.times.ms / best.times.ms - 1
        words.append(
            f"Where nothing is tuned {escape(describe(default.schedule))} runs, which takes"
            f" {_ms(default.times.ms)}, {gain:.1%} longer."
        )
    words.append(f"{len(found.measured)} schedules were timed in {found.seconds:.0f} s.")
    if found.is_interrupted:
        words.append("The search was interrupted.")
    if found.failure is not None:
        words.append(f"It ended early: {escape(found.failure.diagnostics[0].message())}.")
    return " ".join(words)


def _tables(discarded: Sequence[Discarded]) -> list[str]:
    """One table for each stage, folded where it is long."""
    lines = []
    for stage, words in _STAGES.items():
        of_stage = [d for d in discarded if d.stage is stage]
        if not of_stage:
            continue
        rows = "\n".join(
            f"<tr><td>{escape(describe(d.schedule))}</td><td>{escape(d.reason)}</td></tr>"
            for d in of_stage
        )
        lines.append(
            f"<details><summary>{words}: {len(of_stage)}</summary>\n<table>\n{rows}\n</table>"
            "\n</details>"
        )
    return lines or ["<p>Every schedule was timed.</p>"]


# ---- pictures ------------------------------------------------------------------------------


def draw_bars(found: Findings) -> str:
    """The fastest candidates as bars, with the interval of the median and the prediction."""
    shown = list(found.measured[:_MOST_BARS])
    default = found.default
    if default is not None and default not in shown:
        shown.append(default)
    predicted = [found.predictions[m.schedule].us / 1e3 for m in shown]
    longest = max(*(m.times.high_ms for m in shown), *predicted)
    x = _linear(0.0, longest, _LABEL, _WIDTH - _MARGIN)
    height = _BAR * len(shown) + 36
    lines = _begin(_WIDTH, height, "Candidates by measured time")
    for i, (one, guess) in enumerate(zip(shown, predicted, strict=True)):
        lines += _bar(one, guess, x, 8 + _BAR * i, is_default=one is default)
    text = f"bars: measured, line: 95 % interval; mark: predicted ({_ms(longest)} at the right end)"
    lines.append(f'<text class="quiet" x="{_LABEL}" y="{height - 8}">{text}</text>')
    return _end(lines)


def _bar(one: Measured, guess: float, x: Scale, y: int, *, is_default: bool) -> list[str]:
    name = describe(one.schedule) + (" (default)" if is_default else "")
    begin, end, middle = x(0.0), x(one.times.ms), y + _BAR / 2 - 2
    low, high = x(one.times.low_ms), x(one.times.high_ms)
    return [
        f'<text x="{_LABEL - 8}" y="{y + 12}" text-anchor="end">{escape(name)}</text>',
        f'<rect class="{one.schedule.kernel}" x="{begin:.1f}" y="{y}" width="{end - begin:.1f}"'
        f' height="{_BAR - 4}"/>',
        f'<path class="whisker" d="M{low:.1f} {middle}H{high:.1f}"/>',
        f'<path class="predicted" d="M{x(guess):.1f} {y - 1}v{_BAR - 2}"/>',
        f'<text x="{_WIDTH - _MARGIN + 6}" y="{y + 12}">{_ms(one.times.ms)}</text>',
    ]


def draw_scatter(found: Findings) -> str:
    """Every candidate, predicted time to the right and measured time upwards."""
    points = [(found.predictions[m.schedule].us / 1e3, m.times.ms, m) for m in found.measured]
    values = [v for p, m, _ in points for v in (p, m)]
    low, high = 0.9 * min(values), 1.1 * max(values)
    x = _logarithmic(low, high, _MARGIN, _WIDTH - _MARGIN)
    y = _logarithmic(low, high, _SCATTER - 50, 16)
    lines = _begin(_WIDTH, _SCATTER, "Measured against predicted time")
    lines.append(f'<path class="line" d="M{x(low):.1f} {y(low):.1f}L{x(high):.1f} {y(high):.1f}"/>')
    lines += _axes(x, y, low, high)
    for guess, measured, one in points:
        at = f'cx="{x(guess):.1f}" cy="{y(measured):.1f}"'
        title = f"<title>{escape(describe(one.schedule))}: {_ms(measured)}</title>"
        lines.append(f'<circle class="{one.schedule.kernel}" {at} r="4">{title}</circle>')
        if one is found.best:
            lines.append(f'<circle class="ring" {at} r="8"/>')
    lines += _legend(sorted({str(m.schedule.kernel) for m in found.measured}))
    return _end(lines)


def _axes(x: Scale, y: Scale, low: float, high: float) -> list[str]:
    left, bottom = x(low), y(low)
    lines = [f'<path class="axis" d="M{left:.1f} {y(high):.1f}V{bottom:.1f}H{x(high):.1f}"/>']
    for tick in _ticks(low, high):
        label = f"{tick:g}"
        lines += [
            f'<path class="axis" d="M{x(tick):.1f} {bottom:.1f}v5M{left:.1f} {y(tick):.1f}h-5"/>',
            f'<text x="{x(tick):.1f}" y="{bottom + 18:.1f}" text-anchor="middle">{label}</text>',
            f'<text x="{left - 9:.1f}" y="{y(tick) + 4:.1f}" text-anchor="end">{label}</text>',
        ]
    middle = (left + x(high)) / 2
    lines += [
        f'<text x="{middle:.1f}" y="{bottom + 38:.1f}" text-anchor="middle">predicted, ms</text>',
        f'<text x="16" y="{_SCATTER / 2:g}" text-anchor="middle"'
        f' transform="rotate(-90 16 {_SCATTER / 2:g})">measured, ms</text>',
    ]
    return lines


def _legend(families: Sequence[str]) -> list[str]:
    lines = []
    for i, family in enumerate((*families, "the fastest")):
        y = 26 + 18 * i
        mark = f'class="{family}" r="4"' if family in families else 'class="ring" r="6"'
        lines.append(f'<circle {mark} cx="{_MARGIN + 18}" cy="{y}"/>')
        lines.append(f'<text x="{_MARGIN + 32}" y="{y + 4}">{escape(family)}</text>')
    return lines


def draw_roof(section: Section) -> str:
    """The roof of the GPU by arithmetic intensity; the fastest schedule and the default below."""
    roof, found = section.roof, section.findings
    knee = roof.peak_tflops / roof.bandwidth_tb_s
    low, high = 0.5 * min(knee, roof.intensity or knee), 2.0 * max(knee, roof.intensity)
    shown = [m for m in (found.best, found.default) if m is not None]
    slowest = min(roof.tflops(1e3 * m.times.ms) for m in shown)
    bottom = 0.5 * max(min(slowest, low * roof.bandwidth_tb_s), 1e-6)
    x = _logarithmic(low, high, _MARGIN, _WIDTH - _MARGIN)
    y = _logarithmic(bottom, 1.3 * roof.peak_tflops, _ROOF_HEIGHT - 50, 16)
    lines = _begin(_WIDTH, _ROOF_HEIGHT, "The fastest schedule below the roof")
    base = y(bottom)
    lines += [
        f'<path class="axis" d="M{x(low):.1f} 16V{base:.1f}H{x(high):.1f}"/>',
        f'<path class="roof" d="M{x(low):.1f} {y(low * roof.bandwidth_tb_s):.1f}'
        f'L{x(knee):.1f} {y(roof.peak_tflops):.1f}H{x(high):.1f}"/>',
        f'<text class="quiet" x="{x(high):.1f}" y="{y(roof.peak_tflops) - 6:.1f}"'
        f' text-anchor="end">{roof.peak_tflops:.0f} TFLOP/s of the tensor cores,'
        f" {roof.bandwidth_tb_s:.1f} TB/s of memory</text>",
        f'<text x="16" y="{_ROOF_HEIGHT / 2:g}" text-anchor="middle"'
        f' transform="rotate(-90 16 {_ROOF_HEIGHT / 2:g})">TFLOP/s</text>',
    ]
    for tick in _ticks(bottom, 1.2 * roof.peak_tflops):
        lines.append(
            f'<text x="{x(low) - 8:.1f}" y="{y(tick) + 4:.1f}" text-anchor="end">{tick:g}</text>'
        )
    for one in dict.fromkeys(shown):
        tflops = roof.tflops(1e3 * one.times.ms)
        at = f'cx="{x(roof.intensity):.1f}" cy="{y(max(tflops, bottom)):.1f}"'
        lines.append(f'<circle class="{one.schedule.kernel}" {at} r="5"/>')
        if one is found.best:
            share = found.best.times.ms * 1e3 / roof.least_us if roof.least_us else math.inf
            words = f"{tflops:.0f} TFLOP/s, {1 / share:.0%} of the roof"
            lines.append(f'<circle class="ring" {at} r="9"/>')
            lines.append(
                f'<text x="{x(roof.intensity) - 14:.1f}" y="{y(max(tflops, bottom)) + 4:.1f}"'
                f' text-anchor="end">{words}</text>'
            )
    for tick in _ticks(low, high):
        lines.append(
            f'<text x="{x(tick):.1f}" y="{base + 18:.1f}" text-anchor="middle">{tick:g}</text>'
        )
    lines.append(
        f'<text x="{_WIDTH / 2:g}" y="{base + 38:.1f}" text-anchor="middle">operations for each'
        " byte of q, k, v and o</text>"
    )
    return _end(lines)


def _begin(width: int, height: int, title: str) -> list[str]:
    return [
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {width} {height}" width="{width}"'
        f' height="{height}" role="img" aria-label="{escape(title)}">'
    ]


def _end(lines: list[str]) -> str:
    return "\n".join([*lines, "</svg>"])


def _linear(low: float, high: float, begin: float, end: float) -> Scale:
    return lambda value: begin + (end - begin) * (value - low) / max(high - low, 1e-12)


def _logarithmic(low: float, high: float, begin: float, end: float) -> Scale:
    line = _linear(math.log(low), math.log(high), begin, end)
    return lambda value: line(math.log(max(value, 1e-12)))


def _ticks(low: float, high: float) -> list[float]:
    """Round numbers in a range, about as far apart as they look on a logarithmic axis."""
    first, last = math.floor(math.log10(low)), math.ceil(math.log10(high))
    found = [m * 10.0**e for e in range(first, last + 1) for m in (1, 2, 3, 5, 7)]
    return [tick for tick in found if low <= tick <= high]


def _ms(ms: float) -> str:
    """A time with three digits: `412 µs`, `1.23 ms`."""
    return f"{ms:.3g} ms" if ms >= 1 else f"{1e3 * ms:.3g} µs"
