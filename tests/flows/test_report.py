"""The report of a made-up run: its text, its figures, and its form for the terminal."""

import json
import math
import re
import shutil
import subprocess
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any
from urllib.parse import unquote

import pytest

from flows import svg
from flows.plots import running_mean
from flows.report import (
    Evaluation,
    Export,
    Report,
    StageRow,
    Training,
    read_rows,
    rebuild,
    terminal_table,
    write_report,
)

ROOT = Path(__file__).parents[2]
PNG = b"\x89PNG\r\n\x1a\n"


def write_lines(path: Path, rows: list[dict[str, Any]]) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))


def training(out: Path, *, steps: int, dpo: bool) -> Path:
    rows = []
    for step in range(1, steps + 1):
        row = {"step": step, "total_steps": steps, "time": 1e9 + step, "loss": 2 / step}
        row |= {"learning_rate": 1e-3 / step, "grad_norm": 1.0, "tokens_per_second": 500.0}
        row |= {"memory_bytes": 2**30}
        if dpo:
            row |= {"rewards/chosen": 0.1, "rewards/rejected": -0.1 * step}
            row |= {"rewards/margins": 0.1 + 0.1 * step, "rewards/accuracies": 0.5}
        rows.append(row)
    write_lines(out / "metrics.jsonl", rows)
    return out


def estimate(value: float) -> dict[str, float]:
    return {"value": value, "low": value - 0.05, "high": value + 0.05, "n": 20}


def evaluation(out: Path, answers: Mapping[int, str], **measures: float) -> Path:
    named = {name.replace("__", "/"): estimate(value) for name, value in measures.items()}
    write_lines(out / "samples.jsonl", [sample(i, text) for i, text in answers.items()])
    (out / "metrics.json").write_text(json.dumps({"confidence": 0.95} | named))
    return out


def sample(index: int, generated: str) -> dict[str, Any]:
    facts = {"prompt": f"question {index}", "reference": f"{index}", "generated": generated}
    return {"index": index, **facts, "match": generated == f"{index}", "stopped": True}


@pytest.fixture
def report(tmp_path: Path) -> Report:
    store = tmp_path / "store"
    sft = training(store / "sft" / "aaaa", steps=40, dpo=False)
    dpo = training(store / "dpo" / "bbbb", steps=5, dpo=True)
    wrong, right = dict.fromkeys(range(9), "no idea"), {i: f"{i}" for i in range(9)}
    base = evaluation(store / "evaluate" / "base", wrong, conversations__loss=4.0)
    tuned = evaluation(
        store / "evaluate" / "sft",
        right,
        conversations__loss=1.5,
        conversations__exact_match=0.6,
        conversations__loss_change=-2.5,
        preferences__test__accuracy=0.5,
    )
    aligned = evaluation(
        store / "evaluate" / "dpo",
        {**right, 8: "a | b\n*c* `d` <e>"},
        conversations__loss=1.55,
        preferences__test__accuracy=0.9,
        preferences__test__dpo_loss=0.4,
    )
    return Report(
        name="small",
        stages=(
            StageRow(
                label="sft", status="ran", seconds=75, output=sft, backend="fsdp", world_size=2
            ),
            StageRow(label="dpo", status="reused", output=dpo, metrics={"loss": 0.4}),
        ),
        trainings=(Training(label="SFT", output=sft), Training(label="DPO", output=dpo)),
        evaluations=(
            Evaluation(label="base", output=base),
            Evaluation(label="SFT", output=tuned, baseline="base"),
            Evaluation(label="DPO", output=aligned, baseline="SFT"),
        ),
        versions={"torch": "2.13.0"},
    )


@pytest.fixture
def run(tmp_path: Path) -> Path:
    return tmp_path / "runs" / "small"


def row(text: str, name: str) -> list[str]:
    """The cells of the Markdown table's line that starts with ``name``."""
    line = next(line for line in text.splitlines() if line.startswith(f"| {name} |"))
    return [cell.strip() for cell in line.strip("|").split("|")][1:]


