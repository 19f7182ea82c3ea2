"""Writes a tokenizer into a GGUF file: byte-level BPE, or SentencePiece's with byte fallback."""

import re
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from stages.base import StageError
from stages.checkpoint.conversation import load_tokenizer, stop_ids, template
from stages.checkpoint.json_files import read_json

WORDS = r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+"
REST = r"| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
UPPER, LOWER = r"[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]", r"[\p{Ll}\p{Lm}\p{Lo}\p{M}]"
SPLITS: Mapping[str, str] = {
    rf"{WORDS}|\p{{N}}{REST}": "qwen2",
    rf"{WORDS}|\p{{N}}{{1,3}}{REST}": "llama-bpe",
    rf"[^\r\n\p{{L}}\p{{N}}]?{UPPER}*{LOWER}+|[^\r\n\p{{L}}\p{{N}}]?{UPPER}+{LOWER}*|\p{{N}}"
    r"| ?[^\s\p{L}\p{N}]+[\r\n/]*|\s*[\r\n]+|\s+(?!\S)|\s+": "tekken",
}
"""How a text is split before the merges, and llama.cpp's name for it: of Qwen 2 to 3, of Llama 3
and of Mistral since Nemo."""

BYTE = re.compile(r"<0x[0-9A-F]{2}>")


def write_tokenizer(writer: Any, library: Any, model: Path, *, rows: int) -> None:
    """Token texts, their kinds, merges or scores, and special ids, of ``MODEL``'s tokenizer.

    ``rows`` is the vocabulary of the weights; rows without a token get texts of their own. Raises
    ``StageError`` for a tokenizer that llama.cpp would not follow exactly.
    """
    described = read_json(model / "tokenizer.json")
    tokenizer = load_tokenizer(model)
    pieces = described["model"]
    if pieces["type"] != "BPE":
        raise StageError(f"{model}: GGUF is written for BPE tokenizers, not {pieces['type']}")
    tokens, types = _tokens(library, tokenizer, rows)
    merges = [tuple(m.split(" ", 1)) if isinstance(m, str) else tuple(m) for m in pieces["merges"]]
    if _byte_level(described):
        writer.add_tokenizer_model("gpt2")
        writer.add_tokenizer_pre(_splitting(model, described))
        writer.add_token_merges([" ".join(pair) for pair in merges])
    elif pieces.get("byte_fallback"):
        _check_implied(model, merges, set(pieces["vocab"]) - _added(tokenizer))
        writer.add_tokenizer_model("llama")
        writer.add_tokenizer_pre("default")
        writer.add_token_scores(_scores(tokens, merges))
        writer.add_add_space_prefix(_prefixes(described))
        types = _sentencepiece_types(library, tokens, types, unknown=pieces.get("unk_token"))
    else:
        raise StageError(f"{model}: GGUF needs byte-level BPE, or BPE with byte fallback")
    writer.add_token_list(tokens)
    writer.add_token_types(types)
    _special_ids(writer, tokenizer, stop_ids(model))
    if chat := template(model):
        writer.add_chat_template(chat)


def _tokens(library: Any, tokenizer: Any, rows: int) -> tuple[list[str], list[Any]]:
    by_id = {number: token for token, number in tokenizer.get_vocab().items()}
    added, kinds = tokenizer.added_tokens_decoder, library.TokenType
    types = [
        kinds.UNUSED if number not in by_id
        else kinds.NORMAL if number not in added
        else kinds.CONTROL if added[number].special
        else kinds.USER_DEFINED
        for number in range(rows)
    ]  # fmt: skip
    return [by_id.get(number, f"[PAD{number}]") for number in range(rows)], types


def _added(tokenizer: Any) -> set[str]:
    return {str(token) for token in tokenizer.added_tokens_decoder.values()}


def _steps(described: Mapping[str, Any], kind: str) -> Iterator[Mapping[str, Any]]:
    """The normalisers or pre-tokenisers, those in a sequence one by one."""
    whole = described.get(kind) or {}
    yield from whole.get("pretokenizers") or whole.get("normalizers") or ([whole] if whole else [])


def _byte_level(described: Mapping[str, Any]) -> bool:
    return any(step["type"] == "ByteLevel" for step in _steps(described, "pre_tokenizer"))


def _splitting(model: Path, described: Mapping[str, Any]) -> str:
    """llama.cpp's name for how a text is split before the merges."""
    steps = list(_steps(described, "pre_tokenizer"))
    patterns = [step["pattern"].get("Regex") for step in steps if step["type"] == "Split"]
    if patterns:
        if len(patterns) == 1 and patterns[0] in SPLITS:
            return SPLITS[patterns[0]]
        raise StageError(f"{model}: GGUF has no known name for a text split by {patterns[0]!r}")
    return "smollm" if any(step["type"] == "Digits" for step in steps) else "gpt-2"


def _check_implied(model: Path, merges: Sequence[tuple[str, ...]], vocabulary: set[str]) -> None:
    """llama.cpp keeps no merges here: it joins any two pieces that make a third, the best-scored
    first. That is the same only if every such pair is a merge."""
    known = set(merges)
    for token in vocabulary:
        for cut in range(1, len(token)):
            pair = token[:cut], token[cut:]
            if pair[0] in vocabulary and pair[1] in vocabulary and pair not in known:
                raise StageError(
                    f"{model}: GGUF cannot hold its merges: {pair[0]!r} and {pair[1]!r} make a "
                    "token and are never merged"
                )


def _scores(tokens: Sequence[str], merges: Sequence[tuple[str, ...]]) -> list[float]:
    """An earlier merge is a higher score; what is never merged has the lowest."""
    ranks: dict[str, int] = {}
    for rank, pair in enumerate(merges):
        ranks.setdefault("".join(pair), rank)
    return [-float(ranks.get(token, len(merges))) for token in tokens]


def _prefixes(described: Mapping[str, Any]) -> bool:
    """Whether a space is put before a text."""
    prepended = any(step["type"] == "Prepend" for step in _steps(described, "normalizer"))
    schemes = [
        step.get("prepend_scheme", "always")
        for step in _steps(described, "pre_tokenizer")
        if step["type"] == "Metaspace"
    ]
    return prepended or any(scheme != "never" for scheme in schemes)


def _sentencepiece_types(
    library: Any, tokens: Sequence[str], types: Sequence[Any], *, unknown: str | None
) -> list[Any]:
    kinds = library.TokenType
    return [
        kinds.BYTE if BYTE.fullmatch(token) else kinds.UNKNOWN if token == unknown else kind
        for token, kind in zip(tokens, types, strict=True)
    ]


def _special_ids(writer: Any, tokenizer: Any, stops: Sequence[int]) -> None:
    bos, eos = tokenizer.bos_token_id, tokenizer.eos_token_id
    if bos is not None:
        writer.add_bos_token_id(bos)
        writer.add_add_bos_token(tokenizer("a")["input_ids"][:1] == [bos])
    first = stops[0] if len(stops) == 1 or (stops and eos is None) else eos
    if first is not None:
        writer.add_eos_token_id(first)
    for extra in [each for each in stops if each != first][:1]:
        writer.add_eot_token_id(extra)
    if tokenizer.unk_token_id is not None:
        writer.add_unk_token_id(tokenizer.unk_token_id)
    if tokenizer.pad_token_id is not None:
        writer.add_pad_token_id(tokenizer.pad_token_id)
