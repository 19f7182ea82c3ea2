"""Packing: no token lost, rows kept apart, as few sequences as can be, always the same."""

from itertools import pairwise
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from stages.data import packing


def dataset(lengths: list[int]) -> Any:
    from datasets import Dataset, Features, List, Value

    ends = np.cumsum([0, *lengths])
    ids = [list(range(a, b)) for a, b in pairwise(ends)]
    labels = [[-100 if one % 3 else one for one in row] for row in ids]
    kinds = Features({name: List(Value("int32")) for name in ("input_ids", "labels")})
    return Dataset.from_dict({"input_ids": ids, "labels": labels}, features=kinds)


def by_hand(sizes: list[int], capacity: int) -> list[list[int]]:
    """Best-fit decreasing, one piece at a time."""
    bins: list[list[int]] = []
    for size in sorted(sizes, reverse=True):
        fits = [one for one in bins if capacity - sum(one) >= size]
        if fits:
            min(fits, key=lambda one: capacity - sum(one)).append(size)
        else:
            bins.append([size])
    return bins


@settings(max_examples=200, deadline=None)
@given(sizes=st.lists(st.integers(1, 30), min_size=1, max_size=60), capacity=st.integers(30, 64))
def test_it_is_best_fit_decreasing(sizes: list[int], capacity: int) -> None:
    bins = packing.best_fit(np.array(sizes), capacity)
    assert sorted(bins.order.tolist()) == list(range(len(sizes)))
    ours = np.split(np.array(sizes)[bins.order], np.cumsum(bins.sizes)[:-1])
    hand = by_hand(sizes, capacity)
    assert max(map(sum, ours)) <= capacity
    assert sorted(map(sum, ours)) == sorted(map(sum, hand))  # of equal rooms any may be taken
    assert packing.lower_bound(np.array(sizes), capacity) <= len(ours)


def test_no_token_is_lost_and_rows_stay_apart() -> None:
    lengths = [5, 17, 3, 40, 1, 16, 8, 8]
    rows = dataset(lengths)
    packed: Any = packing.pack(rows, 16)
    assert packed.column_names == ["input_ids", "labels", "seq_lengths"]
    pieces = []
    for row in packed:
        assert sum(row["seq_lengths"]) == len(row["input_ids"]) == len(row["labels"]) <= 16
        ends = np.cumsum([0, *row["seq_lengths"]])
        for start, end in pairwise(ends):
            piece = row["input_ids"][start:end]
            assert piece == list(range(piece[0], piece[0] + len(piece)))
            assert row["labels"][start:end] == [-100 if one % 3 else one for one in piece]
            pieces.append(piece)
    whole = [one for row in rows for one in row["input_ids"]]
    assert sorted(one for piece in pieces for one in piece) == whole
    assert sorted(map(len, pieces)) == sorted([5, 16, 1, 3, 16, 16, 8, 1, 16, 8, 8])


def test_selected_rows_and_several_chunks_are_packed_alike() -> None:
    from datasets import concatenate_datasets

    rows = dataset([5, 9, 3, 4, 7, 2])
    chosen = rows.select([1, 3, 5])
    assert (
        packing.pack(chosen, 16).to_dict() == packing.pack(chosen.flatten_indices(), 16).to_dict()
    )
    halves = concatenate_datasets([rows.select(range(3)), rows.select(range(3, 6))])
    assert packing.pack(halves, 16).to_dict() == packing.pack(rows, 16).to_dict()
    slice_of_a_table = type(rows)(rows.data.table.slice(1, 3))
    assert (
        packing.pack(slice_of_a_table, 16).to_dict()
        == packing.pack(rows.select([1, 2, 3]).flatten_indices(), 16).to_dict()
    )


def test_the_features_and_the_fingerprint_are_those_of_a_dataset() -> None:
    from datasets import List, Value

    rows = dataset([5, 9, 3])
    packed: Any = packing.pack(rows, 16)
    assert packed.features["seq_lengths"] == List(Value("int32"))
    assert packed.features["input_ids"] == rows.features["input_ids"]
    assert packed._fingerprint != packing.pack(rows, 12)._fingerprint
    assert packed._fingerprint == packing.pack(rows, 16)._fingerprint


@pytest.mark.parametrize(
    ("sizes", "capacity", "bound"),
    [
        ([6, 6, 6], 10, 3),  # the sum alone says 2
        ([5, 5, 5], 10, 2),
        ([10, 1], 10, 2),
        ([7, 7, 4, 4], 10, 3),  # no 4 fits beside a 7
        ([3] * 7, 10, 3),
    ],
)
def test_the_lower_bound_is_right_for_pieces_over_half(
    sizes: list[int], capacity: int, bound: int
) -> None:
    assert packing.lower_bound(np.array(sizes), capacity) == bound


def test_bins_are_the_lower_bound_or_one_more_on_usual_lengths() -> None:
    lengths = np.clip(np.random.default_rng(0).lognormal(5.3, 0.9, 20_000), 8, 4096).astype(int)
    for capacity in (4096, 8192):
        bins = packing.best_fit(lengths, capacity)
        assert len(bins.sizes) <= packing.lower_bound(lengths, capacity) + 1