def test_the_tables_hold_stages_and_scores(report: Report, run: Path) -> None:
    text = write_report(run, report).read_text()
    assert row(text, "sft")[:3] == ["ran", "1 min 15 s", "fsdp x 2"]
    assert row(text, "dpo")[:4] == ["reused", "", "", "loss 0.4"]
    losses = ["4.000 [3.950, 4.050]", "1.500 [1.450, 1.550]", "1.550 [1.500, 1.600]"]
    assert row(text, "held-out loss, nats/token") == losses
    assert row(text, "exact match, %") == ["", "60.0 [55.0, 65.0]", ""]
    assert "SFT against base | DPO against SFT" in text and "95 %" in text
    assert row(text, "DPO loss (ln 2 = 0.693: none)") == ["", "0.400 [0.350, 0.450]"]
    assert row(text, "torch") == ["2.13.0"]
    assert "perplexity" not in text, "a line that nothing was measured for is left out"


def test_exports_say_what_they_were_made_of_and_how_true_they_are(run: Path) -> None:
    made = {"parameters": 1234567, "bytes": 2_500_000, "dtypes": {"bfloat16": 1234567}}
    adapter = {"layout": "adapter", "merged_into": "float32", **made}
    adapter["parity"] = {"logit_error": 0.0034, "tolerance": 0.05, "change_kept": 0.998}
    found = {"convert sft": adapter, "convert dpo": {"layout": "zero", **made}}
    for label, metrics in found.items():
        (run / label).mkdir(parents=True)
        (run / label / "metrics.json").write_text(json.dumps(metrics))
    exports = tuple(Export(label=label, output=run / label) for label in found)
    text = write_report(run, Report(name="small", stages=(), exports=exports)).read_text()
    assert row(text, "convert sft") == [
        "adapter, merged into float32 weights", "1,234,567", "bfloat16", "2 MB",
        "0.0034 (at most 0.05)", "99.8",
    ]  # fmt: skip
    assert row(text, "convert dpo") == ["zero", "1,234,567", "bfloat16", "2 MB", "", ""]
    assert "## Scores" not in text and "## Figures" not in text
    assert rebuild(run).read_text() == text


def test_a_figure_is_drawn_again_only_when_it_shows_something_new(
    report: Report, run: Path
) -> None:
    def times() -> dict[str, int]:
        return {path.name: path.stat().st_mtime_ns for path in (run / "figures").iterdir()}

    write_report(run, report)
    before = times()
    write_report(run, report)
    assert times() == before
    metrics = report.trainings[0].output / "metrics.jsonl"
    rows = [json.loads(row) for row in metrics.read_text().splitlines()]
    rows[-1]["loss"] += 1
    metrics.write_text("".join(f"{json.dumps(row)}\n" for row in rows))
    write_report(run, report)
    after = times()
    assert after["loss.png"] != before["loss.png"] and after["scores.png"] == before["scores.png"]


def test_every_link_leads_to_a_file_and_every_figure_is_a_picture(
    report: Report, run: Path
) -> None:
    text = write_report(run, report).read_text()
    links = re.findall(r"\]\(([^)]+)\)", text)
    assert all((run / link).exists() for link in links)
    figures = {link for link in links if link.endswith(".png")}
    names = ("scores", "loss", "preferences", "learning_rate", "gradient_norm")
    assert figures == {f"figures/{n}.png" for n in (*names, "throughput", "memory")}
    assert all((run / figure).read_bytes().startswith(PNG) for figure in figures)
    assert not list(run.rglob("*.partial"))


def test_a_figure_with_nothing_to_show_is_left_out(report: Report, run: Path) -> None:
    write_report(run, report)
    plain = report.model_copy(update={"trainings": report.trainings[:1], "evaluations": ()})
    text = write_report(run, plain).read_text()
    assert "preferences.png" not in text and "scores.png" not in text and "loss.png" in text
    assert not (run / "figures" / "preferences.png").exists(), "nor does an old one stay"
    assert "## Scores" not in text and "## Samples" not in text


def test_the_same_prompts_are_answered_side_by_side(report: Report, run: Path) -> None:
    text = write_report(run, report).read_text()
    assert re.findall(r"question (\d)", text) == ["0", "3", "6"], "evenly spaced"
    assert text.count("| reference |") == 3 and text.count("no idea | ✗ |") == 3
    assert "| SFT | 3 | ✓ |" in text


def test_an_answer_cannot_break_the_table(report: Report, run: Path) -> None:
    answers = {8: "a | b\n*c* `d` <e>"}
    broken = evaluation(run.parent / "broken", answers, conversations__loss=1.0)
    (sample_path,) = broken.glob("samples.jsonl")
    one = json.loads(sample_path.read_text()) | {"prompt": "```\ncode\n```"}
    sample_path.write_text(json.dumps(one))
    alone = report.model_copy(update={"evaluations": (Evaluation(label="x", output=broken),)})
    text = write_report(run, alone).read_text()
    assert r"| x | a \| b<br>\*c\* \`d\` \<e\> | ✗ |" in text
    assert "````text\n```\ncode\n```\n````" in text


