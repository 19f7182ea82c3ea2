"""Every backend. A new one is one module here and one name in the union."""

from typing import Annotated

from pydantic import Field

from backends.auto import Auto
from backends.base import Backend, Launch, Resources, split_batch
from backends.ddp import DDP
from backends.deepspeed import DeepSpeed
from backends.fsdp import FSDP
from backends.local import Local

NamedBackend = Local | DDP | FSDP | DeepSpeed
AnyBackend = Annotated[NamedBackend | Auto, Field(discriminator="kind")]

__all__ = [
    "DDP",
    "FSDP",
    "AnyBackend",
    "Auto",
    "Backend",
    "DeepSpeed",
    "Launch",
    "Local",
    "NamedBackend",
    "Resources",
    "split_batch",
]
