"""Training checkpoints inside an output: which are complete, and which to resume from."""

import hashlib
import json
import os
import shutil
from collections.abc import Mapping
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any, Literal

FOLDER = "checkpoints"
MARKER = "complete.json"
DAMAGED = "damaged-"


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
    """Remove what an interrupted save left, and put aside the newest checkpoints whose files are
    no longer what was saved; sound ones are never touched."""
    for folder in (out / FOLDER).glob("checkpoint-*"):
        if not (folder / MARKER).exists():
            shutil.rmtree(folder)
    while (last := newest(out)) and damage(last):
        last.rename(last.with_name(f"{DAMAGED}{last.name}"))


def damage(checkpoint: Path) -> str | None:
    """The file of a complete checkpoint whose content is not what was saved, or ``None``."""
    hashes = json.loads((checkpoint / MARKER).read_text()).get("sha256", {})
    found = _side_by_side(_digest, [checkpoint / name for name in hashes])
    return next((n for n, now in zip(hashes, found, strict=True) if hashes[n] != now), None)


def mark_complete(checkpoint: Path, facts: Mapping[str, Any]) -> None:
    """Sync and hash every file of ``checkpoint``, then say so. Call it once all ranks have
    written."""
    files = sorted(file for file in checkpoint.rglob("*") if file.is_file())
    names = [str(file.relative_to(checkpoint)) for file in files]
    hashes = _side_by_side(_settle, files)
    record = {
        "facts": dict(facts),
        "files": {n: file.stat().st_size for n, file in zip(names, files, strict=True)},
        "sha256": dict(zip(names, hashes, strict=True)),
    }
    for folder in {file.parent for file in files}:
        _sync(folder)
    partial = checkpoint / f"{MARKER}.partial"
    partial.write_text(json.dumps(record))
    _sync(partial)
    partial.rename(checkpoint / MARKER)
    _sync(checkpoint)
    _sync(checkpoint.parent)


def facts(checkpoint: Path) -> dict[str, Any]:
    """What was recorded when ``checkpoint`` was completed: wrapper, ranks, ZeRO stage."""
    return json.loads((checkpoint / MARKER).read_text())["facts"]


def obstacle(checkpoint: Path, promise: Mapping[str, Any]) -> str | None:
    """Why training under ``promise`` cannot go on from ``checkpoint``, or ``None``.

    Plain and DDP checkpoints hold everything once and load under either on any number of ranks;
    FSDP's are cut anew when they are loaded. ZeRO's optimizer state is cut for its ranks.
    """
    had = facts(checkpoint)
    if had == dict(promise):
        return None
    before, asked = (_FAMILIES.get(str(each.get("wrapper"))) for each in (had, promise))
    if before == asked == "whole":
        return None
    if before == asked == "fsdp" and had.get("checkpoints") == promise.get("checkpoints"):
        return None
    return (
        f"{checkpoint} was written under {_shape(had)}, and its optimizer state cannot be loaded "
        f"under {_shape(promise)}; resume it under the former, or begin anew from its weights "
        f"(warm_start): python -m stages.checkpoint convert {checkpoint} NEW --base BASE, and "
        "give NEW/model as the model"
    )


_FAMILIES: Mapping[str, Literal["whole", "fsdp", "deepspeed"]] = {
    "none": "whole",
    "ddp": "whole",
    "fsdp": "fsdp",
    "deepspeed": "deepspeed",
}


def best(out: Path, metric: str, *, larger: bool = False) -> Path | None:
    """The complete checkpoint at whose step ``OUT/metrics.jsonl`` has the best ``metric``, the
    least unless ``larger``; ``None`` if it was logged at none of them."""
    logged = out / "metrics.jsonl"
    lines = logged.read_text().splitlines() if logged.exists() else []
    values = {row["step"]: row[metric] for row in map(json.loads, lines) if metric in row}
    known = [folder for folder in complete(out) if step(folder) in values]
    sign = -1 if larger else 1
    return min(known, key=lambda folder: sign * values[step(folder)], default=None)


def rotate(
    out: Path, *, keep_last: int, metric: str | None = None, larger: bool = False
) -> list[Path]:
    """Remove complete checkpoints but the newest ``keep_last`` and the best by ``metric``; those
    removed. A marker goes first, so that a kill leaves no half checkpoint that looks whole."""
    kept = set(complete(out)[-keep_last:])
    if metric and (top := best(out, metric, larger=larger)):
        kept.add(top)
    gone = [folder for folder in complete(out) if folder not in kept]
    for folder in gone:
        (folder / MARKER).unlink()
        shutil.rmtree(folder)
    return gone


def _shape(promise: Mapping[str, Any]) -> str:
    return ", ".join(f"{key} {value}" for key, value in sorted(promise.items()))


def _side_by_side(act: Any, files: list[Path]) -> list[str]:
    """Syncing waits for the disk and hashing lets other threads run: all cores, largest first."""
    with ThreadPoolExecutor(os.cpu_count()) as threads:
        largest = sorted(files, key=_size, reverse=True)
        done = {file: threads.submit(act, file) for file in largest}
        return [done[file].result() for file in files]


def _size(file: Path) -> int:
    return file.stat().st_size if file.is_file() else 0


def _settle(file: Path) -> str:
    _sync(file)
    return _digest(file)


def _digest(file: Path) -> str:
    if not file.is_file():
        return "missing"
    with file.open("rb") as stream:
        return hashlib.file_digest(stream, "sha256").hexdigest()


def _sync(path: Path) -> None:
    handle = os.open(path, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)
