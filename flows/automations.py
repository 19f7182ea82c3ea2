"""What the server does by itself about runs and data: made by ``flows.deploy --automations``."""

from collections.abc import Iterator
from datetime import timedelta
from typing import TYPE_CHECKING, Any

from flows.deploy import HEARTBEAT_SECONDS

if TYPE_CHECKING:
    from prefect.client.orchestration import SyncPrefectClient
    from prefect.events.schemas.automations import AutomationCore

DEAD_AFTER = timedelta(seconds=3 * HEARTBEAT_SECONDS + 20)
"""Three heartbeats, since one is easily lost, and a little for the way."""

DATASET_UPDATED = "dataset.updated"
RETRAIN = "retrain/tiny"


def create(client: "SyncPrefectClient", *, notify: str | None) -> list[str]:
    """Create them, or bring those of the same name up to date; a line for each."""
    from uuid import UUID

    told = []
    for automation in _wanted(client, notify):
        found = client.read_automations_by_name(automation.name)
        if found:
            client.update_automation(UUID(str(found[0].id)), automation)
        else:
            client.create_automation(automation)
        told.append(f"automation: {automation.name}")
    if notify is None:
        told.append("no message on failure: name a notification block with --notify")
    return told


def _wanted(client: "SyncPrefectClient", notify: str | None) -> Iterator["AutomationCore"]:
    yield dead_runs()
    yield retrain_on_new_data(client.read_deployment_by_name(RETRAIN).id)
    if notify is not None:
        yield message_on_failure(_block(client, notify))


def dead_runs() -> "AutomationCore":
    """A run whose process is gone without a word becomes Crashed, and Retry is offered.

    A live run is never touched: while ranks train, the flow's own thread sends the heartbeats, and
    any terminal state, whatever its name, ends the watch.
    """
    from prefect.client.schemas.objects import StateType
    from prefect.events.actions import ChangeFlowRunState
    from prefect.events.schemas.automations import AutomationCore, EventTrigger, Posture
    from prefect.events.schemas.events import ResourceSpecification

    return AutomationCore(
        name="Dead runs become Crashed",
        description="A run that has sent no heartbeat for three times its interval.",
        trigger=EventTrigger(
            after={"prefect.flow-run.heartbeat"},
            expect={"prefect.flow-run.*"},
            match=ResourceSpecification.model_validate(
                {"prefect.resource.id": ["prefect.flow-run.*"]}
            ),
            for_each={"prefect.resource.id"},
            posture=Posture.Proactive,
            threshold=1,
            within=DEAD_AFTER,
        ),
        actions=[
            ChangeFlowRunState(
                name=None,
                state=StateType.CRASHED,
                force=False,
                message=f"no heartbeat for {DEAD_AFTER.total_seconds():.0f} s; Retry goes on",
            )
        ],
    )


def retrain_on_new_data(deployment: Any) -> "AutomationCore":
    """An event of ours starts the retraining, which itself looks whether anything is new."""
    from prefect.events.actions import RunDeployment
    from prefect.events.schemas.automations import AutomationCore, EventTrigger, Posture

    return AutomationCore(
        name="New data start a retraining",
        description=f"On the event {DATASET_UPDATED}.",
        trigger=EventTrigger(
            expect={DATASET_UPDATED},
            posture=Posture.Reactive,
            threshold=1,
            within=timedelta(0),
        ),
        actions=[
            RunDeployment(
                source="selected", deployment_id=deployment, parameters=None, job_variables=None
            )
        ],
    )


def message_on_failure(block: Any) -> "AutomationCore":
    """Through a notification block of the server, where its address is kept."""
    from prefect.events.actions import SendNotification
    from prefect.events.schemas.automations import AutomationCore, EventTrigger, Posture
    from prefect.events.schemas.events import ResourceSpecification

    return AutomationCore(
        name="A message for each failure",
        description="Of runs that failed or crashed.",
        trigger=EventTrigger(
            expect={"prefect.flow-run.Failed", "prefect.flow-run.Crashed"},
            match=ResourceSpecification.model_validate(
                {"prefect.resource.id": ["prefect.flow-run.*"]}
            ),
            for_each={"prefect.resource.id"},
            posture=Posture.Reactive,
            threshold=1,
            within=timedelta(0),
        ),
        actions=[
            SendNotification(
                block_document_id=block,
                subject="{{ flow.name }}: {{ flow_run.name }} {{ flow_run.state.name }}",
                body="{{ flow_run.state.message }}\n{{ flow_run|ui_url }}",
            )
        ],
    )


def _block(client: "SyncPrefectClient", name: str) -> Any:
    from prefect.exceptions import ObjectNotFound

    kind, slash, block = name.partition("/")
    if not slash:
        raise ValueError(f"--notify {name}: written BLOCK-TYPE/NAME, such as slack-webhook/team")
    try:
        return client.read_block_document_by_name(name=block, block_type_slug=kind).id
    except ObjectNotFound:
        raise ValueError(
            f"--notify {name}: the server has no such block; make it in the UI under Blocks"
        ) from None
