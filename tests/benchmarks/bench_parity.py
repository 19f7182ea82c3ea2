"""How far ten steps under each backend lie from one process, and what a rank holds.

``PYTHONPATH=. python tests/benchmarks/bench_parity.py``. SFT and DPO, full and LoRA, on two
CPU ranks.
"""

import os
import tempfile
from pathlib import Path

from backends import DDP, FSDP, AnyBackend, DeepSpeed, Local, Resources
from tests.benchmarks.table import show
from tests.small import ENV, Run, run_jobs, write_model, write_rows

TWO = Resources(ranks_per_node=2)
BACKENDS: dict[str, tuple[AnyBackend, Resources]] = {
    "one process": (Local(), Resources()),
    "DDP x2": (DDP(), TWO),
    "FSDP2 x2": (FSDP(), TWO),
    "ZeRO-2 x2": (DeepSpeed(zero_stage=2), TWO),
    "ZeRO-3 x2": (DeepSpeed(zero_stage=3), TWO),
}
JOBS = [
    (stage, base, kind)
    for stage, base in (("sft", "model"), ("dpo", "policy"))
    for kind in ("full", "lora")
]


def train(scratch: Path, name: str) -> list[Run]:
    backend, resources = BACKENDS[name]
    runs = [
        Run(
            out=scratch / f"{name} {stage} {kind}",
            stage=stage,
            config={
                "learning_rate": 1e-3,
                "global_batch_size": 8,
                "max_steps": 10,
                "method": {"kind": kind},
            },
            inputs={base: scratch / "base", "data": scratch / "data"},
            backend=backend,
            resources=resources,
        )
        for stage, base, kind in JOBS
    ]
    run_jobs(runs)
    return runs


def apart(run: Run, alone: Run) -> str:
    """The largest difference of a loss, over the steps."""
    return f"{max(abs(a - b) for a, b in zip(run.losses, alone.losses, strict=True)):.1e}"


def row(name: str, runs: list[Run], alone: list[Run]) -> list[str]:
    held = runs[0].ranks[0]
    sizes = [f"{held[key] / 1000:.0f}" for key in ("parameter_bytes", "optimizer_bytes")]
    return [name, *(apart(*pair) for pair in zip(runs, alone, strict=True)), *sizes]


def main() -> None:
    os.environ |= ENV
    with tempfile.TemporaryDirectory() as folder:
        scratch = Path(folder)
        write_model(scratch / "base" / "model", tie=True)
        write_rows(scratch / "data")
        found = {name: train(scratch, name) for name in BACKENDS}
        rows = [row(name, runs, found["one process"]) for name, runs in found.items()]
    head = ["backend", *(f"{stage} {kind}" for stage, _, kind in JOBS)]
    head += ["parameters, kB a rank", "optimizer, kB a rank"]
    show(
        "Largest loss difference from one process over ten steps, and what rank 0 holds", head, rows
    )


if __name__ == "__main__":
    main()
