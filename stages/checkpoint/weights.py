"""A model's tensors by name, read some rows at a time whatever layout they lie in."""

from __future__ import annotations

import math
import os
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Mapping
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, TypeVar

if TYPE_CHECKING:
    from torch import Tensor

BLOCK = 1 << 20
"""Values in a block of the weights that stream by: 4 MB of them in float32."""


@dataclass(frozen=True)
class Spec:
    """What a tensor is, known before it is read."""

    shape: tuple[int, ...]
    dtype: str
    """Torch's name of it, such as ``bfloat16``."""

    @property
    def numel(self) -> int:
        return math.prod(self.shape)

    @property
    def num_rows(self) -> int:
        """Length of the first dimension; a scalar is one row."""
        return self.shape[0] if self.shape else 1

    @property
    def row_shape(self) -> tuple[int, ...]:
        return self.shape[1:]

    @property
    def row_numel(self) -> int:
        return math.prod(self.row_shape)

    def cuts(self) -> Iterator[tuple[int, int]]:
        """First and last row of each block."""
        step = max(1, BLOCK // max(1, self.row_numel))
        for first in range(0, self.num_rows, step):
            yield first, min(first + step, self.num_rows)


@dataclass(frozen=True)
class Weights:
    """Named tensors on the CPU. Only what is read takes memory."""

    specs: Mapping[str, Spec]
    rows: Callable[[str, int, int], Tensor]
    """Rows ``first`` to ``last`` of a tensor, so of shape (last - first, ...). A scalar is one row
    of shape (1,)."""

    def read(self, name: str) -> Tensor:
        """A whole tensor."""
        spec = self.specs[name]
        return self.rows(name, 0, spec.num_rows).reshape(spec.shape)

    def blocks(self, name: str) -> Iterator[Tensor]:
        """A tensor's rows in order, :data:`BLOCK` values at a time or one row if that is more."""
        return (self.rows(name, first, last) for first, last in self.specs[name].cuts())

    def renamed(self, names: Mapping[str, str]) -> Weights:
        """The tensors in ``names`` alone, which maps each new name to the one it has here."""
        return Weights(
            {new: self.specs[old] for new, old in names.items()},
            lambda name, first, last: self.rows(names[name], first, last),
        )

    def without(self, names: Iterable[str]) -> Weights:
        """All tensors but ``names``."""
        gone = set(names)
        return Weights({n: s for n, s in self.specs.items() if n not in gone}, self.rows)


def of_tensors(tensors: Mapping[str, Tensor]) -> Weights:
    """Tensors that are in memory already."""

    def rows(name: str, first: int, last: int) -> Tensor:
        tensor = tensors[name]
        return (tensor if tensor.ndim else tensor.reshape(1))[first:last]

    return Weights({name: spec_of(tensor) for name, tensor in tensors.items()}, rows)


def spec_of(tensor: Tensor) -> Spec:
    return Spec(tuple(tensor.shape), str(tensor.dtype).removeprefix("torch."))


def equal(one: Weights, name: str, other: Weights, other_name: str) -> bool:
    """Whether two tensors have the same shape and values, compared block by block."""
    import torch

    if one.specs[name].shape != other.specs[other_name].shape:
        return False
    pairs = zip(one.blocks(name), other.blocks(other_name), strict=True)
    return all(torch.equal(a, b.to(a.dtype)) for a, b in pairs)


R = TypeVar("R")


def ahead(work: Callable[..., R], tasks: Iterable[tuple[Any, ...]]) -> Iterator[R]:
    """The results of ``work`` on each task, in order, worked out by all cores a few tasks ahead.

    A thread takes a task to itself: torch's own threads would wait for one another at every
    operation, and none of them would read files.
    """
    import torch

    num, before = os.cpu_count() or 1, torch.get_num_threads()
    waiting: deque[Future[R]] = deque()
    with ThreadPoolExecutor(num, initializer=torch.set_num_threads, initargs=(1,)) as threads:
        try:
            for task in tasks:
                waiting.append(threads.submit(work, *task))
                if len(waiting) > 2 * num:
                    yield waiting.popleft().result()
            while waiting:
                yield waiting.popleft().result()
        finally:
            for future in waiting:
                future.cancel()
    torch.set_num_threads(before)


def num_not_finite(weights: Weights, name: str) -> int:
    """How many values of a tensor are NaN or infinite."""
    return sum(map(_num_not_finite, weights.blocks(name)))


def all_not_finite(weights: Weights, names: Iterable[str]) -> dict[str, int]:
    """The same of several tensors, by all cores."""
    counts = dict.fromkeys(names, 0)
    tasks = [(name, *cut) for name in counts for cut in weights.specs[name].cuts()]

    def count(name: str, first: int, last: int) -> tuple[str, int]:
        return name, _num_not_finite(weights.rows(name, first, last))

    for name, number in ahead(count, tasks):
        counts[name] += number
    return counts


def _num_not_finite(block: Tensor) -> int:
    """A sum is finite only if all its terms are, and is ten times as quick as a look at each."""
    import torch

    if not block.is_floating_point():
        return 0
    if block.itemsize == 1:  # torch can neither add nor test 8-bit floats
        block = block.to(torch.float32)
    wide = torch.float32 if block.dtype == torch.float16 else None
    if torch.isfinite(block.sum(dtype=wide)):
        return 0
    return int((~torch.isfinite(block)).sum())
