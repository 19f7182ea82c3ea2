"""The gate before a model is used: promoted, refused, rolled back."""

import io
import json
import os
import pty
import shutil
import string
import sys
import time
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest

from configs import RECIPES, ConfigError, load
from flows import promotion
from flows.approval import Decision, at_the_terminal
from flows.endings import Ending
from flows.retrain import CANDIDATE, PROMOTED, Retrain, conclude
from flows.steps import Artifact
from stages import manifest
from stages.base import StageError
from stages.manifest import Identity, Manifest
from tests.small import python

NAME = "tiny"
ACCURACY = "preferences/test/accuracy_change"


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
    return Artifact("convert dpo", stage, out, identity.fingerprint, "ran")


def compared(before: Artifact, **metrics: Any) -> list[Artifact]:
    """The promoted model measured, and a candidate against it."""
    store, inputs = before.path.parent.parent, {"model": before.fingerprint}
    found = []
    for label, measured in ((PROMOTED, {}), (CANDIDATE, metrics)):
        identity = Identity(stage="evaluate", version=1, config={"label": label}, inputs=inputs)
        out = store / "evaluate" / identity.fingerprint
        out.mkdir(parents=True, exist_ok=True)
        (out / "metrics.json").write_text(json.dumps(measured))
        manifest.write(out, Manifest(identity=identity, metrics=measured))
        found.append(Artifact(label, "evaluate", out, identity.fingerprint, "ran"))
    return found


def change(
    value: float, low: float, high: float, *, of: str = ACCURACY, n: int = 20
) -> dict[str, Any]:
    return {of: {"value": value, "low": low, "high": high, "n": n}}


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
        (change(1.0, 1.0, 1.0, n=1), "better", "Refused by gate"),
        (change(-1.0, -1.0, -1.0, n=1), "not worse", "Refused by gate"),
    ],
)
def test_the_interval_of_the_paired_change_decides(
    tmp_path: Path, measured: dict[str, Any], require: str, ending: str
) -> None:
    config = config_of(tmp_path, f"gate.require={require}")
    old, new = output(tmp_path, "convert", 1), output(tmp_path, "convert", 2)
    judged(config, [old])
    found = judged(config, [new, *compared(old, **measured)])
    assert found.name == ending
    kept = new if ending == "Promoted" else old
    assert promotion.current(tmp_path, NAME) == kept.path.resolve()
    assert len(promotion.history(tmp_path, NAME)) == 2
    assert "preferences/test/accuracy_change" in promotion.history(tmp_path, NAME)[-1]["because"]


def test_less_of_a_loss_is_better(tmp_path: Path) -> None:
    loss = "conversations/loss_change"
    config, old = config_of(tmp_path, f"gate.metric={loss}"), output(tmp_path, "convert", 1)
    judged(config, [old])
    new = output(tmp_path, "convert", 2)
    worse, better = change(0.2, 0.1, 0.3, of=loss), change(-0.2, -0.3, -0.1, of=loss)
    assert judged(config, [new, *compared(old, **worse)]).name == "Refused by gate"
    assert judged(config, [new, *compared(old, **better)]).name == "Promoted"


def test_a_gate_on_answers_that_nobody_asks_for_is_refused_before_anything_runs() -> None:
    words = ["gate.metric=conversations/exact_match_change", "evaluate.config.generate_rows=0"]
    with pytest.raises(ConfigError, match=r"generate_rows is 0"):
        load(Retrain, RECIPES / "tiny.yaml", words)


def test_a_comparison_with_a_model_that_is_no_longer_the_promoted_one_promotes_nothing(
    tmp_path: Path,
) -> None:
    config = config_of(tmp_path)
    first, second, new = (output(tmp_path, "convert", number) for number in (1, 2, 3))
    judged(config, [first])
    measured = compared(first, **change(0.06, 0.03, 0.09))
    promotion.promote(tmp_path, NAME, second.path)
    found = judged(config, [new, *measured])
    assert found.name == "Refused by gate" and "promoted meanwhile" in found.message
    assert promotion.current(tmp_path, NAME) == second.path.resolve()


def test_a_metric_that_was_not_measured_is_refused_with_those_that_were(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"gate\.metric"):
        config_of(tmp_path, "gate.metric=accuracy")
    config = config_of(tmp_path, "gate.metric=conversations/exact_match_change")
    old = output(tmp_path, "convert", 1)
    judged(config, [old])
    measured = compared(old, **change(0.1, 0.0, 0.2))
    with pytest.raises(StageError, match="there are preferences/test/accuracy_change"):
        judged(config, [output(tmp_path, "convert", 2), *measured])


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


