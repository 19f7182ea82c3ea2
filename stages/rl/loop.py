"""The loop of PPO: roll out, score, learn, write down. Imported only inside a rank."""

import json
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.distributed as dist

from stages import resume
from stages.base import Metrics
from stages.data import lines
from stages.manifest import write_atomically
from stages.rewards import prompts
from stages.rl.generation import Answer, uniforms
from stages.rl.kl import next_coefficient
from stages.rl.learning import check_reference, learn
from stages.rl.rollout import Rollout, Sample, batch, describe, rollout, targets
from stages.rl.work import Work
from stages.watch import Watch

PROGRESS = "progress.json"
SAMPLES = "samples.jsonl"
SHOWN = 4
"""Answers of each update that are written down."""


@dataclass(frozen=True)
class Progress:
    """What an update hands to the next; with the engine's state, all there is to resume from.

    Random numbers depend on seed, update and row alone, and the learning rate on the step alone.
    """

    update: int = 0
    """Updates done, and so how far the prompts were read."""

    kl_coefficient: float = 0.0
    tokens: int = 0
    """Tokens of all answers so far."""

    steps: int = 0
    """Optimizer steps taken."""


@dataclass
class Clock:
    """Seconds of this update by what they went into."""

    seconds: dict[str, float] = field(default_factory=dict)

    @contextmanager
    def measure(self, what: str) -> Iterator[None]:
        started = time.perf_counter()
        yield
        self.seconds[what] = time.perf_counter() - started


def train(work: Work) -> Metrics:
    """All updates, from the newest complete checkpoint if there is one.

    Raises ``StageError`` when an invariant is broken, ``NonFiniteError`` when a value is not
    finite, ``Interrupted`` when it was asked to stop and has saved.
    """
    started = time.time()
    progress = _start(work)
    resumed_from = progress.update
    trainer = work.engine.trainer
    while progress.update < work.num_updates:
        clock = Clock()
        rolled = roll_out(work, progress.update, clock)
        if progress.update == 0:
            check_reference(work, rolled)
        taught = targets(work.config, rolled, kl_coefficient=progress.kl_coefficient)
        with clock.measure("train"):
            learned = learn(work, progress.update, rolled, taught, taken=progress.steps)
        figures = describe(rolled, taught) | learned | {"kl_coefficient": progress.kl_coefficient}
        _write_samples(work, progress.update + 1, rolled)
        progress = _next(work, progress, rolled, figures)
        _log(work, progress, figures | _speed(clock, rolled))
        if trainer.control.should_save:
            _save(work, progress)
    trainer.control = trainer.callback_handler.on_train_end(
        trainer.args, trainer.state, trainer.control
    )
    return _summary(work.ctx.out, resumed_from) | {"seconds": time.time() - started}


def _start(work: Work) -> Progress:
    trainer, out = work.engine.trainer, work.ctx.out
    progress = Progress(kl_coefficient=work.config.kl.coefficient)
    if checkpoint := resume.newest(out):
        work.engine.load(checkpoint)
        progress = Progress(**json.loads((checkpoint / PROGRESS).read_text()))
    state = trainer.state
    state.global_step, state.max_steps = progress.update, work.num_updates
    state.num_input_tokens_seen = progress.tokens
    watch = Watch(trainer, work.ctx)
    judges = [judge.model for judge in work.score.judges]
    for model in filter(None, (work.engine.bones, *judges)):
        watch.follow(model)
    trainer.add_callback(watch)
    trainer.control = trainer.callback_handler.on_train_begin(trainer.args, state, trainer.control)
    if trainer.args.process_index == 0:
        _drop_samples_after(out / SAMPLES, progress.update)
    return progress


def roll_out(work: Work, update: int, clock: Clock) -> Rollout:
    """Answers to the next prompts, scored by rewards and models, gathered in every rank.

    Each rank answers what it learns in the first pass, and scores it in the very micro-batches
    of that pass: the first ratio is then 1 to the last bit.
    """
    split, engine = work.split, work.engine
    cut = [micro for _, mine in split.minibatches(work.config.seed, update, 0) for micro in mine]
    mine = [place for micro in cut for place in micro]
    asked = [work.rows[int(work.order[update * split.num + place])] for place in mine]
    with clock.measure("rollout"), engine.whole_policy() as policy:
        drawn = uniforms(work.config.seed, update, mine, work.sampling.max_new_tokens)
        answers = work.generator(policy)([list(row["prompt_ids"]) for row in asked], drawn)
    with clock.measure("score"):
        said = dict(zip(mine, _scored(work, asked, answers), strict=True))
        for micro in cut:
            said.update(zip(micro, _judged(work, [said[place] for place in micro]), strict=True))
        everyone = _exchange(said)
    return rollout([everyone[place] for place in range(split.num)])


