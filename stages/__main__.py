"""``python -m stages OUT/job.json``: what every launched process runs."""

import ctypes
import json
import os
import signal
import sys
import time
import traceback
from pathlib import Path

from stages import STAGES, stopping
from stages.base import Context, Interrupted, Job
from stages.beats import Beats, write_stacks_on_request
from stages.manifest import write_atomically
from stages.urls import without_user_info

LOGS = "logs"
PR_SET_PDEATHSIG = 1


def main(path: Path) -> None:
    """Run the job; a failure is recorded per rank, so that the first guilty one can be named."""
    out, rank = path.parent, int(os.environ.get("RANK", "0"))
    if "RANK" in os.environ:
        _die_with_launcher()
        _own_log(out / LOGS / f"rank-{rank}.log")
    sys.excepthook = lambda _, error, __: sys.stderr.write(_traceback(error))
    try:
        job = Job.model_validate_json(path.read_text())
        stage = STAGES[job.stage]
        if stage.beats:
            Beats(out).beat("start")
            write_stacks_on_request(out)
        config = stage.config_type.model_validate(job.config)
        ctx = Context(
            out=out, trainer_args=job.trainer_args, promise=job.promise, device=job.device
        )
        metrics = stage.fn(config, ctx, **job.inputs)
    except Interrupted as stopped:
        _record(out / "failures" / f"rank-{rank}.json", stopped)
        sys.exit(stopping.EXIT_CODE)
    except BaseException as error:
        _record(out / "failures" / f"rank-{rank}.json", error)
        raise
    if rank == 0:
        write_atomically(out / "metrics.json", json.dumps(dict(metrics), indent=2))


def _die_with_launcher() -> None:
    """A rank whose launcher was killed would wait for its peers for ever, and hold its GPU."""
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0)


def _own_log(path: Path) -> None:
    """Send what this rank prints, its libraries and their threads too, to a file of its own.

    The log of the attempt before this one is kept beside it.
    """
    path.parent.mkdir(exist_ok=True)
    if path.exists():
        path.rename(path.with_suffix(".log.before"))
    with path.open("wb") as log:
        for stream in (sys.stdout, sys.stderr):
            stream.flush()
            os.dup2(log.fileno(), stream.fileno())


def _record(path: Path, error: BaseException) -> None:
    path.parent.mkdir(exist_ok=True)
    fault = {
        "time": time.time(),
        "type": type(error).__name__,
        "kinds": [kind.__name__ for kind in type(error).__mro__],
        "errno": getattr(error, "errno", None),
        "message": without_user_info(str(error)),
        "traceback": _traceback(error),
    }
    path.write_text(json.dumps(fault, indent=2))


def _traceback(error: BaseException) -> str:
    return without_user_info("".join(traceback.format_exception(error)))


if __name__ == "__main__":
    main(Path(sys.argv[1]))
