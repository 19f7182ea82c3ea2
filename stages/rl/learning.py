"""Learning from one rollout: passes, minibatches, and what must hold at the first of them.

Imported only inside a rank: it loads torch.
"""

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from stages.base import StageError
from stages.rl.advantages import explained_variance
from stages.rl.losses import policy_loss, value_loss
from stages.rl.rollout import Rollout, Rows, Targets, batch
from stages.rl.work import Work
from stages.training import NonFiniteError

if TYPE_CHECKING:
    from stages.ppo import PPO

TOLERANCE = {"cpu": 0.0, "cuda": 1e-2}
"""Largest difference of two log-probabilities of one token under the same weights. GPUs may choose
other kernels where a gradient is wanted."""

SUMS = (
    "tokens",
    "policy_loss",
    "value_loss",
    "entropy",
    "ratio",
    "policy_kl",
    "clip_fraction",
    "value_clip_fraction",
)
"""What is added up over tokens and divided by their number."""


@dataclass(frozen=True)
class Seen:
    """What one micro-batch showed."""

    sums: Tensor
    """By :data:`SUMS`."""

    furthest: Tensor
    """The largest |log ratio|."""


@dataclass(frozen=True)
class Lesson:
    """One minibatch as this rank sees it."""

    rolled: Rollout
    taught: Targets
    num_tokens: float
    """Of the whole minibatch, over all ranks: what every sum is divided by."""

    warming: bool
    """Only the critic learns."""


def learn(
    work: Work, update: int, rolled: Rollout, taught: Targets, *, taken: int
) -> dict[str, float]:
    """Passes over one rollout, a step for each minibatch; means over all tokens that were seen.

    ``taken`` steps were made before this rollout. Ends early once the policy is ``stop_at_kl`` from
    the one that sampled.
    """
    config, engine = work.config, work.engine
    warming = update < config.critic_warmup
    idle = config.critic_warmup * work.steps_an_update
    sums, norms, rate = torch.zeros(len(SUMS), dtype=torch.float64), [], 0.0
    for number, whole, mine in _minibatches(work, update):
        step = update * work.steps_an_update + number
        rate = learning_rate(config, step, work.num_updates * work.steps_an_update)
        lesson = Lesson(rolled, taught, float(rolled.mask[list(whole)].sum()), warming)
        seen: list[Seen] = []
        losses = [partial(_loss, work, lesson, rows, seen) for rows in mine]
        policy_rate = after_idling(config.adam_betas, taken + number + 1 - idle, idle=idle)
        norms.append(engine.step(losses, rate=rate, policy_rate=policy_rate))
        if number == 0:
            _check_ratio(work, seen)
        found = engine.total(torch.stack([each.sums for each in seen]).sum(0)).cpu()
        _check_finite(found, norms[-1], update + 1)
        sums += found
        apart = float(found[SUMS.index("policy_kl")]) / lesson.num_tokens
        if config.stop_at_kl is not None and apart > config.stop_at_kl:
            break
    return _figures(work, sums, norms) | {
        "learning_rate": 0.0 if warming else config.learning_rate * rate,
        "explained_variance": explained_variance(rolled.values, taught.returns, rolled.mask),
    }


def _minibatches(work: Work, update: int) -> Iterator[tuple[int, Rows, list[Rows]]]:
    """(number, whole minibatch, this rank's micro-batches) over all passes."""
    number = 0
    for each in range(work.config.passes):
        for whole, mine in work.split.minibatches(work.config.seed, update, each):
            yield number, whole, mine
            number += 1


