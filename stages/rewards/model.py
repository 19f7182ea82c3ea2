"""A reward model: its score of conversations, the same in training, PPO and evaluation."""

import datetime
import json
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from stages.base import StageError
from stages.checkpoint.heads import SCALE, is_reward_model
from stages.data import templates
from stages.data.rules import RowError
from stages.data.templates import Template
from stages.manifest import write_atomically
from stages.rewards.verifiable import Messages, Row


@dataclass(frozen=True)
class Scale:
    """Mean and standard deviation of raw scores; a score leaves as (raw - mean) / std."""

    mean: float = 0.0
    std: float = 1.0
    num: int = 0
    """Samples that it was measured on; 0 is a model that was never measured."""

    template_date: datetime.date | None = None
    """What day it was for the chat template of what the model learnt from, and so for every
    conversation that it scores; ``None`` where the template asks for none."""

    def applied(self, raw: Sequence[float]) -> list[float]:
        return [(each - self.mean) / self.std for each in raw]


def measured(raw: Sequence[float]) -> Scale:
    """The scale of ``raw`` scores. Raises ``StageError`` when they hardly differ."""
    mean = math.fsum(raw) / len(raw)
    std = math.sqrt(math.fsum((each - mean) ** 2 for each in raw) / len(raw))
    if not std > 1e-6:
        raise StageError(
            f"the reward model gives {mean:.6g} to all of {len(raw)} samples, so there is nothing "
            "to scale by; train it longer or at a higher learning rate"
        )
    return Scale(mean, std, len(raw))


def write_scale(folder: Path, scale: Scale) -> None:
    date = scale.template_date
    facts = {"mean": scale.mean, "std": scale.std, "num": scale.num}
    facts |= {"template_date": date and date.isoformat()}
    write_atomically(folder / SCALE, json.dumps(facts, indent=2) + "\n")


def read_scale(folder: Path) -> Scale:
    """The scale beside a model; one without is taken at its raw scores."""
    path = folder / SCALE
    if not path.is_file():
        return Scale()
    try:
        found = json.loads(path.read_text())
        if date := found.get("template_date"):
            found["template_date"] = datetime.date.fromisoformat(date)
        scale = Scale(**found)
    except (ValueError, TypeError, AttributeError) as error:
        raise StageError(f"{path}: not a reward scale ({error})") from None
    if not (scale.std > 0 and math.isfinite(scale.mean) and math.isfinite(scale.std)):
        raise StageError(f"{path}: mean {scale.mean} and std {scale.std} scale nothing")
    return scale


def score(model: Any, rows: Sequence[Sequence[int]], *, pad_id: int) -> list[float]:
    """The raw score of each row of token ids, read at its last token.

    Rows are padded on the right with ``pad_id``, which no row may end with: the model reads the
    rightmost token that is not it. ``model`` may be wrapped for any backend. No gradients.
    """
    import torch

    assert all(row and row[-1] != pad_id for row in rows), "a row would be read before its end"
    device = next(model.parameters()).device
    shape = (len(rows), max(map(len, rows)))
    ids = torch.full(shape, pad_id, dtype=torch.long)
    mask = torch.zeros(shape, dtype=torch.long)
    for number, row in enumerate(rows):
        ids[number, : len(row)] = torch.tensor(list(row))
        mask[number, : len(row)] = 1
    with torch.no_grad():
        given = model(input_ids=ids.to(device), attention_mask=mask.to(device), use_cache=False)
    return given.logits[:, 0].float().tolist()


def conversation_ids(template: Template, turns: Messages, tools: Sequence[Any] = ()) -> list[int]:
    """The ids of a conversation that ends with an answer, cut behind the answer's stop token.

    They are what tokenize_data writes for the same turns and tools. Raises :class:`RowError` where
    the template refuses them.
    """
    told = templates.with_every_name([dict(turn) for turn in turns])
    whole, before = templates.encode(
        template,
        [
            templates.render(template, told, tools=tools),
            templates.render(template, told[:-1], tools=tools, to_answer=True),
        ],
    )
    pairs = enumerate(zip(whole, before, strict=False))
    shared = next((n for n, (one, other) in pairs if one != other), min(len(whole), len(before)))
    ends = (n for n in range(shared, len(whole)) if template.is_stop[whole[n]])
    return whole[: next(ends, len(whole) - 1) + 1]


