"""Which tokens of a rendered conversation are the assistant's, verified turn by turn."""

import json
from bisect import bisect_right
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from itertools import pairwise
from typing import TYPE_CHECKING, Any

from stages.data import templates
from stages.data.rules import RowError
from stages.data.templates import Template
from stages.data.turns import Turn

if TYPE_CHECKING:
    import numpy as np

IGNORED = -100
"""The label of a token that is not trained."""


@dataclass(frozen=True)
class Talk:
    """A conversation to be tokenised."""

    turns: Sequence[Turn]
    tools: Sequence[Any] | None = None
    last_only: bool = False
    """Whether the last assistant turn alone is looked for."""


@dataclass(frozen=True)
class Masked:
    """A conversation as tokens, cut behind the stop token of its last assistant turn."""

    ids: "np.ndarray"
    spans: list[tuple[int, int]]
    """Half-open range of each assistant turn, its stop token included, in ``ids``."""

    prompt_ids: "np.ndarray"
    """What stands before the last assistant turn at inference, generation prompt included."""

    same_context: bool
    """Whether every assistant turn is trained behind exactly the ids it follows at inference."""

    trained: Sequence[bool]
    """For each span whether the data asks to train it."""

    def labels(self) -> "tuple[np.ndarray, int]":
        """``ids`` with :data:`IGNORED` outside the spans that are trained, and what these have."""
        import numpy as np

        labels, number = np.full(len(self.ids), IGNORED, dtype=np.int32), 0
        for (start, end), trained in zip(self.spans, self.trained, strict=True):
            if trained:
                labels[start:end] = self.ids[start:end]
                number += end - start
        return labels, number


@dataclass(frozen=True)
class Cut:
    """Where an assistant turn begins: behind so many special tokens and the ids of ``tail``."""

    num_special: int
    tail: str
    num_in_all: int
    """Special tokens in the whole text."""


@dataclass(frozen=True)
class Rendered:
    """A conversation as text, and where its assistant turns begin."""

    text: str
    trained: Sequence[bool]
    answers: Sequence[str]
    """What each of them says."""

    cuts: list[Cut | None]
    """For each answer; ``None`` where its prompt has to be tokenised by itself."""

    prompts: list[str]
    """For each answer what precedes it at inference; for a marked template what precedes it."""

    last_prompt: str


@dataclass(frozen=True)
class Tails:
    """Ids of what stands between the last special token and an answer: the same for most rows."""

    known: dict[str, list[int]] = field(default_factory=dict)

    def learn(self, template: Template, tails: Iterable[str]) -> None:
        fresh = list(dict.fromkeys(tail for tail in tails if tail not in self.known))
        if len(self.known) > 100_000:
            self.known.clear()
        found = templates.encode_pieces(template, fresh) if fresh else []
        self.known.update(zip(fresh, found, strict=True))


def mask(template: Template, talks: Sequence[Talk], tails: Tails) -> list[Masked | RowError]:
    """Render and tokenise every conversation and find the assistant's tokens.

    A template with generation marks says where an assistant turn begins. Else it begins at the
    first token where the whole rendering differs from the rendering of the turns before it with
    the generation prompt (a tokenizer may merge across the boundary). It ends with the first stop
    token. The value of a conversation that cannot be masked is its fault.

    Every text is tokenised once: special tokens split it, so the prompt's ids are those of the
    whole up to its last special token, and then those of the few characters that follow it.
    """
    rendered = [_rendered(template, talk) for talk in talks]
    good = [one for one in rendered if isinstance(one, Rendered)]
    ids = iter(templates.encode(template, [one.text for one in good]))
    cuts = [cut for one in good for cut in one.cuts if cut]
    tails.learn(template, [cut.tail for cut in cuts])
    return [
        _masked(template, one, next(ids), tails) if isinstance(one, Rendered) else one
        for one in rendered
    ]


# --- text


