"""The rows that a probe of memory trains on are those that take most of it."""

from pathlib import Path

from datasets import Dataset, load_from_disk

from stages.base import Context
from stages.longest_rows import LongestRows, longest_rows


def test_of_pairs_the_longer_side_counts_to_which_the_other_is_padded(tmp_path: Path) -> None:
    even = {"prompt_ids": [5] * 10, "chosen_ids": [6] * 30, "rejected_ids": [7] * 30}
    uneven = {"prompt_ids": [5] * 10, "chosen_ids": [6] * 50, "rejected_ids": [7]}
    folder = tmp_path / "data" / "preferences" / "train"
    Dataset.from_list([even, uneven, even]).save_to_disk(folder)
    found = longest_rows(LongestRows(rows=2), Context(tmp_path / "out"), data=tmp_path / "data")
    assert found == {"preferences/train/longest": 2 * (10 + 50)}
    copies = load_from_disk(str(tmp_path / "out" / "preferences" / "train"))
    assert [len(row) for row in copies["chosen_ids"]] == [50, 50]
