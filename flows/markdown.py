"""Pieces of Markdown: tables, cells, blocks of text."""

import re
from collections.abc import Mapping, Sequence
from urllib.parse import quote

from stages.data.page import visible

MAX_CHARS = 400
"""Longest text in a cell."""

MAX_BLOCK = 4000
"""Longest block of text: a page of a hundred thousand characters is opened by nobody."""


def table(head: Sequence[str], rows: Sequence[Sequence[str]], *, numbers: bool = False) -> str:
    """A table; ``numbers`` sets every column but the first flush right."""
    rule = ["---", *("---:" if numbers else "---" for _ in head[1:])]
    return "\n".join(f"| {' | '.join(row)} |" for row in (head, rule, *rows))


def cell(text: str) -> str:
    """``text`` for a cell of a table: cut, on one line, nothing in it is markup."""
    cut = text if len(text) <= MAX_CHARS else text[:MAX_CHARS].rstrip() + " …"
    return re.sub(r"([\\`*_{}\[\]<>|#~$&])", r"\\\1", _plain(cut.strip())).replace("\n", "<br>")


def fenced(text: str) -> str:
    """``text`` as a code block, whatever backticks it holds itself; of a long one both ends."""
    half = MAX_BLOCK // 2
    if len(text) > MAX_BLOCK:
        text = f"{text[:half]}\n… {len(text) - MAX_BLOCK:,} characters …\n{text[-half:]}"
    shown = _plain(text.strip())
    longest = max((len(run) for run in re.findall(r"`+", shown)), default=0)
    fence = "`" * max(3, longest + 1)
    return f"{fence}text\n{shown}\n{fence}"


def link(text: str, path: str) -> str:
    """A link to a file; a space or a bracket in ``path`` would end it."""
    return f"[{cell(text)}]({quote(path)})"


def estimate(found: Mapping[str, float], form: str, unit: float = 1.0) -> str:
    """A value with its interval. Resamples of one row are all alike and tell nothing."""
    value, low, high = (f"{found[key] / unit:{form}}" for key in ("value", "low", "high"))
    if found["n"] == 1 and found["low"] == found["high"]:
        return f"{value} (one row)"
    return f"{value} [{low}, {high}]"


def _plain(text: str) -> str:
    """What a text holds must neither end a line of a table nor move a terminal's cursor."""
    return visible(re.sub("\r\n?", "\n", text))
