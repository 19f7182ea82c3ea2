"""Rows of text to rows of token ids for one model, many at a time."""

import zlib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any, Literal

from stages.base import StageError
from stages.data import lines, masking, quarantine, templates
from stages.data.conversations import Canonical, Kind
from stages.data.masking import Masked, Tails, Talk
from stages.data.origins import Origins
from stages.data.places import Place
from stages.data.rules import RowError
from stages.data.templates import Template

if TYPE_CHECKING:
    import numpy as np

GATED = 100
"""So many rows of each split are compared with transformers' own ids,"""

GATED_LATER = 500
"""and then one in so many, chosen by content."""


@dataclass(frozen=True)
class Fitting:
    """How rows are cut and masked."""

    max_length: int
    on_overflow: Literal["drop", "error", "truncate_prompt"]
    assistant_only_loss: bool


@dataclass(frozen=True)
class Tokens:
    """One row as token ids."""

    columns: Mapping[str, Any]
    """Arrays of int32, a text or a truth by the name of the column."""

    length: int
    """Tokens in the row; of a pair, in its prompt with the longer answer."""

    num_tokens: int
    num_trained: int
    same_context: bool
    """Whether training sees before each answer exactly what inference sees."""

    truncated: bool = False


@dataclass(frozen=True)
class Block:
    """Some rows one after another, by column, and what was kept out of them."""

    columns: dict[str, Any]
    """``(values, lengths)`` of lists of int32, or a list of texts or truths."""

    lengths: "np.ndarray"
    num_read: int
    num_tokens: int
    num_trained: int
    num_mismatched: int
    num_truncated: int
    rejects: list[tuple[int, RowError, str]]
    """Line, fault and row."""


@dataclass(frozen=True)
class Tokenizing:
    """What the rows of one split need, and what was learnt on the way."""

    template: Template
    fitting: Fitting
    kind: Kind
    file: str
    """The split's name in messages."""

    origins: Origins | None = None
    """Where the user's own files have the rows."""

    tails: Tails = field(default_factory=Tails)

    def place(self, number: int) -> Place:
        """Where line ``number`` of the split comes from."""
        origin = self.origins.of(number) if self.origins else None
        return Place(self.file, line=number, origin=origin)


def block(work: Tokenizing, first: int, rows: Sequence[bytes]) -> Block:
    """Tokenise the lines ``rows``, of which the first is line ``first`` of its file.

    Raises :class:`StageError` for a row that is too long where that is to be an error, and for ids
    that are not the template's.
    """
    values = [_value(work, row, number) for number, row in enumerate(rows, first)]
    talks = [_talks(value) for value in values]
    masked = iter(masking.mask(work.template, [one for few in talks for one in few], work.tails))
    kept: list[Tokens] = []
    rejects: list[tuple[int, RowError, str]] = []
    for number, (row, value, few) in enumerate(zip(rows, values, talks, strict=True), first):
        found = [next(masked) for _ in few]
        try:
            if number <= GATED or zlib.crc32(row) % GATED_LATER == 0:
                _compare(work, few, found, work.place(number))
            kept.append(_fit(work, value, _tokens(work, value, found), number))
        except RowError as fault:
            rejects.append((number, fault, quarantine.excerpt(row.decode().rstrip("\n"))))
    return _gathered(kept, rejects, num_read=len(rows))


def _value(work: Tokenizing, line: bytes, number: int) -> Canonical:
    """The row on a line. Raises :class:`StageError` for what prepare_data does not write."""
    row: Any
    try:
        row = lines.load(line)
    except (ValueError, RecursionError) as error:
        row = str(error)
    if not _is_row(row, work.kind):
        what = row if isinstance(row, str) else f"no row of {work.kind}"
        raise StageError(
            f"{Place(work.file, line=number)}: damaged ({what}); prepare the data again"
        )
    return row


def _is_row(row: Any, kind: Kind) -> bool:
    if not isinstance(row, dict) or not isinstance(row.get("tools", []), list):
        return False
    if kind == "conversations" and "text" in row:
        return isinstance(row["text"], str)
    names = {
        "conversations": ("messages",),
        "preferences": ("prompt", "chosen", "rejected"),
        "unpaired": ("prompt", "completion"),
    }[kind]
    return all(
        isinstance(row.get(name), list)
        and all(
            isinstance(turn, dict)
            and isinstance(turn.get("role"), str)
            and isinstance(turn.get("content"), str)
            for turn in row[name]
        )
        for name in names
    ) and isinstance(row.get("label", False), bool)


def _talks(row: Canonical) -> list[Talk]:
    tools = row.get("tools")
    if "messages" in row:
        return [Talk(templates.with_every_name(row["messages"]), tools)]
    sides = [row[side] for side in ("chosen", "rejected", "completion") if side in row]
    talks = [templates.with_every_name(row["prompt"] + side) for side in sides]
    return [Talk(turns, tools, last_only=True) for turns in talks]


