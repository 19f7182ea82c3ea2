"""What Prefect is told of a run whose process is gone, as far as the files tell it."""

import json
import os
import subprocess
import sys
import time
from collections.abc import Callable
from dataclasses import asdict
from pathlib import Path
from typing import Any

import psutil
import pytest

from backends import Launch
from backends.placement import ThisMachine, supervise
from flows import keeper
from flows.endings import Ending


def trained(out: Path, *, steps: int, saved: int | None = None) -> Path:
    out.mkdir(parents=True)
    rows = [{"step": step, "total_steps": 4230, "time": 1.0} for step in range(1, steps + 1)]
    (out / "metrics.jsonl").write_text("".join(f"{json.dumps(row)}\n" for row in rows))
    if saved is not None:
        checkpoint = out / "checkpoints" / f"checkpoint-{saved}"
        checkpoint.mkdir(parents=True)
        (checkpoint / "complete.json").write_text(json.dumps({"facts": {}, "files": {}}))
    return out


def wait_until(condition: Callable[[], bool]) -> None:
    deadline = time.monotonic() + 20
    while not condition() and time.monotonic() < deadline:
        time.sleep(0.05)


def test_the_message_tells_step_checkpoint_and_processes(tmp_path: Path) -> None:
    out = trained(tmp_path / "sft", steps=1234, saved=1200)
    facts: dict[str, Any] = {"out": str(out), "label": "sft", "processes": 9}
    assert keeper.stopped(facts) == (
        "at sft, step 1,234 of 4,230, checkpoint of step 1,200 saved, 9 processes ended, 0 left"
    )
    early = trained(tmp_path / "dpo", steps=2)
    assert "nothing saved yet" in keeper.stopped({"out": str(early), "label": "dpo"})
    (early / "manifest.json").write_text("{}")
    assert "its output is complete" in keeper.stopped({"out": str(early), "label": "dpo"})
    assert keeper.stopped({}) == "before it had anything to run"


@pytest.mark.parametrize("store", ["absolute", "relative"])
def test_a_process_that_is_left_is_counted_and_not_denied(tmp_path: Path, store: str) -> None:
    out = trained(tmp_path / "sft", steps=3)
    job = out / "job.json" if store == "absolute" else Path("sft") / "job.json"
    code = "import time; time.sleep(60)"
    with subprocess.Popen([sys.executable, "-c", code, str(job)], cwd=tmp_path) as rank:
        try:
            wait_until(lambda: bool(keeper.remaining(out)))
            assert keeper.remaining(out) == [rank.pid]
            assert keeper.stopped({"out": str(out), "label": "sft"}).endswith("1 left")
        finally:
            rank.kill()


def test_a_job_in_a_relative_store_is_found_with_all_that_it_started(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As in the default store. The command of the rank's own child holds nothing of it at all."""
    monkeypatch.chdir(tmp_path)
    out = trained(Path("store/sft/abc"), steps=3)
    code = "import subprocess; subprocess.run(['sleep', '60'])"
    launch = Launch((sys.executable, "-c", code, str(out / "job.json")))
    seen: list[tuple[int, int]] = []
    deadline = time.monotonic() + 30

    def poll() -> None:
        there = tmp_path / out
        seen.append((len(keeper.remaining(there)), keeper.processes_of(there)))
        if seen[-1] == (3, 3) or time.monotonic() > deadline:
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        ThisMachine(grace_seconds=0.5).run(launch, gpus=0, log=out / "log.txt", lock=1, poll=poll)
    assert seen[-1] == (3, 3), "supervisor, rank and the child of it"
    assert keeper.remaining(tmp_path / out) == []


def test_the_flows_own_word_counts_and_without_it_the_files_do(tmp_path: Path) -> None:
    out = trained(tmp_path / "sft", steps=3, saved=2)
    facts: dict[str, Any] = {"run": "r", "attempt": 1, "out": str(out), "label": "sft"}
    said = Ending("Promoted", "the first of its name")
    assert keeper._ending(facts | {"ending": asdict(said)}) == said
    killed = keeper._ending(facts)
    assert (killed.type, killed.name) == ("CRASHED", "Crashed")
    assert "checkpoint of step 2 saved" in killed.message
    assert keeper._ending(facts | {"asked": True}).name == "Preempted"
    alive = supervise.identity(os.getpid())
    (out / supervise.HANDLE).write_text(json.dumps(alive))
    assert "goes on, and Retry attaches" in keeper._ending(facts | {"outlives": True}).message


def test_a_retry_has_a_record_of_its_own_and_a_settled_one_stays_settled(tmp_path: Path) -> None:
    first = keeper.begin(tmp_path, "run", attempt=1)
    second = keeper.begin(tmp_path, "run", attempt=2)
    assert first != second
    first.unlink()
    keeper.note(first, asked=True)
    keeper.note(second, asked=True)
    assert not first.exists() and keeper.read(second)["asked"]
    second.unlink()


def test_a_keeper_stays_though_somebody_looks_at_its_run_while_it_starts(tmp_path: Path) -> None:
    """A run that starts looks at the records of all, and fifty may start at once."""
    record = tmp_path / "run-1.json"
    me = supervise.identity(os.getpid())
    record.write_text(json.dumps({"run": "run", "attempt": 1, "flow": me}))
    lock = record.with_suffix(".lock")
    with keeper._only_keeper(record) as alone:
        assert alone
        process = subprocess.Popen([sys.executable, "-m", "flows.keeper", str(record)])
        waiting = psutil.Process(process.pid)
        while str(lock) not in [each.path for each in waiting.open_files()]:
            assert process.poll() is None, "it has left the run to nobody"
            time.sleep(0.01)
    with pytest.raises(subprocess.TimeoutExpired):
        process.wait(2)
    record.unlink()  # settled
    assert process.wait(20) == 0
    assert not lock.exists()


def test_a_process_that_nobody_has_collected_is_gone() -> None:
    process = subprocess.Popen([sys.executable, "-c", "pass"])
    identity = supervise.identity(process.pid)
    wait_until(lambda: not keeper._runs(identity))
    assert not keeper._runs(identity)
    assert process.wait() == 0
    assert keeper._runs(supervise.identity(os.getpid()))
