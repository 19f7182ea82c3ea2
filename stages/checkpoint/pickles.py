"""What ``torch.save`` wrote, told without reading a value and without running what it names."""

import io
import pickle
import struct
import zipfile
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from enum import Enum, IntEnum
from pathlib import Path
from typing import Any

from stages.base import StageError
from stages.checkpoint.garbled import told_of
from stages.checkpoint.runs import Laid, Run, itemsize, of_runs
from stages.checkpoint.weights import Spec, Weights

_STORAGES: Mapping[str, str] = {
    "DoubleStorage": "float64",
    "FloatStorage": "float32",
    "HalfStorage": "float16",
    "BFloat16Storage": "bfloat16",
    "LongStorage": "int64",
    "IntStorage": "int32",
    "ShortStorage": "int16",
    "CharStorage": "int8",
    "ByteStorage": "uint8",
    "BoolStorage": "bool",
    "UntypedStorage": "uint8",
}
"""Torch's storage classes by the type of their values."""

_OLD = b"\x80\x02\x8a\nl\xfc\x9cF\xf9 j\xa8P\x19."
"""The magic number, a pickle of its own, with which older files of torch begin."""

_PLAIN = {
    "builtins": {"int", "float", "bool", "str", "list", "dict", "tuple", "set", "frozenset"},
    "collections": {"OrderedDict", "defaultdict"},
}
_INERT = {"torch", "deepspeed", "numpy", "argparse", "pathlib", "copyreg", "_codecs"}
"""Packages whose classes may be named: they become inert, and nothing of theirs runs."""


BY_NAME = {("builtins", "getattr"), ("__builtin__", "getattr")}
"""What Python 3.11.0 to 3.11.3 names for a member of an enumeration, where others name its class.
A reader answers with :func:`enum_member`."""


class _ZeroStage(IntEnum):
    """DeepSpeed's ``ZeroStageEnum``."""

    disabled = 0
    optimizer_states = 1
    gradients = 2
    weights = 3
    max_stage = 3


@dataclass(frozen=True)
class Stored:
    """A tensor that lies in a file."""

    run: Run
    dtype: str
    shape: tuple[int, ...]
    stride: tuple[int, ...]

    @property
    def spec(self) -> Spec:
        return Spec(self.shape, self.dtype)


@dataclass(frozen=True)
class Shard:
    """One rank's part of a tensor that is cut along its first dimension, or a whole copy of it."""

    local: Stored
    shape: tuple[int, ...]
    """The whole tensor's."""

    cut: tuple[int | None, ...]
    """For each dimension of the mesh the tensor's dimension that it cuts, if it does."""

    mesh: tuple[int, ...]


class Inert:
    """Stands for an object that nobody needs, so that its code never runs."""

    origin = ""

    def __init__(self, *args: Any, **kwargs: Any) -> None: ...

    def __new__(cls, *args: Any, **kwargs: Any) -> "Inert":
        made = super().__new__(cls)
        made.args, made.state = args, {}
        return made

    def __setstate__(self, state: Any) -> None:
        self.state = state

    def append(self, *args: Any) -> None: ...
    def extend(self, *args: Any) -> None: ...
    def __setitem__(self, *args: Any) -> None: ...


def enum_member(kind: Any, name: Any) -> Any:
    """``getattr(kind, name)`` for enumerations and for what stands for one, and nothing else."""
    if isinstance(kind, type) and issubclass(kind, Enum) and name in kind.__members__:
        return kind[name]
    if isinstance(kind, type) and issubclass(kind, Inert):
        return kind(name)
    raise pickle.UnpicklingError(f"it reaches for {name!r} in what is no enumeration")


def read_pickle(file: Path, offset: int = 0, length: int | None = None) -> Any:
    """The object in a zip of ``torch.save``, which may be a part of ``file``.

    Tensors come as :class:`Stored`, sharded ones as :class:`Shard`, foreign objects as
    :class:`Inert`. Raises :class:`StageError` for a file that is cut off, or that names code
    which no checkpoint needs.
    """
    if not file.exists():
        raise StageError(f"{file}: missing")
    try:
        with told_of(file), file.open("rb") as stream:
            end = file.stat().st_size if length is None else offset + length
            section = _Section(stream, offset, end)
            _refuse_old(file, section)
            with zipfile.ZipFile(section) as archive:
                return _Unpickler(file, offset, archive).load()
    except _Refused as error:
        raise StageError(f"{file}: refused, it holds more than tensors ({error})") from None


def _refuse_old(file: Path, section: "_Section") -> None:
    if section.read(len(_OLD)) == _OLD:
        raise StageError(
            f"{file}: in the form that torch wrote before version 1.6, which is no zip; load it "
            "with torch.load(FILE, weights_only=True) and save it again"
        )
    section.seek(0)


def of_stored(tensors: Mapping[str, Stored]) -> Weights:
    """The tensors themselves. One that was saved transposed is turned when it is read."""
    laid: dict[str, Laid] = {n: (t.spec, (t.run,)) for n, t in tensors.items()}
    turned = {n: t for n, t in tensors.items() if t.stride != _row_major(t.shape)}
    if not turned:
        return of_runs(laid)
    plain = of_runs({n: (Spec((t.run.numel,), t.dtype), (t.run,)) for n, t in turned.items()})
    straight = of_runs(laid)

    def rows(name: str, first: int, last: int) -> Any:
        if name not in turned:
            return straight.rows(name, first, last)
        stored = turned[name]
        return plain.read(name).as_strided(stored.shape, stored.stride)[first:last]

    return Weights(straight.specs, rows)


