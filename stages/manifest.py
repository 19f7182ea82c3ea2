"""The file that says a stage finished, and what it was computed from."""

import hashlib
import json
import os
from collections.abc import Mapping, Sequence
from functools import cache
from pathlib import Path
from typing import Any, Protocol, runtime_checkable

from pydantic import Field
from pydantic_core import to_jsonable_python

from configs import Config
from stages import tree
from stages.base import Stage, StageError
from stages.hashing import each, hash_file

NAME = "manifest.json"
NOT_READ = (
    "beats", "checkpoints", "failures", "logs", "ranks", "stacks", "tensorboard", "trackers",
)  # fmt: skip
"""Folders of an output that no later stage reads."""


class Identity(Config):
    """What decides an output. Two equal identities are the same work."""

    stage: str
    version: int
    config: dict[str, Any]
    inputs: dict[str, str]

    @property
    def fingerprint(self) -> str:
        """The first 16 hex digits of the SHA-256 of the canonical JSON."""
        text = json.dumps(self.model_dump(mode="json"), sort_keys=True, ensure_ascii=False)
        return hashlib.sha256(text.encode()).hexdigest()[:16]


@runtime_checkable
class Selective(Protocol):
    """A config that reads some of the files of the folder that its ``path`` names."""

    @property
    def path(self) -> Path: ...

    def read_files(self) -> Sequence[str]:
        """The names in the folder of what is read. Raises ``StageError`` where that is lacking."""
        ...


class Manifest(Config):
    """The record that a stage is done."""

    identity: Identity
    provenance: dict[str, Any] = Field(default_factory=dict)
    """When, where and with what: backend, resources, command, versions, seconds. Not identity."""

    metrics: dict[str, Any] = Field(default_factory=dict)
    files: dict[str, int] = Field(default_factory=dict)
    """Bytes of each file that later stages may read, by its path in the output."""

    checkpoint: dict[str, Any] | None = None
    """Facts about the checkpoint in the output, as ``stages.checkpoint.describe`` gives them."""


def identify(stage: Stage, config: Config, inputs: Mapping[str, str]) -> Identity:
    """The identity of work not yet done; ``inputs`` maps each input to its fingerprint.

    A ``Path`` inside ``config`` counts by the content it points to, and a file by its name too,
    so a moved file is the same file and an edited or renamed one is not. Of a folder counts what a
    :class:`Selective` config reads of it, or else all that is not hidden. Raises
    ``FileNotFoundError`` for a path that is not there, and ``StageError`` for a folder that lacks
    what is to be read.
    """
    return Identity(
        stage=stage.name,
        version=stage.version,
        config=_by_content(config),
        inputs=dict(sorted(inputs.items())),
    )


def _by_content(value: Any) -> Any:
    """``value`` as it stands in a manifest, each path in it by content."""
    if isinstance(value, Config):
        fields = dict(value)
        if isinstance(value, Selective) and value.path.is_dir():
            fields["path"] = _named(digest(value.path, value.read_files()), value.path)
        return _by_content(fields)
    if isinstance(value, Path):
        return _named(digest(value), value)
    if isinstance(value, Mapping):
        return {str(key): _by_content(item) for key, item in value.items()}
    if isinstance(value, (list, tuple, set, frozenset)):
        return [_by_content(item) for item in value]
    return to_jsonable_python(value)


def _named(sha256: str, path: Path) -> str:
    return f"sha256:{sha256} ({'a folder' if path.is_dir() else path.name})"


def digest(path: Path, names: Sequence[str] | None = None) -> str:
    """SHA-256 of a file, or of files of a directory with their names in it.

    They are ``names``, or all that are not hidden, those in linked folders too.
    """
    if not path.exists():
        raise FileNotFoundError(f"{path}: no such file or directory")
    if path.is_file():
        facts = path.stat()
        return _file_digest(path.resolve(), facts.st_size, facts.st_mtime_ns)
    whole = hashlib.sha256()
    ordered = tree.walk(path)[0] if names is None else tree.in_order(names)
    hashes = each(digest, [path / name for name in ordered])
    for name, hashed in zip(ordered, hashes, strict=True):
        whole.update(f"{name}\0{hashed}\n".encode())
    return whole.hexdigest()


@cache
def _file_digest(path: Path, size: int, modified: int) -> str:
    """Read once in a process; ``size`` and ``modified`` tell a changed file from the same one."""
    return hash_file(path, hashlib.sha256)


def read(out: Path) -> Manifest | None:
    """The manifest of a finished output, or ``None``. Raises ``StageError`` for a damaged one."""
    path = out / NAME
    if not path.exists():
        return None
    try:
        return Manifest.model_validate_json(path.read_text())
    except ValueError:
        raise StageError(f"{path}: not a manifest; remove {out} to make it again") from None


def sizes(out: Path) -> dict[str, int]:
    """Bytes of each file in the folders of ``out`` that later stages read."""
    return {
        str(file.relative_to(out)): file.stat().st_size
        for folder in sorted(out.iterdir())
        if folder.is_dir() and folder.name not in NOT_READ
        for file in sorted(folder.rglob("*"))
        if file.is_file()
    }


def damage(out: Path, found: Manifest, wanted: Identity) -> str | None:
    """What tells that a finished output is not what its manifest says, or ``None``."""
    if found.identity != wanted:
        return "its manifest is that of other work"
    have = sizes(out)
    for name, size in found.files.items():
        is_read = name.split("/")[0] not in NOT_READ  # older manifests list logs too
        if is_read and have.get(name) != size:
            return f"{name} is {have.get(name, 'missing')} and was {size} bytes"
    return None


def write(out: Path, manifest: Manifest) -> None:
    """Publish ``manifest`` atomically. Call it last: its presence is the success flag."""
    write_atomically(out / NAME, manifest.model_dump_json(indent=2))


def write_atomically(path: Path, text: str) -> None:
    """Write aside, sync and rename, so that a reader sees the old text or the new one."""
    partial = path.with_name(f"{path.name}.{os.getpid()}.partial")
    with partial.open("w", encoding="utf-8") as file:
        file.write(text)
        file.flush()
        os.fsync(file.fileno())
    partial.rename(path)
