"""Sharing the batches of an evaluation among the ranks of one job."""

import itertools
import json
import os
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import TypeVar

from stages.beats import Beats

S = TypeVar("S")
T = TypeVar("T")

Batches = Sequence[list[int]]
"""Row numbers, some in each batch."""

COLLECTIVES = {"cpu": "gloo", "cuda": "nccl"}


@dataclass(frozen=True)
class Ranks:
    """This process's place among those that evaluate together."""

    rank: int = 0
    world_size: int = 1

    def map(
        self,
        work: Callable[[list[S]], list[T]],
        rows: Sequence[S],
        batches: Batches,
        tick: Callable[[], None],
    ) -> list[T]:
        """``work`` on ``rows``, with a ``tick`` after each batch; on rank 0 a result for each row.

        A batch is the same whatever the number of ranks, hence so is every bit of its result.
        The other ranks get an empty list.
        """
        done = []
        for batch in batches[self.rank :: self.world_size]:
            done.append(work([rows[i] for i in batch]))
            tick()
        everyone = self._gather(done)
        if self.rank:
            return []
        results: list[list[T]] = [[]] * len(batches)
        for rank, theirs in enumerate(everyone):
            results[rank :: self.world_size] = theirs
        by_row: dict[int, T] = {}
        for batch, found in zip(batches, results, strict=True):
            by_row.update(zip(batch, found, strict=True))
        return [by_row[row] for row in range(len(rows))]

    def ticker(self, path: Path, *work: Batches) -> Callable[[], None]:
        """A function to call after a batch: a beat, and on rank 0 a line in ``path``."""
        total = sum(len(batches[self.rank :: self.world_size]) for batches in work)
        steps, beats = itertools.count(1), Beats(path.parent)
        if self.rank == 0:
            path.write_text("")

        def tick() -> None:
            row = {"step": next(steps), "total_steps": total, "time": time.time()}
            beats.beat(
                "save" if row["step"] == total else "step", step=row["step"], total_steps=total
            )
            if self.rank:
                return
            with path.open("a") as file:
                file.write(json.dumps(row) + "\n")

        return tick

    def _gather(self, mine: list[list[T]]) -> list[list[list[T]]]:
        if self.world_size == 1:
            return [mine]
        from torch import distributed

        everyone = [None] * self.world_size if self.rank == 0 else None
        distributed.gather_object(mine, everyone)
        return everyone or []  # pyright: ignore[reportReturnType] - filled by the call above


@contextmanager
def joined(device: str) -> Iterator[Ranks]:
    """The ranks that torchrun started, ready to exchange results; one process is alone."""
    world_size = int(os.environ.get("WORLD_SIZE", "1"))
    if world_size == 1:
        yield Ranks()
        return
    import torch

    if device == "cuda":
        torch.cuda.set_device(int(os.environ["LOCAL_RANK"]))
    torch.distributed.init_process_group(COLLECTIVES[device])
    try:
        yield Ranks(rank=int(os.environ["RANK"]), world_size=world_size)
    finally:
        torch.distributed.destroy_process_group()


def batches_by_length(lengths: Sequence[int], size: int) -> Batches:
    """Row numbers in batches of ``size``, longest first: little padding, and a batch that does
    not fit the memory fails at once instead of at the end.
    """
    order = sorted(range(len(lengths)), key=lambda row: (-lengths[row], row))
    return [order[start : start + size] for start in range(0, len(order), size)]
