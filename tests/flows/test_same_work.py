"""Two runs that come to the same work, under backends that cannot go on from one another."""

import fcntl
from pathlib import Path
from threading import Timer

import pytest

from backends import Local
from configs import ConfigError
from flows.run_stage import Plan, plan, run_stage
from flows.steps import Artifact, Step
from stages import resume
from stages.sft import SFT

SHARDED = {"wrapper": "fsdp", "world_size": 2, "shard_ranks": 2, "checkpoints": "full"}


@pytest.fixture
def planned(tmp_path: Path, small: Path) -> Plan:
    """A training on one process, where one on two ranks has saved its first step."""
    inputs = {
        name: Artifact(name, name, small / where, where, "reused")
        for name, where in {"model": "tied", "data": "data"}.items()
    }
    step = Step[SFT](config=SFT(global_batch_size=8, max_steps=2), backend=Local())
    found = plan("sft", step, tmp_path / "store", label="sft", inputs=inputs)
    saved = found.out / resume.FOLDER / "checkpoint-1"
    saved.mkdir(parents=True)
    (saved / "weights").write_bytes(b"w")
    resume.mark_complete(saved, SHARDED)
    return found


def test_nobody_is_told_to_remove_what_another_run_is_making(planned: Plan) -> None:
    with planned.out.with_name(f"{planned.out.name}.lock").open("w") as other:
        fcntl.flock(other, fcntl.LOCK_EX)
        assert planned.obstacle is None
    assert planned.obstacle and f"remove {planned.out} to start again" in planned.obstacle


def test_what_the_other_run_left_is_refused_before_a_job_starts(planned: Plan) -> None:
    other = planned.out.with_name(f"{planned.out.name}.lock").open("w")
    fcntl.flock(other, fcntl.LOCK_EX)
    Timer(0.5, other.close).start()
    told: list[str] = []
    with pytest.raises(ConfigError, match=r"checkpoint-1 was written under .*wrapper fsdp"):
        run_stage(planned, say=told.append, queued=told.append)
    assert told[:2] == ["another run is making this; waiting for it", ""]
    assert not (planned.out / "job.json").exists()
