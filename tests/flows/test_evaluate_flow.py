"""The flow that measures a model: its plan, its input, its form, and a whole run."""

import json
import shlex
from datetime import date
from pathlib import Path

import pytest

from configs import RECIPES, ConfigError, load
from flows import forms, run_names
from flows.catalogue import FLOWS
from flows.evaluate import Evaluation
from flows.sft_then_dpo import SFTThenDPO
from flows.steps import Step
from stages.convert import Convert
from stages.evaluate import Evaluate
from tests.small import ROOT, flow_alone

LABELS = [
    "fetch model", "fetch conversations", "fetch preferences", "prepare data", "tokenize data",
    "fetch baseline", "evaluate baseline", "evaluate model",
]  # fmt: skip


def planned(store: Path, *words: str) -> list[str]:
    done = flow_alone("evaluate", store, *words, "--plan")
    assert done.returncode == 0, done.stderr
    return [line.split(":")[0] for line in done.stdout.splitlines() if not line.startswith(" ")]


def test_baseline_and_preferences_are_for_the_user_to_leave_out(tmp_path: Path) -> None:
    assert planned(tmp_path) == LABELS
    alone = planned(tmp_path, "baseline=null", "preferences=null")
    assert alone == [each for each in LABELS if not each.endswith(("baseline", "preferences"))]


SOURCES = ("model", "baseline", "conversations", "preferences", "trained", "base")
NEW_TASK = "{kind: new_task, part: conversations, rows: 9}"


@pytest.mark.parametrize(
    ("name", "word", "says"),
    [
        ("evaluate", f"model.config.source={NEW_TASK}",
         "new_task brings data, and a model is wanted here"),
        ("evaluate", "baseline.config.source={kind: local_checkpoint, path: .}",
         "with the flow convert"),
        ("evaluate", "preferences.config.source={kind: new_model}",
         "new_model brings a model, and data are wanted here"),
        ("evaluate", "sft.config.epochs=2", "sft: unknown key"),
        ("convert", f"trained.config.source={NEW_TASK}",
         "new_task brings data, and a model is wanted here"),
        ("convert", "trained.config.source={kind: local_checkpoint, path: /nowhere}",
         "/nowhere: no such file or directory"),
        ("convert", "trained.config.source={kind: local_checkpoint, path: docs}",
         "docs: holds no weights in a known layout"),
        ("convert", "base.config.source={kind: local_checkpoint, path: .}",
         "a whole model is wanted here"),
        ("convert", "base=null", "base: "),
    ],
)  # fmt: skip
def test_bad_input_is_one_clear_line(tmp_path: Path, name: str, word: str, says: str) -> None:
    done = flow_alone(name, tmp_path / "store", word)
    assert done.returncode == 2
    assert says in done.stderr and len(done.stderr.strip().splitlines()) == 1
    assert not (tmp_path / "store").exists()


def documented() -> dict[str, list[str]]:
    """What the README types after each flow's name."""
    section = (ROOT / "README.md").read_text().partition("## Measuring and converting alone")[2]
    typed = section.split("```")[1].replace("\\\n", " ").strip().splitlines()
    return {line.split()[2].rpartition(".")[2]: shlex.split(line)[3:] for line in typed}


@pytest.mark.parametrize(("name", "computes"), [("evaluate", Evaluate()), ("convert", Convert())])
def test_the_readme_s_commands_bring_no_settings_of_the_tiny_recipes(
    name: str, computes: Evaluate | Convert
) -> None:
    recipe, *words = documented()[name]
    config = load(FLOWS[name].schema, RECIPES / f"{recipe}.yaml", words)
    assert getattr(config, name).config == computes
    sources = {key: step for key, step in config if isinstance(step, Step) and key in SOURCES}
    assert sources.keys() == {word.partition(".")[0] for word in words}
    assert all(step.config.source.kind.startswith("local_") for step in sources.values())


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
    neutral, recipe = flow.recipes()
    assert (neutral.stem, recipe.stem) == (name, f"tiny_{name}")
    assert run_names.name(load(flow.schema, recipe), date(2026, 11, 30)) == called


@pytest.mark.slow
def test_a_whole_run_compares_two_models_and_its_report_is_complete(tmp_path: Path) -> None:
    store = tmp_path / "store"
    done = flow_alone("evaluate", store)
    assert done.returncode == 0, done.stdout[-3000:] + done.stderr[-3000:]
    assert "score                      baseline              model" in done.stdout
    folder = tmp_path / "store-runs" / "tiny_evaluate"
    text = (folder / "report.md").read_text()
    assert "| model against baseline |" in text and "## Samples" in text
    assert "## Figures" in text and "## Curves" not in text, "nothing was trained"
    assert (folder / "figures" / "scores.png").stat().st_size > 0
    scores = json.loads((folder / "evaluate-model" / "metrics.json").read_text())
    assert scores["conversations/loss"]["n"] == 300, "every row is measured"
    again = flow_alone("evaluate", store)
    assert again.returncode == 0 and " ran in " not in again.stdout
