"""A LoRA adapter: what it changes, by how much, and whether it can be merged."""

import math
import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from stages.base import StageError
from stages.checkpoint.json_files import read_json
from stages.checkpoint.names import LowRank, Meaning, Plain, Saved, Unknown, meaning
from stages.checkpoint.readers import open_weights
from stages.checkpoint.weights import Weights, num_not_finite

_INITIALISATIONS = (True, False, "gaussian", "eva", "orthogonal", "mica")
"""Those that leave the base weights alone. PiSSA, OLoRA, CorDA, LoRA-GA and LoftQ do not."""

_VARIANTS = (
    "alora_invocation_tokens",
    "arrow_config",
    "kasa_config",
    "layer_replication",
    "monteclora_config",
    "target_parameters",
    "trainable_token_indices",
    "use_bdlora",
    "velora_config",
)
"""Settings under which the adapted layer is not ``W + s B A``."""


@dataclass(frozen=True)
class Update:
    """The change of one parameter; every field but the last three names a tensor of the adapter."""

    a: str | None = None
    b: str | None = None
    magnitude: str | None = None
    """DoRA's length of each output's weights."""

    bias: str | None = None
    """Added to a bias, scaled like the product."""

    scaling: float = 1.0
    embedding: bool = False
    """Whether the parameter is that of an embedding."""

    transposed: bool = False
    """Whether it is stored (inputs, outputs), as embeddings and GPT-2's layers are."""


@dataclass(frozen=True)
class Adapter:
    """An adapter ready to be merged."""

    config: Mapping[str, Any]
    updates: Mapping[str, Update]
    """Parameter of the bare model -> its low-rank change."""

    replaced: Mapping[str, str]
    """Parameter -> the tensor that was trained whole in its place."""

    frozen: Mapping[str, str]
    """Parameter -> the base's own tensor, where the checkpoint holds those too."""

    weights: Weights

    vocabulary_rows: int | None = None
    """Of the vocabulary that it was trained with, where that has other rows than its base's.
    :func:`stages.checkpoint.fit.fitted` finds it."""

    @property
    def heads(self) -> frozenset[str]:
        """Parameters that the base may lack: the score of a reward model made from a language
        model."""
        reward = self.config.get("task_type") == "SEQ_CLS"
        return frozenset(self.replaced if reward else ())


def read_adapter(path: Path) -> Adapter:
    """The adapter in ``path``: PEFT's own files, or a PEFT model in DCP or ZeRO shards.

    Raises :class:`StageError` for a kind of adapter that is not ``W + s B A`` (with DoRA's
    magnitude or without), or that was trained on weights other than the base's own.
    """
    config = read_json(path / "adapter_config.json")
    _refuse(path / "adapter_config.json", config)
    weights = open_weights(path)
    meanings = {name: meaning(name) for name in weights.specs}
    low_rank = {n: m for n, m in meanings.items() if isinstance(m, LowRank)}
    if not low_rank:
        raise StageError(f"{path}: holds no lora_A and lora_B tensors")
    chosen = _chosen(path, meanings.values())
    state_dict_form = chosen is not None
    plain = {m.parameter: n for n, m in meanings.items() if isinstance(m, Plain)}
    saved = {
        m.parameter: n for n, m in meanings.items() if isinstance(m, Saved) and m.adapter == chosen
    }
    trained = _trained_biases(config, plain, low_rank.values()) if state_dict_form else plain
    return Adapter(
        config=config,
        updates=_updates(path, config, low_rank, chosen, weights),
        replaced={**trained, **saved},
        frozen=plain if state_dict_form else {},
        weights=weights,
    )


def peft_weights(adapter: Adapter) -> Weights:
    """The adapter's tensors under the names of PEFT's ``adapter_model.safetensors``."""
    names: dict[str, str] = {}
    for parameter, update in adapter.updates.items():
        module = f"base_model.model.{parameter.rpartition('.')[0]}"
        kind, leaf = ("lora_embedding_", "") if update.embedding else ("lora_", ".weight")
        tensors = {
            f"{module}.{kind}A{leaf}": update.a,
            f"{module}.{kind}B{leaf}": update.b,
            f"{module}.lora_B.bias": update.bias,
            f"{module}.lora_magnitude_vector": update.magnitude,
        }
        names |= {name: held for name, held in tensors.items() if held}
    for parameter, name in adapter.replaced.items():
        module, _, leaf = parameter.rpartition(".")
        inner = "base_layer." if f"{module}.weight" in adapter.updates else ""
        names[f"base_model.model.{module}.{inner}{leaf}"] = name
    return adapter.weights.renamed(names)


def _refuse(file: Path, config: Mapping[str, Any]) -> None:
    if config.get("peft_type") != "LORA":
        raise StageError(
            f"{file}: peft_type {config.get('peft_type')!r} cannot be merged, only LORA"
        )
    if variants := [name for name in _VARIANTS if config.get(name)]:
        raise StageError(f"{file}: adapters with {', '.join(variants)} cannot be merged")
    start = config.get("init_lora_weights", True)
    if start not in _INITIALISATIONS:
        raise StageError(
            f"{file}: init_lora_weights {start!r} changes the base weights before training, so "
            "that merging into the original ones would be wrong"
        )
    _refuse_scaling(file, config)


