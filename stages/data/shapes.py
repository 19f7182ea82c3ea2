"""The shapes that rows come in, and how each is read into the one form that comes out."""

from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any, Literal

from stages.base import StageError
from stages.data import columns, conversations, turns
from stages.data.columns import Columns
from stages.data.conversations import Canonical, Kind
from stages.data.places import Cell
from stages.data.rules import RowError, text, writable
from stages.data.turns import EMPTY, Dialect, Turn

Raw = Mapping[str, Any]
Read = Callable[[Raw, Dialect], Canonical]

SAMPLE = 100
"""Rows from which a file's shape is told."""

CONTENT = frozenset(
    ("context", "contexts", "passage", "input", "history", "system", "system_prompt", "tools",
     "functions", "reasoning", "reasoning_content", "thinking", "chain_of_thought", "label",
     "image", "images", "video", "videos", "audio", "audios", "documents", "role",
     "chat_template_kwargs")
)  # fmt: skip
"""Columns that carry part of a row by their name: one that a shape has no place for is refused."""

CONTENT_OF_TURNS = CONTENT | {"tool_calls", "function_call", "loss_mask", "mask", "train_detail"}
"""Keys of turns of which the same holds."""

SECOND = {"system": "system_prompt", "tools": "functions"}
"""Second names of columns that every shape may have."""


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

    more: tuple[str, ...] = ("system", "context")
    """Fields that a row may have beside, and ``tools``."""


@dataclass(frozen=True)
class Form:
    """A shape, with the column that holds each of its fields."""

    shape: str
    columns: Mapping[str, str]
    """Field to column, where the two differ."""

    dialect: Dialect = turns.PLAIN

    @cached_property
    def read(self) -> frozenset[str]:
        """The columns that are read."""
        shape = SHAPES[self.shape]
        fields = (*shape.fields, *shape.more, "tools")
        return frozenset(self.columns.get(field, field) for field in fields)

    @property
    def kind(self) -> Kind:
        return SHAPES[self.shape].kind


def detect(rows: Sequence[Any], *, accepted: Iterable[Kind], named: Columns | None) -> Form | None:
    """The form that most of the objects among ``rows`` have, or ``None`` where none has any.

    Among shapes that fit one row the first wins, those of an ``accepted`` kind before others; but
    where conversations are asked for, a ``messages`` column decides.
    """
    wanted = tuple(accepted)
    order = sorted(SHAPES, key=lambda name: SHAPES[name].kind not in wanted)
    if "conversations" in wanted:  # a pair with a surplus `messages` column is a conversation
        order = sorted(SHAPES, key=lambda name: SHAPES[name].kind == "conversations")
        first = ["unpaired_messages", "messages"]  # judged rows are never conversations
        order = [*first, *(name for name in order if name not in first)]
    most = _most_common(rows, order, named)
    return _form(most[0], dict(most[1]), rows, named) if most else None


def _form(shape: str, renamed: dict[str, str], rows: Sequence[Any], named: Columns | None) -> Form:
    """The form with the second names of columns that no row has under their first."""
    may = (*SHAPES[shape].more, "tools")
    held = {column for row in rows for column, cell in row.items() if cell not in EMPTY}
    second = {
        field: column
        for field, column in SECOND.items()
        if field in may and field not in renamed and column in held and field not in held
    }
    dialect = turns.dialect(named)
    second = {field: column for field, column in second.items() if column not in dialect.ignored}
    return Form(shape, renamed | second, dialect)


IN_TURNS = "[]."
"""Stands between a column of turns and one of their keys."""


def unread(row: Any, form: Form) -> list[str]:
    """The columns of ``row`` that hold something and that ``form`` does not read, and the keys of
    its turns, as ``messages[].name``."""
    if not isinstance(row, dict):
        return []
    said = [(c, row[c]) for c in form.read & row.keys() if not _is_plain(row[c])]
    keys = [f"{c}{IN_TURNS}{key}" for c, cell in said for key in turns.unread(cell, form.dialect)]
    columns = [c for c in row.keys() - form.read if row[c] not in EMPTY]
    return [writable(name) for name in (*columns, *keys)]


