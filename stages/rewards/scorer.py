"""The weighted sum of several rewards, with a clear error for each that misbehaves."""

import importlib
import importlib.util
import json
import math
import reprlib
import sys
from collections.abc import Callable, Mapping, Sequence
from copy import deepcopy
from dataclasses import dataclass, field
from numbers import Real
from pathlib import Path
from types import ModuleType, TracebackType
from typing import Any

from stages.base import StageError
from stages.rewards.config import TOTAL, Reward
from stages.rewards.model import RewardModel
from stages.rewards.verifiable import FUNCTIONS, Messages, RewardFunction, Row

SHOWN = 300
"""Characters of a row in an error."""

LARGEST = 3.4e38
"""Rewards become float32."""


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

    @property
    def judges(self) -> list[RewardModel]:
        """The reward models among the rewards."""
        return [each.function for each in self.terms if isinstance(each.function, RewardModel)]

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
    # A name of its own: a file called json.py would stand in for the library's module.
    name = f"reward_file_{module.replace('.', '_')}"
    spec = importlib.util.spec_from_file_location(name, path)
    if spec is None or spec.loader is None:
        raise RewardError(f"{path}: not a Python file")
    found = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = found
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
        # Copies: what a function does to what it is given is not for the next one.
        mine = deepcopy(prompts), list(completions), deepcopy(rows)
        given = _plain(term.function(*mine, **term.options))
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
    scores = [_plain(value) for value in given]
    for index, value in enumerate(scores):
        if not _is_score(value):
            shown = "one beyond any float" if isinstance(value, int) else reprlib.repr(value)
            raise RewardError(
                f"reward {term.name} gave {shown}, not a finite number, to {first(index)}"
            )
    return [float(value) for value in scores]


def _is_score(value: Any) -> bool:
    """A number that a float32 can hold, which NaN is not."""
    size: Any = abs(value) if isinstance(value, Real) else math.inf
    return size <= LARGEST


def _plain(value: Any) -> Any:
    """Arrays, tensors and their scalars as Python has them."""
    return value.tolist() if hasattr(value, "tolist") else value


@dataclass(frozen=True)
class _Told:
    """Adds to whatever a user's code raises what it was doing."""

    doing: str | Callable[[], str]

    def __enter__(self) -> None:
        pass

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, _: TracebackType | None
    ) -> None:
        # Leaving by sys.exit(0) would look like the end of the work.
        if not isinstance(error, Exception | SystemExit) or isinstance(error, RewardError):
            return
        doing = self.doing if isinstance(self.doing, str) else self.doing()
        said = " ".join(str(error).split())  # on one line
        raise RewardError(f"{doing}: {type(error).__name__}: {said}") from error
