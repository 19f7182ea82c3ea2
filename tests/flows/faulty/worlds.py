"""What surrounds a job and breaks it from outside: disks, memory, clocks, ports, data."""

import os
import shutil
import socket
import subprocess
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager, suppress
from dataclasses import dataclass, field
from pathlib import Path

GROUPS = Path("/sys/fs/cgroup/memory")
CLOCK = Path(__file__).with_name("clock.c")
LIMIT = 3_200_000_000
"""Bytes for a flow and two ranks."""


class Unavailable(Exception):
    """This machine cannot make such a world."""


def nothing() -> None:
    """No cause to remove."""


@dataclass
class World:
    """Where a job runs."""

    folder: Path
    """Its inputs."""

    store: Path
    env: Mapping[str, str] = field(default_factory=dict)
    enter: Callable[[], object] | None = None
    """Called in the flow's process before it starts."""

    repair: Callable[[], object] = nothing
    """Remove what makes the job fail, before the same command is typed again."""


Make = Callable[[Path, Path], AbstractContextManager[World]]


@contextmanager
def plain(folder: Path, store: Path) -> Iterator[World]:
    yield World(folder, store)


def _run(*argv: str) -> None:
    done = subprocess.run(argv, capture_output=True, text=True, check=False)
    if done.returncode:
        raise Unavailable(done.stderr.strip() or f"{argv[0]} refused")


@contextmanager
def _own_disk(store: Path) -> Iterator[None]:
    store.mkdir(parents=True)
    _run("mount", "-t", "tmpfs", "-o", "size=64m", "tmpfs", str(store))
    try:
        yield
    finally:
        _run("umount", "--lazy", str(store))


@contextmanager
def small_disk(folder: Path, store: Path) -> Iterator[World]:
    """A disk of its own, which :func:`fill` fills."""
    with _own_disk(store):
        yield World(folder, store, repair=(store / "filler").unlink)


def fill(store: Path, *, but: int = 0) -> None:
    """Take the store's disk to the last byte, ``but`` for so many."""
    with (store / "filler").open("wb", buffering=0) as file:
        with suppress(OSError):
            while True:
                file.write(bytes(4096))
        file.truncate(file.tell() - but)


@contextmanager
def read_only_disk(folder: Path, store: Path) -> Iterator[World]:
    with _own_disk(store):
        _run("mount", "-o", "remount,ro", str(store))
        yield World(folder, store, repair=lambda: _run("mount", "-o", "remount,rw", str(store)))


@contextmanager
def damaged_data(folder: Path, store: Path) -> Iterator[World]:
    """Tokenised rows whose file was cut short."""
    copy = store.with_name(f"{store.name}-inputs")
    shutil.copytree(folder, copy)
    rows = next(copy.glob("data/conversations/train/*.arrow"))
    whole = rows.read_bytes()
    rows.write_bytes(whole[: len(whole) // 2])
    yield World(copy, store, repair=lambda: rows.write_bytes(whole))


@contextmanager
def taken_port(folder: Path, store: Path) -> Iterator[World]:
    """The port that torch meets at unless it is told otherwise."""
    with socket.socket() as taken:
        with suppress(OSError):  # somebody else's: as good
            taken.bind(("127.0.0.1", 29500))
            taken.listen()
        yield World(folder, store)


@contextmanager
def movable_clock(folder: Path, store: Path) -> Iterator[World]:
    """A time of day that :func:`jump` moves, for the flow and every process of the job."""
    library, offset = (store.with_name(f"{store.name}-clock.{kind}") for kind in ("so", "txt"))
    if shutil.which("gcc") is None:
        raise Unavailable("needs gcc")
    _run("gcc", "-shared", "-fPIC", "-o", str(library), str(CLOCK))
    offset.write_text("0")
    yield World(folder, store, env={"LD_PRELOAD": str(library), "OFFSET_FILE": str(offset)})


def jump(store: Path) -> None:
    """Two days forward, and a moment later one day before the start."""
    offset = store.with_name(f"{store.name}-clock.txt")
    for days in (2, -1):
        offset.write_text(str(days * 86_400))
        time.sleep(0.5)


@contextmanager
def limited_memory(folder: Path, store: Path) -> Iterator[World]:
    """A control group that has room for the job and not for a rank that eats memory."""
    group = GROUPS / f"limited-{os.getpid()}"
    try:
        group.mkdir()
        (group / "memory.limit_in_bytes").write_text(str(LIMIT))
    except OSError as error:
        raise Unavailable(f"needs the right to make control groups ({error})") from None
    try:
        yield World(
            folder, store, enter=lambda: (group / "cgroup.procs").write_text(str(os.getpid()))
        )
    finally:
        group.rmdir()
