"""Why a stage failed, in the reader's words: what, where, and what to type next."""

import errno
import json
import re
import shutil
import signal
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

from stages.urls import without_user_info

TAIL_LINES = 12
READ_BYTES = 1 << 18
FULL_BYTES = 1 << 16
"""A disk with less than this left is full: a rank could not even write down its failure."""

Policy = Literal["again", "less memory", "fail"]


@dataclass(frozen=True)
class Kind:
    """A class of failure."""

    name: str
    advice: str
    """What the user may do."""

    policy: Policy = "fail"
    """What the flow does by itself: ``again`` goes on from the newest complete checkpoint, a few
    times at most; ``less memory`` takes the planner's next plan, if there is one."""

    pause_seconds: float = 0.0
    """Before going on: a network or a node needs a moment."""


class StageFailed(Exception):
    """A stage's processes did not end well; the text says why and what to do."""

    def __init__(self, text: str, *, kind: Kind | None = None) -> None:
        super().__init__(text)
        self.kind = kind


AGAIN = "then the same command again"
LESS_MEMORY = (
    "lower resources.micro_batch_size, set resources.gradient_checkpointing=true, or shard more "
    f"with backend.kind=fsdp or deepspeed (backend.kind=auto does so by itself), {AGAIN}"
)
GOES_ON = "the same command goes on from the newest complete checkpoint"

GPU_MEMORY = Kind("out of GPU memory", LESS_MEMORY, "less memory")
HOST_MEMORY = Kind("out of memory", LESS_MEMORY, "less memory")
DISK = Kind("disk full", f"free space on the store's disk, {AGAIN}; what is complete is kept")
NON_FINITE = Kind(
    "non-finite value",
    f"lower config.learning_rate, or load_dtype float32, {AGAIN}; the last checkpoint before it is "
    "kept",
)
INPUT = Kind("input or settings", f"mend what the message names, {AGAIN}")
PACKAGE = Kind("missing package", f"install it in this environment, {AGAIN}")
DATA = Kind(
    "data", "remove the damaged output that the log names, and the same command makes it again"
)
LOST_PEER = Kind(
    "lost peer", f"see the log for the network's complaint; {GOES_ON}", "again", pause_seconds=10.0
)
LOST = Kind("lost", GOES_ON, "again")
CRASHED = Kind("crashed", GOES_ON, "again")
STUCK = Kind("stuck", f"see the stacks for where each rank waits; {GOES_ON}", "again")
PREEMPTED = Kind("preempted", GOES_ON)
CANCELLED = Kind("cancelled", GOES_ON)
ERROR = Kind("error", f"see the log, {AGAIN}")

# Exception type (any in its bases) -> class.
BY_TYPE = {
    "OutOfMemoryError": GPU_MEMORY,
    "MemoryError": HOST_MEMORY,
    "NonFiniteError": NON_FINITE,
    "StageError": INPUT,
    "ModuleNotFoundError": PACKAGE,
    "Interrupted": PREEMPTED,
    "ArrowInvalid": DATA,
    "SafetensorError": DATA,
    "DistBackendError": LOST_PEER,
    "DistNetworkError": LOST_PEER,
}
# What libraries say that raise no type of their own for it.
BY_WORDS = {
    "No space left": DISK,
    "Disk quota exceeded": DISK,
    "CUDA out of memory": GPU_MEMORY,
    "CUDA error: out of memory": GPU_MEMORY,
    "CUBLAS_STATUS_ALLOC_FAILED": GPU_MEMORY,
    "DefaultCPUAllocator: can't allocate memory": HOST_MEMORY,
    "std::bad_alloc": HOST_MEMORY,
    "Connection closed by peer": LOST_PEER,
    "Connection reset by peer": LOST_PEER,
    "Broken pipe": LOST_PEER,
    "NCCL error": LOST_PEER,
    "Gloo": LOST_PEER,
}


READING_ARROW = "pyarrow/error.pxi"
"""In the traceback of every complaint of Arrow's, some of which are a plain OSError."""


@dataclass(frozen=True)
class Failure:
    """How a command failed."""

    kind: Kind
    text: str
    """For the reader: what, where, and what to type next."""


@dataclass(frozen=True)
class Ended:
    """A command's end, as its launcher and its supervisor saw it."""

    code: int
    log: Path
    """Output of the launcher, and of a rank until it opened its own log."""

    since: int = 0
    """Bytes of the log that earlier attempts wrote."""

    oom_kills: int = 0
    """Processes that the kernel killed for memory meanwhile, on the whole machine."""

    supervised: bool = True
    """Whether the supervisor lived to tell of the end."""

    asked: bool = False
    """Whether the supervisor was told to end it."""

    silent: Mapping[int, Mapping[str, Any]] = field(default_factory=dict)
    """Last beat of each rank that was silent for too long and therefore ended."""

    @property
    def said(self) -> str:
        return _last_of(self.log, since=self.since)


