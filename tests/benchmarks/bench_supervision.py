"""What supervision costs: a step, a stage, and a rank that prints a million lines.

``PYTHONPATH=. python tests/benchmarks/bench_supervision.py [REPEATS]``. The tiny recipe's SFT runs
in turn as it is, with beats and stop flags switched off from outside, and with a flood of lines
from rank 1; an empty command runs supervised and plain. Ratios are of runs that followed each
other.
"""

import json
import os
import subprocess
import sys
import tempfile
import time
from itertools import pairwise
from pathlib import Path
from statistics import median

from backends.placement import supervise
from tests.benchmarks.table import show, spread
from tests.flows.faulty.cases import recipe, start
from tests.small import ENV, ROOT

STEPS, WARM_UP = 120, 10
WORDS = (
    f"sft.config.max_steps={STEPS}", "sft.config.global_batch_size=32",
    "sft.config.learning_rate=2e-3", "sft.resources.micro_batch_size=16", "sft.save_every=1000",
)  # fmt: skip
KINDS = {
    "as it is": "none:0:0",
    "without": "unsupervised:0:0",
    "a million lines": f"flood:1:{STEPS // 2}",
}


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


def step_seconds(folder: Path, store: Path, fault: str) -> list[float]:
    """Time of each step after the first ten."""
    flow = start(recipe(folder, store), fault, *WORDS)
    said = flow.communicate()[0]
    assert flow.returncode == 0, said
    rows = next(store.glob("sft/*/metrics.jsonl")).read_text().splitlines()
    times = [json.loads(row)["time"] for row in rows][WARM_UP:]
    return [after - before for before, after in pairwise(times)]


def added_to_a_stage(scratch: Path) -> float:
    """Seconds that an empty command takes more when it is supervised."""
    argv = (sys.executable, "-c", "pass")
    began = time.monotonic()
    subprocess.run(argv, check=True)
    plain = time.monotonic() - began
    job = supervise.Job(argv, env=os.environ, log=scratch / "log.txt", grace_seconds=1)
    began = time.monotonic()
    assert supervise.run(job, poll=lambda: None) == 0
    return time.monotonic() - began - plain


def main(repeats: int) -> None:
    os.environ |= ENV | {"SLOW": "0"}
    runs: dict[str, list[list[float]]] = {kind: [] for kind in KINDS}
    with tempfile.TemporaryDirectory() as scratch:
        added = [added_to_a_stage(Path(scratch)) for _ in range(5 * repeats)]
        folder = inputs(Path(scratch))
        for repeat in range(repeats):
            for number, (kind, fault) in enumerate(KINDS.items()):
                store = Path(scratch) / f"store{repeat}{number}"
                runs[kind].append(step_seconds(folder, store, fault))
    calm, bare, flooded = runs.values()
    steps = [median(a) / median(b) for a, b in zip(calm, bare, strict=True)]
    floods = [sum(a) / sum(b) for a, b in zip(flooded, calm, strict=True)]
    rows = [
        ["median step, with beats and stop flags / without", spread(steps, 3), "1.01"],
        ["all steps, a million lines from a rank / none", spread(floods, 3), "1.02"],
        ["seconds added to a stage", spread(added, 2), "0.5"],
    ]
    show(f"Supervision, median (range) of {repeats} runs", ["what", "measured", "bar"], rows)


if __name__ == "__main__":
    main(int(sys.argv[1]) if len(sys.argv) > 1 else 5)
