"""Rewards: verifiable functions and reward models behind one interface.

A stage that needs rewards has the field ``rewards: tuple[Reward, ...]`` (`stages.rewards.config`),
reads its prompts with `stages.rewards.prompts`, and calls ``load(...)`` once and the `Scorer` that
it gives for each batch of completions.
"""

from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

from stages.rewards import prompts
from stages.rewards.config import TOTAL, Reward, names
from stages.rewards.model import RewardModel
from stages.rewards.scorer import RewardError, Scorer, Term, find
from stages.rewards.verifiable import COMPARING

__all__ = ["TOTAL", "RewardError", "Scorer", "check_rows", "load", "prompts"]


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


def check_rows(
    scorer: Scorer,
    rows: Iterable[Mapping[str, Any]],
    tokenizer: Any,
    *,
    max_new_tokens: int,
) -> None:
    """Raise ``StageError`` for a row that cannot be rated, which would be found out in the middle
    of the work: one in which a built-in reward finds nothing to compare with, and a prompt that
    leaves a reward model no room for the answer.

    ``rows`` are those of `prompts.read`, or of `stages.evaluation.items`, and ``tokenizer`` the
    policy's.
    """
    comparing = [each for each in scorer.terms if each.function in COMPARING]
    if not (comparing or scorer.judges):
        return
    messages, facts, places = [], [], []
    for number, row in enumerate(rows):
        place = f"{row.get('set', 'conversations/train')}, row {row.get('index', number)}"
        (fact,) = prompts.facts([row])
        for term in comparing:
            _check_reference(term, fact, place)
        if scorer.judges:
            messages.append(prompts.messages(row, tokenizer))
            facts.append(fact)
            places.append(place)
    for judge in scorer.judges:
        judge.check_room(messages, facts, places, answer=max_new_tokens)


def _check_reference(term: Term, row: Mapping[str, Any], place: str) -> None:
    try:
        term.function([[]], [""], [row], **term.options)
    except ValueError as error:
        raise RewardError(
            f"{place}: reward {term.name}: {error}; mend the row, or leave it out of the data"
        ) from None
