"""Where the curves of training go beside ``metrics.jsonl``: TensorBoard's files, named trackers."""

import errno
import json
import os
import secrets
import shutil
import socket
import struct
import sys
import textwrap
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager
from copy import copy
from functools import partial
from importlib import import_module
from importlib.util import find_spec
from pathlib import Path
from queue import SimpleQueue
from threading import Lock, Thread
from typing import Any, Literal, Protocol

from configs import Config
from stages.base import Context
from stages.urls import without_user_info

TENSORBOARD = "tensorboard"
"""The folder of TensorBoard's files, which are always written."""

FOLDER = "trackers"
"""The folder of what other trackers keep here, and of what they were told."""

TOLD = "told.json"
NOT_DRAWN = ("step", "total_steps", "time")
PATIENCE = 30.0
"""Seconds that a tracker has at the end for what it has not taken yet."""

WHY_CHARACTERS = 300
"""Of what a tracker says when it fails, which may be a whole page."""

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


class Listener(Protocol):
    """What is told of a training, row by row."""

    def add(self, row: Row, figures: Mapping[str, float]) -> None: ...

    def end(self) -> None:
        """Return when all is written and sent."""
        ...


class Curves:
    """The curves of one training. Rank 0 has them, so that the others need not import anything.

    TensorBoard's files are made anew from ``metrics.jsonl`` at each start, so that each step is in
    them once, whatever was killed. Other trackers cannot take back what they were told: a resumed
    training goes on in their run of it, and they are told the steps that they do not know.

    Training does not depend on them: one that fails is told no more until the next start, and one
    that does not answer is not waited for.
    """

    def __init__(self, trainer: Any, ctx: Context, rows: Sequence[Row]) -> None:
        """``rows`` are those of ``metrics.jsonl`` so far."""
        self.dropped: dict[str, str] = {}
        """Why each that has failed is told no more."""
        self.listeners: dict[str, Listener] = {}
        for name, listen in _listeners(trainer, ctx).items():
            with self._beside(name):
                on_disk = name == TENSORBOARD
                self.listeners[name] = listen() if on_disk else Aside(listen, self._beside(name))
        for row in rows:
            self.add(row)

    def add(self, row: Row) -> None:
        figures = {name: value for name, value in row.items() if name not in NOT_DRAWN}
        for name, listener in list(self.listeners.items()):
            with self._beside(name):
                listener.add(row, figures)

    def end(self) -> None:
        for name, listener in list(self.listeners.items()):
            with self._beside(name):
                listener.end()

    @contextmanager
    def _beside(self, name: str) -> Iterator[None]:
        """Drop a listener that fails. TensorBoard's files lie on the disk where training saves, so
        that a full one is said at once."""
        try:
            yield
        except Exception as error:  # foreign code: no list of what it may raise would be whole
            full = isinstance(error, OSError) and error.errno in (errno.ENOSPC, errno.EDQUOT)
            if full and name == TENSORBOARD:
                raise
            said = without_user_info(f"{type(error).__name__}: {error}")
            self.dropped[name] = textwrap.shorten(said, WHY_CHARACTERS, placeholder=" ...")
            self.listeners.pop(name, None)
            sys.stderr.write(f"{name} is told no more until the next start: {self.dropped[name]}\n")


def _listeners(trainer: Any, ctx: Context) -> dict[str, Callable[[], Listener]]:
    """How each one that is told of this training begins to listen, by name."""
    found: dict[str, Callable[[], Listener]] = {TENSORBOARD: partial(Files, ctx.out / TENSORBOARD)}
    if asked := ctx.trainer_args.get("tracking"):
        tracking = Tracking(**asked)
        told = Told(ctx.out / FOLDER, tracking)
        found |= {name: partial(Integration, name, trainer, told) for name in tracking.trackers}
    return found


class Files:
    """TensorBoard's files, with the tags that transformers gives.

    Its own writers sync the disk, which waits for checkpoints too, and write from a thread, whose
    failure nobody hears of. A record is its length, a check of that, the event, a check of it.
    """

    def __init__(self, folder: Path) -> None:
        from tensorboardX.proto.event_pb2 import Event

        shutil.rmtree(folder, ignore_errors=True)
        folder.mkdir(parents=True)
        now = time.time()
        self.file = (folder / f"events.out.tfevents.{now:.0f}.{socket.gethostname()}").open("wb")
        self._write(Event(wall_time=now, file_version="brain.Event:2"))

    def add(self, row: Row, figures: Mapping[str, float]) -> None:
        from tensorboardX.proto.event_pb2 import Event
        from tensorboardX.proto.summary_pb2 import Summary

        values = [Summary.Value(tag=f"train/{k}", simple_value=v) for k, v in figures.items()]
        summary = Summary(value=values)
        self._write(Event(wall_time=row["time"], step=row["step"], summary=summary))

    def end(self) -> None:
        self.file.close()

    def _write(self, event: Any) -> None:
        data = event.SerializeToString()
        size = struct.pack("<Q", len(data))
        self.file.write(size + _check(size) + data + _check(data))
        self.file.flush()


