"""Results as tables in Markdown.

    python -m benchmarks.report FILE.jsonl [--out FILE.md]

For each suite: the speed of every peer in every cell, how attngen compares with the best of the
others, the geometric mean and the smallest of these ratios, and what is missing and why.
"""

from __future__ import annotations

import argparse
import json
import math
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any, Final, TypeAlias, final

from attngen.record import record
from benchmarks.peers import PEERS

__all__ = [
    "Row",
    "geometric_mean",
    "main",
    "make_rows",
    "order_lanes",
    "read_records",
    "render_report",
]

Record: TypeAlias = Mapping[str, Any]
_OWN: Final = "attngen"
_SDPA: Final = ("fa2", "cudnn")
_TITLES: Final = {
    "forward": "Forward: 16k tokens, 2048 / D heads",
    "gqa": "Grouped queries: 64 heads over 8, D 128",
    "variants": "Variants: B 2, S 8192, 16 heads, D 128; visible pairs only",
}


@final
@record(eq=False)
class Row:
    """One cell: the records of all lanes that have a time, by lane."""

    cell: str
    records: Mapping[str, Record]

    @property
    def own(self) -> Record | None:
        """attngen's fastest."""
        return _fastest(r for r in self.records.values() if r["peer"] == _OWN)

    @property
    def best_other(self) -> Record | None:
        """The fastest of the others."""
        return _fastest(r for r in self.records.values() if r["peer"] != _OWN)

    @property
    def ratio(self) -> float | None:
        """attngen's speed relative to the best of the others; None where one of them is missing."""
        own, other = self.own, self.best_other
        return None if own is None or other is None else other["ms"] / own["ms"]

    @property
    def error_ratio(self) -> float | None:
        """attngen's rms error relative to that of PyTorch's SDPA, the better one."""
        sdpa = [r["rms_err"] for r in self.records.values() if r["peer"] in _SDPA]
        if self.own is None or not sdpa or min(sdpa) == 0:
            return None
        return float(self.own["rms_err"] / min(sdpa))


def read_records(text: str) -> list[dict[str, Any]]:
    """The records of a JSON Lines text; a last line that was cut off is left out."""
    lines = text.split("\n")
    whole = lines[:-1]  # what follows the last newline was not written to its end
    return [json.loads(line) for line in whole if line]


def make_rows(records: Iterable[Record], suite: str) -> tuple[Row, ...]:
    """The cells of a suite, in the order in which they were run."""
    cells: dict[str, dict[str, Record]] = {}
    for found in records:
        if found["suite"] == suite:
            lanes = cells.setdefault(found["cell"], {})
            if found["ms"] is not None:
                lanes[found["lane"]] = found
    return tuple(Row(cell, lanes) for cell, lanes in cells.items())


def order_lanes(records: Iterable[Record]) -> list[str]:
    """All lanes, in the order of the peers."""
    found = {r["lane"]: PEERS.index(r["peer"]) for r in records}
    return sorted(found, key=lambda lane: (found[lane], lane))


def geometric_mean(values: Sequence[float]) -> float | None:
    """None of nothing."""
    if not values:
        return None
    return math.exp(math.fsum(map(math.log, values)) / len(values))


def render_report(records: Sequence[Record]) -> str:
    """The page: environment, a table for each suite that was run, and what is missing."""
    parts = [_render_environment(records)]
    for suite, title in _TITLES.items():
        rows = make_rows(records, suite)
        if rows:
            parts.append(_render_suite(title, rows))
    if any(r["suite"] == "cold" for r in records):
        parts.append(_render_cold(records))
    if any(r.get("mask_ms") is not None for r in records):
        parts.append(_render_mask_building(records))
    parts += [part for part in (_render_refusals(records), _render_end(records)) if part]
    return "\n\n".join(parts) + "\n"


# ---- the parts -----------------------------------------------------------------------------


def _render_environment(records: Sequence[Record]) -> str:
    environment = next((r for r in records if r["suite"] == "environment"), {})
    lines = [f"# Attention on {environment.get('gpu', 'an unknown device')}", ""]
    versions: Mapping[str, str] = environment.get("versions", {})
    facts = {
        "date": environment.get("date"),
        "driver": environment.get("driver"),
        "commit": environment.get("commit"),
        "Python": environment.get("python"),
        "packages": ", ".join(f"{name} {version}" for name, version in sorted(versions.items())),
        "clocks at the start": _describe_clocks(environment.get("clocks")),
        "clocks at the end": _describe_clocks(_end(records).get("clocks")),
    }
    lines += _table(["", ""], [[name, str(value)] for name, value in facts.items() if value])
    missing: Mapping[str, str] = environment.get("missing", {})
    if missing:
        lines += ["", "Missing here:", ""]
        lines += [f"- {name}: {reason}" for name, reason in missing.items()]
    return "\n".join(lines)


