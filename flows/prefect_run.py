"""One run of a deployed flow: its plan first, then its stages, in the end a state that is true."""

import hashlib
import logging
import os
import signal
import time
from collections import deque
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from datetime import UTC, datetime
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

from configs import ConfigError, resolve
from flows import approval, forms, keeper, plan_page, run_names, run_page, runs
from flows.catalogue import Deployable
from flows.command import Preempted
from flows.endings import Ending, first_line
from flows.failures import CANCELLED, PREEMPTED, StageFailed
from flows.prefect_engine import Outcome, as_task
from flows.prefect_watch import Watch, impatient, server_may_be_away
from flows.progress import PASSING
from flows.run_page import Board
from flows.run_stage import Plan, Say
from flows.steps import Artifact, Step

if TYPE_CHECKING:
    from prefect.states import State

Mode = Literal["run", "plan", "ask"]
BackendKind = Literal["as below", "auto", "local", "ddp", "fsdp", "deepspeed"]
LINES_A_SECOND = 5


@dataclass(frozen=True)
class Asked:
    """What the form was filled in with, not yet checked by us."""

    config: Mapping[str, Any]
    mode: Mode = "run"
    backend: BackendKind = "as below"
    overrides: tuple[str, ...] = ()
    late_minutes: int = 30


@dataclass(frozen=True)
class Run:
    """This run, as Prefect knows it."""

    run: Any
    """Prefect's own record of it."""

    record: Path
    """What its keeper reads."""

    say: Say


def carry_out(flow: Deployable, asked: Asked) -> "State[Any]":
    """Called inside a Prefect flow run; its terminal state.

    Raises Prefect's ``Abort`` after a cancelled run's last word but one: the last is its worker's.
    """
    logging.getLogger("prefect.engine").addFilter(_is_news)
    stored = _stored_run()
    if late := _late(stored, asked.late_minutes):
        return Ending("Skipped", late).state()
    home, api = _home_and_api()
    keeper.settle_all(home)
    record = keeper.begin(home, str(stored.id), attempt=stored.run_count, api=api)
    this = Run(stored, record, _limited_say())
    outcome = Outcome[Ending]()
    with outcome, _heeding_signals(record):
        outcome.value = _in_order(flow, asked, this)
    ending = _ending(outcome, this)
    keeper.note(record, ending=asdict(ending))
    if ending.type == "CANCELLED" and keeper.worker_is_alive(keeper.read(record)):
        _leave_it_to_the_worker(this, ending)
    return ending.state()


def _in_order(flow: Deployable, asked: Asked, this: Run) -> Ending:
    config = _config(flow, asked)
    if run_names.GENERATED.fullmatch(this.run.name):
        _rename(this.run.id, run_names.name(config, datetime.now().date()))
    if asked.mode == "plan":
        return Ending("Planned", plan_page.line(_as_plan_task(flow, config, this)))
    with _alone(config, this) as other:
        if other:
            return Ending("Skipped", other)
        plans = _as_plan_task(flow, config, this)
        if asked.mode == "ask":
            approval.of_the_plan(_digest(plans))
        return _run(flow, config, plans, this)


def _config(flow: Deployable, asked: Asked) -> Any:
    """Raises ``ConfigError`` for what only the whole can tell: contradicting fields, say."""
    chosen = asked.backend != "as below"
    keys = forms.trained(flow.schema) if chosen else []
    kinds = [f"{key}.backend.kind={asked.backend}" for key in keys]
    return resolve(
        flow.schema,
        forms.complete(asked.config),
        [*kinds, *asked.overrides],
        place=Path("parameters.config"),
    )


# --- the two parts of a run


