"""The flows as Prefect loads them: ``flows.prefect_flows.sft_then_dpo`` and the others."""

import inspect
from typing import Any

from prefect.flows import Flow

from flows.catalogue import FLOWS, Deployable
from flows.prefect_run import Asked, BackendKind, Mode, carry_out


def _as_flow(deployable: Deployable) -> Flow[Any, Any]:
    def deployed(
        mode: Mode = "run",
        backend: BackendKind = "as below",
        *,
        config: Any,
        overrides: list[str] = [],  # noqa: B006 - Prefect shows it as the default and copies it
        late_minutes: int = 30,
    ) -> Any:
        asked = Asked(config, mode, backend, tuple(overrides), late_minutes)
        return carry_out(deployable, asked)

    deployed.__name__ = deployable.name.replace("-", "_")
    deployed.__doc__ = DOCUMENTATION.format(about=deployable.about)
    deployed.__annotations__["config"] = deployable.schema
    return Flow(
        deployed,
        name=deployable.name,
        description=deployable.about,
        validate_parameters=False,  # the plan does it, with the place of every fault
        persist_result=False,
        retries=0,
    )


DOCUMENTATION = inspect.cleandoc(
    """
    {about}

    Args:
        mode: `run` does it all. `plan` says in seconds what would be done, why, and what it
            takes, and does nothing. `ask` shows the plan and is suspended, without a process,
            until somebody resumes it.
        backend: One backend for every training stage, with its own defaults. `as below` leaves
            each stage the backend that stands in its section.
        config: What is computed, stage by stage. Unchanged, it is the recipe of this deployment.
            A finished stage is reused for as long as nothing that it depends on changes.
        overrides: Changes in the command line's form, such as `dpo.config.beta=0.2`, made on top
            of the values above. For callers that do not want to send the whole config.
        late_minutes: A scheduled run that starts later than this skips itself.
    """
)

sft_then_dpo = _as_flow(FLOWS["sft-then-dpo"])
sft_then_ppo = _as_flow(FLOWS["sft-then-ppo"])
retrain = _as_flow(FLOWS["retrain"])
evaluate = _as_flow(FLOWS["evaluate"])
convert = _as_flow(FLOWS["convert"])