def _row_major(shape: Sequence[int]) -> tuple[int, ...]:
    strides: list[int] = []
    step = 1
    for length in reversed(shape):
        strides.insert(0, step)
        step *= max(length, 1)
    return tuple(strides)


class _Refused(Exception): ...


class _Section(io.RawIOBase):
    """Bytes ``start`` to ``end`` of a file, as a file of their own."""

    def __init__(self, stream: Any, start: int, end: int) -> None:
        self._stream, self._start, self._end = stream, start, end
        self._at = 0

    def seekable(self) -> bool:
        return True

    def readable(self) -> bool:
        return True

    def seek(self, offset: int, whence: int = io.SEEK_SET) -> int:
        origins = {io.SEEK_SET: 0, io.SEEK_CUR: self._at, io.SEEK_END: self._end - self._start}
        self._at = max(0, origins[whence] + offset)
        return self._at

    def tell(self) -> int:
        return self._at

    def read(self, size: int = -1) -> bytes:
        left = max(0, self._end - self._start - self._at)
        self._stream.seek(self._start + self._at)
        found = self._stream.read(left if size is None or size < 0 else min(size, left))
        self._at += len(found)
        return found


class _Unpickler(pickle.Unpickler):
    """See "Restricting Globals" in the documentation of :mod:`pickle`."""

    def __init__(self, file: Path, offset: int, archive: zipfile.ZipFile) -> None:
        names = [name for name in archive.namelist() if name.endswith("/data.pkl")]
        if not names:
            raise zipfile.BadZipFile("it has no data.pkl")
        super().__init__(io.BytesIO(archive.read(names[0])))
        self._file, self._offset, self._archive = file, offset, archive
        self._folder = names[0].removesuffix("data.pkl")
        self._places: dict[str, int] = {}

    def persistent_load(self, pid: Any) -> Stored:
        kind, storage, key, _, numel = pid
        if kind != "storage":
            raise pickle.UnpicklingError(f"persistent object {kind!r}")
        dtype = _STORAGES[storage.origin.rpartition(".")[2]]
        run = Run(self._file, self._place(key), numel)
        return Stored(run, dtype, (numel,), (1,))

    def _place(self, key: str) -> int:
        """Where a record's bytes start: they lie uncompressed after the entry's own header."""
        if key not in self._places:
            entry = self._archive.getinfo(f"{self._folder}data/{key}")
            stream = self._archive.fp
            assert stream
            stream.seek(entry.header_offset)
            name, extra = struct.unpack("<HH", stream.read(30)[26:])
            self._places[key] = self._offset + entry.header_offset + 30 + name + extra
        return self._places[key]

    def find_class(self, module: str, name: str) -> Any:
        if name in _PLAIN.get(module, ()):
            return super().find_class(module, name)
        if (module, name) == ("torch", "Size"):
            return tuple
        if (module, name) in BY_NAME:
            return enum_member
        if name == "ZeroStageEnum":
            return _ZeroStage
        if rebuild := _REBUILD.get(f"{module}.{name}"):
            return rebuild
        if module.partition(".")[0] not in _INERT:
            raise _Refused(f"it names {module}.{name}")
        return type(name, (Inert,), {"origin": f"{module}.{name}"})


def _tensor(
    storage: Stored, first: int, shape: Any, stride: Any, *_: Any, dtype: str | None = None
) -> Stored:
    kind = dtype or storage.dtype
    if min(first, *shape, *stride, 0) < 0:
        raise pickle.UnpicklingError("a tensor reaches before its storage")
    span = 1 + sum((n - 1) * s for n, s in zip(shape, stride, strict=True)) if all(shape) else 0
    if (first + span) * itemsize(kind) > storage.run.numel * itemsize(storage.dtype):
        raise pickle.UnpicklingError("a tensor reaches beyond its storage")
    run = Run(storage.run.file, storage.run.offset + first * itemsize(kind), span)
    return Stored(run, kind, tuple(shape), tuple(stride))


def _tensor_of_bytes(
    storage: Stored, first: int, shape: Any, stride: Any, grad: Any, hooks: Any, dtype: Any, *_: Any
) -> Stored:
    return _tensor(storage, first, shape, stride, dtype=dtype.origin.rpartition(".")[2])


def _parameter(data: Any, *_: Any) -> Any:
    return data


def _subclass(rebuild: Any, kind: Any, args: Any, state: Any) -> Any:
    """Of all tensor subclasses only ``DTensor`` is known here; a plain tensor may come this way if
    it carries attributes."""
    parts = state if isinstance(state, tuple) else (state,)  # of its __dict__, and of its slots
    fields = {key: value for part in parts if isinstance(part, dict) for key, value in part.items()}
    if "_local_tensor" not in fields:
        return rebuild(*args)
    spec = fields["_spec"].state
    cut = tuple(place.state.get("dim") for place in spec["placements"])
    axes = spec["mesh"].state["_layout"].state["axes"]
    mesh = tuple(length for axis in axes for length in axis.state["shape"])
    return Shard(fields["_local_tensor"], tuple(spec["tensor_meta"].args[0]), cut, mesh)


_REBUILD: Mapping[str, Any] = {
    "torch._utils._rebuild_tensor_v2": _tensor,
    "torch._utils._rebuild_tensor_v3": _tensor_of_bytes,
    "torch._utils._rebuild_parameter": _parameter,
    "torch._utils._rebuild_parameter_with_state": _parameter,
    "torch._tensor._rebuild_from_type_v2": _subclass,
}
