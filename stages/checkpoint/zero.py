"""Reads DeepSpeed's ZeRO checkpoints: float32 master weights cut over ranks, stages 1, 2 and 3."""

import math
import pickle
import re
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from stages.base import StageError
from stages.checkpoint.weights import Spec, Weights, spec_of

if TYPE_CHECKING:
    from torch import Tensor

Pieces = Mapping[str, tuple[tuple[int, ...], "tuple[Tensor, ...]"]]
"""Name -> shape, and the flat pieces that make it up in order. What is over at the end is
padding."""

_RANK = re.compile(r"zero_pp_rank_(\d+)_mp_rank_(\d+)_")


def read_zero(path: Path) -> Weights:
    """The master weights in the DeepSpeed checkpoint that ``path/latest`` names.

    The format is that of ``deepspeed.utils.zero_to_fp32`` (0.19), without its two costs: files are
    read with ``weights_only`` (DeepSpeed's own objects become inert stand-ins), and mapped, so that
    a read takes the memory of one tensor. An alias of a tied weight is left out, and so are
    frozen parameters if the save excluded them. Raises :class:`StageError` when shards are missing.
    """
    folder = _tagged(path)
    try:
        return _weights(_pieces(folder))
    except KeyError as missing:
        raise StageError(f"{folder}: its files have no {missing}, so are not ZeRO's") from None


def _pieces(folder: Path) -> Pieces:
    optimizers = [_load(file)["optimizer_state_dict"] for file in _optimizer_files(folder)]
    stage, world = int(optimizers[0]["zero_stage"]), _world_size(optimizers[0])
    if world != len(optimizers):
        raise StageError(f"{folder}: {len(optimizers)} optimizer shards of {world} ranks are there")
    models = [_load(file) for file in _model_files(folder, stage, world)]
    if stage == 3:
        rest, trained = _rest_cut(models), _trained_cut(folder, models[0], optimizers)
    else:
        rest, trained = _rest_whole(models[0]), _trained_joined(folder, models[0], optimizers)
    aliases = models[0]["shared_params"]
    return {n: piece for n, piece in {**rest, **trained}.items() if n not in aliases}


def _weights(pieces: Pieces) -> Weights:
    import torch

    def read(name: str) -> "Tensor":
        shape, parts = pieces[name]
        return torch.cat(parts)[: math.prod(shape)].view(shape)

    specs = {name: Spec(shape, spec_of(parts[0]).dtype) for name, (shape, parts) in pieces.items()}
    return Weights(specs, read)


def _trained_joined(
    folder: Path, model: Mapping[str, Any], optimizers: Sequence[Mapping[str, Any]]
) -> Pieces:
    """Stages 1 and 2: each group is one flat vector, cut over the ranks into equal parts."""
    pieces: dict[str, Any] = {}
    paddings = optimizers[0].get("param_alignment_paddings")
    for group, shapes in enumerate(model["param_shapes"]):
        chunks = [rank["single_partition_of_fp32_groups"][group] for rank in optimizers]
        offset = 0
        for number, (name, shape) in enumerate(shapes.items()):
            pieces[name] = tuple(shape), _window(chunks, offset, math.prod(shape))
            offset += math.prod(shape) + (paddings[group][number] if paddings else 0)
        _check_used(folder, offset, sum(c.numel() for c in chunks), slack=2 * len(optimizers))
    return pieces


def _trained_cut(
    folder: Path, model: Mapping[str, Any], optimizers: Sequence[Mapping[str, Any]]
) -> Pieces:
    """Stage 3: each parameter is cut over the ranks, and a rank's parts follow one another."""
    pieces: dict[str, Any] = {}
    ranks = [rank["fp32_flat_groups"] for rank in optimizers]
    offset = 0
    for shapes in model["param_shapes"]:
        for name, shape in shapes.items():
            part = math.ceil(math.prod(shape) / len(ranks))
            windows = (_window(chunks, offset, part) for chunks in ranks)
            pieces[name] = tuple(shape), tuple(piece for window in windows for piece in window)
            offset += part
    _check_used(folder, offset, sum(chunk.numel() for chunk in ranks[0]), slack=0)
    return pieces


