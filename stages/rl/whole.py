"""A sharded model's parameters, whole again. Imported only inside a rank: it loads torch."""

import copy
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import psutil
import torch
from torch import Tensor, nn
from torch.distributed.fsdp import FSDPModule
from torch.distributed.tensor import DTensor

from stages.base import StageError

CHECKPOINTED = "_checkpoint_wrapped_module."
"""What activation checkpointing adds to the names of parameters."""


def skeleton(model: nn.Module) -> nn.Module:
    """``model`` without its weights, to be filled by :func:`filled`. Call before it is sharded."""
    empty: dict[int, Any] = {}
    for parameter in model.parameters():
        shape = getattr(parameter, "ds_shape", parameter.shape)
        empty[id(parameter)] = nn.Parameter(
            torch.empty(shape, dtype=parameter.dtype, device="meta"), requires_grad=False
        )
    return copy.deepcopy(model, empty)


@contextmanager
def filled(bones: nn.Module, model: nn.Module, device: torch.device) -> Iterator[nn.Module]:
    """``bones`` with the weights of the sharded ``model``, gathered once; empty again afterwards.

    Every rank takes part. Raises ``StageError`` when a rank has no room for the whole model.
    """
    _check_room(bones, device)
    weights = dict(gathered(model, device))
    bones.load_state_dict(weights, assign=True, strict=False)
    for module in bones.modules():
        for name, buffer in module.named_buffers(recurse=False):
            setattr(module, name, buffer.to(device))
    try:
        yield bones
    finally:
        bones.load_state_dict(
            {name: torch.empty_like(w, device="meta") for name, w in weights.items()},
            assign=True,
            strict=False,
        )


def gathered(
    model: nn.Module, device: torch.device, *, only_trained: bool = False
) -> Iterator[tuple[str, Tensor]]:
    """(name, whole tensor) of every parameter, aliases of tied ones included.

    Every rank takes part; a tensor that is whole already is not copied.
    """
    for module in model.modules():
        if isinstance(module, FSDPModule):
            module.reshard()
    found: dict[int, Tensor] = {}
    for name, parameter in named_parameters(model):
        if only_trained and not parameter.requires_grad:
            continue
        if id(parameter) not in found:
            found[id(parameter)] = _whole(parameter, device)
        yield name, found[id(parameter)]


def named_parameters(model: nn.Module) -> Iterator[tuple[str, nn.Parameter]]:
    """Every parameter under the name that a checkpoint has for it, aliases included."""
    for name, parameter in model.named_parameters(remove_duplicate=False):
        yield name.replace(CHECKPOINTED, ""), parameter


def _whole(parameter: nn.Parameter, device: torch.device) -> Tensor:
    if isinstance(parameter, DTensor):
        return parameter.detach().to(device).full_tensor()
    if hasattr(parameter, "ds_id"):
        import deepspeed

        with deepspeed.zero.GatheredParameters([parameter]):
            return parameter.detach().to(device, copy=True)
    return parameter.detach()


def _check_room(bones: nn.Module, device: torch.device) -> None:
    needed = sum(p.numel() * p.element_size() for p in bones.parameters())
    if device.type == "cuda":
        room = torch.cuda.mem_get_info(device)[0]
        room += torch.cuda.memory_reserved(device) - torch.cuda.memory_allocated(device)
    else:
        room = psutil.virtual_memory().available
    least = torch.tensor(room, dtype=torch.float64, device=device)
    torch.distributed.all_reduce(least, torch.distributed.ReduceOp.MIN)
    if needed > float(least):
        raise StageError(
            f"rollouts gather the whole policy once, {needed / 1e9:.2f} GB in every rank, and one "
            f"has {float(least) / 1e9:.2f} GB free; use GPUs with more memory, offload the "
            "optimizer, or train adapters on a smaller base"
        )
