"""What a running stage has to say: a line now and then, read from its ``metrics.jsonl``."""

import json
import re
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

EVERY_SECONDS = 3.0
QUIET_SECONDS = 15.0

PASSING = re.compile(r".*?: (step \d+/\d+|working, \d+ s|starting, \d+ s)(  |$)")
"""What a line of progress begins with: the next one of its stage says it better."""


class Progress:
    """Turns a growing ``metrics.jsonl`` into at most one line every few seconds."""

    def __init__(self, label: str, out: Path, *, say: Callable[[str], None]) -> None:
        self.label, self.path, self.say = label, out / "metrics.jsonl", say
        self.offset = self.path.stat().st_size if self.path.exists() else 0
        self.started = self.spoken = time.monotonic()
        self.began = time.time()
        self.first: dict[str, Any] | None = None
        self.row: dict[str, Any] | None = None

    def poll(self) -> None:
        """Call a few times a second."""
        fresh = self._read()
        now = time.monotonic()
        if fresh and now - self.spoken >= EVERY_SECONDS:
            self.say(line(self.label, self.row or {}, first=self.first or {}))
            self.spoken = now
        elif now - self.spoken >= QUIET_SECONDS:
            what = "working" if self.row else "starting"
            self.say(f"{self.label}: {what}, {now - self.started:.0f} s")
            self.spoken = now

    def _read(self) -> bool:
        if not self.path.exists():
            return False
        if self.path.stat().st_size < self.offset:  # a resumed run has cut the file back
            self.offset = 0
        with self.path.open() as file:
            file.seek(self.offset)
            text = file.read()
        whole = text.rpartition("\n")[0]
        if not whole:
            return False
        self.offset += len(whole.encode()) + 1
        row = json.loads(whole.splitlines()[-1])
        if row["time"] < self.began:  # of the attempt before this one
            return False
        self.row = row
        self.first = self.first or self.row
        return True


def line(label: str, row: dict[str, Any], *, first: dict[str, Any]) -> str:
    """``sft: step 40/300  loss 1.234  812 tokens/s  12 s left``."""
    parts = [f"{label}: step {row['step']}/{row['total_steps']}"]
    shown = {
        "loss": "loss {:.4f}",
        "rewards/accuracies": "accuracy {:.2f}",
        "rewards/margins": "margin {:.3f}",
        "reward": "reward {:.3f}",
        "kl": "KL {:.3f}",
        "tokens_per_second": "{:.0f} tokens/s",
    }
    parts += [text.format(row[key]) for key, text in shown.items() if key in row]
    steps = row["step"] - first["step"]
    if steps > 0:
        left = (row["time"] - first["time"]) / steps * (row["total_steps"] - row["step"])
        parts.append(f"{duration(left)} left")
    return "  ".join(parts)


def duration(seconds: float) -> str:
    """``48 s``, ``12 min 5 s``, ``3 h 20 min``."""
    whole = round(seconds)
    if whole < 60:
        return f"{whole} s"
    if whole < 3600:
        return f"{whole // 60} min {whole % 60} s"
    return f"{whole // 3600} h {whole % 3600 // 60} min"
