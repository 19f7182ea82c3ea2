"""Writes weights as safetensors in one data type, sharded, some rows in memory at a time."""

from __future__ import annotations

import json
import os
import re
from collections.abc import Mapping
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import TYPE_CHECKING

from stages.checkpoint.headers import INDEX, SAFETENSORS_NAMES
from stages.checkpoint.runs import size
from stages.checkpoint.weights import Spec, Weights, ahead

if TYPE_CHECKING:
    from torch import Tensor

UNITS = {"KB": 10**3, "MB": 10**6, "GB": 10**9}
SYNC = 1 << 27
"""Bytes after which the disk is told to begin."""

SIZE = re.compile(r"(\d+)(KB|MB|GB)")


def write(weights: Weights, folder: Path, *, dtype: str, max_shard_size: str) -> None:
    """Write ``weights`` to ``folder`` under the file names of ``save_pretrained``.

    Floating-point tensors become ``dtype``; others keep theirs. ``max_shard_size`` is like
    ``5GB``; a larger tensor gets a file of its own.
    """
    specs = {name: Spec(s.shape, _target(s.dtype, dtype)) for name, s in weights.specs.items()}
    shards = split(specs, max_bytes=_bytes(max_shard_size))
    for file, names in shards.items():
        write_file(folder / file, weights, {name: specs[name] for name in names})
    if len(shards) > 1:
        index = {
            "metadata": {"total_size": sum(map(size, specs.values()))},
            "weight_map": {name: file for file, names in shards.items() for name in names},
        }
        (folder / INDEX).write_text(json.dumps(index, indent=2, sort_keys=True) + "\n")


def split(specs: Mapping[str, Spec], *, max_bytes: int) -> dict[str, list[str]]:
    """File name -> tensors, in their order, as ``save_pretrained`` splits and names them."""
    from huggingface_hub import split_state_dict_into_shards_factory

    plan = split_state_dict_into_shards_factory(
        dict(specs),
        get_storage_size=size,
        filename_pattern="model{suffix}.safetensors",
        max_shard_size=max_bytes,
    )
    return plan.filename_to_tensors


def write_file(file: Path, weights: Weights, specs: Mapping[str, Spec]) -> None:
    """One safetensors file (https://github.com/huggingface/safetensors#format) holding ``specs``.

    Written by hand because the library takes all tensors of a file at once. All cores read and
    merge what comes next while the disk takes what is written.
    """
    tasks = [(name, *cut) for name, spec in specs.items() for cut in spec.cuts()]

    def block(name: str, first: int, last: int) -> memoryview:
        return _bytes_of(weights.rows(name, first, last), specs[name])

    with file.open("wb") as stream, ThreadPoolExecutor(1) as syncing:
        written = stream.write(_header(specs))
        synced, pending = 0, None
        for part in ahead(block, tasks):
            written += stream.write(part)
            if written - synced > SYNC and (pending is None or pending.done()):
                pending, synced = syncing.submit(os.fsync, stream.fileno()), written
    meant = len(_header(specs)) + sum(map(size, specs.values()))
    assert written == meant, (file, written, meant)


def _header(specs: Mapping[str, Spec]) -> bytes:
    entries: dict[str, object] = {"__metadata__": {"format": "pt"}}
    offset = 0
    for name, spec in specs.items():
        end = offset + size(spec)
        entries[name] = {
            "dtype": SAFETENSORS_NAMES[spec.dtype],
            "shape": spec.shape,
            "data_offsets": [offset, end],
        }
        offset = end
    text = json.dumps(entries, separators=(",", ":")).encode()
    text += b" " * (-len(text) % 8)  # so that the tensors start aligned
    return len(text).to_bytes(8, "little") + text


def _bytes_of(tensor: Tensor, spec: Spec) -> memoryview:
    import torch

    cast = tensor.to(getattr(torch, spec.dtype)).contiguous()
    return cast.reshape(-1).view(torch.uint8).numpy().data


def _target(dtype: str, asked: str) -> str:
    return asked if dtype.startswith(("float", "bfloat")) else dtype


def _bytes(text: str) -> int:
    found = SIZE.fullmatch(text)
    assert found, text
    return int(found[1]) * UNITS[found[2]]


def sync(folder: Path) -> None:
    """Make the files of ``folder`` and their names survive a power cut."""
    for path in (*folder.iterdir(), folder):
        handle = os.open(path, os.O_RDONLY)
        try:
            os.fsync(handle)
        finally:
            os.close(handle)
