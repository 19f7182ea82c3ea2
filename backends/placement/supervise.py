"""The one place that starts and ends processes.

``torchrun`` starts every rank in a session of its own, so neither ending its process nor its
process group ends the ranks. A supervisor does: it leads a session of its own, adopts orphaned
descendants (``PR_SET_CHILD_SUBREAPER``), and holds one end of a lifeline, a socket pair whose other
end only the flow has. When the flow goes, however it goes, the lifeline closes and the supervisor
asks the ranks to stop, then ends everything below it. The flow in turn knows by the same lifeline
when the supervisor is gone, also one whose pid it never learned because Ctrl-C came first. Only the
standard library is used, so that it starts in milliseconds; only descendants are ever signalled, so
that a recycled pid is nobody's end.

What is agreed with the ranks, all in the job's folder: they write ``beats/rank-N.json`` while they
work and look for the file ``stop`` after each step; SIGUSR2 makes them write their stacks. The
supervisor writes ``handle.json`` (who it is), ``status.json`` (every few seconds) and, last of all,
``ended.json``.
"""

import ctypes
import json
import os
import select
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Mapping
from contextlib import suppress
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

PR_SET_PDEATHSIG, PR_SET_CHILD_SUBREAPER = 1, 36
POLL_SECONDS = 0.2
STATUS_SECONDS = 2.0
STACK_SECONDS = 3.0
"""Time for the ranks to write their stacks before they are ended."""

HANDLE, STATUS, ENDED, STOP, BEATS = "handle.json", "status.json", "ended.json", "stop", "beats"


@dataclass(frozen=True)
class Limits:
    """Seconds that a rank may be silent, by its phase; a rank that writes no beats is not timed."""

    start: float = 1800.0
    step: float = 300.0
    step_factor: float = 20.0
    """Times the median step; the longer of this and ``step`` counts."""

    save: float = 1800.0


@dataclass(frozen=True)
class Job:
    """A command to supervise."""

    argv: tuple[str, ...]
    env: Mapping[str, str]
    log: Path
    """Standard output and error of every process, appended; its folder is the job's folder."""

    grace_seconds: float
    """Time between SIGTERM and SIGKILL."""

    stop_seconds: float = 0.0
    """Time that ranks which write beats have to save and leave before SIGTERM."""

    limits: Limits = field(default_factory=Limits)
    outlives_flow: bool = False
    """Whether the job goes on when the flow is gone."""

    held: tuple[int, ...] = ()
    """File descriptors, locks say, that stay open until the last process is gone."""


def run(job: Job, *, poll: Callable[[], None]) -> int:
    """Run ``job`` to its end, calling ``poll`` a few times a second; return its exit code.

    A negative code is the signal that ended the command. Whatever leaves this function, an
    exception from ``poll`` or ``KeyboardInterrupt`` too, no process of the job outlives it.
    """
    folder = job.log.parent
    for old in (*map(folder.joinpath, (HANDLE, STATUS, ENDED, STOP)), *folder.glob(f"{BEATS}/*")):
        old.unlink(missing_ok=True)
    facts = asdict(job) | {"log": str(job.log), "env": None, "held": None}
    ours, lifeline = socket.socketpair()
    supervisor = None
    with ours:
        try:
            with lifeline:
                end = lifeline.fileno()
                supervisor = subprocess.Popen(
                    [sys.executable, "-I", "-S", __file__, str(end), json.dumps(facts)],
                    env=dict(job.env),
                    stdin=subprocess.DEVNULL,
                    stdout=subprocess.DEVNULL,
                    pass_fds=(end, *job.held),
                    start_new_session=True,
                )
            _write(str(folder), HANDLE, identity(supervisor.pid) | {"argv": job.argv})
            while True:
                try:
                    code = supervisor.wait(timeout=POLL_SECONDS)
                    break
                except subprocess.TimeoutExpired:
                    poll()
        except BaseException:
            with suppress(OSError):  # it is gone
                ours.send(b"e")  # it now ends whatever still runs, also what outlives a flow
            raise
        finally:
            with suppress(OSError):  # it is gone, and has not read our word
                ours.shutdown(socket.SHUT_WR)
                ours.recv(1)
            if supervisor:
                supervisor.wait()
    poll()
    # 255 and 128 are no signals, whatever shells make of such codes.
    return -number if (number := code - 128) in signal.valid_signals() else code


