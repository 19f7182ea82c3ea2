"""What the training stages share: their fields, the trainer's arguments, and the run itself."""

import json
import math
import shutil
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, ClassVar, Literal, Self

from pydantic import Field, NonNegativeFloat, PositiveFloat, PositiveInt, model_validator

from configs import Config
from stages import recut, resume
from stages.base import Context, Metrics, StageError
from stages.checkpoint.architecture import attention_layers
from stages.checkpoint.conversation import has_tokenizer
from stages.checkpoint.lineage import note_base

if TYPE_CHECKING:
    from datasets import Dataset
    from peft import LoraConfig
    from transformers import BitsAndBytesConfig

Trainer = Any
"""A transformers Trainer, whose own annotations do not know wrapped models."""

DType = Literal["float32", "bfloat16"]
Beta = Annotated[float, Field(ge=0, lt=1)]
Targets = Literal["all_linear", "attention"] | tuple[str, ...]


class NonFiniteError(ArithmeticError):
    """A loss, gradient norm or weight became NaN or infinite."""


class Full(Config):
    """Train every weight."""

    kind: Literal["full"] = "full"


class Adapter(Config):
    """What every kind of low-rank adapter has."""

    rank: PositiveInt = 16
    """Inner dimension of each adapter."""

    alpha: PositiveInt = 32
    """The adapter's product is scaled by alpha / rank; see ``rank_stabilised``."""

    dropout: Annotated[float, Field(ge=0, lt=1)] = 0.0
    """Dropout on the adapter's input."""

    targets: Targets = "all_linear"
    """Which linear layers get an adapter; a tuple names module suffixes."""

    rank_stabilised: bool = False
    """Scale by alpha / sqrt(rank) (rsLoRA, arXiv:2312.03732)."""


class LoRA(Adapter):
    """Train low-rank adapters beside the frozen weights (arXiv:2106.09685)."""

    kind: Literal["lora"] = "lora"


class DoRA(Adapter):
    """LoRA with a learned magnitude per output (arXiv:2402.09353)."""

    kind: Literal["dora"] = "dora"


class QLoRA(Adapter):
    """LoRA beside a base held in 4-bit NF4 (arXiv:2305.14314)."""

    kind: Literal["qlora"] = "qlora"

    double_quantisation: bool = True
    """Quantise the quantisation constants too: 0.5159 instead of 0.5625 bytes a weight."""


Method = Annotated[Full | LoRA | DoRA | QLoRA, Field(discriminator="kind")]


class Training(Config):
    """Fields that every training stage has. Each of them can change the loss curve."""

    uses_dropout: ClassVar[bool] = True
    """Whether the stage leaves dropout on. Preferences and rewards are learnt without: policy and
    reference are compared, and the two answers of a pair."""

    method: Method = Full()
    """What is trained."""

    learning_rate: PositiveFloat
    """Peak learning rate."""

    schedule: Literal["linear", "cosine", "constant"] = "cosine"
    """How the learning rate falls after the warm-up."""

    warmup_fraction: Annotated[float, Field(ge=0, lt=1)] = 0.03
    """Share of the steps over which the learning rate rises from zero."""

    epochs: PositiveInt = 1
    """Passes over the training split."""

    max_steps: PositiveInt | None = None
    """Stop after so many optimizer steps, if that comes before the last epoch ends."""

    global_batch_size: PositiveInt = 32
    """Rows in one optimizer step, over all ranks and accumulation steps."""

    optimizer: Literal["adamw", "adamw_8bit", "paged_adamw_8bit", "paged_adamw"] = "adamw"
    """AdamW by PyTorch, or by bitsandbytes in 8 bits, or paged to host memory (GPU)."""

    adam_betas: tuple[Beta, Beta] = (0.9, 0.999)
    """Decay of the first and second moment."""

    weight_decay: NonNegativeFloat = 0.0
    """Decoupled weight decay."""

    max_grad_norm: NonNegativeFloat = 1.0
    """The gradient is scaled down to this norm; 0 leaves it alone."""

    load_dtype: DType = "float32"
    """Type the weights are loaded in, and so the type that is optimised."""

    compute_dtype: DType = "float32"
    """Type of the matrix products; ``bfloat16`` with float32 weights is mixed precision."""

    attention: Literal["sdpa", "eager", "flash_attention_2"] = "sdpa"
    """Attention kernel."""

    liger_kernel: bool = False
    """Fused Triton kernels of the optional package liger-kernel (GPU)."""

    seed: Annotated[int, Field(ge=0, lt=2**32)] = 0
    """Seeds the adapters, dropout and the order of the rows."""

    @model_validator(mode="after")
    def _has_no_idle_dropout(self) -> Self:
        if not self.uses_dropout and getattr(self.method, "dropout", 0.0):
            raise ValueError("method.dropout must be 0: this stage trains without dropout")
        return self

    @property
    def global_batch_rows(self) -> int:
        """Rows of the training set in one optimizer step."""
        return self.global_batch_size

    @property
    def rows_per_step(self) -> float:
        """Rows of the training set that one step takes, as ``max_steps`` counts steps."""
        return self.global_batch_rows

    @property
    def optimizer_steps_per_step(self) -> int:
        """Of a step as ``max_steps`` counts them."""
        return 1

    @property
    def learned_from(self) -> int:
        """Optimizer steps for which each row or answer counts."""
        return 1

    def obstacle(self, device: str) -> str | None:
        """Why a machine with this ``device`` cannot train so, or ``None``."""
        if device == "cpu" and self.attention == "flash_attention_2":
            return "attention: flash_attention_2 needs a GPU; use sdpa"
        if device == "cpu" and self.liger_kernel:
            return "liger_kernel needs a GPU; set it to false"
        return None


