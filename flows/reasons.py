"""Why a stage has to be computed: what differs from the nearest output that there is."""

from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from flows.run_stage import Plan
from stages import manifest, resume
from stages.base import StageError
from stages.manifest import Identity

MOST_COMPARED = 50
"""Outputs of a stage that are looked at, the newest first."""

MOST_TOLD = 3


def reason(planned: Plan, key: str, made_by: Mapping[str, str]) -> str:
    """One line; nothing for a stage whose output is there.

    ``key`` is the stage's name in the flow's config, ``made_by`` says which unfinished stage of
    this run will make the output of a fingerprint.
    """
    if planned.finished:
        return ""
    if planned.checkpoint:
        return f"an earlier run of this work got to step {resume.step(planned.checkpoint)}"
    found = [_differences(each, planned.identity, key, made_by) for each in _others(planned.out)]
    if not found:
        return "nothing of this stage is in the store"
    nearest = min(found, key=len)
    more = f" and {len(nearest) - MOST_TOLD} more" if len(nearest) > MOST_TOLD else ""
    return ", ".join(nearest[:MOST_TOLD]) + more


def _others(out: Path) -> Iterator[Identity]:
    """What the newest finished outputs of the same stage were computed from."""
    paths = [path for path in out.parent.glob(f"*/{manifest.NAME}") if path.parent != out]
    for path in sorted(paths, key=lambda path: path.stat().st_mtime, reverse=True)[:MOST_COMPARED]:
        try:
            done = manifest.read(path.parent)
        except StageError:  # a damaged neighbour is no reason
            continue
        if done is not None:
            yield done.identity


def _differences(
    had: Identity, wanted: Identity, key: str, made_by: Mapping[str, str]
) -> list[str]:
    told = []
    if had.version != wanted.version:
        told.append(f"version {had.version} -> {wanted.version} of the stage")
    before, now = (dict(_leaves(each.config, f"{key}.config")) for each in (had, wanted))
    told += [
        f"{name} {_value(before.get(name))} -> {_value(now.get(name))}"
        for name in dict.fromkeys([*before, *now])
        if before.get(name) != now.get(name)
    ]
    follows = {}
    for name, fingerprint in wanted.inputs.items():
        if had.inputs.get(name) != fingerprint:
            maker = made_by.get(fingerprint)
            follows[f"follows {maker}" if maker else f"another {name} ({fingerprint})"] = None
    return [*told, *follows]


def _leaves(value: Any, place: str) -> Iterator[tuple[str, Any]]:
    if isinstance(value, Mapping) and value:
        for name, item in value.items():
            yield from _leaves(item, f"{place}.{name}")
    else:
        yield place, value


def _value(value: Any) -> str:
    text = "unset" if value is None else f"{value}"
    if text.startswith("sha256:"):  # a file's content, and its name
        return f"{text[:15]}…{text[71:]}"
    return text if len(text) <= 60 else f"{text[:57]}…"
