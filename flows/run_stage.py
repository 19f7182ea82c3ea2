"""Where a stage meets a backend and a placement."""

import fcntl
import json
import os
import platform
import shutil
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from datetime import UTC, datetime
from functools import cache
from importlib import metadata
from pathlib import Path
from typing import Any

from backends import Launch
from configs import ConfigError
from flows import failures, moves, planning
from flows.failures import Ended, Failure, StageFailed
from flows.planning import lineage
from flows.progress import Progress
from flows.steps import Artifact, Lineage, Step
from flows.ways import Way, ways
from stages import STAGES, checkpoint, manifest, resume, trackers
from stages.base import Job, Stage
from stages.trackers import Tracking
from stages.training import Training

ROOT = Path(__file__).resolve().parent.parent
PACKAGES = ("torch", "transformers", "trl", "peft", "accelerate", "deepspeed", "datasets")
Say = Callable[[str], None]
Queued = Callable[[str], None]
"""Told what a stage waits for before its job starts, and the empty text when that is over."""

WAIT_SECONDS = 0.2


@dataclass(frozen=True)
class Plan:
    """Everything about one stage run that can be known without running it."""

    label: str
    stage: Stage
    step: Step[Any]
    identity: manifest.Identity
    out: Path
    inputs: Mapping[str, Path]
    lineage: Lineage
    ways: tuple[Way, ...]
    """How it can be run, first choice first; none while ``auto`` lacks what it plans from."""

    tracking: Tracking | None = None
    """Who is told of the training beside us."""

    @property
    def is_training(self) -> bool:
        return isinstance(self.step.config, Training)

    @property
    def promised(self) -> Artifact:
        """The output as if it were there already, for what is planned after it."""
        return _artifact(self, "planned")

    @property
    def remaining(self) -> tuple[Way, ...]:
        """The ways still to be tried: from the one that an earlier run of this work came to."""
        return moves.remaining(self.out, self.ways, self.checkpoint)

    @property
    def finished(self) -> bool:
        return manifest.read(self.out) is not None

    @property
    def checkpoint(self) -> Path | None:
        """Where an interrupted run of the same work left off."""
        return resume.newest(self.out)

    @property
    def obstacle(self) -> str | None:
        """Why this machine cannot do the work now, or ``None``. What lies in the output is no
        obstacle while another run is at it: that run is waited for."""
        if done := manifest.read(self.out):
            fault = manifest.damage(self.out, done, self.identity)
            return f"{self.out} is damaged: {fault}; remove it to make it again" if fault else None
        if not self.remaining:
            return planning.obstacle(self.step)
        way = self.remaining[0]
        return (
            self.step.placement.obstacle(way.step.resources)
            or self._missing_part(way)
            or self._missing_tracker()
            or (None if _is_being_made(self.out) else self.in_the_way(way))
        )

    def in_the_way(self, way: Way) -> str | None:
        """Why ``way`` cannot be taken beside what the output and its disk hold, or ``None``."""
        return self._other_shape(way) or self._small_disk(way)

    def _missing_part(self, way: Way) -> str | None:
        config = self.step.config
        if not isinstance(config, Training):
            return None
        return config.obstacle(way.step.resources.device)

    def _missing_tracker(self) -> str | None:
        told = self.is_training and self.tracking
        return trackers.obstacle(told.trackers) if told else None

    def _small_disk(self, way: Way) -> str | None:
        """What is saved already does not need its place again."""
        needed = planning.disk_bytes(way.step, self.lineage)
        place = next(folder for folder in self.out.absolute().parents if folder.is_dir())
        free = shutil.disk_usage(place).free
        if needed is None or needed <= free + resume.saved_bytes(self.out):
            return None
        return (
            f"checkpoints and model take up to {needed / 1e9:.2f} GB and the disk of {place} has "
            f"{free / 1e9:.2f} GB free; free some, lower keep_checkpoints, or move the store"
        )

    def _other_shape(self, way: Way) -> str | None:
        newest = self.checkpoint
        refused = newest and resume.obstacle(newest, way.launch.promise)
        return f"{refused}; or remove {self.out} to start again" if refused else None


