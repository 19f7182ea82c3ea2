"""``killed_saves.py JOB.json OUT``: the same job, killed at each point of its second save.

For each point the job is run in a child that dies there, and again in a child that does not.
Prints a line of JSON for each: where it died, and at which step the second run began.
"""

import json
import os
import resource
import shutil
import signal
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

from stages import resume
from stages.__main__ import main as run_job

SAVE = "checkpoint-2"
SIZES = (1, 1000, 30_000, 100_000, 300_000)
"""Bytes at which a file of the save is cut off, in the middle of a write."""


def die_at(event_number: int) -> None:
    """SIGKILL at the n-th opening, making, renaming or removing of anything in the save, and
    where the folders are synced that it is moved between; the same again does not count."""
    seen: set[tuple[str, str]] = set()

    def hook(event: str, args: tuple[Any, ...]) -> None:
        if event not in ("open", "os.mkdir", "os.rename", "os.remove", "os.rmdir"):
            return
        path = str(args[0])
        synced = event == "open" and path.endswith((resume.FOLDER, resume.SAVING))
        if SAVE in path or (seen and synced):
            seen.add((event, path))
            if len(seen) == event_number:
                os.kill(os.getpid(), signal.SIGKILL)

    sys.addaudithook(hook)


def die_in_files_of(size: int) -> None:
    """Be ended by the kernel inside the write that would make a file of the save larger."""
    signal.signal(signal.SIGXFSZ, signal.SIG_DFL)

    def hook(event: str, args: tuple[Any, ...]) -> None:
        if event == "os.mkdir" and SAVE in str(args[0]):
            resource.setrlimit(resource.RLIMIT_FSIZE, (size, size))

    sys.addaudithook(hook)


def in_child(job: Path, prepare: Callable[[], None]) -> int:
    """The wait status of a child that runs ``job``."""
    child = os.fork()
    if child == 0:
        prepare()
        run_job(job)
        os._exit(0)
    return os.waitpid(child, 0)[1]


def main(job: Path, out: Path) -> None:
    import peft
    from trl import SFTTrainer

    import stages.watch  # noqa: F401

    del peft, SFTTrainer  # imported so that the children are quick
    points: list[tuple[str, Callable[[], None]]] = [
        (f"write over {size} bytes", lambda size=size: die_in_files_of(size)) for size in SIZES
    ]
    points += [(f"point {n}", lambda n=n: die_at(n)) for n in range(1, 200)]
    for number, (name, prepare) in enumerate(points):
        folder = out / str(number)
        folder.mkdir(parents=True)
        shutil.copyfile(job, folder / "job.json")
        status = in_child(folder / "job.json", prepare)
        if status == 0:
            if number < len(SIZES):
                continue  # no file of the save is as large
            break
        left = sorted(p.parent.name for p in folder.glob("checkpoints/*/complete.json"))
        again = in_child(folder / "job.json", lambda: None)
        begun = (
            json.loads((folder / "metrics.json").read_text())["resumed_from"] if not again else 0
        )
        fact = {"died": name, "status": status, "again": again, "left": left, "from": begun}
        print(json.dumps(fact | {"out": str(folder)}), flush=True)


if __name__ == "__main__":
    main(Path(sys.argv[1]), Path(sys.argv[2]))
