"""Conversations and preference pairs out of raw files: checked, split and counted."""

import json
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field
from fnmatch import fnmatchcase
from itertools import chain, islice
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import IO, TYPE_CHECKING, Annotated, Any

from pydantic import Field, NonNegativeInt, PositiveFloat, PositiveInt

from configs import Config
from stages.base import Context, Metrics, StageError
from stages.data import (
    conversations,
    files,
    ledger,
    lines,
    overlap,
    progress,
    quarantine,
    readers,
    shapes,
)
from stages.data.columns import Columns
from stages.data.conversations import Kind
from stages.data.files import DataFile, Tick
from stages.data.ledger import DROPPED, SIDES, TEST, TRAIN, Ledger
from stages.data.places import Record
from stages.data.quarantine import Keep, Tally
from stages.data.rules import RowError
from stages.data.shapes import ConversationShape, Form, PreferenceShape
from stages.manifest import write_atomically

if TYPE_CHECKING:
    import numpy as np

INPUTS: Mapping[str, tuple[Kind, ...]] = {
    "conversations": ("conversations",),
    "preferences": ("preferences", "unpaired"),
}
"""For each input the kinds of rows that it may hold."""


class Source(Config):
    """How some of the files are read, and their share in the mix."""

    files: Annotated[str, Field(min_length=1)]
    """Pattern of file names, in which ``*`` also stands for ``/``; the first that fits counts."""

    shape: ConversationShape | PreferenceShape | None = None
    """Form of the rows. Unset: the stage's own setting."""

    columns: Columns | None = None
    """Names of the columns. Unset: the stage's own setting."""

    weight: PositiveFloat | None = None
    """Share of the training rows, against the weights of other sources; no row is taken twice, so
    the scarcest source decides how many there are. Unset: all rows."""

    max_rows: PositiveInt | None = None
    """At most so many training rows, chosen by hash."""


class PrepareData(Config):
    shape: ConversationShape | None = None
    """Form of the conversation rows. Unset: told by each file's columns."""

    preference_shape: PreferenceShape | None = None
    """Form of the preference rows. Unset: told by each file's columns."""

    columns: Columns | None = None
    """What the columns are called, where they are not called what a shape calls them."""

    sources: tuple[Source, ...] = ()
    """Settings for some of the files: how they are read, and how they are mixed."""

    test_fraction: Annotated[float, Field(gt=0, lt=1)] = 0.1
    """Share of the opening questions, by hash, whose rows are held out."""

    test_files: tuple[str, ...] = ()
    """Patterns of file names whose rows are held out. Where one fits, the names decide and not
    ``test_fraction``; training rows that ask what a held-out row asks are contaminated."""

    seed: NonNegativeInt = 0
    """Salt of the hashes that split and cap."""

    drop_budget: Annotated[float, Field(ge=0, le=1)] = 0.01
    """Largest share of faulty rows, of conversations and of pairs each, that is put up with."""

    contamination_words: PositiveInt | None = 13
    """Training rows that share so many words in a row with a held-out row are left out. Null: only
    rows that ask the same question are kept on one side."""

    near_duplicates: Annotated[float, Field(ge=0.5, le=0.95)] | None = None
    """Leave out rows whose five-word stretches resemble an earlier row's by so much (Jaccard index
    estimated by MinHash). Needs the package datasketch and memory for a sketch of each row."""

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
    """Write ``{conversations,preferences,unpaired}/{train,test}.jsonl`` into ``ctx.out``.

    Each input holds ``data/`` with the raw files; ``stages.data.conversations`` says what the rows
    of each kind are. What is kept out stands in ``quarantine.jsonl``, every count in
    ``report.json``. Rows are never all in memory. Raises :class:`StageError` for files that cannot
    be read, for more faulty rows than the budget and for a split without rows.
    """
    ctx.out.mkdir(parents=True, exist_ok=True)
    inputs = {"conversations": conversations, "preferences": preferences}
    given = {
        name: files.of_input(folder, what=name)
        for name, folder in inputs.items()
        if folder is not None
    }
    found = [(name, file) for name, held in given.items() for file in held]
    size = sum(file.path.stat().st_size for _, file in found)
    tick = progress.ticker(ctx.out, total=size)
    harvests: dict[Kind, Harvest] = {}
    with TemporaryDirectory(prefix="spool.", dir=ctx.out) as scratch:
        with ExitStack() as stack:
            keep = stack.enter_context(quarantine.opened(ctx.out))
            for name, file in found:
                records, form = _detect(config, file, name, tick)
                kind = form.kind if form else INPUTS[name][0]
                if kind not in harvests:
                    spool = Path(scratch) / f"{kind}.jsonl"
                    text = stack.enter_context(spool.open("w", encoding="utf-8"))
                    harvests[kind] = Harvest(kind, spool, text)
                count = FileCount(file, form, _held_out(config, file, given[name]))
                _read(config, harvests[kind], count, records, keep)
        report = {kind: _finish(config, ctx.out, harvest) for kind, harvest in harvests.items()}
    write_atomically(ctx.out / "report.json", json.dumps(report, indent=2, ensure_ascii=False))
    return {
        f"{kind}/{name}": number
        for kind, facts in report.items()
        for name, number in facts["totals"].items()
    }


