"""The gate before a model is used: promoted, refused, rolled back."""

import io
import json
import shutil
import time
from pathlib import Path
from typing import Any

import pytest

from configs import RECIPES, ConfigError, load
from flows import promotion
from flows.approval import Decision, at_the_terminal
from flows.endings import Ending
from flows.retrain import CANDIDATE, Retrain, conclude
from flows.steps import Artifact
from stages import manifest
from stages.base import StageError
from stages.manifest import Identity, Manifest
from tests.small import python

NAME = "tiny"


def config_of(store: Path, *overrides: str) -> Retrain:
    return load(Retrain, RECIPES / "tiny.yaml", [f"store={store}", *overrides])


def judged(config: Retrain, artifacts: list[Artifact], answer: Decision | None = None) -> Ending:
    """What becomes of the candidate; without an answer nobody may be asked."""

    def ask(question: str, key: str) -> Decision:
        assert answer is not None, f"asked: {question}"
        return answer

    return conclude(config, artifacts, ask)


def output(store: Path, stage: str, number: int, **metrics: Any) -> Artifact:
    identity = Identity(stage=stage, version=1, config={"number": number}, inputs={})
    out = store / stage / identity.fingerprint
    out.mkdir(parents=True, exist_ok=True)
    (out / "metrics.json").write_text(json.dumps(metrics))
    manifest.write(out, Manifest(identity=identity, metrics=metrics))
    label = CANDIDATE if stage == "evaluate" else "convert dpo"
    return Artifact(label, stage, out, identity.fingerprint, "ran")


def change(value: float, low: float, high: float) -> dict[str, Any]:
    return {"preferences/test/accuracy_change": {"value": value, "low": low, "high": high}}


def test_the_first_model_is_promoted_and_the_same_one_is_nothing_new(tmp_path: Path) -> None:
    config, model = config_of(tmp_path), output(tmp_path, "convert", 1)
    assert judged(config, [model]).name == "Promoted"
    assert promotion.current(tmp_path, NAME) == model.path.resolve()
    assert judged(config, [model]).name == "Nothing new"
    assert [line["event"] for line in promotion.history(tmp_path, NAME)] == [
        "promoted",
        "nothing new",
    ]


@pytest.mark.parametrize(
    ("measured", "require", "ending"),
    [
        (change(0.02, -0.01, 0.05), "not worse", "Promoted"),
        (change(-0.02, -0.05, 0.01), "not worse", "Promoted"),
        (change(-0.06, -0.09, -0.03), "not worse", "Refused by gate"),
        (change(0.02, -0.01, 0.05), "better", "Refused by gate"),
        (change(0.06, 0.03, 0.09), "better", "Promoted"),
    ],
)
def test_the_interval_of_the_paired_change_decides(
    tmp_path: Path, measured: dict[str, Any], require: str, ending: str
) -> None:
    config = config_of(tmp_path, f"gate.require={require}")
    old, new = output(tmp_path, "convert", 1), output(tmp_path, "convert", 2)
    judged(config, [old])
    found = judged(config, [new, output(tmp_path, "evaluate", 2, **measured)])
    assert found.name == ending
    kept = new if ending == "Promoted" else old
    assert promotion.current(tmp_path, NAME) == kept.path.resolve()
    assert len(promotion.history(tmp_path, NAME)) == 2
    assert "preferences/test/accuracy_change" in promotion.history(tmp_path, NAME)[-1]["because"]


def test_less_of_a_loss_is_better(tmp_path: Path) -> None:
    config = config_of(
        tmp_path, "gate.metric=conversations/loss_change", "gate.larger_is_better=false"
    )
    judged(config, [output(tmp_path, "convert", 1)])
    worse = {"conversations/loss_change": {"value": 0.2, "low": 0.1, "high": 0.3}}
    found = judged(
        config, [output(tmp_path, "convert", 2), output(tmp_path, "evaluate", 2, **worse)]
    )
    assert found.name == "Refused by gate"


def test_a_metric_that_was_not_measured_is_refused_with_those_that_were(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"gate\.metric"):
        config_of(tmp_path, "gate.metric=accuracy")
    config = config_of(tmp_path, "gate.metric=conversations/exact_match_change")
    judged(config, [output(tmp_path, "convert", 1)])
    measured = output(tmp_path, "evaluate", 2, **change(0.1, 0.0, 0.2))
    with pytest.raises(StageError, match="there are preferences/test/accuracy_change"):
        judged(config, [output(tmp_path, "convert", 2), measured])


def test_rollback_is_one_command_and_goes_back_one_model_each_time(tmp_path: Path) -> None:
    models = [output(tmp_path, "convert", number) for number in (1, 2, 3)]
    for model in models:
        promotion.promote(tmp_path, NAME, model.path, because="test")
    for expected in (models[1], models[0]):
        done = python("-m", "flows.retrain", "--rollback", NAME, "--store", str(tmp_path))
        assert done.returncode == 0, done.stderr
        assert promotion.current(tmp_path, NAME) == expected.path.resolve()
    done = python("-m", "flows.retrain", "--rollback", NAME, "--store", str(tmp_path))
    assert done.returncode == 2 and "nothing was promoted before" in done.stderr
    done = python("-m", "flows.retrain", "--history", NAME, "--store", str(tmp_path))
    assert done.stdout.count("rolled back") == 2


