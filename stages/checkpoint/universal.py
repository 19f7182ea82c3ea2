"""Rewrites a ZeRO checkpoint as DeepSpeed's universal one, which any stage and ranks can load."""

import os
import shutil
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from stages.checkpoint import zero

LATEST = "latest_universal"
"""Beside ``latest``; DeepSpeed looks for the name of the folder here."""


def write_universal(path: Path) -> None:
    """Rewrite the save that ``path/latest`` names into ``path/universal_STEP``, one tensor in
    memory at a time; :data:`LATEST` is written last.

    The form is that of ``deepspeed.checkpoint.ds_to_universal`` (0.19), which is not used: it runs
    what pickles name, its copy of stages 1 and 2 cannot be loaded under stage 3 nor the other way
    about, and it leaves out the step that stages 1 and 2 need. Raises
    :class:`~stages.base.StageError` when shards are missing or hold another optimizer than Adam.
    """
    import torch

    remove_universal(path)
    trained = zero.read_trained(path)
    target = path / f"universal_{trained.folder.name}"
    for name in trained.states["fp32"].specs:
        place = target / "zero" / name
        place.mkdir(parents=True)
        for key, weights in trained.states.items():
            torch.save({"param": weights.read(name)}, place / f"{key}.pt")
        torch.save(trained.step, place / "step.pt")
    torch.save(_optimizer(trained), target / "zero" / "optimizer_state.pt")
    source = os.path.relpath(zero.model_file(trained.folder), target)
    for file in (zero.WHOLE_MODEL, zero.FIRST_MODEL):
        (target / file).symlink_to(source)  # counters and schedule; DeepSpeed takes no weights here
    partial = path / f"{LATEST}.partial"
    partial.write_text(target.name)
    partial.rename(path / LATEST)


def remove_universal(path: Path) -> None:
    """Remove what :func:`write_universal` made, or began to."""
    (path / LATEST).unlink(missing_ok=True)
    for folder in path.glob("universal_*"):
        shutil.rmtree(folder)


def _optimizer(trained: zero.Trained) -> dict[str, Any]:
    """What stages 1 and 2 read at the top, and stage 3 below ``optimizer_state_dict``."""
    import deepspeed

    return {
        "ds_version": deepspeed.__version__,
        "param_groups": list(trained.groups),
        "optimizer_state_dict": {
            "state": {0: {"step": trained.step}},
            "param_groups": [_shared(trained.groups)],
        },
    }


def _shared(groups: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    """Settings that are the same in all groups. Stage 3 would give every group those of the first,
    weight decay too; what is left out stays as the group was made."""
    first, *others = groups
    return {key: value for key, value in first.items() if all(o.get(key) == value for o in others)}
