"""Rewards that can be verified, as plain functions of (prompts, completions, rows)."""

import json
import re
import signal
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from decimal import Decimal
from functools import cache
from typing import Annotated, Any, Literal, NoReturn

from pydantic import Field, NonNegativeFloat, NonNegativeInt

Messages = Sequence[Mapping[str, Any]]
Row = Mapping[str, Any]
RewardFunction = Callable[..., Sequence[float]]
"""``(prompts, completions, rows, **options)`` -> a score for each completion."""

MARKER = "####"
"""Behind it stands the answer of a GSM8K solution (arXiv:2110.14168)."""

_NUMBER = re.compile(
    r"(?<![\w.])[-+]?\$?((?:[0-9]{1,3}(?:,[0-9]{3})+(?![0-9])|[0-9]+)(?:\.[0-9]+)?|\.[0-9]+)"
    r"(?:[eE]([-+]?[0-9]{1,3})(?![0-9]))?"
)
PATIENCE = 10.0
"""Seconds that one answer may take."""

_FENCED = re.compile(r"```(?:json)?\s*\n(.*?)```", re.DOTALL)


def exact_match(
    prompts: Sequence[Messages],
    completions: Sequence[str],
    rows: Sequence[Row],
    *,
    field: str = "answer",
    pattern: str | None = None,
    ignore_case: bool = False,
) -> list[float]:
    """1 where the completion is the row's ``field``, else 0; blanks around both do not count.

    ``pattern`` compares only its last match in each text (its group, if it has one). Raises
    ``ValueError`` for a row without ``field``, or in whose reference ``pattern`` finds nothing, and
    for a pattern of several groups.
    """
    flags = re.IGNORECASE if ignore_case else re.NOFLAG
    found = _compiled(pattern, flags) if pattern is not None else None
    if found and found.groups > 1:
        raise ValueError(
            f"pattern {pattern!r} has {found.groups} groups; mark what is compared by one, others "
            "as (?:...)"
        )
    scores = []
    for completion, row in zip(completions, rows, strict=True):
        wanted = _part(_reference(row, field), found)
        if wanted is None:
            raise ValueError(f"pattern {pattern!r} finds nothing in {_short(row[field])}")
        said = _part(completion, found)
        if ignore_case and said is not None:
            said, wanted = said.casefold(), wanted.casefold()
        scores.append(float(said == wanted))
    return scores


def numeric(
    prompts: Sequence[Messages],
    completions: Sequence[str],
    rows: Sequence[Row],
    *,
    field: str = "answer",
    tolerance: NonNegativeFloat = 0.0,
    require_marker: bool = False,
) -> list[float]:
    """1 where the completion's answer is the number in the row's ``field``, else 0.

    The answer stands behind the last ``####``; without that mark it is the last number, or with
    ``require_marker`` none. ``1,000``, ``$1000`` and ``1e3`` are one number, and so are ``5`` and
    ``5.00``; ``tolerance`` is the largest difference that still counts as equal. Raises
    ``ValueError`` for a row whose reference holds no number.
    """
    scores = []
    for completion, row in zip(completions, rows, strict=True):
        wanted = number_in(_reference(row, field))
        if wanted is None:
            raise ValueError(f"there is no number in {_short(row[field])}")
        said = number_in(completion) if MARKER in completion or not require_marker else None
        scores.append(float(said is not None and abs(said - wanted) <= Decimal(str(tolerance))))
    return scores


def number_in(text: str) -> Decimal | None:
    """The number behind the last ``####``, or else the last number of ``text``."""
    text = text.replace("\N{MINUS SIGN}", "-")
    _, marked, behind = text.rpartition(MARKER)
    matches = list(_NUMBER.finditer(behind if marked else text))
    if not matches:
        return None
    match = matches[0] if marked else matches[-1]
    value = Decimal(f"{match[1].replace(',', '')}E{match[2] or 0}")  # exact, whatever its length
    return -value if match[0].startswith("-") else value


def regex(
    prompts: Sequence[Messages],
    completions: Sequence[str],
    rows: Sequence[Row],
    *,
    pattern: str,
    whole: bool = True,
    ignore_case: bool = False,
) -> list[float]:
    """1 where the completion has the form ``pattern``, else 0.

    The whole completion has to match, without the blanks around it; with ``whole`` false a part is
    enough. A dot matches line breaks too.
    """
    compiled = _compiled(pattern, re.DOTALL | (re.IGNORECASE if ignore_case else re.NOFLAG))
    match = compiled.fullmatch if whole else compiled.search
    scores = []
    for completion in completions:
        with _patience(completion):
            scores.append(float(match(completion.strip()) is not None))
    return scores


