"""Which files a folder holds: one look for all who read, copy or hash them."""

from collections.abc import Collection, Iterable, Sequence
from glob import glob
from pathlib import Path

from stages.base import StageError


def walk(folder: Path) -> tuple[list[str], list[str]]:
    """The files under ``folder`` by name, and what is left out: devices, a folder seen before.

    Links to folders are followed. Raises :class:`StageError` for a link that leads nowhere and for
    one that leads back into a folder that holds it. Hidden files and folders do not count.
    """
    names: list[str] = []
    left_out: list[str] = []
    seen: set[Path] = set()

    def enter(place: Path, above: tuple[Path, ...]) -> None:
        real = place.resolve()
        if real in above:
            raise StageError(f"{place}: a link into a folder that holds it; remove the link")
        if real in seen:
            left_out.append(place.relative_to(folder).as_posix())
            return
        seen.add(real)
        for path in sorted(place.iterdir(), key=lambda path: (path.is_symlink(), path.name)):
            if path.name.startswith("."):
                continue
            if path.is_dir():
                enter(path, (*above, real))
            elif path.is_file():
                names.append(path.relative_to(folder).as_posix())
            else:
                _refuse_lost(path)
                left_out.append(path.relative_to(folder).as_posix())

    enter(folder, ())
    return in_order(names), sorted(left_out)


def matching(folder: Path, patterns: Collection[str]) -> list[str]:
    """Names of what lies where the patterns say, in ``folder`` or in linked folders in it, but for
    folders. As in a shell ``*`` stands neither for ``/`` nor for the dot of a hidden file.
    """
    # Path.glob takes hidden files for others, and some lost links for nothing.
    found = {name for pattern in patterns for name in glob(pattern, root_dir=folder)}  # noqa: PTH207
    return in_order(name for name in found if not (folder / name).is_dir())


def require_files(folder: Path, names: Sequence[str]) -> None:
    """Raise :class:`StageError` for the first of ``names`` in ``folder`` that is no file."""
    for name in names:
        _refuse_lost(folder / name)
        if not (folder / name).is_file():
            raise StageError(f"{folder / name}: neither a file nor a folder; remove it")


def in_order(names: Iterable[str]) -> list[str]:
    """``names`` as they stand in a listing, folder by folder."""
    return sorted(names, key=lambda name: Path(name).parts)


def _refuse_lost(path: Path) -> None:
    if not path.exists():
        raise StageError(f"{path}: a link that leads nowhere; mend or remove it")
