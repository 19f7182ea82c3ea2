"""The models that PPO starts from, loaded and checked. Imported only inside a rank."""

from collections.abc import Sequence
from inspect import signature
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch import nn
from transformers import (
    AutoModelForCausalLM,
    AutoModelForSequenceClassification,
    AutoTokenizer,
)

from stages import training
from stages.base import StageError
from stages.rewards.model import check
from stages.rl.actor_critic import ActorCritic, bare, remove_dropout, trainable

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
    adapters = training.peft_config(config.method)
    critic_adapters = training.peft_config(config.method, task="SEQ_CLS")
    reference = None if adapters else _policy(config, policy)
    critic = _critic(config, policy, reward)
    if adapters and critic_adapters:
        from peft import get_peft_model

        actor = get_peft_model(actor, adapters)
        critic = get_peft_model(critic, critic_adapters)
        training.refuse_one_tied_end(actor)
        for head in trainable(critic).values():  # like its adapters; ZeRO-3 wants one type
            head.data = head.data.float()
    module = ActorCritic(actor, critic, reference)
    remove_dropout(module)
    return module


def _policy(config: "PPO", folder: Path) -> Any:
    if (folder / "adapter_config.json").exists():
        raise StageError(f"{folder}: an adapter without its base; give what convert makes of it")
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
    model.config.initializer_range = getattr(plain, "initializer_range", 0.02)
    return model


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


def check_prompts(
    prompts: Sequence[Sequence[int]], model: ActorCritic, *, max_new_tokens: int
) -> None:
    """Raise ``StageError`` for a prompt that leaves no room for its answer, or that holds a token
    that the policy does not know."""
    longest = max(range(len(prompts)), key=lambda row: len(prompts[row]))
    for name, each in (("policy", model.policy), ("critic", model.critic)):
        room = getattr(bare(each).config, "max_position_embeddings", None)
        if room is not None and len(prompts[longest]) + max_new_tokens > room:
            raise StageError(
                f"conversations/train, row {longest}: a prompt of {len(prompts[longest])} tokens "
                f"and max_new_tokens {max_new_tokens} exceed the context of {room} of the {name}; "
                "lower ppo.config.max_new_tokens, or tokenize_data.config.max_length"
            )
    empty = next((row for row, ids in enumerate(prompts) if not len(ids)), None)
    if empty is not None:
        raise StageError(f"conversations/train, row {empty}: its prompt is empty")
    largest = max(max(ids) for ids in prompts)
    if largest >= model.config.vocab_size:
        raise StageError(
            f"the prompts hold token {largest}, and the policy knows {model.config.vocab_size}; "
            "tokenise the data with this policy's tokenizer"
        )


def stop_ids(model: ActorCritic, tokenizer: Any, folder: Path) -> tuple[int, ...]:
    """The tokens that end an answer: those that generation_config.json names.

    Raises ``StageError`` when it names none and the tokenizer has no end-of-sequence token.
    """
    named = model.policy.generation_config.eos_token_id
    named = tokenizer.eos_token_id if named is None else named
    if named is None:
        raise StageError(
            f"{folder}: neither generation_config.json nor the tokenizer names an eos token, so "
            "no answer would end; add eos_token_id"
        )
    return tuple(named) if isinstance(named, (list, tuple)) else (named,)
