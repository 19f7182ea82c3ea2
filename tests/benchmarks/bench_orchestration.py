"""What orchestration costs: wall time of a whole run outside its ranks' own time, by engine.

``PYTHONPATH=. python tests/benchmarks/bench_orchestration.py [REPEATS]``. Each repeat runs the tiny
recipe with a few steps in a fresh store: inline, with a Prefect server running, and with the
temporary server.
"""

import json
import os
import socket
import subprocess
import sys
import tempfile
import time
import urllib.request
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from tests.benchmarks.table import show, spread

ROOT = Path(__file__).resolve().parents[2]
SHORT = ["sft.config.max_steps=4", "dpo.config.max_steps=2", "evaluate.config.generate_rows=4"]
LIMITS = {"inline": 3.0, "prefect, server running": 3.0, "prefect, temporary server": 12.0}


def run(store: Path, engine: str, env: dict[str, str]) -> tuple[float, float, float]:
    """(wall seconds, seconds of the ranks, seconds to the first line) of one run."""
    argv = [sys.executable, "-m", "flows.sft_then_dpo", "tiny", "--engine", engine, *SHORT]
    argv += [f"store={store}", f"runs={store}-runs"]
    started = time.monotonic()
    with subprocess.Popen(argv, cwd=ROOT, env=env, stdout=subprocess.PIPE, text=True) as flow:
        assert flow.stdout
        flow.stdout.readline()
        first = time.monotonic() - started
        rest = flow.stdout.read()
    assert flow.returncode == 0, rest
    wall = time.monotonic() - started
    manifests = store.glob("*/*/manifest.json")
    ranks = sum(json.loads(m.read_text())["provenance"]["seconds"] for m in manifests)
    return wall, ranks, first


@contextmanager
def server(home: Path) -> Iterator[str]:
    """A Prefect server of its own on a free port."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    url = f"http://127.0.0.1:{port}/api"
    argv = [sys.executable, "-m", "prefect", "server", "start", "--port", str(port), "--no-ui"]
    env = os.environ | {"PREFECT_HOME": str(home)}
    with subprocess.Popen(argv, env=env, stdout=subprocess.DEVNULL, stderr=subprocess.STDOUT) as up:
        for _ in range(240):
            try:
                urllib.request.urlopen(f"{url}/health", timeout=1).close()
                break
            except OSError:
                time.sleep(0.5)
        yield url
        up.terminate()


def main(repeats: int) -> None:
    with tempfile.TemporaryDirectory() as scratch, server(Path(scratch) / "served") as url:
        base = os.environ | {"PREFECT_HOME": f"{scratch}/home", "OMP_NUM_THREADS": "1"}
        base.pop("PREFECT_API_URL", None)
        kinds = {
            "inline": ("inline", base),
            "prefect, server running": ("prefect", base | {"PREFECT_API_URL": url}),
            "prefect, temporary server": ("prefect", base),
        }
        run(Path(scratch) / "warm", "prefect", base)  # makes the home's database, once
        found: dict[str, list[tuple[float, float, float]]] = {kind: [] for kind in kinds}
        for repeat in range(repeats):
            for number, (kind, (engine, env)) in enumerate(kinds.items()):
                wall, ranks, first = run(Path(scratch) / f"store{repeat}{number}", engine, env)
                found[kind].append((wall, ranks, first))
                said = f"{kind}: {wall - ranks:.2f} s beside {ranks:.1f} s"
                print(said, file=sys.stderr, flush=True)
    rows = [
        [
            kind,
            spread([wall - ranks for wall, ranks, _ in each]),
            f"{LIMITS[kind]:.0f}",
            spread([ranks for _, ranks, _ in each]),
            spread([first for _, _, first in each]),
        ]
        for kind, each in found.items()
    ]
    head = ["engine", "orchestration, s", "bar, s", "ranks, s", "first line, s"]
    show(f"Orchestration of one run, median (range) of {repeats}", head, rows)


if __name__ == "__main__":
    main(int(sys.argv[1]) if len(sys.argv) > 1 else 3)
