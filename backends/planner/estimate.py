"""The ``estimate`` command: memory and time of one given set-up."""

import argparse
import json
import sys
from collections.abc import Callable
from difflib import get_close_matches
from pathlib import Path
from typing import Any, get_args

from backends import DDP, FSDP, DeepSpeed, Local, NamedBackend, Resources
from backends.planner import work as words
from backends.planner.hardware import GB, find_machine
from backends.planner.memory import Memory, unknown_buckets
from backends.planner.model import find_model
from backends.planner.ranking import MARGIN_BYTES, Limits, Option, judge
from backends.planner.table import as_object
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
    add("--backend", default="local", help=f"deepspeed, or {', '.join(BACKENDS)}")
    add("--zero-stage", type=int, choices=(1, 2, 3), help="of --backend deepspeed; default 3")
    add("--shard-ranks", type=_count, help="ranks of a shard group of fsdp:hybrid")
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
    add("--micro-batch", type=_count, default=1, help="rows of one forward pass on one GPU")
    add("--accumulation", type=_count, default=1, help="forward passes of one optimizer step")
    add("--seq", type=_count, default=4096, help="tokens of the longest row")
    add("--lora-rank", type=_count, default=16)
    add("--lora-targets", choices=("all", "attention"), default="all")
    add("--lora-dropout", type=_fraction, default=Work.lora_dropout)
    add("--reference", choices=get_args(words.Reference), help="of a preference or RL stage")
    add("--new-tokens", type=_count, default=Work.new_tokens, help="generated for a prompt")
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
    add("--no-packing", action="store_true", help="rows of varying length")
    add(
        "--context-margin",
        type=_positive,
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


def run(args: argparse.Namespace) -> int:
    """Print the answer; 0 whether or not it fits. Raises ``ValueError`` for a user's mistake."""
    model = find_model(args.model)
    machine = find_machine(args.gpus, args.link, args.network)
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
    option = judge(model, work, setup, machine, limits=limits)
    if args.json:
        found = as_object(option) | _more(option.memory, model.num_parameters)
        sys.stdout.write(f"{json.dumps(found, indent=2)}\n")
    else:
        sys.stdout.write(f"{_text(option, machine.gpu.memory_bytes)}\n")
    return 0


def _more(need: Memory, num_parameters: int) -> dict[str, Any]:
    return {
        "resident_bytes_per_gpu": need.resident,
        "num_parameters": num_parameters,
    }


def _text(option: Option, capacity: int) -> str:
    need = option.memory
    verdict = "fits" if option.fits else f"does not fit: {option.short_by / GB:.1f} GB short"
    lines = [f"{need.total / GB:.2f} GB of {capacity / GB:.1f} GB at the {need.phase}: {verdict}"]
    lines += [f"  {part:<12}{getattr(need, part) / GB:>8.2f} GB" for part in PARTS]
    away = ((need.host_bytes, "host memory"), (need.disk_bytes, "disk"))
    lines += [f"  {name} of a node: {size / GB:.1f} GB" for size, name in away if size]
    return "\n".join([*lines, f"{option.time.seconds:.3g} s a step; {option.why}"])


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
        return BACKENDS[name]()
    if name != "fsdp:hybrid":
        raise ValueError(f"--shard-ranks belongs to --backend fsdp:hybrid, not to {name!r}")
    return FSDP(sharding="hybrid", shard_ranks=args.shard_ranks)


def _count(text: str) -> int:
    if not text.isdigit() or int(text) < 1:
        raise argparse.ArgumentTypeError(f"{text!r} is not a whole number of at least 1")
    return int(text)


def _positive(text: str) -> float:
    return _number(text, lambda value: 0 < value < float("inf"), "more than zero")


def _fraction(text: str) -> float:
    return _number(text, lambda value: 0 <= value < 1, "from 0 up to 1")


def _number(text: str, allowed: Callable[[float], bool], words: str) -> float:
    try:
        value = float(text)
    except ValueError:
        raise argparse.ArgumentTypeError(f"{text!r} is not a number") from None
    if not allowed(value):
        raise argparse.ArgumentTypeError(f"{text} is not {words}")
    return value
