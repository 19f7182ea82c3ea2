"""Conversations and preference pairs out of raw files: checked, split and counted."""

import json
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import chain, islice
from pathlib import Path
from typing import Annotated, Any

from pydantic import Field, NonNegativeInt, PositiveInt

from configs import Config
from stages.base import Context, Metrics, StageError
from stages.data import lines, quarantine, readers, shapes, splits
from stages.data.quarantine import Reject
from stages.data.rules import RowError
from stages.data.shapes import ConversationShape, Kind, PreferenceShape
from stages.manifest import write_atomically


class PrepareData(Config):
    shape: ConversationShape | None = None
    """Form of the conversation rows. Unset: told by each file's columns."""

    preference_shape: PreferenceShape | None = None
    """Form of the preference rows. Unset: told by each file's columns."""

    test_fraction: Annotated[float, Field(gt=0, lt=1)] = 0.1
    """Share of the opening questions, by hash, whose rows are held out."""

    seed: NonNegativeInt = 0
    """Salt of the hashes that split and cap."""

    drop_budget: Annotated[float, Field(ge=0, le=1)] = 0.01
    """Largest share of faulty rows, of conversations and of pairs each, that is put up with."""

    max_conversation_chars: PositiveInt | None = None
    """Longest conversation in characters. Longer ones are left out."""

    max_pair_chars: PositiveInt | None = None
    """Longest pair in characters, prompt and longer answer together. Longer ones are left out."""

    max_conversations: PositiveInt | None = None
    """At most so many training conversations, chosen by hash."""

    max_test_conversations: PositiveInt | None = None
    """At most so many held-out conversations, chosen by hash."""

    max_preferences: PositiveInt | None = None
    """At most so many training pairs, chosen by hash."""

    max_test_preferences: PositiveInt | None = None
    """At most so many held-out pairs, chosen by hash."""


def prepare_data(
    config: PrepareData, ctx: Context, *, conversations: Path, preferences: Path | None = None
) -> Metrics:
    """Write ``{conversations,preferences}/{train,test}.jsonl`` into ``ctx.out``.

    Each input holds ``data/`` with the raw files. A conversation is ``{"messages": turns}``, a
    pair ``{"prompt": turns, "chosen": [turn], "rejected": [turn]}``. What is kept out stands in
    ``quarantine.jsonl``, every count in ``report.json``. Raises :class:`StageError` for files
    that cannot be read, for more faulty rows than the budget and for a split without rows.
    """
    ctx.out.mkdir(parents=True, exist_ok=True)
    harvests: dict[Kind, list[Harvest]] = {
        "conversations": _gather(config, conversations, "conversations")
    }
    if preferences is not None:
        harvests["preferences"] = _gather(config, preferences, "preferences")
    quarantine.write(ctx.out, {kind: _rejects(files) for kind, files in harvests.items()})
    report = {kind: _split(config, ctx.out, kind, files) for kind, files in harvests.items()}
    write_atomically(ctx.out / "report.json", json.dumps(report, indent=2, ensure_ascii=False))
    return {
        f"{kind}/{name}": number
        for kind, facts in report.items()
        for name, number in facts["totals"].items()
    }


@dataclass(frozen=True)
class Harvest:
    """What one file gave."""

    file: str
    shape: str | None
    num_read: int
    num_duplicates: int
    rows: Sequence[splits.Row]
    rejects: Sequence[Reject]


def _gather(config: PrepareData, source: Path, kind: Kind) -> list[Harvest]:
    folder = source / "data"
    if not folder.is_dir():
        raise StageError(f"{folder}: no such directory; the {kind} input must hold data/")
    seen: set[bytes] = set()
    return [
        _read(config, path, path.relative_to(folder).as_posix(), kind, seen)
        for path in readers.files(folder)
    ]


def _read(config: PrepareData, path: Path, name: str, kind: Kind, seen: set[bytes]) -> Harvest:
    records, shape = _detect(config, path, name, kind)
    num_read = num_duplicates = 0
    rows, rejects = [], []
    for record in records:
        num_read += 1
        try:
            row = _usable(config, record, name, shape)
        except RowError as fault:
            rejects.append(quarantine.reject(record.place, fault, record.value))
            continue
        if row.rank in seen:
            num_duplicates += 1
        else:
            seen.add(row.rank)
            rows.append(row)
    return Harvest(name, shape, num_read, num_duplicates, rows, rejects)


