"""Known answers for the evaluate stage, on two-layer models with random weights."""

import json
import math
import os
import re
import shutil
import subprocess
import sys
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from pydantic import ValidationError

from stages.base import Context, Job, StageError
from stages.evaluate import Evaluate, evaluate
from stages.evaluation.intervals import Intervals, wilson

ROOT = Path(__file__).parents[2]
VOCABULARY = 48
STOPS = [1, 2]
PAIRS = ("preferences/test", "preferences/train")

Found = tuple[Mapping[str, Any], Path]
Rows = list[dict[str, Any]]


# The models and the data


def save_model(folder: Path, *, seed: int, architecture: str = "llama", **facts: Any) -> Path:
    """A random model, and a tokenizer that writes token 7 as ``w7``; its greedy answers vary."""
    import torch
    from transformers import GPT2Config, GPT2LMHeadModel, LlamaConfig, LlamaForCausalLM

    torch.manual_seed(seed)
    if architecture == "llama":
        config = LlamaConfig(
            hidden_size=32, intermediate_size=64, num_hidden_layers=2, num_attention_heads=4,
            num_key_value_heads=2, vocab_size=VOCABULARY, initializer_range=0.6, eos_token_id=1,
            bos_token_id=0,
        )  # fmt: skip
        model: Any = LlamaForCausalLM(config)
    else:
        config = GPT2Config(
            n_embd=32, n_layer=2, n_head=4, n_positions=64, vocab_size=VOCABULARY,
            initializer_range=0.6, eos_token_id=1, bos_token_id=0,
        )  # fmt: skip
        model = GPT2LMHeadModel(config)
    # A repetition penalty in the model's own settings must not leak into greedy decoding.
    model.generation_config.update(eos_token_id=STOPS, repetition_penalty=1.7, **facts)
    model.save_pretrained(folder / "model")
    tokenizer().save_pretrained(folder / "model")
    return folder


def tokenizer() -> Any:
    from tokenizers import Tokenizer, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    words = Tokenizer(models.WordLevel({f"w{i}": i for i in range(VOCABULARY)}, unk_token="w0"))
    words.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    return PreTrainedTokenizerFast(tokenizer_object=words, eos_token="w1")


def random_ids(rng: np.random.Generator, low: int, high: int) -> list[int]:
    return rng.integers(4, VOCABULARY, int(rng.integers(low, high))).tolist()


def conversation(rng: np.random.Generator) -> dict[str, Any]:
    """Two assistant turns, so that untrained tokens stand in the middle too."""
    first, reply, again, answer = (random_ids(rng, 1, 9) for _ in range(4))
    prompt = [*first, *reply, 1, *again]
    hidden = [-100] * len(first), [-100] * len(again)
    return {
        "input_ids": [*prompt, *answer, 1],
        "labels": [*hidden[0], *reply, 1, *hidden[1], *answer, 1],
        "prompt_ids": prompt,
        "answer": " ".join(f"w{i}" for i in answer),
    }


def pair(rng: np.random.Generator) -> dict[str, Any]:
    prompt, chosen, rejected = (random_ids(rng, 1, 12) for _ in range(3))
    return {"prompt_ids": prompt, "chosen_ids": [*chosen, 1], "rejected_ids": [*rejected, 1]}


def save_data(folder: Path, splits: Mapping[str, Rows]) -> Path:
    from datasets import Dataset

    for name, rows in splits.items():
        Dataset.from_list(rows).save_to_disk(str(folder / name))
    return folder


@pytest.fixture(scope="module")
def splits() -> dict[str, Rows]:
    rng = np.random.default_rng(5)
    whole = conversation(rng)  # every token is trained, the first too
    whole["labels"] = whole["input_ids"]
    return {
        "conversations/test": [whole, *(conversation(rng) for _ in range(22))],
        "preferences/test": [pair(rng) for _ in range(11)],
        "preferences/train": [pair(rng) for _ in range(14)],
    }


@pytest.fixture(scope="module")
def data(tmp_path_factory: pytest.TempPathFactory, splits: dict[str, Rows]) -> Path:
    return save_data(tmp_path_factory.mktemp("data"), splits)


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    import torch

    torch.set_num_threads(1)  # as in every rank, so that one process and two agree to the bit
    root = tmp_path_factory.mktemp("models")
    return {
        "base": save_model(root / "base", seed=1),
        "tuned": save_model(root / "tuned", seed=2),
        "gpt2": save_model(root / "gpt2", seed=3, architecture="gpt2"),
    }