def _is_plain(cell: Any) -> bool:
    return cell is None or type(cell) is str


def lost(columns: Iterable[str], form: Form) -> list[str]:
    """Those of the unread ``columns`` that carry part of a row, but for the ignored ones."""

    def carries(column: str) -> bool:
        _, in_turns, key = column.rpartition(IN_TURNS)
        return key in (CONTENT_OF_TURNS if in_turns else CONTENT) - form.dialect.ignored

    return sorted(filter(carries, columns))


def refuse_content(columns: Iterable[str], form: Form, *, shown: str) -> None:
    """Raise :class:`StageError` for unread columns that carry part of a row."""
    if refused := lost(columns, form):
        keys = ", ".join(column.rpartition(IN_TURNS)[2] for column in refused)
        raise StageError(
            f"{shown}: {form.shape} rows have no place for the column {', '.join(refused)}; put it "
            "into a column that they have, or set prepare_data.config.columns: "
            f"{{ignored: [{keys}]}} to leave it unread"
        )


def asked(shape: str, rows: Sequence[Any], named: Columns | None) -> Form:
    """The form of rows whose shape was given; the columns are those that most rows have."""
    most = _most_common(rows, [shape], named)
    found = dict(most[1]) if most else columns.given(named)
    return _form(shape, found, rows, named)


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


def misfit(row: Raw, kinds: Iterable[Kind]) -> str:
    """What to say of rows like ``row`` that fit no shape of ``kinds``."""
    known = "; ".join(
        f"{name}: {', '.join(shape.fields)}"
        for name, shape in SHAPES.items()
        if shape.kind in kinds
    )
    return f"the columns {writable(', '.join(row)) or '(none)'} fit no known shape ({known})"


# --- conversations


def _system(row: Raw, dialect: Dialect) -> list[Turn]:
    if not row.get("system"):
        return []
    return turns.read(row["system"], column="system", role="system", dialect=dialect)


def _turns(row: Raw, field: str, role: str, dialect: Dialect) -> list[Turn]:
    return turns.read(row[field], column=field, role=role, dialect=dialect)


def _whole(row: Raw, field: str, dialect: Dialect) -> list[Turn]:
    """A whole conversation in one cell, behind the system column if there is one."""
    said = turns.read_list(row[field], column=field, dialect=dialect)
    system = _system(row, dialect)
    return said if said[:1] == system else [*system, *said]


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
    asked = _with_context(row, _turns(row, question, "user", dialect))
    return _system(row, dialect) + asked + _turns(row, answer, "assistant", dialect)


def _with_context(row: Raw, asked: list[Turn]) -> list[Turn]:
    """The last question with what it is about behind it."""
    if not row.get("context") or not asked:
        return asked
    content = f"{asked[-1]['content']}\n{text(row['context'], column='context')}"
    return [*asked[:-1], {**asked[-1], "content": content}]


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
    if isinstance(history, Cell):
        history = turns.as_json(history, "not_turns", "history")
    if not isinstance(history, list) or any(
        not isinstance(pair, list) or len(pair) != 2 for pair in history
    ):
        raise RowError("not_turns", "history is not a list of [question, answer]")
    past = [
        {"role": role, "content": text(content, column="history")}
        for pair in history
        for role, content in zip(("user", "assistant"), pair, strict=True)
    ]
    asked = _with_context(row, [{"role": "user", "content": question}])
    return [*_system(row, dialect), *past, *asked]


# --- preferences and judged answers


def _sharegpt_preference(row: Raw, dialect: Dialect) -> Canonical:
    return _answers(row, _whole(row, "conversations", dialect), dialect)


def _alpaca_preference(row: Raw, dialect: Dialect) -> Canonical:
    return _answers(row, _alpaca_prompt(row, dialect), dialect)


def _preference(row: Raw, dialect: Dialect) -> Canonical:
    prompt = _with_context(row, _turns(row, "prompt", "user", dialect))
    return _answers(row, _system(row, dialect) + prompt, dialect)


def _implicit_preference(row: Raw, dialect: Dialect) -> Canonical:
    return conversations.pair(_whole(row, "chosen", dialect), _whole(row, "rejected", dialect))


