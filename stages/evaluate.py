"""Held-out loss, preferences, exact match, rewards and divergence of one model."""

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

from pydantic import Field, NonNegativeInt, PositiveFloat, PositiveInt, field_validator

from configs import Config
from stages import rewards
from stages.base import Context, Metrics, StageError
from stages.data import lines
from stages.evaluation import divergence, items, language_model, tokens
from stages.evaluation.items import IGNORED, Row
from stages.evaluation.ranks import Ranks, batches_by_length, joined
from stages.rewards.config import Reward

if TYPE_CHECKING:
    from stages.evaluation.intervals import Intervals

SAMPLES = "samples.jsonl"
PROGRESS = "metrics.jsonl"
CONVERSATIONS = "conversations/test"


class Evaluate(Config):
    """What is measured, and how precisely."""

    batch_size: PositiveInt = 16
    """Rows in one forward pass of one rank."""

    dtype: Literal["float32", "bfloat16"] = "float32"
    """Of the weights while they are measured. Use one for all models that are compared."""

    generate_rows: NonNegativeInt = 200
    """Held-out prompts that the model answers for exact match; 0 answers none."""

    max_new_tokens: PositiveInt = 128
    """Longest answer, in tokens."""

    answer_pattern: str | None = None
    """Regular expression; its last match in an answer (its group, if it has one) is compared.
    None compares whole texts, stripped of surrounding space."""

    train_pairs: NonNegativeInt = 500
    """Preference pairs of the training split to score beside the held-out ones; 0 scores none."""

    beta: PositiveFloat | None = None
    """Scale of implicit rewards against the baseline, as in DPO. None leaves rewards out."""

    rewards: tuple[Reward, ...] = ()
    """Rewards of the generated answers. None, with a reward model given, is the reward model."""

    kl_rows: NonNegativeInt = 200
    """Held-out prompts that are answered by sampling for the divergence from the reference, where
    one is given."""

    bootstrap_samples: PositiveInt = 1000
    """Resamples behind every interval that is not a proportion's."""

    confidence: float = Field(default=0.95, gt=0, lt=1)
    """Coverage of the intervals."""

    seed: int = 0
    """Of the bootstrap, and of the samples of prompts and of training pairs."""

    @field_validator("answer_pattern")
    @classmethod
    def _compiles(cls, pattern: str | None) -> str | None:
        try:
            groups = re.compile(pattern or "").groups
        except re.error as error:
            raise ValueError(f"not a regular expression: {error}") from None
        if groups > 1:
            raise ValueError(f"has {groups} groups; mark the answer by one, others as (?:...)")
        return pattern


def evaluate(
    config: Evaluate,
    ctx: Context,
    *,
    model: Path,
    data: Path,
    baseline: Path | None = None,
    reward: Path | None = None,
    reference: Path | None = None,
) -> Metrics:
    """Measure ``MODEL/model`` on the splits in ``data`` (an output of tokenize_data).

    ``baseline`` is an earlier output of this stage for another model on the same data; it gives
    the paired changes, is the reference of implicit rewards, and its answers are what this
    model's have to win against. ``reward`` holds a reward model, and ``REFERENCE/model`` is what
    the divergence is measured from. Returns ``confidence``, and numbers or estimates
    ``{"value", "low", "high", "n"}`` under

    - ``conversations/``: ``loss`` (nats a trained token), ``perplexity``, ``tokens``; if answers
      were generated ``exact_match``, ``stopped``, ``answer_tokens``; with a baseline
      ``loss_change``, ``exact_match_change``;
    - ``preferences/test/`` and ``preferences/train/``, where the data has pairs: the keys of
      :func:`stages.evaluation.measures.preference_measures`;
    - ``answers/``: with rewards ``reward`` (the weighted sum) and ``reward/<name>`` of the greedy
      answers, with a baseline ``win_rate`` and ``win_rate/<name>``, how often the reward is above
      that of the baseline's answer, ties counting half; with a reference ``kl`` (nats an answer)
      and ``kl_per_token``, KL(model || reference) of answers sampled at temperature 1.

    Leaves ``items.jsonl`` (results by row), ``samples.jsonl`` (generated answers), ``tokens.json``
    (what the tokenizer reads in the rows) and, while it works, a line a batch in ``metrics.jsonl``
    for those who watch. Several ranks share the batches and give the same result as one; only rank
    0 returns it. Raises :class:`StageError` for data, a model, a baseline or a reference that does
    not fit, and for a non-finite loss.
    """
    rows = _read(config, data)
    before = None if baseline is None else items.read_matching(baseline, rows)
    prompts = _prompts(config, rows)
    folders = Folders(model / "model", reference and reference / "model")
    read = _same_tokens(folders, rows, prompts, baseline)
    with joined(ctx.device) as ranks:
        scorer = None if ranks.rank else _scorer(config, ctx, reward, prompts, folders.model)
        inferred = _infer(config, ctx, ranks, folders, rows, prompts)
    if ranks.rank:
        return {}
    samples = _samples(config, prompts, inferred.answers, folders.model)
    rewarded = _rewarded(config, scorer, prompts, samples, baseline, folders.model)
    found = _items(rows, inferred.scores, samples)
    items.require_finite(found)
    tokens.write(ctx.out, read)
    items.write(ctx.out / items.NAME, found)
    items.write(ctx.out / SAMPLES, samples)
    return {**_measure(config, found, before), **rewarded, **_diverged(config, inferred)}


