"""A tracker that fails beside a training: the training ends well, and the store holds no secret."""

import json
from dataclasses import dataclass
from pathlib import Path

import pytest

from backends import Local
from flows import failures
from flows.run_stage import plan, run_stage
from flows.steps import Artifact, Step
from stages import manifest
from stages.sft import SFT
from stages.trackers import PATIENCE, Tracking
from tests.small import ENV, python
from tests.stages.test_trackers import TRACKIO

SECRET = "hunter2secret"
FAILING = f"""
_log, _num = log, 0

def log(figures):
    global _num
    _num += 1
    if _num == 3:
        raise ConnectionError("POST https://me:{SECRET}@tracker.example/api\\n  timed out")
    _log(figures)
"""
HANGING = """
import time

def log(figures):
    time.sleep(600)
"""
SAID = (
    "trackio was not told everything: ConnectionError: POST https://tracker.example/api timed out"
)


@dataclass(frozen=True)
class Trained:
    out: Path
    said: list[str]
    told: list[dict[str, object]]


@pytest.fixture(scope="module")
def trained(tmp_path_factory: pytest.TempPathFactory, small: Path) -> Trained:
    return train(tmp_path_factory.mktemp("tracking"), small, FAILING)


def train(folder: Path, small: Path, tracker: str) -> Trained:
    """Four steps of SFT beside a tracker whose server fails, or hangs."""
    (folder / "trackio.py").write_text(TRACKIO + tracker)
    inputs = {
        name: Artifact(name, name, small / where, where, "reused")
        for name, where in {"model": "tied", "data": "data"}.items()
    }
    config = SFT(learning_rate=1e-3, global_batch_size=8, max_steps=4)
    tracking = Tracking(trackers=("trackio",), project="tiny", run="sft")
    said: list[str] = []
    with pytest.MonkeyPatch.context() as patch:
        patch.syspath_prepend(str(folder))
        for name, value in {**ENV, "PYTHONPATH": str(folder), "NOTED": f"{folder}/noted"}.items():
            patch.setenv(name, value)
        step = Step[SFT](config=config, backend=Local())
        planned = plan("sft", step, folder / "store", label="sft", inputs=inputs, tracking=tracking)
        done = run_stage(planned, say=said.append)
    lines = (folder / "noted").read_text().splitlines()
    return Trained(done.path, said, [json.loads(line) for line in lines])


def test_training_goes_on_to_its_end_without_it(trained: Trained) -> None:
    rows = (trained.out / "metrics.jsonl").read_text().splitlines()
    assert [json.loads(row)["step"] for row in rows] == [1, 2, 3, 4]
    done = manifest.read(trained.out)
    assert done and done.metrics["steps"] == 4
    assert [each for each in trained.told if "log" in each or "finish" in each] == [
        each for each in trained.told if "log" in each
    ][:2]


@pytest.mark.slow
def test_training_waits_for_none_that_does_not_answer(tmp_path: Path, small: Path) -> None:
    hung = train(tmp_path, small, HANGING)
    rows = [json.loads(row) for row in (hung.out / "metrics.jsonl").read_text().splitlines()]
    assert rows[-1]["step"] == 4 and rows[-1]["time"] - rows[0]["time"] < PATIENCE
    (said,) = [line for line in hung.said if "trackio" in line]
    assert said.startswith("sft: trackio was not told everything: TimeoutError: it did not take")


def test_it_is_said_in_one_line_in_the_log_and_in_the_manifest(trained: Trained) -> None:
    assert f"sft: {SAID}" in trained.said
    why = SAID.partition(": ")[2]
    log = (trained.out / "log.txt").read_text().splitlines()
    assert f"trackio is told no more until the next start: {why}" in log
    done = manifest.read(trained.out)
    assert done and done.provenance["ranks"][0]["dropped_trackers"] == {"trackio": why}


def test_no_file_of_the_store_holds_the_password(trained: Trained) -> None:
    files = [path for path in trained.out.rglob("*") if path.is_file()]
    assert len(files) > 10
    assert not [path for path in files if SECRET.encode() in path.read_bytes()]


def test_what_a_stage_dies_of_is_written_down_without_a_password(tmp_path: Path) -> None:
    """Here of a job for a stage that there is not."""
    url = f"https://me:{SECRET}@hub.example/model"
    job = {"stage": f"GET {url}", "config": {}, "inputs": {}}
    (tmp_path / "job.json").write_text(json.dumps(job))
    done = python("-m", "stages", str(tmp_path / "job.json"))
    assert done.returncode == 1 and "KeyError" in done.stderr
    (tmp_path / "log.txt").write_text(done.stderr + f"a library's own word: {url}\n")
    recorded = (tmp_path / "failures" / "rank-0.json").read_text()
    failure = failures.diagnose("fetch", tmp_path, failures.Ended(1, tmp_path / "log.txt"))
    (tmp_path / "failures" / "rank-0.json").unlink()
    unrecorded = failures.diagnose("fetch", tmp_path, failures.Ended(1, tmp_path / "log.txt"))
    for text in (done.stderr, recorded, failure.text, unrecorded.text):
        assert SECRET not in text and "https://hub.example/model" in text
