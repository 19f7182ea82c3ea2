"""One stage of a run as a value: what to compute, on what, and what came of it."""

from dataclasses import dataclass
from pathlib import Path
from typing import Any, Generic, Literal, Protocol, TypeVar

from pydantic import Field, NonNegativeInt, PositiveInt

from backends import AnyBackend, Local, Resources
from backends.placement import AnyPlacement, ThisMachine
from configs import Config

C = TypeVar("C", bound=Config)
Status = Literal["reused", "ran", "resumed", "planned"]


class Step(Config, Generic[C]):
    """One stage of a run. ``config`` decides the output; everything else only how it is made."""

    config: C
    """What to compute."""

    backend: AnyBackend = Local()
    """How the ranks share the work."""

    resources: Resources = Resources()
    """What the stage runs on."""

    placement: AnyPlacement = ThisMachine()
    """Where it runs."""

    retries: NonNegativeInt = 1
    """Times that a job which crashed, hung or lost a peer goes on by itself from its newest
    complete checkpoint. A fault in the input or the settings is never tried again."""

    save_every: PositiveInt = 100
    """Optimizer steps between checkpoints."""

    keep_checkpoints: PositiveInt = Field(default=2, ge=2)
    """Newest checkpoints kept; at least two, so that one is whole while another is written."""

    best_by: str | None = None
    """Metric, such as ``loss``, by which the best checkpoint is kept too, however old it is."""

    best_is_larger: bool = False
    """More of ``best_by`` is better."""


@dataclass(frozen=True)
class Lineage:
    """What the planner wants to know of a stage's inputs, as far as it is known."""

    model: str | None = None
    """Where the model's shape can be read: a checkpoint folder, or a hub id."""

    longest_conversation: int | None = None
    """Tokens of the longest training row, or the limit that holds before rows are counted."""

    longest_pair: int | None = None
    """The same of the longer side of a preference pair, its prompt included."""


@dataclass(frozen=True)
class Artifact:
    """A stage's output directory, and how this run came by it."""

    label: str
    stage: str
    path: Path
    fingerprint: str
    status: Status
    seconds: float = 0.0
    """Wall time of this run's part; 0 when reused."""

    lineage: Lineage = Lineage()


class Runner(Protocol):
    """What a flow calls for each of its stages."""

    def __call__(
        self, stage: str, step: Step[Any], *, label: str, **inputs: Artifact
    ) -> Artifact: ...