@dataclass(frozen=True)
class Folders:
    """The models that are needed at once."""

    model: Path
    reference: Path | None


@dataclass(frozen=True)
class Inferred:
    """What the models gave, in order."""

    scores: list[language_model.Score]
    """Of every sequence of every row."""

    answers: list[language_model.Answer]
    """To every prompt."""

    divergences: list[divergence.Divergence]
    """Of an answer sampled to each of some prompts."""


def _scorer(
    config: Evaluate, ctx: Context, reward: Path | None, prompts: Sequence[Row], folder: Path
) -> rewards.Scorer | None:
    """What rates the answers, loaded before the long work begins; ``None`` rates nothing."""
    named = config.rewards or ((Reward(model=True),) if reward else ())
    if not named or not config.generate_rows:
        return None
    inputs = {"reward": reward} if reward else {}
    scorer = rewards.load(named, inputs, ctx.device, batch_size=config.batch_size)
    from transformers import AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(folder)
    rewards.check_rows(scorer, prompts, tokenizer, max_new_tokens=config.max_new_tokens)
    return scorer


def _read(config: Evaluate, data: Path) -> list[Row]:
    rows = items.read_split(data, CONVERSATIONS)
    if not (data / "preferences").is_dir():
        _refuse_judged(data)
        return rows
    rows += items.read_split(data, "preferences/test")
    if config.train_pairs:
        rows += items.read_split(
            data, "preferences/train", limit=config.train_pairs, seed=config.seed
        )
    return rows


def _refuse_judged(data: Path) -> None:
    """Who gave them waits for a line on preferences that would never come."""
    if (data / "unpaired").is_dir():
        raise StageError(
            f"{data}: the preferences are judged answers (prompt, completion, label), and evaluate "
            "measures pairs (prompt, chosen, rejected); give pairs, or none with preferences=null"
        )


def _prompts(config: Evaluate, rows: Sequence[Row]) -> list[Row]:
    """The conversations to answer. A pattern must find an answer in every reference."""
    held_out = [row for row in rows if row["set"] == CONVERSATIONS]
    places = items.sample(len(held_out), config.generate_rows, seed=config.seed)
    prompts = [held_out[place] for place in places]
    for row in prompts:
        if answer_of(row["answer"], config.answer_pattern) is None:
            raise StageError(
                f"evaluate.config.answer_pattern: {config.answer_pattern!r} finds nothing in the "
                f"reference answer of {row['set']} row {row['index']} ({row['answer'][:80]!r}); "
                "mend the pattern, or leave it out to compare whole answers"
            )
    return prompts


def _same_tokens(
    folders: Folders, rows: Sequence[Row], prompts: Sequence[Row], baseline: Path | None
) -> tokens.Tokens:
    """What the model reads in the rows. Raises :class:`StageError` where what it is compared with
    read something else."""
    ours = tokens.read(folders.model, rows)
    if folders.reference:
        theirs = tokens.read(folders.reference, rows)
        tokens.require_same(ours, theirs, folder=folders.model, other=folders.reference)
    if baseline:
        theirs = tokens.written(baseline)
        tokens.require_same(ours, theirs, folder=folders.model, other=baseline)
        if not (ours and theirs):
            _require_same_prompts(baseline, prompts, folders.model)
    return ours


