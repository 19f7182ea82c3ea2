"""Proximal policy optimisation of a language model against rewards."""

import os
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, ClassVar, Literal, Self

from pydantic import (
    Field,
    NonNegativeFloat,
    NonNegativeInt,
    PositiveFloat,
    PositiveInt,
    model_validator,
)

from stages import cpu_ranks
from stages.base import Context, Metrics, StageError
from stages.rewards.config import Reward, Rewards
from stages.rl import generators
from stages.rl.generators import Generation, WithTransformers, WithVLLM
from stages.rl.kl import KL, Estimator, FixedKL
from stages.training import Training

if TYPE_CHECKING:
    from stages.rl.generation import MakeGenerator, Sampling

Share = Annotated[float, Field(gt=0, le=1)]

GENERATED_TOGETHER = 4
"""Micro-batches that are generated at once: without a backward pass an answer takes less memory."""


class PPO(Training):
    """What decides the result of PPO (arXiv:1707.06347, for language models arXiv:2203.02155)."""

    uses_dropout: ClassVar[bool] = False

    learning_rate: PositiveFloat = 1e-6
    """Peak learning rate of the policy."""

    critic_learning_rate: PositiveFloat = 5e-6
    """Peak learning rate of the critic."""

    max_steps: PositiveInt | None = None
    """Stop after so many updates (a rollout with all that is learned from it), if that comes
    before the last epoch ends."""

    global_batch_size: PositiveInt = 32
    """Answers in one minibatch, which is one optimizer step, over all ranks."""

    minibatches: PositiveInt = 4
    """Minibatches in a rollout, which is ``global_batch_size`` times as many answers."""

    passes: PositiveInt = 4
    """Passes over each rollout."""

    rewards: Rewards = (Reward(model=True),)
    """What an answer is worth: the weighted sum. A weight of 0 only watches."""

    temperature: PositiveFloat = 1.0
    """Of sampling, and of every log-probability: policy and reference are both taken at it."""

    top_p: Share = 1.0
    """Sample from the likeliest tokens that have this probability together. Below 1 the losses
    take answers for less likely than they were drawn."""

    max_new_tokens: PositiveInt = 128
    """Longest answer, its stop token included."""

    generation: Generation = WithTransformers()
    """What samples the answers."""

    kl: KL = FixedKL()
    """What divergence from the reference costs."""

    kl_estimator: Estimator = "k1"
    """How the divergence at a token is estimated in the reward."""

    missing_eos_penalty: NonNegativeFloat = 0.0
    """Taken off the score of an answer that no stop token ended."""

    reward_clip: PositiveFloat | None = None
    """Scores are held between minus and plus this, before the penalty."""

    whiten_rewards: bool = False
    """Scale the rewards of a rollout, divergence included, to variance 1; their mean stays."""

    normalise_advantages: bool = True
    """Shift and scale advantages to mean 0 and variance 1 over the whole rollout."""

    gamma: Share = 1.0
    """Discount a token."""

    gae_lambda: Annotated[float, Field(ge=0, le=1)] = 0.95
    """From a critic that is trusted (0) to rewards that are waited for (1) (arXiv:1506.02438)."""

    clip: PositiveFloat = 0.2
    """How far the probability ratio may leave 1 before a token stops teaching."""

    value_clip: PositiveFloat | None = 0.2
    """How far a value may leave what it was at the rollout before it stops learning."""

    value_coefficient: PositiveFloat = 0.5
    """Weight of the value loss. The critic has its own weights and rate, so that this counts in
    the common ``max_grad_norm`` alone."""

    entropy_coefficient: NonNegativeFloat = 0.0
    """Weight of the policy's entropy, which is rewarded."""

    stop_at_kl: PositiveFloat | None = None
    """Leave a rollout once the policy is so many nats a token from the one that sampled it."""

    critic: Literal["policy", "reward"] = "policy"
    """What the critic starts from: the policy with a new head of zeros, or the reward model, whose
    tokens must then be the policy's."""

    critic_warmup: NonNegativeInt = 0
    """Updates at the start in which the critic alone learns."""

    @property
    def rollout_size(self) -> int:
        """Answers that are sampled before the policy learns again."""
        return self.global_batch_size * self.minibatches

    @property
    def rows_per_step(self) -> float:
        return self.rollout_size

    @property
    def optimizer_steps_per_step(self) -> int:
        return self.minibatches * self.passes

    @property
    def learned_from(self) -> int:
        return self.passes

    def obstacle(self, device: str) -> str | None:
        return super().obstacle(device) or generators.obstacle(self.generation, device)

    @model_validator(mode="after")
    def _is_read(self) -> Self:
        """What the common fields offer and this stage cannot do."""
        if self.method.kind not in ("full", "lora"):
            raise ValueError(f"ppo trains method.kind full or lora, not {self.method.kind}")
        if self.liger_kernel:
            raise ValueError("ppo has no liger_kernel: it computes no fused loss")
        if self.max_steps is not None and self.critic_warmup >= self.max_steps:
            raise ValueError(_never_learns(self.critic_warmup, self.max_steps))
        if self.kl.kind == "adaptive" and self.kl.horizon <= self.rollout_size / 5:
            raise ValueError(
                f"kl.horizon must be more than a fifth of the {self.rollout_size} answers of a "
                "rollout, or one update could make the price of divergence negative"
            )
        return self