def _as_plan_task(flow: Deployable, config: Any, this: Run) -> list[Plan]:
    """The plan of every stage, as a task with a page. Raises ``ConfigError`` for a stage that could
    not run here, before the first one does."""
    from prefect.cache_policies import NO_CACHE
    from prefect.tasks import Task

    outcome = Outcome[list[Plan]]()

    def look_ahead() -> "State[Any]":
        with outcome:
            plans = outcome.value = _plans(flow, config)
            key = run_names.slug(f"plan-{flow.name}-{config.name}")
            _show_plan(plan_page.page(config, plans), key, this)
            if blocked := runs.obstacles(plans):
                raise ConfigError("\n".join(blocked))
            return Ending("Planned", plan_page.line(plans)).state()
        return outcome.state()

    task = Task(look_ahead, name="plan", task_run_name="plan", cache_policy=NO_CACHE,
                persist_result=False, retries=0)  # fmt: skip
    task(return_state=True)
    plans = outcome.result()
    this.say(f"plan: {plan_page.line(plans)}")
    return plans


def _plans(flow: Deployable, config: Any) -> list[Plan]:
    plans: list[Plan] = []

    def look(stage: str, step: Step[Any], *, label: str, **inputs: Artifact) -> Artifact:
        planned = runs.plan_stage(config, stage, step, label=label, inputs=inputs)
        plans.append(planned)
        return planned.promised

    flow.body(config, look)
    return plans


def _run(flow: Deployable, config: Any, plans: list[Plan], this: Run) -> Ending:
    runs.begin(config)
    board = Board(config.name, runs.folder(config), tuple(plans), {})
    key = run_names.slug(f"run-{flow.name}-{config.name}")
    watch = Watch(board, key=key, run=this.run.id, record=this.record)
    outcome = Outcome[list[Artifact]]()
    with outcome, watch:
        outcome.value = flow.body(config, as_task(_executing(config, watch, this)))
    concluded = Outcome[Ending]()
    with concluded:
        artifacts = outcome.result()
        this.say(f"report: {runs.finish(config, artifacts).absolute()}")
        if flow.conclude:
            concluded.value = flow.conclude(config, artifacts, _asking(config, artifacts, watch))
    if concluded.error is not None:
        watch.change(word=first_line(concluded.error))
        watch.finish(run_page.page(watch.board))
    artifacts = outcome.result()
    ending = concluded.result() or Ending("Completed", _counts(artifacts))
    watch.change(word=f"{ending.name}: {ending.message}")
    watch.finish(run_page.final_page(watch.board, runs.describe(config, artifacts)))
    return ending


def _asking(config: Any, artifacts: list[Artifact], watch: Watch) -> approval.Ask:
    """Who has to answer finds the results on the run's page."""

    def ask(question: str, key: str) -> approval.Decision:
        watch.change(word=f"waits for an answer (Resume): {question}")
        watch.finish(run_page.final_page(watch.board, runs.describe(config, artifacts)))
        return approval.in_the_ui(question, key)

    return ask


def _executing(config: Any, watch: Watch, this: Run) -> Any:
    def begins(planned: Plan) -> None:
        if not planned.finished:
            outlives = getattr(planned.step.placement, "on_parent_exit", "stop") == "keep"
            out = planned.out.absolute()
            keeper.note(this.record, out=str(out), label=planned.label, outlives=outlives)
            this.say(f"{planned.label}: full log: {out / 'log.txt'}")
        watch.change(current=planned.label)

    def queued(why: str) -> None:
        _set_running(this, "Queued" if why else "Running", why)

    def execute(stage: str, step: Step[Any], *, label: str, **inputs: Artifact) -> Artifact:
        artifact = runs.carry_out(
            config, stage, step, label=label, inputs=inputs, say=this.say, queued=queued,
            begins=begins,
        )  # fmt: skip
        watch.change(current="", done={**watch.board.done, label: artifact})
        return artifact

    return execute


def _counts(artifacts: Sequence[Artifact]) -> str:
    states = [each.status for each in artifacts]
    counts = {name: states.count(name) for name in ("reused", "resumed", "ran")}
    return ", ".join(f"{number} {name}" for name, number in counts.items() if number)


