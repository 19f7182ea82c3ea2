"""The weighted sum of several rewards, with a clear error for each that misbehaves."""

import importlib
import importlib.util
import json
import math
import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from numbers import Real
from pathlib import Path
from types import ModuleType, TracebackType
from typing import Any

from stages.base import StageError
from stages.rewards.config import Reward
from stages.rewards.verifiable import FUNCTIONS, Messages, RewardFunction, Row

TOTAL = "total"
SHOWN = 300
"""Characters of a row in an error."""


class RewardError(StageError):
    """A reward that cannot be had, or that gave anything but a number for each completion."""


@dataclass(frozen=True)
class Term:
    """One reward of several."""

    name: str
    function: RewardFunction
    weight: float = 1.0
    options: Mapping[str, Any] = field(default_factory=dict)


@dataclass(frozen=True)
class Scorer:
    """What rates completions: every named reward and their weighted sum."""

    terms: tuple[Term, ...]

    def __call__(
        self,
        prompts: Sequence[Messages],
        completions: Sequence[str],
        rows: Sequence[Row],
    ) -> dict[str, list[float]]:
        """The score of each completion by the reward's name, and under ``total`` the weighted sum.

        ``prompts`` are messages, ``completions`` texts without special tokens, and ``rows`` what
        the data says of each prompt (``answer``). Raises :class:`RewardError` when a function
        raises, or returns another number of scores or one that is not finite.
        """
        assert len(prompts) == len(completions) == len(rows)
        found = {each.name: _scores(each, prompts, completions, rows) for each in self.terms}
        columns = [(each.weight, found[each.name]) for each in self.terms]
        total = [sum(w * scores[i] for w, scores in columns) for i in range(len(rows))]
        return {**found, TOTAL: total}


def find(spec: Reward) -> RewardFunction:
    """The function that ``spec`` names. Raises :class:`RewardError` when there is none."""
    assert spec.function is not None
    module_name, colon, name = spec.function.partition(":")
    if not colon:
        return FUNCTIONS[spec.function]
    with _Told(f"reward {spec.function!r}: its module cannot be imported"):
        module = _from_file(module_name, spec.file) if spec.file else _by_name(module_name)
    function: RewardFunction | None = getattr(module, name, None)
    if function is None or not callable(function):
        raise RewardError(f"reward {spec.function!r}: {module.__file__} has no function {name}")
    return function


def _by_name(module: str) -> ModuleType:
    return importlib.import_module(module)


def _from_file(module: str, path: Path) -> ModuleType:
    spec = importlib.util.spec_from_file_location(module, path)
    if spec is None or spec.loader is None:
        raise RewardError(f"{path}: not a Python file")
    found = importlib.util.module_from_spec(spec)
    sys.modules[module] = found
    spec.loader.exec_module(found)
    return found


def _scores(
    term: Term, prompts: Sequence[Messages], completions: Sequence[str], rows: Sequence[Row]
) -> list[float]:
    if not rows:
        return []

    def first(index: int = 0) -> str:
        shown = {"prompt": list(prompts[index]), "completion": completions[index]}
        shown |= {k: v for k, v in rows[index].items() if not isinstance(v, (list, dict))}
        text = json.dumps(shown, ensure_ascii=False, default=str)
        return text if len(text) <= SHOWN else f"{text[:SHOWN]} ..."

    with _Told(lambda: f"reward {term.name} raised, on a batch that begins with {first()}"):
        given = term.function(prompts, completions, rows, **term.options)
    given = given.tolist() if hasattr(given, "tolist") else given
    if not isinstance(given, (list, tuple)):
        raise RewardError(
            f"reward {term.name} returned {type(given).__name__} and not a list of numbers, on a "
            f"batch that begins with {first()}"
        )
    if len(given) != len(rows):
        raise RewardError(
            f"reward {term.name} returned {len(given)} scores for {len(rows)} completions, of "
            f"which the first is {first()}"
        )
    for index, value in enumerate(given):
        if not isinstance(value, Real) or not math.isfinite(value):
            raise RewardError(
                f"reward {term.name} gave {value!r}, not a finite number, to {first(index)}"
            )
    return [float(value) for value in given]


@dataclass(frozen=True)
class _Told:
    """Adds to whatever a user's code raises what it was doing."""

    doing: str | Callable[[], str]

    def __enter__(self) -> None:
        pass

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, _: TracebackType | None
    ) -> None:
        if not isinstance(error, Exception) or isinstance(error, RewardError):
            return
        doing = self.doing if isinstance(self.doing, str) else self.doing()
        raise RewardError(f"{doing}: {type(error).__name__}: {error}") from error