def _compare(
    work: Tokenizing, talks: Sequence[Talk], found: Sequence[Masked | RowError], place: Place
) -> None:
    """The template gate: what is trained is what the model's own folder makes of the row."""
    for talk, ours in zip(talks, found, strict=True):
        if isinstance(ours, RowError):
            continue
        theirs = templates.by_transformers(work.template, talk.turns, tools=talk.tools)
        ids = ours.ids.tolist()
        if theirs[:1] != ids[:1] and ids[:1] == [work.template.leading_bos]:
            theirs = [*ids[:1], *theirs]  # BOS is the tokenizer's and not the template's
        if theirs[: len(ids)] != ids:
            at = next(n for n, one in enumerate(ids) if theirs[n : n + 1] != [one])
            raise StageError(
                f"{place}: token {at} is {ids[at]}, but {work.template.folder} renders "
                f"{theirs[at : at + 1]}: its chat template gives the same row in two ways; "
                "use a template that depends on the conversation alone"
            )


def _tokens(work: Tokenizing, row: Canonical, found: Sequence[Masked | RowError]) -> Tokens:
    for one in found:
        if isinstance(one, RowError):
            raise one
    good = [one for one in found if isinstance(one, Masked)]
    if "text" in row:
        return _text(work.template, row["text"])
    if "messages" in row:
        return _conversation(work, row, good[0])
    return _judged(row, good[0]) if "completion" in row else _pair(good[0], good[1])


def _conversation(work: Tokenizing, row: Canonical, masked: Masked) -> Tokens:
    labels, num_trained = masked.ids, len(masked.ids)
    if work.fitting.assistant_only_loss:
        labels, num_trained = masked.labels()
    turns = row["messages"]
    last = next(n for n in reversed(range(len(turns))) if turns[n]["role"] == "assistant")
    return Tokens(
        columns={
            "input_ids": masked.ids,
            "labels": labels,
            "prompt_ids": masked.prompt_ids,
            "prompt": lines.dump(turns[:last]),
            "tools": lines.dump(row["tools"]) if row.get("tools") else "[]",
            "answer": turns[last]["content"],
        },
        length=len(masked.ids),
        num_tokens=len(masked.ids),
        num_trained=num_trained,
        same_context=masked.same_context,
    )


def _text(template: Template, content: str) -> Tokens:
    """A text is trained as a whole and ends with EOS; its first token stands for its prompt."""
    import numpy as np

    if found := templates.special_token(template, content):
        raise RowError("special_token_in_text", f"the text holds {found!r}")
    end = template.tokenizer.eos_token_id
    stop = min(template.stop_ids) if end is None else end
    ids = np.array([*templates.encode(template, [content])[0], stop], dtype=np.int32)
    if len(ids) < 2:
        raise RowError("no_trained_token")
    return Tokens(
        columns={
            "input_ids": ids,
            "labels": ids,
            "prompt_ids": ids[:1],
            "prompt": "[]",
            "tools": "[]",
            "answer": content,
        },
        length=len(ids),
        num_tokens=len(ids),
        num_trained=len(ids),
        same_context=True,
    )


def _pair(chosen: Masked, rejected: Masked) -> Tokens:
    if chosen.ids.tolist() == rejected.ids.tolist():
        raise RowError("chosen_equals_rejected", "both answers become the same tokens")
    # A tokenizer may merge the prompt's end into one answer and not into the other, and a mark may
    # stand behind an answer's thoughts: the prompt of a pair is what both share before either
    # answer begins.
    first = min(chosen.spans[-1][0], rejected.spans[-1][0])
    differ = (chosen.ids[:first] != rejected.ids[:first]).nonzero()[0]
    start = int(differ[0]) if len(differ) else first
    num_tokens = len(chosen.ids) + len(rejected.ids)
    return Tokens(
        columns={
            "prompt_ids": chosen.ids[:start],
            "chosen_ids": chosen.ids[start:],
            "rejected_ids": rejected.ids[start:],
        },
        length=max(len(chosen.ids), len(rejected.ids)),
        num_tokens=num_tokens,
        num_trained=num_tokens - 2 * start,
        same_context=chosen.same_context and rejected.same_context,
    )


def _judged(row: Canonical, masked: Masked) -> Tokens:
    start = masked.spans[-1][0]
    return Tokens(
        columns={
            "prompt_ids": masked.ids[:start],
            "completion_ids": masked.ids[start:],
            "label": row["label"],
        },
        length=len(masked.ids),
        num_tokens=len(masked.ids),
        num_trained=len(masked.ids) - start,
        same_context=masked.same_context,
    )


# --- length


