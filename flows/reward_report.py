"""What a report says of reward models, and of answers while a policy learns from rewards."""

import json
import math
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from flows.markdown import cell, estimate, table
from stages.data import lines

NUM_STEPS = 5
"""Steps from which answers are shown, evenly spaced, the first and the last among them."""

NUM_ANSWERS = 2
"""Answers shown of each of them."""


def measures(output: Path) -> dict[str, Any]:
    """What a training stage measured; nothing where it is not done."""
    path = output / "metrics.json"
    return json.loads(path.read_text()) if path.is_file() else {}


def reward_models(outputs: Mapping[str, Path]) -> list[str]:
    """A section on each reward model that was measured on held-out pairs."""
    parts: list[str] = []
    for label, output in outputs.items():
        found = measures(output)
        if "reliability" in found:
            parts += [f"### {label}", *_of_model(found)]
    if not parts:
        return []
    about = (
        "On held-out pairs. A pair counts as right when the chosen answer scores higher. The "
        "margin is the difference of the raw scores; sigmoid(margin) is how probable the model "
        "holds it that the chosen answer is the better one, and the calibration error how far "
        "that is from how often it is right."
    )
    return ["## Reward model", about, *parts]


def _of_model(found: Mapping[str, Any]) -> list[str]:
    quantiles = found["margin_quantiles"]
    scale = found["scale"]
    rows = [
        ["accuracy, %", estimate(found["accuracy"], ".1f", 0.01)],
        ["expected calibration error, points", f"{100 * found['ece']:.1f}"],
        ["margin", estimate(found["margin"], ".3f")],
        *([f"margin, {q} % quantile", f"{value:.3f}"] for q, value in quantiles.items()),
        ["correlation of margin and length difference", f"{found['length_correlation']:.2f}"],
        ["scores of demonstrations", f"{scale['mean']:.3f} ± {scale['std']:.3f}"],
    ]
    lengths = [
        [_range(part), f"{part['accuracy']['n']}", estimate(part["accuracy"], ".1f", 0.01)]
        for part in found["accuracy_by_length"]
    ]
    head = ["chosen answer longer by, tokens", "pairs", "accuracy, %"]
    return [table(["", f"{found['held_out_pairs']} pairs"], rows), table(head, lengths)]


def _range(part: Mapping[str, float]) -> str:
    low, high = part["low"], part["high"]
    return f"{low:g}" if low == high else f"{low:g} to {high:g}"


def answers(outputs: Mapping[str, Path]) -> list[str]:
    """Answers of some steps of each training that learned from rewards, with their rewards."""
    parts: list[str] = []
    for label, output in outputs.items():
        path = output / "samples.jsonl"
        rows = lines.rows(path) if path.is_file() else []
        if rows:
            parts += [f"### {label}", _table_of_answers(rows)]
    if not parts:
        return []
    about = "The first answers of some steps, evenly spaced and not picked."
    return ["## Answers while training", about, *parts]


def _table_of_answers(rows: Sequence[Mapping[str, Any]]) -> str:
    steps = sorted({row["step"] for row in rows})
    every = max(1, (len(steps) - 1) / max(1, NUM_STEPS - 1))
    shown = {steps[math.floor(i * every)] for i in range(min(NUM_STEPS, len(steps)))}
    shown.add(steps[-1])
    names = list(rows[0]["scores"])
    body = []
    for step in sorted(shown):
        for row in [row for row in rows if row["step"] == step][:NUM_ANSWERS]:
            scores = [f"{row['scores'][name]:.2f}" for name in names]
            body.append([f"{step}", cell(row["prompt"]), cell(row["completion"]), *scores])
    heads = (cell(name.replace("_", " ")) for name in names)
    return table(["step", "prompt", "answer", *heads], body)
