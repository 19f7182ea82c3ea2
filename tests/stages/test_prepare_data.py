"""prepare_data on real files: shapes, layouts, rules, splits, caps and counts."""

import gzip
import json
import re
import subprocess
import sys
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from stages.base import Context, StageError
from stages.prepare_data import PrepareData, prepare_data

REAL = Path(__file__).parents[2].parent / "shared" / "data"
needs_real = pytest.mark.skipif(not REAL.is_dir(), reason="the real data files are not here")

LENIENT = PrepareData(drop_budget=1.0, test_fraction=0.5)


def user(content: str) -> dict[str, str]:
    return {"role": "user", "content": content}


def assistant(content: str) -> dict[str, str]:
    return {"role": "assistant", "content": content}


def system(content: str) -> dict[str, str]:
    return {"role": "system", "content": content}


def good(number: int, *, start: int = 0) -> list[dict[str, Any]]:
    return [
        {"messages": [user(f"question {n}"), assistant(f"answer {n}")]}
        for n in range(start, start + number)
    ]


def pairs(number: int) -> list[dict[str, Any]]:
    return [
        {"prompt": f"question {n}", "chosen": f"yes {n}", "rejected": f"no {n}"}
        for n in range(number)
    ]


def source(folder: Path, files: Mapping[str, bytes | str | Iterable[Any]]) -> Path:
    """An input directory: rows are written as JSON lines, bytes and text as they are."""
    for name, content in files.items():
        path = folder / "data" / name
        path.parent.mkdir(parents=True, exist_ok=True)
        if isinstance(content, str):
            content = content.encode()
        if not isinstance(content, bytes):
            content = "".join(json.dumps(row) + "\n" for row in content).encode()
        path.write_bytes(content)
    return folder


def read(path: Path) -> list[Any]:
    return [json.loads(line) for line in path.read_text(encoding="utf-8").splitlines()]


def all_rows(out: Path, kind: str = "conversations") -> list[Any]:
    return read(out / kind / "train.jsonl") + read(out / kind / "test.jsonl")


def run(
    tmp_path: Path, rows: Any, config: PrepareData = LENIENT, *, name: str = "rows.jsonl"
) -> Path:
    """prepare_data on one file of conversations; the output directory."""
    folder = source(tmp_path / "in", {name: rows})
    prepare_data(config, Context(tmp_path / "out"), conversations=folder)
    return tmp_path / "out"


# --- shapes


@pytest.mark.parametrize(
    ("raw", "turns"),
    [
        pytest.param(
            {"messages": [system("s"), user("ask"), assistant("a")], "id": 7},
            [system("s"), user("ask"), assistant("a")],
            id="messages",
        ),
        pytest.param(
            {
                "conversations": [{"from": "human", "value": "ask"}, {"from": "gpt", "value": "a"}],
                "system": "s",
                "tools": "",
            },
            [system("s"), user("ask"), assistant("a")],
            id="sharegpt",
        ),
        pytest.param(
            {"conversations": [user("ask"), assistant("a")]},
            [user("ask"), assistant("a")],
            id="sharegpt column with role and content",
        ),
        pytest.param(
            {"instruction": "ask", "input": "", "output": "o"},
            [user("ask"), assistant("o")],
            id="alpaca",
        ),
        pytest.param(
            {
                "instruction": "ask",
                "input": "x",
                "output": "o",
                "system": "s",
                "history": [["ask1", "a1"], ["q2", "a2"]],
            },
            [
                system("s"),
                user("ask1"),
                assistant("a1"),
                user("q2"),
                assistant("a2"),
                user("ask\nx"),
                assistant("o"),
            ],
            id="alpaca with all columns",
        ),
        pytest.param(
            {"prompt": "ask", "completion": "c"},
            [user("ask"), assistant("c")],
            id="prompt and completion as texts",
        ),
        pytest.param(
            {"prompt": [system("s"), user("ask")], "completion": [assistant("c")]},
            [system("s"), user("ask"), assistant("c")],
            id="prompt and completion as turns",
        ),
        pytest.param(
            {"question": "ask", "answer": "a #### 4"},
            [user("ask"), assistant("a #### 4")],
            id="question and answer",
        ),
    ],
)
def test_a_conversation_shape_becomes_messages(tmp_path: Path, raw: Any, turns: Any) -> None:
    rows = all_rows(run(tmp_path, variants(raw)))
    assert {"messages": turns} in rows and len(rows) == 21