def plan(
    stage_name: str,
    step: Step[Any],
    store: Path,
    *,
    label: str,
    inputs: Mapping[str, Artifact],
    tracking: Tracking | None = None,
) -> Plan:
    """Resolve a stage run. Pure but for reading the files that ``step.config`` names.

    Raises ``ConfigError`` when the batch cannot be split or a file is missing.
    """
    stage = STAGES[stage_name]
    _check_inputs(stage, inputs)
    try:
        identity = manifest.identify(
            stage, step.config, {name: given.fingerprint for name, given in inputs.items()}
        )
        out = store / stage.name / identity.fingerprint
        known = lineage(step, out, [given.lineage for given in inputs.values()])
        found = ways(step, out, known)
    except (ValueError, FileNotFoundError) as error:
        raise ConfigError(f"{label}: {error}") from None
    paths = {name: given.path for name, given in inputs.items()}
    return Plan(label, stage, step, identity, out, paths, known, found, tracking)


def _check_inputs(stage: Stage, inputs: Mapping[str, Artifact]) -> None:
    required = {name for name, needed in stage.inputs.items() if needed}
    assert required <= inputs.keys() <= stage.inputs.keys(), (
        f"{stage.name} takes {dict(stage.inputs)}, got {sorted(inputs)}"
    )


def run_stage(planned: Plan, *, say: Say, queued: Queued = lambda why: None) -> Artifact:
    """Return the output of ``planned``, computing it only if the store does not hold it yet.

    One writer per output: a second run of the same work waits for the first and reuses what it
    made. Raises :class:`StageFailed`, or ``ConfigError`` when this machine cannot run it.
    """
    if planned.obstacle:
        raise ConfigError(f"{planned.label}: {planned.obstacle}")
    if planned.finished:
        return _artifact(planned, "reused")
    assert planned.ways, f"{planned.label}: inputs are complete, so auto has what it plans from"
    with _only_writer(planned, say=say, queued=queued) as lock:
        if planned.finished:
            return _artifact(planned, "reused")
        if _was_done(planned, planned.remaining[0]):
            resumed, way, seconds = True, planned.remaining[0], 0.0
        else:
            if reason := planned.in_the_way(planned.remaining[0]):  # left by whom we waited for
                raise ConfigError(f"{planned.label}: {reason}")
            resumed = _make_ready(planned, say=say)
            way, seconds = _execute(planned, lock=lock, say=say, queued=queued)
        _check_sources(planned)
        for name, why in _dropped(planned.out).items():
            say(f"{planned.label}: {name} was not told everything: {why}")
        manifest.write(planned.out, _manifest(planned, way, seconds=seconds))
        return _artifact(planned, "resumed" if resumed else "ran", seconds)


def _artifact(planned: Plan, status: Any, seconds: float = 0.0) -> Artifact:
    return Artifact(
        label=planned.label,
        stage=planned.stage.name,
        path=planned.out,
        fingerprint=planned.identity.fingerprint,
        status=status,
        seconds=seconds,
        lineage=lineage(planned.step, planned.out, [planned.lineage]),
    )


@contextmanager
def _only_writer(planned: Plan, *, say: Say, queued: Queued) -> Iterator[int]:
    """Hold the output's lock. The kernel frees it when its last holder, a rank's supervisor
    perhaps, is gone, so a lock is never stale."""
    planned.out.parent.mkdir(parents=True, exist_ok=True)
    with _lock_file(planned.out).open("w") as file:
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            queued("another run is making this; waiting for it")
            _wait_for(file.fileno(), Progress(planned.label, planned.out, say=say))
            queued("")
        yield file.fileno()


def _lock_file(out: Path) -> Path:
    return out.with_name(f"{out.name}.lock")


