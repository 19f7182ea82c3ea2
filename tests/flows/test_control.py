"""Cancel means stopped and Retry means resume, whatever is killed: the real product, real ranks."""

import fcntl
import json
import os
import re
import signal
import time
from collections.abc import Iterator
from datetime import UTC, datetime, timedelta
from types import SimpleNamespace
from typing import Any

import psutil
import pytest

from flows import prefect_run
from tests.flows import product
from tests.flows.product import Product

TINY = "sft-then-dpo/tiny"
# Everything short but SFT, which is long enough to be stopped in the middle and saved often.
LONG_SFT = [
    "conversations.config.source.rows=6000",
    "preferences.config.source.rows=150",
    "sft.save_every=10",
    "dpo.config.max_steps=4",
    "evaluate.config.generate_rows=4",
]
SAVED = r"checkpoint of step \d+ saved, \d+ processes ended, 0 left"


@pytest.fixture(scope="module")
def served(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Product]:
    with product.serving(tmp_path_factory.mktemp("control")) as running:
        yield running


def train(served: Product, *overrides: str, name: str) -> str:
    """A run whose SFT is some steps in; each learning rate is other work."""
    run = product.submit(served.api, TINY, overrides=[*LONG_SFT, f"name={name}", *overrides])["id"]
    before = sft_files(served)
    product.wait_for(lambda: len(sft_files(served)) > len(before) and newest_step(served) > 14)
    return run


def sft_files(served: Product) -> list[Any]:
    return list((served.home / "store" / "sft").glob("*/metrics.jsonl"))


def newest_step(served: Product) -> int:
    newest = max(sft_files(served), key=lambda path: path.stat().st_mtime)
    return len(newest.read_text().splitlines())


def worker_process(served: Product) -> psutil.Process:
    children = psutil.Process(served.process.pid).children()
    (found,) = [each for each in children if "worker" in " ".join(product.cmdline(each))]
    return found


def assert_settled(served: Product, run: str) -> None:
    """Nothing is left of the run, and Prefect does not say otherwise of any task."""
    assert product.ranks(served.home) == []
    product.until_tasks(
        served.api, run, lambda tasks: not {"Running", "Pending"} & set(tasks.values())
    )


def assert_resumes(served: Product, run: str) -> None:
    product.retry(served.api, run)
    product.until(served.api, run, "Running", seconds=60)
    product.until(served.api, run, "Completed")
    right = {"fetch model": "Reused", "tokenize data": "Reused", "sft": "Resumed"}
    product.until_tasks(served.api, run, lambda tasks: right.items() <= tasks.items())


@pytest.mark.slow
def test_cancel_saves_stops_and_says_so_and_retry_resumes(served: Product) -> None:
    run = train(served, "sft.config.learning_rate=1.0e-3", name="cancelled")
    assert len(product.ranks(served.home)) >= 3
    product.cancel(served.api, run)
    asked = time.monotonic()
    product.until(served.api, run, "Stopping", "Cancelled", seconds=10)
    assert time.monotonic() - asked < 6
    product.cancel(served.api, run)  # an impatient second click
    product.until(served.api, run, "Cancelled", seconds=60)
    assert product.ranks(served.home) == []
    told = re.compile(rf"cancelled at sft, step \d+ of \d+, {SAVED}")
    product.wait_for(lambda: told.fullmatch(state_of(served, run)["message"]), 3)
    product.until_tasks(served.api, run, lambda tasks: tasks.get("sft") == "Cancelled")
    assert_settled(served, run)
    assert_resumes(served, run)


@pytest.mark.slow
def test_a_killed_flow_ends_its_ranks_and_retry_resumes(served: Product) -> None:
    run = train(served, "sft.config.learning_rate=1.1e-3", name="killed")
    (flow,) = product.flow_processes(served.home)
    flow.kill()
    product.until(served.api, run, "Crashed", seconds=60)
    product.wait_for(lambda: "Retry goes on" in state_of(served, run)["message"], 90)
    assert re.search(r"checkpoint of step \d+ saved", state_of(served, run)["message"])
    assert_settled(served, run)
    assert_resumes(served, run)


def state_of(served: Product, run: str) -> dict[str, Any]:
    return product.run_of(served.api, run)["state"]


@pytest.mark.slow
def test_training_goes_on_without_its_worker_and_can_still_be_cancelled(served: Product) -> None:
    run = train(served, "sft.config.learning_rate=1.2e-3", name="orphaned")
    first = worker_process(served)
    first.kill()
    step = newest_step(served)
    product.wait_for(lambda: newest_step(served) > step + 3, 60)
    product.wait_for(lambda: worker_process(served).pid != first.pid, 30)
    product.cancel(served.api, run)
    found = product.until(served.api, run, "Cancelled", seconds=60)
    assert re.search(SAVED, found["state"]["message"])
    assert_settled(served, run)


