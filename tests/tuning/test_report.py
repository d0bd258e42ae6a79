"""The page is well formed, holds every schedule, and says what the numbers say."""

from __future__ import annotations

import math
import re
from dataclasses import replace
from html import escape
from xml.etree import ElementTree

import pytest

from attngen.ir.schedule import Schedule
from attngen.tuning import report
from attngen.tuning.cost_model import CostModel
from attngen.tuning.report import Section, draw_bars, draw_roof, draw_scatter, render_page
from attngen.tuning.search import Findings
from attngen.tuning.space import describe

from .problems import CAUSAL, specialised
from .test_search import CALL, H200, Simulation, near_to, search

ROOF = CostModel(specialised(CAUSAL, "bf16", (128, 128)), CALL, H200).roof()


@pytest.fixture(scope="module")
def found() -> Findings:
    law = near_to(128, 160)
    return search(Simulation(lambda s: -1.0 if s.tile_kv == 112 else law(s)))


def page_of(found: Findings, title: str = "a <call> & another") -> str:
    return render_page("Tuning", [Section(title, found, ROOF)])


def test_every_schedule_is_on_the_page_with_its_time_or_reason(found: Findings) -> None:
    page = page_of(found)
    for one in found.measured:
        assert describe(one.schedule) in page
    for left in found.discarded:
        row = f"<tr><td>{describe(left.schedule)}</td><td>{escape(left.reason)}</td></tr>"
        assert row in page
    assert "wrong, or did harm: " in page


def test_the_page_is_well_formed_and_needs_nothing_else(found: Findings) -> None:
    page = page_of(found)
    body = page.removeprefix("<!doctype html>\n").replace('<meta charset="utf-8">', "")
    body = body.replace('<meta name="viewport" content="width=device-width">', "")
    ElementTree.fromstring(body)
    links = re.findall(r"(?:src|href|url)\s*[=(]", page)
    assert links == []
    assert "a &lt;call&gt; &amp; another" in page


def test_the_summary_says_how_much_was_gained(found: Findings) -> None:
    assert found.best is not None
    assert found.default is not None
    gain = found.default.times.ms / found.best.times.ms - 1
    assert f"{gain:.1%} longer" in page_of(found)
    same = replace(found, measured=(found.default,))
    assert "It is what runs where nothing is tuned." in page_of(same)


def test_bars_are_as_long_as_the_times(found: Findings) -> None:
    picture = ElementTree.fromstring(draw_bars(found))
    space = "{http://www.w3.org/2000/svg}"
    widths = [float(bar.attrib["width"]) for bar in picture.iter(f"{space}rect")]
    times = [m.times.ms for m in found.measured[: len(widths)]]
    assert len(widths) == min(30, len(found.measured))
    for width, ms in zip(widths, times, strict=True):
        assert width / widths[0] == pytest.approx(ms / times[0], rel=2e-3)


def test_points_lie_inside_of_their_pictures(found: Findings) -> None:
    for text in (draw_scatter(found), draw_roof(Section("", found, ROOF))):
        picture = ElementTree.fromstring(text)
        width, height = (float(picture.attrib[name]) for name in ("width", "height"))
        points = list(picture.iter("{http://www.w3.org/2000/svg}circle"))
        assert points
        for point in points:
            x, y = float(point.attrib["cx"]), float(point.attrib["cy"])
            assert 0 < x < width
            assert 0 < y < height
            assert math.isfinite(x + y)


def test_a_search_without_a_time_still_has_a_page(found: Findings) -> None:
    page = page_of(replace(found, measured=(), is_interrupted=True))
    assert "Nothing was timed." in page
    assert "<svg" not in page


def test_the_longest_label_has_room() -> None:
    longest = Schedule(
        kernel="forward_wgmma", tile_q=128, tile_kv=160, stages=2, warps=12,
        late_values=48, early_weights=160, late_keys=False,
    )  # fmt: skip
    wide = 6.8  # pixels of a character, in a wide font of 12
    assert wide * len(describe(longest)) < report._LABEL
