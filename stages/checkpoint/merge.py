"""Merges a LoRA adapter into its base, tensor by tensor."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING

from stages.base import StageError
from stages.checkpoint.adapter import Adapter, Update
from stages.checkpoint.weights import Spec, Weights

if TYPE_CHECKING:
    from torch import Tensor

Starts = Mapping[str, tuple[Weights, str]]
"""Parameter -> where its value before the low-rank update is, and under which name."""


def merge(base: Weights, adapter: Adapter, *, aliases: Mapping[str, str]) -> Weights:
    """``base`` with ``adapter`` merged in; a parameter is merged when it is read, in float32.

    ``aliases`` maps each tied parameter to the one it shares. Where the adapter changes one end of
    a tie, both ends are in the result, as training saw them: one changed, one not.
    Raises :class:`StageError` when the adapter does not fit ``base``.
    """
    starts = _starts(base, adapter, aliases)
    _check_fit(base, adapter, starts, aliases)
    _check_same_base(base, adapter)

    def spec(name: str) -> Spec:
        weights, stored = starts[name]
        kept = weights.specs[stored]
        return Spec(kept.shape, "float32") if name in adapter.updates else kept

    def read(name: str) -> Tensor:
        weights, stored = starts[name]
        update = adapter.updates.get(name)
        weight = weights.read(stored)
        return weight if update is None else updated(weight, update, adapter)

    return Weights({name: spec(name) for name in starts}, read)


def updated(weight: Tensor, update: Update, adapter: Adapter) -> Tensor:
    """``weight`` with ``update`` applied, in float32; the operations and their order are PEFT's.

    LoRA (Hu et al., arXiv:2106.09685): W' = W + s B A.
    DoRA (Liu et al., arXiv:2402.09353, eq. 5): W' = m (W + s B A) / ||W + s B A||, the norm taken
    over each output's weights. W is the base's own weight, also when it was quantised in training.
    An embedding is stored (inputs, outputs), so its product and its norms are transposed.
    """
    import torch

    def read(name: str | None) -> Tensor:
        assert name is not None
        return adapter.weights.read(name).float()

    if update.bias:
        return weight.float() + read(update.bias) * update.scaling
    transposed = _transposed(update, adapter)
    product = read(update.b) @ read(update.a)
    merged = torch.add(weight, (product.T if transposed else product).mul_(update.scaling))
    if not update.magnitude:
        return merged
    norm = torch.linalg.norm(merged.T if transposed else merged, dim=1)
    factor = read(update.magnitude).reshape(-1) / norm
    return merged.mul_(factor.view(1, -1) if transposed else factor.view(-1, 1))


def _transposed(update: Update, adapter: Adapter) -> bool:
    return update.embedding or bool(adapter.config.get("fan_in_fan_out"))


def _starts(base: Weights, adapter: Adapter, aliases: Mapping[str, str]) -> dict[str, tuple]:
    starts = {name: (base, name) for name in base.specs}
    replaced = {**_resized(base, adapter), **adapter.replaced}
    starts |= {parameter: (adapter.weights, name) for parameter, name in replaced.items()}
    for alias, source in aliases.items():
        touched = {alias, source} & (adapter.updates.keys() | replaced.keys())
        if touched and alias not in starts and source in starts:
            grown = starts[source][0].specs[starts[source][1]].shape != base.specs[source].shape
            starts[alias] = starts[source] if grown else (base, source)
    return starts


def _resized(base: Weights, adapter: Adapter) -> dict[str, str]:
    """Frozen matrices with other rows than the base's: a vocabulary resized before training."""
    return {
        parameter: name
        for parameter, name in adapter.frozen.items()
        if parameter in base.specs
        and len(base.specs[parameter].shape) == 2
        and adapter.weights.specs[name].shape[1:] == base.specs[parameter].shape[1:]
        and adapter.weights.specs[name].shape != base.specs[parameter].shape
    }


def _check_fit(base: Weights, adapter: Adapter, starts: Starts, aliases: Mapping[str, str]) -> None:
    known = base.specs.keys() | aliases.keys()
    if foreign := sorted((adapter.updates.keys() | adapter.replaced.keys()) - known):
        raise StageError(
            f"the adapter changes {foreign[0]} ({len(foreign)} such), which its base does not "
            "have: it was trained on another architecture"
        )
    for parameter, update in adapter.updates.items():
        weights, stored = starts[parameter]
        asked, there = _shape(update, adapter), weights.specs[stored].shape
        if asked != there:
            raise StageError(
                f"the adapter changes {parameter} by a tensor of shape {asked}, and the base's is "
                f"{there}: it was trained on another base"
            )


def _shape(update: Update, adapter: Adapter) -> tuple[int, ...]:
    specs = adapter.weights.specs
    if update.bias:
        return specs[update.bias].shape
    assert update.a and update.b
    outputs, inputs = specs[update.b].shape[0], specs[update.a].shape[1]
    return (inputs, outputs) if _transposed(update, adapter) else (outputs, inputs)


def _check_same_base(base: Weights, adapter: Adapter) -> None:
    """Shards hold the frozen weights too: one adapted matrix tells whether they are the base's."""
    import torch

    for parameter in adapter.updates.keys() & adapter.frozen.keys() & base.specs.keys():
        spec = adapter.weights.specs[adapter.frozen[parameter]]
        if spec.shape != base.specs[parameter].shape or not spec.dtype.startswith(("f", "b")):
            continue  # held quantised, or resized
        frozen = adapter.weights.read(adapter.frozen[parameter])
        if not torch.equal(frozen, base.read(parameter).to(frozen.dtype)):
            raise StageError(
                f"{parameter} is not what the adapter was trained on: merge it into the base that "
                "the training stage was given"
            )
        return
