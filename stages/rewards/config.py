"""A reward as a recipe names it: a function or a reward model, with its weight."""

from collections.abc import Sequence
from inspect import Parameter, signature
from itertools import chain, count
from pathlib import Path
from typing import Annotated, Any, Self

from pydantic import (
    AfterValidator,
    ConfigDict,
    Field,
    TypeAdapter,
    ValidationError,
    model_validator,
)

from configs import Config
from stages.rewards.verifiable import FUNCTIONS

REWARD_MODEL = "reward_model"
"""What the score of the reward model is called."""

TOTAL = "total"
"""What the weighted sum is called."""


class Reward(Config):
    """One term of the reward: ``function`` or ``model``, times ``weight``."""

    function: str | None = None
    """A built-in (``exact_match``, ``numeric``, ``regex``, ``json_schema``, ``length``), or your
    own as ``module:function``."""

    model: bool = False
    """Score with the reward model that the stage is given as its input ``reward``."""

    weight: float = 1.0
    """What the score counts in the sum."""

    options: dict[str, Any] = Field(default_factory=dict)
    """Keyword arguments of the function."""

    file: Path | None = None
    """The Python file of ``module``, loaded from there. It counts by its content, so that an edit
    runs the stage again; without it the function counts by its name alone."""

    @model_validator(mode="after")
    def _names_one_thing(self) -> Self:
        if (self.function is None) != self.model:
            raise ValueError("a reward is either a function or model: true")
        if self.model and (self.options or self.file):
            raise ValueError("options and file belong to a function, and this is the reward model")
        if self.function is None:
            return self
        module, colon, name = self.function.partition(":")
        if colon and not (module and name.isidentifier()):
            raise ValueError(f"{self.function!r}: your own function is written module:function")
        if not colon:
            _check_built_in(self.function, self.options)
            if self.file:
                raise ValueError(f"file belongs to module:function, and {module} is built in")
        return self

    @property
    def name(self) -> str:
        """What its score is called: the function's name."""
        return (self.function or REWARD_MODEL).rpartition(":")[2]


def _at_least_one(rewards: tuple[Reward, ...]) -> tuple[Reward, ...]:
    if not rewards:
        raise ValueError("names no reward; give it a function, or model: true")
    if not any(each.weight for each in rewards):
        raise ValueError("every reward has weight 0, and nothing would be learnt from them")
    return rewards


Rewards = Annotated[tuple[Reward, ...], AfterValidator(_at_least_one)]
"""At least one that counts. A minimal length in the type would complain a second time of a wrong
reward."""


def names(rewards: Sequence[Reward]) -> list[str]:
    """The name of each score, which no other has; a second ``regex`` is ``regex_2``."""
    found: list[str] = []
    for reward in rewards:
        numbered = (f"{reward.name}_{number}" for number in count(2))
        taken = (*found, TOTAL)
        found.append(next(name for name in chain([reward.name], numbered) if name not in taken))
    return found


def _check_built_in(name: str, options: dict[str, Any]) -> None:
    if name not in FUNCTIONS:
        raise ValueError(
            f"{name!r} is no built-in reward ({', '.join(FUNCTIONS)}); "
            "write your own as module:function"
        )
    parameters = signature(FUNCTIONS[name]).parameters.values()
    takes = {each.name: each for each in parameters if each.kind is Parameter.KEYWORD_ONLY}
    if unknown := sorted(options.keys() - takes.keys()):
        raise ValueError(f"{name} has no option {unknown[0]}; it takes {', '.join(takes)}")
    needed = [option for option, each in takes.items() if each.default is Parameter.empty]
    if missing := [option for option in needed if option not in options]:
        raise ValueError(f"{name} needs the option {missing[0]}")
    for option, value in options.items():
        _check_option(name, takes[option], value)
    FUNCTIONS[name]([], [], [], **options)  # it refuses what makes no sense together


def _check_option(function: str, parameter: Parameter, value: Any) -> None:
    strict = ConfigDict(strict=True, allow_inf_nan=False)
    try:
        TypeAdapter(parameter.annotation, config=strict).validate_python(value)
    except ValidationError as error:
        fault = error.errors(include_url=False)[0]
        raise ValueError(
            f"{function}: the option {parameter.name}: {fault['msg']} (got {value!r})"
        ) from None
