"""Every fault gets its name, leaves nothing behind, and costs no finished work."""

import json
from contextlib import ExitStack
from pathlib import Path

import pytest

from tests.flows.faulty.cases import (
    CASES,
    Case,
    finish,
    make_inputs,
    output,
    recipe,
    run_case,
    start,
    wait_for,
    weights,
)
from tests.flows.faulty.worlds import Unavailable, World

QUICK = ("SIGKILL of one rank", "Ctrl-C")


@pytest.fixture(scope="module")
def inputs(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_inputs(tmp_path_factory.mktemp("inputs"))


@pytest.fixture(scope="module")
def calm(inputs: Path, tmp_path_factory: pytest.TempPathFactory) -> str:
    """The weights of an undisturbed run."""
    store = tmp_path_factory.mktemp("calm") / "store"
    recipe(inputs, store)
    return finish(World(inputs, store))


@pytest.mark.parametrize(
    "case",
    [
        pytest.param(case, id=case.name, marks=() if case.name in QUICK else pytest.mark.slow)
        for case in CASES
    ],
)
def test_fault(case: Case, inputs: Path, calm: str, tmp_path: Path) -> None:
    with ExitStack() as stack:
        try:
            world = stack.enter_context(case.world(inputs, tmp_path / "store"))
        except Unavailable as why:
            pytest.skip(str(why))
        got = run_case(case, world)
        assert got.code == case.code, got.text
        assert case.kind in got.text
        assert len(got.text) < 20_000, "a rank's lines are not the reader's"
        assert "Traceback" not in got.text or case.kind in ("error", "lost peer")
        if case.guilty is not None:
            assert f"rank {case.guilty}" in got.text, got.text
        assert not got.left and not got.lost
        if case.code:
            assert got.seconds < (30 if case.kind == "stuck" else 10), got.text
        world.repair()
        assert finish(world) == calm


@pytest.mark.slow
def test_what_a_retry_can_cure_is_retried(inputs: Path, calm: str, tmp_path: Path) -> None:
    store = tmp_path / "store"
    fault = f"exit:1:6:{tmp_path / 'struck'}"
    flow = start(recipe(inputs, store), fault, "sft.retries=1")
    text = flow.communicate(timeout=180)[0]
    assert flow.returncode == 0, text
    assert "failed (crashed, rank 1" in text and "going on from step 4" in text
    assert weights(store) == calm


@pytest.mark.slow
@pytest.mark.parametrize("step", [0, 5, 11])
def test_a_kept_job_runs_once_whenever_its_flow_dies(
    inputs: Path, calm: str, tmp_path: Path, step: int
) -> None:
    store = tmp_path / "store"
    path, keep = recipe(inputs, store), "sft.placement.on_parent_exit=keep"

    def beat() -> dict[str, int]:
        found = [*store.glob("sft/*/beats/rank-0.json")]
        return json.loads(found[0].read_text()) if found else {"step": -1, "pid": 0}

    first = start(path, "none:0:0", keep)
    wait_for(lambda: beat()["step"] >= step, 90)
    first.kill()
    first.wait()
    second = start(path, "none:0:0", keep)
    text = second.communicate(timeout=120)[0]
    assert second.returncode == 0, text
    out = output(store)
    assert out is not None
    assert not list((out / "logs").glob("*.before")), "a rank was started twice"
    assert json.loads((out / "metrics.json").read_text())["resumed_from"] == 0
    assert weights(store) == calm
