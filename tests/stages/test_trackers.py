"""Curves beside metrics.jsonl: TensorBoard's files as they are read back, trackers told once."""

import json
import re
import shutil
import struct
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import pytest

from stages import resume, trackers
from stages.base import Context
from tests.small import ENV, ROOT, Run, run_jobs
from tests.stages import sentences

SFT = {"learning_rate": 1e-3, "global_batch_size": 8, "max_steps": 4}
PPO = {
    "max_steps": 2,
    "global_batch_size": 4,
    "minibatches": 1,
    "passes": 1,
    "max_new_tokens": 3,
    "rewards": [{"function": "tests.stages.sentences:worth"}],
}
OWN = {"sft": {"train/tokens_per_second"}, "ppo": {"train/reward/worth", "train/kl"}}
TRACKING = {"trackers": ["trackio"], "project": "tiny", "run": "sft"}
TRACKIO = '''
"""What transformers' integration calls of trackio, written down."""
import json, os
from contextvars import ContextVar
from types import SimpleNamespace

__version__ = "1"
context_vars = SimpleNamespace(
    current_space_id=ContextVar("space", default=None), current_run=ContextVar("run", default=None)
)

def _note(**facts):
    with open(os.environ["NOTED"], "a") as file:
        file.write(json.dumps(facts, default=str) + "\\n")

def init(**given):
    _note(init={name: given[name] for name in ("project", "name", "resume")})

config = type("Config", (dict,), {"update": lambda *_, **__: None})()

def log(figures):
    _note(log=figures)

def finish():
    _note(finish=True)
'''


def curves(out: Path) -> dict[str, list[tuple[int, float]]]:
    """(step, value) by tag, from TensorBoard's files: records of length, check, event, check."""
    from tensorboardX.proto.event_pb2 import Event

    found: dict[str, list[tuple[int, float]]] = {}
    for path in sorted((out / trackers.TENSORBOARD).iterdir()):
        data = path.read_bytes()
        while data:
            (size,) = struct.unpack("<Q", data[:8])
            event = Event.FromString(data[12 : 12 + size])
            data = data[12 + size + 4 :]
            for value in event.summary.value:
                found.setdefault(value.tag, []).append((event.step, value.simple_value))
    return found


def expected(run: Run) -> dict[str, list[tuple[int, float]]]:
    """What ``metrics.jsonl`` says, in the same form."""
    found: dict[str, list[tuple[int, float]]] = {}
    for row in run.rows:
        for name, value in row.items():
            if name not in ("step", "total_steps", "time"):
                found.setdefault(f"train/{name}", []).append((row["step"], value))
    return found


def interrupted(run: Run, step: int) -> None:
    """As a kill leaves it: checkpoints up to ``step``, and rows beyond it."""
    for folder in resume.complete(run.out):
        if resume.step(folder) > step:
            shutil.rmtree(folder)
    shutil.rmtree(run.out / "model")
    (run.out / trackers.TENSORBOARD / "events.half").write_bytes(b"\0\0\0")


@dataclass(frozen=True)
class Trained:
    """SFT that was killed twice, with a tracker from the second start on; and PPO."""

    sft: Run
    ppo: Run
    told: list[dict[str, Any]]
    """What a stand-in for the package trackio was told by transformers' own integration."""


@pytest.fixture(scope="module")
def trained(tmp_path_factory: pytest.TempPathFactory, small: Path) -> Trained:
    out = tmp_path_factory.mktemp("trackers")
    sentences.write_world(out / "world")
    (out / "packages").mkdir()
    (out / "packages" / "trackio.py").write_text(TRACKIO)
    sft = Run(
        out=out / "sft",
        stage="sft",
        config=SFT,
        inputs={"model": small / "tied", "data": small / "data"},
        settings={"save_steps": 2},
    )
    worlds = {"policy": out / "world" / "policy", "data": out / "world" / "data"}
    ppo = Run(out=out / "ppo", stage="ppo", config=PPO, inputs=worlds)
    with pytest.MonkeyPatch.context() as patch:
        patch.setitem(ENV, "PYTHONPATH", f"{ROOT}:{out / 'packages'}")
        patch.setitem(ENV, "NOTED", str(out / "noted.jsonl"))
        run_jobs([sft, ppo])
        for _ in range(2):
            interrupted(sft, 2)
            run_jobs([replace(sft, settings={"save_steps": 2, "tracking": TRACKING})])
    told = [json.loads(line) for line in (out / "noted.jsonl").read_text().splitlines()]
    return Trained(sft, ppo, told)


