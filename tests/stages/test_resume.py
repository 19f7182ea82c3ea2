"""Checkpoints that survive kills and damage, rotation, and resuming under another shape."""

import json
import shutil
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from backends import DDP, FSDP, DeepSpeed, Local, Resources
from stages import resume
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
    assert not third.exists() and second.exists()


def test_a_file_that_rotted_is_found_by_its_hash(tmp_path: Path) -> None:
    first, second = (save(tmp_path, step) for step in (5, 10))
    assert resume.damage(second) is None
    (second / "global_step" / "optimizer").write_bytes(b"o" * 1999 + b"x")
    assert resume.newest(tmp_path) == second  # the sizes are right
    assert resume.damage(second) == "global_step/optimizer"
    resume.discard_incomplete(tmp_path)
    assert resume.newest(tmp_path) == first
    assert (second.parent / "damaged-checkpoint-10" / "weights").exists()


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
        (ZERO, ZERO | {"world_size": 4}, False),
        (ZERO, ZERO | {"zero_stage": 2}, False),
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


@pytest.mark.slow
@pytest.mark.parametrize(
    ("before", "after"),
    [
        ((FSDP(checkpoints="sharded"), 2), (FSDP(checkpoints="sharded"), 4)),
        ((FSDP(checkpoints="sharded"), 4), (FSDP(checkpoints="sharded"), 2)),
        ((FSDP(), 2), (FSDP(), 4)),
        ((DDP(), 2), (DDP(), 4)),
        ((DDP(), 2), (Local(), 1)),
    ],
    ids=["fsdp 2 to 4", "fsdp 4 to 2", "fsdp whole 2 to 4", "ddp 2 to 4", "ddp to one process"],
)
@pytest.mark.parametrize("method", ["full", "lora"])
def test_training_goes_on_under_another_number_of_ranks(
    tmp_path: Path, small: Path, before: Any, after: Any, method: str
) -> None:
    """Four more steps under the other shape give the losses of a run that never changed it."""
    config = CONFIG | {"max_steps": 8, "method": {"kind": method}}
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
    assert second.losses == pytest.approx(whole.losses, abs=1e-4)


def test_zeros_optimizer_state_stays_with_its_ranks(tmp_path: Path) -> None:
    promise = DeepSpeed(zero_stage=2).plan(Resources(ranks_per_node=2)).promise
    other = DeepSpeed(zero_stage=2).plan(Resources(ranks_per_node=4)).promise
    said = resume.obstacle(save(tmp_path, 3, **promise), other)
    assert said and "world_size 2" in said and "world_size 4" in said
