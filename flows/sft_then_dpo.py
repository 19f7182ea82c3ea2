"""Data, SFT, DPO, conversion and evaluation: ``python -m flows.sft_then_dpo``."""

from flows.given import DataSource, bring_data
from flows.steps import Artifact, Runner, Step
from flows.tuned import FromSFT, export
from stages.dpo import DPO
from stages.evaluate import Evaluate


class SFTThenDPO(FromSFT):
    """Everything the flow needs, as it appears in YAML and in the Prefect UI."""

    preferences: DataSource
    """What DPO learns from."""

    dpo: Step[DPO] = Step[DPO](config=DPO())


def sft_then_dpo(config: SFTThenDPO, run: Runner) -> list[Artifact]:
    """Every stage in order. Each hand-off is a plain Hugging Face folder that was validated."""
    data = bring_data(config, run, preferences=config.preferences)
    model, rows = data.model, data.tokenised
    base = run("evaluate", config.evaluate, label="evaluate base", model=model, data=rows)

    trained = run("sft", config.sft, label="sft", model=model, data=rows)
    tuned = export(config, run, data, label="convert sft", trained=trained, base=model)
    tuned_scores = run(
        "evaluate", config.evaluate, label="evaluate sft", model=tuned, data=rows, baseline=base
    )

    preferred = run("dpo", config.dpo, label="dpo", policy=tuned, data=rows)
    aligned = export(config, run, data, label="convert dpo", trained=preferred, base=tuned)
    aligned_scores = run(
        "evaluate",
        with_beta(config.evaluate, config.dpo.config.beta),
        label="evaluate dpo",
        model=aligned,
        data=rows,
        baseline=tuned_scores,
    )
    return [
        *data.artifacts, base, trained, tuned, tuned_scores, preferred, aligned, aligned_scores
    ]  # fmt: skip


def with_beta(step: Step[Evaluate], beta: float) -> Step[Evaluate]:
    """Rewards are measured in the scale they were trained in, unless the recipe names another."""
    scaled = step.config.model_copy(update={"beta": step.config.beta or beta})
    return step.model_copy(update={"config": scaled})


if __name__ == "__main__":
    from flows import command
    from flows.sft_then_dpo import SFTThenDPO, sft_then_dpo  # the importable twin of this module

    command.leave(command.main("sft-then-dpo", SFTThenDPO, sft_then_dpo, description=__doc__))
