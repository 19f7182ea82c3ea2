"""What the columns of a data set are called, where they are not called what we call them."""

import json
from collections.abc import Iterable
from contextlib import suppress
from typing import Any

from pydantic import Field

from configs import Config
from stages.data.places import Cell


class Columns(Config):
    """For each field of a shape the column of the file that holds it. Unset: its own name."""

    messages: str | None = None
    """Turns of a conversation."""

    conversations: str | None = None
    """Turns of a ShareGPT conversation."""

    instruction: str | None = None
    """Alpaca's question."""

    context: str | None = None
    """What a question is about: the second part of the question."""

    input: str | None = None
    """Alpaca's second part of the question."""

    output: str | None = None
    """Alpaca's answer."""

    history: str | None = None
    """Alpaca's earlier questions with their answers."""

    system: str | None = None
    """A system turn."""

    prompt: str | None = None
    """What stands before a completion or before two answers."""

    completion: str | None = None
    """The answer to a prompt."""

    question: str | None = None
    """A question."""

    answer: str | None = None
    """Its answer."""

    chosen: str | None = None
    """The better answer, or a conversation that ends in it."""

    rejected: str | None = None
    """The worse answer, or a conversation that ends in it."""

    label: str | None = None
    """Whether a completion is good."""

    text: str | None = None
    """A text to continue, or a transcript."""

    tools: str | None = None
    """Definitions of the functions that an assistant may call."""

    role: str | None = None
    """In a turn: who speaks."""

    content: str | None = None
    """In a turn: what is said."""

    user_roles: tuple[str, ...] = Field(default=())
    """Further names of the user's role."""

    assistant_roles: tuple[str, ...] = Field(default=())
    """Further names of the assistant's role."""

    system_roles: tuple[str, ...] = Field(default=())
    """Further names of the system's role."""

    ignored: tuple[str, ...] = ()
    """Columns, and keys of turns, that are left unread although they carry content."""


FIELDS = tuple(
    name
    for name in Columns.model_fields
    if name not in ("role", "content", "ignored") and not name.endswith("_roles")
)


def unmatched(columns: Columns, rows: Iterable[Any]) -> set[str]:
    """Settings of ``columns`` that fit nothing in ``rows``, as ``field=name``."""
    heads: set[str] = set()
    keys: set[str] = set()
    roles: set[str] = set()
    for row in rows:
        heads |= row.keys()
        for turn in (turn for cell in row.values() for turn in _turns(cell)):
            keys |= turn.keys()
            roles |= {said.strip().lower() for said in turn.values() if isinstance(said, str)}
    wrong = {f"{field}={name}" for field, name in given(columns).items() if name not in heads}
    wrong |= {f"ignored={name}" for name in columns.ignored if name not in heads | keys}
    for field in ("role", "content"):
        name = getattr(columns, field)
        wrong |= {f"{field}={name}"} if name and name not in keys else set()
    for field in ("user_roles", "assistant_roles", "system_roles"):
        wrong |= {f"{field}={x}" for x in getattr(columns, field) if x.strip().lower() not in roles}
    return wrong


def _turns(cell: Any) -> list[dict[str, Any]]:
    """What may be turns in a cell, a table's JSON included."""
    if isinstance(cell, Cell):
        with suppress(ValueError, RecursionError):
            cell = json.loads(cell)
    found = cell if isinstance(cell, list) else [cell]
    return [turn for turn in found if isinstance(turn, dict)]


def given(columns: Columns | None) -> dict[str, str]:
    """Field to column, of those that were set."""
    named = columns.model_dump(include=set(FIELDS), exclude_none=True) if columns else {}
    return {field: str(column) for field, column in named.items()}
