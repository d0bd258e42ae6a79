"""`attngen explain` about tiles: conditions in words, the map, its numbers, and the picture."""

from __future__ import annotations

import re
from pathlib import Path
from xml.etree import ElementTree

import numpy as np
import pytest

from attngen.cli.conditions import MAX_LINES, formula_lines
from attngen.frontend.check import check
from attngen.frontend.load import load_text

from .runner import Result, run, run_process, write

EXAMPLES = Path(__file__).parents[2] / "examples"
QUICK = ("--no-compile", "--arch", "sm_80", "--schedule", "kernel forward_simt")
MMA = ("--no-compile", "--arch", "sm_90a", "--schedule")
SVG = "{http://www.w3.org/2000/svg}"


@pytest.fixture(autouse=True)
def _width(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("COLUMNS", "80")


def _block(result: Result, title: str) -> list[str]:
    """The lines below a title, up to the next empty one."""
    assert result.code == 0, result.err
    lines = result.out.splitlines()
    start = next(i for i, line in enumerate(lines) if re.match(rf"{title}($|  | of )", line))
    end = next((i for i in range(start, len(lines)) if not lines[i]), len(lines))
    return [line[2:] for line in lines[start + 1 : end]]


def _conditions(result: Result) -> list[str]:
    """The lines on skipped, full and partial tiles, behind those on ranges of keys."""
    lines = _block(result, "tiles")
    start = next(i for i, line in enumerate(lines) if re.match(r"skip|full|(row|key)\d+ is", line))
    return lines[start:]


def _spec(folder: Path, *lines: str) -> Path:
    return write(folder, "attention t {\n    " + "\n    ".join(lines) + "\n}\n")


# ---- ranges ----------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("mask", "lines"),
    [
        ("kv <= qpos", ["keys         0 <= kv < qpos_last + 1"]),
        (
            "window(left = 3) or kv < 5",
            ["keys         0 <= kv < min(Skv, 5)"],
        ),
        ("kv < 0", ["keys         none: no pair attends"]),
    ],
)
def test_ranges_of_keys(mask: str, lines: list[str], tmp_path: Path) -> None:
    spec = _spec(tmp_path, f"mask {mask}")
    assert _block(run("explain", spec, *QUICK), "tiles")[: len(lines)] == lines


# ---- conditions ------------------------------------------------------------------------------


def test_conditions_of_a_causal_mask(causal: Path) -> None:
    assert _conditions(run("explain", causal, *QUICK)) == [
        "skip unless  kv_first <= qpos_last",
        "full where   kv_last <= qpos_first",
        "partial      otherwise: a row's keys are (forward_simt asks each pair)",
        "             kv < qpos + 1",
    ]


def test_what_is_read_along_rows_and_keys_has_a_minimum_and_a_maximum(documents: Path) -> None:
    lines = _conditions(run("explain", documents, *QUICK))
    assert lines[:3] == [
        "skip unless  -31 <= kv_last - qpos_first",
        "             and kv_first - qpos_last <= 0",
        "             and min(doc[b, qpos]) <= max(doc[b, kv])",
    ]
    assert "             and min(doc[b, kv]) == max(doc[b, kv])" in lines
    known = next(i for i, line in enumerate(lines) if line.startswith("known where"))
    assert lines[known + 3 : -2] == [
        "             there a row's keys are (forward_simt asks each pair)",
        "             kv < qpos + 1",
        "             and kv >= qpos - 31",
    ]
    assert lines[-2] == "partial      otherwise: the mask is evaluated pair by pair"
    assert lines[-1].strip() == "min, max: over the rows or keys of the tile"


def test_a_truth_value_that_is_read(tmp_path: Path) -> None:
    spec = _spec(tmp_path, "tensor keep : bool[B, Skv]", "mask kv <= qpos or keep[b, kv]")
    assert _conditions(run("explain", spec, *QUICK)) == [
        "skip unless  kv_first <= qpos_last",
        "             or any(keep[b, kv])",
        "full where   kv_last <= qpos_first",
        "             or all(keep[b, kv])",
        "partial      otherwise: the mask is evaluated pair by pair",
        "             any, all: over the keys of the tile",
    ]


