"""The rows that an evaluation is about, and the pairing of two evaluations row by row."""

import hashlib
import json
import math
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

from stages.base import StageError
from stages.data import lines
from stages.manifest import write_atomically

NAME = "items.jsonl"
IGNORED = -100
"""The label of a token that is not trained and not counted."""

Row = Mapping[str, Any]
"""A row of a tokenised split, with ``set``, ``index`` in the split and ``id`` of its content."""


def read_split(data: Path, split: str, *, limit: int | None = None, seed: int = 0) -> list[Row]:
    """The rows of ``DATA/<split>`` in order; a seeded sample of ``limit`` where there are more, and
    none where there are none.

    Raises :class:`StageError` for a missing split, for one without rows of which all were asked
    for, and for a row with nothing to score.
    """
    from datasets import load_from_disk

    folder = data / split
    if not folder.is_dir():
        raise StageError(f"{folder}: no such split; evaluate reads the output of tokenize_data")
    table = load_from_disk(str(folder))
    if not len(table) and limit is None:
        raise StageError(f"{folder}: no rows; hold some out in prepare_data")
    chosen = sample(len(table), limit, seed=seed)
    rows: list[Row] = [
        {"set": split, "index": index, "id": content_hash(row), **row}
        for index, row in zip(chosen, table.select(chosen).to_list(), strict=True)
    ]
    for row in rows:
        _require_something_to_score(row, folder)
    return rows


def sample(size: int, limit: int | None, *, seed: int) -> list[int]:
    """``limit`` of ``range(size)`` without repetition and in order, or all of it."""
    import numpy as np

    if limit is None or limit >= size:
        return list(range(size))
    return sorted(np.random.default_rng(seed).choice(size, limit, replace=False).tolist())


def content_hash(row: Mapping[str, Any]) -> str:
    """16 hex digits that change with any token of the row."""
    text = json.dumps(row, sort_keys=True, ensure_ascii=False)
    return hashlib.sha256(text.encode()).hexdigest()[:16]


def write(path: Path, rows: Iterable[Mapping[str, Any]]) -> None:
    """One JSON object a line, published whole."""
    write_atomically(path, lines.join(map(lines.dump, rows)))


def require_finite(items: Iterable[Mapping[str, Any]]) -> None:
    """Raise :class:`StageError` for the first row whose log-probability is not a number."""
    for item in items:
        for key in ("logp", "chosen_logp", "rejected_logp"):
            if not math.isfinite(item.get(key, 0.0)):
                raise StageError(
                    f"{item['set']} row {item['index']}: {key} is {item[key]}; the model is "
                    "broken, or its values overflow in this dtype (evaluate.config.dtype)"
                )


def read_matching(baseline: Path, rows: Sequence[Row]) -> list[Mapping[str, Any]]:
    """What the evaluation in ``baseline`` found for each of ``rows``, in their order.

    Raises :class:`StageError` when it was made on other data, because paired differences
    between different rows mean nothing.
    """
    path = baseline / NAME
    if not path.is_file():
        raise StageError(f"{path}: no such file; the baseline is an earlier output of evaluate")
    by_place = {(item["set"], item["index"]): item for item in lines.rows(path)}
    for row in rows:
        before = by_place.get((row["set"], row["index"]))
        if before is None or before["id"] != row["id"]:
            what = "was not scored" if before is None else f"was {before['id']}, now {row['id']}"
            raise StageError(
                f"{path}: made on other data ({row['set']} row {row['index']} {what}); evaluate "
                "both models on one tokenize_data output with the same train_pairs and seed"
            )
    return [by_place[row["set"], row["index"]] for row in rows]


def _require_something_to_score(row: Row, folder: Path) -> None:
    if "labels" in row:
        empty = all(label == IGNORED for label in row["labels"][1:])
    else:
        empty = not (row["prompt_ids"] and row["chosen_ids"] and row["rejected_ids"])
    if empty:
        raise StageError(f"{folder}: row {row['index']} has nothing to score; mend it in the data")
