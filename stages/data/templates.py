"""A model's chat template with its tokenizer: conversations to text, text to ids."""

import datetime
import json
import re
from collections.abc import Container, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cache
from pathlib import Path
from typing import TYPE_CHECKING, Any

from stages.base import StageError
from stages.data.rules import RowError
from stages.data.turns import Turn
from stages.manifest import write_atomically

if TYPE_CHECKING:
    import numpy as np

JSON_FILES = (
    "config.json", "generation_config.json", "tokenizer_config.json", "special_tokens_map.json",
    "added_tokens.json", "tokenizer.json",
)  # fmt: skip
"""What a tokenizer is loaded from; damage in them is found before a library stumbles over it."""

TOLD = "template.json"
"""Beside tokenised rows: what their template was told besides the rows."""

PROBES = ("user\nHi", "assistant\n", " one two", "\n\nA b", "a", "[INST] x [/INST]")
_MARKS_ANSWERS = re.compile(r"\{%-?\s*generation\s*-?%\}")


@dataclass(frozen=True)
class Template:
    """What turns conversations into token ids, the same way in training and in serving."""

    folder: Path
    tokenizer: Any
    stop_ids: frozenset[int]
    """Ids that end generation: the tokenizer's EOS and those of ``generation_config.json``."""

    leading_bos: int | None
    """The BOS that the tokenizer sets before every text, or ``None`` where it sets none."""

    special: re.Pattern[str] | None
    """Finds the text of a special token."""

    is_special: "np.ndarray"
    """For each id whether it is a special token."""

    is_stop: "np.ndarray"
    """For each id whether it ends generation."""

    plain_stops: frozenset[int]
    """Stop ids that ordinary text becomes, such as a line break's."""

    stops: tuple[str, ...]
    """Texts of the stop tokens that are special."""

    hints: tuple[str, ...]
    """First characters of the special tokens' texts: a text without them holds no such token."""

    splits: bool
    """Whether what follows a special token is tokenised as if it stood alone."""

    date: datetime.date | None = None
    """What day it is, for templates that ask."""

    compiled: dict[bool, "Compiled"] = field(default_factory=dict)
    """The template for rows without and with tools, once it was needed."""

    @property
    def variables(self) -> Mapping[str, Any]:
        """What a template sees beside the conversation. Ours hide transformers' own clock."""
        return {**self.tokenizer.special_tokens_map, "strftime_now": self._day, "documents": None}

    def _day(self, form: str) -> str:
        if self.date is None:
            raise StageError(
                f"{self.folder}: the chat template writes today's date, and the same rows would "
                "change from day to day; set tokenize_data.config.template_date (2024-07-26), or "
                "for a reward model from elsewhere template_date in its reward_scale.json"
            )
        return self.date.strftime(form)


@dataclass(frozen=True)
class Compiled:
    """A template as transformers compiles it."""

    jinja: Any
    context: Any
    """The variables that a rendering starts from."""

    marks: bool
    """Whether it marks what the assistant says."""

    clock: bool
    """Whether it may ask for the date."""

    def render(self, turns: Sequence[Turn], tools: Sequence[Any] | None, to_answer: bool) -> str:
        """What ``jinja.render`` gives, without building its variables anew each time."""
        seen = self.context.parent
        seen["messages"], seen["tools"], seen["add_generation_prompt"] = turns, tools, to_answer
        self.context.vars.clear()
        self.context.exported_vars.clear()
        return "".join(self.jinja.root_render_func(self.context))


def load(folder: Path, *, date: datetime.date | None = None) -> Template:
    """The template of the checkpoint in ``folder``. Raises :class:`StageError`, never downloads."""
    from transformers import AutoTokenizer

    if not folder.is_dir():
        raise StageError(f"{folder}: no such folder; give the one that holds the tokenizer's files")
    for name in JSON_FILES:
        _read_json(folder / name)
    try:
        tokenizer = AutoTokenizer.from_pretrained(folder, local_files_only=True)
    except (OSError, ValueError) as error:
        raise StageError(
            f"{folder}: no tokenizer can be loaded ({str(error).splitlines()[0]}); "
            "fetch a model that carries its tokenizer files"
        ) from None
    stop_ids = _stop_ids(folder, tokenizer)
    if not stop_ids:
        raise StageError(
            f"{folder}: neither the tokenizer nor generation_config.json names an EOS token, "
            "so no answer could end; set eos_token in tokenizer_config.json"
        )
    if tokenizer.is_fast:  # a tokenizer.json may carry settings that cut or fill every text
        tokenizer.backend_tokenizer.no_truncation()
        tokenizer.backend_tokenizer.no_padding()
    texts = _special_texts(tokenizer, stop_ids)
    stops = sorted({str(tokenizer.convert_ids_to_tokens(one)) for one in stop_ids} & set(texts))
    return Template(
        folder,
        tokenizer,
        stop_ids,
        leading_bos=_leading_bos(tokenizer),
        special=re.compile("|".join(map(re.escape, texts))) if texts else None,
        is_special=_table(tokenizer, tokenizer.convert_tokens_to_ids(texts)),
        is_stop=_table(tokenizer, stop_ids),
        plain_stops=stop_ids - set(tokenizer.convert_tokens_to_ids(texts)),
        stops=tuple(stops),
        hints=tuple(sorted({one[:1] for one in texts})),
        splits=_splits(tokenizer, texts),
        date=date,
    )


