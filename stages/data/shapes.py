"""The shapes that rows come in, and the one form that comes out."""

from collections import Counter
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from typing import Any, Literal

from stages.data.rules import RowError, text

Turn = dict[str, str]
"""``{"role": "system" | "user" | "assistant", "content": text}``."""

Canonical = dict[str, list[Turn]]
"""A row as it leaves here: ``messages``, or ``prompt``, ``chosen`` and ``rejected``."""

Raw = Mapping[str, Any]
Kind = Literal["conversations", "preferences"]

ROLES = {
    "system": "system",
    "user": "user",
    "human": "user",
    "assistant": "assistant",
    "gpt": "assistant",
}
SAMPLE = 100


def detect(rows: Iterable[Any], kind: Kind) -> str | None:
    """The shape that most of the objects among ``rows`` have, or ``None`` where none has any.

    Among shapes that fit one row the first of ``kind`` wins, so that a pair with surplus columns
    is a pair; but where conversations are asked for, a ``messages`` column decides.
    """
    names = _preference_first if kind == "preferences" else _messages_first
    votes = Counter(
        next((name for name in names if SHAPES[name].columns <= _filled(row)), None)
        for row in rows
        if isinstance(row, dict)
    )
    del votes[None]
    return max(votes, key=lambda name: votes[name]) if votes else None


def canonical(row: Any, shape: str) -> Canonical:
    """``row`` as ``{"messages": turns}`` or ``{"prompt": turns, "chosen": ..., "rejected": ...}``.

    ``chosen`` and ``rejected`` are one assistant turn each. Raises :class:`RowError`.
    """
    if not isinstance(row, dict):
        raise RowError("not_an_object", f"a row is an object, not {type(row).__name__}")
    missing = SHAPES[shape].columns - _filled(row)
    if missing:
        raise RowError(
            "missing_column", f"{shape} rows need the column {', '.join(sorted(missing))}"
        )
    if row.get("tools") not in (None, "", [], "[]"):
        raise RowError("tool_call", "the row defines tools, which are not supported")
    return SHAPES[shape].read(row)


def opening(row: Canonical) -> str:
    """The first user turn of a canonical row, blanks collapsed: what decides its split.

    Rows that ask the same first question share a side whatever follows it, whatever the system
    turn says and whether they are conversations or pairs; so no held-out question was trained on.
    """
    turns = row.get("messages") or row["prompt"]
    return " ".join(next(t["content"] for t in turns if t["role"] == "user").split())


def num_chars(row: Canonical) -> int:
    """Characters in all turns; of a pair, in the prompt and the longer answer."""
    if "messages" in row:
        return _length(row["messages"])
    return _length(row["prompt"]) + max(_length(row["chosen"]), _length(row["rejected"]))


def _length(turns: list[Turn]) -> int:
    return sum(len(turn["content"]) for turn in turns)


def _filled(row: Raw) -> set[str]:
    return {column for column, value in row.items() if value is not None}


# --- turns


def _turns(value: Any, *, column: str, role: str) -> list[Turn]:
    """``value`` as turns: a text is one turn of ``role``."""
    if isinstance(value, str):
        return [_turn({"role": role, "content": value}, column)]
    if isinstance(value, dict):
        return [_turn(value, column)]
    if not isinstance(value, list):
        raise RowError("not_turns", f"{column} is {type(value).__name__}, not a list of turns")
    return [_turn(turn, f"{column}[{index}]") for index, turn in enumerate(value)]


def _turn(turn: Any, column: str) -> Turn:
    if not isinstance(turn, dict):
        raise RowError("not_turns", f"{column} is {type(turn).__name__}, not a turn")
    if turn.get("tool_calls") or turn.get("function_call"):
        raise RowError("tool_call", f"{column} calls a tool, which is not supported")
    for role, content in (("role", "content"), ("from", "value")):
        if role in turn and content in turn:
            return {
                "role": _role(turn[role], column),
                "content": text(turn[content], column=f"{column}.{content}"),
            }
    raise RowError("not_turns", f"{column} has neither role and content nor from and value")


def _role(name: Any, column: str) -> str:
    if not isinstance(name, str) or name not in ROLES:
        raise RowError("unknown_role", f"{column} has the role {name!r}; known: {', '.join(ROLES)}")
    return ROLES[name]


def _system(row: Raw) -> list[Turn]:
    return _turns(row["system"], column="system", role="system") if row.get("system") else []


def _conversation(turns: list[Turn]) -> Canonical:
    _check(turns)
    return {"messages": turns}


def _check(turns: list[Turn]) -> None:
    if not turns:
        raise RowError("empty_conversation")
    for index, turn in enumerate(turns):
        if not turn["content"].strip():
            raise RowError("empty_turn", f"turn {index} ({turn['role']}) is empty")
        if turn["role"] == "system" and index:
            raise RowError("misplaced_system", f"turn {index} is a system turn")
    roles = [turn["role"] for turn in turns]
    if "assistant" not in roles:
        raise RowError("no_assistant_turn")
    if next(role for role in roles if role != "system") == "assistant":
        raise RowError("opens_with_assistant")
    if roles[-1] != "assistant":
        raise RowError("ends_with_user")


