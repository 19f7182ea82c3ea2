"""What is wrong with a checkpoint folder, one line for each fault."""

from collections.abc import Callable, Iterator, Mapping
from pathlib import Path

from stages.base import StageError
from stages.checkpoint import adapter, fresh
from stages.checkpoint.architecture import Architecture, architecture
from stages.checkpoint.conversation import (
    end_of_turn,
    load_tokenizer,
    special_ids,
    stop_ids,
    template,
)
from stages.checkpoint.fit import fitted
from stages.checkpoint.headers import Entry, read_headers, shard_files
from stages.checkpoint.json_files import read_json
from stages.checkpoint.layouts import is_adapter, layout
from stages.checkpoint.lineage import check_base
from stages.checkpoint.merge import merge
from stages.checkpoint.readers import open_weights
from stages.checkpoint.weights import Weights, all_not_finite

Load = Callable[[Path], tuple[str, ...]]
"""Loads the model of a folder; its faults."""


def validate(
    path: Path,
    dtype: str | None = None,
    *,
    base: Path | None = None,
    chat: bool = False,
    load: Load | None = None,
) -> tuple[str, ...]:
    """The faults of the checkpoint in ``path``; none means that the next stage can have it.

    A whole model in safetensors is checked to the last value and then loaded with plain
    ``from_pretrained`` in a fresh process, which takes the memory of the model; ``load`` takes
    the place of that. ``dtype`` is what every floating-point tensor and the config should be in,
    and ``chat`` asks for a chat template. An adapter's tensors are checked by themselves, and
    against the ``base`` that it should fit. Other layouts are for
    :func:`stages.convert.convert`, and are a fault here.
    """
    try:
        kind = layout(path)
        if kind == "adapter":
            return _adapter(path, base)
        if kind != "safetensors":
            return (f"{path}: weights lie there as {kind}, convert them to safetensors first",)
        return _whole_model(path, dtype, chat=chat, load=load or fresh.load)
    except StageError as error:
        return tuple(str(error).splitlines())


def damage(path: Path) -> tuple[str, ...]:
    """The faults of the weight files in ``path``, of whatever layout, and of the values in them.

    They are read once. No model is built, so it shows nothing of names and shapes.
    """
    try:
        return tuple(_values(open_weights(path)))
    except StageError as error:
        return tuple(str(error).splitlines())


def _adapter(path: Path, base: Path | None) -> tuple[str, ...]:
    read = adapter.read_adapter(path)
    found = [*adapter.faults(read)]
    if base is not None and not found:
        try:
            check_base(path, base)
            fits = fitted(read, path, base)
            merge(open_weights(base), fits, aliases=architecture(base).aliases)
        except StageError as error:
            found += str(error).splitlines()
    return tuple(found)


def _whole_model(path: Path, dtype: str | None, *, chat: bool, load: Load) -> tuple[str, ...]:
    entries = read_headers(path)
    plan = architecture(path)
    found = [
        *_foreign(path),
        *_names(entries, plan),
        *_types(path, entries, plan, dtype),
        *_values(open_weights(path)),
        *_tokenizer(path, plan),
    ]
    if chat and not template(path):
        found.append(f"{path}: no chat template, and a chat model needs one")
    return tuple(found) or load(path)


def _foreign(path: Path) -> Iterator[str]:
    if is_adapter(path):
        yield f"{path}: an adapter_config.json beside a whole model makes loaders expect an adapter"
    known = set(shard_files(path))
    for file in sorted(path.glob("*.safetensors")):
        if file not in known:
            yield f"{file}: a foreign file, no part of this model"


def _names(entries: Mapping[str, Entry], plan: Architecture) -> Iterator[str]:
    wanted = plan.nearest(entries)
    for name in sorted(wanted.keys() - entries.keys()):
        yield f"{name}: missing, the architecture has it"
    for name in sorted(entries.keys() - wanted.keys()):
        tied = plan.aliases.get(name)
        why = f"it is tied to {tied}" if tied else "the architecture has no such tensor"
        yield f"{name}: not expected, {why}"
    for name in sorted(entries.keys() & wanted.keys()):
        if entries[name].shape != wanted[name]:
            yield f"{name}: shape {entries[name].shape}, the config asks for {wanted[name]}"


def _types(
    path: Path, entries: Mapping[str, Entry], plan: Architecture, dtype: str | None
) -> Iterator[str]:
    said = read_json(path / "config.json").get("dtype", dtype)
    if dtype is not None and said != dtype:
        yield f"{path / 'config.json'}: dtype is {said!r}, {dtype!r} was asked"
    for name, entry in sorted(entries.items()):
        floating = entry.dtype.startswith(("float", "bfloat"))
        if floating is (name in plan.integers):
            meant = "whole" if name in plan.integers else "floating-point"
            yield f"{name}: is {entry.dtype}, the architecture has {meant} numbers there"
        elif dtype is not None and floating and entry.dtype != dtype:
            yield f"{name}: is {entry.dtype}, {dtype} was asked"


def _values(weights: Weights) -> Iterator[str]:
    for name, spec in weights.specs.items():
        if not spec.numel:
            yield f"{name}: empty, of shape {spec.shape}"
    names = [name for name, spec in weights.specs.items() if spec.numel]
    for name, count in all_not_finite(weights, names).items():
        if count:
            yield f"{name}: {count} of its {weights.specs[name].numel} values are not finite"


def _tokenizer(path: Path, plan: Architecture) -> Iterator[str]:
    try:
        tokenizer = load_tokenizer(path)
        end = end_of_turn(tokenizer)
        special, stops = [*special_ids(path, tokenizer)], stop_ids(path)
    except StageError as error:
        yield str(error)
        return
    highest = max(tokenizer.get_vocab().values(), default=-1)
    if highest >= plan.vocabulary_rows:
        yield f"the tokenizer has ids up to {highest}, the embedding {plan.vocabulary_rows} rows"
    for place, number in special:
        if not 0 <= number < plan.vocabulary_rows:
            yield f"{place} is id {number}, the embedding has {plan.vocabulary_rows} rows"
    if end is not None and end not in stops:
        token = tokenizer.convert_ids_to_tokens(end)
        yield (
            f"{path / 'generation_config.json'}: eos_token_id {stops} lacks {end} "
            f"({token!r}), which ends a turn: generation would not stop"
        )
