"""A PostgreSQL of its own for a test, on a free port of loopback."""

import os
import pwd
import secrets
import shutil
import signal
import subprocess
import tempfile
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from tests.flows.product import free_port
from tests.small import ROOT

FOLDERS = sorted(Path("/usr/lib/postgresql").glob("*/bin"), reverse=True)
INITDB = shutil.which("initdb") or next((str(f / "initdb") for f in FOLDERS), None)
"""Debian keeps PostgreSQL's programs off the path."""

WITH_SECRETS = ROOT / "deploy" / "compose" / "with-secrets.sh"
READY_SECONDS = 60.0


@dataclass(frozen=True)
class Database:
    """A running server with an empty database ``prefect``."""

    port: int
    password: str

    @property
    def url(self) -> str:
        """What the containers' entry point makes of their secrets, for Prefect."""
        with tempfile.TemporaryDirectory() as folder:
            (Path(folder) / "postgres_password").write_text(self.password)
            env = {"SECRETS_DIR": folder, "POSTGRES_HOST": f"127.0.0.1:{self.port}"}
            words = [str(WITH_SECRETS), "printenv", "PREFECT_SERVER_DATABASE_CONNECTION_URL"]
            made = subprocess.run(
                words, env=os.environ | env, capture_output=True, text=True, check=True
            )
        return made.stdout.strip()

    def run(self, program: str, *words: str) -> subprocess.CompletedProcess[str]:
        """One of PostgreSQL's own programs on this server."""
        assert INITDB
        command = [str(Path(INITDB).resolve().parent / program), "--host", "127.0.0.1"]
        command += ["--port", str(self.port), "--username", "prefect", "--no-password", *words]
        env = os.environ | {"PGPASSWORD": self.password}
        return subprocess.run(command, env=env, capture_output=True, text=True, check=False)

    def ask(self, query: str) -> str:
        """The one value that an SQL query gives."""
        done = self.run("psql", "--dbname", "prefect", "--tuples-only", "--no-align",
                        "--command", query)  # fmt: skip
        assert done.returncode == 0, done.stderr
        return done.stdout.strip()


@contextmanager
def postgresql() -> Iterator[Database]:
    """Made, started, and at the end stopped and removed."""
    assert INITDB
    database = Database(free_port(), secrets.token_hex(12))
    owner = _owner()
    with tempfile.TemporaryDirectory(prefix="postgresql-") as name:
        folder = Path(name)
        (folder / "password").write_text(database.password)
        if owner:
            for path in (folder, folder / "password"):
                shutil.chown(path, owner["user"], owner["group"])
        data = folder / "data"
        words = ["--username", "prefect", "--pwfile", str(folder / "password")]
        words += ["--auth", "scram-sha-256", "--encoding", "UTF8", "--no-sync"]
        subprocess.run([INITDB, "--pgdata", str(data), *words], cwd=folder, check=True,
                       stdout=subprocess.DEVNULL, **owner)  # fmt: skip
        with _started(database, data, owner):
            yield database


def _owner() -> Mapping[str, Any]:
    """PostgreSQL refuses to be root's: then it is somebody else's who has nothing."""
    if os.geteuid():
        return {}
    known = {each.pw_name: each for each in pwd.getpwall()}
    user = known.get("postgres") or known["nobody"]
    return {"user": user.pw_uid, "group": user.pw_gid, "extra_groups": []}


@contextmanager
def _started(database: Database, data: Path, owner: Mapping[str, Any]) -> Iterator[None]:
    assert INITDB
    command: Sequence[str] = [
        str(Path(INITDB).resolve().parent / "postgres"), "-D", str(data), "-h", "127.0.0.1",
        "-p", str(database.port), "-k", str(data), "-c", "fsync=off",
    ]  # fmt: skip
    log = data.parent / "log"
    with log.open("wb") as out, subprocess.Popen(
        command, cwd=data, stdin=subprocess.DEVNULL, stdout=out, stderr=out,
        start_new_session=True, **owner,
    ) as server:  # fmt: skip
        try:
            deadline = time.monotonic() + READY_SECONDS
            while (made := database.run("createdb", "prefect")).returncode:
                assert server.poll() is None and time.monotonic() < deadline, (
                    f"{made.stderr}\n{log.read_text()}"
                )
                time.sleep(0.2)
            yield
        finally:
            server.send_signal(signal.SIGINT)  # its word for: at once, and in order
            try:
                server.wait(10)
            except subprocess.TimeoutExpired:
                server.kill()
