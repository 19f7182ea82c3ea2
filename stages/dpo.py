"""Direct preference optimisation: TRL's trainer on tokenised preference pairs."""

import math
from collections.abc import Mapping
from pathlib import Path
from typing import Annotated, Any, ClassVar, Literal, Self

from pydantic import Field, PositiveFloat, model_validator

from stages import cpu_ranks, training
from stages.base import Context, Metrics, StageError
from stages.training import Training

Loss = Literal[
    "sigmoid", "hinge", "ipo", "robust", "exo_pair", "apo_zero", "apo_down", "sigmoid_norm"
]
SMOOTHED = ("robust", "exo_pair")
"""Losses that read ``label_smoothing``."""


class DPO(Training):
    """What decides the result of preference optimisation."""

    uses_dropout: ClassVar[bool] = False

    learning_rate: PositiveFloat = 5e-6
    """Peak learning rate."""

    beta: PositiveFloat = 0.1
    """How strongly the policy is held to the reference: reward = beta (log pi - log pi_ref)."""

    loss: Loss = "sigmoid"
    """The loss by TRL's name; ``sigmoid`` is -log sigmoid(reward margin) (arXiv:2305.18290)."""

    label_smoothing: Annotated[float, Field(ge=0, lt=0.5)] = 0.0
    """Assumed share of swapped labels, which ``robust`` and ``exo_pair`` alone read."""

    sft_weight: Annotated[float, Field(ge=0)] = 0.0
    """Weight of an added negative log-likelihood: the mean over the chosen tokens of the step."""

    @model_validator(mode="after")
    def _smooths_where_it_is_read(self) -> Self:
        if self.label_smoothing and self.loss not in SMOOTHED:
            raise ValueError(
                f"loss: {self.loss} reads no label_smoothing; leave it out, or use loss: robust"
            )
        if self.loss == "exo_pair" and not self.label_smoothing:
            raise ValueError("loss: exo_pair needs a label_smoothing above 0, such as 1.0e-3")
        return self


def dpo(config: DPO, ctx: Context, *, policy: Path, data: Path) -> Metrics:
    """Train ``POLICY/model`` on the pairs of ``DATA``; the reference is ``POLICY/model`` itself.

    Both models are loaded from that folder, so the reference is the hand-off byte for byte; with
    adapters it is the frozen base. Before the first update the rewards are 0 and the sigmoid loss
    is ln 2; anything else raises ``StageError``.
    """
    cpu_ranks.prepare(ctx.trainer_args)
    from datasets import load_from_disk
    from transformers import AutoTokenizer
    from trl import DPOConfig

    from stages.tokenised_dpo import TokenisedDPOTrainer
    from stages.watch import Watch

    base = str(policy / "model")
    if not (data / "preferences" / "train").is_dir():
        raise StageError(f"{data}: holds no preference pairs; give the data stage `preferences`")
    rows: Any = load_from_disk(str(data / "preferences" / "train"))
    args = DPOConfig(
        **training.trainer_arguments(config, ctx),
        beta=config.beta,
        loss_type=[config.loss] + ["sft"] * (config.sft_weight > 0),
        loss_weights=[1.0, config.sft_weight] if config.sft_weight else None,
        label_smoothing=config.label_smoothing,
    )
    training.adjust_arguments(args, ctx)
    trainer = TokenisedDPOTrainer(
        base,
        args=args,
        train_dataset=training.in_order(rows, config=config),
        processing_class=AutoTokenizer.from_pretrained(base),
        quantization_config=training.quantization_config(config),
        peft_config=training.peft_config(config.method, policy / "model"),
    )
    trainer.add_callback(Watch(trainer, ctx, step_zero=lambda logs: check_step_zero(logs, config)))
    training.refuse_unknown_tokens(trainer)
    return training.train(trainer, ctx)


def check_step_zero(logs: Mapping[str, float], config: DPO) -> None:
    """Before any update the policy is the reference, so both rewards are 0.

    The tolerance covers bfloat16 log-probabilities of long answers. Raises ``StageError``.
    """
    tolerance = 1e-4 if config.compute_dtype == config.load_dtype == "float32" else 5e-2
    at_zero = {"sigmoid": math.log(2), "hinge": 1.0, "ipo": 1 / (4 * config.beta**2)}
    expected: dict[str, float] = {"rewards/chosen": 0.0, "rewards/rejected": 0.0}
    alone = not config.sft_weight and "aux_loss" not in logs  # the balance of experts
    if config.loss in at_zero and alone:
        expected["loss"] = at_zero[config.loss]
    for name, value in expected.items():
        if abs(logs[name] - value) > tolerance * max(1.0, value):
            raise StageError(
                f"before the first update {name} is {logs[name]:.6f} and must be {value:.6f}: "
                "the reference is not the model that training starts from"
            )
