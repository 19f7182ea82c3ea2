"""The files of a whole model: a single one, or several under an index that must be right."""

from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import TypeVar

from stages.base import StageError
from stages.checkpoint.json_files import read_json

T = TypeVar("T")


def member(folder: Path, name: object, *, place: Path) -> Path:
    """The file or folder ``name`` right in ``folder``.

    Raises :class:`StageError` for anything else: a file, ``place``, may not lead a reader away.
    """
    if not isinstance(name, str) or name in ("", "..") or "\0" in name or Path(name).name != name:
        raise StageError(f"{place}: names {name!r}, and what it names must lie in {folder}")
    return folder / name


def weight_map(index: Path) -> dict[str, str]:
    """Tensor name -> file name, as an index says. Raises :class:`StageError`."""
    entries = read_json(index).get("weight_map")
    if not isinstance(entries, dict) or not entries:
        raise StageError(f"{index}: has no weight_map")
    for name in entries.values():
        member(index.parent, name, place=index)
    return entries


def shard_files(singles: Sequence[Path], index: Path) -> tuple[Path, ...]:
    """The files of the model that has one of ``singles``, or those in ``index``, in order.

    Raises :class:`StageError` if several of these are there: loaders do not agree on which counts.
    """
    found = [file for file in (*singles, index) if file.exists()]
    if len(found) > 1:
        names = " and ".join(file.name for file in found)
        raise StageError(
            f"{index.parent}: holds {names}, and which is the model cannot be told; leave one"
        )
    if found != [index]:
        return tuple(found or singles[:1])
    return tuple(index.parent / name for name in sorted(set(weight_map(index).values())))


def read_shards(
    singles: Sequence[Path], index: Path, read: Callable[[Path], Mapping[str, T]]
) -> dict[str, T]:
    """Every tensor of the model, as ``read`` tells of those in a file.

    Raises :class:`StageError` with a line for each file that cannot be read, each entry of the
    index that is not so, and each tensor that stands in two files.
    """
    files = shard_files(singles, index)
    mapped = weight_map(index) if index.is_file() else None
    places: dict[str, Path] = {}
    tensors: dict[str, T] = {}
    faults: list[str] = []
    for file in files:
        try:
            held = read(file)
        except StageError as error:
            faults += str(error).splitlines()
            continue
        if mapped is not None:
            faults += _index_faults(index, file, held, mapped)
        faults += [f"{file}: {n} stands in {places[n]} too" for n in held if n in places]
        places |= dict.fromkeys(held, file)
        tensors |= held
    if faults:
        raise StageError("\n".join(faults))
    return tensors


def _index_faults(
    index: Path, file: Path, held: Mapping[str, object], mapped: Mapping[str, str]
) -> Iterator[str]:
    listed = {name for name, of in mapped.items() if of == file.name}
    for name in sorted(listed - held.keys()):
        yield f"{index}: says that {name} is in {file.name}, where it is not"
    for name in sorted(held.keys() - mapped.keys()):
        yield f"{index}: does not list {name}, which is in {file.name}"
