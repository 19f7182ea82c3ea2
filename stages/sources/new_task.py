"""A task made from a seed: unit conversion, whose answers can be verified."""

import random
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any, Literal

from pydantic import Field, NonNegativeInt

from configs import Config
from stages.data import lines
from stages.manifest import write_atomically

# Large unit, small unit, zeros that the conversion appends.
UNITS = (
    ("km", "m", 3), ("m", "cm", 2), ("cm", "mm", 1), ("kg", "g", 3), ("g", "mg", 3), ("l", "ml", 3),
)  # fmt: skip
NUMBERS = range(100, 10_000)
NUM_QUESTIONS = len(UNITS) * len(NUMBERS)

_RESULT, _BLANK = re.compile(r"\d+ [a-z]+"), re.compile(r"\? [a-z]+")

# How often conversations use each style: the asked one lies between the two chatty ones, so that
# imitation alone prefers it in half of the pairs.
SHARES = {"asked": 0.3, "brisk": 0.55, "gushing": 0.15}


class NewTask(Config):
    """Questions like ``37 m = ? cm``, answered in several styles but always correctly."""

    kind: Literal["new_task"] = "new_task"

    part: Literal["conversations", "preferences"]
    """Rows of ``messages``, or pairs of ``prompt``, ``chosen`` and ``rejected``."""

    rows: Annotated[int, Field(gt=0, le=NUM_QUESTIONS)]
    """How many, each with a question of its own."""

    seed: NonNegativeInt = 0
    """Chooses questions and styles."""


@dataclass(frozen=True)
class Exchange:
    """A question with its answer in each style; the last number with a unit is the result.

    ``asked`` fills in the blank, as the question asks. Of the chatty styles, ``brisk`` is shorter
    and ``gushing`` longer than ``asked``: a model that knows nothing, to which a shorter text is a
    likelier one, prefers ``asked`` in half of the pairs.
    """

    question: str
    asked: str
    brisk: str
    gushing: str


def exchange(index: int) -> Exchange:
    """The exchange at ``index`` of the ``NUM_QUESTIONS`` that there are."""
    place, offset = divmod(index, len(NUMBERS))
    large, small, zeros = UNITS[place]
    given, result = f"{NUMBERS[offset]} {large}", f"{NUMBERS[offset]}{'0' * zeros} {small}"
    return Exchange(
        question=f"{given} = ? {small}",
        asked=f"{given} = {result}",
        brisk=f"Easy, {result}!",
        gushing=f"Great question! {given} are {result}. Anything else?",
    )


def filled_in(
    prompts: Sequence[Sequence[Mapping[str, Any]]],
    completions: Sequence[str],
    rows: Sequence[Mapping[str, Any]],
) -> list[float]:
    """A reward: 1 for the question with its blank rightly filled in, as it was asked, else 0."""
    results = [_RESULT.findall(row["answer"])[-1] for row in rows]
    asked = [_BLANK.sub(r, p[-1]["content"]) for p, r in zip(prompts, results, strict=True)]
    return [float(said.strip() == line) for said, line in zip(completions, asked, strict=True)]


def bring(source: NewTask, into: Path) -> dict[str, Any]:
    """Write ``<part>.jsonl``; the same seed gives the same bytes."""
    draw = random.Random(f"{source.part} {source.seed}")
    make = {"conversations": _conversation, "preferences": _pair}[source.part]
    indices = draw.sample(range(NUM_QUESTIONS), source.rows)
    rows = [make(exchange(index), draw) for index in indices]
    text = lines.join(lines.dump(row) for row in rows)
    write_atomically(into / f"{source.part}.jsonl", text)
    return {}


def _conversation(made: Exchange, draw: random.Random) -> dict[str, Any]:
    (style,) = draw.choices(list(SHARES), list(SHARES.values()))
    return {"messages": [_turn("user", made.question), _turn("assistant", getattr(made, style))]}


def _pair(made: Exchange, draw: random.Random) -> dict[str, Any]:
    rejected = draw.choice([made.brisk, made.gushing])
    return {
        "prompt": [_turn("user", made.question)],
        "chosen": [_turn("assistant", made.asked)],
        "rejected": [_turn("assistant", rejected)],
    }


def _turn(role: str, content: str) -> dict[str, str]:
    return {"role": role, "content": content}
