"""Reward models: training, the score that every stage shares, export, and what is measured."""

import datetime
import json
import math
import shutil
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from backends import DDP, FSDP, AnyBackend, DeepSpeed, Resources
from stages import checkpoint, resume, rewards
from stages.base import Context, StageError
from stages.evaluate import Evaluate, evaluate
from stages.evaluation import reward_measures
from stages.evaluation.intervals import Intervals
from stages.grpo import GRPO, grpo
from stages.ppo import PPO, ppo
from stages.reward import RewardModelling, distinct_pad, reward
from stages.rewards import prompts
from stages.rewards.config import Reward
from stages.rewards.model import SCALE, RewardModel, Scale, measured, read_scale, write_scale
from stages.tokenize_data import TokenizeData, tokenize_data
from tests.small import Run, run_jobs
from tests.task import write_task

STEPS = 12
ASKED = [{"role": "user", "content": "1 km = ? m"}]
METHODS: dict[str, dict[str, Any]] = {
    "full": {"kind": "full"},
    "lora": {"kind": "lora", "rank": 8},
}
CONFIG = {"learning_rate": 2e-3, "global_batch_size": 16, "max_steps": STEPS, "scale_rows": 64}


def training(out: Path, task: Path, method: str, **settings: Any) -> Run:
    return Run(
        out=out / f"reward-{method}",
        stage="reward",
        config=CONFIG | {"method": METHODS[method]},
        inputs={"model": task / "base", "data": task / "data"},
        settings=settings,
    )


def export(out: Path, task: Path, method: str) -> Run:
    return Run(
        out=out / f"export-{method}",
        stage="convert",
        config={"export_dtype": "float32"},
        inputs={
            "trained": out / f"reward-{method}",
            "base": task / "base",
            "data": task / "data",
        },
    )


TOOL = {"type": "function", "function": {"name": "convert", "description": "m to km"}}
DATED_TEMPLATE = (
    "{{ strftime_now('%d %b %Y') }}\n{% for tool in tools or [] %}{{ tool | tojson }}{% endfor %}"
)


def write_dated(out: Path, task: Path) -> Path:
    """``task`` with tools in every other row, and a chat template that writes them and the date."""
    shutil.copytree(task / "base", out / "base")
    template = out / "base" / "model" / "chat_template.jinja"
    template.write_text(DATED_TEMPLATE + template.read_text())
    for path in (task / "prepared").glob("*/*.jsonl"):
        rows = [json.loads(line) for line in path.read_text().splitlines()]
        rows = [row | ({"tools": [TOOL]} if n % 2 else {}) for n, row in enumerate(rows)]
        copy = out / "prepared" / path.relative_to(task / "prepared")
        copy.parent.mkdir(parents=True, exist_ok=True)
        copy.write_text("".join(json.dumps(row) + "\n" for row in rows))
    tokenize_data(
        TokenizeData(max_length=256, template_date=datetime.date(2024, 7, 26)),
        Context(out / "data"),
        model=out / "base",
        data=out / "prepared",
    )
    return out


@pytest.fixture(scope="module")
def task(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_task(tmp_path_factory.mktemp("task"))


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory, task: Path) -> dict[str, Run]:
    """Full and LoRA reward models and their exports, made in one process."""
    out = tmp_path_factory.mktemp("made")
    runs = {f"reward-{method}": training(out, task, method) for method in METHODS}
    runs |= {f"export-{method}": export(out, task, method) for method in METHODS}
    runs["reward-dated"] = replace(
        training(out, write_dated(out / "dated", task), "full"), out=out / "reward-dated"
    )
    run_jobs(list(runs.values()))
    return runs


def metrics(run: Run) -> dict[str, Any]:
    return json.loads((run.out / "metrics.json").read_text())


def held_out(task: Path) -> list[dict[str, Any]]:
    lines = (task / "prepared" / "preferences" / "test.jsonl").read_text().splitlines()
    return [json.loads(line) for line in lines]