def variants(raw: Any) -> list[Any]:
    """``raw`` and twenty rows that ask something else."""
    return [json.loads(json.dumps(raw).replace("ask", f"ask{n}")) for n in ("", *range(20))]


PAIR = {"prompt": [user("ask")], "chosen": [assistant("good")], "rejected": [assistant("bad")]}


@pytest.mark.parametrize(
    ("raw", "pair"),
    [
        pytest.param({"prompt": "ask", "chosen": "good", "rejected": "bad"}, PAIR, id="texts"),
        pytest.param(PAIR, PAIR, id="turns"),
        pytest.param(
            {"prompt": [system("s"), user("ask")], "chosen": "good", "rejected": assistant("bad")},
            {**PAIR, "prompt": [system("s"), user("ask")]},
            id="mixed",
        ),
        pytest.param(
            {
                "chosen": [user("ask"), assistant("good")],
                "rejected": [user("ask"), assistant("bad")],
            },
            PAIR,
            id="implicit",
        ),
        pytest.param(
            {
                "prompt": "ask",
                "chosen": [user("ask"), assistant("good")],
                "rejected": [user("ask"), assistant("bad")],
                "messages": [user("ask"), assistant("good")],
                "score_chosen": 8.5,
            },
            PAIR,
            id="whole conversations beside the prompt",
        ),
        pytest.param(
            {
                "conversations": [
                    {"from": "system", "value": "s"},
                    {"from": "human", "value": "ask0"},
                    {"from": "gpt", "value": "a0"},
                    {"from": "human", "value": "ask"},
                ],
                "chosen": {"from": "gpt", "value": "good"},
                "rejected": {"from": "gpt", "value": "bad"},
            },
            {**PAIR, "prompt": [system("s"), user("ask0"), assistant("a0"), user("ask")]},
            id="sharegpt",
        ),
        pytest.param(
            {"instruction": "ask", "input": "x", "chosen": "good", "rejected": "bad"},
            {**PAIR, "prompt": [user("ask\nx")]},
            id="alpaca",
        ),
    ],
)
def test_a_preference_shape_becomes_a_pair(tmp_path: Path, raw: Any, pair: Any) -> None:
    folder = source(tmp_path / "c", {"rows.jsonl": good(20)})
    preferences = source(tmp_path / "p", {"rows.jsonl": variants(raw)})
    out = tmp_path / "out"
    prepare_data(
        PrepareData(test_fraction=0.5), Context(out), conversations=folder, preferences=preferences
    )
    rows = all_rows(out, "preferences")
    assert pair in rows and len(rows) == 21


def test_a_column_missing_here_and_there_is_the_row_s_fault(tmp_path: Path) -> None:
    rows: list[Any] = [{"question": f"q{n}", "answer": "a"} for n in range(9)]
    out = run(tmp_path, [{"question": "q"}, *rows, {"question": "q", "answer": None}])
    faults = read(out / "quarantine.jsonl")
    assert [(f["rule"], f["line"]) for f in faults] == [
        ("missing_column", 1),
        ("missing_column", 11),
    ]
    assert "answer" in faults[0]["detail"]


def test_an_explicit_shape_overrides_detection(tmp_path: Path) -> None:
    rows = [{**row, "question": f"q{n}", "answer": f"a{n}"} for n, row in enumerate(good(20))]
    out = run(tmp_path, rows, LENIENT.model_copy(update={"shape": "question_answer"}))
    assert {"messages": [user("q3"), assistant("a3")]} in all_rows(out)


