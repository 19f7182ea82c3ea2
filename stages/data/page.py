"""Findings about data files as text for a terminal and as an HTML page."""

import re
from collections.abc import Sequence
from html import escape

from stages.data.inspection import Findings, Marked, facts, problems

STYLE = (
    "body{font:15px/1.5 system-ui,sans-serif;max-width:60rem;margin:2rem auto;padding:0 1rem;"
    "color:#1d1d1f;background:#fff}h2{margin-top:2.5rem;font-size:1.1rem;word-break:break-all}"
    "table{border-collapse:collapse}td{padding:.15rem 1rem .15rem 0;vertical-align:top}"
    "td:first-child{color:#666}pre{white-space:pre-wrap;word-break:break-word;background:#f6f6f7;"
    "padding:.8rem 1rem;border-radius:6px}mark{background:#c9ecd0;color:inherit}"
    "@media(prefers-color-scheme:dark){body{background:#161617;color:#eee}pre{background:#232326}"
    "mark{background:#1f5132}td:first-child{color:#999}}"
)
_CONTROL = re.compile(r"[\x00-\x08\x0b-\x1f\x7f-\x9f\u202a-\u202e\u2066-\u2069]")
CLIPPED = 1200
"""Characters of a sample that a terminal shows of each piece."""


def text(found: Findings, *, colour: bool = False) -> str:
    """Facts, problems and samples. What is trained stands in ``[[`` and ``]]``, or in colour."""
    out = [found.file.shown, *(f"  {name:<11} {visible(value)}" for name, value in facts(found))]
    for rule, number, places in problems(found):
        out.append(f"  problem     {visible(rule)} {number:,}: {visible(places)}")
    if not problems(found):
        out.append("  problems    none")
    for place, marked in found.samples:
        out += [f"  -- {place}", *(f"  | {line}" for line in _sample(marked, colour).split("\n"))]
    return "\n".join(out) + "\n"


def visible(line: str) -> str:
    """``line`` with control characters written out: what a file holds must not move the cursor."""
    return _CONTROL.sub(lambda found: found[0].encode("unicode_escape").decode(), line)


def _sample(marked: Marked, colour: bool) -> str:
    before, after = ("\033[32m", "\033[0m") if colour else ("[[", "]]")
    return "".join(
        f"{before}{visible(_clipped(piece))}{after}" if trained else visible(_clipped(piece))
        for piece, trained in marked
    )


def _clipped(piece: str) -> str:
    if len(piece) <= CLIPPED:
        return piece
    half = CLIPPED // 2
    return f"{piece[:half]} ... {len(piece) - CLIPPED:,} characters ... {piece[-half:]}"


def html(every: Sequence[Findings]) -> str:
    """One page for all files; what is trained is marked."""
    body = "".join(_section(found) for found in every)
    return (
        '<!doctype html><html lang="en"><meta charset="utf-8">'
        '<meta name="viewport" content="width=device-width">'
        f"<title>Data</title><style>{STYLE}</style><body><h1>Data</h1>"
        f"<p>Marked text is trained.</p>{body}</body></html>\n"
    )


def _section(found: Findings) -> str:
    rows = [(name, value) for name, value in facts(found)]
    rows += [(f"{rule} {number:,}", places) for rule, number, places in problems(found)]
    table = "".join(f"<tr><td>{escape(a)}</td><td>{escape(b)}</td></tr>" for a, b in rows)
    samples = "".join(
        f"<h3>{escape(str(place))}</h3><pre>{_marked(marked)}</pre>"
        for place, marked in found.samples
    )
    return f"<h2>{escape(found.file.shown)}</h2><table>{table}</table>{samples}"


def _marked(marked: Marked) -> str:
    return "".join(
        f"<mark>{escape(piece)}</mark>" if trained else escape(piece) for piece, trained in marked
    )
