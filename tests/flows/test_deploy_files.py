"""The files of deploy/: parsed, linted, and the scripts run."""

import configparser
import re
import shutil
import subprocess
from pathlib import Path

import pytest
import yaml

from tests.small import ROOT

DEPLOY = ROOT / "deploy"
COMPOSE = DEPLOY / "compose"
SCRIPTS = sorted(DEPLOY.rglob("*.sh"))


def test_the_server_is_published_on_loopback_alone() -> None:
    services = yaml.safe_load((COMPOSE / "compose.yaml").read_text())["services"]
    published = [port for each in services.values() for port in each.get("ports", [])]
    assert published == ["127.0.0.1:4200:4200"]


def test_passwords_come_from_files_and_every_service_has_what_it_waits_for() -> None:
    text = (COMPOSE / "compose.yaml").read_text()
    whole = yaml.safe_load(text)
    assert {facts["file"].partition("/")[2] for facts in whole["secrets"].values()} == {
        "secrets/postgres_password",
        "secrets/prefect_auth",
    }
    assert not re.search(r"(?i)password: *\S", text)
    services = whole["services"]
    for name, facts in services.items():
        for other, condition in facts.get("depends_on", {}).items():
            if condition["condition"] == "service_healthy":
                assert "healthcheck" in services[other], f"{name} waits for {other}"
    assert "/deploy/compose/secrets/" in (ROOT / ".gitignore").read_text().split()


def test_the_gpu_file_adds_to_services_that_are_there() -> None:
    base, more = (
        yaml.safe_load((COMPOSE / name).read_text())
        for name in ("compose.yaml", "compose.gpu.yaml")
    )
    assert set(more["services"]) <= set(base["services"])


@pytest.mark.parametrize("script", SCRIPTS, ids=lambda path: path.name)
def test_scripts_pass_shellcheck(script: Path) -> None:
    assert script.stat().st_mode & 0o111
    assert subprocess.run(["sh", "-n", str(script)], check=False).returncode == 0
    if shutil.which("shellcheck") is None:
        pytest.skip("shellcheck is not installed")
    done = subprocess.run(["shellcheck", str(script)], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout


def with_secrets(folder: Path) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [str(COMPOSE / "with-secrets.sh"), "env"],
        env={"SECRETS_DIR": str(folder), "PATH": "/usr/bin:/bin"},
        capture_output=True, text=True, check=False,
    )  # fmt: skip


def test_secrets_become_what_prefect_reads(tmp_path: Path) -> None:
    assert "PREFECT" not in with_secrets(tmp_path).stdout
    (tmp_path / "postgres_password").write_text("s3cret\n")
    (tmp_path / "prefect_auth").write_text("admin:word")
    found = with_secrets(tmp_path).stdout.splitlines()
    url = "postgresql+asyncpg://prefect:s3cret@postgres/prefect"
    assert f"PREFECT_SERVER_DATABASE_CONNECTION_URL={url}" in found
    assert "PREFECT_SERVER_API_AUTH_STRING=admin:word" in found
    assert "PREFECT_API_AUTH_STRING=admin:word" in found


def test_a_password_that_would_break_the_url_is_refused(tmp_path: Path) -> None:
    (tmp_path / "postgres_password").write_text("a/b@c")
    done = with_secrets(tmp_path)
    assert done.returncode == 2 and "becomes part of a URL" in done.stderr


def test_secrets_are_made_once(tmp_path: Path) -> None:
    script = tmp_path / "make-secrets.sh"
    shutil.copy(COMPOSE / "make-secrets.sh", script)
    first = subprocess.run([str(script)], capture_output=True, text=True, check=True).stdout
    again = subprocess.run([str(script)], capture_output=True, text=True, check=True).stdout
    assert first == again and re.search(r"admin:[0-9a-f]{48}", first)
    password = (tmp_path / "secrets" / "postgres_password").read_text()
    assert re.fullmatch(r"[0-9a-f]{48}", password)
    assert (tmp_path / "secrets").stat().st_mode & 0o077 == 0


def test_the_workers_health_check_does_not_find_itself() -> None:
    (_, check) = yaml.safe_load((COMPOSE / "compose.yaml").read_text())["services"]["worker"][
        "healthcheck"
    ]["test"]
    pattern = re.search(r"'(.*)'", check)
    assert pattern and not re.search(pattern[1], check)
    assert re.search(pattern[1], "python -m prefect worker start")


def test_the_image_is_pinned_and_not_roots() -> None:
    lines = (COMPOSE / "Dockerfile").read_text().splitlines()
    words = [line.split() for line in lines if line and line[0].isupper()]
    (base,) = [line[1] for line in words if line[0] == "FROM"]
    assert ":" in base and not base.endswith(":latest")
    assert [line[1] for line in words if line[0] == "USER"] == ["posttrain"]
    installs = [line for line in lines if "pip install" in line]
    assert installs and all("--constraint constraints.txt" in line for line in installs)
    copied = {line[1] for line in words if line[0] == "COPY"} - {"constraints.txt"}
    assert all((ROOT / name).exists() for name in copied)
    assert {"configs", "stages", "backends", "flows"} <= copied


@pytest.mark.parametrize("unit", sorted((DEPLOY / "systemd").glob("*.service")), ids=str)
def test_units_are_whole(unit: Path) -> None:
    parser = configparser.ConfigParser(strict=False, interpolation=None)
    parser.optionxform = str  # pyright: ignore[reportAttributeAccessIssue]
    parser.read_string(unit.read_text())
    assert set(parser.sections()) == {"Unit", "Service", "Install"}
    service = parser["Service"]
    assert service["User"] == "posttrain"
    module = service["ExecStart"].split(" -m ")[1].split()[0]
    assert module == "prefect" or (ROOT / f"{module.replace('.', '/')}.py").exists()
    if shutil.which("systemd-analyze"):
        done = subprocess.run(
            ["systemd-analyze", "verify", str(unit)], capture_output=True, text=True, check=False
        )
        faults = [line for line in done.stderr.splitlines() if "/opt/posttrain" not in line]
        assert not [line for line in faults if unit.name in line]
