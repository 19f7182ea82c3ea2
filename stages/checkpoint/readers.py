"""Opens a checkpoint folder of any layout as :class:`Weights` under the bare model's names."""

from collections.abc import Callable, Mapping
from io import FileIO
from pathlib import Path
from typing import TYPE_CHECKING

from stages.base import StageError
from stages.checkpoint.dcp import read_dcp
from stages.checkpoint.headers import Entry, read_header, read_headers
from stages.checkpoint.json_files import read_json
from stages.checkpoint.layouts import Layout, layout
from stages.checkpoint.names import plain_name
from stages.checkpoint.weights import Spec, Weights, load_pickle, of_tensors
from stages.checkpoint.zero import read_zero

if TYPE_CHECKING:
    from torch import Tensor


def open_weights(path: Path) -> Weights:
    """The tensors of the checkpoint in ``path``. Raises :class:`StageError` for a damaged one."""
    raw = READERS[layout(path)](path)
    names: dict[str, str] = {}
    for name in raw.specs:
        if (plain := plain_name(name)) in names:
            raise StageError(f"{path}: {names[plain]} and {name} are both the model's {plain}")
        names[plain] = name
    return raw.renamed(names)


def read_safetensors(path: Path) -> Weights:
    """A whole model, in one file or in indexed shards."""
    return _of_entries(read_headers(path))


def read_bin(path: Path) -> Weights:
    """A whole model as ``torch.save`` wrote it, in one file or in indexed shards."""
    index = path / "pytorch_model.bin.index.json"
    if index.is_file():
        files = sorted(set(read_json(index).get("weight_map", {}).values()))
    else:
        known = ("pytorch_model.bin", "pytorch_model_fsdp.bin")
        files = [name for name in known if (path / name).is_file()]
    tensors: dict[str, Tensor] = {}
    for name in files:
        tensors |= _state_dict(path / name)
    return of_tensors(tensors)


def read_adapter(path: Path) -> Weights:
    """The tensors of PEFT's own file."""
    file = path / "adapter_model.safetensors"
    if file.is_file():
        return _of_entries(read_header(file))
    return of_tensors(_state_dict(path / "adapter_model.bin"))


READERS: Mapping[Layout, Callable[[Path], Weights]] = {
    "safetensors": read_safetensors,
    "bin": read_bin,
    "adapter": read_adapter,
    "dcp": read_dcp,
    "zero": read_zero,
}


def _of_entries(entries: Mapping[str, Entry]) -> Weights:
    specs = {name: Spec(entry.shape, entry.dtype) for name, entry in entries.items()}
    return Weights(specs, lambda name: _read_entry(entries[name]))


def _read_entry(entry: Entry) -> "Tensor":
    """Read and not mapped: a mapped file stays in the resident memory of whoever walks it."""
    import torch

    tensor = torch.empty(entry.shape, dtype=getattr(torch, entry.dtype))
    size = tensor.numel() * tensor.element_size()
    if size != entry.end - entry.start:
        raise StageError(
            f"{entry.file}: a tensor of shape {entry.shape} in {entry.dtype} is {size} bytes, "
            f"and its header gives it {entry.end - entry.start}"
        )
    with entry.file.open("rb", buffering=0) as stream:
        stream.seek(entry.start)
        _fill(stream, tensor.reshape(-1).view(torch.uint8).numpy().data, entry.file)
    return tensor


def _fill(stream: FileIO, view: memoryview, file: Path) -> None:
    done = 0
    while done < len(view):
        count = stream.readinto(view[done:])
        if not count:
            raise StageError(f"{file}: cut off, {len(view) - done} bytes are missing")
        done += count


def _state_dict(file: Path) -> "dict[str, Tensor]":
    import torch

    value = load_pickle(file)
    if not isinstance(value, dict) or not all(isinstance(t, torch.Tensor) for t in value.values()):
        raise StageError(f"{file}: not a state dict, a mapping of names to tensors was expected")
    return value
