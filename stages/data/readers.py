"""Rows out of files: JSON arrays, JSON lines and JSON objects one after another."""

import gzip
import json
import re
import zlib
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from stages.base import StageError
from stages.data.rules import RowError

KINDS = (".json", ".jsonl", ".ndjson")
_BLANK = re.compile(r"\s*")


@dataclass(frozen=True)
class Place:
    """Where a row stands: a line of a text file, or an element of a JSON array."""

    file: str
    line: int | None = None
    """Counted from 1."""

    row: int | None = None
    """Counted from 0, as in ``rows[row]``."""

    def __str__(self) -> str:
        return f"{self.file}[{self.row}]" if self.line is None else f"{self.file}:{self.line}"


@dataclass(frozen=True)
class Record:
    """One row as it stands in its file: a JSON value, or the fault that keeps it from being one."""

    place: Place
    value: Any
    fault: RowError | None = None


def files(folder: Path) -> list[Path]:
    """The data files under ``folder`` in the order of their names; hidden files are no data.

    Raises :class:`StageError` for an empty folder and for a kind of file that is not read here.
    """
    found = sorted(
        path
        for path in folder.rglob("*")
        if path.is_file()
        and not any(part.startswith(".") for part in path.relative_to(folder).parts)
    )
    if not found:
        raise StageError(f"{folder}: holds no data files; give it {', '.join(KINDS)} files")
    for path in found:
        if Path(path.name.removesuffix(".gz")).suffix.lower() not in KINDS:
            raise StageError(
                f"{path}: cannot read this kind of file; "
                f"convert it to one of {', '.join(KINDS)} (.gz may follow)"
            )
    return found


def read(path: Path, *, name: str) -> Iterator[Record]:
    """Every row of ``path``; places carry ``name``. Blank lines are not rows.

    A damaged line of JSON lines is a record with a fault. A damaged array or a file that is not
    text raises :class:`StageError`, because no row after the damage can be told.
    """
    data = _bytes(path).removeprefix(b"\xef\xbb\xbf")
    lines = data.split(b"\n")
    if any(_is_object(line) for line in _first(lines, 10)):
        return _read_lines(lines, name)
    if data.lstrip()[:1] == b"[":
        return _read_array(_decode(data, path), lines, path=path, name=name)
    return _read_stream(_decode(data, path), path=path, name=name)


def _bytes(path: Path) -> bytes:
    if path.suffix != ".gz":
        return path.read_bytes()
    try:
        return gzip.decompress(path.read_bytes())
    except (OSError, EOFError, zlib.error) as error:
        raise StageError(f"{path}: damaged gzip file ({error}); fetch it again") from None


def _decode(data: bytes, path: Path) -> str:
    try:
        return data.decode()
    except UnicodeDecodeError as error:
        line = data.count(b"\n", 0, error.start) + 1
        raise StageError(
            f"{path}:{line}: not UTF-8 (byte 0x{data[error.start]:02x}); save the file as UTF-8"
        ) from None


def _first(lines: list[bytes], number: int) -> Iterator[bytes]:
    filled = (line for line in lines if line.strip())
    return (line for _, line in zip(range(number), filled, strict=False))


def _is_object(line: bytes) -> bool:
    """Whether a line at the left margin is a whole object, which pretty-printed JSON never has."""
    if not line.startswith(b"{"):
        return False
    try:
        json.loads(line)
    except (ValueError, RecursionError):
        return False
    return True


def _read_lines(lines: list[bytes], name: str) -> Iterator[Record]:
    for number, line in enumerate(lines, 1):
        if line.strip():
            yield _record(line, Place(name, line=number))


def _record(line: bytes, place: Place) -> Record:
    try:
        content = line.decode()
    except UnicodeDecodeError as error:
        shown = line.decode(errors="backslashreplace")
        return Record(place, shown, RowError("invalid_utf8", str(error)))
    try:
        return Record(place, json.loads(content))
    except (ValueError, RecursionError) as error:
        return Record(place, content, RowError("invalid_json", str(error)))


def _read_array(content: str, lines: list[bytes], *, path: Path, name: str) -> Iterator[Record]:
    try:
        rows = json.loads(content)
    except json.JSONDecodeError as error:
        if error.msg == "Extra data":  # lines that are arrays: no objects, but lines all the same
            return _read_lines(lines, name)
        raise _not_json(path, error) from None
    except RecursionError:
        raise StageError(f"{path}: nested too deeply to be rows") from None
    return (Record(Place(name, row=row), value) for row, value in enumerate(rows))


def _read_stream(content: str, *, path: Path, name: str) -> Iterator[Record]:
    decoder = json.JSONDecoder()
    line, counted, position = 1, 0, _skip_blank(content, 0)
    while position < len(content):
        line += content.count("\n", counted, position)
        counted = position
        try:
            value, end = decoder.raw_decode(content, position)
        except json.JSONDecodeError as error:
            raise _not_json(path, error) from None
        except RecursionError:
            raise StageError(f"{path}:{line}: nested too deeply to be a row") from None
        yield Record(Place(name, line=line), value)
        position = _skip_blank(content, end)


def _skip_blank(content: str, position: int) -> int:
    match = _BLANK.match(content, position)
    return match.end() if match else position


def _not_json(path: Path, error: json.JSONDecodeError) -> StageError:
    return StageError(
        f"{path}:{error.lineno}:{error.colno}: not JSON ({error.msg}); mend the file there"
    )
