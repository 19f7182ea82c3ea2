"""Deployments: what their forms ask, what the server refuses, and one short run of the product."""

import json
import os
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from uuid import UUID

import psutil
import pytest
import yaml

from configs import RECIPES, load
from flows import deploy, forms, prefect_run
from flows.catalogue import FLOWS
from tests.flows import product
from tests.flows.product import Product
from tests.small import ROOT, TO_GIVE

RECORDED = Path(__file__).parent / "recorded"


@pytest.mark.parametrize("name", sorted(FLOWS))
def test_the_form_is_the_recorded_one(name: str) -> None:
    """What a user sees and what callers send: a change is to be seen in a review. Delete the file
    and run the test to record it anew."""
    path = RECORDED / f"{name}.json"
    text = json.dumps(forms.parameter_schema(FLOWS[name]), indent=1) + "\n"
    if not path.exists():
        path.parent.mkdir(exist_ok=True)
        path.write_text(text)
        pytest.fail(f"recorded {path} anew")
    assert text == path.read_text()  # the order of the fields counts


@pytest.mark.parametrize("name", sorted(FLOWS))
def test_every_field_of_the_form_has_help(name: str) -> None:
    schema = forms.parameter_schema(FLOWS[name])
    silent = [
        f"{title}.{field}"
        for title, part in [("", schema), *schema["definitions"].items()]
        for field, facts in part.get("properties", {}).items()
        if "description" not in facts and field != "kind" and "$ref" not in str(facts)
    ]
    assert not silent
    backend = ["backend"] if forms.trained(FLOWS[name].schema) else []
    asked = ["mode", *backend, "config", "overrides", "late_minutes"]
    assert list(schema["properties"]) == asked


def test_presets_pass_what_the_server_enforces_and_faults_do_not() -> None:
    from prefect.utilities.schema_tools.validation import validate

    for flow in FLOWS.values():
        schema = forms.parameter_schema(flow)
        for recipe in flow.recipes():
            preset = forms.preset(flow, recipe)
            faults = validate({"config": preset}, schema, raise_on_error=False)
            assert bool(faults) == (recipe.stem in TO_GIVE), (recipe.stem, faults)


def test_every_recipe_is_a_preset() -> None:
    deployed = {recipe.stem for flow in FLOWS.values() for recipe in flow.recipes()}
    assert deployed == {path.stem for path in RECIPES.glob("*.yaml")}


@pytest.mark.parametrize("name", sorted(FLOWS))
def test_an_unchanged_form_is_the_recipe(name: str) -> None:
    flow = FLOWS[name]
    for recipe in flow.recipes():
        if recipe.stem not in TO_GIVE:
            sent = forms.complete(json.loads(json.dumps(forms.preset(flow, recipe))))
            assert flow.schema.model_validate(sent) == load(flow.schema, recipe)


def test_prefect_yaml_is_what_deploy_writes() -> None:
    written = (ROOT / "deploy" / "prefect.yaml").read_text()
    assert written == deploy.as_yaml()
    from prefect.flows import load_flow_from_entrypoint

    for each in yaml.safe_load(written)["deployments"]:
        assert load_flow_from_entrypoint(each["entrypoint"]).name in FLOWS


@pytest.mark.parametrize(
    ("words", "said"),
    [
        ([], "PREFECT_API_URL is not set"),
        (["--schedule", "tiny"], "written FLOW/RECIPE=CRON"),
        (["--schedule", "retrain/tiny=0 3 * *"], "'retrain/tiny=0 3 * *' --timezone UTC: "),
        (["--schedule", "retrain/tiny=0 3 * * *", "--timezone", "Mars"], "--timezone Mars: "),
        (["--notify", "block"], "add --automations"),
    ],
)
def test_mistakes_on_the_command_line_are_one_line(
    tmp_path: Path, words: list[str], said: str
) -> None:
    done = subprocess.run(
        [sys.executable, "-m", "flows.deploy", *words],
        env=product.environment(tmp_path), cwd=tmp_path, capture_output=True, text=True,
        check=False,
    )  # fmt: skip
    assert done.returncode == 2
    assert len(done.stderr.splitlines()) == 1 and said in done.stderr


# --- one short life of the whole product


@pytest.fixture(scope="module")
def served(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Product]:
    with product.serving(tmp_path_factory.mktemp("served")) as running:
        yield running


