"""``python -m stages.checkpoint validate|describe|convert|merge|adapter|diff``, for people."""

import argparse
import json
import sys
from collections.abc import Iterable
from pathlib import Path

from configs import ConfigError, resolve
from stages.base import StageError
from stages.checkpoint import describe, validate
from stages.checkpoint.compare import differences


def main(argv: list[str] | None = None) -> int:
    """The exit status: 0, or 1 with one line per fault or difference; 2 for an unusable option."""
    options = _parser().parse_args(argv)
    try:
        return options.run(options)
    except StageError as error:
        return _report(str(error).splitlines())
    except ConfigError as error:
        _report(str(error).splitlines())
        return 2
    except OSError as error:
        return _report([_in_words(error, options)])


def _validate(options: argparse.Namespace) -> int:
    found = validate(options.path, options.dtype, base=options.base, chat=options.chat)
    return _report(found)


def _describe(options: argparse.Namespace) -> int:
    sys.stdout.write(json.dumps(describe(options.path), indent=2) + "\n")
    return 0


def _diff(options: argparse.Namespace) -> int:
    return _report(differences(options.one, options.two))


def _convert(options: argparse.Namespace) -> int:
    from stages.convert import Convert, export_model

    asked = {
        "export_dtype": options.dtype,
        "max_shard_size": options.max_shard_size,
        "also": tuple(options.also or ()),
        "merge_arithmetic": options.arithmetic,
        "merge_into": options.merge_into,
        "parity_probes": options.parity_probes,
    }
    given = {key: value for key, value in asked.items() if value is not None}
    config = resolve(Convert, given, place=Path("options"))
    base = options.base or options.path
    figures = export_model(config, options.out, source=options.path, origin=base)
    sys.stdout.write(json.dumps(figures, indent=2) + "\n")
    return 0


def _adapter(options: argparse.Namespace) -> int:
    from stages.convert import export_adapter

    export_adapter(options.out, source=options.path)
    return 0


def _in_words(error: OSError, options: argparse.Namespace) -> str:
    """What the system said, and of which file; a full disk names none."""
    place = error.filename or getattr(options, "out", None)
    said = error.strerror or (str(error) or repr(error)).splitlines()[0]
    return f"{place}: {said}" if place else said


def _report(lines: Iterable[str]) -> int:
    found = False
    for line in lines:
        found = True
        sys.stdout.write(f"{line}\n")
    return 1 if found else 0


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="python -m stages.checkpoint", description=__doc__)
    commands = parser.add_subparsers(required=True, metavar="COMMAND")
    checking = commands.add_parser("validate", help="print one line per fault; none is exit 0")
    checking.add_argument("path", type=Path)
    checking.add_argument("--dtype", help="the type every tensor should be in, such as bfloat16")
    checking.add_argument("--base", type=Path, help="the whole model that an adapter should fit")
    checking.add_argument("--chat", action="store_true", help="ask for a chat template")
    checking.set_defaults(run=_validate)
    facts = commands.add_parser("describe", help="print the facts as JSON, loading no tensor")
    facts.add_argument("path", type=Path)
    facts.set_defaults(run=_describe)
    for name, text in (
        ("convert", "any layout to a plain folder, validated and compared with the trained model"),
        ("merge", "the same for an adapter, which needs its base"),
    ):
        _add_conversion(commands.add_parser(name, help=text), needs_base=name == "merge")
    alone = commands.add_parser("adapter", help="the adapter alone, as PEFT loads it")
    alone.add_argument("path", type=Path)
    alone.add_argument("out", type=Path)
    alone.set_defaults(run=_adapter)
    comparing = commands.add_parser("diff", help="print one line per difference; none is exit 0")
    comparing.add_argument("one", type=Path)
    comparing.add_argument("two", type=Path)
    comparing.set_defaults(run=_diff)
    return parser


def _add_conversion(parser: argparse.ArgumentParser, *, needs_base: bool) -> None:
    parser.add_argument("path", type=Path, help="what training left")
    parser.add_argument("out", type=Path, help="the model comes to OUT/model")
    parser.add_argument("--base", type=Path, required=needs_base, help="what it was trained from")
    parser.add_argument("--dtype", choices=["float32", "bfloat16", "float16"])
    parser.add_argument("--max-shard-size", help="such as 5GB")
    parser.add_argument("--also", action="append", choices=["gguf_f16", "gguf_q8_0", "nf4"])
    parser.add_argument("--arithmetic", choices=["float32", "peft"])
    parser.add_argument("--merge-into", choices=["measured", "original", "dequantised"])
    parser.add_argument("--parity-probes", type=int, help="0 leaves the comparison out")
    parser.set_defaults(run=_convert)


if __name__ == "__main__":
    sys.exit(main())
