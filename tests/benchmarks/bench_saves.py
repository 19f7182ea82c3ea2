"""How long training stands still for a save, with the finishing beside it and without.

``PYTHONPATH=. python tests/benchmarks/bench_saves.py [REPEATS]``. A float32 Llama is trained whole
under DDP on two ranks, a save after each step: weights, two moments. Both ways are run in turn.
"""

import json
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path
from statistics import median
from typing import Any

from backends import DDP, Resources
from tests.benchmarks.table import show, spread
from tests.small import ROOT, Run, write_job, write_rows

STEPS = 4
WAYS = {"finished beside training": "beside", "finished first": "first"}


def write_large_model(out: Path) -> None:
    """The tokenizer of the tests' small model, and 60 million weights."""
    import torch
    from transformers import LlamaConfig, LlamaForCausalLM

    from tests.small import write_model

    write_model(out, tie=True)
    config = LlamaConfig.from_pretrained(out)
    config.update({"hidden_size": 768, "intermediate_size": 3072, "num_hidden_layers": 6})
    config.head_dim = 192
    torch.manual_seed(0)
    LlamaForCausalLM(config).save_pretrained(out)


def rank(way: str, job: Path) -> None:
    """One rank of a job."""
    from stages import saves
    from stages.__main__ import main as run_job

    written: Any = saves.Saves.written

    def first(self: saves.Saves, step: int) -> None:
        written(self, step)
        self.finish()

    if way == "first":
        saves.Saves.written = first  # type: ignore[method-assign]
    run_job(job)


def measure(folder: Path, way: str) -> dict[str, float]:
    out = folder / way
    shutil.rmtree(out, ignore_errors=True)
    run = Run(
        out=out,
        stage="sft",
        config={"learning_rate": 1e-4, "global_batch_size": 16, "max_steps": STEPS},
        inputs={"model": folder, "data": folder},
        backend=DDP(),
        resources=Resources(ranks_per_node=2),
        settings={"save_steps": 1, "keep": {"keep_last": 2}},
    )
    launch = run.backend.plan(run.resources, __file__, "--rank", way, str(write_job(run)))
    subprocess.run(launch.argv, check=True, capture_output=True, cwd=ROOT)
    facts = json.loads((out / "metrics.json").read_text())
    rows = run.rows
    saved = sum(f.stat().st_size for f in (out / "checkpoints" / f"checkpoint-{STEPS}").iterdir())
    return {
        "stall": facts["save_seconds"] / facts["saves"],
        "wall": rows[-1]["time"] - rows[0]["time"],
        "gigabytes": saved / 1e9,
    }


def main(repeats: int) -> None:
    with tempfile.TemporaryDirectory() as temporary:
        folder = Path(temporary)
        write_large_model(folder / "model")
        write_rows(folder)
        found: dict[str, list[dict[str, float]]] = {label: [] for label in WAYS}
        for _ in range(repeats):
            for label, way in WAYS.items():
                found[label].append(measure(folder, way))
    rows = [
        [label, spread([f["stall"] for f in facts]), spread([f["wall"] for f in facts])]
        for label, facts in found.items()
    ]
    size = median(facts["gigabytes"] for facts in found["finished first"])
    title = f"{STEPS} steps and saves of {size:.2f} GB, median (range) of {repeats}"
    show(title, ["a save is", "stall of a save, s", f"step 1 to step {STEPS}, s"], rows)


if __name__ == "__main__":
    if sys.argv[1:2] == ["--rank"]:
        rank(sys.argv[2], Path(sys.argv[3]))
    else:
        main(int(sys.argv[1]) if sys.argv[1:] else 3)
