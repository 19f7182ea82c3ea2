"""Reinforcement learning without a critic: TRL's GRPO and RLOO trainers on named rewards."""

import os
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Annotated, Any, ClassVar, Literal, Self

from pydantic import Field, NonNegativeFloat, PositiveFloat, PositiveInt, model_validator

from configs import Config
from stages import cpu_ranks, training
from stages.base import Context, Metrics, StageError
from stages.data import lines
from stages.rewards.config import Rewards
from stages.training import Training

SAMPLES = "samples.jsonl"
NUM_SAMPLES = 2
"""Completions written down at each step."""


class GroupRelative(Config):
    """GRPO (arXiv:2402.03300): an answer's advantage is its reward among those to its prompt."""

    kind: Literal["grpo"] = "grpo"

    loss: Literal["grpo", "bnpo", "dr_grpo", "dapo"] = "dapo"
    """How the loss is averaged: over each answer first (``grpo``), over the tokens of the
    micro-batch (``bnpo``), over a constant (``dr_grpo``, arXiv:2503.20783), or over all tokens of
    the optimizer step (``dapo``, arXiv:2503.14476), which alone does not depend on how it is
    split."""

    scale_rewards: Literal["group", "batch", "none"] = "group"
    """Divide by the standard deviation of the rewards to a prompt, of the whole batch, or not."""


class LeaveOneOut(Config):
    """RLOO (arXiv:2402.14740): the baseline is the mean reward of the other answers."""

    kind: Literal["rloo"] = "rloo"

    normalise_advantages: bool = False
    """Bring the advantages of a step to mean 0 and standard deviation 1."""


Estimator = Annotated[GroupRelative | LeaveOneOut, Field(discriminator="kind")]


class GRPO(Training):
    """What decides the result of RL without a critic."""

    uses_dropout: ClassVar[bool] = False

    learning_rate: PositiveFloat = 1e-6
    """Peak learning rate."""

    rewards: Rewards
    """What is rewarded: functions and the reward model, each with its weight."""

    estimator: Estimator = GroupRelative()
    """How rewards become advantages."""

    beta: NonNegativeFloat = 0.04
    """Price of a nat of divergence from the reference: in the loss by k3 for GRPO, in the reward
    by k1 for RLOO. 0 loads no reference."""

    num_generations: Annotated[int, Field(ge=2)] = 8
    """Answers to each prompt; must divide ``global_batch_size``, which counts answers."""

    updates_per_rollout: PositiveInt = 1
    """Optimizer steps on each batch of answers."""

    clip: PositiveFloat = 0.2
    """How far from 1 the ratio of a token's probabilities still teaches; a first step has ratio
    1."""

    max_new_tokens: PositiveInt = 256
    """Longest answer."""

    temperature: PositiveFloat = 1.0
    """Of sampling, and of the log-probabilities of policy and reference."""

    top_p: Annotated[float, Field(gt=0, le=1)] = 1.0
    """Sample among the likeliest tokens that make up this probability."""

    @model_validator(mode="after")
    def _whole_groups(self) -> Self:
        if self.global_batch_size % self.num_generations:
            raise ValueError(
                f"num_generations {self.num_generations} does not divide global_batch_size "
                f"{self.global_batch_size}, which counts answers"
            )
        return self

    @property
    def prompts_per_step(self) -> int:
        return self.global_batch_size // self.num_generations

    @property
    def rows_per_step(self) -> float:
        return self.prompts_per_step / self.updates_per_rollout

    @property
    def learned_from(self) -> int:
        return self.updates_per_rollout


