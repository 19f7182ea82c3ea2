"""Sampling answers from a policy. Imported only inside a rank: it loads torch."""

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor
from transformers import (
    GenerationConfig,
    LogitsProcessor,
    LogitsProcessorList,
    TemperatureLogitsWarper,
    TopPLogitsWarper,
)

from stages.rl.actor_critic import bare

Ids = list[int]
ANSWERS = 0
"""Tells these random numbers from others that are drawn from the seed."""

Generator = Callable[[Sequence[Ids], np.ndarray], "list[Answer]"]
"""``(prompts, uniforms)`` -> an answer to each prompt. ``uniforms`` are (prompts, tokens) random
numbers in [0, 1), one for each token that may be drawn: the same numbers give the same answers,
whatever company a prompt keeps in a batch and on whichever rank. Another engine is another such
function."""

MakeGenerator = Callable[[Any], Generator]
"""A whole policy, with the weights of the moment -> what draws its answers."""


@dataclass(frozen=True)
class Answer:
    """What a policy said."""

    ids: Ids
    """Never empty; a stop token, if there is one, is the last."""

    ended: bool
    """Whether a stop token ended it, and not the limit."""


@dataclass(frozen=True)
class Sampling:
    """How answers are drawn."""

    temperature: float
    top_p: float
    max_new_tokens: int
    stops: tuple[int, ...]
    """Tokens of which each ends an answer."""

    pad: int


def transformers_generator(model: Any, sampling: Sampling, *, batch_size: int) -> Generator:
    """An engine that runs ``model.generate`` on ``batch_size`` prompts at a time, longest first.

    Ranks with equally many prompts make equally many calls.
    """
    # PEFT's shell has settings of its own and would leave them in the model, which is exported.
    model = bare(model)

    def generate(prompts: Sequence[Ids], uniforms: np.ndarray) -> list[Answer]:
        order = sorted(range(len(prompts)), key=lambda row: (-len(prompts[row]), row))
        found: dict[int, Answer] = {}
        with torch.no_grad(), _as_told(model, sampling):
            for start in range(0, len(order), batch_size):
                rows = order[start : start + batch_size]
                answers = _generate(model, [prompts[r] for r in rows], uniforms[rows], sampling)
                found.update(zip(rows, answers, strict=True))
        return [found[row] for row in range(len(prompts))]

    return generate


def uniforms(seed: int, update: int, rows: Sequence[int], num: int) -> np.ndarray:
    """(rows, num) random numbers that depend on the seed, the update and the row alone."""
    return np.stack(
        [np.random.default_rng([ANSWERS, seed, update, row]).random(num) for row in rows]
    )


@contextmanager
def _as_told(model: Any, sampling: Sampling) -> Iterator[None]:
    """generate() fills what it is not told from the model's own settings, which may penalise
    repetition: the answers would not come from the distribution that the losses assume."""
    own, cached, training = model.generation_config, model.config.use_cache, model.training
    model.generation_config = GenerationConfig(
        do_sample=False,  # `Draw` has drawn already when the largest is taken
        num_beams=1,
        max_new_tokens=sampling.max_new_tokens,
        eos_token_id=list(sampling.stops),
        pad_token_id=sampling.pad,
        use_cache=True,
    )
    model.config.use_cache = True
    model.eval()
    try:
        yield
    finally:
        model.generation_config, model.config.use_cache = own, cached
        model.train(training)


def _generate(
    model: Any, prompts: Sequence[Ids], drawn: np.ndarray, sampling: Sampling
) -> list[Answer]:
    width = max(map(len, prompts))
    ids = torch.full((len(prompts), width), sampling.pad)
    mask = torch.zeros_like(ids)
    for row, prompt in enumerate(prompts):
        ids[row, width - len(prompt) :] = torch.tensor(prompt)
        mask[row, width - len(prompt) :] = 1
    device = next(model.parameters()).device
    processors = LogitsProcessorList()
    if sampling.temperature != 1:
        processors.append(TemperatureLogitsWarper(sampling.temperature))
    if sampling.top_p < 1:
        processors.append(TopPLogitsWarper(sampling.top_p))
    processors.append(Draw(torch.from_numpy(drawn).to(device), start=width))
    output = model.generate(
        input_ids=ids.to(device),
        attention_mask=mask.to(device),
        logits_processor=processors,
        synced_gpus=False,  # the policy is whole: no rank waits for another
    )
    return [_to_stop(row, sampling) for row in output[:, width:].tolist()]


def _to_stop(ids: Ids, sampling: Sampling) -> Answer:
    end = next((place for place, token in enumerate(ids) if token in sampling.stops), None)
    if end is None:
        return Answer(ids, ended=False)
    return Answer(ids[: end + 1], ended=True)


class Draw(LogitsProcessor):
    """Leaves the one token that a random number picks: the inverse of the cumulated distribution.

    In float64, since the steps of a large vocabulary's cumulated probabilities are small.
    """

    def __init__(self, drawn: Tensor, *, start: int) -> None:
        """``drawn``: (rows, tokens) numbers in [0, 1); ``start``: the prompts' padded length."""
        self.drawn, self.start = drawn, start

    def __call__(self, input_ids: Tensor, scores: Tensor) -> Tensor:
        cumulated = scores.double().softmax(-1).cumsum(-1)
        at = self.drawn[:, input_ids.shape[1] - self.start, None] * cumulated[:, -1:]
        picked = torch.searchsorted(cumulated, at, right=True).clamp(max=scores.shape[1] - 1)
        return torch.full_like(scores, -torch.inf).scatter(1, picked, 0.0)
