"""The ``estimate`` command: memory and time of one given set-up."""

import argparse
import json
import sys
from collections.abc import Callable
from difflib import get_close_matches
from pathlib import Path
from typing import Any, get_args

from backends import DDP, FSDP, DeepSpeed, Local, NamedBackend, Resources
from backends.planner import arguments
from backends.planner import work as words
from backends.planner.hardware import GB, TERA, Machine, find_machine
from backends.planner.memory import unknown_buckets
from backends.planner.model import Model, find_model
from backends.planner.ranking import (
    MARGIN_BYTES,
    Limits,
    Option,
    contradiction,
    judge,
    refusals,
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
    add = parser.add_argument
    parser.description = "Memory and time of one given set-up."
    add("--model", required=True, help="a hub id, a folder, or a config.json")
    add("--gpus", required=True, help="4xA100-80GB, 2x24GB, 2x8xH100 (nodes x GPUs), 2xCPU")
    add("--link", help="between GPUs: a name, or GB/s")
    add("--network", help="between nodes: a name, or GB/s a node")
    add("--host-memory", type=arguments.amount, metavar="GB", help="host memory of a node")
    add("--nvme", type=Path, metavar="DIR", help="the disk of zero3:nvme")
    add("--tflops", type=arguments.amount, help="what training reaches on one GPU")
    add("--backend", default="local", help=f"deepspeed, or {', '.join(BACKENDS)}")
    add("--zero-stage", type=int, choices=(1, 2, 3), help="of --backend deepspeed; default 3")
    add("--shard-ranks", type=arguments.count, help="ranks of a shard group of fsdp:hybrid")
    add(
        "--fsdp-version",
        type=int,
        choices=(1, 2),
        default=1,
        help="1 (default): as most published runs, and the safer bound for adapters; 2: as here",
    )
    add("--stage", choices=get_args(words.Stage), default="sft")
    add("--method", choices=get_args(words.Method), default="full")
    add("--precision", choices=get_args(words.Precision), help="full: fp32-master, adapters: bf16")
    add("--loss", choices=get_args(words.Loss), default="chunked")
    add("--optimizer", choices=get_args(words.Optimizer), default="adamw")
    add(
        "--micro-batch", type=arguments.count, default=1, help="rows of one forward pass on one GPU"
    )
    add(
        "--accumulation",
        type=arguments.count,
        default=1,
        help="forward passes of one optimizer step",
    )
    add("--seq", type=arguments.count, default=4096, help="tokens of the longest row")
    add("--lora-rank", type=arguments.count, default=16)
    add("--lora-targets", choices=("all", "attention"), default="all")
    add("--lora-dropout", type=arguments.share, default=Work.lora_dropout)
    add("--reference", choices=get_args(words.Reference), help="of a preference or RL stage")
    add(
        "--new-tokens", type=arguments.count, default=Work.new_tokens, help="generated for a prompt"
    )
    add("--no-checkpointing", action="store_true", help="keep activations, recompute nothing")
    add("--activation-offloading", action="store_true", help="keep checkpoints in host memory")
    add("--attention", choices=("flash", "eager"), default="flash")
    add("--fused-kernels", action="store_true", help="adapters in fused kernels")
    add(
        "--norms",
        choices=("plain", "fused"),
        help="how norms are computed; unset, fused unless --loss hf",
    )
    add("--no-double-quantisation", action="store_true", help="QLoRA's scales stay float32")
    add("--frozen-upcast", action="store_true", help="QLoRA's embeddings and head in float32")
    add("--experts", choices=get_args(words.Experts), default=Work.experts, help="of a mixture")
    add(
        "--no-packing",
        action="store_true",
        help="rows of varying length; changes only what nvidia-smi is said to show",
    )
    add(
        "--context-margin",
        type=arguments.amount,
        default=MARGIN_BYTES / GB,
        metavar="GB",
        help="kept free for the CUDA context and fragmentation",
    )
    add(
        "--buckets",
        choices=("unknown", "auto"),
        default="unknown",
        help="of ZeRO-1 and 2: unknown (default) leaves 3.6 GB for those of published examples",
    )
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
    machine = find_machine(
        args.gpus,
        args.link,
        args.network,
        args.host_memory * GB if args.host_memory else None,
        flops=args.tflops * TERA if args.tflops else None,
    )
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
    if reason := contradiction(work):
        raise ValueError(reason)
    option = judge(model, work, setup, machine, limits=limits)
    found = as_object(option, model, work, machine) | {
        "resident_bytes_per_gpu": option.memory.resident,
        "num_parameters": model.num_parameters,
        "refused": refusals(work, setup),
        "assumed": _assumed(args, model, work, setup, machine, spare),
        "ignored": [f"{name} {why}" for name, why in _ignored(args, named, setup, machine)],
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
    args: argparse.Namespace, named: set[str], setup: Setup, machine: Machine
) -> list[tuple[str, str]]:
    found = list(arguments.irrelevant(args, named, machine))
    disk = "nvme" in (getattr(setup.backend, f"offload_{what}", None) for what in OFFLOADED)
    if args.nvme and not disk and machine.device == "cuda":
        found.append(("--nvme", f"belongs to zero3:nvme, not to {args.backend}"))
    if "--fsdp-version" in named and not isinstance(setup.backend, FSDP):
        found.append(("--fsdp-version", f"belongs to fsdp, not to {args.backend}"))
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
    lines.append(f"  nvidia-smi may show {found['reserved_bytes_per_gpu'] / GB:.1f} GB")
    lines.append(f"{option.time.seconds:.3g} s a step; {option.why}")
    lines.append(f"supposed: {'; '.join(found['assumed'])}")
    for head, key in (("warning", "warnings"), ("changes nothing", "ignored")):
        lines += [f"{head}: {each}" for each in found[key]]
    return "\n".join(lines)


def _work(args: argparse.Namespace, setup: Setup) -> Work:
    precision = args.precision or ("fp32-master" if args.method == "full" else "bf16")
    return Work(
        stage=args.stage,
        method=args.method,
        lora_rank=args.lora_rank,
        lora_targets=args.lora_targets,
        lora_dropout=args.lora_dropout,
        precision=precision,
        loss=args.loss,
        optimizer=args.optimizer,
        seq_length=args.seq,
        global_batch=setup.world_size * setup.micro_batch * args.accumulation,
        reference=args.reference,
        new_tokens=args.new_tokens,
        fused_kernels=args.fused_kernels,
        fused_norms=None if args.norms is None else args.norms == "fused",
        frozen_upcast=args.frozen_upcast,
        attention=args.attention,
        experts=args.experts,
        fsdp_version=args.fsdp_version,
        packing=not args.no_packing,
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
