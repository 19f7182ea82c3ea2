"""How near PPO, DPO and RLOO come to the best reward at each divergence, which is known exactly.

``PYTHONPATH=. python tests/benchmarks/bench_ppo_frontier.py FOLDER [METHOD ...]``. Four prompts,
eight one-token answers, two gloo ranks (tests/stages/bandit.py). A method is right if it reaches
the enumerated (E[r], KL); of DPO, which is told of the answers alone, among those. What FOLDER
holds already is not run again; ``FOLDER/frontier.png`` is drawn from all that it holds.
"""

import os
import sys
from pathlib import Path
from typing import Any

import numpy as np

from backends import DDP, Resources
from tests.benchmarks.table import show
from tests.small import ENV, Run, run_jobs
from tests.stages import bandit
from tests.stages.test_ppo import frontier

BETAS = (2.0, 1.0, 0.5, 0.2)
TWO = Resources(ranks_per_node=2, micro_batch_size=32)
REWARDS = [{"function": "tests.stages.bandit:worth"}]
RLOO: dict[str, Any] = {
    "estimator": {"kind": "rloo"},
    "learning_rate": 1e-3,
    "schedule": "linear",
    "global_batch_size": 64,
    "num_generations": 16,
    "max_steps": 150,
    "epochs": 1000,
    "max_new_tokens": 1,
    "rewards": REWARDS,
}
DPO: dict[str, Any] = {
    "learning_rate": 1e-3,
    "global_batch_size": 64,
    "max_steps": 300,
    "epochs": 1000,
}


def write_preferences(world: Path) -> None:
    """Every pair of answers in the proportions of Bradley-Terry: sigmoid(r - r')."""
    from datasets import Dataset

    rows = []
    for prompt, worths in zip(bandit.PROMPTS, bandit.TABLE, strict=True):
        for chosen, mine in worths.items():
            for rejected, other in worths.items():
                share = 1 / (1 + np.exp(other - mine))
                row = {"prompt_ids": prompt, "chosen_ids": [chosen], "rejected_ids": [rejected]}
                rows += [row] * (chosen != rejected) * round(20 * share)
    Dataset.from_list(rows).save_to_disk(world / "data" / "preferences" / "train")


def jobs(folder: Path, method: str) -> list[Run]:
    """One run for each beta."""
    world = folder / "world"
    inputs = {"policy": world / "policy", "data": world / "data"}
    stage = {"PPO": "ppo", "DPO": "dpo", "RLOO": "grpo"}[method]
    found = []
    for beta in BETAS:
        settings = {
            "PPO": frontier(beta),
            "DPO": DPO | {"beta": beta},
            "RLOO": RLOO | {"beta": beta},
        }
        out = folder / f"{method}-{beta:g}"
        found.append(Run(out, stage, settings[method], inputs, DDP(), TWO))
    return found


def draw(path: Path, curve: list[dict[str, float]], reached: dict[str, list[dict]]) -> None:
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    figure, axes = pyplot.subplots(figsize=(6, 4), layout="constrained")
    axes.plot([p["kl"] for p in curve], [p["reward"] for p in curve], color="0.6", label="optimum")
    for marker, (method, points) in zip("osD", reached.items(), strict=False):
        axes.plot([p["kl"] for p in points], [p["reward"] for p in points], marker, label=method)
    axes.set_xlabel("KL from the reference, nats")
    axes.set_ylabel("expected reward")
    axes.legend()
    figure.savefig(path, dpi=120)


def main(folder: Path, methods: list[str]) -> None:
    os.environ |= ENV
    if not (folder / "world").exists():
        bandit.write_world(folder / "world")
        write_preferences(folder / "world")
    for method in methods:
        missing = [run for run in jobs(folder, method) if not (run.out / "model").exists()]
        if missing:
            run_jobs(missing)
    reference = bandit.distribution(folder / "world" / "policy" / "model")
    start = bandit.measure(reference, reference)
    rows = [["reference", "", f"{start['reward']:.3f}", "0", "", "", ""]]
    reached: dict[str, list[dict]] = {}
    for method in ("PPO", "DPO", "RLOO"):
        for beta, run in zip(BETAS, jobs(folder, method), strict=True):
            if not (run.out / "model").exists():
                continue
            policy, best = bandit.distribution(run.out / "model"), bandit.optimum(reference, beta)
            outside = 1 - float(policy.exp()[:, list(bandit.ANSWERS)].sum(1).mean())
            if method == "DPO":
                policy, best = (bandit.among_answers(each) for each in (policy, best))
            got, exact = (bandit.measure(each, reference) for each in (policy, best))
            reached.setdefault(method, []).append(got)
            apart = 0.5 * (policy.exp() - best.exp()).abs().sum(1).max()
            pairs = [f"{got[key]:.3f} / {exact[key]:.3f}" for key in ("reward", "kl")]
            seconds = f"{run.rows[-1]['time'] - run.rows[0]['time']:.0f}"
            facts = [f"{float(apart):.3f}", f"{100 * outside:.1f}", seconds]
            rows.append([method, f"{beta:g}", *pairs, *facts])
    head = ["method", "beta", "E[r] got / exact", "KL got / exact", "max TV", "other words, %", "s"]
    show("The frontier, two gloo ranks", head, rows)
    betas = np.geomspace(0.1, 50, 60).tolist()
    curve = [bandit.measure(bandit.optimum(reference, beta), reference) for beta in betas]
    draw(folder / "frontier.png", curve, reached)


if __name__ == "__main__":
    main(Path(sys.argv[1]), sys.argv[2:] or ["PPO", "DPO", "RLOO"])
