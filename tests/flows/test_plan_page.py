"""What a run says before it does anything: reuse or run, why, and what it takes."""

import json
import math
from pathlib import Path
from typing import Any

import pytest

from backends import Auto
from backends.planner.model import find_model
from backends.planner.ranking import judge
from backends.planner.work import Setup
from configs import RECIPES, load
from flows import plan_page, planning
from flows.catalogue import FLOWS
from flows.costs import cost
from flows.run_stage import Plan, plan
from flows.steps import Artifact, Lineage, Step
from stages import manifest, resume
from stages.manifest import Manifest


def plans_of(store: Path, *overrides: str, flow: str = "sft-then-dpo") -> tuple[Any, list[Plan]]:
    found = FLOWS[flow]
    recipe = {"sft-then-dpo": "tiny.yaml", "sft-then-ppo": "tiny_ppo.yaml"}[flow]
    config = load(found.schema, RECIPES / recipe, [f"store={store}", *overrides])
    plans: list[Plan] = []

    def look(stage: str, step: Step[Any], *, label: str, **inputs: Artifact) -> Artifact:
        plans.append(plan(stage, step, config.store, label=label, inputs=inputs))
        return plans[-1].promised

    found.body(config, look)
    return config, plans


def pretend_done(plans: list[Plan]) -> None:
    for each in plans:
        each.out.mkdir(parents=True, exist_ok=True)
        manifest.write(each.out, Manifest(identity=each.identity))


def cells(page: str) -> dict[str, list[str]]:
    """The table of a page: the cells of each stage by its label."""
    rows = [line.strip("|").split(" | ") for line in page.splitlines() if line.startswith("| ")]
    return {row[0].strip(): [cell.strip() for cell in row[1:]] for row in rows[2:]}


def test_an_empty_store_means_that_everything_runs(tmp_path: Path) -> None:
    config, plans = plans_of(tmp_path / "store")
    page = plan_page.page(config, plans)
    table = cells(page)
    assert list(table) == [each.label for each in plans]
    assert {row[0] for row in table.values()} == {"**run**"}
    assert {row[1] for row in table.values()} == {"nothing of this stage is in the store"}
    assert "-m torch.distributed.run --nnodes=1 --nproc-per-node=2" in page
    assert not list(tmp_path.rglob("*.json"))


def test_a_changed_field_is_named_with_both_values_and_what_follows_says_so(
    tmp_path: Path,
) -> None:
    pretend_done(plans_of(tmp_path / "store")[1])
    config, plans = plans_of(tmp_path / "store", "sft.config.learning_rate=1.0e-3")
    table = cells(plan_page.page(config, plans))
    assert table["fetch model"][0] == "reuse"
    assert table["sft"][:2] == ["**run**", "sft.config.learning_rate 0.002 -> 0.001"]
    assert table["convert sft"][:2] == ["**run**", "follows sft"]
    assert table["evaluate base"][0] == "reuse"
    assert plan_page.line(plans) == "6 to reuse, 6 to run"


def write_shape(folder: Path, *, tie: bool) -> None:
    """The config.json of the tests' small model."""
    shape = {
        "architectures": ["LlamaForCausalLM"], "model_type": "llama", "hidden_size": 64,
        "intermediate_size": 128, "num_hidden_layers": 2, "num_attention_heads": 4,
        "num_key_value_heads": 4, "vocab_size": 128, "tie_word_embeddings": tie,
    }  # fmt: skip
    (folder / "config.json").write_text(json.dumps(shape))


def with_facts(store: Path, flow: str, counts: dict[str, int]) -> dict[str, Plan]:
    """Plans by label, where model and data are there: the rows as ``counts`` has them."""
    plans = {each.label: each for each in plans_of(store, flow=flow)[1]}
    pretend_done(list(plans.values())[:5])
    (plans["tokenize data"].out / "metrics.json").write_text(json.dumps(counts))
    fetched = plans["fetch model"].out / "model"
    fetched.mkdir()
    write_shape(fetched, tie=True)
    return {each.label: each for each in plans_of(store, flow=flow)[1]}


def test_training_has_its_memory_steps_and_disk(tmp_path: Path) -> None:
    counts = {"conversations/train/rows": 320, "conversations/train/longest": 60}
    plans = with_facts(tmp_path / "store", "sft-then-dpo", counts)
    price = cost(plans["sft"])
    assert price is not None
    assert (price.ranks, price.on_gpus, price.steps) == (2, False, 10)
    assert price.memory_bytes and price.seconds and price.disk_bytes
    assert price.gpu_hours is None
    config = load(FLOWS["sft-then-dpo"].schema, RECIPES / "tiny.yaml", [f"store={tmp_path}/store"])
    assert cells(plan_page.page(config, list(plans.values())))["sft"][3] == "2 CPUs"


