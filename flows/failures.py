"""Why a stage failed, in the reader's words: what, where, and what to type next."""

import errno
import json
import signal
from pathlib import Path
from typing import Any

TAIL_LINES = 12


class StageFailed(Exception):
    """A stage's processes did not end well; the text says why and what to do."""


# Exception type (any in its bases) -> class of failure and advice.
ADVICE = {
    "OutOfMemoryError": (
        "out of GPU memory",
        "lower resources.micro_batch_size, set resources.gradient_checkpointing=true, "
        "or shard more with backend.kind=fsdp or deepspeed",
    ),
    "MemoryError": ("out of memory", "use fewer ranks, or a backend that shards"),
    "NonFiniteError": (
        "non-finite value",
        "lower config.learning_rate, or load_dtype float32; the last checkpoint before it is kept",
    ),
    "StageError": ("input or settings", "mend what the message names"),
    "ModuleNotFoundError": ("missing package", "install it in this environment"),
}


def explain(label: str, out: Path, log: Path, code: int) -> str:
    """The text of a :class:`StageFailed` for an output whose command ended with ``code``."""
    fault = _first(out / "failures")
    if fault is None:
        return _without_record(label, log, code)
    kind, advice = _classify(fault)
    lines = [
        f"{label} failed ({kind}, rank {fault['rank']}{_at_step(out)}): {_one_line(fault)}",
        f"  log:  {log}",
        f"  next: {advice}, then the same command again",
    ]
    if kind == "error":
        lines[1:1] = [f"  | {text}" for text in fault["traceback"].splitlines()[-TAIL_LINES:]]
    return "\n".join(lines)


def _first(folder: Path) -> dict[str, Any] | None:
    """The earliest failure on record: later ranks fail because the first one left."""
    found = []
    for file in folder.glob("rank-*.json"):
        try:
            fault = json.loads(file.read_text())
        except ValueError:  # cut short, by a full disk say
            continue
        found.append(fault | {"rank": int(file.stem.removeprefix("rank-"))})
    return min(found, key=lambda fault: fault["time"], default=None)


def _classify(fault: dict[str, Any]) -> tuple[str, str]:
    if fault["errno"] in (errno.ENOSPC, errno.EDQUOT) or "No space left" in fault["message"]:
        return "disk full", "free space on the store's disk; what is complete is kept"
    for kind in fault["kinds"]:
        if kind in ADVICE:
            return ADVICE[kind]
    return "error", "see the log"


def _one_line(fault: dict[str, Any]) -> str:
    text = " ".join(fault["message"].split())
    return text if fault["type"] == "StageError" else f"{fault['type']}: {text}"


def _at_step(out: Path) -> str:
    """The last step that this attempt wrote down; rows of the one before it may still be there."""
    path, began = out / "metrics.jsonl", (out / "job.json").stat().st_mtime
    lines = path.read_text().splitlines() if path.exists() else []
    rows = [json.loads(line) for line in lines if line.startswith("{") and line.endswith("}")]
    return f", after step {rows[-1]['step']}" if rows and rows[-1]["time"] >= began else ""


def _without_record(label: str, log: Path, code: int) -> str:
    ended = f"signal {signal.Signals(-code).name}" if code < 0 else f"exit code {code}"
    text = log.read_text(errors="replace") if log.exists() else ""
    if "No space left on device" in text:
        return (
            f"{label} failed (disk full): No space left on device\n  log:  {log}\n"
            "  next: free space on the store's disk, then the same command again"
        )
    tail = text.splitlines()[-TAIL_LINES:]
    if "SIGKILL" in ended or any("Signal 9" in line for line in tail):
        ended += "; a kill from outside is often the system running out of memory"
    return "\n".join(
        [
            f"{label} failed ({ended})",
            *(f"  | {line}" for line in tail),
            f"  log:  {log}",
            "  next: the same command goes on from the newest complete checkpoint",
        ]
    )
