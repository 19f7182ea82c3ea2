"""Which rows are held out: decided by content, so that rows added later move none."""

import hashlib
from collections.abc import Sequence
from dataclasses import dataclass

from stages.base import StageError


@dataclass(frozen=True)
class Row:
    """A usable row: its canonical JSON line and the two hashes that decide its fate."""

    source: str
    line: str
    position: float
    """Where the opening's hash falls in [0, 1); below the test fraction the row is held out."""

    rank: bytes
    """Hash of the whole row: equal for duplicates, and the order in which a cap takes rows."""


def row(source: str, line: str, *, opening: str, seed: int) -> Row:
    position = int.from_bytes(_hash(opening, seed)[:7], "big") / 2**56
    return Row(source, line, position, _hash(line, seed))


def _hash(content: str, seed: int) -> bytes:
    return hashlib.sha256(f"{seed}\0{content}".encode()).digest()


def split(rows: Sequence[Row], *, test_fraction: float, what: str) -> dict[str, list[Row]]:
    """``rows`` as ``train`` and ``test``, each with one row at least, else :class:`StageError`."""
    sides = {
        "train": [row for row in rows if row.position >= test_fraction],
        "test": [row for row in rows if row.position < test_fraction],
    }
    for side, held in sides.items():
        if not held:
            raise StageError(
                f"all {len(rows)} {what} fall outside {side} at test_fraction {test_fraction:g}; "
                + _way_out(rows)
            )
    return sides


def _way_out(rows: Sequence[Row]) -> str:
    openings = sorted({row.position for row in rows})
    if len(openings) == 1:
        return "they share their first user turn, which keeps them on one side: add other rows"
    held = max(1, len(openings) // 10)
    between = (openings[held - 1] + openings[held]) / 2
    return f"add rows, choose another seed, or set test_fraction to {between:.3g}"


def cap(rows: Sequence[Row], limit: int | None) -> list[Row]:
    """At most ``limit`` rows in their own order, chosen by hash: a larger limit only adds rows."""
    if limit is None or len(rows) <= limit:
        return list(rows)
    chosen = set(sorted(row.rank for row in rows)[:limit])
    return [row for row in rows if row.rank in chosen]
