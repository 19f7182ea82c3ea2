"""Where the curves of training go beside ``metrics.jsonl``: TensorBoard's files, named trackers."""

import json
import os
import secrets
import shutil
from collections.abc import Mapping, Sequence
from copy import copy
from importlib import import_module
from importlib.util import find_spec
from pathlib import Path
from typing import Any, Literal

from configs import Config
from stages.base import Context

TENSORBOARD = "tensorboard"
"""The folder of TensorBoard's files, which are always written."""

FOLDER = "trackers"
"""The folder of what other trackers keep here, and of what they were told."""

TOLD = "told.json"
FLUSH_SECONDS = 10
"""How long a step may wait until TensorBoard can show it."""

NOT_DRAWN = ("step", "total_steps", "time")
QUEUE = 1000
"""Rows that may wait to be written."""

Tracker = Literal["wandb", "mlflow", "trackio"]
INTEGRATIONS: Mapping[Tracker, str] = {
    "wandb": "WandbCallback",
    "mlflow": "MLflowCallback",
    "trackio": "TrackioCallback",
}
"""What transformers calls its integrations."""

Row = Mapping[str, Any]
"""A row of ``metrics.jsonl``."""


class Tracking(Config):
    """Which trackers are told of a training, and under what names."""

    trackers: tuple[Tracker, ...]
    """By the names of their packages."""

    project: str
    """What they file it under: the run's name."""

    run: str
    """What they call it: the stage, with something behind it that no other training has."""


def obstacle(names: Sequence[Tracker]) -> str | None:
    """Why these trackers cannot be told of anything here, or ``None``."""
    missing = [name for name in names if not _is_installed(name)]
    if not missing:
        return None
    return (
        f"trackers: {', '.join(missing)} not installed; type: pip install {' '.join(missing)}, "
        "or leave out what is missing"
    )


def _is_installed(package: str) -> bool:
    """A folder of that name is none: trackers leave such folders where they are started."""
    found = find_spec(package)
    return found is not None and found.origin is not None


class Curves:
    """The curves of one training. Rank 0 has them, so that the others need not import anything.

    TensorBoard's files are made anew from ``metrics.jsonl`` at each start, so that each step is in
    them once, whatever was killed. Other trackers cannot take back what they were told: a resumed
    training goes on in their run of it, and they are told the steps that they do not know.
    """

    def __init__(self, trainer: Any, ctx: Context, rows: Sequence[Row]) -> None:
        """``rows`` are those of ``metrics.jsonl`` so far."""
        self.files = Files(ctx.out / TENSORBOARD)
        asked = ctx.trainer_args.get("tracking")
        self.told = Told(trainer, ctx.out / FOLDER, Tracking(**asked)) if asked else None
        for row in rows:
            self.add(row)

    def add(self, row: Row) -> None:
        figures = {name: value for name, value in row.items() if name not in NOT_DRAWN}
        self.files.add(row, figures)
        if self.told:
            self.told.add(row["step"], figures)

    def end(self) -> None:
        """Return when all is written and sent."""
        self.files.end()
        if self.told:
            self.told.end()


class Files:
    """TensorBoard's files, with the tags that transformers gives.

    Its own callback would sync the disk after every step, which waits for checkpoints too.
    """

    def __init__(self, folder: Path) -> None:
        from tensorboardX import FileWriter

        shutil.rmtree(folder, ignore_errors=True)
        self.writer = FileWriter(str(folder), max_queue=QUEUE, flush_secs=FLUSH_SECONDS)

    def add(self, row: Row, figures: Mapping[str, float]) -> None:
        from tensorboardX.proto.summary_pb2 import Summary

        values = [Summary.Value(tag=f"train/{k}", simple_value=v) for k, v in figures.items()]
        self.writer.add_summary(Summary(value=values), row["step"], walltime=row["time"])

    def end(self) -> None:
        self.writer.close()


class Told:
    """Trackers by name, each through transformers' own integration, and what they know already."""

    def __init__(self, trainer: Any, folder: Path, tracking: Tracking) -> None:
        import transformers.integrations

        folder.mkdir(exist_ok=True)
        self.trainer, self.path = trainer, folder / TOLD
        self.facts = self._facts(tracking)
        self.args = copy(trainer.args)
        self.args.project, self.args.run_name = self.facts["project"], self.facts["run"]
        self._set_environment(folder)
        self.callbacks: dict[str, Any] = {
            name: getattr(transformers.integrations, INTEGRATIONS[name])()
            for name in tracking.trackers
        }
        for name in self.callbacks:
            self._call(name, "on_train_begin")
        if "mlflow" in self.callbacks:
            active = import_module("mlflow").active_run()
            self.facts["mlflow_run"] = active.info.run_id
        self._write()

    def add(self, step: int, figures: Mapping[str, float]) -> None:
        for name in self.callbacks:
            if step > self.facts["steps"].get(name, 0):
                self._call(name, "on_log", step=step, logs=dict(figures))
                self.facts["steps"][name] = step
        self._write()

    def end(self) -> None:
        for name in self.callbacks:
            self._call(name, "on_train_end")
        if "wandb" in self.callbacks:  # whose callback leaves that to the end of the process
            import_module("wandb").finish()

    def _facts(self, tracking: Tracking) -> dict[str, Any]:
        """What earlier starts have left, or the names of a new training."""
        if self.path.exists():
            return json.loads(self.path.read_text())
        run = f"{tracking.run.replace(' ', '-')}-{secrets.token_hex(4)}"
        return {"project": tracking.project, "run": run, "steps": {}}

    def _set_environment(self, folder: Path) -> None:
        """What the integrations take from nowhere else. A user's own project comes first."""
        os.environ.setdefault("WANDB_PROJECT", self.facts["project"])
        os.environ.setdefault("WANDB_DIR", str(folder))
        os.environ |= {"WANDB_RUN_ID": self.facts["run"], "WANDB_RESUME": "allow"}
        os.environ.setdefault("MLFLOW_EXPERIMENT_NAME", self.facts["project"])
        if run := self.facts.get("mlflow_run"):
            os.environ["MLFLOW_RUN_ID"] = run

    def _call(self, name: str, event: str, *, step: int | None = None, **given: Any) -> None:
        state = copy(self.trainer.state)
        if step is not None:
            state.global_step = step
        handler = getattr(self.callbacks[name], event)
        handler(self.args, state, self.trainer.control, model=self.trainer.model, **given)

    def _write(self) -> None:
        """Not synced: after a crash of the machine a step is told twice at worst."""
        partial = self.path.with_suffix(".partial")
        partial.write_text(json.dumps(self.facts))
        partial.replace(self.path)
