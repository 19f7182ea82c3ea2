"""Which weights an adapter was trained on: a fingerprint that travels beside it."""

import hashlib
import json
from pathlib import Path

from stages.base import StageError
from stages.checkpoint.json_files import read_json_if_there
from stages.checkpoint.readers import open_weights

NAME = "base.json"
_SAMPLE = 64


def fingerprint(path: Path) -> str:
    """The first 16 hex digits of a SHA-256 of each tensor's name, type, shape and outer values.

    The first and the last 64 values of every tensor are read and no more, which is instant for any
    size, and tells any two trainings of a model apart.
    """
    import torch

    weights, whole = open_weights(path), hashlib.sha256()
    for name, spec in sorted(weights.specs.items()):
        whole.update(f"{name} {spec.dtype} {spec.shape}\0".encode())
        if not spec.numel:
            continue
        for row in (0, spec.num_rows - 1):
            values = weights.rows(name, row, row + 1).reshape(-1)
            values = values[-_SAMPLE:] if row else values[:_SAMPLE]
            whole.update(values.contiguous().view(torch.uint8).numpy().tobytes())
    return whole.hexdigest()[:16]


def note_base(adapter: Path) -> None:
    """Write the fingerprint of an adapter's base beside it, if the base is a folder here."""
    config = read_json_if_there(adapter / "adapter_config.json")
    base = Path(config.get("base_model_name_or_path") or "absent")
    if base.is_dir():
        text = json.dumps({"path": str(base), "weights": fingerprint(base)}, indent=2)
        (adapter / NAME).write_text(text + "\n")


def noted_base(adapter: Path) -> str | None:
    """The fingerprint that :func:`note_base` left, or ``None``."""
    return read_json_if_there(adapter / NAME).get("weights")


def check_base(adapter: Path, base: Path) -> None:
    """Raise :class:`StageError` if the adapter was trained on other weights than ``base`` holds."""
    said = noted_base(adapter)
    if said and said != (there := fingerprint(base)):
        raise StageError(
            f"{adapter}: was trained on weights {said}, and {base} holds {there}: merge it into "
            "the base that the training stage was given"
        )
