"""One process, not distributed: data preparation, conversion, and runs on one device."""

import sys
from typing import Literal

from backends.base import Launch, Resources, rank_environment, trainer_settings
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
        settings = trainer_settings(resources)
        del settings["ddp_backend"], settings["ddp_timeout"]
        return Launch(
            argv=(sys.executable, *argv),
            env=rank_environment(resources),
            trainer_args=settings,
            promise={"wrapper": "none", "world_size": 1},
        )
