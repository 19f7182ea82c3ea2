"""Turns of a conversation in every dialect, as turns of one."""

import json
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from stages.data.columns import Columns
from stages.data.places import Cell
from stages.data.rules import RowError, text

Turn = dict[str, Any]
"""``{"role": ..., "content": text}`` with role ``system``, ``user``, ``assistant`` or ``tool``.

An assistant turn may carry ``tool_calls`` (``[{"type": "function", "function": {"name": text,
"arguments": object}}]``), ``reasoning_content`` (text) and ``"train": false``; a call and a tool
turn their ``id`` and ``tool_call_id``, a tool turn the ``name`` of the function.
"""

ROLES = {
    **dict.fromkeys(("system", "developer"), "system"),
    **dict.fromkeys(("user", "human", "prompter"), "user"),
    **dict.fromkeys(("assistant", "gpt", "chatgpt", "model", "bot"), "assistant"),
    **dict.fromkeys(("tool", "function", "observation", "function_response"), "tool"),
    "function_call": "call",
}
"""Each known name of a role with the role. A ``call`` is an assistant turn that calls a tool."""

KEYS = (("role", "content"), ("from", "value"))
THOUGHTS = ("reasoning_content", "reasoning", "thinking")
"""Names under which an assistant's thoughts stand in a turn."""

TRAINED = ("train", "weight", "loss", "training")
"""Names under which a turn says whether it is trained."""

SPOKEN = (*TRAINED, *THOUGHTS)
BESIDE = {
    "assistant": (*SPOKEN, "tool_calls", "function_call"),
    "call": SPOKEN,
    "tool": (*TRAINED, "name", "tool_call_id"),
}
"""For each role what is read beside its role and content; of any other role only whether it is
trained, which none is."""

EMPTY: tuple[Any, ...] = (None, "", [], {})
"""Cells that say nothing."""

FLAGS = {"true": True, "false": False, "1": True, "0": False, "1.0": True, "0.0": False}
"""What a truth may be written as."""

DEEPEST = 100
"""So far may a tool's definition or arguments be nested."""

TRANSCRIPT = re.compile(r"\A\s*Human:.*?(?:\r?\n){2}Assistant:", re.DOTALL)
_OPEN = re.compile(r"\A(?:\r?\n){2}Human:|\A\s*Human:.*(?:\r?\n){2}Assistant:\s*\Z", re.DOTALL)
"""A prompt that is a transcript: it begins as hh-rlhf's do, or awaits the assistant's words."""
_SPEAKER = re.compile(r"(?:\A\s*|\n\n)(Human|Assistant): ?")


@dataclass(frozen=True)
class Dialect:
    """How a data set writes its turns."""

    keys: Sequence[tuple[str, str]] = KEYS
    roles: Mapping[str, str] = ()  # type: ignore[assignment]
    ignored: frozenset[str] = frozenset()
    """Keys of turns that are left unread."""


PLAIN = Dialect(KEYS, ROLES)


def dialect(columns: Columns | None) -> Dialect:
    """The usual names, and before them those that ``columns`` gives."""
    if columns is None:
        return PLAIN
    own = (columns.role or "role", columns.content or "content")
    roles = ROLES | {
        name.strip().lower(): role
        for role in ("user", "assistant", "system")
        for name in getattr(columns, f"{role}_roles")
    }
    return Dialect((own, *KEYS), roles, frozenset(columns.ignored))


def read(value: Any, *, column: str, role: str, dialect: Dialect) -> list[Turn]:
    """``value`` as turns: a text is one turn of ``role``, or a transcript.

    A table's cell may hold turns as JSON.
    """
    value = _opened(value, dialect)
    if isinstance(value, str):
        if role == "user" and _OPEN.match(value):
            return transcript(value, column=column, awaits=True)
        return [{"role": role, "content": text(value, column=column)}]
    if isinstance(value, dict):
        return [_turn(value, column, dialect)]
    if not isinstance(value, list):
        raise RowError("not_turns", f"{column} is {type(value).__name__}, neither text nor turns")
    return read_list(value, column=column, dialect=dialect)


def read_list(value: Any, *, column: str, dialect: Dialect) -> list[Turn]:
    """A list of turns. Raises :class:`RowError` for anything else."""
    if isinstance(value, Cell):
        value = as_json(value, "not_turns", column)
    if not isinstance(value, list):
        raise RowError("not_turns", f"{column} is {type(value).__name__}, not a list of turns")
    return [_turn(turn, f"{column}[{index}]", dialect) for index, turn in enumerate(value)]


def _opened(value: Any, dialect: Dialect) -> Any:
    """A table's cell as the turns that it holds as JSON, or as it is."""
    if isinstance(value, Cell):
        try:
            found = json.loads(value)
        except (ValueError, RecursionError):
            return value
        turns = found if isinstance(found, list) else [found]
        if turns and all(
            isinstance(turn, dict) and any(role in turn for role, _ in dialect.keys)
            for turn in turns
        ):
            return found
    return value


