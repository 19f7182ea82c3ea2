"""The report of a run: Markdown with figures, and a short form for the terminal."""

import json
import os
import sys
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from itertools import islice, zip_longest
from pathlib import Path
from typing import Any, Literal

from pydantic import Field, NonNegativeFloat, PositiveInt

from configs import Config
from flows import export_report, plots, reward_plots, reward_report
from flows.markdown import cell, estimate, fenced, link, table
from flows.progress import duration
from stages.data import lines
from stages.manifest import write_atomically

NAME = "report.md"
FACTS = "report.json"
FIGURES = "figures"
WIDTH = 100
"""Longest line of the terminal's table."""

NUM_SAMPLES = 4


class StageRow(Config):
    """One stage of the run."""

    label: str
    """What the run calls it, such as ``evaluate sft``."""

    status: Literal["reused", "ran", "resumed", "planned"]
    """How the run came by its output."""

    output: Path
    """Its directory in the store."""

    seconds: NonNegativeFloat = 0.0
    """Wall time of this run's part; 0 when reused."""

    backend: str = ""
    """Kind of the backend."""

    world_size: PositiveInt = 1
    """Ranks."""

    metrics: dict[str, float] = Field(default_factory=dict)
    """The few figures that belong beside its name."""


class Training(Config):
    """A training stage whose curves are drawn."""

    label: str
    """Heads its panels, such as ``SFT``."""

    output: Path
    """Holds ``metrics.jsonl``."""


class Evaluation(Config):
    """The evaluation of one model."""

    label: str
    """The model's name, such as ``SFT``."""

    output: Path
    """Holds ``metrics.json``, and ``samples.jsonl`` where answers were generated."""

    baseline: str = ""
    """Name of the model that changes and rewards are measured against."""


class Export(Config):
    """A model that was made into a plain folder."""

    label: str
    """The stage that made it, such as ``convert sft``."""

    output: Path
    """Holds ``model``, and ``metrics.json`` with what was found of it."""


class Choice(Config):
    """What the planner chose for a stage under ``auto``, and what became of it."""

    label: str
    """The stage."""

    plan: str
    """Backend, ranks and batch that it ended under."""

    why: str
    """The planner's reasons."""

    moves: tuple[str, ...] = ()
    """Moves to a plan that needs less memory, first to last."""


class Report(Config):
    """Everything a report is made from; outputs are read where they lie."""

    name: str
    """The run's name."""

    stages: tuple[StageRow, ...]
    """In the order of the run."""

    trainings: tuple[Training, ...] = ()
    """In the order of the run."""

    evaluations: tuple[Evaluation, ...] = ()
    """From the base model to the last."""

    exports: tuple[Export, ...] = ()
    """In the order of the run."""

    choices: tuple[Choice, ...] = ()
    """In the order of the run."""

    prepared: Path | None = None
    """Output of prepare_data, for the counts of rows."""

    tokenised: Path | None = None
    """Output of tokenize_data, for the counts of tokens."""

    versions: dict[str, str] = Field(default_factory=dict)
    """What the run was made with: packages, interpreter, machine, recipe."""


@dataclass(frozen=True)
class Score:
    """A line of a table of scores."""

    name: str
    key: str
    form: str = ".3f"
    unit: float = 1.0

    def text(self, measures: Mapping[str, Any]) -> str:
        """The value with its interval; nothing where it was not measured."""
        found = measures.get(self.key)
        if found is None:
            return ""
        return estimate(found, self.form, self.unit)


PERCENT = {"form": ".1f", "unit": 0.01}
SCORES = (
    Score("held-out loss, nats/token", "conversations/loss"),
    Score("perplexity", "conversations/perplexity", ".2f"),
    Score("exact match, %", "conversations/exact_match", **PERCENT),
    Score("answers that stop, %", "conversations/stopped", **PERCENT),
    Score("preference accuracy, %", "preferences/test/accuracy", **PERCENT),
    Score("  on training pairs, %", "preferences/train/accuracy", **PERCENT),
    Score("preference margin, nats", "preferences/test/margin", ".2f"),
    Score("  on training pairs", "preferences/train/margin", ".2f"),
)
CHANGES = (
    Score("held-out loss, nats/token", "conversations/loss_change", "+.3f"),
    Score("exact match, points", "conversations/exact_match_change", "+.1f", 0.01),
    Score("preference accuracy, points", "preferences/test/accuracy_change", "+.1f", 0.01),
    Score("  on training pairs", "preferences/train/accuracy_change", "+.1f", 0.01),
    Score("log p(chosen), nats", "preferences/test/chosen_logp_change", "+.2f"),
    Score("log p(rejected), nats", "preferences/test/rejected_logp_change", "+.2f"),
    Score("preference margin, nats", "preferences/test/margin_change", "+.2f"),
    Score("  on training pairs", "preferences/train/margin_change", "+.2f"),
    Score("reward accuracy, %", "preferences/test/reward_accuracy", **PERCENT),
    Score("  on training pairs, %", "preferences/train/reward_accuracy", **PERCENT),
    Score("reward margin", "preferences/test/reward_margin"),
    Score("  on training pairs", "preferences/train/reward_margin"),
    Score("DPO loss (ln 2 = 0.693: none)", "preferences/test/dpo_loss"),
    Score("  on training pairs", "preferences/train/dpo_loss"),
    Score("KL to the reference, nats/answer", "answers/kl"),
    Score("  a token", "answers/kl_per_token"),
)
BRIEF = (
    "conversations/loss",
    "conversations/exact_match",
    "preferences/test/accuracy",
    "preferences/train/accuracy",
    "preferences/test/margin",
    "preferences/test/reward_margin",
    "preferences/test/dpo_loss",
    "answers/kl",
)
"""What the terminal shows."""


