"""Checkpoints that survive kills and damage, rotation, and resuming under another shape."""

import hashlib
import json
import shutil
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from backends import DDP, FSDP, DeepSpeed, Local, Resources
from stages import recut, resume
from stages.base import Context, StageError
from stages.checkpoint import describe, layout
from stages.convert import Convert, export_model
from tests.small import Run, python, run_jobs, write_job

CONFIG = {"learning_rate": 1e-3, "global_batch_size": 8, "max_steps": 3}


def save(out: Path, step: int, **facts: Any) -> Path:
    """A complete checkpoint of two small files."""
    folder = out / resume.FOLDER / f"checkpoint-{step}"
    (folder / "global_step").mkdir(parents=True)
    (folder / "weights").write_bytes(b"w" * 1000)
    (folder / "global_step" / "optimizer").write_bytes(b"o" * 2000)
    resume.mark_complete(folder, facts)
    return folder


def test_a_save_is_complete_only_with_its_marker_and_all_its_bytes(tmp_path: Path) -> None:
    first, second, third = (save(tmp_path, step) for step in (5, 10, 20))
    assert resume.complete(tmp_path) == [first, second, third]
    (third / resume.MARKER).unlink()
    (second / "weights").write_bytes(b"w" * 999)
    assert resume.newest(tmp_path) == first
    resume.discard_incomplete(tmp_path)
    assert not third.exists() and not second.exists()
    assert (second.parent / "damaged-checkpoint-10" / "weights").exists()
    assert resume.complete(tmp_path) == [first]


def test_a_file_that_rotted_is_found_by_its_hash(tmp_path: Path) -> None:
    first, second = (save(tmp_path, step) for step in (5, 10))
    assert resume.damage(second) is None
    (second / "global_step" / "optimizer").write_bytes(b"o" * 1999 + b"x")
    assert resume.newest(tmp_path) == second  # the sizes are right
    assert resume.damage(second) == "global_step/optimizer"
    resume.discard_incomplete(tmp_path)
    assert resume.newest(tmp_path) == first
    assert (second.parent / "damaged-checkpoint-10" / "weights").exists()


def test_a_step_may_be_damaged_again_and_each_is_told(tmp_path: Path) -> None:
    first = save(tmp_path, 5)
    for name in ("damaged-checkpoint-10", "damaged-checkpoint-10-2", "damaged-checkpoint-10-3"):
        second = save(tmp_path, 10)
        (second / "weights").write_bytes(b"w" * 999 + b"x" * (name[-1] != "2"))
        (line,) = resume.discard_incomplete(tmp_path)
        assert "checkpoint-10/weights: not what was saved" in line and line.endswith(name)
        assert (second.parent / name / "weights").exists()
        assert resume.newest(tmp_path) == first
    assert resume.discard_incomplete(tmp_path) == []


@pytest.mark.parametrize(
    "marker", ["[]", "null", '{"files": []}', '{"files": {}}', '{"facts": {}}', "{", ""]
)
def test_a_marker_that_says_nothing_is_no_save(tmp_path: Path, marker: str) -> None:
    first, second = save(tmp_path, 5), save(tmp_path, 10)
    (second / resume.MARKER).write_text(marker)
    assert resume.complete(tmp_path) == [first] and resume.damage(second) == resume.MARKER
    (line,) = resume.discard_incomplete(tmp_path)
    assert "checkpoint-10/complete.json" in line
    assert resume.newest(tmp_path) == first and not second.exists()


def test_markers_of_an_older_version_are_still_checked(tmp_path: Path) -> None:
    folder = save(tmp_path, 5)
    record = json.loads((folder / resume.MARKER).read_text())
    del record["xxh3_128"]
    record["sha256"] = {
        name: hashlib.sha256((folder / name).read_bytes()).hexdigest() for name in record["files"]
    }
    (folder / resume.MARKER).write_text(json.dumps(record))
    assert resume.newest(tmp_path) == folder and resume.damage(folder) is None
    (folder / "weights").write_bytes(b"w" * 999 + b"x")
    assert resume.damage(folder) == "weights"


