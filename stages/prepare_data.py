"""Conversations and preference pairs out of raw files: checked, split and counted."""

import json
import re
import shutil
import sys
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
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
    columns,
    conversations,
    files,
    ledger,
    lines,
    origins,
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

_HELD_OUT = re.compile(r"(?<![a-z])(test|valid|validation|val|eval|dev|held_?out)(?![a-z])")

WAYS_OUT = {
    "duplicates": "most rows repeat one another: give other rows",
    "near_duplicates": "set near_duplicates: null, or give other rows",
    "contaminated": "set contamination_words: null if held-out rows share their form with others, "
    "or give other test_files",
    "over_cap": "raise the caps and weights of the sources",
}
"""What helps where a reason took the last row of a side."""


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

    test_fraction: Annotated[float, Field(gt=0, le=1)] = 0.1
    """Share of the opening questions, by hash, whose rows are held out. With 1 they all are, and
    there is nothing to train on."""

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

    contamination_budget: Annotated[float, Field(ge=0, le=1)] = 0.1
    """Largest share of the training rows of a kind that ``contamination_words`` may leave out."""

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
    ``report.json``, and in ``places/`` where each row came from. Rows are never all in memory.
    Raises :class:`StageError` for files that cannot be read, for more faulty rows than the budget,
    for a split without rows and for settings that fit nothing.
    """
    ctx.out.mkdir(parents=True, exist_ok=True)
    inputs = {"conversations": conversations, "preferences": preferences}
    given = {
        name: files.of_input(folder, what=name)
        for name, folder in inputs.items()
        if folder is not None
    }
    found = [(name, file) for name, held in given.items() for file in held]
    _refuse_idle_patterns(config, [file for _, file in found])
    for name, held in given.items():
        _tell_held_out(config, name, held)
    for left in ctx.out.glob("spool.*"):  # of a run that was killed
        shutil.rmtree(left)
    size = sum(file.path.stat().st_size for _, file in found)
    tick = progress.ticker(ctx.out, total=size)
    harvests: dict[Kind, Harvest] = {}
    wrong: dict[int, set[str]] = {}
    with TemporaryDirectory(prefix="spool.", dir=ctx.out) as scratch:
        with ExitStack() as stack:
            keep = stack.enter_context(quarantine.opened(ctx.out))
            for name, file in found:
                records, form = _detect(config, file, name, tick, wrong)
                kind = form.kind if form else INPUTS[name][0]
                if kind not in harvests:
                    spool = Path(scratch) / f"{kind}.jsonl"
                    text = stack.enter_context(spool.open("w", encoding="utf-8"))
                    harvests[kind] = Harvest(kind, spool, text)
                count = FileCount(file, form, _held_out(config, file, given[name]))
                _read(config, harvests[kind], count, records, keep)
            _refuse_idle_columns(config, wrong)
        report = _finish(config, ctx.out, harvests)
    for name, folder in inputs.items():
        if folder is not None and (skipped := files.left_out(folder)):
            facts = next(facts for kind, facts in report.items() if kind in INPUTS[name])
            facts.setdefault("skipped_files", []).extend(skipped)
            sys.stdout.write(f"{name}: not read as data: {', '.join(skipped)}\n")
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
    unread: Counter[str] = field(default_factory=Counter)
    """Columns that are not read, with the number of rows where they hold something."""

    rejected: Counter[str] = field(default_factory=Counter)
    by_line: bool = True
    """Whether its rows' places are lines."""


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
        assert count.form
        if surplus := shapes.unread(record.value, count.form):
            shapes.refuse_content(surplus, count.form, shown=count.file.shown)
            count.unread.update(surplus)
        line = lines.dump(row)
        place = record.place
        harvest.lines.write(line + "\n")
        harvest.rows.add(
            line,
            opening=conversations.opening(row),
            source=source,
            place=(place.row if place.line is None else place.line) or 0,
            seed=config.seed,
            held_out=count.held_out,
        )
        count.by_line = place.line is not None
    if not count.num_read:
        sys.stdout.write(f"{count.file.shown}: holds no rows\n")
    if count.unread:
        shown = ", ".join(f"{name} ({number})" for name, number in count.unread.most_common())
        sys.stdout.write(f"{count.file.shown}: columns that are not read: {shown}\n")