def write_report(folder: Path, report: Report) -> Path:
    """Write ``report.md``, its figures and what it was made from into ``folder``; its path."""
    folder.mkdir(parents=True, exist_ok=True)
    facts = _with_paths(report, lambda path: Path(os.path.relpath(path, folder)))
    write_atomically(folder / FACTS, facts.model_dump_json(indent=2))
    write_atomically(folder / NAME, markdown(report, folder=folder, figures=draw(folder, report)))
    return folder / NAME


def draw(folder: Path, report: Report) -> list[tuple[str, str]]:
    """Draw what there is to see by now into ``folder``; (file, caption) of each figure."""
    curves = {training.label: read_rows(training.output) for training in report.trainings}
    rewards = {label: reward_report.measures(out) for label, out in _outputs(report).items()}
    more = [reward_plots.figure(rewards)]
    return plots.draw(folder / FIGURES, curves, scores(report), more=more)


def rebuild(folder: Path) -> Path:
    """Write the report of the run in ``folder`` again, from what its last report was made from."""
    facts = Report.model_validate_json((folder / FACTS).read_text())
    return write_report(folder, _with_paths(facts, lambda path: folder / path))


def _with_paths(report: Report, change: Callable[[Path], Path]) -> Report:
    """In the run's folder paths are relative to it, so that it can be moved with the store."""

    def moved(parts: Sequence[Any]) -> tuple[Any, ...]:
        return tuple(part.model_copy(update={"output": change(part.output)}) for part in parts)

    return report.model_copy(
        update={
            "stages": moved(report.stages),
            "trainings": moved(report.trainings),
            "evaluations": moved(report.evaluations),
            "exports": moved(report.exports),
            "prepared": report.prepared and change(report.prepared),
            "tokenised": report.tokenised and change(report.tokenised),
        }
    )


def scores(report: Report) -> dict[str, dict[str, Any]]:
    """The measures of each evaluated model, by its name."""
    return {
        each.label: json.loads((each.output / "metrics.json").read_text())
        for each in report.evaluations
    }


def _outputs(report: Report) -> dict[str, Path]:
    return {training.label: training.output for training in report.trainings}


def read_rows(output: Path) -> list[dict[str, Any]]:
    """The rows of ``OUTPUT/metrics.jsonl`` by step; of a step that was done twice, the later."""
    by_step = {row["step"]: row for row in lines.rows(output / "metrics.jsonl")}
    return [by_step[step] for step in sorted(by_step)]


def markdown(report: Report, *, folder: Path, figures: Sequence[tuple[str, str]]) -> str:
    """The report's text; paths in it are relative to ``folder``."""
    head = "\n\n".join([f"# {cell(report.name)}", *_stages(report, folder)])
    return f"{head}\n\n{results(report, folder=folder, figures=figures)}"


def results(report: Report, *, folder: Path, figures: Sequence[tuple[str, str]]) -> str:
    """What stands below the table of stages."""
    parts = (
        _choices(report),
        _scores(report),
        reward_report.reward_models(_outputs(report)),
        export_report.exports({each.label: each.output for each in report.exports}),
        _figures(report, figures),
        _samples(report),
        reward_report.answers(_outputs(report)),
        _data(report, folder),
        _provenance(report),
    )
    return "\n\n".join(part for section in parts for part in section) + "\n"