def _require_same_prompts(baseline: Path, prompts: Sequence[Row], folder: Path) -> None:
    """For a baseline that did not write its tokens down, in the prompts that it answered."""
    theirs = {index: each["prompt"] for index, each in _answered(baseline).items()}
    shared = [row for row in prompts if row["index"] in theirs]
    if not shared:
        return
    from transformers import AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(folder)
    if all(tokenizer.decode(row["prompt_ids"]) != theirs[row["index"]] for row in shared):
        tokens.refuse(folder, baseline)


def answer_of(text: str, pattern: str | None) -> str | None:
    """The part of ``text`` that counts as the answer; None where ``pattern`` finds none."""
    if pattern is None:
        return text.strip()
    found = list(re.finditer(pattern, text))
    return (found[-1][1] if found[-1].re.groups else found[-1][0]) if found else None


def _infer(
    config: Evaluate,
    ctx: Context,
    ranks: Ranks,
    folders: Folders,
    rows: Sequence[Row],
    prompts: Sequence[Row],
) -> Inferred:
    sequences = [sequence for row in rows for sequence in _sequences(row)]
    questions = [row["prompt_ids"] for row in prompts]
    sampled = _sampled(config, rows) if folders.reference else []
    scoring = batches_by_length([len(ids) for ids, _ in sequences], config.batch_size)
    answering = batches_by_length([len(ids) for ids in questions], config.batch_size)
    sampling = batches_by_length([len(ids) for _, ids in sampled], config.batch_size)
    folder = folders.model
    model = language_model.load(folder, dtype=config.dtype, device=ctx.device)
    language_model.require_vocabulary(model, [ids for ids, _ in sequences], folder)
    if questions:
        language_model.decode_greedily(model, folder, max_new_tokens=config.max_new_tokens)
    tick = ranks.ticker(ctx.out / PROGRESS, scoring, answering, sampling)
    scores = ranks.map(partial(language_model.score, model), sequences, scoring, tick)
    answers = ranks.map(partial(language_model.answer, model), questions, answering, tick)
    if not sampled or folders.reference is None:
        return Inferred(scores, answers, [])
    reference = language_model.load(folders.reference, dtype=config.dtype, device=ctx.device)
    divergence.require_same_vocabulary(model, reference, folders.reference)
    compare = divergence.measure(
        model, reference, folder, max_new_tokens=config.max_new_tokens, seed=config.seed
    )
    return Inferred(scores, answers, ranks.map(compare, sampled, sampling, tick))


def _sampled(config: Evaluate, rows: Sequence[Row]) -> list[tuple[int, list[int]]]:
    """(place, prompt ids) of the prompts that are answered for the divergence."""
    held_out = [row for row in rows if row["set"] == CONVERSATIONS]
    places = items.sample(len(held_out), config.kl_rows, seed=config.seed)
    return [(held_out[place]["index"], held_out[place]["prompt_ids"]) for place in places]


def _sequences(row: Row) -> list[language_model.Labelled]:
    """One sequence to score for a conversation; for a pair the chosen, then the rejected."""
    if "labels" in row:
        return [(row["input_ids"], row["labels"])]
    prompt = row["prompt_ids"]
    ignored = [IGNORED] * len(prompt)
    return [(prompt + row[key], ignored + row[key]) for key in ("chosen_ids", "rejected_ids")]


def _samples(
    config: Evaluate,
    prompts: Sequence[Row],
    answers: Sequence[language_model.Answer],
    folder: Path,
) -> list[dict[str, Any]]:
    """What the model answered to each prompt, compared with the reference."""
    if not prompts:
        return []
    from transformers import AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(folder)
    return [
        _sample(config, row, tokenizer, ids, stopped=stopped)
        for row, (ids, stopped) in zip(prompts, answers, strict=True)
    ]


def _sample(
    config: Evaluate, row: Row, tokenizer: Any, ids: list[int], *, stopped: bool
) -> dict[str, Any]:
    text = tokenizer.decode(ids, skip_special_tokens=True)
    reference = answer_of(row["answer"], config.answer_pattern)
    return {
        "index": row["index"],
        "prompt": tokenizer.decode(row["prompt_ids"]),
        "reference": row["answer"],
        "generated": text,
        "match": answer_of(text, config.answer_pattern) == reference,
        "stopped": stopped,
        "answer_tokens": len(ids),
    }


