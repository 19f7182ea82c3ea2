"""Training checkpoints inside an output: which are complete, and which to resume from."""

import hashlib
import json
import math
import os
import shutil
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, Literal

from stages import hashing
from stages.base import StageError
from stages.checkpoint.json_files import expect, read_json

FOLDER = "checkpoints"
SAVING = "saving"
"""Where a save is written; it is moved to :data:`FOLDER` when it is whole."""

MARKER = "complete.json"
DAMAGED = "damaged-"


def step(checkpoint: Path) -> int:
    """The optimizer step of ``checkpoint-N``."""
    return int(checkpoint.name.rpartition("-")[2])


def complete(out: Path) -> list[Path]:
    """The checkpoints of ``out`` that were written to the end, oldest first."""
    return sorted((folder for folder in _marked(out) if not _changed_size(folder)), key=step)


def _marked(out: Path) -> list[Path]:
    """The checkpoints of ``out`` that have a marker."""
    found = [marker.parent for marker in (out / FOLDER).glob(f"checkpoint-*/{MARKER}")]
    return [folder for folder in found if folder.name.rpartition("-")[2].isdecimal()]


def _changed_size(checkpoint: Path) -> str | None:
    """The first file that is not there with the size that was recorded; the marker itself if it
    records none."""
    try:
        files = _record(checkpoint)["files"]
    except StageError:
        return MARKER
    return next((name for name, size in files.items() if _size(checkpoint / name) != size), None)


def _size(file: Path) -> int | None:
    return file.stat().st_size if file.is_file() else None


def newest(out: Path) -> Path | None:
    """The newest complete checkpoint, or ``None``."""
    return (complete(out) or [None])[-1]


def saved_bytes(out: Path) -> int:
    """On disk, of the complete checkpoints of ``out``."""
    files = (file for checkpoint in complete(out) for file in checkpoint.rglob("*"))
    return sum(file.stat().st_size for file in files if file.is_file())


def discard_incomplete(out: Path) -> list[str]:
    """Remove what an interrupted save left, and put aside checkpoints whose files are no longer
    what was saved: all of which a file has another size, and the newest whose hashes are wrong.
    Sound ones are never touched. Returns a line for each that is put aside."""
    discard_saving(out)
    for folder in (out / FOLDER).glob("checkpoint-*"):
        if not (folder / MARKER).exists():
            shutil.rmtree(folder)
    told = [_put_aside(each, file) for each in _marked(out) if (file := _changed_size(each))]
    while (last := newest(out)) and (file := damage(last)):
        told.append(_put_aside(last, file))
    return told


def _put_aside(checkpoint: Path, file: str) -> str:
    """Rename a damaged checkpoint; what happened, in a line."""
    aside, number = checkpoint.with_name(f"{DAMAGED}{checkpoint.name}"), 1
    while aside.exists():  # this step was saved, damaged and done again before
        number += 1
        aside = checkpoint.with_name(f"{DAMAGED}{checkpoint.name}-{number}")
    checkpoint.rename(aside)
    return f"{checkpoint / file}: not what was saved; the checkpoint is put aside as {aside.name}"


def discard_saving(out: Path) -> None:
    """Remove a save that was cut short."""
    shutil.rmtree(out / SAVING, ignore_errors=True)


def damage(checkpoint: Path) -> str | None:
    """The file of a checkpoint with a marker whose content is not what was saved, or ``None``; the
    marker itself if it does not say what was."""
    if file := _changed_size(checkpoint):
        return file
    record = _record(checkpoint)
    for kind, digest in _DIGESTS.items():
        hashes = record.get(kind, {})
        found = hashing.each(digest, [checkpoint / name for name in hashes])
        for name, now in zip(hashes, found, strict=True):
            if hashes[name] != now:
                return name
    return None


def require_saved(checkpoint: Path) -> None:
    """Raise ``StageError`` where a save was marked complete and is not what it was then."""
    if (checkpoint / MARKER).is_file() and (name := damage(checkpoint)):
        raise StageError(
            f"{checkpoint / name}: is not what was saved, as {MARKER} tells; take another "
            "checkpoint"
        )


