"""Rows out of JSON files, one at a time: lines, arrays and objects one after another."""

import codecs
import json
import re
from collections.abc import Iterator
from typing import Any, BinaryIO

from stages.base import StageError
from stages.data import files, lines, tables
from stages.data.files import DataFile, Tick
from stages.data.places import Place, Record
from stages.data.rules import RowError

HEAD = 1 << 20
"""Bytes from which a file's layout is told."""

CHUNK = 1 << 20
LARGEST = 1 << 28
"""Characters that one row of an array may have: what is longer is damage."""

BOM = codecs.BOM_UTF8
_BLANK = re.compile(r"[ \t\n\r]*")
_DECODER = json.JSONDecoder()


def read(file: DataFile, *, tick: Tick = lambda _: None) -> Iterator[Record]:
    """Every row of ``file``, in constant memory; places carry its name. Blank lines are not rows.

    A damaged line of JSON lines or of a table is a record with a fault. A damaged array, archive
    or binary file, or a text file that is not UTF-8 raises :class:`StageError` with the place,
    because no row after the damage can be told.
    """
    files.require_known(file)
    if file.kind in tables.READERS:
        return tables.READERS[file.kind](file, tick)
    return _read_json(file, tick)


def _read_json(file: DataFile, tick: Tick) -> Iterator[Record]:
    with files.opened(file, lambda _: None) as stream:
        head = stream.read(HEAD)
        if head[head.rfind(b"\n") + 1 :].removeprefix(BOM).startswith(b"{"):
            head += stream.readline(LARGEST)  # a long row tells as much as a short one
        whole = not stream.read(1)
    layout = _layout(head.removeprefix(BOM), whole=whole)
    with files.opened(file, tick) as stream:
        yield from layout(stream, file)


def _layout(head: bytes, *, whole: bool) -> Any:
    """How the rows follow one another, told from the file's first bytes.

    One whole value on the first line with more below is JSON lines. Where the first line is no
    JSON, it is damaged JSON lines if another line is an object at the left margin, which
    pretty-printed JSON never has.
    """
    rows = [line for line in head.split(b"\n")[: None if whole else -1] if line.strip()]
    if rows and _is_json(rows[0]) and (len(rows) > 1 or rows[0].lstrip()[:1] == b"{"):
        return _read_lines
    if head.lstrip()[:1] == b"[":
        return _read_array
    if any(line.startswith(b"{") and _is_json(line) for line in rows):
        return _read_lines
    return _read_stream


def _is_json(line: bytes) -> bool:
    try:
        lines.load(line)
    except (ValueError, RecursionError):
        return False
    return True


def _read_lines(stream: BinaryIO, file: DataFile) -> Iterator[Record]:
    for number, line in enumerate(stream, 1):
        content = line.removeprefix(BOM)  # files that were joined have one at each seam
        if content.strip():
            yield _record(content.rstrip(b"\r\n"), Place(file.name, line=number))


def _record(line: bytes, place: Place) -> Record:
    try:
        return _parsed(line, lines.load(line), place)
    except UnicodeDecodeError as error:
        shown = line.decode(errors="backslashreplace")
        return Record(place, shown, RowError("invalid_utf8", str(error)))
    except (ValueError, RecursionError) as error:
        return Record(place, line.decode(), RowError("invalid_json", str(error)))


def _parsed(content: bytes, value: Any, place: Place) -> Record:
    """A row; one in which an object names a key twice has lost what stood there first."""
    key = lines.repeated_key(content, value)
    fault = RowError("repeated_key", f"an object has the key {key!r} twice") if key else None
    return Record(place, value, fault)


def _read_array(stream: BinaryIO, file: DataFile) -> Iterator[Record]:
    text = _Text(stream, file)
    text.expect("[")
    row = 0
    while not (row == 0 and text.accept("]")):
        yield text.record(Place(file.name, row=row))
        row += 1
        if text.accept("]"):
            break
        text.expect(",")
    if not text.at_end():
        raise text.fault("more follows the array", text.position)


def _read_stream(stream: BinaryIO, file: DataFile) -> Iterator[Record]:
    text = _Text(stream, file)
    while not text.at_end():
        yield text.record(Place(file.name, line=text.line))


class _Text:
    """A file's text, of which a window around the reading position is held."""

    def __init__(self, stream: BinaryIO, file: DataFile) -> None:
        self.stream, self.file = stream, file
        self.decoder = codecs.getincrementaldecoder("utf-8-sig")()
        self.window, self.position, self.ended = "", 0, False
        self.line, self.column = 1, 1  # of the reading position
        self.num_bytes_lines = 1  # the line of the next byte

    def at_end(self) -> bool:
        """Whether nothing but blanks is left."""
        while True:
            match = _BLANK.match(self.window, self.position)
            self._advance(match.end() if match else self.position)
            if self.position < len(self.window):
                return False
            if not self._more():
                return True

    def accept(self, mark: str) -> bool:
        if self.at_end() or self.window[self.position] != mark:
            return False
        self._advance(self.position + 1)
        return True

    def expect(self, mark: str) -> None:
        if not self.accept(mark):
            raise self.fault(f"Expecting {mark!r}", self.position)

    def record(self, place: Place) -> Record:
        """The next JSON value."""
        self.at_end()
        while True:
            try:
                value, end = _DECODER.raw_decode(self.window, self.position)
            except json.JSONDecodeError as error:
                # Where the window ends inside a value, so does the text that was decoded. Reading
                # on moves the window, so the place is taken from where the value begins.
                inside = error.pos - self.position
                if not self._is_cut(error) or not self._more():
                    raise self.fault(error.msg, self.position + inside) from None
                continue
            except ValueError as error:  # an integer of thousands of digits
                raise self.fault(str(error), self.position) from None
            except RecursionError:
                where = f"{self.file.shown}:{self.line}"
                raise StageError(f"{where}: nested too deeply to be a row") from None
            if end == len(self.window) and self._more():  # a number may go on
                continue
            content = self.window[self.position : end].encode(errors="surrogatepass")
            self._advance(end)
            return _parsed(content, value, place)

    def fault(self, what: str, position: int) -> StageError:
        self._advance(position)
        return StageError(
            f"{self.file.shown}:{self.line}:{self.column}: not JSON ({what}); mend the file there"
        )

    def _is_cut(self, error: json.JSONDecodeError) -> bool:
        if len(self.window) - self.position > LARGEST:
            return False
        return error.msg.startswith("Unterminated") or error.pos > len(self.window) - 16

    def _advance(self, position: int) -> None:
        newlines = self.window.count("\n", self.position, position)
        if newlines:
            self.line += newlines
            self.column = position - self.window.rindex("\n", self.position, position)
        else:
            self.column += position - self.position
        self.position = position

    def _more(self) -> bool:
        """Read on, as much again as is held; ``False`` at the end of the file."""
        if self.ended:
            return False
        held = self.window[self.position :]
        block = self.stream.read(max(CHUNK, len(held)))
        self.ended = not block
        try:
            fresh = self.decoder.decode(block, final=self.ended)
        except UnicodeDecodeError as error:
            line = self.num_bytes_lines + error.object.count(b"\n", 0, error.start)
            raise StageError(
                f"{self.file.shown}:{line}: not UTF-8 (byte 0x{error.object[error.start]:02x}); "
                "save the file as UTF-8"
            ) from None
        self.num_bytes_lines += block.count(b"\n")
        self.window, self.position = held + fresh, 0
        return bool(fresh) or not self.ended
