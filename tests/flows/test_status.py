"""``python -m flows.status`` beside a real run: it sees, follows and stops it."""

import json
import os
import signal
import subprocess
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from backends.placement import supervise
from flows.status import left, see
from tests.flows.faulty.cases import finish, output, recipe, start, wait_for
from tests.flows.faulty.worlds import World
from tests.small import python


@pytest.fixture(scope="module")
def store(small: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    store = tmp_path_factory.mktemp("status") / "store"
    recipe(small, store)
    return store


@pytest.fixture(scope="module")
def running(store: Path) -> Iterator["subprocess.Popen[str]"]:
    """A stage of twelve steps, each slowed down to a second."""
    os.environ["SLOW"] = "1"
    flow = start(store.with_suffix(".yaml"), "none:0:0")
    del os.environ["SLOW"]
    wait_for(lambda: output(store) and "/12" in status(store), 60)
    yield flow
    if flow.poll() is None:
        flow.send_signal(signal.SIGINT)
        flow.wait()


def status(store: Path, *words: str) -> str:
    done = python("-m", "flows.status", "one", "--runs", f"{store}-runs", "--once", *words)
    return done.stdout + done.stderr


def test_a_live_stage_a_stop_and_the_end(
    store: Path, running: "subprocess.Popen[str]", small: Path
) -> None:
    head, rule, line = status(store).splitlines()[1:]
    assert head.split()[:3] == ["stage", "state", "step"] and set(rule) <= {"-", " "}
    cells = line.split()
    assert cells[:2] == ["sft", "running"] and cells[2].endswith("/12")
    assert "GB" in cells

    log = status(store, "--logs", "1")
    assert "has no log" not in log
    assert "rank 7 has no log" in status(store, "--logs", "7")

    assert "sft: asked to save and stop" in status(store, "--stop")
    text = running.communicate(timeout=60)[0]
    assert running.returncode == 75 and "cancelled" in text and "is saved" in text, text
    line = status(store).splitlines()[-1]
    assert line.split()[:2] == ["sft", "interrupted"] and "Interrupted" in line
    assert "no stage is running" in status(store, "--stop")

    finish(World(small, store))
    assert status(store).splitlines()[-1].split()[:2] == ["sft", "done"]


def test_an_unknown_run_is_told_from_the_known(store: Path, running: object) -> None:
    done = python("-m", "flows.status", "two", "--runs", f"{store}-runs")
    assert done.returncode == 2 and "does not hold two; it has one" in done.stderr


def test_a_stop_before_the_first_step_is_not_taken_for_a_crash_and_tried_again(
    small: Path, tmp_path: Path
) -> None:
    store = tmp_path / "store"
    flow = start(recipe(small, store), "none:0:0", "sft.retries=1")
    wait_for(lambda: "running" in status(store), 60)
    assert "sft: asked to save and stop" in status(store, "--stop")
    text = flow.communicate(timeout=60)[0]
    assert flow.returncode == 75 and "cancelled" in text and "going on" not in text, text
    assert status(store).splitlines()[-1].split()[:2] == ["sft", "interrupted"]


def test_a_run_is_found_by_its_folder_and_a_damaged_output_costs_no_other(tmp_path: Path) -> None:
    run = tmp_path / "runs" / "one"
    run.mkdir(parents=True)
    (run / "run.json").write_text("{}")
    for stage, text in (("fetch-model", ""), ("sft", None)):
        out = tmp_path / "store" / stage
        out.mkdir(parents=True)
        if text is not None:
            (out / "manifest.json").write_text(text)
        (run / stage).symlink_to(out)
    done = python("-m", "flows.status", str(run), "--once")
    states = [line.split()[:3] for line in done.stdout.splitlines()[3:]]
    assert states == [["fetch", "model", "damaged"], ["sft", "waiting"]], done.stderr


def test_a_night_between_two_attempts_is_no_measure_of_a_step(tmp_path: Path) -> None:
    now, me = time.time(), supervise.identity(os.getpid())
    times = [now - 36_000 + step for step in range(10)] + [now - 10 + step for step in range(10)]
    rows = [{"step": n, "total_steps": 40, "time": at} for n, at in enumerate(times, 1)]
    (tmp_path / "metrics.jsonl").write_text("".join(f"{json.dumps(row)}\n" for row in rows))
    (tmp_path / "status.json").write_text(json.dumps(me | {"state": "running", "time": now}))
    (tmp_path / "job.json").touch()
    os.utime(tmp_path / "job.json", (now - 30, now - 30))
    assert left(see("sft", tmp_path)) == "20 s"