def _rendered(template: Template, talk: Talk) -> Rendered | RowError:
    turns = talk.turns
    answers = [index for index, turn in enumerate(turns) if turn["role"] == "assistant"]
    try:
        if not answers:
            raise RowError("no_trained_token", "there is no assistant turn")
        if answers[0] == 0:
            raise RowError("opens_with_assistant")
        templates.refuse_special_tokens(template, turns)
        answers = answers[-1:] if talk.last_only else answers
        trained = [turns[index].get("train", True) for index in answers]
        if not any(trained):
            raise RowError("no_trained_token", "every assistant turn asks not to be trained")
        if templates.compile_for(template, talk.tools).marks:
            return _by_marks(template, talk, answers, trained)
        return _by_prefixes(template, talk, answers, trained)
    except RowError as fault:
        return fault


def _by_prefixes(
    template: Template, talk: Talk, answers: Sequence[int], trained: Sequence[bool]
) -> Rendered:
    turns, tools = talk.turns, talk.tools
    whole = templates.render(template, turns, tools=tools)
    prompts = [
        templates.render(template, turns[:index], tools=tools, to_answer=True) for index in answers
    ]
    _verify_text(template, talk, answers, prompts, whole)
    _verify_turns(turns, whole)
    said = [turns[index]["content"] for index in answers]
    return Rendered(whole, trained, said, _cuts(template, whole, prompts), prompts, prompts[-1])


def _by_marks(
    template: Template, talk: Talk, answers: Sequence[int], trained: Sequence[bool]
) -> Rendered:
    """The template says where the answers are; that their texts stand there is checked."""
    whole, marks = templates.render_marked(template, talk.turns, tools=talk.tools)
    num_turns = sum(turn["role"] == "assistant" for turn in talk.turns)
    if not len(answers) <= len(marks) <= num_turns:
        detail = f"{len(marks)} generation marks for {num_turns} assistant turns"
        raise RowError("answer_rewritten", detail)
    marks = marks[-len(answers) :]
    _verify_tools(talk, whole)
    ends = [*(start for start, _ in marks[1:]), len(whole)]
    for index, (start, _), end in zip(answers, marks, ends, strict=True):
        _verify_answer(template, talk.turns[index], index, whole[start:end])
    _verify_turns(talk.turns, whole)
    before = [whole[:start] for start, _ in marks]
    said = [talk.turns[index]["content"] for index in answers]
    prompt = templates.render(template, talk.turns[: answers[-1]], tools=talk.tools, to_answer=True)
    return Rendered(whole, trained, said, _cuts(template, whole, before), before, prompt)


def _cuts(template: Template, whole: str, prompts: Sequence[str]) -> list[Cut | None]:
    """The end of each prompt with which ``whole`` begins, as seen from its last special token."""
    if not template.splits or template.special is None:
        return [None] * len(prompts)
    ends = [found.end() for found in template.special.finditer(whole)]
    numbers = [
        bisect_right(ends, len(prompt)) if whole.startswith(prompt) else 0 for prompt in prompts
    ]
    return [
        Cut(number, prompt[ends[number - 1] :], len(ends)) if number else None
        for number, prompt in zip(numbers, prompts, strict=True)
    ]


def _verify_text(
    template: Template, talk: Talk, answers: Sequence[int], prompts: Sequence[str], whole: str
) -> None:
    """The whole begins with each answer's history, and between two histories stands the answer."""
    turns = talk.turns
    _verify_tools(talk, whole)
    cuts = [0]
    for index, prompt in zip(answers, prompts, strict=True):
        history = prompt
        if not whole.startswith(prompt):
            # Some templates end a finished conversation with more than its turns (Phi-3 sets an
            # EOS): the history is what the finished and the awaiting rendering share.
            finished = templates.render(template, turns[:index], tools=talk.tools)
            history = prompt[: _num_common(finished, prompt)]
        question = turns[index - 1]["content"].strip()
        if not whole.startswith(history) or question not in history[cuts[-1] :]:
            raise RowError("history_rewritten", f"not so the turns before turn {index}")
        cuts.append(len(history))
    for index, (start, end) in zip(answers, pairwise([*cuts[1:], len(whole)]), strict=True):
        _verify_answer(template, turns[index], index, whole[start:end])


