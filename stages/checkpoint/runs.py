"""Tensors that lie in files as runs of values, which are read when asked for and not mapped."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from io import FileIO
from pathlib import Path
from typing import TYPE_CHECKING

from stages.base import StageError
from stages.checkpoint.weights import Spec, Weights

if TYPE_CHECKING:
    from torch import Tensor


@dataclass(frozen=True)
class Run:
    """Consecutive values of one type in a file."""

    file: Path
    offset: int
    """Byte at which the first value starts."""

    numel: int


Laid = tuple[Spec, Sequence[Run]]
"""A tensor, and the runs that make it up in row-major order when laid end to end."""


def of_runs(laid: Mapping[str, Laid]) -> Weights:
    """Read and not mapped: a mapped file stays in the resident memory of whoever walks it."""

    def rows(name: str, first: int, last: int) -> Tensor:
        spec, runs = laid[name]
        flat = read_runs(runs, spec.dtype, first * spec.row_numel, last * spec.row_numel)
        return flat.reshape(last - first, *spec.row_shape)

    return Weights({name: spec for name, (spec, _) in laid.items()}, rows)


def read_runs(runs: Iterable[Run], dtype: str, start: int, stop: int) -> Tensor:
    """Values ``start`` to ``stop`` of ``runs`` laid end to end, as one flat tensor.

    Raises :class:`StageError` when a file is cut off.
    """
    import torch

    flat = torch.empty(stop - start, dtype=getattr(torch, dtype))
    view = flat.view(torch.uint8).numpy().data
    for run in window(runs, start, stop, flat.itemsize):
        size = run.numel * flat.itemsize
        with run.file.open("rb", buffering=0) as stream:
            stream.seek(run.offset)
            _fill(stream, view[:size], run.file)
        view = view[size:]
    if len(view):
        raise StageError(f"a tensor of {stop} values or more has {len(view)} bytes too few")
    return flat


def window(runs: Iterable[Run], start: int, stop: int, itemsize: int) -> Iterable[Run]:
    """The parts of ``runs`` that hold values ``start`` to ``stop``."""
    for run in runs:
        first, last = max(start, 0), min(stop, run.numel)
        if first < last:
            yield Run(run.file, run.offset + first * itemsize, last - first)
        start, stop = start - run.numel, stop - run.numel


def itemsize(dtype: str) -> int:
    """Bytes of one value of torch's ``dtype``."""
    import torch

    return getattr(torch, dtype).itemsize


def size(spec: Spec) -> int:
    """Bytes that a tensor takes."""
    return math.prod(spec.shape) * itemsize(spec.dtype)


def _fill(stream: FileIO, view: memoryview, file: Path) -> None:
    done = 0
    while done < len(view):
        count = stream.readinto(view[done:])
        if not count:
            raise StageError(f"{file}: cut off, {len(view) - done} bytes are missing")
        done += count
