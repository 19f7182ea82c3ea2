"""Reads DeepSpeed's ZeRO checkpoints: float32 master weights cut over ranks, stages 1, 2 and 3."""

import math
import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from stages.base import StageError
from stages.checkpoint.garbled import told_of
from stages.checkpoint.pickles import Stored, of_stored, read_pickle
from stages.checkpoint.runs import Laid, Run, itemsize, of_runs, window
from stages.checkpoint.shards import member
from stages.checkpoint.weights import Spec, Weights

Pieces = Mapping[str, Laid]
"""Name -> what it is, and the runs that make it up in order. What is over at the end is padding."""

WHOLE_MODEL = "mp_rank_00_model_states.pt"
FIRST_MODEL = "zero_pp_rank_0_mp_rank_00_model_states.pt"
_RANK = re.compile(r"zero_pp_rank_(\d+)_mp_rank_(\d+)_")


def read_zero(path: Path) -> Weights:
    """The master weights in the DeepSpeed checkpoint that ``path/latest`` names.

    The format is that of ``deepspeed.utils.zero_to_fp32`` (0.19), without its two costs: nothing
    that the files name is run (DeepSpeed's own objects become inert stand-ins), and values are
    read where they lie, so that a read takes the memory of its rows. An alias of a tied weight is
    left out, and so are frozen parameters if the save excluded them. Raises :class:`StageError`
    when shards are missing, or are of several saves.
    """
    folder = _tagged(path)
    with _told_of(folder):
        return of_runs(_pieces(folder))


@dataclass(frozen=True)
class Shards:
    """What the files of one save hold."""

    folder: Path
    stage: int
    models: Sequence[Mapping[str, Any]]
    """Of each model file, which stage 3 writes for each rank."""

    optimizers: Sequence[Mapping[str, Any]]
    """Of each rank."""

    @property
    def inner(self) -> Sequence[Mapping[str, Any]]:
        """The state dict of each rank's own optimizer."""
        key = "optimizer_state_dict" if self.stage == 3 else "base_optimizer_state"
        return [rank[key] for rank in self.optimizers]


@dataclass(frozen=True)
class Trained:
    """Everything that ZeRO's optimizer knows, whole."""

    folder: Path
    states: Mapping[str, Weights]
    """``fp32``, the master weights, and each moment (``exp_avg``, ``exp_avg_sq``) of all trained
    parameters."""

    step: Any
    groups: Sequence[Mapping[str, Any]]
    """The settings of each parameter group."""


def read_trained(path: Path) -> Trained:
    """The optimizer in the DeepSpeed checkpoint that ``path/latest`` names, read where it lies.

    Raises :class:`StageError` when shards are missing or are of several saves, and for an optimizer
    that keeps anything but Adam's moments.
    """
    folder = _tagged(path)
    with _told_of(folder):
        shards = _shards(folder)
        first = shards.inner[0]["state"][0]
        moments = sorted(first.keys() - {"step"})
        if moments != ["exp_avg", "exp_avg_sq"] or "step" not in first:
            kept = ", ".join(sorted(first)) or "nothing"
            raise StageError(f"{folder}: its optimizer keeps {kept}, and only Adam's can be recut")
        states = {key: of_runs(_trained(shards, key)) for key in ("fp32", *moments)}
        groups = [
            {key: value for key, value in group.items() if key != "params"}
            for group in shards.inner[0]["param_groups"]
        ]
        return Trained(folder, states, _value(first["step"]), groups)


def model_file(folder: Path) -> Path:
    """The first rank's model states in the folder of a step, under whatever stage."""
    whole = folder / WHOLE_MODEL
    return whole if whole.is_file() else folder / FIRST_MODEL


def _shards(folder: Path) -> Shards:
    optimizers = [read_pickle(file)["optimizer_state_dict"] for file in _optimizer_files(folder)]
    stage, world = int(optimizers[0]["zero_stage"]), _world_size(optimizers[0])
    if world != len(optimizers):
        raise StageError(f"{folder}: {len(optimizers)} optimizer shards of {world} ranks are there")
    models = [read_pickle(file) for file in _model_files(folder, stage, world)]
    shards = Shards(folder, stage, models, optimizers)
    _check_one_save(shards)
    return shards


def _check_one_save(shards: Shards) -> None:
    """All ranks have done the same steps when they save. Values say nothing of the sort: shards of
    two saves fit together as well as those of one."""
    key = "optimizer_state_dict" if shards.stage == 3 else "base_optimizer_state"
    counts = (
        [model.get("global_steps") for model in shards.models],
        [_steps(rank.get(key)) for rank in shards.optimizers],
    )
    for ranks in counts:
        known = [(rank, count) for rank, count in enumerate(ranks) if count is not None]
        for rank, count in known:
            if count != known[0][1]:
                raise StageError(
                    f"{shards.folder}: its shards are of several saves: rank {known[0][0]}'s is of "
                    f"step {known[0][1]}, rank {rank}'s of {count}; take those of one"
                )


def _steps(inner: Any) -> int | None:
    """How many steps an optimizer has done, if it counts them."""
    states = inner.get("state") if isinstance(inner, dict) else None
    counts = [int(_value(s["step"])) for s in (states or {}).values() if "step" in s]
    return max(counts, default=None)