def _render_suite(title: str, rows: Sequence[Row]) -> str:
    lanes = order_lanes(r for row in rows for r in row.records.values())
    head = ["cell", *lanes, "best peer", "attngen / best", "error / SDPA's"]
    body = []
    for row in rows:
        other = row.best_other
        speeds = [
            _number(row.records[lane]["tflops"], 1) if lane in row.records else "–"
            for lane in lanes
        ]
        best = "–" if other is None else str(other["lane"])
        body.append([row.cell, *speeds, best, _number(row.ratio, 3), _number(row.error_ratio, 2)])
    lines = [f"## {title}", "", "TFLOP/s, median.", "", *_table(head, body), "", _summary(rows)]
    return "\n".join(lines)


def _summary(rows: Sequence[Row]) -> str:
    """The ratios of all cells in a sentence or two."""
    known = [(row.ratio, row.cell) for row in rows if row.ratio is not None]
    if not known:
        return "No cell has both attngen and another peer."
    mean = _number(geometric_mean([ratio for ratio, _ in known]), 3)
    smallest, cell = min(known)
    return (
        f"attngen / best peer over {len(known)} of {len(rows)} cells: geometric mean {mean},"
        f" smallest {smallest:.3f} ({cell})."
    )


def _render_cold(records: Sequence[Record]) -> str:
    head = ["peer", "first call, ms", "at a new length, ms", "first call, caches filled, ms"]
    body = [
        [r["lane"], _number(r["ms"], 0), _number(r["new_length_ms"], 1), _number(r["cached_ms"], 0)]
        for r in records
        if r["suite"] == "cold" and r["ms"] is not None
    ]
    return "\n".join(["## Cold start", "", *_table(head, body)])


def _render_mask_building(records: Sequence[Record]) -> str:
    found = [r for r in records if r.get("mask_ms") is not None]
    head = ["cell", "peer", "building the mask, ms", "attention, ms"]
    body = [[r["cell"], r["lane"], _number(r["mask_ms"], 2), _number(r["ms"], 3)] for r in found]
    note = "Needed before each new mask; not part of the times."
    return "\n".join(["## Mask building", "", note, "", *_table(head, body)])


def _render_refusals(records: Sequence[Record]) -> str:
    """Who refused which cells, one line for each reason."""
    cells: dict[tuple[str, str], list[str]] = {}
    for r in records:
        if "cell" in r and r["ms"] is None:
            cells.setdefault((r["lane"], r["reason"]), []).append(r["cell"])
    if not cells:
        return ""
    lines = [f"- {lane}: {reason} ({', '.join(names)})" for (lane, reason), names in cells.items()]
    return "\n".join(["## Not run", "", *lines])


def _render_end(records: Sequence[Record]) -> str:
    end = _end(records)
    if not end:
        return "The run was ended from outside; what it measured until then is here."
    lines = []
    if end["left_out"]:
        lines.append(f"Left out, because the time was used up: {', '.join(end['left_out'])}.")
    if end["lost"]:
        lines.append(f"The run ended early: {end['lost']}.")
    return "\n".join(lines)


# ---- words and numbers ---------------------------------------------------------------------


def _fastest(records: Iterable[Record]) -> Record | None:
    return min(records, key=lambda r: float(r["ms"]), default=None)


def _end(records: Sequence[Record]) -> Record:
    return next((r for r in records if r["suite"] == "end"), {})


def _describe_clocks(clocks: Mapping[str, float | None] | None) -> str:
    if not clocks:
        return ""
    return ", ".join(f"{name} {value:g}" for name, value in clocks.items() if value is not None)


def _number(value: float | None, digits: int) -> str:
    return "–" if value is None else f"{value:.{digits}f}"


def _table(head: Sequence[str], body: Sequence[Sequence[str]]) -> list[str]:
    rows = [head, ["---"] * len(head), *body]
    return ["| " + " | ".join(cell.replace("|", "\\|") for cell in row) + " |" for row in rows]


def main(arguments: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.report", description=__doc__)
    parser.add_argument("file", type=Path)
    parser.add_argument("--out", type=Path, help="a file; left out, the report is printed")
    given = parser.parse_args(arguments)
    report = render_report(read_records(given.file.read_text(encoding="utf-8")))
    if given.out is None:
        print(report, end="")
    else:
        given.out.write_text(report, encoding="utf-8")


if __name__ == "__main__":
    main()
