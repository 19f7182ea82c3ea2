"""The tokenizer side of a checkpoint: its files, its template, and where a turn ends."""

import hashlib
import json
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from stages.base import StageError
from stages.checkpoint.garbled import GARBLED, first_line, told_of
from stages.checkpoint.json_files import read_json, read_json_if_there

VOCABULARIES = (
    "tokenizer.json",
    "tokenizer.model",
    "spiece.model",
    "vocab.json",
    "merges.txt",
    "vocab.txt",
    "added_tokens.json",
)
"""Files that decide which ids a text becomes."""

TEMPLATE = "chat_template.jinja"

FILES = (*VOCABULARIES, "tokenizer_config.json", "special_tokens_map.json", TEMPLATE)


def has_tokenizer(path: Path) -> bool:
    return any((path / name).is_file() for name in VOCABULARIES)


def tokenizer_sha256(path: Path) -> str | None:
    """A hash of what decides the ids; ``None`` without a tokenizer.

    ``truncation`` and ``padding`` in tokenizer.json are left out: a trainer leaves its own there,
    and they are set anew by every call.
    """
    whole = hashlib.sha256()
    for name in VOCABULARIES:
        if not (path / name).is_file():
            continue
        content = (path / name).read_bytes()
        if name == "tokenizer.json":
            kept = {**read_json(path / name), "truncation": None, "padding": None}
            content = json.dumps(kept, sort_keys=True).encode()
        whole.update(f"{name}\0".encode() + content)
    return whole.hexdigest() if has_tokenizer(path) else None


def template(path: Path) -> str | None:
    """The chat template: a file of its own, or inside tokenizer_config.json as of old."""
    if (path / TEMPLATE).is_file():
        with told_of(path / TEMPLATE):
            return (path / TEMPLATE).read_text(encoding="utf-8")
    inside = read_json_if_there(path / "tokenizer_config.json").get("chat_template")
    return inside if isinstance(inside, str) else None


def stop_ids(path: Path) -> list[int]:
    """The ids at which generation stops: generation_config.json's, or else config.json's. Raises
    :class:`StageError` for one that is no whole number."""
    key = "eos_token_id"
    for file in (path / "generation_config.json", path / "config.json"):
        values = read_json_if_there(file)
        if values.get(key) is not None:
            return sorted(ids_in(file, values, key))
    return []


def ids_in(file: Path, values: Mapping[str, Any], key: str) -> list[int]:
    """The ids under ``key`` of a config ``file``, where one, several or none may stand. Raises
    :class:`StageError` for one that is no whole number."""
    ids = values.get(key)
    listed = ids if isinstance(ids, list) else [] if ids is None else [ids]
    for number in listed:
        if type(number) is not int:
            raise StageError(f"{file}: {key} is {ids!r}, and an id is a whole number")
    return listed


def load_tokenizer(path: Path) -> Any:
    """The tokenizer in ``path``. Raises :class:`StageError` when it is missing or broken."""
    from transformers import AutoTokenizer

    if not has_tokenizer(path):
        raise StageError(f"{path}: no tokenizer, none of {', '.join(VOCABULARIES)} is there")
    try:
        return AutoTokenizer.from_pretrained(path, trust_remote_code=False)
    except GARBLED as error:
        raise StageError(f"{path}: its tokenizer does not load ({first_line(error)})") from None


def end_of_turn(tokenizer: Any) -> int | None:
    """The id that ends an assistant's turn, at which generation has to stop.

    It is the first special token that the chat template writes after the answer; without a
    template, or if the template writes none, it is the end-of-sequence token.
    Raises :class:`StageError` when the template cannot be rendered.
    """
    import jinja2

    if not tokenizer.chat_template:
        return tokenizer.eos_token_id
    answer = "ANSWER"
    turns = [{"role": "user", "content": "?"}, {"role": "assistant", "content": answer}]
    try:
        text = tokenizer.apply_chat_template(turns, tokenize=False)
    except (jinja2.TemplateError, *GARBLED) as error:
        raise StageError(
            f"the chat template cannot render a question and an answer: {first_line(error)}"
        ) from None
    _, found, after = text.rpartition(answer)
    if not found:
        raise StageError("the chat template drops the assistant's answer")
    ids = tokenizer(after, add_special_tokens=False)["input_ids"]
    special = _special_ids(tokenizer) - {tokenizer.unk_token_id}
    return next((i for i in ids if i in special), tokenizer.eos_token_id)


def special_ids(path: Path, tokenizer: Any) -> Iterator[tuple[str, int]]:
    """Every id that the configs or the tokenizer give a special meaning, after its place. Raises
    :class:`StageError` for one that is no whole number."""
    for number in _special_ids(tokenizer):
        yield f"tokenizer {tokenizer.convert_ids_to_tokens(number)!r}", number
    for name in ("config.json", "generation_config.json"):
        values = read_json_if_there(path / name)
        for key in ("bos_token_id", "eos_token_id", "pad_token_id"):
            for number in ids_in(path / name, values, key):
                yield f"{name} {key}", number


def _special_ids(tokenizer: Any) -> set[int]:
    added = {i for i, token in tokenizer.added_tokens_decoder.items() if token.special}
    return added | set(tokenizer.all_special_ids)