@pytest.mark.parametrize("trainer", ["sft", "ppo"])
def test_tensorboard_shows_what_metrics_say(trained: Trained, trainer: str) -> None:
    """Each step once, though SFT was killed behind its checkpoint twice."""
    run: Run = getattr(trained, trainer)
    assert [row["step"] for row in run.rows] == list(range(1, run.config["max_steps"] + 1))
    drawn, noted = curves(run.out), expected(run)
    assert drawn.keys() == noted.keys()
    assert {"train/loss", "train/grad_norm"} | OWN[trainer] <= drawn.keys()
    for tag, points in noted.items():
        assert [step for step, _ in drawn[tag]] == [step for step, _ in points], tag
        values = [[value for _, value in each] for each in (drawn[tag], points)]
        assert values[0] == pytest.approx(values[1], rel=1e-6), tag  # they are float32 there


def test_a_tracker_is_told_each_step_once_and_what_came_before_it(trained: Trained) -> None:
    logs = [each["log"] for each in trained.told if "log" in each]
    assert [each["train/global_step"] for each in logs] == [1, 2, 3, 4]
    assert [each["train/loss"] for each in logs] == trained.sft.losses


def test_a_resumed_training_is_one_run_of_its_tracker(trained: Trained) -> None:
    first, second = (each["init"] for each in trained.told if "init" in each)
    assert first == second and first["project"] == "tiny" and first["resume"] == "allow"
    assert re.fullmatch(r"sft-[0-9a-f]{8}", first["name"])
    others = [next(iter(each)) for each in trained.told if "log" not in each]
    assert others == ["init", "finish"] * 2


ROW = {"step": 1, "total_steps": 4, "time": 1.5, "loss": 0.25, "grad_norm": 2.0}


def test_records_are_what_tensorboards_own_writer_makes(tmp_path: Path) -> None:
    from tensorboardX.record_writer import RecordWriter

    drawn = trackers.Curves(None, Context(tmp_path), [ROW])
    drawn.end()
    (path,) = (tmp_path / trackers.TENSORBOARD).glob("*.tfevents.*")
    data, events = path.read_bytes(), []
    while data:
        (size,) = struct.unpack("<Q", data[:8])
        events.append(data[12 : 12 + size])
        data = data[12 + size + 4 :]
    again = RecordWriter(str(tmp_path / "again"))
    for event in events:
        again.write(event)
    again.close()
    assert len(events) == 2 and (tmp_path / "again").read_bytes() == path.read_bytes()


def test_a_full_disk_is_not_hidden_and_no_other_fault_of_tensorboard_stops_training(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    drawn = trackers.Curves(None, Context(tmp_path), [])
    files = drawn.listeners[trackers.TENSORBOARD]
    assert isinstance(files, trackers.Files)
    full = pytest.raises(OSError, match="No space left")
    with full, Path("/dev/full").open("wb") as files.file:
        drawn.add(ROW)
    assert drawn.dropped == {} and files.file.closed
    drawn.add(ROW)
    drawn.add(ROW)
    drawn.end()
    assert drawn.dropped == {"tensorboard": "ValueError: write to closed file"}
    said = capsys.readouterr().err
    assert (
        said
        == f"tensorboard is told no more until the next start: {drawn.dropped['tensorboard']}\n"
    )


@pytest.mark.parametrize("left", [b"", b'{"project": "tiny", "run": "sf', b"\0" * 64, b"\xff"])
def test_what_a_power_cut_left_of_the_memory_begins_a_new_run(tmp_path: Path, left: bytes) -> None:
    asked = trackers.Tracking.model_validate(TRACKING)
    whole = trackers.Told(tmp_path, asked)
    whole.note("trackio", 7)
    assert trackers.Told(tmp_path, asked).facts == whole.facts
    (tmp_path / trackers.TOLD).write_bytes(left)
    anew = trackers.Told(tmp_path, asked)
    assert not anew.knows("trackio", 1) and anew.facts["run"] != whole.facts["run"]


def test_a_package_that_is_missing_is_named_and_a_folder_is_none(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("sys.path", [str(tmp_path)])
    (tmp_path / "wandb").mkdir()  # wandb's own files, where it was started
    said = trackers.obstacle(("wandb", "mlflow"))
    assert said and said.startswith(
        "trackers: wandb, mlflow not installed; type: pip install wandb"
    )
    (tmp_path / "wandb" / "__init__.py").write_text("")
    assert "wandb" not in str(trackers.obstacle(("wandb", "mlflow")))
    assert trackers.obstacle(()) is None
