"""What runs are doing: ``python -m flows.status [RUN]``. Reads the run folders and nothing else."""

import argparse
import json
import os
import signal
import sys
import time
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from backends.placement import supervise
from flows import moves
from flows.progress import duration
from flows.report import aligned
from stages import manifest, resume
from stages.base import StageError
from stages.stopping import STOP

REFRESH_SECONDS = 2.0
HEAD = ("stage", "state", "step", "loss", "tokens/s", "memory", "left", "last event")


@dataclass(frozen=True)
class Seen:
    """A stage of a run, as its folder tells."""

    label: str
    out: Path
    state: str
    """``done``, ``running``, ``stopping``, ``failed``, ``interrupted`` (nobody works on it), or
    ``waiting``: started by the flow, and not yet by a job; ``damaged``: its manifest is none."""

    row: Mapping[str, Any]
    """The newest line of ``metrics.jsonl``."""

    first: Mapping[str, Any]
    """Its first line of this attempt, for the time left."""

    event: str

    @property
    def is_live(self) -> bool:
        return self.state in ("running", "stopping")


def main(argv: list[str] | None = None) -> int:
    options = _parser().parse_args(argv)
    folders = _runs(options.runs, options.run)
    if not folders:
        what = options.run or "any run"
        known = ", ".join(path.name for path in _runs(options.runs, None)) or "none"
        print(f"{options.runs}: does not hold {what}; it has {known}", file=sys.stderr)
        return 2
    if options.stop:
        return _stop(folders)
    if options.logs is not None:
        return _print_log(folders, options.logs, follow=not options.once)
    try:
        return _show(folders, once=options.once or not sys.stdout.isatty())
    except KeyboardInterrupt:
        return 0


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="python -m flows.status", description=__doc__)
    parser.add_argument("run", nargs="?", help="name of a run (default: all, the newest first)")
    parser.add_argument("--runs", type=Path, default=Path("runs"), help="directory of runs")
    parser.add_argument("--once", action="store_true", help="print once, and do not refresh")
    parser.add_argument("--logs", type=int, metavar="RANK", help="follow a rank's log instead")
    parser.add_argument(
        "--stop", action="store_true", help="let the live stage save, and end its processes"
    )
    return parser


def _runs(folder: Path, name: str | None) -> list[Path]:
    files = [folder / name / "run.json"] if name else folder.glob("*/run.json")
    found = [path.parent for path in files if path.exists()]
    return sorted(found, key=lambda path: (path / "run.json").stat().st_mtime, reverse=True)


def _show(folders: list[Path], *, once: bool) -> int:
    while True:
        text = "\n\n".join(f"{folder.name}\n{table(list(look(folder)))}" for folder in folders)
        if once:
            print(text)
            return 0
        print(f"\033[H\033[2J{time.strftime('%H:%M:%S')}\n{text}", flush=True)
        time.sleep(REFRESH_SECONDS)


def look(folder: Path) -> Iterator[Seen]:
    """The stages of the run in ``folder``, in the order in which they began."""
    links = [path for path in folder.glob("[!.]*") if path.is_symlink()]  # but what is being made
    for link in sorted(links, key=lambda path: path.lstat().st_mtime_ns):
        yield see(link.name.replace("-", " "), link.resolve())


def see(label: str, out: Path) -> Seen:
    """One stage's output folder. Reads a few small files, whoever runs the job and wherever."""
    logged = rows(out)
    state, event = _state(out)
    return Seen(
        label=label,
        out=out,
        state=state,
        row=logged[-1] if logged else {},
        first=_begun(out, logged),
        event=event,
    )


def _begun(out: Path, logged: list[dict[str, Any]]) -> Mapping[str, Any]:
    """The first row of this attempt, or the newest of the one before: a night in between is no
    measure of a step."""
    job = out / "job.json"
    since = job.stat().st_mtime if job.exists() else 0.0
    return next((row for row in logged if row["time"] >= since), logged[-1] if logged else {})