CONFIG = Evaluate(batch_size=5, max_new_tokens=12, bootstrap_samples=200, beta=0.3)


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory, data: Path) -> Callable[..., Found]:
    def run(model: Path, config: Evaluate = CONFIG, **inputs: Path) -> Found:
        out = tmp_path_factory.mktemp("out")
        return evaluate(config, Context(out), model=model, **{"data": data, **inputs}), out

    return run


@pytest.fixture(scope="module")
def base(run: Callable[..., Found], models: dict[str, Path]) -> Found:
    return run(models["base"])


@pytest.fixture(scope="module")
def tuned(run: Callable[..., Found], models: dict[str, Path], base: Found) -> Found:
    return run(models["tuned"], baseline=base[1])


def lines(path: Path) -> Rows:
    return [json.loads(line) for line in path.read_text().splitlines()]


# The same figures, in the plainest way


def load(folder: Path) -> Any:
    from transformers import AutoModelForCausalLM

    return AutoModelForCausalLM.from_pretrained(folder / "model")


def plain_log_prob(model: Any, prefix: list[int], targets: Mapping[int, int]) -> float:
    """Sum of log-probabilities of ``targets`` (place -> token), one row, without padding."""
    import torch

    with torch.no_grad():
        logits = model(torch.tensor([prefix])).logits[0].double()
    table = torch.log_softmax(logits, -1)
    return sum(table[place - 1, token].item() for place, token in targets.items())


def plain_conversation(model: Any, row: Mapping[str, Any]) -> tuple[float, int]:
    targets = {t: y for t, y in enumerate(row["labels"]) if t > 0 and y != -100}
    return plain_log_prob(model, row["input_ids"], targets), len(targets)


def plain_completion(model: Any, row: Mapping[str, Any], side: str) -> float:
    ids = row["prompt_ids"] + row[side]
    start = len(row["prompt_ids"])
    return plain_log_prob(model, ids, dict(enumerate(ids[start:], start)))


def plain_answer(model: Any, prompt: list[int], limit: int) -> tuple[list[int], bool]:
    """Greedy decoding without batch, padding or cache."""
    import torch

    ids = list(prompt)
    for _ in range(limit):
        with torch.no_grad():
            token = model(torch.tensor([ids])).logits[0, -1].argmax().item()
        if token in STOPS:
            return ids[len(prompt) :], True
        ids.append(token)
    return ids[len(prompt) :], False


# Loss


@pytest.mark.parametrize("name", ["base", "gpt2"])
def test_loss_is_that_of_one_unpadded_row_after_the_other(
    name: str, run: Callable[..., Found], models: dict[str, Path], splits: dict[str, Rows]
) -> None:
    metrics, out = run(models[name], CONFIG.model_copy(update={"generate_rows": 0}))
    model = load(models[name])
    plain = [plain_conversation(model, row) for row in splits["conversations/test"]]
    loss = -sum(p for p, _ in plain) / sum(n for _, n in plain)
    assert metrics["conversations/loss"]["value"] == pytest.approx(loss, rel=1e-6)
    assert metrics["conversations/perplexity"]["value"] == pytest.approx(math.exp(loss), rel=1e-5)
    assert metrics["conversations/tokens"] == sum(n for _, n in plain)
    items = [item for item in lines(out / "items.jsonl") if item["set"] == "conversations/test"]
    assert [item["index"] for item in items] == list(range(len(plain)))
    assert [item["logp"] for item in items] == pytest.approx([p for p, _ in plain], rel=1e-5)


def test_intervals_hold_their_value_and_perplexity_follows_loss(base: Found) -> None:
    estimates = {k: v for k, v in base[0].items() if isinstance(v, dict)}
    assert all(e["low"] <= e["value"] <= e["high"] for e in estimates.values())
    loss, perplexity = estimates["conversations/loss"], estimates["conversations/perplexity"]
    assert loss["low"] < loss["value"] < loss["high"] and loss["n"] == 23
    assert perplexity["high"] == pytest.approx(math.exp(loss["high"]))


# Answers


