"""Training whenever the data have changed, with a gate: ``python -m flows.retrain RECIPE``."""

import argparse
import json
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Literal

from configs import Config
from flows import promotion
from flows.approval import Ask
from flows.endings import Ending
from flows.sft_then_dpo import SFTThenDPO, sft_then_dpo
from flows.steps import Artifact, Runner
from stages import manifest
from stages.base import StageError

CANDIDATE, PROMOTED = "compare candidate", "compare promoted"


class Gate(Config):
    """When a new model takes the place of the promoted one."""

    metric: Literal[
        "conversations/loss_change",
        "conversations/exact_match_change",
        "preferences/test/accuracy_change",
        "preferences/test/margin_change",
    ] = "preferences/test/accuracy_change"
    """A paired change that the evaluation of the new model measures against the promoted one, on
    the held-out rows of the new data."""

    larger_is_better: bool = True
    """Whether more of it is better; of a loss, less is."""

    require: Literal["not worse", "better"] = "not worse"
    """``not worse``: the confidence interval reaches to no change, or beyond. ``better``: it lies
    wholly on the good side."""

    approval: bool = False
    """A person is asked before any model is promoted: the run is suspended in Prefect, a command
    asks at its terminal. A model that was turned down is not asked about again."""


class Retrain(SFTThenDPO):
    """A recipe, and the gate before its model is used."""

    gate: Gate = Gate()
    """When the new model is promoted."""


def retrain(config: Retrain, run: Runner) -> list[Artifact]:
    """The recipe's stages; then the promoted model and the new one measured on the same rows."""
    artifacts = sft_then_dpo(config, run)
    promoted = promotion.current(config.store, config.name)
    candidate, data = _candidate(artifacts), _last(artifacts, "tokenize_data")
    if promoted is None or promoted == candidate.path.resolve():
        return artifacts
    if promotion.was_left(config.store, config.name, candidate.path):
        return artifacts
    before = run(
        "evaluate",
        config.evaluate,
        label=PROMOTED,
        model=_artifact(promoted),
        data=data,
    )
    after = run(
        "evaluate", config.evaluate, label=CANDIDATE, model=candidate, data=data, baseline=before
    )
    return [*artifacts, before, after]


def conclude(config: Retrain, artifacts: list[Artifact], ask: Ask) -> Ending:
    """Promote the new model, or refuse it; one line of history either way."""
    store, name = config.store, config.name
    candidate = _candidate(artifacts)
    if promotion.current(store, name) == candidate.path.resolve():
        promotion.note(store, name, event="nothing new", output=candidate.fingerprint)
        return Ending("Nothing new", "the data and the recipe are those of the promoted model")
    if promotion.was_left(store, name, candidate.path):
        promotion.note(store, name, event="nothing new", output=candidate.fingerprint)
        return Ending(
            "Nothing new",
            "somebody turned this model down, or rolled back from it; change the data or the "
            "recipe",
        )
    compared = next((each for each in artifacts if each.label == CANDIDATE), None)
    if compared is None:
        return _promoted(config, candidate, "the first of its name", ask)
    change = _change(config.gate, compared.path)
    told = "{metric} {value:+.4g} [{low:+.4g}, {high:+.4g}]".format(
        metric=config.gate.metric, **change
    )
    if _passes(config.gate, change):
        return _promoted(config, candidate, told, ask)
    promotion.note(store, name, event="refused", output=candidate.fingerprint, because=told)
    return Ending("Refused by gate", f"{told}; the gate requires: {config.gate.require}")


def _promoted(config: Retrain, candidate: Artifact, told: str, ask: Ask) -> Ending:
    """Promote the model, unless a person is to be asked and turns it down."""
    store, name, out = config.store, config.name, candidate.path
    if config.gate.approval:
        decision = ask(f"{name}: {told}; {out}", candidate.fingerprint)
        told = f"{told}; {decision.comment}" if decision.comment else told
        if not decision.approved:
            promotion.turn_down(store, name, out, because=told)
            return Ending("Turned down", f"{told}; {out}")
    promotion.promote(store, name, out, because=told)
    return Ending("Promoted", f"{told}; {out}")


def _passes(gate: Gate, change: Mapping[str, float]) -> bool:
    low, high = change["low"], change["high"]
    if not gate.larger_is_better:
        low, high = -high, -low
    return low > 0 if gate.require == "better" else high >= 0


def _change(gate: Gate, out: Path) -> dict[str, float]:
    measures = json.loads((out / "metrics.json").read_text())
    if gate.metric not in measures:
        known = ", ".join(key for key in measures if key.endswith("_change"))
        raise StageError(f"gate.metric: {gate.metric} was not measured; there are {known}")
    return measures[gate.metric]


def _candidate(artifacts: Sequence[Artifact]) -> Artifact:
    """The last model that was made into a plain folder."""
    return _last(artifacts, "convert")


def _last(artifacts: Sequence[Artifact], stage: str) -> Artifact:
    return next(each for each in reversed(artifacts) if each.stage == stage)


def _artifact(out: Path) -> Artifact:
    """A finished output as the input of a stage."""
    done = manifest.read(out)
    assert done is not None
    return Artifact("promoted model", done.identity.stage, out, done.identity.fingerprint, "reused")


def _other_command(argv: Sequence[str]) -> int | None:
    """``--history NAME`` and ``--rollback NAME``; ``None`` for a run."""
    parser = argparse.ArgumentParser(add_help=False)
    parser.add_argument("--history", metavar="NAME")
    parser.add_argument("--rollback", metavar="NAME")
    parser.add_argument("--store", type=Path, default=Path("store"))
    options, _ = parser.parse_known_args(argv)
    try:
        if options.rollback:
            print(f"promoted: {promotion.rollback(options.store, options.rollback)}")
            return 0
    except ValueError as error:
        print(error, file=sys.stderr)
        return 2
    if options.history:
        for line in promotion.history(options.store, options.history):
            print("  ".join(f"{value}" for value in line.values() if isinstance(value, str)))
        return 0
    return None


def _main(argv: Sequence[str]) -> int:
    from flows import command
    from flows.retrain import Retrain, conclude, retrain  # the importable twin of this module

    code = _other_command(argv)
    if code is not None:
        return code
    return command.main("retrain", Retrain, retrain, description=__doc__, conclude=conclude)


if __name__ == "__main__":
    sys.exit(_main(sys.argv[1:]))
