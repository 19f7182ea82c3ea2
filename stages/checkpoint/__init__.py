"""The checkpoint contract: what a folder holds, what is wrong with it, and what it becomes."""

from stages.checkpoint.facts import describe
from stages.checkpoint.faults import validate
from stages.checkpoint.layouts import Layout, layout

__all__ = ["Layout", "describe", "layout", "validate"]