OPTIMIZERS = {
    "adamw": "adamw_torch",
    "adamw_8bit": "adamw_bnb_8bit",
    "paged_adamw": "paged_adamw_32bit",
    "paged_adamw_8bit": "paged_adamw_8bit",
}
SCHEDULES = {"linear": "linear", "cosine": "cosine", "constant": "constant_with_warmup"}
"""By their names in transformers, whose ``constant`` knows no warm-up."""


def trainer_arguments(config: Training, ctx: Context) -> dict[str, Any]:
    """A TRL trainer's arguments, from ``config`` and from what the backend adds."""
    ours = {"fsdp_plugin", "whole_embedding", "keep", "tracking"}
    backend = {key: value for key, value in recut.settings(ctx).items() if key not in ours}
    return {
        "output_dir": str(ctx.out / resume.SAVING),
        "learning_rate": config.learning_rate,
        "lr_scheduler_type": SCHEDULES[config.schedule],
        "warmup_steps": config.warmup_fraction,
        "num_train_epochs": 1,
        "optim": OPTIMIZERS[config.optimizer],
        "adam_beta1": config.adam_betas[0],
        "adam_beta2": config.adam_betas[1],
        "weight_decay": config.weight_decay,
        "max_grad_norm": config.max_grad_norm,
        "bf16": config.compute_dtype == "bfloat16",
        "model_init_kwargs": {
            "dtype": config.load_dtype,
            "attn_implementation": config.attention,
        },
        "use_liger_kernel": config.liger_kernel,
        "seed": config.seed,
        "train_sampling_strategy": "sequential",  # `in_order` has already shuffled
        "logging_strategy": "steps",
        "logging_steps": 1,
        "logging_first_step": True,
        "logging_nan_inf_filter": False,  # it hides the very values that `Watch` looks for
        "save_strategy": "steps",
        "report_to": "none",
        "disable_tqdm": True,
        "remove_unused_columns": True,
        "max_length": None,  # lengths were settled when the rows were tokenised
        **backend,
    }


def peft_config(
    method: Full | Adapter, base: Path, *, task: Literal["CAUSAL_LM", "SEQ_CLS"] = "CAUSAL_LM"
) -> "LoraConfig | None":
    """PEFT's description of ``method`` on the model in ``base``, or ``None`` when every weight is
    trained.

    The score head of a ``SEQ_CLS`` model is trained whole and saved with the adapter.
    """
    if isinstance(method, Full):
        return None
    from peft import LoraConfig

    return LoraConfig(
        task_type=task,
        r=method.rank,
        lora_alpha=method.alpha,
        lora_dropout=method.dropout,
        target_modules=_target_modules(method.targets, base),
        use_rslora=method.rank_stabilised,
        use_dora=isinstance(method, DoRA),
        modules_to_save=["score"] if task == "SEQ_CLS" else None,
    )


def _target_modules(targets: Targets, base: Path) -> str | list[str]:
    match targets:
        case "all_linear":
            return "all-linear"
        case "attention":
            return list(attention_layers(base))
        case _:
            return list(targets)


def quantization_config(config: Training) -> "BitsAndBytesConfig | None":
    """NF4 for QLoRA. Storage in the load type lets FSDP shard the packed weights like others."""
    if not isinstance(config.method, QLoRA):
        return None
    import torch
    from transformers import BitsAndBytesConfig

    return BitsAndBytesConfig(
        load_in_4bit=True,
        bnb_4bit_quant_type="nf4",
        bnb_4bit_use_double_quant=config.method.double_quantisation,
        bnb_4bit_compute_dtype=getattr(torch, config.compute_dtype),
        bnb_4bit_quant_storage=getattr(torch, config.load_dtype),
    )


