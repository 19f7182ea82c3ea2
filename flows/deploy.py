"""Register every flow with the configured Prefect server: ``python -m flows.deploy``."""

import argparse
import sys
import time
import urllib.error
import urllib.request
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any
from uuid import UUID

import yaml
from pydantic import ValidationError

from configs import read
from flows import forms
from flows.catalogue import FLOWS, Deployable
from flows.prefect_server import reach_loopback
from flows.run_stage import python_path

if TYPE_CHECKING:
    from prefect.client.orchestration import SyncPrefectClient
    from prefect.client.schemas.responses import DeploymentResponse
    from prefect.client.schemas.schedules import CronSchedule

POOL = "this-machine"
HEARTBEAT_SECONDS = 60
WAIT_SECONDS = 0.2


def main(argv: Sequence[str] | None = None) -> int:
    options = _parser().parse_args(argv)
    reach_loopback()
    if options.yaml:
        print(as_yaml(), end="")
        return 0
    from httpx import HTTPError

    try:
        if options.notify and not options.automations:
            raise ValueError("--notify is for the automations: add --automations")
        schedules = _asked_for(options.schedule, timezone=options.timezone)
        _wait_for_server(options.wait)
        with _client() as client:
            names = deploy(client, pool=options.pool, schedules=schedules)
            if options.automations:
                from flows import automations

                names += automations.create(client, notify=options.notify)
    except ValueError as error:
        print(error, file=sys.stderr)
        return 2
    except (OSError, HTTPError) as error:
        said = str(error).splitlines()[0] if str(error) else type(error).__name__
        print(f"the Prefect server cannot be used: {said}; start one with `make ui`, or set "
              "PREFECT_API_URL", file=sys.stderr)  # fmt: skip
        return 1
    print("\n".join(names))
    return 0


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="python -m flows.deploy", description=__doc__)
    parser.add_argument("--pool", default=POOL, help="work pool (made if it is not there)")
    parser.add_argument(
        "--schedule",
        action="append",
        default=[],
        metavar="FLOW/RECIPE=CRON",
        help="such as 'retrain/tiny=0 3 * * *'; may be repeated. Deployments that are not named "
        "keep the schedules they have",
    )
    parser.add_argument("--timezone", default="UTC", help="of the schedules, by its IANA name")
    parser.add_argument(
        "--automations",
        action="store_true",
        help="also create: dead runs become Crashed, dataset.updated starts a retraining, and, "
        "with --notify, a message for each failure",
    )
    parser.add_argument(
        "--notify",
        metavar="BLOCK",
        help="a notification block of the server, such as slack-webhook/team",
    )
    parser.add_argument(
        "--yaml",
        action="store_true",
        help="print what `prefect deploy --all` reads (deploy/prefect.yaml), and do nothing",
    )
    parser.add_argument(
        "--wait", type=float, default=0.0, metavar="SECONDS", help="for a server that is starting"
    )
    return parser


def _wait_for_server(seconds: float) -> None:
    """Load what is needed meanwhile, which takes as long as the server takes to start."""
    if seconds <= 0:
        return
    from prefect.settings import get_current_settings

    from flows import prefect_flows  # noqa: F401

    deadline = time.monotonic() + seconds
    while not answers(get_current_settings().api.url or "") and time.monotonic() < deadline:
        time.sleep(WAIT_SECONDS)


def answers(url: str) -> bool:
    """Whether an API says that it is well, or that it wants a password."""
    try:
        with urllib.request.urlopen(f"{url.rstrip('/')}/health", timeout=2) as reply:
            return reply.status == 200
    except urllib.error.HTTPError as refusal:
        return refusal.code in (401, 403)
    except (OSError, ValueError):
        return False


def _asked_for(texts: Sequence[str], *, timezone: str) -> dict[str, list["CronSchedule"]]:
    """What each ``--schedule`` asks for, by deployment, which may have several."""
    found: dict[str, list[CronSchedule]] = {}
    for name, schedule in (_schedule(text, timezone) for text in texts):
        found.setdefault(name, []).append(schedule)
    return found


def _schedule(text: str, timezone: str) -> tuple[str, "CronSchedule"]:
    """The deployment that ``--schedule`` names, and when it is to run."""
    name, equals, cron = text.partition("=")
    if not equals or name.count("/") != 1:
        raise ValueError(f"--schedule {text!r}: written FLOW/RECIPE=CRON")
    from prefect.client.schemas.schedules import CronSchedule

    try:
        return name, CronSchedule(cron=cron, timezone=timezone)
    except ValidationError as error:
        said = "; ".join(fault["msg"].removeprefix("Value error, ") for fault in error.errors())
        raise ValueError(f"--schedule {text!r} --timezone {timezone}: {said}") from None


def deploy(
    client: "SyncPrefectClient",
    *,
    pool: str = POOL,
    schedules: Mapping[str, Sequence["CronSchedule"]] | None = None,
) -> list[str]:
    """Create every deployment, or bring it up to date; their names."""
    wanted = schedules or {}
    names = [f"{flow.name}/{recipe.stem}" for flow in FLOWS.values() for recipe in flow.recipes()]
    if unknown := [name for name in wanted if name not in names]:
        raise ValueError(f"--schedule: no deployment {', '.join(unknown)}; there are {names}")
    ensure_pool(client, pool)
    for flow in FLOWS.values():
        schema = forms.parameter_schema(flow)
        flow_id = client.create_flow_from_name(flow.name)
        for recipe in flow.recipes():
            asked = wanted.get(f"{flow.name}/{recipe.stem}", ())
            _deploy_one(client, flow, recipe, flow_id=flow_id, schema=schema, pool=pool,
                        asked=asked)  # fmt: skip
    return names


