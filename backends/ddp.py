"""PyTorch DistributedDataParallel: a full replica in every rank, one all-reduce a step."""

from typing import Literal

from pydantic import PositiveInt

from backends.base import (
    Launch,
    Resources,
    one_process,
    rank_environment,
    torchrun,
    trainer_settings,
)
from configs import Config


class DDP(Config):
    """The fastest while memory suffices, and the easiest to debug: the first thing to try."""

    kind: Literal["ddp"] = "ddp"

    bucket_cap_mb: PositiveInt | None = None
    """Size of a gradient bucket in MiB; unset, PyTorch's 25."""

    def plan(self, resources: Resources, *argv: str) -> Launch:
        if resources.world_size == 1:
            return one_process(resources, *argv)
        settings = trainer_settings(resources) | {"ddp_find_unused_parameters": False}
        if self.bucket_cap_mb is not None:
            settings["ddp_bucket_cap_mb"] = self.bucket_cap_mb
        return Launch(
            argv=torchrun(resources, *argv),
            env=rank_environment(resources),
            trainer_args=settings,
            promise={"wrapper": "ddp", "world_size": resources.world_size},
        )
