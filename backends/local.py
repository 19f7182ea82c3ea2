"""One process, not distributed: data preparation, conversion, and runs on one device."""

from typing import Literal

from backends.base import Launch, Resources, one_process
from configs import Config


class Local(Config):
    """One plain process."""

    kind: Literal["local"] = "local"

    def plan(self, resources: Resources, *argv: str) -> Launch:
        if resources.world_size != 1:
            raise ValueError(
                f"the local backend is one process, but {resources.world_size} ranks are asked "
                "for; use backend.kind ddp, fsdp or deepspeed"
            )
        return one_process(resources, *argv)