def _pair(chosen: list[Turn], rejected: list[Turn]) -> Canonical:
    """A pair out of two whole conversations that differ in their last turns."""
    _check(chosen)
    _check(rejected)
    if chosen[:-1] != rejected[:-1]:
        raise RowError("different_prompts")
    if chosen[-2]["role"] != "user":
        raise RowError("answer_without_question")
    if chosen[-1]["content"].strip() == rejected[-1]["content"].strip():
        raise RowError("chosen_equals_rejected")
    return {"prompt": chosen[:-1], "chosen": chosen[-1:], "rejected": rejected[-1:]}


# --- one function for each shape


def _messages(row: Raw) -> Canonical:
    return _conversation(_system(row) + _turn_list(row, "messages"))


def _sharegpt(row: Raw) -> Canonical:
    return _conversation(_system(row) + _turn_list(row, "conversations"))


def _alpaca(row: Raw) -> Canonical:
    answer = _turns(row["output"], column="output", role="assistant")
    return _conversation(_alpaca_prompt(row) + answer)


def _prompt_completion(row: Raw) -> Canonical:
    prompt = _turns(row["prompt"], column="prompt", role="user")
    answer = _turns(row["completion"], column="completion", role="assistant")
    return _conversation(_system(row) + prompt + answer)


def _question_answer(row: Raw) -> Canonical:
    question = _turns(row["question"], column="question", role="user")
    answer = _turns(row["answer"], column="answer", role="assistant")
    return _conversation(_system(row) + question + answer)


def _sharegpt_preference(row: Raw) -> Canonical:
    return _answers(row, _system(row) + _turn_list(row, "conversations"))


def _alpaca_preference(row: Raw) -> Canonical:
    return _answers(row, _alpaca_prompt(row))


def _preference(row: Raw) -> Canonical:
    """``chosen`` and ``rejected`` are answers, or whole conversations that repeat the prompt."""
    prompt = _system(row) + _turns(row["prompt"], column="prompt", role="user")
    chosen = _turns(row["chosen"], column="chosen", role="assistant")
    if len(chosen) < 2 or chosen[0]["role"] == "assistant":
        return _answers(row, prompt)
    pair = _implicit_preference(row)
    if prompt and prompt[-1]["content"].strip() not in {
        turn["content"].strip() for turn in pair["prompt"]
    }:
        raise RowError("different_prompts", "chosen and rejected do not contain the prompt")
    return pair


def _implicit_preference(row: Raw) -> Canonical:
    chosen, rejected = _turn_list(row, "chosen"), _turn_list(row, "rejected")
    return _pair(_system(row) + chosen, _system(row) + rejected)


def _answers(row: Raw, prompt: list[Turn]) -> Canonical:
    chosen = _turns(row["chosen"], column="chosen", role="assistant")
    rejected = _turns(row["rejected"], column="rejected", role="assistant")
    return _pair(prompt + chosen, prompt + rejected)


def _turn_list(row: Raw, column: str) -> list[Turn]:
    if not isinstance(row[column], list):
        raise RowError(
            "not_turns", f"{column} is {type(row[column]).__name__}, not a list of turns"
        )
    return _turns(row[column], column=column, role="user")


def _alpaca_prompt(row: Raw) -> list[Turn]:
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
    return [*_system(row), *past, {"role": "user", "content": question}]


@dataclass(frozen=True)
class Shape:
    """A form of row: which columns it needs, and how it is read."""

    kind: Kind
    columns: frozenset[str]
    read: Callable[[Raw], Canonical]


def _shape(kind: Kind, read: Callable[[Raw], Canonical], *columns: str) -> Shape:
    return Shape(kind, frozenset(columns), read)


SHAPES = {
    "messages": _shape("conversations", _messages, "messages"),
    "sharegpt": _shape("conversations", _sharegpt, "conversations"),
    "alpaca": _shape("conversations", _alpaca, "instruction", "output"),
    "prompt_completion": _shape("conversations", _prompt_completion, "prompt", "completion"),
    "question_answer": _shape("conversations", _question_answer, "question", "answer"),
    "sharegpt_preference": _shape(
        "preferences", _sharegpt_preference, "conversations", "chosen", "rejected"
    ),
    "alpaca_preference": _shape(
        "preferences", _alpaca_preference, "instruction", "chosen", "rejected"
    ),
    "preference": _shape("preferences", _preference, "prompt", "chosen", "rejected"),
    "implicit_preference": _shape("preferences", _implicit_preference, "chosen", "rejected"),
}
"""In the order of detection: a shape stands before those whose columns it includes."""

ConversationShape = Literal[
    "messages", "sharegpt", "alpaca", "prompt_completion", "question_answer"
]
PreferenceShape = Literal[
    "sharegpt_preference", "alpaca_preference", "preference", "implicit_preference"
]

_preference_first = sorted(SHAPES, key=lambda name: SHAPES[name].kind != "preferences")
_messages_first = sorted(_preference_first, key=lambda name: name != "messages")