def test_unknown_columns_name_the_file_and_what_is_known(tmp_path: Path) -> None:
    with pytest.raises(
        StageError, match=r"rows\.jsonl: the columns prose, meta fit no known shape"
    ):
        run(tmp_path, [{"prose": "x", "meta": 1}])


def test_preferences_given_as_conversations_are_refused(tmp_path: Path) -> None:
    with pytest.raises(StageError, match="give it as the preferences input"):
        run(tmp_path, pairs(5))


# --- layouts

TEXT = "naïve \u2028 \u0085 \U0001f600 line\nbreak \r\n tab\t"
LAYOUT_ROWS = [{"messages": [user(f"{n} {TEXT}"), assistant(TEXT)]} for n in range(12)]
LINES = "\n".join(json.dumps(row, ensure_ascii=False) for row in LAYOUT_ROWS)
PRETTY = json.dumps(LAYOUT_ROWS, indent=2, ensure_ascii=False)
LAYOUTS = {
    "lines.jsonl": LINES + "\n",
    "no_last_newline.jsonl": LINES,
    "lines_in_json.json": LINES,
    "blank_lines.ndjson": LINES.replace("\n", "\n\n  \n"),
    "crlf.jsonl": LINES.replace("\n", "\r\n"),
    "bom.jsonl": "\ufeff" + LINES,
    "array.json": json.dumps(LAYOUT_ROWS),
    "pretty.json": PRETTY,
    "pretty_crlf_bom.json": "\ufeff" + PRETTY.replace("\n", "\r\n"),
    "pretty_objects.json": "\n".join(json.dumps(row, indent=1) for row in LAYOUT_ROWS),
    "lines.jsonl.gz": gzip.compress(LINES.encode()),
}


@pytest.mark.parametrize("name", LAYOUTS)
def test_every_layout_gives_the_same_rows(tmp_path: Path, name: str) -> None:
    out = run(tmp_path, LAYOUTS[name], name=name)
    assert sorted(map(json.dumps, all_rows(out))) == sorted(map(json.dumps, LAYOUT_ROWS))
    assert read(out / "quarantine.jsonl") == []


def test_folders_are_read_and_hidden_files_are_not(tmp_path: Path) -> None:
    files = {"a/x.jsonl": good(10), "b/x.jsonl": good(10, start=10), ".gitattributes": "x"}
    folder = source(tmp_path / "in", files)
    metrics = prepare_data(LENIENT, Context(tmp_path / "out"), conversations=folder)
    assert metrics["conversations/kept"] == 20
    report = json.loads((tmp_path / "out" / "report.json").read_text())
    assert list(report["conversations"]["sources"]) == ["a/x.jsonl", "b/x.jsonl"]


@pytest.mark.parametrize(
    ("name", "content", "message"),
    [
        ("rows.xlsx", b"PK", r"rows\.xlsx: cannot read this kind of file.*\.jsonl"),
        ("README.md", b"# hi", r"README\.md: cannot read this kind of file"),
        ("cut.json", b'[\n {"messages": []},\n {"mess', r"cut\.json:3:\d+: not JSON"),
        ("cut.jsonl", b'{"messages": ', r"cut\.jsonl:1:\d+: not JSON"),
        ("utf16.json", "[1]".encode("utf-16"), r"utf16\.json:1: not UTF-8 \(byte 0xff\)"),
        ("latin1.json", b'[{"messages":\n "\xe9"}]', r"latin1\.json:2: not UTF-8 \(byte 0xe9\)"),
        ("bad.jsonl.gz", b"not gzip", r"bad\.jsonl\.gz: damaged gzip"),
        ("cut.jsonl.gz", gzip.compress(b"x" * 999, mtime=0)[:-9], r"cut\.jsonl\.gz: damaged gzip"),
        ("deep.json", b"[" * 99_999, r"deep\.json:1: nested too deeply"),
        ("empty.jsonl", b"", r"no usable conversations among 0 rows of .*empty\.jsonl"),
        ("blank.json", b"\n  \n", "no usable conversations among 0 rows"),
        ("none.json", b"[]", "no usable conversations among 0 rows"),
    ],
)
def test_a_file_that_cannot_be_read_is_named(
    tmp_path: Path, name: str, content: bytes, message: str
) -> None:
    with pytest.raises(StageError, match=message):
        run(tmp_path, content, name=name)


