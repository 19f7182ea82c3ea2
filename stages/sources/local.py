"""Models and data on this machine, pinned by their content."""

from collections.abc import Sequence
from fnmatch import fnmatchcase
from pathlib import Path
from typing import Any, Literal

from configs import Config
from stages import resume, tree
from stages.base import StageError
from stages.checkpoint.layouts import SHARDED, layout
from stages.sources import folders


class LocalModel(Config):
    """A model folder in the Hugging Face layout."""

    kind: Literal["local_model"] = "local_model"

    path: Path
    """The folder. Its weights must be a whole model, not an adapter."""

    def read_files(self) -> list[str]:
        """The names of what belongs to the model."""
        return folders.choose_whole(self.path)


class LocalCheckpoint(Config):
    """A folder that a training left, in any layout that conversion reads. For conversion alone."""

    kind: Literal["local_checkpoint"] = "local_checkpoint"

    path: Path
    """The folder with the weights: a PEFT adapter; a whole model in safetensors or ``.bin``; shards
    of DeepSpeed ZeRO, of FSDP or of ``torch.distributed.checkpoint``; a trainer's
    ``checkpoint-N``."""

    def read_files(self) -> list[str]:
        """The names of what a conversion reads."""
        return folders.choose_trained(self.path)


class LocalData(Config):
    """A file with rows, or a folder of such files."""

    kind: Literal["local_data"] = "local_data"

    path: Path
    """The file or the folder; hidden files in it do not count."""

    files: tuple[str, ...] = ()
    """Patterns of the files of a folder that are wanted, such as ``*.jsonl``; empty, all."""

    def read_files(self) -> list[str]:
        """The names of what is wanted of the folder, or of the file alone. Raises
        :class:`StageError` where that is nothing."""
        names = [self.path.name] if self.path.is_file() else tree.walk(self.path)[0]
        if self.files:
            names = [name for name in names if any(fnmatchcase(name, p) for p in self.files)]
        if not names:
            what = f"files like {', '.join(self.files)}" if self.files else "files"
            raise StageError(f"{self.path}: the folder holds no {what}; give one with data in it")
        return names


def bring_model(source: LocalModel, into: Path) -> dict[str, Any]:
    """Copy what belongs to the model. Raises :class:`StageError` for a folder that is none, and for
    damaged weights.

    Weights are copied, not linked: a later training run that saves over the folder must not
    change what was fetched.
    """
    names = source.read_files()
    folders.require_known_architecture(source.path, place=str(source.path))
    _copy(source.path, names, into)
    folders.require_sound(into, place=str(source.path))
    return {}


def bring_checkpoint(source: LocalCheckpoint, into: Path) -> dict[str, Any]:
    """Copy what a conversion reads. Returns the ``layout``; raises :class:`StageError` for a folder
    without weights in a known one, and for damaged weights. Those of shards are left to the
    conversion, which looks at all that it writes."""
    resume.require_saved(source.path)
    _copy(source.path, source.read_files(), into)
    kind = layout(source.path)
    if kind not in SHARDED:
        folders.require_sound(into, place=str(source.path))
    return {"layout": kind}


def bring_data(source: LocalData, into: Path) -> dict[str, Any]:
    """Copy the file, or every file of the folder by its name there.

    Links to folders are followed, once each. Returns the names of what is left out.
    """
    if source.path.is_file():
        _copy(source.path.parent, source.read_files(), into)
        return {}
    if not source.path.is_dir():
        raise StageError(f"{source.path}: no such file or folder; give the data's path")
    _copy(source.path, source.read_files(), into)
    left_out = tree.walk(source.path)[1]
    return {"left_out": ", ".join(left_out)} if left_out else {}


def _copy(folder: Path, names: Sequence[str], into: Path) -> None:
    for name in names:
        folders.copy(folder / name, into / name)