def ended(folder: Path) -> dict[str, Any] | None:
    """How the last job of ``folder`` ended: ``code``, ``why`` it was ended (``None``: by itself),
    ``silent`` ranks with their last beat,
    ``processes`` that had to be ended. ``None`` while it runs, or if nobody knows.
    """
    try:
        return json.loads((folder / ENDED).read_text())
    except (FileNotFoundError, ValueError):
        return None


def is_alive(handle: Mapping[str, Any]) -> bool:
    """Whether the process of a handle still runs: its pid, started when the handle says."""
    return identity(handle["pid"]).get("started") == handle["started"]


# What follows runs in the supervisor, which has no site-packages and no project.


def main(argv: list[str]) -> int:
    """The supervisor itself: ``supervise.py LIFELINE JOB``."""
    lifeline, job = int(argv[0]), json.loads(argv[1])
    folder = os.path.dirname(job["log"])  # noqa: PTH120 - pathlib is not worth its import here
    os.set_inheritable(lifeline, False)
    _adopt_orphans()
    wake = _wake_on(signal.SIGTERM, signal.SIGINT, signal.SIGCHLD)
    with open(job["log"], "ab") as out:  # noqa: PTH123
        try:
            child = subprocess.Popen(
                job["argv"],
                stdin=subprocess.DEVNULL,
                stdout=out,
                stderr=out,
                start_new_session=True,
                preexec_fn=_die_with_parent if sys.platform == "linux" else None,
            )
        except OSError as error:
            out.write(f"{job['argv'][0]}: {error}\n".encode())
            _write(folder, ENDED, {"code": 127, "why": None, "silent": {}, "processes": 0})
            return 127
    why, silent = _watch(child, job, folder, wake=wake, lifeline=lifeline)
    if why == "silent":
        _ask_for_stacks(folder, child, wake)
    elif why and job["stop_seconds"]:
        _ask_to_stop(folder, child, seconds=job["stop_seconds"], wake=wake)
    _status(folder, "ending", why)
    processes = _end_all(
        child if why else None, grace=job["grace_seconds"] if why else 0, wake=wake
    )
    code = 128 + signal.SIGTERM if why else child.returncode
    code = code if code >= 0 else 128 - code
    _write(folder, ENDED, {"code": code, "why": why, "silent": silent, "processes": processes})
    _status(folder, "ended", why)
    return code


def _adopt_orphans() -> None:
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(PR_SET_CHILD_SUBREAPER, 1, 0, 0, 0)


def _die_with_parent() -> None:
    """Nothing may outlive a supervisor that was itself killed."""
    ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0)


def _wake_on(*signals: signal.Signals) -> int:
    """A descriptor that becomes readable, with the signals' numbers, when one of them comes."""
    reading, writing = os.pipe()
    os.set_blocking(reading, False)
    os.set_blocking(writing, False)
    signal.set_wakeup_fd(writing)
    for number in signals:
        signal.signal(number, lambda *_: None)
    return reading


def _watch(
    child: "subprocess.Popen[bytes]", job: dict[str, Any], folder: str, *, wake: int, lifeline: int
) -> tuple[str | None, dict[int, dict[str, Any]]]:
    """Wait for the child, or for a reason to stop it: ``asked``, ``parent``, ``silent`` (ranks)."""
    watched = [wake, lifeline]
    while child.poll() is None:
        ready, _, _ = select.select(watched, [], [], STATUS_SECONDS)
        if lifeline in ready:
            watched = [wake]
            asked = bool(os.read(lifeline, 1))  # nothing: the flow is gone
            if (asked or not job["outlives_flow"]) and child.poll() is None:
                return "asked" if asked else "parent", {}
        if wake in ready and {signal.SIGTERM, signal.SIGINT} & set(os.read(wake, 512)):
            return ("asked", {}) if child.poll() is None else (None, {})
        beats = _beats(folder)
        silent = {
            rank: beat | {"state": "".join(_stat(beat["pid"])[:1])}
            for rank, beat in beats.items()
            if _is_silent(beat, job["limits"])
        }
        if silent:
            return "silent", silent
        _status(folder, "running", None, beats)
    return None, {}


def _beats(folder: str) -> dict[int, dict[str, Any]]:
    """The last beat of each rank that has written one."""
    found = {}
    where = os.path.join(folder, BEATS)  # noqa: PTH118
    names = os.listdir(where) if os.path.isdir(where) else []  # noqa: PTH208, PTH112
    for name in names:
        if name.startswith("rank-") and name.endswith(".json"):
            with suppress(OSError, ValueError), open(os.path.join(where, name)) as file:  # noqa: PTH118, PTH123
                found[int(name[5:-5])] = json.load(file)
    return dict(sorted(found.items()))