def trained_on(store: Path, number: int, **split: Any) -> Artifact:
    """An export, with the manifests of the data that its training read."""
    config: dict[str, Any] = {"test_fraction": 0.1, "test_files": [], "seed": 0} | split
    inputs: dict[str, str] = {}
    for stage in ("prepare_data", "tokenize_data", "convert"):
        identity = Identity(stage=stage, version=1, config=config, inputs=inputs)
        out = store / stage / identity.fingerprint
        out.mkdir(parents=True, exist_ok=True)
        manifest.write(out, Manifest(identity=identity))
        config, inputs = {"number": number}, {"data": identity.fingerprint}
    return Artifact("convert dpo", "convert", out, identity.fingerprint, "ran")


def test_a_comparison_on_rows_that_were_split_otherwise_says_so(tmp_path: Path) -> None:
    config, better = config_of(tmp_path), change(0.06, 0.03, 0.09)
    shares = (0.1, 0.1, 0.2)
    old, same, other = (trained_on(tmp_path, n, test_fraction=s) for n, s in enumerate(shares))
    judged(config, [old])
    found = judged(config, [other, *compared(old, **better)])
    assert "test_fraction 0.1 -> 0.2" in found.message
    promotion.rollback(tmp_path, NAME)
    assert "split" not in judged(config, [same, *compared(old, **better)]).message


def test_a_promoted_model_of_an_earlier_version_is_compared_with(tmp_path: Path) -> None:
    """Its rows were prepared before there was such a setting."""
    config, better = config_of(tmp_path), change(0.06, 0.03, 0.09)
    old = trained_on(tmp_path, 1)
    prepared = next(tmp_path.glob("prepare_data/*/manifest.json"))
    prepared.write_text(prepared.read_text().replace("test_files", "files_of_old"))
    new = trained_on(tmp_path, 2, seed=1)
    judged(config, [old])
    found = judged(config, [new, *compared(old, **better)])
    assert found.name == "Promoted" and "test_files None -> []" in found.message


def command(store: Path, *words: str) -> Any:
    return python("-m", "flows.retrain", *words, f"store={store}")


def test_the_other_commands_take_nothing_that_they_do_not_heed(tmp_path: Path) -> None:
    promotion.promote(tmp_path, NAME, output(tmp_path, "convert", 1).path)
    for words, told in (
        (["--rollback", NAME, "--plan"], "unrecognized arguments: --plan"),
        (["--history", "tyni"], "nothing of this name was ever promoted"),
        (["--promote", NAME, str(tmp_path)], "not a finished output of the stage convert"),
    ):
        done = command(tmp_path, *words)
        assert done.returncode == 2 and told in done.stderr, (done.stdout, done.stderr)


def test_a_pointer_that_cannot_be_switched_is_one_line(tmp_path: Path) -> None:
    """As a copy leaves it that followed the links."""
    for number in (1, 2):
        promotion.promote(tmp_path, NAME, output(tmp_path, "convert", number).path)
    pointer = promotion.folder(tmp_path, NAME) / promotion.POINTER
    pointer.unlink()
    shutil.copytree(output(tmp_path, "convert", 2).path, pointer)
    done = command(tmp_path, "--rollback", NAME)
    assert done.returncode == 2 and len(done.stderr.splitlines()) == 1
    assert str(pointer) in done.stderr


def test_a_model_that_was_turned_down_can_be_promoted_by_hand(tmp_path: Path) -> None:
    old, new = output(tmp_path, "convert", 1), output(tmp_path, "convert", 2)
    promotion.promote(tmp_path, NAME, old.path)
    promotion.turn_down(tmp_path, NAME, new.path, because="a slip")
    assert promotion.was_left(tmp_path, NAME, new.path)
    done = command(tmp_path, "--promote", NAME, str(new.path))
    assert done.returncode == 0, done.stderr
    assert promotion.current(tmp_path, NAME) == new.path.resolve()
    assert not promotion.was_left(tmp_path, NAME, new.path)


def test_rollback_passes_over_what_is_gone_and_what_was_left(tmp_path: Path) -> None:
    models = [output(tmp_path, "convert", number) for number in (1, 2, 3)]
    for model in models:
        promotion.promote(tmp_path, NAME, model.path)
    shutil.rmtree(models[1].path)
    assert promotion.rollback(tmp_path, NAME) == models[0].path.resolve()
    with pytest.raises(ValueError, match="nothing was promoted before the current model"):
        promotion.rollback(tmp_path, NAME)  # not on to the third, which was left just now


