"""Which model is the promoted one: a pointer in the store with a history."""

import json
import os
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from stages import manifest
from stages.base import StageError

FOLDER, POINTER, HISTORY = "promoted", "current", "history.jsonl"


def folder(store: Path, name: str) -> Path:
    """``STORE/promoted/<name>``: ``current`` is a link to the promoted output."""
    return store / FOLDER / name


def current(store: Path, name: str) -> Path | None:
    """The promoted output, or ``None`` before the first. Raises ``StageError`` for a pointer to
    an output that is gone."""
    pointer = folder(store, name) / POINTER
    if not pointer.is_symlink():
        return None
    out = pointer.resolve()
    if manifest.read(out) is None:
        raise StageError(
            f"{pointer}: points to {out}, which is not a finished output; go back to an earlier "
            f"one (python -m flows.retrain --rollback {name}), or remove the pointer"
        )
    return out


def promote(store: Path, name: str, out: Path, **facts: Any) -> None:
    """Let the pointer show ``out``, at once for every reader, and write it down."""
    where = folder(store, name)
    where.mkdir(parents=True, exist_ok=True)
    _point(where, out)
    note(store, name, event="promoted", output=_relative(where, out), **facts)


def turn_down(store: Path, name: str, out: Path, **facts: Any) -> None:
    """Write down that a person does not want ``out``."""
    where = folder(store, name)
    note(store, name, event="turned down", left=_relative(where, out), **facts)


def note(store: Path, name: str, **facts: Any) -> None:
    """Add a line to the history; readers of it never see a part of one."""
    where = folder(store, name)
    where.mkdir(parents=True, exist_ok=True)
    line = json.dumps({"time": datetime.now(UTC).isoformat(timespec="seconds")} | facts)
    with (where / HISTORY).open("a") as file:
        file.write(f"{line}\n")
        file.flush()
        os.fsync(file.fileno())


def history(store: Path, name: str) -> list[dict[str, Any]]:
    """Every line, the oldest first: ``time``, ``event``, and what goes with it."""
    path = folder(store, name) / HISTORY
    return [json.loads(line) for line in path.read_text().splitlines()] if path.exists() else []


def rollback(store: Path, name: str) -> Path:
    """Point to what was promoted before the current one; that. Raises ``ValueError`` when there is
    none, or it is gone."""
    where = folder(store, name)
    now = current_or_dangling(where)
    earlier = [line["output"] for line in _stack(history(store, name))]
    found = [(where / output).resolve() for output in earlier if (where / output).resolve() != now]
    if not found:
        raise ValueError(f"{where}: nothing was promoted before the current model")
    out = found[-1]
    if manifest.read(out) is None:
        raise ValueError(f"{out}: was promoted before, and is no longer in the store")
    _point(where, out)
    left = {"left": _relative(where, now)} if now else {}
    note(store, name, event="rolled back", output=_relative(where, out), **left)
    return out


def was_left(store: Path, name: str, out: Path) -> bool:
    """Whether ``out`` was turned down or rolled back from, and not promoted since."""
    output, found = _relative(folder(store, name), out), False
    for line in history(store, name):
        if line["event"] == "promoted" and line["output"] == output:
            found = False
        found = found or line.get("left") == output
    return found


def current_or_dangling(where: Path) -> Path | None:
    """Where the pointer points, whether or not that is there."""
    pointer = where / POINTER
    return pointer.resolve() if pointer.is_symlink() else None


def _stack(lines: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """The promotions that still count: each step back took the newest one away."""
    kept: list[dict[str, Any]] = []
    for line in lines:
        if line["event"] == "promoted":
            kept.append(line)
        elif line["event"] == "rolled back" and kept:
            kept.pop()
    return kept


def _point(where: Path, out: Path) -> None:
    partial = where / f".{POINTER}.{os.getpid()}.partial"
    partial.unlink(missing_ok=True)
    partial.symlink_to(_relative(where, out))
    partial.rename(where / POINTER)


def _relative(where: Path, out: Path) -> str:
    """The store can be moved as a whole."""
    return os.path.relpath(out.resolve(), where.resolve())
