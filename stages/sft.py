"""Supervised fine-tuning: TRL's trainer on tokenised conversations."""

from pathlib import Path
from typing import Any, Literal, Self

from pydantic import PositiveFloat, PositiveInt, model_validator

from stages import cpu_ranks, training
from stages.base import Context, Metrics
from stages.data import packing
from stages.training import Training


class SFT(Training):
    """What decides the result of supervised fine-tuning."""

    learning_rate: PositiveFloat = 2e-5
    """Peak learning rate."""

    batch_unit: Literal["rows", "tokens"] = "rows"
    """What ``global_batch_size`` counts; ``tokens`` needs ``pack_length``, which must divide it."""

    pack_length: PositiveInt | None = None
    """Pack rows, kept apart from one another, into sequences of up to this many tokens."""

    neftune_alpha: PositiveFloat | None = None
    """Noise on the embeddings while training (arXiv:2310.05914)."""

    @model_validator(mode="after")
    def _batch_can_be_counted(self) -> Self:
        if self.batch_unit == "tokens" and (
            self.pack_length is None or self.global_batch_size % self.pack_length
        ):
            raise ValueError(
                f"batch_unit: tokens needs a pack_length that divides global_batch_size "
                f"{self.global_batch_size}, not {self.pack_length}"
            )
        return self

    @property
    def global_batch_rows(self) -> int:
        if self.batch_unit == "tokens" and self.pack_length:
            return self.global_batch_size // self.pack_length
        return self.global_batch_size


def sft(config: SFT, ctx: Context, *, model: Path, data: Path) -> Metrics:
    """Train ``MODEL/model`` on the conversations of ``DATA``.

    The loss is the mean over all trained tokens of the optimizer step, over every rank.
    """
    cpu_ranks.prepare(ctx.trainer_args)
    from datasets import load_from_disk
    from transformers import AutoTokenizer
    from trl import SFTConfig, SFTTrainer

    from stages.watch import Watch

    base = str(model / "model")
    rows: Any = load_from_disk(str(data / "conversations" / "train"))
    rows = rows.select_columns(["input_ids", "labels"])
    if config.pack_length is not None:
        rows = packing.pack(rows, config.pack_length)
    args = SFTConfig(
        **training.trainer_arguments(config, ctx),
        neftune_noise_alpha=config.neftune_alpha,
        padding_free=config.pack_length is not None,
        dataset_kwargs={"skip_prepare_dataset": True},
    )
    training.adjust_arguments(args, ctx)
    trainer = SFTTrainer(
        base,
        args=args,
        train_dataset=training.in_order(rows, config=config),
        processing_class=AutoTokenizer.from_pretrained(base),
        quantization_config=training.quantization_config(config),
        peft_config=training.peft_config(config.method, model / "model"),
    )
    trainer.add_callback(Watch(trainer, ctx))
    training.refuse_unknown_tokens(trainer)
    return training.train(trainer, ctx)
