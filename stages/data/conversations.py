"""The one form that rows take, and what must hold for it."""

from collections.abc import Sequence
from typing import Any, Literal

from stages.data.rules import RowError
from stages.data.turns import Turn

Kind = Literal["conversations", "preferences", "unpaired"]
KINDS: tuple[Kind, ...] = ("conversations", "preferences", "unpaired")

Canonical = dict[str, Any]
"""A row as it leaves the data stage, one of

- conversations: ``messages`` (turns), or ``text``
- preferences: ``prompt`` (turns), ``chosen`` and ``rejected`` (one assistant turn each)
- unpaired: ``prompt`` (turns), ``completion`` (one assistant turn), ``label`` (bool)

with ``tools`` where functions are defined.
"""


def conversation(turns: list[Turn]) -> Canonical:
    check(turns)
    return {"messages": turns}


def raw_text(content: str) -> Canonical:
    if not content.strip():
        raise RowError("empty_text")
    return {"text": content}


def pair(chosen: list[Turn], rejected: list[Turn]) -> Canonical:
    """A pair out of two whole conversations that differ in their last turns."""
    check(chosen)
    check(rejected)
    if _said(chosen[:-1]) != _said(rejected[:-1]):
        raise RowError("different_prompts")
    _require_question(chosen)
    _require_trained(chosen[-1], rejected[-1])
    if _same(chosen[-1], rejected[-1]):
        raise RowError("chosen_equals_rejected")
    return {"prompt": chosen[:-1], "chosen": chosen[-1:], "rejected": rejected[-1:]}


def judged(turns: list[Turn], *, label: bool) -> Canonical:
    """A conversation whose last turn was judged good or bad."""
    check(turns)
    _require_question(turns)
    _require_trained(turns[-1])
    return {"prompt": turns[:-1], "completion": turns[-1:], "label": label}


def _require_question(turns: Sequence[Turn]) -> None:
    if turns[-2]["role"] not in ("user", "tool"):
        raise RowError("answer_without_question")


def _require_trained(*answers: Turn) -> None:
    if not all(turn.get("train", True) for turn in answers):
        raise RowError("answer_not_trained")


def _said(turns: Sequence[Turn]) -> list[Turn]:
    """Turns without the marks that say whether they are trained, which no prompt is."""
    return [{key: one for key, one in turn.items() if key != "train"} for turn in turns]


def begins_with(turns: Sequence[Turn], prompt: Sequence[Turn]) -> bool:
    """Whether ``turns`` begin with those of ``prompt``, blanks around texts aside."""
    pairs = zip(turns, prompt, strict=False)
    return len(turns) >= len(prompt) and all(
        one["role"] == other["role"] and one["content"].strip() == other["content"].strip()
        for one, other in pairs
    )


def _same(one: Turn, other: Turn) -> bool:
    return {**one, "content": one["content"].strip()} == {
        **other,
        "content": other["content"].strip(),
    }


def check(turns: Sequence[Turn]) -> None:
    """Raise :class:`RowError` for turns that are no conversation ending in an answer."""
    if not turns:
        raise RowError("empty_conversation")
    called = False
    for index, turn in enumerate(turns):
        role = turn["role"]
        if not turn["content"].strip() and role != "tool" and "tool_calls" not in turn:
            raise RowError("empty_turn", f"turn {index} ({role}) is empty")
        if role == "system" and index:
            raise RowError("misplaced_system", f"turn {index} is a system turn")
        if role == "tool" and not called:
            raise RowError("misplaced_tool_result", f"turn {index} answers no call")
        called = "tool_calls" in turn or (called and role == "tool")
    roles = [turn["role"] for turn in turns]
    if "assistant" not in roles:
        raise RowError("no_assistant_turn")
    if next(role for role in roles if role != "system") == "assistant":
        raise RowError("opens_with_assistant")
    if roles[-1] != "assistant":
        raise RowError("ends_with_user", f"the last turn is the {roles[-1]}'s")


def history(row: Canonical) -> list[Turn]:
    """The turns of a row, without the answers of a pair; a text is a user's turn."""
    if "text" in row:
        return [{"role": "user", "content": row["text"]}]
    return row.get("messages") or row["prompt"]


def opening(row: Canonical) -> str:
    """The first user turn of a row, blanks collapsed: what decides its split.

    Rows that ask the same first question share a side whatever follows it, whatever the system
    turn says and whether they are conversations or pairs; so no held-out question was trained on.
    """
    asked = next(turn["content"] for turn in history(row) if turn["role"] == "user")
    return " ".join(asked.split())


def num_chars(row: Canonical) -> int:
    """Characters in all turns; of a pair, in the prompt and the longer answer."""
    longer = [row.get(name, []) for name in ("chosen", "rejected", "completion")]
    return _length(history(row)) + max(map(_length, longer))


def _length(turns: Sequence[Turn]) -> int:
    return sum(len(turn["content"]) for turn in turns)