# --- how it ends


def _ending(outcome: Outcome[Ending], this: Run) -> Ending:
    error = outcome.error
    if error is None:
        assert outcome.value is not None
        return outcome.value
    facts = keeper.read(this.record)
    if isinstance(error, KeyboardInterrupt):
        what = keeper.stopped(facts)
        if _is_cancelling(this):
            return Ending("Cancelled", f"cancelled {what}", "CANCELLED")
        return Ending("Preempted", f"stopped from outside {what}; Retry goes on", "CRASHED")
    if isinstance(error, StageFailed) and error.kind in (PREEMPTED, CANCELLED):
        return Ending("Preempted", first_line(error), "CRASHED")
    if not isinstance(error, StageFailed | ConfigError | ValueError | OSError):
        logging.getLogger("prefect.flow_runs").error("%s", error, exc_info=error)
    this.say(str(error))
    return Ending("Failed", first_line(error), "FAILED")


def _is_cancelling(this: Run) -> bool:
    """A server that does not answer has not asked for anything."""
    import httpx
    from prefect.client.orchestration import get_client
    from prefect.exceptions import PrefectHTTPStatusError

    try:
        with get_client(sync_client=True) as client:
            state = client.read_flow_run(this.run.id).state
    except (httpx.TransportError, PrefectHTTPStatusError):
        return False
    return state is not None and (state.is_cancelling() or state.is_cancelled())


def _leave_it_to_the_worker(this: Run, ending: Ending) -> None:
    """Once this process is gone its worker calls the run cancelled, whatever it is by then: Retry,
    which is offered for a run that has ended, would be undone. So it has not ended until then, and
    the keeper adds what became of it. A run that was not asked to be cancelled through Prefect's
    ``Cancelling`` is not heeded by the worker."""
    from prefect.client.orchestration import get_client
    from prefect.client.schemas.objects import StateType
    from prefect.exceptions import Abort
    from prefect.states import State

    state = State(type=StateType.CANCELLING, name="Stopping", message=ending.message)
    with impatient(), server_may_be_away(), get_client(sync_client=True) as client:
        found = client.read_flow_run(this.run.id).state
        if found is None or not found.is_cancelling():
            return
        client.set_flow_run_state(this.run.id, state, force=True)
    # The engine would call this run, which was asked to end, aborted by the orchestrator.
    logging.getLogger("prefect.engine").addFilter(lambda each: "aborted by" not in str(each.msg))
    raise Abort(ending.message)


@contextmanager
def _heeding_signals(record: Path) -> Iterator[None]:
    """The first SIGTERM (a worker's, for a cancelled run) or SIGUSR1 (a scheduler's) stops the run
    in order; later ones find it at that already."""

    def stop(*_: object) -> None:
        for number in (signal.SIGTERM, signal.SIGUSR1):
            signal.signal(number, signal.SIG_IGN)
        facts = keeper.read(record)
        processes = keeper.processes_of(Path(facts["out"])) if "out" in facts else 0
        keeper.note(record, asked=True, processes=processes)
        raise Preempted

    before = {number: signal.signal(number, stop) for number in (signal.SIGTERM, signal.SIGUSR1)}
    try:
        yield
    finally:
        for number, handler in before.items():
            if not keeper.read(record).get("asked"):
                signal.signal(number, handler)


# --- whether it starts


def _late(run: Any, minutes: int) -> str | None:
    """Why a scheduled run that comes late is not carried out."""
    if not _comes_by_schedule(run) or run.expected_start_time is None:
        return None
    late = (datetime.now(UTC) - run.expected_start_time).total_seconds() / 60
    if late <= minutes:
        return None
    return (
        f"scheduled for {run.expected_start_time:%Y-%m-%d %H:%M} UTC and {late:.0f} minutes late; "
        f"the limit is {minutes} (late_minutes)"
    )