@dataclass
class FileCount:
    """What one file gave."""

    file: DataFile
    form: Form | None
    held_out: bool | None
    """Whether its rows are held out; ``None`` leaves that to their hash."""

    num_read: int = 0
    rejected: Counter[str] = field(default_factory=Counter)


@dataclass(frozen=True)
class Harvest:
    """The usable rows of one kind, in a file of canonical lines, and what is known of each."""

    kind: Kind
    spool: Path
    lines: IO[str]
    rows: Ledger = field(default_factory=Ledger)
    counts: list[FileCount] = field(default_factory=list)
    tally: Tally = field(default_factory=Tally)

    @property
    def num_read(self) -> int:
        return sum(count.num_read for count in self.counts)


# --- reading


def _read(
    config: PrepareData, harvest: Harvest, count: FileCount, records: Iterator[Record], keep: Keep
) -> None:
    """The rows of one file, into the harvest of their kind."""
    harvest.counts.append(count)
    source = len(harvest.counts) - 1
    for record in records:
        count.num_read += 1
        try:
            row = _usable(config, record, count.form)
        except RowError as fault:
            keep(harvest.kind, record.place, fault, record.value)
            count.rejected[fault.rule] += 1
            harvest.tally.add(fault.rule, str(record.place), fault.detail)
            continue
        line = lines.dump(row)
        harvest.lines.write(line + "\n")
        harvest.rows.add(
            line,
            opening=conversations.opening(row),
            source=source,
            seed=config.seed,
            held_out=count.held_out,
        )


def _detect(
    config: PrepareData, file: DataFile, name: str, tick: Tick
) -> tuple[Iterator[Record], Form | None]:
    """The file's records, and their form: ``None`` only where no record is an object."""
    records = readers.read(file, tick=tick)
    sample = list(islice(records, shapes.SAMPLE))
    whole = chain(sample, records)
    objects = [record.value for record in sample if isinstance(record.value, dict)]
    source = _source(config, file.name)
    own = config.shape if name == "conversations" else config.preference_shape
    columns = (source.columns if source else None) or config.columns
    if shape := (source.shape if source else None) or own:
        form = shapes.asked(shape, objects, columns)
    else:
        form = shapes.detect(objects, accepted=INPUTS[name], named=columns)
    if objects and form is None:
        raise StageError(
            f"{file.shown}: the columns {', '.join(objects[0]) or '(none)'} fit no known shape "
            f"({shapes.known(INPUTS[name])}); rename them, set prepare_data.config.columns, or "
            "set the shape if columns are missing here and there"
        )
    if form is not None and form.kind not in INPUTS[name]:
        other = next(other for other, kinds in INPUTS.items() if form.kind in kinds)
        raise StageError(
            f"{file.shown}: holds {form.kind} ({form.shape} rows) but was given as {name}; "
            f"give it as the {other} input, or set its shape"
        )
    return whole, form


def _held_out(config: PrepareData, file: DataFile, others: Sequence[DataFile]) -> bool | None:
    def fits(one: DataFile) -> bool:
        return any(fnmatchcase(one.name, pattern) for pattern in config.test_files)

    return fits(file) if any(map(fits, others)) else None


def _source(config: PrepareData, name: str) -> Source | None:
    return next((one for one in config.sources if fnmatchcase(name, one.files)), None)


def _usable(config: PrepareData, record: Record, form: Form | None) -> conversations.Canonical:
    if record.fault:
        raise record.fault
    if form is None:
        raise RowError("not_an_object")
    row = shapes.canonical(record.value, form)
    limit = config.max_conversation_chars if form.kind == "conversations" else config.max_pair_chars
    if limit is not None and (length := conversations.num_chars(row)) > limit:
        raise RowError("too_long", f"{length} characters, the limit is {limit}")
    return row


# --- choosing and writing


def _finish(config: PrepareData, out: Path, harvest: Harvest) -> dict[str, Any]:
    """Write the two sides of a kind; return its part of the report."""
    quarantine.enforce_budget(
        harvest.tally,
        num_rows=harvest.num_read,
        budget=config.drop_budget,
        what=harvest.kind,
        out=out,
        sources=[count.file.shown for count in harvest.counts if count.rejected],
    )
    if not len(harvest.rows):
        reasons = quarantine.listed(harvest.tally.counts)
        raise StageError(
            f"no usable {harvest.kind} among {harvest.num_read} rows of "
            f"{', '.join(count.file.shown for count in harvest.counts)}"
            f"{f' ({reasons})' if reasons else ''}; see {out / quarantine.NAME}"
        )
    fates = ledger.sides(harvest.rows, test_fraction=config.test_fraction)
    ledger.refuse_empty(fates, harvest.rows, test_fraction=config.test_fraction, what=harvest.kind)
    lost = dict(_losses(config, harvest, fates))
    for side, code in SIDES.items():
        if not (fates == code).any():
            why = quarantine.listed({reason: int(rows.sum()) for reason, rows in lost.items()})
            raise StageError(f"no {harvest.kind} are left in {side} ({why}); give other rows")
    _write(out / harvest.kind, harvest.spool, fates)
    return {
        "totals": _totals(harvest, fates, lost),
        "sources": {
            count.file.name: _source_report(count, number, harvest, fates, lost)
            for number, count in enumerate(harvest.counts)
        },
    }


