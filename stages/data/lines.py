"""JSON lines that every reader splits alike."""

import json
from collections.abc import Iterable
from contextlib import suppress
from pathlib import Path
from typing import Any

import orjson

# JSON leaves these as they are, and str.splitlines takes each for the end of a line.
_SEPARATORS = str.maketrans({"\u0085": "\\u0085", "\u2028": "\\u2028", "\u2029": "\\u2029"})
_DIGITS = bytes(ord("0") if chr(code) in "0123456789" else ord(" ") for code in range(256))
_LONG = b"0" * 19
_encode = json.JSONEncoder(ensure_ascii=False).encode


def dump(value: Any) -> str:
    """``value`` as JSON without a line break, readable in every language."""
    line = _encode(value)
    return line if line.isascii() else line.translate(_SEPARATORS)


def load(line: bytes) -> Any:
    """The value of a JSON text; ``ValueError`` or ``RecursionError`` where it is none.

    What the fast parser refuses goes to the lenient one, so that half a surrogate pair or a NaN
    becomes the fault of its column and not of the whole line. So does a line with a long number:
    the fast parser makes a float of an integer over 64 bits.
    """
    if _LONG in line.translate(_DIGITS):  # a pattern takes as long as all the rest
        return json.loads(line.decode())
    try:
        return orjson.loads(line)
    except orjson.JSONDecodeError:
        return json.loads(line.decode())


def repeated_key(content: bytes, value: Any) -> str | None:
    """A key that an object in ``content`` names twice; ``value`` keeps the last and loses the rest.

    Only where ``content`` has more keys than ``value`` is it parsed again to find which.
    """
    # Inside a text a quotation mark stands behind a backslash. A pattern takes ten times as long.
    ends = sum(content.count(end) - content.count(b"\\" + end) for end in (b'":', b'" :'))
    if ends <= _num_keys(value):
        return None
    found: list[str] = []

    def note(pairs: list[tuple[str, Any]]) -> None:
        keys = [key for key, _ in pairs]
        found.extend(key for key in dict.fromkeys(keys) if keys.count(key) > 1)

    json.loads(content, object_pairs_hook=note)
    return next(iter(found), None)


def _num_keys(value: Any) -> int:
    number, inside = 0, [value]
    for one in inside:  # which grows meanwhile
        if isinstance(one, dict):
            number += len(one)
            inside.extend(one.values())
        elif isinstance(one, list):
            inside.extend(one)
    return number


def rows(path: Path) -> list[Any]:
    """The values of a file's lines, in order; a last line that a kill has cut short is left out.

    Not by ``str.splitlines``, which also splits at separators that JSON leaves as they are.
    """
    whole, _, last = path.read_text(encoding="utf-8").rpartition("\n")
    found = [json.loads(line) for line in whole.split("\n") if line]
    with suppress(ValueError):  # a row that lacks no more than its line break counts
        found.append(json.loads(last))
    return found


def join(lines: Iterable[str]) -> str:
    """A file's text: each line with its newline."""
    return "".join(f"{line}\n" for line in lines)