def _verify_answer(template: Template, turn: Turn, index: int, shown: str) -> None:
    """``shown``, what is rendered of an answer, has all of it before its first stop token."""
    content = turn["content"].strip()
    if content not in shown:
        raise RowError("answer_rewritten", f"turn {index} is rendered without its text")
    stops = [(at, stop) for stop in template.stops if (at := shown.find(stop)) >= 0]
    end, stop = min(stops, default=(len(shown), ""))
    if content not in shown[:end]:
        raise RowError("answer_cut", f"turn {index} goes on behind the stop token {stop!r}")
    _verify_calls(turn, index, shown[:end])


def _verify_calls(turn: Turn, index: int, shown: str) -> None:
    for call in turn.get("tool_calls", ()):
        if lost := _lost([call["function"]["name"], call["function"]["arguments"]], shown):
            detail = f"turn {index} is rendered without {lost!r} of its call"
            raise RowError("tools_not_rendered", detail)


def _verify_tools(talk: Talk, whole: str) -> None:
    for tool in talk.tools or ():
        function = tool["function"]
        parameters = function.get("parameters")
        known = parameters.get("properties") if isinstance(parameters, dict) else None
        said = [function["name"], function.get("description")]
        said += list(known) if isinstance(known, dict) else []
        if lost := _lost(said, whole):
            detail = f"the template leaves {lost!r} of the tool {function['name']} out"
            raise RowError("tools_not_rendered", detail)


def _lost(value: Any, shown: str) -> str | None:
    """A text, number or key in ``value`` that ``shown`` does not have, as it is or as JSON."""
    if isinstance(value, dict):
        value = [one for pair in value.items() for one in pair]
    if isinstance(value, list):
        return next((lost for one in value if (lost := _lost(one, shown))), None)
    if value is None:
        return None
    written = value.strip() if isinstance(value, str) else str(value)
    forms = (written, *(json.dumps(value, ensure_ascii=escaped) for escaped in (False, True)))
    if any(_bare(form) in shown for form in forms):
        return None
    return written[:40]


def _bare(form: str) -> str:
    return form[1:-1].strip() if len(form) > 1 and form[0] == form[-1] == '"' else form


def _verify_turns(turns: Sequence[Turn], whole: str) -> None:
    """Every turn's text is in ``whole``, in the turns' order; a system turn's may stand anywhere.

    Thoughts at the start of an earlier answer may be left out, as reasoning models' templates do.
    """
    place = 0
    last = len(turns) - 1
    for index, turn in enumerate(turns):
        said = turn["content"].strip()
        if turn["role"] == "system":
            if said not in whole:
                raise RowError("turn_not_rendered", f"the text of turn {index} (system) is missing")
            continue
        forms = [said]
        if turn["role"] == "tool":
            forms += [json.dumps(said, ensure_ascii=escaped)[1:-1] for escaped in (False, True)]
        if turn["role"] == "assistant" and "</think>" in said:
            forms += [said.rpartition("</think>")[2].strip()]
        if "tool_calls" in turn:
            _verify_calls(turn, index, whole[place:])
        if index == last and "reasoning_content" in turn:
            _verify_thoughts(turn, index, whole[place:])
        found = [at + len(form) for form in forms if (at := whole.find(form, place)) >= 0]
        if not found:
            detail = f"the text of turn {index} ({turn['role']}) is missing or out of its place"
            raise RowError("turn_not_rendered", detail)
        place = min(found)


def _verify_thoughts(turn: Turn, index: int, shown: str) -> None:
    thoughts = turn["reasoning_content"].strip()
    at = shown.find(thoughts)
    if at < 0 or turn["content"].strip() not in shown[at + len(thoughts) :]:
        raise RowError(
            "thoughts_not_rendered",
            f"turn {index} is rendered without its thoughts ({thoughts[:40]!r}); use a template "
            "that shows reasoning_content, or set prepare_data.config.columns.ignored to their key",
        )


def _num_common(ours: Sequence[Any], theirs: Sequence[Any]) -> int:
    """The length of the longest common prefix."""
    if theirs[: len(ours)] == ours:
        return len(ours)
    return next(n for n, one in enumerate(ours) if n == len(theirs) or one != theirs[n])


# --- tokens


def _masked(
    template: Template, rendered: Rendered, ids: list[int], tails: Tails
) -> Masked | RowError:
    try:
        return _verified(template, rendered, ids, tails)
    except RowError as fault:
        return fault


