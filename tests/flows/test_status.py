"""``python -m flows.status`` beside a real run: it sees, follows and stops it."""

import os
import signal
import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest

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
