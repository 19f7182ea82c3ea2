"""What a checkpoint folder is, told without loading a tensor."""

from collections import Counter
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

from stages.checkpoint.conversation import stop_ids, template, tokenizer_sha256
from stages.checkpoint.headers import Entry, read_header, read_headers
from stages.checkpoint.json_files import expect, read_json_if_there
from stages.checkpoint.layouts import Layout, is_adapter, layout
from stages.checkpoint.lineage import noted_base
from stages.checkpoint.names import Plain, meaning
from stages.checkpoint.weights import Spec

_HEADS = ("lm_head.weight", "embed_out.weight")
"""What families call the head over the vocabulary."""


def describe(path: Path) -> dict[str, Any]:
    """Facts for the manifest and the report, all of them JSON values.

    ``parameters`` and ``dtypes`` (values of each type) are told by the heads of the files,
    ``vocabulary_rows`` is the config's, ``quantization`` is how the weights were held while an
    adapter was trained and ``precision`` the type that training loaded the others in,
    ``resumable`` whether optimizer state lies beside them, and the hashes are those of the
    tokenizer and the chat template. An adapter's count is of its own tensors.
    Raises :class:`~stages.base.StageError` for a folder without a checkpoint, and for files that
    are damaged so that they cannot tell.
    """
    import hashlib

    kind = layout(path)
    config = read_json_if_there(path / "config.json")
    tensors = _tensors(path, kind, config)
    chat = template(path)
    return {
        "layout": kind,
        "architecture": _architecture(path / "config.json", config),
        "model_type": config.get("model_type"),
        "parameters": sum(tensor.numel for tensor in tensors.values()),
        "dtypes": _dtypes(tensors),
        "bytes": sum(f.stat().st_size for f in path.rglob("*") if f.is_file()),
        "vocabulary_rows": config.get("vocab_size"),
        "tied": _tied(config, tensors if kind == "safetensors" else None),
        "adapter": _adapter(path),
        "quantization": quantization(config),
        "precision": config.get("dtype") or config.get("torch_dtype"),
        "resumable": resumable(path),
        "tokenizer_sha256": tokenizer_sha256(path),
        "template_sha256": hashlib.sha256(chat.encode()).hexdigest() if chat else None,
        "stop_ids": stop_ids(path),
    }


def quantization(config: Mapping[str, Any]) -> str | None:
    """``nf4``, ``fp4``, ``int8`` or the method's name; ``None`` for plain weights."""
    settings = expect(Path("config.json"), config, "quantization_config", dict)
    if not settings:
        return None
    if settings.get("load_in_4bit"):
        return settings.get("bnb_4bit_quant_type", "fp4")
    return "int8" if settings.get("load_in_8bit") else settings.get("quant_method", "unknown")


def resumable(path: Path) -> bool:
    """Whether a trainer can go on from here: its state and an optimizer's lie in the folder."""
    signs = ("optimizer.pt", "optimizer.bin", "optimizer_0", "*/*_optim_states.pt")
    there = any(any(path.glob(sign)) for sign in signs)
    return there and (path / "trainer_state.json").is_file()


def _tensors(path: Path, kind: Layout, config: Mapping[str, Any]) -> Mapping[str, Entry | Spec]:
    """What is there of each tensor that counts. Safetensors tell it without torch, which takes
    seconds to load; shards may also hold the base of an adapter, and both ends of a tied weight.
    """
    if kind == "safetensors":
        return read_headers(path)
    adapter = path / "adapter_model.safetensors"
    if kind == "adapter" and adapter.is_file():
        return read_header(adapter)
    from stages.checkpoint.readers import open_weights

    specs = open_weights(path).specs
    if is_adapter(path):
        return {name: spec for name, spec in specs.items() if not isinstance(meaning(name), Plain)}
    if config.get("tie_word_embeddings") is True:
        return {name: spec for name, spec in specs.items() if not name.endswith(_HEADS)}
    return specs


def _architecture(file: Path, config: Mapping[str, Any]) -> str | None:
    return next(iter(expect(file, config, "architectures", list) or []), None)


def _dtypes(tensors: Mapping[str, Entry | Spec]) -> dict[str, int]:
    counts: Counter[str] = Counter()
    for tensor in tensors.values():
        counts[tensor.dtype] += tensor.numel
    return dict(sorted(counts.items()))


def _tied(config: Mapping[str, Any], tensors: Iterable[str] | None) -> bool | None:
    """A config may leave its default out; then a whole model without a head is a tied one. Shards
    may hold both ends of a tied one."""
    if isinstance(said := config.get("tie_word_embeddings"), bool):
        return said
    if tensors is None or not config:
        return None
    return not any(name.endswith(_HEADS) for name in tensors)


def _adapter(path: Path) -> dict[str, Any] | None:
    file = path / "adapter_config.json"
    config = read_json_if_there(file)
    if not config:
        return None
    return {
        "base": config.get("base_model_name_or_path"),
        "base_fingerprint": noted_base(path),
        "rank": config.get("r"),
        "alpha": config.get("lora_alpha"),
        "dora": bool(config.get("use_dora")),
        "rank_stabilised": bool(config.get("use_rslora")),
        "saved_whole": sorted(expect(file, config, "modules_to_save", list) or [], key=str),
    }
