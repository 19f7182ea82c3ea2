"""Rows out of tables, one at a time: CSV, TSV, Parquet and Arrow files."""

import csv
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import partial
from typing import Any, BinaryIO

from stages.base import StageError
from stages.data import files
from stages.data.files import DataFile, Tick
from stages.data.places import Cell, Place, Record
from stages.data.rules import RowError

BATCH = 512
"""Rows of a binary table that are held at a time."""

ENDS = b"\xff\xff\xff\xff\x00\x00\x00\x00"
"""What a stream of Arrow closes with."""


def read_delimited(file: DataFile, tick: Tick, *, delimiter: str) -> Iterator[Record]:
    """A text table with a header. An empty cell is a missing value.

    The column without a name that pandas writes for its index is called ``Unnamed: 0``.
    """
    csv.field_size_limit(1 << 30)
    with files.opened(file, tick) as stream:
        rows = csv.reader(_decoded(stream, file), delimiter=delimiter, strict=True)
        header = _header(file, rows)
        while True:
            place = Place(file.name, line=rows.line_num + 1)
            cells = _next(file, rows, place.line)
            if cells is None:
                return
            if cells:
                yield _record(place, header, cells)


def _decoded(stream: BinaryIO, file: DataFile) -> Iterator[str]:
    for number, line in enumerate(stream, 1):
        try:
            yield line.decode("utf-8-sig" if number == 1 else "utf-8")
        except UnicodeDecodeError as error:
            raise StageError(
                f"{file.shown}:{number}: not UTF-8 (byte 0x{line[error.start]:02x}); "
                "save the file as UTF-8"
            ) from None


def _next(file: DataFile, rows: Any, first: int | None) -> list[str] | None:
    """The next row; where its quotes never close, the fault stands where it begins."""
    try:
        return next(rows, None)
    except csv.Error as error:
        broken = "new-line character" in str(error)
        way_out = "save it with LF or CRLF line breaks" if broken else "mend the quotes of its row"
        raise StageError(f"{file.shown}:{first}: not a table ({error}); {way_out}") from None


def _header(file: DataFile, rows: Any) -> list[str]:
    cells = _next(file, rows, 1)
    while cells is not None and not cells:
        cells = _next(file, rows, rows.line_num + 1)
    header = [name.strip() for name in cells or []]
    if len(header) > 1 and not header[0]:
        header[0] = "Unnamed: 0"
    _require_names(f"{file.shown}:1", header)
    return header


def _require_names(place: str, header: Sequence[str]) -> None:
    """Raise :class:`StageError` for columns that cannot be told apart."""
    if len(set(header)) < len(header) or not all(header):
        raise StageError(
            f"{place}: the header must name every column once, not {', '.join(header)}"
        )


def _record(place: Place, header: list[str], cells: list[str]) -> Record:
    if len(cells) != len(header):
        detail = f"{len(cells)} cells under {len(header)} columns"
        return Record(place, cells, RowError("wrong_number_of_cells", detail))
    return Record(place, {k: _cell(c) for k, c in zip(header, cells, strict=True)})


def _cell(cell: str) -> Any:
    return (Cell(cell) if cell[0] in "[{" else cell) if cell else None


def read_parquet(file: DataFile, tick: Tick) -> Iterator[Record]:
    """A Parquet file, by batches."""
    import pyarrow.parquet

    def batches(source: Any) -> Iterator[Any]:
        table = pyarrow.parquet.ParquetFile(source)
        _require_names(file.shown, table.schema_arrow.names)
        for batch in table.iter_batches(batch_size=BATCH):
            tick(file.path.stat().st_size * len(batch) // max(1, table.metadata.num_rows))
            yield batch

    return _rows(file, tick, "Parquet", batches)


def read_arrow(file: DataFile, tick: Tick) -> Iterator[Record]:
    """An Arrow IPC stream or file, as ``save_to_disk`` writes them."""
    import pyarrow

    def batches(source: Any) -> Iterator[Any]:
        magic = source.read(6)
        source.seek(0)
        if magic == b"ARROW1":
            table = pyarrow.ipc.open_file(source)
            found = (table.get_batch(index) for index in range(table.num_record_batches))
        else:
            table = pyarrow.ipc.open_stream(source)
            found = iter(table)
        _require_names(file.shown, table.schema.names)
        for batch in found:
            tick(batch.nbytes)
            yield from (batch.slice(start, BATCH) for start in range(0, len(batch), BATCH))
        if magic != b"ARROW1":
            _require_end(source)

    return _rows(file, tick, "Arrow", batches)


def _require_end(source: Any) -> None:
    """Raise ``OSError`` for a stream that is cut between two batches, or that more follows: pyarrow
    takes both for its end."""
    end = source.tell()
    source.seek(max(0, end - len(ENDS)))
    if source.read(len(ENDS) + 1) != ENDS:
        raise OSError("it does not close as a stream does, so rows may be missing")


def _rows(
    file: DataFile, tick: Tick, what: str, batches: Callable[[Any], Iterator[Any]]
) -> Iterator[Record]:
    """Damage that pyarrow finds names the file and the last row before it."""
    import pyarrow

    row = 0
    with files.seekable(file, tick) as source:
        try:
            for batch in batches(source):
                batch.validate(full=True)  # else damaged offsets end the process
                filled = [field.name for field in batch.schema if _has_struct(field.type)]
                for value in batch.to_pylist():
                    for name in filled:
                        value[name] = _without_none(value[name])
                    yield Record(Place(file.name, row=row), value)
                    row += 1
        except (pyarrow.ArrowException, OSError, UnicodeDecodeError, OverflowError) as error:
            raise StageError(
                f"{file.shown}: damaged {what} file, after row {row} "
                f"({str(error).splitlines()[0]}); fetch it again"
            ) from None


def _has_struct(kind: Any) -> bool:
    import pyarrow

    if pyarrow.types.is_struct(kind):
        return True
    return any(_has_struct(kind.field(n).type) for n in range(kind.num_fields))


def _without_none(value: Any) -> Any:
    """Structs of one column have the same fields, so that absent ones come back as ``None``."""
    if isinstance(value, dict):
        return {key: _without_none(one) for key, one in value.items() if one is not None}
    if isinstance(value, list):
        return [_without_none(one) for one in value]
    return value


READERS: Mapping[str, Callable[[DataFile, Tick], Iterator[Record]]] = {
    ".csv": partial(read_delimited, delimiter=","),
    ".tsv": partial(read_delimited, delimiter="\t"),
    ".parquet": read_parquet,
    ".arrow": read_arrow,
}