def _transcript_preference(row: Raw, dialect: Dialect) -> Canonical:
    sides = (text(row[field], column=field) for field in ("chosen", "rejected"))
    return conversations.pair(
        *(_system(row, dialect) + turns.transcript(side, column="chosen") for side in sides)
    )


def _answers(row: Raw, prompt: list[Turn], dialect: Dialect) -> Canonical:
    """``chosen`` and ``rejected`` go on from the prompt, or repeat it."""
    return conversations.pair(
        *(
            _continued(prompt, _side(row, field, prompt, dialect), field)
            for field in ("chosen", "rejected")
        )
    )


def _side(row: Raw, field: str, prompt: list[Turn], dialect: Dialect) -> list[Turn]:
    """The turns of a side; a text that is a transcript of the prompt's turns is one."""
    if isinstance(row[field], str) and turns.TRANSCRIPT.match(row[field]):
        said = turns.transcript(row[field], column=field)
        asked = [turn for turn in prompt if turn["role"] != "system"]
        if asked and conversations.begins_with(said, asked):
            return said
    return _turns(row, field, "assistant", dialect)


def _continued(prompt: list[Turn], side: list[Turn], field: str) -> list[Turn]:
    """One whole conversation of a pair. Raises :class:`RowError` where the two do not fit."""
    if not side or side[0]["role"] in ("assistant", "tool"):
        return prompt + side
    has_system = side[0]["role"] == "system"
    num_system = sum(turn["role"] == "system" for turn in prompt)
    asked = prompt if has_system else prompt[num_system:]
    own = side if num_system else side[int(has_system) :]
    if conversations.begins_with(own, asked):
        return side if has_system else prompt[:num_system] + side
    if prompt and prompt[-1]["role"] == "assistant" and not has_system:
        return prompt + side
    raise RowError("different_prompts", f"{field} neither repeats the prompt nor goes on from it")


def _unpaired(row: Raw, dialect: Dialect) -> Canonical:
    said = _exchange(row, dialect, "prompt", "completion")
    return conversations.judged(said, label=_label(row["label"]))


def _unpaired_messages(row: Raw, dialect: Dialect) -> Canonical:
    return conversations.judged(_whole(row, "messages", dialect), label=_label(row["label"]))


def _label(value: Any) -> bool:
    return turns.truth(value, "not_a_label", "label")


def _speak(*fields: str) -> Callable[[Raw], bool]:
    """Whether all ``fields`` hold transcripts."""
    return lambda row: all(
        isinstance(row[field], str) and turns.TRANSCRIPT.match(row[field]) for field in fields
    )


SHAPES: Mapping[str, Shape] = {
    "unpaired_messages": Shape(
        "unpaired",
        ("messages", "label"),
        _unpaired_messages,
        named=(("conversations", "label"),),
        more=("system",),
    ),
    "unpaired": Shape(
        "unpaired",
        ("prompt", "completion", "label"),
        _unpaired,
        named=(("prompt", "response", "label"), ("question", "answer", "label")),
    ),
    "sharegpt_preference": Shape(
        "preferences",
        ("conversations", "chosen", "rejected"),
        _sharegpt_preference,
        more=("system",),
    ),
    "alpaca_preference": Shape(
        "preferences",
        ("instruction", "chosen", "rejected"),
        _alpaca_preference,
        more=("system", "context", "input", "history"),
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
        more=("system",),
    ),
    "implicit_preference": Shape(
        "preferences", ("chosen", "rejected"), _implicit_preference, more=("system",)
    ),
    "messages": Shape("conversations", ("messages",), _messages, more=("system",)),
    "sharegpt": Shape("conversations", ("conversations",), _sharegpt, more=("system",)),
    "alpaca": Shape(
        "conversations",
        ("instruction", "output"),
        _alpaca,
        named=(("instruction", "response"),),
        more=("system", "context", "input", "history"),
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
    "transcript": Shape(
        "conversations", ("text",), _transcript, also=_speak("text"), more=("system",)
    ),
    "text": Shape("conversations", ("text",), _text, more=()),
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
