"""Faults on real two-rank jobs, and what becomes of them; ``make faults`` prints a table."""

import hashlib
import json
import os
import re
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from tests.flows.faulty.worlds import (
    Make,
    Unavailable,
    World,
    damaged_data,
    fill,
    jump,
    limited_memory,
    movable_clock,
    plain,
    read_only_disk,
    small_disk,
    taken_port,
)
from tests.small import ENV, ROOT, write_model, write_rows

HERE = Path(__file__).resolve().parent
STEPS = 12
COMPLETE = "sft/*/checkpoints/*/complete.json"
RECIPE = """
name: one
folder: {folder}
store: {store}
runs: {store}-runs
sft:
  config: {{global_batch_size: 8, max_steps: {steps}, learning_rate: 1.0e-3}}
  backend: {{kind: ddp}}
  resources: {{ranks_per_node: 2}}
  save_every: 4
  retries: 0
  placement: {{grace_seconds: 3, silence: {{step_minutes: 0.2, step_factor: 1}}}}
"""


@dataclass(frozen=True)
class Case:
    """A fault: injected in a rank (``fault``), or done from outside to a process."""

    name: str
    kind: str
    """What the pipeline must call it."""

    fault: str = "none:0:0"
    outside: Callable[["Running"], None] | None = None
    code: int = 1
    """Exit code of the flow."""

    guilty: int | None = None
    """Rank that must be named."""

    world: Make = plain
    """What surrounds the job."""


@dataclass
class Running:
    flow: "subprocess.Popen[str]"
    store: Path

    @property
    def out(self) -> Path:
        """The stage's output folder."""
        return output(self.store) or self.store

    def rank(self, number: int) -> int:
        return json.loads((self.out / "beats" / f"rank-{number}.json").read_text())["pid"]

    def step(self) -> int:
        try:
            return json.loads((self.out / "beats" / "rank-0.json").read_text())["step"]
        except (FileNotFoundError, ValueError):
            return 0

    def agent(self) -> int:
        """torchrun: the parent of a rank."""
        return int(Path(f"/proc/{self.rank(0)}/stat").read_text().rpartition(")")[2].split()[1])

    def supervisor(self) -> int:
        return json.loads((self.out / "handle.json").read_text())["pid"]


@dataclass(frozen=True)
class Outcome:
    code: int
    text: str
    seconds: float
    """From the fault to the end of the flow."""

    left: list[int]
    """Processes of the job that are still there."""

    lost: int
    """Complete checkpoints that are gone."""


def recipe(folder: Path, store: Path) -> Path:
    path = store.with_suffix(".yaml")
    path.write_text(RECIPE.format(folder=folder, store=store, steps=STEPS))
    return path


def start(
    path: Path, fault: str, *words: str, world: World | None = None
) -> "subprocess.Popen[str]":
    env = os.environ | ENV | {"FAULT": fault, "PYTHONPATH": f"{HERE}{os.pathsep}{ROOT}"}
    return subprocess.Popen(
        [sys.executable, str(HERE / "one_stage.py"), str(path), *words],
        env=env | dict(world.env if world else {}),
        cwd=ROOT,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        preexec_fn=world.enter if world else None,
    )


def wait_for(condition: Callable[[], object], seconds: float) -> None:
    deadline = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < deadline, "it did not happen in time"
        time.sleep(0.02)


def output(store: Path) -> Path | None:
    return next((path.parent for path in store.glob("sft/*/job.json")), None)


def job_processes(store: Path) -> list[int]:
    """Live processes whose command names the store, but for the flow itself."""
    found = []
    for folder in Path("/proc").iterdir():
        if folder.name.isdigit() and int(folder.name) != os.getpid():
            try:
                words = (folder / "cmdline").read_bytes().decode().split("\0")
                state = (folder / "stat").read_text().rpartition(")")[2].split()[0]
            except (FileNotFoundError, ProcessLookupError):
                continue
            if state != "Z" and any(str(store / "sft") in word for word in words):
                found.append(int(folder.name))
    return found


def run_case(case: Case, world: World) -> Outcome:
    """Run the stage with the fault, until nothing of it is left."""
    store = world.store
    flow = start(recipe(world.folder, store), case.fault, world=world)
    running = Running(flow, store)
    _until(lambda: any(store.glob("sft/*/beats/rank-1.json")), flow, 60)
    wanted = int(case.fault.split(":")[2]) or 6
    _until(lambda: running.step() >= wanted - 1, flow, 90)
    before = set(store.glob(COMPLETE))
    begun = time.monotonic()
    if case.outside:
        case.outside(running)
    text = flow.communicate(timeout=90)[0]
    wait_for(lambda: not job_processes(store), 30)
    seconds = time.monotonic() - begun
    after = set(store.glob(COMPLETE))
    kept = 2  # older ones may have been rotated out
    lost = len(before - after) if len(after) < kept else 0
    return Outcome(flow.returncode, text, seconds, job_processes(store), lost)


def _until(condition: Callable[[], object], flow: "subprocess.Popen[str]", seconds: float) -> None:
    wait_for(lambda: condition() or flow.poll() is not None, seconds)


def weights(store: Path) -> str:
    out = output(store)
    assert out is not None
    return hashlib.sha256((out / "model" / "model.safetensors").read_bytes()).hexdigest()


def finish(world: World) -> str:
    """The same command without the fault; the weights' hash."""
    done = start(world.store.with_suffix(".yaml"), "none:0:0")
    text = done.communicate(timeout=120)[0]
    assert done.returncode == 0, text
    return weights(world.store)