def num_oom_kills() -> int:
    """The kernel's own count since it started; 0 where it keeps none."""
    try:
        lines = Path("/proc/vmstat").read_text().splitlines()
    except OSError:
        return 0
    return next((int(line.split()[1]) for line in lines if line.startswith("oom_kill ")), 0)


def diagnose(label: str, out: Path, ended: Ended) -> Failure:
    """Why the command that was to fill ``out`` ended as it did, by its first guilty rank."""
    said, faults = ended.said, _faults(out / "failures")
    if not faults and shutil.disk_usage(out).free < FULL_BYTES:
        head = f"{label} failed ({DISK.name}{_at_step(out)}): no room was left to say more"
        return Failure(DISK, _text(head, log=ended.log, advice=DISK.advice))
    if not ended.supervised:
        head = (
            f"{label} failed (lost{_at_step(out)}): the job's supervisor was killed, with the job"
        )
        return Failure(LOST, _text(head, log=ended.log, advice=LOST.advice))
    own = [fault for fault in faults if _kind(fault) is not LOST_PEER]
    if ended.asked and not own:
        head = f"{label} failed ({CANCELLED.name}{_at_step(out)}): asked to stop"
        return Failure(CANCELLED, _text(head, log=ended.log, advice=CANCELLED.advice))
    if ended.silent and not own:  # a rank that failed may hang while it leaves
        return _stuck(label, out, ended)
    culprit = _first_to_die(said)
    if culprit and culprit.rank not in {fault["rank"] for fault in faults} and not own:
        return _vanished(label, out, ended, culprit)
    if faults:
        return _recorded(label, out, ended, min(own or faults, key=lambda fault: fault["time"]))
    return _unrecorded(label, ended, said)


def stopped(label: str, checkpoint: int | None, ended: Mapping[str, Any] | None) -> str:
    """What is left of a stage that was told to stop; ``checkpoint`` is its newest complete step."""
    kept = f"step {checkpoint} is saved" if checkpoint else "it had saved nothing yet"
    known = f"{ended['processes']} processes had to be ended, 0 are left" if ended else ""
    return "; ".join(filter(None, (f"{label} stopped: {kept}", known)))


# --- what there is to go by


@dataclass(frozen=True)
class Death:
    """A rank's end, as torchrun saw it."""

    rank: int
    code: int


def _first_to_die(said: str) -> Death | None:
    """torchrun's first observed failure. The ranks that it ends afterwards are not guilty."""
    found = re.search(
        r"Root Cause \(first observed failure\).*?rank +: (\d+).*?exitcode +: (-?\d+)", said, re.S
    )
    return Death(int(found[1]), int(found[2])) if found else None


def _faults(folder: Path) -> list[dict[str, Any]]:
    """What the ranks wrote down of their own failures."""
    found = []
    for file in folder.glob("rank-*.json"):
        try:
            fault = json.loads(file.read_text())
        except ValueError:  # cut short, by a full disk say
            continue
        found.append(fault | {"rank": int(file.stem.removeprefix("rank-"))})
    return found


def _kind(fault: Mapping[str, Any]) -> Kind:
    said = _by_words(fault["message"])
    if fault["errno"] in (errno.ENOSPC, errno.EDQUOT) or said is DISK:
        return DISK
    for name in fault["kinds"]:
        if name in BY_TYPE and BY_TYPE[name] is not LOST_PEER:
            return BY_TYPE[name]
    if READING_ARROW in fault["traceback"]:
        return DATA
    by_type = (BY_TYPE[name] for name in fault["kinds"] if name in BY_TYPE)
    return said or next(by_type, ERROR)


def _by_words(text: str) -> Kind | None:
    return next((kind for words, kind in BY_WORDS.items() if words in text), None)


def _at_step(out: Path) -> str:
    """The last step that this attempt wrote down; rows of the one before it may still be there."""
    path, job = out / "metrics.jsonl", out / "job.json"
    lines = path.read_text().splitlines() if path.exists() and job.exists() else []
    rows = [json.loads(line) for line in lines if line.startswith("{") and line.endswith("}")]
    if not rows or rows[-1]["time"] < job.stat().st_mtime:
        return ""
    return f", after step {rows[-1]['step']}"


