"""Leaving early and in order: every rank after the same step, with its work saved."""

import signal
from pathlib import Path

STOP = "stop"
EXIT_CODE = 75
"""``EX_TEMPFAIL``: the work is not done and goes on from its checkpoint; schedulers requeue."""


class StopRequest:
    """Whether this rank was asked to stop, by a signal or by the file ``OUT/stop``."""

    def __init__(self, out: Path) -> None:
        self.file = out / STOP
        self.signalled = False

    def listen(self) -> None:
        """Take SIGTERM (a scheduler, torchrun) and SIGUSR1 (a warning before it) as requests."""
        for number in (signal.SIGTERM, signal.SIGUSR1):
            signal.signal(number, self._note)

    def _note(self, *_: object) -> None:
        self.signalled = True

    def agreed(self, device: str) -> bool:
        """Whether any rank was asked. Every rank calls this after every step."""
        import torch
        import torch.distributed as dist

        asked = self.signalled or self.file.exists()
        if not (dist.is_available() and dist.is_initialized()):
            return asked
        flag = torch.tensor(int(asked), device=device, dtype=torch.int32)
        dist.all_reduce(flag, op=dist.ReduceOp.MAX)
        return bool(flag.item())
