"""Rows out of tables, one at a time: CSV, TSV, Parquet and Arrow files."""

import csv
import json
from collections.abc import Callable, Iterator, Mapping
from functools import partial
from typing import Any, BinaryIO

from stages.base import StageError
from stages.data import files
from stages.data.files import DataFile, Tick
from stages.data.places import Place, Record
from stages.data.rules import RowError

BATCH = 512
"""Rows of a binary table that are held at a time."""


def read_delimited(file: DataFile, tick: Tick, *, delimiter: str) -> Iterator[Record]:
    """A text table with a header. An empty cell is a missing value; ``[`` or ``{`` opens JSON."""
    csv.field_size_limit(1 << 30)
    with files.opened(file, tick) as stream:
        rows = csv.reader(_decoded(stream, file), delimiter=delimiter, strict=True)
        header = _header(file, rows)
        while True:
            place = Place(file.name, line=rows.line_num + 1)
            cells = _next(file, rows)
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


def _next(file: DataFile, rows: Any) -> list[str] | None:
    try:
        return next(rows, None)
    except csv.Error as error:
        raise StageError(
            f"{file.shown}:{rows.line_num}: not a table ({error}); mend the quotes there"
        ) from None


def _header(file: DataFile, rows: Any) -> list[str]:
    header = [name.strip() for name in _next(file, rows) or []]
    if len(set(header)) < len(header) or not all(header):
        raise StageError(
            f"{file.shown}:1: the header must name every column once, not {', '.join(header)}"
        )
    return header


def _record(place: Place, header: list[str], cells: list[str]) -> Record:
    if len(cells) != len(header):
        detail = f"{len(cells)} cells under {len(header)} columns"
        return Record(place, cells, RowError("wrong_number_of_cells", detail))
    return Record(place, {k: _cell(c) for k, c in zip(header, cells, strict=True)})


def _cell(cell: str) -> Any:
    if cell[:1] in ("[", "{"):
        try:
            return json.loads(cell)
        except (ValueError, RecursionError):
            return cell
    return cell or None


def read_parquet(file: DataFile, tick: Tick) -> Iterator[Record]:
    """A Parquet file, by batches."""
    import pyarrow.parquet

    def batches(source: Any) -> Iterator[Any]:
        table = pyarrow.parquet.ParquetFile(source)
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
            found = iter(pyarrow.ipc.open_stream(source))
        for batch in found:
            tick(batch.nbytes)
            yield from (batch.slice(start, BATCH) for start in range(0, len(batch), BATCH))

    return _rows(file, tick, "Arrow", batches)


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
                for value in batch.to_pylist():
                    yield Record(Place(file.name, row=row), value)
                    row += 1
        except (pyarrow.ArrowException, OSError, UnicodeDecodeError, OverflowError) as error:
            raise StageError(
                f"{file.shown}: damaged {what} file, after row {row} "
                f"({str(error).splitlines()[0]}); fetch it again"
            ) from None


READERS: Mapping[str, Callable[[DataFile, Tick], Iterator[Record]]] = {
    ".csv": partial(read_delimited, delimiter=","),
    ".tsv": partial(read_delimited, delimiter="\t"),
    ".parquet": read_parquet,
    ".arrow": read_arrow,
}
