"""Readable names for runs: ``smollm2-135m · alpaca · dpo · 2026-11-29``."""

import re
from datetime import date
from pathlib import Path
from typing import Any

from flows.steps import Step
from stages.fetch import Fetch
from stages.training import Training

GENERATED = re.compile(r"[A-Za-z]+-[A-Za-z]+")
"""What Prefect calls a run that nobody has named, ``brave-otter``, or ``Brave-Otter``."""


def name(config: Any, today: date) -> str:
    """The model, the data, the last training stage, or else the last stage, and the day."""
    model = _source(config, "model") or _source(config, "base")
    keys = [key for key, _ in _steps(config)]
    trained = [key for key, step in _steps(config) if isinstance(step.config, Training)]
    parts = [model or config.name, _source(config, "conversations"), (trained or keys)[-1]]
    return " · ".join(part for part in (*parts, today.isoformat()) if part)


def _steps(config: Any) -> list[tuple[str, Step[Any]]]:
    fields = ((key, getattr(config, key)) for key in type(config).model_fields)
    return [(key, value) for key, value in fields if isinstance(value, Step)]


def _source(config: Any, key: str) -> str:
    """The shortest word for where a model or data come from."""
    step = getattr(config, key, None)
    if step is None or not isinstance(step.config, Fetch):
        return ""
    source = step.config.source
    if hasattr(source, "repo"):
        return source.repo.rpartition("/")[2].lower()
    for place in ("file", "path"):
        if found := getattr(source, place, None):
            return Path(found).stem.lower()
    return source.kind.replace("_", "-")


def slug(text: str) -> str:
    """``text`` as Prefect takes it as a key."""
    return re.sub(r"[^a-z0-9]+", "-", text.lower()).strip("-")