def _value(number: Any) -> Any:
    """A number that may have been saved as a tensor, which is then read."""
    return of_stored({"": number}).read("") if isinstance(number, Stored) else number


@contextmanager
def _told_of(folder: Path) -> Iterator[None]:
    """What the files of ``folder`` lack, or have oddly, as a :class:`StageError`."""
    with told_of(folder):
        try:
            yield
        except KeyError as missing:
            raise StageError(f"{folder}: its files have no {missing}, so are not ZeRO's") from None


def _pieces(folder: Path) -> Pieces:
    shards = _shards(folder)
    models = shards.models
    rest = _rest_cut(models) if shards.stage == 3 else _rest_whole(models[0])
    aliases = models[0]["shared_params"]
    return {n: p for n, p in {**rest, **_trained(shards, "fp32")}.items() if n not in aliases}


def _trained(shards: Shards, key: str) -> Pieces:
    """``key`` of every trained parameter: ``fp32``, or a moment, which is laid out alike."""
    if key != "fp32":
        flat = [[rank["state"][n][key] for n in sorted(rank["state"])] for rank in shards.inner]
    elif shards.stage == 3:
        flat = [rank["fp32_flat_groups"] for rank in shards.optimizers]
    else:
        flat = [rank["single_partition_of_fp32_groups"] for rank in shards.optimizers]
    cut = _trained_cut if shards.stage == 3 else _trained_joined
    return cut(shards, flat)


def _trained_joined(shards: Shards, flat: Sequence[Sequence[Stored]]) -> Pieces:
    """Stages 1 and 2: each group is one flat vector, cut over the ranks into equal parts."""
    pieces: dict[str, Any] = {}
    paddings = shards.optimizers[0].get("param_alignment_paddings")
    for group, shapes in enumerate(shards.models[0]["param_shapes"]):
        chunks = [rank[group] for rank in flat]
        offset = 0
        for number, (name, shape) in enumerate(shapes.items()):
            pieces[name] = _cut_out(chunks, shape, offset)
            offset += math.prod(shape) + (paddings[group][number] if paddings else 0)
        there = sum(chunk.run.numel for chunk in chunks)
        _check_used(shards.folder, offset, there, slack=2 * len(flat))
    return pieces


def _trained_cut(shards: Shards, ranks: Sequence[Sequence[Stored]]) -> Pieces:
    """Stage 3: each parameter is cut over the ranks, and a rank's parts follow one another."""
    pieces: dict[str, Any] = {}
    folder, model = shards.folder, shards.models[0]
    offset = 0
    for shapes in model["param_shapes"]:
        for name, shape in shapes.items():
            part = math.ceil(math.prod(shape) / len(ranks))
            runs = tuple(run for chunks in ranks for run in _runs(chunks, offset, part))
            pieces[name] = Spec(tuple(shape), ranks[0][0].dtype), runs
            offset += part
    _check_used(folder, offset, sum(chunk.run.numel for chunk in ranks[0]), slack=0)
    return pieces


def _rest_whole(model: Mapping[str, Any]) -> Pieces:
    """Stages 1 and 2: rank 0's state dict is whole, and right for what is not trained: buffers,
    and frozen parameters, of which stage 1 keeps no fragments (and zero_to_fp32 loses them).
    """
    module = model["module"] or {}
    return {name: (t.spec, (t.run,)) for name, t in module.items() if isinstance(t, Stored)}


def _rest_cut(models: Sequence[Mapping[str, Any]]) -> Pieces:
    """Stage 3: buffers are whole, frozen parameters are cut like trained ones."""
    shapes = models[0].get("frozen_param_shapes") or {}
    parts = [model["frozen_param_fragments"] for model in models]
    frozen = {
        n: (Spec(tuple(shape), parts[0][n].dtype), tuple(part[n].run for part in parts))
        for n, shape in shapes.items()
    }
    whole = _rest_whole(models[0])
    return frozen | {name: whole[name] for name in models[0]["buffer_names"] if name in whole}


def _cut_out(chunks: Sequence[Stored], shape: Iterable[int], offset: int) -> Laid:
    spec = Spec(tuple(shape), chunks[0].dtype)
    return spec, _runs(chunks, offset, spec.numel)


def _runs(chunks: Sequence[Stored], start: int, length: int) -> tuple[Run, ...]:
    """Elements ``start`` to ``start + length`` of flat ``chunks`` laid end to end."""
    size = itemsize(chunks[0].dtype)
    return tuple(window((c.run for c in chunks), start, start + length, size))


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
    with told_of(latest):
        folder = member(path, latest.read_text().strip(), place=latest)
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
        return [folder / WHOLE_MODEL]
    return [folder / f"zero_pp_rank_{r}_mp_rank_00_model_states.pt" for r in range(world)]


def _rank(file: Path) -> int:
    found = _RANK.search(file.name)
    if not found or int(found[2]):
        raise StageError(f"{file}: shards of tensor-parallel training cannot be converted")
    return int(found[1])


def _world_size(optimizer: Mapping[str, Any]) -> int:
    count = optimizer["partition_count"]
    return max(count) if isinstance(count, list) else int(count)