@pytest.mark.parametrize("name", ["base", "gpt2"])
def test_left_padded_answers_are_those_of_one_prompt_at_a_time(
    name: str, run: Callable[..., Found], models: dict[str, Path], splits: dict[str, Rows]
) -> None:
    # GPT-2 has absolute positions, which wrong position ids would spoil; Llama's are relative.
    samples = lines(run(models[name])[1] / "samples.jsonl")
    model = load(models[name])
    rows = splits["conversations/test"]
    plain = [plain_answer(model, row["prompt_ids"], CONFIG.max_new_tokens) for row in rows]
    assert [s["generated"] for s in samples] == [" ".join(f"w{i}" for i in ids) for ids, _ in plain]
    assert [s["stopped"] for s in samples] == [stopped for _, stopped in plain]
    assert [s["answer_tokens"] for s in samples] == [len(ids) for ids, _ in plain]
    assert {s["stopped"] for s in samples} == {True, False}, "a fixture that shows both ends"


def test_exact_match_compares_the_last_match_of_the_pattern(
    run: Callable[..., Found],
    models: dict[str, Path],
    splits: dict[str, Rows],
    base: Found,
    tmp_path: Path,
) -> None:
    generated = [sample["generated"] for sample in lines(base[1] / "samples.jsonl")]
    rows = [dict(row) for row in splits["conversations/test"]]
    ends = [re.findall(r"w(\d+)", text) for text in generated]
    for row, end in zip(rows[:10], ends, strict=False):
        row["answer"] = f"w0 then w{end[-1] if end else 0}"
    changed = save_data(tmp_path, {"conversations/test": rows})
    config = CONFIG.model_copy(update={"answer_pattern": r"w(\d+)"})
    metrics, out = run(models["base"], config, data=changed)
    expected = [
        bool(end) and re.findall(r"w(\d+)", row["answer"])[-1] == end[-1]
        for row, end in zip(rows, ends, strict=True)
    ]
    assert [sample["match"] for sample in lines(out / "samples.jsonl")] == expected
    exact = metrics["conversations/exact_match"]
    assert exact["value"] == sum(expected) / 23 > 0.2
    assert (exact["low"], exact["high"]) == wilson(sum(expected), 23, confidence=0.95)


def test_whole_answers_are_compared_without_a_pattern(base: Found) -> None:
    samples = lines(base[1] / "samples.jsonl")
    assert all(s["match"] == (s["generated"] == s["reference"].strip()) for s in samples)
    assert samples[0]["prompt"].startswith("w")


def test_a_sample_of_prompts_keeps_its_place_in_the_split(
    run: Callable[..., Found], models: dict[str, Path], base: Found
) -> None:
    everyone = {s["index"]: s for s in lines(base[1] / "samples.jsonl")}
    metrics, out = run(models["base"], CONFIG.model_copy(update={"generate_rows": 6}))
    samples = lines(out / "samples.jsonl")
    assert len(samples) == 6 == metrics["conversations/exact_match"]["n"]
    assert all(sample == everyone[sample["index"]] for sample in samples)
    assert [s["index"] for s in samples] != list(range(6))


# Preferences


@pytest.mark.parametrize("split", PAIRS)
def test_preferences_are_summed_log_probabilities(
    split: str, base: Found, models: dict[str, Path], splits: dict[str, Rows]
) -> None:
    model, rows = load(models["base"]), splits[split]
    chosen = np.array([plain_completion(model, row, "chosen_ids") for row in rows])
    rejected = np.array([plain_completion(model, row, "rejected_ids") for row in rows])
    lengths = [[len(row[f"{side}_ids"]) for row in rows] for side in ("chosen", "rejected")]
    per_token = chosen / np.array(lengths[0]) - rejected / np.array(lengths[1])
    metrics = {k.removeprefix(f"{split}/"): v for k, v in base[0].items() if k.startswith(split)}
    assert metrics["margin"]["value"] == pytest.approx((chosen - rejected).mean(), rel=1e-5)
    assert metrics["accuracy"]["value"] == (chosen > rejected).mean()
    assert metrics["accuracy_per_token"]["value"] == (per_token > 0).mean()
    assert metrics["margin_per_token"]["value"] == pytest.approx(per_token.mean(), rel=1e-5)
    assert metrics["rejected_tokens"] == np.mean(lengths[1])
    assert "dpo_loss" not in metrics and "margin_change" not in metrics