def in_order(dataset: "Dataset", *, config: Training) -> "Dataset":
    """The rows in the order in which they are trained on, whatever the ranks and micro-batches.

    Each epoch is a permutation drawn from ``seed``; epochs follow one another, and the last
    optimizer step is filled up from the front, so that every step holds ``global_batch_rows`` and
    no row is left out. Raises ``StageError`` when there are no rows.
    """
    import numpy as np

    if not len(dataset):
        raise StageError("the training split has no rows; see the data stage's report.json")
    rng = np.random.default_rng(config.seed)
    order = np.concatenate([rng.permutation(len(dataset)) for _ in range(config.epochs)])
    steps = math.ceil(len(order) / config.global_batch_rows)
    if config.max_steps is not None:
        steps = min(steps, config.max_steps)
    return dataset.select(np.resize(order, steps * config.global_batch_rows))


def adjust_arguments(args: Any, ctx: Context) -> None:
    """What the backend asks of accelerate beyond the trainer's own argument names."""
    plugin = dict(ctx.trainer_args.get("fsdp_plugin", {}))
    if plugin and args.bf16:
        import torch
        from torch.distributed.fsdp import MixedPrecisionPolicy

        # accelerate would also cast the outputs to bfloat16, the loss itself among them.
        args.fsdp_plugin_args["mixed_precision_policy"] = MixedPrecisionPolicy(
            param_dtype=torch.bfloat16,
            reduce_dtype=getattr(torch, plugin["reduce_dtype"]),
            output_dtype=None,
        )
    if "dp_shard_size" in plugin:
        from accelerate.parallelism_config import ParallelismConfig

        args.parallelism_config = ParallelismConfig(
            dp_replicate_size=plugin["dp_replicate_size"], dp_shard_size=plugin["dp_shard_size"]
        )


def keep_embedding_whole(trainer: Trainer) -> None:
    """Replicate the embedding, and a head tied to it, over the ranks that shard the body.

    A unit sharded over a mesh of N replicas x 1 shard is whole in every rank, and its gradient is
    still averaged over all of them. accelerate leaves modules alone that are units already.
    """
    import torch.distributed as dist
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import fully_shard

    names = ("replicate", "shard")
    mesh = init_device_mesh(
        trainer.args.device.type, (dist.get_world_size(), 1), mesh_dim_names=names
    )
    embedding = trainer.model.get_input_embeddings()
    head = trainer.model.get_output_embeddings()
    tied = head is not None and head.weight is embedding.weight
    fully_shard([embedding, head] if tied else embedding, mesh=mesh)


def train(trainer: Trainer, ctx: Context) -> Metrics:
    """Train to the last step, from the newest complete checkpoint if there is one, and save.

    Leaves ``OUT/model`` (what the trainer saved), ``OUT/metrics.jsonl`` and ``OUT/ranks/``.
    ``save_seconds`` in what it returns is how long training stood still for ``saves`` saves.
    Raises ``StageError`` when no step was done, or none at a learning rate above 0, and
    ``NonFiniteError`` when a value was not finite.
    """
    refuse_lost_targets(trainer.model)
    refuse_one_tied_end(trainer.model)
    checkpoint = resume.newest(ctx.out)
    started = time.time()
    if ctx.trainer_args.get("whole_embedding"):
        keep_embedding_whole(trainer)
    recut.prepare(trainer, ctx)
    trainer.train(resume_from_checkpoint=str(checkpoint) if checkpoint else None)
    done, asked = trainer.state.global_step, trainer.state.max_steps
    first = resume.step(checkpoint) if checkpoint else 0
    if done < asked or done == 0:
        raise StageError(f"training ended at step {done} of {asked}; nothing was saved")
    rows = [row for row in trainer.state.log_history if "loss" in row]
    _refuse_idle(rows)
    _save(trainer, ctx)
    noted = ctx.out / "ranks" / f"rank-{trainer.args.process_index}.json"
    facts = json.loads(noted.read_text())
    return {
        "steps": done,
        "resumed_from": first,
        "seconds": time.time() - started,
        "first_loss": rows[0]["loss"],
        "final_loss": rows[-1]["loss"],
        "saves": facts["saves"],
        "save_seconds": facts["save_seconds"],
    }


def _refuse_idle(rows: Sequence[Mapping[str, float]]) -> None:
    """A warm-up begins at a rate of 0. Raise ``StageError`` where no later step has come."""
    if not any(row["learning_rate"] for row in rows):
        raise StageError(
            "the only optimizer step was the first of the warm-up, whose learning rate is 0, so "
            "nothing was trained; set config.warmup_fraction=0, or lower global_batch_size"
        )