def _scored(work: Work, asked: list[Any], answers: list[Answer]) -> list[Sample]:
    """Answers with what the rewards give them; the models have not been asked yet."""
    texts = [work.tokenizer.decode(each.ids, skip_special_tokens=True) for each in answers]
    messages = [prompts.messages(row, work.tokenizer) for row in asked]
    scores = work.score(messages, texts, prompts.facts(asked))
    nothing = np.zeros(0, dtype=np.float32)
    return [
        Sample(
            prompt=list(row["prompt_ids"]),
            answer=answer.ids,
            ended=answer.ended,
            scores={name: float(values[place]) for name, values in scores.items()},
            log_probs=nothing,
            reference=nothing,
            values=nothing,
        )
        for place, (row, answer) in enumerate(zip(asked, answers, strict=True))
    ]


def _judged(work: Work, samples: list[Sample]) -> list[Sample]:
    """One micro-batch with what policy, critic and reference say of it."""
    engine, temperature = work.engine, work.sampling.temperature
    cut = batch([(each.prompt, each.answer) for each in samples], engine.device)
    engine.module.eval()
    with torch.no_grad():
        log_probs, _, values = engine("learners", cut, temperature=temperature)
        reference = engine("reference", cut, temperature=temperature)
    engine.module.train()
    tables = [each.float().cpu().numpy() for each in (log_probs, reference, values)]
    judged = []
    for row, each in enumerate(samples):
        mine = [table[row, : len(each.answer)] for table in tables]
        judged.append(replace(each, log_probs=mine[0], reference=mine[1], values=mine[2]))
    return judged


def _exchange(mine: dict[int, Sample]) -> dict[int, Sample]:
    """What all ranks have, in every rank: some numbers a token, little beside the models."""
    if not (dist.is_available() and dist.is_initialized()):
        return mine
    parts: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(parts, mine)
    return {place: sample for part in parts for place, sample in part.items()}


def _next(work: Work, progress: Progress, rolled: Rollout, figures: dict[str, float]) -> Progress:
    return Progress(
        update=progress.update + 1,
        kl_coefficient=next_coefficient(
            work.config.kl, progress.kl_coefficient, kl=figures["kl"], num=work.split.num
        ),
        tokens=progress.tokens + int(rolled.mask.sum()),
        steps=progress.steps + int(figures["optimizer_steps"]),
    )


def _log(work: Work, progress: Progress, figures: dict[str, float]) -> None:
    """The trainer's callbacks in its own order: beats, a request to stop, a line of metrics."""
    trainer = work.engine.trainer
    handler, args, state = trainer.callback_handler, trainer.args, trainer.state
    state.global_step = progress.update
    state.num_input_tokens_seen = progress.tokens
    trainer.control = handler.on_step_end(args, state, trainer.control)
    logs = {"loss": figures.pop("loss"), "tokens": progress.tokens, **figures}
    trainer.control = handler.on_log(args, state, trainer.control, logs)


def _save(work: Work, progress: Progress) -> None:
    trainer = work.engine.trainer
    folder = Path(trainer.args.output_dir) / f"checkpoint-{progress.update}"
    work.engine.save(folder)
    if trainer.args.process_index == 0:
        write_atomically(folder / PROGRESS, json.dumps(asdict(progress)))
    trainer.control = trainer.callback_handler.on_save(trainer.args, trainer.state, trainer.control)


def _speed(clock: Clock, rolled: Rollout) -> dict[str, float]:
    """Seconds of each part, and the tokens of answers that it got through in a second."""
    tokens = float(rolled.mask.sum())
    figures = {}
    for what, seconds in clock.seconds.items():
        figures[f"seconds/{what}"] = seconds
        figures[f"tokens_per_second/{what}"] = tokens / max(seconds, 1e-9)
    return figures


def _write_samples(work: Work, step: int, rolled: Rollout) -> None:
    """The first answers of the rollout, for people."""
    if not work.engine.accelerator.is_main_process:
        return
    with (work.ctx.out / SAMPLES).open("a", encoding="utf-8") as file:
        for place, each in enumerate(rolled.samples[:SHOWN]):
            row = int(work.order[(step - 1) * work.split.num + place])
            shown = {
                "step": step,
                "row": row,
                "prompt": work.tokenizer.decode(each.prompt, skip_special_tokens=True),
                "completion": work.tokenizer.decode(each.answer, skip_special_tokens=True),
                "answer": work.rows[row].get("answer"),
                "scores": each.scores,
                "tokens": len(each.answer),
                "ended": each.ended,
            }
            file.write(f"{lines.dump(shown)}\n")


def _drop_samples_after(path: Path, step: int) -> None:
    """A resumed run does these updates again."""
    if path.exists():
        kept = [row for row in lines.rows(path) if row["step"] <= step]
        write_atomically(path, lines.join(map(lines.dump, kept)))


def _summary(out: Path, resumed_from: int) -> dict[str, Any]:
    """First and last figures, from what was written down."""
    path = out / "metrics.jsonl"
    rows = [json.loads(line) for line in path.read_text().splitlines()] if path.exists() else []
    if not rows:
        return {}
    found: dict[str, Any] = {"steps": rows[-1]["step"], "resumed_from": resumed_from}
    for name in ("loss", "reward", "kl"):
        found |= {f"first_{name}": rows[0][name], f"final_{name}": rows[-1][name]}
    return found
