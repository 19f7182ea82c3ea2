"""Further forms of an export, for those who run it elsewhere."""

from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, Literal

from stages.base import StageError
from stages.checkpoint import companions, fresh, gguf
from stages.checkpoint.heads import is_reward_model, model_class

Form = Literal["gguf_f16", "gguf_q8_0", "nf4"]


def write(form: Form, model: Path, out: Path) -> None:
    """Make ``form`` of the plain checkpoint in ``model``, in its folder under ``out``. Raises
    ``StageError`` where that form would not be the same model."""
    _WRITERS[form](form, model, out)


def _nf4(form: Form, model: Path, out: Path) -> None:
    """As ``from_pretrained(quantization_config=...)`` quantises and ``save_pretrained`` writes."""
    from safetensors import SafetensorError

    folder = out / form
    try:
        _in_four_bits(model).save_pretrained(folder)
    except SafetensorError as error:  # a full disk
        raise StageError(f"{folder}: cannot be written: {error}") from None
    companions.copy_tokenizer(folder, model, model)
    companions.copy_scale(folder, model)
    if faults := fresh.load(folder):
        raise StageError("\n".join(faults))


def _in_four_bits(model: Path) -> Any:
    import torch
    from transformers import BitsAndBytesConfig

    settings = BitsAndBytesConfig(
        load_in_4bit=True,
        bnb_4bit_quant_type="nf4",
        bnb_4bit_use_double_quant=True,
        bnb_4bit_compute_dtype=torch.bfloat16,
    )
    loaded, told = model_class(reward=is_reward_model(model)).from_pretrained(
        model,
        dtype="auto",
        quantization_config=settings,
        device_map={"": "cpu"},
        output_loading_info=True,
        trust_remote_code=False,
    )
    if missing := sorted(map(str, told["missing_keys"])):
        raise StageError(f"nf4: {missing[0]} ({len(missing)} such) is not in the model to quantise")
    return loaded


def _gguf(form: Form, model: Path, out: Path) -> None:
    folder = out / "gguf"
    folder.mkdir(exist_ok=True)
    file = folder / f"model-{form.removeprefix('gguf_')}.gguf"
    gguf.write(model, file, quantised=form == "gguf_q8_0")


_WRITERS: Mapping[Form, Callable[[Form, Path, Path], None]] = {
    "gguf_f16": _gguf,
    "gguf_q8_0": _gguf,
    "nf4": _nf4,
}
