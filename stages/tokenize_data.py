"""Rows of text to rows of token ids for one model, with masks that were verified."""

import json
import shutil
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Annotated, Any, Literal

from pydantic import Field, PositiveInt

from configs import Config
from stages.base import Context, Metrics, StageError
from stages.data import masking, quarantine, templates
from stages.data.quarantine import Reject
from stages.data.readers import Place
from stages.data.rules import RowError
from stages.data.shapes import Canonical, Kind, Turn
from stages.data.templates import Template

KINDS: tuple[Kind, ...] = ("conversations", "preferences")
SIDES = ("train", "test")


class TokenizeData(Config):
    max_length: PositiveInt = 1024
    """Longest row in tokens; of a pair, its prompt with the longer answer."""

    on_overflow: Literal["drop", "error", "truncate_prompt"] = "drop"
    """For a longer row: leave it out, fail, or shorten what stands before the last answer (the
    oldest turns go first, then the start of the question). Answers are never cut."""

    assistant_only_loss: bool = True
    """Train the assistant's turns and their stop tokens only; else every token."""

    drop_budget: Annotated[float, Field(ge=0, le=1)] = 0.01
    """Largest share of faulty rows, of conversations and of pairs each, that is put up with.
    Rows over ``max_length`` do not count."""


def tokenize_data(config: TokenizeData, ctx: Context, *, model: Path, data: Path) -> Metrics:
    """Write ``{conversations,preferences}/{train,test}`` into ``ctx.out`` as saved datasets.

    Conversations: ``input_ids``, ``labels`` (-100 where not trained), ``prompt_ids`` (what stands
    before the last answer at inference), ``answer`` (its text). Preferences: ``prompt_ids``,
    ``chosen_ids``, ``rejected_ids``; prompt with answer is the template's rendering. Ids are lists
    of int32, and every answer ends with a stop token. ``model`` holds ``model/`` with a tokenizer,
    of which nothing else is loaded; ``data`` is an output of ``prepare_data``. What is kept out
    stands in ``quarantine.jsonl``. Raises :class:`StageError`.
    """
    ctx.out.mkdir(parents=True, exist_ok=True)
    template = templates.load(model / "model")
    found: list[Kind] = [kind for kind in KINDS if (data / kind).is_dir()]
    if not found:
        raise StageError(f"{data}: holds none of {', '.join(KINDS)}; give a prepare_data output")
    splits = [_tokenize(config, template, data, kind, side) for kind in found for side in SIDES]
    quarantine.write(ctx.out, {kind: _rejects(splits, kind) for kind in found})
    for kind in found:
        num_rows = sum(split.num_read for split in splits if split.kind == kind)
        quarantine.enforce_budget(
            _rejects(splits, kind),
            num_rows=num_rows,
            budget=config.drop_budget,
            what=kind,
            out=ctx.out,
        )
    for split in splits:
        _refuse_empty(split, ctx.out)
    for split in splits:
        _save(split, ctx.out)
    return {
        f"{split.kind}/{split.side}/{name}": number
        for split in splits
        for name, number in _facts(split).items()
    }


@dataclass(frozen=True)
class Tokens:
    """One row as token ids."""

    columns: dict[str, Any]
    length: int
    """Tokens in the row; of a pair, in its prompt with the longer answer."""

    num_tokens: int
    num_trained: int
    same_context: bool
    """Whether training sees before each answer exactly what inference sees."""

    truncated: bool = False


@dataclass(frozen=True)
class Split:
    """One side of the conversations or of the preferences, tokenised."""

    kind: Kind
    side: str
    num_read: int
    rows: Sequence[Tokens]
    rejects: Sequence[Reject]


def _tokenize(config: TokenizeData, template: Template, data: Path, kind: Kind, side: str) -> Split:
    name = f"{kind}/{side}.jsonl"
    num_read = 0
    rows, rejects = [], []
    with (data / name).open(encoding="utf-8") as file:
        for num_read, line in enumerate(file, 1):
            place = Place(name, line=num_read)
            try:
                rows.append(_fit(config, template, json.loads(line), place))
            except RowError as fault:
                rejects.append(quarantine.reject(place, fault, line.rstrip("\n")))
    return Split(kind, side, num_read, rows, rejects)


def _fit(config: TokenizeData, template: Template, row: Canonical, place: Place) -> Tokens:
    """``row`` within ``max_length``. Raises :class:`RowError`, or :class:`StageError` if asked."""
    tokens = _tokens(config, template, row)
    length, excess = tokens.length, tokens.length - config.max_length
    if excess > 0 and config.on_overflow == "error":
        raise StageError(
            f"{place}: {length} tokens, max_length is {config.max_length}; "
            "raise max_length, or set on_overflow to drop or truncate_prompt"
        )
    while excess > 0 and config.on_overflow == "truncate_prompt":
        shorter = _shorten(template, row, excess)
        if shorter is None:
            break
        row, tokens = shorter, replace(_tokens(config, template, shorter), truncated=True)
        excess = tokens.length - config.max_length
    if excess > 0:
        raise RowError("too_long", f"{length} tokens, max_length is {config.max_length}")
    return tokens