def test_a_sample_ends_no_line_and_moves_no_cursor(report: Report, run: Path) -> None:
    hostile = "one\r\ntwo\rthree\x1b[2Jfour\u202efive"
    broken = evaluation(run.parent / "broken", {8: hostile}, conversations__loss=1.0)
    asked = f"{hostile}\n" + 50_000 * "x" + "the question"
    write_lines(broken / "samples.jsonl", [sample(8, hostile) | {"prompt": asked}])
    alone = report.model_copy(update={"evaluations": (Evaluation(label="x", output=broken),)})
    text = write_report(run, alone).read_bytes().decode()
    assert not re.search("[\r\x1b\u202e]", text)
    assert r"| x | one<br>two<br>three\\x1b\[2Jfour\\u202efive | ✗ |" in text
    prompt = text.split("```text\n")[1].split("\n```")[0]
    assert prompt.startswith("one\ntwo") and prompt.endswith("the question")
    assert len(prompt) < 4200 and "characters …" in prompt


def test_a_link_survives_spaces_and_brackets(report: Report, tmp_path: Path) -> None:
    odd = tmp_path / "my (new) store" / "sft" / "aaaa"
    shutil.copytree(report.stages[0].output, odd)
    moved = report.stages[0].model_copy(update={"output": odd})
    text = write_report(
        tmp_path / "run", report.model_copy(update={"stages": (moved,)})
    ).read_text()
    (link,) = re.findall(r"\[aaaa\]\(([^)\s]+)\)", text)
    assert (tmp_path / "run" / unquote(link)).is_dir()


@pytest.mark.parametrize("value", [math.nan, math.inf, -math.inf, None, 1e308])
def test_values_that_no_axis_can_hold_cost_their_points_alone(
    report: Report, run: Path, value: Any
) -> None:
    path = report.trainings[0].output / "metrics.jsonl"
    rows = read_rows(report.trainings[0].output)
    keys = ("grad_norm", "learning_rate", "tokens_per_second", "memory_bytes", "loss")
    write_lines(path, [rows[0] | dict.fromkeys(keys, value), *rows[1:]])
    text = write_report(run, report).read_text()
    assert all(f"figures/{name}.png" in text for name in ("loss", "learning_rate", "gradient_norm"))
    write_lines(path, [{"step": 1} | dict.fromkeys(keys, value)])
    one = report.model_copy(update={"trainings": report.trainings[:1]})
    assert "loss.png" not in write_report(run, one).read_text()
    picture = svg.draw("loss", {"loss": [(1, 2.0), (2, value), (3, 1.0)]})
    assert "nan" not in picture and "inf" not in picture and "polyline" in picture


def test_a_row_that_is_being_written_is_left_out(tmp_path: Path) -> None:
    write_lines(tmp_path / "metrics.jsonl", [{"step": 1, "loss": 3.0}])
    with (tmp_path / "metrics.jsonl").open("a") as file:
        file.write('{"step": 2, "lo')
    assert [row["step"] for row in read_rows(tmp_path)] == [1]


def test_one_row_has_no_interval(report: Report, run: Path) -> None:
    """Resamples of one row are all alike: an interval without zero would be news of nothing."""
    only = {"value": -0.2, "low": -0.2, "high": -0.2, "n": 1}
    path = report.evaluations[1].output / "metrics.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | {"conversations/loss_change": only}))
    assert "| -0.200 (one row) |" in write_report(run, report).read_text()


def test_the_report_is_rebuilt_from_the_run_folder_alone(
    report: Report, run: Path, tmp_path: Path
) -> None:
    before = write_report(run, report).read_bytes()
    figure = (run / "figures" / "loss.png").read_bytes()
    shutil.rmtree(run / "figures")
    (run / "report.md").unlink()
    command = [sys.executable, "-X", "importtime", "-m", "flows.report", str(run)]
    told = subprocess.run(command, check=True, cwd=ROOT, capture_output=True, text=True)
    imported = {line.rpartition("|")[2].strip() for line in told.stderr.splitlines()}
    assert "matplotlib" in imported and "torch" not in imported
    assert told.stdout.strip() == str(run / "report.md")
    assert (run / "report.md").read_bytes() == before
    assert (run / "figures" / "loss.png").read_bytes() == figure
    moved = shutil.move(run.parents[1], tmp_path.parent / f"{tmp_path.name}-moved")
    assert rebuild(Path(moved) / "runs" / "small").read_bytes() == before


