"""One stage through the store: what counts as done, and what failures are called."""

import signal
from pathlib import Path

import pytest

from flows.failures import Ended, StageFailed, diagnose
from flows.run_stage import Plan, plan, run_stage
from flows.steps import Step
from stages.fetch import Fetch
from stages.sources.local import LocalData


def fetching(rows: Path, store: Path) -> Plan:
    step = Step[Fetch](config=Fetch(source=LocalData(path=rows)))
    return plan("fetch", step, store, label="fetch rows", inputs={})


def test_rows_that_changed_while_they_were_read_do_not_pass_for_the_former_once_those_are_back(
    tmp_path: Path,
) -> None:
    rows, store = tmp_path / "rows.jsonl", tmp_path / "store"
    rows.write_text('{"text": "one"}\n')
    planned = fetching(rows, store)
    rows.write_text('{"text": "another"}\n')
    with pytest.raises(StageFailed, match="changed while it was read"):
        run_stage(planned, say=lambda text: None)
    rows.write_text('{"text": "one"}\n')
    made = run_stage(fetching(rows, store), say=lambda text: None)
    assert made.path == planned.out
    assert (made.path / "data" / "rows.jsonl").read_text() == '{"text": "one"}\n'


@pytest.mark.parametrize(
    ("code", "said"), [(255, "exit code 255"), (-signal.SIGTERM, "SIGTERM"), (-40, "signal 40")]
)
def test_every_exit_code_has_a_name(tmp_path: Path, code: int, said: str) -> None:
    """40 is a real-time signal, which Python does not call by a name."""
    assert said in diagnose("fetch", tmp_path, Ended(code, tmp_path / "log.txt")).text
