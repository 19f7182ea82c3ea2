"""The process beside a run that keeps its Prefect history.

Started by ``flows.prefect_server`` and by nothing else. It finds the configured API, or serves one
of its own for as long as the run lasts, and closes the history of a run that was killed. It answers
on standard output in JSON lines: ``{"log": path}``, any number of ``{"say": text}``, then one
``{"url", "temporary"}`` when that API answers. On standard input it is told of a flow run, of
each of its tasks and of its end; the end of the input, however it comes about, is the end of the
process.
"""

import asyncio
import fcntl
import gc
import json
import os
import re
import socket
import sqlite3
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import closing, contextmanager
from functools import partial
from pathlib import Path
from typing import IO, Any

SETTINGS = {
    "PREFECT_UI_ENABLED": "false",
    "PREFECT_SERVER_ANALYTICS_ENABLED": "false",
    "PREFECT_SERVER_LOGGING_LEVEL": "WARNING",
    "PREFECT_SERVER_DATABASE_MIGRATE_ON_START": "false",  # `migrate` does it, one at a time
    # The next real server registers the block types; without the second line it would believe
    # that this one had.
    "PREFECT_SERVER_REGISTER_BLOCKS_ON_START": "false",
    "PREFECT_SERVER_MEMOIZE_BLOCK_AUTO_REGISTRATION": "false",
}

HEALTH_SECONDS = 2.0
"""A configured server that says nothing for so long does not answer."""

SETTLE_SECONDS = 5.0
"""How long the last states may take from the event queue to the database."""

EXIT_SECONDS = 15.0
"""After its input has ended, the process is gone within this time, whatever hangs."""


def main() -> None:
    answers = os.fdopen(os.dup(sys.stdout.fileno()), "w", buffering=1)
    os.environ.update(SETTINGS, DO_NOT_TRACK="1")
    gc.disable()  # a quarter of the seconds that the imports below take
    import prefect.settings

    settings = prefect.settings.get_current_settings()
    if url := answering(answers):
        tell(answers, url=url, temporary=False)
        keep_history(temporary=False)
    else:
        tell(answers, say="starting a temporary Prefect server for this run: some seconds")
        log_to(settings.home / "temporary-server.log", answers)
        migrate(settings.home / "temporary-server.lock", answers)
        serve(answers)
    os._exit(0)  # all is stored; taking down the interpreter would need two more seconds


def tell(answers: IO[str], **facts: Any) -> None:
    answers.write(json.dumps(facts) + "\n")


def log_to(path: Path, answers: IO[str]) -> None:
    """Everything the server prints goes to ``path``; the terminal belongs to the run."""
    path.parent.mkdir(parents=True, exist_ok=True)
    log = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o600)
    os.dup2(log, sys.stdout.fileno())
    os.dup2(log, sys.stderr.fileno())
    tell(answers, log=str(path))


def answering(answers: IO[str]) -> str | None:
    """The URL of the configured API, or ``None`` when there is none or it does not answer."""
    import httpx
    from prefect.client.orchestration import get_client
    from prefect.exceptions import PrefectHTTPStatusError
    from prefect.settings import get_current_settings

    api = get_current_settings().api
    if not api.url:
        return None
    verify: Any = not api.tls_insecure_skip_verify and (api.ssl_cert_file or True)
    try:
        # Prefect's client retries for longer than a person waits, so ask once without it.
        httpx.get(f"{api.url}/health", timeout=HEALTH_SECONDS, verify=verify)
        with get_client(sync_client=True) as client:
            client.raise_for_api_version_mismatch()  # and it asks with the credentials
    except (httpx.HTTPError, PrefectHTTPStatusError, RuntimeError) as error:
        reason = (str(error) or type(error).__name__).splitlines()[0]
        tell(
            answers,
            say=f"warning: the configured Prefect server {api.url} cannot be used ({reason}); "
            "this run is recorded by a temporary one",
        )
        return None
    return api.url


def migrate(lock: Path, answers: IO[str]) -> None:
    """Bring the database to this Prefect's schema; of two processes one does it."""
    from prefect.server.database import provide_database_interface

    if is_current():
        return
    with exclusive(lock):
        if not is_current():
            tell(answers, say="preparing Prefect's database, once for each version of Prefect")
            asyncio.run(provide_database_interface().create_db())


@contextmanager
def exclusive(lock: Path) -> Iterator[None]:
    with lock.open("w") as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        yield


