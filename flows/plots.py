"""Figures of a run: training curves, and the scores of its models."""

import hashlib
import itertools
import math
import os
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

from flows.svg import drawable

Rows = Sequence[Mapping[str, Any]]
"""The rows of a ``metrics.jsonl``."""

Scores = Mapping[str, Mapping[str, Any]]
"""The measures of each model, in the order of the run."""

Job = Callable[[Any], None]
"""Draws one panel on the axis that it is given."""

LN2 = math.log(2)
NOISY = 30
"""From so many points on, a noisy curve is drawn as dots and their running mean."""

BLUE, ORANGE, GREEN, GREY = "#0072b2", "#d55e00", "#009e73", "#777777"
MORE = ("#009e73", "#d55e00", "#cc79a7", "#e69f00", "#56b4e9")
"""For curves whose number is not known beforehand."""

DPI = 110
WIDTH, HEIGHT = 8.2, 2.7
"""Of a figure with two or three panels, in inches: about the width of a README."""

MARGINS = (0.72, 0.48, 0.12, 0.3)
"""Inches around a panel's axes for its labels: left, bottom, right, top."""


@dataclass(frozen=True)
class Line:
    """One curve: a column of ``metrics.jsonl``, divided by ``unit``."""

    key: str
    colour: str = BLUE
    name: str = ""
    unit: float = 1.0


@dataclass(frozen=True)
class Mark:
    """A horizontal line that says where a value stands for something."""

    value: float
    name: str


@dataclass(frozen=True)
class Panel:
    """Curves over the optimizer steps of each training that logged them."""

    title: str
    ylabel: str
    lines: tuple[Line, ...]
    low: float | None = None
    """Where the axis starts; None fits it to the data."""

    high: float | None = None
    """Where it ends, if ``low`` is given."""

    marks: tuple[Mark, ...] = ()
    marks_if: str = ""
    """The marks mean something only where this column was logged too."""

    wide: bool = False
    """Use a logarithmic axis when the values span more than two powers of ten."""

    power: bool = False
    """Write the common power of ten into the label."""

    noisy: bool = True
    """Values jump from step to step, so that a running mean shows more than they do."""

    each: str = ""
    """Also a curve for every column that begins with this, named by the rest."""

    only_with: str = ""
    """Drawn for trainings that logged this column."""


@dataclass(frozen=True)
class Shown:
    """A figure for one report."""

    caption: str
    file: str
    material: Any
    """What is drawn, as a value whose ``repr`` tells it from any other."""

    draw: Callable[[], Any]
    """Gives a matplotlib figure, or ``None`` when there is nothing to show."""


@dataclass(frozen=True)
class Figure:
    """A file with a row of panels."""

    file: str
    caption: str
    panels: tuple[Panel, ...]


REWARDS = (
    Line("rewards/chosen", GREEN, "chosen"),
    Line("rewards/rejected", ORANGE, "rejected"),
    Line("rewards/margins", BLUE, "margin"),
)

