"""Carry out a pipeline as a Prefect flow run: its body is the flow, each stage a task.

Prefect is imported inside the functions: that takes a second or two, which ``--engine inline``
need not pay and which passes here while the server starts.
"""

import gc
import logging
import os
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from types import TracebackType
from typing import TYPE_CHECKING, Any, Generic, TypeVar

from flows.endings import Ending
from flows.failures import CANCELLED, PREEMPTED, StageFailed
from flows.prefect_server import Api, PrefectError, reach_loopback, require_home, starting
from flows.steps import Artifact, Runner, Step
from stages.training import Training

if TYPE_CHECKING:
    from prefect.flows import Flow
    from prefect.states import State

T = TypeVar("T")
C = TypeVar("C")

STATE_NAMES = {"reused": "Reused", "resumed": "Resumed"}
"""What the state of a finished stage is called, by its artifact's status; else Trained where it
trains, or Completed."""

FLUSH_SECONDS = 5.0


def run_flow(
    body: Callable[[C, Runner], T],
    config: C,
    run: Runner,
    *,
    name: str,
    run_name: str,
    say: Callable[[str], None],
) -> T:
    """``body(config, run)``, recorded as the run ``run_name`` of the Prefect flow ``name``.

    ``say`` shows one line to the user. What the body raises is raised unchanged, after Prefect has
    recorded it; an ``Ending`` that it returns is the run's state. Raises :class:`PrefectError` when
    the run cannot be recorded from its start; a server that is lost later costs the record and
    never the run.
    """
    require_home()
    reach_loopback()
    with starting(say) as ready:
        _import_prefect()
        _leave_the_terminal_alone()
        api = ready()
        outcome, recording = Outcome[T](), Outcome[None]()
        flow = _as_flow(body, run, outcome, api=api, name=name, run_name=run_name, say=say)
        with _settings(api):
            with recording:
                state = flow(config, return_state=True)
                api.note("end", str(state.state_details.flow_run_id))
            _flush()
    if recording.error and not outcome.ended:
        if not isinstance(recording.error, Exception):
            raise recording.error
        raise PrefectError(
            f"Prefect at {api.url} did not accept the run ({_first_line(recording.error)}); "
            "--engine inline runs without Prefect"
        ) from recording.error
    if recording.error:
        say(
            f"warning: Prefect at {api.url} has lost track of this run "
            f"({_first_line(recording.error)}); its outputs are as they should be"
        )
    return outcome.result()


def as_task(run: Runner) -> Runner:
    """``run`` with each call recorded as a task run of the flow run around it.

    The task ends in the state that the artifact's status names, or fails with the first line of
    the error as its message; the caller gets the artifact or the error itself. Artifacts given as
    inputs become the edges of the graph in the UI.
    """
    from prefect.cache_policies import NO_CACHE
    from prefect.logging import get_run_logger
    from prefect.tasks import Task

    def run_as_task(stage: str, step: Step[Any], *, label: str, **inputs: Artifact) -> Artifact:
        outcome = Outcome[Artifact]()

        def carry_out(**inputs: Artifact) -> "State[Any]":
            with outcome:
                outcome.value = run(stage, step, label=label, **inputs)
            if isinstance(outcome.error, Exception):
                get_run_logger().error("%s", outcome.error, exc_info=outcome.error)
            return outcome.state(_state_name(step, outcome.value))

        task = Task(
            carry_out,
            name=stage,
            task_run_name=lambda: label,  # a plain string would be a template
            cache_policy=NO_CACHE,  # the manifest in the store is the only cache
            persist_result=False,
            retries=0,
        )
        task(**inputs, return_state=True)
        return outcome.result()

    return run_as_task


class Outcome(Generic[T]):
    """What a block of work gave or raised, kept where Prefect does not reach it.

    Prefect would log every exception with its traceback and store its ``repr``. So the block
    around the work holds the error back, Prefect is told a state, and `result` raises the error
    where its caller expects it.
    """

    value: T | None = None
    error: BaseException | None = None
    ended: bool = False

    def __enter__(self) -> "Outcome[T]":
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> bool:
        self.error, self.ended = error, True
        return isinstance(error, (Exception, KeyboardInterrupt))

    def result(self) -> T:
        if self.error is not None:
            raise self.error
        return self.value  # pyright: ignore[reportReturnType]  # set unless there is an error

    def state(self, name: str = "Completed") -> "State[Any]":
        """The terminal state that tells Prefect of this outcome; ``name`` is that of success."""
        from prefect.states import Cancelled, Completed, Crashed, Failed

        if isinstance(self.error, KeyboardInterrupt):
            return Cancelled(message=_first_line(self.error))
        if isinstance(self.error, StageFailed) and self.error.kind in (PREEMPTED, CANCELLED):
            return Crashed(name="Preempted", message=_first_line(self.error))
        if self.error is not None:
            return Failed(message=_first_line(self.error))
        if isinstance(self.value, Ending):
            return self.value.state()
        return Completed(name=name, data=self.value)


