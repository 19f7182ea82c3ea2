"""Asking a person before a run goes on, or its model is promoted.

A deployed run is suspended for it: no process waits, and Resume in the UI starts the run again,
which finds its finished stages in the store.
"""

import sys
from collections.abc import Callable
from dataclasses import dataclass
from typing import Literal

from stages.base import StageError


@dataclass(frozen=True)
class Decision:
    """What a person said."""

    approved: bool
    comment: str = ""


Ask = Callable[[str, str], Decision]
"""Called with the question and a key; the same key is never asked twice within a run."""


def at_the_terminal(question: str, key: str) -> Decision:
    """Raises ``StageError`` where nobody sits at one."""
    if not sys.stdin.isatty():
        raise StageError(
            f"{question}: nobody can be asked here (gate.approval); run it at a terminal or in "
            "the Prefect UI"
        )
    answer = input(f"{question}\npromote it? [y/N, then a comment] ")
    word, _, comment = answer.strip().partition(" ")
    return Decision(word.lower() in ("y", "yes"), comment)


def in_the_ui(question: str, key: str) -> Decision:
    """Suspends the flow run around it: raises Prefect's ``Pause`` until the run was resumed with
    an answer. The server refuses a Resume without one, since no default of ours is a decision."""
    from prefect.flow_runs import suspend_flow_run
    from prefect.input import RunInput

    class Answer(RunInput):
        decision: Literal["promote", "turn down"]
        comment: str = ""

    form = Answer.with_initial_data(description=question)
    said = suspend_flow_run(wait_for_input=form, key=key)
    return Decision(said.decision == "promote", said.comment)


def of_the_plan() -> None:
    """Suspends the flow run around it until it was resumed."""
    from prefect.flow_runs import suspend_flow_run

    suspend_flow_run(key="plan")