@pytest.mark.parametrize("method", METHODS)
def test_it_learns_to_tell_the_answers_apart(made: dict[str, Run], method: str) -> None:
    run = made[f"reward-{method}"]
    assert len(run.losses) == STEPS and run.losses[0] == pytest.approx(math.log(2), abs=0.2)
    assert run.losses[-1] < run.losses[0]
    assert "rewards/accuracies" in run.rows[0] and "rewards/margins" in run.rows[0]
    if method == "full":
        assert metrics(run)["accuracy"]["value"] > 0.9


@pytest.mark.parametrize("method", METHODS)
def test_the_export_scores_what_training_scored(
    made: dict[str, Run], task: Path, method: str
) -> None:
    """From messages, by its own tokenizer and template, alone or padded: the very same numbers."""
    run = made[f"reward-{method}"]
    model = RewardModel.load(made[f"export-{method}"].out / "model", device="cpu", batch_size=7)
    pairs = held_out(task)
    seen = [json.loads(line) for line in (run.out / "held_out.jsonl").read_text().splitlines()]
    assert len(seen) == len(pairs) == metrics(run)["held_out_pairs"]
    for side in ("chosen", "rejected"):
        rows = [model.ids([*pair["prompt"], *pair[side]]) for pair in pairs]
        expected = [row[side] for row in seen]
        assert model.raw(rows) == pytest.approx(expected, abs=1e-4)
        assert [model.raw([row])[0] for row in rows[:3]] == pytest.approx(expected[:3], abs=1e-4)
        given = model([p["prompt"] for p in pairs], [p[side][0]["content"] for p in pairs])
        assert given == pytest.approx(model.scale.applied(expected), abs=1e-3)


def test_ids_of_a_conversation_are_those_of_the_data_stage(
    made: dict[str, Run], task: Path
) -> None:
    from datasets import load_from_disk

    model = RewardModel.load(made["export-full"].out / "model", device="cpu")
    rows: Any = load_from_disk(str(task / "data" / "preferences" / "test"))
    for row, pair in zip(rows, held_out(task), strict=True):
        for side in ("chosen", "rejected"):
            ids = model.ids([*pair["prompt"], *pair[side]])
            assert ids == row["prompt_ids"] + row[f"{side}_ids"]


def test_the_date_and_the_tools_that_it_learnt_from_are_those_that_it_scores_with(
    made: dict[str, Run],
) -> None:
    from datasets import load_from_disk

    run = made["reward-dated"]
    model = RewardModel.load(run.out / "model", device="cpu")
    rows = list(prompts.read(run.inputs["data"], "test"))
    told = prompts.facts(rows)
    assert [row.get("tools") for row in told[:2]] == [None, [TOOL]]
    messages = [prompts.messages(row, model.template.tokenizer) for row in rows]
    whole: Any = load_from_disk(str(run.inputs["data"] / "conversations" / "test"))
    expected = model.scale.applied(model.raw(whole["input_ids"]))
    assert model(messages, [row["answer"] for row in told], told) == pytest.approx(expected)
    text = model.template.tokenizer.decode(whole["input_ids"][1])
    assert text.startswith("26 Jul 2024\n") and '"name": "convert"' in text


def test_a_dated_template_without_its_date_is_refused_with_a_way_out(
    made: dict[str, Run], tmp_path: Path
) -> None:
    model = Path(shutil.copytree(made["reward-dated"].out / "model", tmp_path / "model"))
    scale = json.loads((model / SCALE).read_text())
    (model / SCALE).write_text(json.dumps(scale | {"template_date": None}))
    with pytest.raises(StageError, match=r"today's date.*template_date in its reward_scale\.json"):
        RewardModel.load(model, device="cpu")([ASKED], ["1 m"])
    (model / SCALE).write_text(json.dumps(scale | {"template_date": "yesterday"}))
    with pytest.raises(StageError, match="not a reward scale"):
        RewardModel.load(model, device="cpu")


