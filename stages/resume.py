"""Training checkpoints inside an output: which are complete, and which to resume from."""

import json
import os
import shutil
from collections.abc import Mapping
from pathlib import Path
from typing import Any

FOLDER = "checkpoints"
MARKER = "complete.json"


def step(checkpoint: Path) -> int:
    """The optimizer step of ``checkpoint-N``."""
    return int(checkpoint.name.rpartition("-")[2])


def complete(out: Path) -> list[Path]:
    """The checkpoints of ``out`` that were written to the end, oldest first."""
    found = [marker.parent for marker in (out / FOLDER).glob(f"checkpoint-*/{MARKER}")]
    return sorted(filter(_is_whole, found), key=step)


def _is_whole(checkpoint: Path) -> bool:
    """Whether every file is there with the size that was recorded."""
    try:
        step(checkpoint)
        files = json.loads((checkpoint / MARKER).read_text())["files"]
    except (ValueError, KeyError):
        return False
    return all(
        (checkpoint / name).is_file() and (checkpoint / name).stat().st_size == size
        for name, size in files.items()
    )


def newest(out: Path) -> Path | None:
    """The newest complete checkpoint, or ``None``."""
    return (complete(out) or [None])[-1]


def discard_incomplete(out: Path) -> None:
    """Remove what an interrupted save left; complete checkpoints are never touched."""
    for folder in (out / FOLDER).glob("checkpoint-*"):
        if not (folder / MARKER).exists():
            shutil.rmtree(folder)


def mark_complete(checkpoint: Path, facts: Mapping[str, Any]) -> None:
    """Sync every file of ``checkpoint``, then say so. Call it once all ranks have written."""
    files = [file for file in checkpoint.rglob("*") if file.is_file()]
    for file in files:
        _sync(file)
    sizes = {str(file.relative_to(checkpoint)): file.stat().st_size for file in files}
    partial = checkpoint / f"{MARKER}.partial"
    partial.write_text(json.dumps({"facts": dict(facts), "files": sizes}))
    _sync(partial)
    partial.rename(checkpoint / MARKER)
    _sync(checkpoint)


def facts(checkpoint: Path) -> dict[str, Any]:
    """What was recorded when ``checkpoint`` was completed: wrapper, ranks, ZeRO stage."""
    return json.loads((checkpoint / MARKER).read_text())["facts"]


def _sync(path: Path) -> None:
    handle = os.open(path, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)
