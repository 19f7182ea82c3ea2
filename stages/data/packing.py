"""Tokenised rows in sequences of one length: best-fit decreasing over a whole split."""

import gc
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from stages.base import StageError

if TYPE_CHECKING:
    import numpy as np
    from datasets import Dataset

LENGTHS = "seq_lengths"
"""The column with the lengths of a sequence's rows, by which the collator keeps them apart."""


@dataclass(frozen=True)
class Bins:
    """Which pieces lie in which bin."""

    order: "np.ndarray"
    """The pieces, bin after bin."""

    sizes: "np.ndarray"
    """For each bin the number of its pieces."""


def pack(rows: "Dataset", length: int) -> "Dataset":
    """``rows`` in sequences of at most ``length`` tokens, with ``seq_lengths``.

    All columns are lists of one length in each row. Rows longer than ``length`` are cut into
    pieces; no token is lost, and the same rows always give the same sequences. Raises
    :class:`StageError` where there are none.
    """
    import numpy as np
    import pyarrow
    from datasets import Dataset, Features, List, Value
    from datasets.table import InMemoryTable

    if not len(rows):
        raise StageError("no rows to pack; give a split that holds rows")
    table = _plain(rows)
    starts = piece_starts(table.column(0).chunk(0).offsets.to_numpy(), length)
    sizes = np.diff(starts)
    bins = best_fit(sizes, length)
    ordered = sizes[bins.order]
    places = np.concatenate(([0], np.cumsum(bins.sizes)))
    ends = np.concatenate(([0], np.cumsum(ordered)))[places]
    begins = starts[bins.order]
    columns: dict[str, Any] = {}
    with _no_collection():
        slices = list(map(slice, begins.tolist(), (begins + ordered).tolist()))
        for name in table.column_names:
            values = table.column(name).chunk(0).values.to_numpy()
            columns[name] = _lists(ends, _gathered(values, slices, total=int(ends[-1])))
    columns[LENGTHS] = _lists(places, pyarrow.array(ordered.astype(np.int32)))
    features = Features({**rows.features, LENGTHS: List(Value("int32"))})
    packed = pyarrow.table(columns).cast(features.arrow_schema)
    name = f"{rows._fingerprint}-packed-{length}"  # what later maps are cached by
    return Dataset(InMemoryTable(packed), fingerprint=name)


def _gathered(values: "np.ndarray", pieces: list[slice], *, total: int) -> Any:
    """The ``total`` values of the pieces, one after another, in memory of Arrow's pool: the
    system's own takes several times as long to be touched first as the copy itself."""
    import numpy as np
    import pyarrow

    buffer = pyarrow.allocate_buffer(total * values.itemsize)
    parts = list(map(values.__getitem__, pieces))
    np.concatenate(parts, out=np.frombuffer(buffer, values.dtype))
    kind = pyarrow.from_numpy_dtype(values.dtype)
    return pyarrow.Array.from_buffers(kind, total, [None, buffer])


@contextmanager
def _no_collection() -> Iterator[None]:
    """A slice for each piece would make Python look through everything that torch has loaded, for
    garbage that there is none of: half of the time."""
    was_enabled = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if was_enabled:
            gc.enable()


def _plain(rows: "Dataset") -> Any:
    """The rows as one chunk of Arrow, without a copy where they are that already."""
    table = rows.data.table if rows._indices is None else rows.with_format("arrow")[:]
    return table if all(c.num_chunks == 1 for c in table.columns) else table.combine_chunks()


def _lists(ends: "np.ndarray", values: Any) -> Any:
    import pyarrow

    if ends[-1] < 1 << 31:
        return pyarrow.ListArray.from_arrays(pyarrow.array(ends, pyarrow.int32()), values)
    return pyarrow.LargeListArray.from_arrays(pyarrow.array(ends, pyarrow.int64()), values)


def piece_starts(offsets: "np.ndarray", length: int) -> "np.ndarray":
    """Where the pieces of the rows begin, and the end: a row is cut every ``length`` tokens."""
    import numpy as np

    sizes = np.diff(offsets)
    numbers = -(-sizes // length)
    if not (sizes > length).any() and numbers.all():
        return offsets
    before = np.repeat(np.cumsum(numbers) - numbers, numbers)
    inside = np.arange(numbers.sum()) - before
    starts = np.repeat(offsets[:-1], numbers) + inside * length
    return np.concatenate((starts, offsets[-1:]))


def best_fit(sizes: "np.ndarray", capacity: int) -> Bins:
    """Best-fit decreasing: each piece, the longest first, into the fullest bin that has room.

    Pieces of one size are placed together. A bin that is the fullest with room for one stays so
    until there is no room, so it takes as many as fit, and so do all bins with the same room: the
    work depends on the number of different sizes and not on the number of pieces.
    """
    import numpy as np

    order = np.argsort(-sizes, kind="stable")
    bin_of = np.empty(len(sizes), dtype=np.int64)
    rooms: dict[int, list[np.ndarray]] = {}
    open_rooms, num_bins = 0, 0  # a bit for each room that some bin has
    lengths, numbers = np.unique(sizes, return_counts=True)
    first = 0
    for size, number in zip(lengths[::-1].tolist(), numbers[::-1].tolist(), strict=True):
        left = number
        while left:
            fitting = open_rooms >> size
            if fitting:
                room = size + (fitting & -fitting).bit_length() - 1
                held = rooms.pop(room)
                bins = held[0] if len(held) == 1 else np.concatenate(held)
                open_rooms ^= 1 << room
            else:
                room = capacity
                bins = np.arange(num_bins, num_bins + -(-left // (capacity // size)))
                num_bins += len(bins)
            each = room // size
            used = min(len(bins), -(-left // each))
            taken = min(left, used * each)
            bin_of[first : first + taken] = bins[:used].repeat(each)[:taken]
            first, left = first + taken, left - taken
            last = taken - (used - 1) * each
            whole = used if last == each else used - 1
            for some, rest in (
                (bins[:whole], room - each * size),
                (bins[whole:used], room - last * size),
                (bins[used:], room),
            ):
                if len(some) and rest:
                    rooms.setdefault(rest, []).append(some)
                    open_rooms |= 1 << rest
    by_bin = np.argsort(bin_of, kind="stable")
    return Bins(order[by_bin], np.bincount(bin_of, minlength=num_bins))


def lower_bound(sizes: "np.ndarray", capacity: int) -> int:
    """Bins that no packing can do without (Martello and Toth's L2, 1990).

    Pieces over half the capacity need a bin each; for every threshold the pieces between it and
    half must fit into what these leave, and pieces that no such piece fits beside leave nothing.
    """
    import numpy as np

    numbers = np.bincount(sizes, minlength=capacity + 1)[: capacity + 1]
    tokens = numbers * np.arange(capacity + 1)
    count_to, tokens_to = np.cumsum(numbers), np.cumsum(tokens)
    half = capacity // 2
    large = int(count_to[-1] - count_to[half])
    best = large
    for least in range(half + 1):
        beside = count_to[capacity - least] - count_to[half]  # large, with room for `least`
        room = beside * capacity - (tokens_to[capacity - least] - tokens_to[half])
        small = tokens_to[half] - (tokens_to[least - 1] if least else 0)
        best = max(best, large + -(-int(max(0, small - room)) // capacity))
    return best