def _fit(work: Tokenizing, row: Canonical, tokens: Tokens, number: int) -> Tokens:
    """``row`` within ``max_length``. Raises :class:`RowError`, or :class:`StageError` if asked."""
    limit, length = work.fitting.max_length, tokens.length
    if length <= limit:
        return tokens
    if work.fitting.on_overflow == "error":
        raise StageError(
            f"{work.place(number)}: {length} tokens, max_length is {limit}; "
            "raise max_length, or set on_overflow to drop or truncate_prompt"
        )
    too_long = RowError("too_long", f"{length} tokens, max_length is {limit}")
    if work.fitting.on_overflow == "truncate_prompt":
        row = _without_oldest(work.template, row, tokens.length, limit)
    shorter = row if work.fitting.on_overflow == "truncate_prompt" else None
    while tokens.length > limit and shorter is not None:
        found = masking.mask(work.template, _talks(shorter), work.tails)
        try:
            tokens = replace(_tokens(work, shorter, found), truncated=True)
        except RowError:  # what is left has nothing to learn from: the row was too long for it
            raise too_long from None
        row = shorter
        if tokens.length > limit:
            shorter = _shorten(work.template, row, tokens.length - limit)
    if tokens.length > limit:
        raise too_long
    return tokens


def _without_oldest(template: Template, row: Canonical, length: int, limit: int) -> Canonical:
    """``row`` without as many of its oldest questions as the limit asks for.

    How many is found by halving, on renderings of the whole conversation: what these are longer
    than the ``length`` that was measured, the text behind the last stop token, is always the same.
    """
    if "text" in row:
        return row
    try:
        behind = _rendered_length(template, row) - length
        least, most = 0, max(0, _num_questions(row) - 1)
        while least < most:
            middle = (least + most) // 2
            if _rendered_length(template, _later(row, middle)) - behind <= limit:
                most = middle
            else:
                least = middle + 1
    except RowError:  # the template refuses some beginning: one question after another, then
        return row
    return _later(row, least)


def _rendered_length(template: Template, row: Canonical) -> int:
    texts = [templates.render(template, one.turns, tools=one.tools) for one in _talks(row)]
    return max(map(len, templates.encode(template, texts)))


def _num_questions(row: Canonical) -> int:
    turns = row["prompt"] if "prompt" in row else row["messages"]
    return sum(turn["role"] == "user" for turn in turns)


def _later(row: Canonical, number: int) -> Canonical:
    """``row`` from its question ``number`` on, behind its system turn."""
    name = "prompt" if "prompt" in row else "messages"
    turns = row[name]
    questions = [index for index, turn in enumerate(turns) if turn["role"] == "user"]
    if not number or number >= len(questions):
        return row
    num_system = sum(turn["role"] == "system" for turn in turns)
    return {**row, name: [*turns[:num_system], *turns[questions[number] :]]}


def _shorten(template: Template, row: Canonical, excess: int) -> Canonical | None:
    """``row`` with less before its last answer, or ``None`` when nothing more can go.

    The oldest question goes with its answers as long as a later one is left; then the last
    question loses about ``excess`` tokens at its start. The system turn stays, and a question
    that a tool's results follow is not cut.
    """
    if "text" in row:
        return None
    name = "prompt" if "prompt" in row else "messages"
    answer = row[name][-1:] if name == "messages" else []
    turns = row[name][: len(row[name]) - len(answer)]
    num_system = sum(turn["role"] == "system" for turn in turns)
    questions = [index for index, turn in enumerate(turns) if turn["role"] == "user"]
    if not questions:
        return None
    if len(questions) > 1:
        rest = turns[questions[1] :]
    else:
        question = turns[questions[0]]["content"]
        num_tokens = max(1, len(templates.encode(template, [question])[0]))
        kept = question[max(1, len(question) * excess // num_tokens) :]
        if not kept.strip():
            return None
        rest = [{"role": "user", "content": kept}, *turns[questions[0] + 1 :]]
    return {**row, name: [*turns[:num_system], *rest, *answer]}


# --- columns


def _gathered(
    kept: Sequence[Tokens], rejects: list[tuple[int, RowError, str]], *, num_read: int
) -> Block:
    import numpy as np

    columns: dict[str, Any] = {}
    for name in kept[0].columns if kept else ():
        cells = [row.columns[name] for row in kept]
        if isinstance(cells[0], np.ndarray):
            sizes = np.fromiter(map(len, cells), dtype=np.int32, count=len(cells))
            columns[name] = (np.concatenate(cells), sizes)
        else:
            columns[name] = cells
    return Block(
        columns=columns,
        lengths=np.fromiter((row.length for row in kept), dtype=np.int32, count=len(kept)),
        num_read=num_read,
        num_tokens=sum(row.num_tokens for row in kept),
        num_trained=sum(row.num_trained for row in kept),
        num_mismatched=sum(not row.same_context for row in kept),
        num_truncated=sum(row.truncated for row in kept),
        rejects=rejects,
    )