def write_date(out: Path, date: datetime.date | None) -> None:
    """Note beside tokenised rows what day their template was told it is."""
    write_atomically(out / TOLD, json.dumps({"date": date and date.isoformat()}) + "\n")


def read_date(out: Path) -> datetime.date | None:
    """What day it was for the template of the rows in ``out``; ``None`` if it was told none."""
    date = (_read_json(out / TOLD) or {}).get("date")
    return date and datetime.date.fromisoformat(date)


def _stop_ids(folder: Path, tokenizer: Any) -> frozenset[int]:
    path = folder / "generation_config.json"
    listed = (_read_json(path) or {}).get("eos_token_id")
    ids = listed if isinstance(listed, list) else [listed]
    for one in ids:
        known = isinstance(one, int) and not isinstance(one, bool) and 0 <= one < len(tokenizer)
        if one is not None and not known:
            raise StageError(
                f"{path}: eos_token_id {one!r} is none of the tokenizer's {len(tokenizer)} ids; "
                "set it to the token that ends an answer"
            )
    return frozenset(one for one in (*ids, tokenizer.eos_token_id) if one is not None)


def _read_json(path: Path) -> dict[str, Any] | None:
    """The object in a file, ``None`` where there is none. Raises :class:`StageError`."""
    if not path.exists():
        return None
    try:
        found = json.loads(path.read_bytes())
    except (ValueError, RecursionError) as error:
        raise StageError(f"{path}: not JSON ({error}); fetch the model again") from None
    if not isinstance(found, dict):
        raise StageError(f"{path}: {type(found).__name__}, not an object; fetch the model again")
    return found


def _leading_bos(tokenizer: Any) -> int | None:
    bos = tokenizer.bos_token_id
    return bos if bos is not None and tokenizer("a")["input_ids"][:1] == [bos] else None


def _special_texts(tokenizer: Any, stop_ids: Container[int]) -> list[str]:
    """Texts of the special tokens, the longest first, as the tokenizer finds them.

    An added token that ends generation is one, whatever the tokenizer calls it.
    """
    added = {
        str(one)
        for number, one in tokenizer.added_tokens_decoder.items()
        if one.special or number in stop_ids
    }
    return sorted(added | set(tokenizer.all_special_tokens), key=lambda one: (-len(one), one))


def _table(tokenizer: Any, ids: Iterable[int]) -> "np.ndarray":
    import numpy as np

    chosen = list(ids)
    table = np.zeros(max(len(tokenizer), *chosen) + 1, dtype=bool)
    table[chosen] = True
    return table


def _splits(tokenizer: Any, texts: Sequence[str]) -> bool:
    """Told by trying: some tokenizers mark the beginning of a text, others strip around tokens.

    Tokens that are found alike are treated alike, so one of each kind is tried.
    """

    def ids(content: str) -> list[int]:
        return tokenizer(content, add_special_tokens=False)["input_ids"]

    kinds = {
        (one.lstrip, one.rstrip, one.single_word, one.normalized): (str(one), number)
        for number, one in tokenizer.added_tokens_decoder.items()
        if str(one) in texts
    }
    return tokenizer.is_fast and all(
        ids(f"a{one}{probe}") == [*ids("a"), number, *ids(probe)]
        for one, number in kinds.values()
        for probe in PROBES
    )


def refuse_special_tokens(template: Template, turns: Sequence[Turn]) -> None:
    """Raise :class:`RowError` where a turn's text would be read as a special token."""
    for index, turn in enumerate(turns):
        said = turn["content"]
        if len(turn) > 2:
            said += json.dumps([turn[key] for key in turn if key not in ("role", "content")])
        for hint in template.hints:
            if hint in said and (found := special_token(template, said)):
                where = f"turn {index} ({turn['role']}) holds {found!r}"
                raise RowError("special_token_in_text", where)


def special_token(template: Template, content: str) -> str | None:
    """The first special token that ``content`` would become."""
    found = template.special and template.special.search(content)
    return found[0] if found else None


