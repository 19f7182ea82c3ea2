"""GRPO and RLOO through TRL's trainers on the data stage's own prompts."""

import json
import shutil
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from backends import DDP, FSDP, AnyBackend, DeepSpeed, Resources
from stages import resume
from stages.base import Context, StageError
from stages.grpo import GRPO, check_step_zero, grpo
from tests.small import Run, run_jobs
from tests.task import write_task

STEPS = 3
BASE: dict[str, Any] = {
    "learning_rate": 1e-3,
    "schedule": "constant",
    "warmup_fraction": 0.0,
    "global_batch_size": 8,
    "num_generations": 4,
    "max_steps": STEPS,
    "max_new_tokens": 8,
    "beta": 0.05,
    "rewards": [
        {"function": "tests.stages.test_grpo:share_of_digits"},
        {"function": "length", "options": {"most": 4, "margin": 8}, "weight": 0.5},
    ],
}
ESTIMATORS = {"grpo": {"kind": "grpo"}, "rloo": {"kind": "rloo"}}
LOGGED = (
    *("reward", "reward/share_of_digits", "reward/length", "kl", "kl_per_token", "entropy"),
    *("answer_tokens", "eos_rate", "clip_fraction", "grad_norm", "tokens_per_second"),
)


def share_of_digits(
    prompts: Sequence[Any], completions: Sequence[str], rows: Sequence[Any]
) -> list[float]:
    """The share of digits; that prompts and rows belong together is checked on the way."""
    for prompt, row in zip(prompts, rows, strict=True):
        asked = prompt[-1]["content"].split(" ")[0]  # ``37 km = ? m``
        assert asked in row["answer"], (prompt, row)
    return [sum(c.isdigit() for c in text) / max(1, len(text)) for text in completions]


def training(out: Path, task: Path, estimator: str, **config: Any) -> Run:
    return Run(
        out=out / estimator,
        stage="grpo",
        config=BASE | {"estimator": ESTIMATORS[estimator]} | config,
        inputs={"policy": task / "base", "data": task / "data"},
    )