def refuse_unknown_tokens(trainer: Trainer) -> None:
    """Raise ``StageError`` for a tokenizer with more tokens than the model has embeddings: rows may
    be padded with one of them, and no export would be valid."""
    tokenizer = trainer.processing_class
    highest = max(tokenizer.get_vocab().values())
    known = trainer.model.get_input_embeddings().num_embeddings
    if highest >= known:
        raise StageError(
            f"{tokenizer.name_or_path}: the tokenizer has a token {highest} "
            f"({tokenizer.convert_ids_to_tokens(highest)!r}), and the model {known} embeddings; "
            "give a model with as many (resize_token_embeddings), or a tokenizer without it"
        )


def refuse_lost_targets(model: Any) -> None:
    """Raise ``StageError`` for a target that is no layer of the model: PEFT passes over it."""
    if not hasattr(model, "peft_config"):
        return
    adapted = model.base_model.targeted_module_names
    asked = model.peft_config["default"].target_modules
    lost = [one for one in asked if not any(f".{n}".endswith(f".{one}") for n in adapted)]
    if lost:
        found = {name.rpartition(".")[2] for name in adapted}
        raise StageError(
            f"method.targets: the model has no layer {', '.join(sorted(lost))}, and only "
            f"{', '.join(sorted(found))} would be trained; give the names of this model's own "
            "layers, or all_linear"
        )


def refuse_one_tied_end(model: Any) -> None:
    """Raise ``StageError`` when an adapter would drive the two ends of a tie apart."""
    if not hasattr(model, "peft_config") or not model.config.tie_word_embeddings:
        return
    ends = {"embedding": model.get_input_embeddings(), "head": model.get_output_embeddings()}
    adapted = [n for n, e in ends.items() if hasattr(e, "lora_A") or hasattr(e, "modules_to_save")]
    if len(adapted) == 1:
        raise StageError(
            f"the {adapted[0]} is one end of a tie and the other end has no adapter: the two would "
            "be trained apart; leave it out of method.targets, or untie the model first"
        )


def keep_generation_settings(model: Any) -> None:
    """Let the model be saved with the generation settings that it came with.

    Published ones may name a temperature without ``do_sample``. transformers 5.24 saves such if
    they are as they were loaded, and no longer once a trainer has set the pad token beside them:
    it would raise at the first checkpoint. Ends when it refuses what was changed alone.
    """
    settings = getattr(model, "generation_config", None)
    if settings is not None:
        settings._original_object_hash = hash(settings)


def _save(trainer: Trainer, ctx: Context) -> None:
    """Write ``OUT/model`` aside and rename it, once every rank is done."""
    partial, final = ctx.out / "model.partial", ctx.out / "model"
    main = trainer.args.process_index == 0
    if main:
        shutil.rmtree(partial, ignore_errors=True)
        shutil.rmtree(final, ignore_errors=True)
    trainer.accelerator.wait_for_everyone()
    trainer.save_model(str(partial))
    if trainer.is_fsdp_enabled and not gathers(trainer):
        from accelerate.utils import save_fsdp_model

        save_fsdp_model(
            trainer.accelerator.state.fsdp_plugin, trainer.accelerator, trainer.model, str(partial)
        )
    trainer.accelerator.wait_for_everyone()
    if main:
        complete(trainer, partial)
        partial.rename(final)


def gathers(trainer: Trainer) -> bool:
    """Whether FSDP saves whole tensors from rank 0, and not a shard from every rank."""
    return "FULL_STATE_DICT" in str(trainer.accelerator.state.fsdp_plugin.state_dict_type)


def complete(trainer: Trainer, folder: Path) -> None:
    """Sharded saves bring weights alone; a reader needs config, tokenizer and adapter too, and
    the fingerprint of what the adapter was trained on. Saves of several models as one, as PPO's,
    are nobody's to read but the stage's own."""
    from transformers import PreTrainedModel

    model = trainer.accelerator.unwrap_model(trainer.model)
    adapters = getattr(model, "peft_config", None)
    base = model.get_base_model() if adapters else model
    if not isinstance(base, PreTrainedModel):
        return
    if adapters:
        if not (folder / "adapter_config.json").exists():
            adapters["default"].save_pretrained(folder)
        note_base(folder)
    if not (folder / "config.json").exists():
        base.config.save_pretrained(folder)
    if base.can_generate() and not (folder / "generation_config.json").exists():
        base.generation_config.save_pretrained(folder)
    if not has_tokenizer(folder):
        trainer.processing_class.save_pretrained(folder)
