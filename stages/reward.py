"""A reward model from preference pairs: TRL's trainer, a scale, and how far it can be trusted."""

import json
import math
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Annotated, Any, ClassVar

from pydantic import Field, NonNegativeFloat, NonNegativeInt, PositiveFloat, PositiveInt

from stages import cpu_ranks, training
from stages.base import Context, Metrics, StageError
from stages.training import Training

HELD_OUT = "held_out.jsonl"


class RewardModelling(Training):
    """What decides the result of reward modelling."""

    uses_dropout: ClassVar[bool] = False

    learning_rate: PositiveFloat = 1e-5
    """Peak learning rate."""

    centring: NonNegativeFloat = 0.01
    """Weight of (r_chosen + r_rejected)^2, which keeps scores around zero (arXiv:2312.09244,
    eq. 2); 0 leaves it out."""

    scale_rows: PositiveInt = 512
    """Demonstrations (rows that SFT learns from) on which mean and standard deviation of the
    scores are measured; pairs' answers where the data has none."""

    held_out_pairs: NonNegativeInt = 1000
    """Held-out pairs that are scored after training; 0 scores none."""

    reliability_bins: PositiveInt = 10
    """Bins of the reliability plot and of the expected calibration error."""

    confidence: Annotated[float, Field(gt=0, lt=1)] = 0.95
    """Coverage of the intervals."""


def reward(config: RewardModelling, ctx: Context, *, model: Path, data: Path) -> Metrics:
    """Give ``MODEL/model`` a score head and train it on the pairs of ``DATA``.

    The loss is -log sigmoid(r_chosen - r_rejected), Bradley and Terry's, r being read at the last
    token, which is a stop token; with an adapter the head is trained whole. After training the
    scores of demonstrations are measured: ``OUT/model/reward_scale.json`` brings every later score
    to mean 0 and standard deviation 1 there, and has the day that the rows' template was told.
    Returns, beside the training's figures, those of
    :func:`stages.evaluation.reward_measures.reward_measures` on held-out pairs; each pair's
    scores are in ``OUT/held_out.jsonl``. Raises ``StageError`` for data without pairs, a
    tokenizer without a token to pad with, and a model that scores everything alike.
    """
    cpu_ranks.prepare(ctx.trainer_args)
    from stages.data import templates
    from stages.rewards import model as reward_model

    trainer = _trainer(config, ctx, base=model / "model", data=data)
    figures = training.train(trainer, ctx)
    scored = Scored(trainer, ctx)
    samples = _demonstrations(config, data)
    same = all(row == samples[0] for row in samples)  # of a memory probe
    scale = reward_model.Scale() if same else reward_model.measured(scored(samples))
    pairs = _pairs(data, "test", config.held_out_pairs, config.seed)
    sides = scored([pair["prompt_ids"] + pair[key] for pair in pairs for key in SIDES])
    found = {"scale": {"mean": scale.mean, "std": scale.std, "num": scale.num}}
    if trainer.args.process_index == 0:
        kept = replace(scale, template_date=templates.read_date(data))
        _complete(ctx.out, model / "model", kept)
        found |= _measure(config, ctx.out, pairs, sides)
    return {**figures, **found}


SIDES = ("chosen_ids", "rejected_ids")


def _trainer(config: RewardModelling, ctx: Context, *, base: Path, data: Path) -> training.Trainer:
    from transformers import AutoTokenizer
    from trl import RewardConfig, RewardTrainer
    from trl.trainer.reward_trainer import DataCollatorForPreference

    from stages.watch import Watch

    rows = _train_split(data)
    tokenizer = AutoTokenizer.from_pretrained(base)
    tokenizer.pad_token = distinct_pad(base)
    pad = DataCollatorForPreference(pad_token_id=tokenizer.pad_token_id)

    def collate(pairs: Sequence[Mapping[str, Any]]) -> Any:
        return pad([{key: pair["prompt_ids"] + pair[key] for key in SIDES} for pair in pairs])

    arguments = training.trainer_arguments(config, ctx)
    args = RewardConfig(
        **{**arguments, "remove_unused_columns": False},
        center_rewards_coefficient=config.centring or None,
    )
    training.adjust_arguments(args, ctx)
    trainer: training.Trainer = RewardTrainer(
        str(base),
        args=args,
        data_collator=collate,
        train_dataset=training.in_order(rows, config=config),
        processing_class=tokenizer,
        quantization_config=training.quantization_config(config),
        peft_config=training.peft_config(config.method, base, task="SEQ_CLS"),
    )
    bare = getattr(trainer.model, "get_base_model", lambda: trainer.model)()
    # An adapter's config.json would go on naming the language model that it was made from.
    bare.config.architectures = [type(bare).__name__]
    trainer.add_callback(Watch(trainer, ctx))
    _require_known(rows, trainer.model, data)
    return trainer


def _require_known(rows: Any, model: Any, data: Path) -> None:
    """Raise ``StageError`` for pairs that hold a token which the model does not know."""
    import pyarrow.compute as pc

    columns = (pc.list_flatten(rows.data.column(name)) for name in rows.column_names)
    largest = max(pc.max(column).as_py() for column in columns)  # pyright: ignore[reportAttributeAccessIssue]: made at run time
    known = model.get_input_embeddings().num_embeddings
    if largest >= known:
        raise StageError(
            f"{data}: preferences/train holds token {largest}, and the model knows {known}; "
            "tokenise the data with this model's tokenizer"
        )


