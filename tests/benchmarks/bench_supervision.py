"""What supervision costs a step: the tiny recipe's SFT with beats and stop flags, and without.

``PYTHONPATH=. python tests/benchmarks/bench_supervision.py [REPEATS]``. The same job runs in turn
as it is and with both switched off from outside; the ratio is that of the median step times.
"""

import json
import os
import subprocess
import sys
import tempfile
from itertools import pairwise
from pathlib import Path
from statistics import median

from tests.benchmarks.table import show, spread
from tests.flows.faulty.cases import HERE
from tests.small import ENV, ROOT

STEPS = 120
RECIPE = """
name: one
folder: {folder}
store: {store}
runs: {store}-runs
sft:
  config: {{global_batch_size: 32, max_steps: {steps}, learning_rate: 2.0e-3}}
  backend: {{kind: ddp}}
  resources: {{ranks_per_node: 2, micro_batch_size: 16}}
  save_every: 1000
"""


def inputs(scratch: Path) -> Path:
    """The tiny recipe's model and rows, where a one-stage flow looks for them."""
    store = scratch / "tiny"
    words = ["sft.config.max_steps=1", "dpo.config.max_steps=1", "evaluate.config.generate_rows=0"]
    argv = [sys.executable, "-m", "flows.sft_then_dpo", "tiny", "--engine", "inline", *words]
    argv += [f"store={store}", f"runs={store}-runs"]
    subprocess.run(argv, cwd=ROOT, check=True, capture_output=True)
    folder = scratch / "inputs"
    folder.mkdir()
    runs = store.with_name("tiny-runs") / "tiny"
    (folder / "tied").symlink_to((runs / "fetch-model").resolve())
    (folder / "data").symlink_to((runs / "tokenize-data").resolve())
    return folder


def step_seconds(folder: Path, store: Path, *, supervised: bool) -> float:
    """Median time of a step after the first ten."""
    recipe = store.with_suffix(".yaml")
    recipe.write_text(RECIPE.format(folder=folder, store=store, steps=STEPS))
    env = os.environ | ENV | {"PYTHONPATH": f"{HERE}{os.pathsep}{ROOT}", "SLOW": "0"}
    env["FAULT"] = "none:0:0" if supervised else "unsupervised:0:0"
    argv = [sys.executable, str(HERE / "one_stage.py"), str(recipe)]
    subprocess.run(argv, env=env, cwd=ROOT, check=True, capture_output=True)
    rows = next(store.glob("sft/*/metrics.jsonl")).read_text().splitlines()
    times = [json.loads(row)["time"] for row in rows][10:]
    return median(after - before for before, after in pairwise(times))


def main(repeats: int) -> None:
    with_it, without = [], []
    with tempfile.TemporaryDirectory() as scratch:
        folder = inputs(Path(scratch))
        for repeat in range(repeats):
            for supervised, found in ((True, with_it), (False, without)):
                store = Path(scratch) / f"store{repeat}{supervised}"
                found.append(1e3 * step_seconds(folder, store, supervised=supervised))
    ratio = median(a / b for a, b in zip(with_it, without, strict=True))
    rows = [["supervised", spread(with_it), f"{ratio:.3f}"], ["without", spread(without), "1"]]
    show(f"A step of the tiny SFT, median (range) of {repeats} runs", ["what", "ms", "ratio"], rows)


if __name__ == "__main__":
    main(int(sys.argv[1]) if len(sys.argv) > 1 else 5)
