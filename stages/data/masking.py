"""Which tokens of a rendered conversation are the assistant's, verified turn by turn."""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Any

from stages.data import templates
from stages.data.rules import RowError
from stages.data.shapes import Turn
from stages.data.templates import Template

IGNORED = -100
"""The label of a token that is not trained."""


@dataclass(frozen=True)
class Masked:
    """A conversation as tokens, cut behind the stop token of its last assistant turn."""

    ids: list[int]
    spans: list[tuple[int, int]]
    """Half-open range of each assistant turn, its stop token included, in ``ids``."""

    prompt_ids: list[int]
    """What stands before the last assistant turn at inference, generation prompt included."""

    same_context: bool
    """Whether every assistant turn is trained behind exactly the ids it follows at inference."""

    @property
    def labels(self) -> list[int]:
        """``ids`` with :data:`IGNORED` outside the spans."""
        labels = [IGNORED] * len(self.ids)
        for start, end in self.spans:
            labels[start:end] = self.ids[start:end]
        return labels


def mask(template: Template, turns: Sequence[Turn], *, last_only: bool = False) -> Masked:
    """Render and tokenise ``turns`` and find the assistant's tokens by the prefix method.

    For an assistant turn, the turns before it are rendered up to and including the generation
    prompt. The turn begins at the first token where the whole rendering differs from that prompt
    (a tokenizer may merge across the boundary) and ends with the first stop token. ``last_only``
    finds the last assistant turn alone. Raises :class:`RowError`.
    """
    answers = [index for index, turn in enumerate(turns) if turn["role"] == "assistant"]
    if not answers:
        raise RowError("no_trained_token", "there is no assistant turn")
    if answers[0] == 0:
        raise RowError("opens_with_assistant")
    templates.refuse_special_tokens(template, turns)
    answers = answers[-1:] if last_only else answers
    whole = templates.render(template, turns)
    prompts = [templates.render(template, turns[:index], to_answer=True) for index in answers]
    _verify_text(template, turns, answers, prompts, whole)
    ids, *prompt_ids = templates.encode(template, [whole, *prompts])
    if len(ids) > 1 and ids[0] == ids[1] == template.tokenizer.bos_token_id:
        raise RowError("two_bos")
    starts = [_num_common(one, ids) for one in prompt_ids]
    ends = _ends(template, ids, starts)
    return Masked(
        ids=ids[: ends[-1]],
        spans=list(zip(starts, ends, strict=True)),
        prompt_ids=prompt_ids[-1],
        same_context=all(len(one) == start for one, start in zip(prompt_ids, starts, strict=True)),
    )


def _verify_text(
    template: Template,
    turns: Sequence[Turn],
    answers: Sequence[int],
    prompts: Sequence[str],
    whole: str,
) -> None:
    """The whole begins with each answer's history, and between two histories stands the answer."""
    cuts = [0]
    for index, prompt in zip(answers, prompts, strict=True):
        # Some templates end a finished conversation with more than its turns (Phi-3 sets an EOS):
        # the history is what the finished and the awaiting rendering share.
        history = prompt[: _num_common(templates.render(template, turns[:index]), prompt)]
        question = turns[index - 1]["content"].strip()
        if not whole.startswith(history) or question not in history[cuts[-1] :]:
            raise RowError("history_rewritten", f"the turns before turn {index}")
        cuts.append(len(history))
    for index, (start, end) in zip(answers, pairwise([*cuts[1:], len(whole)]), strict=True):
        if turns[index]["content"].strip() not in whole[start:end]:
            raise RowError("answer_rewritten", f"turn {index} is rendered without its text")


def _num_common(ours: Sequence[Any], theirs: Sequence[Any]) -> int:
    """The length of the longest common prefix."""
    if theirs[: len(ours)] == ours:
        return len(ours)
    return next(n for n, one in enumerate(ours) if n == len(theirs) or one != theirs[n])


def _ends(template: Template, ids: Sequence[int], starts: Sequence[int]) -> list[int]:
    """Where each span ends: behind the first stop token, which must come before the next span."""
    ends = []
    for start, following in pairwise([*starts, len(ids)]):
        end = _behind_stop(template, ids[start:following])
        if end is None:
            raise RowError("no_stop_token", f"between the tokens {start} and {following}")
        ends.append(start + end)
    return ends


def _behind_stop(template: Template, ids: Iterable[int]) -> int | None:
    return next((n for n, one in enumerate(ids, 1) if one in template.stop_ids), None)
