"""Tied parameters: written once, or untied where training drove the two ends apart."""

from collections.abc import Mapping

from stages.checkpoint.weights import Weights


def settle(weights: Weights, aliases: Mapping[str, str]) -> tuple[Weights, bool]:
    """The tensors to write, and whether the config may go on tying them.

    ``aliases`` maps each tied parameter to the one it shares. A checkpoint may hold a tied pair
    once, or twice with equal values, and then one is written. Ends that differ are both written,
    and the config has to stop tying them, or loading would give one the other's values.
    """
    import torch

    for alias, source in aliases.items():
        if alias in weights.specs and source in weights.specs:
            same_shape = weights.specs[alias].shape == weights.specs[source].shape
            if not same_shape or not torch.equal(weights.read(alias), weights.read(source)):
                return weights, False
    return weights.without(aliases), bool(aliases)
