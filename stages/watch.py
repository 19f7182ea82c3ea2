"""A trainer callback that verifies what a rank got and writes down what it does.

Imported only inside a rank: it loads torch and transformers.
"""

import json
import math
import resource
import time
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import psutil
import torch
from torch.distributed.tensor import DTensor
from torch.utils.hooks import RemovableHandle
from transformers import (
    PreTrainedModel,
    TrainerCallback,
    TrainerControl,
    TrainerState,
    TrainingArguments,
)

from stages import recut, resume
from stages.base import Context, Interrupted, StageError
from stages.beats import Beats, Phase
from stages.manifest import write_atomically
from stages.saves import Saves
from stages.stopping import StopRequest
from stages.trackers import NOT_DRAWN, Curves
from stages.training import NonFiniteError, Trainer, gathers, keep_generation_settings

Logs = Mapping[str, float]
RENAMED = {
    "num_tokens": "tokens",
    "num_input_tokens_seen": "tokens",
    "accuracy": "rewards/accuracies",  # the reward trainer's names for what the DPO trainer logs
    "margin": "rewards/margins",
}
LEFT_OUT = {"total_flos", "train_loss", "train_runtime", "epoch"}


class Watch(TrainerCallback):
    """Watches one rank; rank 0 also writes ``metrics.jsonl`` and marks checkpoints complete."""

    def __init__(
        self,
        trainer: Trainer,
        ctx: Context,
        step_zero: Callable[[Logs], None] | None = None,
        *,
        in_our_words: Callable[[Logs], Logs] = dict,
    ) -> None:
        """``step_zero`` is given the first step's values, taken before any update, and raises
        if they break an invariant of the method. ``in_our_words`` makes of a trainer's names those
        of ``metrics.jsonl``."""
        self.trainer, self.ctx, self.step_zero = trainer, ctx, step_zero
        self.in_our_words = in_our_words
        self.rank = trainer.args.process_index
        self.metrics = ctx.out / "metrics.jsonl"
        self.last = (0.0, 0.0)
        self.earlier_tokens = 0.0
        self.noted: dict[str, Any] = {}
        self.beats = Beats(ctx.out, heeds_stop=True)
        self.request = StopRequest(ctx.out)
        self.leaving = False
        self.saves = Saves(trainer, ctx)
        self.curves: Curves | None = None
        self.hooks: list[RemovableHandle] = []

    def on_train_begin(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **_: Any
    ) -> None:
        found = {"wrapper": wrapper(self.trainer), "world_size": args.world_size} | resident(
            self.trainer
        )
        verify(found, self.ctx.promise)
        self._note(found | {"process_bytes": process_bytes(self.ctx.device, found)})
        recut.settle(self.trainer, self.ctx)
        state.compute_steps(args, state.max_steps)  # a checkpoint brings those of its own start
        keep_generation_settings(self.trainer.model)
        self.last = (time.time(), float(state.num_input_tokens_seen or 0))
        if self.rank == 0:
            self._begin_records(state.global_step)
        self._beat("start", state)
        self.follow(self.trainer.model)
        self.request.listen()

    def _begin_records(self, step: int) -> None:
        """Put what rank 0 writes down where it was at ``step``."""
        resume.discard_saving(self.ctx.out)
        rows = self._drop_rows_after(step)
        if rows:  # most of TRL's trainers count their tokens from 0 again
            self.earlier_tokens = rows[-1].get("tokens", self.last[1]) - self.last[1]
        self._require_best_by(rows)
        self.curves = Curves(self.trainer, self.ctx, rows)
        if self.trainer.is_deepspeed_enabled:
            resolved = self.trainer.accelerator.state.deepspeed_plugin.deepspeed_config
            write_atomically(
                self.ctx.out / "deepspeed.json", json.dumps(resolved, indent=2, default=str)
            )

    def follow(self, model: torch.nn.Module) -> None:
        """Until training ends, beat whenever a model of transformers in ``model`` is run, be it for
        one token."""
        for module in model.modules():
            if isinstance(module, PreTrainedModel):
                hook = module.register_forward_pre_hook(lambda *_: self.beats.again())
                self.hooks.append(hook)

    def on_step_end(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **_: Any
    ) -> None:
        if "optimizer_bytes" not in self.noted:
            self._note({"optimizer_bytes": optimizer_bytes(self.trainer)})
        self._beat("step", state)
        if state.global_step < state.max_steps and self.request.agreed(self.ctx.device):
            self.leaving = control.should_save = control.should_training_stop = True
        if control.should_save:
            self._beat("save", state)
            self.saves.begin()

    def on_train_end(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **_: Any
    ) -> None:
        for hook in self.hooks:
            hook.remove()
        self._beat("save", state)
        self.saves.finish()
        if self.curves:
            self.curves.end()
            self._note({"dropped_trackers": self.curves.dropped})
        if self.rank == 0:
            resume.discard_saving(self.ctx.out)
        waited = {"saves": self.saves.count, "save_seconds": self.saves.seconds}
        self._note(waited | {"peak_bytes": memory_bytes(self.ctx.device)})

    def on_log(
        self,
        args: TrainingArguments,
        state: TrainerState,
        control: TrainerControl,
        logs: dict[str, float] | None = None,
        **_: Any,
    ) -> None:
        if not logs or "loss" not in logs:
            return
        for name in ("loss", "grad_norm"):
            value = logs.get(name)
            if value is not None and not math.isfinite(value):
                raise NonFiniteError(f"{name} is {value} at step {state.global_step}")
        if self.step_zero and state.global_step == 1:
            self.step_zero(logs)
        if self.rank == 0:
            self._append(logs, state)

    def on_save(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **_: Any
    ) -> None:
        self.saves.written(state.global_step)
        if self.leaving:
            self.saves.finish()
            if self.curves:
                self.curves.end()
            raise Interrupted(f"asked to stop; step {state.global_step} is saved")
        self._beat("step", state)

    def _beat(self, phase: Phase, state: TrainerState) -> None:
        self.beats.beat(phase, step=state.global_step, total_steps=state.max_steps)

    def _append(self, logs: Logs, state: TrainerState) -> None:
        now = time.time()
        row: dict[str, Any] = {
            "step": state.global_step,
            "total_steps": state.max_steps,
            "time": now,
        }
        told = self.in_our_words(logs)
        row |= {RENAMED.get(k, k): v for k, v in told.items() if k not in LEFT_OUT}
        tokens = float(row.get("tokens", 0))
        if tokens > self.last[1]:
            row["tokens_per_second"] = (tokens - self.last[1]) / max(now - self.last[0], 1e-9)
        self.last = (now, tokens)
        if "tokens" in row:
            row["tokens"] = tokens + self.earlier_tokens
        if stood := self.saves.told():
            row["save_seconds"] = stood
        row["memory_bytes"] = memory_bytes(self.ctx.device)
        if state.global_step == 1:
            self._require_best_by([row])
        with self.metrics.open("a") as file:
            file.write(json.dumps(row) + "\n")
        assert self.curves
        self.curves.add(row)

    def _require_best_by(self, rows: Sequence[Mapping[str, Any]]) -> None:
        """What a trainer logs is known once there are rows. Raises ``StageError``."""
        metric = self.ctx.trainer_args.get("keep", {}).get("metric")
        names = {name for row in rows for name in row}
        if metric is not None and names and metric not in names:
            raise StageError(
                f"best_by: {metric} is never logged here, so no checkpoint would be the best; "
                f"take one of {', '.join(sorted(names.difference(NOT_DRAWN)))}"
            )

    def _drop_rows_after(self, step: int) -> list[dict[str, Any]]:
        """A resumed run does these steps again; the rows that stay."""
        if not self.metrics.exists():
            return []
        lines = filter(_is_whole, self.metrics.read_text().splitlines())
        kept = [row for row in map(json.loads, lines) if row["step"] <= step]
        write_atomically(self.metrics, "".join(json.dumps(row) + "\n" for row in kept))
        return kept

    def _note(self, facts: Mapping[str, Any]) -> None:
        """Add to what ``ranks/rank-N.json`` says of this rank."""
        self.noted |= facts
        folder = self.ctx.out / "ranks"
        folder.mkdir(exist_ok=True)
        write_atomically(folder / f"rank-{self.rank}.json", json.dumps(self.noted, indent=2))


