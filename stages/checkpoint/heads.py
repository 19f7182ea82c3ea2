"""What the model of a checkpoint ends in: a head over the vocabulary, or one score."""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from stages.checkpoint.json_files import read_json_if_there

SCALE = "reward_scale.json"
"""Travels with a reward model: what brings its scores to one scale."""

SCORE = "score"
"""What transformers calls the score head of a decoder."""


def is_reward_model(folder: Path) -> bool:
    """Whether ``folder`` holds a sequence classifier, or an adapter of one."""
    adapter = read_json_if_there(folder / "adapter_config.json")
    names = read_json_if_there(folder / "config.json").get("architectures") or [""]
    return adapter.get("task_type") == "SEQ_CLS" or names[0].endswith("ForSequenceClassification")


def model_class(*, reward: bool) -> Any:
    """The class of transformers that loads such a model."""
    from transformers import AutoModelForCausalLM, AutoModelForSequenceClassification

    return AutoModelForSequenceClassification if reward else AutoModelForCausalLM


def labels(*, reward: bool) -> Mapping[str, Any]:
    """What a language model's config needs to be that of a reward model."""
    return {"num_labels": 1} if reward else {}