def test_an_input_without_files_is_named(tmp_path: Path) -> None:
    with pytest.raises(StageError, match="no such directory; the conversations input must hold"):
        prepare_data(PrepareData(), Context(tmp_path / "out"), conversations=tmp_path / "in")
    (tmp_path / "in" / "data").mkdir(parents=True)
    with pytest.raises(StageError, match="holds no data files"):
        prepare_data(PrepareData(), Context(tmp_path / "out"), conversations=tmp_path / "in")


# --- rules

Q, A = user("q"), assistant("a")
CALL = {"id": "c1", "type": "function", "function": {"name": "f", "arguments": '{"x": 1}'}}
BAD = {
    b'{"messages": [': "invalid_json",
    b'{"messages": "' + b"[" * 5 + b"\xff": "invalid_utf8",
    b"[" * 99_999: "invalid_json",
    b"[1, 2]": "not_an_object",
    b'"text"': "not_an_object",
    b"{}": "missing_column",
    b'{"messages": null}': "missing_column",
    b'{"messages": "hello"}': "not_turns",
    b'{"messages": ["hello"]}': "not_turns",
    b'{"messages": [{"role": "user"}]}': "not_turns",
    b'{"messages": [{"role": "user", "content": 5}]}': "not_text",
    b'{"messages": [{"role": "user", "content": "\\ud800"}]}': "not_text",
    json.dumps({"messages": [{"role": "narrator", "content": "x"}]}).encode(): "unknown_role",
    json.dumps({"messages": [{"role": ["user"], "content": "x"}]}).encode(): "unknown_role",
    json.dumps({"messages": [Q, {**A, "tool_calls": [1]}]}).encode(): "bad_tool_call",
    json.dumps({"messages": [Q, {**A, "tool_calls": "f()"}]}).encode(): "bad_tool_call",
    json.dumps(
        {"messages": [Q, {**A, "function_call": {"name": "f", "arguments": "{"}}]}
    ).encode(): "bad_tool_call",
    json.dumps({"messages": [{**Q, "tool_calls": [CALL]}, A]}).encode(): "bad_tool_call",
    json.dumps({"messages": [Q, A], "tools": [{"parameters": {}}]}).encode(): "bad_tools",
    json.dumps({"messages": [Q, A], "tools": "f, g"}).encode(): "bad_tools",
    json.dumps({"messages": [Q, {"role": "tool", "content": "x"}, A]}).encode(): (
        "misplaced_tool_result"
    ),
    json.dumps({"messages": []}).encode(): "empty_conversation",
    json.dumps({"messages": [Q, assistant(" \n")]}).encode(): "empty_turn",
    json.dumps({"messages": [Q, system("s"), A]}).encode(): "misplaced_system",
    json.dumps({"messages": [system("s"), system("s"), Q, A]}).encode(): "misplaced_system",
    json.dumps({"messages": [Q]}).encode(): "no_assistant_turn",
    json.dumps({"messages": [system("s"), A, Q, A]}).encode(): "opens_with_assistant",
    json.dumps({"messages": [Q, A, Q]}).encode(): "ends_with_user",
}


@pytest.mark.parametrize(("line", "rule"), BAD.items(), ids=lambda v: str(v)[:50])
def test_a_bad_row_is_quarantined_under_its_rule(tmp_path: Path, line: bytes, rule: str) -> None:
    lines = [json.dumps(row).encode() for row in good(20)]
    out = run(tmp_path, b"\n".join([*lines[:4], line, *lines[4:]]))
    (fault,) = read(out / "quarantine.jsonl")
    where = (fault["kind"], fault["file"], fault["line"], fault["rule"])
    assert where == ("conversations", "rows.jsonl", 5, rule)
    assert fault["detail"] and 0 < len(fault["excerpt"]) <= 200
    assert len(all_rows(out)) == 20


