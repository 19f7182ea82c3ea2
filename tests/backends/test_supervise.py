"""The supervisor, on real processes: exit codes come back, and nothing outlives a job."""

import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from backends.base import Launch
from backends.placement import ThisMachine

LEAVES_A_GRANDCHILD = """
import os, signal, subprocess, sys, time
signal.signal(signal.SIGTERM, signal.SIG_IGN)
child = subprocess.Popen(
    [sys.executable, "-c",
     "import signal, time; signal.signal(signal.SIGTERM, signal.SIG_IGN); time.sleep(600)"],
    start_new_session=True,
)
open(sys.argv[1], "w").write(f"{os.getpid()} {child.pid}")
time.sleep(600)
"""
FLOW = """
import sys
from pathlib import Path
from backends.base import Launch
from backends.placement import ThisMachine
log, argv = Path(sys.argv[1]), tuple(sys.argv[2:])
ThisMachine(grace_seconds=0.5).run(Launch(argv), log=log, lock=1, poll=lambda: None)
"""


def run(code: str, log: Path) -> int:
    launch = Launch((sys.executable, "-c", code))
    return ThisMachine().run(launch, log=log, lock=1, poll=lambda: None)


def alive(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except FileNotFoundError:
        return False


def wait_for(condition, seconds: float = 10) -> bool:
    deadline = time.monotonic() + seconds
    while time.monotonic() < deadline:
        if condition():
            return True
        time.sleep(0.05)
    return False


def test_exit_codes_signals_and_output_come_back(tmp_path: Path) -> None:
    log = tmp_path / "log.txt"
    assert run("print('hello')", log) == 0
    assert run("raise SystemExit(3)", log) == 3
    assert run("import os, signal; os.kill(os.getpid(), signal.SIGKILL)", log) == -signal.SIGKILL
    assert log.read_text() == "hello\n"


def test_a_command_that_cannot_start_is_said_in_the_log(tmp_path: Path) -> None:
    log = tmp_path / "log.txt"
    launch = Launch(("/no/such/program",))
    assert ThisMachine().run(launch, log=log, lock=1, poll=lambda: None) == 127
    assert "/no/such/program" in log.read_text()


def test_an_exception_in_the_flow_ends_the_job(tmp_path: Path) -> None:
    pids = tmp_path / "pids"

    def poll() -> None:
        if pids.exists():
            raise KeyboardInterrupt

    launch = Launch((sys.executable, "-c", LEAVES_A_GRANDCHILD, str(pids)))
    with pytest.raises(KeyboardInterrupt):
        ThisMachine(grace_seconds=0.5).run(launch, log=tmp_path / "log", lock=1, poll=poll)
    assert not any(alive(int(pid)) for pid in pids.read_text().split())


@pytest.mark.skipif(sys.platform != "linux", reason="reads /proc")
def test_kill_9_of_the_flow_leaves_no_process(tmp_path: Path) -> None:
    """Ranks that ignore SIGTERM, in sessions of their own, orphaned by a flow that cannot react."""
    pids = tmp_path / "pids"
    argv = [sys.executable, "-c", LEAVES_A_GRANDCHILD, str(pids)]
    flow = subprocess.Popen([sys.executable, "-c", FLOW, str(tmp_path / "log"), *argv])
    assert wait_for(lambda: pids.exists() and len(pids.read_text().split()) == 2)
    started = [int(pid) for pid in pids.read_text().split()]
    assert all(map(alive, started))
    os.kill(flow.pid, signal.SIGKILL)
    flow.wait()
    assert wait_for(lambda: not any(map(alive, started)))


def test_a_lock_is_held_until_the_last_process_is_gone(tmp_path: Path) -> None:
    import fcntl

    def is_free() -> bool:
        with (tmp_path / "lock").open("w") as other:
            try:
                fcntl.flock(other, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except BlockingIOError:
                return False
            return True

    seen: list[bool] = []
    with (tmp_path / "lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        launch = Launch((sys.executable, "-c", "import time; time.sleep(0.6)"))
        ThisMachine().run(
            launch,
            log=tmp_path / "log",
            lock=lock.fileno(),
            poll=lambda: seen.append(is_free()),
        )
    assert seen and not any(seen)
    assert is_free()