def _state(out: Path) -> tuple[str, str]:
    try:
        done = manifest.read(out)
    except StageError as error:
        return "damaged", str(error)
    if done is not None:
        return "done", f"took {duration(done.provenance['seconds'])}"
    status = _json(out / supervise.STATUS)
    if not status:
        return "waiting", ""
    ended = supervise.ended(out)
    if ended is not None:
        why = {"silent": "stuck", None: "failed"}.get(ended["why"], "interrupted")
        return (why if ended["code"] else "running"), _last_event(out)
    late = time.time() - status["time"] > 10 * supervise.STATUS_SECONDS
    if late and not supervise.is_alive(status):
        return "interrupted", _last_event(out)
    return ("running" if status["state"] == "running" else "stopping"), _last_event(out)


def _last_event(out: Path) -> str:
    newest = resume.newest(out)
    moved = moves.read(out)
    events = [(fact["time"], f"moved to {fact['to']}") for fact in moved]
    if newest is not None:
        saved = (newest / resume.MARKER).stat().st_mtime
        events.append((saved, f"step {resume.step(newest)} saved"))
    for fault in (out / "failures").glob("rank-*.json"):
        facts = _json(fault)
        events.append((facts.get("time", 0.0), f"{fault.stem}: {facts.get('type')}"))
    return max(events, default=(0.0, ""))[1]


def rows(out: Path) -> list[dict[str, Any]]:
    """The whole lines of ``OUT/metrics.jsonl``, first to last."""
    path = out / "metrics.jsonl"
    lines = path.read_text().splitlines() if path.exists() else []
    return [json.loads(line) for line in lines if line.startswith("{") and line.endswith("}")]


def _json(path: Path) -> dict[str, Any]:
    try:
        return json.loads(path.read_text())
    except (FileNotFoundError, ValueError):
        return {}


def table(stages: list[Seen]) -> str:
    """Aligned text, a line a stage."""
    return aligned(HEAD, [_cells(seen) for seen in stages])


def _cells(seen: Seen) -> list[str]:
    row = seen.row
    steps = f"{row['step']}/{row['total_steps']}" if "step" in row else ""
    loss = f"{row['loss']:.4f}" if "loss" in row else ""
    speed = f"{row['tokens_per_second']:.0f}" if "tokens_per_second" in row else ""
    memory = f"{row['memory_bytes'] / 1e9:.1f} GB" if "memory_bytes" in row else ""
    return [seen.label, seen.state, steps, loss, speed, memory, left(seen), seen.event]


def left(seen: Seen) -> str:
    """The time that is left, as the steps of this attempt went."""
    done = seen.row.get("step", 0) - seen.first.get("step", 0)
    if not seen.is_live or done <= 0:
        return ""
    each = (seen.row["time"] - seen.first["time"]) / done
    return duration(each * (seen.row["total_steps"] - seen.row["step"]))


def _live(folders: list[Path]) -> list[Seen]:
    return [seen for folder in folders for seen in look(folder) if seen.is_live]


def _stop(folders: list[Path]) -> int:
    """Ask the ranks by file, wherever they run, and the supervisor too if it runs here."""
    live = _live(folders)
    for seen in live:
        (seen.out / STOP).write_text(json.dumps({"time": time.time()}))
        handle = _json(seen.out / supervise.HANDLE)
        if handle and supervise.is_alive(handle):
            os.kill(handle["pid"], signal.SIGTERM)
        print(f"{seen.label}: asked to save and stop")
    if not live:
        print("no stage is running", file=sys.stderr)
    return 0 if live else 1


def _print_log(folders: list[Path], rank: int, *, follow: bool) -> int:
    stages = _live(folders) or [seen for seen in look(folders[0]) if seen.state != "waiting"][-1:]
    path = stages[0].out / "logs" / f"rank-{rank}.log" if stages else None
    if path is not None and not path.exists() and rank == 0:
        path = stages[0].out / "log.txt"
    if path is None or not path.exists():
        print(f"rank {rank} has no log; see --once for the stages", file=sys.stderr)
        return 1
    with path.open(errors="replace") as file:
        while True:
            sys.stdout.write(file.read())
            sys.stdout.flush()
            if not follow or not see("", stages[0].out).is_live:
                return 0
            time.sleep(0.5)


if __name__ == "__main__":
    sys.exit(main())
