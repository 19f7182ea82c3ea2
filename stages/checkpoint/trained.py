"""The model as training left it, and as training found it, in memory and in float32."""

import shutil
import tempfile
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from stages.base import StageError
from stages.checkpoint import export, lineage
from stages.checkpoint.adapter import Adapter, peft_weights
from stages.checkpoint.heads import is_reward_model, labels, model_class
from stages.checkpoint.json_files import read_json_if_there
from stages.checkpoint.layouts import layout
from stages.checkpoint.merge import before
from stages.checkpoint.readers import open_weights
from stages.checkpoint.weights import Weights

Model = Any


@dataclass(frozen=True)
class Training:
    """What a conversion is given."""

    source: Path
    """What training left."""

    origin: Path
    """The whole model that it started from."""

    adapter: Adapter | None

    @property
    def is_reward_model(self) -> bool:
        """Whether training made a reward model, of a language model perhaps."""
        return is_reward_model(self.source)

    @property
    def quantization(self) -> Mapping[str, Any] | None:
        """``quantization_config`` of the base while the adapter was trained."""
        return read_json_if_there(self.source / "config.json").get("quantization_config")

    @property
    def load_dtype(self) -> str:
        """The type that the weights were loaded in, as far as training wrote it down."""
        config = read_json_if_there(self.source / "config.json")
        return config.get("dtype") or config.get("torch_dtype") or "float32"


def trained_model(training: Training) -> Model:
    """The training side: whole weights as they lie in the shards, or PEFT's model of an adapter
    on its base, held in 4 bits if it was so in training."""
    if training.adapter is None:
        if _loads(training.source):
            return _plain(training.source, reward=training.is_reward_model)
        return filled(
            training.source, open_weights(training.source), reward=training.is_reward_model
        )
    with tempfile.TemporaryDirectory() as folder:
        write_adapter(training.adapter, training.source, Path(folder))
        return _with_adapter(base_model(training), Path(folder))


def base_model(training: Training) -> Model:
    """What training started from, in 4 bits if it was trained so."""
    if training.quantization:
        return _quantised(training)
    if training.adapter and (rows := training.adapter.vocabulary_rows):
        weights = before(open_weights(training.origin), training.adapter)
        reward = training.is_reward_model
        return filled(training.origin, weights, reward=reward, vocab_size=rows)
    return _plain(training.origin, reward=training.is_reward_model)


def original_model(training: Training) -> Model:
    """What training started from, in plain weights."""
    return _plain(training.origin, reward=training.is_reward_model)


def filled(folder: Path, weights: Weights, *, reward: bool = False, **settings: Any) -> Model:
    """A model of ``folder``'s config with ``weights``; raises ``StageError`` if one is missing."""
    import torch
    from transformers import AutoConfig
    from transformers.initialization import no_init_weights

    config = AutoConfig.from_pretrained(
        folder, trust_remote_code=False, **labels(reward=reward), **settings
    )
    if hasattr(config, "quantization_config"):
        del config.quantization_config
    with no_init_weights():
        model = model_class(reward=reward).from_config(
            config, dtype=torch.float32, trust_remote_code=False
        )
    model.tie_weights()
    state = dict(model.state_dict(keep_vars=True))
    held = {parameter.data_ptr() for name, parameter in state.items() if name in weights.specs}
    if missing := [n for n, p in state.items() if p.data_ptr() not in held]:
        raise StageError(f"{folder}: {missing[0]} ({len(missing)} such) is not in the checkpoint")
    with torch.no_grad():
        for name in state.keys() & weights.specs.keys():
            _copy(state[name], weights, name)
    return model


def write_adapter(adapter: Adapter, source: Path, folder: Path) -> None:
    """The adapter alone, as PEFT loads it, and the fingerprint of its base if it is known."""
    weights = peft_weights(adapter)
    export.write_file(folder / "adapter_model.safetensors", weights, weights.specs)
    for name in ("adapter_config.json", lineage.NAME):
        if (source / name).is_file():
            shutil.copyfile(source / name, folder / name)


def _copy(target: Any, weights: Weights, name: str) -> None:
    target, row = target.reshape(weights.specs[name].num_rows, -1), 0
    for block in weights.blocks(name):
        target[row : row + len(block)] = block.reshape(len(block), -1)
        row += len(block)


def _loads(path: Path) -> bool:
    """Whether ``from_pretrained`` finds the weights."""
    return layout(path) == "safetensors" or (path / "pytorch_model.bin").is_file()


def _plain(path: Path, *, reward: bool) -> Model:
    import torch

    loader = model_class(reward=reward)
    return loader.from_pretrained(
        path, dtype=torch.float32, trust_remote_code=False, **labels(reward=reward)
    )


def _quantised(training: Training) -> Model:
    """Products and everything that is not in 4 bits are in float32, to be compared exactly."""
    import torch
    from bitsandbytes.nn import Linear4bit, Params4bit
    from transformers import BitsAndBytesConfig

    settings = BitsAndBytesConfig.from_dict(dict(training.quantization or {}))
    settings.bnb_4bit_compute_dtype = torch.float32
    model = model_class(reward=training.is_reward_model).from_pretrained(
        training.origin,
        trust_remote_code=False,
        **labels(reward=training.is_reward_model),
        dtype=getattr(torch, training.load_dtype),
        quantization_config=settings,
        device_map={"": "cpu"},
    )
    for parameter in model.parameters():
        if not isinstance(parameter, Params4bit) and parameter.is_floating_point():
            parameter.data = parameter.data.float()
    for module in model.modules():
        if isinstance(module, Linear4bit):
            module.support_avx512bf16_for_cpu = False  # its inference kernel computes in bfloat16
    return model


def _with_adapter(model: Model, folder: Path) -> Model:
    from peft import PeftModel

    return PeftModel.from_pretrained(model, str(folder))
