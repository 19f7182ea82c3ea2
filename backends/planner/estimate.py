"""The ``estimate`` command: memory and time of one given set-up."""

import argparse
import json
import sys
from collections.abc import Callable
from difflib import get_close_matches
from pathlib import Path
from typing import Any

from backends import DDP, FSDP, DeepSpeed, Local, NamedBackend, Resources
from backends.planner import arguments
from backends.planner.hardware import GB, Machine
from backends.planner.memory import unknown_buckets
from backends.planner.model import Model, find_model
from backends.planner.ranking import (
    MARGIN_BYTES,
    Limits,
    Option,
    contradiction,
    judge,
    refusals,
    stored_otherwise,
)
from backends.planner.seconds import OFFLOADED
from backends.planner.table import as_object, suppositions
from backends.planner.work import Setup, Work

PARTS = ("weights", "gradients", "optimizer", "activations", "logits", "buffers")
SOMEWHERE = Path("nvme")
"""The disk's place does not matter to an estimate."""


def _zero(stage: Any, **offload: Any) -> DeepSpeed:
    place = SOMEWHERE if "nvme" in offload.values() else None
    return DeepSpeed(zero_stage=stage, nvme_path=place, **offload)


BACKENDS: dict[str, Callable[[], NamedBackend]] = {
    "local": Local,
    "single": Local,
    "ddp": DDP,
    "fsdp": FSDP,
    "fsdp:full": FSDP,
    "fsdp:grad_op": lambda: FSDP(sharding="grad_op"),
    "fsdp:hybrid": lambda: FSDP(sharding="hybrid"),
    "fsdp:offload": lambda: FSDP(cpu_offload=True),
    "fsdp:whole-embedding": lambda: FSDP(whole_embedding=True),
    "zero1": lambda: _zero(1),
    "zero1:offload": lambda: _zero(1, offload_optimizer="cpu"),
    "zero2": lambda: _zero(2),
    "zero2:offload": lambda: _zero(2, offload_optimizer="cpu"),
    "zero3": lambda: _zero(3),
    "zero3:offload": lambda: _zero(3, offload_optimizer="cpu"),
    "zero3:offload-parameters": lambda: _zero(3, offload_parameters="cpu"),
    "zero3:offload-all": lambda: _zero(3, offload_optimizer="cpu", offload_parameters="cpu"),
    "zero3:nvme": lambda: _zero(3, offload_optimizer="nvme", offload_parameters="nvme"),
    "zero3:nvme-optimizer": lambda: _zero(3, offload_optimizer="nvme"),
}
"""Names of set-ups. ``deepspeed`` with ``--zero-stage N`` is ``zeroN``."""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """The options of ``python -m backends.planner estimate``."""
    parser.description = "Memory and time of one given set-up."
    arguments.add_machine(parser)
    arguments.add_work(parser)
    add = parser.add_argument
    add("--backend", default="local", help=f"deepspeed, or {', '.join(BACKENDS)}")
    add("--zero-stage", type=int, choices=(1, 2, 3), help="of --backend deepspeed; default 3")
    add("--shard-ranks", type=arguments.count, help="ranks of a shard group of fsdp:hybrid")
    which = "1 (default): as most published runs, and the safer bound for adapters; 2: as here"
    add("--fsdp-version", type=int, choices=(1, 2), default=1, help=which)
    rows = "rows of one forward pass on one GPU"
    add("--micro-batch", type=arguments.count, default=1, help=rows)
    passes = "forward passes of one optimizer step"
    add("--accumulation", type=arguments.count, default=1, help=passes)
    add("--no-checkpointing", action="store_true", help="keep activations, recompute nothing")
    add("--activation-offloading", action="store_true", help="keep checkpoints in host memory")
    norms = "how norms are computed; unset, fused unless --loss hf"
    add("--norms", choices=("plain", "fused"), help=norms)
    add("--no-double-quantisation", action="store_true", help="QLoRA's scales stay float32")
    add("--frozen-upcast", action="store_true", help="QLoRA's embeddings and head in float32")
    kept = "kept free for the CUDA context and fragmentation"
    margin = MARGIN_BYTES / GB
    add("--context-margin", type=arguments.amount, default=margin, metavar="GB", help=kept)
    known = "of ZeRO-1 and 2: unknown (default) leaves 3.6 GB for those of published examples"
    add("--buckets", choices=("unknown", "auto"), default="unknown", help=known)
    add("--json", action="store_true", help="one object")


