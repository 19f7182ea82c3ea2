"""Types of command-line values, and options that the rest of a question gives no meaning."""

import argparse
import re
from collections.abc import Callable, Iterator, Sequence

from backends.planner.hardware import Machine

LARGEST = 10**9
"""Of counts and of GB, GB/s and TFLOP/s: beyond it a figure is a slip of the pen."""

ADAPTER_OPTIONS = ("--lora-rank", "--lora-targets", "--lora-dropout", "--fused-kernels")
QLORA_OPTIONS = ("--no-double-quantisation", "--frozen-upcast")
GPU_OPTIONS = ("--link", "--network", "--nvme", "--tflops")


def count(text: str) -> int:
    """A whole number from 1 to ``LARGEST``."""
    if not re.fullmatch(r"[0-9]+", text) or not text.strip("0"):
        raise argparse.ArgumentTypeError(f"{text!r} is not a whole number of at least 1")
    if len(text.lstrip("0")) > len(str(LARGEST)) or int(text) > LARGEST:
        raise argparse.ArgumentTypeError(f"{text[:20]!r} is more than {LARGEST}")
    return int(text)


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
    args: argparse.Namespace, named: set[str], machine: Machine
) -> Iterator[tuple[str, str]]:
    """(option, why it changes nothing here) of the options that were named."""
    rows = getattr(args, "rows", None)
    rules = (
        (ADAPTER_OPTIONS, args.method == "full", "belongs to adapters, and --method is full"),
        (QLORA_OPTIONS, args.method != "qlora", f"belongs to qlora, and --method is {args.method}"),
        (
            ("--new-tokens",),
            args.stage not in ("ppo", "grpo"),
            f"belongs to ppo and grpo, and stage {args.stage} writes no answers",
        ),
        (("--epochs",), rows is None, "says nothing without --rows"),
        (GPU_OPTIONS, machine.device == "cpu", "describes GPUs, and these ranks run on CPUs"),
    )
    for options, off, why in rules:
        yield from ((option, why) for option in options if off and option in named)