def test_data_counts_and_quarantine(report: Report, run: Path, tmp_path: Path) -> None:
    prepared, tokenised = tmp_path / "prepared", tmp_path / "tokenised"
    totals = {"read": 1234, "quarantined": 2, "train": 1000, "test": 232}
    source = {"shape": "messages", "read": 1234, "rejected": {"empty_message": 2}}
    prepared.mkdir()
    counts = {"conversations": {"totals": totals, "sources": {"a.jsonl": source}}}
    (prepared / "report.json").write_text(json.dumps(counts))
    (prepared / "quarantine.jsonl").write_text("")
    tokenised.mkdir()
    measured = {"conversations/train/rows": 990, "conversations/train/dropped/too_long": 10}
    (tokenised / "metrics.json").write_text(json.dumps(measured))
    told = report.model_copy(update={"prepared": prepared, "tokenised": tokenised})
    text = write_report(run, told).read_text()
    assert row(text, "conversations") == ["1,234", "2", "1,000", "232"]
    assert "| conversations | a.jsonl | empty\\_message | 2 |" in text
    assert "|  | rows | dropped: too long |" in text
    assert row(text, "conversations, train") == ["990", "10"]


def test_a_step_that_was_done_twice_counts_as_done_later(tmp_path: Path) -> None:
    rows = [{"step": 1, "loss": 3.0}, {"step": 2, "loss": 2.0}, {"step": 2, "loss": 2.5}]
    write_lines(tmp_path / "metrics.jsonl", rows)
    assert [row["loss"] for row in read_rows(tmp_path)] == [3.0, 2.5]


def test_the_terminal_shows_stages_and_scores(report: Report) -> None:
    deep = Path("/very/deep") / ("directory/" * 20) / "sft" / "0123456789abcdef"
    stages = (report.stages[0].model_copy(update={"output": deep}), *report.stages[1:])
    text = terminal_table(report.model_copy(update={"stages": stages}))
    assert max(map(len, text.splitlines())) == 100
    stage, scores = text.split("\n\n")
    assert stage.splitlines()[2].startswith("sft    ran     1 min 15 s  fsdp x2  …")
    assert stage.splitlines()[2].endswith("/sft/0123456789abcdef")
    head, _, *lines = scores.splitlines()
    assert head.split() == ["score", "base", "SFT", "DPO"]
    loss = next(line for line in lines if line.startswith("held-out loss"))
    assert loss.index("1.500 [1.450") == head.index("SFT"), "aligned"
    assert any(re.match(r"DPO loss .*0\.400 \[0\.350, 0\.450\]$", line) for line in lines)


def test_many_models_are_shown_in_blocks_of_three(report: Report) -> None:
    models = tuple(each.model_copy(update={"label": f"{each.label} {i}"})
                   for i in range(2) for each in report.evaluations)  # fmt: skip
    text = terminal_table(report.model_copy(update={"evaluations": models}))
    assert max(map(len, text.splitlines())) <= 100
    assert [line.split("  ")[0] for line in text.splitlines()].count("score") == 2


def test_wide_scores_are_shown_in_blocks_of_fewer_models(report: Report) -> None:
    wide = {"value": -1234.5, "low": -1334.5, "high": -1134.5, "n": 20}
    for each in report.evaluations:
        path = each.output / "metrics.json"
        found = json.loads(path.read_text()) | {"preferences/test/margin": wide}
        path.write_text(json.dumps(found))
    text = terminal_table(report)
    assert max(map(len, text.splitlines())) <= 100
    assert text.count("-1234.50 [-1334.50, -1134.50]") == 3


def test_running_mean() -> None:
    assert running_mean([1.0, 2.0, 6.0, 1.0]) == [1.0, 3.0, 3.0, 1.0]
    many = [math.sin(i) for i in range(200)]
    assert running_mean(many)[100] == pytest.approx(sum(many[95:106]) / 11)


def test_importing_loads_neither_torch_nor_matplotlib() -> None:
    code = "import sys, flows.report; sys.exit(bool({'torch', 'matplotlib'} & sys.modules.keys()))"
    assert subprocess.run([sys.executable, "-c", code], check=False, cwd=ROOT).returncode == 0