def transcript(value: str, *, column: str, awaits: bool = False) -> list[Turn]:
    """Turns out of ``Human: ...`` and ``Assistant: ...``, two line breaks before each.

    Where it ``awaits`` an answer, an empty last turn of the assistant is left away.
    """
    content = text(value, column=column).replace("\r\n", "\n")
    before, *parts = _SPEAKER.split(content)
    if before.strip() or not parts:
        raise RowError("not_turns", f"{column} does not begin with 'Human: '")
    turns = [
        {"role": {"Human": "user", "Assistant": "assistant"}[who], "content": said.strip()}
        for who, said in zip(parts[::2], parts[1::2], strict=True)
    ]
    ends_empty = len(turns) > 1 and turns[-1] == {"role": "assistant", "content": ""}
    return turns[:-1] if awaits and ends_empty else turns


def _turn(turn: Any, column: str, dialect: Dialect) -> Turn:
    if not isinstance(turn, dict):
        raise RowError("not_turns", f"{column} is {type(turn).__name__}, not a turn")
    if dialect.ignored:
        turn = {key: one for key, one in turn.items() if key not in dialect.ignored}
    role_key, content_key = _keys(turn, column, dialect)
    role = _role(turn[role_key], column, dialect)
    content = _content(turn.get(content_key), f"{column}.{content_key}", turn)
    if len(turn) == 2 and content_key in turn and role != "call":
        return {"role": role, "content": content}
    return _rich(turn, role, content, column)


def _keys(turn: Mapping[str, Any], column: str, dialect: Dialect) -> tuple[str, str]:
    """The keys of the role and the content. Raises :class:`RowError` for a turn without them."""
    if found := _found_keys(turn, dialect):
        return found
    for role_key, content_key in dialect.keys:
        if role_key in turn:
            raise RowError("not_turns", f"{column} has a {role_key} and no {content_key}")
    raise RowError(
        "not_turns",
        f"{column} has neither role and content nor from and value; "
        "name its keys in columns.role and columns.content",
    )


def _found_keys(turn: Mapping[str, Any], dialect: Dialect) -> tuple[str, str] | None:
    for role_key, content_key in dialect.keys:
        if role_key in turn and (content_key in turn or _calls(turn)):
            return role_key, content_key
    return None


def unread(cell: Any, dialect: Dialect) -> set[str]:
    """The keys of turns in a cell that hold something and that nobody reads."""
    found = _opened(cell, dialect)
    return {
        key
        for turn in (found if isinstance(found, list) else [found])
        if isinstance(turn, dict) and len(turn) > 2 and (keys := _found_keys(turn, dialect))
        for key in turn.keys() - {*keys, *_read_beside(turn[keys[0]], dialect)}
        if turn[key] not in EMPTY
    }


def _read_beside(name: Any, dialect: Dialect) -> set[str]:
    """What is read of a turn beside its content, by the name of its role."""
    role = _known_role(name, dialect)
    return set(BESIDE.get(role or "", TRAINED)) - dialect.ignored


def _known_role(name: Any, dialect: Dialect) -> str | None:
    return dialect.roles.get(name.strip().lower()) if isinstance(name, str) else None


def _role(name: Any, column: str, dialect: Dialect) -> str:
    role = _known_role(name, dialect)
    if role is None:
        known = ", ".join(dialect.roles)
        raise RowError(
            "unknown_role",
            f"{column} has the role {name!r}; known: {known}; name others in columns.user_roles, "
            "assistant_roles or system_roles",
        )
    return role


def _calls(turn: Mapping[str, Any]) -> Any:
    return turn.get("tool_calls") or turn.get("function_call")


def _content(value: Any, column: str, turn: Mapping[str, Any]) -> str:
    """A text, or the joined texts of OpenAI's content parts; a call may come without."""
    if isinstance(value, str):
        return text(value, column=column)
    if value is None and _calls(turn):
        return ""
    if isinstance(value, list) and value and all(_is_text_part(part) for part in value):
        return "".join(text(part["text"], column=f"{column} part") for part in value)
    return text(value, column=column)


def _is_text_part(part: Any) -> bool:
    return isinstance(part, dict) and part.get("type") == "text" and "text" in part


def _rich(turn: Mapping[str, Any], role: str, content: str, column: str) -> Turn:
    """A turn with what may stand beside its role and content."""
    if role == "call":
        said = _thought(turn, column) | _untrained(turn, column)
        calls = _sharegpt_calls(content, column)
        return {"role": "assistant", "content": "", "tool_calls": calls, **said}
    read: Turn = {"role": role, "content": content}
    if role == "assistant":
        if _calls(turn):
            raw = turn.get("tool_calls") or [{"function": turn["function_call"]}]
            read["tool_calls"] = _openai_calls(raw, f"{column}.tool_calls")
        read |= _thought(turn, column) | _untrained(turn, column)
    elif _calls(turn):
        raise RowError("bad_tool_call", f"{column} is a {role} turn and calls a tool")
    if role == "tool":
        for key in ("name", "tool_call_id"):
            if turn.get(key):
                read[key] = text(turn[key], column=f"{column}.{key}")
    return read


