"""The process beside a deployed run that keeps Prefect's word on it true.

Prefect calls a run cancelled once the flow's process is gone, calls it crashed when a server was
away at its end, and leaves the tasks of a killed flow running for ever. This process outlives the
flow: it waits for the flow and for the job that the flow supervised, then makes the run's state say
what really became of both. Only what the flow itself cannot say any more is worked out here.
"""

import fcntl
import json
import os
import subprocess
import sys
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import TYPE_CHECKING, Any

from backends.placement import supervise
from flows.endings import Ending
from stages import manifest, resume
from stages.manifest import write_atomically

if TYPE_CHECKING:
    from prefect.client.orchestration import SyncPrefectClient
    from psutil import Process

FOLDER = "deployed-runs"
"""Below Prefect's home: a file for each run of this machine that has not been settled."""

POLL_SECONDS = 0.5
WORKER_SECONDS = 45.0
"""The worker has its own word on a cancelled run, up to its 30 s of patience after ours,"""

WORD_SECONDS = 20.0
"""but most often within a few; so long the run is left to it."""

JOB_SECONDS = 3600.0
"""Longest time that a job whose flow is gone may take to save."""

SERVER_SECONDS = 6 * 3600.0
"""How long a server that does not answer is waited for."""


def begin(folder: Path, run: str, *, attempt: int, api: str | None = None) -> Path:
    """Write the file of a run of the server at ``api``, and start its keeper; the file."""
    path = folder / FOLDER / f"{run}-{attempt}.json"  # the keeper before may still be at work
    path.parent.mkdir(parents=True, exist_ok=True)
    me, worker = supervise.identity(os.getpid()), supervise.identity(os.getppid())
    facts = {"run": run, "attempt": attempt, "flow": me, "worker": worker, "api": api}
    write_atomically(path, json.dumps(facts))
    subprocess.Popen(
        [sys.executable, "-m", "flows.keeper", str(path)],
        stdin=subprocess.DEVNULL,
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
        start_new_session=True,
    )
    return path


def note(path: Path, **facts: Any) -> None:
    """Add to the run's file: ``out`` and ``label`` of the stage at work, ``processes`` that are
    told to stop, ``ending``. A run that has been settled meanwhile stays settled."""
    if found := read(path):
        write_atomically(path, json.dumps(found | facts))


def read(path: Path) -> dict[str, Any]:
    """What the file says; nothing when it is gone."""
    try:
        return json.loads(path.read_text())
    except FileNotFoundError:
        return {}


def worker_is_alive(facts: Mapping[str, Any]) -> bool:
    """Whether who started the flow is there still, to have its own word on a cancelled run."""
    return "worker" in facts and supervise.is_alive(facts["worker"])


def settle_all(folder: Path) -> list[str]:
    """Settle the runs of this machine that have lost flow and keeper; what was said of each."""
    told = []
    for path in sorted((folder / FOLDER).glob("*.json")):
        with _only_keeper(path) as alone:
            facts = read(path)
            if alone and facts and not _runs(facts["flow"]):
                told.append(settle(path, patience=0.0).message)
    return told


def main(argv: list[str]) -> None:
    path = Path(argv[0])
    with _only_keeper(path, wait=True):  # a run that starts holds it while it looks at ours
        while (facts := read(path)) and _runs(facts["flow"]):
            time.sleep(POLL_SECONDS)
        if facts:
            settle(path, patience=WORKER_SECONDS)


@contextmanager
def _only_keeper(path: Path, *, wait: bool = False) -> Iterator[bool]:
    """Whether nobody else is about to settle the run; with ``wait`` not before that is so."""
    lock = path.with_suffix(".lock")
    with lock.open("w") as file:
        try:
            fcntl.flock(file, fcntl.LOCK_EX | (0 if wait else fcntl.LOCK_NB))
        except BlockingIOError:
            yield False
            return
        yield True
        if not path.exists():
            lock.unlink(missing_ok=True)