def _deploy_one(
    client: "SyncPrefectClient",
    flow: Deployable,
    recipe: Path,
    *,
    flow_id: Any,
    schema: dict[str, Any],
    pool: str,
    asked: Sequence["CronSchedule"],
) -> None:
    from prefect.client.schemas.actions import DeploymentScheduleCreate

    there = _existing(client, f"{flow.name}/{recipe.stem}")
    schedules = _schedules(client, there.id) if there else []
    if asked:
        schedules = [DeploymentScheduleCreate(schedule=each, active=True) for each in asked]
    client.create_deployment(
        flow_id=flow_id,
        name=recipe.stem,
        entrypoint=flow.entrypoint,
        work_pool_name=pool,
        tags=tags(recipe),
        description=f"{flow.about}\n\n{comment(recipe)}",
        parameters={"config": forms.preset(flow, recipe)},
        parameter_openapi_schema=schema,
        # A server enforces unless it is told otherwise; asked to, it first checks our schema and
        # the preset against it, twice, and a second of each deployment goes by.
        enforce_parameter_schema=True if there and not there.enforce_parameter_schema else None,
        job_variables=job_variables(),
        schedules=schedules,  # those that are not sent are deleted
    )


def _existing(client: "SyncPrefectClient", name: str) -> "DeploymentResponse | None":
    from prefect.exceptions import ObjectNotFound

    try:
        return client.read_deployment_by_name(name)
    except ObjectNotFound:
        return None


def _schedules(client: "SyncPrefectClient", deployment: UUID) -> list[Any]:
    """What it has, from the command line or the UI, as it is sent again."""
    from prefect.client.schemas.actions import DeploymentScheduleCreate

    return [
        DeploymentScheduleCreate(
            schedule=each.schedule, active=each.active, parameters=each.parameters, slug=each.slug,
            max_scheduled_runs=each.max_scheduled_runs,
        )
        for each in client.read_deployment_schedules(deployment)
    ]  # fmt: skip


def as_yaml() -> str:
    """The same deployments for ``prefect deploy``, but for what depends on a machine."""
    deployments = [
        {
            "name": recipe.stem,
            "entrypoint": flow.entrypoint,
            "description": flow.about,
            "tags": tags(recipe),
            "parameters": {"config": read(recipe)},
            "enforce_parameter_schema": True,
            "work_pool": {"name": POOL, "job_variables": {"stream_output": False}},
        }
        for flow in FLOWS.values()
        for recipe in flow.recipes()
    ]
    step = {"prefect.deployments.steps.set_working_directory": {"directory": "{{ $PWD }}"}}
    whole = {"name": "posttrain-flows", "pull": [step], "deployments": deployments}
    head = (
        "# Written by `python -m flows.deploy --yaml`, which knows the recipes; a test compares.\n"
    )
    return head + yaml.safe_dump(whole, sort_keys=False, width=100)


def comment(recipe: Path) -> str:
    """The lines at a recipe's head, which say what it is for."""
    lines = recipe.read_text(encoding="utf-8").splitlines()
    return " ".join(line.lstrip("# ") for line in _head(lines))


def _head(lines: Sequence[str]) -> Iterator[str]:
    for line in lines:
        if not line.startswith("#"):
            return
        yield line


def tags(recipe: Path) -> list[str]:
    """By recipe, and by what it needs."""
    return [recipe.stem, "gpu" if "device: cuda" in recipe.read_text() else "cpu"]


def job_variables() -> dict[str, Any]:
    """How the worker starts a run: here, by this interpreter, with our four packages in reach.

    Its output is not piped through the worker: a run goes on when the worker is killed, and then
    nobody would read it. Every word of it is in the run's log.
    """
    from prefect.utilities.processutils import command_to_string

    return {
        "command": command_to_string([sys.executable, "-m", "prefect.engine"]),
        "working_dir": str(Path.cwd()),
        "stream_output": False,
        "env": {
            "PYTHONPATH": python_path(),
            "PREFECT_FLOWS_HEARTBEAT_FREQUENCY": str(HEARTBEAT_SECONDS),
            "DO_NOT_TRACK": "1",
            "HF_HUB_DISABLE_TELEMETRY": "1",
        },
    }


def ensure_pool(client: "SyncPrefectClient", name: str) -> None:
    """A work pool for process workers."""
    from prefect.client.schemas.actions import WorkPoolCreate
    from prefect.exceptions import ObjectNotFound
    from prefect.workers.process import ProcessWorker

    try:
        found = client.read_work_pool(name)
    except ObjectNotFound:
        template = ProcessWorker.get_default_base_job_template()
        client.create_work_pool(
            WorkPoolCreate(name=name, type="process", base_job_template=template)
        )
        return
    if found.type != "process":
        raise ValueError(f"--pool {name}: is of type {found.type}; name one of type process")


def _client() -> "SyncPrefectClient":
    from prefect.client.orchestration import get_client
    from prefect.settings import get_current_settings

    if not get_current_settings().api.url:
        raise ValueError("PREFECT_API_URL is not set; start a server with `make ui`, or name one")
    return get_client(sync_client=True)


if __name__ == "__main__":
    sys.exit(main())
