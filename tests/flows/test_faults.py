"""Every fault gets its name, leaves nothing behind, and costs no finished work."""

from pathlib import Path

import pytest

from tests.flows.faulty.cases import CASES, Case, finish, make_inputs, recipe, run_case

QUICK = ("SIGKILL of one rank", "Ctrl-C")


@pytest.fixture(scope="module")
def inputs(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_inputs(tmp_path_factory.mktemp("inputs"))


@pytest.fixture(scope="module")
def calm(inputs: Path, tmp_path_factory: pytest.TempPathFactory) -> str:
    """The weights of an undisturbed run."""
    store = tmp_path_factory.mktemp("calm") / "store"
    recipe(inputs, store)
    return finish(store)


@pytest.mark.parametrize(
    "case",
    [
        pytest.param(case, id=case.name, marks=() if case.name in QUICK else pytest.mark.slow)
        for case in CASES
    ],
)
def test_fault(case: Case, inputs: Path, calm: str, tmp_path: Path) -> None:
    got = run_case(case, inputs, tmp_path / "store")
    assert got.code == case.code, got.text
    assert case.kind in got.text
    assert "Traceback" not in got.text or case.kind in ("error", "lost peer")
    if case.guilty is not None:
        assert f"rank {case.guilty}" in got.text, got.text
    assert not got.left and not got.lost
    limit = 20 if case.kind == "stuck" else 10
    assert got.seconds < limit, got.text
    assert finish(tmp_path / "store") == calm