def _runs(process: Mapping[str, Any]) -> bool:
    """Whether it does; one that nobody has collected yet does not."""
    import psutil

    with suppress(psutil.NoSuchProcess):
        return supervise.is_alive(process) and _is_at_work(psutil.Process(process["pid"]))
    return False


def settle(path: Path, *, patience: float) -> Ending:
    """Bring the run's state in line with what became of it; that. The run's file is gone after.

    A run that its server does not know any more, deleted or of another database, is settled too.
    """
    from prefect.exceptions import ObjectNotFound

    facts = read(path)
    if _job_is_alive(facts) and "ending" not in facts:
        with suppress(ObjectNotFound):
            _say_that_it_ends(facts)
        _wait_for_job(facts)
    ending = _ending(facts)
    with suppress(ObjectNotFound), _client() as client:
        _correct(client, facts, ending, patience=patience)
    path.unlink(missing_ok=True)
    return ending


# --- what became of it


def _job_is_alive(facts: Mapping[str, Any]) -> bool:
    return "out" in facts and _supervisor(Path(facts["out"])) is not None


def _wait_for_job(facts: Mapping[str, Any]) -> None:
    """Until its supervisor is gone; one that was told to outlive its flow is left alone."""
    deadline = time.monotonic() + JOB_SECONDS
    while _job_is_alive(facts) and not _outlives(facts) and time.monotonic() < deadline:
        time.sleep(POLL_SECONDS)


def _outlives(facts: Mapping[str, Any]) -> bool:
    return bool(facts.get("outlives"))


def _ending(facts: Mapping[str, Any]) -> Ending:
    """The flow's own word, or what can be seen of a flow that was killed."""
    if "ending" in facts:
        return Ending(**facts["ending"])
    if _job_is_alive(facts):
        return Ending(
            "Crashed",
            f"the flow's process was killed; its job {facts['label']} goes on, and Retry attaches "
            "to it",
            "CRASHED",
        )
    what = stopped(facts)
    if facts.get("asked"):
        return Ending("Preempted", f"stopped {what}; Retry goes on from there", "CRASHED")
    return Ending("Crashed", f"the flow's process was killed {what}; Retry goes on", "CRASHED")


def stopped(facts: Mapping[str, Any]) -> str:
    """``at sft, step 40 of 254, checkpoint 40 saved, 4 processes ended, 0 left``."""
    if "out" not in facts:
        return "before it had anything to run"
    out = Path(facts["out"])
    newest = resume.newest(out)
    saved = f"checkpoint of step {resume.step(newest):,} saved" if newest else "nothing saved yet"
    if (out / manifest.NAME).exists():
        saved = "its output is complete"
    processes = facts.get("processes") or (supervise.ended(out) or {}).get("processes", 0)
    return (
        f"at {facts['label']}{_step(out)}, {saved}, {processes} processes ended, "
        f"{len(remaining(out))} left"
    )


def _step(out: Path) -> str:
    path = out / "metrics.jsonl"
    lines = path.read_text().splitlines() if path.exists() else []
    rows = [json.loads(line) for line in lines if line.startswith("{") and line.endswith("}")]
    return f", step {rows[-1]['step']:,} of {rows[-1]['total_steps']:,}" if rows else ""


def remaining(out: Path) -> list[int]:
    """Live processes of the job of ``out``: its supervisor, which is known by its handle, the
    launcher and the ranks, which name its file, and what any of these have started."""
    import psutil

    job, supervisor, found = (out / "job.json").resolve(), _supervisor(out), set[int]()
    for process in psutil.process_iter():
        with suppress(psutil.Error):
            if process.pid == supervisor or _names(process, job):
                family = [process, *process.children(recursive=True)]
                found |= {each.pid for each in family if _is_at_work(each)}
    return sorted(found)


def processes_of(out: Path) -> int:
    """How many processes the job of ``out`` has now, its supervisor among them."""
    import psutil

    with suppress(psutil.Error):
        if supervisor := _supervisor(out):
            return 1 + len(psutil.Process(supervisor).children(recursive=True))
    return 0


def _supervisor(out: Path) -> int | None:
    handle = read(out / supervise.HANDLE)
    return handle["pid"] if handle and supervise.is_alive(handle) else None


