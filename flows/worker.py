"""The process worker, started after runs that were lost here have been settled."""

import argparse
import os
import sys
from collections.abc import Sequence

from flows import keeper
from flows.deploy import POOL
from flows.prefect_server import reach_loopback

QUICK = {
    "PREFECT_WORKER_QUERY_SECONDS": "2",
    "PREFECT_WORKER_ENABLE_CANCELLATION": "true",
    "PREFECT_WORKER_CANCELLATION_POLL_SECONDS": "10",
}
"""A run starts within seconds of Submit, and one that waits to start can be cancelled."""


def main(argv: Sequence[str] | None = None) -> None:
    options = _parser().parse_args(argv)
    reach_loopback()
    for name, value in QUICK.items():
        os.environ.setdefault(name, value)
    from prefect.settings import get_current_settings

    for line in keeper.settle_all(get_current_settings().home):
        print(f"settled a run that was lost: {line}", flush=True)
    worker = ["-m", "prefect", "worker", "start", "--pool", options.pool, "--type", "process"]
    if options.limit:
        worker += ["--limit", str(options.limit)]
    os.execv(sys.executable, [sys.executable, *worker])


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="python -m flows.worker", description=__doc__)
    parser.add_argument("--pool", default=POOL, help="work pool to take runs from")
    parser.add_argument("--limit", type=int, help="runs at once")
    return parser


if __name__ == "__main__":
    main()