BAD_PAIRS: list[tuple[dict[str, Any], str]] = [
    ({"prompt": "q", "chosen": "same", "rejected": "same "}, "chosen_equals_rejected"),
    ({"prompt": "q", "chosen": "a", "rejected": ""}, "empty_turn"),
    ({"prompt": "q", "chosen": "a"}, "missing_column"),
    ({"prompt": "q", "chosen": 1, "rejected": 2}, "not_turns"),
    ({"prompt": [], "chosen": "a", "rejected": "b"}, "opens_with_assistant"),
    ({"prompt": "q", "chosen": [], "rejected": []}, "no_assistant_turn"),
    ({"prompt": [Q, A], "chosen": "a", "rejected": "b"}, "answer_without_question"),
    ({"prompt": "q", "chosen": [A, Q, A], "rejected": "b"}, "different_prompts"),
    ({"prompt": "q", "chosen": [Q, A], "rejected": [user("r"), A]}, "different_prompts"),
    (
        {"prompt": "r", "chosen": [Q, A], "rejected": [Q, assistant("b")]},
        "different_prompts",
    ),
]


@pytest.mark.parametrize(("row", "rule"), BAD_PAIRS)
def test_a_bad_pair_is_quarantined_under_its_rule(tmp_path: Path, row: Any, rule: str) -> None:
    folder = source(tmp_path / "c", {"rows.jsonl": good(20)})
    array = json.dumps([*pairs(20), row])
    preferences = source(tmp_path / "p", {"rows.json": array})
    out = tmp_path / "out"
    prepare_data(LENIENT, Context(out), conversations=folder, preferences=preferences)
    (fault,) = read(out / "quarantine.jsonl")
    assert (fault["kind"], fault["row"], fault["rule"]) == ("preferences", 20, rule)


def test_an_implicit_pair_without_turns_is_quarantined(tmp_path: Path) -> None:
    folder = source(tmp_path / "c", {"rows.jsonl": good(20)})
    rows = [
        {"chosen": [user(f"q{n}"), A], "rejected": [user(f"q{n}"), assistant("b")]}
        for n in range(20)
    ]
    rows.append({"chosen": "Human: hi", "rejected": "Human: ho"})  # type: ignore[dict-item]
    preferences = source(tmp_path / "p", {"rows.jsonl": rows})
    out = tmp_path / "out"
    prepare_data(LENIENT, Context(out), conversations=folder, preferences=preferences)
    assert [fault["rule"] for fault in read(out / "quarantine.jsonl")] == ["not_turns"]


def test_the_drop_budget_fails_the_stage_with_rule_number_and_places(tmp_path: Path) -> None:
    bad = [{"messages": [Q]}] * 4 + [{"messages": [Q, assistant("")]}]
    with pytest.raises(StageError) as caught:
        run(tmp_path, [*good(95), *bad], PrepareData(drop_budget=0.04))
    message = str(caught.value)
    assert "5 of 100 conversations are unusable, more than drop_budget 0.04" in message
    assert "no_assistant_turn 4 (rows.jsonl:96, rows.jsonl:97, rows.jsonl:98:" in message
    assert "empty_turn 1" in message and "\n" not in message
    assert len(read(tmp_path / "out" / "quarantine.jsonl")) == 5
    assert not (tmp_path / "out" / "conversations").exists()


def test_a_drop_budget_that_is_just_met_passes(tmp_path: Path) -> None:
    rows = [*good(71), *[{"messages": [Q]}] * 29]
    assert len(all_rows(run(tmp_path, rows, PrepareData(drop_budget=0.29)))) == 71


def test_no_usable_row_fails_whatever_the_budget(tmp_path: Path) -> None:
    with pytest.raises(StageError, match=r"no usable conversations among 3 rows.*ends_with_user 3"):
        run(tmp_path, [{"messages": [Q, A, Q]}] * 3)


# --- duplicates, limits, counts