def _stages(report: Report, folder: Path) -> list[str]:
    rows = [
        [
            row.label,
            row.status,
            _seconds(row),
            f"{row.backend} x {row.world_size}" if row.backend else "",
            ", ".join(f"{name} {value:.4g}" for name, value in row.metrics.items()),
            link(row.output.name, os.path.relpath(row.output, folder)),
        ]
        for row in report.stages
    ]
    head = ["stage", "status", "time", "backend x ranks", "figures", "output"]
    return ["## Stages", table(head, rows)] if rows else []


def _choices(report: Report) -> list[str]:
    rows = [
        [each.label, cell(each.plan), cell(each.why), cell("\n".join(each.moves))]
        for each in report.choices
    ]
    head = ["stage", "plan", "because", "moves when memory ran out"]
    return ["## Backends that were chosen", table(head, rows)] if rows else []


def _scores(report: Report) -> list[str]:
    if not report.evaluations:
        return []
    found = scores(report)
    parts = [
        "## Scores",
        f"On held-out rows unless a line says otherwise, with {_confidence(found)} confidence "
        "intervals: Wilson's for proportions, bootstrapped over rows for the rest. "
        "A preference counts as right when the model gives the chosen answer the higher "
        "log-probability, and its margin is the difference.",
        _score_table((*SCORES, *_of_answers("reward", found)), found),
    ]
    compared = {each.label: each for each in report.evaluations if each.baseline}
    changed = {label: found[label] for label in compared}
    lines = (*CHANGES, *_of_answers("win_rate", changed))
    if not any(score.key in measures for score in lines for measures in changed.values()):
        return parts
    titles = {label: f"{label} against {each.baseline}" for label, each in compared.items()}
    return [
        *parts,
        "### Changes, row by row",
        "Paired differences: an interval without zero is a change that the held-out rows can "
        "tell. Rewards are beta x (log p - log p of the model compared with), so that a model "
        "equal to it has margin 0 and DPO loss ln 2 = 0.693. An answer wins when it earns more "
        "reward than the compared model's to the same prompt; the divergence is that of answers "
        "sampled at temperature 1.",
        _score_table(lines, {titles[label]: measures for label, measures in changed.items()}),
    ]


def _of_answers(measure: str, found: Mapping[str, Mapping[str, Any]]) -> list[Score]:
    """A line for each reward of the answers: its mean, or how often it beats the compared model's.

    The sum comes first where there are several.
    """
    whole = f"answers/{measure}"
    keys = dict.fromkeys(key for measures in found.values() for key in measures)
    named = [key for key in keys if key.startswith(f"{whole}/")]
    first = [whole] if whole in keys and len(named) != 1 else []
    form = PERCENT if measure == "win_rate" else {}
    what = "answers that win by {}, %" if measure == "win_rate" else "reward of answers, {}"
    return [
        Score(
            what.format(key.removeprefix(whole).strip("/").replace("_", " ") or "sum"), key, **form
        )
        for key in (*first, *named)
    ]


def _confidence(found: Mapping[str, Mapping[str, Any]]) -> str:
    levels = {measures["confidence"] for measures in found.values()}
    return " or ".join(f"{100 * level:g} %" for level in sorted(levels))


def _score_table(lines: Iterable[Score], found: Mapping[str, Mapping[str, Any]]) -> str:
    rows = [
        [cell(line.name.replace("  ", "… ")), *map(line.text, found.values())] for line in lines
    ]
    return table(["", *map(cell, found)], [row for row in rows if any(row[1:])])


def _figures(report: Report, figures: Sequence[tuple[str, str]]) -> list[str]:
    images = [f"![{caption}]({FIGURES}/{file})" for file, caption in figures]
    head = "## Curves" if report.trainings else "## Figures"
    return [head, *images] if images else []


