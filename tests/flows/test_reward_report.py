"""What a report shows of a reward model and of a policy that learns from rewards."""

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from flows.report import Evaluation, Report, Training, terminal_table, write_report
from stages.evaluation.intervals import Intervals
from stages.evaluation.reward_measures import Pairs, reward_measures


def write_lines(path: Path, rows: list[dict[str, Any]]) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))


def estimate(value: float) -> dict[str, float]:
    return {"value": value, "low": value - 0.05, "high": value + 0.05, "n": 20}


@pytest.fixture
def report(tmp_path: Path) -> Report:
    store = tmp_path / "store"
    rng = np.random.default_rng(0)
    columns = [rng.normal(each, 1, 50) for each in (1, 0, 20, 18)]
    pairs = Pairs(columns[0], columns[1], columns[2].round(), columns[3].round())
    measured = reward_measures(pairs, Intervals())
    measured |= {"held_out_pairs": 50, "scale": {"mean": 0.5, "std": 2.0, "num": 64}}
    steps = range(1, 21)
    common = [{"step": s, "total_steps": 20, "time": 1e9 + s, "loss": 1 / s} for s in steps]
    write_lines(store / "reward" / "metrics.jsonl", common)
    (store / "reward" / "metrics.json").write_text(json.dumps(measured))
    learnt = [
        row
        | {"reward": s / 20, "reward/regex": s / 40, "reward/exact_match": s / 40, "kl": s / 100}
        | {"entropy": 1.0, "clip_fraction": 0.1, "value_loss": 0.5, "explained_variance": 0.2}
        | {"answer_tokens": 9.0, "eos_rate": 1.0, "seconds/rollout": 1.0, "seconds/train": 2.0}
        for s, row in zip(steps, common, strict=True)
    ]
    write_lines(store / "ppo" / "metrics.jsonl", learnt)
    answered = {"completion": "*a*\rb\r\nc\nd", "scores": {"regex": 1, "total": 1}}
    samples = [{"step": s, "prompt": f"q | {s}"} | answered for s in steps]
    write_lines(store / "ppo" / "samples.jsonl", samples)
    evaluations = []
    for name, reward in (("SFT", 0.3), ("PPO", 0.9)):
        out = store / f"evaluate-{name}"
        found = {"answers/reward": reward, "answers/reward/regex": reward, "answers/reward/x": 0.0}
        if name == "PPO":
            found |= {"answers/win_rate": 0.8, "answers/win_rate/reward_model": 0.7}
            found |= {"answers/win_rate/regex": 0.8}
            found |= {"answers/kl": 1.5}
        out.mkdir()
        measures = {"confidence": 0.95} | {key: estimate(value) for key, value in found.items()}
        (out / "metrics.json").write_text(json.dumps(measures))
        baseline = "SFT" if name == "PPO" else ""
        evaluations.append(Evaluation(label=name, output=out, baseline=baseline))
    return Report(
        name="small",
        stages=(),
        trainings=(
            Training(label="REWARD", output=store / "reward"),
            Training(label="PPO", output=store / "ppo"),
        ),
        evaluations=tuple(evaluations),
    )


def test_a_reward_model_is_shown_with_its_calibration(report: Report, tmp_path: Path) -> None:
    text = write_report(tmp_path / "run", report).read_text()
    section = text.split("## Reward model")[1].split("## Curves")[0]
    for words in ("| accuracy, % |", "expected calibration error", "margin, 95 % quantile",
                  "chosen answer longer by, tokens", "0.500 ± 2.000"):  # fmt: skip
        assert words in section
    assert "(figures/reliability.png)" in text


def test_what_a_policy_learns_is_drawn_and_answers_are_shown(
    report: Report, tmp_path: Path
) -> None:
    run = tmp_path / "run"
    text = write_report(run, report).read_text()
    for name in ("reward", "learning", "answers", "reliability", "loss"):
        assert f"(figures/{name}.png)" in text
        assert (run / "figures" / f"{name}.png").stat().st_size > 5000
    section = text.split("## Answers while training")[1]
    shown = [line for line in section.splitlines() if line.startswith("| ") and "q \\| " in line]
    assert [int(line.split("|")[1]) for line in shown] == [1, 5, 10, 15, 20]
    assert "\\*a\\*<br>b<br>c<br>d |" in shown[0], "answers are no markup"


def test_rewards_win_rates_and_divergence_stand_in_the_tables(
    report: Report, tmp_path: Path
) -> None:
    text = write_report(tmp_path / "run", report).read_text()
    assert "| reward of answers, sum | 0.300 [0.250, 0.350] | 0.900 [0.850, 0.950] |" in text
    assert "| reward of answers, regex | 0.300" in text
    assert "| answers that win by sum, % | 80.0 [75.0, 85.0] |" in text
    assert "| answers that win by reward model, % | 70.0" in text
    assert "| KL to the reference, nats/answer | 1.500" in text
    table = terminal_table(report)
    assert "reward of answers, sum" in table and "answers that win by reward model" in table
    assert "KL to the reference" in table


def test_one_reward_alone_is_not_told_twice(report: Report, tmp_path: Path) -> None:
    out = report.evaluations[0].output
    measures = {"confidence": 0.95} | {
        key: estimate(0.5) for key in ("answers/reward", "answers/reward/numeric")
    }
    (out / "metrics.json").write_text(json.dumps(measures))
    alone = report.model_copy(update={"evaluations": report.evaluations[:1]})
    text = write_report(tmp_path / "run", alone).read_text()
    assert "reward of answers, numeric" in text and "reward of answers, sum" not in text


def test_without_rewards_nothing_of_this_is_there(report: Report, tmp_path: Path) -> None:
    plain = report.model_copy(update={"trainings": (), "evaluations": ()})
    text = write_report(tmp_path / "run", plain).read_text()
    assert "Reward model" not in text and "Answers while training" not in text
    assert not (tmp_path / "run" / "figures" / "reliability.png").exists()
