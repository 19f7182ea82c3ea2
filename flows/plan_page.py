"""The plan of a run as a page: what each stage will do, why, with what, for how long."""

import shlex
import shutil
from collections.abc import Sequence
from typing import Any

from flows.costs import Cost, cost
from flows.markdown import table
from flows.progress import duration
from flows.reasons import reason
from flows.run_stage import Plan
from stages import resume

HEAD = ("stage", "does", "why", "backend, batch", "ranks", "memory a rank", "steps", "time", "disk")


def verb(planned: Plan) -> str:
    """``reuse``, ``resume from step 40`` or ``run``."""
    if planned.finished:
        return "reuse"
    newest = planned.checkpoint
    return f"resume from step {resume.step(newest)}" if newest else "run"


def page(config: Any, plans: Sequence[Plan]) -> str:
    """Markdown with a table, and every exact command below it."""
    made_by = {p.identity.fingerprint: p.label for p in plans if not p.finished}
    costs = [cost(each) for each in plans]
    rows = [
        _row(each, price, reason(each, _key(config, each), made_by).replace("|", "\\|"))
        for each, price in zip(plans, costs, strict=True)
    ]
    parts = [f"# Plan of {config.name}", table(HEAD, rows), _sum(config, plans, costs)]
    parts += [f"**cannot run here:** {each.label}: {each.obstacle}" for each in _blocked(plans)]
    return "\n\n".join([*parts, _commands(plans)]) + "\n"


def line(plans: Sequence[Plan]) -> str:
    """``3 to reuse, 1 to resume, 8 to run``."""
    verbs = [verb(each).split()[0] for each in plans]
    counts = {name: verbs.count(name) for name in ("reuse", "resume", "run")}
    return ", ".join(f"{number} to {name}" for name, number in counts.items() if number)


def _key(config: Any, planned: Plan) -> str:
    """The stage's name in the flow's config; a step made on the way goes by its stage's name."""
    named = (name for name in type(config).model_fields if getattr(config, name) is planned.step)
    return next(named, planned.stage.name)


def _row(planned: Plan, price: Cost | None, why: str) -> list[str]:
    if planned.finished:
        return [planned.label, "reuse", "", "", "", "", "", "", ""]
    does = f"**{verb(planned)}**"
    if price is None:
        return [planned.label, does, why, "auto: chosen when the stage starts", "", "", "", "", ""]
    ranks = f"{price.ranks} {'GPU' if price.on_gpus else 'CPU'}{'s' * (price.ranks > 1)}"
    return [
        planned.label,
        does,
        why,
        planned.remaining[0].text,
        ranks,
        size(price.memory_bytes),
        "" if price.steps is None else f"{price.steps:,}",
        "" if price.seconds is None else f"about {duration(price.seconds)}",
        size(price.disk_bytes),
    ]


def size(number: float | None) -> str:
    """``1.5 GB``; nothing for what is not known."""
    if number is None:
        return ""
    return f"{number / 1e9:.1f} GB" if number >= 1e9 else f"{number / 1e6:.0f} MB"


def _sum(config: Any, plans: Sequence[Plan], costs: Sequence[Cost | None]) -> str:
    known = [each for each in costs if each is not None]
    seconds = sum(each.seconds or 0 for each in known)
    hours = [each.gpu_hours for each in known if each.gpu_hours is not None]
    disk = sum(each.disk_bytes or 0 for each in known)
    store = config.store.absolute()
    place = next(path for path in (store, *store.parents) if path.is_dir())
    free = shutil.disk_usage(place).free
    told = [line(plans)]
    if seconds:
        told.append(f"training takes about {duration(seconds)} by the planner's estimate")
    if hours:
        told.append(f"{sum(hours):.1f} GPU-hours")
    if disk:
        told.append(f"checkpoints and models take up to {size(disk)}")
    return f"{'; '.join(told)}. `{place}` has {size(free)} free."


def _blocked(plans: Sequence[Plan]) -> list[Plan]:
    return [each for each in plans if each.obstacle]


def _commands(plans: Sequence[Plan]) -> str:
    """Collapsed, since the table is what is read first."""
    parts = []
    for each in plans:
        if each.finished or not each.remaining:
            continue
        launch = each.remaining[0].launch
        settings = "".join(f"{name}={value} " for name, value in launch.env.items())
        parts.append(f"# {each.label} -> {each.out}\n{settings}{shlex.join(launch.argv)}")
    text = "\n\n".join(parts)
    if not parts:
        return ""
    return f"<details><summary>Exact commands</summary>\n\n```\n{text}\n```\n\n</details>"
