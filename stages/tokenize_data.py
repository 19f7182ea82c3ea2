"""Rows of text to rows of token ids for one model, with masks that were verified."""

import ctypes
import datetime
import gc
import os
import shutil
import signal
import sys
from collections import deque
from collections.abc import Iterator, Sequence
from concurrent.futures import Future
from contextlib import contextmanager
from dataclasses import dataclass, field
from itertools import islice
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal

from pydantic import Field, PositiveInt

from configs import Config
from stages.base import Context, Metrics, StageError
from stages.data import arrow, origins, progress, quarantine, templates, tokens
from stages.data.conversations import KINDS, Kind
from stages.data.files import Tick
from stages.data.quarantine import Keep, Tally
from stages.data.templates import Template
from stages.data.tokens import Block, Fitting, Tokenizing

if TYPE_CHECKING:
    import numpy as np

SIDES = ("train", "test")
BLOCK_ROWS, BLOCK_BYTES = 1000, 1 << 20
PR_SET_PDEATHSIG = 1
WORTH_A_PROCESS = 4 << 20
"""Bytes of rows from which on starting a process for each core pays."""


class TokenizeData(Config):
    max_length: PositiveInt = 1024
    """Longest row in tokens; of a pair, its prompt with the longer answer."""

    on_overflow: Literal["drop", "error", "truncate_prompt"] = "drop"
    """For a longer row: leave it out, fail, or shorten what stands before the last answer (the
    oldest turns go first, then the start of the question). Answers are never cut."""

    assistant_only_loss: bool = True
    """Train the assistant's turns and their stop tokens only; else every token."""

    template_date: datetime.date | None = None
    """What day it is for chat templates that write the date. Unset: they are refused."""

    drop_budget: Annotated[float, Field(ge=0, le=1)] = 0.01
    """Largest share of faulty rows, of conversations and of pairs each, that is put up with.
    Rows over ``max_length`` do not count."""


def tokenize_data(config: TokenizeData, ctx: Context, *, model: Path, data: Path) -> Metrics:
    """Write ``{conversations,preferences,unpaired}/{train,test}`` into ``ctx.out`` as saved sets.

    Conversations: ``input_ids``, ``labels`` (-100 where not trained), ``prompt_ids`` (what stands
    before the last answer at inference), ``prompt`` (the turns before that answer, as JSON),
    ``tools`` (the row's, as JSON), ``answer`` (its text). Preferences: ``prompt_ids``,
    ``chosen_ids``, ``rejected_ids``; prompt with answer is the template's rendering. Unpaired:
    ``prompt_ids``, ``completion_ids``, ``label``. Ids are lists of int32, every answer ends with a
    stop token, and ``length`` is what ``max_length`` limits. ``model`` holds ``model/`` with a
    tokenizer, of which nothing else is loaded; ``data`` is an output of ``prepare_data``. What is
    kept out stands in ``quarantine.jsonl``, what day it was for the template in ``template.json``.
    Rows are never all in memory. Raises :class:`StageError`.
    """
    ctx.out.mkdir(parents=True, exist_ok=True)
    found: list[Kind] = [kind for kind in KINDS if (data / kind).is_dir()]
    if not found:
        raise StageError(f"{data}: holds none of {', '.join(KINDS)}; give a prepare_data output")
    splits = [Split(kind, side, data / kind / f"{side}.jsonl") for kind in found for side in SIDES]
    size = sum(split.path.stat().st_size for split in splits)
    processes = len(os.sched_getaffinity(0)) if size >= WORTH_A_PROCESS else 1
    if processes > 1:  # each core tokenises whole blocks by itself
        os.environ["TOKENIZERS_PARALLELISM"] = "false"
    template = templates.load(model / "model", date=config.template_date)
    with _scratch(ctx.out) as scratch:
        tick = progress.ticker(ctx.out, total=size)
        with quarantine.opened(ctx.out) as keep:
            for split in splits:
                _tokenize(config, template, split, scratch, keep, processes, tick)
                _tell_length(config, split)
        for kind in found:
            _enforce_budget(config, kind, splits, ctx.out)
        for split in splits:
            _refuse_empty(split, ctx.out)
        for kind in found:
            shutil.rmtree(ctx.out / kind, ignore_errors=True)
            (scratch / kind).rename(ctx.out / kind)
    templates.write_date(ctx.out, config.template_date)
    return {
        f"{split.kind}/{split.side}/{name}": number
        for split in splits
        for name, number in _facts(split).items()
    }


@dataclass
class Split:
    """One side of the conversations or of the preferences, and what came of it."""

    kind: Kind
    side: str
    path: Path
    num_read: int = 0
    num_tokens: int = 0
    num_trained: int = 0
    num_mismatched: int = 0
    num_truncated: int = 0
    lengths: "np.ndarray | None" = None
    """How many rows there are of each length."""

    tally: Tally = field(default_factory=Tally)

    @property
    def file(self) -> str:
        return f"{self.kind}/{self.path.name}"


@contextmanager
def _scratch(out: Path) -> Iterator[Path]:
    """A folder for what is not yet complete; gone afterwards, whatever happens."""
    folder = out / "tokenised.partial"
    shutil.rmtree(folder, ignore_errors=True)
    folder.mkdir()
    try:
        yield folder
    finally:
        shutil.rmtree(folder)


def _tokenize(
    config: TokenizeData,
    template: Template,
    split: Split,
    scratch: Path,
    keep: Keep,
    processes: int,
    tick: Tick,
) -> None:
    import numpy as np

    fitting = Fitting(config.max_length, config.on_overflow, config.assistant_only_loss)
    known = origins.read(split.path.parent.parent, split.kind, split.side)
    work = Tokenizing(template, fitting, split.kind, split.file, known)
    split.lengths = np.zeros(config.max_length + 1, dtype=np.int64)
    with arrow.writer(scratch / split.kind / split.side, split.kind) as write:
        for size, block in _blocks(work, split.path, processes):
            write(block)
            _count(work, split, block, keep)
            tick(size)