def _rank_log(out: Path, rank: int, ended: Ended) -> Path:
    own = out / "logs" / f"rank-{rank}.log"
    return own if own.exists() else ended.log


# --- what is said of it


def _text(head: str, *, tail: Iterable[str] = (), log: Path, advice: str) -> str:
    lines = [head, *(f"  | {line}" for line in tail), f"  log:  {log}", f"  next: {advice}"]
    return without_user_info("\n".join(lines))


def _recorded(label: str, out: Path, ended: Ended, fault: Mapping[str, Any]) -> Failure:
    kind, rank = _kind(fault), fault["rank"]
    if kind is PREEMPTED and ended.asked:
        kind = CANCELLED
    message = " ".join(fault["message"].split())
    if fault["type"] not in ("StageError", "Interrupted"):
        message = f"{fault['type']}: {message}"
    unexpected = kind is ERROR or kind is LOST_PEER
    tail = fault["traceback"].splitlines()[-TAIL_LINES:] if unexpected else ()
    head = f"{label} failed ({kind.name}, rank {rank}{_at_step(out)}): {message}"
    log = _rank_log(out, rank, ended)
    return Failure(kind, _text(head, tail=tail, log=log, advice=kind.advice))


def _vanished(label: str, out: Path, ended: Ended, culprit: Death) -> Failure:
    """A rank that left no word: killed, or ended by code that asks nobody."""
    kind, how = CRASHED, f"exit code {culprit.code} without a word"
    if culprit.code < 0:
        how = f"signal {_signal(-culprit.code)}"
    if culprit.code == -signal.SIGKILL and ended.oom_kills:
        kind, how = HOST_MEMORY, "killed by the system, which had no memory left"
    elif culprit.code == -signal.SIGKILL:
        how += ", from outside"
    log = _rank_log(out, culprit.rank, ended)
    tail = _tail(ended.said if log == ended.log else _last_of(log))
    if said := _by_words("\n".join(tail)):
        kind = said if said is not LOST_PEER else kind
    head = f"{label} failed ({kind.name}, rank {culprit.rank}{_at_step(out)}): {how}"
    return Failure(kind, _text(head, tail=tail, log=log, advice=kind.advice))


def _stuck(label: str, out: Path, ended: Ended) -> Failure:
    """Ranks wait for one another, so all fall silent: a stopped process is the one to blame."""
    halted = {rank: beat for rank, beat in ended.silent.items() if beat["state"] in "Tt"}
    silent = halted or ended.silent
    ranks = ", ".join(
        f"rank {rank} ({'its process is stopped, ' if halted else ''}"
        f"phase {beat['phase']}, step {beat['step']})"
        for rank, beat in silent.items()
    )
    head = f"{label} failed (stuck{_at_step(out)}): no sign of life from {ranks}"
    stacks = [line for rank in silent for line in _stack(out, rank)]
    return Failure(STUCK, _text(head, tail=stacks, log=out / "stacks", advice=STUCK.advice))


def _stack(out: Path, rank: int) -> Sequence[str]:
    path = out / "stacks" / f"rank-{rank}.txt"
    lines = path.read_text().splitlines() if path.exists() else []
    if not lines:
        return [f"rank {rank}: no stack; the process is stopped, or waits in the kernel"]
    current = next((n for n, line in enumerate(lines) if line.startswith("Current thread")), 0)
    return [f"rank {rank}:", *lines[current : current + TAIL_LINES]]


def _unrecorded(label: str, ended: Ended, said: str) -> Failure:
    """The launcher itself, or a single process that was killed."""
    code = ended.code
    kind = _by_words(said) or (CRASHED if code < 0 else ERROR)
    how = f"signal {_signal(-code)}" if code < 0 else f"exit code {code}"
    if code == -signal.SIGKILL and ended.oom_kills:
        kind, how = HOST_MEMORY, "killed by the system, which had no memory left"
    head = f"{label} failed ({kind.name}): {how}"
    return Failure(kind, _text(head, tail=_tail(said), log=ended.log, advice=kind.advice))


def _signal(number: int) -> str:
    """``SIGKILL``; a real-time signal has no name but its number."""
    return next((each.name for each in signal.Signals if each == number), f"{number}")


def _last_of(path: Path, since: int = 0) -> str:
    """The end of a log, which may be larger than memory; nothing before byte ``since``."""
    if not path.exists():
        return ""
    with path.open("rb") as file:
        file.seek(max(since, path.stat().st_size - READ_BYTES))
        return file.read().decode(errors="replace")


def _tail(said: str) -> list[str]:
    return said.splitlines()[-TAIL_LINES:]
