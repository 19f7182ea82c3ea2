"""What a checkpoint folder is, told without loading a tensor."""

from collections import Counter
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from stages.checkpoint.conversation import stop_ids, template, tokenizer_sha256
from stages.checkpoint.headers import Entry, read_header, read_headers
from stages.checkpoint.json_files import read_json_if_there
from stages.checkpoint.layouts import Layout, layout
from stages.checkpoint.lineage import noted_base


def describe(path: Path) -> dict[str, Any]:
    """Facts for the manifest and the report, all of them JSON values.

    ``parameters`` and ``dtypes`` (values of each type) are read from safetensors headers and are
    ``None`` for pickled and sharded layouts, ``vocabulary_rows`` is the config's,
    ``quantization`` is how the weights were held while an adapter was trained and ``precision``
    the type that training loaded the others in, ``resumable`` whether optimizer state lies beside
    them, and the hashes are those of the tokenizer and the chat template. An adapter's count is of
    its own tensors.
    Raises :class:`~stages.base.StageError` for a folder without a checkpoint.
    """
    import hashlib

    kind = layout(path)
    config = read_json_if_there(path / "config.json")
    entries = _entries(path, kind)
    chat = template(path)
    return {
        "layout": kind,
        "architecture": (config.get("architectures") or [None])[0],
        "model_type": config.get("model_type"),
        "parameters": None if entries is None else sum(e.numel for e in entries.values()),
        "dtypes": None if entries is None else _dtypes(entries),
        "bytes": sum(f.stat().st_size for f in path.rglob("*") if f.is_file()),
        "vocabulary_rows": config.get("vocab_size"),
        "tied": _tied(config, entries),
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
    settings = config.get("quantization_config")
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


def _entries(path: Path, kind: Layout) -> Mapping[str, Entry] | None:
    if kind == "safetensors":
        return read_headers(path)
    adapter = path / "adapter_model.safetensors"
    return read_header(adapter) if kind == "adapter" and adapter.is_file() else None


def _dtypes(entries: Mapping[str, Entry]) -> dict[str, int]:
    counts: Counter[str] = Counter()
    for entry in entries.values():
        counts[entry.dtype] += entry.numel
    return dict(sorted(counts.items()))


def _tied(config: Mapping[str, Any], entries: Mapping[str, Entry] | None) -> bool | None:
    """A config may leave its default out; then a whole model without a head is a tied one."""
    if isinstance(said := config.get("tie_word_embeddings"), bool):
        return said
    if entries is None or not config:
        return None
    return not any(name.endswith(("lm_head.weight", "embed_out.weight")) for name in entries)


def _adapter(path: Path) -> dict[str, Any] | None:
    config = read_json_if_there(path / "adapter_config.json")
    if not config:
        return None
    return {
        "base": config.get("base_model_name_or_path"),
        "base_fingerprint": noted_base(path),
        "rank": config.get("r"),
        "alpha": config.get("lora_alpha"),
        "dora": bool(config.get("use_dora")),
        "rank_stabilised": bool(config.get("use_rslora")),
        "saved_whole": sorted(config.get("modules_to_save") or []),
    }
