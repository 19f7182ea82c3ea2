"""What every flow that trains begins with: supervised fine-tuning, and the export of a model."""

from typing import Self

from pydantic import model_validator

from flows.given import Data, OnData
from flows.steps import Artifact, Runner, Step
from stages.convert import Convert
from stages.evaluate import Evaluate
from stages.sft import SFT
from stages.trackers import Tracker


class FromSFT(OnData):
    """What a flow needs that starts with supervised fine-tuning, in YAML and in the Prefect UI."""

    trackers: tuple[Tracker, ...] = ()
    """Who is told of every training beside TensorBoard's files: ``wandb``, ``mlflow``, ``trackio``,
    if they are installed. The run's name is the project; secrets stay in the environment."""

    sft: Step[SFT] = Step[SFT](config=SFT())
    convert: Step[Convert] = Step[Convert](config=Convert())
    evaluate: Step[Evaluate] = Step[Evaluate](config=Evaluate())

    @model_validator(mode="after")
    def _keeps_rows_to_train_on(self) -> Self:
        if self.prepare_data.config.test_fraction == 1:
            raise ValueError("prepare_data.config.test_fraction: 1 leaves no row to train on")
        return self


def export(
    config: FromSFT, run: Runner, data: Data, *, label: str, trained: Artifact, base: Artifact
) -> Artifact:
    """What ``trained`` made of ``base``, as a plain Hugging Face folder that was validated."""
    return run(
        "convert", config.convert, label=label, trained=trained, base=base, data=data.tokenised
    )
