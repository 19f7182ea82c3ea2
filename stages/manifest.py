"""The file that says a stage finished, and what it was computed from."""

import hashlib
import json
import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from pydantic import Field

from configs import Config
from stages.base import Stage

NAME = "manifest.json"


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


class Manifest(Config):
    """The record that a stage is done."""

    identity: Identity
    provenance: dict[str, Any] = Field(default_factory=dict)
    """When, where and with what: backend, resources, command, versions, seconds. Not identity."""

    metrics: dict[str, Any] = Field(default_factory=dict)
    checkpoint: dict[str, Any] | None = None
    """Facts about the checkpoint in the output, as ``stages.checkpoint.describe`` gives them."""


def identify(stage: Stage, config: Config, inputs: Mapping[str, str]) -> Identity:
    """The identity of work not yet done; ``inputs`` maps each input to its fingerprint.

    A ``Path`` inside ``config`` counts by the content it points to, so a moved file is the same
    file and an edited one is not. Raises ``FileNotFoundError`` for a path that is not there.
    """
    return Identity(
        stage=stage.name,
        version=stage.version,
        config=_by_content(config.model_dump(mode="python")),
        inputs=dict(sorted(inputs.items())),
    )


def _by_content(value: Any) -> Any:
    if isinstance(value, Path):
        return f"sha256:{digest(value)}"
    if isinstance(value, Mapping):
        return {str(key): _by_content(item) for key, item in value.items()}
    if isinstance(value, (list, tuple, set, frozenset)):
        return [_by_content(item) for item in value]
    return value


def digest(path: Path) -> str:
    """SHA-256 of a file, or of a directory's relative names and files."""
    if not path.exists():
        raise FileNotFoundError(f"{path}: no such file or directory")
    if path.is_file():
        with path.open("rb") as file:
            return hashlib.file_digest(file, "sha256").hexdigest()
    whole = hashlib.sha256()
    for file in sorted(p for p in path.rglob("*") if p.is_file()):
        whole.update(f"{file.relative_to(path)}\0{digest(file)}\n".encode())
    return whole.hexdigest()


def read(out: Path) -> Manifest | None:
    """The manifest of a finished output, or ``None``."""
    path = out / NAME
    return Manifest.model_validate_json(path.read_text()) if path.exists() else None


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
