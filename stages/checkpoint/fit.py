"""Whether an adapter's tensors are those that PEFT makes of its config on a base."""

import re
import warnings
from collections.abc import Iterator, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

from stages.base import StageError
from stages.checkpoint.adapter import Adapter
from stages.checkpoint.architecture import without_memory
from stages.checkpoint.garbled import GARBLED, first_line
from stages.checkpoint.heads import is_reward_model
from stages.checkpoint.names import LowRank, Plain, Saved, meaning, plain_name

Model = Any
Part = tuple[str, str]
"""A parameter of the bare model, and what there is of it: a role of :class:`Update`, or ``whole``
for a tensor that replaces it."""

_ROLES = {"a": "lora_A", "b": "lora_B", "magnitude": "lora_magnitude_vector", "bias": "lora_B.bias"}


def fitted(adapter: Adapter, path: Path, base: Path) -> Adapter:
    """The adapter of ``path``, told what only ``base`` knows: which of its layers are stored
    (inputs, outputs), and whether the vocabulary was resized.

    PEFT's own model of the config on the base is built without memory. Raises
    :class:`StageError`, with a line for each kind of fault, unless the adapter's tensors are the
    ones that this model trains, in names and shapes: PEFT loads an adapter that lacks some as if
    they were zero.
    """
    reward = is_reward_model(path)
    model = without_memory(base, reward=reward)
    rows = _resized(adapter, model)
    if rows:
        model = without_memory(base, reward=reward, vocab_size=rows)
    saved_too = _ends(model) & adapter.replaced.keys()
    wrapped = _wrapped(model, path, base)
    if lines := [*_faults(_parts(adapter), _asked(wrapped, saved_too))]:
        place = f"its adapter_config.json on {base}"
        raise StageError("\n".join(f"{path}: {said}, and {place} {asks}" for said, asks in lines))
    stored = _inputs_first(wrapped)
    updates = {
        parameter: replace(update, transposed=update.embedding or stored.get(parameter, False))
        for parameter, update in adapter.updates.items()
    }
    return replace(adapter, updates=updates, vocabulary_rows=rows)


def _resized(adapter: Adapter, model: Model) -> int | None:
    """Rows of the vocabulary that the adapter was trained with, where the base has others."""
    embedding = model.get_input_embeddings()
    (name,) = (n for n, module in model.named_modules() if module is embedding)
    parameter = f"{name}.weight"
    held = adapter.replaced.get(parameter) or adapter.frozen.get(parameter)
    shape = adapter.weights.specs[held].shape if held else ()
    there = tuple(embedding.weight.shape)
    return shape[0] if len(shape) == 2 and shape[1:] == there[1:] and shape != there else None


def _ends(model: Model) -> frozenset[str]:
    """Both ends of the vocabulary, which PEFT saves with an adapter though it trains them not."""
    ends = (model.get_input_embeddings(), model.get_output_embeddings())
    return frozenset(
        f"{name}.{leaf}"
        for name, module in model.named_modules()
        if any(module is end for end in ends)
        for leaf, _ in module.named_parameters(recurse=False)
    )


def _wrapped(model: Model, path: Path, base: Path) -> Model:
    """PEFT's model of the config in ``path``. How it starts its tensors does not matter here."""
    import torch
    from peft import LoraConfig, get_peft_model

    try:
        with warnings.catch_warnings(), torch.device("meta"):
            warnings.simplefilter("ignore")
            config = LoraConfig.from_pretrained(str(path))
            config.init_lora_weights = False
            return get_peft_model(model, config, autocast_adapter_dtype=False)
    except (*GARBLED, re.error) as error:
        raise StageError(
            f"{path / 'adapter_config.json'}: PEFT makes no adapter of it on {base}: "
            f"{first_line(error)}"
        ) from None


def _asked(wrapped: Model, saved_too: frozenset[str]) -> Mapping[Part, Any]:
    """What PEFT's model trains, and ``saved_too``: tensors without memory; tied ones are one."""
    bias = wrapped.peft_config["default"].bias
    asked: dict[Part, Any] = {}
    plain: dict[str, Any] = {}
    for name, tensor in wrapped.state_dict(keep_vars=True).items():
        match meaning(plain_name(name)):
            case LowRank() as part:
                asked[part.parameter, part.role.lower()] = tensor
            case Saved() as part:
                asked[part.parameter, "whole"] = tensor
            case Plain() as part:
                plain[part.parameter] = tensor
    adapted = {parameter.rpartition(".")[0] for parameter, role in asked if role == "a"}
    for parameter, tensor in plain.items():
        module, _, leaf = parameter.rpartition(".")
        trained = bias == "all" or (bias == "lora_only" and module in adapted)
        if parameter in saved_too or (leaf == "bias" and trained):
            asked.setdefault((parameter, "whole"), tensor)
    return asked


def _parts(adapter: Adapter) -> Mapping[Part, tuple[int, ...]]:
    """The adapter's own tensors, as shapes."""
    tensors = {
        (parameter, role): name
        for parameter, update in adapter.updates.items()
        for role in _ROLES
        if (name := getattr(update, role))
    }
    tensors |= {(parameter, "whole"): name for parameter, name in adapter.replaced.items()}
    return {part: adapter.weights.specs[name].shape for part, name in tensors.items()}


def _faults(
    held: Mapping[Part, tuple[int, ...]], asked: Mapping[Part, Any]
) -> Iterator[tuple[str, str]]:
    """One of each kind: what the adapter does, and what its config asks for."""
    tied = {id(tensor) for part, tensor in asked.items() if part in held}
    lacking = [p for p, tensor in asked.items() if p not in held and id(tensor) not in tied]
    if lacking:
        yield f"lacks {_named(lacking)}", "asks for it"
    if foreign := [*(held.keys() - asked.keys())]:
        yield f"holds {_named(foreign)}", "has no place for it"
    for part in sorted(held.keys() & asked.keys()):
        if held[part] != (shape := tuple(asked[part].shape)):
            yield f"{_named([part])} has shape {held[part]}", f"asks for {shape}"
            return


def _named(parts: list[Part]) -> str:
    parameter, role = min(parts)
    more = f" ({len(parts)} such)" if parts[1:] else ""
    return (f"{_ROLES[role]} of {parameter}" if role in _ROLES else parameter) + more


def _inputs_first(wrapped: Model) -> Mapping[str, bool]:
    """Adapted parameter -> whether PEFT found it stored (inputs, outputs), as GPT-2's are."""
    return {
        f"{plain_name(name)}.weight": bool(layer.fan_in_fan_out)
        for name, layer in wrapped.named_modules()
        if hasattr(layer, "lora_A") and hasattr(layer, "fan_in_fan_out")
    }
