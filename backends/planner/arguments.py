"""What both commands ask in the same words: the model, the machine, the work."""

import argparse
import re
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any, get_args

from backends.planner import work as words
from backends.planner.hardware import GB, TERA, Machine, find_machine
from backends.planner.model import Model
from backends.planner.seconds import ADAPTERS
from backends.planner.work import Work

LARGEST = 10**9
"""Of counts and of GB, GB/s and TFLOP/s: beyond it a figure is a slip of the pen."""

ADAPTER_OPTIONS = ("--lora-rank", "--lora-targets", "--lora-dropout", "--fused-kernels")
QLORA_OPTIONS = ("--no-double-quantisation", "--frozen-upcast")
RL_OPTIONS = ("--new-tokens", "--passes", "--reward-models")
GPU_OPTIONS = ("--link", "--network", "--nvme", "--tflops")


def add_machine(parser: argparse.ArgumentParser) -> None:
    """The model and what it runs on."""
    add = parser.add_argument
    add("--model", required=True, help="a hub id, a folder, or a config.json")
    add("--gpus", required=True, help="8xH100, 2x24GB, 2x8xA100-80GB (nodes x GPUs), 2xCPU")
    add("--link", help="between GPUs: nvlink, pcie3, pcie4, pcie5, slow-pcie, or GB/s")
    add("--network", help="between nodes: ethernet-25, infiniband-400, ..., or GB/s a node")
    add("--host-memory", type=amount, metavar="GB", help="host memory of a node")
    add("--nvme", type=Path, metavar="DIR", help="directory on a fast disk, to offload to")
    add("--tflops", type=amount, help="what training reaches on one GPU, if you know better")


def add_work(parser: argparse.ArgumentParser) -> None:
    """What is trained, and how."""
    add = parser.add_argument
    add("--stage", choices=get_args(words.Stage), default="sft")
    add("--method", choices=get_args(words.Method), default="full")
    add("--seq", type=count, default=4096, help="tokens of the longest row")
    default = "default: fp32-master, adapters bf16"
    add("--precision", choices=get_args(words.Precision), help=default)
    add("--loss", choices=get_args(words.Loss), default="chunked", help="TRL 1.16's is chunked")
    add("--optimizer", choices=get_args(words.Optimizer), default="adamw")
    add("--lora-rank", type=count, default=16)
    add("--lora-targets", choices=("all", "attention"), default="all")
    saves = "above 0 it saves masks"
    add("--lora-dropout", type=share, default=Work.lora_dropout, help=saves)
    add("--attention", choices=("flash", "eager"), default="flash")
    add("--reference", choices=get_args(words.Reference), help="of a preference or RL stage")
    writes = "that an RL stage writes for a prompt"
    add("--new-tokens", type=count, default=Work.new_tokens, help=writes)
    add("--passes", type=count, default=Work.passes, help="that it learns from each answer")
    scores = "that score answers, whole in every rank; default: PPO has one"
    add("--reward-models", type=count_or_none, metavar="N", help=scores)
    add("--fused-kernels", action="store_true", help="adapters in fused kernels")
    add("--experts", choices=get_args(words.Experts), default=Work.experts, help="of a mixture")
    varying = "rows of varying length; changes only what nvidia-smi is said to show"
    add("--no-packing", action="store_true", help=varying)


def machine(args: argparse.Namespace) -> Machine:
    """What :func:`add_machine` asked for."""
    return find_machine(
        args.gpus,
        args.link,
        args.network,
        args.host_memory * GB if args.host_memory else None,
        flops=args.tflops * TERA if args.tflops else None,
    )


def work(args: argparse.Namespace, **more: Any) -> Work:
    """What :func:`add_work` asked for; full training keeps float32 master weights unless told."""
    return Work(
        stage=args.stage,
        method=args.method,
        lora_rank=args.lora_rank,
        lora_targets=args.lora_targets,
        lora_dropout=args.lora_dropout,
        precision=args.precision or ("bf16" if args.method in ADAPTERS else "fp32-master"),
        loss=args.loss,
        optimizer=args.optimizer,
        seq_length=args.seq,
        reference=args.reference,
        new_tokens=args.new_tokens,
        passes=args.passes,
        reward_models=args.reward_models,
        fused_kernels=args.fused_kernels,
        attention=args.attention,
        experts=args.experts,
        packing=not args.no_packing,
        **more,
    )


def count(text: str) -> int:
    """A whole number from 1 to ``LARGEST``."""
    if not re.fullmatch(r"[0-9]+", text) or not text.strip("0"):
        raise argparse.ArgumentTypeError(f"{text!r} is not a whole number of at least 1")
    if len(text.lstrip("0")) > len(str(LARGEST)) or int(text) > LARGEST:
        raise argparse.ArgumentTypeError(f"{text[:20]!r} is more than {LARGEST}")
    return int(text)


def count_or_none(text: str) -> int:
    """A whole number from 0 to ``LARGEST``."""
    return 0 if text == "0" else count(text)


def amount(text: str) -> float:
    """A number above zero, of a size that machines have."""
    words = f"between {1 / LARGEST:g} and {LARGEST:g}"
    return _number(text, lambda value: 1 / LARGEST <= value <= LARGEST, words)


def share(text: str) -> float:
    """A number from 0 up to 1, without 1."""
    return _number(text, lambda value: 0 <= value < 1, "from 0 up to 1")


def _number(text: str, allowed: Callable[[float], bool], words: str) -> float:
    try:
        value = float(text)
    except ValueError:
        raise argparse.ArgumentTypeError(f"{text!r} is not a number") from None
    if not allowed(value):
        more = "; it must be more than zero" if value <= 0 and not allowed(0.0) else ""
        raise argparse.ArgumentTypeError(f"{text} is not {words}{more}")
    return value


def given(argv: Sequence[str]) -> set[str]:
    """The options that ``argv`` names."""
    return {word.partition("=")[0] for word in argv if word.startswith("--")}


def irrelevant(
    args: argparse.Namespace, named: set[str], model: Model, machine: Machine
) -> Iterator[tuple[str, str]]:
    """(option, why it changes nothing here) of the options that were named."""
    rows = getattr(args, "rows", None)
    gpus = machine.device == "cuda"
    rules = (
        (ADAPTER_OPTIONS, args.method == "full", "belongs to adapters, and --method is full"),
        (QLORA_OPTIONS, args.method != "qlora", f"belongs to qlora, and --method is {args.method}"),
        (
            RL_OPTIONS,
            args.stage not in ("ppo", "grpo"),
            f"belongs to ppo and grpo, and stage {args.stage} writes no answers",
        ),
        (("--epochs",), rows is None, "says nothing without --rows"),
        (GPU_OPTIONS, not gpus, "describes GPUs, and these ranks run on CPUs"),
        (("--network",), gpus and machine.nodes == 1, "joins nodes, and there is one"),
        (("--experts",), not model.is_mixture, f"belongs to mixtures, and {model.name} is none"),
        (
            ("--loss",),
            args.stage in words.OWN_LOSS,
            f"belongs to stages with a choice of losses, and stage {args.stage} has its own",
        ),
    )
    for options, off, why in rules:
        yield from ((option, why) for option in options if off and option in named)