def test_the_scale_makes_demonstrations_mean_0_and_std_1(made: dict[str, Run], task: Path) -> None:
    from datasets import load_from_disk

    from stages.evaluation.items import sample

    folder = made["export-full"].out / "model"
    model = RewardModel.load(folder, device="cpu")
    scale = metrics(made["reward-full"])["scale"] | {"template_date": None}
    assert json.loads((folder / SCALE).read_text()) == scale
    rows: Any = load_from_disk(str(task / "data" / "conversations" / "train"))
    chosen = rows.select(sample(len(rows), 64, seed=0))["input_ids"]
    scaled = model.scale.applied(model.raw([list(ids) for ids in chosen]))
    assert np.mean(scaled) == pytest.approx(0, abs=1e-4)
    assert np.std(scaled) == pytest.approx(1, abs=1e-4)


def test_an_adapter_carries_its_head_and_the_head_was_trained(made: dict[str, Run]) -> None:
    from safetensors.torch import load_file

    folder = made["reward-lora"].out / "model"
    names = load_file(folder / "adapter_model.safetensors")
    head = next(value for name, value in names.items() if name.endswith("score.weight"))
    exported = load_file(made["export-lora"].out / "model" / "model.safetensors")
    assert exported["score.weight"].equal(head)
    assert not any(name.startswith("lm_head") for name in exported)
    first = load_file(made["reward-full"].out / "model" / "model.safetensors")["score.weight"]
    assert not first.equal(head), "both heads were drawn from one seed and trained apart"


def test_the_export_is_a_whole_checkpoint(made: dict[str, Run]) -> None:
    for method in METHODS:
        out = made[f"export-{method}"].out
        # The stage has loaded it in a fresh process already.
        assert checkpoint.validate(out / "model", "float32", chat=True, load=lambda _: ()) == ()
        facts = checkpoint.describe(out / "model")
        assert facts["architecture"] == "LlamaForSequenceClassification"
        parity = metrics(made[f"export-{method}"])["parity"]
        assert parity["logit_error"] < 1e-3 and parity["margin_difference"] < 1e-3


def test_what_is_measured_adds_up(made: dict[str, Run]) -> None:
    found = metrics(made["reward-full"])
    pairs = found["held_out_pairs"]
    assert sum(part["n"] for part in found["reliability"]) == pairs
    assert sum(part["accuracy"]["n"] for part in found["accuracy_by_length"]) == pairs
    assert sum(found["margin_histogram"]["counts"]) == pairs
    assert 0 <= found["ece"] <= 0.5 and -1 <= found["length_correlation"] <= 1
    quantiles = list(found["margin_quantiles"].values())
    assert quantiles == sorted(quantiles)


# --- what is refused


def test_a_folder_that_is_no_reward_model_is_refused(
    made: dict[str, Run], task: Path, tmp_path: Path
) -> None:
    with pytest.raises(StageError, match="holds LlamaForCausalLM, and a reward model is a"):
        RewardModel.load(task / "base" / "model", device="cpu")
    with pytest.raises(StageError, match="an adapter without its base; give what convert makes"):
        RewardModel.load(made["reward-lora"].out / "model", device="cpu")
    with pytest.raises(StageError, match=r"no config\.json; give an output of convert"):
        RewardModel.load(tmp_path, device="cpu")


def shortened(made: dict[str, Run], out: Path, context: int) -> Path:
    """The full reward model, in a folder that holds ``model``, with a context of so many tokens."""
    shutil.copytree(made["export-full"].out / "model", out / "model")
    config = json.loads((out / "model" / "config.json").read_text())
    (out / "model" / "config.json").write_text(
        json.dumps(config | {"max_position_embeddings": context})
    )
    return out


