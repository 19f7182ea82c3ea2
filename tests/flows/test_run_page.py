"""The page of a run while it goes on, and its pictures."""

import json
import time
import xml.etree.ElementTree as ElementTree
from dataclasses import replace
from datetime import date
from pathlib import Path

from configs import RECIPES, load
from flows import run_names, run_page, svg
from flows.run_page import Board
from flows.sft_then_dpo import SFTThenDPO
from flows.steps import Artifact
from tests.flows.test_plan_page import plans_of


def write_rows(out: Path, number: int) -> None:
    out.mkdir(parents=True)
    rows = [
        {"step": step, "total_steps": 2 * number, "time": time.time() - number + step,
         "loss": 5.0 / step, "grad_norm": 1.0, "tokens_per_second": 900.0, "memory_bytes": 2e9,
         "rewards/chosen": 0.1 * step, "rewards/rejected": -0.1 * step,
         "rewards/margins": 0.2 * step}
        for step in range(1, number + 1)
    ]  # fmt: skip
    (out / "metrics.jsonl").write_text("".join(f"{json.dumps(row)}\n" for row in rows))


def test_a_page_shows_bars_steps_and_curves(tmp_path: Path) -> None:
    _, plans = plans_of(tmp_path / "store")
    (dpo,) = (each for each in plans if each.label == "dpo")
    write_rows(dpo.out, 40)
    first = plans[0]
    done = Artifact(first.label, "fetch", first.out, first.identity.fingerprint, "reused")
    board = Board("tiny", tmp_path / "runs/tiny", tuple(plans), {first.label: done}, current="dpo")
    page = run_page.page(board)
    plain = page.replace("\N{NO-BREAK SPACE}", " ")
    assert "| fetch model | reused | ████████ 100 % |" in plain
    assert "████░░░░ 50 % | 40 of 80, loss 0.1250" in plain
    for title in ("loss", "rewards", "gradient norm", "tokens a second", "memory of rank 0, GB"):
        assert f"![dpo: {title}](data:image/svg+xml;base64," in page
    ended = run_page.page(replace(board, word="dpo failed (out of memory)"))
    assert "**dpo failed (out of memory)**" in ended


def test_a_long_run_stays_within_what_prefect_keeps(tmp_path: Path) -> None:
    _, plans = plans_of(tmp_path / "store")
    for each in plans:
        if each.is_training:
            write_rows(each.out, 20_000)
    page = run_page.page(Board("tiny", tmp_path, tuple(plans), {}))
    assert page.count("data:image/svg+xml") == 10
    assert len(page.encode()) < 120_000


def test_a_picture_is_xml_and_survives_odd_values() -> None:
    curves = {
        "a & <b>": [(1.0, 1.0), (2.0, float("nan")), (3.0, 2.0)],
        "one": [(1.0, 4.0)],
        "none": [],
    }
    for each in (curves, {"flat": [(1.0, 0.0), (2.0, 0.0)]}, {"none": []}):
        root = ElementTree.fromstring(svg.draw("title <1>", each))
        assert root.tag == "{http://www.w3.org/2000/svg}svg"
    assert "nan" not in svg.draw("", curves)


def test_names_are_readable() -> None:
    today = date(2026, 11, 29)
    tiny = load(SFTThenDPO, RECIPES / "tiny.yaml")
    assert run_names.name(tiny, today) == "new-model · new-task · dpo · 2026-11-29"
    qwen = load(SFTThenDPO, RECIPES / "qwen3_8b_lora_1x24gb.yaml")
    assert run_names.name(qwen, today) == "qwen3-8b · alpaca-cleaned · dpo · 2026-11-29"
    assert run_names.GENERATED.fullmatch("Brave-Otter")
    assert not run_names.GENERATED.fullmatch("my run 3")
