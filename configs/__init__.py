"""Run descriptions: the strict base model, and how a YAML recipe becomes one."""

import ast
import difflib
import inspect
import itertools
import re
import textwrap
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any, TypeVar

import yaml
from pydantic import (
    BaseModel,
    ConfigDict,
    GetJsonSchemaHandler,
    ValidationError,
    model_validator,
)
from pydantic_core import CoreSchema

C = TypeVar("C", bound="Config")

RECIPES = Path(__file__).parent / "recipes"

MOST_SHOWN = 80
"""Characters of a value in a message; a fault between two fields is one of the whole recipe."""


class Config(BaseModel):
    """An immutable, strict value: unknown keys are errors and instances are hashable."""

    model_config = ConfigDict(frozen=True, extra="forbid", allow_inf_nan=False)

    @model_validator(mode="before")
    @classmethod
    def _no_yes_for_a_number(cls, data: Any) -> Any:
        """Pydantic would take ``true`` for 1, and YAML takes ``yes`` for ``true``."""
        for name, value in data.items() if isinstance(data, Mapping) else ():
            field = cls.model_fields.get(name)
            if isinstance(value, bool) and field and "bool" not in str(field.annotation):
                raise ValueError(f"{name} is a {field.annotation}, not {value}")
        return data

    @classmethod
    def __get_pydantic_json_schema__(
        cls, core_schema: CoreSchema, handler: GetJsonSchemaHandler
    ) -> dict[str, Any]:
        """The docstring below a field is its help. Pydantic would read them all whenever a class is
        made, a third of the time that importing the project takes."""
        schema = handler(core_schema)
        properties = handler.resolve_ref_schema(schema).get("properties", {})
        for name, text in _docstrings(cls).items():
            if name in properties:
                properties[name].setdefault("description", text)
        return schema


def _docstrings(cls: type[Config]) -> dict[str, str]:
    """The text below each field of ``cls`` and of the classes that it extends."""
    found: dict[str, str] = {}
    for each in reversed(cls.__mro__[: cls.__mro__.index(Config)]):
        try:
            [body] = ast.parse(textwrap.dedent(inspect.getsource(each))).body
        except (OSError, TypeError):  # a class that stands in no file
            continue
        for field, text in itertools.pairwise(getattr(body, "body", [])):
            match field, text:
                case (
                    ast.AnnAssign(target=ast.Name(id=name)),
                    ast.Expr(value=ast.Constant(value=str(words))),
                ):
                    found[name] = inspect.cleandoc(words)
                case _:
                    pass
    return found


class ConfigError(ValueError):
    """A recipe or an override that cannot be used: one line per fault, each with its place."""


def load(schema: type[C], path: Path, overrides: Iterable[str] = ()) -> C:
    """Read ``path`` as ``schema``; each override is ``dotted.key=yaml-value``.

    Setting a ``kind`` to another value replaces its whole section, because the options of the
    old alternative mean nothing to the new one. Raises :class:`ConfigError`.
    """
    return resolve(schema, read(path), overrides, place=path)


def resolve(
    schema: type[C], values: Mapping[str, Any], overrides: Iterable[str] = (), *, place: Path
) -> C:
    """``values`` with ``overrides`` as ``schema``, as `load` does it; errors name ``place``."""
    data = _unshared(values)
    ordered = sorted(overrides, key=lambda text: not _KIND.match(text))
    for override in ordered:
        _apply(data, override)
    try:
        return schema.model_validate(data)
    except ValidationError as error:
        lines = [_line(fault, data, place, ordered) for fault in error.errors(include_url=False)]
        raise ConfigError("\n".join(lines)) from None


_KIND = re.compile(r"^[^=]*\bkind=")
"""Overrides of a kind come first: what is set beside it is meant for the new kind."""


def _unshared(data: Any) -> Any:
    """A copy in which what YAML anchors share is no longer one object."""
    if isinstance(data, dict):
        return {key: _unshared(value) for key, value in data.items()}
    return [_unshared(value) for value in data] if isinstance(data, list) else data


