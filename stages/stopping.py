"""Leaving early and in order: every rank after the same step, with its work saved."""

import signal
import time
from pathlib import Path

STOP = "stop"
EXIT_CODE = 75
"""``EX_TEMPFAIL``: the work is not done and goes on from its checkpoint; schedulers requeue."""


BETWEEN_SECONDS, MOST_STEPS = 0.5, 20
"""Ranks ask one another this often, and at least after so many steps: a step that is long is
followed by it every time, and one of milliseconds does not pay for it."""


class StopRequest:
    """Whether this rank was asked to stop, by a signal or by the file ``OUT/stop``."""

    def __init__(self, out: Path) -> None:
        self.file = out / STOP
        self.signalled = False
        self.steps, self.passed = 1, 0
        self.exchanged = time.monotonic()

    def listen(self) -> None:
        """Take SIGTERM (a scheduler, torchrun) and SIGUSR1 (a warning before it) as requests."""
        for number in (signal.SIGTERM, signal.SIGUSR1):
            signal.signal(number, self._note)

    def _note(self, *_: object) -> None:
        self.signalled = True

    def agreed(self, device: str) -> bool:
        """Whether any rank was asked. Every rank calls this after every step and gets the same
        answer; between two exchanges it is no."""
        self.passed += 1
        if self.passed < self.steps:
            return False
        asked, self.steps = self._exchange(device)
        self.passed, self.exchanged = 0, time.monotonic()
        return asked

    def _exchange(self, device: str) -> tuple[bool, int]:
        """Whether any rank was asked, and the steps until the next exchange by the slowest one."""
        import torch
        import torch.distributed as dist

        asked, steps = self.signalled or self.file.exists(), self._steps_that_fit()
        if not (dist.is_available() and dist.is_initialized()):
            return asked, steps
        told = torch.tensor([int(asked), -steps], device=device, dtype=torch.int32)
        dist.all_reduce(told, op=dist.ReduceOp.MAX)
        any_asked, fewest = told.tolist()
        return bool(any_asked), -fewest

    def _steps_that_fit(self) -> int:
        seconds = (time.monotonic() - self.exchanged) / self.passed
        return max(1, min(MOST_STEPS, int(BETWEEN_SECONDS / max(seconds, 1e-6))))
