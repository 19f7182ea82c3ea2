"""DeepSpeed ZeRO under torchrun."""

from pathlib import Path
from typing import Any, Literal, Self

from pydantic import NonNegativeInt, model_validator

from backends.base import Launch, Resources, rank_environment, torchrun, trainer_settings
from configs import Config

Offload = Literal["cpu", "nvme"]


class DeepSpeed(Config):
    """ZeRO: stage 1 shards the optimizer, 2 the gradients as well, 3 the parameters too."""

    kind: Literal["deepspeed"] = "deepspeed"

    zero_stage: Literal[1, 2, 3] = 3
    """What is sharded."""

    offload_optimizer: Offload | None = None
    """Where optimizer state lives and steps, if not on the GPU; ``nvme`` needs stage 3."""

    offload_parameters: Offload | None = None
    """Where parameters rest between uses; needs stage 3."""

    nvme_path: Path | None = None
    """Directory on a fast disk for ``nvme`` offload."""

    communication: Literal["plain", "zero++", "one_bit_adam"] = "plain"
    """For slow networks: ``zero++`` (stage 3) quantises weights and gradients and keeps a second
    shard inside each node; ``one_bit_adam`` (stage 1) sends one bit a value after a warm-up."""

    one_bit_freeze_step: NonNegativeInt | None = None
    """Full-precision warm-up steps of ``one_bit_adam``; unset, 100."""

    checkpoints: Literal["full", "sharded"] = "full"
    """``full`` gathers weights when the run ends; ``sharded`` leaves ZeRO's shards to convert."""

    @model_validator(mode="after")
    def _fits_together(self) -> Self:
        if self.offload_parameters and self.zero_stage != 3:
            raise ValueError("offload_parameters needs zero_stage 3")
        if self.offload_optimizer == "nvme" and self.zero_stage != 3:
            raise ValueError("offload_optimizer: nvme needs zero_stage 3")
        uses_nvme = "nvme" in (self.offload_optimizer, self.offload_parameters)
        if uses_nvme != (self.nvme_path is not None):
            raise ValueError("nvme_path and an offload to nvme go together")
        if self.communication == "zero++" and self.zero_stage != 3:
            raise ValueError("communication: zero++ needs zero_stage 3")
        if self.communication == "one_bit_adam" and self.zero_stage != 1:
            raise ValueError("communication: one_bit_adam needs zero_stage 1")
        if self.one_bit_freeze_step is not None and self.communication != "one_bit_adam":
            raise ValueError("one_bit_freeze_step is read only by communication: one_bit_adam")
        if self.checkpoints == "sharded" and self.zero_stage != 3:
            raise ValueError("checkpoints: sharded needs zero_stage 3; below it weights are whole")
        return self

    def plan(self, resources: Resources, *argv: str) -> Launch:
        if resources.device == "cpu" and resources.world_size == 1:
            raise ValueError("deepspeed on one CPU rank shards nothing; use two ranks, or ddp")
        accelerator = {"DS_ACCELERATOR": "cpu"} if resources.device == "cpu" else {}
        return Launch(
            argv=torchrun(resources, *argv),
            env=rank_environment(resources) | accelerator,
            trainer_args=trainer_settings(resources) | {"deepspeed": self._settings(resources)},
            promise={
                "wrapper": "deepspeed",
                "world_size": resources.world_size,
                "zero_stage": self.zero_stage,
            },
        )

    def _settings(self, resources: Resources) -> dict[str, Any]:
        """DeepSpeed's own JSON; the trainer fills every ``auto``."""
        settings: dict[str, Any] = {
            "zero_optimization": self._zero(resources),
            "bf16": {"enabled": "auto"},
            "gradient_clipping": "auto",
            "train_batch_size": "auto",
            "train_micro_batch_size_per_gpu": "auto",
            "gradient_accumulation_steps": "auto",
            "zero_allow_untested_optimizer": True,
            # Plain AdamW on CPU ranks: DeepSpeed's own would be compiled on first use.
            "zero_force_ds_cpu_optimizer": resources.device == "cuda",
            "steps_per_print": 1_000_000_000,
        }
        if self.communication == "one_bit_adam":
            params = {"lr": "auto", "betas": "auto", "eps": "auto", "weight_decay": "auto"}
            settings["optimizer"] = {
                "type": "OneBitAdam",
                "params": params | {"freeze_step": self.one_bit_freeze_step or 100},
            }
        return settings

    def _zero(self, resources: Resources) -> dict[str, Any]:
        zero: dict[str, Any] = {
            "stage": self.zero_stage,
            "overlap_comm": resources.device == "cuda",
            "contiguous_gradients": True,
            "reduce_bucket_size": "auto",
        }
        if self.zero_stage == 3:
            zero |= {
                "stage3_prefetch_bucket_size": "auto",
                "stage3_param_persistence_threshold": "auto",
                "stage3_gather_16bit_weights_on_model_save": self.checkpoints == "full",
            }
        if self.offload_optimizer:
            zero["offload_optimizer"] = self._offload(self.offload_optimizer)
        if self.offload_parameters:
            zero["offload_param"] = self._offload(self.offload_parameters)
        if self.communication == "zero++":
            zero |= {
                "zero_quantized_weights": True,
                "zero_quantized_gradients": True,
                "zero_hpz_partition_size": resources.ranks_per_node,
            }
        return zero

    def _offload(self, device: Offload) -> dict[str, Any]:
        place = {"nvme_path": str(self.nvme_path)} if device == "nvme" else {}
        return {"device": device, "pin_memory": True} | place