def test_it_prints_its_address_soon_and_has_every_flow(served: Product) -> None:
    (ready,) = [line for line in served.lines if "Ctrl-C ends it" in line]
    assert served.url in ready
    assert int(ready.rpartition("ready in ")[2].split()[0]) < 45  # 30 where nobody else is at work
    found = product.ask(served.api, "/deployments/filter", {})
    names = {f"{recipe.stem}" for flow in FLOWS.values() for recipe in flow.recipes()}
    assert {each["name"] for each in found} == names
    assert all(each["enforce_parameter_schema"] for each in found)
    assert all(each["entrypoint"].startswith("flows.prefect_flows.") for each in found)


def test_registering_again_keeps_schedules_that_are_not_named_and_enforces_forms(
    served: Product,
) -> None:
    def there() -> dict[str, Any]:
        return product.ask(served.api, "/deployments/name/retrain/tiny")

    def crons() -> list[str]:
        return [each["schedule"]["cron"] for each in there()["schedules"]]

    env = product.environment(served.home, PREFECT_API_URL=served.api)
    loose = {"enforce_parameter_schema": False}
    product.ask(served.api, f"/deployments/{there()['id']}", loose, method="PATCH")
    assert not there()["enforce_parameter_schema"]
    for words, expected in (
        (["--schedule", "retrain/tiny=0 3 1 1 *"], ["0 3 1 1 *"]),
        ([], ["0 3 1 1 *"]),
        (["--schedule", "retrain/tiny=0 4 1 1 *"], ["0 4 1 1 *"]),
        (
            ["--schedule", "retrain/tiny=0 4 1 1 *", "--schedule", "retrain/tiny=0 5 1 1 *"],
            ["0 4 1 1 *", "0 5 1 1 *"],
        ),
    ):
        argv = [sys.executable, "-m", "flows.deploy", *words]
        subprocess.run(argv, env=env, cwd=served.home, check=True, capture_output=True)
        assert sorted(crons()) == expected
        assert there()["enforce_parameter_schema"]


def test_a_run_finds_the_modules_of_its_user(monkeypatch: pytest.MonkeyPatch) -> None:
    """Rewards of the user's own, say, as the command line does."""
    monkeypatch.setenv("PYTHONPATH", "/home/me/rewards")
    assert deploy.job_variables()["env"]["PYTHONPATH"] == f"{ROOT}:/home/me/rewards"


def test_a_home_that_cannot_be_written_is_one_line(tmp_path: Path) -> None:
    done = subprocess.run(
        [sys.executable, "-m", "flows.serve", "--port", str(product.free_port())],
        env=product.environment(tmp_path, PREFECT_HOME="/proc/nobody"),
        capture_output=True, text=True, check=False,
    )  # fmt: skip
    assert done.returncode == 1 and "/proc/nobody" in done.stderr
    assert len(done.stderr.splitlines()) == 1


HOMELESS = """
import os
from flows import prefect_engine, serve
os.setuid(54321)
print(serve.main([]))
prefect_engine.run_flow(None, None, None, name="", run_name="", say=print)
"""


@pytest.mark.skipif(os.geteuid() != 0, reason="only root can become nobody")
def test_a_user_without_a_home_is_told_to_set_one(tmp_path: Path) -> None:
    env = {name: value for name, value in product.environment(tmp_path).items() if name != "HOME"}
    done = subprocess.run(
        [sys.executable, "-c", HOMELESS], env=env, capture_output=True, text=True, check=False
    )
    first, *_, last = done.stderr.splitlines()
    assert done.stdout == "1\n"
    assert "this user has no home folder" in first and "set HOME" in last


def test_a_server_that_is_away_is_one_line(tmp_path: Path) -> None:
    env = product.environment(tmp_path, PREFECT_API_URL="http://127.0.0.1:9/api")
    done = subprocess.run(
        [sys.executable, "-m", "flows.deploy"],
        env=env | {"PREFECT_CLIENT_MAX_RETRIES": "0"},
        cwd=tmp_path, capture_output=True, text=True, check=False,
    )  # fmt: skip
    assert done.returncode == 1 and "cannot be used" in done.stderr
    assert "Traceback" not in done.stderr


