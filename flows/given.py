"""What a flow is given: the run's name, its places, its models and its data."""

from dataclasses import dataclass
from pathlib import Path
from typing import Annotated

from pydantic import AfterValidator, Field

from configs import Config
from flows.steps import Artifact, Runner, Step
from stages.fetch import BRING, Fetch
from stages.prepare_data import PrepareData
from stages.sources.local import LocalCheckpoint
from stages.tokenize_data import TokenizeData


def _checkpoint(step: Step[Fetch]) -> Step[Fetch]:
    """The stage that reads it would say so much later."""
    if BRING[type(step.config.source)][0] != "model":
        raise ValueError(f"{step.config.source.kind} brings data, and a model is wanted here")
    return step


def _model(step: Step[Fetch]) -> Step[Fetch]:
    if isinstance(step.config.source, LocalCheckpoint):
        raise ValueError(
            "a local_checkpoint may be an adapter or shards, and a whole model is wanted here; "
            "make it one with the flow convert, or name it as local_model if it is one"
        )
    return _checkpoint(step)


def _data(step: Step[Fetch]) -> Step[Fetch]:
    if BRING[type(step.config.source)][0] != "data":
        raise ValueError(f"{step.config.source.kind} brings a model, and data are wanted here")
    return step


def _place(path: Path) -> Path:
    """A shell turns ``~`` into a home before we see it; a recipe and a form would get a folder of
    that name."""
    if str(path).startswith("~"):
        raise ValueError(f"{path}: ~ is your home to a shell alone; write the whole path")
    return path


CheckpointSource = Annotated[Step[Fetch], AfterValidator(_checkpoint)]
"""Where something comes from that a training left, in any layout."""

ModelSource = Annotated[Step[Fetch], AfterValidator(_model)]
"""Where a whole model comes from."""

DataSource = Annotated[Step[Fetch], AfterValidator(_data)]
"""Where rows come from."""


Place = Annotated[Path, AfterValidator(_place)]
"""A directory to write into."""


class Named(Config):
    """What every run has."""

    name: Annotated[str, Field(pattern=r"^[A-Za-z0-9][A-Za-z0-9._-]*$")]
    """The run's folder under ``runs``; a later run of this name takes its place."""

    store: Place = Path("store")
    """Directory of finished work; an output's place follows from what it was computed from."""

    runs: Place = Path("runs")
    """Directory of runs: for each its settings, a link to every output, and the report."""


class OnData(Named):
    """A run that begins with a model and conversations."""

    model: ModelSource
    """The model that the run starts from."""

    conversations: DataSource
    """What the model learns from, and is measured on: some are held out."""

    prepare_data: Step[PrepareData] = Step[PrepareData](config=PrepareData())
    tokenize_data: Step[TokenizeData] = Step[TokenizeData](config=TokenizeData())


@dataclass(frozen=True)
class Data:
    """What is known before anything is trained or measured."""

    model: Artifact
    prepared: Artifact
    tokenised: Artifact
    fetched: tuple[Artifact, ...]
    """The sources, in order."""

    @property
    def artifacts(self) -> list[Artifact]:
        return [self.model, *self.fetched, self.prepared, self.tokenised]


def bring_data(config: OnData, run: Runner, *, preferences: Step[Fetch] | None) -> Data:
    """The model and its data, tokenised for it."""
    model = run("fetch", config.model, label="fetch model")
    sources = {"conversations": run("fetch", config.conversations, label="fetch conversations")}
    if preferences is not None:
        sources["preferences"] = run("fetch", preferences, label="fetch preferences")
    prepared = run("prepare_data", config.prepare_data, label="prepare data", **sources)
    tokenised = run(
        "tokenize_data", config.tokenize_data, label="tokenize data", model=model, data=prepared
    )
    return Data(model, prepared, tokenised, tuple(sources.values()))
