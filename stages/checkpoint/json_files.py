"""The JSON files of a checkpoint folder."""

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any, TypeVar

from stages.base import StageError

T = TypeVar("T")


def read_json(path: Path) -> dict[str, Any]:
    """A JSON object. Raises :class:`StageError` when it is missing or is not one."""
    try:
        value = json.loads(path.read_text(encoding="utf-8"))
    except FileNotFoundError:
        raise StageError(f"{path}: missing") from None
    except (OSError, ValueError, RecursionError) as error:
        raise StageError(f"{path}: not readable JSON ({error})") from None
    if not isinstance(value, dict):
        raise StageError(f"{path}: a JSON object was expected, not a {type(value).__name__}")
    return value


def read_json_if_there(path: Path) -> dict[str, Any]:
    """As :func:`read_json`; an absent file is an empty object."""
    return read_json(path) if path.is_file() else {}


def expect(file: Path, values: Mapping[str, Any], key: str, kind: type[T]) -> T | None:
    """``values[key]`` of ``file``; ``None`` for one that is absent or null. Raises
    :class:`StageError` for a value of another kind, such as a text where a list is meant."""
    value = values.get(key)
    if value is not None and not isinstance(value, kind):
        what = {dict: "an object", list: "a list"}.get(kind, kind.__name__)
        raise StageError(f"{file}: {key} is {value!r}, and {what} was expected")
    return value
