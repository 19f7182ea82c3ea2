"""``auto``: the planner chooses among the other backends when the stage starts."""

from typing import Literal

from pydantic import NonNegativeFloat

from configs import Config


class Auto(Config):
    """The fastest backend that fits, then the next ones if memory runs out all the same.

    ``resources.micro_batch_size`` is then the largest micro-batch to try, and
    ``resources.gradient_checkpointing`` leaves only plans that recompute.
    """

    kind: Literal["auto"] = "auto"

    ranks: Literal["all", "given"] = "all"
    """``all``: every GPU of the machine, or every core where it has none, or the largest number of
    them that divides the global batch; ``resources.ranks_per_node`` is then not looked at.
    ``given``: the device and ranks of ``resources``."""

    link: str | None = None
    """What connects the GPUs of a machine, such as ``nvlink`` or ``pcie4``; unset, what GPUs of
    this kind usually have."""

    margin_gb: NonNegativeFloat = 1.0
    """Memory in GB that a plan leaves free on each GPU, for the driver's context and the like."""