@pytest.fixture(scope="module")
def task(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_task(tmp_path_factory.mktemp("task"))


@pytest.fixture(scope="module")
def trained(tmp_path_factory: pytest.TempPathFactory, task: Path) -> dict[str, Run]:
    out = tmp_path_factory.mktemp("trained")
    runs = {name: training(out, task, name) for name in ESTIMATORS}
    run_jobs(list(runs.values()))
    return runs


@pytest.mark.parametrize("estimator", ESTIMATORS)
def test_it_trains_and_logs_in_the_words_of_ppo(trained: dict[str, Run], estimator: str) -> None:
    rows = trained[estimator].rows
    assert [row["step"] for row in rows] == list(range(1, STEPS + 1))
    for row in rows:
        assert set(LOGGED) <= row.keys() and not any("completions/" in key for key in row)
        weighted = row["reward/share_of_digits"] + 0.5 * row["reward/length"]
        assert row["reward"] == pytest.approx(weighted, abs=1e-5)
    assert rows[0]["kl"] == pytest.approx(0, abs=1e-5), "the policy is its reference at first"
    assert rows[-1]["kl"] > 1e-5, "and then leaves it"
    assert (trained[estimator].out / "model" / "model.safetensors").exists()


@pytest.mark.parametrize("estimator", ESTIMATORS)
def test_answers_are_written_down_with_their_rewards(
    trained: dict[str, Run], estimator: str
) -> None:
    text = (trained[estimator].out / "samples.jsonl").read_text()
    rows = [json.loads(line) for line in text.splitlines()]
    assert [row["step"] for row in rows] == [1, 1, 2, 2, 3, 3]
    for row in rows:
        scores = row["scores"]
        assert scores["total"] == scores["share_of_digits"] + 0.5 * scores["length"]
        assert row["answer"] and "= ?" in row["prompt"] and "<|im_" not in row["completion"]


def test_prompts_are_the_data_stage_s_ids(task: Path) -> None:
    from datasets import load_from_disk
    from transformers import AutoTokenizer

    from stages.grpo import Prompts

    rows: Any = load_from_disk(str(task / "data" / "conversations" / "train"))
    asked = Prompts(rows, AutoTokenizer.from_pretrained(task / "base" / "model"))
    for place in ("0", "7"):
        row = rows[int(place)]
        assert asked.ids(place) == row["prompt_ids"]
        assert asked.messages(place) == json.loads(row["prompt"])
        assert asked.facts(place) == {"answer": row["answer"]}


def test_a_prompt_without_room_for_its_answer_is_named(task: Path, tmp_path: Path) -> None:
    config = GRPO.model_validate(BASE | {"max_new_tokens": 250})
    with pytest.raises(StageError, match=r"conversations/train, row \d+: a prompt of \d+ tokens"):
        grpo(config, Context(tmp_path), policy=task / "base", data=task / "data")


@pytest.mark.parametrize(
    ("prompts", "said"),
    [
        ([[5], []], "conversations/train, row 1: its prompt is empty"),
        ([[5, 70_000]], "the prompts hold token 70000, and the policy knows"),
    ],
)
def test_prompts_that_cannot_be_answered_are_told(
    task: Path, tmp_path: Path, prompts: list[list[int]], said: str
) -> None:
    from datasets import Dataset

    rows = [{"prompt_ids": ids, "answer": "37 m"} for ids in prompts]
    Dataset.from_list(rows).save_to_disk(tmp_path / "data" / "conversations" / "train")
    refused(said, tmp_path, policy=task / "base", data=tmp_path / "data")


def refused(said: str, out: Path, *, policy: Path, data: Path) -> None:
    with pytest.raises(StageError, match=said):
        grpo(GRPO.model_validate(BASE), Context(out), policy=policy, data=data)


def test_an_adapter_is_no_policy(task: Path, tmp_path: Path) -> None:
    shutil.copytree(task / "base", tmp_path / "policy")
    (tmp_path / "policy" / "model" / "adapter_config.json").write_text("{}")
    said = "an adapter without its base"
    refused(said, tmp_path, policy=tmp_path / "policy", data=task / "data")


def test_answers_end_where_the_generation_config_says(task: Path, tmp_path: Path) -> None:
    """A tokenizer need not have an end-of-sequence token; one of both must name one."""
    policy = tmp_path / "policy"
    shutil.copytree(task / "base", policy)
    _leave_out(policy / "model" / "tokenizer_config.json", "eos_token")
    alone = {"use_cpu": True, "per_device_train_batch_size": 8, "save_steps": 1000}
    promise = {"wrapper": "none", "world_size": 1}
    ctx = Context(tmp_path / "out", trainer_args=alone, promise=promise)
    plain = {"max_steps": 1, "rewards": [{"function": "length", "options": {"most": 4}}]}
    config = GRPO.model_validate(BASE | plain)
    assert grpo(config, ctx, policy=policy, data=task / "data")["steps"] == 1
    for name in ("config", "generation_config"):
        _leave_out(policy / "model" / f"{name}.json", "eos_token_id")
    ctx = replace(ctx, out=tmp_path / "endless")
    with pytest.raises(StageError, match="nor the tokenizer names an eos"):
        grpo(config, ctx, policy=policy, data=task / "data")


def _leave_out(path: Path, key: str) -> None:
    values = json.loads(path.read_text())
    values.pop(key, None)
    path.write_text(json.dumps(values))


def test_a_wrong_reference_is_caught_at_the_first_step() -> None:
    config = GRPO.model_validate(BASE)
    check_step_zero({"kl": 0.0}, config)
    check_step_zero({}, config)
    with pytest.raises(StageError, match=r"divergence is 0\.200000 and must be 0"):
        check_step_zero({"kl": 0.2}, config)


@pytest.mark.slow
@pytest.mark.parametrize("estimator", ESTIMATORS)
def test_the_reward_rises(task: Path, tmp_path: Path, estimator: str) -> None:
    config = {"max_steps": 40, "global_batch_size": 32, "num_generations": 8}
    run = training(tmp_path, task, estimator, **config)
    run_jobs([run])
    rewards = [row["reward"] for row in run.rows]
    assert sum(rewards[-5:]) / 5 > sum(rewards[:5]) / 5 + 0.15


BACKENDS: dict[str, AnyBackend] = {
    "ddp": DDP(),
    "fsdp": FSDP(),
    "zero2": DeepSpeed(zero_stage=2),
    "zero3": DeepSpeed(zero_stage=3),
}


@pytest.mark.slow
@pytest.mark.parametrize("backend", BACKENDS)
def test_every_backend_trains(task: Path, tmp_path: Path, backend: str) -> None:
    """Answers differ by rank; what may not differ is the reference, and that ranks wait."""
    two = Resources(ranks_per_node=2)
    lora = {"method": {"kind": "lora", "rank": 8}}
    runs = [
        *(training(tmp_path / "full", task, name) for name in ESTIMATORS),
        training(tmp_path / "lora", task, "grpo", **lora),
    ]
    runs = [replace(run, backend=BACKENDS[backend], resources=two) for run in runs]
    run_jobs(runs)
    for run in runs:
        assert [row["step"] for row in run.rows] == list(range(1, STEPS + 1))
        assert run.rows[0]["kl"] == pytest.approx(0, abs=1e-5)


@pytest.mark.slow
def test_a_resumed_run_goes_on_as_it_would_have(task: Path, tmp_path: Path) -> None:
    whole = replace(training(tmp_path / "whole", task, "grpo"), settings={"save_steps": 2})
    run_jobs([whole])
    run = replace(whole, out=tmp_path / "cut")
    shutil.copytree(whole.out, run.out)
    for folder in resume.complete(run.out)[1:]:
        shutil.rmtree(folder)
    run_jobs([run])
    untimed = ("time", "tokens_per_second", "step_time", "memory_bytes", "save_seconds")
    rows = [[{k: v for k, v in r.items() if k not in untimed} for r in each.rows]
            for each in (whole, run)]  # fmt: skip
    assert rows[0] == rows[1]
    samples = [(each.out / "samples.jsonl").read_text() for each in (whole, run)]
    assert samples[0] == samples[1]