def _detect(
    config: PrepareData, path: Path, name: str, kind: Kind
) -> tuple[Iterator[readers.Record], str | None]:
    """The file's records, and their shape: ``None`` only where no record is an object."""
    records = readers.read(path, name=name)
    asked = config.shape if kind == "conversations" else config.preference_shape
    if asked:
        return records, asked
    sample = list(islice(records, shapes.SAMPLE))
    objects = [record.value for record in sample if isinstance(record.value, dict)]
    shape = shapes.detect(objects, kind)
    if objects and shape is None:
        raise StageError(
            f"{path}: the columns {', '.join(objects[0]) or '(none)'} fit no known shape "
            f"({_known(kind)}); rename them, or set the shape if columns are missing here and there"
        )
    if shape is not None and shapes.SHAPES[shape].kind != kind:
        raise StageError(
            f"{path}: holds {shapes.SHAPES[shape].kind} ({shape} rows) but was given as {kind}; "
            f"give it as the {shapes.SHAPES[shape].kind} input"
        )
    return chain(sample, records), shape


def _known(kind: Kind) -> str:
    return "; ".join(
        f"{name}: {', '.join(sorted(shape.columns))}"
        for name, shape in shapes.SHAPES.items()
        if shape.kind == kind
    )


def _usable(
    config: PrepareData, record: readers.Record, source: str, shape: str | None
) -> splits.Row:
    if record.fault:
        raise record.fault
    if shape is None:
        raise RowError("not_an_object")
    row = shapes.canonical(record.value, shape)
    limit = config.max_pair_chars if "chosen" in row else config.max_conversation_chars
    length = shapes.num_chars(row)
    if limit is not None and length > limit:
        raise RowError("too_long", f"{length} characters, the limit is {limit}")
    line = lines.dump(row)
    return splits.row(source, line, opening=shapes.opening(row), seed=config.seed)


def _split(config: PrepareData, out: Path, kind: Kind, files: Sequence[Harvest]) -> dict[str, Any]:
    """Write the two sides of ``kind``; return its part of the report."""
    num_read = sum(file.num_read for file in files)
    rejects = _rejects(files)
    quarantine.enforce_budget(
        rejects, num_rows=num_read, budget=config.drop_budget, what=kind, out=out
    )
    rows = [row for file in files for row in file.rows]
    if not rows:
        raise StageError(
            f"no usable {kind} among {num_read} rows of {', '.join(file.file for file in files)}"
            f"{_reasons(rejects)}; see {out / quarantine.NAME}"
        )
    sides = splits.split(rows, test_fraction=config.test_fraction, what=kind)
    kept = {side: splits.cap(held, _limit(config, kind, side)) for side, held in sides.items()}
    for side, held in kept.items():
        (out / kind).mkdir(exist_ok=True)
        write_atomically(out / kind / f"{side}.jsonl", lines.join(row.line for row in held))
    return {
        "totals": _totals(files, kept),
        "sources": {file.file: _source(file, kept) for file in files},
    }


def _rejects(files: Sequence[Harvest]) -> list[Reject]:
    return [bad for file in files for bad in file.rejects]


def _reasons(rejects: Sequence[Reject]) -> str:
    by_rule = ", ".join(f"{rule} {number}" for rule, number in quarantine.counts(rejects).items())
    return f" ({by_rule})" if by_rule else ""


def _limit(config: PrepareData, kind: Kind, side: str) -> int | None:
    return {
        ("conversations", "train"): config.max_conversations,
        ("conversations", "test"): config.max_test_conversations,
        ("preferences", "train"): config.max_preferences,
        ("preferences", "test"): config.max_test_preferences,
    }[kind, side]


def _totals(files: Sequence[Harvest], kept: Mapping[str, Sequence[splits.Row]]) -> dict[str, int]:
    """``read`` = ``quarantined`` + ``too_long`` + ``duplicates`` + ``over_cap`` + ``kept``."""
    rejects = _rejects(files)
    num_faulty = len(quarantine.faults(rejects))
    num_kept = sum(len(held) for held in kept.values())
    return {
        "read": sum(file.num_read for file in files),
        "quarantined": num_faulty,
        "too_long": len(rejects) - num_faulty,
        "duplicates": sum(file.num_duplicates for file in files),
        "over_cap": sum(len(file.rows) for file in files) - num_kept,
        "kept": num_kept,
        **{side: len(held) for side, held in kept.items()},
    }


def _source(file: Harvest, kept: Mapping[str, Sequence[splits.Row]]) -> dict[str, Any]:
    return {
        "shape": file.shape,
        "read": file.num_read,
        "duplicates": file.num_duplicates,
        "rejected": quarantine.counts(file.rejects),
        **{side: sum(row.source == file.file for row in held) for side, held in kept.items()},
    }
