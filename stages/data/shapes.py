"""The shapes that rows come in, and how each is read into the one form that comes out."""

from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal

from stages.data import columns, conversations, turns
from stages.data.columns import Columns
from stages.data.conversations import Canonical, Kind
from stages.data.rules import RowError, text
from stages.data.turns import Dialect, Turn

Raw = Mapping[str, Any]
Read = Callable[[Raw, Dialect], Canonical]

SAMPLE = 100
"""Rows from which a file's shape is told."""

LABELS = {"true": True, "false": False, "1": True, "0": False}


@dataclass(frozen=True)
class Shape:
    """A form of row: the fields that it needs, and how it is read."""

    kind: Kind
    fields: tuple[str, ...]
    read: Read
    named: tuple[tuple[str, ...], ...] = ()
    """Further sets of columns that hold the fields, in their order."""

    also: Callable[[Raw], bool] = lambda row: True
    """What the cells must look like beside."""


@dataclass(frozen=True)
class Form:
    """A shape, with the column that holds each of its fields."""

    shape: str
    columns: Mapping[str, str]
    """Field to column, where the two differ."""

    dialect: Dialect = turns.PLAIN

    @property
    def kind(self) -> Kind:
        return SHAPES[self.shape].kind


def detect(rows: Iterable[Any], *, accepted: Iterable[Kind], named: Columns | None) -> Form | None:
    """The form that most of the objects among ``rows`` have, or ``None`` where none has any.

    Among shapes that fit one row the first wins, those of an ``accepted`` kind before others; but
    where conversations are asked for, a ``messages`` column decides.
    """
    wanted = tuple(accepted)
    order = sorted(SHAPES, key=lambda name: SHAPES[name].kind not in wanted)
    if "conversations" in wanted:  # a pair with a surplus `messages` column is a conversation
        order = sorted(SHAPES, key=lambda name: SHAPES[name].kind == "conversations")
        order = ["messages", *(name for name in order if name != "messages")]
    most = _most_common(rows, order, named)
    return Form(most[0], dict(most[1]), turns.dialect(named)) if most else None


def asked(shape: str, rows: Iterable[Any], named: Columns | None) -> Form:
    """The form of rows whose shape was given; the columns are those that most rows have."""
    most = _most_common(rows, [shape], named)
    found = dict(most[1]) if most else columns.given(named)
    return Form(shape, found, turns.dialect(named))


Fit = tuple[str, tuple[tuple[str, str], ...]]
"""A shape with its renamed columns."""


def _most_common(rows: Iterable[Any], order: Sequence[str], named: Columns | None) -> Fit | None:
    found = (_fitting(row, order, named) for row in rows if isinstance(row, dict))
    votes = Counter(fit for fit in found if fit)
    return max(votes, key=lambda fit: votes[fit]) if votes else None


def _fitting(row: Raw, order: Sequence[str], named: Columns | None) -> Fit | None:
    """The first shape that ``row`` fits, with its renamed columns."""
    own = columns.given(named)
    for name in order:
        shape = SHAPES[name]
        for cells in (shape.fields, *shape.named):
            mapping = dict(zip(shape.fields, cells, strict=True)) | own
            renamed = {field: column for field, column in mapping.items() if field != column}
            if all(row.get(mapping[field]) is not None for field in shape.fields):
                plain = {**row, **{f: row.get(column) for f, column in renamed.items()}}
                if shape.also(plain):
                    return name, tuple(sorted(renamed.items()))
    return None


def canonical(row: Any, form: Form) -> Canonical:
    """``row`` in the one form that comes out. Raises :class:`RowError`."""
    if not isinstance(row, dict):
        raise RowError("not_an_object", f"a row is an object, not {type(row).__name__}")
    shape = SHAPES[form.shape]
    if form.columns:
        row = {**row, **{field: row.get(column) for field, column in form.columns.items()}}
    for field in shape.fields:
        if row.get(field) is None:
            column = form.columns.get(field, field)
            raise RowError("missing_column", f"{form.shape} rows need the column {column}")
    read = shape.read(row, form.dialect)
    if row.get("tools") and (defined := turns.tools(row["tools"])):
        read["tools"] = defined
    return read


