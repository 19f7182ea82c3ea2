"""Rows, turns and input folders that the tests of the data stages share."""

import json
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any


def user(content: str) -> dict[str, Any]:
    return {"role": "user", "content": content}


def assistant(content: str, **more: Any) -> dict[str, Any]:
    return {"role": "assistant", "content": content, **more}


def system(content: str) -> dict[str, Any]:
    return {"role": "system", "content": content}


def calling(name: str, **arguments: Any) -> dict[str, Any]:
    """An assistant turn in the form that comes out."""
    call = {"type": "function", "function": {"name": name, "arguments": arguments}}
    return assistant("", tool_calls=[call])


def good(number: int, *, start: int = 0) -> list[dict[str, Any]]:
    return [
        {"messages": [user(f"question {n}"), assistant(f"answer {n}")]}
        for n in range(start, start + number)
    ]


def source(folder: Path, files: Mapping[str, bytes | str | Iterable[Any]]) -> Path:
    """An input directory: rows are written as JSON lines, bytes and text as they are."""
    for name, content in files.items():
        path = folder / "data" / name
        path.parent.mkdir(parents=True, exist_ok=True)
        if isinstance(content, str):
            content = content.encode()
        if not isinstance(content, bytes):
            content = "".join(json.dumps(row) + "\n" for row in content).encode()
        path.write_bytes(content)
    return folder


def read(path: Path) -> list[Any]:
    return [json.loads(line) for line in path.read_text(encoding="utf-8").splitlines()]


def both(out: Path, kind: str = "conversations") -> list[Any]:
    """The rows of both sides."""
    return read(out / kind / "train.jsonl") + read(out / kind / "test.jsonl")