@pytest.mark.parametrize(
    ("key", "value", "said"),
    [
        ("sft.config.learning_rate", -1, "minimum"),
        ("sft.config.epochs", "many", "many"),
        ("dpo.config.bta", 0.2, "bta"),
        ("sft.backend", {"kind": "horovod"}, "horovod"),
    ],
)
def test_wrong_values_are_refused_at_submission_with_their_place(
    served: Product, key: str, value: Any, said: str
) -> None:
    *parents, leaf = key.split(".")
    config = product.deployment(served.api, "sft-then-dpo/tiny")["parameters"]["config"]
    node = config
    for parent in parents:
        node = node[parent]
    node[leaf] = value
    where = product.deployment(served.api, "sft-then-dpo/tiny")["id"]
    code, reason = product.refused(
        served.api, f"/deployments/{where}/create_flow_run", {"parameters": {"config": config}}
    )
    assert code == 409
    assert said in reason


def test_unknown_parameters_are_refused_at_submission(served: Product) -> None:
    where = product.deployment(served.api, "sft-then-dpo/tiny")["id"]
    code, reason = product.refused(
        served.api, f"/deployments/{where}/create_flow_run", {"parameters": {"mod": "plan"}}
    )
    assert code == 409 and "mod" in reason


def test_a_plan_tells_everything_in_seconds_and_does_nothing(served: Product) -> None:
    run = product.submit(served.api, "sft-then-dpo/tiny", mode="plan", backend="ddp")
    found = product.until(served.api, run["id"], seconds=90)
    assert (found["state"]["name"], found["state"]["message"]) == ("Planned", "12 to run")
    assert found["name"].startswith("new-model · new-task · dpo · ")
    product.until_tasks(served.api, run["id"], lambda tasks: tasks == {"plan": "Planned"})
    page = product.page_of(served.api, run["id"], "What the run will do")
    assert "DDP x2" in page and "torch.distributed.run" in page
    assert not (served.home / "store").exists()


def test_a_run_that_is_being_cancelled_is_not_called_running_again(
    served: Product, tmp_path: Path
) -> None:
    """It waited for another one, whose end comes just then."""
    from prefect.settings import PREFECT_API_URL, temporary_settings

    flow = product.deployment(served.api, "sft-then-dpo/tiny")["flow_id"]
    begun = {"flow_id": flow, "state": {"type": "RUNNING", "name": "Queued"}}
    run = product.ask(served.api, "/flow_runs/", begun)["id"]
    product.cancel(served.api, run)
    this = prefect_run.Run(SimpleNamespace(id=UUID(run)), tmp_path / "none.json", print)
    with temporary_settings({PREFECT_API_URL: served.api}):
        prefect_run._set_running(this, "Running", "")
    assert product.run_of(served.api, run)["state"]["type"] == "CANCELLING"


def test_what_only_the_worker_sees_is_refused_in_its_first_seconds(served: Product) -> None:
    run = product.submit(
        served.api, "sft-then-dpo/tiny", overrides=["sft.config.global_batch_size=33"]
    )
    found = product.until(served.api, run["id"], seconds=90)
    assert found["state"]["name"] == "Failed"
    assert "a global batch of 33 rows does not divide over 2 ranks" in found["state"]["message"]
    assert found["total_run_time"] < 15


BEGUN = {"flow_runs": {"state": {"type": {"not_any_": ["SCHEDULED"]}}}}
"""Registering drops what a schedule has laid out, and the server lays it out again."""


@pytest.mark.slow
def test_ctrl_c_ends_everything_and_the_same_state_comes_back(
    tmp_path_factory: pytest.TempPathFactory, served: Product
) -> None:
    run = product.submit(served.api, "sft-then-dpo/tiny", mode="plan")["id"]
    product.until(served.api, run, "Planned", seconds=90)
    before = product.ask(served.api, "/flow_runs/count", BEGUN)
    children = psutil.Process(served.process.pid).children(recursive=True)
    assert len(children) >= 2
    started = time.monotonic()
    served.process.send_signal(2)
    assert served.process.wait(60) == 0
    assert time.monotonic() - started < 20
    left = [each for each in children if is_alive(each)]
    assert all("flows.keeper" in product.cmdline(each) for each in left), "they settle runs"
    product.wait_for(lambda: not any(map(is_alive, left)), 60)
    with product.serving(served.home) as again:
        assert product.ask(again.api, "/flow_runs/count", BEGUN) == before > 0


def is_alive(process: psutil.Process) -> bool:
    """A zombie has ended; that nobody asked for its exit code is init's affair."""
    try:
        return process.is_running() and process.status() != psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:
        return False