def _is_being_made(out: Path) -> bool:
    """Whether a run holds the output's lock."""
    if not _lock_file(out).exists():
        return False
    with _lock_file(out).open() as file:
        try:
            fcntl.flock(file, fcntl.LOCK_SH | fcntl.LOCK_NB)
        except BlockingIOError:
            return True
    return False


def _wait_for(lock: int, progress: Progress) -> None:
    """Wait for the lock, and tell meanwhile how its holder gets on."""
    while True:
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
            return
        except BlockingIOError:
            progress.poll()
            time.sleep(WAIT_SECONDS)


def _make_ready(planned: Plan, *, say: Say) -> bool:
    """Bring the output directory to a state to start from; True when there is one to resume."""
    out = planned.out
    for line in resume.discard_incomplete(out):
        say(f"{planned.label}: {line}")
    if planned.checkpoint is None:
        moves.clear(out)
        return False
    shutil.rmtree(out / "failures", ignore_errors=True)
    return True


def _execute(planned: Plan, *, lock: int, say: Say, queued: Queued) -> tuple[Way, float]:
    """Run the first way that memory suffices for; it, and the seconds that all of them took."""
    started, retries = time.monotonic(), planned.step.retries
    left = list(planned.remaining)
    while failure := _try(planned, left[0], lock=lock, say=say, queued=queued):
        if failure.kind.policy == "less memory" and len(left) > 1:
            failed = left.pop(0)
            say(f"{planned.label}: {moves.move(planned.out, failed, left[0], failure)}")
        elif failure.kind.policy == "again" and retries:
            retries -= 1
            say(f"{failure.text.splitlines()[0]}; going on from {_start(planned)}")
            time.sleep(failure.kind.pause_seconds)
            _make_ready(planned, say=say)
        else:
            raise StageFailed(failure.text, kind=failure.kind)
    return left[0], time.monotonic() - started


def _start(planned: Plan) -> str:
    newest = planned.checkpoint
    return f"step {resume.step(newest)}" if newest else "the start"


def _try(planned: Plan, way: Way, *, lock: int, say: Say, queued: Queued) -> Failure | None:
    """Run one way to its end; ``None`` when it is done."""
    out, log, placement = planned.out, planned.out / "log.txt", way.step.placement
    manifest.write_atomically(out / "job.json", _job_text(planned, way))
    since = log.stat().st_size if log.exists() else 0
    killed = failures.num_oom_kills()
    progress = Progress(planned.label, out, say=say)
    launch = _with_environment(planned, way)
    try:
        code = placement.run(
            launch, gpus=_gpus(way), log=log, lock=lock, poll=progress.poll, queued=queued
        )
    except KeyboardInterrupt as stop:
        newest = planned.checkpoint
        step = resume.step(newest) if newest else None
        raise type(stop)(failures.stopped(planned.label, step, placement.ended(out))) from None
    if code == 0:
        return None
    facts = placement.ended(out)
    ended = Ended(
        code,
        log,
        since=since,
        oom_kills=failures.num_oom_kills() - killed,
        supervised=facts is not None,
        asked=facts is not None and facts["why"] == "asked",
        silent={int(rank): beat for rank, beat in facts["silent"].items()} if facts else {},
    )
    return failures.diagnose(planned.label, out, ended)


def _gpus(way: Way) -> int:
    resources = way.step.resources
    return resources.ranks_per_node if resources.device == "cuda" else 0


def _was_done(planned: Plan, way: Way) -> bool:
    """Whether this very job has run to its end already, for a flow that was gone by then."""
    out = planned.out
    ended = way.step.placement.ended(out)
    if ended is None or ended["code"] != 0 or not (out / "metrics.json").exists():
        return False
    return (out / "job.json").read_text() == _job_text(planned, way)


def _job_text(planned: Plan, way: Way) -> str:
    return job(planned, way).model_dump_json(indent=2)


