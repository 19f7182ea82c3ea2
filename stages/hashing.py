"""Hashes files as fast as they are read: one thread reads ahead of the one that hashes."""

import os
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from itertools import cycle
from pathlib import Path
from typing import Any

BLOCK = 1 << 22
"""Bytes read at once. Reads as small as those of ``hashlib.file_digest`` keep a disk waiting."""

Hash = Callable[[], Any]
"""A constructor such as ``hashlib.sha256``; what it makes lets other threads run."""


def hash_file(file: Path, kind: Hash) -> str:
    """The hex digest of a file's bytes."""
    whole = kind()
    with file.open("rb", buffering=0) as stream, ThreadPoolExecutor(1) as reader:
        blocks = cycle([memoryview(bytearray(BLOCK)), memoryview(bytearray(BLOCK))])
        block = next(blocks)
        size = stream.readinto(block)  # type: ignore[attr-defined]
        while size:
            following = next(blocks)
            ahead = reader.submit(stream.readinto, following)  # type: ignore[attr-defined]
            whole.update(block[:size])
            block, size = following, ahead.result()
    return whole.hexdigest()


def each(act: Callable[[Path], str], files: Sequence[Path]) -> list[str]:
    """``act`` on each file by all cores, the largest first; the results in the order of ``files``.

    For hashing, and for syncing, which waits for the disk.
    """
    with ThreadPoolExecutor(os.cpu_count()) as threads:
        largest = sorted(files, key=_size, reverse=True)
        done = {file: threads.submit(act, file) for file in largest}
        return [done[file].result() for file in files]


def _size(file: Path) -> int:
    return file.stat().st_size if file.is_file() else 0