def test_duplicates_are_removed_counted_and_free(tmp_path: Path) -> None:
    files = {"a.jsonl": good(30), "b.json": json.dumps(good(30) + good(5, start=30))}
    folder = source(tmp_path / "in", files)
    metrics = prepare_data(
        PrepareData(drop_budget=0), Context(tmp_path / "out"), conversations=folder
    )
    assert metrics["conversations/duplicates"] == 30
    assert metrics["conversations/kept"] == len(all_rows(tmp_path / "out")) == 35


def test_over_long_rows_are_counted_and_free(tmp_path: Path) -> None:
    long = [{"messages": [user(f"{n}" + "x" * 95), assistant("1234")]} for n in range(8)]
    just = {"messages": [user("x" * 96), assistant("1234")]}
    folder = source(tmp_path / "in", {"a.jsonl": [*good(20), just, *long[:4], *long[4:]]})
    config = PrepareData(
        drop_budget=0, max_conversation_chars=100, max_pair_chars=100, test_fraction=0.5
    )
    preferences = source(
        tmp_path / "p",
        {"p.jsonl": [*pairs(20), {"prompt": "q", "chosen": "x" * 100, "rejected": "b"}]},
    )
    metrics = prepare_data(
        config, Context(tmp_path / "out"), conversations=folder, preferences=preferences
    )
    assert metrics["conversations/too_long"] == 0 and just in all_rows(tmp_path / "out")
    assert metrics["preferences/too_long"] == 1 and metrics["preferences/quarantined"] == 0
    tight = config.model_copy(update={"max_conversation_chars": 99})
    metrics = prepare_data(tight, Context(tmp_path / "tight"), conversations=folder)
    assert metrics["conversations/too_long"] == 9
    assert {f["rule"] for f in read(tmp_path / "tight" / "quarantine.jsonl")} == {"too_long"}


def test_caps_choose_by_content_and_a_larger_cap_only_adds(tmp_path: Path) -> None:
    rows = good(200)
    kept = {}
    for name, order, limit in (("10", rows, 10), ("25", rows, 25), ("back", rows[::-1], 25)):
        config = PrepareData(max_conversations=limit, max_test_conversations=3)
        out = run(tmp_path / name, order, config)
        assert len(read(out / "conversations" / "test.jsonl")) == 3
        kept[name] = [json.dumps(row) for row in read(out / "conversations" / "train.jsonl")]
    assert [len(kept[name]) for name in ("10", "25", "back")] == [10, 25, 25]
    assert set(kept["10"]) < set(kept["25"]) and kept["25"] == kept["back"][::-1]


def test_the_counts_add_up_in_metrics_and_report(tmp_path: Path) -> None:
    rows = [*good(90), *good(7), {"messages": [Q]}, {"messages": [Q, assistant("x" * 999)]}]
    folder = source(tmp_path / "in", {"a.jsonl": rows, "b.jsonl": good(10, start=90)})
    config = PrepareData(drop_budget=0.02, max_conversation_chars=500, max_conversations=50)
    metrics = prepare_data(config, Context(tmp_path / "out"), conversations=folder)
    totals = {name.removeprefix("conversations/"): n for name, n in metrics.items()}
    expected = {"read": 109, "quarantined": 1, "too_long": 1, "duplicates": 7, "train": 50}
    assert expected.items() <= totals.items()
    assert totals["kept"] == totals["train"] + totals["test"] == len(all_rows(tmp_path / "out"))
    assert totals["over_cap"] + totals["kept"] == 100
    report = json.loads((tmp_path / "out" / "report.json").read_text())["conversations"]
    assert report["totals"] == totals
    assert report["sources"]["a.jsonl"]["rejected"] == {"no_assistant_turn": 1, "too_long": 1}
    assert report["sources"]["a.jsonl"]["shape"] == "messages"
    assert sum(s["train"] for s in report["sources"].values()) == 50
    assert not (tmp_path / "out" / "preferences").exists()