def test_a_long_value_is_named_first(tmp_path: Path) -> None:
    spec = _spec(
        tmp_path,
        "tensor doc : int32[B, Skv]",
        "mask kv <= qpos and clamp(doc[b, kv] * 17 + 4, 1, 1000) // 3 < 99",
    )
    lines = _conditions(run("explain", spec, *QUICK))
    assert lines[0] == "key0 is      clamp(doc[b, kv] * 17 + 4, 1, 1000) // 3 < 99"
    assert "             and any(key0)" in lines
    assert "             and all(key0)" in lines


def test_without_a_mask(tmp_path: Path) -> None:
    result = run("explain", _spec(tmp_path, "output o"), *QUICK)
    assert _conditions(result) == ["full  always: there is no mask"]
    assert "map of tiles" not in result.out


def test_chains_are_split_between_their_parts() -> None:
    def lines(mask: str) -> list[str]:
        text = f"attention t {{\n    param w : int where w >= 1\n    mask {mask}\n}}\n"
        found = check(load_text(text)).attention.mask
        assert found is not None
        return formula_lines(found)

    assert lines("kv < 3 and (q < 2 and (q > 0 or max(q, kv) == 4))") == [
        "kv < 3",
        "and q < 2",
        "and (q > 0 or max(q, kv) == 4)",
    ]
    assert lines("kv < 3 or q < 2 and kv > 0") == ["kv < 3", "or q < 2 and kv > 0"]
    assert lines("kv < 3") == ["kv < 3"]
    many = lines(" or ".join(f"kv == {3 * i}" for i in range(100)))
    assert len(many) == MAX_LINES
    assert many[-1] == f"… and {100 - MAX_LINES + 1} more lines"


# ---- the map ---------------------------------------------------------------------------------


def test_the_map_of_a_causal_mask(causal: Path) -> None:
    result = run("explain", causal, *QUICK, "--shape", "Sq=64,Skv=96")
    assert _block(result, "map of tiles") == [
        "· skip  ▒ partial  █ full   a character is one tile",
        "       kv 0",
        "q  0 | █▒·",
        "q 16 | █▒·",
        "q 32 | ██▒",
        "q 48 | ██▒",
    ]
    partial = 2 * 16 * 32 - 2 * sum(range(1, 17)) - 16 * 16
    heading, numbers, *remarks = _block(result, "tiles in numbers")
    assert heading.split("  ")[0] == "tile"
    assert re.split(r" {2,}", numbers) == [
        "16 x 32", "12", "2 (16.7%)", "4 (33.3%)", "6 (50.0%)", f"{10 * 512:,}",
        f"{2 * partial / (10 * 512):.1%}",
    ]  # fmt: skip
    assert "exact with these tiles: every one that could be skipped or full is" in remarks