@pytest.mark.slow
def test_a_run_outlives_its_server_and_ends_true(served: Product) -> None:
    run = train(served, "sft.config.learning_rate=1.3e-3", name="outage")
    children = psutil.Process(served.process.pid).children()
    (server,) = [each for each in children if "server" in " ".join(product.cmdline(each))]
    server.kill()
    product.wait_for(lambda: api_answers(served), 90)
    found = product.until(served.api, run, "Completed")
    assert found["state"]["message"].endswith("ran")
    assert_settled(served, run)


@pytest.mark.slow
def test_training_goes_on_while_its_server_hangs_for_five_minutes(served: Product) -> None:
    run = train(served, "sft.config.learning_rate=1.5e-3", name="hanging")
    children = psutil.Process(served.process.pid).children()
    (server,) = [each for each in children if "server" in " ".join(product.cmdline(each))]
    before = newest_step(served)
    server.send_signal(signal.SIGSTOP)
    try:
        product.wait_for(lambda: newest_step(served) > before + 20, 120)
        time.sleep(300)
    finally:
        server.send_signal(signal.SIGCONT)
    product.wait_for(lambda: state_of(served, run)["type"] == "COMPLETED", 300)
    assert state_of(served, run)["message"].endswith("ran")
    assert_settled(served, run)


def api_answers(served: Product) -> bool:
    try:
        return bool(product.ask(served.api, "/health"))
    except OSError:
        return False


@pytest.mark.slow
def test_a_run_that_waits_can_be_cancelled_though_its_worker_was_killed(served: Product) -> None:
    lock = served.home / "runs" / ".held.lock"
    lock.parent.mkdir(exist_ok=True)
    with lock.open("w") as held:
        fcntl.flock(held, fcntl.LOCK_EX)
        run = product.submit(served.api, TINY, overrides=["name=held"])["id"]
        product.until(served.api, run, "Queued", seconds=60)
        worker_process(served).kill()
        product.cancel(served.api, run)
        product.until(served.api, run, "Cancelled", seconds=30)
        product.wait_for(lambda: not product.flow_processes(served.home), 30)
    told = state_of(served, run)["message"]
    assert told == "cancelled before it had anything to run"


@pytest.mark.slow
def test_a_run_of_the_same_name_waits_and_its_state_says_so(served: Product) -> None:
    first = product.submit(served.api, TINY, overrides=[*product.SHORT, "name=twice"])["id"]
    product.until_tasks(served.api, first, lambda tasks: "plan" in tasks)
    second = product.submit(served.api, TINY, overrides=[*product.SHORT, "name=twice"])["id"]
    waiting = product.until(served.api, second, "Queued", seconds=60)
    assert waiting["state"]["message"] == "waits for an earlier run named twice to end"
    product.until(served.api, first, "Completed")
    product.until(served.api, second, "Completed")
    assert_all_reused(served, second)


@pytest.mark.slow
def test_what_a_stage_waits_for_is_the_runs_state(served: Product) -> None:
    words = [*product.SHORT, "sft.config.learning_rate=1.4e-3"]
    first, second = (
        product.submit(served.api, TINY, overrides=[*words, f"name={name}"])["id"]
        for name in ("one", "other")
    )
    waiting = product.until_any(served.api, (first, second), "Queued", seconds=120)
    assert waiting["state"]["message"].endswith(": another run is making this; waiting for it")
    for run in (first, second):
        product.until(served.api, run, "Completed")
    product.until_tasks(served.api, waiting["id"], lambda tasks: "Reused" in tasks.values())


@pytest.mark.slow
def test_a_run_that_asks_holds_no_process_and_goes_on_when_resumed(served: Product) -> None:
    run = product.submit(served.api, TINY, mode="ask", overrides=[*product.SHORT, "name=asks"])[
        "id"
    ]
    assert_suspended(served, run)
    product.until_tasks(served.api, run, lambda tasks: tasks == {"plan": "Planned"})
    assert_asks_again_once_cancelled_and_retried(served, run)
    assert not (served.home / "runs" / "asks").exists()
    product.resume(served.api, run)
    done = product.until(served.api, run, "Completed")
    assert done["state"]["message"]


@pytest.mark.slow
def test_another_plan_than_the_one_that_was_agreed_to_is_asked_about(served: Product) -> None:
    rows = served.home / "rows.jsonl"
    rows.write_text(asked_and_answered(60))
    source = f"conversations.config.source={{kind: local_data, path: {rows}}}"
    words = [*product.SHORT[1:], "name=moved", source]
    run = product.submit(served.api, TINY, mode="ask", overrides=words)["id"]
    assert_suspended(served, run)
    rows.write_text(asked_and_answered(61))
    product.resume(served.api, run)
    product.until(served.api, run, "Running", seconds=60)
    assert_suspended(served, run)
    product.cancel(served.api, run)


