"""What a rank says of itself while it works, for whoever watches: phase, step, time.

A beat is ``OUT/beats/rank-N.json``: ``pid``, ``started`` (the clock tick, so that a recycled pid is
told apart), ``phase`` (``start``, ``step``, ``save``), ``step``, ``total_steps``, ``step_seconds``
(median), ``time`` (of day), ``clock`` (monotonic) and ``heeds_stop``.
"""

import faulthandler
import json
import os
import signal
import time
from collections import deque
from contextlib import suppress
from pathlib import Path
from statistics import median
from typing import Any, Literal

FOLDER = "beats"
STACKS = "stacks"
REMEMBERED = 20
"""Steps whose median is told."""

PAUSE = 1.0
"""Seconds between beats within a step."""

Phase = Literal["start", "step", "save"]


class Beats:
    """The beats of this rank."""

    def __init__(self, out: Path, *, heeds_stop: bool = False) -> None:
        """``heeds_stop``: between steps the rank looks for a request to save and leave."""
        self.heeds_stop = heeds_stop
        self.rank = int(os.environ.get("RANK", "0"))
        self.path = out / FOLDER / f"rank-{self.rank}.json"
        self.path.parent.mkdir(parents=True, exist_ok=True)
        self.durations: deque[float] = deque(maxlen=REMEMBERED)
        self.last_step: tuple[int, float] | None = None
        self.last: dict[str, Any] | None = None
        stat = Path("/proc/self/stat")
        self.started = int(stat.read_text().rpartition(")")[2].split()[19]) if stat.exists() else 0

    def beat(self, phase: Phase, *, step: int = 0, total_steps: int = 0) -> None:
        """Say where this rank is. Costs tens of microseconds; nothing is synced."""
        now = time.monotonic()
        if phase == "step":
            if self.last_step and step == self.last_step[0] + 1:
                self.durations.append(now - self.last_step[1])
            self.last_step = (step, now)
        self._write(
            {
                "pid": os.getpid(),
                "started": self.started,
                "phase": phase,
                "step": step,
                "total_steps": total_steps,
                "step_seconds": median(self.durations) if self.durations else None,
                "time": time.time(),
                "clock": now,
                "heeds_stop": self.heeds_stop,
            }
        )

    def again(self) -> None:
        """Say once more what was said last: this rank is still at work on it. A step that samples
        answers, or that is many micro-batches, takes longer than a rank may be silent."""
        now = time.monotonic()
        if self.last and now - self.last["clock"] >= PAUSE:
            self._write(self.last | {"time": time.time(), "clock": now})

    def _write(self, fact: dict[str, Any]) -> None:
        self.last = fact
        partial = self.path.with_suffix(".partial")
        with suppress(OSError):  # a full disk: whoever has work to save will say so
            partial.write_text(json.dumps(fact))
            partial.replace(self.path)


def write_stacks_on_request(out: Path) -> None:
    """On SIGUSR2 every thread's stack goes to ``OUT/stacks/rank-N.txt``, also in a blocked call."""
    folder = out / STACKS
    folder.mkdir(parents=True, exist_ok=True)
    file = (folder / f"rank-{os.environ.get('RANK', '0')}.txt").open("w")
    faulthandler.register(signal.SIGUSR2, file=file, all_threads=True)
