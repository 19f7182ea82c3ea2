"""The product on PostgreSQL, as one server for several people has it."""

from collections.abc import Iterator
from dataclasses import dataclass
from datetime import UTC, datetime, timedelta
from typing import Any

import pytest

from flows import keeper
from tests.flows import product
from tests.flows.postgresql import INITDB, Database, postgresql
from tests.flows.product import Product

pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(INITDB is None, reason="PostgreSQL is not here (Debian: postgresql)"),
]
TINY = "sft-then-dpo/tiny"
NUM_RUNS = 50
NOTICE = timedelta(seconds=60)
"""The server looks for new schedules every few seconds; a busy one takes longer to see fifty."""


@dataclass(frozen=True)
class Served:
    product: Product
    database: Database

    @property
    def api(self) -> str:
        return self.product.api


@pytest.fixture(scope="module")
def served(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Served]:
    home = tmp_path_factory.mktemp("postgres")
    with postgresql() as database:
        url = database.url
        with product.serving(home, PREFECT_SERVER_DATABASE_CONNECTION_URL=url) as running:
            yield Served(running, database)


def test_the_containers_form_of_the_address_is_what_the_server_uses(served: Served) -> None:
    database = served.database
    port = f"127.0.0.1:{database.port}"
    assert database.url == f"postgresql+asyncpg://prefect:{database.password}@{port}/prefect"
    assert int(database.ask("select count(*) from deployment")) > 0
    assert not list(served.product.home.rglob("prefect.db"))


def test_a_short_run_is_trained_to_the_end(served: Served) -> None:
    run = product.submit(served.api, TINY, overrides=product.SHORT)["id"]
    found = product.until(served.api, run)
    assert (found["state"]["name"], found["state"]["message"]) == ("Completed", "12 ran")
    assert "## Scores" in product.page_of(served.api, run, "The run:")
    query = f"select state_type from flow_run where id = '{run}'"
    assert served.database.ask(query) == "COMPLETED"


def test_fifty_runs_of_one_minute_all_end_and_none_is_lost(served: Served) -> None:
    where = product.deployment(served.api, TINY)["id"]
    minute = (datetime.now(UTC) + NOTICE).replace(second=0, microsecond=0) + timedelta(minutes=1)
    names = {f"nightly-{number:02}" for number in range(NUM_RUNS)}
    product.ask(served.api, f"/deployments/{where}/schedules",
                [schedule(name, minute) for name in sorted(names)])  # fmt: skip
    product.wait_for(lambda: len(scheduled(served, where)) == NUM_RUNS, 90)
    assert datetime.now(UTC) < minute, "they were scheduled in time"
    product.wait_for(lambda: all(ended(each) for each in scheduled(served, where)), 900)

    runs = scheduled(served, where)
    assert {word for each in runs for word in each["parameters"]["overrides"]} == {
        f"name={name}" for name in names
    }
    names_of_states = {each["state"]["name"] for each in runs}
    assert names_of_states == {"Planned"}, "nothing failed, crashed or was skipped as late"
    assert {each["run_count"] for each in runs} == {1}
    assert {each["expected_start_time"] for each in runs} == {runs[0]["expected_start_time"]}
    query = "select count(*) from flow_run where auto_scheduled and state_type = 'COMPLETED'"
    assert served.database.ask(query) == f"{NUM_RUNS}"
    records = served.product.home / "prefect" / keeper.FOLDER
    product.wait_for(lambda: not list(records.iterdir()), 30)
    last = max(datetime.fromisoformat(each["end_time"]) for each in runs)
    print(f"\n{NUM_RUNS} runs of one minute: the last ended {(last - minute).seconds} s later")


def schedule(name: str, minute: datetime) -> dict[str, Any]:
    """Once in a year, a plan of the recipe under a name of its own."""
    cron = f"{minute.minute} {minute.hour} {minute.day} {minute.month} *"
    parameters = {"mode": "plan", "overrides": [f"name={name}"]}
    when = {"cron": cron, "timezone": "UTC"}
    return {"slug": name, "active": True, "schedule": when, "parameters": parameters}


def scheduled(served: Served, deployment: str) -> list[dict[str, Any]]:
    query = {"deployments": {"id": {"any_": [deployment]}}, "limit": 200}
    found = product.ask(served.api, "/flow_runs/filter", query)
    return [each for each in found if each["auto_scheduled"]]


def ended(run: dict[str, Any]) -> bool:
    return run["state"]["type"] in product.FINAL
