"""PyTorch DistributedDataParallel: a full replica in every rank, one all-reduce a step."""

from typing import Literal

from pydantic import PositiveInt

from backends.base import Launch, Resources, rank_environment, torchrun, trainer_settings
from configs import Config


class DDP(Config):
    """The fastest while memory suffices, and the easiest to debug: the first thing to try."""

    kind: Literal["ddp"] = "ddp"

    bucket_cap_mb: PositiveInt | None = None
    """Size of a gradient bucket in MiB; unset, PyTorch's 25."""

    def plan(self, resources: Resources, *argv: str) -> Launch:
        settings = trainer_settings(resources) | {"ddp_find_unused_parameters": False}
        if self.bucket_cap_mb is not None:
            settings["ddp_bucket_cap_mb"] = self.bucket_cap_mb
        wrapper = "ddp" if resources.world_size > 1 else "none"
        return Launch(
            argv=torchrun(resources, *argv),
            env=rank_environment(resources),
            trainer_args=settings,
            promise={"wrapper": wrapper, "world_size": resources.world_size},
        )
