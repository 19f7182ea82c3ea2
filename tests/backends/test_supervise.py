"""The supervisor, on real processes: exit codes come back, and nothing outlives a job."""

import json
import os
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import pytest

from backends.base import Launch
from backends.placement import ThisMachine, slots
from backends.placement.local import Silence, visible_gpus
from tests.small import ROOT

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
ThisMachine(grace_seconds=0.5).run(Launch(argv), gpus=0, log=log, lock=1, poll=lambda: None)
"""


def run(code: str, log: Path) -> int:
    launch = Launch((sys.executable, "-c", code))
    return ThisMachine().run(launch, gpus=0, log=log, lock=1, poll=lambda: None)


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
    assert run("import os; os.kill(os.getpid(), 40)", log) == -40
    assert [run(f"import os; os._exit({code})", log) for code in (128, 255)] == [128, 255]
    assert log.read_text() == "hello\n"


def test_a_command_that_cannot_start_is_said_in_the_log(tmp_path: Path) -> None:
    log = tmp_path / "log.txt"
    launch = Launch(("/no/such/program",))
    assert ThisMachine().run(launch, gpus=0, log=log, lock=1, poll=lambda: None) == 127
    assert "/no/such/program" in log.read_text()


@pytest.mark.parametrize("on_parent_exit", ["stop", "keep"])
def test_an_interrupt_before_the_pid_is_known_ends_the_job(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, on_parent_exit
) -> None:
    begin = subprocess.Popen._execute_child  # type: ignore[attr-defined]

    def begin_and_be_interrupted(*args, **kwargs) -> None:
        begin(*args, **kwargs)
        assert wait_for(started.exists)
        raise KeyboardInterrupt

    monkeypatch.setattr(subprocess.Popen, "_execute_child", begin_and_be_interrupted)
    started = tmp_path / "started"
    code = "import os, sys, time; open(sys.argv[1], 'w').write(f'{os.getpid()}'); time.sleep(600)"
    launch = Launch((sys.executable, "-c", code, str(started)))
    machine = ThisMachine(on_parent_exit=on_parent_exit)
    with pytest.raises(KeyboardInterrupt):
        machine.run(launch, gpus=0, log=tmp_path / "log.txt", lock=1, poll=lambda: None)
    assert not alive(int(started.read_text()))
    ended = machine.ended(tmp_path)
    assert ended and ended["why"] == "asked"


def test_an_exception_in_the_flow_ends_the_job(tmp_path: Path) -> None:
    pids = tmp_path / "pids"

    def poll() -> None:
        if pids.exists():
            raise KeyboardInterrupt

    launch = Launch((sys.executable, "-c", LEAVES_A_GRANDCHILD, str(pids)))
    with pytest.raises(KeyboardInterrupt):
        ThisMachine(grace_seconds=0.5).run(launch, gpus=0, log=tmp_path / "log", lock=1, poll=poll)
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
            gpus=0,
            log=tmp_path / "log",
            lock=lock.fileno(),
            poll=lambda: seen.append(is_free()),
        )
    assert seen and not any(seen)
    assert is_free()


# What the ranks and the supervisor agree on.

RANK = """
import json, os, sys, time
folder, phase, heeds, seconds = sys.argv[1], sys.argv[2], sys.argv[3] == "heeds", float(sys.argv[4])
os.makedirs(f"{folder}/beats", exist_ok=True)
def beat():
    fact = {"pid": os.getpid(), "started": 0, "phase": phase, "step": 3, "total_steps": 9,
            "step_seconds": None, "time": 0, "clock": time.monotonic(), "heeds_stop": heeds}
    with open(f"{folder}/beats/rank-0.partial", "w") as file:
        json.dump(fact, file)
    os.replace(f"{folder}/beats/rank-0.partial", f"{folder}/beats/rank-0.json")
beat()
until = time.monotonic() + seconds
while time.monotonic() < until:
    time.sleep(0.1)
    if os.path.exists(f"{folder}/stop"):
        open(f"{folder}/saved", "w").close()
        sys.exit(75)
