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
from importlib import metadata
from pathlib import Path
from typing import Any

from backends import Launch, split_batch
from configs import ConfigError
from flows.failures import StageFailed, explain
from flows.progress import Progress
from flows.steps import Artifact, Step
from stages import STAGES, checkpoint, manifest, resume
from stages.base import Job, Stage

ROOT = Path(__file__).resolve().parent.parent
PACKAGES = ("torch", "transformers", "trl", "peft", "accelerate", "deepspeed", "datasets")
Say = Callable[[str], None]


@dataclass(frozen=True)
class Plan:
    """Everything about one stage run that can be known without running it."""

    label: str
    stage: Stage
    step: Step[Any]
    identity: manifest.Identity
    out: Path
    inputs: Mapping[str, Path]
    launch: Launch
    micro_batch_size: int | None
    accumulation_steps: int | None

    @property
    def finished(self) -> bool:
        return manifest.read(self.out) is not None

    @property
    def checkpoint(self) -> Path | None:
        """Where an interrupted run of the same work left off."""
        return resume.newest(self.out)

    @property
    def obstacle(self) -> str | None:
        """Why this machine cannot do the work now, or ``None``."""
        if done := manifest.read(self.out):
            fault = manifest.damage(self.out, done, self.identity)
            return f"{self.out} is damaged: {fault}; remove it to make it again" if fault else None
        return self.step.placement.obstacle(self.step.resources) or self._other_shape()

    def _other_shape(self) -> str | None:
        newest = self.checkpoint
        if newest is None:
            return None
        found, promised = resume.facts(newest), dict(self.launch.promise)
        if found == promised:
            return None
        return (
            f"{newest} was written under {_shape(found)} and this run asks for "
            f"{_shape(promised)}, whose optimizer state has another shape; go back to the former, "
            f"or remove {self.out} to start again"
        )


