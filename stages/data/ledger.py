"""What happens to each usable row: which side holds it out, which copies and surplus go."""

import hashlib
from array import array
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from stages.base import StageError

if TYPE_CHECKING:
    import numpy as np

DROPPED, TRAIN, TEST = 0, 1, 2
SIDES = {"train": TRAIN, "test": TEST}


@dataclass(frozen=True)
class Ledger:
    """Forty-eight bytes for each row, in the rows' order; decided by content, never by position."""

    positions: "array[float]" = field(default_factory=lambda: array("d"))
    """Where the opening's hash falls in [0, 1); below the test fraction a row is held out."""

    ranks: "array[int]" = field(default_factory=lambda: array("Q"))
    """Two words a row, the hash of the whole row: equal for duplicates, and the order in which a
    cap takes rows."""

    openings: "array[int]" = field(default_factory=lambda: array("Q"))
    """The hash of what opens the row: equal for rows that ask the same."""

    sources: "array[int]" = field(default_factory=lambda: array("L"))
    """The number of the file that it came from."""

    places: "array[int]" = field(default_factory=lambda: array("Q"))
    """Its line or row there."""

    def __len__(self) -> int:
        return len(self.sources)

    def add(
        self, line: str, *, opening: str, source: int, place: int, seed: int, held_out: bool | None
    ) -> None:
        """One more row; ``held_out`` says on which side it is, and ``None`` asks its hash."""
        start = _hash(opening, seed)
        position = int.from_bytes(start[:7], "big") / 2**56
        if held_out is not None:
            position = -1.0 if held_out else 2.0
        self.positions.append(position)
        self.openings.append(int.from_bytes(start[8:16], "big"))
        whole = _hash(line, seed)
        self.ranks.append(int.from_bytes(whole[:8], "big"))
        self.ranks.append(int.from_bytes(whole[8:16], "big"))
        self.sources.append(source)
        self.places.append(place)


def _hash(content: str, seed: int) -> bytes:
    return hashlib.sha256(f"{seed}\0{content}".encode()).digest()


def sides(ledger: Ledger, *, test_fraction: float) -> "np.ndarray":
    """For each row ``TRAIN`` or ``TEST``: adding rows never moves an old one."""
    import numpy as np

    positions = np.frombuffer(ledger.positions, dtype=np.float64)
    return np.where(positions < test_fraction, TEST, TRAIN).astype(np.uint8)


def wanted(test_fraction: float) -> dict[str, int]:
    """The sides that must have rows."""
    return {side: code for side, code in SIDES.items() if side == "test" or test_fraction < 1}


def copies(ledger: Ledger, fates: "np.ndarray") -> "np.ndarray":
    """Whether each row repeats another; of equal rows the first stays, a held-out one before."""
    import numpy as np

    high, low = _ranks(ledger)
    order = np.lexsort((fates != TEST, low, high))
    same = (high[order][1:] == high[order][:-1]) & (low[order][1:] == low[order][:-1])
    repeated = np.zeros(len(ledger), dtype=bool)
    repeated[order[1:][same]] = True
    return repeated


def held_openings(ledger: Ledger, fates: "np.ndarray") -> "np.ndarray":
    """Hashes of what opens the held-out rows."""
    import numpy as np

    return np.unique(np.frombuffer(ledger.openings, dtype=np.uint64)[fates == TEST])


def asked_in_test(ledger: Ledger, fates: "np.ndarray", held: "np.ndarray") -> "np.ndarray":
    """Whether each training row opens like a ``held`` one, which only a file's name can cause."""
    import numpy as np

    openings = np.frombuffer(ledger.openings, dtype=np.uint64)
    return (fates == TRAIN) & np.isin(openings, held)