def known(kinds: Iterable[Kind]) -> str:
    """The shapes of ``kinds`` with their columns, for a message."""
    return "; ".join(
        f"{name}: {', '.join(shape.fields)}"
        for name, shape in SHAPES.items()
        if shape.kind in kinds
    )


# --- conversations


def _system(row: Raw, dialect: Dialect) -> list[Turn]:
    if not row.get("system"):
        return []
    return turns.read(row["system"], column="system", role="system", dialect=dialect)


def _turns(row: Raw, field: str, role: str, dialect: Dialect) -> list[Turn]:
    return turns.read(row[field], column=field, role=role, dialect=dialect)


def _whole(row: Raw, field: str, dialect: Dialect) -> list[Turn]:
    """A whole conversation in one cell, behind the system column if there is one."""
    return [*_system(row, dialect), *turns.read_list(row[field], column=field, dialect=dialect)]


def _messages(row: Raw, dialect: Dialect) -> Canonical:
    return conversations.conversation(_whole(row, "messages", dialect))


def _sharegpt(row: Raw, dialect: Dialect) -> Canonical:
    return conversations.conversation(_whole(row, "conversations", dialect))


def _alpaca(row: Raw, dialect: Dialect) -> Canonical:
    answer = _turns(row, "output", "assistant", dialect)
    return conversations.conversation(_alpaca_prompt(row, dialect) + answer)


def _prompt_completion(row: Raw, dialect: Dialect) -> Canonical:
    return conversations.conversation(_exchange(row, dialect, "prompt", "completion"))


def _question_answer(row: Raw, dialect: Dialect) -> Canonical:
    return conversations.conversation(_exchange(row, dialect, "question", "answer"))


def _exchange(row: Raw, dialect: Dialect, question: str, answer: str) -> list[Turn]:
    said = _turns(row, question, "user", dialect) + _turns(row, answer, "assistant", dialect)
    return _system(row, dialect) + said


def _transcript(row: Raw, dialect: Dialect) -> Canonical:
    return conversations.conversation(
        _system(row, dialect) + turns.transcript(row["text"], column="text")
    )


def _text(row: Raw, dialect: Dialect) -> Canonical:
    return conversations.raw_text(text(row["text"], column="text"))


def _alpaca_prompt(row: Raw, dialect: Dialect) -> list[Turn]:
    question = text(row["instruction"], column="instruction")
    if row.get("input"):
        question = f"{question}\n{text(row['input'], column='input')}"
    history = row.get("history") or []
    if not isinstance(history, list) or any(
        not isinstance(pair, list) or len(pair) != 2 for pair in history
    ):
        raise RowError("not_turns", "history is not a list of [question, answer]")
    past = [
        {"role": role, "content": text(content, column="history")}
        for pair in history
        for role, content in zip(("user", "assistant"), pair, strict=True)
    ]
    return [*_system(row, dialect), *past, {"role": "user", "content": question}]


# --- preferences and judged answers


def _sharegpt_preference(row: Raw, dialect: Dialect) -> Canonical:
    return _answers(row, _whole(row, "conversations", dialect), dialect)


def _alpaca_preference(row: Raw, dialect: Dialect) -> Canonical:
    return _answers(row, _alpaca_prompt(row, dialect), dialect)


def _preference(row: Raw, dialect: Dialect) -> Canonical:
    """``chosen`` and ``rejected`` are answers, or whole conversations that repeat the prompt."""
    prompt = _system(row, dialect) + _turns(row, "prompt", "user", dialect)
    chosen = _turns(row, "chosen", "assistant", dialect)
    if len(chosen) < 2 or chosen[0]["role"] == "assistant":
        return _answers(row, prompt, dialect)
    pair = _implicit_preference(row, dialect)
    if prompt and prompt[-1]["content"].strip() not in {
        turn["content"].strip() for turn in pair["prompt"]
    }:
        raise RowError("different_prompts", "chosen and rejected do not contain the prompt")
    return pair


