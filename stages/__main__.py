"""``python -m stages OUT/job.json``: what every launched process runs."""

import json
import os
import sys
import time
import traceback
from pathlib import Path

from stages import STAGES
from stages.base import Context, Job
from stages.manifest import write_atomically


def main(path: Path) -> None:
    """Run the job; a failure is recorded per rank, so that the first guilty one can be named."""
    out = path.parent
    rank = int(os.environ.get("RANK", "0"))
    try:
        job = Job.model_validate_json(path.read_text())
        stage = STAGES[job.stage]
        config = stage.config_type.model_validate(job.config)
        ctx = Context(
            out=out, trainer_args=job.trainer_args, promise=job.promise, device=job.device
        )
        metrics = stage.fn(config, ctx, **job.inputs)
    except BaseException as error:
        _record(out / "failures" / f"rank-{rank}.json", error)
        raise
    if rank == 0:
        write_atomically(out / "metrics.json", json.dumps(dict(metrics), indent=2))


def _record(path: Path, error: BaseException) -> None:
    path.parent.mkdir(exist_ok=True)
    fault = {
        "time": time.time(),
        "type": type(error).__name__,
        "kinds": [kind.__name__ for kind in type(error).__mro__],
        "errno": getattr(error, "errno", None),
        "message": str(error),
        "traceback": traceback.format_exc(),
    }
    path.write_text(json.dumps(fault, indent=2))


if __name__ == "__main__":
    main(Path(sys.argv[1]))
