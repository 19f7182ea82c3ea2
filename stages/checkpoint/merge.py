"""Merges a LoRA adapter into its base, some rows of a tensor at a time."""

from __future__ import annotations

from collections.abc import Mapping
from functools import lru_cache
from threading import Lock
from typing import TYPE_CHECKING, Any, Literal

from stages.base import StageError
from stages.checkpoint.adapter import Adapter, Update
from stages.checkpoint.lineage import sampled
from stages.checkpoint.weights import BLOCK, Spec, Weights

if TYPE_CHECKING:
    from torch import Tensor

Starts = Mapping[str, tuple[Weights, str]]
"""Parameter -> where its value before the low-rank update is, and under which name."""

Arithmetic = Literal["float32", "peft"]
"""``float32`` rounds once, from the float32 sum to the type that is written; the last bit of that
sum is the processor's, since a fused multiply and add rounds less often. ``peft`` rounds where
PEFT's ``merge_and_unload`` on a CPU does, bit for bit, after a plain ``PeftModel.from_pretrained``:
that holds the base in its own type, also where the adapter's file brings a tensor of it, and half
adapters in float32; the sum is rounded to the base's type."""


def merge(
    base: Weights,
    adapter: Adapter,
    *,
    aliases: Mapping[str, str],
    arithmetic: Arithmetic = "float32",
) -> Weights:
    """``base`` with ``adapter`` merged in; rows are merged when they are read.

    ``aliases`` maps each tied parameter to the one it shares. Where the adapter changes one end of
    a tie, both ends are in the result, as training saw them: one changed, one not.
    Raises :class:`StageError` when the adapter does not fit ``base``.
    """
    starts = _starts(base, adapter, aliases)
    _check_fit(base, adapter, starts, aliases)
    _check_same_base(base, adapter)
    if arithmetic == "peft":
        starts = _loaded(base, starts)

    def spec(name: str) -> Spec:
        weights, stored = starts[name]
        kept = weights.specs[stored]
        exact = name in adapter.updates and arithmetic == "float32"
        return Spec(kept.shape, "float32") if exact else kept

    one_at_a_time = Lock()

    @lru_cache(maxsize=1)
    def merged(name: str) -> Tensor:
        weights, stored = starts[name]
        return _OPERATIONS[arithmetic](weights.read(stored), adapter.updates[name], adapter)

    def whole(name: str) -> Tensor:
        with one_at_a_time:
            return merged(name)

    def rows(name: str, first: int, last: int) -> Tensor:
        weights, stored = starts[name]
        update = adapter.updates.get(name)
        if update is None:
            return weights.rows(stored, first, last)
        if arithmetic == "peft" or _needs_whole(update):
            return whole(name)[first:last]
        return updated(weights.rows(stored, first, last), update, adapter, first=first)

    return Weights({name: spec(name) for name in starts}, rows)


def before(base: Weights, adapter: Adapter) -> Weights:
    """What the adapter was put around: ``base``, with the rows of a vocabulary that was resized."""
    starts = {name: (base, name) for name in base.specs}
    starts |= {name: (adapter.weights, held) for name, held in _resized(base, adapter).items()}
    return Weights(
        {name: weights.specs[held] for name, (weights, held) in starts.items()},
        lambda name, first, last: starts[name][0].rows(starts[name][1], first, last),
    )