FIGURES = (
    Figure(
        "loss.png",
        "Training loss",
        (
            Panel(
                "loss",
                "loss (nats)",
                (Line("loss"),),
                marks=(Mark(LN2, "ln 2: nothing learnt"),),
                marks_if="rewards/margins",
            ),
        ),
    ),
    Figure(
        "preferences.png",
        "Rewards and preference accuracy on the training batches; DPO's rewards are beta x nats",
        (
            Panel("rewards", "reward", REWARDS, marks=(Mark(0, ""),)),
            Panel(
                "preference accuracy",
                "pairs with margin > 0 (%)",
                (Line("rewards/accuracies", unit=0.01),),
                low=0,
                high=105,
                marks=(Mark(50, "chance"),),
            ),
        ),
    ),
    Figure(
        "reward.png",
        "Reward of the sampled answers, divergence from the reference, entropy",
        (
            Panel("reward", "reward", (Line("reward", BLUE, "total"),), each="reward/"),
            Panel("KL to the reference", "nats an answer", (Line("kl"),), marks=(Mark(0, ""),)),
            Panel("entropy", "nats a token", (Line("entropy"),), only_with="reward"),
        ),
    ),
    Figure(
        "learning.png",
        "What the updates of policy and critic did",
        (
            Panel("clipped", "tokens (%)", (Line("clip_fraction", unit=0.01),), low=0),
            Panel("value loss", "value loss", (Line("value_loss"),), low=0),
            Panel(
                "explained variance",
                "explained variance",
                (Line("explained_variance"),),
                marks=(Mark(0, "a constant"), Mark(1, "a perfect critic")),
            ),
        ),
    ),
    Figure(
        "answers.png",
        "Length of the sampled answers, how many end, and seconds of an update",
        (
            Panel("length", "tokens an answer", (Line("answer_tokens"),), low=0),
            Panel("ended", "answers (%)", (Line("eos_rate", unit=0.01),), low=0, high=105),
            Panel("time", "seconds an update", (), low=0, each="seconds/"),
        ),
    ),
    Figure(
        "learning_rate.png",
        "Learning rate",
        (
            Panel(
                "learning rate",
                "learning rate",
                (Line("learning_rate"),),
                low=0,
                power=True,
                noisy=False,
            ),
        ),
    ),
    Figure(
        "gradient_norm.png",
        "Gradient norm before clipping",
        (Panel("gradient norm", "gradient norm", (Line("grad_norm"),), low=0, wide=True),),
    ),
    Figure(
        "throughput.png",
        "Tokens a second, all ranks together",
        (Panel("throughput", "tokens / s", (Line("tokens_per_second"),), low=0),),
    ),
    Figure(
        "memory.png",
        "Peak memory of rank 0",
        (Panel("memory", "memory (GiB)", (Line("memory_bytes", unit=2**30),), low=0, noisy=False),),
    ),
)

SCORES = "scores.png"
STAMPED = 4096
"""A figure's first bytes, which hold its stamp."""

PERCENT = 0.01


def draw(
    folder: Path, trainings: Mapping[str, Rows], scores: Scores, *, more: Sequence[Shown] = ()
) -> list[tuple[str, str]]:
    """Write the figures into ``folder``; return (file, caption) of those with something to show.

    One that shows the same already is left as it is: to draw them all takes a second. Figures of
    an earlier run that this one has nothing for are removed.
    """
    folder.mkdir(parents=True, exist_ok=True)
    trainings = {label: _drawable(rows) for label, rows in trainings.items()}
    shown = [Shown("Scores with their intervals", SCORES, scores, partial(_draw_scores, scores))]
    shown += more
    shown += [
        Shown(each.caption, each.file, trainings, partial(_draw_curves, each, trainings))
        for each in FIGURES
    ]
    return [(each.file, each.caption) for each in shown if _is_drawn(folder / each.file, each)]


def _drawable(rows: Rows) -> Rows:
    """Without the values that no axis can hold: an infinite gradient norm is news, no reason to
    go without a report."""
    return [{key: value for key, value in row.items() if drawable(value)} for row in rows]


def _is_drawn(path: Path, shown: Shown) -> bool:
    """Draw the figure unless its file shows the very same; False when there is nothing to show."""
    stamp = _stamp(shown)
    if path.is_file() and stamp.encode() in path.read_bytes()[:STAMPED]:
        return True
    figure = shown.draw()
    if figure is None:
        path.unlink(missing_ok=True)
        return False
    partial_path = path.with_name(f"{path.name}.{os.getpid()}.partial")  # two runs may share it
    figure.savefig(
        partial_path,
        format="png",
        dpi=DPI,
        metadata={"Comment": stamp},
        pil_kwargs={"compress_level": 2},
    )
    partial_path.rename(path)
    return True