def json_schema(
    prompts: Sequence[Messages],
    completions: Sequence[str],
    rows: Sequence[Row],
    *,
    schema: Mapping[str, Any],
    fenced: bool = False,
    for_json: Annotated[float, Field(ge=0, le=1)] = 0.0,
) -> list[float]:
    """1 where the completion is JSON that ``schema`` accepts, ``for_json`` for other JSON, else 0.

    ``schema`` is a JSON Schema (2020-12 unless it says otherwise), checked by the package
    jsonschema; references to other documents are not fetched. ``fenced`` also takes the last
    block between ``` marks. ``NaN`` and ``Infinity`` are not JSON. Raises ``ValueError`` for a
    schema that is none.
    """
    validator = _validator(json.dumps(schema))
    scores = []
    for completion in completions:
        with _patience(completion):
            scores.append(_json_score(completion, validator, fenced, for_json))
    return scores


def length(
    prompts: Sequence[Messages],
    completions: Sequence[str],
    rows: Sequence[Row],
    *,
    most: NonNegativeInt,
    least: NonNegativeInt = 0,
    margin: NonNegativeInt = 0,
    unit: Literal["characters", "words"] = "characters",
) -> list[float]:
    """1 for a completion of ``least`` to ``most`` units, falling to 0 over ``margin`` units beside.

    With margin m, a completion that is n units too short or too long has 1 - n / m, never below 0.
    Raises ``ValueError`` where ``least`` exceeds ``most``.
    """
    if least > most:
        raise ValueError(f"no length is at least {least} and at most {most}")
    sizes = [len(text.split()) if unit == "words" else len(text.strip()) for text in completions]
    excess = [max(size - most, least - size, 0) for size in sizes]
    if not margin:
        return [float(each == 0) for each in excess]
    return [max(0.0, 1 - each / margin) for each in excess]


FUNCTIONS: Mapping[str, RewardFunction] = {
    function.__name__: function for function in (exact_match, numeric, regex, json_schema, length)
}
"""The built-in rewards by name."""

COMPARING = (exact_match, numeric)
"""Those that raise ``ValueError`` for a row that has nothing to compare with."""


def _reference(row: Row, field: str) -> str:
    if field not in row:
        raise ValueError(f"the row has no {field!r}; it has {', '.join(sorted(row))}")
    return str(row[field])


def _part(text: str, pattern: "re.Pattern[str] | None") -> str | None:
    if pattern is None:
        return text.strip()
    with _patience(text):
        found = list(pattern.finditer(text))
    return (found[-1][1] if pattern.groups else found[-1][0]) if found else None


@contextmanager
def _patience(text: str) -> Iterator[None]:
    """Raise ``ValueError`` when ``text`` takes too long: a pattern of nested repetitions, on a text
    that it does not match, may take longer than anybody waits. Only the main thread has an alarm.
    """
    if threading.current_thread() is not threading.main_thread():
        yield
        return

    def give_up(*_: Any) -> NoReturn:
        raise ValueError(
            f"no verdict on {_short(text)} after {PATIENCE:g} s; write the pattern without "
            "repetitions inside repetitions"
        )

    before = signal.signal(signal.SIGALRM, give_up)
    left = signal.setitimer(signal.ITIMER_REAL, PATIENCE)
    try:
        yield
    finally:
        signal.setitimer(signal.ITIMER_REAL, *left)
        signal.signal(signal.SIGALRM, before or signal.SIG_DFL)


@cache
def _compiled(pattern: str, flags: re.RegexFlag) -> "re.Pattern[str]":
    try:
        return re.compile(pattern, flags)
    except re.error as error:
        raise ValueError(f"{pattern!r} is not a regular expression: {error}") from None


@cache
def _validator(schema: str) -> Any:
    from jsonschema import SchemaError
    from jsonschema.validators import Draft202012Validator, validator_for
    from referencing import Registry

    found = json.loads(schema)
    kind: Any = validator_for(found, default=Draft202012Validator)
    try:
        kind.check_schema(found)
    except SchemaError as error:
        raise ValueError(f"not a JSON schema: {error.message}") from None
    return kind(found, registry=Registry())  # an empty one, or it would fetch what is referred to


def _json_score(text: str, validator: Any, fenced: bool, for_json: float) -> float:
    from referencing.exceptions import Unresolvable

    if fenced and (blocks := _FENCED.findall(text)):
        text = blocks[-1]
    try:
        value = json.loads(text, parse_constant=_refuse)
    except (ValueError, RecursionError):
        return 0.0
    try:
        return 1.0 if validator.is_valid(value) else for_json
    except (OverflowError, RecursionError):  # a number or a nesting that cannot be judged
        return 0.0
    except Unresolvable as error:
        raise ValueError(f"the schema refers to {error.ref!r}, which is not in it") from None


def _refuse(constant: str) -> float:
    raise ValueError(f"{constant} is not JSON")


def _short(text: Any) -> str:
    cut = str(text)
    return repr(cut if len(cut) <= 80 else f"{cut[:80]} ...")
