"""Training rows that hold a stretch of the evaluation's words, and rows that are nearly equal."""

import re
import unicodedata
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from stages.base import StageError
from stages.data import conversations
from stages.data.conversations import Canonical

if TYPE_CHECKING:
    import numpy as np

BOILERPLATE = 3
"""A stretch in so many held-out rows, or in so many training rows, belongs to the form of the rows
and not to one of them."""

COMMON_SHARE = 0.01
"""A held-out question inside more training questions than this share is such a form too."""

SHORTEST_QUESTION = 5
"""Words of the shortest held-out question that is looked for inside training questions."""

MOST_STRETCHES = 8_000_000
"""Stretches of held-out rows that are held: 64 MB, and three times that while they are sorted."""

OPERATORS = "+-*/=<>^%"
"""What makes another question of the same words: 3 + 4 is not 3 - 4."""

_BYTES, _BYTES_ASKED = (
    bytes(
        ord(chr(code).lower()) if code < 128 and (chr(code).isalnum() or chr(code) in kept) else 32
        for code in range(256)
    )
    for kept in ("", OPERATORS)
)
_WORD = re.compile(r"[^\W_]+")
_WORD_ASKED = re.compile(rf"(?:[^\W_]|[{re.escape(OPERATORS)}\u00d7\u00f7\u2200-\u22ff])+")
_UNSPACED = re.compile(
    "[\u0e00-\u0eff\u1000-\u109f\u1780-\u17ff\u3040-\u30ff\u31f0-\u31ff\u3400-\u9fff\uf900-\ufaff"
    "\U00020000-\U0003ffff]"
)
"""Letters of scripts without blanks between words: Thai, Lao, Burmese, Khmer, Chinese, Japanese."""

_BASE = 0x9E3779B97F4A7C15 | 1
_INVERSE = pow(_BASE, -1, 1 << 64)


def words(row: Canonical) -> bytes:
    """What a row says, whatever its case and punctuation, one blank between words.

    Each letter of a script without blanks is a word. System turns are left out: they stand in many
    rows.
    """
    turns = conversations.history(row) + [
        turn for side in ("chosen", "rejected", "completion") for turn in row.get(side, [])
    ]
    said = " ".join(turn["content"] for turn in turns if turn["role"] != "system")
    return _plain(said, _BYTES, _WORD)


def questions(row: Canonical) -> bytes:
    """The words of a row's user turns; operators count."""
    said = " ".join(
        turn["content"] for turn in conversations.history(row) if turn["role"] == "user"
    )
    return _plain(said, _BYTES_ASKED, _WORD_ASKED)


def _plain(said: str, table: bytes, word: re.Pattern[str]) -> bytes:
    if said.isascii():
        return b" ".join(said.encode().translate(table).split())
    folded = unicodedata.normalize("NFKC", said).casefold()
    return " ".join(word.findall(_UNSPACED.sub(r" \g<0> ", folded))).encode()


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


def overlap(
    held_out: Iterable[Canonical], *, length: int, training: Iterable[Canonical] = ()
) -> Callable[[Canonical], bool]:
    """Whether a training row shares ``length`` words in a row with a held-out one.

    Stretches in many held-out rows or in many ``training`` rows do not count. A row with fewer
    words counts if all of them are those of a held-out row that is as short, and any row counts
    whose questions hold a whole held-out question of five words or more. Where the held-out rows
    have more stretches than memory should hold, every other is looked for, or one in four, and so
    on, chosen by hash.
    """
    import numpy as np

    none = np.zeros(0, dtype=np.uint64)
    short: set[bytes] = set()
    found: list[np.ndarray] = []
    asked: list[bytes] = []
    total, shift = 0, 64
    for row in held_out:
        if question := _opening(row):
            asked.append(question)
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
    whole = _Questions.of(asked)
    counts, counts_whole, num_rows = np.zeros(len(known), np.int64), np.zeros(whole.size, int), 0

    def shared(row: Canonical) -> "np.ndarray":
        hashes = stretches(words(row), length)
        return _places(known, none if hashes is None else _sampled(hashes, shift))

    for row in training:
        num_rows += 1
        counts[np.unique(shared(row))] += 1
        counts_whole[whole.inside(questions(row))] += 1
    common = counts >= BOILERPLATE
    common_whole = counts_whole >= max(BOILERPLATE, COMMON_SHARE * num_rows)

    def contaminated(row: Canonical) -> bool:
        if (~common[shared(row)]).any() or words(row) in short:
            return True
        return bool((~common_whole[whole.inside(questions(row))]).any())

    return contaminated


def _opening(row: Canonical) -> bytes | None:
    """The words of a row's first question, if they are enough to tell it from others."""
    turns = conversations.history(row)
    first = next((turn for turn in turns if turn["role"] == "user"), None)
    said = _plain(first["content"], _BYTES_ASKED, _WORD_ASKED) if first else b""
    return said if said.count(b" ") + 1 >= SHORTEST_QUESTION else None


def _places(known: "np.ndarray", hashes: "np.ndarray") -> "np.ndarray":
    """Where in ``known``, which is sorted, those of ``hashes`` stand that are in it."""
    import numpy as np

    if not len(known) or not len(hashes):
        return np.zeros(0, dtype=np.int64)
    places = np.minimum(np.searchsorted(known, hashes), len(known) - 1)
    return places[known[places] == hashes]


@dataclass(frozen=True)
class _Questions:
    """Whole questions, to be found inside others."""

    starts: "np.ndarray"
    """The hash of the first words of each, sorted,"""

    lengths: "np.ndarray"
    """the number of its words,"""

    hashes: "np.ndarray"
    """and the hash of all of them."""

    @property
    def size(self) -> int:
        return len(self.starts)

    @staticmethod
    def of(asked: Iterable[bytes]) -> "_Questions":
        import numpy as np

        rows = {
            (int(_stretch(said, SHORTEST_QUESTION)), n, int(_stretch(said, n)))
            for said in asked
            for n in (said.count(b" ") + 1,)
        }
        ordered = sorted(rows)
        starts, lengths, hashes = (
            np.array([row[place] for row in ordered], dtype=kind)
            for place, kind in enumerate((np.uint64, np.int64, np.uint64))
        )
        return _Questions(starts, lengths, hashes)

    def inside(self, said: bytes) -> list[int]:
        """The numbers of the questions that ``said`` holds."""
        import numpy as np

        hashes = stretches(said, SHORTEST_QUESTION) if self.size else None
        if hashes is None:
            return []
        hits = np.flatnonzero(self.starts[
            np.minimum(np.searchsorted(self.starts, hashes), self.size - 1)
        ] == hashes)  # fmt: skip
        found: set[int] = set()
        for hit in hits.tolist():
            first, last = (
                int(np.searchsorted(self.starts, hashes[hit], side=side))
                for side in ("left", "right")
            )
            for number in range(first, last):
                whole = stretches(said, int(self.lengths[number]))
                if whole is not None and hit < len(whole) and whole[hit] == self.hashes[number]:
                    found.add(number)
        return sorted(found)


def _stretch(said: bytes, length: int) -> int:
    """The hash of the first ``length`` words."""
    found = stretches(b" ".join(said.split(b" ")[:length]), length)
    assert found is not None
    return int(found[0])


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