def _stamp(shown: Shown) -> str:
    """Tells what a figure shows and the code that drew it."""
    facts = hashlib.sha256(repr((shown.caption, shown.material)).encode())
    for code in sorted(Path(__file__).parent.glob("*plots.py")):
        facts.update(code.read_bytes())
    return facts.hexdigest()


def _draw_curves(figure: Figure, trainings: Mapping[str, Rows]) -> Any:
    """A matplotlib figure with a panel for each training that has the curves, or None."""
    jobs: list[tuple[str, Job]] = []
    for asked in figure.panels:
        for label, rows in trainings.items():
            panel = _with_every_line(asked, rows)
            if panel.only_with and not any(panel.only_with in row for row in rows):
                continue
            if any(line.key in row for line in panel.lines for row in rows):
                jobs.append((f"{label}: {panel.title}", _curves(panel, rows)))
    return canvas(jobs) if jobs else None


def _with_every_line(panel: Panel, rows: Rows) -> Panel:
    if not panel.each:
        return panel
    keys = dict.fromkeys(key for row in rows for key in row if key.startswith(panel.each))
    colours = itertools.cycle(MORE)
    found = [Line(key, next(colours), _words(key.removeprefix(panel.each))) for key in keys]
    if len(found) == 1 and panel.lines:  # it is the total
        return panel
    return replace(panel, lines=(*panel.lines, *found))


def _words(name: str) -> str:
    return name.replace("_", " ")


def canvas(jobs: Sequence[tuple[str, Job]]) -> Any:
    """A row of panels, each drawn by its job. No pyplot: it would keep every figure alive."""
    from matplotlib import rc_context
    from matplotlib.figure import Figure as Canvas

    style: dict[Any, Any] = {
        "font.size": 9,
        "axes.titlesize": 10,
        "axes.titlelocation": "left",
        "axes.spines.top": False,
        "axes.spines.right": False,
        "axes.grid": True,
        "grid.color": "#e6e6e6",
        "axes.axisbelow": True,
        "legend.frameon": False,
    }
    with rc_context(style):
        # Fixed margins: a layout engine draws everything twice, half of the report's time.
        left, bottom, right, top = MARGINS
        panel = WIDTH / min(max(len(jobs), 2), 3)
        width = panel * max(len(jobs), 2)
        canvas = Canvas(figsize=(width, HEIGHT))
        for place, (title, job) in enumerate(jobs):
            corner = (place * panel + left) / width, bottom / HEIGHT
            size = (panel - left - right) / width, (HEIGHT - bottom - top) / HEIGHT
            axis = canvas.add_axes((*corner, *size))
            axis.margins(y=0.12)
            axis.set_title(title, y=1.0)
            job(axis)
    return canvas


def _curves(panel: Panel, rows: Rows) -> Callable[[Any], None]:
    def job(axis: Any) -> None:
        from matplotlib.ticker import MaxNLocator

        power = _power(panel, rows)
        for line in panel.lines:
            points = [
                (r["step"], r[line.key] / line.unit / 10**power) for r in rows if line.key in r
            ]
            _plot(axis, points, line, noisy=panel.noisy)
        if not panel.marks_if or any(panel.marks_if in row for row in rows):
            for mark in panel.marks:
                _mark(axis, mark)
        axis.set_xlabel("optimizer step")
        axis.xaxis.set_major_locator(MaxNLocator(integer=True, nbins=6))
        axis.set_ylabel(panel.ylabel + (rf" ($\times 10^{{{power}}}$)" if power else ""))
        _limit(axis, panel, rows)
        if len(panel.lines) > 1:
            axis.legend(loc="best", fontsize=8)

    return job


def _plot(axis: Any, points: Sequence[tuple[float, float]], line: Line, *, noisy: bool) -> None:
    steps, values = [p[0] for p in points], [p[1] for p in points]
    if len(points) >= NOISY and noisy:
        axis.plot(steps, values, ".", color=line.colour, markersize=5, alpha=0.3, markeredgewidth=0)
        axis.plot(steps, running_mean(values), color=line.colour, linewidth=1.6, label=line.name)
    else:
        size = 3.5 if len(points) < NOISY else 0
        axis.plot(steps, values, "-o", color=line.colour, markersize=size, label=line.name)


