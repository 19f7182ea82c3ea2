"""What the server does by itself, watched: with a real server, a frozen flow and a real event."""

import signal
import subprocess
import sys
import time
from datetime import UTC, datetime
from pathlib import Path
from uuid import uuid4

import pytest

from flows.automations import DATASET_UPDATED, DEAD_AFTER
from tests.flows import product
from tests.flows.product import Product

TINY, RETRAIN = "sft-then-dpo/tiny", "retrain/tiny"
LONG = [*product.ENDLESS, "conversations.config.source.rows=450", "name=frozen"]


@pytest.mark.slow
def test_dead_runs_crash_waiting_ones_do_not_and_an_event_starts_a_retraining(
    tmp_path: Path,
) -> None:
    with product.serving(tmp_path) as served:
        create_automations(served)
        asks = product.submit(served.api, TINY, mode="ask", overrides=["name=asks"])["id"]
        product.until(served.api, asks, "Suspended", seconds=120)
        run = product.submit(served.api, TINY, overrides=LONG)["id"]
        product.wait_for(lambda: product.steps_done(served.home, "sft") > 5)
        (flow,) = product.flow_processes(served.home)
        time.sleep(65)  # it has sent a heartbeat
        flow.send_signal(signal.SIGSTOP)
        try:
            started = started_by_an_event(served)
            seconds = DEAD_AFTER.total_seconds() + 60
            dead = product.until(served.api, run, "Crashed", seconds=seconds)
            assert "no heartbeat for 200 s; Retry goes on" in dead["state"]["message"]
        finally:
            flow.send_signal(signal.SIGCONT)
        product.wait_for(
            lambda: state_of(served, run) == ("Running", "goes on: it was taken for dead"), 60
        )
        product.cancel(served.api, run)
        product.until(served.api, run, "Cancelled", seconds=60)
        assert product.run_of(served.api, asks)["state"]["name"] == "Suspended"
        assert started["deployment_id"] == product.deployment(served.api, RETRAIN)["id"]


def state_of(served: Product, run: str) -> tuple[str, str]:
    state = product.run_of(served.api, run)["state"]
    return state["name"], state["message"]


def create_automations(served: Product) -> None:
    env = product.environment(served.home, PREFECT_API_URL=served.api)
    command = [sys.executable, "-m", "flows.deploy", "--automations"]
    done = subprocess.run(command, env=env, cwd=served.home, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    assert "automation: Dead runs become Crashed" in done.stdout


def started_by_an_event(served: Product) -> dict[str, str]:
    """The run that the event has started; it is cancelled, since only its start is of interest."""
    runs = {"deployments": {"name": {"any_": ["tiny"]}}, "flows": {"name": {"any_": ["retrain"]}}}
    assert product.ask(served.api, "/flow_runs/filter", runs) == []
    event = {
        "id": str(uuid4()),
        "occurred": datetime.now(UTC).isoformat(),
        "event": DATASET_UPDATED,
        "resource": {"prefect.resource.id": "dataset.mine"},
    }
    product.ask(served.api, "/events", [event])
    product.wait_for(lambda: product.ask(served.api, "/flow_runs/filter", runs), 30)
    (found,) = product.ask(served.api, "/flow_runs/filter", runs)
    product.cancel(served.api, found["id"])
    product.until(served.api, found["id"], "Cancelled", "Stopping", seconds=60)
    return found