def test_what_a_rollback_left_is_not_promoted_again_by_a_run_that_finds_nothing_new(
    tmp_path: Path,
) -> None:
    config = config_of(tmp_path)
    old, new = output(tmp_path, "convert", 1), output(tmp_path, "convert", 2)
    better = output(tmp_path, "evaluate", 2, **change(0.06, 0.03, 0.09))
    judged(config, [old])
    assert judged(config, [new, better]).name == "Promoted"
    promotion.rollback(tmp_path, NAME)
    found = judged(config, [new, better])
    assert found.name == "Nothing new" and "rolled back from it" in found.message
    assert promotion.current(tmp_path, NAME) == old.path.resolve()
    newest = output(tmp_path, "convert", 3)
    assert judged(config, [newest, better]).name == "Promoted"


def test_with_approval_a_person_decides_once(tmp_path: Path) -> None:
    config = config_of(tmp_path, "gate.approval=true")
    old, new = output(tmp_path, "convert", 1), output(tmp_path, "convert", 2)
    better = output(tmp_path, "evaluate", 2, **change(0.06, 0.03, 0.09))
    assert judged(config, [old], Decision(approved=True)).name == "Promoted"
    found = judged(config, [new, better], Decision(approved=False, comment="too chatty"))
    assert found.name == "Turned down" and "too chatty" in found.message
    assert promotion.current(tmp_path, NAME) == old.path.resolve()
    assert promotion.history(tmp_path, NAME)[-1]["because"].endswith("too chatty")
    again = judged(config, [new, better])
    assert again.name == "Nothing new" and "turned this model down" in again.message


def test_a_model_that_the_gate_refuses_is_nobodys_question(tmp_path: Path) -> None:
    config = config_of(tmp_path, "gate.approval=true")
    judged(config, [output(tmp_path, "convert", 1)], Decision(approved=True))
    worse = output(tmp_path, "evaluate", 2, **change(-0.06, -0.09, -0.03))
    assert judged(config, [output(tmp_path, "convert", 2), worse]).name == "Refused by gate"


def test_where_nobody_can_be_asked_nothing_is_promoted(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("sys.stdin", io.StringIO("yes\n"))
    with pytest.raises(StageError, match=r"nobody can be asked here \(gate.approval\)"):
        at_the_terminal("tiny", "key")


def test_a_pointer_to_a_model_that_is_gone_is_an_error_with_a_way_out(tmp_path: Path) -> None:
    model = output(tmp_path, "convert", 1)
    promotion.promote(tmp_path, NAME, model.path)
    (model.path / manifest.NAME).unlink()
    with pytest.raises(ValueError, match="--rollback tiny"):
        promotion.current(tmp_path, NAME)


RETRAIN = [
    "tiny",
    "preferences.config.source.rows=150",
    "sft.config.max_steps=12",
    "dpo.config.max_steps=4",
    "evaluate.config.generate_rows=8",
]


def lines_of(store: Path) -> list[str]:
    return [line["event"] for line in promotion.history(store, NAME)]


@pytest.mark.slow
def test_new_rows_are_trained_on_compared_and_nothing_new_ends_in_seconds(tmp_path: Path) -> None:
    store, rows = tmp_path / "store", tmp_path / "rows.jsonl"
    source = "conversations.config.source"
    made = [*RETRAIN, "--engine", "inline", f"store={store}", f"runs={tmp_path}/runs"]
    first = python("-m", "flows.retrain", *made, f"{source}.rows=450")
    assert first.returncode == 0, first.stderr[-3000:]
    (found,) = store.glob("fetch/*/data/conversations.jsonl")
    shutil.copy(found, rows)
    mine = [*made, f"{source}.kind=local_data", f"{source}.path={rows}"]

    again = python("-m", "flows.retrain", *mine)
    assert again.returncode == 0, again.stderr[-3000:]
    with rows.open("a") as file:
        text = (
            {"role": "user", "content": "12 m = ? cm"},
            {"role": "assistant", "content": "1200 cm"},
        )
        file.write(json.dumps({"messages": text}) + "\n")
    more = python("-m", "flows.retrain", *mine)
    assert more.returncode == 0, more.stderr[-3000:]
    assert "compare candidate: ran" in more.stdout
    assert lines_of(store)[0] == "promoted" and lines_of(store)[-1] in ("promoted", "refused")

    started = time.monotonic()
    last = python("-m", "flows.retrain", *mine)
    assert last.returncode == 0, last.stderr[-3000:]
    assert time.monotonic() - started < 30 and " ran in " not in last.stdout