def grpo(
    config: GRPO, ctx: Context, *, policy: Path, data: Path, reward: Path | None = None
) -> Metrics:
    """Train ``POLICY/model`` on the prompts of ``DATA`` (an output of tokenize_data).

    ``reward`` holds the reward model where ``rewards`` names it. The reference is ``POLICY/model``
    byte for byte; with adapters it is the frozen base. Before the first update the divergence is
    0; anything else raises ``StageError``. Every rank samples from a stream of its own, so another
    number of ranks means other answers. Leaves what every training stage does, and
    ``OUT/samples.jsonl``.
    """
    cpu_ranks.prepare(ctx.trainer_args)
    from transformers import AutoConfig, AutoTokenizer

    from stages import rewards
    from stages.rewards import prompts
    from stages.rl import start
    from stages.watch import Watch

    base = policy / "model"
    start.refuse_adapter(base)
    tokenizer = AutoTokenizer.from_pretrained(base, padding_side="left")
    rows = prompts.read(data)
    reads = {"policy": AutoConfig.from_pretrained(base)}
    start.check_prompts(list(rows["prompt_ids"]), reads, max_new_tokens=config.max_new_tokens)
    device = ctx.device if ctx.device == "cpu" else f"cuda:{os.environ.get('LOCAL_RANK', '0')}"
    scorer = rewards.load(config.rewards, {"reward": reward} if reward else {}, device)
    rewards.check_rows(scorer, rows, tokenizer, max_new_tokens=config.max_new_tokens)
    asked = Prompts(rows, tokenizer)
    trainer = _trainer(config, ctx, base, tokenizer, asked, _functions(ctx, scorer, asked))
    watch = Watch(
        trainer,
        ctx,
        step_zero=lambda logs: check_step_zero(logs, config),
        in_our_words=in_our_words,
    )
    for judge in scorer.judges:
        watch.follow(judge.model)
    trainer.add_callback(watch)
    training.refuse_unknown_tokens(trainer)
    return training.train(trainer, ctx)


class Prompts:
    """The rows that are answered, by their place."""

    def __init__(self, rows: Any, tokenizer: Any) -> None:
        from stages.rewards import prompts

        self.rows, self.tokenizer = rows, tokenizer
        self._messages, self._facts = prompts.messages, prompts.facts

    def ids(self, place: str) -> list[int]:
        return list(self.rows[int(place)]["prompt_ids"])

    def messages(self, place: str) -> list[dict[str, Any]]:
        return self._messages(self.rows[int(place)], self.tokenizer)

    def text(self, place: str) -> str:
        return self.tokenizer.decode(self.ids(place), skip_special_tokens=True)

    def facts(self, place: str) -> dict[str, Any]:
        return self._facts([self.rows[int(place)]])[0]


def _trainer(
    config: GRPO, ctx: Context, base: Path, tokenizer: Any, asked: Prompts, functions: list[Any]
) -> training.Trainer:
    from stages.tokenised_grpo import TRAINERS

    trainer_type, arguments_type = TRAINERS[config.estimator.kind]
    arguments = training.trainer_arguments(config, ctx)
    if arguments.pop("activation_offloading", False):
        raise StageError("TRL's RL trainers cannot offload activations; switch it off")
    del arguments["max_length"]
    args = arguments_type(
        **arguments,
        **_estimator_arguments(config.estimator),
        beta=config.beta,
        num_generations=config.num_generations,
        num_iterations=config.updates_per_rollout,
        epsilon=config.clip,
        max_completion_length=config.max_new_tokens,
        temperature=config.temperature,
        top_p=config.top_p,
        top_k=0,
        reward_weights=[each.weight for each in config.rewards],
        shuffle_dataset=False,  # `in_order` has already shuffled
        disable_dropout=True,
    )
    if config.max_steps is not None:
        args.max_steps = config.max_steps
    training.adjust_arguments(args, ctx)
    return trainer_type(
        asked,
        str(base),
        reward_funcs=functions,
        args=args,
        train_dataset=_places(config, len(asked.rows)),
        processing_class=tokenizer,
        quantization_config=training.quantization_config(config),
        peft_config=training.peft_config(config.method, base),
    )


def _estimator_arguments(estimator: GroupRelative | LeaveOneOut) -> dict[str, Any]:
    if isinstance(estimator, LeaveOneOut):
        return {"normalize_advantages": estimator.normalise_advantages}
    return {"loss_type": estimator.loss, "scale_rewards": estimator.scale_rewards}


