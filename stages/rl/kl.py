"""The divergence from the reference: its estimators, and the coefficient that it is charged with.

Estimators: http://joschu.net/blog/kl-approx.html. Adaptive coefficient: arXiv:1909.08593, 2.2.
"""

from collections.abc import Callable
from typing import TYPE_CHECKING, Annotated, Literal

from pydantic import Field, NonNegativeFloat, PositiveFloat, PositiveInt

from configs import Config

if TYPE_CHECKING:
    from torch import Tensor

Estimator = Literal["k1", "k2", "k3"]


class FixedKL(Config):
    """The same coefficient from the first update to the last."""

    kind: Literal["fixed"] = "fixed"

    coefficient: NonNegativeFloat = 0.05
    """What a nat of divergence from the reference costs, in units of reward."""


class AdaptiveKL(Config):
    """A coefficient that rises and falls so that the divergence comes to a target."""

    kind: Literal["adaptive"] = "adaptive"

    coefficient: PositiveFloat = 0.15
    """What a nat costs in the first update."""

    target: PositiveFloat = 6.0
    """Divergence to be held, in nats an answer."""

    horizon: PositiveInt = 10_000
    """Answers over which the coefficient follows; the larger, the slower."""


KL = Annotated[FixedKL | AdaptiveKL, Field(discriminator="kind")]


def next_coefficient(config: FixedKL | AdaptiveKL, now: float, *, kl: float, num: int) -> float:
    """The coefficient after ``num`` answers of mean divergence ``kl`` (nats an answer).

    now (1 + clip(kl / target - 1, -0.2, 0.2) num / horizon).
    """
    if isinstance(config, FixedKL):
        return now
    error = min(max(kl / config.target - 1, -0.2), 0.2)
    return now * (1 + error * num / config.horizon)


def k1(log_ratio: "Tensor") -> "Tensor":
    """log p - log q: unbiased, of high variance, of either sign."""
    return log_ratio


def k2(log_ratio: "Tensor") -> "Tensor":
    """(log p - log q)^2 / 2: biased, of low variance, never negative."""
    return log_ratio**2 / 2


def k3(log_ratio: "Tensor") -> "Tensor":
    """q / p - 1 - log(q / p): unbiased, of low variance, never negative."""
    return (-log_ratio).expm1() + log_ratio


ESTIMATORS: dict[Estimator, "Callable[[Tensor], Tensor]"] = {"k1": k1, "k2": k2, "k3": k3}
"""Of KL(p || q), from log p - log q at tokens that were drawn from p."""
