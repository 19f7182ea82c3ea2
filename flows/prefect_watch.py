"""What Prefect shows of a deployed run while it goes on: its page, its progress bars."""

import os
import signal
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import replace
from pathlib import Path
from types import TracebackType
from typing import TYPE_CHECKING, Any
from uuid import UUID

from flows import keeper, run_page, status
from flows.run_page import Board

if TYPE_CHECKING:
    from prefect.client.orchestration import SyncPrefectClient

PAGE_SECONDS = 5.0
STATE_SECONDS = 1.0
WORKER_SECONDS = 3.0
"""After a run is being cancelled, its worker has this long to tell the flow; one that was started
later does not know the flow, and then the flow heeds the state by itself."""


class Watch:
    """A thread that shows the board every few seconds and looks whether the run is cancelled.

    A server that is away costs a page and nothing else.
    """

    def __init__(self, board: Board, *, key: str, run: UUID, record: Path) -> None:
        self.board, self.key, self.run, self.record = board, key, run, record
        self.page: UUID | None = None
        self.bars: dict[str, UUID] = {}
        self.shown = ""
        self.told = False
        self.cancelling_since: float | None = None
        self.done = threading.Event()
        self.thread = threading.Thread(target=self._run, name="watch", daemon=True)

    def __enter__(self) -> "Watch":
        self.thread.start()
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.done.set()
        self.thread.join(2 * PAGE_SECONDS)

    def change(self, **facts: Any) -> None:
        """What the page shows from now on."""
        self.board = replace(self.board, **facts)

    def _run(self) -> None:
        with impatient():
            while not self.done.wait(STATE_SECONDS):
                with server_may_be_away(), _client() as client:
                    self._follow(client)

    def _follow(self, client: "SyncPrefectClient") -> None:
        """Until the run ends, or the server is away."""
        painted = 0.0
        while not self.done.wait(STATE_SECONDS):
            self._heed_cancelling(client)
            if time.monotonic() - painted >= PAGE_SECONDS:
                painted = time.monotonic()
                self.show(client, run_page.page(self.board))
                self._show_progress(client)

    def finish(self, text: str) -> None:
        """The last page, once the thread has ended."""
        with impatient(), server_may_be_away(), _client() as client:
            self.show(client, text)
            self._show_progress(client)

    def show(self, client: "SyncPrefectClient", text: str) -> None:
        """Create the page or bring it up to date."""
        from prefect.client.schemas.actions import ArtifactCreate, ArtifactUpdate

        if text == self.shown:
            return
        if self.page is None:
            self.page = client.create_artifact(
                ArtifactCreate(
                    key=self.key, type="markdown", data=text, flow_run_id=self.run,
                    description="The run: progress, curves, results",
                )
            ).id  # fmt: skip
        else:
            client.update_artifact(self.page, ArtifactUpdate(data=text))
        self.shown = text

    def _show_progress(self, client: "SyncPrefectClient") -> None:
        from prefect.client.schemas.actions import ArtifactCreate, ArtifactUpdate

        for planned in self.board.plans:
            label = planned.label
            if not planned.is_training or not (label in self.bars or label == self.board.current):
                continue
            seen = status.see(label, planned.out)
            share = run_page.percent(seen)
            if label in self.bars:
                client.update_artifact(self.bars[label], ArtifactUpdate(data=share))
                continue
            self.bars[label] = client.create_artifact(
                ArtifactCreate(
                    key=None, type="progress", description=label, data=share, flow_run_id=self.run
                )
            ).id

    def _heed_cancelling(self, client: "SyncPrefectClient") -> None:
        """Say what is happening, and be our own worker if there is none."""
        asked = keeper.read(self.record).get("asked")
        if asked and self.told:
            return
        state = client.read_flow_run(self.run).state
        if state is not None and state.is_crashed():
            self._contradict(client)
        if state is None or not state.is_cancelling():
            self.cancelling_since = None
            return
        if asked:
            self.told = True
            client.set_flow_run_state(self.run, _stopping(self.board, self.record), force=True)
            return
        self.cancelling_since = self.cancelling_since or time.monotonic()
        if time.monotonic() - self.cancelling_since > WORKER_SECONDS:
            os.kill(os.getpid(), signal.SIGTERM)

    def _contradict(self, client: "SyncPrefectClient") -> None:
        """The server's automation takes us for dead after an outage, or a machine's sleep."""
        from prefect.states import Running

        state = Running(message="goes on: it was taken for dead")
        client.set_flow_run_state(self.run, state, force=True)
        # The server counts each entry into a running state as a run.
        keeper.note(self.record, attempt=client.read_flow_run(self.run).run_count)


def _stopping(board: Board, record: Path) -> Any:
    from prefect.client.schemas.objects import StateType
    from prefect.states import State

    processes = keeper.read(record).get("processes", 0)
    return State(
        type=StateType.CANCELLING,
        name="Stopping",
        message=f"{board.current or 'the run'}: finishing the step and saving; then "
        f"{processes} processes end",
    )


@contextmanager
def impatient() -> Iterator[None]:
    """Prefect's client would retry for a minute; the next page comes anyway."""
    from prefect.settings import PREFECT_CLIENT_MAX_RETRIES, temporary_settings

    with temporary_settings({PREFECT_CLIENT_MAX_RETRIES: 0}):
        yield


@contextmanager
def server_may_be_away() -> Iterator[None]:
    import httpx
    from prefect.exceptions import PrefectHTTPStatusError

    with suppress(httpx.TransportError, PrefectHTTPStatusError):
        yield


def _client() -> "SyncPrefectClient":
    from prefect.client.orchestration import get_client

    return get_client(sync_client=True)
