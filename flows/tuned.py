"""What every flow begins with: data, supervised fine-tuning, and its export."""

from dataclasses import dataclass
from pathlib import Path
from typing import Annotated

from pydantic import Field

from configs import Config
from flows.steps import Artifact, Runner, Step
from stages.convert import Convert
from stages.evaluate import Evaluate
from stages.fetch import Fetch
from stages.prepare_data import PrepareData
from stages.sft import SFT
from stages.tokenize_data import TokenizeData


class FromSFT(Config):
    """What a flow needs that starts with supervised fine-tuning, in YAML and in the Prefect UI."""

    name: Annotated[str, Field(pattern=r"^[A-Za-z0-9][A-Za-z0-9._-]*$")]
    """The run's folder under ``runs``; a later run of this name takes its place."""

    store: Path = Path("store")
    """Directory of finished work; an output's place follows from what it was computed from."""

    runs: Path = Path("runs")
    """Directory of runs: for each its settings, a link to every output, and the report."""

    model: Step[Fetch]
    """The base model."""

    conversations: Step[Fetch]
    """What SFT learns from."""

    prepare_data: Step[PrepareData] = Step[PrepareData](config=PrepareData())
    tokenize_data: Step[TokenizeData] = Step[TokenizeData](config=TokenizeData())
    sft: Step[SFT] = Step[SFT](config=SFT())
    convert: Step[Convert] = Step[Convert](config=Convert())
    evaluate: Step[Evaluate] = Step[Evaluate](config=Evaluate())


@dataclass(frozen=True)
class Data:
    """What is known before anything is trained."""

    model: Artifact
    prepared: Artifact
    tokenised: Artifact
    fetched: tuple[Artifact, ...]
    """The sources, in order."""

    @property
    def artifacts(self) -> list[Artifact]:
        return [self.model, *self.fetched, self.prepared, self.tokenised]


def bring_data(config: FromSFT, run: Runner, *, preferences: Step[Fetch] | None) -> Data:
    """The base model and its data, tokenised for it."""
    model = run("fetch", config.model, label="fetch model")
    sources = {"conversations": run("fetch", config.conversations, label="fetch conversations")}
    if preferences is not None:
        sources["preferences"] = run("fetch", preferences, label="fetch preferences")
    prepared = run("prepare_data", config.prepare_data, label="prepare data", **sources)
    tokenised = run(
        "tokenize_data", config.tokenize_data, label="tokenize data", model=model, data=prepared
    )
    return Data(model, prepared, tokenised, tuple(sources.values()))


def export(
    config: FromSFT, run: Runner, data: Data, *, label: str, trained: Artifact, base: Artifact
) -> Artifact:
    """What ``trained`` made of ``base``, as a plain Hugging Face folder that was validated."""
    return run(
        "convert", config.convert, label=label, trained=trained, base=base, data=data.tokenised
    )
