"""`attngen tune`: with no GPU, by the model, with recorded times, and on the CPU."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from attngen.cli import tune as module
from attngen.tuning.call import Call, Subject
from attngen.tuning.search import Findings, Plan, Progress, Tell
from attngen.tuning.store import Store
from attngen.tuning.timing import RacePlan
from attngen.tuning.tune import Machine, contents_of, host_machine
from attngen.tuning.tune import tune as tune_for_real

from .runner import run

SHAPES = ("--shapes", "B=1,Hq=2,Hkv=1,Sq=40,Skv=40")
QUICK = RacePlan(min_rounds=2, max_rounds=2, sample_ms=0.0, warm_ms=0.0)


@pytest.fixture
def quick(monkeypatch: pytest.MonkeyPatch, host_compiler: None) -> None:
    """Races of two rounds; everything else is as it is."""

    def tune(
        subject: Subject, calls: Sequence[Call], machine: Machine, plan: Plan, tell: Tell
    ) -> Findings:
        return tune_for_real(subject, calls, machine, replace(plan, race=QUICK, final=None), tell)

    monkeypatch.setattr(module, "tune", tune)


@pytest.fixture
def recording(quick: None, monkeypatch: pytest.MonkeyPatch) -> None:
    """Times of the CPU are kept as if they were a GPU's."""
    machine = replace(host_machine(), driver="13.0")
    monkeypatch.setattr(module, "host_machine", lambda: machine)


def test_without_a_gpu_it_says_what_can_be_done(causal: Path) -> None:
    found = run("tune", causal)
    assert found.code == 2
    assert "A721" in found.err
    for option in ("--dry-run", "--replay", "--device cpu"):
        assert option in found.err


def test_a_dry_run_ranks_and_rejects_with_reasons(documents: Path) -> None:
    found = run("tune", documents, "--dry-run", "--device", "h200", "--shapes", "B=2,Sq=2000")
    assert found.code == 0
    lines = found.out.splitlines()
    assert lines[0].startswith("documents  bf16, head dim 32, B 2, Hq 4, Hkv 2, Sq 2000, Skv 2000")
    assert "sm_90a-132sm" in lines[0]
    times = [float(line.split()[1]) for line in lines[3:27]]
    assert times == sorted(times)
    assert sum(line.split()[0] == "default" for line in lines[3:27]) <= 1
    assert "chosen without a measurement: forward_" in found.out
    assert "forward_wgmma: its head dims" in found.out or "do not fit sm_90a" in found.out


@pytest.mark.parametrize(
    ("options", "words"),
    [
        (("--shard", "3/2"), "is no part"),
        (("--budget", "soon"), "is no duration"),
        (("--device", "h2000", "--dry-run"), "unknown device"),
        (("--shapes", "Sqq=3", "--dry-run"), "Sqq"),
        (("--replay", "nowhere.jsonl"), "nowhere.jsonl"),
    ],
)
def test_what_is_not_possible_is_said(causal: Path, options: tuple[str, ...], words: str) -> None:
    found = run("tune", causal, *options)
    assert found.code == 2
    assert words in found.err


def test_shards_are_all_shapes_once(causal: Path) -> None:
    sizes = [str(n) for n in (100, 200, 300, 400, 500)]
    shapes = [word for size in sizes for word in ("--shapes", f"Sq={size}")]
    seen = []
    for part in ("1/2", "2/2"):
        out = run("tune", causal, "--dry-run", "--device", "h200", *shapes, "--shard", part).out
        lines = [line for line in out.splitlines() if line.startswith("causal_lm")]
        seen.append([line.split(" Sq ")[1].split(",")[0] for line in lines])
    assert seen == [["100", "300", "500"], ["200", "400"]]


def test_a_rehearsal_times_and_reports_and_keeps_nothing(
    causal: Path, tmp_path: Path, quick: None
) -> None:
    page, folder = tmp_path / "report.html", tmp_path / "tuned"
    found = run(
        "tune", causal, *SHAPES, "--device", "cpu", "--most", "2", "--report", page, "-o", folder
    )
    assert found.code == 0, found.err
    assert "fastest" in found.out
    assert "2 timed" in found.out
    assert "rehearsal" in found.err
    assert not folder.exists()
    assert "forward_simt" in page.read_text(encoding="utf-8")


def test_what_was_timed_is_kept_and_can_be_replayed(
    causal: Path, tmp_path: Path, recording: None
) -> None:
    folder = tmp_path / "tuned"
    first = run("tune", causal, *SHAPES, "--device", "cpu", "--most", "3", "-o", folder)
    assert first.code == 0, first.err
    ((device, op, contents),) = Store(folder).files()
    assert len(contents.records) == 3
    assert contents.definitions[0].op == op
    file = folder / device.name / f"{op}.jsonl"
    again = run("tune", causal, *SHAPES, "--replay", file, "--most", "3")
    assert again.code == 0, again.err
    fastest = [line for line in first.out.splitlines() if "fastest" in line]
    assert fastest[0].split()[1:3] == _fastest(again.out)
    other = run("tune", causal, "--shapes", "Sq=4000", "--replay", file)
    assert other.code == 2
    assert "it has no record of" in other.err


def _fastest(out: str) -> list[str]:
    (line,) = (line for line in out.splitlines() if "fastest" in line)
    return line.split()[1:3]


def test_an_interrupt_keeps_what_was_measured(
    causal: Path, tmp_path: Path, recording: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    quick_tune: Any = module.tune

    def tune(subject: Any, calls: Any, machine: Any, plan: Any, tell: Tell) -> Findings:
        def stop(doing: Progress) -> None:
            if doing.best is not None:
                raise KeyboardInterrupt
            tell(doing)

        return replace(quick_tune(subject, calls, machine, plan, stop), is_interrupted=True)

    monkeypatch.setattr(module, "tune", tune)
    folder = tmp_path / "tuned"
    found = run("tune", causal, *SHAPES, "--device", "cpu", "--most", "3", "-o", folder)
    assert "kept" in found.out
    assert len(list(Store(folder).files())) == 1


def test_ctrl_c_ends_every_search_and_the_command(
    causal: Path, recording: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    def tune(subject: Any, calls: Any, machine: Any, plan: Any, tell: Tell) -> Findings:
        raise KeyboardInterrupt

    monkeypatch.setattr(module, "tune", tune)
    found = run("tune", causal, *SHAPES, *SHAPES, "--device", "cpu")
    assert found.code == 130


def test_gpus_share_the_shapes_and_the_time(
    causal: Path, tmp_path: Path, quick: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    budgets = []
    quick_tune: Any = module.tune

    def tune(subject: Any, calls: Any, machine: Any, plan: Plan, tell: Tell) -> Findings:
        budgets.append(plan.budget_s)
        found: Findings = quick_tune(subject, calls, machine, plan, tell)
        assert contents_of(found, subject, calls[0], machine).records == ()
        return found

    monkeypatch.setattr(module, "tune", tune)
    monkeypatch.setattr(module, "_open_machines", lambda name: [host_machine(), host_machine()])
    shapes = [word for n in (20, 24, 28, 40) for word in ("--shapes", f"B=1,Hq=1,Sq={n}")]
    found = run("tune", causal, *shapes, "--budget", "2m", "--most", "1")
    assert found.code == 0, found.err
    assert budgets == [60.0] * 4
    assert found.out.count("fastest") == 4