def _loss(work: Work, lesson: Lesson, rows: Rows, seen: list[Seen]) -> Tensor:
    """The loss of one micro-batch, as its share of the minibatch."""
    config, engine, rolled, taught = work.config, work.engine, lesson.rolled, lesson.taught
    samples = [rolled.samples[row] for row in rows]
    cut = batch([(each.prompt, each.answer) for each in samples], engine.device)

    def part(table: Tensor) -> Tensor:
        return table[list(rows), : cut.mask.shape[1]].to(engine.device)

    log_probs, entropy, values = engine(
        "learners",
        cut,
        temperature=work.sampling.temperature,
        entropy="learned" if config.entropy_coefficient > 0 else "told",
    )
    actor = policy_loss(
        log_probs, part(rolled.log_probs), part(taught.advantages), cut.mask, clip=config.clip
    )
    critic, held = value_loss(
        values, part(rolled.values), part(taught.returns), cut.mask, clip=config.value_clip
    )
    sums = (cut.mask.sum(), actor.loss, critic, entropy.sum(), actor.ratio, actor.kl, actor.clipped)
    seen.append(Seen(torch.stack([s.detach().double() for s in (*sums, held)]), actor.furthest))
    loss = config.value_coefficient * critic
    # The policy takes part in a warm-up too, with nothing to learn: DDP waits for its gradients.
    loss = loss + (actor.loss - config.entropy_coefficient * entropy.sum()) * (not lesson.warming)
    return loss / lesson.num_tokens


def learning_rate(config: "PPO", step: int, num_steps: int) -> float:
    """The rate of ``step`` (from 0) of ``num_steps``, as a share of its peak: a linear rise over
    ``warmup_fraction`` of the steps, then ``schedule``. It depends on nothing that must be saved.
    """
    rising = math.ceil(config.warmup_fraction * num_steps)
    if step < rising:
        return (step + 1) / (rising + 1)
    done = (step - rising) / max(1, num_steps - rising)
    if config.schedule == "linear":
        return 1 - done
    return (1 + math.cos(math.pi * done)) / 2 if config.schedule == "cosine" else 1.0


def after_idling(betas: tuple[float, float], step: int, *, idle: int) -> float:
    """What makes Adam's ``step`` (from 1) after ``idle`` ones without a gradient as long as without
    them; 0 while it idles.

    Adam divides its means m and v by 1 - beta^t (arXiv:1412.6980, algorithm 1). Idle steps count in
    t and not in the means: m is trusted too much, and v too little by more.
    """
    if step < 1:
        return 0.0
    first, second = (_bias(beta, step) / _bias(beta, step + idle) for beta in betas)
    return math.sqrt(second) / first


def _bias(beta: float, step: int) -> float:
    return 1 - beta**step


def check_reference(work: Work, rolled: Rollout) -> None:
    """Before the first update the policy is the reference, and no token tells them apart."""
    apart = float(rolled.log_ratio.abs().max())
    if apart > TOLERANCE[work.ctx.device]:
        raise StageError(
            f"before the first update the policy and the reference differ by {apart:.3g} in a "
            "log-probability: the reference is not the model that training starts from"
        )


def _check_ratio(work: Work, seen: Sequence[Seen]) -> None:
    """At the first minibatch of an update the policy is the one that sampled: its ratio is 1."""
    apart = max(float(each.furthest) for each in seen)
    if apart > TOLERANCE[work.ctx.device]:
        raise StageError(
            f"at the first minibatch the log ratio of a token is {apart:.3g} and must be 0: "
            "answers were scored under another temperature, other weights or other positions"
        )


def _check_finite(sums: Tensor, norm: float, update: int) -> None:
    if not math.isfinite(norm):
        raise NonFiniteError(f"grad_norm is {norm} at update {update}")
    for name, value in zip(SUMS, sums.tolist(), strict=True):
        if not math.isfinite(value):
            raise NonFiniteError(f"{name} is {value} at update {update}")


def _figures(work: Work, sums: Tensor, norms: Sequence[float]) -> dict[str, float]:
    config = work.config
    means = dict(zip(SUMS, (sums / sums[0]).tolist(), strict=True))
    del means["tokens"]
    loss = means["policy_loss"] + config.value_coefficient * means["value_loss"]
    return means | {
        "loss": loss - config.entropy_coefficient * means["entropy"],
        "grad_norm": sum(norms) / len(norms),
        "optimizer_steps": len(norms),
    }
