"""Model folders in the Hugging Face layout: which files count, and what is missing."""

import os
import shutil
from collections.abc import Collection, Mapping, Sequence
from fnmatch import fnmatchcase
from pathlib import Path

from stages import tree
from stages.base import StageError
from stages.checkpoint import heads, lineage
from stages.checkpoint.faults import damage
from stages.checkpoint.json_files import read_json
from stages.checkpoint.layouts import Layout, layout
from stages.checkpoint.shards import weight_map

SAFETENSORS = ("model*.safetensors", "model.safetensors.index.json")
PICKLED = ("pytorch_model*.bin", "pytorch_model.bin.index.json")
TOKENIZERS = (
    "tokenizer.json", "tokenizer.model", "spiece.model", "sentencepiece.bpe.model",
    "vocab.json", "vocab.txt", "tekken.json",
)  # fmt: skip
# No *.py: code that comes with a model is never run.
BESIDE = (
    "config.json", "generation_config.json", "tokenizer_config.json", "special_tokens_map.json",
    "added_tokens.json", "merges.txt", "chat_template.json", "*.jinja", "*processor_config.json",
    "LICENSE*",
)  # fmt: skip
TRAINED: Mapping[Layout, tuple[str, ...]] = {
    "safetensors": SAFETENSORS,
    "bin": PICKLED,
    "adapter": ("adapter_model.safetensors", "adapter_model.bin"),
    "dcp": ("pytorch_model_fsdp_0/.metadata", "pytorch_model_fsdp_0/*"),
    "rank_files": ("pytorch_model_fsdp*_rank*.bin",),
    "zero": ("latest", "*/*_states.pt"),
}
"""For each layout what holds the weights; ZeRO's lie in the optimizer's states."""

WEIGHTS = (".safetensors", ".bin", ".distcp", ".pt")
"""How files end that hold weights; indexes and ZeRO's ``latest`` only name such."""

BESIDE_TRAINED = ("adapter_config.json", lineage.NAME, heads.SCALE)
"""What training leaves beside the weights, and conversion reads."""


def choose(names: Sequence[str], *, place: str) -> list[str]:
    """Those of a folder's file names that make up a model; of two weight formats safetensors.

    Raises :class:`StageError` for a folder at ``place`` without config, weights or tokenizer, and
    for one with an adapter beside them, which transformers would load too.
    """
    if "config.json" not in names:
        raise StageError(f"{place}: no config.json, so it is no model folder; {_instead(names)}")
    weights = _matching(names, SAFETENSORS) or _matching(names, PICKLED)
    if not any(name.endswith(WEIGHTS) for name in weights):
        raise StageError(
            f"{place}: no weights ({SAFETENSORS[0]} or {PICKLED[0]}); {_instead(names)}"
        )
    if "adapter_config.json" in names:
        raise StageError(
            f"{place}: an adapter (adapter_config.json) beside a whole model; move its files to a "
            "folder of their own, and merge it by the flow convert if it is meant"
        )
    tokenizer = _matching(names, TOKENIZERS)
    if not tokenizer:
        raise StageError(
            f"{place}: weights without a tokenizer ({', '.join(TOKENIZERS[:2])}, ...); "
            "add the tokenizer files of the model that the weights were trained from"
        )
    return [*weights, *tokenizer, *_matching(names, BESIDE)]


def choose_whole(folder: Path) -> list[str]:
    """What makes up the model in ``folder``. Raises :class:`StageError` as :func:`choose` does, and
    for files that are missing.
    """
    place = str(folder)
    if not folder.is_dir():
        raise StageError(f"{place}: no such folder; give one that save_pretrained wrote")
    names = choose(tree.matching(folder, ["*"]), place=place)
    return _complete(folder, names)


def choose_trained(folder: Path) -> list[str]:
    """What a conversion reads in a folder that training left, in whatever layout: not what is there
    to go on with the training. Raises :class:`StageError` for a folder without weights, and for
    files that are missing.
    """
    kind = layout(folder)
    weights = tree.matching(folder, TRAINED[kind])
    if not any(name.endswith(WEIGHTS) for name in weights):
        raise StageError(
            f"{folder}: looks like {kind}, and no weight file ({' or '.join(TRAINED[kind])}) is in "
            "it; give the whole folder that training left"
        )
    beside = tree.matching(folder, (*TOKENIZERS, *BESIDE, *BESIDE_TRAINED))
    return _complete(folder, [*weights, *beside])


def _complete(folder: Path, names: list[str]) -> list[str]:
    tree.require_files(folder, names)
    require_shards(folder, names, place=str(folder))
    return names


def _matching(names: Sequence[str], patterns: Collection[str]) -> list[str]:
    return [name for name in names if any(fnmatchcase(name, pattern) for pattern in patterns)]


def _instead(names: Sequence[str]) -> str:
    """The way out, from what the folder holds instead."""
    if "adapter_config.json" in names:
        return "it holds an adapter: merge that into its base model first (the flow convert)"
    if any(name.endswith(".gguf") for name in names):
        return "it holds GGUF files: use a source of kind gguf"
    return "give the folder that save_pretrained wrote"


def require_shards(folder: Path, names: Sequence[str], *, place: str) -> None:
    """Raise :class:`StageError` for a weight file that an index names and ``names`` lacks."""
    for index in _matching(names, ["*.index.json"]):
        shards = set(weight_map(folder / index).values())
        lacking = sorted(shards.difference(names))
        if lacking:
            raise StageError(
                f"{place}: {len(lacking)} of the {len(shards)} weight files in {index} are "
                f"missing, the first is {lacking[0]}; complete the folder"
            )


def require_sound(folder: Path, *, place: str) -> None:
    """Raise :class:`StageError`, with a line for each fault, for weights in ``folder`` that are
    damaged, empty or not finite. They came from ``place``."""
    faults = [line.replace(f"{folder}/", "") for line in damage(folder)]
    if faults:
        raise StageError("\n".join(f"{place}: {line}" for line in faults))


def require_known_architecture(folder: Path, *, place: str) -> None:
    """Raise :class:`StageError` for a model that only code of its own could load."""
    config = read_json(folder / "config.json")
    if "auto_map" not in config:
        return
    from transformers import CONFIG_MAPPING

    if config.get("model_type") not in CONFIG_MAPPING:
        raise StageError(
            f"{place}: the installed transformers has no model type {config.get('model_type')!r} "
            "and code that comes with a model is never run; choose a model that it has"
        )


def copy(source: Path, target: Path) -> None:
    """Copy a file. File systems that can do so let both share their blocks until one changes."""
    target.parent.mkdir(parents=True, exist_ok=True)
    try:
        with source.open("rb") as read, target.open("wb") as write:
            while os.copy_file_range(read.fileno(), write.fileno(), 1 << 30):
                pass
    except (AttributeError, OSError):  # not on Linux, or not between these file systems
        shutil.copyfile(source, target)


def link(source: Path, target: Path) -> None:
    """Share a file that nobody rewrites in place; copy it where the file system cannot."""
    try:
        target.hardlink_to(source.resolve())
    except OSError:
        copy(source, target)
