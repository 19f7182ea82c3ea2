"""JSON lines that every reader splits alike."""

import json
from collections.abc import Iterable
from typing import Any

# JSON leaves these as they are, and str.splitlines takes each for the end of a line.
_SEPARATORS = str.maketrans({"\u0085": "\\u0085", "\u2028": "\\u2028", "\u2029": "\\u2029"})


def dump(value: Any) -> str:
    """``value`` as JSON without a line break, readable in every language."""
    return json.dumps(value, ensure_ascii=False).translate(_SEPARATORS)


def join(lines: Iterable[str]) -> str:
    """A file's text: each line with its newline."""
    return "".join(f"{line}\n" for line in lines)
