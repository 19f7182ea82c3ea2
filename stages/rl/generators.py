"""What samples answers: ``transformers`` itself, or vLLM on a GPU."""

from importlib.util import find_spec
from typing import Annotated, Literal

from pydantic import Field

from configs import Config


class WithTransformers(Config):
    """The policy's own ``generate``, on every device. Answers depend on seed, update and row."""

    kind: Literal["transformers"] = "transformers"


class WithVLLM(Config):
    """vLLM beside the policy in every rank, each on its own prompts. It needs GPUs, and vLLM, which
    is not among the pinned packages. Its arithmetic is not that of the policy, so that answers are
    drawn from a distribution that is a little off; every log-probability is the policy's own."""

    kind: Literal["vllm"] = "vllm"

    memory: Annotated[float, Field(gt=0, lt=1)] = 0.3
    """Share of a GPU's memory that weights and cache take during a rollout. While the policy learns
    they take nothing."""


Generation = Annotated[WithTransformers | WithVLLM, Field(discriminator="kind")]


def obstacle(config: WithTransformers | WithVLLM, device: str) -> str | None:
    """Why this machine cannot generate with it, or ``None``."""
    if isinstance(config, WithTransformers):
        return None
    if device != "cuda":
        return "generation: vllm needs a GPU; use kind: transformers"
    if find_spec("vllm") is None:
        return (
            "generation: vllm is not installed; `pip install vllm` in an environment whose torch "
            "it accepts, or use kind: transformers"
        )
    return None
