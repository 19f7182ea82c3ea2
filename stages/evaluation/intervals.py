"""Estimates with confidence intervals, in plain numpy."""

import math
from dataclasses import dataclass
from statistics import NormalDist

import numpy as np
from numpy.typing import ArrayLike

Estimate = dict[str, float]
"""``value``, the ends ``low`` and ``high`` of its confidence interval, ``n`` observations."""


@dataclass(frozen=True)
class Intervals:
    """How intervals are made: one choice for a whole evaluation."""

    confidence: float = 0.95
    """Probability with which an interval covers the true value."""

    samples: int = 1000
    """Bootstrap resamples."""

    seed: int = 0
    """The same seed resamples the same rows for every measure and every model."""

    def share(self, wins: ArrayLike) -> Estimate:
        """The share of ``wins`` (1 won, 0 lost, 0.5 tied), with its Wilson score interval.

        Wilson (1927), "Probable inference, the law of succession, and statistical inference".
        """
        won = np.asarray(wins, dtype=float)
        low, high = wilson(float(won.sum()), won.size, confidence=self.confidence)
        return {"value": float(won.mean()), "low": low, "high": high, "n": won.size}

    def mean(self, values: ArrayLike) -> Estimate:
        """The mean of ``values``, with its percentile bootstrap interval over rows."""
        return self.ratio(values, np.ones(np.shape(values)))

    def ratio(self, numerators: ArrayLike, denominators: ArrayLike) -> Estimate:
        """sum(numerators) / sum(denominators), with its percentile bootstrap interval over rows.

        Both are per row, so that rows of unequal weight (a loss summed over tokens, and the
        number of tokens) are resampled together: Efron (1979), "Bootstrap methods".
        """
        top, bottom = np.asarray(numerators, dtype=float), np.asarray(denominators, dtype=float)
        rng = np.random.default_rng(self.seed)
        resamples = (rng.integers(0, top.size, top.size) for _ in range(self.samples))
        ratios = [top[rows].sum() / bottom[rows].sum() for rows in resamples]
        tail = (1 - self.confidence) / 2
        low, high = np.quantile(ratios, (tail, 1 - tail))
        value = float(top.sum() / bottom.sum())
        return {"value": value, "low": float(low), "high": float(high), "n": top.size}


def wilson(wins: float, n: int, *, confidence: float) -> tuple[float, float]:
    """The ends of the Wilson score interval for ``wins`` out of ``n`` trials; ``n`` > 0.

    An end that is 0 or 1 by algebra is so exactly, whatever the rounding.
    """
    z = NormalDist().inv_cdf(0.5 + confidence / 2)
    share, spread = wins / n, z * z / n
    centre = (share + spread / 2) / (1 + spread)
    half = z / (1 + spread) * math.sqrt(share * (1 - share) / n + spread / (4 * n))
    return (
        0.0 if wins == 0 else max(0.0, centre - half),
        1.0 if wins == n else min(1.0, centre + half),
    )
