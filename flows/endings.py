"""How a run ended, in the words of Prefect's states."""

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Literal

if TYPE_CHECKING:
    from prefect.states import State

Type = Literal["COMPLETED", "FAILED", "CRASHED", "CANCELLED"]


@dataclass(frozen=True)
class Ending:
    """A terminal state."""

    name: str
    """What the UI shows: ``Completed``, ``Skipped``, ``Preempted``, ``Refused by gate``."""

    message: str = ""
    type: Type = "COMPLETED"
    """Prefect's own class of it, which decides colour, automations and whether Retry is offered."""

    def state(self) -> "State[Any]":
        from prefect.client.schemas.objects import StateType
        from prefect.states import State

        return State(type=StateType[self.type], name=self.name, message=self.message)


def first_line(error: BaseException) -> str:
    """What a state's message can hold of an error."""
    return next(iter(str(error).splitlines()), "") or type(error).__name__
