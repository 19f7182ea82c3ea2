"""The whole product in a test: its own server, worker and home, on a free port."""

import json
import os
import re
import signal
import socket
import subprocess
import sys
import time
import urllib.error
import urllib.request
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import psutil

from tests.small import ENV

# The tiny recipe with less of everything: half a minute of training at most.
SHORT = [
    "conversations.config.source.rows=450",
    "preferences.config.source.rows=150",
    "sft.config.max_steps=12",
    "dpo.config.max_steps=4",
    "sft.save_every=4",
    "evaluate.config.generate_rows=8",
]
# Long enough to be stopped in the middle, saved every few steps.
ENDLESS = ["sft.config.max_steps=2000", "sft.config.epochs=200", "sft.save_every=5"]


@dataclass(frozen=True)
class Product:
    """A running `make ui`."""

    process: subprocess.Popen[str]
    home: Path
    url: str
    lines: list[str]
    """What it printed until it was ready."""

    @property
    def api(self) -> str:
        return f"{self.url}/api"


def free_port() -> int:
    with socket.create_server(("127.0.0.1", 0)) as free:
        return free.getsockname()[1]


def environment(home: Path, **extra: str) -> dict[str, str]:
    ours = {name: value for name, value in os.environ.items() if not name.startswith("PREFECT_")}
    return {**ours, **ENV, "PREFECT_HOME": str(home / "prefect"), **extra}


@contextmanager
def serving(home: Path, port: int | None = None, **settings: str) -> Iterator[Product]:
    """Start it and stop it as a person at a terminal does: with Ctrl-C. ``settings`` are further
    environment variables."""
    port = port or free_port()
    command = [sys.executable, "-u", "-m", "flows.serve", "--port", str(port)]
    with subprocess.Popen(
        command, env=environment(home, **settings), cwd=home, text=True,
        stdout=subprocess.PIPE, stderr=subprocess.STDOUT, process_group=0,
    ) as process:  # fmt: skip
        try:
            lines = _until_ready(process)
            yield Product(process, home, f"http://127.0.0.1:{port}", lines)
        finally:
            if process.poll() is None:
                os.killpg(process.pid, signal.SIGINT)
            try:
                process.wait(120)
            except subprocess.TimeoutExpired:
                process.kill()


def _until_ready(process: subprocess.Popen[str]) -> list[str]:
    assert process.stdout
    lines: list[str] = []
    while not any("Ctrl-C ends it" in line for line in lines):
        line = process.stdout.readline()
        assert line, f"ended before it was ready: {lines}"
        lines.append(line.rstrip("\n"))
    return lines


def ask(api: str, path: str, query: Any = None, method: str | None = None) -> Any:
    data = None if query is None else json.dumps(query).encode()
    headers = {"Content-Type": "application/json"}
    request = urllib.request.Request(f"{api}{path}", data, headers, method=method)
    text = _answer(request)
    return json.loads(text) if text else None


def _answer(request: urllib.request.Request, *, tries: int = 5) -> bytes:
    """A server on SQLite says 503 while that is busy; Prefect's own clients try again too."""
    try:
        with urllib.request.urlopen(request, timeout=30) as reply:
            return reply.read()
    except urllib.error.HTTPError as error:
        if error.code != 503 or tries == 1:
            raise
    time.sleep(1.0)
    return _answer(request, tries=tries - 1)


def refused(api: str, path: str, query: Any) -> tuple[int, str]:
    """The status and the reason of a request that is not taken."""
    try:
        ask(api, path, query)
    except urllib.error.HTTPError as error:
        return error.code, error.read().decode()
    raise AssertionError(f"{path} took {query}")


def deployment(api: str, name: str) -> dict[str, Any]:
    return ask(api, f"/deployments/name/{name}")


def submit(api: str, name: str, **parameters: Any) -> dict[str, Any]:
    """Start a run of a deployment; what is not given is its preset."""
    where = f"/deployments/{deployment(api, name)['id']}/create_flow_run"
    return ask(api, where, {"parameters": parameters})


def run_of(api: str, run: str) -> dict[str, Any]:
    return ask(api, f"/flow_runs/{run}")


FINAL = ("COMPLETED", "FAILED", "CRASHED", "CANCELLED")


def until(api: str, run: str, *names: str, seconds: float = 240.0) -> dict[str, Any]:
    """The run once its state has one of the names; without any, once it has ended."""
    deadline = time.monotonic() + seconds
    while True:
        found = run_of(api, run)
        state = found["state"]
        if state["name"] in names or (not names and state["type"] in FINAL):
            return found
        ended = state["type"] in FINAL and names
        assert not ended, f"ended as {state['name']}: {state['message']}\n{log_of(api, run)}"
        assert time.monotonic() < deadline, f"still {state}\n{log_of(api, run)}"
        time.sleep(0.3)