def test_the_same_work_writes_the_same_bytes(tmp_path: Path) -> None:
    outs = [run(tmp_path / name, good(50)) for name in ("a", "b")]
    for name in ("conversations/train.jsonl", "conversations/test.jsonl", "report.json"):
        assert (outs[0] / name).read_bytes() == (outs[1] / name).read_bytes()


# --- the split


def test_adding_rows_never_moves_an_old_row(tmp_path: Path) -> None:
    sides = []
    for name, rows in (("old", good(100)), ("new", good(300, start=80) + good(80))):
        out = run(tmp_path / name, rows, PrepareData())
        sides.append(
            [
                {json.dumps(r) for r in read(out / "conversations" / f"{s}.jsonl")}
                for s in ("train", "test")
            ]
        )
    (old_train, old_test), (new_train, new_test) = sides
    assert old_train < new_train and old_test < new_test
    assert 0.04 < len(new_test) / 380 < 0.16


def test_another_seed_holds_out_other_rows(tmp_path: Path) -> None:
    held = [
        (
            run(tmp_path / str(seed), good(200), PrepareData(seed=seed))
            / "conversations"
            / "test.jsonl"
        ).read_text()
        for seed in (0, 1)
    ]
    assert held[0] != held[1]


def test_rows_with_one_question_never_straddle_the_split(tmp_path: Path) -> None:
    conversations, preferences = [], []
    for n in range(150):
        question = f"question {n}"
        conversations += [
            {"messages": [user(question), assistant("one")]},
            {"messages": [system("be kind"), user(f" {question}\n"), assistant("two")]},
            {"messages": [user(question), assistant("one"), user("more"), assistant("three")]},
        ]
        preferences += [
            {"prompt": [system("be short"), user(question)], "chosen": "yes", "rejected": "no"},
            {"prompt": [user(question), A, user(f"{n}?")], "chosen": "yes", "rejected": "no"},
        ]
    prepare_data(
        PrepareData(),
        Context(tmp_path / "out"),
        conversations=source(tmp_path / "c", {"c.jsonl": conversations}),
        preferences=source(tmp_path / "p", {"p.jsonl": preferences}),
    )
    asked: dict[str, set[str]] = {}
    for side in ("train", "test"):
        rows = read(tmp_path / "out" / "conversations" / f"{side}.jsonl")
        rows += read(tmp_path / "out" / "preferences" / f"{side}.jsonl")
        turns = [row.get("messages") or row["prompt"] for row in rows]
        asked[side] = {
            next(t["content"].strip() for t in one if t["role"] == "user") for one in turns
        }
    assert asked["train"] and asked["test"] and not asked["train"] & asked["test"]


def test_a_side_without_rows_is_an_error_whose_way_out_works(tmp_path: Path) -> None:
    with pytest.raises(StageError, match=r"all 40 conversations fall outside test") as caught:
        run(tmp_path / "a", good(40), PrepareData(test_fraction=0.0001))
    found = re.search(r"set test_fraction to ([\d.e-]+)", str(caught.value))
    assert found
    out = run(tmp_path / "b", good(40), PrepareData(test_fraction=float(found[1])))
    assert len(read(out / "conversations" / "test.jsonl")) == 4
    with pytest.raises(StageError, match="fall outside train"):
        run(tmp_path / "c", good(40), PrepareData(test_fraction=0.9999))


def test_every_row_can_be_held_out(tmp_path: Path) -> None:
    out = run(tmp_path, good(40), PrepareData(test_fraction=1))
    assert len(read(out / "conversations" / "test.jsonl")) == 40
    assert read(out / "conversations" / "train.jsonl") == []
    totals = json.loads((out / "report.json").read_text())["conversations"]["totals"]
    assert (totals["train"], totals["kept"]) == (0, 40)


def test_one_question_for_all_rows_cannot_be_split(tmp_path: Path) -> None:
    rows = [{"messages": [Q, assistant(f"a{n}")]} for n in range(40)]
    with pytest.raises(StageError, match="they share their first user turn"):
        run(tmp_path, rows, PrepareData())


