"""A policy's weights as a checkpoint has them. Imported only inside a rank: it loads torch."""

from collections.abc import Iterator
from typing import Any

from peft.tuners.tuners_utils import BaseTunerLayer
from torch import Tensor, nn

from stages.rl.whole import named_parameters

PEFT_SHELL = "base_model.model."


def weights(policy: nn.Module) -> Iterator[tuple[str, Tensor]]:
    """(name, tensor) as a checkpoint of the whole policy has them, tied ones once, adapters merged
    in, one at a time. The policy's own weights stay as they are, to the last bit."""
    layers = {
        name: module
        for name, module in policy.named_modules()
        if isinstance(module, BaseTunerLayer)
    }
    adapters = {id(p) for layer in layers.values() for p in _adapters(layer)}
    told = set[int]()
    for name, parameter in named_parameters(policy):
        if id(parameter) in adapters or ".original_module." in name:
            continue
        if parameter.data_ptr() in told:
            continue
        told.add(parameter.data_ptr())
        owner, base, rest = name.partition(".base_layer.")
        tensor = parameter.detach()
        if base and rest == "weight":
            tensor = _merged(layers[owner])
        yield _checkpoint_name(owner + (f".{rest}" if base else "")), tensor


def _adapters(layer: Any) -> Iterator[nn.Parameter]:
    for name in layer.adapter_layer_names:
        yield from getattr(layer, name).parameters()


def _merged(layer: Any) -> Tensor:
    """Its weight as PEFT merges it, with every kind of adapter that PEFT knows."""
    base = layer.get_base_layer()
    own = base.weight.data
    base.weight.data = own.clone()
    try:
        layer.merge()
        return base.weight.data
    finally:
        base.weight.data = own
        layer.merged_adapters.clear()


def _checkpoint_name(name: str) -> str:
    return name.removeprefix(PEFT_SHELL).replace(".modules_to_save.default.", ".")
