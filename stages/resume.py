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
    return sorted(found, key=step)


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
    for file in checkpoint.rglob("*"):
        if file.is_file():
            _sync(file)
    partial = checkpoint / f"{MARKER}.partial"
    partial.write_text(json.dumps(dict(facts)))
    _sync(partial)
    partial.rename(checkpoint / MARKER)
    _sync(checkpoint)


def facts(checkpoint: Path) -> dict[str, Any]:
    """What was recorded when ``checkpoint`` was completed: wrapper, ranks, ZeRO stage."""
    return json.loads((checkpoint / MARKER).read_text())


def _sync(path: Path) -> None:
    handle = os.open(path, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)
