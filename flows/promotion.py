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
    an output that is gone, and where a pointer must have been: nothing would be compared."""
    pointer = folder(store, name) / POINTER
    way_out = (
        f"go back to an earlier model (python -m flows.retrain --rollback {name}), or name one "
        f"(--promote {name} OUTPUT)"
    )
    if not pointer.is_symlink():
        if any(line["event"] == "promoted" for line in history(store, name)):
            raise StageError(f"{pointer}: is gone, and models were promoted before; {way_out}")
        return None
    out = pointer.resolve()
    if manifest.read(out) is None:
        raise StageError(f"{pointer}: points to {out}, which is not a finished output; {way_out}")
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
    """Add a line to the history. One that a crash cut short is not gone on with."""
    where = folder(store, name)
    where.mkdir(parents=True, exist_ok=True)
    line = json.dumps({"time": datetime.now(UTC).isoformat(timespec="seconds")} | facts)
    with (where / HISTORY).open("a+b") as file:
        file.seek(max(0, file.tell() - 1))
        torn = file.read(1) not in (b"", b"\n")
        file.write(b"\n" * torn + f"{line}\n".encode())
        file.flush()
        os.fsync(file.fileno())


def history(store: Path, name: str) -> list[dict[str, Any]]:
    """Every whole line, the oldest first: ``time``, ``event``, and what goes with it."""
    path = folder(store, name) / HISTORY
    lines = path.read_bytes().splitlines() if path.exists() else []
    return [found for line in lines if (found := _parsed(line)) is not None]


def _parsed(line: bytes) -> dict[str, Any] | None:
    try:
        return json.loads(line)
    except ValueError:  # cut short by a crash
        return None


def names(store: Path) -> list[str]:
    """Those of which there is a history."""
    return sorted(path.parent.name for path in (store / FOLDER).glob(f"*/{HISTORY}"))


def rollback(store: Path, name: str) -> Path:
    """Point to the newest model that was promoted before the current one, is still there, and was
    not left; that. Raises ``ValueError`` when there is none."""
    where = folder(store, name)
    now = current_or_dangling(where)
    earlier = [(where / line["output"]).resolve() for line in _stack(history(store, name))]
    before = [out for out in earlier if out != now and not was_left(store, name, out)]
    there = [out for out in before if manifest.read(out) is not None]
    if not there:
        gone = f"; gone from the store: {before[-1]}" if before else ""
        raise ValueError(f"{where}: nothing was promoted before the current model{gone}")
    out = there[-1]
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
