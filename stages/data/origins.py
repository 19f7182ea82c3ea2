"""Where the rows of prepared splits stand in the user's own files."""

import json
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from stages.data.places import Place

if TYPE_CHECKING:
    import numpy as np

FOLDER = "places"
"""Beside the splits: ``files.json``, and for each split ``KIND.SIDE.npy``."""


@dataclass(frozen=True)
class Origins:
    """The places of the rows of one split."""

    shown: Sequence[Sequence[Any]]
    """For each file what it is called and whether its places are lines."""

    rows: "np.ndarray"
    """For each row the number of its file and its line or row there."""

    def of(self, number: int) -> str | None:
        """The place of line ``number`` of the split, counted from 1."""
        if number > len(self.rows):
            return None
        file, position = self.rows[number - 1].tolist()
        name, lines = self.shown[file]
        return str(Place(name, line=position) if lines else Place(name, row=position))


def write(folder: Path, shown: Sequence[Sequence[Any]]) -> None:
    """Say what the files are called."""
    (folder / FOLDER).mkdir(exist_ok=True)
    text = json.dumps(shown, ensure_ascii=False)
    (folder / FOLDER / "files.json").write_text(text, encoding="utf-8")


def write_split(folder: Path, kind: str, side: str, rows: "np.ndarray") -> None:
    """Write the places of one split: ``rows`` are as in :class:`Origins`."""
    import numpy as np

    (folder / FOLDER).mkdir(exist_ok=True)
    np.save(folder / FOLDER / f"{kind}.{side}.npy", rows)


def read(folder: Path, kind: str, side: str) -> Origins | None:
    """The places of one split, ``None`` where none were written."""
    import numpy as np

    path, names = folder / FOLDER / f"{kind}.{side}.npy", folder / FOLDER / "files.json"
    if not path.exists() or not names.exists():
        return None
    return Origins(json.loads(names.read_text(encoding="utf-8")), np.load(path, mmap_mode="r"))
