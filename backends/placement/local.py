"""This machine: the ranks run under a supervisor beside the flow."""

import os
from collections.abc import Callable
from pathlib import Path
from typing import Literal

from pydantic import PositiveFloat

from backends.base import Launch, Resources
from backends.placement import supervise
from configs import Config


class ThisMachine(Config):
    """Run here, and end every process when the flow ends."""

    kind: Literal["local"] = "local"

    grace_seconds: PositiveFloat = 10.0
    """Time between asking the ranks to stop and killing them."""

    def obstacle(self, resources: Resources) -> str | None:
        """Why these resources are not to be had here, or ``None``."""
        if resources.nodes != 1:
            return f"resources.nodes is {resources.nodes}, and this machine is one"
        have, what = (
            (num_gpus(), "GPU") if resources.device == "cuda" else (num_cores(), "CPU core")
        )
        if resources.ranks_per_node > have:
            return (
                f"resources.ranks_per_node is {resources.ranks_per_node}, "
                f"and this machine has {have} {what}{'s' * (have != 1)}"
            )
        return None

    def run(self, launch: Launch, *, log: Path, lock: int, poll: Callable[[], None]) -> int:
        """Run ``launch`` to its end and return its exit code (negative: the signal)."""
        job = supervise.Job(
            argv=launch.argv,
            env={**os.environ, "TORCH_ELASTIC_SHUTDOWN_TIMEOUT": f"{self.grace_seconds:.0f}"}
            | dict(launch.env),
            log=log,
            grace_seconds=self.grace_seconds,
            held=(lock,),
        )
        return supervise.run(job, poll=poll)


def num_cores() -> int:
    """Cores that this process may use, which in a container is fewer than the machine has."""
    if hasattr(os, "sched_getaffinity"):
        return len(os.sched_getaffinity(0))
    return os.cpu_count() or 1


def num_gpus() -> int:
    """NVIDIA GPUs that this process may use, found without loading a driver."""
    visible = os.environ.get("CUDA_VISIBLE_DEVICES")
    if visible is not None:
        return len([name for name in visible.split(",") if name.strip() not in ("", "-1")])
    return len([p for p in Path("/dev").glob("nvidia[0-9]*") if p.name[6:].isdigit()])
