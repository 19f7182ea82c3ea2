"""A Prefect API for the time of one run: the configured server's, else a temporary one's."""

import json
import os
import signal
import subprocess
import sys
import tempfile
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import IO

START_SECONDS = 180.0
"""A temporary server takes 4 s to start, 15 s with a new database, more on a busy machine."""

END_SECONDS = 20.0

LOOPBACK = "127.0.0.1,localhost"


def reach_loopback() -> None:
    """A proxy that the environment names is for other machines: a server on this one is spoken to
    directly, by us and by all that we start."""
    told = os.environ.get("no_proxy") or os.environ.get("NO_PROXY") or ""
    if told != "*" and LOOPBACK not in told:
        told = f"{told},{LOOPBACK}" if told else LOOPBACK
    os.environ.update(no_proxy=told, NO_PROXY=told)


class PrefectError(ValueError):
    """Prefect cannot record the run; the text says why and how to run without it."""


def require_home() -> None:
    """Raise :class:`PrefectError` for a user without a home: Prefect could not even be loaded."""
    try:
        Path.home()
    except RuntimeError:
        raise PrefectError(
            "this user has no home folder, which Prefect wants: set HOME to a folder that may be "
            "written; --engine inline runs without Prefect"
        ) from None


@dataclass(frozen=True)
class Api:
    """An API that answers."""

    url: str
    temporary: bool
    lifeline: IO[str]

    def note(self, kind: str, run: str) -> None:
        """Tell the recorder of a flow ``run``, of a ``task`` or of the ``end`` of that run.

        It needs to know in order to close the history of a run that was killed.
        """
        with suppress(BrokenPipeError):
            self.lifeline.write(f"{kind} {run}\n")
            self.lifeline.flush()


@contextmanager
def starting(say: Callable[[str], None]) -> Iterator[Callable[[], Api]]:
    """Start looking for an API; the value, when called, waits until one answers.

    In between the caller can import Prefect, which takes as long as the recorder's own import. The
    recorder has a session of its own, so that Ctrl-C reaches the run and not its record, and it
    ends when our end of the pipe closes: after the block, or when we are killed.
    """
    command = (sys.executable, "-P", str(Path(__file__).with_name("prefect_recorder.py")))
    with (
        tempfile.TemporaryFile("w+", encoding="utf-8", errors="replace") as early,
        subprocess.Popen(
            command,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=early,
            text=True,
            start_new_session=True,
        ) as recorder,
    ):
        apis: list[Api] = []

        def ready() -> Api:
            apis.append(_wait(recorder, early, say))
            return apis[0]

        try:
            yield ready
        finally:
            if apis:
                _end(recorder)
            recorder.kill()  # at once where no run was recorded


def _wait(recorder: subprocess.Popen[str], early: IO[str], say: Callable[[str], None]) -> Api:
    assert recorder.stdin and recorder.stdout
    log: IO[str] | str = early
    limit = threading.Timer(START_SECONDS, recorder.kill)
    limit.start()
    try:
        for line in recorder.stdout:
            facts = json.loads(line)
            if "url" in facts:
                return Api(facts["url"], facts["temporary"], recorder.stdin)
            if "say" in facts:
                say(facts["say"])
            log = facts.get("log", log)
    finally:
        limit.cancel()
    too_slow = f" within {START_SECONDS:.0f} s" if recorder.wait() == -signal.SIGKILL else ""
    last, place = _last_line(log)
    raise PrefectError(
        f"Prefect's temporary server did not start{too_slow}: {last}{place}; "
        "--engine inline runs without Prefect"
    )


def _last_line(log: IO[str] | str) -> tuple[str, str]:
    """What the server said last, and where the rest stands if it is kept."""
    if isinstance(log, str):
        text, place = Path(log).read_text(encoding="utf-8", errors="replace"), f" (in {log})"
    else:
        log.seek(0)
        text, place = log.read(), ""
    lines = [line.strip() for line in text.splitlines() if line.strip()]
    return lines[-1] if lines else "it said nothing", place


def _end(recorder: subprocess.Popen[str]) -> None:
    """Let the recorder finish what it has been told."""
    assert recorder.stdin
    with suppress(BrokenPipeError):
        recorder.stdin.close()
    with suppress(subprocess.TimeoutExpired):
        recorder.wait(END_SECONDS)