def _names(process: "Process", job: Path) -> bool:
    """Whether its command names the file, from where it works if it writes a relative path."""
    named = [word for word in process.cmdline() if word.endswith(job.name)]
    return bool(named) and job in [Path(process.cwd(), word).resolve() for word in named]


def _is_at_work(process: "Process") -> bool:
    import psutil

    with suppress(psutil.NoSuchProcess):
        return process.status() != psutil.STATUS_ZOMBIE
    return False


# --- what Prefect is told


def _client() -> "SyncPrefectClient":
    from prefect.client.orchestration import get_client

    return get_client(sync_client=True)


def _say_that_it_ends(facts: Mapping[str, Any]) -> None:
    """The worker may have called the run cancelled while its ranks still save."""
    from prefect.client.schemas.objects import StateType
    from prefect.states import State

    saving = State(
        type=StateType.CANCELLING,
        name="Stopping",
        message=f"{facts['label']}: the flow is gone, its ranks save and end",
    )
    with _client() as client:
        run = _read(client, facts["run"])
        if _is_ours(run, facts) and (run.state.is_cancelled() or run.state.is_cancelling()):
            client.set_flow_run_state(run.id, saving, force=True)


def _is_ours(run: Any, facts: Mapping[str, Any]) -> bool:
    """Whether the run has not been started again since, and does not wait for a person."""
    waits = run.state.is_scheduled() or run.state.is_pending() or run.state.is_paused()
    return run.run_count <= facts["attempt"] and not waits


def _correct(
    client: "SyncPrefectClient", facts: Mapping[str, Any], ending: Ending, *, patience: float
) -> None:
    """Set the state until nobody has another word on it; then settle the tasks. Neither is touched
    once the run has been started again: they are the next attempt's.

    A run that is still being cancelled is its worker's first: Retry is offered as soon as it is
    called cancelled, and a worker that comes later would end the retried run."""
    run = _read(client, facts["run"])
    cancelled = run.state.is_cancelled() or run.state.is_cancelling()
    if "ending" not in facts and cancelled:
        ending = Ending("Cancelled", f"cancelled {stopped(facts)}", "CANCELLED")
    began = time.monotonic()
    deadline = began + (patience if ending.type == "CANCELLED" else 0.0)
    its_word = min(deadline, began + WORD_SECONDS)
    while _is_ours(run, facts):
        now = time.monotonic()
        awaited = run.state.is_cancelling() and now < its_word and worker_is_alive(facts)
        if not awaited and not _says(run.state, ending):
            client.set_flow_run_state(run.id, ending.state(), force=True)
        if now >= deadline:
            _settle_tasks(client, facts["run"], ending)
            break
        time.sleep(POLL_SECONDS)
        run = _read(client, facts["run"])


def _says(state: Any, ending: Ending) -> bool:
    return (state.type.value, state.name, state.message or "") == (
        ending.type,
        ending.name,
        ending.message,
    )


def _settle_tasks(client: "SyncPrefectClient", run: str, ending: Ending) -> None:
    from uuid import UUID

    from prefect.client.schemas.filters import FlowRunFilter, FlowRunFilterId

    wanted = FlowRunFilter(id=FlowRunFilterId(any_=[UUID(run)]))
    for task in client.read_task_runs(flow_run_filter=wanted):
        if task.state is not None and not task.state.is_final():
            client.set_task_run_state(task.id, ending.state(), force=True)


def _read(client: "SyncPrefectClient", run: str) -> Any:
    """The run, once the server answers."""
    from uuid import UUID

    import httpx
    from prefect.exceptions import PrefectHTTPStatusError

    deadline = time.monotonic() + SERVER_SECONDS
    while True:
        try:
            return client.read_flow_run(UUID(run))
        except (httpx.TransportError, PrefectHTTPStatusError):
            if time.monotonic() >= deadline:
                raise
            time.sleep(10 * POLL_SECONDS)


if __name__ == "__main__":
    main(sys.argv[1:])