def render(
    template: Template,
    turns: Sequence[Turn],
    *,
    tools: Sequence[Any] | None = None,
    to_answer: bool = False,
) -> str:
    """The text of ``turns``; ``to_answer`` adds what stands before an answer at inference.

    Raises :class:`RowError` where the template refuses.
    """
    compiled = compile_for(template, tools)
    try:
        return compiled.render(turns, tools or None, to_answer)
    except StageError:
        raise
    except _faults() as error:
        raise _explained(error) from None


def render_marked(
    template: Template, turns: Sequence[Turn], *, tools: Sequence[Any] | None
) -> tuple[str, list[tuple[int, int]]]:
    """The text of ``turns`` with the ranges that the template marks as the assistant's."""
    from transformers.utils.chat_template_utils import _render_with_assistant_indices

    try:
        return _render_with_assistant_indices(
            compiled_template=compile_for(template, tools).jinja,
            messages=list(turns),
            tools=tools or None,
            add_generation_prompt=False,
            **template.variables,
        )
    except StageError:
        raise
    except _faults() as error:
        raise _explained(error) from None


def with_every_name(turns: Sequence[Turn]) -> Sequence[Turn]:
    """Turns whose thoughts stand under each name that a template may ask for."""
    if not any("reasoning_content" in turn for turn in turns):
        return turns
    from transformers.utils.chat_template_utils import _alias_reasoning_fields

    return _alias_reasoning_fields([dict(turn) for turn in turns])


def compile_for(template: Template, tools: Sequence[Any] | None) -> Compiled:
    """The template for rows with or without tools: some models have one for each."""
    known = bool(tools)
    if known not in template.compiled:
        from jinja2 import TemplateError
        from transformers.utils.chat_template_utils import _compile_jinja_template

        try:
            text = template.tokenizer.get_chat_template(None, list(tools) if tools else None)
        except ValueError:
            raise StageError(
                f"{template.folder}: the tokenizer has no chat template, so conversations cannot "
                "be rendered; put its chat_template.jinja beside the tokenizer, or fetch the "
                "model's chat variant"
            ) from None
        try:
            jinja = _compile_jinja_template(text)
        except (TemplateError, RecursionError) as error:
            line = getattr(error, "lineno", None)
            raise StageError(
                f"{template.folder}: the chat template cannot be compiled"
                f"{f', line {line}' if line else ''} ({error}); mend chat_template.jinja"
            ) from None
        template.compiled[known] = Compiled(
            jinja,
            jinja.new_context(dict(template.variables)),
            marks=bool(_MARKS_ANSWERS.search(text)),
            clock="strftime_now" in text,
        )
    return template.compiled[known]


@cache
def _faults() -> tuple[type[Exception], ...]:
    """What a template raises that refuses a row, or that expects rows of another form."""
    from jinja2 import TemplateError

    return (
        *(TemplateError, TypeError, AttributeError, LookupError, ArithmeticError, ValueError),
        RecursionError,
    )


def _explained(error: Exception) -> RowError:
    return RowError("cannot_be_rendered", f"the chat template says: {error}")


def encode(template: Template, texts: Sequence[str]) -> list[list[int]]:
    """The ids of rendered texts, each with one BOS if the model's texts begin with one.

    A template that writes BOS is taken at its word; else the tokenizer's own is set once.
    """
    bos = template.leading_bos
    encoded = encode_pieces(template, texts)
    if bos is None:
        return encoded
    return [ids if ids[:1] == [bos] else [bos, *ids] for ids in encoded]


def encode_pieces(template: Template, texts: Sequence[str]) -> list[list[int]]:
    """The ids of texts, to which nothing is added."""
    if not template.tokenizer.is_fast:
        return template.tokenizer(list(texts), add_special_tokens=False)["input_ids"]
    backend = template.tokenizer.backend_tokenizer
    # Offsets, which nothing here needs, are most of what `encode_batch` adds to this.
    return [one.ids for one in backend.encode_batch_fast(texts, add_special_tokens=False)]


def by_transformers(
    template: Template, turns: Sequence[Turn], *, tools: Sequence[Any] | None
) -> list[int]:
    """The ids as the exported folder gives them to whoever serves it, from its own front door."""
    tokenizer = template.tokenizer
    if compile_for(template, tools).clock:  # its clock is the wall's
        text = render(template, turns, tools=tools)
        return tokenizer(text, add_special_tokens=False)["input_ids"]
    try:
        found = tokenizer.apply_chat_template(list(turns), tools=list(tools) if tools else None)
    except _faults() as error:
        raise _explained(error) from None
    return found["input_ids"]
