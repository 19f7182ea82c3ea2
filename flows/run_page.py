"""The page of a run: what each stage does, its curves, and in the end its results."""

import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import zip_longest
from pathlib import Path
from typing import Any

from flows import report, status, svg
from flows.markdown import table
from flows.progress import duration
from flows.run_stage import Plan
from flows.status import Seen
from flows.steps import Artifact

MAX_BYTES = 480_000
"""Prefect keeps an artifact in one row of its database and sends it whole."""

BAR = 8
CURVES: tuple[tuple[str, Mapping[str, str], float], ...] = (
    ("loss", {"loss": "loss"}, 1.0),
    ("rewards", {"chosen": "rewards/chosen", "rejected": "rewards/rejected",
                 "margin": "rewards/margins"}, 1.0),
    ("reward", {"reward": "reward", "score": "score"}, 1.0),
    ("KL to the reference", {"kl": "kl"}, 1.0),
    ("gradient norm", {"norm": "grad_norm"}, 1.0),
    ("tokens a second", {"tokens": "tokens_per_second"}, 1.0),
    ("memory of rank 0, GB", {"memory": "memory_bytes"}, 1e9),
)  # fmt: skip
"""(title, name of each curve: its key in ``metrics.jsonl``, unit)."""


@dataclass(frozen=True)
class Board:
    """What is known of a run while it goes on."""

    name: str
    folder: Path
    """Its run folder."""

    plans: tuple[Plan, ...]
    """Of every stage, in order."""

    done: Mapping[str, Artifact]
    """The outputs of finished stages, by label."""

    current: str = ""
    """Label of the stage that is being made."""

    word: str = ""
    """How the run ended, or what it waits for."""


def page(board: Board) -> str:
    """Markdown while the run goes on."""
    told = f"**{board.word}**" if board.word else f"as of {time.strftime('%H:%M:%S')}"
    return _within_limits([f"# {board.name}", told, _stages(board)], _curves(board), [_logs(board)])


def final_page(board: Board, facts: report.Report) -> str:
    """Markdown of a finished run: scores, samples, data and versions below the curves."""
    results = report.results(facts, folder=board.folder, figures=())
    where = f"The whole report, with its figures: `{(board.folder / report.NAME).absolute()}`"
    top = [f"# {board.name}", f"**{board.word}**", _stages(board), where]
    return _within_limits(top, _curves(board), [results, _logs(board)])


def _within_limits(top: list[str], curves: list[str], rest: list[str]) -> str:
    """Whole, or with as many curves as there is room for."""
    room = MAX_BYTES - sum(len(part.encode()) for part in (*top, *rest))
    while curves and sum(map(len, curves)) > room:
        curves.pop()
    return "\n\n".join([*top, *curves, *rest])[:MAX_BYTES]


def percent(seen: Seen) -> float:
    """How far a stage is."""
    if seen.state == "done":
        return 100.0
    row = seen.row
    return 100.0 * row["step"] / row["total_steps"] if row.get("total_steps") else 0.0


def _stages(board: Board) -> str:
    head = ["stage", "state", "progress", "steps", "left", "last event"]
    return table(head, [_row(board, each) for each in board.plans])


def _row(board: Board, planned: Plan) -> list[str]:
    if artifact := board.done.get(planned.label):
        took = duration(artifact.seconds) if artifact.status != "reused" else ""
        return [planned.label, artifact.status, _bar(100), took, "", ""]
    if planned.label != board.current:
        return [planned.label, "", "", "", "", ""]
    seen = status.see(planned.label, planned.out)
    row = seen.row
    steps = f"{row['step']:,} of {row['total_steps']:,}" if "step" in row else ""
    if "loss" in row:
        steps += f", loss {row['loss']:.4f}"
    told = [_bar(percent(seen)), steps, status.left(seen), seen.event]
    return [planned.label, f"**{seen.state}**", *told]


def _bar(share: float) -> str:
    full = round(BAR * share / 100)
    return f"{'█' * full}{'░' * (BAR - full)}\N{NO-BREAK SPACE}{share:.0f}\N{NO-BREAK SPACE}%"


def _logs(board: Board) -> str:
    """Where everything stands that is not for people to read from end to end."""
    found = []
    for planned in board.plans:
        path = planned.out.absolute() / "logs" / "rank-0.log"
        path = path if path.exists() else planned.out.absolute() / "log.txt"
        if path.exists():
            found.append(f"{planned.label}: {path}")
    text = "\n".join(found)
    return f"<details><summary>Full logs</summary>\n\n```\n{text}\n```\n\n</details>"


def _curves(board: Board) -> list[str]:
    """A block for each training: its heading, and its pictures in two columns."""
    found = []
    for planned in board.plans:
        path = planned.out / "metrics.jsonl"
        if not planned.is_training or not path.exists():
            continue
        rows = status.rows(planned.out)
        pictures = [_picture(planned.label, rows, *curve) for curve in CURVES]
        shown = [each for each in pictures if each]
        if shown:
            pairs = list(zip_longest(shown[::2], shown[1::2], fillvalue=""))
            found.append(f"## {planned.label}\n\n{table(['', ''], pairs)}")
    return found


def _picture(
    label: str, rows: Sequence[Mapping[str, Any]], title: str, keys: Mapping[str, str], unit: float
) -> str:
    curves = {
        name: [(row["step"], row[key] / unit) for row in rows if row.get(key) is not None]
        for name, key in keys.items()
    }
    shown = {name: points for name, points in curves.items() if points}
    return svg.image(f"{label}: {title}", shown) if shown else ""
