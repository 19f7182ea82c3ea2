"""A run as a readable folder: its settings, a link to every output, and the report."""

import json
import os
import shlex
from pathlib import Path
from typing import Any

from flows.run_stage import Plan
from flows.steps import Artifact
from stages import resume
from stages.manifest import write_atomically


def folder(config: Any) -> Path:
    """``RUNS/<name>``."""
    return config.runs / config.name


def begin(config: Any) -> None:
    """Write ``run.json``: the resolved config, and, as they come, what each step resolved to."""
    folder(config).mkdir(parents=True, exist_ok=True)
    _write(config, [])


def link(config: Any, artifact: Artifact) -> None:
    """``RUNS/<name>/<label>`` points to the stage's output in the store."""
    path = folder(config) / artifact.label.replace(" ", "-")
    partial = path.with_name(f".{path.name}.partial")
    partial.unlink(missing_ok=True)
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
    step, launch = planned.step, planned.launch
    newest = planned.checkpoint
    verb = "reuse" if planned.finished else "run"
    if not planned.finished and newest:
        verb = f"resume from step {resume.step(newest)}"
    lines = [f"{planned.label}: {verb}", f"  output:  {planned.out}"]
    ranks = f"{step.resources.world_size} on {step.resources.device}"
    if step.resources.nodes > 1:
        ranks += f" ({step.resources.nodes} nodes x {step.resources.ranks_per_node})"
    lines.append(f"  backend: {step.backend.kind}, ranks: {ranks}")
    if planned.micro_batch_size is not None:
        lines.append(
            f"  batch:   {step.config.global_batch_rows} rows = {planned.micro_batch_size} a rank"
            f" x {planned.accumulation_steps} accumulated x {step.resources.world_size} ranks"
        )
    lines.append(f"  command: {shlex.join(launch.argv)}")
    obstacle = step.placement.obstacle(step.resources)
    if obstacle and not planned.finished:
        lines.append(f"  cannot run here: {obstacle}")
    return lines