def run(args: argparse.Namespace, named: set[str]) -> int:
    """Print the answer; 0 whether or not it fits. Raises ``ValueError`` for a user's mistake.

    ``named`` are the options of the command line; those that change nothing here are listed.
    """
    if args.no_checkpointing and args.activation_offloading:
        raise ValueError(
            "--activation-offloading moves checkpoints to the host, and --no-checkpointing leaves "
            "none; drop one of the two"
        )
    model = find_model(args.model)
    machine = arguments.machine(args)
    resources = Resources(
        nodes=machine.nodes,
        ranks_per_node=machine.ranks_per_node,
        device=machine.device,
        micro_batch_size=args.micro_batch,
        gradient_checkpointing=not args.no_checkpointing,
        activation_offloading=args.activation_offloading,
    )
    setup = Setup(_backend(args), resources)
    setup.backend.plan(resources)  # refuses what cannot be started
    spare = unknown_buckets(setup) if args.buckets == "unknown" else 0
    limits = Limits(margin_bytes=int(args.context_margin * GB) + spare)
    work = _work(args, setup)
    if reason := contradiction(work) or stored_otherwise(model, work):
        raise ValueError(reason)
    option = judge(model, work, setup, machine, limits=limits)
    found = as_object(option, model, work, machine) | {
        "resident_bytes_per_gpu": option.memory.resident,
        "num_parameters": model.num_parameters,
        "refused": refusals(work, setup),
        "assumed": _assumed(args, model, work, setup, machine, spare),
        "ignored": [f"{name} {why}" for name, why in _ignored(args, named, model, setup, machine)],
    }
    found["fits"] = option.fits and found["refused"] is None
    text = json.dumps(found, indent=2) if args.json else _text(option, machine, found)
    sys.stdout.write(f"{text}\n")
    return 0


def _assumed(
    args: argparse.Namespace, model: Model, work: Work, setup: Setup, machine: Machine, spare: int
) -> list[str]:
    """Everything by which this answer may differ from another one to the same question."""
    found = [each for each in suppositions(model, work, machine) if not each.startswith("FSDP ")]
    if isinstance(setup.backend, FSDP):
        found.append(f"FSDP {work.fsdp_version} (the ranked command plans with 2)")
    if spare:
        found.append(f"{spare / GB:.1f} GB for buckets of unknown size (--buckets auto: none)")
    if args.precision is None:
        found.append(f"precision {work.precision}")
    found.append(f"{args.context_margin:g} GB left free on a GPU")
    return found


def _ignored(
    args: argparse.Namespace, named: set[str], model: Model, setup: Setup, machine: Machine
) -> list[tuple[str, str]]:
    found = list(arguments.irrelevant(args, named, model, machine))
    disk = "nvme" in (getattr(setup.backend, f"offload_{what}", None) for what in OFFLOADED)
    if args.nvme and not disk and machine.device == "cuda":
        found.append(("--nvme", f"belongs to zero3:nvme, not to {args.backend}"))
    if "--fsdp-version" in named and not isinstance(setup.backend, FSDP):
        found.append(("--fsdp-version", f"belongs to fsdp, not to {args.backend}"))
    if "--buckets" in named and not unknown_buckets(setup):
        found.append(("--buckets", "belongs to ZeRO-1 and 2 of several ranks"))
    return found


def _text(option: Option, machine: Machine, found: dict[str, Any]) -> str:
    need, capacity = option.memory, machine.gpu.memory_bytes
    verdict = "fits"
    if not option.fits:
        verdict = f"does not fit: {option.short_by / GB:.1f} GB of {option.short_of} short"
    elif found["refused"]:
        verdict = "would fit, but is refused"
    lines = [f"{need.total / GB:.2f} GB of {capacity / GB:.1f} GB at the {need.phase}: {verdict}"]
    lines += [f"refused: {found['refused']}"] if found["refused"] else []
    lines += [f"  {part:<12}{getattr(need, part) / GB:>8.2f} GB" for part in PARTS]
    away = ((need.host_bytes, "host memory"), (need.disk_bytes, "disk"))
    lines += [f"  {name} of a node: {size / GB:.1f} GB" for size, name in away if size]
    if machine.device == "cuda":
        lines.append(f"  nvidia-smi may show {found['reserved_bytes_per_gpu'] / GB:.1f} GB")
    lines.append(f"{option.time.seconds:.3g} s a step; {option.why}")
    lines.append(f"supposed: {'; '.join(found['assumed'])}")
    for head, key in (("warning", "warnings"), ("changes nothing", "ignored")):
        lines += [f"{head}: {each}" for each in found[key]]
    return "\n".join(lines)


def _work(args: argparse.Namespace, setup: Setup) -> Work:
    return arguments.work(
        args,
        global_batch=setup.world_size * setup.micro_batch * args.accumulation,
        fused_norms=None if args.norms is None else args.norms == "fused",
        frozen_upcast=args.frozen_upcast,
        fsdp_version=args.fsdp_version,
        double_quantisation=not args.no_double_quantisation,
    )


def _backend(args: argparse.Namespace) -> NamedBackend:
    name = args.backend
    if name == "deepspeed":
        return _zero(args.zero_stage or 3)
    if args.zero_stage is not None:
        raise ValueError(f"--zero-stage belongs to --backend deepspeed, not to {name!r}")
    if name not in BACKENDS:
        known = ["deepspeed", *BACKENDS]
        near = get_close_matches(name, known, n=1, cutoff=0.4)
        hint = f"did you mean {near[0]}?" if near else f"known are {', '.join(known)}"
        raise ValueError(f"backend {name!r} is not known; {hint}")
    if args.shard_ranks is None:
        backend = BACKENDS[name]()
        disk = isinstance(backend, DeepSpeed) and backend.nvme_path
        return (
            backend.model_copy(update={"nvme_path": args.nvme}) if disk and args.nvme else backend
        )
    if name != "fsdp:hybrid":
        raise ValueError(f"--shard-ranks belongs to --backend fsdp:hybrid, not to {name!r}")
    return FSDP(sharding="hybrid", shard_ranks=args.shard_ranks)
