"""The longest row of each training split, over and over: what a memory probe trains on."""

from pathlib import Path
from typing import Any

from pydantic import PositiveInt

from configs import Config
from stages.base import Context, Metrics, StageError


class LongestRows(Config):
    rows: PositiveInt
    """Copies of the longest row in each split that is written."""


def longest_rows(config: LongestRows, ctx: Context, *, data: Path) -> Metrics:
    """Write ``{conversations,preferences}/train`` as tokenize_data does, of one row repeated.

    ``DATA`` is an output of tokenize_data. Returns the tokens of the row under
    ``<kind>/train/longest``, of a pair both sides as padded. Raises ``StageError`` when there is no
    training split.
    """
    from datasets import disable_progress_bars, load_from_disk

    disable_progress_bars()
    found: dict[str, float] = {}
    for split in sorted(data.glob("*/train")):
        rows: Any = load_from_disk(str(split))
        lengths = [_length(row) for row in rows]
        longest = max(range(len(lengths)), key=lengths.__getitem__)
        name = split.relative_to(data)
        rows.select([longest] * config.rows).save_to_disk(str(ctx.out / name))
        found[f"{name.parent}/train/longest"] = lengths[longest]
    if not found:
        raise StageError(f"{data}: holds no training split; give an output of tokenize_data")
    return found


def _length(row: dict[str, Any]) -> int:
    if "input_ids" in row:
        return len(row["input_ids"])
    side = max(len(row["chosen_ids"]), len(row["rejected_ids"]))  # the other is padded to it
    return 2 * (len(row["prompt_ids"]) + side)
