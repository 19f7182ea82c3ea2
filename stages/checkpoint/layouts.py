"""Which of the known checkpoint layouts a folder holds, told by names and JSON alone."""

from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Literal

from stages.base import StageError
from stages.checkpoint.headers import read_header

Layout = Literal["safetensors", "bin", "adapter", "dcp", "rank_files", "zero"]

SIGNS: Mapping[Layout, tuple[str, ...]] = {
    "safetensors": ("model.safetensors", "model.safetensors.index.json"),
    "bin": ("pytorch_model.bin", "pytorch_model.bin.index.json", "pytorch_model_fsdp.bin"),
    "adapter": ("adapter_model.safetensors", "adapter_model.bin"),
    "dcp": ("pytorch_model_fsdp_0",),
    "rank_files": ("pytorch_model_fsdp*_rank*.bin",),
    "zero": ("*/*_optim_states.pt",),
}
"""What gives each layout away. ``safetensors`` and ``bin`` are whole models in the Hugging Face
form, ``adapter`` is PEFT's, ``dcp`` is the directory that accelerate writes for FSDP with
``SHARDED_STATE_DICT``, ``rank_files`` what it writes without DCP, and ``zero`` is a DeepSpeed
checkpoint of any ZeRO stage and world size."""

SHARDED: frozenset[Layout] = frozenset({"dcp", "rank_files", "zero"})
"""Layouts that may hold a whole model or a PEFT model: an ``adapter_config.json`` tells which."""


def layouts(path: Path) -> tuple[Layout, ...]:
    """Every layout that ``path`` holds; a trainer's own checkpoint may hold two."""
    return tuple(name for name, signs in SIGNS.items() if any(_found(path, signs)))


def layout(path: Path) -> Layout:
    """The one layout that ``path`` holds. Raises :class:`StageError` for none, or for several.

    In a trainer's own checkpoint, whose shards are there to be resumed from, it is the whole model
    or the adapter beside them; of what FSDP gathers into one file, too.
    """
    if not path.is_dir():
        raise StageError(f"{path}: no such checkpoint folder")
    found = layouts(path)
    if len(found) > 1 and (path / "trainer_state.json").is_file():
        for beside in (SHARDED, frozenset({"bin"})):
            found: tuple[Layout, ...] = tuple(n for n in found if n not in beside) or found
    if len(found) == 1:
        return found[0]
    if found:
        raise StageError(
            f"{path}: holds weights in {len(found)} layouts ({', '.join(found)}), and which of "
            "them is meant cannot be told; leave one of them in the folder"
        )
    names = sorted(f"{p.name}/" if p.is_dir() else p.name for p in path.iterdir())
    raise StageError(
        f"{path}: holds no weights in a known layout ({', '.join(SIGNS)}); "
        f"it holds {', '.join(names[:12]) or 'nothing'}{', ...' if len(names) > 12 else ''}"
    )


def is_adapter(path: Path) -> bool:
    """Whether the weights in ``path`` are an adapter of another model, sharded or not."""
    return (path / "adapter_config.json").is_file()


def _found(path: Path, signs: tuple[str, ...]) -> Iterator[bool]:
    return (_holds_something(found) for sign in signs for found in path.glob(sign))


def _holds_something(found: Path) -> bool:
    """ZeRO-3 with ``stage3_gather_16bit_weights_on_model_save=false`` makes transformers' Trainer
    leave an adapter file without a single tensor beside the shards that hold the weights.
    """
    if found.suffix != ".safetensors":
        return True
    try:
        return bool(read_header(found))
    except StageError:  # damaged, and whoever reads it says how
        return True
