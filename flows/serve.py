"""A Prefect server with a worker and every flow deployed, on this machine: ``make ui``."""

import argparse
import ctypes
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from types import FrameType
from typing import IO, Any

from backends.placement import supervise
from flows import keeper
from flows.deploy import answers
from flows.prefect_server import PrefectError, reach_loopback, require_home
from flows.run_stage import python_path

PR_SET_PDEATHSIG = 1
PORT = 4200
HOST = "127.0.0.1"
"""Loopback: the server asks nobody who they are."""

START_SECONDS = 120.0
SERVER_SECONDS = 10.0
WORKER_SECONDS = 90.0
"""A worker ends its runs first, and those save what they have."""

STAY_SECONDS = 15.0
"""A part that ends sooner would end again."""

POLL_SECONDS = 0.2


class ServeError(Exception):
    """The server or the worker cannot be had; the text says why."""


@dataclass(frozen=True)
class Part:
    """A process that has to be there for as long as the product is."""

    name: str
    command: tuple[str, ...]
    patience: float
    """Seconds from SIGTERM to SIGKILL."""

    @property
    def log(self) -> Path:
        return _home() / f"{self.name}.log"


def main(argv: Sequence[str] | None = None) -> int:
    options = _parser().parse_args(argv)
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
        signal.signal(number, _interrupt)
    try:
        _serve(options.port)
    except KeyboardInterrupt:
        print("ended", flush=True)
        return 0
    except (ServeError, PrefectError, OSError) as error:
        print(error, file=sys.stderr)
    return 1


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="python -m flows.serve", description=__doc__)
    parser.add_argument("--port", type=int, default=PORT, help="of the server, on loopback")
    return parser


def _interrupt(number: int, frame: FrameType | None) -> None:
    raise KeyboardInterrupt


def _serve(port: int) -> None:
    """Until Ctrl-C, or until a part does not stay."""
    require_home()
    reach_loopback()
    started, url = time.monotonic(), f"http://{HOST}:{port}/api"
    if answers(url):
        raise ServeError(
            f"{url} answers already: a server runs there. Use it (PREFECT_API_URL={url} python -m "
            "flows.deploy), or choose another port with --port"
        )
    environment = _environment(url)
    command = (sys.executable, "-m", "prefect", "server", "start")
    command += ("--host", HOST, "--port", str(port))
    server = Part("server", command, SERVER_SECONDS)
    worker = Part("worker", (sys.executable, "-m", "flows.worker"), WORKER_SECONDS)
    print(f"starting Prefect's server (log: {server.log})", flush=True)
    with _kept(server, environment) as keep_server, _deploying(environment) as deployed:
        _wait_for_server(keep_server, url, server.log)
        print("deploying the flows", flush=True)
        deployed()
        try:
            with _kept(worker, environment) as keep_worker:
                took, address = time.monotonic() - started, url.removesuffix("/api")
                print(f"\n  {address}   (ready in {took:.0f} s; Ctrl-C ends it)\n", flush=True)
                while True:
                    keep_server()
                    keep_worker()
                    time.sleep(POLL_SECONDS)
        finally:
            _end_runs(url)


def _end_runs(url: str) -> None:
    """Tell those that a worker which was killed has left behind; the others know. The server stays
    until the last has saved and said so; a further Ctrl-C cuts it short."""
    deadline = time.monotonic() + WORKER_SECONDS
    for facts in _unsettled(url):
        if supervise.is_alive(facts["flow"]):
            with suppress(ProcessLookupError):
                os.kill(facts["flow"]["pid"], signal.SIGTERM)
    if _unsettled(url):
        print("waiting for runs to save", flush=True)
    while _unsettled(url) and time.monotonic() < deadline:
        time.sleep(POLL_SECONDS)


def _unsettled(url: str) -> list[dict[str, Any]]:
    """What is noted of the runs of the server at ``url`` whose state is not yet their last."""
    noted = map(keeper.read, (_home() / keeper.FOLDER).glob("*.json"))
    return [facts for facts in noted if facts.get("api") == url]


