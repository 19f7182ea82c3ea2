"""``python -m stages.checkpoint validate|describe PATH``, for people."""

import argparse
import json
import sys
from pathlib import Path

from stages.base import StageError
from stages.checkpoint import describe, validate


def main(argv: list[str] | None = None) -> int:
    """The exit status: 0, or 1 with one line per fault."""
    options = _parser().parse_args(argv)
    try:
        return options.run(options)
    except StageError as error:
        return _report((str(error),))


def _validate(options: argparse.Namespace) -> int:
    return _report(validate(options.path, options.dtype))


def _describe(options: argparse.Namespace) -> int:
    sys.stdout.write(json.dumps(describe(options.path), indent=2) + "\n")
    return 0


def _report(faults: tuple[str, ...]) -> int:
    sys.stdout.writelines(f"{fault}\n" for fault in faults)
    return 1 if faults else 0


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="python -m stages.checkpoint", description=__doc__)
    commands = parser.add_subparsers(required=True, metavar="validate|describe")
    checking = commands.add_parser("validate", help="print one line per fault; none is exit 0")
    checking.add_argument("path", type=Path)
    checking.add_argument("--dtype", help="the type every tensor should be in, such as bfloat16")
    checking.set_defaults(run=_validate)
    facts = commands.add_parser("describe", help="print the facts as JSON, loading no tensor")
    facts.add_argument("path", type=Path)
    facts.set_defaults(run=_describe)
    return parser


if __name__ == "__main__":
    sys.exit(main())
