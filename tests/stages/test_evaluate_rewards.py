"""The evaluate stage's rewards, win rate and divergence, on small random models."""

import itertools
import json
import math
import shutil
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import pytest

from stages.base import Context, StageError
from stages.evaluate import Evaluate, evaluate
from stages.evaluation import divergence
from stages.rewards import RewardError
from tests.task import write_task

DIGITS = {"function": "tests.stages.test_grpo:share_of_digits"}
SHORT = {"function": "length", "options": {"most": 4, "margin": 40}, "weight": 0.5}
CONFIG: dict[str, Any] = {
    "generate_rows": 24,
    "kl_rows": 24,
    "max_new_tokens": 8,
    "train_pairs": 0,
    "bootstrap_samples": 100,
    "rewards": [DIGITS, SHORT],
}


@pytest.fixture(scope="module")
def task(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Also ``other``: the same model, its weights moved a little."""
    import torch
    from transformers import AutoModelForCausalLM

    out = write_task(tmp_path_factory.mktemp("task"), conversations=150, preferences=60)
    shutil.copytree(out / "base", out / "other")
    model = AutoModelForCausalLM.from_pretrained(out / "base" / "model")
    torch.manual_seed(0)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(0.05 * torch.randn_like(parameter))
    model.save_pretrained(out / "other" / "model")
    return out


def run(out: Path, task: Path, model: str, **given: Any) -> Mapping[str, Any]:
    config = Evaluate.model_validate(CONFIG | given.pop("config", {}))
    out.mkdir()
    return evaluate(config, Context(out), model=task / model, data=task / "data", **given)


@pytest.fixture(scope="module")
def evaluated(
    tmp_path_factory: pytest.TempPathFactory, task: Path
) -> tuple[Path, Mapping[str, Any], Mapping[str, Any]]:
    out = tmp_path_factory.mktemp("evaluated")
    before = run(out / "base", task, "base")
    given = {"baseline": out / "base", "reference": task / "base"}
    return out, before, run(out / "other", task, "other", **given)


def test_answers_have_rewards_with_intervals(evaluated: Any) -> None:
    out, before, after = evaluated
    assert not any(key.startswith(("answers/win", "answers/kl")) for key in before)
    samples = [json.loads(line) for line in (out / "other" / "samples.jsonl").open()]
    for name, key in (("total", "answers/reward"), ("length", "answers/reward/length")):
        values = [sample["rewards"][name] for sample in samples]
        assert after[key]["value"] == pytest.approx(sum(values) / len(values))
        assert after[key]["low"] <= after[key]["value"] <= after[key]["high"]
        assert after[key]["n"] == len(samples) > 20


def test_the_win_rate_counts_answers_to_the_same_prompts(evaluated: Any) -> None:
    out, _, after = evaluated
    mine, theirs = (
        [json.loads(line) for line in (out / name / "samples.jsonl").open()]
        for name in ("other", "base")
    )
    won = [
        (a["rewards"]["total"] > b["rewards"]["total"])
        + (a["rewards"]["total"] == b["rewards"]["total"]) / 2
        for a, b in zip(mine, theirs, strict=True)
    ]
    found = after["answers/win_rate"]
    assert found["value"] == pytest.approx(sum(won) / len(won)) and found["n"] == len(won)
    assert 0 < sum(won) != len(won) / 2, "some answers differ"
    assert 0 <= found["low"] <= found["value"] <= found["high"] <= 1
    assert "answers/win_rate/share_of_digits" in after


def test_a_model_ties_with_itself_and_has_no_divergence(
    evaluated: Any, task: Path, tmp_path: Path
) -> None:
    out, *_ = evaluated
    given = {"baseline": out / "base", "reference": task / "base"}
    same = run(tmp_path / "same", task, "base", **given)
    assert same["answers/win_rate"]["value"] == 0.5
    assert same["answers/kl"]["value"] == same["answers/kl_per_token"]["value"] == 0
    apart = evaluated[2]
    assert apart["answers/kl"]["value"] > 0.01
    assert apart["answers/kl"]["low"] <= apart["answers/kl"]["value"] <= apart["answers/kl"]["high"]


CALLS = itertools.count()


def rounded_otherwise(
    prompts: Sequence[Any], completions: Sequence[str], rows: Sequence[Any]
) -> list[float]:
    """The same for every answer, but for what a batch of another width does to the last bits."""
    return [1 + 1e-7 * next(CALLS)] * len(completions)


def test_the_same_answer_twice_is_a_tie_whatever_its_score_was_rounded_to(
    evaluated: Any, task: Path, tmp_path: Path
) -> None:
    out, *_ = evaluated
    config = {"rewards": [{"function": f"{__name__}:rounded_otherwise"}]}
    same = run(tmp_path / "same", task, "base", baseline=out / "base", config=config)
    assert same["answers/win_rate"]["value"] == 0.5


def test_the_divergence_is_that_of_the_enumerated_answers() -> None:
    """Two tokens over five words: every answer can be listed, with what each model gives it."""
    import torch
    from transformers import LlamaConfig, LlamaForCausalLM

    def model(seed: int) -> Any:
        torch.manual_seed(seed)
        return LlamaForCausalLM(
            LlamaConfig(vocab_size=5, hidden_size=16, intermediate_size=16, num_hidden_layers=1,
                        num_attention_heads=2, initializer_range=0.6)
        ).eval()  # fmt: skip

    policy, reference, prompt = model(0), model(1), [1, 2]
    answers = [list(pair) for pair in itertools.product(range(5), repeat=2)]
    logps = []
    for each in (policy, reference):
        with torch.no_grad():
            logits = each(torch.tensor([[*prompt, *a] for a in answers])).logits.log_softmax(-1)
        picked = [logits[row, [1, 2], answer].sum() for row, answer in enumerate(answers)]
        logps.append(torch.stack(picked).double())
    exact = float((logps[0].exp() * (logps[0] - logps[1])).sum())
    found = divergence.divergences(policy, reference, [(prompt, a) for a in answers])
    weights = logps[0].exp().tolist()
    estimate = math.fsum(w * kl for w, (kl, _) in zip(weights, found, strict=True))
    assert estimate == pytest.approx(exact, abs=1e-5) and exact > 0.1
    assert {tokens for _, tokens in found} == {2}


class Masked:
    """A model that can never say the last of its tokens, as one with a padded vocabulary may."""

    def __init__(self, model: Any) -> None:
        self.model, self.device = model, model.device

    def __call__(self, **inputs: Any) -> Any:
        found = self.model(**inputs)
        found.logits[..., -1] = -math.inf
        return found


def test_a_token_that_the_model_never_says_adds_no_divergence(task: Path) -> None:
    from transformers import AutoModelForCausalLM

    policy, reference = (
        AutoModelForCausalLM.from_pretrained(task / name / "model").eval()
        for name in ("other", "base")
    )
    rows = [([5, 6], [7, 8, 9])]
    ((nats, tokens),) = divergence.divergences(Masked(policy), Masked(reference), rows)
    assert nats == pytest.approx(divergence.divergences(policy, reference, rows)[0][0], rel=0.1)
    assert tokens == 3
    ((beside_whole, _),) = divergence.divergences(Masked(policy), reference, rows)
    assert beside_whole > 0
    with pytest.raises(StageError, match="the divergence of an answer is inf"):
        divergence.divergences(policy, Masked(reference), rows)


def test_padding_changes_no_divergence(task: Path) -> None:
    from transformers import AutoModelForCausalLM

    policy, reference = (
        AutoModelForCausalLM.from_pretrained(task / name / "model").eval()
        for name in ("other", "base")
    )
    rows = [([5, 6], [7, 8, 9]), ([5, 6, 7, 8, 9, 10], [11])]
    together = divergence.divergences(policy, reference, rows)
    alone = [divergence.divergences(policy, reference, [row])[0] for row in rows]
    assert [kl for kl, _ in together] == pytest.approx([kl for kl, _ in alone], abs=1e-5)


def test_a_batch_of_another_size_draws_the_same_answers(
    evaluated: Any, task: Path, tmp_path: Path
) -> None:
    again = run(
        tmp_path / "again", task, "other", reference=task / "base", config={"batch_size": 5}
    )
    for key in ("answers/kl", "answers/reward"):
        assert again[key] == pytest.approx(evaluated[2][key], abs=1e-4)


def test_a_reward_model_that_is_none_is_refused_before_the_work(task: Path, tmp_path: Path) -> None:
    config = {"rewards": [{"model": True}]}
    with pytest.raises(RewardError, match="was given no input `reward`"):
        run(tmp_path / "none", task, "base", config=config)
    with pytest.raises(StageError, match="a reward model is a sequence classifier"):
        run(tmp_path / "wrong", task, "base", config={"rewards": []}, reward=task / "base")