def _samples(report: Report) -> list[str]:
    """A few prompts, evenly spaced over the held-out ones, with every model's answer."""
    found = {each.label: _by_index(each.output / "samples.jsonl") for each in report.evaluations}
    found = {label: samples for label, samples in found.items() if samples}
    shared = sorted(set.intersection(*(set(each) for each in found.values()))) if found else []
    chosen = shared[:: -(-len(shared) // NUM_SAMPLES)] if shared else []
    parts = []
    for index in chosen:
        one = next(iter(found.values()))[index]
        rows = [["reference", cell(one["reference"]), ""]]
        rows += [
            [label, cell(samples[index]["generated"]), "✓" if samples[index]["match"] else "✗"]
            for label, samples in found.items()
        ]
        parts += [fenced(one["prompt"]), table(["", "answer", "match"], rows)]
    title = "Held-out prompts, evenly spaced and not picked, with every model's greedy answer."
    return ["## Samples", title, *parts] if parts else []


def _by_index(path: Path) -> dict[int, dict[str, Any]]:
    if not path.exists():
        return {}
    return {sample["index"]: sample for sample in lines.rows(path)}


def _data(report: Report, folder: Path) -> list[str]:
    parts = []
    if report.prepared is not None:
        parts += _prepared(report.prepared, folder)
    if report.tokenised is not None:
        parts += _tokenised(report.tokenised)
    return ["## Data", *parts] if parts else []


def _prepared(output: Path, folder: Path) -> list[str]:
    counts = json.loads((output / "report.json").read_text(encoding="utf-8"))
    rows = {kind: facts["totals"] for kind, facts in counts.items()}
    rules = [
        [kind, cell(name), cell(rule), f"{number}"]
        for kind, facts in counts.items()
        for name, source in facts["sources"].items()
        for rule, number in source["rejected"].items()
    ]
    quarantine = os.path.relpath(output / "quarantine.jsonl", folder)
    where = link("quarantine.jsonl", quarantine)
    told = f"Rows kept out, each named with file and line in {where}:"
    rejected = [told, table(["", "file", "rule", "rows"], rules)] if rules else []
    return [_count_table(rows), *rejected]


def _tokenised(output: Path) -> list[str]:
    rows: dict[str, dict[str, Any]] = {}
    for key, value in json.loads((output / "metrics.json").read_text()).items():
        kind, side, name = key.split("/", 2)
        rows.setdefault(f"{kind}, {side}", {})[name.replace("/", ": ")] = value
    return ["In tokens:", _count_table(rows)]


def _count_table(rows: Mapping[str, Mapping[str, Any]]) -> str:
    names = list(dict.fromkeys(name for facts in rows.values() for name in facts))
    head = ["", *(name.replace("_", " ") for name in names)]
    body = [
        [label, *(f"{facts[name]:,}" if name in facts else "" for name in names)]
        for label, facts in rows.items()
    ]
    return table(head, body, numbers=True)


def _provenance(report: Report) -> list[str]:
    rows = [[name, cell(version)] for name, version in report.versions.items()]
    return ["## Made with", table(["", "version"], rows)] if rows else []


def _seconds(row: StageRow) -> str:
    if row.status == "reused":
        return ""
    return f"{row.seconds:.1f} s" if row.seconds < 60 else duration(row.seconds)


def terminal_table(report: Report) -> str:
    """The stages and the main scores as aligned text, no line longer than 100 characters."""
    parts = [_terminal_stages(report)] if report.stages else []
    found = scores(report)
    lines = [next(s for s in (*SCORES, *CHANGES) if s.key == key) for key in BRIEF]
    lines += [*_of_answers("reward", found), *_of_answers("win_rate", found)]
    while found:
        number, block = _scores_that_fit(lines, found)
        parts.append(block)
        found = dict(islice(found.items(), number, None))
    return "\n\n".join(parts)


def _scores_that_fit(
    lines: Sequence[Score], found: Mapping[str, Mapping[str, Any]]
) -> tuple[int, str]:
    """(models, their scores as aligned text): three, or fewer where lines become too long."""
    blocks = {
        number: _terminal_scores(lines, dict(islice(found.items(), number)))
        for number in range(1, min(3, len(found)) + 1)
    }
    fitting = [n for n, block in blocks.items() if max(map(len, block.split("\n"))) <= WIDTH]
    number = max(fitting, default=1)
    return number, blocks[number]


def _terminal_scores(lines: Sequence[Score], found: Mapping[str, Mapping[str, Any]]) -> str:
    rows = [[line.name, *map(line.text, found.values())] for line in lines]
    return aligned(["score", *found], [row for row in rows if any(row[1:])])


def _terminal_stages(report: Report) -> str:
    head = ["stage", "status", "time", "backend", "output"]
    rows = [
        [
            row.label,
            row.status,
            _seconds(row),
            f"{row.backend} x{row.world_size}" if row.backend else "",
            str(row.output),
        ]
        for row in report.stages
    ]
    used = sum(max(len(row[i]) for row in (head, *rows)) + 2 for i in range(4))
    return aligned(head, [[*row[:4], _from_the_left(row[4], WIDTH - used)] for row in rows])


def _from_the_left(path: str, room: int) -> str:
    """``path`` without its beginning if it is too long: what tells outputs apart is the end."""
    return path if len(path) <= room else f"…{path[-max(room - 1, 1) :]}"


def aligned(head: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    """A table for a terminal: columns as wide as their widest cell."""
    columns = zip_longest(head, *rows, fillvalue="")
    widths = [max(map(len, column)) for column in columns]
    rule = ["-" * width for width in widths]
    return "\n".join(
        "  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)).rstrip()
        for row in (head, rule, *rows)
    )


if __name__ == "__main__":
    print(rebuild(Path(sys.argv[1])))
