"""What a backend is: a value that plans a launch, and does nothing else."""

import sys
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Literal, Protocol

from pydantic import PositiveInt

from configs import Config

Device = Literal["cpu", "cuda"]


class Resources(Config):
    """What a stage runs on. Nothing here changes what it computes."""

    nodes: PositiveInt = 1
    """Machines."""

    ranks_per_node: PositiveInt = 1
    """Processes on each machine: one per GPU, or CPU ranks where ``device`` is ``cpu``."""

    device: Device = "cpu"
    """``cuda`` gives each rank one GPU and talks NCCL; ``cpu`` talks gloo."""

    micro_batch_size: PositiveInt | None = None
    """Rows per rank in one forward pass. Unset: the largest of 8, 4, 2, 1 that divides evenly."""

    gradient_checkpointing: bool = False
    """Recompute activations in the backward pass: about a third more compute, much less memory."""

    activation_offloading: bool = False
    """Keep activations in host memory between forward and backward; needs ``device: cuda``."""

    collective_timeout_minutes: PositiveInt = 30
    """A rank that waits longer than this for the others gives up."""

    @property
    def world_size(self) -> int:
        return self.nodes * self.ranks_per_node


@dataclass(frozen=True)
class Launch:
    """A command ready to run on each node, and the settings its trainer needs."""

    argv: tuple[str, ...]
    env: Mapping[str, str] = field(default_factory=dict)
    trainer_args: Mapping[str, Any] = field(default_factory=dict)
    promise: Mapping[str, Any] = field(default_factory=dict)
    """What every rank must find after wrapping: ``wrapper``, ``zero_stage``, ``sharded``."""


class Backend(Protocol):
    """A backend's fields are execution: sharding, offload, communication."""

    @property
    def kind(self) -> str: ...

    def plan(self, resources: Resources, *argv: str) -> Launch: ...


def split_batch(global_batch: int, resources: Resources) -> tuple[int, int]:
    """(micro-batch size, accumulation steps) such that their product with the world size is
    ``global_batch`` rows. Raises ``ValueError`` when no such split exists.
    """
    world = resources.world_size
    per_rank, rest = divmod(global_batch, world)
    if rest or not per_rank:
        near = sorted({max(1, per_rank) * world, (per_rank + 1) * world})
        verb = "do are" if len(near) > 1 else "does is"
        raise ValueError(
            f"a global batch of {global_batch} rows does not divide over {world} ranks; "
            f"the nearest that {verb} {' and '.join(map(str, near))}"
        )
    micro = resources.micro_batch_size or next(m for m in (8, 4, 2, 1) if per_rank % m == 0)
    if per_rank % micro:
        raise ValueError(
            f"a global batch of {global_batch} rows over {world} ranks is {per_rank} rows each, "
            f"which micro_batch_size {micro} does not divide"
        )
    return micro, per_rank // micro


def trainer_settings(resources: Resources) -> dict[str, Any]:
    """The trainer arguments that every distributed backend shares."""
    if resources.activation_offloading and resources.device == "cpu":
        raise ValueError("activation_offloading needs device: cuda; host memory is all a CPU has")
    return {
        "use_cpu": resources.device == "cpu",
        "gradient_checkpointing": resources.gradient_checkpointing,
        "activation_offloading": resources.activation_offloading,
        "ddp_timeout": 60 * resources.collective_timeout_minutes,
        "ddp_backend": "gloo" if resources.device == "cpu" else "nccl",
    }


def one_process(resources: Resources, *argv: str) -> Launch:
    """A rank that is alone, started without torchrun: accelerate 1.15 starts a process group in
    whatever has a ``LOCAL_RANK``, and on a CPU wraps the model for it too, though it has no peer.
    """
    settings = trainer_settings(resources)
    del settings["ddp_backend"], settings["ddp_timeout"]
    return Launch(
        argv=(sys.executable, *argv),
        env=rank_environment(resources),
        trainer_args=settings,
        promise={"wrapper": "none", "world_size": 1},
    )


def torchrun(resources: Resources, *argv: str) -> tuple[str, ...]:
    """Rendezvous is the cluster's business: torchrun reads it from ``PET_*`` variables.

    On one node the endpoint ``localhost:0`` lets the kernel choose a free port, so that two jobs
    never meet.
    """
    alone = ("--rdzv-backend=c10d", "--rdzv-endpoint=localhost:0") if resources.nodes == 1 else ()
    return (
        sys.executable,
        "-m",
        "torch.distributed.run",
        f"--nnodes={resources.nodes}",
        f"--nproc-per-node={resources.ranks_per_node}",
        *alone,
        *argv,
    )


def rank_environment(resources: Resources) -> dict[str, str]:
    """One thread a CPU rank keeps ranks on one machine from stealing each other's cores."""
    return {"OMP_NUM_THREADS": "1"} if resources.device == "cpu" else {}
