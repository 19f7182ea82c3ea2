"""A run as a readable folder: its settings, a link to every output, and the report."""

import fcntl
import json
import os
import shlex
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from flows import moves, report
from flows.run_stage import Plan, Queued, Say, plan, run_stage
from flows.steps import Artifact, Step
from flows.ways import Way
from stages import manifest, resume
from stages.manifest import write_atomically
from stages.trackers import Tracking

WAIT_SECONDS = 1.0


def folder(config: Any) -> Path:
    """``RUNS/<name>``."""
    return config.runs / config.name


@contextmanager
def lock(config: Any) -> Iterator[Callable[[], bool]]:
    """The run folder's lock as a function that tries to take it: whether it is ours, until the
    block ends. The kernel frees it with its holder, so that it is never stale."""
    config.runs.mkdir(parents=True, exist_ok=True)
    with (config.runs / f".{config.name}.lock").open("a+") as file:

        def take() -> bool:
            try:
                fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except BlockingIOError:
                return False
            return True

        yield take


def wait_for(take: Callable[[], bool], *, poll: Callable[[], None] = lambda: None) -> None:
    """Return when the lock is ours; ``poll`` is called about once a second until then."""
    while not take():
        poll()
        time.sleep(WAIT_SECONDS)


def plan_stage(
    config: Any, stage: str, step: Step[Any], *, label: str, inputs: Mapping[str, Artifact]
) -> Plan:
    """One stage of a run, planned; trackers file it under the run's name."""
    named = getattr(config, "trackers", ())  # where nothing is trained there are none
    tracking = Tracking(trackers=named, project=config.name, run=label) if named else None
    return plan(stage, step, config.store, label=label, inputs=inputs, tracking=tracking)


def obstacles(plans: Sequence[Plan]) -> list[str]:
    """Why this machine cannot do the work of some stages, a line for each reason."""
    labels: dict[str, list[str]] = {}
    for each in plans:
        if reason := each.obstacle:
            labels.setdefault(reason, []).append(each.label)
    return [f"{', '.join(found)}: {reason}" for reason, found in labels.items()]


def carry_out(
    config: Any,
    stage: str,
    step: Step[Any],
    *,
    label: str,
    inputs: Mapping[str, Artifact],
    say: Say,
    queued: Queued = lambda why: None,
    begins: Callable[[Plan], None] = lambda planned: None,
) -> Artifact:
    """One stage of a run, linked from its folder, with a word before and after; ``begins`` is given
    its plan first."""
    planned = plan_stage(config, stage, step, label=label, inputs=inputs)
    link(config, planned.promised)
    begins(planned)
    if not planned.finished:
        verb = "resuming" if planned.checkpoint else "running"
        text = planned.remaining[0].text if planned.remaining else "auto"
        say(f"{label}: {verb} ({text})")

    def waits(why: str) -> None:
        if why:
            say(f"{label}: {why}")
        queued(f"{label}: {why}" if why else "")

    artifact = run_stage(planned, say=say, queued=waits)
    took = f" in {artifact.seconds:.1f} s" if artifact.status != "reused" else ""
    say(f"{label}: {artifact.status}{took}")
    return artifact


def begin(config: Any) -> None:
    """Write ``run.json``: the resolved config, and, as they come, what each step resolved to."""
    where = folder(config)
    where.mkdir(parents=True, exist_ok=True)
    for old in where.iterdir():  # what an earlier run of this name left would pass for ours
        if old.is_symlink() or old.name in (report.NAME, report.FACTS):
            old.unlink(missing_ok=True)
    _write(config, [])


def link(config: Any, artifact: Artifact) -> None:
    """``RUNS/<name>/<label>`` points to the stage's output in the store."""
    path = folder(config) / artifact.label.replace(" ", "-")
    if path.is_symlink() and path.resolve() == artifact.path.resolve():
        return  # the order of the links is that of the stages
    partial = path.with_name(f".{path.name}.{os.getpid()}.partial")
    partial.symlink_to(os.path.relpath(artifact.path.resolve(), path.parent.resolve()))
    partial.rename(path)


def _write(config: Any, artifacts: list[Artifact]) -> None:
    steps = [
        {"label": a.label, "stage": a.stage, "output": str(a.path), "status": a.status}
        for a in artifacts
    ]
    resolved = {"config": config.model_dump(mode="json"), "steps": steps}
    write_atomically(folder(config) / "run.json", json.dumps(resolved, indent=2))