def _comes_by_schedule(run: Any) -> bool:
    """A run that somebody resumed or retried has been asked for since."""
    return run.auto_scheduled and run.run_count <= 1


@contextmanager
def _alone(config: Any, this: Run) -> Iterator[str | None]:
    """Hold the run folder's lock. A scheduled run that finds it held does not start, and gets the
    reason; another waits for it, and its state says so."""
    with runs.lock(config) as take:
        if not take():
            if _comes_by_schedule(this.run):
                yield f"an earlier run named {config.name} is still at work; runs do not overlap"
                return
            _set_running(this, "Queued", f"waits for an earlier run named {config.name} to end")
            runs.wait_for(take, poll=lambda: _heed_cancelling(this))
            _set_running(this, "Running", "")
        yield None


def _heed_cancelling(this: Run) -> None:
    """Once its worker was killed, nobody else tells a run that waits."""
    if _is_cancelling(this):
        os.kill(os.getpid(), signal.SIGTERM)


# --- Prefect


def _stored_run() -> Any:
    from prefect.client.orchestration import get_client
    from prefect.runtime import flow_run

    with get_client(sync_client=True) as client:
        return client.read_flow_run(flow_run.id)  # run_count and all, as the server has them


def _home_and_api() -> tuple[Path, str | None]:
    from prefect.settings import get_current_settings

    settings = get_current_settings()
    return settings.home, settings.api.url


def _rename(run: Any, name: str) -> None:
    from prefect.client.orchestration import get_client

    with get_client(sync_client=True) as client:
        client.update_flow_run(run, name=name)


def _set_running(this: Run, name: str, message: str) -> None:
    from prefect.client.orchestration import get_client
    from prefect.client.schemas.objects import StateType
    from prefect.states import State

    state = State(type=StateType.RUNNING, name=name, message=message)
    with impatient(), server_may_be_away(), get_client(sync_client=True) as client:
        found = client.read_flow_run(this.run.id).state
        if found is not None and (found.is_cancelling() or found.is_cancelled()):
            return  # that is the word that counts, and it would be overwritten
        client.set_flow_run_state(this.run.id, state, force=True)
        # The server counts each entry into a running state as a run.
        keeper.note(this.record, attempt=client.read_flow_run(this.run.id).run_count)


def _digest(plans: Sequence[Plan]) -> str:
    """Tells a plan from every other: what will be computed, from what."""
    text = " ".join(each.identity.fingerprint for each in plans)
    return hashlib.sha256(text.encode()).hexdigest()[:16]


def _show_plan(text: str, key: str, this: Run) -> None:
    from prefect.client.orchestration import get_client
    from prefect.client.schemas.actions import ArtifactCreate
    from prefect.runtime import task_run

    with get_client(sync_client=True) as client:
        client.create_artifact(
            ArtifactCreate(
                key=key, type="markdown", description="What the run will do, and why", data=text,
                flow_run_id=this.run.id, task_run_id=task_run.id,
            )
        )  # fmt: skip


def _is_news(record: logging.LogRecord) -> bool:
    """Prefect's engine ends with a traceback of its own for every state that is not Completed; what
    there is to say stands in the state, and in the log above."""
    from prefect.exceptions import CancelledRun, CrashedRun, FailedRun

    error = record.exc_info[1] if record.exc_info else None
    return not isinstance(error, CancelledRun | CrashedRun | FailedRun)


def _limited_say() -> Say:
    """The run's log, for people: progress fills it up to five lines a second, and whatever is said
    once is always said. The stages' own logs are files."""
    from prefect.logging import get_run_logger

    spoken: deque[float] = deque(maxlen=LINES_A_SECOND)

    def say(text: str) -> None:
        now = time.monotonic()
        full = len(spoken) == LINES_A_SECOND and now - spoken[0] < 1.0
        if full and PASSING.match(text):
            return
        spoken.append(now)
        get_run_logger().info("%s", text)

    return say
