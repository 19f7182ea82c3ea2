"""Who has which GPU of this machine: one job at a time, held by locks that the kernel frees."""

import fcntl
import os
import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from pathlib import Path

WAIT_SECONDS = 0.5


def folder() -> Path:
    """Shared by all who use the machine, as the GPUs are, whatever their TMPDIR."""
    return Path("/tmp/gpu-slots")


def take(
    count: int,
    *,
    visible: Sequence[str],
    poll: Callable[[], None],
    queued: Callable[[str], None] = lambda why: None,
) -> tuple[list[str], list[int]]:
    """``count`` of the ``visible`` GPUs that no other job holds, and their locks' descriptors.

    Waits until so many are free, calling ``poll`` meanwhile; ``queued`` is told when that begins,
    and the empty text when it is over. Either all are taken or none, so that
    two jobs never wait for each other. The GPUs are the caller's until every copy of the
    descriptors is closed.
    """
    assert count <= len(visible), f"{count} GPUs of {list(visible)}"
    taken = _free(count, visible)
    if len(taken) < count:
        queued(f"waits for {count} of {len(visible)} GPUs; {len(taken)} not in use by other jobs")
        while len(taken) < count:
            release(list(taken.values()))
            poll()
            time.sleep(WAIT_SECONDS)
            taken = _free(count, visible)
        queued("")
    return list(taken), list(taken.values())


def _free(count: int, visible: Sequence[str]) -> dict[str, int]:
    """At most ``count`` GPUs that no other job holds, and the descriptors of their locks."""
    taken: dict[str, int] = {}
    for name in visible:
        if len(taken) < count and (lock := _lock(name)) is not None:
            taken[name] = lock
    return taken


def release(locks: Sequence[int]) -> None:
    """Close descriptors that `take` gave."""
    for lock in locks:
        os.close(lock)


def _lock(name: str) -> int | None:
    where = folder()
    where.mkdir(exist_ok=True)
    with suppress(PermissionError):
        where.chmod(0o1777)
    path = where / f"{name.replace('/', '_')}.lock"  # parts of a GPU have names with slashes
    try:
        # Another user's file need not be written to be locked, and in a folder for all users the
        # kernel refuses to open it as if to create it.
        file = os.open(path, os.O_RDONLY)
    except FileNotFoundError:
        file = os.open(path, os.O_RDONLY | os.O_CREAT, 0o644)
        os.fchmod(file, 0o644)  # whatever the umask
    try:
        fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        os.close(file)
        return None
    return file
