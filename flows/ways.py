"""The ways in which one stage can be run: one under a named backend, a ladder under ``auto``."""

from dataclasses import dataclass
from pathlib import Path
from typing import Any

from backends import Auto, Launch, split_batch
from backends.planner.memory import Memory
from backends.planner.ranking import Option, describe
from flows import planning
from flows.steps import Lineage, Step


@dataclass(frozen=True)
class Way:
    """A step with a definite backend, and what follows from it."""

    step: Step[Any]
    launch: Launch
    micro_batch_size: int | None
    accumulation_steps: int | None
    rung: Option | None = None
    """What the planner computed for it; ``None`` where the recipe names the backend."""

    @property
    def memory(self) -> Memory | None:
        return self.rung and self.rung.memory

    @property
    def why(self) -> str:
        """The planner's reasons."""
        return self.rung.why if self.rung else ""

    @property
    def backend(self) -> str:
        """``FSDP grad-op``, ``ZeRO-3, optimizer on cpu``."""
        assert not isinstance(self.step.backend, Auto)
        return describe(self.step.backend)

    @property
    def text(self) -> str:
        """``FSDP grad-op x2, 4 rows x 2, recomputing``."""
        resources = self.step.resources
        parts = [f"{self.backend} x{resources.world_size}"]
        if self.micro_batch_size is not None:
            parts.append(f"{self.micro_batch_size} rows x {self.accumulation_steps}")
        if resources.gradient_checkpointing:
            parts.append("recomputing")
        return ", ".join(parts)


def ways(step: Step[Any], out: Path, known: Lineage) -> tuple[Way, ...]:
    """How ``step`` can be run into ``out``, first choice first.

    Empty under ``auto`` while what it plans from is not known yet. Raises ``ValueError`` for a
    batch that cannot be split, and for work that the planner cannot plan.
    """
    if not isinstance(step.backend, Auto):
        planning.refuse(step, known)
        return (_way(step, out),)
    return tuple(_way(chosen, out, rung) for chosen, rung in planning.choices(step, known))


def _way(step: Step[Any], out: Path, rung: Option | None = None) -> Way:
    assert not isinstance(step.backend, Auto)
    launch = step.backend.plan(step.resources, "-m", "stages", str(out / "job.json"))
    rows = getattr(step.config, "global_batch_rows", None)
    split = split_batch(rows, step.resources) if rows is not None else (None, None)
    return Way(step, launch, *split, rung=rung)
