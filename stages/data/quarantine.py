"""Rows that are kept out: where they stand, which rule they break, how many there may be."""

import json
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from stages.base import StageError
from stages.data import lines
from stages.data.readers import Place
from stages.data.rules import RowError
from stages.manifest import write_atomically

NAME = "quarantine.jsonl"
EXCERPT = 200
ASKED_FOR = frozenset({"too_long"})
"""Rules that carry out a limit of the user's and say nothing about the data's quality."""


@dataclass(frozen=True)
class Reject:
    """One row that was kept out."""

    place: Place
    rule: str
    detail: str
    excerpt: str


def reject(place: Place, fault: RowError, value: Any) -> Reject:
    shown = value if isinstance(value, str) else json.dumps(value, ensure_ascii=False)
    excerpt = shown[:EXCERPT].encode(errors="backslashreplace").decode()
    return Reject(place, fault.rule, fault.detail, excerpt)


def write(out: Path, rejects: Mapping[str, Sequence[Reject]]) -> None:
    """``out/quarantine.jsonl``: one object for each row, with a ``line`` or a ``row``.

    The keys of ``rejects`` say what the rows are, and stand in the field ``kind``.
    """
    entries = (
        lines.dump({"kind": kind, **_entry(bad)}) for kind, rows in rejects.items() for bad in rows
    )
    write_atomically(out / NAME, lines.join(entries))


def _entry(bad: Reject) -> dict[str, Any]:
    spot = {"row": bad.place.row} if bad.place.line is None else {"line": bad.place.line}
    rest = {"rule": bad.rule, "detail": bad.detail, "excerpt": bad.excerpt}
    return {"file": bad.place.file, **spot, **rest}


def counts(rejects: Sequence[Reject]) -> dict[str, int]:
    """How many rows each rule kept out, the most frequent first."""
    return dict(Counter(bad.rule for bad in rejects).most_common())


def faults(rejects: Sequence[Reject]) -> list[Reject]:
    """The rejects that count against the drop budget."""
    return [bad for bad in rejects if bad.rule not in ASKED_FOR]


def enforce_budget(
    rejects: Sequence[Reject], *, num_rows: int, budget: float, what: str, out: Path
) -> None:
    """Raise :class:`StageError` where more than ``budget`` of ``num_rows`` rows are faulty.

    ``what`` names the rows and ``out`` the directory that holds the quarantine.
    """
    bad = faults(rejects)
    if not bad or len(bad) / num_rows <= budget:
        return
    (rule, number), *others = counts(bad).items()
    worst = [one for one in bad if one.rule == rule][:3]
    places = ", ".join(str(one.place) for one in worst)
    raise StageError(
        f"{len(bad)} of {num_rows} {what} are unusable, more than drop_budget {budget:g} allows: "
        f"{rule} {number} ({places}: {worst[0].detail})"
        f"{''.join(f', {other} {count}' for other, count in others)}; "
        f"see {out / NAME}, then mend the rows or raise drop_budget"
    )
