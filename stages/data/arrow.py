"""Tokenised rows as a saved data set, written block by block."""

import json
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from stages.data.tokens import Block

FILE = "data-00000-of-00001.arrow"

COLUMNS: Mapping[str, Mapping[str, str]] = {
    "conversations": {
        "input_ids": "ids", "labels": "ids", "prompt_ids": "ids", "prompt": "string",
        "answer": "string", "length": "int32",
    },
    "preferences": {
        "prompt_ids": "ids", "chosen_ids": "ids", "rejected_ids": "ids", "length": "int32",
    },
    "unpaired": {
        "prompt_ids": "ids", "completion_ids": "ids", "label": "bool", "length": "int32",
    },
}  # fmt: skip
"""For each kind of rows the columns and their types; ``ids`` is a list of int32."""


@contextmanager
def writer(folder: Path, kind: str) -> Iterator[Callable[[Block], None]]:
    """Takes blocks, and leaves in ``folder`` what ``datasets.load_from_disk`` reads.

    Written by pyarrow alone: importing datasets takes longer than writing a small set.
    """
    import pyarrow
    import xxhash

    columns = COLUMNS[kind]
    schema = _schema(columns)
    content = xxhash.xxh3_128(kind.encode())
    folder.mkdir(parents=True)
    with (
        pyarrow.OSFile(str(folder / FILE), "wb") as file,
        pyarrow.ipc.new_stream(file, schema) as stream,
    ):

        def write(block: Block) -> None:
            if not len(block.lengths):
                return
            cells = {**block.columns, "length": block.lengths}
            arrays = [_array(cells[name], kind) for name, kind in columns.items()]
            for name in columns:
                content.update(_bytes(cells[name]))
            stream.write_batch(pyarrow.record_batch(arrays, schema=schema))

        yield write
    _describe(folder, columns, content.hexdigest()[:16])


def _schema(columns: Mapping[str, str]) -> Any:
    import pyarrow

    types = {
        "ids": pyarrow.list_(pyarrow.int32()),
        "string": pyarrow.string(),
        "bool": pyarrow.bool_(),
        "int32": pyarrow.int32(),
    }
    fields = [pyarrow.field(name, types[kind]) for name, kind in columns.items()]
    info = json.dumps({"info": {"features": _features(columns)}})
    return pyarrow.schema(fields, metadata={"huggingface": info})


def _array(cells: Any, kind: str) -> Any:
    import numpy as np
    import pyarrow

    if kind != "ids":
        return pyarrow.array(cells)
    values, sizes = cells
    offsets = np.concatenate(([0], np.cumsum(sizes, dtype=np.int64))).astype(np.int32)
    return pyarrow.ListArray.from_arrays(offsets, values)


def _bytes(cells: Any) -> bytes:
    if isinstance(cells, tuple):
        return cells[0].tobytes() + cells[1].tobytes()
    return cells.tobytes() if hasattr(cells, "tobytes") else json.dumps(cells).encode()


def _features(columns: Mapping[str, str]) -> dict[str, Any]:
    ids = {"feature": {"dtype": "int32", "_type": "Value"}, "_type": "List"}
    return {
        name: ids if kind == "ids" else {"dtype": kind, "_type": "Value"}
        for name, kind in columns.items()
    }


def _describe(folder: Path, columns: Mapping[str, str], fingerprint: str) -> None:
    """The two JSON files of ``save_to_disk``; caches of later maps go by the fingerprint."""
    state = {
        "_data_files": [{"filename": FILE}],
        "_fingerprint": fingerprint,
        "_format_columns": None,
        "_format_kwargs": {},
        "_format_type": None,
        "_output_all_columns": False,
        "_split": None,
    }
    info = {"citation": "", "description": "", "features": _features(columns)}
    info |= {"homepage": "", "license": ""}
    (folder / "state.json").write_text(json.dumps(state, indent=2))
    (folder / "dataset_info.json").write_text(json.dumps(info, indent=2))
