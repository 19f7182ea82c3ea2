"""The form of a flow: what Prefect shows, fills in and enforces.

A whole config is a form of five hundred fields, most of which say how a stage is run and are hardly
ever changed. Of stages that run on ranks those stand folded away behind a tab, empty, which means
their default; of the others they are left out, and ``overrides`` sets them where it has to be.
"""

import copy
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any, get_args

from configs import Config, ConfigError, load, read
from flows.catalogue import Deployable
from flows.steps import Step
from stages.evaluate import Evaluate
from stages.training import Training

FIRST = (
    *("name", "model", "baseline", "trained", "base"),
    *("conversations", "preferences", "reward_base"),
    *("sft", "reward", "dpo", "ppo", "gate", "evaluate"),
)
LAST = ("store", "runs")
FOLDED = ("resources", "placement")
"""Sections that may be empty. Not ``backend``: the UI loses a value that is one of several kinds
inside of one that may be empty."""

OF_TRAINING = ("save_every", "keep_checkpoints", "best_by", "best_is_larger")
"""Fields of a step that mean nothing where nothing is trained."""

OF_RANKS = ("backend", *FOLDED, "retries", *OF_TRAINING)
"""Fields of a step that are hardly ever set where there is one process."""


def parameter_schema(flow: Deployable) -> dict[str, Any]:
    """What the form asks and the server enforces: unknown names are refused on every level."""
    from prefect.utilities.callables import parameter_schema as schema_of

    from flows import prefect_flows

    loaded = getattr(prefect_flows, flow.name.replace("-", "_"))
    found = copy.deepcopy(schema_of(loaded.fn).model_dump_for_openapi())
    definitions = found["definitions"]
    for step in _steps(flow.schema).values():
        _fold(next(each for each in definitions.values() if each["title"] == step.__name__), step)
    if not trained(flow.schema):
        del found["properties"]["backend"]  # it is that of training stages
    config = definitions[flow.schema.__name__]
    config["properties"] = {key: _titled(config["properties"][key], key)
                            for key in _ordered(config["properties"])}  # fmt: skip
    return found | {"additionalProperties": False}


def _steps(schema: type[Config]) -> dict[str, type[Step[Any]]]:
    """The fields of a config that are stages."""
    return {
        key: each
        for key, field in schema.model_fields.items()
        for each in _parts(field.annotation)
        if isinstance(each, type) and issubclass(each, Step)
    }


def _parts(annotation: Any) -> Iterator[Any]:
    """A type, and what it is put together from: ``X`` of ``Annotated[X, ...] | None``."""
    yield annotation
    for part in get_args(annotation):
        yield from _parts(part)


def trained(schema: type[Config]) -> list[str]:
    """The fields of a config that are training stages."""
    return [key for key, step in _steps(schema).items() if issubclass(_computes(step), Training)]


def _computes(step: type[Step[Any]]) -> type[Any]:
    config = step.model_fields["config"].annotation
    assert isinstance(config, type)
    return config


def _left_out(computes: type[Any]) -> tuple[str, ...]:
    """Fields of a step that its form does not have."""
    if issubclass(computes, Training):
        return ()
    return OF_TRAINING if issubclass(computes, Evaluate) else OF_RANKS


def _fold(form: dict[str, Any], step: type[Step[Any]]) -> None:
    """Let the sections be empty, and drop what means nothing; what it computes stays as it is."""
    properties = form["properties"]
    for key in _left_out(_computes(step)):
        properties.pop(key, None)  # one kind of step may be that of several fields
    for key in FOLDED:
        if key not in properties or "anyOf" in properties[key]:
            continue
        section = properties[key]
        about = section.pop("description", "")
        section.pop("default", None)
        section.pop("title", None)
        properties[key] = {
            "anyOf": [{"type": "null"}, section],
            "title": _words(key),
            "description": f"{about} None: the default.",
            "default": None,
        }


def _ordered(properties: Mapping[str, Any]) -> list[str]:
    known = [key for key in FIRST if key in properties]
    last = [key for key in LAST if key in properties]
    return [*known, *(key for key in properties if key not in (*FIRST, *LAST)), *last]


def _titled(section: dict[str, Any], key: str) -> dict[str, Any]:
    """A section is called by its field, not by its class."""
    return section | {"title": _words(key)}


def _words(key: str) -> str:
    return key.replace("_", " ").capitalize() if key not in ("sft", "dpo", "ppo") else key.upper()


def preset(flow: Deployable, recipe: Path) -> dict[str, Any]:
    """What the form is filled in with: the recipe and every default, or, of a recipe in which
    something is for the user to give, what it has."""
    try:
        config = load(flow.schema, recipe)
    except ConfigError:
        return read(recipe)
    filled = config.model_dump(mode="json")
    for key in type(config).model_fields:
        step = getattr(config, key)
        if isinstance(step, Step):
            filled[key] = _folded(step, filled[key])
    return filled


def _folded(step: Step[Any], filled: dict[str, Any]) -> dict[str, Any]:
    defaults = type(step).model_construct()
    hidden = [key for key in FOLDED if getattr(step, key) == getattr(defaults, key)]
    dropped = _left_out(type(step.config))
    kept = {key: value for key, value in filled.items() if key not in dropped}
    return kept | dict.fromkeys(key for key in hidden if key not in dropped)


def complete(sent: Mapping[str, Any]) -> dict[str, Any]:
    """What a form sent, without the sections that were left empty."""
    return {
        key: {name: item for name, item in value.items() if name not in FOLDED or item is not None}
        if isinstance(value, Mapping)
        else value
        for key, value in sent.items()
    }
