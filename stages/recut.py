"""Resuming ZeRO under another number of ranks, or another stage: its state is cut anew first."""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from stages import resume
from stages.base import Context, StageError
from stages.checkpoint.universal import remove_universal, write_universal

Trainer = Any


def source(ctx: Context) -> Path | None:
    """The checkpoint that must be cut anew before it can be resumed here, or ``None``."""
    newest = resume.newest(ctx.out)
    if newest is None or ctx.promise.get("wrapper") != "deepspeed":
        return None
    return None if resume.facts(newest) == dict(ctx.promise) else newest


def settings(ctx: Context) -> dict[str, Any]:
    """``ctx.trainer_args`` with which DeepSpeed looks for a universal checkpoint, if it is to.

    Raises :class:`StageError` where DeepSpeed cannot load one.
    """
    given = dict(ctx.trainer_args)
    if (checkpoint := source(ctx)) is None:
        return given
    own: Mapping[str, Any] = given["deepspeed"]
    if offloads_to_nvme(own) or "optimizer" in own:
        what = "its optimizer on NVMe" if offloads_to_nvme(own) else own["optimizer"]["type"]
        raise StageError(
            f"{checkpoint} was written under another number of ranks or ZeRO stage, and DeepSpeed "
            f"cannot cut it anew for {what}; resume it as it was written, or without that setting"
        )
    return given | {"deepspeed": {**own, "checkpoint": {"load_universal": True}}}


def prepare(trainer: Trainer, ctx: Context) -> None:
    """Cut the state anew, if it has to be, before the trainer loads it. Every rank calls it."""
    checkpoint = source(ctx)
    if checkpoint is not None and trainer.args.process_index == 0:
        write_universal(checkpoint)
    trainer.accelerator.wait_for_everyone()


def settle(trainer: Trainer, ctx: Context) -> None:
    """After loading: remove the copy, and give each part of the optimizer a step of its own.

    Stage 3 gives all parts one tensor, which torch's AdamW would then count up once for each of
    them (deepspeed 0.19). Ends when ``load_hp_checkpoint_state_from_checkpoint_dir_stage3`` copies.
    """
    if (checkpoint := source(ctx)) is None:
        return
    for state in trainer.model_wrapped.basic_optimizer.state.values():
        if hasattr(state.get("step"), "clone"):
            state["step"] = state["step"].clone()
    trainer.accelerator.wait_for_everyone()
    if trainer.args.process_index == 0:
        remove_universal(checkpoint)


def movable(trainer: Trainer) -> bool:
    """Whether what is saved now can be cut anew: DeepSpeed's, with Adam's moments in memory."""
    engine = trainer.model_wrapped
    states = engine.basic_optimizer.state.values()
    adam = any(state for state in states) and all(
        state.keys() <= {"step", "exp_avg", "exp_avg_sq"} for state in states
    )
    return adam and not engine.zero_nvme_offload_optimizer()


def offloads_to_nvme(settings: Mapping[str, Any]) -> bool:
    """Whether DeepSpeed's ``settings`` put the optimizer on a disk."""
    offload = settings.get("zero_optimization", {}).get("offload_optimizer", {})
    return offload.get("device") == "nvme"