def _rest_whole(model: Mapping[str, Any]) -> Pieces:
    """Stages 1 and 2: rank 0's state dict is whole, and right for what is not trained: buffers,
    and frozen parameters, of which stage 1 keeps no fragments (and zero_to_fp32 loses them).
    """
    return {name: (tuple(t.shape), (t.reshape(-1),)) for name, t in model["module"].items()}


def _rest_cut(models: Sequence[Mapping[str, Any]]) -> Pieces:
    """Stage 3: buffers are whole, frozen parameters are cut like trained ones."""
    shapes = models[0].get("frozen_param_shapes") or {}
    parts = [model["frozen_param_fragments"] for model in models]
    frozen = {n: (tuple(shape), tuple(part[n] for part in parts)) for n, shape in shapes.items()}
    whole = _rest_whole(models[0])
    return frozen | {name: whole[name] for name in models[0]["buffer_names"] if name in whole}


def _window(chunks: Sequence["Tensor"], start: int, length: int) -> "tuple[Tensor, ...]":
    """Elements ``start`` to ``start + length`` of flat ``chunks`` laid end to end, not copied."""
    pieces = []
    for chunk in chunks:
        first, last = max(start, 0), min(start + length, chunk.numel())
        if first < last:
            pieces.append(chunk[first:last])
        start -= chunk.numel()
    return tuple(pieces)


def _check_used(folder: Path, used: int, there: int, *, slack: int) -> None:
    if not 0 <= there - used <= slack:
        raise StageError(
            f"{folder}: its shards hold {there} values where the parameters need {used}; "
            "the checkpoint is incomplete, or mixed from two saves"
        )


def _tagged(path: Path) -> Path:
    latest = path / "latest"
    if not latest.is_file():
        raise StageError(f"{latest}: missing; it names the step whose shards are meant")
    folder = path / latest.read_text().strip()
    if not folder.is_dir():
        raise StageError(f"{latest}: names {folder.name!r}, and there is no such folder")
    return folder


def _optimizer_files(folder: Path) -> list[Path]:
    files = {_rank(file): file for file in folder.glob("*_optim_states.pt")}
    if not files:
        raise StageError(f"{folder}: no *_optim_states.pt, so no ZeRO shards")
    return [files[rank] for rank in sorted(files)]


def _model_files(folder: Path, stage: int, world: int) -> list[Path]:
    if stage < 3:
        return [folder / "mp_rank_00_model_states.pt"]
    return [folder / f"zero_pp_rank_{r}_mp_rank_00_model_states.pt" for r in range(world)]


def _rank(file: Path) -> int:
    found = _RANK.search(file.name)
    if not found or int(found[2]):
        raise StageError(f"{file}: shards of tensor-parallel training cannot be converted")
    return int(found[1])


def _world_size(optimizer: Mapping[str, Any]) -> int:
    count = optimizer["partition_count"]
    return max(count) if isinstance(count, list) else int(count)


class _Inert:
    """Stands for a DeepSpeed object that nobody needs, so that its code never runs."""

    def __init__(self, *args: Any, **kwargs: Any) -> None: ...

    def __setstate__(self, state: Any) -> None: ...


def _load(file: Path) -> dict[str, Any]:
    import torch

    try:
        named = torch.serialization.get_unsafe_globals_in_checkpoint(file)
        with torch.serialization.safe_globals(_stand_ins(file, named)):
            return torch.load(file, map_location="cpu", mmap=True, weights_only=True)
    except FileNotFoundError:
        raise StageError(f"{file}: missing") from None
    except (RuntimeError, OSError, EOFError, pickle.UnpicklingError) as error:
        raise StageError(f"{file}: cannot be read, perhaps cut off ({error})") from None


def _stand_ins(file: Path, named: Iterable[str]) -> list[Any]:
    """DeepSpeed's classes by inert ones, and its stage number by a plain one."""
    stand_ins = []
    for name in named:
        if not name.startswith("deepspeed."):
            raise StageError(f"{file}: refused, it names {name}, which is not DeepSpeed's")
        stand_ins.append((int if name.endswith(".ZeroStageEnum") else _Inert, name))
    return stand_ins