def _detect(
    config: PrepareData, file: DataFile, name: str, tick: Tick, wrong: dict[int, set[str]]
) -> tuple[Iterator[Record], Form | None]:
    """The file's records, and their form: ``None`` only where no record is an object.

    ``wrong`` keeps for each columns setting what has fitted no row so far.
    """
    records = readers.read(file, tick=tick)
    sample = list(islice(records, shapes.SAMPLE))
    whole = chain(sample, records)
    objects = [record.value for record in sample if isinstance(record.value, dict)]
    source = _source(config, file.name)
    own = config.shape if name == "conversations" else config.preference_shape
    named = (source.columns if source else None) or config.columns
    if named:
        whole = _matched(whole, named, wrong)
    if shape := (source.shape if source else None) or own:
        form = shapes.asked(shape, objects, named)
    else:
        form = shapes.detect(objects, accepted=INPUTS[name], named=named)
    if objects and form is None:
        raise StageError(
            f"{file.shown}: {shapes.misfit(objects[0], INPUTS[name])}; rename them, set "
            "prepare_data.config.columns, or set the shape if columns are missing here and there"
        )
    if form is not None and form.kind not in INPUTS[name]:
        other = next(other for other, kinds in INPUTS.items() if form.kind in kinds)
        raise StageError(
            f"{file.shown}: holds {form.kind} ({form.shape} rows) but was given as {name}; "
            f"give it as the {other} input, or set its shape"
        )
    return whole, form


def _matched(
    records: Iterator[Record], named: Columns, wrong: dict[int, set[str]]
) -> Iterator[Record]:
    """``records``, while they are compared with ``named``: a name may fit a late row only."""
    for record in records:
        if isinstance(record.value, dict):
            idle = wrong.setdefault(id(named), columns.unmatched(named, []))
            if idle:
                idle &= columns.unmatched(named, [record.value])
        yield record


def _held_out(config: PrepareData, file: DataFile, others: Sequence[DataFile]) -> bool | None:
    def fits(one: DataFile) -> bool:
        return any(fnmatchcase(one.name, pattern) for pattern in config.test_files)

    return fits(file) if any(map(fits, others)) else None


def _refuse_idle_patterns(config: PrepareData, found: Sequence[DataFile]) -> None:
    """Raise :class:`StageError` for a pattern that fits no file."""
    names = [file.name for file in found]
    listed = f"the files are {', '.join(names[:10])}{', ...' if len(names) > 10 else ''}"
    for pattern in config.test_files:
        if not any(fnmatchcase(name, pattern) for name in names):
            raise StageError(f"prepare_data.config.test_files: {pattern!r} fits no file; {listed}")
    ruling = [_source(config, name) for name in names]
    for number, source in enumerate(config.sources):
        if not any(one is source for one in ruling):
            raise StageError(
                f"prepare_data.config.sources[{number}].files: {source.files!r} rules no file (of "
                f"the patterns that fit a file the first counts); {listed}"
            )


def _tell_held_out(config: PrepareData, name: str, held: Sequence[DataFile]) -> None:
    """Say which files look as if they were held out, where they are read as all others are."""
    looks = [file.name for file in held if _HELD_OUT.search(file.name.lower())]
    if looks and len(looks) < len(held) and not config.test_files and config.test_fraction < 1:
        sys.stdout.write(
            f"{name}: {', '.join(looks[:3])}{', ...' if len(looks) > 3 else ''}: rows of these are "
            "trained too, as of all files; to hold them out set prepare_data.config.test_files\n"
        )


def _refuse_idle_columns(config: PrepareData, wrong: Mapping[int, set[str]]) -> None:
    """Raise :class:`StageError` for names that are in none of the files that they are for."""
    settings = {"columns": config.columns}
    settings |= {f"sources[{n}].columns": one.columns for n, one in enumerate(config.sources)}
    for key, named in settings.items():
        if named and (idle := wrong.get(id(named))):
            raise StageError(
                f"prepare_data.config.{key}: {', '.join(sorted(idle))} fits nothing in any file; "
                "correct the name, or remove the setting"
            )


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


def _finish(
    config: PrepareData, out: Path, harvests: Mapping[Kind, Harvest]
) -> dict[Kind, dict[str, Any]]:
    """Write the two sides of each kind; return the report."""
    fates: dict[Kind, np.ndarray] = {
        kind: _sides(config, out, harvest) for kind, harvest in harvests.items()
    }
    lost = _losses(config, harvests, fates)
    files_of = [count for harvest in harvests.values() for count in harvest.counts]
    origins.write(out, [[count.file.shown, count.by_line] for count in files_of])
    report: dict[Kind, dict[str, Any]] = {}
    first = 0
    for kind, harvest in harvests.items():
        _refuse_empty(config, fates[kind], lost[kind], kind)
        _write(out / kind, harvest.spool, fates[kind])
        _write_places(out, harvest, fates[kind], first)
        first += len(harvest.counts)
        report[kind] = {
            "totals": _totals(harvest, fates[kind], lost[kind]),
            "sources": {
                count.file.name: _source_report(count, number, harvest, fates[kind], lost[kind])
                for number, count in enumerate(harvest.counts)
            },
        }
    return report


