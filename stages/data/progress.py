"""How far a long run over files is: rows of ``metrics.jsonl``, which the flow shows."""

import json
import time
from pathlib import Path

from stages.data.files import Tick

NAME = "metrics.jsonl"
EVERY_SECONDS = 2.0
MEGABYTE = 1_000_000


def ticker(out: Path, *, total: int) -> Tick:
    """A function to be told of every number of bytes that was read, of ``total``.

    Every two seconds it appends to ``out/metrics.jsonl``, counting megabytes as steps; work that
    is done sooner leaves no such file.
    """
    path = out / NAME
    path.unlink(missing_ok=True)
    done, spoken = 0, time.monotonic()

    def tick(number: int) -> None:
        nonlocal done, spoken
        done += number
        if time.monotonic() - spoken < EVERY_SECONDS:
            return
        spoken = time.monotonic()
        steps = {"step": min(done, total) // MEGABYTE, "total_steps": -(-total // MEGABYTE)}
        with path.open("a") as file:
            file.write(json.dumps(steps | {"unit": "MB", "time": time.time()}) + "\n")

    return tick
