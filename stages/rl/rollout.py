"""One rollout: answers with their scores, log-probabilities and values, the same in every rank.

Imported only inside a rank: it loads torch.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import TYPE_CHECKING

import numpy as np
import torch
from torch import Tensor

from stages.rl.actor_critic import Batch
from stages.rl.advantages import advantages_and_returns, masked_mean, whiten
from stages.rl.generation import Ids
from stages.rl.kl import ESTIMATORS

if TYPE_CHECKING:
    from stages.ppo import PPO

PASSES = 1
"""Tells these random numbers from those of the answers, which are drawn from the seed too."""

Rows = Sequence[int]
"""Places in a rollout."""


@dataclass(frozen=True)
class Sample:
    """One answer and what the models said of it at the time. Ranks exchange these."""

    prompt: Ids
    answer: Ids
    ended: bool
    scores: dict[str, float]
    """By the reward's name, and ``total``."""

    log_probs: np.ndarray
    """(tokens of the answer,), as are the next two."""

    reference: np.ndarray
    values: np.ndarray


@dataclass(frozen=True)
class Rollout:
    """All answers of an update. Tensors are (answers, longest answer) in float32 on the CPU."""

    samples: tuple[Sample, ...]
    mask: Tensor
    log_probs: Tensor
    reference: Tensor
    values: Tensor

    @property
    def log_ratio(self) -> Tensor:
        """log pi - log pi_ref at every token."""
        return (self.log_probs - self.reference) * self.mask


@dataclass(frozen=True)
class Targets:
    """What the learners are taught, (answers, tokens)."""

    advantages: Tensor
    returns: Tensor
    scores: Tensor
    """(answers,): the score after clipping and the penalty, as it entered the reward."""


def rollout(samples: Sequence[Sample]) -> Rollout:
    longest = max(len(each.answer) for each in samples)

    def padded(rows: Sequence[np.ndarray]) -> Tensor:
        table = np.zeros((len(rows), longest), dtype=np.float32)
        for row, values in zip(table, rows, strict=True):
            row[: len(values)] = values
        return torch.from_numpy(table)

    return Rollout(
        samples=tuple(samples),
        mask=padded([np.ones(len(each.answer)) for each in samples]),
        log_probs=padded([each.log_probs for each in samples]),
        reference=padded([each.reference for each in samples]),
        values=padded([each.values for each in samples]),
    )


def targets(config: "PPO", rolled: Rollout, *, kl_coefficient: float) -> Targets:
    """Rewards, advantages and returns.

    The reward of a token is -kl_coefficient times its divergence from the reference, and at the
    last token of an answer the score is added (arXiv:2203.02155, equation 2).
    """
    mask = rolled.mask
    scores = torch.tensor([each.scores["total"] for each in rolled.samples])
    if config.reward_clip is not None:
        scores = scores.clamp(-config.reward_clip, config.reward_clip)
    ended = torch.tensor([each.ended for each in rolled.samples])
    scores = torch.where(ended, scores, scores - config.missing_eos_penalty)
    rewards = -kl_coefficient * ESTIMATORS[config.kl_estimator](rolled.log_ratio) * mask
    last = mask.sum(1).long() - 1
    rewards[torch.arange(len(scores)), last] += scores
    if config.whiten_rewards:
        rewards = whiten(rewards, mask, keep_mean=True)
    advantages, returns = advantages_and_returns(
        rewards, rolled.values, mask, gamma=config.gamma, lam=config.gae_lambda
    )
    if config.normalise_advantages:
        advantages = whiten(advantages, mask)
    return Targets(advantages, returns, scores)


def batch(samples: Sequence[tuple[Ids, Ids]], device: torch.device) -> Batch:
    """(prompt, answer) pairs as one batch, no wider than they need."""
    width = max(len(prompt) + len(answer) for prompt, answer in samples)
    longest = max(len(answer) for _, answer in samples)
    ids = torch.zeros(len(samples), width, dtype=torch.long)
    mask = torch.zeros(len(samples), longest)
    before = torch.zeros(len(samples), longest, dtype=torch.long)
    for row, (prompt, answer) in enumerate(samples):
        both, first = [*prompt, *answer], len(prompt) - 1
        ids[row, : len(both)] = torch.tensor(both)
        before[row] = first  # in the padding, any place that exists
        before[row, : len(answer)] = torch.arange(first, first + len(answer))
        mask[row, : len(answer)] = 1
    return Batch(*(each.to(device) for each in (ids, before, mask)))


@dataclass(frozen=True)
class Split:
    """How a rollout is cut: minibatches of ``minibatch`` answers, each cut over the ranks, each
    rank's share into micro-batches."""

    num: int
    minibatch: int
    micro: int
    rank: int
    world_size: int

    def minibatches(self, seed: int, update: int, number: int) -> Iterator[tuple[Rows, list[Rows]]]:
        """Pass ``number`` over the rollout of ``update``: every minibatch, and this rank's share
        of it in micro-batches. The order depends on nothing else, so any split trains the same."""
        order = np.random.default_rng([PASSES, seed, update, number]).permutation(self.num).tolist()
        share = self.minibatch // self.world_size
        for start in range(0, self.num, self.minibatch):
            whole = order[start : start + self.minibatch]
            mine = whole[self.rank * share : (self.rank + 1) * share]
            edges = [*range(0, share, self.micro), share]
            yield whole, [mine[a:b] for a, b in pairwise(edges)]


def describe(rolled: Rollout, taught: Targets) -> dict[str, float]:
    """What is logged of a rollout. Divergences are in nats an answer, lengths in tokens."""
    lengths = rolled.mask.sum(1)
    totals = torch.tensor([each.scores["total"] for each in rolled.samples])
    figures = {
        "reward": float(totals.mean()),
        "reward_std": float(totals.std(correction=0)),
        "score": float(taught.scores.mean()),
        "kl": float(rolled.log_ratio.sum(1).mean()),
        "kl_per_token": float(masked_mean(rolled.log_ratio, rolled.mask)),
        "answer_tokens": float(lengths.mean()),
        "eos_rate": sum(each.ended for each in rolled.samples) / len(rolled.samples),
        "length_reward_correlation": _correlation(lengths, totals),
    }
    named = (name for name in rolled.samples[0].scores if name != "total")
    for name in named:
        scores = [each.scores[name] for each in rolled.samples]
        figures[f"reward/{name}"] = sum(scores) / len(scores)
    return figures


def _correlation(a: Tensor, b: Tensor) -> float:
    """Pearson's, or 0 where one of them does not vary."""
    spread = a.std(correction=0) * b.std(correction=0)
    if spread < 1e-8:
        return 0.0
    return float(((a - a.mean()) * (b - b.mean())).mean() / spread)
