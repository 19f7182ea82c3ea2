"""A small untrained model with the unit-conversion task, prepared and tokenised by the stages."""

from pathlib import Path
from typing import Any

from stages.base import Context
from stages.fetch import Fetch, fetch
from stages.prepare_data import PrepareData, prepare_data
from stages.tokenize_data import TokenizeData, tokenize_data


def write_task(out: Path, *, conversations: int = 240, preferences: int = 240) -> Path:
    """``OUT/base`` (a fetched model), ``OUT/prepared`` and ``OUT/data`` (tokenised for it)."""
    model: dict[str, Any] = {"kind": "new_model", "hidden_size": 64, "intermediate_size": 128}
    _fetch(out / "base", model)
    for part, rows in (("conversations", conversations), ("preferences", preferences)):
        _fetch(out / part, {"kind": "new_task", "part": part, "rows": rows})
    prepare_data(
        PrepareData(test_fraction=0.2),
        Context(out / "prepared"),
        conversations=out / "conversations",
        preferences=out / "preferences",
    )
    tokenize_data(
        TokenizeData(max_length=128),
        Context(out / "data"),
        model=out / "base",
        data=out / "prepared",
    )
    return out


def _fetch(out: Path, source: dict[str, Any]) -> None:
    fetch(Fetch.model_validate({"source": source}), Context(out))