def test_a_save_is_written_aside_and_moved_when_it_is_whole(tmp_path: Path) -> None:
    saving = tmp_path / resume.SAVING / "checkpoint-5"
    for text in ("first", "again"):
        saving.mkdir(parents=True)
        (saving / "weights").write_text(text)
        assert text == "again" or not resume.complete(tmp_path)
        final = resume.publish(tmp_path, 5, {"wrapper": "none"})
        assert resume.complete(tmp_path) == [final] and not saving.exists()
        assert (final / "weights").read_text() == text
        (final / "weights").write_text("cut")  # so it is no longer whole, and the step is done anew
    (saving / "weights").parent.mkdir(parents=True)
    resume.discard_incomplete(tmp_path)
    assert not (tmp_path / resume.SAVING).exists()


def test_rotation_keeps_the_newest_and_the_best(tmp_path: Path) -> None:
    folders = {step: save(tmp_path, step) for step in (1, 2, 3, 4, 5)}
    rows = [{"step": step, "loss": abs(step - 2), "reward": -step} for step in folders]
    (tmp_path / "metrics.jsonl").write_text("".join(f"{json.dumps(row)}\n" for row in rows))
    assert resume.best(tmp_path, "loss") == folders[2]
    assert resume.best(tmp_path, "reward", larger=True) == folders[1]
    assert resume.best(tmp_path, "accuracy") is None
    assert resume.rotate(tmp_path, keep_last=2, metric="loss") == [folders[1], folders[3]]
    assert resume.complete(tmp_path) == [folders[2], folders[4], folders[5]]
    assert resume.rotate(tmp_path, keep_last=2) == [folders[2]]


@pytest.mark.parametrize("odd", [float("nan"), float("-inf"), None, "0"])
def test_a_value_that_is_not_finite_is_never_the_best(tmp_path: Path, odd: Any) -> None:
    folders = [save(tmp_path, step) for step in (1, 2, 3)]
    rows = [{"step": step, "loss": loss} for step, loss in ((1, odd), (2, 0.1), (3, 2.0))]
    (tmp_path / "metrics.jsonl").write_text("".join(f"{json.dumps(row)}\n" for row in rows))
    assert resume.best(tmp_path, "loss") == folders[1]
    assert resume.best(tmp_path, "loss", larger=True) == folders[2]
    assert resume.rotate(tmp_path, keep_last=1, metric="loss") == [folders[0]]


FSDP2 = {"wrapper": "fsdp", "world_size": 2, "shard_ranks": 2, "checkpoints": "sharded"}
ZERO = {"wrapper": "deepspeed", "world_size": 2, "zero_stage": 3}


@pytest.mark.parametrize(
    ("had", "asked", "goes"),
    [
        ({"wrapper": "ddp", "world_size": 2}, {"wrapper": "ddp", "world_size": 4}, True),
        ({"wrapper": "ddp", "world_size": 2}, {"wrapper": "none", "world_size": 1}, True),
        (FSDP2, FSDP2 | {"world_size": 4, "shard_ranks": 4}, True),
        (FSDP2, FSDP2 | {"checkpoints": "full"}, False),
        (FSDP2, {"wrapper": "ddp", "world_size": 2}, False),
        (ZERO, dict(ZERO), True),
        (ZERO, ZERO | {"world_size": 4}, True),
        (ZERO, ZERO | {"zero_stage": 2}, True),
        (ZERO, FSDP2, False),
        (FSDP2, ZERO, False),
    ],
)
def test_which_shapes_a_checkpoint_can_be_resumed_under(
    tmp_path: Path, had: dict, asked: dict, goes: bool
) -> None:
    said = resume.obstacle(save(tmp_path, 7, **had), asked)
    assert (said is None) is goes
    if said:
        assert "warm_start" in said and "checkpoint-7" in said and str(had["world_size"]) in said