class _UniqueKeys(yaml.SafeLoader):
    """YAML keeps the last of two equal keys without a word; here that is an error."""

    def construct_mapping(self, node: yaml.MappingNode, deep: bool = False) -> dict[Any, Any]:
        keys = [self.construct_object(key, deep=True) for key, _ in node.value]
        for key in keys:
            if keys.count(key) > 1:
                raise yaml.constructor.ConstructorError(
                    None, None, f"the key {key!r} stands twice", node.start_mark
                )
        return super().construct_mapping(node, deep=deep)


def read(path: Path) -> dict[str, Any]:
    """The mapping in a recipe, not yet checked. Raises :class:`ConfigError`."""
    try:
        text = path.read_text(encoding="utf-8-sig")
    except FileNotFoundError:
        near = difflib.get_close_matches(path.stem, [p.stem for p in RECIPES.glob("*.yaml")], 3)
        hint = f"; did you mean {', '.join(str(RECIPES / f'{n}.yaml') for n in near)}?"
        raise ConfigError(f"{path}: no such recipe{hint if near else ''}") from None
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(f"{path}: cannot be read as a recipe ({error})") from None
    try:
        data = yaml.load(text, Loader=_UniqueKeys)  # a SafeLoader
    except yaml.YAMLError as error:
        mark = getattr(error, "problem_mark", None)
        place = f"{path}:{mark.line + 1}:{mark.column + 1}" if mark else str(path)
        raise ConfigError(f"{place}: not YAML ({getattr(error, 'problem', error)})") from None
    if data is None:
        return {}
    if not isinstance(data, dict):
        raise ConfigError(f"{path}: a recipe is a mapping of keys, not a {type(data).__name__}")
    return data


def _apply(data: dict[str, Any], override: str) -> None:
    key, equals, text = override.partition("=")
    if not equals or not all(key.split(".")):
        raise ConfigError(f"{override!r}: an override is written dotted.key=value")
    try:
        value = yaml.load(text, Loader=_UniqueKeys)
    except yaml.YAMLError as error:
        problem = getattr(error, "problem", None) or "it cannot be read"
        raise ConfigError(f"{override!r}: the value is not YAML ({problem})") from None
    if "#" in text and "#" not in str(value):
        raise ConfigError(f"{override!r}: in YAML a comment begins at #; quote the whole value")
    *parents, leaf = key.split(".")
    node = data
    for depth, parent in enumerate(parents, 1):
        child = node.get(parent)
        if child is None:
            child = node[parent] = {}
        if not isinstance(child, dict):
            place = ".".join(parents[:depth])
            hint = f"; give the whole list, {place}=[...]" if isinstance(child, list) else ""
            raise ConfigError(f"{override!r}: {place} has no keys under it{hint}")
        node = child
    if leaf == "kind" and node.get("kind", value) != value:
        node.clear()
    node[leaf] = value


def _line(fault: Mapping[str, Any], data: Any, path: Path, overrides: Iterable[str]) -> str:
    place, got = _place(fault["loc"], data) or "recipe", fault["input"]
    if fault["type"] == "union_tag_invalid":
        place, got = f"{place}.kind", got["kind"]
    given = [each for each in overrides if f"{place}.".startswith(f"{each.partition('=')[0]}.")]
    start = f"{repr(given[-1]) if given else path}: {place}"
    if fault["type"] == "extra_forbidden":
        return f"{start}: unknown key, nothing reads it"
    if fault["type"] == "missing":
        return f"{start}: missing, and it has no default"
    text = repr(got)
    got = text if len(text) <= MOST_SHOWN else f"{text[:MOST_SHOWN]}..."
    return f"{start}: {fault['msg'].removeprefix('Value error, ')} (got {got})"


def _place(loc: tuple[Any, ...], data: Any) -> str:
    """The dotted key as it is written: pydantic also names the alternative that it chose."""
    parts = []
    for depth, part in enumerate(loc, 1):
        if isinstance(data, dict) and part not in data and depth < len(loc):
            continue
        parts.append(str(part))
        data = data[part] if isinstance(data, (dict, list)) and _has(data, part) else None
    return ".".join(parts)


def _has(data: Any, part: Any) -> bool:
    return part in data if isinstance(data, dict) else isinstance(part, int) and part < len(data)
