"""What a stage is: a function of (config, inputs) that fills a directory."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from inspect import Parameter, signature
from pathlib import Path
from typing import Any

from pydantic import Field

from configs import Config

Metrics = Mapping[str, Any]
"""What a stage measured: JSON values by name."""


class Interrupted(Exception):
    """The stage was asked to stop and has saved what it can resume from."""


class StageError(ValueError):
    """A fault that the user can mend; its text says what, where and how."""


@dataclass(frozen=True)
class Context:
    """Where and how a stage runs. Nothing here may change what it computes."""

    out: Path
    """The output directory; it may hold what an interrupted run of the same work left."""

    trainer_args: Mapping[str, Any] = field(default_factory=dict)
    """What the backend adds to the trainer's arguments."""

    promise: Mapping[str, Any] = field(default_factory=dict)
    """What the backend says the ranks will get; training stages verify it."""

    device: str = "cpu"
    """``cpu`` or ``cuda``."""


@dataclass(frozen=True)
class Stage:
    """A stage function; its name, config type and inputs are read off its signature."""

    fn: Callable[..., Metrics]
    version: int = 1
    """Bump it when the function's meaning changes, so that old outputs stop matching."""

    online: bool = False
    """May reach the network; every other stage runs with the hub switched off."""

    beats: bool = False
    """Its ranks write beats and wait for one another, so that one that falls silent is a hang."""

    @property
    def name(self) -> str:
        return self.fn.__name__

    @property
    def config_type(self) -> type[Config]:
        return next(iter(signature(self.fn).parameters.values())).annotation

    @property
    def inputs(self) -> Mapping[str, bool]:
        """Each input's name, and whether it must be given."""
        parameters = signature(self.fn).parameters.values()
        return {
            p.name: p.default is Parameter.empty
            for p in parameters
            if p.kind is Parameter.KEYWORD_ONLY
        }


class Job(Config):
    """One stage run, as handed over to the processes that carry it out."""

    stage: str
    config: dict[str, Any]
    inputs: dict[str, Path]
    trainer_args: dict[str, Any] = Field(default_factory=dict)
    promise: dict[str, Any] = Field(default_factory=dict)
    device: str = "cpu"