def _train_split(data: Path) -> Any:
    from datasets import load_from_disk

    folder = data / "preferences" / "train"
    if not folder.is_dir():
        raise StageError(f"{data}: holds no preference pairs; give the data stage `preferences`")
    rows: Any = load_from_disk(str(folder))
    return rows.select_columns(["prompt_ids", *SIDES])


def distinct_pad(folder: Path) -> str:
    """A token to pad with that no answer ends with, for the model in ``folder``.

    A score is read at the last token that is not padding: where padding is the stop token too, it
    would be read one token early. The tokenizer's own pad token is kept if it is distinct and the
    model knows it; else the first special token that ends nothing is taken, one that both know
    already. Raises ``StageError`` when there is none.
    """
    from transformers import AutoConfig

    from stages.data import templates

    template = templates.load(folder)
    tokenizer, stops = template.tokenizer, template.stop_ids
    special = [one for _, one in sorted(tokenizer.added_tokens_decoder.items()) if one.special]
    candidates = [tokenizer.pad_token, tokenizer.unk_token, *map(str, special)]
    known = [one for one in candidates if one is not None]
    rows = AutoConfig.from_pretrained(folder).get_text_config().vocab_size
    ids = {token: tokenizer.convert_tokens_to_ids(token) for token in known}
    found = next((t for t, number in ids.items() if number < rows and number not in stops), None)
    if found is None:
        raise StageError(
            f"{folder}: every special token of the tokenizer ends an answer, or has no row in the "
            f"model ({', '.join(sorted(ids)) or 'there is none'}), and padding needs one that "
            "does neither; add a pad token to the tokenizer and a row for it to the model"
        )
    return found


class Scored:
    """Scores rows of ids by the model of a trainer, shared among its ranks."""

    def __init__(self, trainer: training.Trainer, ctx: Context) -> None:
        from stages.beats import Beats

        self.trainer, self.beats = trainer, Beats(ctx.out)
        self.size = trainer.args.per_device_train_batch_size
        trainer.model_wrapped.eval()

    def __call__(self, rows: Sequence[Sequence[int]]) -> list[float]:
        """The raw score of each row, on every rank.

        Every rank makes the same number of forward passes, because each one gathers sharded
        weights; one without a batch of its own repeats the last.
        """
        from accelerate.utils import gather_object

        from stages.evaluation.ranks import batches_by_length
        from stages.rewards.model import score

        batches = batches_by_length([len(row) for row in rows], self.size)
        world, rank = self.trainer.args.world_size, self.trainer.args.process_index
        rounds = math.ceil(len(batches) / world)
        pad_id = self.trainer.processing_class.pad_token_id
        mine: list[tuple[int, float]] = []
        for step in range(rounds):
            place = step * world + rank
            batch = batches[min(place, len(batches) - 1)]
            given = score(self.trainer.model_wrapped, [rows[i] for i in batch], pad_id=pad_id)
            if place < len(batches):
                mine += zip(batch, given, strict=True)
            self.beats.beat("step", step=step + 1, total_steps=rounds)
        found = dict(gather_object(mine))
        self.beats.beat("save")
        return [found[i] for i in range(len(rows))]


def _demonstrations(config: RewardModelling, data: Path) -> list[list[int]]:
    """Rows of ids that the scale is measured on."""
    from datasets import load_from_disk

    from stages.evaluation.items import sample

    folder = data / "conversations" / "train"
    if not folder.is_dir():
        pairs = _pairs(data, "train", config.scale_rows // 2 or 1, config.seed)
        return [pair["prompt_ids"] + pair[key] for pair in pairs for key in SIDES]
    rows: Any = load_from_disk(str(folder))
    chosen = sample(len(rows), config.scale_rows, seed=config.seed)
    return [list(ids) for ids in rows.select(chosen)["input_ids"]]


def _pairs(data: Path, side: str, limit: int, seed: int) -> list[dict[str, Any]]:
    """A seeded sample of the pairs of one side, or none where there are none."""
    from datasets import load_from_disk

    from stages.evaluation.items import sample

    folder = data / "preferences" / side
    if not folder.is_dir() or not limit:
        return []
    rows: Any = load_from_disk(str(folder))
    return rows.select(sample(len(rows), limit, seed=seed)).to_list()


def _complete(out: Path, base: Path, scale: Any) -> None:
    """Beside the weights: the scale, and the stop tokens that scored rows are cut behind."""
    import shutil

    from stages.rewards import model as reward_model

    name = "generation_config.json"
    if (base / name).exists():
        shutil.copyfile(base / name, out / "model" / name)
    reward_model.write_scale(out / "model", scale)


def _measure(
    config: RewardModelling, out: Path, pairs: Sequence[Mapping[str, Any]], sides: Sequence[float]
) -> dict[str, Any]:
    """The measures on held-out pairs, whose scores in turn are those of ``sides``."""
    if not pairs:
        return {}
    import numpy as np

    from stages.evaluation.intervals import Intervals
    from stages.evaluation.reward_measures import Pairs, reward_measures
    from stages.manifest import write_atomically

    lengths = [[len(pair[key]) for pair in pairs] for key in SIDES]
    rows = [
        {"chosen": c, "rejected": r, "chosen_tokens": nc, "rejected_tokens": nr}
        for c, r, nc, nr in zip(sides[::2], sides[1::2], *lengths, strict=True)
    ]
    write_atomically(out / HELD_OUT, "".join(json.dumps(row) + "\n" for row in rows))
    columns = {name: np.array([row[name] for row in rows], dtype=float) for name in rows[0]}
    intervals = Intervals(config.confidence, seed=config.seed)
    measures = reward_measures(Pairs(**columns), intervals, bins=config.reliability_bins)
    return {"held_out_pairs": len(rows), **measures}