def _check(data: bytes) -> bytes:
    from tensorboardX.record_writer import masked_crc32c

    return struct.pack("<I", masked_crc32c(data))


class Aside:
    """A listener in a thread of its own, since a server may take its time or never answer."""

    def __init__(self, listen: Callable[[], Listener], guard: AbstractContextManager[None]) -> None:
        """``guard`` is told of what goes wrong in the thread."""
        self.asked: SimpleQueue[Callable[[Listener], None] | None] = SimpleQueue()
        self.thread = Thread(target=self._work, args=(listen, guard), daemon=True)
        self.thread.start()

    def add(self, row: Row, figures: Mapping[str, float]) -> None:
        self.asked.put(lambda listener: listener.add(row, figures))

    def end(self) -> None:
        self.asked.put(None)
        self.thread.join(PATIENCE)
        if self.thread.is_alive():
            raise TimeoutError(f"it did not take everything in the last {PATIENCE:.0f} s")

    def _work(self, listen: Callable[[], Listener], guard: AbstractContextManager[None]) -> None:
        with guard:
            listener = listen()
            while ask := self.asked.get():
                ask(listener)
            listener.end()


class Told:
    """What trackers know from earlier starts, and under what names they keep it."""

    def __init__(self, folder: Path, tracking: Tracking) -> None:
        folder.mkdir(exist_ok=True)
        self.lock = Lock()
        self.path = folder / TOLD
        self.facts = self._facts(tracking)
        self._set_environment()

    def knows(self, name: str, step: int) -> bool:
        return step <= self.facts["steps"].get(name, 0)

    def note(self, name: str, step: int) -> None:
        with self.lock:
            self.facts["steps"][name] = step
            self._write()

    def begin(self, **facts: str) -> None:
        """A tracker listens; what the next start has to know of it."""
        with self.lock:
            self.facts |= facts
            self._write()

    def _write(self) -> None:
        """Not synced: after a crash of the machine a step is told twice at worst, or all of them
        once more, as another run, where the file did not come through."""
        aside = self.path.with_suffix(".partial")
        aside.write_text(json.dumps(self.facts))
        aside.replace(self.path)

    def _facts(self, tracking: Tracking) -> dict[str, Any]:
        """What earlier starts have left, or the names of a new training."""
        try:
            return json.loads(self.path.read_text())
        except (FileNotFoundError, ValueError):  # or cut short when the machine lost its power
            run = f"{tracking.run.replace(' ', '-')}-{secrets.token_hex(4)}"
            return {"project": tracking.project, "run": run, "steps": {}}

    def _set_environment(self) -> None:
        """What the integrations take from nowhere else. A user's own project comes first."""
        os.environ.setdefault("WANDB_PROJECT", self.facts["project"])
        os.environ.setdefault("WANDB_DIR", str(self.path.parent))
        os.environ |= {"WANDB_RUN_ID": self.facts["run"], "WANDB_RESUME": "allow"}
        os.environ.setdefault("MLFLOW_EXPERIMENT_NAME", self.facts["project"])
        if run := self.facts.get("mlflow_run"):
            os.environ["MLFLOW_RUN_ID"] = run


class Integration:
    """A tracker by its name, through transformers' own integration."""

    def __init__(self, name: Tracker, trainer: Any, told: Told) -> None:
        import transformers.integrations

        self.name, self.trainer, self.told = name, trainer, told
        self.args = copy(trainer.args)
        self.args.project, self.args.run_name = told.facts["project"], told.facts["run"]
        self.callback = getattr(transformers.integrations, INTEGRATIONS[name])()
        self._call("on_train_begin")
        if name == "mlflow":
            run = import_module("mlflow").active_run().info.run_id
            told.begin(mlflow_run=run)
        else:
            told.begin()

    def add(self, row: Row, figures: Mapping[str, float]) -> None:
        step = row["step"]
        if not self.told.knows(self.name, step):
            self._call("on_log", step=step, logs=dict(figures))
            self.told.note(self.name, step)

    def end(self) -> None:
        self._call("on_train_end")
        if self.name == "wandb":  # whose callback leaves that to the end of the process
            import_module("wandb").finish()

    def _call(self, event: str, *, step: int | None = None, **given: Any) -> None:
        state = copy(self.trainer.state)
        if step is not None:
            state.global_step = step
        handler = getattr(self.callback, event)
        handler(self.args, state, self.trainer.control, model=self.trainer.model, **given)
