"""Workarounds that give CPU ranks the same sharding as GPU ranks; each names what would end it."""

import os
from collections.abc import Mapping
from typing import Any


def prepare(trainer_args: Mapping[str, Any]) -> None:
    """Call once in a rank, before any trainer argument or model is made."""
    if not trainer_args.get("use_cpu") or int(os.environ.get("WORLD_SIZE", "1")) == 1:
        return
    if "deepspeed" in trainer_args:
        start_deepspeed()
    if "deepspeed" in trainer_args or "fsdp" in trainer_args:
        _honour_plugins()


def start_deepspeed() -> None:
    """DeepSpeed reads its world size from a group that it started itself.

    With the group started by accelerate it sees one rank and refuses the batch size
    (deepspeed 0.19). Ends when accelerate starts gloo groups through DeepSpeed.
    """
    import deepspeed
    import deepspeed.ops

    # Or it compiles a shared-memory extension on first use, which takes half a minute and a C++
    # compiler; gloo does without.
    deepspeed.ops.__compatible_ops__["deepspeed_shm_comm"] = False
    deepspeed.init_distributed(dist_backend="gloo", verbose=False)


def _honour_plugins() -> None:
    """accelerate 1.15 runs plain DDP on CPU whatever plugin is given, without a word.

    ``AcceleratorState.__init__`` selects FSDP or DeepSpeed only for accelerator types. Selecting
    them for ``MULTI_CPU`` too is all that real sharding over gloo needs. Ends when that method
    treats ``MULTI_CPU`` like ``MULTI_GPU``.
    """
    from accelerate.state import AcceleratorState, DistributedType, PartialState

    original = AcceleratorState.__init__

    def init(self: Any, *args: Any, **kwargs: Any) -> None:
        fresh = not AcceleratorState._shared_state.get("_sharded_on_cpu")
        original(self, *args, **kwargs)
        if not fresh or self.distributed_type != DistributedType.MULTI_CPU:
            return
        precision = self._mixed_precision
        if plugins := kwargs.get("deepspeed_plugin"):
            self.distributed_type = DistributedType.DEEPSPEED
            self.deepspeed_plugins = plugins
            for plugin in plugins.values() if isinstance(plugins, dict) else [plugins]:
                plugin.set_mixed_precision(precision)
            first = next(iter(plugins.values())) if isinstance(plugins, dict) else plugins
            first.select(_from_accelerator_state=True)
            self._mixed_precision = "no"
        elif plugin := kwargs.get("fsdp_plugin"):
            self.distributed_type = DistributedType.FSDP
            if precision != "no":
                plugin.set_mixed_precision(precision)
            self.fsdp_plugin = plugin
        else:
            return
        PartialState._shared_state["distributed_type"] = self.distributed_type
        AcceleratorState._shared_state["_sharded_on_cpu"] = True

    AcceleratorState.__init__ = init
