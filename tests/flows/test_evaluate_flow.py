"""The flow that measures a model: its plan, its input, its form, and a whole run."""

import json
import subprocess
from datetime import date
from pathlib import Path

import pytest

from configs import RECIPES, ConfigError, load
from flows import forms, run_names
from flows.catalogue import FLOWS
from flows.evaluate import Evaluation
from flows.sft_then_dpo import SFTThenDPO
from tests.small import ROOT, python

LABELS = [
    "fetch model", "fetch conversations", "fetch preferences", "prepare data", "tokenize data",
    "fetch baseline", "evaluate baseline", "evaluate model",
]  # fmt: skip


def flow(store: Path, *words: str) -> subprocess.CompletedProcess[str]:
    places = [f"store={store}", f"runs={store}-runs"]
    return python("-m", "flows.evaluate", "--engine", "inline", *places, *words, cwd=ROOT)


def planned(store: Path, *words: str) -> list[str]:
    done = flow(store, "--plan", *words)
    assert done.returncode == 0, done.stderr
    return [line.split(":")[0] for line in done.stdout.splitlines() if not line.startswith(" ")]


def test_baseline_and_preferences_are_for_the_user_to_leave_out(tmp_path: Path) -> None:
    assert planned(tmp_path) == LABELS
    alone = planned(tmp_path, "baseline=null", "preferences=null")
    assert alone == [each for each in LABELS if not each.endswith(("baseline", "preferences"))]


@pytest.mark.parametrize(
    ("words", "says"),
    [
        (["model.config.source={kind: new_task, part: conversations, rows: 9}"],
         "new_task brings data, and a model is wanted here"),
        (["baseline.config.source={kind: local_checkpoint, path: .}"], "with the flow convert"),
        (["preferences.config.source={kind: new_model}"],
         "new_model brings a model, and data are wanted here"),
        (["sft.config.epochs=2"], "sft: unknown key"),
    ],
)  # fmt: skip
def test_bad_input_is_one_clear_line(tmp_path: Path, words: list[str], says: str) -> None:
    done = flow(tmp_path / "store", *words)
    assert done.returncode == 2
    assert says in done.stderr and len(done.stderr.strip().splitlines()) == 1
    assert not (tmp_path / "store").exists()


def test_only_what_is_measured_may_be_held_out_whole() -> None:
    assert load(Evaluation, RECIPES / "tiny_evaluate.yaml").prepare_data.config.test_fraction == 1
    with pytest.raises(ConfigError, match="leaves no row to train on"):
        load(SFTThenDPO, RECIPES / "tiny.yaml", ["prepare_data.config.test_fraction=1"])


@pytest.mark.parametrize(
    ("name", "first", "called"),
    [
        ("evaluate", ["name", "model", "baseline", "conversations", "preferences", "evaluate"],
         "new-model · new-task · evaluate · 2026-11-30"),
        ("convert", ["name", "trained", "base", "convert", "store", "runs"],
         "new-model · convert · 2026-11-30"),
    ],
)  # fmt: skip
def test_forms_and_names_of_flows_that_train_nothing(
    name: str, first: list[str], called: str
) -> None:
    flow = FLOWS[name]
    schema = forms.parameter_schema(flow)
    assert "backend" not in schema["properties"], "it is that of training stages"
    assert list(schema["definitions"][flow.schema.__name__]["properties"])[: len(first)] == first
    (recipe,) = flow.recipes()
    assert recipe.stem == f"tiny_{name}"
    assert run_names.name(load(flow.schema, recipe), date(2026, 11, 30)) == called


@pytest.mark.slow
def test_a_whole_run_compares_two_models_and_its_report_is_complete(tmp_path: Path) -> None:
    store = tmp_path / "store"
    done = flow(store)
    assert done.returncode == 0, done.stdout[-3000:] + done.stderr[-3000:]
    assert "score                      baseline              model" in done.stdout
    folder = tmp_path / "store-runs" / "tiny_evaluate"
    text = (folder / "report.md").read_text()
    assert "| model against baseline |" in text and "## Samples" in text
    assert "## Figures" in text and "## Curves" not in text, "nothing was trained"
    assert (folder / "figures" / "scores.png").stat().st_size > 0
    scores = json.loads((folder / "evaluate-model" / "metrics.json").read_text())
    assert scores["conversations/loss"]["n"] == 300, "every row is measured"
    again = flow(store)
    assert again.returncode == 0 and " ran in " not in again.stdout
