"""The JSON files of a checkpoint folder."""

import json
from pathlib import Path
from typing import Any

from stages.base import StageError


def read_json(path: Path) -> dict[str, Any]:
    """A JSON object. Raises :class:`StageError` when it is missing or is not one."""
    try:
        value = json.loads(path.read_text(encoding="utf-8"))
    except FileNotFoundError:
        raise StageError(f"{path}: missing") from None
    except (OSError, ValueError) as error:
        raise StageError(f"{path}: not readable JSON ({error})") from None
    if not isinstance(value, dict):
        raise StageError(f"{path}: a JSON object was expected, not a {type(value).__name__}")
    return value


def read_json_if_there(path: Path) -> dict[str, Any]:
    """As :func:`read_json`; an absent file is an empty object."""
    return read_json(path) if path.is_file() else {}