def _implicit_preference(row: Raw, dialect: Dialect) -> Canonical:
    return conversations.pair(_whole(row, "chosen", dialect), _whole(row, "rejected", dialect))


def _transcript_preference(row: Raw, dialect: Dialect) -> Canonical:
    sides = (text(row[field], column=field) for field in ("chosen", "rejected"))
    return conversations.pair(
        *(_system(row, dialect) + turns.transcript(side, column="chosen") for side in sides)
    )


def _answers(row: Raw, prompt: list[Turn], dialect: Dialect) -> Canonical:
    chosen = _turns(row, "chosen", "assistant", dialect)
    rejected = _turns(row, "rejected", "assistant", dialect)
    return conversations.pair(prompt + chosen, prompt + rejected)


def _unpaired(row: Raw, dialect: Dialect) -> Canonical:
    said = _exchange(row, dialect, "prompt", "completion")
    return conversations.judged(said, label=_label(row["label"]))


def _unpaired_messages(row: Raw, dialect: Dialect) -> Canonical:
    return conversations.judged(_whole(row, "messages", dialect), label=_label(row["label"]))


def _label(value: Any) -> bool:
    key = str(value).strip().lower()
    if not isinstance(value, (bool, int, str)) or key not in LABELS:
        raise RowError("not_a_label", f"label is {value!r}, neither true nor false")
    return LABELS[key]


def _judged(row: Raw) -> bool:
    return isinstance(row["label"], (bool, int, str)) and str(row["label"]).lower() in LABELS


def _speak(*fields: str) -> Callable[[Raw], bool]:
    """Whether all ``fields`` hold transcripts."""
    return lambda row: all(
        isinstance(row[field], str) and turns.TRANSCRIPT.match(row[field]) for field in fields
    )


SHAPES: Mapping[str, Shape] = {
    "unpaired_messages": Shape("unpaired", ("messages", "label"), _unpaired_messages, also=_judged),
    "unpaired": Shape(
        "unpaired",
        ("prompt", "completion", "label"),
        _unpaired,
        named=(("prompt", "response", "label"), ("question", "answer", "label")),
        also=_judged,
    ),
    "sharegpt_preference": Shape(
        "preferences", ("conversations", "chosen", "rejected"), _sharegpt_preference
    ),
    "alpaca_preference": Shape(
        "preferences", ("instruction", "chosen", "rejected"), _alpaca_preference
    ),
    "preference": Shape(
        "preferences",
        ("prompt", "chosen", "rejected"),
        _preference,
        named=(("question", "chosen", "rejected"),),
    ),
    "transcript_preference": Shape(
        "preferences",
        ("chosen", "rejected"),
        _transcript_preference,
        also=_speak("chosen", "rejected"),
    ),
    "implicit_preference": Shape("preferences", ("chosen", "rejected"), _implicit_preference),
    "messages": Shape("conversations", ("messages",), _messages),
    "sharegpt": Shape("conversations", ("conversations",), _sharegpt),
    "alpaca": Shape(
        "conversations",
        ("instruction", "output"),
        _alpaca,
        named=(("instruction", "response"),),
    ),
    "prompt_completion": Shape(
        "conversations",
        ("prompt", "completion"),
        _prompt_completion,
        named=(("prompt", "response"),),
    ),
    "question_answer": Shape(
        "conversations",
        ("question", "answer"),
        _question_answer,
        named=(("question", "response"), ("query", "answer"), ("query", "response")),
    ),
    "transcript": Shape("conversations", ("text",), _transcript, also=_speak("text")),
    "text": Shape("conversations", ("text",), _text),
}
"""In the order of detection: a shape stands before those whose columns it includes."""

ConversationShape = Literal[
    "messages", "sharegpt", "alpaca", "prompt_completion", "question_answer", "transcript", "text"
]
PreferenceShape = Literal[
    "sharegpt_preference",
    "alpaca_preference",
    "preference",
    "transcript_preference",
    "implicit_preference",
    "unpaired",
    "unpaired_messages",
]