def publish(out: Path, number: int, facts: Mapping[str, Any], *, movable: bool = True) -> Path:
    """Complete the save of step ``number`` and move it among the checkpoints, where it now is.

    Call it once all ranks have written to ``OUT/saving/checkpoint-N``.
    """
    saved = out / SAVING / f"checkpoint-{number}"
    final = out / FOLDER / saved.name
    mark_complete(saved, facts, movable=movable)
    final.parent.mkdir(exist_ok=True)
    if final.exists():  # not whole, or this step would not have been done again
        shutil.rmtree(final)
    saved.rename(final)
    _sync(final.parent)
    _sync(saved.parent)
    return final


def mark_complete(checkpoint: Path, facts: Mapping[str, Any], *, movable: bool = True) -> None:
    """Sync and hash every file of ``checkpoint``, then say so in its marker.

    ``movable`` tells whether ZeRO's optimizer state can be cut anew (see :func:`obstacle`).
    """
    files = sorted(file for file in checkpoint.rglob("*") if file.is_file())
    names = [str(file.relative_to(checkpoint)) for file in files]
    hashes = hashing.each(_settle, files)
    record = {
        "facts": dict(facts),
        "movable": movable,
        "files": {n: file.stat().st_size for n, file in zip(names, files, strict=True)},
        "xxh3_128": dict(zip(names, hashes, strict=True)),
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
    return _record(checkpoint)["facts"]


def _record(checkpoint: Path) -> dict[str, Any]:
    """What the marker holds. Raises :class:`StageError` for one that nobody here wrote."""
    file = checkpoint / MARKER
    record = read_json(file)
    for key in ("facts", "files", *_DIGESTS):
        if expect(file, record, key, dict) is None and key not in _DIGESTS:
            raise StageError(f"{file}: has no {key}")
    return record


def obstacle(checkpoint: Path, promise: Mapping[str, Any]) -> str | None:
    """Why training under ``promise`` cannot go on from ``checkpoint``, or ``None``.

    Plain and DDP checkpoints hold everything once and load under either on any number of ranks;
    FSDP's are cut anew when they are loaded, and ZeRO's before (``stages.recut``), if Adam's
    moments are all that its optimizer keeps.
    """
    had = facts(checkpoint)
    if had == dict(promise):
        return None
    before, asked = (_FAMILIES.get(str(each.get("wrapper"))) for each in (had, promise))
    if before == asked == "whole":
        return None
    if before == asked == "fsdp" and had.get("checkpoints") == promise.get("checkpoints"):
        return None
    if before == asked == "deepspeed" and _record(checkpoint).get("movable", True):
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
    least unless ``larger``; ``None`` if it was logged at none of them as a finite number."""
    logged = out / "metrics.jsonl"
    lines = logged.read_text().splitlines() if logged.exists() else []
    rows = (json.loads(line) for line in lines if line.endswith("}"))  # one may be half written
    values = {row["step"]: row[metric] for row in rows if _is_finite(row.get(metric))}
    known = [folder for folder in complete(out) if step(folder) in values]
    sign = -1 if larger else 1
    return min(known, key=lambda folder: sign * values[step(folder)], default=None)


def _is_finite(value: Any) -> bool:
    """NaN is neither more nor less than anything, so that the first of several would be best."""
    return isinstance(value, int | float) and math.isfinite(value)


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


def _settle(file: Path) -> str:
    _sync(file)
    return _xxh3(file)


def _xxh3(file: Path) -> str:
    """Finds rot, which is no adversary, at the speed of memory."""
    import xxhash

    return _digest(file, xxhash.xxh3_128)


def _sha256(file: Path) -> str:
    return _digest(file, hashlib.sha256)


def _digest(file: Path, kind: hashing.Hash) -> str:
    return hashing.hash_file(file, kind) if file.is_file() else "missing"


_DIGESTS: Mapping[str, Callable[[Path], str]] = {"xxh3_128": _xxh3, "sha256": _sha256}
"""By the name under which a marker holds them; older markers have SHA-256."""


def _sync(path: Path) -> None:
    handle = os.open(path, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)
