"""The flow with rewards through its command line: its plan, its input, and a whole short run."""

import json
import subprocess
from pathlib import Path
from typing import Any

import pytest
from pydantic import ValidationError

from backends import DDP, Resources
from backends.planner.ranking import refusals
from backends.planner.work import Setup
from configs import RECIPES, load
from flows import planning, probe
from flows.sft_then_ppo import SFTThenPPO, with_rewards
from flows.steps import Lineage, Step
from stages import STAGES, manifest
from stages.evaluate import Evaluate
from stages.ppo import PPO
from stages.reward import RewardModelling
from stages.rewards.config import Reward
from tests.small import ROOT, python

MODULE = "flows.sft_then_ppo"
# The tiny recipe, with less of everything.
SHORT = [
    "conversations.config.source.rows=450",
    "preferences.config.source.rows=150",
    "sft.config.max_steps=12",
    "reward.config.max_steps=4",
    "ppo.config.max_steps=2",
    "evaluate.config.generate_rows=8",
    "evaluate.config.kl_rows=8",
]
LABELS = [
    "fetch model", "fetch conversations", "fetch preferences", "prepare data", "tokenize data",
    "sft", "convert sft", "reward", "convert reward", "ppo", "convert ppo",
    "evaluate base", "evaluate sft", "evaluate ppo",
]  # fmt: skip


def flow(store: Path, *words: str) -> subprocess.CompletedProcess[str]:
    places = [f"store={store}", f"runs={store}-runs"]
    return python("-m", MODULE, "--engine", "inline", *SHORT, *places, *words, cwd=ROOT)


def plan(store: Path, *words: str) -> dict[str, str]:
    """What the plan says of each stage: label to its lines."""
    done = flow(store, "--plan", *words)
    assert done.returncode == 0, done.stderr
    found: dict[str, str] = {}
    label = ""
    for line in done.stdout.splitlines():
        if not line.startswith(" "):
            label = line.split(":")[0]
        found[label] = found.get(label, "") + line + "\n"
    return found


def recipe(*overrides: str) -> SFTThenPPO:
    return load(SFTThenPPO, RECIPES / "tiny_ppo.yaml", overrides)


def test_the_default_recipe_is_planned_stage_by_stage(tmp_path: Path) -> None:
    found = plan(tmp_path / "store")
    assert list(found) == LABELS
    assert "ddp" in found["ppo"] and "ranks: 2" in found["ppo"]
    assert not (tmp_path / "store").exists()


def outputs(found: dict[str, str]) -> dict[str, str]:
    return {label: text.split("output:")[1].split()[0] for label, text in found.items()}


def test_only_what_a_change_reaches_is_other_work(tmp_path: Path) -> None:
    before = outputs(plan(tmp_path / "store"))
    after = outputs(plan(tmp_path / "store", "ppo.config.gae_lambda=0.9"))
    changed = {label for label in before if before[label] != after[label]}
    assert changed == {"ppo", "convert ppo", "evaluate ppo"}
    after = outputs(plan(tmp_path / "store", "reward.config.centring=0"))
    changed = {label for label in before if before[label] != after[label]}
    assert changed == {
        "reward", "convert reward", "evaluate base", "evaluate sft", "evaluate ppo"
    }, "PPO was not rewarded by the reward model"  # fmt: skip


def test_a_reward_model_that_is_asked_decides_the_policy(tmp_path: Path) -> None:
    asked = "ppo.config.rewards=[{model: true}]"
    before = outputs(plan(tmp_path / "store", asked))
    after = outputs(plan(tmp_path / "store", asked, "reward.config.centring=0"))
    assert before["ppo"] != after["ppo"] and before["sft"] == after["sft"]


def test_without_preferences_there_is_no_reward_model(tmp_path: Path) -> None:
    found = plan(tmp_path / "store", "preferences=null")
    assert not {"fetch preferences", "reward", "convert reward"} & found.keys()
    done = flow(tmp_path / "store", "preferences=null", "ppo.config.rewards=[{model: true}]")
    assert done.returncode == 2 and "give preferences" in done.stderr
    assert len(done.stderr.strip().splitlines()) == 1 and "Traceback" not in done.stderr


def test_another_base_of_the_reward_model_has_rows_of_its_own(tmp_path: Path) -> None:
    words = "reward_base={config: {source: {kind: new_model, seed: 1}}}"
    found = plan(tmp_path / "store", words)
    assert "fetch reward base" in found and "tokenize for reward" in found


