"""Rows that are kept out: where they stand, which rule they break, how many there may be."""

import json
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from stages.base import StageError
from stages.data import lines
from stages.data.places import Place
from stages.data.rules import RowError, writable

NAME = "quarantine.jsonl"
EXCERPT = 200
NUM_PLACES = 3
ASKED_FOR = frozenset({"too_long"})
"""Rules that carry out a limit of the user's and say nothing about the data's quality."""


@dataclass(frozen=True)
class Tally:
    """What was kept out of one kind of rows: numbers, and the first of each rule."""

    counts: Counter[str] = field(default_factory=Counter)
    first: dict[str, list[tuple[str, str]]] = field(default_factory=dict)
    """For each rule the places of its first rows, with what was wrong there."""

    @property
    def num_faults(self) -> int:
        """Rows that count against the drop budget."""
        return sum(number for rule, number in self.counts.items() if rule not in ASKED_FOR)

    def add(self, rule: str, place: str, detail: str) -> None:
        self.counts[rule] += 1
        places = self.first.setdefault(rule, [])
        if len(places) < NUM_PLACES:
            places.append((place, detail))


Keep = Callable[[str, Place, RowError, Any], None]
"""Told of the kind of a row, its place, its fault and its value."""


@contextmanager
def opened(out: Path) -> Iterator[Keep]:
    """Writes ``out/quarantine.jsonl``: one object for each row, with a ``line`` or a ``row``.

    The file gets its name when the context ends, also with an error: it says why.
    """
    partial = out / f"{NAME}.partial"
    with partial.open("w", encoding="utf-8", errors="backslashreplace") as file:

        def keep(kind: str, place: Place, fault: RowError, value: Any) -> None:
            spot = {"row": place.row} if place.line is None else {"line": place.line}
            entry = {"kind": kind, "file": place.file, **spot, "rule": fault.rule}
            entry |= {"origin": place.origin} if place.origin else {}
            entry |= {"detail": fault.detail, "excerpt": excerpt(value)}
            file.write(lines.dump(entry) + "\n")

        try:
            yield keep
        finally:
            file.flush()
            partial.rename(out / NAME)


def excerpt(value: Any) -> str:
    """The start of a row, whatever it is."""
    try:
        shown = value if isinstance(value, str) else _dump(value)
    except RecursionError:
        shown = "(nested too deeply to show)"
    return writable(shown[:EXCERPT])


def _dump(value: Any) -> str:
    return json.dumps(value, ensure_ascii=False, default=str)


def counts(tally: Mapping[str, int]) -> dict[str, int]:
    """How many rows each rule kept out, the most frequent first."""
    return dict(Counter(tally).most_common())


def listed(tally: Mapping[str, int]) -> str:
    """``empty_turn 3, not_text 1``."""
    return ", ".join(f"{rule} {number}" for rule, number in counts(tally).items())


def enforce_budget(
    tally: Tally, *, num_rows: int, budget: float, what: str, out: Path, sources: Sequence[str] = ()
) -> None:
    """Raise :class:`StageError` where more than ``budget`` of ``num_rows`` rows are faulty.

    ``what`` names the rows, ``out`` the directory that holds the quarantine and ``sources`` the
    files as the user calls them.
    """
    bad = tally.num_faults
    if not bad or bad / num_rows <= budget:
        return
    (rule, number), *others = (
        (rule, number) for rule, number in counts(tally.counts).items() if rule not in ASKED_FOR
    )
    places = ", ".join(place for place, _ in tally.first[rule])
    raise StageError(
        f"{bad} of {num_rows} {what} are unusable, more than drop_budget {budget:g} allows: "
        f"{rule} {number} ({places}: {tally.first[rule][0][1]})"
        f"{''.join(f', {other} {count}' for other, count in others)}"
        f"{' in ' + ', '.join(sources[:3]) if sources else ''}"
        f"{', ...' if len(sources) > 3 else ''}; "
        f"see {out / NAME}, then mend the rows{' or raise drop_budget' if bad < num_rows else ''}"
    )