def _kill(number: int) -> Callable[[Running], None]:
    return lambda running: os.kill(running.rank(number), signal.SIGKILL)


def _twice(running: Running) -> None:
    running.flow.send_signal(signal.SIGINT)
    time.sleep(0.3)
    running.flow.send_signal(signal.SIGINT)


def _in_a_save(running: Running) -> None:
    beats = running.out / "beats" / "rank-0.json"
    wait_for(lambda: '"save"' in beats.read_text() or running.step() >= STEPS - 1, 30)
    running.flow.send_signal(signal.SIGINT)


def _end(running: Running, what: str) -> None:
    os.kill(getattr(running, what)(), signal.SIGKILL)


def _beside(running: Running) -> None:
    """A second flow of the same recipe, which must run nothing itself."""
    second = start(running.store.with_suffix(".yaml"), "none:0:0")
    said = second.communicate(timeout=90)[0]
    assert second.returncode == 0 and "another run named one is at work" in said, said


CASES = (
    Case("exception on one rank", "error", "exception:1:6", guilty=1),
    Case("os._exit on one rank", "crashed", "exit:1:6", guilty=1),
    Case("segmentation fault on one rank", "crashed", "segfault:0:6", guilty=0),
    Case("SIGKILL of one rank", "crashed", outside=_kill(1), guilty=1),
    Case("SIGKILL of the agent", "crashed", outside=lambda r: _end(r, "agent")),
    Case("SIGKILL of the supervisor", "lost", outside=lambda r: _end(r, "supervisor")),
    Case("SIGKILL of the flow", "", outside=lambda r: r.flow.kill(), code=-signal.SIGKILL),
    Case("SIGSTOP of one rank", "stuck", "stop:1:6", guilty=1),
    Case("deadlock: one rank skips a collective", "stuck", "deadlock:1:6", guilty=1),
    Case("CUDA out of memory, simulated", "out of GPU memory", "cuda_oom:1:6", guilty=1),
    Case("NaN loss", "non-finite value", "nan:0:6", guilty=0),
    Case("SIGUSR1 to one rank (preemption)", "preempted", "preempt:1:6", code=75),
    Case(
        "SIGTERM of the flow (preemption)", "stopped", outside=lambda r: r.flow.terminate(), code=75
    ),
    Case("Ctrl-C", "stopped", outside=lambda r: r.flow.send_signal(signal.SIGINT), code=130),
    Case("Ctrl-C twice in a row", "", outside=_twice, code=130),
    Case("Ctrl-C during a save", "stopped", outside=_in_a_save, code=130),
    Case("a million lines from one rank", "", "flood:1:6", code=0),
    Case(
        "disk full during training", "disk full", outside=lambda r: fill(r.store), world=small_disk
    ),
    Case(
        "disk full during a save",
        "disk full",
        outside=lambda r: fill(r.store, but=100_000),
        world=small_disk,
    ),
    Case("store on a read-only disk", "Read-only file system", world=read_only_disk),
    Case("damaged data file", "data", world=damaged_data),
    Case(
        "memory limit of the machine", "out of memory", "memory:1:6", guilty=1, world=limited_memory
    ),
    Case("torch's usual port is taken", "", code=0, world=taken_port),
    Case("clock jumps by days", "", code=0, outside=lambda r: jump(r.store), world=movable_clock),
    Case("two flows at once", "", code=0, outside=_beside),
)


def make_inputs(folder: Path) -> Path:
    write_model(folder / "tied" / "model", tie=True)
    write_rows(folder / "data")
    return folder


QUIET_ENDS = {0: "no failure", 75: "stopped: requeue", 130: "stopped", -9: "killed"}


def table_row(case: Case, world: World, calm: str) -> list[str]:
    got = run_case(case, world)
    named = re.search(r"failed \(([^,)]+)", got.text)
    ended = QUIET_ENDS.get(got.code) or got.text.strip().splitlines()[-1].rpartition(": ")[2]
    world.repair()
    same = finish(world) == calm
    return [
        case.name, named[1] if named else ended, str(got.code), f"{got.seconds:.1f}",
        str(len(got.left)), str(got.lost), "yes" if same else "NO",
    ]  # fmt: skip


def main(words: list[str]) -> None:
    """Try the faults whose names hold one of ``words``, or all."""
    from tests.benchmarks.table import show

    signal.signal(signal.SIGINT, signal.default_int_handler)  # a shell's `&` makes us deaf to it
    rows = []
    with tempfile.TemporaryDirectory() as scratch:
        folder = make_inputs(Path(scratch) / "inputs")
        recipe(folder, Path(scratch) / "calm")
        calm = finish(World(folder, Path(scratch) / "calm"))
        chosen = [c for c in CASES if not words or any(word in c.name for word in words)]
        for number, case in enumerate(chosen):
            try:
                with case.world(folder, Path(scratch) / f"store{number}") as world:
                    rows.append(table_row(case, world, calm))
            except Unavailable as why:
                rows.append([case.name, f"not tried: {why}", *[""] * 5])
            print(f"{number + 1}/{len(chosen)}", *rows[-1], sep="  ", file=sys.stderr, flush=True)
    head = ["fault", "detected as", "exit code", "seconds to the end", "processes left",
            "checkpoints lost", "same weights after the same command"]  # fmt: skip
    show("Faults on two ranks", head, rows)


if __name__ == "__main__":
    main(sys.argv[1:])