def _tokens(config: TokenizeData, template: Template, row: Canonical) -> Tokens:
    if "prompt" in row:
        return _pair(template, row)
    return _conversation(template, row["messages"], assistant_only=config.assistant_only_loss)


def _conversation(template: Template, turns: Sequence[Turn], *, assistant_only: bool) -> Tokens:
    masked = masking.mask(template, turns)
    labels = masked.labels if assistant_only else list(masked.ids)
    return Tokens(
        columns={
            "input_ids": masked.ids,
            "labels": labels,
            "prompt_ids": masked.prompt_ids,
            "answer": next(t["content"] for t in reversed(turns) if t["role"] == "assistant"),
        },
        length=len(masked.ids),
        num_tokens=len(masked.ids),
        num_trained=sum(label != masking.IGNORED for label in labels),
        same_context=masked.same_context,
    )


def _pair(template: Template, row: Canonical) -> Tokens:
    chosen = masking.mask(template, row["prompt"] + row["chosen"], last_only=True)
    rejected = masking.mask(template, row["prompt"] + row["rejected"], last_only=True)
    if chosen.ids == rejected.ids:
        raise RowError("chosen_equals_rejected", "both answers become the same tokens")
    # A tokenizer may merge the prompt's end into one answer and not into the other: the prompt
    # of a pair is what both share before either answer begins.
    start = min(chosen.spans[-1][0], rejected.spans[-1][0])
    num_tokens = len(chosen.ids) + len(rejected.ids)
    return Tokens(
        columns={
            "prompt_ids": chosen.ids[:start],
            "chosen_ids": chosen.ids[start:],
            "rejected_ids": rejected.ids[start:],
        },
        length=max(len(chosen.ids), len(rejected.ids)),
        num_tokens=num_tokens,
        num_trained=num_tokens - 2 * start,
        same_context=chosen.same_context and rejected.same_context,
    )


def _shorten(template: Template, row: Canonical, excess: int) -> Canonical | None:
    """``row`` with less before its last answer, or ``None`` when nothing more can go.

    The oldest question goes with its answers as long as a later one is left; then the last
    question loses about ``excess`` tokens at its start. The system turn stays.
    """
    name = "prompt" if "prompt" in row else "messages"
    answer = row[name][-1:] if name == "messages" else []
    turns = row[name][: len(row[name]) - len(answer)]
    num_system = sum(turn["role"] == "system" for turn in turns)
    questions = [index for index, turn in enumerate(turns) if turn["role"] == "user"]
    if len(questions) > 1:
        rest = turns[questions[1] :]
    else:
        question = turns[questions[0]]["content"]
        num_tokens = len(templates.encode(template, [question])[0])
        kept = question[max(1, len(question) * excess // num_tokens) :]
        if not kept.strip():
            return None
        rest = [{"role": "user", "content": kept}]
    return {**row, name: [*turns[:num_system], *rest, *answer]}


def _rejects(splits: Sequence[Split], kind: Kind) -> list[Reject]:
    return [bad for split in splits if split.kind == kind for bad in split.rejects]


def _refuse_empty(split: Split, out: Path) -> None:
    if not split.rows:
        dropped = ", ".join(f"{rule} {n}" for rule, n in quarantine.counts(split.rejects).items())
        raise StageError(
            f"no row of {split.kind}/{split.side} is left ({dropped or 'it was empty'}); "
            f"see {out / quarantine.NAME}, then give more rows, or raise max_length for long ones"
        )


def _save(split: Split, out: Path) -> None:
    """Write ``out/<kind>/<side>`` aside, then put it in its place."""
    from datasets import Dataset, Features, List, Value, disable_progress_bars

    disable_progress_bars()
    columns = {name: [row.columns[name] for row in split.rows] for name in split.rows[0].columns}
    kinds = {
        name: Value("string") if name == "answer" else List(Value("int32")) for name in columns
    }
    path = out / split.kind / split.side
    partial = path.with_name(f"{path.name}.partial")
    for old in (partial, path):
        shutil.rmtree(old, ignore_errors=True)
    Dataset.from_dict(columns, features=Features(kinds)).save_to_disk(partial)
    partial.rename(path)


def _facts(split: Split) -> dict[str, int]:
    lengths = sorted(row.length for row in split.rows)
    return {
        "rows": len(split.rows),
        "tokens": sum(row.num_tokens for row in split.rows),
        "trained_tokens": sum(row.num_trained for row in split.rows),
        "longest": lengths[-1],
        "p50": _quantile(lengths, 50),
        "p95": _quantile(lengths, 95),
        "context_mismatch_rows": sum(not row.same_context for row in split.rows),
        "truncated": sum(row.truncated for row in split.rows),
        **{f"dropped/{rule}": number for rule, number in quarantine.counts(split.rejects).items()},
    }


def _quantile(lengths: Sequence[int], percent: int) -> int:
    """The nearest-rank percentile of sorted ``lengths``."""
    return lengths[-(-percent * len(lengths) // 100) - 1]
