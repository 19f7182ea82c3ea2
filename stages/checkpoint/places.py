"""The folders that a conversion leaves: made aside, and put in place once all of them are whole."""

import fcntl
import os
import shutil
import tempfile
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import IO

from stages.base import StageError
from stages.checkpoint import export

FOLDERS = ("adapter", "gguf", "nf4", "model")
"""What may come to ``OUT``, in the order in which it does."""

ASIDE = "convert.partial"
LOCK = "convert.lock"


@contextmanager
def aside(out: Path, *, inputs: Iterable[Path], replace: bool) -> Iterator[Path]:
    """An empty ``OUT/convert.partial`` that nobody else writes to, and that is gone afterwards.

    What an interrupted conversion left in it is removed, and nothing else. Raises
    :class:`StageError` while another conversion writes to ``out``, for one of ``inputs`` that lies
    in what :func:`put_in_place` would move away, and unless ``replace`` if there is any such.
    """
    inputs = list(inputs)
    _refuse_no_folders(out)
    _refuse_own_inputs(out, inputs)
    if not replace:
        _refuse_taken(out / name for name in FOLDERS)
    out.mkdir(parents=True, exist_ok=True)
    folder = out / ASIDE
    with _only_writer(out):
        shutil.rmtree(folder, ignore_errors=True)
        folder.mkdir()
        try:
            yield folder
        finally:
            shutil.rmtree(folder)


def put_in_place(made: Path, out: Path) -> None:
    """Move the folders in ``made`` to ``out``; what an earlier conversion left there makes room."""
    for name in FOLDERS:
        if (made / name).is_dir():
            export.sync(made / name)
    earlier = made / "earlier"
    earlier.mkdir()
    for name in FOLDERS:
        if (out / name).is_dir():
            (out / name).rename(earlier / name)
    for name in FOLDERS:
        if (made / name).is_dir():
            (made / name).rename(out / name)


@contextmanager
def new_folder(out: Path) -> Iterator[Path]:
    """An empty folder that becomes ``out`` if all goes well, and leaves nothing otherwise.

    Raises :class:`StageError` if ``out`` is there already.
    """
    _refuse_taken([out])
    out.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(
        dir=out.parent, prefix=f".{out.name}.", suffix=".partial"
    ) as holder:
        folder = Path(holder) / out.name
        folder.mkdir()
        yield folder
        export.sync(folder)
        folder.rename(out)


def _refuse_no_folders(out: Path) -> None:
    if os.path.lexists(out) and not out.is_dir():
        raise StageError(f"{out}: is no folder; give one for the result")
    for path in (out / name for name in (*FOLDERS, ASIDE)):
        if path.is_symlink() or path.is_file():
            what = "a link" if path.is_symlink() else "a file"
            raise StageError(f"{path}: is {what}, and a conversion makes a folder of that name")


def _refuse_own_inputs(out: Path, inputs: Iterable[Path]) -> None:
    """Linked files of an input count where they lie."""
    replaced = [(out / name).resolve() for name in (*FOLDERS, ASIDE)]
    for given in inputs:
        for path in (given, *(path for path in given.rglob("*") if path.is_symlink())):
            place = next((p for p in replaced if path.resolve().is_relative_to(p)), None)
            if place:
                raise StageError(
                    f"{path}: lies in {place}, in whose place the result would come; "
                    "give another folder for the result"
                )


def _refuse_taken(places: Iterable[Path]) -> None:
    if taken := [place for place in places if os.path.lexists(place)]:
        raise StageError(
            f"{taken[0]}: is there already; give another folder for the result, or remove it"
        )


@contextmanager
def _only_writer(out: Path) -> Iterator[None]:
    """Hold the lock of ``out``, which the kernel frees when its holder is gone."""
    path = out / LOCK
    with path.open("w") as file:
        if not _locked(file, path):
            raise StageError(
                f"{out}: another conversion writes to it; wait for its end, or give another folder"
            )
        try:
            yield
        finally:
            path.unlink()


def _locked(file: IO[str], path: Path) -> bool:
    """Whether ``file`` is locked now, and is still what lies at ``path``: a holder removes it."""
    try:
        fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        return os.path.samestat(path.stat(), os.fstat(file.fileno()))
    except (BlockingIOError, FileNotFoundError):
        return False
