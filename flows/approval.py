"""Asking a person before a run goes on, or its model is promoted.

A deployed run is suspended for it: no process waits, and Resume in the UI starts the run again,
which finds its finished stages in the store. Nothing but a Resume answers: a run that was cancelled
while it waited, and then retried, asks again.
"""

import sys
from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Literal

from stages.base import StageError

if TYPE_CHECKING:
    from prefect.input import RunInput


@dataclass(frozen=True)
class Decision:
    """What a person said."""

    approved: bool
    comment: str = ""


class AskedElsewhere(Exception):
    """Another run waits for the answer to the same question; the text names it."""


Ask = Callable[[str, str], Decision]
"""Called with the question and a key (lowercase letters, digits and dashes), which tells it from
other questions. Raises :class:`AskedElsewhere`."""

WORDS = {"y": True, "yes": True, "n": False, "no": False}


def at_the_terminal(question: str, key: str) -> Decision:
    """Asks until it is answered. Raises ``StageError`` where nobody sits at one."""
    nobody = StageError(
        f"{question}: nobody can be asked here (gate.approval); run it at a terminal or in the "
        "Prefect UI"
    )
    if not sys.stdin.isatty():
        raise nobody
    print(question)
    while True:
        try:
            answer = input("promote it? [y/n, then a comment] ")
        except EOFError:
            raise nobody from None
        word, _, comment = answer.strip().partition(" ")
        if (approved := WORDS.get(word.strip(",.;:!").lower())) is not None:
            return Decision(approved, comment.strip())


def in_the_ui(question: str, key: str) -> Decision:
    """Suspends the flow run around it: raises Prefect's ``Pause`` until the run was resumed with
    an answer. The server refuses a Resume without one, since no default of ours is a decision."""
    from prefect.input import RunInput

    class Answer(RunInput):
        decision: Literal["promote", "turn down"]
        comment: str = ""

    said = _answer(key, Answer.with_initial_data(description=question))
    return Decision(said.decision == "promote", said.comment)


def of_the_plan(key: str) -> None:
    """Suspends the flow run around it until it was resumed; another ``key`` is another plan."""
    _answer(f"plan-{key}", None)


def _answer(key: str, form: "type[RunInput] | None") -> Any:
    """What a Resume said to the question of this flow run, which it is suspended for until then."""
    from prefect.flow_runs import suspend_flow_run
    from prefect.runtime import flow_run
    from pydantic import ValidationError

    asked, resumed = _asked(key)
    if resumed and form is None:
        return None
    if resumed and form is not None:
        try:
            return form.load(resumed.state_details.run_input_keyset, flow_run_id=flow_run.id)
        except ValidationError:  # resumed by force, past the form
            pass
    if form is not None and (other := _waiting_elsewhere(key)):
        raise AskedElsewhere(f"the run {other} waits for the answer")
    return suspend_flow_run(wait_for_input=form, key=f"{key}-{asked}")


def _asked(key: str) -> tuple[int, Any]:
    """(how often this flow run has asked, the suspension if a Resume ended the last one). Prefect
    lets a key suspend a run once, however that ended, so that each time has a key of its own."""
    from uuid import UUID

    from prefect.client.orchestration import get_client
    from prefect.runtime import flow_run

    with get_client(sync_client=True) as client:
        states = client.read_flow_run_states(UUID(str(flow_run.id)))
    ordered = sorted(states, key=lambda state: state.timestamp)
    places = [place for place, state in enumerate(ordered) if _asks(state, key)]
    if not places:
        return 0, None
    after = ordered[places[-1] + 1 :]
    return len(places), ordered[places[-1]] if after and after[0].name == "Resuming" else None


def _asks(state: Any, key: str) -> bool:
    return state.is_paused() and (state.state_details.pause_key or "").startswith(f"{key}-")


def _waiting_elsewhere(key: str) -> str | None:
    """The name of another flow run that is suspended for the same question."""
    from prefect.client.orchestration import get_client
    from prefect.client.schemas.filters import (
        FlowRunFilter,
        FlowRunFilterState,
        FlowRunFilterStateType,
    )
    from prefect.client.schemas.objects import StateType
    from prefect.runtime import flow_run

    paused = FlowRunFilterStateType(any_=[StateType.PAUSED])
    with get_client(sync_client=True) as client:
        found = client.read_flow_runs(
            flow_run_filter=FlowRunFilter(state=FlowRunFilterState(type=paused)), limit=200
        )
    others = (run for run in found if str(run.id) != str(flow_run.id))
    return next((run.name for run in others if run.state and _asks(run.state, key)), None)