def plan(
    stage_name: str, step: Step[Any], store: Path, *, label: str, inputs: Mapping[str, Artifact]
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
        launch = step.backend.plan(step.resources, "-m", "stages", str(out / "job.json"))
        rows = getattr(step.config, "global_batch_rows", None)
        split = split_batch(rows, step.resources) if rows is not None else (None, None)
    except (ValueError, FileNotFoundError) as error:
        raise ConfigError(f"{label}: {error}") from None
    paths = {name: given.path for name, given in inputs.items()}
    return Plan(label, stage, step, identity, out, paths, launch, *split)


def _check_inputs(stage: Stage, inputs: Mapping[str, Artifact]) -> None:
    required = {name for name, needed in stage.inputs.items() if needed}
    assert required <= inputs.keys() <= stage.inputs.keys(), (
        f"{stage.name} takes {dict(stage.inputs)}, got {sorted(inputs)}"
    )


def run_stage(planned: Plan, *, say: Say) -> Artifact:
    """Return the output of ``planned``, computing it only if the store does not hold it yet.

    One writer per output: a second run of the same work waits for the first and reuses what it
    made. Raises :class:`StageFailed`, or ``ConfigError`` when this machine cannot run it.
    """
    if planned.obstacle:
        raise ConfigError(f"{planned.label}: {planned.obstacle}")
    if planned.finished:
        return _artifact(planned, "reused")
    with _only_writer(planned, say=say) as lock:
        if planned.finished:
            return _artifact(planned, "reused")
        resumed = _make_ready(planned)
        seconds = _execute(planned, lock=lock, say=say)
        _check_sources(planned)
        manifest.write(planned.out, _manifest(planned, seconds=seconds))
        return _artifact(planned, "resumed" if resumed else "ran", seconds)


def _artifact(planned: Plan, status: Any, seconds: float = 0.0) -> Artifact:
    return Artifact(
        label=planned.label,
        stage=planned.stage.name,
        path=planned.out,
        fingerprint=planned.identity.fingerprint,
        status=status,
        seconds=seconds,
    )


@contextmanager
def _only_writer(planned: Plan, *, say: Say) -> Iterator[int]:
    """Hold the output's lock. The kernel frees it when its last holder, a rank's supervisor
    perhaps, is gone, so a lock is never stale."""
    planned.out.parent.mkdir(parents=True, exist_ok=True)
    path = planned.out.with_name(f"{planned.out.name}.lock")
    with path.open("w") as file:
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            say(f"{planned.label}: another run is making this; waiting for it")
            fcntl.flock(file, fcntl.LOCK_EX)
        yield file.fileno()


def _make_ready(planned: Plan) -> bool:
    """Bring the output directory to a state to start from; True when there is one to resume."""
    out = planned.out
    resume.discard_incomplete(out)
    if planned.checkpoint is None:
        shutil.rmtree(out, ignore_errors=True)
        out.mkdir(parents=True)
        return False
    shutil.rmtree(out / "failures", ignore_errors=True)
    return True


def _shape(promise: Mapping[str, Any]) -> str:
    return ", ".join(f"{key} {value}" for key, value in sorted(promise.items()))


def _execute(planned: Plan, *, lock: int, say: Say) -> float:
    """Run the command; the seconds from its start to the end of its last process."""
    out, log = planned.out, planned.out / "log.txt"
    manifest.write_atomically(out / "job.json", job(planned).model_dump_json(indent=2))
    progress = Progress(planned.label, out, say=say)
    launch = _with_environment(planned)
    started = time.monotonic()
    code = planned.step.placement.run(launch, log=log, lock=lock, poll=progress.poll)
    if code != 0:
        raise StageFailed(explain(planned.label, out, log, code))
    return time.monotonic() - started


def _check_sources(planned: Plan) -> None:
    """Files that the config names must still be what they were when the run was planned."""
    again = manifest.identify(planned.stage, planned.step.config, planned.identity.inputs)
    if again != planned.identity:
        raise StageFailed(
            f"{planned.label} failed: a file that its config names changed while it was read\n"
            "  next: the same command again, when the file is at rest"
        )


def job(planned: Plan) -> Job:
    """What every rank is handed."""
    settings = dict(planned.launch.trainer_args)
    if planned.micro_batch_size is not None:
        settings |= {
            "per_device_train_batch_size": planned.micro_batch_size,
            "gradient_accumulation_steps": planned.accumulation_steps,
            "save_steps": planned.step.save_every,
            "save_total_limit": planned.step.keep_checkpoints,
        }
    return Job(
        stage=planned.stage.name,
        config=planned.step.config.model_dump(mode="json"),
        inputs=dict(planned.inputs),
        trainer_args=settings,
        promise=dict(planned.launch.promise),
        device=planned.step.resources.device,
    )


def _with_environment(planned: Plan) -> Launch:
    """The four packages' generic names must resolve to this project in every rank."""
    path = os.pathsep.join(filter(None, (str(ROOT), os.environ.get("PYTHONPATH"))))
    env = {
        "PYTHONPATH": path,
        "PYTHONUNBUFFERED": "1",
        "TOKENIZERS_PARALLELISM": "false",
        "HF_HUB_DISABLE_TELEMETRY": "1",
        "DO_NOT_TRACK": "1",
    }
    if not planned.stage.online:
        env["HF_HUB_OFFLINE"] = "1"
    launch = planned.launch
    return Launch(launch.argv, env=env | dict(launch.env), trainer_args=launch.trainer_args)


def _manifest(planned: Plan, *, seconds: float) -> manifest.Manifest:
    step, out = planned.step, planned.out
    provenance = {
        "finished": datetime.now(UTC).isoformat(timespec="seconds"),
        "seconds": round(seconds, 2),
        "host": platform.node(),
        "command": list(planned.launch.argv),
        "inputs": {name: str(path) for name, path in planned.inputs.items()},
        "backend": step.backend.model_dump(mode="json"),
        "world_size": step.resources.world_size,
        "resources": step.resources.model_dump(mode="json"),
        "micro_batch_size": planned.micro_batch_size,
        "accumulation_steps": planned.accumulation_steps,
        "ranks": _ranks(out),
        "versions": {"python": platform.python_version()}
        | {name: metadata.version(name) for name in PACKAGES},
    }
    model = out / "model"
    return manifest.Manifest(
        identity=planned.identity,
        provenance=provenance,
        metrics=json.loads((out / "metrics.json").read_text()),
        files=manifest.sizes(out),
        checkpoint=checkpoint.describe(model) if model.is_dir() else None,
    )


def _ranks(out: Path) -> list[dict[str, Any]]:
    """What each rank found itself to be: wrapper, shard sizes, optimizer bytes."""
    files = sorted((out / "ranks").glob("rank-*.json"), key=lambda p: int(p.stem[5:]))
    return [json.loads(file.read_text()) for file in files]
