"""The planner's command line: ``python -m backends.planner --model M --gpus 8xH100 ...``."""

import argparse
import json
import os
import re
import sys
from collections.abc import Sequence
from difflib import get_close_matches
from pathlib import Path
from typing import NoReturn, get_args

from backends.planner import arguments
from backends.planner import work as words
from backends.planner.explain import explain
from backends.planner.hardware import GB, TERA, Machine, find_machine
from backends.planner.model import find_model
from backends.planner.ranking import MARGIN_BYTES, Limits, options, refused
from backends.planner.seconds import ADAPTERS
from backends.planner.table import as_object, as_text, hours
from backends.planner.work import Work

USER_MISTAKE = 2
OF_ESTIMATE = (
    "--backend",
    "--zero-stage",
    "--shard-ranks",
    "--fsdp-version",
    "--micro-batch",
    "--accumulation",
    "--no-checkpointing",
    "--activation-offloading",
    "--norms",
    "--buckets",
    "--context-margin",
    "--frozen-upcast",
    "--no-double-quantisation",
)


class _Parser(argparse.ArgumentParser):
    """Says what is wrong in one line, with the nearest word that would be right."""

    def error(self, message: str) -> NoReturn:
        options = [action.option_strings[-1] for action in self._actions if action.option_strings]
        self.exit(USER_MISTAKE, f"planner: {_nearest(message, options)}\n")


def main(argv: Sequence[str] | None = None) -> int:
    """Answer one question; 0, or 2 with one line on stderr when it cannot be meant."""
    argv = sys.argv[1:] if argv is None else list(argv)
    try:
        if argv[:1] == ["estimate"]:
            return _estimate(argv[1:])
        sys.stdout.write(f"{_answer(_parser().parse_args(argv), arguments.given(argv))}\n")
        sys.stdout.flush()
    except BrokenPipeError:  # the reader of a pipe has seen enough
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
    except (ValueError, OSError) as error:
        sys.stderr.write(f"planner: {' '.join(str(error).split())}\n")
        return USER_MISTAKE
    return 0


def _estimate(argv: Sequence[str]) -> int:
    from backends.planner import estimate

    parser = _Parser(prog="python -m backends.planner estimate", allow_abbrev=False)
    estimate.add_arguments(parser)
    return estimate.run(parser.parse_args(argv), arguments.given(argv)) or 0


def _answer(args: argparse.Namespace, named: set[str]) -> str:
    model = find_model(args.model)
    machine = _machine(args)
    for option, why in arguments.irrelevant(args, named, machine):
        raise ValueError(f"{option} {why}; leave it out")
    work = _work(args)
    limits = Limits(margin_bytes=int(args.margin_gb * GB), nvme_path=args.nvme)
    ranked = options(model, work, machine, limits=limits)
    if args.json:
        taken = [hours(option, work, args.rows, args.epochs) for option in ranked]
        found = [
            as_object(option, model, work, machine, total_hours=total)
            for option, total in zip(ranked, taken, strict=True)
        ]
        return json.dumps(found, indent=2)
    rules = explain(model, work, machine, ranked)
    without = refused(work, machine, limits)
    return as_text(model, work, machine, ranked, rules, without, rows=args.rows, epochs=args.epochs)


def _machine(args: argparse.Namespace) -> Machine:
    return find_machine(
        args.gpus,
        args.link,
        args.network,
        args.host_memory * GB if args.host_memory else None,
        flops=args.tflops * TERA if args.tflops else None,
    )


def _work(args: argparse.Namespace) -> Work:
    """Full training keeps float32 master weights unless told otherwise."""
    precision = args.precision or ("bf16" if args.method in ADAPTERS else "fp32-master")
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
        global_batch=args.global_batch,
        reference=args.reference,
        new_tokens=args.new_tokens,
        fused_kernels=args.fused_kernels,
        attention=args.attention,
        experts=args.experts,
        packing=not args.no_packing,
    )


def _parser() -> argparse.ArgumentParser:
    parser = _Parser(
        prog="python -m backends.planner",
        description="Every way to spread the work over the machine: what fits, how fast, why.",
        epilog="`python -m backends.planner estimate --help`: memory and time of one given set-up.",
        allow_abbrev=False,
    )
    add = parser.add_argument
    add("--model", required=True, help="a hub id, a folder, or a config.json")
    add("--gpus", required=True, help="8xH100, 2x24GB, 2x8xA100-80GB (nodes x GPUs), 2xCPU")
    add("--link", help="between GPUs: nvlink, pcie3, pcie4, pcie5, slow-pcie, or GB/s")
    add("--network", help="between nodes: ethernet-25, infiniband-400, ..., or GB/s a node")
    add("--host-memory", type=arguments.amount, metavar="GB", help="host memory of a node")
    add("--nvme", type=Path, metavar="DIR", help="directory on a fast disk, to offload to")
    add(
        "--tflops",
        type=arguments.amount,
        help="what training reaches on one GPU, if you know better",
    )
    add("--stage", choices=get_args(words.Stage), default="sft")
    add("--method", choices=get_args(words.Method), default="full")
    add("--seq", type=arguments.count, default=4096, help="tokens of the longest row")
    add("--global-batch", type=arguments.count, default=64, help="rows of one optimizer step")
    add(
        "--precision", choices=get_args(words.Precision), help="default: fp32-master, adapters bf16"
    )
    add("--loss", choices=get_args(words.Loss), default="chunked", help="TRL 1.16's is chunked")
    add("--optimizer", choices=get_args(words.Optimizer), default="adamw")
    add("--lora-rank", type=arguments.count, default=16)
    add("--lora-targets", choices=("all", "attention"), default="all")
    add(
        "--lora-dropout",
        type=arguments.share,
        default=Work.lora_dropout,
        help="above 0 it saves masks",
    )
    add("--attention", choices=("flash", "eager"), default="flash")
    add("--reference", choices=get_args(words.Reference), help="of a preference or RL stage")
    add(
        "--new-tokens",
        type=arguments.count,
        default=512,
        help="that an RL stage writes for a prompt",
    )
    add("--fused-kernels", action="store_true", help="adapters in fused kernels")
    add("--experts", choices=get_args(words.Experts), default=Work.experts, help="of a mixture")
    add(
        "--no-packing",
        action="store_true",
        help="rows of varying length; changes only what nvidia-smi is said to show",
    )
    add(
        "--margin-gb",
        type=arguments.amount,
        default=MARGIN_BYTES / GB,
        help="kept free on each GPU",
    )
    add("--rows", type=arguments.count, help="rows of data, for hours")
    add("--epochs", type=arguments.count, default=1)
    add("--json", action="store_true", help="a list of objects")
    return parser


def _nearest(message: str, options: Sequence[str]) -> str:
    """argparse's ``message`` with the nearest of the choices that it names, or of ``options``."""
    if wrong := re.search(r"invalid choice: '([^']*)' \(choose from (.*)\)", message):
        near = get_close_matches(wrong[1], re.findall(r"[\w.-]+", wrong[2]), n=1, cutoff=0.4)
        return message + (f"; did you mean {near[0]}?" if near else "")
    if wrong := re.search(r"unrecognized arguments: (--[\w-]+)", message):
        if wrong[1] in OF_ESTIMATE and wrong[1] not in options:
            return (
                f"{wrong[1]} belongs to one given set-up, and this command ranks them all; "
                "ask `python -m backends.planner estimate`"
            )
        near = get_close_matches(wrong[1], options, n=1, cutoff=0.4)
        return message + (f"; did you mean {near[0]}?" if near else "; see --help")
    return message


if __name__ == "__main__":
    sys.exit(main())