def test_without_its_pointer_no_model_counts_as_the_first(tmp_path: Path) -> None:
    config = config_of(tmp_path)
    judged(config, [output(tmp_path, "convert", 1)])
    (promotion.folder(tmp_path, NAME) / promotion.POINTER).unlink()
    with pytest.raises(StageError, match=r"models were promoted before; .*--rollback tiny"):
        judged(config, [output(tmp_path, "convert", 2)])


def test_a_line_of_history_that_a_crash_cut_short_costs_that_line_alone(tmp_path: Path) -> None:
    old, new = output(tmp_path, "convert", 1), output(tmp_path, "convert", 2)
    promotion.promote(tmp_path, NAME, old.path)
    with (promotion.folder(tmp_path, NAME) / promotion.HISTORY).open("a") as file:
        file.write('{"time": "2026-11')
    promotion.promote(tmp_path, NAME, new.path)
    found = [line["output"] for line in promotion.history(tmp_path, NAME)]
    assert [name.rpartition("/")[2] for name in found] == [old.path.name, new.path.name]
    assert promotion.rollback(tmp_path, NAME) == old.path.resolve()


def test_what_a_rollback_left_is_not_promoted_again_by_a_run_that_finds_nothing_new(
    tmp_path: Path,
) -> None:
    config = config_of(tmp_path)
    old, new = output(tmp_path, "convert", 1), output(tmp_path, "convert", 2)
    better = change(0.06, 0.03, 0.09)
    judged(config, [old])
    assert judged(config, [new, *compared(old, **better)]).name == "Promoted"
    promotion.rollback(tmp_path, NAME)
    found = judged(config, [new, *compared(old, **better)])
    assert found.name == "Nothing new" and "rolled back from it" in found.message
    assert promotion.current(tmp_path, NAME) == old.path.resolve()
    newest = output(tmp_path, "convert", 3)
    assert judged(config, [newest, *compared(old, **better)]).name == "Promoted"


def test_with_approval_a_person_decides_once(tmp_path: Path) -> None:
    config = config_of(tmp_path, "gate.approval=true")
    old, new = output(tmp_path, "convert", 1), output(tmp_path, "convert", 2)
    assert judged(config, [old], Decision(approved=True)).name == "Promoted"
    better = compared(old, **change(0.06, 0.03, 0.09))
    found = judged(config, [new, *better], Decision(approved=False, comment="too chatty"))
    assert found.name == "Turned down" and "too chatty" in found.message
    assert promotion.current(tmp_path, NAME) == old.path.resolve()
    assert promotion.history(tmp_path, NAME)[-1]["because"].endswith("too chatty")
    again = judged(config, [new, *better])
    assert again.name == "Nothing new" and "turned this model down" in again.message


def test_each_name_has_a_question_of_its_own(tmp_path: Path) -> None:
    """Two recipes may come to the same model, and be for different people."""
    model, keys = output(tmp_path, "convert", 1), set[str]()

    def ask(question: str, key: str) -> Decision:
        keys.add(key)
        return Decision(approved=False)

    for name in ("Shop.en", "help-desk"):
        conclude(config_of(tmp_path, "gate.approval=true", f"name={name}"), [model], ask)
    assert len(keys) == 2
    assert all(set(key) <= set(string.ascii_lowercase + string.digits + "-") for key in keys)


def test_a_model_that_the_gate_refuses_is_nobodys_question(tmp_path: Path) -> None:
    config = config_of(tmp_path, "gate.approval=true")
    old = output(tmp_path, "convert", 1)
    judged(config, [old], Decision(approved=True))
    worse = compared(old, **change(-0.06, -0.09, -0.03))
    assert judged(config, [output(tmp_path, "convert", 2), *worse]).name == "Refused by gate"


ASKING = "from flows.approval import *\nprint('SAID', at_the_terminal('tiny', 'key'))"


@pytest.mark.parametrize(
    ("typed", "said"),
    [
        ("Yes, looks good\n", "Decision(approved=True, comment='looks good')"),
        ("\nhm\nn\n", "Decision(approved=False, comment='')"),
        ("\x04", "nobody can be asked here (gate.approval)"),
    ],
)
def test_the_question_at_a_terminal_is_asked_until_it_is_answered(typed: str, said: str) -> None:
    pid, terminal = pty.fork()
    if not pid:
        os.execv(sys.executable, [sys.executable, "-c", ASKING])
    shown = b""
    while b"comment]" not in shown:
        shown += os.read(terminal, 1000)
    os.write(terminal, typed.encode())
    with suppress(OSError):  # how Linux says that the other end is gone
        while part := os.read(terminal, 1000):
            shown += part
    os.waitpid(pid, 0)
    assert said in shown.decode()


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
