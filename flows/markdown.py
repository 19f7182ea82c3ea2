"""Pieces of Markdown: tables, cells, blocks of text."""

import re
from collections.abc import Sequence

MAX_CHARS = 400
"""Longest text in a cell."""


def table(head: Sequence[str], rows: Sequence[Sequence[str]], *, numbers: bool = False) -> str:
    """A table; ``numbers`` sets every column but the first flush right."""
    rule = ["---", *("---:" if numbers else "---" for _ in head[1:])]
    return "\n".join(f"| {' | '.join(row)} |" for row in (head, rule, *rows))


def cell(text: str) -> str:
    """``text`` for a cell of a table: cut, on one line, nothing in it is markup."""
    cut = text if len(text) <= MAX_CHARS else text[:MAX_CHARS].rstrip() + " …"
    return re.sub(r"([\\`*_{}\[\]<>|#~$&])", r"\\\1", cut.strip()).replace("\n", "<br>")


def fenced(text: str) -> str:
    """``text`` as a code block, whatever backticks it holds itself."""
    longest = max((len(run) for run in re.findall(r"`+", text)), default=0)
    fence = "`" * max(3, longest + 1)
    return f"{fence}text\n{text.strip()}\n{fence}"