def _sides(config: PrepareData, out: Path, harvest: Harvest) -> "np.ndarray":
    """Where each row belongs. Raises :class:`StageError` for faulty rows and for empty sides."""
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
    return fates


def _refuse_empty(
    config: PrepareData, fates: "np.ndarray", lost: Mapping[str, "np.ndarray"], kind: Kind
) -> None:
    for side, code in ledger.wanted(config.test_fraction).items():
        if not (fates == code).any():
            numbers = {reason: int(rows.sum()) for reason, rows in lost.items() if rows.any()}
            why = quarantine.listed(numbers)
            most = max(numbers, key=lambda reason: numbers[reason], default="")
            raise StageError(
                f"no {kind} are left in {side} ({why}); {WAYS_OUT.get(most, 'give other rows')}"
            )


def _losses(
    config: PrepareData, harvests: Mapping[Kind, Harvest], fates: Mapping[Kind, "np.ndarray"]
) -> dict[Kind, dict[str, "np.ndarray"]]:
    """Drop rows from ``fates`` step by step; the rows that each reason took, by kind."""
    lost: dict[Kind, dict[str, np.ndarray]] = {kind: {} for kind in harvests}

    def take(reason: str, kind: Kind, rows: "np.ndarray") -> None:
        taken = rows & (fates[kind] != DROPPED)
        fates[kind][taken] = DROPPED
        lost[kind][reason] = taken

    for kind, harvest in harvests.items():
        take("duplicates", kind, ledger.copies(harvest.rows, fates[kind]))
        take("near_duplicates", kind, _near_copies(config, harvest.spool, fates[kind]))
    for kind, rows in _contaminated(config, harvests, fates).items():
        take("contaminated", kind, rows)
    for kind, harvest in harvests.items():
        take("over_cap", kind, _surplus(config, harvest, fates[kind]))
    return lost


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


def _contaminated(
    config: PrepareData, harvests: Mapping[Kind, Harvest], fates: Mapping[Kind, "np.ndarray"]
) -> dict[Kind, "np.ndarray"]:
    """Training rows that ask or say what held-out rows do, of whatever kind these are."""
    import numpy as np

    held = np.concatenate(
        [ledger.held_openings(harvest.rows, fates[kind]) for kind, harvest in harvests.items()]
    )
    found: dict[Kind, np.ndarray] = {
        kind: ledger.asked_in_test(harvest.rows, fates[kind], held)
        for kind, harvest in harvests.items()
    }
    if config.contamination_words is None:
        return found

    def rows(chosen: Mapping[Kind, "np.ndarray"]) -> Iterator[conversations.Canonical]:
        return (row for kind in harvests for _, row in _rows(harvests[kind].spool, chosen[kind]))

    training: dict[Kind, np.ndarray] = {
        kind: (fates[kind] == TRAIN) & ~found[kind] for kind in harvests
    }
    held_out: dict[Kind, np.ndarray] = {kind: fates[kind] == TEST for kind in harvests}
    shared = overlap.overlap(
        rows(held_out),
        length=config.contamination_words,
        training=rows(training),
    )
    for kind, harvest in harvests.items():
        number_shared = 0
        for number, row in _rows(harvest.spool, training[kind]):
            found[kind][number] = shared(row)
            number_shared += int(found[kind][number])
        _enforce_contamination_budget(config, kind, number_shared, int(training[kind].sum()))
    return found


def _enforce_contamination_budget(
    config: PrepareData, kind: Kind, number: int, num_training: int
) -> None:
    if number > config.contamination_budget * num_training:
        raise StageError(
            f"{number} of {num_training} training {kind} share {config.contamination_words} words "
            f"in a row, or a question, with held-out rows, more than contamination_budget "
            f"{config.contamination_budget:g} allows; if they are the form of the rows set "
            "prepare_data.config.contamination_words: null, else hold out other rows or raise "
            "contamination_budget"
        )


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


def _write_places(out: Path, harvest: Harvest, fates: "np.ndarray", first: int) -> None:
    """Where each row of the two sides came from; the files are numbered from ``first`` on."""
    import numpy as np

    files_of = np.frombuffer(harvest.rows.sources, dtype=np.dtype("L")) + first
    places = np.frombuffer(harvest.rows.places, dtype=np.uint64)
    for side, code in SIDES.items():
        chosen = np.flatnonzero(fates == code)
        rows = np.stack([files_of[chosen].astype(np.uint64), places[chosen]], axis=1)
        origins.write_split(out, harvest.kind, side, rows)


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
        "unread_columns": dict(count.unread.most_common()),
        "read": count.num_read,
        "rejected": quarantine.counts(count.rejected),
        **{reason: int((taken & own).sum()) for reason, taken in lost.items()},
        **{side: int(((fates == code) & own).sum()) for side, code in SIDES.items()},
    }
