"""What a run says while its stages run, and what of it may be left out of Prefect's log."""

import json
import logging
import time
from pathlib import Path

import prefect.logging
import pytest

from flows import prefect_run, progress
from flows.progress import Progress

ONCE = [
    "tokenize data: running (local x1)",
    "sft: full log: /store/sft/abc/log.txt",
    "sft: ran in 12.3 s",
    "sft failed (error, rank 0, after step 3): it broke\n  log:  /store/log.txt\n  next: mend it",
    "report: /runs/tiny/report.md",
]


def lines_of_progress(out: Path, monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """What is really said of a stage: before its first step, in a long one, after some."""
    monkeypatch.setattr(progress, "EVERY_SECONDS", 0.0)
    monkeypatch.setattr(progress, "QUIET_SECONDS", 0.0)
    said: list[str] = []
    of_stage = Progress("sft", out, say=said.append)
    of_stage.poll()
    for step in (1, 2):
        row = {"step": step, "total_steps": 9, "time": time.time() + step, "loss": 0.1 * step}
        (out / "metrics.jsonl").open("a").write(json.dumps(row) + "\n")
        of_stage.poll()
    of_stage.poll()
    return said


def test_a_flood_of_progress_is_cut_and_nothing_else_is_lost(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    passing = lines_of_progress(tmp_path, monkeypatch)
    assert [line.split()[1] for line in passing] == ["starting,", "step", "step", "working,"]
    monkeypatch.setattr(prefect.logging, "get_run_logger", lambda: logging.getLogger("run"))
    caplog.set_level("INFO", logger="run")
    say = prefect_run._limited_say()
    for _ in range(50):
        for line in passing:
            say(line)
    flood = caplog.messages.copy()
    assert len(flood) == prefect_run.LINES_A_SECOND
    for line in ONCE * 3:
        say(line)
    assert caplog.messages[len(flood) :] == ONCE * 3
    time.sleep(1.1)
    say(passing[0])
    assert caplog.messages[-1] == passing[0]
