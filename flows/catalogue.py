"""Every flow that can be deployed. A new one is one entry below."""

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from configs import RECIPES, Config, read
from flows.approval import Ask
from flows.convert import Conversion, convert
from flows.endings import Ending
from flows.evaluate import Evaluation, evaluate
from flows.retrain import Retrain, conclude, retrain
from flows.sft_then_dpo import SFTThenDPO, sft_then_dpo
from flows.sft_then_ppo import SFTThenPPO, sft_then_ppo
from flows.steps import Artifact, Runner


@dataclass(frozen=True)
class Deployable:
    """A flow, and what its form asks."""

    name: str
    """As Prefect calls it."""

    schema: type[Config]
    body: Callable[[Any, Runner], list[Artifact]]
    about: str
    """One line for the list of deployments."""

    conclude: Callable[[Any, list[Artifact], Ask], Ending | None] | None = None
    """What is left to do once every stage is there; its word on how the run ended."""

    @property
    def entrypoint(self) -> str:
        """The module path that Prefect loads."""
        return f"flows.prefect_flows.{self.name.replace('-', '_')}"

    def recipes(self) -> Iterator[Path]:
        """The recipes whose every key this flow reads, and that bring what only it needs."""
        needed = {name for name, field in self.schema.model_fields.items() if field.is_required()}
        for path in sorted(RECIPES.glob("*.yaml")):
            keys = set(read(path))
            if needed <= keys <= set(self.schema.model_fields):
                yield path


FLOWS = {
    each.name: each
    for each in (
        Deployable(
            "sft-then-dpo",
            SFTThenDPO,
            sft_then_dpo,
            "Data, supervised fine-tuning, direct preference optimisation, conversion, evaluation.",
        ),
        Deployable(
            "sft-then-ppo",
            SFTThenPPO,
            sft_then_ppo,
            "Data, supervised fine-tuning, reward model, PPO, conversion, evaluation.",
        ),
        Deployable(
            "retrain",
            Retrain,
            retrain,
            "The same whenever the data have changed; the model is promoted if it is not worse.",
            conclude,
        ),
        Deployable(
            "evaluate",
            Evaluation,
            evaluate,
            "A model measured on conversations and preferences, alone or against another.",
        ),
        Deployable(
            "convert",
            Conversion,
            convert,
            "An adapter, shards or a whole checkpoint made into one plain model folder.",
        ),
    )
}
