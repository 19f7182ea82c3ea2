"""What is trained and how it is spread: the two halves of a question to the planner."""

from dataclasses import dataclass
from typing import Literal

from backends import FSDP, NamedBackend, Resources

Stage = Literal["sft", "dpo", "reward", "ppo", "grpo"]
Method = Literal["full", "lora", "dora", "qlora"]
Precision = Literal["bf16", "fp32-master", "fp32"]
Loss = Literal["hf", "fused", "chunked"]
Optimizer = Literal["adamw", "adamw_8bit", "paged_adamw", "paged_adamw_8bit"]
Experts = Literal["loop", "grouped"]
Reference = Literal["resident", "adapter_base", "cached", "none"]

OWN_LOSS = ("reward", "ppo")
"""Stages that compute their loss in one way: from scores, and from an answer's whole logits."""

PPO_WRITES = 4
"""Micro-batches whose answers PPO writes at once."""


@dataclass(frozen=True)
class Work:
    """What decides the loss curve, as far as memory and time depend on it."""

    stage: Stage = "sft"
    method: Method = "full"
    lora_rank: int = 16
    lora_targets: Literal["all", "attention"] = "all"
    precision: Precision = "bf16"
    """``bf16``: weights, gradients and optimizer state in 2 bytes; ``fp32-master``: those in 4 and
    the matrix products in bfloat16; ``fp32``: everything in 4. A frozen base is held like trained
    weights, adapters in 4 bytes; of QLoRA that is so of what is not quantised."""

    loss: Loss = "chunked"
    """``hf``: logits upcast whole to float32; ``fused``: one kernel over whole logits;
    ``chunked``: the head is part of the loss and whole logits never exist."""

    optimizer: Optimizer = "adamw"
    seq_length: int = 4096
    """Tokens of the longest row."""

    global_batch: int = 64
    """Rows of one optimizer step. Of a pair, chosen and rejected are one row here."""

    reference: Reference | None = None
    """Where a preference or RL stage has its reference policy; unset, an adapter method takes its
    frozen base and full training a resident copy. ``none``: of GRPO that puts no price on
    leaving it."""

    new_tokens: int = 512
    """Tokens that an RL stage generates for a prompt."""

    passes: int = 1
    """Times that an RL stage learns from each answer: what is done once an answer (writing it,
    scoring it) counts for so many optimizer steps."""

    reward_models: int | None = None
    """That score an RL stage's answers, each whole in every rank; unset, PPO has one."""

    fused_kernels: bool = False
    """Adapters computed in fused kernels, as unsloth and Liger's do."""

    fused_norms: bool | None = None
    """RMSNorm and rotary embedding in fused kernels, which save less; unset, wherever the loss is
    not ``hf``, since libraries bring them together."""

    fused_mlp: bool = False
    """Gate and activation in one kernel, as Liger's do."""

    lora_dropout: float = 0.05
    """Above 0, each adapter saves a mask."""

    frozen_upcast: bool = False
    """PEFT's ``prepare_model_for_kbit_training``: embeddings, head and norms beside a quantised
    base are held in float32."""

    attention: Literal["flash", "eager"] = "flash"
    """``eager`` has whole score matrices; SDPA's fused kernels count as ``flash``."""

    reentrant: bool = True
    """How gradient checkpointing recomputes: PyTorch's reentrant form keeps a layer's output, the
    other stops before it."""

    fsdp_version: Literal[1, 2] = 2
    """PyTorch's FSDP: 1 keeps every layer's input and its gradient while adapters are trained, and
    gathers nothing early; 2 gathers one layer early. Published measurements are mostly of 1."""

    experts: Experts = "loop"
    """How a mixture computes its experts: one after another, as transformers 4 does, or as grouped
    products over stacked weights, as transformers 5. It changes time alone."""

    packing: bool = True
    """Rows are filled to ``seq_length``; else they vary up to it."""

    double_quantisation: bool = True

    @property
    def num_reward_models(self) -> int:
        return int(self.stage == "ppo") if self.reward_models is None else self.reward_models


@dataclass(frozen=True)
class Setup:
    """How the work is spread: nothing here changes the loss curve."""

    backend: NamedBackend
    resources: Resources
    """``micro_batch_size`` must be set."""

    @property
    def world_size(self) -> int:
        return self.resources.world_size

    @property
    def shard_ranks(self) -> int:
        """Ranks that one copy of what is sharded is cut over: all, but for FSDP's hybrid groups."""
        match self.backend:
            case FSDP(sharding="hybrid", shard_ranks=asked):
                return asked or self.resources.ranks_per_node
            case _:
                return self.world_size

    @property
    def micro_batch(self) -> int:
        assert self.resources.micro_batch_size is not None, "a setup names its micro-batch"
        return self.resources.micro_batch_size


def answers_at_once(work: Work, setup: Setup) -> int:
    """Answers that a rank of an RL stage writes together: TRL's GRPO all of an optimizer step's
    (``steps_per_generation`` is the accumulation), PPO those of some micro-batches."""
    if work.stage == "grpo":
        return max(setup.micro_batch, work.global_batch // setup.world_size)
    return PPO_WRITES * setup.micro_batch
