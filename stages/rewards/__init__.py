"""Rewards: verifiable functions and reward models behind one interface.

A stage that needs rewards has the field ``rewards: tuple[Reward, ...]`` (`stages.rewards.config`),
reads its prompts with `stages.rewards.prompts`, and calls ``load(...)`` once and the `Scorer` that
it gives for each batch of completions.
"""

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from stages.rewards import prompts
from stages.rewards.config import Reward, names
from stages.rewards.model import RewardModel
from stages.rewards.scorer import TOTAL, RewardError, Scorer, Term, find

__all__ = ["TOTAL", "RewardError", "Scorer", "check_room", "load", "prompts"]


def load(
    specs: Sequence[Reward],
    inputs: Mapping[str, Path],
    device: str,
    *,
    batch_size: int = 16,
) -> Scorer:
    """The scorer of ``specs``; ``inputs["reward"]`` is the output that holds a reward ``model/``.

    The reward model is loaded whole on ``device`` and takes ``batch_size`` rows at a time. Raises
    :class:`RewardError` for a function that cannot be imported, ``StageError`` for a folder that
    holds no reward model.
    """
    if not specs:
        raise RewardError("no reward is named; give rewards a function, or model: true")
    terms = []
    for name, spec in zip(names(specs), specs, strict=True):
        if spec.model:
            if not (folder := inputs.get("reward")):
                raise RewardError(f"reward {name}: the stage was given no input `reward`")
            model = RewardModel.load(folder / "model", device=device, batch_size=batch_size)
            terms.append(Term(name, model, spec.weight))
        else:
            terms.append(Term(name, find(spec), spec.weight, spec.options))
    return Scorer(tuple(terms))


def check_room(
    scorer: Scorer,
    rows: Sequence[Mapping[str, Any]],
    tokenizer: Any,
    *,
    max_new_tokens: int,
) -> None:
    """Raise ``StageError`` for a prompt that leaves a reward model no room for the answer, which
    would be found out in the middle of the work.

    ``rows`` are those of `prompts.read`, or of `stages.evaluation.items`, and ``tokenizer`` the
    policy's.
    """
    models = [each.function for each in scorer.terms if isinstance(each.function, RewardModel)]
    if not models:
        return
    asked = list(rows)
    messages = [prompts.messages(row, tokenizer) for row in asked]
    places = [
        f"{row.get('set', 'conversations/train')}, row {row.get('index', number)}"
        for number, row in enumerate(asked)
    ]
    for model in models:
        model.check_room(messages, prompts.facts(asked), places, answer=max_new_tokens)