def _blocks(work: Tokenizing, path: Path, processes: int) -> Iterator[tuple[int, Block]]:
    """The file's rows, in its order, with the number of bytes that they were."""
    _current[:] = [work]
    if processes == 1:
        yield from map(_block, _batches(path))
        return
    from concurrent.futures import ProcessPoolExecutor
    from concurrent.futures.process import BrokenProcessPool
    from multiprocessing import get_context

    # Forked, so that the template is there; no thread was started yet that a fork would cut off.
    # What is loaded is no garbage, and no worker is to look through it again and again.
    gc.freeze()
    with ProcessPoolExecutor(
        processes, get_context("fork"), initializer=_die_with, initargs=(os.getpid(),)
    ) as pool:
        waiting: deque[Future[tuple[int, Block]]] = deque()
        try:
            for batch in _batches(path):
                waiting.append(pool.submit(_block, batch))
                if len(waiting) > 2 * processes:
                    yield waiting.popleft().result()
            while waiting:
                yield waiting.popleft().result()
        except BrokenProcessPool:
            raise StageError(
                f"{work.file}: a tokenising process was killed, most often because memory ran "
                "out; free some, or allow the stage fewer cores"
            ) from None
        finally:
            pool.shutdown(wait=False, cancel_futures=True)
            gc.unfreeze()


def _die_with(parent: int) -> None:
    """A worker whose parent was killed would wait for work for ever."""
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0)
        if os.getppid() != parent:
            os._exit(1)


_current: list[Tokenizing] = []
"""What this process works on: a forked one inherits what cannot be sent."""


def _block(batch: tuple[int, Sequence[bytes]]) -> tuple[int, Block]:
    first, rows = batch
    return sum(map(len, rows)), tokens.block(_current[0], first, rows)


def _batches(path: Path) -> Iterator[tuple[int, Sequence[bytes]]]:
    first = 1
    with path.open("rb") as file:
        while rows := _batch(file):
            yield first, rows
            first += len(rows)


def _batch(file: Any) -> list[bytes]:
    rows, size = [], 0
    for row in islice(file, BLOCK_ROWS):
        rows.append(row)
        size += len(row)
        if size >= BLOCK_BYTES:
            break
    return rows


def _count(work: Tokenizing, split: Split, block: Block, keep: Keep) -> None:
    import numpy as np

    assert split.lengths is not None
    split.lengths += np.bincount(block.lengths, minlength=len(split.lengths))
    split.num_read += block.num_read
    split.num_tokens += block.num_tokens
    split.num_trained += block.num_trained
    split.num_mismatched += block.num_mismatched
    split.num_truncated += block.num_truncated
    for number, fault, row in block.rejects:
        place = work.place(number)
        keep(split.kind, place, fault, row)
        split.tally.add(fault.rule, str(place), fault.detail)


def _enforce_budget(config: TokenizeData, kind: Kind, splits: Sequence[Split], out: Path) -> None:
    both = Tally()
    for split in splits:
        if split.kind == kind:
            both.counts.update(split.tally.counts)
            for rule, places in split.tally.first.items():
                known = both.first.setdefault(rule, [])
                known += places[: quarantine.NUM_PLACES - len(known)]
    quarantine.enforce_budget(
        both,
        num_rows=sum(split.num_read for split in splits if split.kind == kind),
        budget=config.drop_budget,
        what=kind,
        out=out,
    )


def _refuse_empty(split: Split, out: Path) -> None:
    assert split.lengths is not None
    held_out_only = split.side == "train" and split.path.stat().st_size == 0
    if not split.lengths.any() and not held_out_only:
        dropped = quarantine.listed(split.tally.counts)
        places = [f" ({place}: {detail})" for (place, detail), *_ in split.tally.first.values()]
        longer = ", or raise max_length" if split.tally.counts["too_long"] else ""
        raise StageError(
            f"no row of {split.kind}/{split.side} is left ({dropped or 'it was empty'})"
            f"{''.join(places[:1])}; see {out / quarantine.NAME}, then give other rows{longer}"
        )


def _tell_length(config: TokenizeData, split: Split) -> None:
    """Rows that were left out or shortened count against no budget, so they are told."""
    told = {"left out": split.tally.counts["too_long"], "shortened": split.num_truncated}
    done = ", ".join(f"{number} {what}" for what, number in told.items() if number)
    if done:
        sys.stdout.write(
            f"{split.file}: of {split.num_read} rows {done}, longer than max_length "
            f"{config.max_length} tokens (on_overflow: {config.on_overflow})\n"
        )


def _facts(split: Split) -> dict[str, int]:
    assert split.lengths is not None
    rows = split.lengths.cumsum()
    return {
        "rows": int(rows[-1]),
        "tokens": split.num_tokens,
        "trained_tokens": split.num_trained,
        "longest": int(split.lengths.nonzero()[0].max(initial=0)),
        "p50": _quantile(rows, 50),
        "p95": _quantile(rows, 95),
        "context_mismatch_rows": split.num_mismatched,
        "truncated": split.num_truncated,
        **{f"dropped/{rule}": n for rule, n in quarantine.counts(split.tally.counts).items()},
    }


def _quantile(rows: "np.ndarray", percent: int) -> int:
    """The nearest-rank percentile, from the number of rows of each length or less."""
    return int(rows.searchsorted(-(-percent * int(rows[-1]) // 100)))