def _check_sources(planned: Plan) -> None:
    """Files that the config names must still be what they were when the run was planned. Else the
    output must not pass for one that is done, should they be that again."""
    again = manifest.identify(planned.stage, planned.step.config, planned.identity.inputs)
    if again != planned.identity:
        (planned.out / "metrics.json").unlink(missing_ok=True)
        raise StageFailed(
            f"{planned.label} failed: a file that its config names changed while it was read\n"
            "  next: the same command again, when the file is at rest"
        )


def job(planned: Plan, way: Way) -> Job:
    """What every rank is handed."""
    settings = dict(way.launch.trainer_args)
    if way.micro_batch_size is not None:
        settings |= {
            "per_device_train_batch_size": way.micro_batch_size,
            "gradient_accumulation_steps": way.accumulation_steps,
            "save_steps": way.step.save_every,
            "save_total_limit": None,
            "keep": {
                "keep_last": way.step.keep_checkpoints,
                "metric": way.step.best_by,
                "larger": way.step.best_is_larger,
            },
        }
    if planned.is_training and planned.tracking:
        settings |= {"tracking": planned.tracking.model_dump(mode="json")}
    return Job(
        stage=planned.stage.name,
        config=way.step.config.model_dump(mode="json"),
        inputs=dict(planned.inputs),
        trainer_args=settings,
        promise=dict(way.launch.promise),
        device=way.step.resources.device,
    )


def python_path() -> str:
    """Where every process of ours looks for modules: our four packages, whose generic names must
    resolve to this project, and what the user has put there, rewards say."""
    return os.pathsep.join(filter(None, (str(ROOT), os.environ.get("PYTHONPATH"))))


def _with_environment(planned: Plan, way: Way) -> Launch:
    env = {
        "PYTHONPATH": python_path(),
        "PYTHONUNBUFFERED": "1",
        "TOKENIZERS_PARALLELISM": "false",
        "HF_HUB_DISABLE_TELEMETRY": "1",
        "DO_NOT_TRACK": "1",
    }
    if not planned.stage.online:
        env["HF_HUB_OFFLINE"] = "1"
    launch = way.launch
    return Launch(launch.argv, env=env | dict(launch.env), trainer_args=launch.trainer_args)


def _manifest(planned: Plan, way: Way, *, seconds: float) -> manifest.Manifest:
    step, out = way.step, planned.out
    provenance = {
        "finished": datetime.now(UTC).isoformat(timespec="seconds"),
        "seconds": round(seconds, 2),
        "host": platform.node(),
        "command": list(way.launch.argv),
        "inputs": {name: str(path) for name, path in planned.inputs.items()},
        "backend": step.backend.model_dump(mode="json"),
        "world_size": step.resources.world_size,
        "resources": step.resources.model_dump(mode="json"),
        "micro_batch_size": way.micro_batch_size,
        "accumulation_steps": way.accumulation_steps,
        "choice": [way.text, way.why] if way.why else None,
        "moves": moves.read(out),
        "ranks": _ranks(out),
        "versions": dict(_versions()),
    }
    model = out / "model"
    return manifest.Manifest(
        identity=planned.identity,
        provenance=provenance,
        metrics=json.loads((out / "metrics.json").read_text()),
        files=manifest.sizes(out),
        checkpoint=checkpoint.describe(model) if model.is_dir() else None,
    )


@cache
def _versions() -> tuple[tuple[str, str], ...]:
    found = ((name, metadata.version(name)) for name in PACKAGES)
    return (("python", platform.python_version()), *found)


def _ranks(out: Path) -> list[dict[str, Any]]:
    """What each rank found itself to be: wrapper, shard sizes, optimizer bytes."""
    files = sorted((out / "ranks").glob("rank-*.json"), key=lambda p: int(p.stem[5:]))
    return [json.loads(file.read_text()) for file in files]


def _dropped(out: Path) -> dict[str, str]:
    """Why which trackers failed, while training went on."""
    told = [rank.get("dropped_trackers", {}) for rank in _ranks(out)]
    return {name: why for each in told for name, why in each.items()}