@dataclass(frozen=True)
class RewardModel:
    """A reward model on one device, with its own tokenizer and scale."""

    folder: Path
    model: Any
    template: Template
    scale: Scale
    batch_size: int

    @staticmethod
    def load(folder: Path, *, device: str, batch_size: int = 16) -> "RewardModel":
        """The model in ``folder``, whole and in eval mode. Raises ``StageError`` for a folder that
        is not a reward model with its tokenizer."""
        check(folder)
        import torch
        from transformers import AutoModelForSequenceClassification

        scale = read_scale(folder)
        template = templates.load(folder, date=scale.template_date)
        loaded: Any = AutoModelForSequenceClassification.from_pretrained(
            folder,
            dtype=torch.float32 if device == "cpu" else "auto",  # on a GPU as it was exported
            output_loading_info=True,
        )
        model, report = loaded
        # transformers fills what a checkpoint lacks with random numbers and goes on.
        if missing := sorted(report["missing_keys"]):
            raise StageError(f"{folder}: weights are missing ({', '.join(missing[:3])})")
        rows, ids = model.get_input_embeddings().num_embeddings, template.tokenizer.get_vocab()
        if (highest := max(ids.values())) >= rows:
            raise StageError(
                f"{folder}: its tokenizer has ids up to {highest} and the model knows {rows}; "
                "give the reward model with the tokenizer that it was trained with"
            )
        pad_id = model.config.get_text_config().pad_token_id
        if pad_id is None or pad_id in template.stop_ids:
            raise StageError(
                f"{folder}: its pad token (id {pad_id}) ends answers too or is not set, so scores "
                "would be read one token early; set another pad_token_id in config.json"
            )
        return RewardModel(folder, model.eval().to(device), template, scale, batch_size)

    @property
    def pad_id(self) -> int:
        return self.model.config.get_text_config().pad_token_id

    def __call__(
        self, prompts: Sequence[Messages], completions: Sequence[str], rows: Sequence[Row] = ()
    ) -> list[float]:
        """The scaled score of each completion of a conversation, read at its last token.

        A row may have ``tools``, which the template is given.
        """
        ids = [
            self.ids([*prompt, {"role": "assistant", "content": self._as_text(said)}], tools)
            for prompt, said, tools in zip(prompts, completions, _tools(rows, prompts), strict=True)
        ]
        return self.scale.applied(self.raw(ids))

    def _as_text(self, completion: str) -> str:
        """An answer that spells one of this model's special tokens does not get that token: what
        stands behind a spelt stop token would not be scored."""
        if self.template.special is None:
            return completion
        return self.template.special.sub(lambda found: " ".join(found[0]), completion)

    def ids(self, turns: Messages, tools: Sequence[Any] = ()) -> list[int]:
        """The ids of a conversation by this model's own tokenizer and template.

        An answer may be more tokens here than it was the policy's; what there is no room for is
        left out before its stop token, for work must not end at one answer of many.
        """
        try:
            found = conversation_ids(self.template, turns, tools)
        except RowError as fault:
            raise StageError(
                f"{self.folder}: its chat template cannot render a prompt with its answer: {fault}"
            ) from None
        if self.context is None or len(found) <= self.context:
            return found
        prompt = self._prompt(turns[:-1], tools, place="an answer")
        if len(templates.encode(self.template, [prompt])[0]) + 1 >= self.context:
            raise StageError(
                f"{self.folder}: a prompt with its answer is {len(found)} tokens and the reward "
                f"model takes {self.context}, which the prompt fills; leave long prompts out"
            )
        return [*found[: self.context - 1], found[-1]]

    @property
    def context(self) -> int | None:
        """The most tokens that it takes, where there is a limit."""
        return getattr(self.model.config.get_text_config(), "max_position_embeddings", None)

    def check_room(
        self,
        prompts: Sequence[Messages],
        rows: Sequence[Row],
        places: Sequence[str],
        *,
        answer: int,
    ) -> None:
        """Raise ``StageError`` for the longest prompt that leaves no room for ``answer`` tokens and
        the stop token that the template sets behind an answer that was cut, and for a prompt that
        it cannot render. ``places`` is where the rows stand.

        An answer may be more tokens here than the policy's own; :meth:`ids` shortens it.
        """
        if self.context is None:
            return
        texts: dict[str, str] = {}
        for prompt, tools, place in zip(prompts, _tools(rows, prompts), places, strict=True):
            text = self._prompt(prompt, tools, place=place)
            if len(text.encode()) + answer + 1 >= self.context:  # a token is a byte at least
                texts[place] = text
        lengths = map(len, templates.encode(self.template, list(texts.values())))
        longest, place = max(zip(lengths, texts, strict=True), default=(0, ""))
        if longest + answer + 1 > self.context:
            raise StageError(
                f"{place}: a prompt of {longest} tokens, max_new_tokens {answer} and a stop token "
                f"exceed the context of {self.context} of the reward model {self.folder}; lower "
                "max_new_tokens, or tokenize_data.config.max_length, or give one that takes more"
            )

    def _prompt(self, turns: Messages, tools: Sequence[Any], *, place: str) -> str:
        told = templates.with_every_name([dict(turn) for turn in turns])
        try:
            return templates.render(self.template, told, tools=tools, to_answer=True)
        except RowError as fault:
            raise StageError(
                f"{place}: the chat template of the reward model {self.folder} cannot render the "
                f"prompt: {fault}"
            ) from None

    def raw(self, rows: Sequence[Sequence[int]]) -> list[float]:
        """The raw score of each row of ids, the longest first to keep padding small."""
        order = sorted(range(len(rows)), key=lambda i: (-len(rows[i]), i))
        found: Mapping[int, float] = {}
        for start in range(0, len(order), self.batch_size):
            batch = order[start : start + self.batch_size]
            given = score(self.model, [rows[i] for i in batch], pad_id=self.pad_id)
            found = {**found, **dict(zip(batch, given, strict=True))}
        return [found[i] for i in range(len(rows))]


def _tools(rows: Sequence[Row], prompts: Sequence[Messages]) -> list[Sequence[Any]]:
    """The tools of each row; none where there are no rows."""
    return [row.get("tools", ()) for row in rows or [{}] * len(prompts)]


def check(folder: Path) -> None:
    """Raise ``StageError`` unless ``folder`` is one whole reward model, told by its config."""
    if (folder / "adapter_config.json").exists():
        raise StageError(f"{folder}: an adapter without its base; give what convert makes of it")
    path = folder / "config.json"
    if not path.is_file():
        raise StageError(f"{folder}: no config.json; give an output of convert")
    config = json.loads(path.read_text())
    if not is_reward_model(folder):
        held = ", ".join(config.get("architectures") or ["no architecture"])
        raise StageError(
            f"{folder}: holds {held}, and a reward model is a sequence classifier with one label; "
            "train one with the stage reward"
        )
    labels = config.get("num_labels") or len(config.get("id2label") or [0])
    if labels != 1:
        raise StageError(f"{folder}: gives {labels} scores, and a reward is one number")