def is_current() -> bool:
    """Whether an SQLite database stands at the newest migration.

    A cheap stand-in for loading Alembic and its hundred scripts; when in doubt, ``False``.
    """
    import prefect.server.database
    from prefect.settings import PREFECT_SERVER_DATABASE_CONNECTION_URL
    from sqlalchemy.engine import make_url

    url = make_url(PREFECT_SERVER_DATABASE_CONNECTION_URL.value() or "sqlite://")
    if url.get_backend_name() != "sqlite" or not url.database:
        return False
    scripts = Path(prefect.server.database.__file__).parent / "_migrations/versions/sqlite"
    text = "".join(path.read_text(encoding="utf-8") for path in scripts.glob("*.py"))
    named = partial(re.findall, string=text, flags=re.MULTILINE)
    heads = set(named(r"^revision\b.*?= *[\"'](\w+)")) - set(named(r"^down_revision.*[\"'](\w+)"))
    try:
        with closing(sqlite3.connect(f"file:{url.database}?mode=ro", uri=True)) as database:
            rows = database.execute("select version_num from alembic_version").fetchall()
    except sqlite3.OperationalError:
        return False
    return bool(heads) and {row[0] for row in rows} == heads


def serve(answers: IO[str]) -> None:
    """Serve the API on a free port of this machine until standard input ends."""
    import uvicorn
    from prefect.server.api.server import create_app
    from prefect.settings import PREFECT_API_URL, temporary_settings

    # Bound here and handed over, so that nobody can take the port in between.
    listening = socket.create_server(("127.0.0.1", 0))
    url = f"http://127.0.0.1:{listening.getsockname()[1]}/api"

    class Server(uvicorn.Server):
        async def startup(self, sockets: list[socket.socket] | None = None) -> None:
            await super().startup(sockets)
            gc.enable()
            tell(answers, url=url, temporary=True)
            answers.close()

    with temporary_settings({PREFECT_API_URL: url}):
        config = uvicorn.Config(
            create_app(ephemeral=True, final=True),
            log_level="error",
            timeout_graceful_shutdown=2,
        )
        server = Server(config)
        threading.Thread(target=end_with_input, args=(server, url), daemon=True).start()
        server.run(sockets=[listening])


def end_with_input(server: Any, url: str) -> None:
    """End the server when the run has ended and its history is in order."""
    from prefect.settings import PREFECT_API_URL, temporary_settings

    try:
        with temporary_settings({PREFECT_API_URL: url}):
            keep_history(temporary=True)
    finally:
        server.should_exit = True


def keep_history(*, temporary: bool) -> None:
    """Wait for the end of standard input, then settle what it told of."""
    told = [line.split() for line in sys.stdin]
    threading.Timer(EXIT_SECONDS, os._exit, args=(1,)).start()
    # What a server has stored of an ended run stays; ours may still have it in a queue.
    ended = {run for kind, run in told if kind == "end" and not temporary}
    for run in (run for kind, run in told if kind == "run" and run not in ended):
        num_tasks = sum(task == run for kind, task in told if kind == "task")
        settle(run, num_tasks=num_tasks, temporary=temporary)


def settle(run: str, *, num_tasks: int, temporary: bool) -> None:
    """A run that was cut off has crashed; of another the last states are stored before we go."""
    from uuid import UUID

    from prefect.client.orchestration import get_client
    from prefect.client.schemas.filters import FlowRunFilter, FlowRunFilterId
    from prefect.states import Crashed

    flow_run_id = UUID(run)
    ours = FlowRunFilter(id=FlowRunFilterId(any_=[flow_run_id]))
    crashed = Crashed(message="The process that carried out this run ended before the run did.")
    with get_client(sync_client=True) as client:
        stored = partial(client.read_task_runs, flow_run_filter=ours)
        if is_final(client.read_flow_run(flow_run_id)):
            if temporary:
                wait_until(lambda: sum(map(is_final, stored())) >= num_tasks)
            return
        client.set_flow_run_state(flow_run_id, crashed, force=True)
        wait_until(lambda: len(stored()) >= num_tasks)
        for task in stored():
            if not is_final(task):
                client.set_task_run_state(task.id, crashed, force=True)


def is_final(run: Any) -> bool:
    return run.state is not None and run.state.is_final()


def wait_until(condition: Callable[[], bool]) -> None:
    deadline = time.monotonic() + SETTLE_SECONDS
    while time.monotonic() < deadline and not condition():
        time.sleep(0.05)


if __name__ == "__main__":
    main()
