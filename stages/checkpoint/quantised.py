"""A base as QLoRA's training sees it: its linear layers rounded to NF4."""

from collections.abc import Mapping
from functools import lru_cache
from pathlib import Path
from threading import Lock
from typing import TYPE_CHECKING, Any

from stages.checkpoint.weights import Spec, Weights

if TYPE_CHECKING:
    from torch import Tensor


def dequantised(
    base: Weights, folder: Path, quantization: Mapping[str, Any], load_dtype: str
) -> Weights:
    """``base`` with each weight that bitsandbytes holds in 4 bits quantised and taken back.

    ``folder`` has the model's config, ``quantization`` is the ``quantization_config`` of the
    training, and ``load_dtype`` the type that the weights were loaded in before they were
    quantised, which is also the type that they are taken back to.
    """
    import torch
    from bitsandbytes.functional import dequantize_4bit, quantize_4bit

    held = {name for name in quantised_parameters(folder, quantization) if name in base.specs}

    one_at_a_time = Lock()

    @lru_cache(maxsize=1)
    def taken_back(name: str) -> "Tensor":
        values = base.read(name).to(getattr(torch, load_dtype))
        packed, state = quantize_4bit(
            values,
            quant_type=quantization.get("bnb_4bit_quant_type", "fp4"),
            compress_statistics=bool(quantization.get("bnb_4bit_use_double_quant")),
            blocksize=64,
        )
        return dequantize_4bit(packed, state)

    def whole(name: str) -> "Tensor":
        with one_at_a_time:
            return taken_back(name)

    def rows(name: str, first: int, last: int) -> "Tensor":
        return whole(name)[first:last] if name in held else base.rows(name, first, last)

    specs = {n: Spec(s.shape, load_dtype) if n in held else s for n, s in base.specs.items()}
    return Weights(specs, rows)


def quantised_parameters(folder: Path, quantization: Mapping[str, Any]) -> set[str]:
    """The weights that transformers replaces by 4-bit ones, told by a model without memory."""
    import bitsandbytes
    import torch
    from transformers import AutoConfig, AutoModelForCausalLM, BitsAndBytesConfig
    from transformers.integrations.bitsandbytes import replace_with_bnb_linear
    from transformers.quantizers.base import get_keys_to_not_convert

    settings = BitsAndBytesConfig.from_dict(dict(quantization))
    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(
            AutoConfig.from_pretrained(folder, trust_remote_code=False), trust_remote_code=False
        )
    kept = settings.llm_int8_skip_modules or get_keys_to_not_convert(model)
    replace_with_bnb_linear(model, modules_to_not_convert=kept, quantization_config=settings)
    return {
        f"{name}.weight"
        for name, module in model.named_modules()
        if isinstance(module, bitsandbytes.nn.Linear4bit)
    }