def _is_whole(row: str) -> bool:
    return row.startswith("{") and row.endswith("}")


def wrapper(trainer: Trainer) -> str:
    """What the model really is wrapped in: ``fsdp``, ``deepspeed``, ``ddp`` or ``none``."""
    from torch.distributed.fsdp import FSDPModule
    from torch.nn.parallel import DistributedDataParallel

    model = trainer.model_wrapped
    if type(model).__name__ == "DeepSpeedEngine":
        return "deepspeed"
    if isinstance(model, DistributedDataParallel):
        return "ddp"
    return "fsdp" if isinstance(model, FSDPModule) else "none"


def verify(found: Mapping[str, Any], promise: Mapping[str, Any]) -> None:
    """Raise ``StageError`` unless every promised fact was found."""
    for name, promised in promise.items():
        if found.get(name) != promised:
            raise StageError(
                f"the backend promised {name} {promised!r}, and this rank found "
                f"{found.get(name)!r}; training would not be what the recipe says"
            )


def resident(trainer: Trainer) -> dict[str, Any]:
    """What of the model this rank holds: bytes of all and of its own parameters, ZeRO stage."""
    whole = own = 0
    shard_ranks = None
    for parameter in trainer.model.parameters():
        if isinstance(parameter, DTensor):
            local, full = parameter.to_local(), parameter.numel()
            mesh = parameter.device_mesh
            shard_ranks = max(shard_ranks or 1, mesh.size(mesh.ndim - 1))
        elif hasattr(parameter, "ds_tensor"):
            local, full = parameter.ds_tensor, parameter.ds_numel
        else:
            local, full = parameter, parameter.numel()
        own += local.numel() * local.element_size()
        whole += full * parameter.element_size()
    facts: dict[str, Any] = {"parameter_bytes": own, "whole_parameter_bytes": whole}
    if shard_ranks is not None:
        facts["shard_ranks"] = shard_ranks
    if trainer.is_fsdp_enabled:
        facts["checkpoints"] = "full" if gathers(trainer) else "sharded"
    if trainer.is_deepspeed_enabled:
        facts["zero_stage"] = trainer.model_wrapped.zero_optimization_stage()
    return facts


def optimizer_bytes(trainer: Trainer) -> int:
    """Bytes of optimizer state in this rank, float32 master copies of ZeRO included."""
    optimizer: Any = trainer.optimizer
    masters = 0
    while hasattr(optimizer, "optimizer"):
        for name in ("single_partition_of_fp32_groups", "fp32_partitioned_groups_flat"):
            masters += sum(t.numel() * t.element_size() for t in getattr(optimizer, name, ()))
        optimizer = optimizer.optimizer
    states = (value for state in optimizer.state.values() for value in state.values())
    tensors = (v.to_local() if isinstance(v, DTensor) else v for v in states if torch.is_tensor(v))
    return masters + sum(t.numel() * t.element_size() for t in tensors)


def process_bytes(device: str, found: Mapping[str, Any]) -> int:
    """Of what `memory_bytes` counts, what is neither weights nor made by training.

    On a CPU that is the interpreter and its libraries; on a GPU only tensors are counted.
    """
    if device == "cuda":
        return 0
    return psutil.Process().memory_info().rss - found["parameter_bytes"]


def memory_bytes(device: str) -> int:
    """Peak bytes: allocated on the GPU, or resident in this process on a CPU."""
    if device == "cuda":
        return torch.cuda.max_memory_allocated()
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024