TOO_SHORT = (
    r"conversations/{split}, row \d+: a prompt of \d+ tokens, max_new_tokens 8 and a stop token "
    r"exceed the context of 20 of the reward model .*; lower max_new_tokens, or .*, or give one"
)


def test_a_reward_model_with_too_short_a_context_is_refused_before_the_work(
    made: dict[str, Run], task: Path, tmp_path: Path
) -> None:
    judge = shortened(made, tmp_path / "judge", 20)
    asked = {"rewards": [{"model": True}], "max_new_tokens": 8}
    inputs = {"policy": task / "base", "data": task / "data", "reward": judge}
    with pytest.raises(StageError, match=TOO_SHORT.format(split="train")):
        ppo(PPO.model_validate(asked), Context(tmp_path / "ppo"), **inputs)
    with pytest.raises(StageError, match=TOO_SHORT.format(split="train")):
        grpo(GRPO.model_validate(asked), Context(tmp_path / "grpo"), **inputs)
    inputs["model"] = inputs.pop("policy")
    config = Evaluate.model_validate(asked | {"train_pairs": 0})
    with pytest.raises(StageError, match=TOO_SHORT.format(split="test")):
        evaluate(config, Context(tmp_path / "evaluate"), **inputs)
    assert not (tmp_path / "evaluate" / "metrics.jsonl").exists(), "nothing was measured yet"


def test_the_longest_prompt_with_its_answer_may_fill_the_context(
    made: dict[str, Run], task: Path, tmp_path: Path
) -> None:
    rows = prompts.read(task / "data")
    longest = max(map(len, rows["prompt_ids"]))  # by the same template and tokenizer
    for context, fits in ((longest + 9, True), (longest + 8, False)):
        judge = shortened(made, tmp_path / str(context), context)
        scorer = rewards.load((Reward(model=True),), {"reward": judge}, "cpu")
        if fits:
            rewards.check_rows(scorer, rows, None, max_new_tokens=8)
        else:
            with pytest.raises(StageError, match=f"a prompt of {longest} tokens"):
                rewards.check_rows(scorer, rows, None, max_new_tokens=8)


def test_an_answer_that_is_longer_here_is_scored_as_far_as_it_fits(
    made: dict[str, Run], tmp_path: Path
) -> None:
    """Work must not end at one answer, and end there again whenever it is resumed."""
    judge = RewardModel.load(shortened(made, tmp_path / "judge", 40) / "model", device="cpu")
    asked = [{"role": "user", "content": "37 m = ? cm"}]
    whole, cut = (
        judge.ids([*asked, {"role": "assistant", "content": "x" * number}]) for number in (5, 200)
    )
    assert len(whole) < len(cut) == 40
    assert cut[: len(whole) - 1] == whole[:-1] and cut[-1] == whole[-1]
    (score,) = judge([asked], ["x" * 200])
    assert [score] == judge.scale.applied(judge.raw([cut]))
    with pytest.raises(StageError, match="the reward model takes 40, which the prompt fills"):
        judge([[{"role": "user", "content": "x" * 200}]], ["3700 cm"])


def test_a_critic_with_too_short_a_context_is_refused(
    made: dict[str, Run], task: Path, tmp_path: Path
) -> None:
    rated = {"rewards": [{"function": "length", "options": {"most": 3}}]}
    config = PPO.model_validate(rated | {"critic": "reward", "max_new_tokens": 8})
    judge = shortened(made, tmp_path / "judge", 20)
    with pytest.raises(StageError, match="exceed the context of 20 of the critic"):
        ppo(config, Context(tmp_path), policy=task / "base", data=task / "data", reward=judge)


def test_a_reward_model_needs_its_own_tokenizer(made: dict[str, Run], tmp_path: Path) -> None:
    model = Path(shutil.copytree(made["export-full"].out / "model", tmp_path / "model"))
    for file in model.glob("tokenizer*"):
        file.unlink()
    with pytest.raises(StageError, match="no tokenizer can be loaded"):
        RewardModel.load(model, device="cpu")


