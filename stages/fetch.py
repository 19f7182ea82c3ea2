"""Bring a model or a data set in: the one stage that reads from outside."""

import json
import shutil
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Annotated, Any

from pydantic import Field

from configs import Config
from stages.base import Context, Metrics
from stages.manifest import write_atomically
from stages.sources import gguf, hub, local, new_model, new_task, several
from stages.sources.gguf import GGUFModel
from stages.sources.hub import HubData, HubModel
from stages.sources.local import LocalCheckpoint, LocalData, LocalModel
from stages.sources.new_model import NewModel
from stages.sources.new_task import NewTask
from stages.sources.several import Several

Source = (
    NewModel | NewTask | LocalModel | LocalCheckpoint | LocalData | HubModel | HubData | GGUFModel
    | Several
)  # fmt: skip

BRING: Mapping[type[Config], tuple[str, Callable[[Any, Path], Mapping[str, Any]]]] = {
    NewModel: ("model", new_model.bring),
    NewTask: ("data", new_task.bring),
    LocalModel: ("model", local.bring_model),
    LocalCheckpoint: ("model", local.bring_checkpoint),
    LocalData: ("data", local.bring_data),
    HubModel: ("model", hub.bring_model),
    HubData: ("data", hub.bring_data),
    GGUFModel: ("model", gguf.bring),
    Several: ("data", several.bring_data),
}
"""For each kind of source the folder that it fills, and what fills it."""


class Fetch(Config):
    source: Annotated[Source, Field(discriminator="kind")]
    """Where it comes from."""


def fetch(config: Fetch, ctx: Context) -> Metrics:
    """Fill ``OUT/model`` with a checkpoint, or ``OUT/data`` with files as they came.

    The checkpoint is a whole one in the Hugging Face layout, but for a ``local_checkpoint``.
    ``OUT/source.json`` says where from, at which commit or content hash, and lists the files with
    their sizes in bytes. Raises :class:`StageError` for whatever is missing, damaged or out of
    reach, and then leaves neither folder.
    """
    name, bring = BRING[type(config.source)]
    partial, final = ctx.out / f"{name}.partial", ctx.out / name
    for old in (partial, final):
        shutil.rmtree(old, ignore_errors=True)
    partial.mkdir(parents=True)
    try:
        facts = bring(config.source, partial)
    except BaseException:
        shutil.rmtree(partial)
        raise
    sizes = {
        file.relative_to(partial).as_posix(): file.stat().st_size
        for file in sorted(partial.rglob("*"))
        if file.is_file()
    }
    record = {"source": config.source.model_dump(mode="json"), **facts, "files": sizes}
    write_atomically(ctx.out / "source.json", json.dumps(record, indent=2))
    partial.rename(final)
    numbers = {key: value for key, value in facts.items() if not isinstance(value, str)}
    return {"files": len(sizes), "bytes": sum(sizes.values()), **numbers}
