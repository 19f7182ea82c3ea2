"""Saves: every rank writes while training stands still, and rank 0 finishes them while it goes on.

Finishing is to sync, to hash and to move the save among the checkpoints, which takes as long as the
writing or longer.
"""

import time
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Any

from stages import recut, resume
from stages.base import Context
from stages.training import complete

Trainer = Any


class Saves:
    """The saves of one rank, and how long training stood still for them."""

    def __init__(self, trainer: Trainer, ctx: Context) -> None:
        self.trainer, self.ctx = trainer, ctx
        self.thread = ThreadPoolExecutor(1, thread_name_prefix="save")
        self.unfinished: Future[None] | None = None
        self.began = 0.0
        self.untold = 0.0
        self.seconds = 0.0
        self.count = 0

    def begin(self) -> None:
        """Call it before the trainer writes. The save before this one is waited for, so that no
        more than one lies unfinished on the disk. Raises what went wrong with that."""
        self.began = time.monotonic()
        self._wait()

    def written(self, step: int) -> None:
        """Call it in every rank when the trainer has written; rank 0 begins to finish the save."""
        self.trainer.accelerator.wait_for_everyone()
        if self.trainer.args.process_index == 0:
            complete(self.trainer, self.ctx.out / resume.SAVING / f"checkpoint-{step}")
            movable = not self.trainer.is_deepspeed_enabled or recut.movable(self.trainer)
            self.unfinished = self.thread.submit(self._publish, step, movable)
        self.count += 1
        self._stood(self.began)

    def finish(self) -> None:
        """Return, in every rank, when the last save is among the checkpoints."""
        began = time.monotonic()
        self._wait()
        self.trainer.accelerator.wait_for_everyone()
        self._stood(began)

    def told(self) -> float:
        """Seconds that training stood still since this was last asked."""
        seconds, self.untold = self.untold, 0.0
        return seconds

    def _stood(self, since: float) -> None:
        seconds = time.monotonic() - since
        self.untold, self.seconds = self.untold + seconds, self.seconds + seconds

    def _wait(self) -> None:
        if self.unfinished:
            self.unfinished.result()
            self.unfinished = None

    def _publish(self, step: int, movable: bool) -> None:
        resume.publish(self.ctx.out, step, self.ctx.promise, movable=movable)
        if keep := self.ctx.trainer_args.get("keep"):
            resume.rotate(self.ctx.out, **keep)
