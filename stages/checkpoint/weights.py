"""A model's tensors by name, read one at a time whatever layout they lie in."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from stages.base import StageError

if TYPE_CHECKING:
    from torch import Tensor


@dataclass(frozen=True)
class Spec:
    """What a tensor is, known before it is read."""

    shape: tuple[int, ...]
    dtype: str
    """Torch's name of it, such as ``bfloat16``."""

    @property
    def numel(self) -> int:
        return math.prod(self.shape)


@dataclass(frozen=True)
class Weights:
    """Named tensors on the CPU. Only what :attr:`read` returns takes memory."""

    specs: Mapping[str, Spec]
    read: Callable[[str], Tensor]

    def renamed(self, names: Mapping[str, str]) -> Weights:
        """The tensors in ``names`` alone, which maps each new name to the one it has here."""
        return Weights(
            {new: self.specs[old] for new, old in names.items()},
            lambda name: self.read(names[name]),
        )

    def without(self, names: Iterable[str]) -> Weights:
        """All tensors but ``names``."""
        gone = set(names)
        return Weights({n: s for n, s in self.specs.items() if n not in gone}, self.read)


def of_tensors(tensors: Mapping[str, Tensor]) -> Weights:
    """Tensors that are in memory, or mapped into it, already."""
    return Weights(
        {name: spec_of(tensor) for name, tensor in tensors.items()}, lambda name: tensors[name]
    )


def spec_of(tensor: Tensor) -> Spec:
    return Spec(tuple(tensor.shape), str(tensor.dtype).removeprefix("torch."))


def load_pickle(file: Path) -> object:
    """What ``torch.save`` wrote, tensors and plain containers only, mapped and not copied.

    Raises :class:`StageError` for a file that is cut off or that would run code.
    """
    import pickle

    import torch

    try:
        return torch.load(file, map_location="cpu", mmap=True, weights_only=True)
    except FileNotFoundError:
        raise StageError(f"{file}: missing") from None
    except pickle.UnpicklingError as error:
        reason = str(error).split(". ")[0]
        raise StageError(f"{file}: refused, it holds more than tensors ({reason})") from None
    except (RuntimeError, OSError, EOFError) as error:
        raise StageError(f"{file}: cannot be read, perhaps cut off ({error})") from None
