"""PyTorch FSDP2: parameters, gradients and optimizer state sharded over the ranks."""

from typing import Any, Literal

from pydantic import PositiveInt

from backends.base import Launch, Resources, rank_environment, torchrun, trainer_settings
from configs import Config


class FSDP(Config):
    """Fully sharded data parallelism, version 2."""

    kind: Literal["fsdp"] = "fsdp"

    sharding: Literal["full", "grad_op", "hybrid"] = "full"
    """``full`` frees a block's parameters after use; ``grad_op`` keeps them gathered from forward
    to backward (faster, more memory); ``hybrid`` shards inside a group and replicates between."""

    shard_ranks: PositiveInt | None = None
    """Ranks in one shard group under ``hybrid``; unset, the ranks of one node."""

    cpu_offload: bool = False
    """Keep shards and optimizer state in host memory; needs ``device: cuda`` to be of use."""

    wrap_classes: tuple[str, ...] = ()
    """Module classes that become units; empty, the model's own decoder layers."""

    whole_embedding: bool = False
    """Keep the embedding (and a tied head) whole in every rank while the body is sharded."""

    reduce_dtype: Literal["float32", "bfloat16"] = "float32"
    """Type gradients are summed in under bfloat16 compute; ``bfloat16`` halves the traffic."""

    checkpoints: Literal["full", "sharded"] = "full"
    """``full`` gathers on rank 0; ``sharded`` writes one file a rank, for models too large."""

    def plan(self, resources: Resources, *argv: str) -> Launch:
        if resources.device == "cpu" and resources.world_size == 1:
            raise ValueError("fsdp on one CPU rank shards nothing; use two ranks, or ddp")
        shared = trainer_settings(resources)
        recompute = shared.pop("gradient_checkpointing")
        return Launch(
            argv=torchrun(resources, *argv),
            env=rank_environment(resources),
            trainer_args=shared
            | {
                "gradient_checkpointing": False,
                "fsdp": True,
                "fsdp_config": self._config(recompute),
                "fsdp_plugin": self._plugin(resources),
                # Or each rank would keep whole float32 gradients from micro-step to micro-step.
                "accelerator_config": {
                    "gradient_accumulation_kwargs": {"sync_each_batch": True},
                },
                "whole_embedding": self.whole_embedding,
            },
            promise={
                "wrapper": "fsdp",
                "world_size": resources.world_size,
                "shard_ranks": self._shard_ranks(resources),
                "checkpoints": self.checkpoints,
            },
        )

    def _config(self, recompute: bool) -> dict[str, Any]:
        config: dict[str, Any] = {
            "version": 2,
            "auto_wrap_policy": "TRANSFORMER_BASED_WRAP",
            "reshard_after_forward": self.sharding != "grad_op",
            "cpu_offload": self.cpu_offload,
            "activation_checkpointing": recompute,
            "state_dict_type": f"{self.checkpoints.upper()}_STATE_DICT",
        }
        if self.wrap_classes:
            config["transformer_layer_cls_to_wrap"] = list(self.wrap_classes)
        return config

    def _plugin(self, resources: Resources) -> dict[str, Any]:
        """What accelerate's plugin takes beyond the trainer's own arguments."""
        plugin: dict[str, Any] = {"reduce_dtype": self.reduce_dtype}
        group = self._shard_ranks(resources)
        if group != resources.world_size:
            plugin["dp_replicate_size"] = resources.world_size // group
            plugin["dp_shard_size"] = group
        return plugin

    def _shard_ranks(self, resources: Resources) -> int:
        if self.sharding != "hybrid":
            if self.shard_ranks is not None:
                raise ValueError(f"shard_ranks {self.shard_ranks} is read only by sharding: hybrid")
            return resources.world_size
        group = self.shard_ranks or resources.ranks_per_node
        if group == 1:
            raise ValueError("a shard group of one rank shards nothing; use backend.kind=ddp")
        if resources.world_size % group:
            raise ValueError(f"shard_ranks {group} does not divide {resources.world_size} ranks")
        return group