def test_padding_that_ends_answers_is_refused(made: dict[str, Run], tmp_path: Path) -> None:
    model = Path(shutil.copytree(made["export-full"].out / "model", tmp_path / "model"))
    config = json.loads((model / "config.json").read_text())
    stop = json.loads((model / "generation_config.json").read_text())["eos_token_id"]
    (model / "config.json").write_text(json.dumps(config | {"pad_token_id": stop}))
    with pytest.raises(StageError, match="scores would be read one token early"):
        RewardModel.load(model, device="cpu")


def test_a_distinct_pad_token_is_found_or_asked_for(task: Path, tmp_path: Path) -> None:
    from transformers import AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(task / "base" / "model")
    assert distinct_pad(task / "base" / "model") == tokenizer.pad_token
    tokenizer.pad_token = tokenizer.eos_token  # as many chat models have it
    tokenizer.save_pretrained(tmp_path / "same")
    shutil.copyfile(task / "base" / "model" / "config.json", tmp_path / "same" / "config.json")
    assert distinct_pad(tmp_path / "same") == "<|pad|>"
    tokenizer.add_special_tokens({"pad_token": "<|new|>"})  # for which the model has no row
    tokenizer.save_pretrained(tmp_path / "larger")
    shutil.copyfile(task / "base" / "model" / "config.json", tmp_path / "larger" / "config.json")
    assert distinct_pad(tmp_path / "larger") == "<|pad|>"
    ids = [tokenizer.convert_tokens_to_ids(t) for t in ("<|pad|>", "<|im_start|>", "<|im_end|>")]
    (tmp_path / "same" / "generation_config.json").write_text(json.dumps({"eos_token_id": ids}))
    with pytest.raises(StageError, match="every special token of the tokenizer ends an answer"):
        distinct_pad(tmp_path / "same")


def test_pairs_of_another_tokenizer_are_refused(task: Path, tmp_path: Path) -> None:
    from datasets import Dataset

    pair = {"prompt_ids": [5, 6], "chosen_ids": [7, 99_999], "rejected_ids": [8]}
    Dataset.from_list([pair] * 2).save_to_disk(tmp_path / "preferences" / "train")
    ctx = Context(tmp_path / "out", trainer_args={"use_cpu": True})
    with pytest.raises(StageError, match=r"preferences/train holds token 99999, and the model kn"):
        reward(RewardModelling(), ctx, model=task / "base", data=tmp_path)


def test_scores_that_hardly_differ_scale_nothing(tmp_path: Path) -> None:
    with pytest.raises(StageError, match=r"gives 0\.5 to all of 3 samples"):
        measured([0.5, 0.5, 0.5])
    write_scale(tmp_path, Scale(0.0, 0.0, 3))
    with pytest.raises(StageError, match=r"std 0\.0 scale nothing"):
        read_scale(tmp_path)
    (tmp_path / SCALE).write_text('{"average": 1}')
    with pytest.raises(StageError, match="not a reward scale"):
        read_scale(tmp_path)
    (tmp_path / SCALE).unlink()
    assert read_scale(tmp_path).applied([0.25]) == [0.25]


# --- known answers of the measures


def pairs(chosen: list[float], rejected: list[float], lengths: list[float]) -> Any:
    none = [0.0] * len(lengths)
    columns = [np.array(each) for each in (chosen, rejected, lengths, none)]
    return reward_measures.Pairs(*columns)


def test_calibration_has_its_known_values() -> None:
    """Half of the pairs right at a confidence of 0.75: 25 points off."""
    margin = math.log(3)  # sigmoid is 0.75
    margins = np.array([margin, margin, -margin, -margin])
    bins = reward_measures.reliability(margins, bins=5)
    assert len(bins) == 1 and bins[0]["n"] == 4 and bins[0]["accuracy"] == 0.5
    assert bins[0]["confidence"] == pytest.approx(0.75)
    assert reward_measures.expected_calibration_error(bins) == pytest.approx(0.25)