def test_each_stage_counts_its_own_rows_and_steps(tmp_path: Path) -> None:
    """Reward models learn from pairs; PPO from prompts, a rollout a step, each learned from
    ``passes`` times in ``minibatches`` steps of the optimizer."""
    counts = {
        "conversations/train/rows": 320, "conversations/train/longest": 60,
        "preferences/train/rows": 96, "preferences/train/longest": 60,
    }  # fmt: skip
    plans = with_facts(tmp_path / "store", "sft-then-ppo", counts)
    prices = {label: cost(plans[label]) for label in ("reward", "ppo")}
    steps = {label: price and price.steps for label, price in prices.items()}
    assert steps == {"reward": math.ceil(96 / 32), "ppo": math.ceil(320 / (32 * 4))}
    ppo = plans["ppo"]
    asked = planning.work(ppo.step.config, ppo.lineage)
    assert (asked.passes, asked.reward_models, asked.global_batch) == (2, 0, 32)
    assert not isinstance(ppo.step.backend, Auto)
    setup = Setup(ppo.step.backend, ppo.step.resources)
    machine = ppo.step.placement.machine(ppo.step.resources, Auto(ranks="given"))
    found = judge(find_model(str(plans["fetch model"].out / "model")), asked, setup, machine)
    assert prices["ppo"] and prices["ppo"].seconds == pytest.approx(3 * 4 * 2 * found.time.seconds)


SAVED = {
    ("kind: ddp", "full", "float32"): 1246531,
    ("kind: ddp", "full", "bfloat16"): 654776,
    ("kind: ddp", "lora", "bfloat16"): 493815,
    ("kind: fsdp", "full", "bfloat16"): 1650397,
    ("kind: fsdp", "lora", "float32"): 646471,
    ("kind: fsdp, checkpoints: sharded", "full", "float32"): 1528719,
    ("kind: deepspeed, zero_stage: 1", "full", "float32"): 2080411,
    ("kind: deepspeed, zero_stage: 2", "full", "bfloat16"): 1686086,
    ("kind: deepspeed, zero_stage: 2", "lora", "float32"): 825600,
    ("kind: deepspeed, zero_stage: 3", "full", "float32"): 1701313,
    ("kind: deepspeed, zero_stage: 3", "lora", "bfloat16"): 649402,
}
"""Bytes of a checkpoint that two real ranks left, of a model of 98,624 weights with untied ends, by
backend, method and ``load_dtype`` (LoRA of rank 16 on every linear layer)."""


@pytest.mark.parametrize("case", SAVED, ids=" ".join)
def test_the_disk_that_checkpoints_take_is_what_they_took(tmp_path: Path, case: Any) -> None:
    backend, method, dtype = case
    write_shape(tmp_path, tie=False)
    words = [
        f"sft.backend={{{backend}}}",
        f"sft.config.method.kind={method}",
        f"sft.config.load_dtype={dtype}",
    ]
    step = load(FLOWS["sft-then-dpo"].schema, RECIPES / "tiny.yaml", words).sft
    known = Lineage(model=str(tmp_path), longest_conversation=60)
    trained = 98624 if method == "full" else 34816
    more = step.model_copy(update={"keep_checkpoints": 3})
    found, one_more = (planning.disk_bytes(each, known) for each in (step, more))
    assert found and one_more
    assert found - 4 * trained == (2 + 1) * (one_more - found)
    beside = SAVED[case] - (one_more - found)  # tokenizer, random states, settings, metadata
    assert 0 < beside < 350_000


def test_a_run_that_goes_on_needs_no_second_place_for_what_it_saved(tmp_path: Path) -> None:
    whole = tmp_path / "checkpoints" / "checkpoint-4"
    whole.mkdir(parents=True)
    (whole / "weights").write_bytes(b"x" * 1000)
    assert resume.saved_bytes(tmp_path) == 0  # cut short
    resume.mark_complete(whole, {})
    assert resume.saved_bytes(tmp_path) > 1000


@pytest.mark.parametrize("name", ["conversations", "preferences"])
def test_another_file_is_told_by_its_name(tmp_path: Path, name: str) -> None:
    for number in (1, 2):
        (tmp_path / f"rows-{number}.jsonl").write_text(f'{{"n": {number}}}\n')
    source = f"{name}.config.source"
    words = [f"{source}.kind=local_data", f"{source}.path={tmp_path}/rows-1.jsonl"]
    pretend_done(plans_of(tmp_path / "store", *words)[1])
    words[1] = f"{source}.path={tmp_path}/rows-2.jsonl"
    config, plans = plans_of(tmp_path / "store", *words)
    why = cells(plan_page.page(config, plans))[f"fetch {name}"][1]
    assert "(rows-1.jsonl) -> sha256:" in why and why.endswith("(rows-2.jsonl)")
    assert f"{name}.config.source.path" in why