@pytest.mark.parametrize(
    ("words", "says"),
    [
        (["ppo.config.rewards=[{function: exact}]"], "'exact' is no built-in reward"),
        (["ppo.config.rewards=[{function: regex, options: {}}]"], "regex needs the option pattern"),
        (["ppo.config.reward=1"], "ppo.config.reward: unknown key"),
        (["reward.config.method={kind: lora, ranks: 4}"], "unknown key"),
        (["ppo.config.global_batch_size=33"], "does not divide over 2 ranks"),
    ],
)
def test_bad_input_is_one_clear_line(tmp_path: Path, words: list[str], says: str) -> None:
    done = flow(tmp_path / "store", *words)
    assert done.returncode == 2
    assert says in done.stderr and "Traceback" not in done.stderr
    assert len(done.stderr.strip().splitlines()) == 1
    assert not (tmp_path / "store").exists()


def test_the_evaluation_rates_what_was_rewarded() -> None:
    step = Step[Evaluate](config=Evaluate())
    trained_on = (Reward(function="length", options={"most": 3}, weight=2),)
    rated = with_rewards(step, trained_on, judged=True).config.rewards
    assert rated == (*trained_on, Reward(model=True, weight=0))
    assert with_rewards(step, trained_on, judged=False).config.rewards == trained_on
    asked = (Reward(model=True),)
    assert with_rewards(step, asked, judged=True).config.rewards == asked
    own = Step[Evaluate](config=Evaluate(rewards=trained_on))
    assert with_rewards(own, asked, judged=False).config.rewards == trained_on


def test_a_probe_of_memory_is_too_short_for_a_warm_up() -> None:
    config = PPO(critic_warmup=5, epochs=3)
    two = PPO.model_validate(probe.shortened(config).model_dump())
    assert (two.max_steps, two.epochs, two.critic_warmup) == (2, 1, 0)


def test_a_reward_base_without_preferences_is_refused() -> None:
    with pytest.raises(ValidationError, match="nothing is trained from it without preferences"):
        data = recipe().model_dump(mode="json")
        SFTThenPPO.model_validate(data | {"preferences": None, "reward_base": data["model"]})


def test_every_field_says_what_it_is_for() -> None:
    """The Prefect form and ``--help`` show these texts."""
    schema = SFTThenPPO.model_json_schema()
    bare = [
        f"{name}.{field}"
        for name, model in schema["$defs"].items()
        for field, facts in model.get("properties", {}).items()
        if "description" not in facts and field != "kind" and "$ref" not in facts
    ]
    assert bare == []


@pytest.mark.parametrize(
    ("config", "stage", "longest"),
    [
        (RewardModelling(), "reward", 90),
        (PPO(max_new_tokens=40), "ppo", 110),
        (STAGES["grpo"].config_type.model_validate(
            {"rewards": [{"function": "length", "options": {"most": 3}}], "max_new_tokens": 40}
        ), "grpo", 110),
    ],
)  # fmt: skip
def test_the_planner_is_asked_about_the_stage_that_it_is(
    config: Any, stage: str, longest: int
) -> None:
    known = Lineage(longest_conversation=70, longest_pair=90)
    work = planning.work(config, known)
    assert (work.stage, work.seq_length) == (stage, longest)
    assert work.global_batch == config.global_batch_rows
    assert refusals(work, Setup(DDP(), Resources(micro_batch_size=4))) is None


def test_grpo_that_charges_nothing_for_divergence_holds_no_reference() -> None:
    rewards = [{"function": "length", "options": {"most": 3}}]
    free, priced = (
        STAGES["grpo"].config_type.model_validate({"rewards": rewards, "beta": beta})
        for beta in (0, 0.04)
    )
    known = Lineage(longest_conversation=70)
    assert planning.work(free, known).reference == "none"
    assert planning.work(priced, known).reference is None


@pytest.mark.slow
def test_a_whole_short_run(tmp_path: Path) -> None:
    store = tmp_path / "store"
    done = flow(store)
    assert done.returncode == 0, done.stdout[-3000:] + done.stderr[-3000:]
    assert "ppo: step " in done.stdout and "reward " in done.stdout
    tail = done.stdout.rpartition("evaluate ppo: ran")[2]
    for words in ("reward of answers, sum", "answers that win by reward model, %",
                  "KL to the reference, nats/answer"):  # fmt: skip
        assert words in tail, tail
    report = Path(done.stdout.rpartition("report: ")[2].split("  (")[0])
    text = report.read_text()
    for words in ("## Reward model", "## Answers while training", "figures/reliability.png",
                  "figures/reward.png"):  # fmt: skip
        assert words in text
    for line in [line for line in text.splitlines() if line.startswith("![")]:
        assert (report.parent / line.rpartition("(")[2].rstrip(")")).stat().st_size > 0
    ppo = next((store / "ppo").glob(f"*/{manifest.NAME}")).parent
    assert (ppo / "critic").is_dir() and (ppo / "samples.jsonl").exists()
    ranks = json.loads((ppo / manifest.NAME).read_text())["provenance"]["ranks"]
    assert [rank["wrapper"] for rank in ranks] == ["ddp", "ddp"]
    again = flow(store)
    assert again.returncode == 0 and "ran in" not in again.stdout
