"""Two real steps of a stage's plans at the longest row: what memory they really take."""

import json
import tempfile
from dataclasses import dataclass
from pathlib import Path
from statistics import median

from configs import Config, ConfigError
from flows.failures import StageFailed
from flows.report import aligned
from flows.run_stage import Plan, Say, plan, run_stage
from flows.steps import Artifact, Step
from flows.ways import Way
from stages.longest_rows import LongestRows

STEPS = 2
"""The second is the first with optimizer state."""

SHORT = {"max_steps": STEPS, "epochs": 1, "critic_warmup": 0}
"""What a stage's config says of its length."""

MOST = 3
"""Plans that are tried."""


@dataclass(frozen=True)
class Probed:
    """A way, with its peak bytes per rank: planned (without a plan, ``None``) and measured."""

    way: Way
    planned: int | None
    measured: int | None
    """``None``: it ended out of memory."""


def probe(planned: Plan, *, store: Path, say: Say) -> list[Probed]:
    """Run two steps of the first ways of a training stage, on copies of the longest row.

    Nothing is left in ``store``. Raises ``ConfigError`` when the model or the rows are not there
    yet, ``StageFailed`` when a way fails for another reason than memory.
    """
    inputs = _inputs(planned)
    with tempfile.TemporaryDirectory(prefix=".probe-", dir=store) as folder:
        rows = planned.step.config.global_batch_rows * STEPS
        longest = _longest(inputs["data"], Path(folder), rows=rows, say=say)
        return [
            _probe(planned, way, inputs | {"data": longest}, Path(folder) / str(number), say=say)
            for number, way in enumerate(planned.remaining[:MOST])
        ]


def _inputs(planned: Plan) -> dict[str, Artifact]:
    """The stage's inputs; a model that is yet to be trained is as large as its base."""
    base = planned.lineage.model
    found = {}
    for name, path in planned.inputs.items():
        stand_in = path if path.is_dir() or name == "data" or base is None else Path(base).parent
        if not stand_in.is_dir():
            raise ConfigError(
                f"{planned.label}: a probe needs the model and the tokenised rows, and {path} is "
                "not there yet; run the flow once, or let it run until tokenize data is done"
            )
        found[name] = Artifact(name, name, stand_in, stand_in.name, "reused")
    return found


def _longest(data: Artifact, store: Path, *, rows: int, say: Say) -> Artifact:
    step = Step[LongestRows](config=LongestRows(rows=rows))
    made = plan("longest_rows", step, store, label="longest rows", inputs={"data": data})
    return run_stage(made, say=say)


def _probe(
    planned: Plan, way: Way, inputs: dict[str, Artifact], store: Path, *, say: Say
) -> Probed:
    changed = {"config": shortened(way.step.config), "save_every": STEPS + 1}
    step = way.step.model_copy(update=changed)
    label = f"probe {planned.label}"
    one = plan(planned.stage.name, step, store, label=label, inputs=inputs)
    say(f"{one.label}: {way.text}")
    peak = _total(way)
    try:
        out = run_stage(one, say=say).path
    except StageFailed as failed:
        if failed.kind is None or failed.kind.policy != "less memory":
            raise
        return Probed(way, peak, None)
    facts = [json.loads(file.read_text()) for file in (out / "ranks").glob("rank-*.json")]
    return Probed(way, peak, max(each["peak_bytes"] - each["process_bytes"] for each in facts))


def shortened(config: Config) -> Config:
    """``config`` of a training stage for two steps in which everything is trained."""
    known = type(config).model_fields
    return config.model_copy(update={key: SHORT[key] for key in SHORT.keys() & known.keys()})


def lines(planned: Plan, found: list[Probed]) -> list[str]:
    """The plans of a stage: planned, measured, and the unmeasured ones corrected by the rest."""
    known = {each.way.text: each for each in found}
    every = [known.get(way.text) or Probed(way, _total(way), None) for way in planned.remaining]
    shift = median(
        [each.measured - each.planned for each in found if each.measured and each.planned] or [0]
    )
    rows = [_row(each, tried=each.way.text in known, shift=shift) for each in every]
    head = ("bytes a rank: planned", "measured", "difference", "plan")
    return [f"  {line}" for line in aligned(head, rows).splitlines()]


def _total(way: Way) -> int | None:
    return way.memory.total if way.memory else None


def _row(each: Probed, *, tried: bool, shift: float) -> list[str]:
    planned = _size(each.planned) if each.planned else ""
    if each.measured and each.planned:
        change = f"{100 * (each.measured / each.planned - 1):+.0f} %"
        return [planned, _size(each.measured), change, each.way.text]
    if tried:
        measured = _size(each.measured) if each.measured else "out of memory"
        return [planned, measured, "", each.way.text]
    corrected = f"about {_size((each.planned or 0) + shift)}" if shift else ""
    return [planned, corrected, "", each.way.text]


def _size(number: float) -> str:
    return f"{number / 1e9:.2f} GB" if number >= 1e9 else f"{number / 1e6:.0f} MB"
