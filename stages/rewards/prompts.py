"""The prompts of a tokenised data set, as messages and as token ids."""

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from stages.base import StageError

OF_SFT = ("input_ids", "labels", "length")
"""Columns that say nothing of a prompt."""


def read(data: Path, split: str = "train") -> Any:
    """The conversations of ``DATA/conversations/<split>`` (an output of tokenize_data).

    A ``datasets.Dataset`` with ``prompt_ids``, ``answer``, and as JSON ``prompt``, the messages
    before the answer, and ``tools``. Raises ``StageError`` when there are none.
    """
    from datasets import load_from_disk

    folder = data / "conversations" / split
    if not folder.is_dir():
        raise StageError(f"{folder}: no such split; prompts are those of tokenised conversations")
    rows: Any = load_from_disk(str(folder))
    if not len(rows):
        raise StageError(f"{folder}: no rows; see the data stage's report.json")
    return rows.remove_columns([name for name in OF_SFT if name in rows.column_names])


def messages(row: Mapping[str, Any], tokenizer: Any) -> list[dict[str, Any]]:
    """The messages before the answer of ``row``.

    A row without them, which tokenize_data does not write, is one user turn: the prompt's text.
    """
    if found := row.get("prompt"):
        return json.loads(found)
    text = tokenizer.decode(list(row["prompt_ids"]), skip_special_tokens=True)
    return [{"role": "user", "content": text}]


def facts(rows: Sequence[Mapping[str, Any]]) -> list[dict[str, Any]]:
    """What reward functions see of each row: everything but token ids and the messages' JSON.

    ``tools`` is there as a list, and only where the row has some.
    """
    hidden = (*OF_SFT, "prompt_ids", "prompt", "tools")
    return [{key: row[key] for key in row if key not in hidden} | _tools(row) for row in rows]


def _tools(row: Mapping[str, Any]) -> dict[str, Any]:
    found = json.loads(row.get("tools") or "[]")
    return {"tools": found} if found else {}
