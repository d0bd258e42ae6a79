"""Plots of records that were made up for them, read back as XML."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from itertools import pairwise
from pathlib import Path
from typing import Any
from xml.etree import ElementTree

import pytest

from benchmarks.plots import Axis, draw_forward, draw_ratio, draw_roofline, find_intensity, main

ENVIRONMENT: dict[str, Any] = {"suite": "environment", "gpu": "NVIDIA H200"}
SIZES: dict[str, Any] = {"B": 1, "Hq": 2, "Hkv": 2, "D": 64, "Dv": 64}


def timed(mask: str, S: int, peer: str, tflops: float, **more: Any) -> dict[str, Any]:
    """A record of 1 TFLOP, so that its time is 1000 / tflops ms."""
    made = {**SIZES, "suite": "forward", "mask": mask, "S": S, "peer": peer, "lane": peer}
    made |= {"ms": 1000 / tflops, "tflops": tflops, **more}
    return {"cell": f"{made['suite']}-{mask}-d{made['D']}-s{S}", **made}


RECORDS = [
    ENVIRONMENT,
    timed("full", 1024, "attngen", 250.0),
    timed("full", 1024, "fa3", 500.0),
    timed("full", 4096, "attngen", 400.0),
    timed("full", 4096, "fa3", 500.0),
    timed("causal", 2048, "attngen", 200.0),
    {**timed("causal", 2048, "fa3", 1.0), "ms": None, "tflops": None, "reason": "no kernel"},
    timed("full", 1024, "attngen", 100.0, D=128),
]


def read(picture: str | None) -> ElementTree.Element:
    assert picture is not None
    return ElementTree.fromstring(picture)


def find(root: ElementTree.Element, tag: str, style: str = "") -> Iterator[ElementTree.Element]:
    """The elements of a tag that have all of these classes."""
    for element in root.iter(f"{{http://www.w3.org/2000/svg}}{tag}"):
        if set(style.split()) <= set(element.get("class", "").split()):
            yield element


def corners(path: ElementTree.Element) -> list[tuple[float, float]]:
    numbers = [float(n) for n in re.findall(r"[-\d.]+", path.get("d", ""))]
    return list(zip(numbers[::2], numbers[1::2], strict=True))


def centres(root: ElementTree.Element, style: str) -> list[tuple[float, float]]:
    """Of the points that say what they are; those of a legend do not."""
    return [
        (float(c.get("cx", "")), float(c.get("cy", "")))
        for c in find(root, "circle", style)
        if len(c)
    ]


def texts(root: ElementTree.Element, style: str = "") -> list[str]:
    return [element.text or "" for element in find(root, "text", style)]


def test_an_axis_is_linear_or_logarithmic() -> None:
    assert Axis(1024, 4096, 0, 300).at(2048) == pytest.approx(150)
    assert Axis(0, 500, 200, 0, is_log=False).at(100) == pytest.approx(160)


def test_forward_has_a_panel_for_each_mask_and_head_dim_of_the_file() -> None:
    panels = list(find(read(draw_forward(RECORDS)), "g", "panel"))
    assert [texts(panel, "head") for panel in panels] == [
        ["full, D 64"],
        ["causal, D 64"],
        ["full, D 128"],
    ]
    assert [len(list(find(panel, "path", "line"))) for panel in panels] == [2, 1, 1]


def test_forward_points_stand_where_length_and_speed_say() -> None:
    """1024 to 4096 tokens over 300 pixels, 500 TFLOP/s over 220."""
    panels = list(find(read(draw_forward(RECORDS)), "g", "panel"))
    (line,) = find(panels[0], "path", "line attngen")
    assert corners(line) == [(0, 110), (300, 44)] == centres(panels[0], "attngen")
    assert centres(panels[0], "fa3") == [(0, 0), (300, 0)]
    assert centres(panels[1], "attngen") == [(150, 132)]
    assert centres(panels[1], "fa3") == []


def test_labels_of_lines_that_end_together_stand_apart() -> None:
    lanes = ["fa2", "fa3", "cudnn", "flex"]
    root = read(draw_forward([timed("full", 1024, lane, 0.1 + i) for i, lane in enumerate(lanes)]))
    levels = sorted(float(label.get("y", "")) for label in find(root, "text", "label"))
    assert len(levels) == 4
    assert all(b - a >= 14 for a, b in pairwise(levels))


def test_lanes_of_attngen_differ_in_style() -> None:
    lanes = ["attngen: auto", "attngen: kernel forward_mma"]
    root = read(draw_forward([timed("full", 1024, "attngen", 9.0, lane=lane) for lane in lanes]))
    assert [path.get("class") for path in find(root, "path", "line")][:2] == [
        "line attngen",
        "line attngen second",
    ]


def test_ratio_has_a_row_for_each_cell_and_a_dot_where_both_ran() -> None:
    """0.5 to 1 over 420 pixels."""
    root = read(draw_ratio(RECORDS))
    dots = centres(root, "attngen")
    assert dots == [(0, 30), (pytest.approx(284.79, abs=0.01), 50)]
    (one,) = find(root, "path", "one")
    assert one.get("d") == "M420 0V100"
    said = texts(root)
    assert [text for text in said if " of " in text] == ["0.500 of fa3", "0.800 of fa3"]
    assert said.count("no peer has a time") == 2
    assert texts(root, "head") == ["forward: geometric mean 0.632"]


def test_ratio_shows_all_suites_and_no_cold_start() -> None:
    both = [timed("causal", 8192, p, 100.0, suite="gqa") for p in ("attngen", "fa3")]
    cold = [timed("causal", 4096, p, 1.0, suite="cold") for p in ("attngen", "fa3")]
    root = read(draw_ratio([*RECORDS, *both, *cold]))
    assert [head.split(":")[0] for head in texts(root, "head")] == ["forward", "gqa"]
    assert len(centres(root, "attngen")) == 3


def test_intensity_counts_each_of_the_four_tensors_once() -> None:
    record = timed("full", 1000, "attngen", 100.0, Hq=8, Hkv=2, D=64, Dv=128, B=3)
    elements = 3 * 1000 * (8 * 64 + 2 * 64 + 2 * 128 + 8 * 128)
    assert find_intensity(record) == pytest.approx(1e12 / (2 * elements))


def test_roofline_points_are_those_of_attngen_below_the_roof() -> None:
    root = read(draw_roofline(RECORDS))
    (roof,) = find(root, "path", "roof")
    low, knee, end = corners(roof)
    assert low[0] < knee[0] < end[0] == 700
    assert low[1] > knee[1] == end[1]
    ridge = 989 / 4.8
    x = Axis(2.0**5, 2.0**20, 0, 700)
    y = Axis(2.0**6, 2.0**10, 400, 0)
    assert [knee] == [pytest.approx((x.at(ridge), y.at(989)), abs=0.01)]
    own = [r for r in RECORDS if r.get("peer") == "attngen"]
    expected = [(x.at(find_intensity(r)), y.at(r["tflops"])) for r in own]
    assert centres(root, "attngen") == [pytest.approx(place, abs=0.01) for place in expected]


@pytest.mark.parametrize("gpu", ["NVIDIA H200 NVL", "NVIDIA GH200 480GB", None])
def test_there_is_no_roof_for_another_gpu(gpu: str | None) -> None:
    environment = {"suite": "environment"} if gpu is None else {**ENVIRONMENT, "gpu": gpu}
    root = read(draw_roofline([environment, *RECORDS[1:]]))
    assert not list(find(root, "path", "roof"))
    assert not [text for text in texts(root) if "TB/s" in text]
    assert len(centres(root, "attngen")) == 4


def test_names_are_escaped() -> None:
    lane, cell, gpu = 'attngen: a < b & "c"', "<cell> & more", "<GPU> & 'more'"
    own = timed("<full>", 1024, "attngen", 1.0, lane=lane, cell=cell)
    other = timed("<full>", 1024, "fa3", 1.0, cell=cell)
    records = [{**ENVIRONMENT, "gpu": gpu}, own, other]
    forward, ratio, roofline = (
        read(draw(records)) for draw in (draw_forward, draw_ratio, draw_roofline)
    )
    assert texts(forward, "label attngen") == [lane]
    assert texts(forward, "head") == ["<full>, D 64"]
    assert cell in texts(ratio)
    assert lane in texts(roofline)
    assert all(gpu in texts(root, "title")[0] for root in (forward, ratio, roofline))


def test_what_has_no_times_is_not_drawn() -> None:
    nothing: list[dict[str, Any]] = [ENVIRONMENT]
    assert draw_forward(nothing) is draw_ratio(nothing) is draw_roofline(nothing) is None
    peers = [r for r in RECORDS if r.get("peer") != "attngen"]
    assert draw_forward(peers) is not None
    assert draw_ratio(peers) is draw_roofline(peers) is None
    gqa = [timed("causal", 8192, "attngen", 100.0, suite="gqa")]
    assert draw_forward(gqa) is draw_ratio(gqa) is None
    assert draw_roofline(gqa) is not None


def test_the_command_writes_what_it_can_and_the_same_bytes_each_time(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    file = tmp_path / "2026-11-30-h200.jsonl"
    gqa = [timed("causal", 8192, p, 100.0, suite="gqa") for p in ("attngen", "fa3")]
    file.write_text("\n".join(map(json.dumps, [ENVIRONMENT, *gqa])) + "\n", encoding="utf-8")
    main([str(file)])
    assert capsys.readouterr().out.splitlines() == [
        "2026-11-30-h200-forward.svg is not written: the suite forward has no times",
        "2026-11-30-h200-ratio.svg is written",
        "2026-11-30-h200-roofline.svg is written",
    ]
    main([str(file), "--out", str(tmp_path / "again")])
    written = sorted(path.name for path in tmp_path.glob("*.svg"))
    assert written == ["2026-11-30-h200-ratio.svg", "2026-11-30-h200-roofline.svg"]
    for name in written:
        assert (tmp_path / name).read_bytes() == (tmp_path / "again" / name).read_bytes()


def test_a_file_that_was_cut_off_is_drawn_as_far_as_it_goes(tmp_path: Path) -> None:
    file = tmp_path / "cut.jsonl"
    whole = "\n".join(map(json.dumps, RECORDS)) + "\n"
    file.write_text(whole[:-20], encoding="utf-8")
    main([str(file)])
    assert (tmp_path / "cut-forward.svg").read_text(encoding="utf-8") == draw_forward(RECORDS[:-1])
