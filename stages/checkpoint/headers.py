"""What stands in safetensors files, read from their headers."""

import json
import math
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from stages.base import StageError
from stages.checkpoint import shards
from stages.checkpoint.garbled import GARBLED, first_line

TORCH_NAMES: Mapping[str, str] = {
    "F64": "float64",
    "F32": "float32",
    "F16": "float16",
    "BF16": "bfloat16",
    "F8_E4M3": "float8_e4m3fn",
    "F8_E5M2": "float8_e5m2",
    "F8_E8M0": "float8_e8m0fnu",
    "I64": "int64",
    "I32": "int32",
    "I16": "int16",
    "I8": "int8",
    "U64": "uint64",
    "U32": "uint32",
    "U16": "uint16",
    "U8": "uint8",
    "BOOL": "bool",
}
"""Each safetensors data type by torch's name."""

SAFETENSORS_NAMES: Mapping[str, str] = {torch: name for name, torch in TORCH_NAMES.items()}

SINGLE = "model.safetensors"
INDEX = "model.safetensors.index.json"


@dataclass(frozen=True)
class Entry:
    """One tensor in a safetensors file."""

    file: Path
    shape: tuple[int, ...]
    dtype: str
    """Torch's name of it, such as ``bfloat16``."""

    start: int
    end: int
    """Byte offsets in the file."""

    @property
    def numel(self) -> int:
        return math.prod(self.shape)


def read_header(file: Path) -> dict[str, Entry]:
    """The tensors of one file. Raises :class:`StageError` when the file is cut off or garbled."""
    try:
        with file.open("rb") as stream:
            size = file.stat().st_size
            length = int.from_bytes(stream.read(8), "little")
            header = stream.read(length) if 2 <= length <= size - 8 else b""
    except FileNotFoundError:
        raise StageError(f"{file}: missing") from None
    except OSError as error:
        raise StageError(f"{file}: cannot be read ({error.strerror})") from None
    if not header:
        raise StageError(f"{file}: not a safetensors file, or cut off in its header")
    try:
        entries = {
            name: _entry(file, 8 + length, fact)
            for name, fact in json.loads(header).items()
            if name != "__metadata__"
        }
    except GARBLED as error:
        raise StageError(
            f"{file}: its safetensors header is garbled ({first_line(error)})"
        ) from None
    _check_laid(file, entries, start=8 + length, size=size)
    return entries


def read_headers(path: Path) -> dict[str, Entry]:
    """Every tensor of the whole model in ``path``, single file or indexed shards. Raises
    :class:`StageError` with a line for each fault of the files and of the index."""
    return shards.read_shards((path / SINGLE,), path / INDEX, read_header)


def shard_files(path: Path) -> tuple[Path, ...]:
    """The safetensors files of the model in ``path``, in order."""
    return shards.shard_files((path / SINGLE,), path / INDEX)


def _check_laid(file: Path, entries: Mapping[str, Entry], *, start: int, size: int) -> None:
    """Tensors lie end to end, or two names have the same bytes, or bytes have no name."""
    for name, entry in sorted(entries.items(), key=lambda one: (one[1].start, one[1].end)):
        if entry.start != start:
            raise StageError(
                f"{file}: its safetensors header is garbled ({name} starts at byte {entry.start}, "
                f"and byte {start} is next)"
            )
        start = entry.end
    if size != start:
        raise StageError(f"{file}: truncated or overlong, {size} bytes where {start} are meant")


def _entry(file: Path, origin: int, fact: Mapping[str, Any]) -> Entry:
    shape, (start, end), dtype = fact["shape"], fact["data_offsets"], fact["dtype"]
    for number in (*shape, start, end):
        if type(number) is not int or number < 0:
            raise ValueError(f"{number!r} is no length and no offset")
    if dtype not in TORCH_NAMES:
        raise ValueError(f"its data type {dtype!r} is not known")
    return Entry(
        file=file,
        shape=tuple(shape),
        dtype=TORCH_NAMES[dtype],
        start=origin + start,
        end=origin + end,
    )
