"""Opens a checkpoint folder of any layout as :class:`Weights` under the bare model's names."""

from collections.abc import Callable, Mapping
from pathlib import Path

from stages.base import StageError
from stages.checkpoint.dcp import read_dcp
from stages.checkpoint.headers import Entry, read_header, read_headers
from stages.checkpoint.layouts import Layout, layout
from stages.checkpoint.names import plain_name
from stages.checkpoint.pickles import Stored, of_stored, read_pickle
from stages.checkpoint.rank_files import read_rank_files
from stages.checkpoint.runs import Run, of_runs, size
from stages.checkpoint.shards import read_shards
from stages.checkpoint.weights import Spec, Weights
from stages.checkpoint.zero import read_zero


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
    singles = [path / name for name in ("pytorch_model.bin", "pytorch_model_fsdp.bin")]
    index = path / "pytorch_model.bin.index.json"
    return of_stored(read_shards(singles, index, _state_dict))


def read_adapter(path: Path) -> Weights:
    """The tensors of PEFT's own file."""
    file = path / "adapter_model.safetensors"
    if file.is_file():
        return _of_entries(read_header(file))
    return of_stored(_state_dict(path / "adapter_model.bin"))


READERS: Mapping[Layout, Callable[[Path], Weights]] = {
    "safetensors": read_safetensors,
    "bin": read_bin,
    "adapter": read_adapter,
    "dcp": read_dcp,
    "rank_files": read_rank_files,
    "zero": read_zero,
}


def _of_entries(entries: Mapping[str, Entry]) -> Weights:
    laid = {}
    for name, entry in entries.items():
        spec = Spec(entry.shape, entry.dtype)
        if size(spec) != entry.end - entry.start:
            raise StageError(
                f"{entry.file}: a tensor of shape {entry.shape} in {entry.dtype} is {size(spec)} "
                f"bytes, and its header gives it {entry.end - entry.start}"
            )
        laid[name] = spec, (Run(entry.file, entry.start, entry.numel),)
    return of_runs(laid)


def _state_dict(file: Path) -> dict[str, Stored]:
    value = read_pickle(file)
    if not isinstance(value, dict) or not all(
        isinstance(name, str) and isinstance(tensor, Stored) for name, tensor in value.items()
    ):
        raise StageError(f"{file}: not a state dict, a mapping of names to tensors was expected")
    return value