def _verified(template: Template, rendered: Rendered, ids: list[int], tails: Tails) -> Masked:
    import numpy as np

    if len(ids) > 1 and ids[0] == ids[1] == template.tokenizer.bos_token_id:
        raise RowError("two_bos", "the rendering begins with two BOS tokens")
    array = np.array(ids, dtype=np.int32)
    prompts = _prompts(template, rendered, array, tails)
    starts = [first + _num_common(own, ids[first : first + len(own)]) for first, own in prompts]
    ends = _ends(template, array, starts)
    _verify_plain_stops(template, rendered, array, list(zip(starts, ends, strict=True)))
    first, own = prompts[-1]
    last = trained_behind = [*ids[:first], *own]
    if rendered.last_prompt != rendered.prompts[-1]:
        last = templates.encode(template, [rendered.last_prompt])[0]
    same = all(
        first + len(own) == start for (first, own), start in zip(prompts, starts, strict=True)
    )
    whole = array[: ends[-1]]
    return Masked(
        ids=whole,
        spans=list(zip(starts, ends, strict=True)),
        prompt_ids=(
            whole[: starts[-1]] if len(last) == starts[-1] else np.array(last, dtype=np.int32)
        ),
        same_context=same and last == trained_behind,
        trained=rendered.trained,
    )


def _prompts(
    template: Template, rendered: Rendered, ids: "np.ndarray", tails: Tails
) -> list[tuple[int, list[int]]]:
    """The prompt of each answer, as so many of ``ids`` and then ids of its own.

    Where ids are special that no special token's text became, as the unknown token is, a cut tells
    nothing.
    """
    shift = int(template.leading_bos is not None and _bos_was_set(template, rendered))
    special = template.is_special[ids].nonzero()[0][shift:].tolist()
    return [
        (special[cut.num_special - 1] + 1, tails.known[cut.tail])
        if cut and cut.num_in_all == len(special)
        else (0, templates.encode(template, [prompt])[0])
        for cut, prompt in zip(rendered.cuts, rendered.prompts, strict=True)
    ]


def _bos_was_set(template: Template, rendered: Rendered) -> bool:
    """Whether the first id is not of the text, but the BOS that was set before it."""
    found = template.special.match(rendered.text) if template.special else None
    return not (
        found and template.tokenizer.convert_tokens_to_ids(found[0]) == template.leading_bos
    )


def _ends(template: Template, ids: "np.ndarray", starts: Sequence[int]) -> list[int]:
    """Where each span ends: behind the first stop token, which must come before the next span."""
    stops = template.is_stop[ids].nonzero()[0]
    found = stops.searchsorted(starts).tolist()
    ends = []
    for place, (start, following) in zip(found, pairwise([*starts, len(ids)]), strict=True):
        end = int(stops[place]) + 1 if place < len(stops) else following + 1
        if end > following:
            raise RowError("no_stop_token", _closing(template, ids[start:following]))
        ends.append(end)
    return ends


def _closing(template: Template, ids: "np.ndarray") -> str:
    """With what an answer is closed that has no stop token."""
    unknown = template.tokenizer.unk_token_id
    special = [one for one in ids[template.is_special[ids]].tolist() if one != unknown]
    if not special:
        return "the template closes an answer with no special token"
    token = template.tokenizer.convert_ids_to_tokens(special[0])
    return (
        f"the template closes an answer with {token!r}, which ends no generation; add its id "
        f"{special[0]} to eos_token_id in the model's generation_config.json"
    )


def _verify_plain_stops(
    template: Template, rendered: Rendered, ids: "np.ndarray", spans: Sequence[tuple[int, int]]
) -> None:
    """An answer that ends where ordinary text ends generation is nevertheless whole."""
    for said, (start, end) in zip(rendered.answers, spans, strict=True):
        if template.plain_stops and int(ids[end - 1]) in template.plain_stops:
            shown = template.tokenizer.decode(ids[start:end].tolist())
            if said.strip() not in shown:
                detail = f"an answer goes on behind {shown[-1:]!r}, which ends generation"
                raise RowError("answer_cut", detail)