def test_scores_drawn_from_their_own_model_are_calibrated() -> None:
    rng = np.random.default_rng(0)
    margins = np.abs(rng.normal(0, 2, 20_000))
    won = rng.random(20_000) < 1 / (1 + np.exp(-margins))
    bins = reward_measures.reliability(np.where(won, margins, -margins))
    assert reward_measures.expected_calibration_error(bins) < 0.02
    overconfident = reward_measures.reliability(np.where(won, 5 * margins, -5 * margins))
    assert reward_measures.expected_calibration_error(overconfident) > 0.1


def test_accuracy_is_told_by_length_difference() -> None:
    lengths = [-2.0] * 10 + [-1.0] * 10 + [1.0] * 10 + [2.0] * 10
    chosen = [0.0] * 20 + [1.0] * 20  # right exactly where the chosen answer is the longer one
    found = reward_measures.accuracy_by_length(pairs(chosen, [0.5] * 40, lengths), Intervals())
    assert [(part["low"], part["high"]) for part in found] == [(-2, -2), (-1, -1), (1, 1), (2, 2)]
    assert [part["accuracy"]["value"] for part in found] == [0, 0, 1, 1]
    measures = reward_measures.reward_measures(pairs(chosen, [0.5] * 40, lengths), Intervals())
    assert measures["accuracy"]["value"] == 0.5 and measures["length_correlation"] > 0.9


def test_a_win_rate_has_wilson_s_interval_and_counts_ties_half() -> None:
    found = reward_measures.win_rate([1.0, 1.0, 0.0, 2.0], [0.0, 1.0, 1.0, 1.0], Intervals())
    assert found["value"] == 0.625 and found["n"] == 4
    assert found["low"] == pytest.approx(0.2194, abs=1e-4)


# --- every backend


BACKENDS: Mapping[str, AnyBackend] = {
    "ddp": DDP(),
    "fsdp": FSDP(),
    "zero2": DeepSpeed(zero_stage=2),
    "zero3": DeepSpeed(zero_stage=3),
}


@pytest.mark.slow
@pytest.mark.parametrize("backend", BACKENDS)
def test_every_backend_makes_the_same_reward_model(
    made: dict[str, Run], task: Path, tmp_path: Path, backend: str
) -> None:
    two = Resources(ranks_per_node=2)
    runs = [
        replace(training(tmp_path, task, m), backend=BACKENDS[backend], resources=two)
        for m in METHODS
    ]
    run_jobs(runs)
    for run, method in zip(runs, METHODS, strict=True):
        alone = made[f"reward-{method}"]
        assert run.losses == pytest.approx(alone.losses, abs=1e-4)
        for key in ("mean", "std"):
            ours, theirs = metrics(run)["scale"][key], metrics(alone)["scale"][key]
            assert ours == pytest.approx(theirs, abs=1e-3)
        lines = [(each.out / "held_out.jsonl").read_text().splitlines() for each in (run, alone)]
        for mine, theirs in zip(*lines, strict=True):
            assert json.loads(mine) == pytest.approx(json.loads(theirs), abs=1e-3)
    exports = [export(tmp_path, task, method) for method in METHODS]
    run_jobs(exports)
    for each in exports:
        assert RewardModel.load(each.out / "model", device="cpu").scale.num == 64


@pytest.mark.slow
def test_a_resumed_reward_model_is_the_same(
    made: dict[str, Run], task: Path, tmp_path: Path
) -> None:
    run = training(tmp_path, task, "full", save_steps=6)
    run_jobs([run])
    for folder in resume.complete(run.out)[1:]:
        shutil.rmtree(folder)
    shutil.rmtree(run.out / "model")
    run_jobs([run])
    assert run.losses == made["reward-full"].losses
    assert metrics(run)["scale"] == metrics(made["reward-full"])["scale"]