def test_many_tiles_share_a_character(causal: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for columns in (40, 80):
        monkeypatch.setenv("COLUMNS", str(columns))
        result = run("explain", causal, *QUICK, "--shape", "Sq=4000,Skv=8000")
        legend, _, *lines = _block(result, "map of tiles")
        step = 16 if columns == 40 else 4
        expected = f"a character is 16 x {step} tiles, 256 rows x {32 * step} keys"
        assert legend == f"· skip  ▒ partial  █ full  ░ of several kinds   {expected}"
        assert len(lines) == 16
        assert all(len(line) + 2 <= columns for line in lines)
        assert all(re.fullmatch("q +[0-9]+ [|] █+░+·*", line) for line in lines)


def test_a_pipe_without_unicode(causal: Path) -> None:
    result = run_process(
        "explain", causal, *QUICK, "--shape", "Sq=32,Skv=64", PYTHONIOENCODING="ascii:replace"
    )
    assert _block(result, "map of tiles")[0].startswith(". skip  + partial  # full")
    assert [line[-2:] for line in _block(result, "map of tiles")[2:]] == ["#+", "#+"]


def test_a_length_ends_the_map(tmp_path: Path) -> None:
    spec = _spec(tmp_path, "tensor n : int32[B]", "length q = n[b], kv = n[b]", "mask kv <= qpos")
    result = run("explain", spec, *QUICK, "--shape", "B=2,Sq=256,Skv=256", "--set", "n=64,256")
    assert len(_block(result, "map of tiles")) == 2 + 4
    assert "batch 0, head 0" in result.out


def test_every_size_of_tiles_has_its_numbers(tmp_path: Path) -> None:
    text = "attention t {\n    dtype bf16\n    head_dim 64\n    mask kv <= qpos\n}\n"
    text += "schedule {\n    kernel forward_simt\n}\n"
    text += "schedule sm_90a {\n    kernel forward_mma\n    tile q = 64, kv = 64\n}\n"
    spec = write(tmp_path, text)
    result = run("explain", spec, "--no-compile", "--arch", "sm_80,sm_90a,sm_120")
    heading, *rows = _block(result, "tiles in numbers")[:3]
    assert heading.endswith("on")
    assert [re.split(r" {2,}", row)[0] for row in rows] == ["16 x 32", "64 x 64"]
    assert [re.split(r" {2,}", row)[-1] for row in rows] == ["sm_80, sm_120", "sm_90a"]
    assert "map of tiles of 16 rows x 32 keys" in result.out


def test_a_family_that_skips_nothing_says_so(causal: Path) -> None:
    remark = "note: forward_simt uses no tile classes"
    assert remark in run("explain", causal, *QUICK).out
    spec = EXAMPLES / "causal.attn"
    assert "uses no tile classes" not in run("explain", spec, *MMA, "kernel forward_mma").out


def test_of_very_many_tiles_some_are_classified(
    causal: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from attngen.analysis import tile_map

    monkeypatch.setattr(tile_map, "MAX_ALONG", 64)
    result = run("explain", causal, *QUICK, "--shape", "Sq=4096,Skv=4096")
    assert "a character is about" in result.out
    lines = _block(result, "tiles in numbers")
    assert lines[1].count("about") == 5
    assert "estimated from 64 rows and 64 columns of tiles, evenly spaced" in lines


def test_of_very_many_pairs_some_are_decided(causal: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from attngen.analysis import tile_map

    monkeypatch.setattr(tile_map, "MAX_PAIRS", 20 * 512)
    lines = _block(run("explain", causal, *QUICK), "tiles in numbers")
    found = re.search(r"about ([\d.]+)%$", lines[1])
    assert found is not None
    assert float(found[1]) == pytest.approx(2.9, abs=0.5)
    assert "pairs were decided in 20 of 64 partial tiles" in lines


@pytest.mark.parametrize("shape", ["Sq=0", "Skv=0", "B=0"])
def test_nothing_to_map(shape: str, causal: Path, tmp_path: Path) -> None:
    result = run("explain", causal, *QUICK, "--shape", shape)
    assert result.code == 0
    assert "map of tiles" not in result.out
    path = tmp_path / "map.svg"
    result = run("explain", causal, *QUICK, "--shape", shape, "--svg", path)
    assert result.code == 2
    assert "error[A711]" in result.err
    assert not path.exists()


# ---- what is not known -----------------------------------------------------------------------


def test_a_divisor_that_may_be_negative_and_what_helps(tmp_path: Path) -> None:
    lines = "param w : int = 64", "mask qpos // w == kv // w and kv % max(Skv // 2, 1) < 99"
    result = run("explain", _spec(tmp_path, *lines), *QUICK)
    expected = "decided pair by pair, as it may be negative: declare it `where w >= 0`"
    assert f"note: `//` and `%` by `w` are {expected}" in result.out
    assert "without any pair that attends" in result.out
    assert "note: conditions may hold" not in result.out
    bounded = _spec(tmp_path, lines[0] + " where w >= 1", lines[1])
    result = run("explain", bounded, *QUICK)
    assert "pair by pair, as it" not in result.out
    assert "exact with these tiles" in result.out


def test_a_size_that_may_be_zero_is_known(tmp_path: Path) -> None:
    """A remainder by 0 is 0."""
    spec = _spec(tmp_path, "let n = Skv // 2", "mask kv % n <= qpos % n")
    assert "pair by pair, as it" not in run("explain", spec, *QUICK).out


def test_a_mask_of_which_nothing_is_known(tmp_path: Path) -> None:
    result = run("explain", _spec(tmp_path, "param w : int = 7", "mask kv % w == qpos % w"), *QUICK)
    assert _conditions(result)[:2] == ["skip     never", "full     never"]


def test_a_table_is_known_where_a_tile_reads_few_elements() -> None:
    spec = EXAMPLES / "bigbird.attn"
    note = "note: `random` is known where a tile reads at most 64 elements of it"
    help_ = "note: a tile is known that reads at most 64 elements of `random`: smaller help"
    result = run("explain", spec, *QUICK)
    assert note in result.out
    assert help_ not in result.out
    result = run("explain", spec, *QUICK, "-D", "block=2", "--set", "random=false")
    assert note in result.out
    assert help_ in result.out


def test_values_in_no_order(tmp_path: Path) -> None:
    spec = _spec(tmp_path, "tensor doc : int32[B, Skv]", "mask doc[b, qpos] == doc[b, kv]")
    shape = ("--shape", "B=1,Sq=256,Skv=256")
    help_ = "values in order along the tokens are told apart best"
    assert help_ not in run("explain", spec, *QUICK, *shape).out
    doc = np.arange(256, dtype=np.int32)[None] % 4 // 2 + np.arange(256) // 128 * 9
    doc[:, 0] = 99
    np.save(tmp_path / "doc.npy", doc.astype(np.int32))
    result = run("explain", spec, *QUICK, *shape, "--input", f"doc={tmp_path / 'doc.npy'}")
    assert "not exact: among the partial tiles are" in result.out
    assert help_ in result.out


def test_floats(tmp_path: Path) -> None:
    spec = _spec(tmp_path, "tensor t : float[Skv]", "mask t[kv] <= qpos * 0.5 + 0.5")
    np.save(tmp_path / "t.npy", np.zeros(128, np.float32))
    shape = ("--shape", "Sq=128,Skv=128", "--input", f"t={tmp_path / 't.npy'}")
    result = run("explain", spec, *QUICK, *shape)
    assert "note: a float comparison is decided pair by pair" in result.out
    assert "note: a comparison of integers is known for a whole tile" in result.out


def test_conditions_that_hold_nowhere_together(tmp_path: Path) -> None:
    spec = _spec(tmp_path, "mask kv < qpos and kv > qpos - 2 and kv % 40 == 39 and qpos % 40 == 1")
    result = run("explain", spec, *QUICK, "--shape", "Sq=256,Skv=256")
    assert "note: conditions may hold in a tile one by one, and nowhere together" in result.out


def test_a_score_line_that_masks(tmp_path: Path) -> None:
    """As far as its condition does not read the score, it is a mask, and tiles know it."""
    note = "note: tiles know nothing of the pairs that a score line makes -inf"
    result = run("explain", _spec(tmp_path, "score where(kv > qpos, -inf, s)"), *QUICK)
    assert note not in result.out
    assert _conditions(result)[0] == "skip unless  kv_first <= qpos_last"
    lines = "mask kv <= qpos", "score where(s < 0.5, -inf, s)"
    assert note in run("explain", _spec(tmp_path, *lines), *QUICK).out
    lines = "mask kv <= qpos", "score where(s < 0.5, -2.0, s)"
    assert note not in run("explain", _spec(tmp_path, *lines), *QUICK).out


# ---- the picture -----------------------------------------------------------------------------


def _picture(path: Path) -> ElementTree.Element:
    text = path.read_text("utf-8")
    assert "prefers-color-scheme: dark" in text
    assert not re.search(r"href|@import|url\(|<script", text)
    return ElementTree.fromstring(text)


def _areas(picture: ElementTree.Element) -> dict[str, float]:
    """Shares of the map that each class of tiles covers, all but the ground."""
    (ground,) = (
        r for r in picture.iter(f"{SVG}rect") if r.get("class") == "skip" and not r.get("x")
    )
    whole = float(ground.get("width", 0)) * float(ground.get("height", 0))
    areas = {}
    for path in picture.iter(f"{SVG}path"):
        if path.get("class") == "frame":
            continue
        pieces = re.findall(r"M([\d.]+) ([\d.]+)H([\d.]+)V([\d.]+)H\1Z", path.get("d", ""))
        assert "".join(f"M{a} {b}H{c}V{d}H{a}Z" for a, b, c, d in pieces) == path.get("d")
        area = sum((float(c) - float(a)) * (float(d) - float(b)) for a, b, c, d in pieces)
        areas[path.get("class", "")] = area / whole
    return areas


def test_the_picture(causal: Path, tmp_path: Path) -> None:
    path = tmp_path / "map.svg"
    result = run("explain", causal, *QUICK, "--shape", "Sq=256,Skv=512", "--svg", path)
    assert result.code == 0
    assert f"the map is in {path}" in result.out
    picture = _picture(path)
    title = picture.find(f"{SVG}title")
    assert title is not None
    assert title.text == "causal_lm: tiles of 16 rows x 32 keys, batch 0, head 0"
    texts = [text.text for text in picture.iter(f"{SVG}text")]
    assert {"key kv, in tokens", "query row q, in tokens", "0", "128", "512"} <= set(texts)
    assert "partial: the mask is evaluated pair by pair (16 tiles, 6.2%)" in texts
    assert "neighbouring tiles of several kinds" not in texts
    full = sum((256 + 16 * i + 1) // 32 for i in range(16)) / 256
    assert _areas(picture) == pytest.approx({"partial": 1 / 16, "full": full})


def test_a_picture_of_many_tiles(causal: Path, tmp_path: Path) -> None:
    path = tmp_path / "map.svg"
    assert run("explain", causal, *QUICK, "--shape", "Sq=16384,Skv=16384", "--svg", path).code == 0
    areas = _areas(_picture(path))
    assert set(areas) == {"full", "mixed"}
    assert 0.45 < areas["full"] < 0.5
    assert path.stat().st_size < 100_000


def test_a_picture_without_a_mask(tmp_path: Path) -> None:
    path = tmp_path / "map.svg"
    assert run("explain", _spec(tmp_path, "output o"), *QUICK, "--svg", path).code == 0
    assert _areas(_picture(path)) == pytest.approx({"full": 1.0})


@pytest.mark.parametrize("shape", ["Sq=1,Skv=1", "Sq=1,Skv=100000", "Sq=5000,Skv=3"])
def test_pictures_of_every_shape(shape: str, causal: Path, tmp_path: Path) -> None:
    path = tmp_path / "map.svg"
    assert run("explain", causal, *QUICK, "--shape", shape, "--svg", path).code == 0
    picture = _picture(path)
    assert float(picture.get("width", 0)) < 800
    assert float(picture.get("height", 0)) < 800


def test_a_picture_that_cannot_be_written(causal: Path, tmp_path: Path) -> None:
    result = run("explain", causal, *QUICK, "--svg", tmp_path / "none" / "map.svg")
    assert result.code == 2
    assert "error[A713]" in result.err
    assert not result.out


def test_a_param_without_a_value_has_no_picture(tmp_path: Path) -> None:
    path = tmp_path / "map.svg"
    path.write_text("before")
    result = run("explain", _spec(tmp_path, "param w : int", "mask kv < w"), *QUICK, "--svg", path)
    assert result.code == 2
    assert "this problem has no map of tiles" in result.err
    assert path.read_text() == "before"
