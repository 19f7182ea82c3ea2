"""What a data file holds: shape, rows, roles, lengths, problems and samples."""

import hashlib
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import chain, islice
from pathlib import Path

from stages.base import StageError
from stages.data import conversations, files, lines, masking, readers, shapes, tokens
from stages.data.columns import Columns
from stages.data.conversations import KINDS, Canonical
from stages.data.files import DataFile
from stages.data.places import Place
from stages.data.quarantine import Tally
from stages.data.rules import RowError
from stages.data.shapes import Form
from stages.data.templates import Template
from stages.data.turns import Turn

NUM_SAMPLES = 3
NUM_TOKENISED = 300
"""Rows whose tokens are counted."""

LATER = 1 << 30
"""A line number behind those that the template gate takes for its sample."""

Marked = Sequence[tuple[str, bool]]
"""A text in pieces, each with whether it is trained."""


@dataclass
class Findings:
    """What one file holds."""

    file: DataFile
    form: Form | None = None
    num_rows: int = 0
    complete: bool = True
    """Whether the file was read to its end."""

    unread: Counter[str] = field(default_factory=Counter)
    """Columns that are not read, with the number of rows where they hold something."""

    num_duplicates: int = 0
    num_tools: int = 0
    roles: Counter[str] = field(default_factory=Counter)
    chars: list[int] = field(default_factory=list)
    tokens: list[int] = field(default_factory=list)
    """Tokens of the first rows, where a model was given."""

    trained: int = 0
    tally: Tally = field(default_factory=Tally)
    samples: list[tuple[Place, Marked]] = field(default_factory=list)


def located(paths: Iterable[Path]) -> list[DataFile]:
    """The data files that ``paths`` name, folders included. Raises :class:`StageError`."""
    found = []
    for path in paths:
        if path.is_dir():
            found += files.of_folder(path)
        elif path.is_file():
            found.append(DataFile(path, path.name, str(path)))
            files.require_known(found[-1])
        else:
            raise StageError(f"{path}: no such file or folder; give the data's path")
    return found


def look(
    file: DataFile,
    *,
    limit: int,
    shape: str | None = None,
    columns: Columns | None = None,
    template: Template | None = None,
) -> Findings:
    """Read up to ``limit`` rows of ``file``. Raises :class:`StageError` for an unreadable one."""
    records = readers.read(file)
    sample = list(islice(records, shapes.SAMPLE))
    objects = [record.value for record in sample if isinstance(record.value, dict)]
    found = Findings(file)
    # Whatever it holds is accepted; where a row could be both it is a pair.
    found.form = (
        shapes.asked(shape, objects, columns)
        if shape
        else shapes.detect(objects, accepted=KINDS[1:], named=columns)
    )
    if objects and found.form is None:
        raise StageError(f"{file.shown}: {shapes.misfit(objects[0], KINDS)}")
    seen: set[bytes] = set()
    for record in chain(sample, records):
        if found.num_rows == limit:
            found.complete = False
            break
        found.num_rows += 1
        try:
            if record.fault or found.form is None:
                raise record.fault or RowError("not_an_object")
            row = shapes.canonical(record.value, found.form)
            found.unread.update(shapes.unread(record.value, found.form))
            _note(found, row, record.place, seen, template)
        except RowError as fault:
            found.tally.add(fault.rule, str(record.place), fault.detail)
    return found


def is_faulty(found: Findings) -> bool:
    """Whether a row is faulty, a column with content would be lost, or there are no rows at all."""
    return bool(found.tally.counts or refused(found) or not found.num_rows)


def refused(found: Findings) -> list[str]:
    """Unread columns that carry part of a row, for which prepare_data would refuse the file."""
    return shapes.lost(found.unread, found.form) if found.form else []


def _note(
    found: Findings, row: Canonical, place: Place, seen: set[bytes], template: Template | None
) -> None:
    digest = hashlib.blake2b(lines.dump(row).encode(), digest_size=16).digest()
    found.num_duplicates += digest in seen
    seen.add(digest)
    if template and len(found.tokens) < NUM_TOKENISED:
        marked = _tokenised(found, row, template)
    else:
        marked = plain(row)
    found.chars.append(conversations.num_chars(row))
    found.num_tools += bool(row.get("tools"))
    found.roles.update(turn["role"] for turn in turns(row)) if "text" not in row else None
    if len(found.samples) < NUM_SAMPLES:
        found.samples.append((place, marked))