def difference(
    base: Weights, adapter: Adapter, *, aliases: Mapping[str, str], dtype: str
) -> dict[str, Any]:
    """How far the two kinds of arithmetic are apart once written in ``dtype``.

    It is measured on the first rows of every merged tensor: the share of values that differ, and
    the largest difference.
    """
    import torch

    starts = _starts(base, adapter, aliases)
    loaded = _loaded(base, starts)
    differing = compared = 0
    largest = 0.0
    for name, update in adapter.updates.items():
        weights, stored = starts[name]
        spec = weights.specs[stored]
        last = min(spec.num_rows, max(1, BLOCK // 4 // max(1, spec.row_numel)))
        if _needs_whole(update):
            last = spec.num_rows
        exact = updated(weights.rows(stored, 0, last), update, adapter)
        weights, stored = loaded[name]
        peft = _peft_updated(weights.rows(stored, 0, last), update, adapter)
        exact, peft = (each.to(getattr(torch, dtype)).float() for each in (exact, peft))
        apart = (exact - peft).abs()
        differing += int(apart.count_nonzero())
        compared += apart.numel()
        largest = max(largest, float(apart.max()))
    return {"values": compared, "share": differing / max(1, compared), "largest": largest}


def updated(weight: Tensor, update: Update, adapter: Adapter, *, first: int = 0) -> Tensor:
    """Rows of a weight from ``first`` on with ``update`` applied, in float32.

    LoRA (Hu et al., arXiv:2106.09685): W' = W + s B A.
    DoRA (Liu et al., arXiv:2402.09353, eq. 5): W' = m (W + s B A) / ||W + s B A||, the norm taken
    over each output's weights. W is the base's own weight, also when it was quantised in training.
    An embedding is stored (inputs, outputs), so its product and its norms are transposed.
    """
    import torch

    last = first + weight.shape[0]
    if update.bias:
        return weight.float() + _read(adapter, update.bias)[first:last].float() * update.scaling
    a, b = _read(adapter, update.a).float(), _read(adapter, update.b).float()
    transposed = update.transposed
    if transposed:
        merged = (b @ a[:, first:last]).T.mul_(update.scaling).add_(weight.float())
    else:  # in one pass over the weights, which some processors round once
        start = weight.to(torch.float32, copy=True)
        merged = start.addmm_(b[first:last], a, alpha=update.scaling)
    if not update.magnitude:
        return merged
    norm = torch.linalg.norm(merged.T if transposed else merged, dim=1)
    magnitude = _read(adapter, update.magnitude).float().reshape(-1)
    factor = (magnitude if transposed else magnitude[first:last]) / norm
    return merged.mul_(factor.view(1, -1) if transposed else factor.view(-1, 1))


def _peft_updated(weight: Tensor, update: Update, adapter: Adapter) -> Tensor:
    """As peft 0.21 does it on a CPU, in the types in which it does it."""
    import torch

    result, rows = weight.clone(), len(weight)
    if update.bias:
        result += _upcast(adapter, update.bias)[:rows] * update.scaling
        return result
    a, b = _upcast(adapter, update.a), _upcast(adapter, update.b)
    transposed = update.transposed
    delta = ((b @ a[:, :rows]).T if transposed else b[:rows] @ a) * update.scaling
    if not update.magnitude:
        result += delta.to(result.dtype) if update.embedding else delta
        return result
    turned = weight.T + delta.T if transposed else weight + delta
    norm = torch.linalg.norm(turned, dim=1).to(turned.dtype)
    factor = _upcast(adapter, update.magnitude).reshape(-1)[: len(norm)] / norm
    factor = factor.view(1, -1) if transposed else factor.view(-1, 1)
    return (factor * (weight + delta)).to(weight.dtype)


_OPERATIONS = {"float32": updated, "peft": _peft_updated}


def _read(adapter: Adapter, name: str | None) -> Tensor:
    assert name is not None
    return adapter.weights.read(name)


def _upcast(adapter: Adapter, name: str | None) -> Tensor:
    tensor = _read(adapter, name)
    return tensor.float() if tensor.itemsize < 4 else tensor


def _needs_whole(update: Update) -> bool:
    """Whether a row's value depends on other rows: DoRA's norms run along columns then."""
    return bool(update.magnitude) and update.transposed


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


def _loaded(base: Weights, starts: Starts) -> dict[str, tuple]:
    """``starts`` as loading them into the base makes them: each in the base's own type."""
    import torch

    def cast(weights: Weights, dtype: str) -> Weights:
        specs = {name: Spec(spec.shape, dtype) for name, spec in weights.specs.items()}
        kind = getattr(torch, dtype)
        return Weights(specs, lambda name, first, last: weights.rows(name, first, last).to(kind))

    return {
        name: (cast(weights, base.specs[name].dtype), stored)
        if weights is not base and name in base.specs
        else (weights, stored)
        for name, (weights, stored) in starts.items()
    }


def _resized(base: Weights, adapter: Adapter) -> dict[str, str]:
    """Matrices with other rows than the base's: a vocabulary resized before training."""
    return {
        parameter: name
        for parameter, name in {**adapter.frozen, **adapter.replaced}.items()
        if parameter in base.specs
        and len(base.specs[parameter].shape) == 2
        and adapter.weights.specs[name].shape[1:] == base.specs[parameter].shape[1:]
        and adapter.weights.specs[name].shape != base.specs[parameter].shape
    }


def _check_fit(base: Weights, adapter: Adapter, starts: Starts, aliases: Mapping[str, str]) -> None:
    known = base.specs.keys() | aliases.keys() | adapter.heads
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
    return (inputs, outputs) if update.transposed else (outputs, inputs)


def comparable(base: Weights, adapter: Adapter) -> list[str]:
    """Parameters of which the adapter's checkpoint holds what training started from, and left
    alone, as shards do. One held in 4 bits or with other rows has nothing to be compared with."""
    return [
        parameter
        for parameter, name in adapter.frozen.items()
        if parameter in base.specs
        and parameter not in adapter.replaced
        and adapter.weights.specs[name].shape == base.specs[parameter].shape
        and adapter.weights.specs[name].dtype.startswith(("f", "b"))
    ]


def _check_same_base(base: Weights, adapter: Adapter) -> None:
    """Some values of every tensor that can be compared tell whether the base is the training's."""
    for parameter in comparable(base, adapter):
        held = sampled(adapter.weights, adapter.frozen[parameter])
        if not _may_be(held, sampled(base, parameter)):
            raise StageError(
                f"{parameter} is not what the adapter was trained on: merge it into the base that "
                "the training stage was given"
            )


def _may_be(held: Tensor, start: Tensor) -> bool:
    """Whether ``held`` is ``start`` as training loads it, perhaps in half precision, and keeps it
    in a type of its own."""
    import torch

    types = (held.dtype, torch.bfloat16, torch.float16)
    return any(torch.equal(held, start.to(loaded).to(held.dtype)) for loaded in types)
