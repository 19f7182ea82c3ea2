"""What PPO and GRPO ask of a policy and of the prompts before they start. It loads no torch."""

from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

from stages.base import StageError


def refuse_adapter(folder: Path) -> None:
    """Raise ``StageError`` where ``folder`` holds an adapter, and so no whole policy."""
    if (folder / "adapter_config.json").exists():
        raise StageError(f"{folder}: an adapter without its base; give what convert makes of it")


def check_prompts(
    prompts: Sequence[Sequence[int]], models: Mapping[str, Any], *, max_new_tokens: int
) -> None:
    """Raise ``StageError`` for a prompt that is empty, that leaves no room for its answer, or that
    holds a token which the policy does not know.

    ``models`` are the configs of the models that read prompts with their answers, by the names that
    an error gives them, that of the ``policy`` among them.
    """
    empty = next((row for row, ids in enumerate(prompts) if not len(ids)), None)
    if empty is not None:
        raise StageError(f"conversations/train, row {empty}: its prompt is empty")
    longest = max(range(len(prompts)), key=lambda row: len(prompts[row]))
    for name, config in models.items():
        room = getattr(config.get_text_config(), "max_position_embeddings", None)
        if room is not None and len(prompts[longest]) + max_new_tokens > room:
            raise StageError(
                f"conversations/train, row {longest}: a prompt of {len(prompts[longest])} tokens "
                f"and max_new_tokens {max_new_tokens} exceed the context of {room} of the {name}; "
                "lower max_new_tokens, or tokenize_data.config.max_length"
            )
    largest, known = max(map(max, prompts)), models["policy"].get_text_config().vocab_size
    if largest >= known:
        raise StageError(
            f"the prompts hold token {largest}, and the policy knows {known}; "
            "tokenise the data with this policy's tokenizer"
        )


def require_stops(ids: Iterable[int | None], folder: Path) -> tuple[int, ...]:
    """The ``ids`` that there are of tokens that end an answer. Raises ``StageError`` for none."""
    found = tuple(each for each in ids if each is not None)
    if not found:
        raise StageError(
            f"{folder}: neither generation_config.json nor the tokenizer names an eos token, so "
            "no answer would end; add eos_token_id"
        )
    return found
