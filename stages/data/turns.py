"""Turns of a conversation in every dialect, as turns of one."""

import json
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from stages.data.columns import Columns
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
TRANSCRIPT = re.compile(r"\A\s*(?:Human|H): ")
_SPEAKER = re.compile(r"(?:\A\s*|\n\n)(Human|Assistant): ?")


@dataclass(frozen=True)
class Dialect:
    """How a data set writes its turns."""

    keys: Sequence[tuple[str, str]] = KEYS
    roles: Mapping[str, str] = ()  # type: ignore[assignment]


PLAIN = Dialect(KEYS, ROLES)


def dialect(columns: Columns | None) -> Dialect:
    """The usual names, and before them those that ``columns`` gives."""
    if columns is None:
        return PLAIN
    own = (columns.role or "role", columns.content or "content")
    roles = ROLES | {
        name: role
        for role in ("user", "assistant", "system")
        for name in getattr(columns, f"{role}_roles")
    }
    return Dialect((own, *KEYS), roles)


def read(value: Any, *, column: str, role: str, dialect: Dialect) -> list[Turn]:
    """``value`` as turns: a text is one turn of ``role``, or a transcript."""
    if isinstance(value, str):
        if role == "user" and value.startswith("\n\nHuman: "):
            return transcript(value, column=column)
        return [{"role": role, "content": text(value, column=column)}]
    if isinstance(value, dict):
        return [_turn(value, column, dialect)]
    return read_list(value, column=column, dialect=dialect)


def read_list(value: Any, *, column: str, dialect: Dialect) -> list[Turn]:
    """A list of turns. Raises :class:`RowError` for anything else."""
    if not isinstance(value, list):
        raise RowError("not_turns", f"{column} is {type(value).__name__}, not a list of turns")
    return [_turn(turn, f"{column}[{index}]", dialect) for index, turn in enumerate(value)]


def transcript(value: str, *, column: str) -> list[Turn]:
    """Turns out of ``Human: ...`` and ``Assistant: ...``, two line breaks before each.

    An empty last turn of the assistant awaits an answer and is left away.
    """
    content = text(value, column=column)
    before, *parts = _SPEAKER.split(content)
    if before.strip() or not parts:
        raise RowError("not_turns", f"{column} does not begin with 'Human: '")
    turns = [
        {"role": {"Human": "user", "Assistant": "assistant"}[who], "content": said.strip()}
        for who, said in zip(parts[::2], parts[1::2], strict=True)
    ]
    awaits = len(turns) > 1 and turns[-1] == {"role": "assistant", "content": ""}
    return turns[:-1] if awaits else turns


def _turn(turn: Any, column: str, dialect: Dialect) -> Turn:
    if not isinstance(turn, dict):
        raise RowError("not_turns", f"{column} is {type(turn).__name__}, not a turn")
    for role_key, content_key in dialect.keys:
        if role_key in turn and (content_key in turn or _calls(turn)):
            role = _role(turn[role_key], column, dialect)
            content = _content(turn.get(content_key), f"{column}.{content_key}", turn)
            if len(turn) == 2 and content_key in turn and role != "call":
                return {"role": role, "content": content}
            return _rich(turn, role, content, column)
    raise RowError("not_turns", f"{column} has neither role and content nor from and value")


def _role(name: Any, column: str, dialect: Dialect) -> str:
    if not isinstance(name, str) or name not in dialect.roles:
        known = ", ".join(dialect.roles)
        raise RowError("unknown_role", f"{column} has the role {name!r}; known: {known}")
    return dialect.roles[name]


def _calls(turn: Mapping[str, Any]) -> Any:
    return turn.get("tool_calls") or turn.get("function_call")


def _content(value: Any, column: str, turn: Mapping[str, Any]) -> str:
    """A text, or the joined texts of OpenAI's content parts; a call may come without."""
    if isinstance(value, str):
        return text(value, column=column)
    if value is None and _calls(turn):
        return ""
    if isinstance(value, list) and value and all(_is_text_part(part) for part in value):
        return text("".join(part["text"] for part in value), column=column)
    return text(value, column=column)


def _is_text_part(part: Any) -> bool:
    return isinstance(part, dict) and part.get("type") == "text" and "text" in part


def _rich(turn: Mapping[str, Any], role: str, content: str, column: str) -> Turn:
    """A turn with what may stand beside its role and content."""
    if role == "call":
        return {"role": "assistant", "content": "", "tool_calls": _sharegpt_calls(content, column)}
    read: Turn = {"role": role, "content": content}
    if role == "assistant":
        if _calls(turn):
            raw = turn.get("tool_calls") or [{"function": turn["function_call"]}]
            read["tool_calls"] = _openai_calls(raw, f"{column}.tool_calls")
        if turn.get("reasoning_content"):
            read["reasoning_content"] = text(
                turn["reasoning_content"], column=f"{column}.reasoning_content"
            )
        if turn.get("weight") == 0 or turn.get("train") is False:
            read["train"] = False
    elif _calls(turn):
        raise RowError("bad_tool_call", f"{column} is a {role} turn and calls a tool")
    if role == "tool":
        for key in ("name", "tool_call_id"):
            if turn.get(key):
                read[key] = text(turn[key], column=f"{column}.{key}")
    return read


def _sharegpt_calls(content: str, column: str) -> list[Any]:
    found = _parsed(content, "bad_tool_call", column)
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
        arguments = _parsed(arguments or "{}", "bad_tool_call", f"{column}.arguments")
    if not isinstance(arguments, dict):
        kind = type(arguments).__name__
        raise RowError("bad_tool_call", f"{column}.arguments is {kind}, not an object")
    known = {"id": call_id} if isinstance(call_id, str) else {}
    function = {"name": function["name"], "arguments": _clean(arguments, column)}
    return {**known, "type": "function", "function": function}


def tools(value: Any) -> list[Any]:
    """Definitions of functions in OpenAI's form, out of that form or of bare functions.

    Raises :class:`RowError`.
    """
    if isinstance(value, str):
        value = _parsed(value, "bad_tools", "tools") if value.strip() else []
    if not isinstance(value, list):
        raise RowError("bad_tools", f"tools is {type(value).__name__}, not a list")
    return [_tool(tool, f"tools[{index}]") for index, tool in enumerate(value)]


def _tool(tool: Any, column: str) -> dict[str, Any]:
    if isinstance(tool, str):
        tool = _parsed(tool, "bad_tools", column)
    function = tool.get("function", tool) if isinstance(tool, dict) else None
    if not isinstance(function, dict) or not isinstance(function.get("name"), str):
        raise RowError("bad_tools", f"{column} names no function")
    return _clean({"type": "function", "function": function}, column)


def _parsed(content: str, rule: str, column: str) -> Any:
    try:
        return json.loads(content)
    except (ValueError, RecursionError):
        raise RowError(rule, f"{column} is not JSON: {content[:60]!r}") from None


def _clean(value: Any, column: str) -> Any:
    """``value`` if UTF-8 can write it. Raises :class:`RowError`."""
    text(json.dumps(value, ensure_ascii=False), column=column)
    return value
