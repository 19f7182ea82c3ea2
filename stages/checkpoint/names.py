"""Parameter names: what wrappers and PEFT add to them, and what they mean without it."""

import re
from dataclasses import dataclass
from typing import Literal

Role = Literal["A", "B", "magnitude", "bias"]

_WRAPPERS = re.compile(r"(?<![^.])(?:_fsdp_wrapped_module|_checkpoint_wrapped_module|_orig_mod)\.")
_DATA_PARALLEL = re.compile(r"^(?:module\.)+")
_PEFT_MODEL = "base_model.model."
_LOW_RANK = re.compile(
    r"^(?P<module>.+)\.(?P<part>lora_(?:embedding_)?[AB]|lora_magnitude_vector)"
    r"(?:\.(?!(?:weight|bias)$)(?P<adapter>[^.]+))?(?:\.(?P<leaf>weight|bias))?$"
)
_SAVED = re.compile(r"^(?P<module>.+)\.modules_to_save\.(?P<adapter>[^.]+)\.(?P<leaf>.+)$")
_FROZEN = re.compile(r"^(?P<module>.+)\.(?:base_layer|original_module)\.(?P<leaf>.+)$")
_UNKNOWN = re.compile(r"\.(?:lora_[^.]+|token_adapter|trainable_tokens_\w+)(?:\.|$)")


@dataclass(frozen=True)
class LowRank:
    """A tensor of the low-rank update of ``parameter``."""

    parameter: str
    """The parameter in the bare model that it changes, such as ``model.norm.weight``."""

    role: Role
    adapter: str | None
    embedding: bool


@dataclass(frozen=True)
class Saved:
    """A tensor that was trained whole and replaces ``parameter`` (``modules_to_save``)."""

    parameter: str
    adapter: str | None


@dataclass(frozen=True)
class Plain:
    """A tensor of the model itself; ``wrapped`` when PEFT has put an adapter around its module."""

    parameter: str
    wrapped: bool


@dataclass(frozen=True)
class Unknown:
    """A tensor of an adapter kind that cannot be merged here."""

    name: str


Meaning = LowRank | Saved | Plain | Unknown


def plain_name(name: str) -> str:
    """``name`` as the bare model calls it.

    Taken away, wherever they stand: FSDP1's ``_fsdp_wrapped_module.``, activation checkpointing's
    ``_checkpoint_wrapped_module.`` and ``torch.compile``'s ``_orig_mod.``; and at the front: the
    ``module.`` of DDP and of DeepSpeed's engine, then PEFT's ``base_model.model.``. FSDP2 adds
    nothing. What PEFT adds in the middle of a name is told by :func:`meaning`.
    """
    bare = _DATA_PARALLEL.sub("", _WRAPPERS.sub("", name))
    return bare.removeprefix(_PEFT_MODEL)


def meaning(name: str) -> Meaning:
    """What the tensor with this plain name is in a PEFT model.

    PEFT writes ``X.lora_A.weight`` to its own files and ``X.lora_A.default.weight`` to a state
    dict, which is what the shards hold; both are understood.
    """
    if found := _LOW_RANK.match(name):
        return _low_rank(found)
    if found := _SAVED.match(name):
        return Saved(f"{found['module']}.{found['leaf']}", found["adapter"])
    if _UNKNOWN.search(name):
        return Unknown(name)
    if found := _FROZEN.match(name):
        return Plain(f"{found['module']}.{found['leaf']}", wrapped=True)
    return Plain(name, wrapped=False)


def _low_rank(found: re.Match[str]) -> LowRank:
    part = found["part"]
    biased = found["leaf"] == "bias"
    role: Role = "magnitude" if part == "lora_magnitude_vector" else part[-1]  # type: ignore[assignment]
    return LowRank(
        parameter=f"{found['module']}.{'bias' if biased else 'weight'}",
        role="bias" if biased else role,
        adapter=found["adapter"],
        embedding="embedding" in part,
    )
