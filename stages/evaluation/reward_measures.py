"""What a reward model's scores of preference pairs say of it. Pure functions of numbers."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from stages.evaluation.intervals import Estimate, Intervals

Values = NDArray[np.float64]
QUANTILES = (5, 25, 50, 75, 95)


@dataclass(frozen=True)
class Pairs:
    """Raw scores of both answers of each pair, and their lengths in tokens."""

    chosen: Values
    rejected: Values
    chosen_tokens: Values
    rejected_tokens: Values

    @property
    def margins(self) -> Values:
        return self.chosen - self.rejected

    @property
    def wins(self) -> Values:
        """1 where the chosen answer scores higher, 0.5 for a tie."""
        return (np.sign(self.margins) + 1) / 2

    @property
    def length_differences(self) -> Values:
        return self.chosen_tokens - self.rejected_tokens


def reward_measures(pairs: Pairs, intervals: Intervals, *, bins: int = 10) -> dict[str, Any]:
    """Everything that is reported of a reward model on held-out pairs.

    ``accuracy`` (of pairs, ties count half), ``margin`` and its ``margin_quantiles`` in raw
    scores, ``ece`` with the bins of ``reliability``, ``accuracy_by_length`` and
    ``length_correlation``, Pearson's of the margin and the difference in tokens.
    """
    calibration = reliability(pairs.margins, bins=bins)
    quantiles = np.quantile(pairs.margins, [q / 100 for q in QUANTILES])
    return {
        "accuracy": intervals.share(pairs.wins),
        "margin": intervals.mean(pairs.margins),
        "margin_quantiles": {f"{q}": float(v) for q, v in zip(QUANTILES, quantiles, strict=True)},
        "margin_histogram": histogram(pairs.margins),
        "ece": expected_calibration_error(calibration),
        "reliability": calibration,
        "accuracy_by_length": accuracy_by_length(pairs, intervals),
        "length_correlation": correlation(pairs.margins, pairs.length_differences),
    }


def reliability(margins: Values, *, bins: int = 10) -> list[dict[str, float]]:
    """Stated against found: the pairs by how sure the model is of the answer that it prefers.

    By Bradley and Terry (1952) the model believes that the chosen answer is the better one with
    probability sigmoid(margin); its confidence is that of the side it takes, from 0.5 to 1.
    Each of ``bins`` equal bins has ``low``, ``high``, ``n``, mean ``confidence`` and ``accuracy``;
    empty ones are left out.
    """
    confidence = 1 / (1 + np.exp(-np.abs(margins)))
    right = (np.sign(margins) + 1) / 2
    edges = np.linspace(0.5, 1, bins + 1)
    places = np.clip(np.digitize(confidence, edges) - 1, 0, bins - 1)
    return [
        {
            "low": float(edges[each]),
            "high": float(edges[each + 1]),
            "n": int((places == each).sum()),
            "confidence": float(confidence[places == each].mean()),
            "accuracy": float(right[places == each].mean()),
        }
        for each in range(bins)
        if (places == each).any()
    ]


def expected_calibration_error(calibration: Sequence[Mapping[str, float]]) -> float:
    """Sum over bins of (n / N) |accuracy - confidence|: Guo et al. (2017), arXiv:1706.04599."""
    total = sum(each["n"] for each in calibration)
    gaps = (each["n"] * abs(each["accuracy"] - each["confidence"]) for each in calibration)
    return sum(gaps) / total


def accuracy_by_length(pairs: Pairs, intervals: Intervals) -> list[dict[str, Any]]:
    """Accuracy in quarters of the pairs by how much longer the chosen answer is, in tokens.

    Each has ``low`` and ``high``, the ends of the difference in it, and the ``accuracy`` as an
    estimate. Equal differences stay together, so that there may be fewer than four.
    """
    differences = pairs.length_differences
    edges = np.unique(np.quantile(differences, (0.25, 0.5, 0.75)))
    places = np.searchsorted(edges, differences, side="left")
    return [
        {
            "low": float(differences[places == each].min()),
            "high": float(differences[places == each].max()),
            "accuracy": intervals.share(pairs.wins[places == each]),
        }
        for each in np.unique(places)
    ]


def histogram(values: Values, *, bins: int = 20) -> dict[str, list[float]]:
    """``counts`` between ``edges``, one more than they are."""
    counts, edges = np.histogram(values, bins=bins)
    return {"counts": counts.astype(float).tolist(), "edges": edges.tolist()}


def correlation(one: Values, other: Values) -> float:
    """Pearson's; 0 where either does not vary."""
    if not (np.ptp(one) and np.ptp(other)):
        return 0.0
    return float(np.corrcoef(one, other)[0, 1])


def win_rate(
    mine: Sequence[float],
    theirs: Sequence[float],
    intervals: Intervals,
    *,
    alike: Sequence[bool] | None = None,
) -> Estimate:
    """How often ``mine`` is the higher score, row by row; ties count half. Rows that are ``alike``
    are ties: a batch of another width rounds the score of the same answer otherwise."""
    signs = np.sign(np.subtract(mine, theirs))
    if alike is not None:
        signs[np.asarray(alike)] = 0
    return intervals.share((signs + 1) / 2)
