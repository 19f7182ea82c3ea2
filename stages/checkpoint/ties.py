"""Tied parameters: written once, or untied where training drove the two ends apart."""

from collections.abc import Mapping

from stages.checkpoint.weights import Weights, equal


def settle(weights: Weights, aliases: Mapping[str, str]) -> tuple[Weights, bool]:
    """The tensors to write, and whether the config may go on tying them.

    ``aliases`` maps each tied parameter to the one it shares. A checkpoint may hold a tied pair
    once, or twice with equal values, and then one is written. Ends that differ are both written,
    and the config has to stop tying them, or loading would give one the other's values.
    """
    for alias, source in aliases.items():
        there = alias in weights.specs and source in weights.specs
        if there and not equal(weights, alias, weights, source):
            return weights, False
    return weights.without(aliases), bool(aliases)
