"""The models that PPO starts from, loaded and checked. Imported only inside a rank."""

from inspect import signature
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch import nn
from transformers import (
    MODEL_FOR_SEQUENCE_CLASSIFICATION_MAPPING,
    AutoConfig,
    AutoModelForCausalLM,
    AutoModelForSequenceClassification,
    AutoTokenizer,
)

from stages import training
from stages.base import StageError
from stages.rewards.model import check
from stages.rl import start
from stages.rl.actor_critic import ActorCritic, remove_dropout, trainable

if TYPE_CHECKING:
    from stages.ppo import PPO


def load(config: "PPO", policy: Path, reward: Path | None) -> ActorCritic:
    """Policy and reference from the folder ``policy``, the critic from it or from ``reward``.

    Raises ``StageError`` for a critic that cannot judge this policy's tokens.
    """
    torch.manual_seed(config.seed)  # the adapters' first values
    actor = _policy(config, policy)
    if "logits_to_keep" not in signature(actor.forward).parameters:
        raise StageError(f"{policy}: {type(actor).__name__} cannot leave out the prompt's logits")
    adapters = training.peft_config(config.method, policy)
    reference = None if adapters else _policy(config, policy)
    critic = _critic(config, policy, reward)
    source = reward if reward and config.critic == "reward" else policy
    critic_adapters = training.peft_config(config.method, source, task="SEQ_CLS")
    if adapters and critic_adapters:
        from peft import get_peft_model

        actor = get_peft_model(actor, adapters)
        critic = get_peft_model(critic, critic_adapters)
        training.refuse_lost_targets(actor)
        training.refuse_one_tied_end(actor)
        for head in trainable(critic).values():  # like its adapters; ZeRO-3 wants one type
            head.data = head.data.float()
    module = ActorCritic(actor, critic, reference)
    remove_dropout(module)
    return module


def _policy(config: "PPO", folder: Path) -> Any:
    start.refuse_adapter(folder)
    return AutoModelForCausalLM.from_pretrained(str(folder), **_how(config))


def _critic(config: "PPO", policy: Path, reward: Path | None) -> Any:
    """A value for every token: a reward model's body and head, or the policy's with a new head.

    A new head is zero, so that the first values are 0 whatever the seed and the backend.
    """
    source = policy
    if config.critic == "reward":
        if reward is None:
            raise StageError("ppo.config.critic: reward needs the input `reward`")
        source = reward
        check(reward)
        _same_tokens(policy, reward)
    _require_head(source)
    loaded: Any = AutoModelForSequenceClassification.from_pretrained(
        str(source), num_labels=1, initializer_range=0.0, output_loading_info=True, **_how(config)
    )
    model, report = loaded
    missing = [name for name in report["missing_keys"] if name != "score.weight"]
    if missing or (config.critic == "reward" and report["missing_keys"]):
        missing = sorted(report["missing_keys"])
        raise StageError(f"{source}: as a critic it lacks {len(missing)} weights ({missing[0]})")
    if not isinstance(getattr(model, "score", None), nn.Linear):
        raise StageError(
            f"{source}: a {type(model).__name__} has no linear head `score`, which a critic needs"
        )
    plain = type(model.config).from_pretrained(source)
    model.config.initializer_range = plain.initializer_range
    return model


def _require_head(folder: Path) -> None:
    """Raise ``StageError`` where transformers has no classifier of the model's kind, or none whose
    head begins as it is told."""
    config = AutoConfig.from_pretrained(folder)
    if type(config) not in MODEL_FOR_SEQUENCE_CLASSIFICATION_MAPPING or not hasattr(
        config, "initializer_range"
    ):
        raise StageError(
            f"{folder}: of a model of type {config.model_type} no critic can be made: transformers "
            "has no classifier of this type with a head that begins at zero; take a policy of "
            "another type, or grpo, which needs no critic"
        )


def _same_tokens(policy: Path, reward: Path) -> None:
    """A critic reads the policy's own token ids."""
    if (reward / "adapter_config.json").exists():
        raise StageError(f"{reward}: an adapter; a critic starts from a whole reward model")
    ours, theirs = (AutoTokenizer.from_pretrained(each).get_vocab() for each in (policy, reward))
    if ours != theirs:
        raise StageError(
            f"{reward}: its tokenizer has other tokens ({len(theirs)}) than {policy} "
            f"({len(ours)}), so it cannot be the critic; set ppo.config.critic: policy"
        )


def _how(config: "PPO") -> dict[str, Any]:
    return {"dtype": getattr(torch, config.load_dtype), "attn_implementation": config.attention}


def stop_ids(model: ActorCritic, tokenizer: Any, folder: Path) -> tuple[int, ...]:
    """The tokens that end an answer: those that generation_config.json names, or else the
    tokenizer's. Raises ``StageError`` where there is none."""
    named = model.policy.generation_config.eos_token_id
    named = tokenizer.eos_token_id if named is None else named
    return start.require_stops(named if isinstance(named, list | tuple) else [named], folder)