@pytest.mark.slow
def test_a_trainers_own_checkpoint_can_be_warm_started_from(tmp_path: Path, small: Path) -> None:
    run = Run(
        out=tmp_path / "sft",
        stage="sft",
        config=CONFIG | {"method": {"kind": "lora", "rank": 4}},
        inputs={"model": small / "tied", "data": small / "data"},
        settings={"save_steps": 2},
    )
    run_jobs([run])
    newest = resume.newest(run.out)
    assert newest and layout(newest) == "adapter" and describe(newest)["resumable"]
    export_model(
        Convert(export_dtype="float32", parity_probes=0),
        tmp_path / "new",
        source=newest,
        origin=small / "tied" / "model",
    )
    assert describe(tmp_path / "new" / "model")["layout"] == "safetensors"


@pytest.mark.slow
@pytest.mark.parametrize("method", ["full", "lora"])
def test_a_kill_at_any_point_of_a_save_is_resumed_from_a_complete_checkpoint(
    tmp_path: Path, small: Path, method: str
) -> None:
    run = Run(
        out=tmp_path / "whole",
        stage="sft",
        config=CONFIG | {"method": {"kind": method}},
        inputs={"model": small / "tied", "data": small / "data"},
        settings={"save_steps": 1},
    )
    run_jobs([run])
    kept = "model.safetensors" if method == "full" else "adapter_model.safetensors"
    job = write_job(replace(run, out=tmp_path / "job"))
    done = python("tests/stages/killed_saves.py", str(job), str(tmp_path / "killed"))
    assert done.returncode == 0, done.stderr[-3000:]
    facts = [json.loads(line) for line in done.stdout.splitlines() if line.startswith('{"died"')]
    assert len(facts) > 20
    steps = set()
    for fact in facts:
        assert fact["again"] == 0, fact
        assert fact["from"] == max(int(name.rpartition("-")[2]) for name in fact["left"]), fact
        steps.add(fact["from"])
        again = replace(run, out=Path(fact["out"]))
        assert again.losses == run.losses, fact
        assert (again.out / "model" / kept).read_bytes() == (
            run.out / "model" / kept
        ).read_bytes(), fact
    assert steps == {1, 2}  # before the marker the first save counts, after it the second


ZERO1, ZERO2, ZERO3 = (DeepSpeed(zero_stage=stage) for stage in (1, 2, 3))
SHAPES = {
    "fsdp 2 to 4": ((FSDP(checkpoints="sharded"), 2), (FSDP(checkpoints="sharded"), 4)),
    "fsdp 4 to 2": ((FSDP(checkpoints="sharded"), 4), (FSDP(checkpoints="sharded"), 2)),
    "fsdp whole 2 to 4": ((FSDP(), 2), (FSDP(), 4)),
    "ddp 2 to 4": ((DDP(), 2), (DDP(), 4)),
    "ddp to one process": ((DDP(), 2), (Local(), 1)),
    "zero1 2 to zero3 4": ((ZERO1, 2), (ZERO3, 4)),
    "zero2 2 to zero3 2": ((ZERO2, 2), (ZERO3, 2)),
    "zero2 2 to zero2 4": ((ZERO2, 2), (ZERO2, 4)),
    "zero3 2 to zero2 2": ((ZERO3, 2), (ZERO2, 2)),
    "zero3 2 to zero3 4": ((ZERO3, 2), (ZERO3, 4)),
    "zero3 4 to zero1 2": ((ZERO3, 4), (ZERO1, 2)),
}
"""Backend and ranks before, and after."""