def _home() -> Path:
    """Where Prefect keeps its database: the same for runs from the command line."""
    return Path(os.environ.get("PREFECT_HOME", "~/.prefect")).expanduser()


def _environment(url: str) -> dict[str, str]:
    return os.environ | {
        "PREFECT_API_URL": url,
        "PREFECT_UI_API_URL": url,
        "PREFECT_SERVER_ANALYTICS_ENABLED": "false",
        "PREFECT_SERVER_LOGGING_LEVEL": "WARNING",
        "PYTHONPATH": python_path(),
        "DO_NOT_TRACK": "1",
    }


@contextmanager
def _kept(part: Part, environment: Mapping[str, str]) -> Iterator[Callable[[], None]]:
    """Run ``part``; the value, called now and then, starts it again if it has ended by itself, and
    raises :class:`ServeError` if it does not stay for a moment."""
    part.log.parent.mkdir(parents=True, exist_ok=True)
    with part.log.open("ab") as out:
        process, since = _start(part, environment, out), time.monotonic()

        def keep() -> None:
            nonlocal process, since
            if process.poll() is None:
                return
            if time.monotonic() - since < STAY_SECONDS:
                raise ServeError(
                    f"the {part.name} ended with code {process.returncode}: {_last_line(part.log)} "
                    f"(in {part.log})"
                )
            print(f"the {part.name} ended by itself (code {process.returncode}); starting it again "
                  f"(log: {part.log})", flush=True)  # fmt: skip
            process, since = _start(part, environment, out), time.monotonic()

        try:
            yield keep
        finally:
            _end(process, patience=part.patience)


def _last_line(log: Path) -> str:
    lines = [line for line in log.read_text(errors="replace").splitlines() if line.strip()]
    return lines[-1].strip() if lines else "it said nothing"


def _start(part: Part, environment: Mapping[str, str], out: IO[bytes]) -> subprocess.Popen[bytes]:
    """In a session of its own, so that Ctrl-C reaches it in our order and not at once."""
    return subprocess.Popen(
        part.command, env=dict(environment), stdin=subprocess.DEVNULL, stdout=out, stderr=out,
        start_new_session=True,
        preexec_fn=_end_with_parent if sys.platform == "linux" else None,
    )  # fmt: skip


def _end_with_parent() -> None:
    """A `make ui` that is killed takes the server and the worker along."""
    ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, signal.SIGTERM, 0, 0, 0)


def _end(process: subprocess.Popen[bytes], *, patience: float) -> None:
    """SIGTERM, and SIGKILL for what is deaf to it; a second Ctrl-C does not cut this short."""
    before = signal.signal(signal.SIGINT, signal.SIG_IGN)
    try:
        if process.poll() is None:
            process.terminate()
        process.wait(patience)
    except subprocess.TimeoutExpired:
        process.kill()
        process.wait()
    finally:
        signal.signal(signal.SIGINT, before)


def _wait_for_server(keep: Callable[[], None], url: str, log: Path) -> None:
    deadline = time.monotonic() + START_SECONDS
    while not answers(url):
        keep()
        if time.monotonic() > deadline:
            raise ServeError(f"the server does not answer: {_last_line(log)} (in {log})")
        time.sleep(POLL_SECONDS)


@contextmanager
def _deploying(environment: Mapping[str, str]) -> Iterator[Callable[[], None]]:
    """Begin at once, since half of it is loading; the value waits for the end."""
    command = (sys.executable, "-m", "flows.deploy", "--wait", f"{START_SECONDS:.0f}")
    with subprocess.Popen(
        command, env=dict(environment), stdin=subprocess.DEVNULL, stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT, text=True, start_new_session=True,
    ) as process:  # fmt: skip

        def deployed() -> None:
            said = process.communicate()[0].strip()
            if process.returncode:
                raise ServeError(f"the flows could not be deployed: {said[-2000:]}")
            print("\n".join(f"  {line}" for line in said.splitlines()), flush=True)

        try:
            yield deployed
        finally:
            process.kill()  # nothing, once it has ended


if __name__ == "__main__":
    sys.exit(main())