def test_a_model_equal_to_its_baseline_earns_nothing(
    run: Callable[..., Found], models: dict[str, Path], base: Found
) -> None:
    metrics, _ = run(models["base"], baseline=base[1])
    for split in PAIRS:
        assert metrics[f"{split}/dpo_loss"]["value"] == pytest.approx(math.log(2), abs=1e-6)
        assert metrics[f"{split}/reward_accuracy"]["value"] == 0.5, "ties count half"
        for key in ("reward_margin", "margin_change", "chosen_logp_change", "accuracy_change"):
            estimate = metrics[f"{split}/{key}"]
            assert (estimate["low"], estimate["value"], estimate["high"]) == (0, 0, 0)
    assert metrics["conversations/loss_change"]["value"] == 0
    assert metrics["conversations/exact_match_change"]["value"] == 0


@pytest.mark.parametrize("split", PAIRS)
def test_rewards_are_measured_against_the_baseline(
    split: str, base: Found, tuned: Found, models: dict[str, Path], splits: dict[str, Rows]
) -> None:
    rows = splits[split]
    policy, reference = load(models["tuned"]), load(models["base"])
    chosen, rejected = (
        np.array([plain_completion(policy, r, s) - plain_completion(reference, r, s) for r in rows])
        for s in ("chosen_ids", "rejected_ids")
    )
    margin = CONFIG.beta * (chosen - rejected) if CONFIG.beta else chosen
    expected = {
        "chosen_logp_change": chosen.mean(),
        "rejected_logp_change": rejected.mean(),
        "margin_change": (chosen - rejected).mean(),
        "chosen_reward": 0.3 * chosen.mean(),
        "rejected_reward": 0.3 * rejected.mean(),
        "reward_margin": margin.mean(),
        "reward_accuracy": (margin > 0).mean(),
        "dpo_loss": -np.log(1 / (1 + np.exp(-margin))).mean(),
    }
    for key, value in expected.items():
        assert tuned[0][f"{split}/{key}"]["value"] == pytest.approx(value, rel=1e-4), key
    gained = tuned[0][f"{split}/accuracy"]["value"] - base[0][f"{split}/accuracy"]["value"]
    assert tuned[0][f"{split}/accuracy_change"]["value"] == pytest.approx(gained)


def test_change_of_loss_is_paired(base: Found, tuned: Found) -> None:
    before, after = base[0]["conversations/loss"], tuned[0]["conversations/loss"]
    change = tuned[0]["conversations/loss_change"]
    assert change["value"] == pytest.approx(after["value"] - before["value"])
    logp = [
        [i["logp"] for i in lines(out / "items.jsonl") if "logp" in i] for _, out in (base, tuned)
    ]
    tokens = [i["tokens"] for i in lines(base[1] / "items.jsonl") if "logp" in i]
    paired = Intervals(samples=200).ratio(np.subtract(logp[0], logp[1]), tokens)
    assert change == pytest.approx(paired)


def test_without_beta_only_rewards_are_left_out(
    run: Callable[..., Found], models: dict[str, Path], base: Found, tuned: Found
) -> None:
    metrics, _ = run(models["tuned"], CONFIG.model_copy(update={"beta": None}), baseline=base[1])
    missing = {key.rpartition("/")[2] for key in tuned[0].keys() - metrics.keys()}
    rewards = {"reward_accuracy", "chosen_reward", "rejected_reward", "reward_margin"}
    assert missing == rewards | {"dpo_loss"}
    assert all(tuned[0][key] == value for key, value in metrics.items())


def test_training_pairs_are_capped(
    run: Callable[..., Found], models: dict[str, Path], base: Found
) -> None:
    config = CONFIG.model_copy(update={"train_pairs": 4, "generate_rows": 0})
    metrics, out = run(models["base"], config, baseline=base[1])
    assert metrics["preferences/train/accuracy"]["n"] == 4
    assert metrics["preferences/train/margin_change"]["value"] == pytest.approx(0, abs=1e-4)
    sampled = [i["index"] for i in lines(out / "items.jsonl") if i["set"] == "preferences/train"]
    assert sampled == sorted(set(sampled)) and len(sampled) == 4 and sampled != [0, 1, 2, 3]
    metrics, _ = run(models["base"], config.model_copy(update={"train_pairs": 0}))
    assert not any(key.startswith("preferences/train") for key in metrics)


def test_data_without_preferences(
    run: Callable[..., Found], models: dict[str, Path], splits: dict[str, Rows], tmp_path: Path
) -> None:
    alone = save_data(tmp_path, {"conversations/test": splits["conversations/test"][:3]})
    metrics, _ = run(models["base"], data=alone)
    assert {key.partition("/")[0] for key in metrics} == {"confidence", "conversations"}


