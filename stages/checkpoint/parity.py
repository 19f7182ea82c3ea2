"""Whether an export answers as the model did that was trained."""

import gc
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

from stages.checkpoint import trained
from stages.checkpoint.json_files import read_json
from stages.checkpoint.probes import (
    Probe,
    answers,
    compared,
    compared_pairs,
    compared_scores,
    fixed,
    pairs,
)
from stages.checkpoint.quantised import dequantised
from stages.checkpoint.readers import open_weights
from stages.checkpoint.trained import Training
from stages.checkpoint.weights import Weights

if TYPE_CHECKING:
    from torch import Tensor

Start = Literal["original", "dequantised"]
TOLERANCES: Mapping[str, float] = {"float32": 1e-3, "float16": 1e-2, "bfloat16": 5e-2}
"""Largest ``logit_error`` by the type of the export. Rounding the weights to bfloat16 gave 0.003
for two layers and 0.012 for SmolLM2's thirty; float32 gave 3.5e-6."""

KEPT = 0.8
"""Least share of what training changed that the export must show."""

NOTICEABLE = 1e-5
"""A change smaller than this is that of kernels, and no share of it can be told."""


@dataclass(frozen=True)
class Exam:
    """What is asked of both models."""

    fixed: tuple[Probe, ...]
    pairs: tuple[Probe, ...]
    out: Path
    """Where the fresh process leaves the export's answers."""

    @property
    def probes(self) -> tuple[Probe, ...]:
        return self.fixed + self.pairs


def prepare(model: Path, *, num: int, data: Path | None, folder: Path) -> Exam:
    """``num`` fixed probes and as many preference pairs for a model of the config in ``model``."""
    if not num:
        return Exam((), (), folder)
    rows = read_json(model / "config.json")["vocab_size"]
    return Exam(fixed(num, rows), pairs(data, num), folder / "answers.pt")


def measure(exam: Exam, training: Training) -> dict[str, Any]:
    """The export's answers, which lie in ``exam.out``, against the trained model's; see
    :func:`stages.checkpoint.probes.compared`."""
    import torch

    exported = torch.load(exam.out, weights_only=True)
    expected = _answers(trained.trained_model(training), exam.probes)
    num, rows = len(exam.fixed), exported[0].shape[1]
    if training.is_reward_model:  # what it started from had no score to compare with
        figures = dict(compared_scores(expected[:num], exported[:num]))
    else:
        base = [_cut(each, rows) for each in _answers(trained.base_model(training), exam.fixed)]
        figures = dict(compared(expected[:num], exported[:num], base))
    if exam.pairs:
        figures |= compared_pairs(expected[num:], exported[num:])
    return figures


def faults(figures: Mapping[str, float], *, tolerance: float, dtype: str) -> list[str]:
    """What the figures say is wrong, one line each."""
    lines = []
    if not figures["logit_error"] <= tolerance:
        lines.append(
            f"its log-probabilities on the fixed probes are {figures['logit_error']:.3g} standard "
            f"deviations from the trained model's, and parity_tolerance is {tolerance:g}"
        )
    if figures.get("change", 0) > NOTICEABLE and not figures["change_kept"] >= KEPT:
        lines.append(
            f"it shows {figures['change_kept']:.0%} of what training changed, at least {KEPT:.0%} "
            f"is asked; {dtype} may be too coarse for so small a change: export_dtype: float32"
        )
    return lines


def nearest(
    training: Training, candidates: Mapping[Start, Weights], *, dtype: str, num: int
) -> tuple[Start, Mapping[Start, float]]:
    """The candidate that answers most like the trained model, and every one's ``logit_error``."""
    exam = prepare(training.origin, num=num, data=None, folder=Path())
    expected = _answers(trained.trained_model(training), exam.fixed)
    errors: dict[Start, float] = {}
    for name, weights in candidates.items():
        cast = _cast(weights, dtype)
        untied = {"tie_word_embeddings": False} if "lm_head.weight" in weights.specs else {}
        model = trained.filled(training.origin, cast, reward=training.is_reward_model, **untied)
        found = _answers(model, exam.fixed)
        reward = training.is_reward_model
        figures = compared_scores(expected, found) if reward else compared(expected, found, found)
        errors[name] = figures["logit_error"]
    return min(errors, key=lambda name: errors[name]), errors


def dequantised_base(training: Training) -> Weights:
    """The base's weights as the 4 bits held them in training."""
    assert training.quantization
    base = open_weights(training.origin)
    return dequantised(base, training.origin, training.quantization, training.load_dtype)


def _answers(model: Any, probes: tuple[Probe, ...]) -> "list[Tensor]":
    found = answers(model, probes)
    del model
    gc.collect()
    return found


def _cut(logp: "Tensor", rows: int) -> "Tensor":
    """Log-probabilities over another vocabulary, brought to ``rows`` ids; a row that was added in
    training counts as unchanged at the least likely."""
    import torch

    if logp.shape[1] >= rows:
        return logp[:, :rows]
    least = logp.min(dim=1, keepdim=True).values
    return torch.cat([logp, least.expand(-1, rows - logp.shape[1])], dim=1)


def _cast(weights: Weights, dtype: str) -> Weights:
    import torch

    kind = getattr(torch, dtype)
    return Weights(weights.specs, lambda *place: weights.rows(*place).to(kind))
