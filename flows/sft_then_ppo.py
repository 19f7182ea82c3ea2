"""Data, SFT, reward model, PPO, conversion and evaluation: ``python -m flows.sft_then_ppo``."""

from typing import Self

from pydantic import model_validator

from flows.given import Data, DataSource, ModelSource, bring_data
from flows.steps import Artifact, Runner, Step
from flows.tuned import FromSFT, export
from stages.evaluate import Evaluate
from stages.ppo import PPO
from stages.reward import RewardModelling
from stages.rewards.config import Reward


class SFTThenPPO(FromSFT):
    """Everything the flow needs, as it appears in YAML and in the Prefect UI."""

    preferences: DataSource | None = None
    """What the reward model learns from; without them none is trained, and functions alone
    reward."""

    reward_base: ModelSource | None = None
    """What the reward model starts from, if not from what SFT made."""

    reward: Step[RewardModelling] = Step[RewardModelling](config=RewardModelling())

    ppo: Step[PPO] = Step[PPO](config=PPO())
    """What is rewarded is ``config.rewards``."""

    @model_validator(mode="after")
    def _has_a_reward_model(self) -> Self:
        if self.preferences is None and _needs_reward_model(self):
            raise ValueError(
                "ppo.config or evaluate.config asks for a reward model (model: true, or critic: "
                "reward), which is trained on preferences; give preferences"
            )
        if self.preferences is None and self.reward_base is not None:
            raise ValueError("reward_base: nothing is trained from it without preferences")
        return self


def sft_then_ppo(config: SFTThenPPO, run: Runner) -> list[Artifact]:
    """Every stage in order. Each hand-off is a plain Hugging Face folder that was validated."""
    data = bring_data(config, run, preferences=config.preferences)
    trained = run("sft", config.sft, label="sft", model=data.model, data=data.tokenised)
    tuned = export(config, run, data, label="convert sft", trained=trained, base=data.model)
    judges = _reward_model(config, run, data, tuned)
    judge = {"reward": judges[-1]} if judges else {}

    asked = judge if _is_asked(config) else {}
    improved = run("ppo", config.ppo, label="ppo", policy=tuned, data=data.tokenised, **asked)
    aligned = export(config, run, data, label="convert ppo", trained=improved, base=tuned)

    evaluate = with_rewards(config.evaluate, config.ppo.config.rewards, judged=bool(judge))
    measured = {"data": data.tokenised, **judge}
    base = run("evaluate", evaluate, label="evaluate base", model=data.model, **measured)
    tuned_scores = run(
        "evaluate", evaluate, label="evaluate sft", model=tuned, baseline=base, **measured
    )
    aligned_scores = run(
        "evaluate",
        evaluate,
        label="evaluate ppo",
        model=aligned,
        baseline=tuned_scores,
        reference=tuned,
        **measured,
    )
    scores = [base, tuned_scores, aligned_scores]
    return [*data.artifacts, trained, tuned, *judges, improved, aligned, *scores]


def _reward_model(config: SFTThenPPO, run: Runner, data: Data, tuned: Artifact) -> list[Artifact]:
    """The reward model's artifacts, the model itself last; none without preferences."""
    if config.preferences is None:
        return []
    base, rows, before = tuned, data.tokenised, []
    if config.reward_base is not None:
        base = run("fetch", config.reward_base, label="fetch reward base")
        rows = run(
            "tokenize_data",
            config.tokenize_data,
            label="tokenize for reward",
            model=base,
            data=data.prepared,
        )
        before = [base, rows]
    trained = run("reward", config.reward, label="reward", model=base, data=rows)
    model = run(
        "convert", config.convert, label="convert reward", trained=trained, base=base, data=rows
    )
    return [*before, trained, model]


def _is_asked(config: SFTThenPPO) -> bool:
    """Whether PPO itself needs the reward model, and not only the evaluation."""
    ppo = config.ppo.config
    return any(each.model for each in ppo.rewards) or ppo.critic == "reward"


def _needs_reward_model(config: SFTThenPPO) -> bool:
    return _is_asked(config) or any(each.model for each in config.evaluate.config.rewards)


def with_rewards(
    step: Step[Evaluate], trained_on: tuple[Reward, ...], *, judged: bool
) -> Step[Evaluate]:
    """Answers are rated by what PPO was rewarded with, unless the recipe names other rewards.

    The reward model, if there is one, always rates them too; with weight 0 where it was no part
    of the reward, so that the sum stays what was trained on.
    """
    rewards = step.config.rewards or trained_on
    if judged and not any(each.model for each in rewards):
        rewards = (*rewards, Reward(model=True, weight=0))
    rated = step.config.model_copy(update={"rewards": rewards})
    return step.model_copy(update={"config": rated})


if __name__ == "__main__":
    from flows import command
    from flows.sft_then_ppo import SFTThenPPO, sft_then_ppo  # the importable twin of this module

    command.leave(
        command.main(
            "sft-then-ppo", SFTThenPPO, sft_then_ppo, description=__doc__, default="tiny_ppo"
        )
    )