"""


def rank(folder: Path, phase: str, heeds: str, seconds: float) -> Launch:
    return Launch((sys.executable, "-c", RANK, str(folder), phase, heeds, str(seconds)))


def test_a_silent_rank_is_named_and_ended(tmp_path: Path) -> None:
    here = ThisMachine(grace_seconds=0.5, silence=Silence(step_minutes=0.02, step_factor=1))
    launch = rank(tmp_path, "step", "deaf", 60)
    code = here.run(launch, gpus=0, log=tmp_path / "log", lock=1, poll=lambda: None)
    ended = here.ended(tmp_path)
    assert code == -signal.SIGTERM and ended and ended["why"] == "silent"
    assert ended["silent"]["0"]["step"] == 3 and ended["silent"]["0"]["state"] == "S"


def test_silence_of_an_earlier_attempt_does_not_count(tmp_path: Path) -> None:
    (tmp_path / "beats").mkdir()
    old = {"phase": "step", "step": 1, "clock": time.monotonic() - 1e6, "heeds_stop": True}
    (tmp_path / "beats" / "rank-0.json").write_text(json.dumps(old | {"pid": os.getpid()}))
    launch = Launch((sys.executable, "-c", "import time; time.sleep(3)"))
    assert ThisMachine().run(launch, gpus=0, log=tmp_path / "log", lock=1, poll=lambda: None) == 0


@pytest.mark.parametrize(("heeds", "saved"), [("heeds", True), ("deaf", False)])
def test_ranks_that_heed_it_save_before_they_are_ended(
    tmp_path: Path, heeds: str, saved: bool
) -> None:
    def poll() -> None:
        if (tmp_path / "beats" / "rank-0.json").exists():
            raise KeyboardInterrupt

    here, launch = ThisMachine(grace_seconds=0.5), rank(tmp_path, "step", heeds, 60)
    with pytest.raises(KeyboardInterrupt):
        here.run(launch, gpus=0, log=tmp_path / "log", lock=1, poll=poll)
    assert (tmp_path / "saved").exists() is saved
    ended = here.ended(tmp_path)
    assert ended and ended["why"] in ("asked", "parent")
    assert ended["processes"] == (0 if saved else 1)


def test_a_kept_job_outlives_its_flow(tmp_path: Path) -> None:
    code = FLOW.replace("grace_seconds=0.5", "grace_seconds=0.5, on_parent_exit='keep'")
    done = tmp_path / "done"
    argv = [sys.executable, "-c", f"import time; time.sleep(3); open({str(done)!r}, 'w')"]
    flow = subprocess.Popen([sys.executable, "-c", code, str(tmp_path / "log"), *argv])
    assert wait_for((tmp_path / "status.json").exists)
    os.kill(flow.pid, signal.SIGKILL)
    flow.wait()
    assert wait_for((tmp_path / "ended.json").exists) and done.exists()
    ended = ThisMachine().ended(tmp_path)
    assert ended and ended["code"] == 0 and ended["why"] is None


def test_two_jobs_never_share_a_gpu(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "x0,x1,x2")
    monkeypatch.setattr(slots, "folder", lambda: tmp_path / "slots")
    first, held = slots.take(2, visible=visible_gpus(), poll=lambda: None)
    assert first == ["x0", "x1"]
    print_mine = "import os; print(os.environ['CUDA_VISIBLE_DEVICES'])"
    launch = Launch((sys.executable, "-c", print_mine))
    log = tmp_path / "log"
    assert ThisMachine().run(launch, gpus=1, log=log, lock=1, poll=lambda: None) == 0
    assert log.read_text() == "x2\n"
    waited: list[int] = []
    told: list[str] = []

    def poll() -> None:
        waited.append(1)
        if len(waited) == 1:
            slots.release(held)

    here = ThisMachine()
    assert here.run(launch, gpus=3, log=log, lock=1, poll=poll, queued=told.append) == 0
    assert waited and log.read_text() == "x2\nx0,x1,x2\n"
    assert told == ["waits for 3 of 3 GPUs; 1 not in use by other jobs", ""]


def test_a_job_that_shares_gpus_sees_as_many_as_it_asked_for(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A plain process would spread over all that it sees, and its batch would grow with them."""
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "x0,x1,x2")
    launch = Launch((sys.executable, "-c", "import os; print(os.environ['CUDA_VISIBLE_DEVICES'])"))
    log = tmp_path / "log"
    here = ThisMachine(share_gpus=True)
    assert here.run(launch, gpus=1, log=log, lock=1, poll=lambda: None) == 0
    assert log.read_text() == "x0\n"


def test_jobs_with_a_tmpdir_of_their_own_and_parts_of_a_gpu_are_locked_too(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    code = "from backends.placement import slots; print(slots.folder())"
    places = {
        subprocess.check_output(
            [sys.executable, "-c", code], cwd=ROOT, env=os.environ | {"TMPDIR": str(each)}
        )
        for each in (tmp_path, ROOT)
    }
    assert len(places) == 1
    monkeypatch.setattr(slots, "folder", lambda: tmp_path / "slots")
    parts = ["MIG-GPU-0a1b/1/0", "MIG-GPU-0a1b/2/0"]
    held = [slots.take(1, visible=parts, poll=lambda: None) for _ in parts]
    assert [names for names, _ in held] == [[part] for part in parts]
    for _, locks in held:
        slots.release(locks)


HIDDEN = """
mount -t proc -o hidepid=1 proc /proc || exit 1
exec setpriv --reuid 65534 --regid 65534 --clear-groups --inh-caps +dac_override \\
    --ambient-caps +dac_override "$@"
"""


@pytest.mark.skipif(os.geteuid() != 0, reason="only root can mount and become another user")
def test_a_job_ends_where_the_processes_of_others_are_hidden(tmp_path: Path) -> None:
    """As on machines that many share."""
    argv = [sys.executable, "-c", FLOW, str(tmp_path / "log"), sys.executable, "-c", "pass"]
    inside = ["unshare", "-m", "sh", "-c", HIDDEN, "sh"]
    if not shutil.which("unshare") or subprocess.run([*inside, "true"], check=False).returncode:
        pytest.skip("needs the right to mount")
    subprocess.run([*inside, *argv], cwd=ROOT, check=True)
    ended = ThisMachine().ended(tmp_path)
    assert ended and ended["code"] == 0


SECOND_USER = """
import os, sys
from pathlib import Path
from backends.placement import slots
slots.folder = lambda: Path(sys.argv[1])
os.setgid(65534)
os.setuid(65534)
print(*slots.take(1, visible=["0", "1"], poll=lambda: None)[0])
"""


@pytest.mark.skipif(os.geteuid() != 0, reason="only root can be two users")
def test_users_of_one_machine_see_each_others_gpus(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    shared = Path(tempfile.mkdtemp(dir="/tmp"))  # pytest's own folders are closed to others
    monkeypatch.setattr(slots, "folder", lambda: shared)
    before = os.umask(0o077)
    try:
        held, locks = slots.take(1, visible=["0", "1"], poll=lambda: None)
    finally:
        os.umask(before)
    try:
        argv = [sys.executable, "-c", SECOND_USER, str(shared)]
        told = subprocess.run(argv, cwd=ROOT, capture_output=True, text=True, check=True)
        assert (held, told.stdout.split()) == (["0"], ["1"])
    finally:
        slots.release(locks)
        shutil.rmtree(shared)
