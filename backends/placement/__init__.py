"""Every placement: where a planned command becomes a running job."""

from typing import Annotated

from pydantic import Field

from backends.placement.local import ThisMachine

AnyPlacement = Annotated[ThisMachine, Field(description="Where the ranks run.")]

__all__ = ["AnyPlacement", "ThisMachine"]
