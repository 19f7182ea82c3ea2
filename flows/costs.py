"""What a stage will take: memory, time and disk, as the planner sees it."""

import json
import math
from dataclasses import dataclass
from pathlib import Path

from backends import Auto
from backends.planner.model import find_model
from backends.planner.ranking import Option, judge
from backends.planner.work import Setup
from flows import planning
from flows.run_stage import Plan
from flows.ways import Way
from stages.training import Training


@dataclass(frozen=True)
class Cost:
    """An estimate; ``None`` where it is not known."""

    ranks: int
    on_gpus: bool
    memory_bytes: int | None = None
    """Of the fullest rank."""

    steps: int | None = None
    """That are left, as the stage counts them: of PPO its updates."""

    seconds: float | None = None
    """Of those steps."""

    disk_bytes: int | None = None
    """Of checkpoints and model, at most."""

    @property
    def gpu_hours(self) -> float | None:
        if self.seconds is None or not self.on_gpus:
            return None
        return self.seconds * self.ranks / 3600


def cost(planned: Plan) -> Cost | None:
    """What the rest of a stage costs; ``None`` when it is there, or not yet planned."""
    if planned.finished or not planned.remaining:
        return None
    way = planned.remaining[0]
    resources = way.step.resources
    cuda = resources.device == "cuda"
    if not planned.is_training:
        return Cost(resources.world_size, cuda)
    judged, steps = _judged(planned, way), _steps(planned)
    return Cost(
        ranks=resources.world_size,
        on_gpus=cuda,
        memory_bytes=judged.memory.total if judged else None,
        steps=steps,
        seconds=_seconds(planned.step.config, judged, steps),
        disk_bytes=planning.disk_bytes(way.step, planned.lineage),
    )


def _judged(planned: Plan, way: Way) -> Option | None:
    """The planner's verdict on the way; ``None`` for what it cannot judge."""
    if way.rung is not None:
        return way.rung
    known, resources = planned.lineage, way.step.resources
    if known.model is None or known.longest_conversation is None:
        return None
    filled = resources.model_copy(update={"micro_batch_size": way.micro_batch_size})
    assert not isinstance(way.step.backend, Auto)
    try:
        machine = way.step.placement.machine(resources, Auto(ranks="given"))
        work = planning.work(way.step.config, known)
        return judge(find_model(known.model), work, Setup(way.step.backend, filled), machine)
    except (ValueError, OSError):  # no driver, or an architecture that it does not know
        return None


def _seconds(config: Training, judged: Option | None, steps: int | None) -> float | None:
    if judged is None or steps is None:
        return None
    return judged.time.seconds * steps * config.optimizer_steps_per_step


def _steps(planned: Plan) -> int | None:
    config: Training = planned.step.config
    rows, steps = _rows(planned.inputs.get("data")), None
    of_pairs = planning.stage(config) in planning.OF_PAIRS
    kind = "preferences" if of_pairs else "conversations"
    if rows and f"{kind}/train/rows" in rows:
        steps = math.ceil(rows[f"{kind}/train/rows"] * config.epochs / config.rows_per_step)
    known = [number for number in (steps, config.max_steps) if number is not None]
    return min(known, default=None)


def _rows(data: Path | None) -> dict[str, int]:
    """The counts of tokenised rows, once they are there."""
    path = data / "metrics.json" if data else None
    return json.loads(path.read_text()) if path and path.exists() else {}
