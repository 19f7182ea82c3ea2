"""What stands in safetensors files, read from their headers."""

import json
import math
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from stages.base import StageError
from stages.checkpoint.json_files import read_json

TORCH_NAMES: Mapping[str, str] = {
    "F64": "float64",
    "F32": "float32",
    "F16": "float16",
    "BF16": "bfloat16",
    "F8_E4M3": "float8_e4m3fn",
    "F8_E5M2": "float8_e5m2",
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
            length = int.from_bytes(stream.read(8), "little")
            size = file.stat().st_size
            if not 2 <= length <= size - 8:
                raise StageError(f"{file}: not a safetensors file, or cut off in its header")
            header = json.loads(stream.read(length))
        entries = {
            name: _entry(file, 8 + length, fact)
            for name, fact in header.items()
            if name != "__metadata__"
        }
    except FileNotFoundError:
        raise StageError(f"{file}: missing") from None
    except (KeyError, TypeError, AttributeError, json.JSONDecodeError, UnicodeDecodeError) as error:
        raise StageError(f"{file}: its safetensors header is garbled ({error!r})") from None
    promised = max((entry.end for entry in entries.values()), default=8 + length)
    if size != promised:
        raise StageError(f"{file}: truncated or overlong, {size} bytes where {promised} are meant")
    return entries


def read_headers(path: Path) -> dict[str, Entry]:
    """Every tensor of the whole model in ``path``, single file or indexed shards."""
    return {name: entry for file in shard_files(path) for name, entry in read_header(file).items()}


def shard_files(path: Path) -> tuple[Path, ...]:
    """The safetensors files of the model in ``path``, in order."""
    if not (path / INDEX).is_file():
        return (path / SINGLE,)
    return tuple(path / name for name in sorted(set(weight_map(path).values())))


def weight_map(path: Path) -> dict[str, str]:
    """Tensor name -> file name, as the index says. Raises :class:`StageError`."""
    entries = read_json(path / INDEX).get("weight_map")
    if not isinstance(entries, dict) or not entries:
        raise StageError(f"{path / INDEX}: has no weight_map")
    return entries


def _entry(file: Path, origin: int, fact: Mapping[str, object]) -> Entry:
    start, end = fact["data_offsets"]  # type: ignore[misc]
    return Entry(
        file=file,
        shape=tuple(fact["shape"]),  # type: ignore[arg-type]
        dtype=TORCH_NAMES[str(fact["dtype"])],
        start=origin + start,
        end=origin + end,
    )
