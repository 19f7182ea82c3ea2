"""Reads the file that each rank of an FSDP2 model wrote for itself, without DCP."""

import math
import re
from collections.abc import Mapping, Sequence
from pathlib import Path

from stages.base import StageError
from stages.checkpoint.garbled import told_of
from stages.checkpoint.pickles import Shard, Stored, read_pickle
from stages.checkpoint.runs import Laid, of_runs
from stages.checkpoint.weights import Spec, Weights

PATTERN = "pytorch_model_fsdp*_rank*.bin"
_RANK = re.compile(r"_rank(\d+)\.bin$")


def read_rank_files(path: Path) -> Weights:
    """The model in ``path/pytorch_model_fsdp_0_rank*.bin``, which accelerate writes with
    ``use_dcp=False``. Raises :class:`StageError` when a rank's file is missing.
    """
    found = {int(m[1]): file for file in path.glob(PATTERN) if (m := _RANK.search(file.name))}
    ranks: list[Mapping[str, Shard | Stored]] = []
    for rank in range(max(found) + 1):
        if rank not in found:
            raise StageError(f"{path}: the file of rank {rank} is missing, of {max(found) + 1}")
        ranks.append(_state_dict(found[rank]))
    names = [name for name, part in ranks[0].items() if isinstance(part, (Shard, Stored))]
    if not names:
        raise StageError(f"{found[0]}: holds no tensors")
    with told_of(path):
        return of_runs({name: _laid(path, name, ranks) for name in names})


def _state_dict(file: Path) -> Mapping[str, Shard | Stored]:
    value = read_pickle(file)
    if not isinstance(value, dict):
        raise StageError(f"{file}: not a state dict, a mapping of names to tensors was expected")
    return value


def _laid(path: Path, name: str, ranks: Sequence[Mapping[str, Shard | Stored]]) -> Laid:
    first = ranks[0][name]
    if isinstance(first, Stored):
        return first.spec, (first.run,)
    cuts = [axis for axis, cut in enumerate(first.cut) if cut is not None]
    if not cuts:
        return first.local.spec, (first.local.run,)
    if len(cuts) > 1 or first.cut[cuts[0]] != 0 or cuts[0] != len(first.mesh) - 1:
        raise StageError(f"{path}: {name} is cut as {first.cut}, and only its rows may be")
    parts = [rank.get(name) for rank in ranks[: first.mesh[-1]]]
    runs = tuple(part.local.run for part in parts if isinstance(part, Shard))
    there, meant = sum(run.numel for run in runs), math.prod(first.shape)
    if there != meant or len(ranks) < math.prod(first.mesh):
        raise StageError(
            f"{path}: the {len(ranks)} files hold {there} values of {name}, which has {meant}; "
            f"{math.prod(first.mesh)} ranks wrote it"
        )
    return Spec(first.shape, first.local.dtype), runs