# Ranks


def test_two_ranks_give_what_one_process_gives(
    models: dict[str, Path], data: Path, base: Found, tuned: Found, tmp_path: Path
) -> None:
    inputs = {"model": models["tuned"], "data": data, "baseline": base[1]}
    job = Job(stage="evaluate", config=CONFIG.model_dump(mode="json"), inputs=inputs)
    (tmp_path / "job.json").write_text(job.model_dump_json())
    command = ["torch.distributed.run", "--nproc-per-node=2", "--rdzv-backend=c10d"]
    command += ["--rdzv-endpoint=localhost:0", "-m", "stages", str(tmp_path / "job.json")]
    environment = os.environ | {"OMP_NUM_THREADS": "1", "PYTHONPATH": str(ROOT)}
    subprocess.run(
        [sys.executable, "-m", *command], check=True, cwd=ROOT, env=environment, timeout=120
    )
    for name in ("items.jsonl", "samples.jsonl"):
        assert (tmp_path / name).read_bytes() == (tuned[1] / name).read_bytes()
    assert json.loads((tmp_path / "metrics.json").read_text()) == tuned[0]
    progress = lines(tmp_path / "metrics.jsonl")
    # 23 + 2 * 25 sequences and 23 prompts in fives: 15 and 5 batches, of which rank 0 has 8 and 3.
    assert [(row["step"], row["total_steps"]) for row in progress] == [
        (step, 11) for step in range(1, 12)
    ]


# What does not fit


def copy_model(source: Path, folder: Path) -> Path:
    shutil.copytree(source / "model", folder / "model")
    return folder


def drop_a_weight(folder: Path) -> None:
    from safetensors.torch import load_file, save_file

    weights = load_file(folder / "model.safetensors")
    del weights["model.layers.1.mlp.up_proj.weight"]
    save_file(weights, folder / "model.safetensors", metadata={"format": "pt"})


def break_a_weight(folder: Path) -> None:
    from safetensors.torch import load_file, save_file

    weights = load_file(folder / "model.safetensors")
    weights["model.norm.weight"][3] = math.nan
    save_file(weights, folder / "model.safetensors", metadata={"format": "pt"})


def forget_the_stop(folder: Path) -> None:
    for name in ("generation_config.json", "config.json"):
        facts = json.loads((folder / name).read_text())
        (folder / name).write_text(json.dumps(facts | {"eos_token_id": None}))


MODEL_FAULTS: dict[str, tuple[Callable[[Path], object], str]] = {
    "an adapter": (lambda f: (f / "adapter_config.json").write_text("{}"), "adapter without"),
    "no config": (lambda f: (f / "config.json").unlink(), "no config.json"),
    "a weight missing": (drop_a_weight, r"1 weights are missing \(model.layers.1.mlp.up_proj"),
    "not a number": (break_a_weight, "conversations/test row 0: logp is nan"),
    "no stop": (forget_the_stop, "names no eos_token_id.*generate_rows"),
}


@pytest.mark.parametrize("fault", MODEL_FAULTS)
def test_a_model_that_cannot_be_measured_is_refused(
    fault: str, run: Callable[..., Found], models: dict[str, Path], tmp_path: Path
) -> None:
    spoil, message = MODEL_FAULTS[fault]
    model = copy_model(models["base"], tmp_path)
    spoil(model / "model")
    with pytest.raises(StageError, match=message):
        run(model)


def test_a_baseline_on_other_data_is_refused(
    run: Callable[..., Found],
    models: dict[str, Path],
    splits: dict[str, Rows],
    base: Found,
    tmp_path: Path,
) -> None:
    rows = [dict(row) for row in splits["preferences/test"]]
    rows[4]["rejected_ids"] = [*rows[4]["rejected_ids"][:-1], 9, 1]
    other = save_data(tmp_path, splits | {"preferences/test": rows})
    with pytest.raises(StageError, match=r"other data \(preferences/test row 4 was"):
        run(models["base"], data=other, baseline=base[1])


def test_a_baseline_that_scored_fewer_rows_is_refused(
    run: Callable[..., Found], models: dict[str, Path]
) -> None:
    few = CONFIG.model_copy(update={"train_pairs": 2, "generate_rows": 0})
    _, out = run(models["base"], few)
    with pytest.raises(StageError, match=r"preferences/train row \d+ was not scored.*train_pairs"):
        run(models["base"], baseline=out)