def plan_lines(planned: Plan) -> list[str]:
    """What would happen to one stage, for people."""
    newest = planned.checkpoint
    verb = "reuse" if planned.finished else "run"
    if not planned.finished and newest:
        verb = f"resume from step {resume.step(newest)}"
    lines = [f"{planned.label}: {verb}", f"  output:  {planned.out}"]
    if not planned.remaining:
        missing = planned.obstacle or "the model and the rows are not there yet"
        return [*lines, f"  backend: auto, chosen when the stage starts ({missing})"]
    way, *others = planned.remaining
    lines += _way_lines(planned, way)
    lines += [f"  else:    {other.text}" for other in others]
    if planned.obstacle:
        lines.append(f"  cannot run here: {planned.obstacle}")
    return lines


def _way_lines(planned: Plan, way: Way) -> list[str]:
    step, launch = way.step, way.launch
    ranks = f"{step.resources.world_size} on {step.resources.device}"
    if step.resources.nodes > 1:
        ranks += f" ({step.resources.nodes} nodes x {step.resources.ranks_per_node})"
    lines = [f"  backend: {step.backend.kind} ({way.backend}), ranks: {ranks}"]
    if way.why:
        lines.append(f"  because: {way.why}")
    if way.micro_batch_size is not None:
        lines.append(
            f"  batch:   {step.config.global_batch_rows} rows = {way.micro_batch_size} a rank"
            f" x {way.accumulation_steps} accumulated x {step.resources.world_size} ranks"
        )
    settings = "".join(f"{name}={value} " for name, value in launch.env.items())
    lines.append(f"  command: {settings}{shlex.join(launch.argv)}")
    return lines


def finish(config: Any, artifacts: list[Artifact]) -> Path:
    """Record what every step resolved to and write the report; its path."""
    _write(config, artifacts)
    for artifact in artifacts:
        link(config, artifact)
    return report.write_report(folder(config), describe(config, artifacts))


def draw(config: Any, artifacts: list[Artifact]) -> None:
    """Draw the report's figures as far as the run has come; the report does not draw them again."""
    report.draw(folder(config), describe(config, artifacts))


def describe(config: Any, artifacts: list[Artifact]) -> report.Report:
    """The report's material, read off the artifacts and their manifests."""
    manifests = {a.label: manifest.read(a.path) for a in artifacts}
    by_path = {str(a.path): a.label for a in artifacts}
    done = {label: found for label, found in manifests.items() if found is not None}
    trained = [a for a in artifacts if done[a.label].provenance["accumulation_steps"]]
    return report.Report(
        name=config.name,
        stages=tuple(_row(a, done[a.label]) for a in artifacts),
        trainings=tuple(report.Training(label=a.label.upper(), output=a.path) for a in trained),
        evaluations=tuple(
            report.Evaluation(
                label=_model(a.label, trained),
                output=a.path,
                baseline=_model(
                    by_path.get(done[a.label].provenance["inputs"].get("baseline"), ""), trained
                ),
            )
            for a in artifacts
            if a.stage == "evaluate"
        ),
        exports=tuple(
            report.Export(label=a.label, output=a.path) for a in artifacts if a.stage == "convert"
        ),
        choices=tuple(
            report.Choice(label=label, plan=plan, why=why, moves=_moves(found))
            for label, found in done.items()
            if (choice := found.provenance.get("choice"))
            for plan, why in [choice]
        ),
        prepared=_output(artifacts, "prepare_data"),
        tokenised=_output(artifacts, "tokenize_data"),
        versions=_versions(artifacts, done),
    )


def _row(artifact: Artifact, done: manifest.Manifest) -> report.StageRow:
    shown = ("steps", "final_loss", "save_seconds")
    return report.StageRow(
        label=artifact.label,
        status=artifact.status,
        output=artifact.path,
        seconds=artifact.seconds,
        backend=done.provenance["backend"]["kind"],
        world_size=done.provenance["world_size"],
        metrics={key: done.metrics[key] for key in shown if key in done.metrics},
    )


def _moves(done: manifest.Manifest) -> tuple[str, ...]:
    return tuple(moves.describe(fact) for fact in done.provenance.get("moves", ()))


def _model(label: str, trained: Sequence[Artifact]) -> str:
    """``evaluate sft`` measures the model ``SFT``, and ``evaluate base`` the ``base``."""
    name = label.removeprefix("evaluate ")
    return name.upper() if name in {each.label for each in trained} else name


def _output(artifacts: list[Artifact], stage: str) -> Path | None:
    return next((a.path for a in artifacts if a.stage == stage), None)


def _versions(artifacts: list[Artifact], done: dict[str, manifest.Manifest]) -> dict[str, str]:
    """What the last stage was made with; earlier ones have their own in their manifests."""
    return done[artifacts[-1].label].provenance["versions"] if artifacts else {}