def until_any(api: str, runs: Sequence[str], name: str, seconds: float) -> dict[str, Any]:
    """The first of some runs whose state has this name."""
    deadline = time.monotonic() + seconds
    while True:
        for found in (run_of(api, run) for run in runs):
            if found["state"]["name"] == name:
                return found
        assert time.monotonic() < deadline, f"none is {name}"
        time.sleep(0.3)


def tasks_of(api: str, run: str) -> dict[str, str]:
    """The name of each task of a run, and that of its newest state."""
    query = {"flow_runs": {"id": {"any_": [run]}}, "sort": "EXPECTED_START_TIME_ASC"}
    found = ask(api, "/task_runs/filter", query)
    return {each["name"]: each["state"]["name"] for each in found if each["state"]}


def until_tasks(api: str, run: str, right: Callable[[dict[str, str]], bool]) -> None:
    """Wait until the states of a run's tasks are as they should be: Prefect sends them as events,
    and its server writes them down some time after the run's own state."""
    deadline = time.monotonic() + 60
    while not right(found := tasks_of(api, run)):
        assert time.monotonic() < deadline, found
        time.sleep(0.3)


def artifacts_of(api: str, run: str) -> list[dict[str, Any]]:
    return ask(api, "/artifacts/filter", {"flow_runs": {"id": {"any_": [run]}}})


def page_of(api: str, run: str, start: str) -> str:
    """The Markdown artifact whose description starts so."""
    found = [each for each in artifacts_of(api, run) if each["description"].startswith(start)]
    assert len(found) == 1, [each["description"] for each in found]
    return found[0]["data"]


def log_of(api: str, run: str) -> str:
    query = {"logs": {"flow_run_id": {"any_": [run]}}, "sort": "TIMESTAMP_ASC"}
    return "\n".join(line["message"] for line in ask(api, "/logs/filter", query))


def cancel(api: str, run: str) -> None:
    """As the UI does it."""
    state = {"type": "CANCELLING", "name": "Cancelling"}
    ask(api, f"/flow_runs/{run}/set_state", {"state": state})


def retry(api: str, run: str) -> None:
    """As the UI does it."""
    state = {"type": "SCHEDULED", "name": "AwaitingRetry", "message": "Retry from the UI"}
    ask(api, f"/flow_runs/{run}/set_state", {"state": state, "force": True})


def resume(api: str, run: str, **answer: Any) -> Any:
    """As the UI does it, with what its form was filled in with; what the server says."""
    return ask(api, f"/flow_runs/{run}/resume", {"run_input": answer or None})


def flow_processes(home: Path) -> list[psutil.Process]:
    """The processes of the deployed runs at work."""
    return [
        each
        for each in psutil.process_iter()
        if "prefect.engine" in " ".join(cmdline(each)) and cwd(each) == str(home)
    ]


def cmdline(process: psutil.Process) -> list[str]:
    try:
        return process.cmdline()
    except psutil.Error:
        return []


def cwd(process: psutil.Process) -> str:
    try:
        return process.cwd()
    except psutil.Error:
        return ""


def processes(home: Path) -> list[str]:
    """Command lines of the live processes that work below ``home``: ranks, launchers, flows."""
    found = [(" ".join(cmdline(each)), cwd(each)) for each in psutil.process_iter()]
    return [words for words, where in found if where == str(home) or str(home) in words]


def ranks(home: Path) -> list[str]:
    return [words for words in processes(home) if "job.json" in words]


def steps_done(home: Path, stage: str) -> int:
    """The newest step that a stage of the store has written down."""
    files = list((home / "store" / stage).glob("*/metrics.jsonl"))
    texts = [path.read_text() for path in files]
    return max((int(n) for text in texts for n in re.findall(r'"step": ?(\d+)', text)), default=0)


def wait_for(condition: Any, seconds: float = 180.0) -> None:
    deadline = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < deadline, "did not come about"
        time.sleep(0.2)


def config_with(api: str, name: str, changes: Mapping[str, Any]) -> dict[str, Any]:
    """The deployment's preset with values at dotted keys, as an edited form sends it."""
    config = deployment(api, name)["parameters"]["config"]
    for key, value in changes.items():
        *parents, leaf = key.split(".")
        node = config
        for parent in parents:
            node = node[parent]
        node[leaf] = value
    return config
