"""Policy, critic and reference as one module. Imported only inside a rank: it loads torch.

One module is one engine: whatever a backend does to a model it does to all three, with the options
that it has for any (docs/decisions/0012-ppo-is-one-module.md).
"""

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, Literal

import torch
from torch import Tensor, nn

from stages.rl.whole import named_parameters

Role = Literal["learners", "reference"]
Entropy = Literal["none", "told", "learned"]
"""Whether the entropy is computed, and with a gradient; it is as dear as the log-probabilities."""


@dataclass(frozen=True)
class Batch:
    """Some answers behind their prompts, padded on the right, where a causal model cannot look.

    So models are given no attention mask, which would keep them from their fastest kernels.
    """

    ids: Tensor
    """(answers, width) token ids."""

    before: Tensor
    """(answers, tokens): where the state stands from which each token of the answer was chosen."""

    mask: Tensor
    """(answers, tokens): 1 at tokens of the answer, its stop token included."""


class ActorCritic(nn.Module):
    """The policy, its critic and, where the policy is trained whole, the frozen reference.

    With adapters the reference is the policy without them, and costs no memory. Every pass goes
    through :meth:`forward`: sharding backends gather parameters there.
    """

    def __init__(self, policy: Any, critic: Any, reference: Any | None) -> None:
        super().__init__()
        self.policy, self.critic, self.reference = policy, critic, reference
        self.config = bare(policy).config  # DeepSpeed sizes its buckets by it
        self._no_split_modules = _layers(policy, critic)  # FSDP's units
        if reference is not None:
            reference.requires_grad_(False)
        self.register_state_dict_post_hook(_leave_out_frozen)
        self.register_load_state_dict_post_hook(_expect_no_frozen)

    def forward(
        self, role: Role, batch: Batch, *, temperature: float, entropy: Entropy = "none"
    ) -> Any:
        """``learners``: (log_probs, entropies, values), each (answers, tokens): of the token that
        stands there, of the distribution that it was drawn from, and of the state before it.
        ``reference``: its log_probs."""
        if role == "reference":
            with without_adapters(self.policy):
                model = self.policy if self.reference is None else self.reference
                return token_log_probs(model, batch, temperature=temperature)[0]
        log_probs, entropies = token_log_probs(
            self.policy, batch, temperature=temperature, entropy=entropy
        )
        return log_probs, entropies, token_values(self.critic, batch)


def bare(model: Any) -> Any:
    """The model without PEFT's shell."""
    return model.get_base_model() if hasattr(model, "peft_config") else model


def token_log_probs(
    model: Any, batch: Batch, *, temperature: float, entropy: Entropy = "none"
) -> tuple[Tensor, Tensor]:
    """(log-probabilities, entropies) of softmax(logits / temperature) at the answers' tokens.

    Both in float32, zero where ``batch.mask`` is. Logits are computed from the first answer on:
    those of prompts are read by nobody. Entropies that are not asked for are zero.
    """
    first = int(batch.before.min())
    keep = batch.ids.shape[1] - first
    logits = model(
        input_ids=batch.ids,
        use_cache=False,
        logits_to_keep=keep,
    ).logits[:, -keep:-1]
    scaled = logits.float() if temperature == 1 else logits.float() / temperature
    normaliser = scaled.logsumexp(-1)
    targets = batch.ids[:, first + 1 :, None]
    log_probs = scaled.gather(-1, targets).squeeze(-1) - normaliser
    places = batch.before - first
    found = log_probs.gather(1, places) * batch.mask
    if entropy == "none":
        return found, torch.zeros_like(found)
    with torch.set_grad_enabled(entropy == "learned" and torch.is_grad_enabled()):
        entropies = normaliser - (scaled.softmax(-1) * scaled).sum(-1)
    return found, entropies.gather(1, places) * batch.mask


def token_values(critic: Any, batch: Batch) -> Tensor:
    """The critic's value of the state before each token of the answers, in float32."""
    model = bare(critic)
    states = getattr(model, model.base_model_prefix)(
        input_ids=batch.ids, use_cache=False
    ).last_hidden_state
    *_, head = model.score.parameters()  # the last: PEFT keeps the untrained one before its own
    values = model.score(states.to(head.dtype)).squeeze(-1).float()
    return values.gather(1, batch.before) * batch.mask


@contextmanager
def without_adapters(policy: Any) -> Iterator[None]:
    """The policy as it was before adapters.

    PEFT's own ``disable_adapter`` also freezes the adapters meanwhile, and FSDP2 reads
    ``requires_grad`` only when it gathers a unit for the first time: they would stay frozen.
    """
    from peft.tuners.tuners_utils import BaseTunerLayer

    layers = [m for m in policy.modules() if isinstance(m, BaseTunerLayer)]
    for layer in layers:
        layer._disable_adapters = True
    try:
        yield
    finally:
        for layer in layers:
            layer._disable_adapters = False


def remove_dropout(model: nn.Module) -> None:
    """A policy that drops units is not the policy that sampled: its ratio would not be 1."""
    for module in model.modules():
        if isinstance(module, nn.Dropout):
            module.p = 0.0
        if isinstance(getattr(module, "attention_dropout", None), float):
            vars(module)["attention_dropout"] = 0.0


def trainable(model: nn.Module) -> dict[str, nn.Parameter]:
    return {name: p for name, p in model.named_parameters() if p.requires_grad}


def _layers(*models: Any) -> list[str]:
    """The names of the decoder layers' classes that the models really have."""
    found = {type(module).__name__ for model in models for module in model.modules()}
    named = {name for model in models for name in bare(model)._no_split_modules or ()}
    return sorted(named & found)


def _frozen(module: nn.Module) -> set[str]:
    return {name for name, p in named_parameters(module) if not p.requires_grad}


def _leave_out_frozen(
    module: nn.Module, state: dict[str, Any], prefix: str, _: Mapping[str, Any]
) -> None:
    """Checkpoints hold what is trained; the rest is in the stage's inputs, byte for byte."""
    for name in _frozen(module):
        state.pop(f"{prefix}{name}", None)


def _expect_no_frozen(module: nn.Module, keys: Any) -> None:
    frozen = _frozen(module)
    keys.missing_keys[:] = [
        key for key in keys.missing_keys if not any(key.endswith(name) for name in frozen)
    ]
