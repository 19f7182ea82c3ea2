"""Reads the distributed checkpoint that accelerate writes for a sharded FSDP model."""

import pickle
import warnings
from collections.abc import Mapping
from functools import cache
from pathlib import Path
from typing import TYPE_CHECKING, Any

from stages.base import StageError
from stages.checkpoint.garbled import told_of
from stages.checkpoint.pickles import BY_NAME, Stored, enum_member, read_pickle
from stages.checkpoint.runs import Run, read_runs
from stages.checkpoint.shards import member
from stages.checkpoint.weights import Spec, Weights

if TYPE_CHECKING:
    from torch import Tensor
    from torch.distributed.checkpoint.metadata import Metadata

FOLDER = "pytorch_model_fsdp_0"
METADATA = ".metadata"

_GLOBALS = {
    "torch": {"Size"},
    "torch.serialization": {"_get_layout"},
    "torch.distributed.checkpoint.filesystem": {"_StorageInfo"},
    "torch.distributed.checkpoint.metadata": {
        "BytesStorageMetadata",
        "ChunkStorageMetadata",
        "Metadata",
        "MetadataIndex",
        "StorageMeta",
        "TensorProperties",
        "TensorStorageMetadata",
        "_MEM_FORMAT_ENCODING",
    },
    "pathlib": {"Path", "PosixPath", "PurePosixPath"},
    "collections": {"OrderedDict"},
}
"""All that a ``.metadata`` pickle of torch 2.13 names; data types are admitted beside it."""


def read_dcp(path: Path) -> Weights:
    """The model in ``path/pytorch_model_fsdp_0``, whose shards are read where they lie.

    No process group is needed, and nothing is written: a read takes the memory of its rows, or of
    one tensor if that is cut along other dimensions than the first. Raises :class:`StageError` for
    a save that was cut off.
    """
    folder = path / FOLDER
    metadata = read_metadata(folder)
    with told_of(folder / METADATA):
        keys = _model_keys(folder, metadata)
        specs = {name: _spec(metadata.state_dict_metadata[key]) for name, key in keys.items()}
        for place in (metadata.storage_data or {}).values():
            member(folder, place.relative_path, place=folder / METADATA)
    reader = _reader(folder, metadata)

    @cache
    def runs(name: str) -> tuple[Run, ...] | None:
        return _runs(folder, metadata, keys[name], specs[name])

    def rows(name: str, first: int, last: int) -> "Tensor":
        spec, found = specs[name], runs(name)
        if found is None:
            return _read(folder, reader, keys[name], spec).reshape(-1, *spec.row_shape)[first:last]
        flat = read_runs(found, spec.dtype, first * spec.row_numel, last * spec.row_numel)
        return flat.reshape(last - first, *spec.row_shape)

    return Weights(specs, rows)


def _runs(folder: Path, metadata: "Metadata", key: str, spec: Spec) -> tuple[Run, ...] | None:
    """Where the rows of a tensor lie, if its chunks are whole rows, as FSDP cuts them."""
    from torch.distributed.checkpoint.metadata import MetadataIndex, TensorStorageMetadata

    kept = metadata.state_dict_metadata[key]
    assert isinstance(kept, TensorStorageMetadata)
    runs, row = [], 0
    for chunk in sorted(kept.chunks, key=lambda chunk: tuple(chunk.offsets)):
        place = (metadata.storage_data or {}).get(MetadataIndex(key, chunk.offsets))
        whole_rows = tuple(chunk.sizes[1:]) == spec.row_shape
        follows = not spec.shape or chunk.offsets[0] == row
        if place is None or not whole_rows or not follows or _transformed(place):
            return None
        stored = read_pickle(folder / place.relative_path, place.offset, place.length)
        if not isinstance(stored, Stored) or stored.shape != tuple(chunk.sizes):
            return None
        runs.append(stored.run)
        row += chunk.sizes[0] if spec.shape else 1
    return tuple(runs) if row == spec.num_rows else None


def _transformed(place: Any) -> bool:
    return bool(getattr(place, "transform_descriptors", None))


def read_metadata(folder: Path) -> "Metadata":
    """The ``.metadata`` of a DCP directory, unpickled without running anything it names."""
    from torch.distributed.checkpoint.metadata import Metadata

    file = folder / METADATA
    if not file.exists():
        raise StageError(f"{file}: missing; it is written last, so this save was cut off")
    with told_of(file), file.open("rb") as stream:
        found = _Restricted(stream).load()
    if not isinstance(found, Metadata):
        raise StageError(f"{file}: a {type(found).__name__}, and DCP's metadata was expected")
    return found


class _Restricted(pickle.Unpickler):
    """See "Restricting Globals" in the documentation of :mod:`pickle`."""

    def find_class(self, module: str, name: str) -> Any:
        import torch

        if module == "torch" and isinstance(getattr(torch, name, None), torch.dtype):
            return getattr(torch, name)
        if (module, name) in BY_NAME:
            return enum_member
        module = "pathlib" if module == "pathlib._local" else module  # as Python 3.13 calls it
        if name not in _GLOBALS.get(module, ()):
            raise pickle.UnpicklingError(f"it names {module}.{name}")
        return super().find_class(module, name)


def _model_keys(folder: Path, metadata: "Metadata") -> dict[str, str]:
    """Parameter name -> key; accelerate saves ``{"model": state_dict}``, and DCP flattens that."""
    from torch.distributed.checkpoint.metadata import TensorStorageMetadata

    paths: Mapping[str, tuple[Any, ...]] = metadata.planner_data or {}
    keys = {
        ".".join(map(str, paths[key][1:])): key
        for key, kept in metadata.state_dict_metadata.items()
        if isinstance(kept, TensorStorageMetadata) and paths.get(key, ("",))[0] == "model"
    }
    if not keys:
        raise StageError(f"{folder}: holds no tensors under the key 'model'")
    return keys


def _spec(kept: Any) -> Spec:
    return Spec(tuple(kept.size), str(kept.properties.dtype).removeprefix("torch."))


def _reader(folder: Path, metadata: "Metadata") -> Any:
    from torch.distributed.checkpoint import FileSystemReader

    class Reader(FileSystemReader):
        """Serves the metadata that was read once, and safely, to every tensor's read."""

        def read_metadata(self, *args: Any, **kwargs: Any) -> "Metadata":
            return metadata

    return Reader(folder)


def _read(folder: Path, reader: Any, key: str, spec: Spec) -> "Tensor":
    import torch
    import torch.distributed.checkpoint as dcp

    tensor = torch.empty(spec.shape, dtype=getattr(torch, spec.dtype))
    try:
        with warnings.catch_warnings():
            warnings.filterwarnings("ignore", "torch.distributed is disabled")  # as it should be
            dcp.load({key: tensor}, storage_reader=reader, no_dist=True)
    except dcp.CheckpointException as error:
        reason = next(iter(error.failures.values()))[0]
        raise StageError(f"{folder}: {key} cannot be read ({reason!r})") from None
    return tensor