def test_a_baseline_that_is_no_evaluation_is_refused(
    run: Callable[..., Found], models: dict[str, Path], data: Path
) -> None:
    with pytest.raises(StageError, match="earlier output of evaluate"):
        run(models["base"], baseline=data)


def with_tokens(source: Path, folder: Path, name: Callable[[int], str]) -> Path:
    """The model of ``source`` with a tokenizer in which ``name`` says what each id stands for."""
    file = copy_model(source, folder) / "model" / "tokenizer.json"
    facts = json.loads(file.read_text())
    numbers = facts["model"]["vocab"].values()
    facts["model"]["vocab"] = {name(number): number for number in numbers}
    file.write_text(json.dumps(facts))
    return folder


def swapped(number: int) -> str:
    """Neighbours from 4 on have changed places."""
    return f"w{number if number < 4 else number ^ 1}"


SCORED = CONFIG.model_copy(update={"generate_rows": 0})
OTHER_WORDS = "read other words in the same tokens"


@pytest.mark.parametrize("config", [CONFIG, SCORED], ids=["answered", "scored alone"])
def test_a_baseline_of_another_tokenizer_is_refused_before_measuring(
    config: Evaluate, run: Callable[..., Found], models: dict[str, Path], tmp_path: Path
) -> None:
    other = with_tokens(models["base"], tmp_path / "other", swapped)
    _, out = run(other, config)
    weights = copy_model(models["tuned"], tmp_path / "tuned")
    (weights / "model" / "model.safetensors").unlink()
    with pytest.raises(StageError, match=rf"{OTHER_WORDS}.*\('w5' for 'w4' in token 4\)"):
        run(weights, config, baseline=out)


def test_a_baseline_that_wrote_no_tokens_down_is_judged_by_its_prompts(
    run: Callable[..., Found], models: dict[str, Path], base: Found, tmp_path: Path
) -> None:
    _, out = run(with_tokens(models["base"], tmp_path / "other", swapped))
    (out / "tokens.json").unlink()
    with pytest.raises(StageError, match=OTHER_WORDS):
        run(models["tuned"], baseline=out)
    old = Path(shutil.copytree(base[1], tmp_path / "old"))
    (old / "tokens.json").unlink()
    assert "conversations/loss_change" in run(models["tuned"], baseline=old)[0]


def test_tokens_that_no_row_has_make_no_other_tokenizer(
    run: Callable[..., Found], models: dict[str, Path], base: Found, tmp_path: Path
) -> None:
    """Such as are added for a template, or for padding, and whatever else its files say."""
    more = with_tokens(models["tuned"], tmp_path, lambda n: "another" if n == 3 else f"w{n}")
    assert "conversations/loss_change" in run(more, SCORED, baseline=base[1])[0]


def test_a_reference_of_another_tokenizer_is_refused(
    run: Callable[..., Found], models: dict[str, Path], tmp_path: Path
) -> None:
    reference = with_tokens(models["base"], tmp_path, swapped)
    with pytest.raises(StageError, match=OTHER_WORDS):
        run(models["tuned"], SCORED, reference=reference)


def test_judged_answers_are_no_pairs_and_that_is_said(
    run: Callable[..., Found], models: dict[str, Path], splits: dict[str, Rows], tmp_path: Path
) -> None:
    judged = [{"prompt_ids": [4, 5], "completion_ids": [6, 1], "label": True}]
    rows = {"conversations/test": splits["conversations/test"][:3], "unpaired/test": judged}
    data = save_data(tmp_path, rows)
    with pytest.raises(StageError, match=r"judged answers.*measures pairs.*preferences=null"):
        run(models["base"], SCORED, data=data)
    save_data(tmp_path, {"preferences/test": splits["preferences/test"]})
    no_train = SCORED.model_copy(update={"train_pairs": 0})
    assert "preferences/test/accuracy" in run(models["base"], no_train, data=data)[0]


def spoil_token(splits: dict[str, Rows]) -> None:
    splits["preferences/train"][2]["chosen_ids"] = [VOCABULARY, 1]


def hide_every_label(splits: dict[str, Rows]) -> None:
    row = splits["conversations/test"][2]
    row["labels"] = [-100] * len(row["labels"])


def empty_a_completion(splits: dict[str, Rows]) -> None:
    splits["preferences/test"][1]["rejected_ids"] = []


