"""Training whenever the data have changed, with a gate: ``python -m flows.retrain RECIPE``."""

import argparse
import json
import re
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Literal, Self

from pydantic import model_validator

from configs import Config
from flows import promotion, run_names
from flows.approval import Ask, AskedElsewhere
from flows.endings import Ending
from flows.sft_then_dpo import SFTThenDPO, sft_then_dpo
from flows.steps import Artifact, Runner
from stages import manifest
from stages.base import StageError

CANDIDATE, PROMOTED = "compare candidate", "compare promoted"


LESS_IS_BETTER = ("conversations/loss_change",)


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

    @model_validator(mode="after")
    def _measures_what_the_gate_reads(self) -> Self:
        told = self.gate.metric, self.evaluate.config.generate_rows
        if told == ("conversations/exact_match_change", 0):
            raise ValueError(
                f"gate.metric: {told[0]} is measured on answers, and evaluate.config.generate_rows "
                "is 0"
            )
        return self


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
        return _promoted(config, candidate, "the first of its name", ask, before=None)
    change = _change(config.gate, compared.path)
    told = "{metric} {value:+.4g} [{low:+.4g}, {high:+.4g}]".format(
        metric=config.gate.metric, **change
    )
    told += _other_split(promotion.current(store, name), candidate.path)
    if _passes(config.gate, change):
        return _promoted(config, candidate, told, ask, before=_compared_with(artifacts))
    promotion.note(store, name, event="refused", output=candidate.fingerprint, because=told)
    return Ending("Refused by gate", f"{told}; the gate requires: {config.gate.require}")


def _promoted(
    config: Retrain, candidate: Artifact, told: str, ask: Ask, *, before: str | None
) -> Ending:
    """Promote the model, unless a person is to be asked and turns it down. ``before`` is the
    fingerprint of the promoted model that it was compared with."""
    store, name, out = config.store, config.name, candidate.path
    if config.gate.approval:
        try:
            key = run_names.slug(f"{name}-{candidate.fingerprint}-{before or 'first'}")
            decision = ask(f"{name}: {told}; {out}", key)
        except AskedElsewhere as other:
            return Ending("Nothing new", f"{other}; {out}")
        told = f"{told}; {decision.comment}" if decision.comment else told
        if not decision.approved:
            promotion.turn_down(store, name, out, because=told)
            return Ending("Turned down", f"{told}; {out}")
    now = promotion.current(store, name)
    if (_artifact(now).fingerprint if now else None) != before:
        promotion.note(store, name, event="refused", output=candidate.fingerprint, because=told)
        return Ending("Refused by gate", f"{now} was promoted meanwhile; run again to compare")
    promotion.promote(store, name, out, because=told)
    return Ending("Promoted", f"{told}; {out}")


SPLIT_BY = ("test_fraction", "test_files", "seed")
"""Settings of prepare_data that decide which rows are held out."""


def _other_split(promoted: Path | None, candidate: Path) -> str:
    """What to know of a comparison on rows that the promoted model may have been trained on."""
    before, now = (out and _split_of(out) for out in (promoted, candidate))
    if not before or not now or before == now:
        return ""
    changed = ", ".join(
        f"{key} {before[key]} -> {now[key]}" for key in now if before[key] != now[key]
    )
    return (
        f" (rows were split otherwise, {changed}: the promoted model may know those held out now)"
    )


def _split_of(out: Path) -> dict[str, object] | None:
    """How the rows were split that the exported model ``out`` was trained on, if that is known."""
    for stage in ("tokenize_data", "prepare_data"):
        done = manifest.read(out)
        if done is None or "data" not in done.identity.inputs:
            return None
        out = out.parent.parent / stage / done.identity.inputs["data"]
    done = manifest.read(out)
    return done and {key: done.identity.config.get(key) for key in SPLIT_BY}


def _compared_with(artifacts: Sequence[Artifact]) -> str:
    """The fingerprint of the model that was the promoted one when this run measured it."""
    before = next(each for each in artifacts if each.label == PROMOTED)
    done = manifest.read(before.path)
    assert done is not None
    return done.identity.inputs["model"]


def _passes(gate: Gate, change: Mapping[str, float]) -> bool:
    """Whether a change, an estimate, is what ``gate`` requires; one row proves nothing better."""
    low, high = change["low"], change["high"]
    if gate.metric in LESS_IS_BETTER:
        low, high = -high, -low
    return low > 0 and change["n"] > 1 if gate.require == "better" else high >= 0


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


def _other_command(argv: Sequence[str]) -> int:
    """``--history NAME``, ``--rollback NAME`` or ``--promote NAME OUTPUT``."""
    parser = argparse.ArgumentParser(prog="python -m flows.retrain")
    asked = parser.add_mutually_exclusive_group(required=True)
    asked.add_argument("--history", metavar="NAME", help="every promotion and refusal of a name")
    asked.add_argument("--rollback", metavar="NAME", help="back to the model before")
    promoted = "whatever the gate or a person said of it"
    asked.add_argument("--promote", nargs=2, metavar=("NAME", "OUTPUT"), help=promoted)
    parser.add_argument("--store", type=Path, default=Path("store"))
    options = parser.parse_args([re.sub(r"^store=", "--store=", word) for word in argv])
    try:
        _carry_out(options)
    except (ValueError, OSError) as error:
        print(error, file=sys.stderr)
        return 2
    return 0


def _carry_out(options: argparse.Namespace) -> None:
    store, known = options.store, promotion.names(options.store)
    name = options.history or options.rollback or options.promote[0]
    if name not in known:
        have = f"there are {', '.join(known)}" if known else "there are none"
        raise ValueError(f"{name}: nothing of this name was ever promoted in {store}; {have}")
    if options.rollback:
        print(f"promoted: {promotion.rollback(store, name)}")
    elif options.promote:
        out = Path(options.promote[1])
        done = manifest.read(out)
        if done is None or done.identity.stage != "convert":
            raise ValueError(f"{out}: not a finished output of the stage convert")
        promotion.promote(store, name, out, because="by hand")
        print(f"promoted: {out.resolve()}")
    else:
        for line in promotion.history(store, name):
            print("  ".join(f"{value}" for value in line.values() if isinstance(value, str)))


OTHER_COMMANDS = ("--history", "--rollback", "--promote")


def _main(argv: Sequence[str]) -> int:
    from flows import command
    from flows.retrain import Retrain, conclude, retrain  # the importable twin of this module

    if any(word.partition("=")[0] in OTHER_COMMANDS for word in argv):
        return _other_command(argv)
    return command.main("retrain", Retrain, retrain, description=__doc__, conclude=conclude)


if __name__ == "__main__":
    from flows import command

    command.leave(_main(sys.argv[1:]))
