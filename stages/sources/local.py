"""Models and data on this machine, pinned by their content."""

from collections.abc import Sequence
from fnmatch import fnmatchcase
from pathlib import Path
from typing import Any, Literal

from configs import Config
from stages.base import StageError
from stages.checkpoint.layouts import layout
from stages.data import files
from stages.sources import folders


class LocalModel(Config):
    """A model folder in the Hugging Face layout."""

    kind: Literal["local_model"] = "local_model"

    path: Path
    """The folder. Its weights must be a whole model, not an adapter."""


class LocalCheckpoint(Config):
    """A folder that a training left, in any layout that conversion reads. For conversion alone."""

    kind: Literal["local_checkpoint"] = "local_checkpoint"

    path: Path
    """The folder with the weights: a PEFT adapter; a whole model in safetensors or ``.bin``; shards
    of DeepSpeed ZeRO, of FSDP or of ``torch.distributed.checkpoint``; a trainer's
    ``checkpoint-N``."""


class LocalData(Config):
    """A file with rows, or a folder of such files."""

    kind: Literal["local_data"] = "local_data"

    path: Path
    """The file or the folder; hidden files in it do not count."""

    files: tuple[str, ...] = ()
    """Patterns of the files of a folder that are wanted, such as ``*.jsonl``; empty, all."""


def bring_model(source: LocalModel, into: Path) -> dict[str, Any]:
    """Copy what belongs to the model. Raises :class:`StageError` for a folder that is none.

    Weights are copied, not linked: a later training run that saves over the folder must not
    change what was fetched.
    """
    if not source.path.is_dir():
        raise StageError(f"{source.path}: no such folder; give one that save_pretrained wrote")
    place = str(source.path)
    names = folders.choose(sorted(file.name for file in source.path.iterdir()), place=place)
    folders.require_shards(source.path, names, place=place)
    folders.require_known_architecture(source.path, place=place)
    for name in names:
        folders.copy(source.path / name, into / name)
    return {}


def bring_checkpoint(source: LocalCheckpoint, into: Path) -> dict[str, Any]:
    """Copy what a conversion reads. Returns the ``layout``; raises :class:`StageError` for a folder
    without weights in a known one."""
    kind = layout(source.path)
    for name in folders.choose_trained(source.path):
        folders.copy(source.path / name, into / name)
    return {"layout": kind}


def bring_data(source: LocalData, into: Path) -> dict[str, Any]:
    """Copy the file, or every file of the folder by its name there.

    Links to folders are followed, once each. Returns the names of what is left out.
    """
    found, left_out = _files(source.path)
    if source.files:
        found = {name: file for name, file in found.items() if _is_wanted(name, source.files)}
    if not found:
        what = f"files like {', '.join(source.files)}" if source.files else "files"
        raise StageError(f"{source.path}: the folder holds no {what}; give one with data in it")
    for name, file in found.items():
        folders.copy(file, into / name)
    return {"left_out": ", ".join(left_out)} if left_out else {}


def _is_wanted(name: Path, patterns: Sequence[str]) -> bool:
    return any(fnmatchcase(name.as_posix(), pattern) for pattern in patterns)


def _files(path: Path) -> tuple[dict[Path, Path], list[str]]:
    if path.is_file():
        return {Path(path.name): path}, []
    if not path.is_dir():
        raise StageError(f"{path}: no such file or folder; give the data's path")
    names, left_out = files.walk(path)
    return {Path(name): path / name for name in names}, left_out
