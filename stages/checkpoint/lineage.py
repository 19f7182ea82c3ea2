"""Which weights an adapter was trained on: a fingerprint that travels beside it."""

import hashlib
import json
from pathlib import Path
from typing import TYPE_CHECKING

from stages.base import StageError
from stages.checkpoint.json_files import read_json_if_there
from stages.checkpoint.readers import open_weights
from stages.checkpoint.weights import BLOCK, Weights

if TYPE_CHECKING:
    from torch import Tensor

NAME = "base.json"
_ROWS, _VALUES = 16, 64


def fingerprint(path: Path) -> str:
    """The first 16 hex digits of a SHA-256 of each tensor's name, type, shape and sampled values.

    About a thousand values of each are read and no more, which is quick for any size. It tells two
    trainings of a model apart, which move values everywhere, and not a change of single rows. A
    copy in another type is rounded, and so other weights.
    """
    import torch

    weights, whole = open_weights(path), hashlib.sha256()
    for name, spec in sorted(weights.specs.items()):
        whole.update(f"{name} {spec.dtype} {spec.shape}\0".encode())
        if spec.numel:
            values = sampled(weights, name).contiguous().view(torch.uint8)
            whole.update(values.numpy().tobytes())
    return whole.hexdigest()[:16]


def sampled(weights: Weights, name: str) -> "Tensor":
    """At most 64 values of each of 16 rows, spread evenly over a tensor that is not empty; of
    fewer rows where one is very long, and all values of a vector."""
    import torch

    spec = weights.specs[name]
    if len(spec.shape) < 2:
        return weights.read(name).reshape(-1)
    rows = max(2, min(_ROWS, BLOCK // spec.row_numel))
    flat = [weights.rows(name, row, row + 1).reshape(-1) for row in _spread(spec.num_rows, rows)]
    return torch.cat([values[_spread(len(values), _VALUES)] for values in flat])


def _spread(length: int, num: int) -> list[int]:
    """At most ``num`` indices from the first to the last, evenly apart."""
    num = min(length, num)
    return [round(n * (length - 1) / max(1, num - 1)) for n in range(num)]


def note_base(adapter: Path) -> None:
    """Write the fingerprint of an adapter's base beside it, if the base is a folder here."""
    config = read_json_if_there(adapter / "adapter_config.json")
    base = Path(config.get("base_model_name_or_path") or "absent")
    if base.is_dir():
        text = json.dumps({"path": str(base), "fingerprint": fingerprint(base)}, indent=2)
        (adapter / NAME).write_text(text + "\n")


def noted_base(adapter: Path) -> str | None:
    """The fingerprint that :func:`note_base` left, or ``None``."""
    return read_json_if_there(adapter / NAME).get("fingerprint")


def check_base(adapter: Path, base: Path) -> None:
    """Raise :class:`StageError` if the adapter was trained on other weights than ``base`` holds."""
    said = noted_base(adapter)
    if said and said != (there := fingerprint(base)):
        raise StageError(
            f"{adapter}: was trained on weights {said}, and {base} holds {there}: merge it into "
            "the base that the training stage was given"
        )
