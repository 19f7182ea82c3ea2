"""Which tokens a model reads in the rows: only models that read the same can be compared."""

import json
from collections.abc import Mapping, Sequence
from pathlib import Path

from stages.base import StageError
from stages.checkpoint.conversation import has_tokenizer, load_tokenizer
from stages.evaluation.items import Row
from stages.manifest import write_atomically

NAME = "tokens.json"
IDS = ("input_ids", "prompt_ids", "chosen_ids", "rejected_ids")

Tokens = Mapping[int, str | None]
"""The token of each id; ``None`` for an id that the tokenizer does not know.

Hashes of a tokenizer's files would not do: the same one is saved in other files by another version,
and tokens that are added for a training change nothing in rows without them.
"""


def read(folder: Path, rows: Sequence[Row]) -> Tokens:
    """What the tokenizer in ``folder`` reads in ``rows``; nothing where there is none."""
    if not has_tokenizer(folder):
        return {}
    tokenizer = load_tokenizer(folder)
    known = range(len(tokenizer))  # sentencepiece raises beyond
    ids = sorted({number for row in rows for key in IDS for number in row.get(key, ())})
    return {
        number: tokenizer.convert_ids_to_tokens(number) if number in known else None
        for number in ids
    }


def write(out: Path, tokens: Tokens) -> None:
    """Leave ``tokens`` in an evaluation's output, for those that are compared with it."""
    if tokens:
        write_atomically(out / NAME, json.dumps(tokens, ensure_ascii=False))


def written(out: Path) -> Tokens:
    """The tokens that an evaluation left; nothing where it left none."""
    path = out / NAME
    known = json.loads(path.read_text(encoding="utf-8")) if path.is_file() else {}
    return {int(number): token for number, token in known.items()}


def require_same(ours: Tokens, theirs: Tokens, *, folder: Path, other: Path) -> None:
    """Raise :class:`StageError` for the first id in which ``other``'s model reads another token
    than the one in ``folder``."""
    for number in sorted(ours.keys() & theirs.keys()):
        if ours[number] != theirs[number]:
            refuse(folder, other, f" ({theirs[number]!r} for {ours[number]!r} in token {number})")


def refuse(folder: Path, other: Path, where: str = "") -> None:
    """Raise :class:`StageError`: ``other`` cannot be compared with the model in ``folder``."""
    raise StageError(
        f"{other}: its model read other words in the same tokens than {folder} does{where}, so no "
        "difference between them means anything; compare models of one tokenizer"
    )
