"""The command line of every flow."""

import argparse
import os
import signal
import sys
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from pathlib import Path
from typing import Any, NoReturn

from configs import RECIPES, ConfigError, load
from flows import approval, probe, report, runs
from flows.endings import Ending
from flows.failures import CANCELLED, PREEMPTED, StageFailed
from flows.prefect_server import PrefectError
from flows.progress import duration
from flows.run_stage import Plan
from flows.steps import Artifact, Runner, Step
from stages.base import StageError

Body = Callable[[Any, Runner], list[Artifact]]
Conclude = Callable[[Any, list[Artifact], approval.Ask], Ending | None]
CONFIG_EXIT, FAILED_EXIT, INTERRUPTED_EXIT, REQUEUE_EXIT = 2, 1, 130, 75


class Preempted(KeyboardInterrupt):
    """A scheduler wants this machine back: SIGTERM, or SIGUSR1 some time before it."""


def main(
    name: str,
    schema: type[Any],
    body: Body,
    *,
    description: str | None,
    conclude: Conclude | None = None,
    default: str = "tiny",
    argv: Any = None,
) -> int:
    """Parse, run, and return an exit code: 0 only when every stage is done.

    ``conclude`` does what is left once every stage is there, and says how the run ended.
    """
    options = _parser(name, description, default).parse_intermixed_args(argv)
    for number in (signal.SIGTERM, signal.SIGUSR1):
        signal.signal(number, _preempt)
    try:
        recipe, overrides = _recipe(options.recipe, default)
        config = load(schema, recipe, overrides)
        if options.plan or options.probe:
            return show_plan(config, body, probing=options.probe)
        say(f"{config.name}: {name}, recipe {recipe}")
        refuse_early(config, body)
        with runs.lock(config) as take:
            if not take():
                say(f"another run named {config.name} is at work; waiting for it to end")
                runs.wait_for(take)
            return _run(config, body, name=name, engine=options.engine, conclude=conclude)
    except (ConfigError, StageFailed, StageError, PrefectError) as error:
        print(error, file=sys.stderr)
        if isinstance(error, StageFailed) and error.kind in (PREEMPTED, CANCELLED):
            return REQUEUE_EXIT
        return CONFIG_EXIT if isinstance(error, ConfigError) else FAILED_EXIT
    except BrokenPipeError:  # whoever reads what is printed has read enough
        return FAILED_EXIT
    except OSError as error:
        print(f"{error.filename or 'store'}: {error.strerror or error}", file=sys.stderr)
        return FAILED_EXIT
    except KeyboardInterrupt as stop:
        what = str(stop) or "stopped"
        print(f"{what}; the same command goes on from what is complete", file=sys.stderr)
        return REQUEUE_EXIT if isinstance(stop, Preempted) else INTERRUPTED_EXIT


def leave(code: int) -> NoReturn:
    """End the process with everything printed, without the second that Python takes to clear up."""
    with suppress(BrokenPipeError):
        sys.stdout.flush()
    sys.stderr.flush()
    os._exit(code)


def _preempt(*_: object) -> None:
    raise Preempted


def say(text: str) -> None:
    """One line for the person at the terminal, at once."""
    print(f"{time.strftime('%H:%M:%S')}  {text}", flush=True)


def _parser(name: str, description: str | None, default: str) -> argparse.ArgumentParser:
    known = ", ".join(sorted(path.stem for path in RECIPES.glob("*.yaml")))
    parser = argparse.ArgumentParser(
        prog=f"python -m flows.{name.replace('-', '_')}",
        description=description,
        epilog=f"Recipes that come with the project ({RECIPES}): {known}.",
    )
    parser.add_argument(
        "recipe",
        nargs="*",
        metavar="RECIPE.yaml | key=value",
        help=f"a recipe (default: {default}), then overrides such as sft.config.epochs=2",
    )
    parser.add_argument(
        "--plan", action="store_true", help="say what would be done, and do nothing"
    )
    parser.add_argument(
        "--probe",
        action="store_true",
        help="a plan, and what memory two real steps of each training stage take",
    )
    parser.add_argument(
        "--engine",
        choices=("prefect", "inline"),
        default="prefect",
        help="prefect: a flow run with history (default); inline: the same without Prefect",
    )
    return parser


def _recipe(words: list[str], default: str) -> tuple[Path, list[str]]:
    """A first word without ``=`` is the name of a recipe that comes with us, or else a path."""
    if not words or "=" in words[0]:
        return RECIPES / f"{default}.yaml", words
    ours = {path.stem: path for path in RECIPES.glob("*.yaml")}
    return ours.get(words[0], Path(words[0])), words[1:]


def _run(config: Any, body: Body, *, name: str, engine: str, conclude: Conclude | None) -> int:
    started, made = time.time(), list[Artifact]()
    draw = ThreadPoolExecutor(1)

    def execute(stage: str, step: Step[Any], *, label: str, **inputs: Artifact) -> Artifact:
        artifact = runs.carry_out(config, stage, step, label=label, inputs=inputs, say=say)
        made.append(artifact)
        if artifact.status != "reused":
            draw.submit(runs.draw, config, list(made))  # while the next stage runs
        return artifact

    def whole(config: Any, run: Runner) -> Ending | None:
        artifacts = body(config, run)
        draw.shutdown()
        path = runs.finish(config, artifacts)
        print(f"\n{report.terminal_table(runs.describe(config, artifacts))}")
        print(f"\nreport: {path}  ({duration(time.time() - started)} in all)", flush=True)
        return conclude(config, artifacts, approval.at_the_terminal) if conclude else None

    runs.begin(config)
    if engine == "inline":
        ending = whole(config, execute)
    else:
        from flows import prefect_engine

        ending = prefect_engine.run_flow(
            whole, config, execute, name=name, run_name=config.name, say=say
        )
    if ending:
        print(f"{ending.name}: {ending.message}")
    return 0


def refuse_early(config: Any, body: Body) -> None:
    """Raise ``ConfigError`` for every stage that could not run here, before the first one does."""
    plans: list[Plan] = []

    def look(stage: str, step: Step[Any], *, label: str, **inputs: Artifact) -> Artifact:
        plans.append(runs.plan_stage(config, stage, step, label=label, inputs=inputs))
        return plans[-1].promised

    body(config, look)
    if found := runs.obstacles(plans):
        raise ConfigError("\n".join(found))


def show_plan(config: Any, body: Body, *, probing: bool) -> int:
    """Print what a run would do with each stage; nothing is kept of what a probe writes."""

    def preview(stage: str, step: Step[Any], *, label: str, **inputs: Artifact) -> Artifact:
        planned = runs.plan_stage(config, stage, step, label=label, inputs=inputs)
        print("\n".join(runs.plan_lines(planned)), flush=True)
        if probing and planned.is_training:
            found = probe.probe(planned, store=config.store, say=say)
            print("\n".join(probe.lines(planned, found)), flush=True)
        return planned.promised

    body(config, preview)
    return 0
