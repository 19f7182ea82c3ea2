"""``python -m stages.data inspect FILE...``: what data files hold, for people."""

import argparse
import datetime
import os
import sys
from collections.abc import Sequence
from pathlib import Path

from stages.base import StageError
from stages.data import inspection, page, shapes, templates
from stages.data.columns import FIELDS, Columns
from stages.manifest import write_atomically


def main(argv: Sequence[str] | None = None) -> int:
    """Print what each file holds; 0, or 1 where a file cannot be read or rows are faulty."""
    given = _parser().parse_args(argv)
    try:
        template = templates.load(given.model, date=given.date) if given.model else None
        every = []
        for file in inspection.located(given.files):
            found = inspection.look(
                file,
                limit=given.rows,
                shape=given.shape,
                columns=_columns(given.column),
                template=template,
            )
            sys.stdout.write(page.text(found, colour=sys.stdout.isatty()))
            every.append(found)
        if given.html:
            if given.html.is_dir() or not given.html.parent.is_dir():
                raise StageError(f"--html {given.html}: name a file in a folder that there is")
            write_atomically(given.html, page.html(every))
            sys.stdout.write(f"page: {given.html}\n")
        sys.stdout.flush()
    except BrokenPipeError:  # whoever read has read enough, and nothing may be written at exit
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 1
    except (StageError, OSError) as error:  # a file that may not be read, a full disk
        sys.stderr.write(f"{page.visible(str(error))}\n")
        return 1
    return int(any(inspection.is_faulty(found) for found in every))


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="python -m stages.data", description=__doc__)
    verbs = parser.add_subparsers(required=True, metavar="inspect")
    inspect = verbs.add_parser("inspect", help="shape, rows, lengths, problems and samples")
    inspect.add_argument("files", nargs="+", type=Path, help="data files, or folders of them")
    inspect.add_argument("--model", type=Path, help="model folder: renders and counts tokens")
    inspect.add_argument("--shape", choices=list(shapes.SHAPES), help="instead of detecting it")
    inspect.add_argument(
        "--column", action="append", default=[], metavar="FIELD=NAME", help="a column's own name"
    )
    inspect.add_argument("--date", type=datetime.date.fromisoformat, help="for the template")
    inspect.add_argument(
        "--rows", type=_number, default=50_000, help="at most so many of each file"
    )
    inspect.add_argument("--html", type=Path, help="write the same as a page")
    return parser


def _number(word: str) -> int:
    if not word.isdecimal() or not int(word):
        raise argparse.ArgumentTypeError(f"{word} is no number of rows: give 1 or more")
    return int(word)


def _columns(words: Sequence[str]) -> Columns | None:
    pairs: dict[str, str] = {}
    known = (*FIELDS, "role", "content")
    ignored: list[str] = []
    for word in words:
        field, _, column = word.partition("=")
        if field == "ignored" and column:
            ignored.append(column)
            continue
        if field not in known or not column:
            listed = ", ".join((*known, "ignored"))
            raise StageError(f"--column {word}: write FIELD=NAME, with one of {listed}")
        pairs[field] = column
    return Columns.model_validate({**pairs, "ignored": tuple(ignored)}) if words else None


if __name__ == "__main__":
    sys.exit(main())