@pytest.mark.slow
@pytest.mark.parametrize(("before", "after"), SHAPES.values(), ids=SHAPES.keys())
@pytest.mark.parametrize("method", ["full", "lora"])
def test_training_goes_on_under_another_number_of_ranks(
    tmp_path: Path, small: Path, before: Any, after: Any, method: str
) -> None:
    """Four more steps under the other shape give the losses of a run that never changed it.

    A large weight decay and rate make a lost setting or a wrong step count tell.
    """
    config = CONFIG | {"max_steps": 8, "learning_rate": 1e-2, "weight_decay": 0.5}
    config |= {"method": {"kind": method}}
    inputs = {"model": small / "tied", "data": small / "data"}
    runs = []
    for name, (backend, ranks) in (("whole", before), ("moved", before), ("moved", after)):
        run = Run(
            out=tmp_path / name,
            stage="sft",
            config=config,
            inputs=inputs,
            backend=backend,
            resources=Resources(ranks_per_node=ranks),
            settings={"save_steps": 4},
        )
        runs.append(run)
    whole, first, second = runs
    run_jobs([whole])
    run_jobs([first])
    for folder in resume.complete(first.out)[1:]:
        shutil.rmtree(folder)
    shutil.rmtree(first.out / "model")
    checkpoint = resume.newest(first.out)
    promise = second.backend.plan(second.resources).promise
    assert checkpoint and resume.obstacle(checkpoint, promise) is None
    run_jobs([second])
    assert json.loads((second.out / "metrics.json").read_text())["resumed_from"] == 4
    assert not list(checkpoint.glob("*universal*"))
    assert second.losses == pytest.approx(whole.losses, abs=1e-4)


def test_zeros_optimizer_state_stays_with_its_ranks_unless_it_is_adams(tmp_path: Path) -> None:
    promise = DeepSpeed(zero_stage=2).plan(Resources(ranks_per_node=2)).promise
    other = DeepSpeed(zero_stage=2).plan(Resources(ranks_per_node=4)).promise
    folder = save(tmp_path, 3, **promise)
    assert resume.obstacle(folder, other) is None
    resume.mark_complete(folder, promise, movable=False)
    said = resume.obstacle(folder, other)
    assert said and "world_size 2" in said and "world_size 4" in said
    assert resume.obstacle(folder, promise) is None


def test_what_deepspeed_cannot_cut_anew_is_refused(tmp_path: Path) -> None:
    two, four = Resources(ranks_per_node=2), Resources(ranks_per_node=4)
    save(tmp_path, 3, **DeepSpeed(zero_stage=3).plan(two).promise)
    offloaded = DeepSpeed(zero_stage=3, offload_optimizer="nvme", nvme_path=tmp_path)
    for backend, says in (
        (offloaded, "its optimizer on NVMe"),
        (DeepSpeed(zero_stage=1, communication="one_bit_adam"), "OneBitAdam"),
    ):
        launch = backend.plan(four)
        ctx = Context(tmp_path, trainer_args=launch.trainer_args, promise=launch.promise)
        with pytest.raises(StageError, match=says):
            recut.settings(ctx)
    same = offloaded.plan(two)
    ctx = Context(tmp_path, trainer_args=same.trainer_args, promise=same.promise)
    assert recut.settings(ctx) == same.trainer_args


@pytest.mark.slow
def test_how_long_training_stands_still_for_a_save_is_told(tmp_path: Path, small: Path) -> None:
    run = Run(
        out=tmp_path / "sft",
        stage="sft",
        config=CONFIG,
        inputs={"model": small / "tied", "data": small / "data"},
        settings={"save_steps": 1, "keep": {"keep_last": 2}},
    )
    run_jobs([run])
    stood = [row.get("save_seconds", 0) for row in run.rows]
    figures = json.loads((run.out / "metrics.json").read_text())
    assert stood[0] == 0 and min(stood[1:]) > 0  # a row is written before its step is saved
    assert figures["saves"] == 3 and figures["save_seconds"] > sum(stood)
    assert [resume.step(folder) for folder in resume.complete(run.out)] == [2, 3]
    assert not (run.out / resume.SAVING).exists()
