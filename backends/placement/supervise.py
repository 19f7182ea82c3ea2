"""The one place that starts and ends processes.

``torchrun`` starts every rank in a session of its own, so neither ending its process nor its
process group ends the ranks. A supervisor does: it leads a session of its own, adopts orphaned
descendants (``PR_SET_CHILD_SUBREAPER``), and holds the reading end of a pipe whose writing end only
the flow has. When the flow goes, however it goes, the pipe closes and the supervisor ends
everything below it. Only the standard library is used, so that it starts in milliseconds.
"""

import ctypes
import os
import select
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path

PR_SET_CHILD_SUBREAPER = 36
POLL_SECONDS = 0.2


@dataclass(frozen=True)
class Job:
    """A command to supervise."""

    argv: tuple[str, ...]
    env: Mapping[str, str]
    log: Path
    """Standard output and error of every process, appended."""

    grace_seconds: float
    """Time between SIGTERM and SIGKILL."""

    held: tuple[int, ...] = ()
    """File descriptors, locks say, that stay open until the last process is gone."""


def run(job: Job, *, poll: Callable[[], None]) -> int:
    """Run ``job`` to its end, calling ``poll`` a few times a second; return its exit code.

    A negative code is the signal that ended the command. Whatever leaves this function, an
    exception from ``poll`` or ``KeyboardInterrupt`` too, no process of the job outlives it.
    """
    lifeline, ours = os.pipe()
    with subprocess.Popen(
        [
            *(sys.executable, "-I", "-S", __file__),
            *(str(lifeline), str(job.log), str(job.grace_seconds)),
            *job.argv,
        ],
        env=dict(job.env),
        stdin=subprocess.DEVNULL,
        stdout=subprocess.DEVNULL,
        pass_fds=(lifeline, *job.held),
        start_new_session=True,
    ) as supervisor:
        os.close(lifeline)
        try:
            while True:
                try:
                    code = supervisor.wait(timeout=POLL_SECONDS)
                    break
                except subprocess.TimeoutExpired:
                    poll()
        finally:
            os.close(ours)  # the supervisor now ends whatever still runs
            supervisor.wait()
    poll()
    return code if code < 128 else 128 - code


def main(argv: list[str]) -> int:
    """The supervisor itself: ``supervise.py LIFELINE LOG GRACE COMMAND ...``."""
    lifeline, log, grace, command = int(argv[0]), argv[1], float(argv[2]), argv[3:]
    os.set_inheritable(lifeline, False)
    _adopt_orphans()
    wake = _wake_on(signal.SIGTERM, signal.SIGINT, signal.SIGCHLD)
    with open(log, "ab") as out:  # noqa: PTH123 - pathlib is not worth its import here
        try:
            child = subprocess.Popen(
                command, stdin=subprocess.DEVNULL, stdout=out, stderr=out, start_new_session=True
            )
        except OSError as error:
            out.write(f"{command[0]}: {error}\n".encode())
            return 127
    if _outlasts(child, wake=wake, lifeline=lifeline):
        _end_all(child, grace=grace, wake=wake)
        return 128 + signal.SIGTERM
    _end_all(None, grace=0, wake=wake)
    code = child.returncode
    return code if code >= 0 else 128 - code


def _adopt_orphans() -> None:
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(PR_SET_CHILD_SUBREAPER, 1, 0, 0, 0)


def _wake_on(*signals: signal.Signals) -> int:
    """A descriptor that becomes readable, with the signals' numbers, when one of them comes."""
    reading, writing = os.pipe()
    os.set_blocking(reading, False)
    os.set_blocking(writing, False)
    signal.set_wakeup_fd(writing)
    for number in signals:
        signal.signal(number, lambda *_: None)
    return reading


def _outlasts(child: subprocess.Popen[bytes], *, wake: int, lifeline: int) -> bool:
    """Wait for the child or for a reason to stop it; True when it must be stopped."""
    while child.poll() is None:
        ready, _, _ = select.select([wake, lifeline], [], [], 2.0)
        if lifeline in ready and not os.read(lifeline, 1):
            return child.poll() is None
        if wake in ready and {signal.SIGTERM, signal.SIGINT} & set(os.read(wake, 512)):
            return child.poll() is None
    return False


def _end_all(child: subprocess.Popen[bytes] | None, *, grace: float, wake: int) -> None:
    """SIGTERM to the launcher, which tells its ranks; after ``grace``, SIGKILL to what is left."""
    if child is not None:
        child.terminate()
    deadline = time.monotonic() + grace
    while _reap() and time.monotonic() < deadline:
        select.select([wake], [], [], POLL_SECONDS)
    while _reap():
        for pid in _descendants(os.getpid()):
            try:
                os.kill(pid, signal.SIGKILL)
            except ProcessLookupError:
                continue
        time.sleep(0.02)


def _reap() -> bool:
    """Collect the dead; True while a descendant lives."""
    while True:
        try:
            pid, _ = os.waitpid(-1, os.WNOHANG)
        except ChildProcessError:
            return False
        if pid == 0:
            return True


def _descendants(root: int) -> list[int]:
    children: dict[int, list[int]] = {}
    for pid, parent in _processes():
        children.setdefault(parent, []).append(pid)
    found, todo = [], [root]
    while todo:
        below = children.get(todo.pop(), [])
        found += below
        todo += below
    return found


def _processes() -> list[tuple[int, int]]:
    """(pid, parent) of every process, from /proc or, elsewhere, from ``ps``."""
    if not os.path.isdir("/proc/self"):  # noqa: PTH112
        table = subprocess.run(
            ["ps", "-axo", "pid=,ppid="], capture_output=True, text=True, check=True
        ).stdout
        return [(int(pid), int(parent)) for pid, parent in map(str.split, table.splitlines())]
    pairs = []
    for name in filter(str.isdigit, os.listdir("/proc")):  # noqa: PTH208
        try:
            with open(f"/proc/{name}/stat") as stat:  # noqa: PTH123
                pairs.append((int(name), int(stat.read().rpartition(")")[2].split()[1])))
        except (FileNotFoundError, ProcessLookupError):
            continue
    return pairs


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
