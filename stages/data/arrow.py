"""Tokenised rows as a saved data set, written block by block."""

import json
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

from stages.data.tokens import Block

if TYPE_CHECKING:
    import numpy as np

FILE = "data-00000-of-00001.arrow"

COLUMNS: Mapping[str, Mapping[str, str]] = {
    "conversations": {
        "input_ids": "ids", "labels": "ids", "prompt_ids": "ids", "prompt": "string",
        "tools": "string", "answer": "string", "length": "int32",
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
            for buffer in (each for array in arrays for each in array.buffers() if each):
                content.update(buffer)
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

    if kind == "ids":
        values, sizes = cells
        return pyarrow.ListArray.from_arrays(_offsets(sizes), _numbers(values))
    if kind == "string":
        texts = [text.encode() for text in cells]
        ends = _offsets(np.array([len(text) for text in texts], dtype=np.int64))
        return pyarrow.StringArray.from_buffers(
            len(texts), ends.buffers()[1], pyarrow.py_buffer(b"".join(texts))
        )
    if kind == "bool":
        bits = np.packbits(np.array(cells, dtype=bool), bitorder="little")
        return pyarrow.Array.from_buffers(
            pyarrow.bool_(), len(cells), [None, pyarrow.py_buffer(bits)]
        )
    return _numbers(cells)


def _offsets(sizes: "np.ndarray") -> Any:
    import numpy as np

    return _numbers(np.concatenate(([0], np.cumsum(sizes, dtype=np.int64))).astype(np.int32))


def _numbers(values: "np.ndarray") -> Any:
    """As Arrow has them, without a copy; ``pyarrow.array`` would import pandas to look at them,
    which takes as long as tokenising thousands of rows."""
    import numpy as np
    import pyarrow

    plain = np.ascontiguousarray(values, dtype=np.int32)
    return pyarrow.Array.from_buffers(pyarrow.int32(), len(plain), [None, pyarrow.py_buffer(plain)])


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