DATA_FAULTS: dict[str, tuple[Callable[[dict[str, Rows]], object], str]] = {
    "a foreign token": (spoil_token, "token 48, but the model knows only 48"),
    "nothing trained": (hide_every_label, "row 2 has nothing to score"),
    "an empty answer": (empty_a_completion, "row 1 has nothing to score"),
    "no held-out rows": (lambda s: s.pop("conversations/test"), "no such split"),
}


@pytest.mark.parametrize("fault", DATA_FAULTS)
def test_data_that_cannot_be_scored_is_refused(
    fault: str,
    run: Callable[..., Found],
    models: dict[str, Path],
    splits: dict[str, Rows],
    tmp_path: Path,
) -> None:
    spoil, message = DATA_FAULTS[fault]
    spoiled = {name: [dict(row) for row in rows] for name, rows in splits.items()}
    spoil(spoiled)
    with pytest.raises(StageError, match=message):
        run(models["base"], data=save_data(tmp_path, spoiled))


def test_a_pattern_that_no_reference_matches_is_refused(
    run: Callable[..., Found], models: dict[str, Path]
) -> None:
    config = CONFIG.model_copy(update={"answer_pattern": r"#### (\d+)"})
    with pytest.raises(StageError, match=r"answer_pattern.*finds nothing.*row 0"):
        run(models["base"], config)


def test_a_broken_pattern_is_refused_by_the_config() -> None:
    with pytest.raises(ValidationError, match="not a regular expression"):
        Evaluate(answer_pattern="(")
    with pytest.raises(ValidationError, match="has 2 groups"):
        Evaluate(answer_pattern="(a)(b)")


# Statistics


@pytest.mark.parametrize(
    ("wins", "n", "low", "high"),
    [
        # Newcombe (1998), "Two-sided confidence intervals for the single proportion", table I.
        (81, 263, 0.2553, 0.3662),
        (15, 148, 0.0624, 0.1605),
        (0, 20, 0.0, 0.1611),
        (1, 29, 0.0061, 0.1718),
        (20, 20, 0.8389, 1.0),
    ],
)
def test_wilson(wins: int, n: int, low: float, high: float) -> None:
    assert wilson(wins, n, confidence=0.95) == pytest.approx((low, high), abs=5e-5)


@pytest.mark.parametrize("n", range(1, 300))
def test_wilson_ends_are_exact_where_they_are_known(n: int) -> None:
    assert wilson(0, n, confidence=0.95)[0] == 0
    assert wilson(n, n, confidence=0.95)[1] == 1


def test_bootstrap_of_a_mean_is_the_textbook_one_for_many_rows() -> None:
    values = np.random.default_rng(1).normal(3, 2, 400)
    mean = Intervals(samples=4000).mean(values)
    error = values.std() / math.sqrt(400)
    assert mean["value"] == pytest.approx(values.mean()) and mean["n"] == 400
    assert mean["low"] == pytest.approx(values.mean() - 1.96 * error, abs=0.1 * error)
    assert mean["high"] == pytest.approx(values.mean() + 1.96 * error, abs=0.1 * error)
    narrow = Intervals(samples=4000, confidence=0.5).mean(values)
    assert narrow["high"] == pytest.approx(values.mean() + 0.6745 * error, abs=0.1 * error)


def test_bootstrap_of_a_ratio_weighs_rows_by_their_tokens() -> None:
    ratio = Intervals().ratio([1.0, 30.0], [1, 10])
    # Each resample holds the first row twice, the second twice, or both: 1, 3 or 31 / 11.
    assert ratio == {"value": 31 / 11, "low": 1.0, "high": 3.0, "n": 2}
    middle = Intervals(confidence=0.02).ratio([1.0, 30.0], [1, 10])
    assert middle["low"] == middle["high"] == 31 / 11, "half of the resamples hold both"
    constant = Intervals().ratio([2.0, 6.0, 4.0], [1, 3, 2])
    assert (constant["low"], constant["high"]) == (2.0, 2.0)


def test_the_seed_decides_the_resamples() -> None:
    values = np.random.default_rng(1).normal(size=30)
    assert Intervals(seed=3).mean(values) == Intervals(seed=3).mean(values)
    assert Intervals(seed=3).mean(values) != Intervals(seed=4).mean(values)


def test_importing_the_stage_loads_no_torch() -> None:
    code = "import sys, stages.evaluate; sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], check=False, cwd=ROOT).returncode == 0
