"""TRL's RL trainers on prompts that the data stage has tokenised. Imported only inside a rank."""

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any, Protocol

from trl import GRPOConfig, GRPOTrainer, RLOOConfig, RLOOTrainer

from stages.rl.start import require_stops


class Asked(Protocol):
    """Where token ids of prompts are to be had."""

    def ids(self, place: str) -> list[int]: ...


@contextmanager
def in_step(trainer: Any) -> Iterator[None]:
    """Ranks that hold shards generate until the longest answer of all is done.

    Each token gathers the shards of every rank, and transformers 5.24 goes on for ranks that are
    still busy under ZeRO-3 and its own FSDP alone; accelerate's FSDP2 would wait for ever.
    """
    models = [trainer.model]
    if hasattr(trainer.model, "get_base_model"):
        models.append(trainer.model.get_base_model())
    for model in models:
        model._is_fsdp_managed_module = trainer.is_fsdp_enabled
    try:
        yield
    finally:
        for model in models:
            del model._is_fsdp_managed_module


def _leave_out_no_token(trainer: Any) -> None:
    """TRL 1.16 takes a tokenizer's missing eos token for one more that ends an answer."""
    stops = require_stops(trainer.eos_token_ids, Path(trainer.processing_class.name_or_path))
    trainer.eos_token_ids = trainer.generation_config.eos_token_id = list(stops)
    trainer.generation_kwargs["eos_token_id"] = trainer.eos_token_ids


class TakesIds:
    """Takes a prompt by its place in the data, and its ids from there as they are.

    TRL 1.16 renders and tokenises messages itself, with today's template and not the data stage's,
    and has no argument against it. Ends when it accepts tokenised prompts.
    """

    def __init__(self, asked: Asked, *args: Any, **kwargs: Any) -> None:
        self.asked = asked
        super().__init__(*args, **kwargs)
        _leave_out_no_token(self)

    def _tokenize_prompts(self, prompts: Sequence[str]) -> Any:
        return [self.asked.ids(place) for place in prompts], None, {}

    def _generate_single_turn(self, *args: Any, **kwargs: Any) -> Any:
        with in_step(self):
            return super()._generate_single_turn(*args, **kwargs)


class TokenisedGRPOTrainer(TakesIds, GRPOTrainer):
    """GRPO by TRL."""


class TokenisedRLOOTrainer(TakesIds, RLOOTrainer):
    """RLOO by TRL."""


TRAINERS: Mapping[str, tuple[Any, Any]] = {
    "grpo": (TokenisedGRPOTrainer, GRPOConfig),
    "rloo": (TokenisedRLOOTrainer, RLOOConfig),
}
"""Trainer and arguments by the kind of the estimator."""
