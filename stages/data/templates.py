"""A model's chat template with its tokenizer: conversations to text, text to ids."""

import json
import re
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from stages.base import StageError
from stages.data.rules import RowError
from stages.data.shapes import Turn


@dataclass(frozen=True)
class Template:
    """What turns conversations into token ids, the same way in training and in serving."""

    tokenizer: Any
    stop_ids: frozenset[int]
    """Ids that end generation: the tokenizer's EOS and those of ``generation_config.json``."""

    leading_bos: int | None
    """The BOS that the tokenizer sets before every text, or ``None`` where it sets none."""

    special: re.Pattern[str] | None
    """Finds the text of a special token."""


def load(folder: Path) -> Template:
    """The template of the checkpoint in ``folder``. Raises :class:`StageError`, never downloads."""
    from transformers import AutoTokenizer

    try:
        tokenizer = AutoTokenizer.from_pretrained(folder, local_files_only=True)
    except (OSError, ValueError) as error:
        raise StageError(
            f"{folder}: no tokenizer can be loaded ({str(error).splitlines()[0]}); "
            "fetch a model that carries its tokenizer files"
        ) from None
    if not tokenizer.chat_template:
        raise StageError(
            f"{folder}: the tokenizer has no chat template, so conversations cannot be rendered; "
            "put its chat_template.jinja beside the tokenizer, or fetch the model's chat variant"
        )
    stop_ids = _stop_ids(folder, tokenizer)
    if not stop_ids:
        raise StageError(
            f"{folder}: neither the tokenizer nor generation_config.json names an EOS token, "
            "so no answer could end; set eos_token in tokenizer_config.json"
        )
    return Template(tokenizer, stop_ids, _leading_bos(tokenizer), _special(tokenizer))


def _stop_ids(folder: Path, tokenizer: Any) -> frozenset[int]:
    path = folder / "generation_config.json"
    listed = json.loads(path.read_text()).get("eos_token_id") if path.exists() else None
    ids = listed if isinstance(listed, list) else [listed]
    return frozenset(one for one in (*ids, tokenizer.eos_token_id) if one is not None)


def _leading_bos(tokenizer: Any) -> int | None:
    bos = tokenizer.bos_token_id
    return bos if bos is not None and tokenizer("a")["input_ids"][:1] == [bos] else None


def _special(tokenizer: Any) -> re.Pattern[str] | None:
    added = {str(one) for one in tokenizer.added_tokens_decoder.values() if one.special}
    texts = sorted(added | set(tokenizer.all_special_tokens), key=lambda one: (-len(one), one))
    return re.compile("|".join(map(re.escape, texts))) if texts else None


def refuse_special_tokens(template: Template, turns: Sequence[Turn]) -> None:
    """Raise :class:`RowError` where a turn's text would be read as a special token."""
    for index, turn in enumerate(turns):
        found = template.special and template.special.search(turn["content"])
        if found:
            raise RowError(
                "special_token_in_text", f"turn {index} ({turn['role']}) holds {found[0]!r}"
            )


def render(template: Template, turns: Sequence[Turn], *, to_answer: bool = False) -> str:
    """The text of ``turns``; ``to_answer`` adds what stands before an answer at inference.

    Raises :class:`RowError` where the template refuses.
    """
    from jinja2 import TemplateError

    try:
        return template.tokenizer.apply_chat_template(
            list(turns), tokenize=False, add_generation_prompt=to_answer
        )
    except TemplateError as error:
        raise RowError("cannot_be_rendered", f"the chat template says: {error}") from None


def encode(template: Template, texts: Sequence[str]) -> list[list[int]]:
    """The ids of rendered texts, each with one BOS if the model's texts begin with one.

    A template that writes BOS is taken at its word; else the tokenizer's own is set once.
    """
    bos = template.leading_bos
    encoded = template.tokenizer(list(texts), add_special_tokens=False)["input_ids"]
    return [ids if bos is None or ids[:1] == [bos] else [bos, *ids] for ids in encoded]