def _rewarded(
    config: Evaluate,
    scorer: rewards.Scorer | None,
    prompts: Sequence[Row],
    samples: Sequence[dict[str, Any]],
    baseline: Path | None,
    folder: Path,
) -> dict[str, Any]:
    """Rewards of the answers, noted in ``samples`` too, and how often they beat the baseline's."""
    if scorer is None or not samples:
        return {}
    from transformers import AutoTokenizer

    from stages.evaluation.reward_measures import win_rate
    from stages.rewards import prompts as asked

    tokenizer = AutoTokenizer.from_pretrained(folder)
    messages = [asked.messages(row, tokenizer) for row in prompts]
    facts = asked.facts(prompts)
    mine = scorer(messages, [sample["generated"] for sample in samples], facts)
    for place, sample in enumerate(samples):
        sample["rewards"] = {name: scores[place] for name, scores in mine.items()}
    intervals = _intervals(config)
    found = {_key("reward", name): intervals.mean(scores) for name, scores in mine.items()}
    if earlier := _earlier(baseline, samples):
        theirs = scorer(messages, earlier, facts)
        pairs = zip(samples, earlier, strict=True)
        alike = [sample["generated"] == before for sample, before in pairs]
        for name, scores in mine.items():
            found[_key("win_rate", name)] = win_rate(scores, theirs[name], intervals, alike=alike)
    return found


def _key(measure: str, name: str) -> str:
    return f"answers/{measure}" + ("" if name == rewards.TOTAL else f"/{name}")


def _earlier(baseline: Path | None, samples: Sequence[Mapping[str, Any]]) -> list[str]:
    """The baseline's answers to the same prompts; none where it did not answer all of them."""
    known = _answered(baseline) if baseline else {}
    if any(sample["index"] not in known for sample in samples):
        return []
    return [known[sample["index"]]["generated"] for sample in samples]


def _answered(baseline: Path) -> dict[int, dict[str, Any]]:
    """What the baseline answered, by the place of the prompt."""
    path = baseline / SAMPLES
    return {each["index"]: each for each in lines.rows(path)} if path.is_file() else {}


def _diverged(config: Evaluate, inferred: Inferred) -> dict[str, Any]:
    if not inferred.divergences:
        return {}
    intervals = _intervals(config)
    nats, tokens = zip(*inferred.divergences, strict=True)
    return {
        "answers/kl": intervals.mean(nats),
        "answers/kl_per_token": intervals.ratio(nats, tokens),
    }


def _items(
    rows: Sequence[Row],
    scores: Sequence[language_model.Score],
    samples: Sequence[Mapping[str, Any]],
) -> list[dict[str, Any]]:
    """Results by row: its place, content hash, log-probabilities and the fate of its answer."""
    answers = {sample["index"]: sample for sample in samples}
    rest = iter(scores)
    found = []
    for row in rows:
        item = {key: row[key] for key in ("set", "index", "id")}
        if "labels" in row:
            item["logp"], item["tokens"] = next(rest)
            answer = answers.get(row["index"], {})
            item |= {k: answer[k] for k in ("match", "stopped", "answer_tokens") if k in answer}
        else:
            item["chosen_logp"], item["chosen_tokens"] = next(rest)
            item["rejected_logp"], item["rejected_tokens"] = next(rest)
        found.append(item)
    return found


def _measure(
    config: Evaluate,
    found: Sequence[Mapping[str, Any]],
    before: Sequence[Mapping[str, Any]] | None,
) -> Metrics:
    from stages.evaluation import measures

    intervals = _intervals(config)
    metrics: dict[str, Any] = {"confidence": config.confidence}
    for name in dict.fromkeys(item["set"] for item in found):
        places = [place for place, item in enumerate(found) if item["set"] == name]
        now = [found[place] for place in places]
        then = None if before is None else [before[place] for place in places]
        if name == CONVERSATIONS:
            prefix, part = "conversations", measures.conversation_measures(now, then, intervals)
        else:
            prefix = name
            part = measures.preference_measures(now, then, intervals, beta=config.beta)
        metrics |= {f"{prefix}/{key}": value for key, value in part.items()}
    return metrics


def _intervals(config: Evaluate) -> "Intervals":
    from stages.evaluation.intervals import Intervals

    return Intervals(config.confidence, config.bootstrap_samples, config.seed)