def asked_and_answered(num: int) -> str:
    turns = ({"role": "user", "content": "{} m = ? cm"}, {"role": "assistant", "content": "{}00"})
    rows = [
        {"messages": [turn | {"content": turn["content"].format(n)} for turn in turns]}
        for n in range(num)
    ]
    return "".join(f"{json.dumps(row)}\n" for row in rows)


@pytest.mark.slow
def test_a_model_waits_for_a_person_without_a_process(served: Product) -> None:
    words = [*product.SHORT, "name=judged", "gate.approval=true"]
    run = product.submit(served.api, "retrain/tiny", overrides=words)["id"]
    assert_suspended(served, run)
    pages = [each["data"] for each in product.artifacts_of(served.api, run)]
    assert any("waits for an answer (Resume)" in page and "held-out" in page for page in pages)
    assert_asks_again_once_cancelled_and_retried(served, run)
    pointer = served.home / "store" / "promoted" / "judged" / "current"
    assert not pointer.exists()
    refusal = product.resume(served.api, run)
    assert refusal["status"] == "REJECT" and "'decision' is a required" in str(refusal), refusal
    assert state_of(served, run)["name"] == "Suspended"

    second = product.submit(served.api, "retrain/tiny", overrides=words)["id"]
    found = product.until(served.api, second, "Nothing new")
    assert "waits for the answer" in found["state"]["message"]

    product.resume(served.api, run, decision="turn down", comment="not today")
    done = product.until(served.api, run, "Turned down")
    assert done["state"]["message"].startswith("the first of its name; not today")
    assert_all_reused(served, run)
    assert not pointer.exists()


def assert_asks_again_once_cancelled_and_retried(served: Product, run: str) -> None:
    product.cancel(served.api, run)
    product.until(served.api, run, "Cancelled", seconds=30)
    product.retry(served.api, run)
    product.until(served.api, run, "Running", seconds=60)
    assert_suspended(served, run)


def assert_all_reused(served: Product, run: str) -> None:
    def right(tasks: dict[str, str]) -> bool:
        return {state for task, state in tasks.items() if task != "plan"} == {"Reused"}

    product.until_tasks(served.api, run, right)


def assert_suspended(served: Product, run: str) -> None:
    """The run waits for a person and nothing else of it is there, its keeper included."""
    product.until(served.api, run, "Suspended", seconds=300)
    product.wait_for(lambda: not product.flow_processes(served.home), 30)
    product.wait_for(lambda: not list(served.home.glob("prefect/deployed-runs/*.json")), 30)
    assert product.ranks(served.home) == []
    time.sleep(3)
    assert state_of(served, run)["name"] == "Suspended"


@pytest.mark.slow
def test_ctrl_c_preempts_what_runs_and_the_next_start_can_retry_it(
    tmp_path_factory: pytest.TempPathFactory,
) -> None:
    home = tmp_path_factory.mktemp("preempted")
    with product.serving(home) as served:
        run = train(served, name="preempted")
        os.killpg(served.process.pid, signal.SIGINT)
        assert served.process.wait(120) == 0
    assert product.ranks(home) == []
    with product.serving(home) as again:
        product.wait_for(lambda: state_of(again, run)["type"] == "CRASHED", 60)
        assert_resumes(again, run)


@pytest.mark.slow
def test_ctrl_c_also_stops_a_run_whose_worker_was_killed(
    tmp_path_factory: pytest.TempPathFactory,
) -> None:
    home = tmp_path_factory.mktemp("left")
    with product.serving(home) as served:
        train(served, name="left")
        worker_process(served).kill()
        step = newest_step(served)
        product.wait_for(lambda: newest_step(served) > step + 3, 60)
        os.killpg(served.process.pid, signal.SIGINT)
        assert served.process.wait(60) == 0
    assert product.ranks(home) == []


def late_run(minutes: float, **facts: Any) -> Any:
    start = datetime.now(UTC) - timedelta(minutes=minutes)
    return SimpleNamespace(
        **{"auto_scheduled": True, "run_count": 1, "expected_start_time": start} | facts
    )


def test_only_a_scheduled_run_that_is_late_and_new_skips_itself() -> None:
    assert "45 minutes late; the limit is 30" in (prefect_run._late(late_run(45), 30) or "")
    assert prefect_run._late(late_run(20), 30) is None
    assert prefect_run._late(late_run(45, auto_scheduled=False), 30) is None
    assert prefect_run._late(late_run(45, run_count=2), 30) is None