# --- real files, speed, damage


@needs_real
def test_real_files(tmp_path: Path) -> None:
    for name, file in (("c", "alpaca_en_demo.json"), ("p", "dpo_en_demo.json")):
        source(tmp_path / name, {file: (REAL / file).read_bytes()})
    out = tmp_path / "out"
    metrics = prepare_data(
        PrepareData(drop_budget=0, contamination_words=None),
        Context(out),
        conversations=tmp_path / "c",
        preferences=tmp_path / "p",
    )
    assert metrics["conversations/read"] == 999 and metrics["preferences/read"] == 300
    assert metrics["conversations/kept"] + metrics["conversations/duplicates"] == 999
    assert metrics["preferences/kept"] + metrics["preferences/duplicates"] == 300
    raw = json.loads((REAL / "dpo_en_demo.json").read_text())
    rejected = {row["rejected"]["value"] for row in raw}
    assert {row["rejected"][0]["content"] for row in all_rows(out, "preferences")} == rejected
    shapes = json.loads((out / "report.json").read_text())
    assert shapes["conversations"]["sources"]["alpaca_en_demo.json"]["shape"] == "alpaca"
    assert shapes["preferences"]["sources"]["dpo_en_demo.json"]["shape"] == "sharegpt_preference"


@needs_real
def test_real_question_and_answer_files(tmp_path: Path) -> None:
    names = ("gsm8k_train.jsonl", "gsm8k_test.jsonl")
    folder = source(tmp_path / "in", {name: (REAL / name).read_bytes() for name in names})
    metrics = prepare_data(
        PrepareData(drop_budget=0, max_conversations=500),
        Context(tmp_path / "out"),
        conversations=folder,
    )
    assert metrics["conversations/read"] == 7473 + 1319
    assert metrics["conversations/train"] == 500
    assert all("####" in row["messages"][-1]["content"] for row in all_rows(tmp_path / "out"))


def test_it_loads_no_torch_and_is_quick(tmp_path: Path) -> None:
    source(tmp_path / "in", {"rows.jsonl": good(1000)})
    code = (
        "import sys, time; from pathlib import Path\n"
        "from stages.base import Context\n"
        "from stages.prepare_data import PrepareData, prepare_data\n"
        "start = time.process_time()\n"
        "prepare_data(PrepareData(), Context(Path('out')), conversations=Path('in'))\n"
        "spent = time.process_time() - start\n"
        "heavy = {'torch', 'transformers', 'datasets'} & set(sys.modules)\n"
        "sys.exit(f'{heavy} {spent}' if heavy or spent > 1 else 0)\n"
    )
    root = Path(__file__).parents[2]
    done = subprocess.run(
        [sys.executable, "-c", code],
        cwd=tmp_path,
        env={"PYTHONPATH": str(root)},
        check=False,
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0, done.stderr


DAMAGED = "\n".join(json.dumps(row) for row in good(30)).encode()


@settings(max_examples=60, deadline=None)
@given(
    at=st.integers(0, len(DAMAGED) - 1),
    length=st.integers(0, 40),
    patch=st.binary(max_size=12),
    wrap=st.booleans(),
)
def test_damage_ends_in_rows_or_in_a_named_error(
    tmp_path_factory: pytest.TempPathFactory, at: int, length: int, patch: bytes, wrap: bool
) -> None:
    content = b"[" + DAMAGED.replace(b"\n", b",\n") + b"]" if wrap else DAMAGED
    content = content[:at] + patch + content[at + length :]
    folder = tmp_path_factory.mktemp("damaged")
    try:
        out = run(folder, content, LENIENT, name="rows.json")
    except StageError as error:
        assert "rows.json" in str(error) or "fall outside" in str(error)
        return
    totals = json.loads((out / "report.json").read_text())["conversations"]["totals"]
    lost = totals["quarantined"] + totals["duplicates"]
    assert totals["read"] == lost + len(all_rows(out))
    assert len(read(out / "quarantine.jsonl")) == totals["quarantined"]