def _places(config: GRPO, num: int) -> Any:
    """The prompts in the order in which they are answered, each by its place in the data."""
    from datasets import Dataset

    steps = config.max_steps and -(-config.max_steps // config.updates_per_rollout)
    counted = {"global_batch_size": config.prompts_per_step, "max_steps": steps}
    places = Dataset.from_dict({"prompt": [str(place) for place in range(num)]})
    return training.in_order(places, config=config.model_copy(update=counted))


def _functions(ctx: Context, scorer: Any, asked: Prompts) -> list[Callable[..., list[float]]]:
    """One function for TRL's trainer for each reward, so that each is logged by its name."""
    from stages.rewards import Scorer

    notes = Notes(ctx.out, {term.name: term.weight for term in scorer.terms})

    def function(term: Any) -> Callable[..., list[float]]:
        alone = Scorer((term,))

        def scores(prompts: Sequence[str], completions: Sequence[str], **given: Any) -> list[float]:
            messages = [asked.messages(place) for place in prompts]
            rows = [asked.facts(place) for place in prompts]
            found = alone(messages, completions, rows)[term.name]
            answers = [row.get("answer") for row in rows]
            texts = list(zip(map(asked.text, prompts), completions, answers, strict=True))
            notes.add(given["trainer_state"].global_step + 1, term.name, found, texts)
            return found

        scores.__name__ = term.name
        return scores

    return [function(term) for term in scorer.terms]


class Notes:
    """Some completions of each rollout with their scores, in ``OUT/samples.jsonl``; rank 0's."""

    def __init__(self, out: Path, weights: Mapping[str, float]) -> None:
        self.path, self.weights = out / SAMPLES, weights
        self.silent = os.environ.get("RANK", "0") != "0"
        self.begun = False
        self.found: dict[str, Sequence[float]] = {}

    def add(self, step: int, name: str, scores: Sequence[float], texts: Sequence[Any]) -> None:
        """One reward's scores of a batch of ``texts`` (prompt, completion, right answer); the
        other rewards' follow before the next batch."""
        self.found[name] = scores
        if self.silent or len(self.found) < len(self.weights):
            return
        if not self.begun:
            self._drop_rows_from(step)
        rows = [
            {
                "step": step,
                "prompt": prompt,
                "completion": completion,
                "answer": answer,
                "scores": self._scores(place),
            }
            for place, (prompt, completion, answer) in enumerate(texts[:NUM_SAMPLES])
        ]
        self.found = {}
        with self.path.open("a", encoding="utf-8") as file:
            file.write(lines.join(map(lines.dump, rows)))

    def _scores(self, place: int) -> dict[str, float]:
        named = {name: self.found[name][place] for name in self.weights}
        return {**named, "total": sum(self.weights[name] * named[name] for name in named)}

    def _drop_rows_from(self, step: int) -> None:
        """A resumed run does these steps again."""
        from stages.manifest import write_atomically

        self.begun = True
        rows = lines.rows(self.path) if self.path.exists() else []
        kept = [row for row in rows if row["step"] < step]
        write_atomically(self.path, lines.join(map(lines.dump, kept)))


NAMES = {
    "completions/mean_length": "answer_tokens",
    "clip_ratio/region_mean": "clip_fraction",
    "kl": "kl_per_token",
}
UNTOLD = ("completions/", "clip_ratio/", "rewards/")


def in_our_words(logs: Mapping[str, float]) -> dict[str, float]:
    """What TRL logs of a step, under the names of the stage ppo; ``kl`` is in nats an answer."""
    told = {NAMES.get(k, k): v for k, v in logs.items() if k in NAMES or not k.startswith(UNTOLD)}
    for name, value in logs.items():
        if name.startswith("rewards/") and name.endswith("/mean"):
            told[f"reward/{name.split('/')[1]}"] = value
    if "completions/clipped_ratio" in logs:
        told["eos_rate"] = 1 - logs["completions/clipped_ratio"]
    if "kl" in logs and "answer_tokens" in told:
        told["kl"] = logs["kl"] * told["answer_tokens"]
    return told


def check_step_zero(logs: Mapping[str, float], config: GRPO) -> None:
    """Before any update the policy is the reference. Raises ``StageError`` if it is not."""
    tolerance = 1e-5 if config.compute_dtype == config.load_dtype == "float32" else 5e-2
    if abs(logs.get("kl", 0.0)) > tolerance:
        raise StageError(
            f"before the first update the divergence is {logs['kl']:.6f} and must be 0: the "
            "reference is not the model that training starts from"
        )
