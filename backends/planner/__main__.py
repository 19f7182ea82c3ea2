"""The planner's command line: ``python -m backends.planner --model M --gpus 8xH100 ...``."""

import argparse
import json
import os
import re
import sys
from collections.abc import Iterator, Sequence
from difflib import get_close_matches
from typing import NoReturn

from backends.planner import arguments
from backends.planner.explain import explain
from backends.planner.hardware import GB, Machine
from backends.planner.model import Model, find_model
from backends.planner.ranking import MARGIN_BYTES, Limits, options, refused
from backends.planner.seconds import ADAPTERS
from backends.planner.table import as_object, as_text, hours

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
OF_RANKING = {
    "--global-batch": "--micro-batch and --accumulation",
    "--margin-gb": "--context-margin",
    "--rows": "no hours",
    "--epochs": "no hours",
}
"""Options of the ranked command, with what stands for them in ``estimate``."""


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
    machine = arguments.machine(args)
    for option, why in _irrelevant(args, named, model, machine):
        raise ValueError(f"{option} {why}; leave it out")
    work = arguments.work(args, global_batch=args.global_batch)
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


def _irrelevant(
    args: argparse.Namespace, named: set[str], model: Model, machine: Machine
) -> Iterator[tuple[str, str]]:
    yield from arguments.irrelevant(args, named, model, machine)
    if args.nvme and args.method in ADAPTERS:
        yield "--nvme", f"is for full training: {args.method} leaves little to put on a disk"


def _parser() -> argparse.ArgumentParser:
    parser = _Parser(
        prog="python -m backends.planner",
        description="Every way to spread the work over the machine: what fits, how fast, why.",
        epilog="`python -m backends.planner estimate --help`: memory and time of one given set-up.",
        allow_abbrev=False,
    )
    arguments.add_machine(parser)
    arguments.add_work(parser)
    add, kept = parser.add_argument, "kept free on each GPU"
    add("--global-batch", type=arguments.count, default=64, help="rows of one optimizer step")
    add("--margin-gb", type=arguments.amount, default=MARGIN_BYTES / GB, help=kept)
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
        if wrong[1] in OF_RANKING and wrong[1] not in options:
            return f"{wrong[1]} belongs to the ranked command; estimate has {OF_RANKING[wrong[1]]}"
        near = get_close_matches(wrong[1], options, n=1, cutoff=0.4)
        return message + (f"; did you mean {near[0]}?" if near else "; see --help")
    return message


if __name__ == "__main__":
    sys.exit(main())
