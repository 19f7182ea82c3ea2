"""Writes a model as GGUF for llama.cpp and Ollama, by the package gguf, one tensor at a time."""

from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from stages.base import StageError
from stages.checkpoint.gguf_tokenizer import write_tokenizer
from stages.checkpoint.readers import open_weights
from stages.checkpoint.weights import Weights

FAMILIES = ("llama", "mistral", "qwen2", "qwen3")
"""Model types whose tensors are known to mean the same in llama.cpp; the first two are its
``llama``, which turns the query and key rows."""

_LIMITS: Mapping[str, float] = {"F16": 65520.0, "Q8_0": 127 * 65520.0}
"""The least value that is rounded to infinity; a block of Q8_0 is 127 steps of a float16."""


def write(model: Path, file: Path, *, quantised: bool) -> None:
    """Write ``model``, a plain checkpoint, in float16, or with ``quantised`` in Q8_0.

    One-dimensional tensors stay float32, and rows that Q8_0's blocks of 32 do not fit float16.
    Raises ``StageError`` without the package, for another family, for a setting, a value or a
    tokenizer that llama.cpp would not take alike.
    """
    library = _library()
    config = _config(model)
    if config.get("model_type") not in FAMILIES:
        raise StageError(
            f"{model}: GGUF is written for {', '.join(FAMILIES)}, not {config.get('model_type')!r}"
        )
    turned = config["model_type"] in ("llama", "mistral")
    name = "llama" if turned else config["model_type"]
    writer = library.GGUFWriter(file, name)
    _settings(writer, config)
    write_tokenizer(writer, library, model, rows=config["vocab_size"])
    weights = open_weights(model)
    names = _names(library, name, config, weights)
    kinds = {n: _kind(library, weights.specs[n].shape, quantised=quantised) for n in names}
    for own, theirs in names.items():
        kind, shape = kinds[own], weights.specs[own].shape
        writer.add_tensor_info(
            theirs, _stored_shape(library, shape, kind), _numpy(kind), _size(library, shape, kind),
            kind,
        )  # fmt: skip
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_ti_data_to_file()
    for own in names:
        values = _values(weights, own, config, turned=turned)
        _require_range(own, values, kinds[own].name)
        writer.write_tensor_data(library.quants.quantize(values, kinds[own]))
    writer.close()


def _library() -> Any:
    try:
        import gguf
    except ImportError:
        raise StageError(
            "GGUF needs the package gguf: pip install 'posttrain-flows[gguf]'"
        ) from None
    return gguf


def _config(model: Path) -> Mapping[str, Any]:
    """The settings as transformers reads them, in every spelling that it takes, defaults too."""
    from transformers import AutoConfig

    return AutoConfig.from_pretrained(model, trust_remote_code=False).to_dict()


def _settings(writer: Any, config: Mapping[str, Any]) -> None:
    heads = config["num_attention_heads"]
    head = config.get("head_dim") or config["hidden_size"] // heads
    rope = config["rope_parameters"]
    if rope["rope_type"] != "default" or rope.get("partial_rotary_factor", 1) != 1:
        raise StageError(f"GGUF: scaled or partial positions are not written here, this is {rope}")
    if config["hidden_act"] != "silu":
        raise StageError(f"GGUF: these families have silu, not {config['hidden_act']!r}")
    longest = config["max_position_embeddings"]
    # llama.cpp attends to all of the context in these families, so it ends with the window
    writer.add_context_length(min(longest, config.get("sliding_window") or longest))
    writer.add_embedding_length(config["hidden_size"])
    writer.add_block_count(config["num_hidden_layers"])
    writer.add_feed_forward_length(config["intermediate_size"])
    writer.add_head_count(heads)
    writer.add_head_count_kv(config.get("num_key_value_heads") or heads)
    writer.add_key_length(head)
    writer.add_value_length(head)
    writer.add_rope_dimension_count(head)
    writer.add_rope_freq_base(rope["rope_theta"])
    writer.add_layer_norm_rms_eps(config["rms_norm_eps"])
    writer.add_vocab_size(config["vocab_size"])


def _names(
    library: Any, family: str, config: Mapping[str, Any], weights: Weights
) -> Mapping[str, str]:
    kind = {name: key for key, name in library.MODEL_ARCH_NAMES.items()}[family]
    table = library.get_tensor_name_map(kind, config["num_hidden_layers"])
    names = {own: table.get_name(own, try_suffixes=(".weight", ".bias")) for own in weights.specs}
    if unknown := [own for own, theirs in names.items() if theirs is None]:
        raise StageError(f"GGUF has no name for {unknown[0]} ({len(unknown)} such)")
    return names


def _values(weights: Weights, name: str, config: Mapping[str, Any], *, turned: bool) -> Any:
    """In float32; llama.cpp interleaves the two halves of a rotated head's rows."""
    values = weights.read(name).float()
    heads = _turned_heads(name, config) if turned else 0
    if heads:
        halves = values.reshape(heads, 2, values.shape[0] // heads // 2, *values.shape[1:])
        values = halves.transpose(1, 2).reshape(values.shape)
    return values.contiguous().numpy()


def _require_range(name: str, values: Any, kind: str) -> None:
    """A value past the range of its type, or of the scale of its block, would become infinite."""
    limit = _LIMITS.get(kind)
    if limit and (largest := float(abs(values).max())) >= limit:
        raise StageError(f"GGUF: {name} holds {largest:.6g}, and {kind} ends below {limit:.6g}")


def _turned_heads(name: str, config: Mapping[str, Any]) -> int:
    heads = config["num_attention_heads"]
    if ".q_proj." in name:
        return heads
    return (config.get("num_key_value_heads") or heads) if ".k_proj." in name else 0


def _kind(library: Any, shape: tuple[int, ...], *, quantised: bool) -> Any:
    kinds = library.GGMLQuantizationType
    if len(shape) < 2:
        return kinds.F32
    return kinds.Q8_0 if quantised and shape[-1] % 32 == 0 else kinds.F16


def _stored_shape(library: Any, shape: tuple[int, ...], kind: Any) -> tuple[int, ...]:
    if kind.name in ("F32", "F16"):
        return shape
    return tuple(library.quants.quant_shape_to_byte_shape(shape, kind))


def _numpy(kind: Any) -> Any:
    import numpy as np

    return np.dtype({"F32": np.float32, "F16": np.float16}.get(kind.name, np.uint8))


def _size(library: Any, shape: tuple[int, ...], kind: Any) -> int:
    import math

    block, size = library.GGML_QUANT_SIZES[kind]
    return math.prod(shape) // block * size


def tensors(file: Path) -> Iterator[tuple[str, str, tuple[int, ...]]]:
    """Name, type and shape of each tensor in a GGUF file."""
    for tensor in _library().GGUFReader(file).tensors:
        yield tensor.name, tensor.tensor_type.name, tuple(map(int, tensor.shape))