def _thought(turn: Mapping[str, Any], column: str) -> Turn:
    """The thoughts of an assistant turn, which stand under one of several names."""
    said = {
        name: text(turn[name], column=f"{column}.{name}") for name in THOUGHTS if turn.get(name)
    }
    if len(set(said.values())) > 1:
        raise RowError("not_turns", f"{column} has different texts in {' and '.join(said)}")
    return {"reasoning_content": next(iter(said.values()))} if said else {}


def _untrained(turn: Mapping[str, Any], column: str) -> Turn:
    """``{"train": False}`` where one of :data:`TRAINED` asks for it."""
    asked = [
        truth(turn[name], "bad_train_flag", f"{column}.{name}")
        for name in TRAINED
        if turn.get(name) is not None
    ]
    return {} if all(asked) else {"train": False}


def truth(value: Any, rule: str, column: str) -> bool:
    """``value`` as true or false. Raises :class:`RowError` of ``rule``."""
    key = str(value).strip().lower() if isinstance(value, (bool, int, float, str)) else ""
    if key not in FLAGS:
        raise RowError(rule, f"{column} is {str(value)[:60]!r}, neither true nor false")
    return FLAGS[key]


def _sharegpt_calls(content: str, column: str) -> list[Any]:
    found = as_json(content, "bad_tool_call", column)
    calls = found if isinstance(found, list) else [found]
    return [_call(one, column) for one in calls]


def _openai_calls(value: Any, column: str) -> list[Any]:
    if not isinstance(value, list):
        raise RowError("bad_tool_call", f"{column} is {type(value).__name__}, not a list of calls")
    return [
        _call(
            call.get("function") if isinstance(call, dict) else call,
            f"{column}[{index}]",
            call_id=call.get("id") if isinstance(call, dict) else None,
        )
        for index, call in enumerate(value)
    ]


def _call(function: Any, column: str, *, call_id: Any = None) -> dict[str, Any]:
    if not isinstance(function, dict) or not isinstance(function.get("name"), str):
        raise RowError("bad_tool_call", f"{column} names no function")
    arguments = function.get("arguments", function.get("parameters", {}))
    if isinstance(arguments, str):
        arguments = as_json(arguments or "{}", "bad_tool_call", f"{column}.arguments")
    arguments = {} if arguments is None else arguments
    if not isinstance(arguments, dict):
        kind = type(arguments).__name__
        raise RowError("bad_tool_call", f"{column}.arguments is {kind}, not an object")
    known = {"id": text(call_id, column=f"{column}.id")} if isinstance(call_id, str) else {}
    name = text(function["name"], column=f"{column}.name")
    function = {"name": name, "arguments": _clean(arguments, "bad_tool_call", column)}
    return {**known, "type": "function", "function": function}


def tools(value: Any) -> list[Any]:
    """Definitions of functions in OpenAI's form, out of that form or of bare functions.

    Raises :class:`RowError`.
    """
    if isinstance(value, str):
        value = as_json(value, "bad_tools", "tools") if value.strip() else []
    value = [] if value is None else value
    if not isinstance(value, list):
        raise RowError("bad_tools", f"tools is {type(value).__name__}, not a list")
    return [_tool(tool, f"tools[{index}]") for index, tool in enumerate(value)]


def _tool(tool: Any, column: str) -> dict[str, Any]:
    if isinstance(tool, str):
        tool = as_json(tool, "bad_tools", column)
    function = tool.get("function", tool) if isinstance(tool, dict) else None
    if not isinstance(function, dict) or not isinstance(function.get("name"), str):
        raise RowError("bad_tools", f"{column} names no function")
    return _clean({"type": "function", "function": function}, "bad_tools", column)


def as_json(content: str, rule: str, column: str) -> Any:
    """The value of a JSON text. Raises :class:`RowError` of ``rule``."""
    try:
        return json.loads(content)
    except (ValueError, RecursionError):
        raise RowError(rule, f"{column} is not JSON: {content[:60]!r}") from None


def _clean(value: Any, rule: str, column: str) -> Any:
    """``value`` if it is JSON, in UTF-8 and not too deep. Raises :class:`RowError`."""
    level = [value]
    for _ in range(DEEPEST):
        level = [
            inner
            for one in level
            if isinstance(one, (dict, list))
            for inner in (one.values() if isinstance(one, dict) else one)
        ]
    if level:
        raise RowError(rule, f"{column} is nested more than {DEEPEST} deep")
    try:
        written = json.dumps(value, ensure_ascii=False, allow_nan=False)
    except (TypeError, ValueError) as error:  # a date of a Parquet file, a NaN
        raise RowError(rule, f"{column} holds what JSON cannot: {error}") from None
    text(written, column=column)
    return value