def _never_learns(warmup: int, updates: int) -> str:
    return (
        f"critic_warmup {warmup}: the policy would learn in none of {updates} updates; lower it, "
        "or give more epochs or max_steps"
    )


def ppo(
    config: PPO, ctx: Context, *, policy: Path, data: Path, reward: Path | None = None
) -> Metrics:
    """Train ``POLICY/model`` on the prompts of ``DATA`` so that its answers earn more reward.

    The reference is ``POLICY/model`` itself, byte for byte; with adapters it is the frozen base.
    Leaves ``OUT/model``, ``OUT/critic``, ``OUT/metrics.jsonl`` (a row an update) and
    ``OUT/samples.jsonl``. Before the first update no token tells policy and reference apart, and
    at the first minibatch of every update each ratio is 1; anything else raises ``StageError``.
    """
    if reason := config.obstacle(ctx.device):
        raise StageError(reason)
    cpu_ranks.prepare(ctx.trainer_args)
    from transformers import AutoTokenizer

    from stages import rewards
    from stages.rl import engine, loop, models, start
    from stages.rl.actor_critic import bare
    from stages.rl.export import export
    from stages.rl.rollout import Split
    from stages.rl.work import Work, prompt_order

    folder = policy / "model"
    rows = rewards.prompts.read(data)
    tokenizer = AutoTokenizer.from_pretrained(str(folder))
    inputs = {"reward": reward} if reward else {}
    score = rewards.load(config.rewards, inputs, _device(ctx))  # whole: before ZeRO-3 is known of
    rewards.check_rows(score, rows, tokenizer, max_new_tokens=config.max_new_tokens)
    args = engine.arguments(config, ctx)
    module = models.load(config, folder, reward / "model" if reward else None)
    read = {name: bare(getattr(module, name)).config for name in ("policy", "critic")}
    start.check_prompts(list(rows["prompt_ids"]), read, max_new_tokens=config.max_new_tokens)
    sampling = _sampling(config, tokenizer, models.stop_ids(module, tokenizer, folder))
    wrapped = engine.wrap(module, config, ctx, args)
    work = Work(
        config=config,
        ctx=ctx,
        engine=wrapped,
        tokenizer=tokenizer,
        rows=rows,
        order=prompt_order(len(rows), config),
        score=score,
        sampling=sampling,
        generator=_generator(
            config,
            folder,
            sampling,
            longest=max(map(len, rows["prompt_ids"])) + config.max_new_tokens,
            together=GENERATED_TOGETHER * args.per_device_train_batch_size,
        ),
        split=Split(
            num=config.rollout_size,
            minibatch=config.global_batch_size,
            micro=args.per_device_train_batch_size,
            rank=args.process_index,
            world_size=args.world_size,
        ),
    )
    if config.critic_warmup >= work.num_updates:
        raise StageError(f"ppo.config: {_never_learns(config.critic_warmup, work.num_updates)}")
    metrics = loop.train(work)
    export(work.engine, tokenizer, ctx.out)
    return metrics


def _sampling(config: PPO, tokenizer: Any, stops: tuple[int, ...]) -> "Sampling":
    from stages.rl.generation import Sampling

    return Sampling(
        temperature=config.temperature,
        top_p=config.top_p,
        max_new_tokens=config.max_new_tokens,
        stops=stops,
        pad=stops[0] if tokenizer.pad_token_id is None else tokenizer.pad_token_id,
    )


def _generator(
    config: PPO, folder: Path, sampling: "Sampling", *, longest: int, together: int
) -> "MakeGenerator":
    from stages.rl.generation import transformers_generator

    if isinstance(config.generation, WithVLLM):
        from stages.rl.vllm_generator import vllm_generator

        return vllm_generator(
            folder, config.generation, sampling, longest=longest, dtype=config.compute_dtype
        )
    return lambda policy: transformers_generator(policy, sampling, batch_size=together)


def _device(ctx: Context) -> str:
    """This rank's own."""
    return f"cuda:{os.environ.get('LOCAL_RANK', '0')}" if ctx.device == "cuda" else ctx.device
