"""Data files as they came: which count, what the user calls them, and their bytes."""

import gzip
import io
import json
import zlib
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from fnmatch import fnmatchcase
from pathlib import Path
from typing import Any, BinaryIO, cast

from stages import tree
from stages.base import StageError
from stages.data.rules import writable

KINDS = (".json", ".jsonl", ".ndjson", ".csv", ".tsv", ".parquet", ".arrow")
COMPRESSED = (".gz", ".zst", ".zstd")
NO_DATA = (
    *(f"{name}{suffix}" for name in ("README", "LICENSE", "LICENCE", "NOTICE")
      for suffix in ("", ".txt", ".rst", ".html")),
    "*.md", "dataset_info*.json", "dataset_dict.json", "state.json",
)  # fmt: skip
"""What data sets carry beside their rows; left out where there are rows."""

Tick = Callable[[int], None]
"""Told of every number of bytes that was read."""

BUFFER = 1 << 20


@dataclass(frozen=True)
class DataFile:
    """One file of a data set."""

    path: Path
    """Where it lies now."""

    name: str
    """Its name in the data set, with ``/`` between folders."""

    shown: str
    """What the user calls it: messages name this one."""

    @property
    def kind(self) -> str:
        """Its suffix without the compression's, in lower case."""
        return Path(_plain(self.name)).suffix.lower()


def _plain(name: str) -> str:
    suffix = Path(name).suffix
    return name.removesuffix(suffix) if suffix.lower() in COMPRESSED else name


def of_input(source: Path, *, what: str) -> list[DataFile]:
    """The data files of a fetched output, in the order of their names.

    Raises :class:`StageError` for an input without files and for a kind that is not read here.
    """
    folder = source / "data"
    if not folder.is_dir():
        raise StageError(f"{folder}: no such directory; the {what} input must hold data/")
    return of_folder(folder, origin=_origin(source, folder))


def of_folder(folder: Path, *, origin: Callable[[str], str] | None = None) -> list[DataFile]:
    """The data files under ``folder``; hidden files are no data. Raises :class:`StageError`."""
    names = tree.walk(folder)[0]
    paths = [folder / name for name in names]
    shown = origin or (lambda name: str(folder / name))
    found = [
        DataFile(path, name, shown(name))
        for path, name in zip(paths, names, strict=True)
        if not any(part.startswith(".") for part in name.split("/"))
    ]
    rows = [file for file in found if not _is_no_data(file)] or found
    if not rows:
        raise StageError(f"{shown('')}: holds no data files; give it {', '.join(KINDS)} files")
    for file in rows:
        require_known(file)
    return rows


def left_out(source: Path) -> list[str]:
    """Names of the files of a fetched output that are not read as data."""
    folder = source / "data"
    names, others = tree.walk(folder)
    read = {file.name for file in of_folder(folder)}
    return sorted(others + [name for name in names if name not in read])


def require_known(file: DataFile) -> None:
    """Raise :class:`StageError` for a kind of file that is not read here, and for a name that no
    report can hold."""
    shown = writable(file.shown)
    if shown != file.shown:
        raise StageError(f"{shown}: the name is not UTF-8; rename the file")
    if file.kind not in KINDS:
        raise StageError(
            f"{file.shown}: cannot read this kind of file; convert it to one of "
            f"{', '.join(KINDS)} ({', '.join(COMPRESSED)} may follow)"
        )


def _is_no_data(file: DataFile) -> bool:
    return any(fnmatchcase(file.path.name, pattern) for pattern in NO_DATA)


def _origin(source: Path, folder: Path) -> Callable[[str], str]:
    """From a file's name to what the user calls it, by the record that fetching left."""
    record = source / "source.json"
    given = json.loads(record.read_text(encoding="utf-8"))["source"] if record.exists() else {}
    return lambda name: _called(given, name) or str(folder / name)


def _called(given: Mapping[str, Any], name: str) -> str | None:
    """What the file ``name`` of a source is called where it came from."""
    if given.get("kind") == "local_data":
        whole = Path(given["path"])
        return str(whole if whole.name == name else whole / name)
    if given.get("kind") == "hub_data":
        return f"{given['repo']}@{given['revision']}: {name}"
    if given.get("kind") == "several":
        part, _, rest = name.partition("/")
        return _called(given["sources"].get(part, {}), rest)
    return None


@contextmanager
def opened(file: DataFile, tick: Tick) -> Iterator[BinaryIO]:
    """The file's bytes, decompressed. Damage raises :class:`StageError` while reading."""
    with file.path.open("rb", buffering=0) as raw:
        counted = io.BufferedReader(_Counted(raw, tick), BUFFER)
        yield io.BufferedReader(_Explained(_decompressed(file, counted), file), BUFFER)


@contextmanager
def seekable(file: DataFile, tick: Tick) -> Iterator[Any]:
    """The file's bytes for a format that is read from its end."""
    import tempfile

    if Path(file.name).suffix.lower() not in COMPRESSED:
        with file.path.open("rb") as plain:
            yield plain
        return
    with opened(file, tick) as packed, tempfile.TemporaryFile() as plain:
        while block := packed.read(BUFFER):
            plain.write(block)
        plain.seek(0)
        yield plain


def _decompressed(file: DataFile, raw: BinaryIO) -> Any:
    suffix = Path(file.name).suffix.lower()
    if suffix == ".gz":
        return gzip.GzipFile(fileobj=raw)
    if suffix in COMPRESSED:
        import pyarrow

        return pyarrow.CompressedInputStream(pyarrow.PythonFile(raw, mode="r"), "zstd")
    return raw


class _Counted(io.RawIOBase):
    """Bytes that report how many they were."""

    def __init__(self, raw: Any, tick: Tick) -> None:
        self.raw, self.tick = raw, tick

    def readable(self) -> bool:
        return True

    def readinto(self, buffer: Any) -> int:
        number = self.raw.readinto(buffer)
        self.tick(number)
        return number


class _Explained(io.RawIOBase):
    """Decompressed bytes; damage in them names the file."""

    def __init__(self, stream: Any, file: DataFile) -> None:
        self.stream, self.file = stream, file

    def readable(self) -> bool:
        return True

    def readinto(self, buffer: Any) -> int:
        try:
            block = self.stream.read(len(buffer))
        except (OSError, EOFError, zlib.error) as error:
            what = "gzip" if self.file.name.lower().endswith(".gz") else "zstd"
            raise StageError(
                f"{self.file.shown}: damaged {what} file ({error}); fetch it again"
            ) from None
        cast(Any, buffer)[: len(block)] = block
        return len(block)
