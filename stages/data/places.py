"""Where a row stands, and the row as it stands there."""

from dataclasses import dataclass
from typing import Any

from stages.data.rules import RowError


@dataclass(frozen=True)
class Place:
    """A line of a text file, or a row of an array or a table."""

    file: str
    line: int | None = None
    """Counted from 1."""

    row: int | None = None
    """Counted from 0, as in ``rows[row]``."""

    origin: str | None = None
    """Where the user's own file has it, for a line of a file that a stage wrote."""

    def __str__(self) -> str:
        own = f"{self.file}[{self.row}]" if self.line is None else f"{self.file}:{self.line}"
        return own if self.origin is None else f"{self.origin} ({own})"


class Cell(str):
    """The text of a table's cell that may be JSON: it is read so where a list belongs."""


@dataclass(frozen=True)
class Record:
    """One row as it stands in its file: a JSON value, or the fault that keeps it from being one."""

    place: Place
    value: Any
    fault: RowError | None = None