def _refuse_scaling(file: Path, config: Mapping[str, Any]) -> None:
    patterns = config.get("alpha_pattern") or {}
    if not isinstance(patterns, dict):
        raise StageError(f"{file}: alpha_pattern is {patterns!r}, and a mapping was expected")
    alphas = {"lora_alpha": config.get("lora_alpha") or 0}
    alphas |= {f"alpha_pattern {pattern!r}": alpha for pattern, alpha in patterns.items()}
    for place, alpha in alphas.items():
        if type(alpha) not in (int, float):
            raise StageError(f"{file}: {place} is {alpha!r}, and a number was expected")
    if not alphas["lora_alpha"]:
        raise StageError(f"{file}: lora_alpha is 0 or not there, which drops the adapter")
    for pattern in patterns:
        try:
            re.compile(_end(pattern))
        except re.error as error:
            raise StageError(
                f"{file}: alpha_pattern {pattern!r} is no regular expression: {error}"
            ) from None


def _chosen(path: Path, meanings: Iterable[Meaning]) -> str | None:
    """The adapter's name in a state dict; ``None`` in PEFT's own form, which leaves it out."""
    named: set[str | None] = set()
    for m in meanings:
        if isinstance(m, Unknown):
            raise StageError(f"{path}: {m.name} belongs to a kind of adapter that cannot be merged")
        if isinstance(m, LowRank):
            named.add(m.adapter)
    if len(named) == 1:
        return named.pop()
    if "default" in named:
        return "default"
    raise StageError(f"{path}: holds {len(named)} adapters ({named}) and none is called 'default'")


def _trained_biases(
    config: Mapping[str, Any], plain: Mapping[str, str], low_rank: Iterable[LowRank]
) -> dict[str, str]:
    kind = config.get("bias", "none")
    if kind == "none":
        return {}
    biases = {parameter: name for parameter, name in plain.items() if parameter.endswith(".bias")}
    if kind == "all":
        return biases
    adapted = {f"{part.parameter.rpartition('.')[0]}.bias" for part in low_rank}
    return {parameter: name for parameter, name in biases.items() if parameter in adapted}


def _updates(
    path: Path,
    config: Mapping[str, Any],
    low_rank: Mapping[str, LowRank],
    chosen: str | None,
    weights: Weights,
) -> dict[str, Update]:
    parts: dict[str, dict[str, Any]] = {}
    for name, part in low_rank.items():
        if part.adapter == chosen:
            role = part.role.lower()
            parts.setdefault(part.parameter, {})[role] = name
            if part.embedding:
                parts[part.parameter]["embedding"] = True
    for parameter, fields in parts.items():
        module, _, leaf = parameter.rpartition(".")
        a = parts.get(f"{module}.weight", {}).get("a")
        if a is None or (leaf == "weight" and "b" not in fields):
            raise StageError(f"{path}: {module} has one of lora_A and lora_B, and not the other")
        rank = weights.specs[a].shape[0] if weights.specs[a].shape else 0
        fields["scaling"] = _scaling(config, module, rank)
        fields["transposed"] = "embedding" in fields or bool(config.get("fan_in_fan_out"))
    return {parameter: Update(**fields) for parameter, fields in parts.items()}


def _scaling(config: Mapping[str, Any], module: str, rank: int) -> float:
    """alpha / r, or alpha / sqrt(r) for rsLoRA (arXiv:2312.03732); alpha may differ by module."""
    alpha = _by_pattern(config.get("alpha_pattern") or {}, module, config["lora_alpha"])
    if not rank:
        return 0.0  # an empty tensor, which `faults` reports
    return alpha / math.sqrt(rank) if config.get("use_rslora") else alpha / rank


def _by_pattern(patterns: Mapping[str, float], module: str, otherwise: float) -> float:
    """As ``peft.utils.get_pattern_key``: the first key that matches the end of the name."""
    for pattern, value in patterns.items():
        if re.match(_end(pattern), module):
            return value
    return otherwise


def _end(pattern: str) -> str:
    return rf"(.*\.)?({pattern})$"


def faults(adapter: Adapter) -> tuple[str, ...]:
    """What is wrong with the adapter's own tensors, one line each."""
    lines = []
    trained = {n for update in adapter.updates.values() for n in _tensors(update)}
    for name in sorted(trained | set(adapter.replaced.values())):
        spec = adapter.weights.specs[name]
        if not spec.numel:
            lines.append(f"{name}: empty, of shape {spec.shape}; the shards were not gathered")
        elif num_not_finite(adapter.weights, name):
            lines.append(f"{name}: holds values that are not finite")
    for parameter, update in adapter.updates.items():
        if update.a and update.b:
            a, b = adapter.weights.specs[update.a].shape, adapter.weights.specs[update.b].shape
            if len(a) != 2 or len(b) != 2 or a[0] != b[1]:
                lines.append(f"{parameter}: lora_A {a} and lora_B {b} do not multiply")
    return tuple(lines)


def _tensors(update: Update) -> list[str]:
    return [name for name in (update.a, update.b, update.magnitude, update.bias) if name]
