"""Several places whose data are mixed: each fills a folder of its own name."""

from collections.abc import Mapping
from pathlib import Path
from typing import Annotated, Any, Literal

from pydantic import Field

from configs import Config
from stages.sources import hub, local, new_task
from stages.sources.hub import HubData
from stages.sources.local import LocalData
from stages.sources.new_task import NewTask

Name = Annotated[str, Field(pattern=r"^[A-Za-z0-9][\w.-]*$")]
One = Annotated[LocalData | HubData | NewTask, Field(discriminator="kind")]


class Several(Config):
    """Data from several places, each under a name; ``prepare_data.config.sources`` mixes them."""

    kind: Literal["several"] = "several"

    sources: Annotated[Mapping[Name, One], Field(min_length=1)]
    """The places by the folder that each fills: the pattern ``name/*`` stands for its files."""


def bring_data(source: Several, into: Path) -> dict[str, Any]:
    """Fill ``into/<name>`` from each place. Returns what each said of itself, as JSON text."""
    bring = {
        LocalData: local.bring_data,
        HubData: hub.bring_data,
        NewTask: new_task.bring,
    }
    facts: dict[str, Any] = {}
    for name, one in source.sources.items():
        (into / name).mkdir()
        for key, value in bring[type(one)](one, into / name).items():
            facts[f"{name}/{key}"] = value
    return facts