def _is_silent(beat: dict[str, Any], limits: dict[str, float]) -> bool:
    """Clocks are monotonic ones, so that a jump of the time of day ends nobody."""
    limit = {
        "step": max(limits["step"], limits["step_factor"] * (beat.get("step_seconds") or 0)),
        "save": limits["save"],
    }.get(beat["phase"], limits["start"])
    return time.monotonic() - beat["clock"] > limit


def _ask_for_stacks(folder: str, child: "subprocess.Popen[bytes]", wake: int) -> None:
    """Ranks write their stacks on SIGUSR2; one that is stopped cannot."""
    below = set(_descendants(os.getpid()))
    for beat in _beats(folder).values():
        if beat["pid"] in below:
            with suppress(ProcessLookupError):
                os.kill(beat["pid"], signal.SIGUSR2)
    _wait(child, STACK_SECONDS, wake)


def _ask_to_stop(
    folder: str, child: "subprocess.Popen[bytes]", *, seconds: float, wake: int
) -> None:
    """Ranks that heed it save and leave by themselves; nobody else is waited for."""
    beats = _beats(folder).values()
    if not any(beat["heeds_stop"] and beat["phase"] != "start" for beat in beats):
        return
    _write(folder, STOP, {"time": time.time()})
    _status(folder, "stopping", "asked")
    _wait(child, seconds, wake)


def _wait(child: "subprocess.Popen[bytes]", seconds: float, wake: int) -> None:
    deadline = time.monotonic() + seconds
    while child.poll() is None and time.monotonic() < deadline:
        select.select([wake], [], [], POLL_SECONDS)
        with suppress(BlockingIOError):
            os.read(wake, 512)


def _end_all(child: "subprocess.Popen[bytes] | None", *, grace: float, wake: int) -> int:
    """SIGTERM to the launcher, which tells its ranks; after ``grace``, SIGKILL to what is left.

    Returns how many processes had to be ended.
    """
    ended = set(_descendants(os.getpid()))
    if child is not None and child.poll() is None:
        child.terminate()
    deadline = time.monotonic() + grace
    while _reap() and time.monotonic() < deadline:
        select.select([wake], [], [], POLL_SECONDS)
        with suppress(BlockingIOError):
            os.read(wake, 512)
    while _reap():
        for pid in _descendants(os.getpid()):
            ended.add(pid)
            with suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
        time.sleep(0.02)
    return len(ended)


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
    """(pid, parent) of every live process, from /proc or, elsewhere, from ``ps``."""
    if not os.path.isdir("/proc/self"):  # noqa: PTH112
        table = subprocess.run(
            ["ps", "-axo", "pid=,ppid="], capture_output=True, text=True, check=True
        ).stdout
        return [(int(pid), int(parent)) for pid, parent in map(str.split, table.splitlines())]
    pairs = []
    for name in filter(str.isdigit, os.listdir("/proc")):  # noqa: PTH208
        fields = _stat(int(name))
        if fields and fields[0] != "Z":
            pairs.append((int(name), int(fields[1])))
    return pairs


def _stat(pid: int) -> list[str]:
    """The fields of ``/proc/PID/stat`` after the name; none when the process is gone, or not for us
    to see."""
    try:
        with open(f"/proc/{pid}/stat") as stat:  # noqa: PTH123
            return stat.read().rpartition(")")[2].split()
    except OSError:
        return []


def identity(pid: int) -> dict[str, Any]:
    """A pid and the clock tick at which its process started: together they are never reused."""
    fields = _stat(pid)
    return {"pid": pid, "started": int(fields[19]) if fields else None}


def _status(
    folder: str, state: str, why: str | None, beats: dict[int, dict[str, Any]] | None = None
) -> None:
    ranks = [{"rank": rank} | beat for rank, beat in (beats or _beats(folder)).items()]
    fact = identity(os.getpid()) | {"state": state, "why": why, "time": time.time()}
    _write(folder, STATUS, fact | {"ranks": ranks})


def _write(folder: str, name: str, value: Any) -> None:
    """Aside and rename. A full disk costs the note, never the supervision."""
    path = os.path.join(folder, name)  # noqa: PTH118
    with suppress(OSError):
        with open(f"{path}.partial", "w") as file:  # noqa: PTH123
            json.dump(value, file)
        os.replace(f"{path}.partial", path)  # noqa: PTH105


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
