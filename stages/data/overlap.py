"""Training rows that hold a stretch of the evaluation's words, and rows that are nearly equal."""

from collections.abc import Callable, Iterable, Sequence
from typing import TYPE_CHECKING, Any

from stages.base import StageError
from stages.data import conversations
from stages.data.conversations import Canonical

if TYPE_CHECKING:
    import numpy as np

BOILERPLATE = 3
"""A stretch in so many held-out rows belongs to the form of the rows, not to one of them."""

MOST_STRETCHES = 8_000_000
"""Stretches of held-out rows that are held: 64 MB, and three times that while they are sorted."""

_BYTES = bytes(
    code if code > 127 else ord(chr(code).lower()) if chr(code).isalnum() else 32
    for code in range(256)
)
_BASE = 0x9E3779B97F4A7C15 | 1
_INVERSE = pow(_BASE, -1, 1 << 64)


def words(row: Canonical) -> bytes:
    """What a row says, in lower case without punctuation, one blank between words.

    System turns are left out: they stand in many rows.
    """
    turns = conversations.history(row) + [
        turn for side in ("chosen", "rejected", "completion") for turn in row.get(side, [])
    ]
    said = " ".join(turn["content"] for turn in turns if turn["role"] != "system")
    return b" ".join(said.encode().translate(_BYTES).split())


def stretches(said: bytes, length: int) -> "np.ndarray | None":
    """The 64-bit hash of each stretch of ``length`` words; ``None`` where there are fewer words.

    Polynomial prefix hashes: a stretch costs one subtraction and one product.
    """
    import numpy as np

    if said.count(b" ") + 1 < length:
        return None
    text = np.frombuffer(said, dtype=np.uint8)
    powers, inverses = _powers(len(text) + 1)
    sums = np.zeros(len(text) + 1, dtype=np.uint64)
    np.cumsum((text.astype(np.uint64) + np.uint64(1)) * powers[1:], out=sums[1:])
    blanks = np.flatnonzero(text == 32)
    starts = np.concatenate(([0], blanks + 1))
    ends = np.concatenate((blanks, [len(text)]))
    first, last = starts[: len(starts) - length + 1], ends[length - 1 :]
    return (sums[last] - sums[first]) * inverses[first]


def _powers(number: int) -> "tuple[np.ndarray, np.ndarray]":
    """Powers of the base and of its inverse modulo 2**64."""
    import numpy as np

    if len(_table[0]) < number:
        size = max(number, 2 * len(_table[0]), 1 << 14)
        for place, base in enumerate((_BASE, _INVERSE)):
            steps = np.full(size, base, dtype=np.uint64)
            steps[0] = 1
            _table[place] = np.cumprod(steps, dtype=np.uint64)
    return _table[0][:number], _table[1][:number]


_table: list[Any] = [(), ()]


def overlap(held_out: Iterable[Canonical], *, length: int) -> Callable[[Canonical], bool]:
    """Whether a training row shares ``length`` words in a row with a held-out one.

    Stretches in many held-out rows do not count. A row with fewer words counts if all of them are
    those of a held-out row that is as short. Where the held-out rows have more stretches than
    memory should hold, every other is looked for, or one in four, and so on, chosen by hash.
    """
    import numpy as np

    none = np.zeros(0, dtype=np.uint64)
    short: set[bytes] = set()
    found: list[np.ndarray] = []
    total, shift = 0, 64
    for row in held_out:
        said = words(row)
        hashes = stretches(said, length)
        if hashes is None:
            short.add(said)
            continue
        found.append(np.unique(_sampled(hashes, shift)))
        total += len(found[-1])
        if total > MOST_STRETCHES:
            shift -= 1
            found = [_sampled(np.concatenate(found), shift)]
            total = len(found[0])
    every, numbers = np.unique(np.concatenate([none, *found]), return_counts=True)
    known = every[numbers < BOILERPLATE]
    found.clear()

    def contaminated(row: Canonical) -> bool:
        said = words(row)
        hashes = stretches(said, length)
        if hashes is None:
            return said in short
        hashes = _sampled(hashes, shift)
        if not len(known) or not len(hashes):
            return False
        places = np.searchsorted(known, hashes)
        return bool((known[np.minimum(places, len(known) - 1)] == hashes).any())

    return contaminated


def _sampled(hashes: "np.ndarray", shift: int) -> "np.ndarray":
    """Those hashes of which all bits from ``shift`` on are 0: one in 2 to the (64 - shift)."""
    return hashes if shift == 64 else hashes[hashes >> shift == 0]


def near_copies(rows: Iterable[Canonical], *, threshold: float) -> Callable[[Canonical], bool]:
    """Whether a row's words resemble those of an earlier one, of ``rows`` or told of here.

    Resemblance is the Jaccard index of the rows' stretches of five words, estimated by MinHash
    with 128 permutations. Raises :class:`StageError` without the package datasketch.
    """
    try:
        from datasketch import MinHash, MinHashLSH
    except ImportError:
        raise StageError(
            "near_duplicates needs the package datasketch; type: pip install datasketch"
        ) from None
    index = MinHashLSH(threshold=threshold, num_perm=128)
    number = 0

    def resembles(row: Canonical) -> bool:
        nonlocal number
        sketch = MinHash(num_perm=128)
        sketch.update_batch(_shingles(words(row).split(b" ")))
        if index.query(sketch):
            return True
        index.insert(number, sketch)
        number += 1
        return False

    for row in rows:
        resembles(row)
    return resembles


def _shingles(said: Sequence[bytes], length: int = 5) -> list[bytes]:
    return [b" ".join(said[start : start + length]) for start in range(max(1, len(said) - 4))]
