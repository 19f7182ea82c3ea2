"""A run as a Prefect flow run: real servers, real runs, and the history that they leave."""

import json
import os
import signal
import socket
import subprocess
import sys
import time
import urllib.request
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import psutil
import pytest

from backends.placement import supervise
from flows.failures import CANCELLED, StageFailed
from flows.prefect_engine import Outcome
from tests.flows import product

ROOT = Path(__file__).parents[2]

PIPELINE = '''
import sys
import time
from pathlib import Path

from configs import Config
from flows.prefect_engine import run_flow
from flows.steps import Artifact

ERROR = ValueError("dpo.config.beta: -1 is not positive\\nthe second line of the message")


class Pipeline(Config):
    seconds: float = 0.0
    """How long the stage sft takes."""

    fails: bool = False


def run(stage, step, *, label, **inputs):
    print("stage", label, flush=True)
    if stage == "sft":
        time.sleep(step.seconds)
    if stage == "dpo" and step.fails:
        raise ERROR
    status = {"fetch": "reused", "sft": "resumed"}.get(stage, "ran")
    return Artifact(label, stage, Path(label), label, status)


def body(config, run):
    model = run("fetch", config, label="fetch {model}")
    policy = run("sft", config, label="sft", model=model)
    return run("dpo", config, label="dpo", policy=policy)


if __name__ == "__main__":
    name, options = sys.argv[1], sys.argv[2]
    config = Pipeline.model_validate_json(options)
    try:
        result = run_flow(body, config, run, name="test", run_name=name, say=print)
    except ValueError as error:
        print("original" if error is ERROR else f"{type(error).__name__}: {error}")
        sys.exit(1)
    print("result", result.path)
'''

STARTING = "starting a temporary Prefect server for this run: some seconds"
STAGES = ["stage fetch {model}", "stage sft", "stage dpo"]


