"""What PPO does to the true reward when it is paid by a learned one (arXiv:2210.10760).

``PYTHONPATH=. python tests/benchmarks/bench_over_optimisation.py FOLDER``. The prompts and answers
of tests/stages/bandit.py; a reward model is trained on a few pairs, each judged once and noisily
(Bradley and Terry), and PPO on two gloo ranks follows it at falling prices of divergence. Both
rewards of every policy are computed over the whole vocabulary. ``FOLDER/over_optimisation.png`` is
drawn from it; what FOLDER holds already is not run again.
"""

import math
import os
import random
import sys
from pathlib import Path
from typing import Any

import numpy as np

from backends import DDP, Resources
from tests.benchmarks.table import show
from tests.small import ENV, EOS, WORDS, Run, run_jobs
from tests.stages import bandit
from tests.stages.test_ppo import frontier

BETAS = (2.0, 1.0, 0.5, 0.2, 0.1)
PAIRS = 120
TWO = Resources(ranks_per_node=2, micro_batch_size=32)
REWARD: dict[str, Any] = {
    "learning_rate": 1e-3,
    "global_batch_size": 16,
    "max_steps": 80,
    "epochs": 1000,
    "held_out_pairs": 0,
}
TEMPLATE = (
    "{% for m in messages %}{{ m.content }}{{ ' w1' if m.role == 'assistant' else ' ' }}"
    "{% endfor %}"
)


def write_world(folder: Path) -> None:
    """The bandit, whose tokenizer reads what it writes, and noisy preferences."""
    from datasets import Dataset
    from tokenizers import pre_tokenizers
    from transformers import AutoTokenizer

    bandit.write_world(folder)
    tokenizer = AutoTokenizer.from_pretrained(folder / "policy" / "model")
    tokenizer.backend_tokenizer.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    tokenizer.chat_template = TEMPLATE
    tokenizer.save_pretrained(folder / "policy" / "model")
    draw, rows = random.Random(3), []
    for number in range(PAIRS):
        prompt, worths = (each[number % 4] for each in (bandit.PROMPTS, bandit.TABLE))
        one, other = draw.sample(sorted(worths), 2)
        if draw.random() > 1 / (1 + math.exp(worths[other] - worths[one])):
            one, other = other, one
        sides = {"chosen_ids": [one, EOS], "rejected_ids": [other, EOS]}
        rows.append({"prompt_ids": prompt, **sides})
    Dataset.from_list(rows).save_to_disk(folder / "pairs" / "preferences" / "train")


def training(folder: Path) -> Run:
    inputs = {"model": folder / "world" / "policy", "data": folder / "world" / "pairs"}
    return Run(folder / "reward", "reward", REWARD, inputs)


def runs(folder: Path) -> list[Run]:
    """One for each beta; the true reward only watches."""
    inputs = {
        "policy": folder / "world" / "policy",
        "data": folder / "world" / "data",
        "reward": folder / "reward",
    }
    paid = [{"model": True}, {"function": "tests.stages.bandit:worth", "weight": 0}]
    return [
        Run(folder / f"ppo-{b:g}", "ppo", frontier(b, rewards=paid), inputs, DDP(), TWO)
        for b in BETAS
    ]


def learned(folder: Path) -> Any:
    """(prompts, words) what the reward model gives each word as an answer, in float64."""
    import torch

    from stages.rewards.model import RewardModel

    model = RewardModel.load(folder / "reward" / "model", device="cpu", batch_size=WORDS)
    rows = []
    for ids in bandit.PROMPTS:
        prompt = [{"role": "user", "content": " ".join(f"w{each}" for each in ids)}]
        rows.append(model([prompt] * WORDS, [f"w{word}" for word in range(WORDS)]))
    return torch.tensor(rows, dtype=torch.float64)


def draw(path: Path, curves: dict[str, list[dict]], reached: dict[str, list[dict]]) -> None:
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    figure, axes = pyplot.subplots(figsize=(6, 4), layout="constrained")
    for style, (label, points) in zip((":", "--", "-"), curves.items(), strict=True):
        axes.plot([p["kl"] for p in points], [p["reward"] for p in points], style, color="0.5",
                  label=label)  # fmt: skip
    for marker, (label, points) in zip("so", reached.items(), strict=True):
        axes.plot([p["kl"] for p in points], [p["reward"] for p in points], marker, label=label)
    axes.set_xlabel("KL from the reference, nats")
    axes.set_ylabel("expected reward")
    axes.legend()
    figure.savefig(path, dpi=120)


def curves(reference: Any, proxy: Any) -> dict[str, list[dict]]:
    """What the best policies for the learned reward have of both, and what there is to have."""
    prices = np.geomspace(0.05, 50, 80).tolist()
    followed = [bandit.optimum(reference, beta, proxy) for beta in prices]
    best = [bandit.optimum(reference, beta) for beta in prices]
    return {
        "learned, its optimum": [bandit.measure(each, reference, proxy) for each in followed],
        "true, at that optimum": [bandit.measure(each, reference) for each in followed],
        "true, the best there is": [bandit.measure(each, reference) for each in best],
    }


def main(folder: Path) -> None:
    os.environ |= ENV
    if not (folder / "world").exists():
        write_world(folder / "world")
    if not (folder / "reward" / "model").exists():
        run_jobs([training(folder)])
    if missing := [run for run in runs(folder) if not (run.out / "model").exists()]:
        run_jobs(missing)
    reference, proxy = bandit.distribution(folder / "world" / "policy" / "model"), learned(folder)
    lines = curves(reference, proxy)
    best = sorted((p["kl"], p["reward"]) for p in lines["true, the best there is"])
    start = [bandit.measure(reference, reference, table)["reward"] for table in (proxy, None)]
    rows = [["reference", "0", f"{start[0]:.3f}", f"{start[1]:.3f}", f"{start[1]:.3f}"]]
    reached: dict[str, list[dict]] = {"learned, PPO": [], "true, PPO": []}
    for beta, run in zip(BETAS, runs(folder), strict=True):
        policy = bandit.distribution(run.out / "model")
        exact = bandit.optimum(reference, beta, proxy)
        got, wanted = (
            [bandit.measure(each, reference, table) for table in (proxy, None)]
            for each in (policy, exact)
        )
        for points, point in zip(reached.values(), got, strict=True):
            points.append(point)
        most = np.interp(got[0]["kl"], [kl for kl, _ in best], [reward for _, reward in best])
        pairs = [
            f"{one[key]:.3f} / {other[key]:.3f}"
            for key, one, other in (
                ("kl", got[0], wanted[0]),
                ("reward", got[0], wanted[0]),
                ("reward", got[1], wanted[1]),
            )
        ]
        rows.append([f"{beta:g}", *pairs, f"{float(most):.3f}"])
    head = ["beta", "KL got / exact", "learned r got / exact", "true r got / exact", "best true r"]
    show(f"PPO paid by a reward model of {PAIRS} noisy pairs; best: at the same KL", head, rows)
    draw(folder / "over_optimisation.png", lines, reached)


if __name__ == "__main__":
    main(Path(sys.argv[1]))
