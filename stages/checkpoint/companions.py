"""The files beside the weights of an export: config, tokenizer, template, generation config."""

import json
import shutil
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from stages.base import StageError
from stages.checkpoint.conversation import (
    FILES,
    TEMPLATE,
    end_of_turn,
    has_tokenizer,
    load_tokenizer,
    template,
)
from stages.checkpoint.heads import SCALE
from stages.checkpoint.json_files import read_json, read_json_if_there

_SAME = (
    "model_type",
    "hidden_size",
    "num_hidden_layers",
    "num_attention_heads",
    "num_key_value_heads",
    "intermediate_size",
)
"""Settings that training never changes."""


def model_config(
    trained: Path, base: Path, *, vocabulary_rows: int | None = None
) -> dict[str, Any]:
    """The config of the trained model: what training left, or else the base's.

    ``use_cache`` is the base's, because trainers switch it off for gradient checkpointing and an
    export with it off generates slowly; the class name loses the ``FSDP`` that wrapping puts
    before it. ``vocabulary_rows`` is how many an adapter was trained with, if other than the
    base's. Raises :class:`StageError` when the two configs are not the same architecture.
    """
    start = read_json(base / "config.json")
    config = read_json_if_there(trained / "config.json") or dict(start)
    for key in _SAME:
        if key in config and key in start and config[key] != start[key]:
            raise StageError(
                f"{trained / 'config.json'}: {key} is {config[key]!r}, and {base} has "
                f"{start[key]!r}: that is not the base of this training"
            )
    if vocabulary_rows:
        config["vocab_size"] = vocabulary_rows
    _restore_cache(config, start)
    names = config.get("architectures") or start.get("architectures") or []
    config["architectures"] = [name.removeprefix("FSDP") for name in names]
    return config


def write_config(
    folder: Path, config: Mapping[str, Any], *, dtype: str, tied: bool | None = None
) -> None:
    """``config.json`` of plain, unquantised weights in ``dtype``; ``tied`` unset is as it was."""
    gone = ("quantization_config", "torch_dtype", "_name_or_path")
    kept = {key: value for key, value in config.items() if key not in gone}
    kept["dtype"] = dtype
    if tied is not None:
        kept["tie_word_embeddings"] = tied
    _write_json(folder / "config.json", kept)


def copy_tokenizer(folder: Path, trained: Path, base: Path) -> None:
    """The tokenizer that training left, or else the base's; likewise the chat template.

    Raises :class:`StageError` when neither folder has a tokenizer.
    """
    source = next((path for path in (trained, base) if has_tokenizer(path)), None)
    if source is None:
        raise StageError(f"neither {trained} nor {base} has a tokenizer")
    for name in FILES:
        if (source / name).is_file():
            shutil.copyfile(source / name, folder / name)
    chat = template(source) or template(base)
    if chat:
        (folder / TEMPLATE).write_text(chat, encoding="utf-8")


def copy_scale(folder: Path, trained: Path) -> None:
    """What brings a reward model's scores to one scale goes where the model goes."""
    if (trained / SCALE).is_file():
        shutil.copyfile(trained / SCALE, folder / SCALE)


def write_generation_config(folder: Path, trained: Path, base: Path) -> None:
    """``generation_config.json``, which lists the id that ends a turn of the copied tokenizer.

    Raises :class:`StageError` when the template cannot be rendered.
    """
    name = "generation_config.json"
    start = read_json_if_there(base / name)
    values = read_json_if_there(trained / name) or dict(start)
    _restore_cache(values, start)
    config = read_json(folder / "config.json")
    for key in ("bos_token_id", "eos_token_id", "pad_token_id"):
        if config.get(key) is not None:
            values.setdefault(key, config[key])
    values.pop("_from_model_config", None)  # it would make transformers prefer config.json's ids
    ids = values.get("eos_token_id")
    stops = list(ids) if isinstance(ids, list) else [] if ids is None else [ids]
    end = end_of_turn(load_tokenizer(folder))
    if end is not None and end not in stops:
        stops.append(end)
    if stops:
        values["eos_token_id"] = stops if len(stops) > 1 else stops[0]
    _write_json(folder / name, values)


def _restore_cache(values: dict[str, Any], start: Mapping[str, Any]) -> None:
    values.pop("use_cache", None)
    if "use_cache" in start:
        values["use_cache"] = start["use_cache"]


def _write_json(file: Path, value: Mapping[str, Any]) -> None:
    file.write_text(json.dumps(value, indent=2, sort_keys=True, ensure_ascii=False) + "\n")
