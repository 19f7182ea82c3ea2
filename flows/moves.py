"""Moves of a stage from one way of running it to the next, when memory ran out."""

import json
import shutil
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from flows.failures import Failure
from flows.ways import Way
from stages import resume
from stages.manifest import write_atomically

NAME = "moves.jsonl"


def read(out: Path) -> list[dict[str, Any]]:
    """The moves so far, first to last: ``from``, ``to``, ``because``, ``step``, ``time``."""
    path = out / NAME
    return [json.loads(line) for line in path.read_text().splitlines()] if path.exists() else []


def remaining(out: Path, ways: Sequence[Way], checkpoint: Path | None) -> tuple[Way, ...]:
    """The ways below those that have failed, from the first that can go on from ``checkpoint``.

    If none of them can, they are returned as they are: that is for the caller to refuse.
    """
    failed = {each["from"] for each in read(out)}
    last = max((index for index, way in enumerate(ways) if way.text in failed), default=-1)
    left = ways[last + 1 :] or ways[-1:]
    if checkpoint is not None:
        fitting = (index for index, way in enumerate(left) if continues(way, checkpoint))
        left = left[next(fitting, 0) :]
    return tuple(left)


def continues(way: Way, checkpoint: Path) -> bool:
    """Whether ``way`` can load the optimizer state of ``checkpoint``."""
    return resume.obstacle(checkpoint, way.launch.promise) is None


def move(out: Path, failed: Way, following: Way, failure: Failure) -> str:
    """Make ``out`` ready for ``following`` and write the move down; the line that tells it."""
    resume.discard_incomplete(out)
    newest = resume.newest(out)
    if newest is None or not continues(following, newest):
        newest = None
        clear(out)
    shutil.rmtree(out / "failures", ignore_errors=True)
    step = resume.step(newest) if newest else 0
    fact = {
        "from": failed.text,
        "to": following.text,
        "because": failure.kind.name,
        "step": step,
        "time": time.time(),
    }
    told = [*read(out), fact]
    write_atomically(out / NAME, "".join(json.dumps(each) + "\n" for each in told))
    return describe(fact)


def describe(fact: dict[str, Any]) -> str:
    """One line for people."""
    start = f"from step {fact['step']}" if fact["step"] else "from the start"
    return f"{fact['because']} under {fact['from']}; goes on {start} under {fact['to']}"


def clear(out: Path) -> None:
    """Empty ``out`` for a new start, but for the moves that led to it."""
    kept = (out / NAME).read_bytes() if (out / NAME).exists() else None
    shutil.rmtree(out, ignore_errors=True)
    out.mkdir(parents=True)
    if kept is not None:
        (out / NAME).write_bytes(kept)
