"""Fixtures that tests share."""

import os
import signal
from pathlib import Path

import pytest

from tests.small import ENV, write_model, write_rows


@pytest.fixture(scope="session", autouse=True)
def quiet_environment() -> None:
    os.environ.update(ENV)
    # A shell starts what it runs in the background deaf to Ctrl-C, which children would inherit.
    signal.signal(signal.SIGINT, signal.default_int_handler)


@pytest.fixture(scope="session")
def small(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with ``tied/model``, ``untied/model`` and ``data``: two layers, 128 words."""
    folder = tmp_path_factory.mktemp("small")
    for name, tie in (("tied", True), ("untied", False)):
        write_model(folder / name / "model", tie=tie)
    write_rows(folder / "data")
    return folder
