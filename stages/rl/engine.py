"""The trainer's machinery without its loop: wrapping, optimizer steps, saving and loading.

Imported only inside a rank: it loads torch and transformers. A transformers ``Trainer`` turns the
backend's arguments into an accelerator, as in every training stage; here it also carries the
callbacks that write beats and metrics. Its own loop never runs.
"""

import math
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass
from pathlib import Path
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor
from transformers import Trainer, TrainingArguments
from transformers.integrations.deepspeed import deepspeed_load_checkpoint

from stages import recut, training
from stages.base import Context, StageError
from stages.rl.actor_critic import ActorCritic, bare, trainable
from stages.rl.whole import filled, skeleton

if TYPE_CHECKING:
    from stages.ppo import PPO

TRL_ONLY = ("model_init_kwargs", "max_length", "activation_offloading")
"""Arguments of TRL's trainers that a plain one does not have."""

Loss = Callable[[], Tensor]
"""Runs one micro-batch forward; its share of the loss of the whole optimizer step."""


def arguments(config: "PPO", ctx: Context) -> TrainingArguments:
    """Make them before any model is loaded: ZeRO-3 cuts weights as they come."""
    given = training.trainer_arguments(config, ctx)
    if given.get("activation_offloading"):
        raise StageError("ppo has no activation_offloading; use gradient_checkpointing")
    args = TrainingArguments(**{k: v for k, v in given.items() if k not in TRL_ONLY})
    training.adjust_arguments(args, ctx)
    if "optimizer" in _deepspeed_settings(args):
        raise StageError("ppo has no communication: one_bit_adam; use plain, or zero++")
    return args


@dataclass(frozen=True)
class Engine:
    """Policy, critic and reference under a backend. Made by :func:`wrap`."""

    module: ActorCritic
    ctx: Context

    trainer: Any
    """What the other training stages' functions take."""

    bones: nn.Module | None
    """The policy without weights, where the backend cuts them."""

    groups: tuple[tuple[str, float], ...]
    """(part, peak learning rate) of each of the optimizer's groups."""

    @property
    def accelerator(self) -> Any:
        return self.trainer.accelerator

    @property
    def device(self) -> torch.device:
        return self.accelerator.device

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """A pass through the wrapped module; see :class:`ActorCritic`."""
        return self.trainer.model_wrapped(*args, **kwargs)

    @contextmanager
    def whole_policy(self) -> Iterator[nn.Module]:
        """The policy in every rank, ready to generate: itself where it is whole, else a copy."""
        if self.bones is None:
            context: Any = nullcontext(self.module.policy)
        else:
            context = filled(self.bones, self.module.policy, self.device)
        with context as policy, self.accelerator.autocast():
            yield policy

    def step(self, losses: Sequence[Loss], *, rate: float, policy_rate: float = 1.0) -> float:
        """One optimizer step on the sum of ``losses`` over all ranks; the gradient's norm.

        Learning rates are their peaks times ``rate``, the policy's times ``policy_rate`` too.
        Ranks give equally many losses. The norm is that of policy and critic together, and so is
        its limit ``max_grad_norm``.
        """
        accelerator, wrapped = self.accelerator, self.trainer.model_wrapped
        optimizer: Any = self.trainer.optimizer
        for group, (part, peak) in zip(optimizer.param_groups, self.groups, strict=True):
            group["lr"] = peak * rate * (policy_rate if part == "policy" else 1.0)
        state = accelerator.gradient_state
        for number, loss in enumerate(losses, 1):
            last = number == len(losses)
            state._set_sync_gradients(last)
            waits = (
                last
                or state.plugin_kwargs.get("sync_each_batch")
                or self.trainer.is_deepspeed_enabled
            )
            with nullcontext() if waits else accelerator.no_sync(wrapped):
                # Backends average over the ranks what is to be added up.
                accelerator.backward(loss() * self.trainer.args.world_size, **self._unscaled)
        norm = self._clip()
        optimizer.step()
        optimizer.zero_grad()
        return norm

    @property
    def _unscaled(self) -> dict[str, bool]:
        return {"scale_wrt_gas": False} if self.trainer.is_deepspeed_enabled else {}

    def _clip(self) -> float:
        limit = self.trainer.args.max_grad_norm or math.inf
        norm = self.accelerator.clip_grad_norm_(list(self.module.parameters()), limit)
        if isinstance(norm, DTensor):
            norm = norm.full_tensor()
        return float(norm)

    def total(self, values: Tensor) -> Tensor:
        """``values`` added up over all ranks."""
        return self.accelerator.reduce(values, "sum")

    def save(self, folder: Path) -> None:
        """Trained weights and optimizer state, as the backend keeps them for any stage."""
        if self.trainer.is_deepspeed_enabled:
            engine = self.trainer.model_wrapped
            engine.save_checkpoint(str(folder), exclude_frozen_parameters=True)
        else:
            self.accelerator.save_state(str(folder), safe_serialization=False)

    def load(self, folder: Path) -> None:
        if self.trainer.is_deepspeed_enabled:
            recut.prepare(self.trainer, self.ctx)
            deepspeed_load_checkpoint(self.trainer.model_wrapped, str(folder))
        else:
            self.accelerator.load_state(str(folder))


def wrap(module: ActorCritic, config: "PPO", ctx: Context, args: TrainingArguments) -> Engine:
    """``module`` under the backend whose arguments are in ``args``."""
    zero_stage = _deepspeed_settings(args).get("zero_optimization", {}).get("stage")
    bones = skeleton(module.policy) if args.fsdp or zero_stage == 3 else None
    if args.gradient_checkpointing:
        for model in (module.policy, module.critic):
            model.gradient_checkpointing_enable({"use_reentrant": False})
    cached = module.config.use_cache
    trainer: Any = Trainer(model=module, args=args)
    module.config.use_cache = cached  # which the trainer has switched off
    if ctx.trainer_args.get("whole_embedding"):
        for model in filter(None, (module.policy, module.critic, module.reference)):
            training.keep_embedding_whole(SimpleNamespace(args=args, model=bare(model)))
    groups = _groups(config, module, set(trainer.get_decay_parameter_names(module)))
    any_model: Any = module
    kind, settings = Trainer.get_optimizer_cls_and_kwargs(args, any_model)
    optimizer = kind([group for _, group in groups], **settings)
    trainer.model_wrapped, trainer.optimizer = trainer.accelerator.prepare(module, optimizer)
    return Engine(module, ctx, trainer, bones, tuple((part, group["lr"]) for part, group in groups))


def _groups(
    config: "PPO", module: ActorCritic, decaying: set[str]
) -> list[tuple[str, dict[str, Any]]]:
    """(part, the optimizer's group): policy and critic each at its own rate, and of each part the
    weights apart from biases and norms, which do not decay."""
    rates = {"policy": config.learning_rate, "critic": config.critic_learning_rate}
    found = []
    for part, rate in rates.items():
        learned = {n: p for n, p in trainable(module).items() if n.startswith(f"{part}.")}
        for decays in (True, False):
            chosen = [p for name, p in learned.items() if (name in decaying) == decays]
            decay = config.weight_decay if decays else 0.0
            if chosen:
                found.append((part, {"params": chosen, "lr": rate, "weight_decay": decay}))
    return found


def _deepspeed_settings(args: TrainingArguments) -> dict[str, Any]:
    return args.deepspeed if isinstance(args.deepspeed, dict) else {}