def _losses(
    config: PrepareData, harvest: Harvest, fates: "np.ndarray"
) -> Iterator[tuple[str, "np.ndarray"]]:
    """Drop rows from ``fates`` step by step; yields each reason with the rows that it took."""
    steps: Sequence[tuple[str, Callable[[], np.ndarray]]] = (
        ("duplicates", lambda: ledger.copies(harvest.rows, fates)),
        ("near_duplicates", lambda: _near_copies(config, harvest.spool, fates)),
        ("contaminated", lambda: _contaminated(config, harvest, fates)),
        ("over_cap", lambda: _surplus(config, harvest, fates)),
    )
    for reason, step in steps:
        taken = step() & (fates != DROPPED)
        fates[taken] = DROPPED
        yield reason, taken


def _near_copies(config: PrepareData, spool: Path, fates: "np.ndarray") -> "np.ndarray":
    import numpy as np

    found = np.zeros(len(fates), dtype=bool)
    if config.near_duplicates is not None:
        # Held-out rows first: of two that resemble one another the training row goes.
        resembles = overlap.near_copies((), threshold=config.near_duplicates)
        for code in (TEST, TRAIN):
            for number, row in _rows(spool, fates == code):
                found[number] = resembles(row)
    return found


def _contaminated(config: PrepareData, harvest: Harvest, fates: "np.ndarray") -> "np.ndarray":
    found = ledger.asked_in_test(harvest.rows, fates)
    if config.contamination_words is not None:
        held_out = (row for _, row in _rows(harvest.spool, fates == TEST))
        shared = overlap.overlap(held_out, length=config.contamination_words)
        for number, row in _rows(harvest.spool, (fates == TRAIN) & ~found):
            found[number] = shared(row)
    return found


def _surplus(config: PrepareData, harvest: Harvest, fates: "np.ndarray") -> "np.ndarray":
    if harvest.kind == "conversations":
        limits = {"train": config.max_conversations, "test": config.max_test_conversations}
    else:
        limits = {"train": config.max_preferences, "test": config.max_test_preferences}
    rulers = [*config.sources, None]
    return ledger.surplus(
        harvest.rows,
        fates,
        limits=limits,
        groups=[rulers.index(_source(config, count.file.name)) for count in harvest.counts],
        weights=[ruler.weight if ruler else None for ruler in rulers],
        caps=[ruler.max_rows if ruler else None for ruler in rulers],
    )


def _rows(spool: Path, chosen: "np.ndarray") -> Iterator[tuple[int, conversations.Canonical]]:
    """Number and value of the chosen rows."""
    with spool.open("rb") as file:
        for number, line in enumerate(file):
            if chosen[number]:
                yield number, lines.load(line)


def _write(folder: Path, spool: Path, fates: "np.ndarray") -> None:
    """Both sides out of the spool, aside and then in place."""
    folder.mkdir(exist_ok=True)
    with ExitStack() as stack:
        partial = {
            code: stack.enter_context((folder / f"{side}.jsonl.partial").open("wb"))
            for side, code in SIDES.items()
        }
        for line, fate in zip(stack.enter_context(spool.open("rb")), fates.tolist(), strict=True):
            if fate != DROPPED:
                partial[fate].write(line)
    for side in SIDES:
        (folder / f"{side}.jsonl.partial").rename(folder / f"{side}.jsonl")


# --- counting


def _totals(
    harvest: Harvest, fates: "np.ndarray", lost: Mapping[str, "np.ndarray"]
) -> dict[str, int]:
    """``read`` is the sum of all that follows but ``train`` and ``test``, which make ``kept``."""
    kept = {side: int((fates == code).sum()) for side, code in SIDES.items()}
    return {
        "read": harvest.num_read,
        "quarantined": harvest.tally.num_faults,
        "too_long": harvest.tally.counts["too_long"],
        **{reason: int(taken.sum()) for reason, taken in lost.items()},
        "kept": sum(kept.values()),
        **kept,
    }


def _source_report(
    count: FileCount,
    number: int,
    harvest: Harvest,
    fates: "np.ndarray",
    lost: Mapping[str, "np.ndarray"],
) -> dict[str, Any]:
    import numpy as np

    own = np.frombuffer(harvest.rows.sources, dtype=np.dtype("L")) == number
    return {
        "shape": count.form.shape if count.form else None,
        "columns": dict(count.form.columns) if count.form else {},
        "read": count.num_read,
        "rejected": quarantine.counts(count.rejected),
        **{reason: int((taken & own).sum()) for reason, taken in lost.items()},
        **{side: int(((fates == code) & own).sum()) for side, code in SIDES.items()},
    }