def _tokenised(found: Findings, row: Canonical, template: Template) -> Marked:
    """Count the row's tokens; its text as the model sees it. Raises :class:`RowError`."""
    assert found.form
    fitting = tokens.Fitting(1 << 30, "drop", assistant_only_loss=True)
    work = tokens.Tokenizing(template, fitting, found.form.kind, found.file.name)
    block = tokens.block(work, LATER, [lines.dump(row).encode()])
    for _, fault, _ in block.rejects:
        raise fault
    found.tokens += block.lengths.tolist()
    found.trained += block.num_trained
    return list(_pieces({name: cells[0] for name, cells in block.columns.items()}, template))


def _pieces(columns: Mapping[str, Sequence[int]], template: Template) -> Iterator[tuple[str, bool]]:
    decode = template.tokenizer.decode
    if "input_ids" in columns:
        ids, labels = columns["input_ids"], columns["labels"]
        start = 0
        for end in range(1, len(ids) + 1):
            here = labels[start] != masking.IGNORED
            if end == len(ids) or (labels[end] != masking.IGNORED) != here:
                yield decode(ids[start:end]), here
                start = end
        return
    yield decode(columns["prompt_ids"]), False
    for side in ("chosen", "rejected", "completion"):
        if f"{side}_ids" in columns:
            yield f"\n{side}: ", False
            yield decode(columns[f"{side}_ids"]), True


def turns(row: Canonical) -> list[Turn]:
    """Every turn of a row, answers included."""
    answers = [turn for side in ("chosen", "rejected", "completion") for turn in row.get(side, [])]
    return [*conversations.history(row), *answers]


def plain(row: Canonical) -> Marked:
    """A row without a model: its turns, and those of the assistant as what would be trained."""
    if "text" in row:
        return [(row["text"], True)]
    named = [(turn["role"], turn) for turn in conversations.history(row)]
    for side in ("chosen", "rejected", "completion"):
        named += [(side, turn) for turn in row.get(side, [])]
    shown: list[tuple[str, bool]] = []
    for name, turn in named:
        shown.append((f"{chr(10) if shown else ''}{name}: ", False))
        calls = "".join(
            f"[calls {call['function']['name']}]" for call in turn.get("tool_calls", ())
        )
        shown.append((turn["content"] + calls, _is_trained(row, name) and turn.get("train", True)))
    return shown


def _is_trained(row: Canonical, name: str) -> bool:
    return name == "assistant" if "messages" in row else name in row


def quantiles(lengths: Sequence[int]) -> str:
    """``p50 212  p95 1840  longest 4096``; nearest ranks."""
    if not lengths:
        return "none"
    ordered = sorted(lengths)
    p50, p95 = (ordered[-(-share * len(ordered) // 100) - 1] for share in (50, 95))
    return f"p50 {p50:,}  p95 {p95:,}  longest {ordered[-1]:,}"


def facts(found: Findings) -> list[tuple[str, str]]:
    """Name and value of each fact, for people."""
    form = found.form
    renamed = f" ({', '.join(f'{c} as {f}' for f, c in form.columns.items())})" if form else ""
    shown = [
        ("shape", f"{form.shape}{renamed if form.columns else ''}" if form else "no objects"),
        ("kind", form.kind if form else "-"),
        ("rows", f"{found.num_rows:,}{'' if found.complete else ' (first; there are more)'}"),
        ("usable", f"{len(found.chars):,}, {found.num_duplicates:,} of them duplicates"),
        ("turns", ", ".join(f"{role} {n:,}" for role, n in found.roles.most_common()) or "-"),
        ("characters", quantiles(found.chars)),
    ]
    if found.num_tools:
        shown.append(("tools", f"in {found.num_tools:,} rows"))
    if found.tokens:
        share = found.trained / max(1, sum(found.tokens))
        shown.append(("tokens", f"{quantiles(found.tokens)} (first {len(found.tokens):,} rows)"))
        shown.append(("trained", f"{share:.0%} of them" if form and form.kind != "preferences" else
                      f"{found.trained:,} tokens of answers"))  # fmt: skip
    return shown


def problems(found: Findings) -> list[tuple[str, int, str]]:
    """Rule, number and first places of what is wrong, the most frequent first."""
    if not found.num_rows:
        return [("no rows", 0, "the file is empty, or is a header alone")]
    return [
        (rule, number, "; ".join(f"{place} {detail}" for place, detail in found.tally.first[rule]))
        for rule, number in found.tally.counts.most_common()
    ] + [
        (f"column {name} is not read", number, _advice(found, name))
        for name, number in found.unread.most_common()
    ]


def _advice(found: Findings, name: str) -> str:
    if name in refused(found):
        return "it carries content: prepare_data refuses it unless columns: {ignored: [...]} has it"
    return "rows hold something there"