@pytest.fixture(scope="session")
def home(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """One Prefect home for all, because its database takes ten seconds to make."""
    return tmp_path_factory.mktemp("prefect")


@pytest.fixture(scope="session")
def script(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("pipeline") / "pipeline.py"
    path.write_text(PIPELINE)
    return path


def environment(home: Path, **extra: str) -> dict[str, str]:
    """As a newcomer has it: nothing of Prefect is set but where it lives."""
    ours = {name: value for name, value in os.environ.items() if not name.startswith("PREFECT_")}
    return {**ours, "PREFECT_HOME": str(home), "PYTHONPATH": str(ROOT), **extra}


@contextmanager
def started(
    script: Path, home: Path, name: str, options: dict[str, Any] | None = None, **extra: str
) -> Iterator[subprocess.Popen[str]]:
    """The pipeline as a process in a group of its own, as a shell would start it."""
    command = [sys.executable, "-u", str(script), name, json.dumps(options or {})]
    with subprocess.Popen(
        command,
        env=environment(home, **extra),
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        process_group=0,
    ) as process:
        try:
            yield process
        finally:
            process.kill()


def lines_until(process: subprocess.Popen[str], last: str) -> list[str]:
    assert process.stdout
    lines: list[str] = []
    while last not in lines:
        line = process.stdout.readline()
        assert line, f"ended before {last!r}: {lines}"
        lines.append(line.rstrip("\n"))
    return lines


def recorders(process: subprocess.Popen[str]) -> list[psutil.Process]:
    children = psutil.Process(process.pid).children(recursive=True)
    found = [child for child in children if "prefect_recorder.py" in " ".join(child.cmdline())]
    assert len(found) == 1
    return found


def ask(api: str, path: str, query: dict[str, Any] | None = None) -> Any:
    data = None if query is None else json.dumps(query).encode()
    headers = {"Content-Type": "application/json"}
    with urllib.request.urlopen(urllib.request.Request(f"{api}{path}", data, headers)) as reply:
        return json.load(reply)


def history(api: str, name: str) -> tuple[dict[str, Any], dict[str, dict[str, Any]]]:
    """The one flow run called ``name``, and its task runs by name."""
    (run,) = ask(api, "/flow_runs/filter", {"flow_runs": {"name": {"any_": [name]}}})
    tasks = ask(api, "/task_runs/filter", {"flow_runs": {"id": {"any_": [run["id"]]}}})
    return run, {task["name"]: task for task in tasks}


def states(api: str, name: str) -> list[str]:
    """State names: the flow run's, then those of its tasks in the order of the pipeline.

    A task whose name or state has not arrived yet counts as ``?``.
    """
    run, tasks = history(api, name)
    known = [tasks[label] for label in ("fetch {model}", "sft", "dpo") if label in tasks]
    named = [task["state"]["name"] if task["state"] else "?" for task in known]
    return [run["state"]["name"], *named, *("?" for _ in range(len(tasks) - len(known)))]


def arrives(api: str, name: str, wanted: list[str]) -> None:
    """A server takes in the events of tasks when it has the time."""
    deadline = time.monotonic() + 20
    while states(api, name) != wanted and time.monotonic() < deadline:
        time.sleep(0.1)
    assert states(api, name) == wanted


@pytest.fixture(scope="session")
def first_runs(script: Path, home: Path) -> list[tuple[int, list[str]]]:
    """Exit code and lines of two runs that meet in a home which has no database yet."""
    assert not list(home.iterdir())
    with started(script, home, "first") as one, started(script, home, "second") as other:
        outputs = [process.communicate()[0].splitlines() for process in (one, other)]
        return [(one.returncode, outputs[0]), (other.returncode, outputs[1])]


@pytest.fixture(scope="session")
def api(first_runs: Any, home: Path) -> Iterator[str]:
    """What `prefect server start` shows later, in the same home."""
    with socket.create_server(("127.0.0.1", 0)) as free:
        port = free.getsockname()[1]
    command = [sys.executable, "-m", "prefect", "server", "start", "--port", str(port), "--no-ui"]
    url = f"http://127.0.0.1:{port}/api"
    log = (home / "later-server.log").open("w")
    with log, subprocess.Popen(command, env=environment(home), stdout=log, stderr=log) as server:
        try:
            while server.poll() is None and not answers(url):
                time.sleep(0.1)
            yield url
        finally:
            server.terminate()


def answers(url: str) -> bool:
    try:
        return ask(url, "/health")
    except OSError:
        return False


def test_two_runs_at_once_share_a_new_home_and_say_little(
    first_runs: list[tuple[int, list[str]]],
) -> None:
    migrating = "preparing Prefect's database, once for each version of Prefect"
    for code, lines in first_runs:
        assert code == 0, lines
        assert [line for line in lines if line != migrating] == [STARTING, *STAGES, "result dpo"]
    assert sum(lines.count(migrating) for _, lines in first_runs) == 1


def test_a_later_server_shows_what_each_run_did(api: str) -> None:
    for name in ("first", "second"):
        assert states(api, name) == ["Completed", "Reused", "Resumed", "Completed"]
    run, tasks = history(api, "first")
    assert run["parameters"] == {"config": {"seconds": 0.0, "fails": False}}
    upstream = [given["id"] for given in tasks["dpo"]["task_inputs"]["inputs"]]
    assert tasks["sft"]["id"] in upstream


def test_the_configured_server_is_used_and_a_failure_is_told_once(
    api: str, script: Path, home: Path
) -> None:
    with started(script, home, "failing", {"fails": True}, PREFECT_API_URL=api) as process:
        output = process.communicate()[0].splitlines()
    arrives(api, "failing", ["Failed", "Reused", "Resumed", "Failed"])
    run, tasks = history(api, "failing")
    page = api.removesuffix("/api") + f"/runs/flow-run/{run['id']}"
    assert output == [f"Prefect run: {page}", *STAGES, "original"]
    assert process.returncode == 1
    for state in (run["state"], tasks["dpo"]["state"]):
        assert state["message"] == "dpo.config.beta: -1 is not positive"
    logs = ask(api, "/logs/filter", {"logs": {"task_run_id": {"any_": [tasks["dpo"]["id"]]}}})
    assert any("the second line of the message" in log["message"] for log in logs)


def test_ctrl_c_cancels_the_run_and_leaves_no_process(api: str, script: Path, home: Path) -> None:
    with started(script, home, "stopped", {"seconds": 600}) as process:
        lines_until(process, "stage sft")
        found = recorders(process)
        os.killpg(process.pid, signal.SIGINT)
        rest = process.communicate(timeout=30)[0]
    assert process.returncode == -signal.SIGINT
    assert rest.splitlines() == ["stopped"]
    assert not any(recorder.is_running() for recorder in found)
    arrives(api, "stopped", ["Cancelled", "Reused", "Cancelled"])
    assert history(api, "stopped")[0]["state"]["message"] == "stopped by Ctrl-C"


@pytest.mark.parametrize("worker_lives", [True, False])
def test_a_cancelled_run_is_its_workers_first_and_a_retry_stays(
    api: str, home: Path, tmp_path: Path, worker_lives: bool
) -> None:
    flow = product.ask(api, "/flows/", {"name": "kept"})["id"]
    run = product.ask(api, "/flow_runs/", {"flow_id": flow})["id"]

    def set_state(**state: str) -> None:
        product.ask(api, f"/flow_runs/{run}/set_state", {"state": state, "force": True})

    def state() -> tuple[str, str]:
        found = product.ask(api, f"/flow_runs/{run}")["state"]
        return found["name"], found["message"] or ""

    set_state(type="RUNNING", name="Running")
    set_state(type="CANCELLING", name="Stopping", message="cancelled at sft, 0 left")
    word = {"name": "Cancelled", "message": "cancelled at sft, 0 left", "type": "CANCELLED"}
    with subprocess.Popen(["sleep", "120"]) as worker:
        facts = {
            "run": run,
            "attempt": 1,
            "flow": supervise.identity(worker.pid) | {"started": 1},  # it is gone
            "worker": supervise.identity(worker.pid),
            "ending": word,
        }
        record = tmp_path / "record.json"
        record.write_text(json.dumps(facts))
        if not worker_lives:
            worker.kill()
            worker.wait()
        command = [sys.executable, "-m", "flows.keeper", str(record)]
        with subprocess.Popen(command, env=environment(home, PREFECT_API_URL=api)) as keeper:
            try:
                if worker_lives:
                    speaking = psutil.Process(keeper.pid)
                    product.wait_for(lambda: speaking.net_connections(), 60)
                    time.sleep(3)
                    assert state()[0] == "Stopping"
                    set_state(type="CANCELLED", name="Cancelled", message="the worker's word")
                product.wait_for(lambda: state() == (word["name"], word["message"]), 20)
                set_state(type="SCHEDULED", name="AwaitingRetry")
                assert keeper.wait(30) == 0
                assert state()[0] == "AwaitingRetry"
            finally:
                keeper.kill()
                worker.kill()


def test_a_proxy_is_for_other_machines(first_runs: Any, script: Path, home: Path) -> None:
    nobody = "http://127.0.0.1:9"
    with started(script, home, "proxied", http_proxy=nobody, https_proxy=nobody) as process:
        assert process.communicate()[0].splitlines() == [STARTING, *STAGES, "result dpo"]


def test_a_stage_that_was_asked_to_stop_has_not_failed() -> None:
    outcome = Outcome[None]()
    with outcome:
        raise StageFailed("sft failed (cancelled): asked to stop", kind=CANCELLED)
    assert outcome.state().name == "Preempted"


def test_ctrl_c_while_the_server_starts_ends_at_once(script: Path, tmp_path: Path) -> None:
    with started(script, tmp_path, "unborn") as process:
        lines_until(process, STARTING)
        found = recorders(process)
        os.killpg(process.pid, signal.SIGINT)
        assert process.wait(timeout=10) == -signal.SIGINT
    assert not any(recorder.is_running() for recorder in found)


def killed_in_sft(process: subprocess.Popen[str], api: str, name: str) -> list[str]:
    """Kill the run when its history has come as far; the lines that it printed."""
    lines = lines_until(process, "stage sft")
    found = recorders(process)
    while states(api, name) != ["Running", "Reused", "Running"]:
        time.sleep(0.1)  # the events of the tasks are on their way
    process.kill()
    assert not psutil.wait_procs(found, timeout=30)[1]
    return lines


def test_a_killed_run_is_closed_by_its_recorder(api: str, script: Path, home: Path) -> None:
    options = {"seconds": 600}
    with started(script, home, "killed", options, PREFECT_API_URL=api) as process:
        killed_in_sft(process, api, "killed")
    assert states(api, "killed") == ["Crashed", "Reused", "Crashed"]


def test_a_mute_server_is_reported_and_a_temporary_one_takes_its_place(
    api: str, script: Path, home: Path
) -> None:
    """The configured server accepts connections and says nothing: the run must not hang."""
    with socket.create_server(("127.0.0.1", 0)) as mute:
        url = f"http://127.0.0.1:{mute.getsockname()[1]}/api"
        options = {"seconds": 600}
        with started(script, home, "deaf", options, PREFECT_API_URL=url) as process:
            warning, *others = killed_in_sft(process, api, "deaf")
    assert warning.startswith(f"warning: the configured Prefect server {url} cannot be used (")
    assert others == [STARTING, "stage fetch {model}", "stage sft"]
    assert states(api, "deaf") == ["Crashed", "Reused", "Crashed"]


def test_a_server_that_cannot_start_is_one_clear_line(script: Path, tmp_path: Path) -> None:
    (tmp_path / "prefect.db").write_text("this is no database\n" * 100)
    with started(script, tmp_path, "never") as process:
        *_, last = process.communicate()[0].splitlines()
    assert process.returncode == 1
    assert last == (
        "PrefectError: Prefect's temporary server did not start: sqlite3.DatabaseError: file is "
        f"not a database (in {tmp_path / 'temporary-server.log'}); --engine inline runs "
        "without Prefect"
    )


@pytest.mark.slow
def test_losing_the_server_costs_the_record_and_not_the_run(
    first_runs: Any, script: Path, home: Path
) -> None:
    with started(script, home, "unrecorded", {"seconds": 3}) as process:
        lines_until(process, "stage sft")
        for recorder in recorders(process):
            recorder.kill()
        stage, warning, result = process.communicate(timeout=120)[0].splitlines()
    assert process.returncode == 0
    assert stage == "stage dpo"
    assert warning.startswith("warning: Prefect at http://127.0.0.1:")
    assert result == "result dpo"


def test_importing_the_engine_loads_neither_prefect_nor_torch() -> None:
    code = "import sys, flows.prefect_engine; print({'prefect', 'torch'} & set(sys.modules))"
    command = [sys.executable, "-c", code]
    assert subprocess.check_output(command, cwd=ROOT, text=True) == "set()\n"
