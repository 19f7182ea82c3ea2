"""Data, SFT, DPO, conversion and evaluation: ``python -m flows.sft_then_dpo``."""

from pathlib import Path
from typing import Annotated

from pydantic import Field

from configs import Config
from flows.steps import Artifact, Runner, Step
from stages.convert import Convert
from stages.dpo import DPO
from stages.evaluate import Evaluate
from stages.fetch import Fetch
from stages.prepare_data import PrepareData
from stages.sft import SFT
from stages.tokenize_data import TokenizeData


class SFTThenDPO(Config):
    """Everything the flow needs, as it appears in YAML and in the Prefect UI."""

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

    preferences: Step[Fetch]
    """What DPO learns from."""

    prepare_data: Step[PrepareData] = Step[PrepareData](config=PrepareData())
    tokenize_data: Step[TokenizeData] = Step[TokenizeData](config=TokenizeData())
    sft: Step[SFT] = Step[SFT](config=SFT())
    dpo: Step[DPO] = Step[DPO](config=DPO())
    convert: Step[Convert] = Step[Convert](config=Convert())
    evaluate: Step[Evaluate] = Step[Evaluate](config=Evaluate())


def sft_then_dpo(config: SFTThenDPO, run: Runner) -> list[Artifact]:
    """Every stage in order. Each hand-off is a plain Hugging Face folder that was validated."""
    model = run("fetch", config.model, label="fetch model")
    conversations = run("fetch", config.conversations, label="fetch conversations")
    preferences = run("fetch", config.preferences, label="fetch preferences")
    prepared = run(
        "prepare_data",
        config.prepare_data,
        label="prepare data",
        conversations=conversations,
        preferences=preferences,
    )
    data = run(
        "tokenize_data", config.tokenize_data, label="tokenize data", model=model, data=prepared
    )
    base = run("evaluate", config.evaluate, label="evaluate base", model=model, data=data)

    trained = run("sft", config.sft, label="sft", model=model, data=data)
    tuned = run(
        "convert", config.convert, label="convert sft", trained=trained, base=model, data=data
    )
    tuned_scores = run(
        "evaluate", config.evaluate, label="evaluate sft", model=tuned, data=data, baseline=base
    )

    preferred = run("dpo", config.dpo, label="dpo", policy=tuned, data=data)
    aligned = run(
        "convert", config.convert, label="convert dpo", trained=preferred, base=tuned, data=data
    )
    aligned_scores = run(
        "evaluate",
        with_beta(config.evaluate, config.dpo.config.beta),
        label="evaluate dpo",
        model=aligned,
        data=data,
        baseline=tuned_scores,
    )
    return [
        model, conversations, preferences, prepared, data, base,
        trained, tuned, tuned_scores, preferred, aligned, aligned_scores,
    ]  # fmt: skip


def with_beta(step: Step[Evaluate], beta: float) -> Step[Evaluate]:
    """Rewards are measured in the scale they were trained in, unless the recipe names another."""
    scaled = step.config.model_copy(update={"beta": step.config.beta or beta})
    return step.model_copy(update={"config": scaled})


if __name__ == "__main__":
    from flows import command
    from flows.sft_then_dpo import SFTThenDPO, sft_then_dpo  # the importable twin of this module

    command.leave(command.main("sft-then-dpo", SFTThenDPO, sft_then_dpo, description=__doc__))