def surplus(
    ledger: Ledger,
    fates: "np.ndarray",
    *,
    limits: dict[str, int | None],
    groups: Sequence[int],
    weights: Sequence[float | None],
    caps: Sequence[int | None],
) -> "np.ndarray":
    """Whether each row is over a cap, its source's share included; a larger cap only adds rows.

    ``groups`` gives for each file the entry of the mix that rules it, ``weights`` and ``caps`` what
    that entry allows.
    """
    import numpy as np

    over = np.zeros(len(ledger), dtype=bool)
    group = np.asarray(groups)[np.frombuffer(ledger.sources, dtype=np.dtype("L"))]
    for side, code in SIDES.items():
        rows = _by_rank(ledger, np.flatnonzero(fates == code))
        members = [rows[group[rows] == number] for number in range(len(weights))]
        allowed = [len(one) for one in members]
        if code == TRAIN:
            pairs = zip(allowed, caps, strict=True)
            allowed = [have if cap is None else min(have, cap) for have, cap in pairs]
            allowed = shares(allowed, weights, limit=limits[side])
            _refuse_nothing(allowed, weights, [len(one) for one in members], groups)
        for one, number in zip(members, allowed, strict=True):
            over[one[number:]] = True
        left = rows[~over[rows]]
        over[left[limits[side] :] if limits[side] is not None else left[:0]] = True
    return over


def _refuse_nothing(
    allowed: Sequence[int],
    weights: Sequence[float | None],
    have: Sequence[int],
    groups: Sequence[int],
) -> None:
    """Raise :class:`StageError` for a weighted source, ruling some file, that gives no row."""
    for number, weight in enumerate(weights):
        if weight is None or number not in groups or allowed[number]:
            continue
        if not have[number]:
            raise StageError(
                f"sources[{number}] has weight {weight:g} and no training row left; give its files "
                "other rows, or remove its weight"
            )
        others = min(
            (n / w for n, w in zip(have, weights, strict=True) if w is not None and n), default=1.0
        )
        raise StageError(
            f"sources[{number}] has weight {weight:g} and gets none of its {have[number]} training "
            f"rows, because the scarcest source allows {others * weight:.2g}; raise its weight to "
            f"{1 / max(others, 1e-9):.2g} or more, or raise the cap"
        )


def shares(have: Sequence[int], weights: Sequence[float | None], *, limit: int | None) -> list[int]:
    """Rows to take of each source: by weight, as many as the scarcest allows, none twice.

    Sources without a weight give all they have. ``limit`` bounds the weighted ones together.
    """
    weighted = [(n, w) for n, w in zip(have, weights, strict=True) if w is not None]
    if not weighted:
        return list(have)
    scale = min((number / weight for number, weight in weighted if number), default=0.0)
    if limit is not None:
        scale = min(scale, limit / sum(weight for number, weight in weighted if number))
    # A hair more than the product: 3 / 0.3 * 0.3 is 2.9999999999999996.
    return [
        n if w is None else min(n, int(scale * w + 1e-9))
        for n, w in zip(have, weights, strict=True)
    ]


def refuse_empty(fates: "np.ndarray", ledger: Ledger, *, test_fraction: float, what: str) -> None:
    """Raise :class:`StageError` for a side without rows; the message's way out works."""
    for side, code in wanted(test_fraction).items():
        if not (fates == code).any():
            raise StageError(
                f"all {len(fates)} {what} fall outside {side} at test_fraction {test_fraction:g}; "
                + _way_out(ledger)
            )


def _way_out(ledger: Ledger) -> str:
    openings = sorted(set(ledger.positions))
    if len(openings) < 2:
        return "they share their first user turn, which keeps them on one side: add other rows"
    held = max(1, len(openings) // 10)
    between = (openings[held - 1] + openings[held]) / 2
    return f"add rows, choose another seed, or set test_fraction to {between:.3g}"


def _ranks(ledger: Ledger) -> Any:
    import numpy as np

    both = np.frombuffer(ledger.ranks, dtype=np.uint64)
    return both[::2], both[1::2]


def _by_rank(ledger: Ledger, rows: "np.ndarray") -> "np.ndarray":
    import numpy as np

    high, low = _ranks(ledger)
    return rows[np.lexsort((low[rows], high[rows]))]