def _state_name(step: Step[Any], artifact: Artifact | None) -> str:
    made = "Trained" if isinstance(getattr(step, "config", None), Training) else "Completed"
    return STATE_NAMES.get(artifact.status, made) if artifact else made


def _as_flow(
    body: Callable[[C, Runner], T],
    run: Runner,
    outcome: Outcome[T],
    *,
    api: Api,
    name: str,
    run_name: str,
    say: Callable[[str], None],
) -> "Flow[Any, Any]":
    from prefect.flows import Flow
    from prefect.runtime import flow_run
    from prefect.utilities.urls import url_for

    def noted(stage: str, step: Step[Any], *, label: str, **inputs: Artifact) -> Artifact:
        api.note("task", flow_run.id)
        return run(stage, step, label=label, **inputs)

    def pipeline(config: Any) -> "State[Any]":
        api.note("run", flow_run.id)
        if not api.temporary:
            say(f"Prefect run: {url_for('flow-run', obj_id=flow_run.id)}")
        with outcome:
            outcome.value = body(config, as_task(noted))
        return outcome.state()

    class Recorded(Flow[Any, Any]):
        def serialize_parameters(self, parameters: dict[str, Any]) -> dict[str, Any]:
            """The same JSON, without the half second that importing FastAPI for it takes."""
            return {name: value.model_dump(mode="json") for name, value in parameters.items()}

    return Recorded(
        pipeline,
        name=name,
        flow_run_name=lambda: run_name,
        validate_parameters=False,  # a config is valid since it was made
        persist_result=False,
        retries=0,
    )


def _import_prefect() -> None:
    os.environ.setdefault("DO_NOT_TRACK", "1")  # no first-use notice, no calls home
    gc.disable()  # a tenth of the time
    import prefect.main  # noqa: F401  # the module that also sets up logging

    gc.freeze()  # what was imported stays; later collections need not walk it
    gc.enable()


@contextmanager
def _settings(api: Api) -> Iterator[None]:
    """Prefect's settings for the time of a run.

    Its own ``temporary_settings`` reads the environment and the profiles anew, which takes an
    eighth of a second.
    """
    from prefect.context import SettingsContext, get_settings_context

    context = get_settings_context()
    settings = context.settings
    changed: dict[str, Any] = {"api": settings.api.model_copy(update={"url": api.url})}
    if "heartbeat_frequency" not in settings.flows.model_fields_set:
        # The recorder sees us end; Prefect's heartbeat makes every run up to a second longer.
        changed["flows"] = settings.flows.model_copy(update={"heartbeat_frequency": None})
    if api.temporary:
        # It can be busy but does not come back: 14 s of patience in place of a minute.
        changed["client"] = settings.client.model_copy(update={"max_retries": 3})
    mine = settings.model_copy(update=changed)
    with SettingsContext(profile=context.profile, settings=mine):
        yield


def _flush() -> None:
    """Send what Prefect still holds, for a bounded time and before the server may end."""
    from prefect.events.worker import EventsWorker
    from prefect.logging.handlers import APILogWorker

    EventsWorker.drain_all(timeout=FLUSH_SECONDS)
    APILogWorker.drain_all(timeout=FLUSH_SECONDS)


def _leave_the_terminal_alone() -> None:
    """Leave Prefect's log to its server, unless the user has set PREFECT_LOGGING_LEVEL."""
    from prefect.settings import get_current_settings

    if "level" in get_current_settings().logging.model_fields_set:
        return
    logging.raiseExceptions = False  # or each line that a lost server misses is complained of
    for name in (None, "prefect._internal"):
        for handler in logging.getLogger(name).handlers:
            handler.addFilter(_is_not_prefect)


def _is_not_prefect(record: logging.LogRecord) -> bool:
    import prefect

    said_in = Path(record.pathname)
    return not (record.name.startswith("prefect") or said_in.is_relative_to(prefect.__path__[0]))


def _first_line(error: BaseException) -> str:
    if isinstance(error, KeyboardInterrupt):
        return str(error) or "stopped by Ctrl-C"
    return next(iter(str(error).splitlines()), "") or type(error).__name__
