"""A model measured on data, alone or against another: ``python -m flows.evaluate``."""

from flows.given import Data, DataSource, ModelSource, OnData, bring_data
from flows.steps import Artifact, Runner, Step
from stages.evaluate import Evaluate


class Evaluation(OnData):
    """Everything the flow needs, as it appears in YAML and in the Prefect UI."""

    baseline: ModelSource | None = None
    """A model of the same tokenizer that the first is compared with, row by row."""

    preferences: DataSource | None = None
    """Pairs, of whose answers the chosen one should be the likelier."""

    evaluate: Step[Evaluate] = Step[Evaluate](config=Evaluate())


def evaluate(config: Evaluation, run: Runner) -> list[Artifact]:
    """The baseline's scores come first, so that the model's are paired with them."""
    data = bring_data(config, run, preferences=config.preferences)
    before = _baseline(config, run, data)
    compared = {"baseline": before[-1]} if before else {}
    scores = run(
        "evaluate",
        config.evaluate,
        label="evaluate model",
        model=data.model,
        data=data.tokenised,
        **compared,
    )
    return [*data.artifacts, *before, scores]


def _baseline(config: Evaluation, run: Runner, data: Data) -> list[Artifact]:
    """The baseline and its scores, on the rows as they are for the model; none without one."""
    if config.baseline is None:
        return []
    model = run("fetch", config.baseline, label="fetch baseline")
    scores = run(
        "evaluate", config.evaluate, label="evaluate baseline", model=model, data=data.tokenised
    )
    return [model, scores]


if __name__ == "__main__":
    from flows import command
    from flows.evaluate import Evaluation, evaluate  # the importable twin of this module

    command.leave(
        command.main("evaluate", Evaluation, evaluate, description=__doc__, default="tiny_evaluate")
    )
