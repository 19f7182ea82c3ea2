"""Figures of a reward model: calibration, margins, and accuracy by difference of length."""

from collections.abc import Callable, Mapping
from functools import partial
from itertools import pairwise
from typing import Any

from flows.plots import BLUE, GREY, ORANGE, PERCENT, Job, Shown, canvas

Measures = Mapping[str, Any]
FILE = "reliability.png"


def figure(trainings: Mapping[str, Measures]) -> Shown:
    """What the stage ``reward`` measured, for each training that is one."""
    about = "Held-out pairs by the reward model: calibration, margins, accuracy by length"
    return Shown(about, FILE, trainings, partial(_draw, trainings))


def _draw(trainings: Mapping[str, Measures]) -> Any:
    jobs: list[tuple[str, Job]] = []
    for label, found in trainings.items():
        if "reliability" in found:
            jobs += [
                (f"{label}: reliability", _reliability(found)),
                (f"{label}: margins", _margins(found)),
                (f"{label}: by length", _by_length(found)),
            ]
    return canvas(jobs) if jobs else None


def _reliability(found: Measures) -> Callable[[Any], None]:
    """How often right against how sure: on the diagonal where the scores mean what they say."""

    def job(axis: Any) -> None:
        bins = found["reliability"]
        axis.plot([50, 100], [50, 100], color=GREY, linewidth=0.9, linestyle="--", zorder=1)
        axis.plot(
            [each["confidence"] / PERCENT for each in bins],
            [each["accuracy"] / PERCENT for each in bins],
            "-", color=BLUE, linewidth=1.2,
        )  # fmt: skip
        largest = max(each["n"] for each in bins)
        for each in bins:
            size = 3 + 7 * (each["n"] / largest) ** 0.5  # the area tells the number of pairs
            place = [each["confidence"] / PERCENT], [each["accuracy"] / PERCENT]
            axis.plot(*place, "o", color=BLUE, markersize=size, alpha=0.7, markeredgewidth=0)
        axis.set_xlabel("sure of the preferred answer (%)")
        axis.set_ylabel("right (%)")
        axis.set_ylim(-3, 105)
        error = 100 * found["ece"]
        axis.annotate(f"error {error:.1f} points", (0.97, 0.05), xycoords="axes fraction",
                      ha="right", color=GREY, fontsize=8)  # fmt: skip

    return job


def _margins(found: Measures) -> Callable[[Any], None]:
    def job(axis: Any) -> None:
        counts, edges = found["margin_histogram"]["counts"], found["margin_histogram"]["edges"]
        middles = [(a + b) / 2 for a, b in pairwise(edges)]
        colours = [ORANGE if middle < 0 else BLUE for middle in middles]
        axis.bar(middles, counts, width=edges[1] - edges[0], color=colours)
        axis.axvline(0, color=GREY, linewidth=0.9, linestyle="--")
        axis.set_xlabel("score of chosen - rejected")
        axis.set_ylabel("pairs")

    return job


def _by_length(found: Measures) -> Callable[[Any], None]:
    def job(axis: Any) -> None:
        parts = found["accuracy_by_length"]
        shares = [part["accuracy"] for part in parts]
        values = [each["value"] / PERCENT for each in shares]
        errors = [
            [max(0.0, each["value"] - each["low"]) / PERCENT for each in shares],
            [max(0.0, each["high"] - each["value"]) / PERCENT for each in shares],
        ]
        axis.errorbar(range(len(parts)), values, errors, fmt="o", color=BLUE, capsize=3)
        ends = [(part["low"], part["high"]) for part in parts]
        names = [f"{low:g}" if low == high else f"{low:g} to {high:g}" for low, high in ends]
        axis.set_xticks(range(len(parts)), names, fontsize=7)
        axis.set_xlim(-0.5, len(parts) - 0.5)
        axis.axhline(50, color=GREY, linewidth=0.9, linestyle="--")
        axis.set_xlabel("chosen longer by (tokens)")
        axis.set_ylabel("accuracy (%)")
        axis.set_ylim(-3, 105)

    return job
