"""What supervision costs: a step, a stage, and a rank that prints a million lines.

``PYTHONPATH=. python tests/benchmarks/bench_supervision.py [REPEATS]``. The tiny recipe's SFT on
two ranks has blocks of five steps with beats and stop flags and without, by turns in one process;
a second one has blocks in which a rank prints ten thousand lines a step into its log and into
nothing. Ratios are of the whole time of neighbouring blocks. An empty command runs supervised and
plain.
"""

import json
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from itertools import pairwise
from pathlib import Path
from statistics import quantiles

from backends.placement import supervise
from tests.benchmarks.table import show
from tests.flows.faulty.cases import recipe, start
from tests.small import ENV, ROOT

BLOCK, BLOCKS = 5, 128
"""Steps in a block, and blocks in a run; the first pair is left out. A block is as short as it can
be with a look for a stop request in it, since a machine's speed changes within seconds."""

WORDS = (
    f"sft.config.max_steps={BLOCK * BLOCKS}", "sft.config.epochs=200",
    "sft.config.global_batch_size=32", "sft.config.learning_rate=2e-3",
    "sft.resources.micro_batch_size=16", "sft.save_every=10000",
)  # fmt: skip


def inputs(scratch: Path) -> Path:
    """The tiny recipe's model and rows, where a one-stage flow looks for them."""
    store = scratch / "tiny"
    words = ["sft.config.max_steps=2", "dpo.config.max_steps=2", "evaluate.config.generate_rows=0"]
    argv = [sys.executable, "-m", "flows.sft_then_dpo", "tiny", "--engine", "inline", *words]
    argv += [f"store={store}", f"runs={store}-runs"]
    subprocess.run(argv, cwd=ROOT, check=True, capture_output=True)
    folder = scratch / "inputs"
    folder.mkdir()
    runs = store.with_name("tiny-runs") / "tiny"
    (folder / "tied").symlink_to((runs / "fetch-model").resolve())
    (folder / "data").symlink_to((runs / "tokenize-data").resolve())
    return folder


def ratios(folder: Path, store: Path, kind: str) -> list[float]:
    """Time of each block that pays over that of the block after it, which does not."""
    flow = start(recipe(folder, store), f"{kind}:1:{BLOCK}", *WORDS)
    said = flow.communicate()[0]
    assert flow.returncode == 0, said
    rows = next(store.glob("sft/*/metrics.jsonl")).read_text().splitlines()
    times = [json.loads(row)["time"] for row in rows]
    blocks = [after - before for before, after in pairwise(times[BLOCK - 1 :: BLOCK])][1:]
    return [paid / free for paid, free in zip(blocks[::2], blocks[1::2], strict=True)]


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


def quartiles(found: Sequence[float]) -> str:
    low, middle, high = quantiles(found, n=4)
    return f"{middle:.3f} ({low:.3f}-{high:.3f})"


def main(repeats: int) -> None:
    os.environ |= ENV | {"SLOW": "0"}
    steps, floods = list[float](), list[float]()
    with tempfile.TemporaryDirectory() as scratch:
        added = [added_to_a_stage(Path(scratch)) for _ in range(5 * repeats)]
        folder = inputs(Path(scratch))
        for repeat in range(repeats):
            steps += ratios(folder, Path(scratch) / f"steps{repeat}", "unsupervised")
            floods += ratios(folder, Path(scratch) / f"floods{repeat}", "drown")
            so_far = f"{quartiles(steps)}, {quartiles(floods)}"
            print(f"run {repeat + 1} of {repeats}: {so_far}", file=sys.stderr, flush=True)
    rows = [
        [f"{BLOCK} steps, with beats and stop flags / without", quartiles(steps), "1.01"],
        [
            f"{BLOCK} steps, {BLOCK}0,000 lines into the log / into nothing",
            quartiles(floods),
            "1.02",
        ],
        ["seconds added to a stage", quartiles(added), "0.5"],
    ]
    show(
        f"Supervision, median (quartiles), {len(steps)} pairs of blocks of {repeats} runs",
        ["what", "measured", "bar"],
        rows,
    )


if __name__ == "__main__":
    main(int(sys.argv[1]) if len(sys.argv) > 1 else 5)