def running_mean(values: Sequence[float]) -> list[float]:
    """The mean over a twentieth of the values around each one, over fewer at the two ends."""
    half = max(1, len(values) // 40)
    reach = [min(half, i, len(values) - 1 - i) for i in range(len(values))]
    windows = [values[i - r : i + r + 1] for i, r in enumerate(reach)]
    return [sum(window) / len(window) for window in windows]


def _mark(axis: Any, mark: Mark) -> None:
    axis.axhline(mark.value, color=GREY, linewidth=0.9, linestyle="--", zorder=1)
    if mark.name:
        axis.annotate(
            mark.name,
            (1, mark.value),
            xycoords=axis.get_yaxis_transform(),
            xytext=(0, 3),
            textcoords="offset points",
            ha="right",
            color=GREY,
            fontsize=8,
        )


def _power(panel: Panel, rows: Rows) -> int:
    """The power of ten of the largest value, where the panel wants it in its label."""
    if not panel.power:
        return 0
    largest = max(row.get(line.key, 0.0) for line in panel.lines for row in rows)
    return math.floor(math.log10(largest)) if largest > 0 else 0


def _limit(axis: Any, panel: Panel, rows: Rows) -> None:
    values = [row[line.key] for line in panel.lines for row in rows if row.get(line.key, 0) > 0]
    if panel.wide and values and max(values) > 100 * min(values):
        axis.set_yscale("log")
        return
    if panel.low is not None:
        # Margins are not added to an axis that ends are set for.
        axis.set_ylim(panel.low, panel.high or 1.12 * axis.dataLim.y1 or 1)


def _draw_scores(scores: Scores) -> Any:
    """Loss, exact match and preference accuracy of each model, with intervals, or None."""
    jobs: list[tuple[str, Job]] = []
    panels = (
        ("held-out loss", "nats a token", 1.0, {"": "conversations/loss"}),
        ("exact match", "%", PERCENT, {"": "conversations/exact_match"}),
        (
            "preference accuracy",
            "%",
            PERCENT,
            {"held out": "preferences/test/accuracy", "training": "preferences/train/accuracy"},
        ),
    )
    for title, ylabel, unit, keys in panels:
        present = {n: k for n, k in keys.items() if any(k in found for found in scores.values())}
        if present:
            jobs.append((title, _score_panel(scores, ylabel, unit, present)))
    return canvas(jobs) if jobs else None


def _score_panel(
    scores: Scores, ylabel: str, unit: float, keys: Mapping[str, str]
) -> Callable[[Any], None]:
    def job(axis: Any) -> None:
        for shift, (name, key) in enumerate(keys.items()):
            found = [(place, m[key]) for place, m in enumerate(scores.values()) if key in m]
            places = [place + 0.12 * (shift - (len(keys) - 1) / 2) for place, _ in found]
            values = [e["value"] / unit for _, e in found]
            # An end that rounding puts inside the value is no distance.
            errors = [
                [max(0.0, e["value"] - e["low"]) / unit for _, e in found],
                [max(0.0, e["high"] - e["value"]) / unit for _, e in found],
            ]
            colour = (BLUE, ORANGE)[shift]
            axis.errorbar(
                places, values, errors, fmt="o-", color=colour, markersize=5, capsize=3,
                linewidth=1.2, label=name,
            )  # fmt: skip
        axis.set_xticks(range(len(scores)), list(scores))
        axis.set_xlim(-0.4, len(scores) - 0.6)
        axis.grid(axis="x", visible=False)
        axis.set_ylabel(ylabel)
        if unit == PERCENT:
            axis.set_ylim(-3, 103)
        if len(keys) > 1:
            axis.legend(loc="lower right", fontsize=8)

    return job
