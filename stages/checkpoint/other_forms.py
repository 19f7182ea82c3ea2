"""Further forms of an export, for those who run it elsewhere."""

from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Literal

from stages.checkpoint import export, gguf

Form = Literal["gguf_f16", "gguf_q8_0", "nf4"]
FOLDERS = ("gguf", "nf4")


def write(form: Form, model: Path, out: Path) -> None:
    """Make ``form`` of the plain checkpoint in ``model``, in its folder under ``out``."""
    _WRITERS[form](form, model, out)


def _nf4(form: Form, model: Path, out: Path) -> None:
    """As ``from_pretrained(quantization_config=...)`` quantises and ``save_pretrained`` writes."""
    import torch
    from transformers import AutoModelForCausalLM, AutoTokenizer, BitsAndBytesConfig

    partial = out / "nf4.partial"
    settings = BitsAndBytesConfig(
        load_in_4bit=True,
        bnb_4bit_quant_type="nf4",
        bnb_4bit_use_double_quant=True,
        bnb_4bit_compute_dtype=torch.bfloat16,
    )
    loaded = AutoModelForCausalLM.from_pretrained(
        model, dtype="auto", quantization_config=settings, device_map={"": "cpu"}
    )
    loaded.save_pretrained(partial)
    AutoTokenizer.from_pretrained(model).save_pretrained(partial)
    export.sync(partial)
    partial.rename(out / "nf4")


def _gguf(form: Form, model: Path, out: Path) -> None:
    partial = out / "gguf" / f"model-{form.removeprefix('gguf_')}.gguf.partial"
    partial.parent.mkdir(exist_ok=True)
    gguf.write(model, partial, quantised=form == "gguf_q8_0")
    partial.rename(partial.with_suffix(""))
    export.sync(partial.parent)


_WRITERS: Mapping[Form, Callable[[Form, Path, Path], None]] = {
    "gguf_f16": _gguf,
    "gguf_q8_0": _gguf,
    "nf4": _nf4,
}
