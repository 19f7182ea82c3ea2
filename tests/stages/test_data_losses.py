"""Nothing is lost, cut or misread without a word: columns, turns, answers, numbers, settings."""

import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from functools import cache
from pathlib import Path
from typing import Any

import pytest

from stages import tree
from stages.base import Context, StageError
from stages.data import overlap, packing, shapes, templates
from stages.data.columns import Columns
from stages.data.conversations import Kind
from stages.data.files import DataFile
from stages.data.rules import RowError
from stages.prepare_data import PrepareData, Source, prepare_data
from stages.sources.local import LocalData, bring_data
from stages.tokenize_data import TokenizeData, tokenize_data
from tests.data_rows import assistant, both, good, read, source, system, user
from tests.small import python

HALF = PrepareData(test_fraction=0.5, drop_budget=1.0)
CONVERSATIONS: tuple[Kind, ...] = ("conversations",)
PREFERENCES: tuple[Kind, ...] = ("preferences", "unpaired")


def row(question: str, answer: str = "a") -> dict[str, Any]:
    return {"messages": [user(question), assistant(answer)]}


def canonical(raw: Any, *, preferences: bool = False, columns: Columns | None = None) -> Any:
    """``raw`` in the form that comes out, its shape told from itself."""
    accepted = PREFERENCES if preferences else CONVERSATIONS
    form = shapes.detect([raw], accepted=accepted, named=columns)
    assert form
    shapes.refuse_content(shapes.unread(raw, form), form, shown="rows.jsonl")
    return shapes.canonical(raw, form)


def fault(raw: Any, *, preferences: bool = False) -> str:
    with pytest.raises(RowError) as caught:
        canonical(raw, preferences=preferences)
    return caught.value.rule


def prepared(
    tmp_path: Path, rows: dict[str, Any], config: PrepareData = HALF, pairs: Any = None
) -> Path:
    folder = source(tmp_path / "c", rows)
    other = source(tmp_path / "p", pairs) if pairs else None
    prepare_data(config, Context(tmp_path / "out"), conversations=folder, preferences=other)
    return tmp_path / "out"


# --- columns


@pytest.mark.parametrize(
    ("raw", "turns"),
    [
        (
            {"instruction": "q", "context": "c", "response": "a", "category": "x"},
            [user("q\nc"), assistant("a")],
        ),
        ({"question": "q", "context": "c", "answer": "a"}, [user("q\nc"), assistant("a")]),
        (
            {"system_prompt": "s", "question": "q", "response": "a"},
            [system("s"), user("q"), assistant("a")],
        ),
    ],
)
def test_context_and_system_prompt_are_read(raw: Any, turns: Any) -> None:
    assert canonical(raw) == {"messages": turns}


@pytest.mark.parametrize(
    "raw",
    [
        {"prompt": "q", "input": "i", "completion": "a"},
        {"question": "q", "reasoning": "r", "answer": "a"},
        {"prompt": "q", "response": "a", "history": [["a", "b"]]},
    ],
)
def test_a_column_with_content_and_no_place_is_refused_or_ignored(raw: Any) -> None:
    with pytest.raises(StageError, match=r"rows\.jsonl: .*ignored: \["):
        canonical(raw)
    (lost,) = {"input", "reasoning", "history"} & set(raw)
    assert canonical(raw, columns=Columns(ignored=(lost,)))["messages"][0] == user("q")


def test_unread_columns_are_named(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    rows = [row | {"id": n, "note": None} for n, row in enumerate(good(30), 1)]
    out = prepared(tmp_path, {"a.jsonl": rows})
    report = json.loads((out / "report.json").read_text())["conversations"]["sources"]
    assert report["a.jsonl"]["unread_columns"] == {"id": 30}
    assert "columns that are not read: id (30)" in capsys.readouterr().out
    done = python("-m", "stages.data", "inspect", str(tmp_path / "c" / "data" / "a.jsonl"))
    assert done.returncode == 0 and "column id is not read 30" in done.stdout


def test_inspect_counts_refused_columns_as_faults(tmp_path: Path) -> None:
    (tmp_path / "a.jsonl").write_text('{"question": "q", "reasoning": "r", "answer": "a"}\n')
    done = python("-m", "stages.data", "inspect", str(tmp_path / "a.jsonl"))
    assert done.returncode == 1 and "column reasoning is not read 1: it carries" in done.stdout


@pytest.mark.parametrize("label", [0.0, 1.0, " True ", "0", "false"])
def test_labels_are_read_however_they_are_written(label: Any) -> None:
    row = {"prompt": "q", "completion": "a", "label": label}
    assert canonical(row, preferences=True)["label"] is (label in (1.0, " True "))


@pytest.mark.parametrize("label", ["good", 2, 0.5, [1]])
def test_unknown_labels_are_no_conversations(tmp_path: Path, label: Any) -> None:
    row = {"prompt": "q", "completion": "a", "label": label}
    assert fault(row, preferences=True) == "not_a_label"
    for judged in (row, {"messages": [user("q"), assistant("a")], "label": label}):
        form = shapes.detect([judged], accepted=CONVERSATIONS, named=None)
        assert form and form.kind == "unpaired"


# --- keys of turns and of rows


def test_unread_keys_of_turns_are_named(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    rows = [row("q"), *good(30)]
    rows[0]["messages"] = [user("q") | {"name": "bob"}, assistant("a", refusal=None)]
    out = prepared(tmp_path, {"a.jsonl": rows})
    report = json.loads((out / "report.json").read_text())["conversations"]["sources"]
    assert report["a.jsonl"]["unread_columns"] == {"messages[].name": 1}
    assert "not read: messages[].name (1)" in capsys.readouterr().out


def test_names_that_utf_8_cannot_hold_are_written_out(tmp_path: Path) -> None:
    rows = [{**one, "x\ud800": 1} for one in good(30)]
    rows[0]["messages"][0]["y\udfff"] = 1
    out = prepared(tmp_path, {"a.jsonl": rows})
    report = json.loads((out / "report.json").read_text())["conversations"]["sources"]
    named = {"x\\ud800": 30, "messages[].y\\udfff": 1}
    assert report["a.jsonl"]["unread_columns"] == named


@pytest.mark.parametrize("key", ["loss_mask", "images"])
def test_a_key_with_content_and_no_place_is_refused_or_ignored(tmp_path: Path, key: str) -> None:
    rows = [*good(150), {"messages": [user("q"), assistant("a", **{key: [0]})]}]
    with pytest.raises(StageError, match=rf"messages\[\]\.{key}.*ignored: \[{key}\]"):
        prepared(tmp_path, {"a.jsonl": rows})
    config = HALF.model_copy(update={"columns": Columns(ignored=(key,))})
    assert len(both(prepared(tmp_path, {"a.jsonl": rows}, config))) == 151


def test_keys_of_turns_in_a_table_s_cell_count_too(tmp_path: Path) -> None:
    turns = json.dumps([user("q"), assistant("a", mask=1)]).replace('"', '""')
    with pytest.raises(StageError, match=r"messages\[\]\.mask"):
        prepared(tmp_path, {"a.csv": f'messages\n"{turns}"\n'})


@pytest.mark.parametrize(
    "raw",
    [
        {**row("<image>"), "images": ["a.png"]},
        {**row("q"), "chat_template_kwargs": {"enable_thinking": False}},
        {"text": "a turn of a tree", "role": "prompter"},
    ],
)
def test_columns_that_change_what_a_row_means_are_refused(raw: Any) -> None:
    with pytest.raises(StageError, match=r"no place for the column (images|chat_t|role)"):
        canonical(raw)


def test_a_number_is_no_text_wherever_it_stands() -> None:
    with pytest.raises(RowError, match="not_turns: answer is int, neither text nor turns"):
        canonical({"question": "q", "answer": 42})


def test_files_that_look_held_out_are_told(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    rows = {"contest.jsonl": good(30), "x/gsm8k_test.jsonl": good(30, start=30)}
    prepared(tmp_path / "a", rows)
    assert "conversations: x/gsm8k_test.jsonl: rows of these are trained" in capsys.readouterr().out
    prepared(tmp_path / "b", rows, HALF.model_copy(update={"test_files": ("*_test*",)}))
    assert "rows of these" not in capsys.readouterr().out


def test_thoughts_of_a_sharegpt_call_are_kept_and_can_be_left() -> None:
    call = {"from": "function_call", "value": '{"name": "f"}', "reasoning": "why"}
    turns = [{"from": "human", "value": "q"}, call]
    asked = canonical({"conversations": turns})["messages"][1]
    assert asked["reasoning_content"] == "why"
    left = canonical({"conversations": turns}, columns=Columns(ignored=("reasoning",)))
    assert "reasoning_content" not in left["messages"][1]


def test_names_that_fit_a_late_row_are_no_faults(tmp_path: Path) -> None:
    late = {"messages": [{"role": "Kunde", "content": "q"}, assistant("a")]}
    config = HALF.model_copy(update={"columns": Columns(user_roles=("Kunde",))})
    out = prepared(tmp_path, {"a.jsonl": [*good(150), late]}, config)
    assert len(both(out)) == 151


def test_names_that_fit_turns_in_a_table_s_cell_are_no_faults(tmp_path: Path) -> None:
    cells = [json.dumps([{"wer": "Kunde", "was": f"q{n}"}, assistant("a")]) for n in range(9)]
    lines = ['"{}"'.format(cell.replace('"', '""')) for cell in cells]
    named = Columns(role="wer", content="was", user_roles=("kunde",))
    config = HALF.model_copy(update={"columns": named})
    out = prepared(tmp_path, {"a.csv": "\n".join(["messages", *lines])}, config)
    assert len(both(out)) == 9


TWICE = '{"messages": [{"role": "user", "content": "q"}], "x": 1, "messages" : []}'
ONCE = '{"messages": [{"role": "user", "content": "\\": \\" :"}, {"role": "x", "content": "a"}]}'


@pytest.mark.parametrize("name", ["a.jsonl", "a.json"])
def test_a_key_that_stands_twice_is_a_fault(tmp_path: Path, name: str) -> None:
    found = records(tmp_path, name, {"a.jsonl": "{}\n{}\n", "a.json": "[{},\n{}]"}[name].format(
        TWICE, ONCE
    ))  # fmt: skip
    assert found[0].fault and "'messages'" in found[0].fault.detail
    assert not found[1].fault


def test_what_json_cannot_hold_is_no_argument(tmp_path: Path) -> None:
    import datetime

    import pyarrow
    import pyarrow.parquet

    call = {"function": {"name": "f", "arguments": {"day": datetime.date(2024, 7, 26)}}}
    turns = [user("q") | {"tool_calls": None}, assistant("a") | {"tool_calls": [call]}]
    (tmp_path / "c" / "data").mkdir(parents=True)
    table = pyarrow.Table.from_pylist([{"messages": turns}])
    pyarrow.parquet.write_table(table, tmp_path / "c" / "data" / "a.parquet")
    with pytest.raises(StageError, match="bad_tool_call 1"):
        prepare_data(HALF, Context(tmp_path / "out"), conversations=tmp_path / "c")
    call["function"]["arguments"] = {"x": float("nan")}
    assert fault({"messages": turns}) == "bad_tool_call"


def test_a_turn_without_content_says_so() -> None:
    with pytest.raises(RowError, match=r"messages\[1\] has a role and no content"):
        canonical({"messages": [user("q"), {"role": "assistant"}]})


# --- contamination

LONG = "one two three four five six seven eight nine ten eleven twelve thirteen"


def test_a_form_that_training_rows_share_is_no_contamination(tmp_path: Path) -> None:
    rows = [row(f"{LONG} item {n}", f"answer {n}") for n in range(30)]
    config = PrepareData(test_files=("test*",))
    out = prepared(tmp_path, {"a.jsonl": rows[1:], "test.jsonl": rows[:1]}, config)
    assert len(read(out / "conversations" / "train.jsonl")) == 29
    assert not overlap.overlap(rows[:1], length=13, training=rows[1:])(rows[5])
    assert overlap.overlap(rows[:1], length=13, training=rows[1:3])(rows[1])


def test_much_contamination_fails_with_the_way_out(tmp_path: Path) -> None:
    leaked = [row(f"x{n}", f"{LONG} {n}") for n in range(2)]
    held = {"test.jsonl": [row("y", LONG)], "a.jsonl": [*good(10), *leaked]}
    config = PrepareData(test_files=("test*",))
    with pytest.raises(StageError, match=r"2 of 12 training.*contamination_words: null"):
        prepared(tmp_path / "a", held, config)
    lenient = config.model_copy(update={"contamination_budget": 0.2})
    assert len(both(prepared(tmp_path / "b", held, lenient))) == 11


@pytest.mark.parametrize(
    ("held", "training"),
    [
        ("ÉTÉ À LA PLAGE " * 4, "dis " + "été à la plage " * 4),
        ("“one” two “three” four five “six” " * 3, "x " + '"one" two "three" four five "six" ' * 3),
        ("今天的天气非常好，我们一起去公园散步。", "请复述：今天的天气非常好,我们一起去公园散步"),  # noqa: RUF001
        ("What is the capital of France?", "Please answer: what is the capital of FRANCE"),
    ],
)
def test_contamination_is_seen_in_any_script_case_and_quotes(held: str, training: str) -> None:
    shared = overlap.overlap([row(held, "x")], length=13)
    assert shared(row(training, "y")) and not shared(row("something else", "y"))


def test_short_questions_that_differ_are_no_contamination() -> None:
    shared = overlap.overlap([row("What is the sum 3 + 4?", "7"), row("Hi there")], length=13)
    assert not shared(row("What is the sum 3 - 4?")) and not shared(row("Hi there, who are you"))


def test_pairs_are_cleaned_of_held_out_conversations(tmp_path: Path) -> None:
    pairs = [{"prompt": f"p{n}", "chosen": "a", "rejected": "b"} for n in range(60)]
    pairs.append({"prompt": "Tell me", "chosen": "a", "rejected": "b"})
    files = {"a.jsonl": good(20), "test.jsonl": [row("Tell me", "x")]}
    out = prepared(tmp_path, files, PrepareData(test_files=("test*",)), {"p.jsonl": pairs})
    assert "Tell me" not in (out / "preferences" / "train.jsonl").read_text()


# --- flags, numbers, pairs


@pytest.mark.parametrize("flag", [0, False, "false", "0", 0.0])
def test_turns_are_left_untrained_however_it_is_written(flag: Any) -> None:
    call = {"from": "function_call", "value": '{"name": "f", "arguments": {}}', "weight": flag}
    turns = [
        {"from": "human", "value": "q"},
        call,
        {"from": "observation", "value": "r"},
        {"from": "gpt", "value": "a", "train": flag},
        {"from": "human", "value": "q"},
        {"from": "gpt", "value": "b", "train": True, "weight": "1"},
    ]
    said = canonical({"conversations": turns})["messages"]
    assert [turn.get("train", True) for turn in said] == [True, False, True, False, True, True]


@pytest.mark.parametrize("name", ["train", "weight", "loss", "training"])
def test_every_name_of_the_flag_is_read(name: str) -> None:
    turns = [user("q"), assistant("a", **{name: False}), user("q"), assistant("b", **{name: True})]
    said = canonical({"messages": turns})["messages"]
    assert [turn.get("train", True) for turn in said] == [True, False, True, True]


def test_other_flags_and_untrained_answers_of_pairs_are_faults() -> None:
    turns = [user("q"), assistant("a", weight=0.5)]
    assert fault({"messages": turns}) == "bad_train_flag"
    pair = {"prompt": "q", "chosen": [assistant("a", train=False)], "rejected": "b"}
    assert fault(pair, preferences=True) == "answer_not_trained"


def test_whole_numbers_stay_exact_to_the_tokens(tmp_path: Path, models: Any) -> None:
    number = 12345678901234567890123
    call = {"name": "f", "arguments": json.dumps({"id": number})}
    rows = [{"messages": [user(f"q{n}"), assistant("", function_call=call)]} for n in range(20)]
    out = prepared(tmp_path, {"a.jsonl": rows})
    assert both(out)[0]["messages"][1]["tool_calls"][0]["function"]["arguments"]["id"] == number
    text = tokenised(tmp_path, models("calls"), out)
    assert f'"id": {number}' in text


def test_a_prompt_that_chosen_repeats_must_be_repeated_whole() -> None:
    history = [user("first"), assistant("a1"), user("q")]
    sides = {"chosen": [user("q"), assistant("g")], "rejected": [user("q"), assistant("b")]}
    assert fault({"prompt": history, **sides}, preferences=True) == "different_prompts"
    kept = canonical({"prompt": [system("s"), user("q")], **sides}, preferences=True)
    assert kept["prompt"] == [system("s"), user("q")]


@pytest.mark.parametrize(
    "raw",
    [
        {"prompt": "Human: q\n\nAssistant:", "chosen": "g", "rejected": "b"},
        {
            "prompt": "\n\nHuman: q\n\nAssistant:",
            "chosen": "\n\nHuman: q\n\nAssistant: g",
            "rejected": "\n\nHuman: q\n\nAssistant: b",
        },
        {
            "chosen": "\r\n\r\nHuman: q\r\n\r\nAssistant: g",
            "rejected": "\r\n\r\nHuman: q\r\n\r\nAssistant: b",
        },
    ],
)
def test_transcripts_are_turns_wherever_they_stand(raw: Any) -> None:
    pair = {"prompt": [user("q")], "chosen": [assistant("g")], "rejected": [assistant("b")]}
    assert canonical(raw, preferences=True) == pair


def test_an_empty_rejected_answer_is_an_empty_turn() -> None:
    raw = {"chosen": "\n\nHuman: q\n\nAssistant: g", "rejected": "\n\nHuman: q\n\nAssistant: "}
    assert fault(raw, preferences=True) == "empty_turn"


def test_roles_are_known_whatever_their_case_and_the_message_names_the_setting() -> None:
    turns = [{"role": "User", "content": "q"}, {"role": "ASSISTANT", "content": "a"}]
    assert canonical({"messages": turns})["messages"][0] == user("q")
    with pytest.raises(RowError, match=r"columns\.user_roles"):
        canonical({"messages": [{"role": "narrator", "content": "q"}]})


def test_fields_that_arrow_fills_are_not_read(tmp_path: Path) -> None:
    import pyarrow
    import pyarrow.parquet

    rows = [
        {
            "messages": [
                {"role": "user", "content": f"q{n}", "tool_calls": None},
                {
                    "role": "assistant",
                    "content": None,
                    "tool_calls": [{"function": {"name": "f", "arguments": one}}],
                },
            ]
        }
        for n, one in enumerate([{"x": 1}, {"y": "z"}] * 10)
    ]
    (tmp_path / "c" / "data").mkdir(parents=True)
    table = pyarrow.Table.from_pylist(rows)
    pyarrow.parquet.write_table(table, tmp_path / "c" / "data" / "a.parquet")
    prepare_data(HALF, Context(tmp_path / "out"), conversations=tmp_path / "c")
    arguments = [
        row["messages"][1]["tool_calls"][0]["function"]["arguments"]
        for row in both(tmp_path / "out")
    ]
    assert len(arguments) == 20 and all(one in ({"x": 1}, {"y": "z"}) for one in arguments)


# --- files and settings


def test_links_are_followed_once_and_broken_ones_are_refused(tmp_path: Path) -> None:
    real, folder, into = tmp_path / "real", tmp_path / "folder", tmp_path / "into"
    for one in (real, folder, into):
        one.mkdir()
    (real / "x.jsonl").write_text("{}\n")
    (folder / "a").symlink_to(real)
    (folder / "b").symlink_to(real)
    assert bring_data(LocalData(path=folder), into) == {"left_out": "b"}
    assert (into / "a" / "x.jsonl").exists()
    (folder / "gone.jsonl").symlink_to(real / "no.jsonl")
    with pytest.raises(StageError, match=r"gone\.jsonl: a link that leads nowhere"):
        bring_data(LocalData(path=folder), into)
    (folder / "gone.jsonl").unlink()
    (real / "up").symlink_to(folder)
    with pytest.raises(StageError, match="a link into a folder that holds it"):
        tree.walk(folder)


def test_files_that_are_not_data_are_named_and_others_are_read(tmp_path: Path) -> None:
    named = {"a.jsonl": good(20), "README_rows.jsonl": good(5, start=20), "README.md": "# hi"}
    out = prepared(tmp_path, named)
    report = json.loads((out / "report.json").read_text())["conversations"]
    assert report["skipped_files"] == ["README.md"] and report["totals"]["read"] == 25


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"test_files": ("*tset*",)}, r"test_files: '\*tset\*' fits no file.*a\.jsonl"),
        ({"sources": (Source(files="nope/*"),)}, r"sources\[0\]\.files: 'nope/\*' rules no file"),
        (
            {"sources": (Source(files="*"), Source(files="a*"))},
            r"sources\[1\]\.files: 'a\*' rules no file",
        ),
        ({"columns": Columns(system="systm")}, "columns: system=systm fits nothing"),
        ({"columns": Columns(user_roles=("Kunde",))}, "user_roles=Kunde fits nothing"),
        (
            {"sources": (Source(files="a*", weight=0.0001), Source(files="b*", weight=0.9))},
            r"sources\[0\] has weight 0\.0001 and gets none.*raise its weight to",
        ),
    ],
)
def test_settings_that_do_nothing_are_errors(tmp_path: Path, settings: Any, message: str) -> None:
    rows = {"a.jsonl": good(60), "b.jsonl": good(60, start=60)}
    with pytest.raises(StageError, match=message):
        prepared(tmp_path, rows, PrepareData(**settings))


def test_the_spool_of_a_killed_run_is_removed(tmp_path: Path) -> None:
    (tmp_path / "out" / "spool.old").mkdir(parents=True)
    out = prepared(tmp_path, {"a.jsonl": good(20)})
    assert not list(out.glob("spool.*"))


def records(tmp_path: Path, name: str, content: str) -> list[Any]:
    from stages.data import readers

    (tmp_path / name).write_text(content)
    return list(readers.read(DataFile(tmp_path / name, name, name)))


def test_damage_stands_at_its_own_line(tmp_path: Path) -> None:
    text = json.dumps(good(60), indent=1)[:-300]
    with pytest.raises(StageError) as caught:
        records(tmp_path, "cut.json", text)
    line = int(str(caught.value).split(":")[1])
    assert text.count("\n") - 1 <= line <= text.count("\n") + 1
    table = 'question,answer\nq,"a\n' + "q,a\n" * 100
    with pytest.raises(StageError, match=r"open\.csv:2: not a table"):
        records(tmp_path, "open.csv", table)


@pytest.mark.parametrize("at", [0, 1, 60])
def test_a_damaged_line_is_one_fault_wherever_it_stands(tmp_path: Path, at: int) -> None:
    long = json.dumps(row("q", "x" * 1_200_000))
    lines = [long, *(json.dumps(one) for one in good(60))]
    lines.insert(at, "{bad")
    found = records(tmp_path, "a.jsonl", "\n".join(lines))
    assert len(found) == 62
    assert [one.place.line for one in found if one.fault] == [at + 1]


def test_cells_are_json_only_where_a_list_belongs(tmp_path: Path) -> None:
    table = ',question,answer\n0,q,"{""name"": ""x""}"\n'
    (one,) = records(tmp_path, "t.csv", table)
    assert canonical(one.value) == {"messages": [user("q"), assistant('{"name": "x"}')]}
    form = shapes.detect([one.value], accepted=CONVERSATIONS, named=None)
    assert form and shapes.unread(one.value, form) == ["Unnamed: 0"]


DEEP = "[" * 950 + "]" * 950


@pytest.mark.parametrize(
    "line",
    [
        '{"messages": [{"role": "user", "content": [{"type": "text", "text": null}]}]}',
        '{"messages": [{"role": "user", "content": "q"}, {"role": "assistant", "tool_calls": '
        '[{"id": "\\ud800", "function": {"name": "a\\ud800", "arguments": {}}}]}]}',
        '{"messages": [{"role": "user", "content": "q"}, {"role": "assistant", "content": "a"}],'
        f' "x": {"9" * 5000}}}',
        f'{{"messages": {DEEP}}}',
        '{"messages": [{"role": "user", "content": "q"}, {"role": "assistant", "tool_calls": '
        f'[{{"function": {{"name": "a", "arguments": {{"x": {DEEP}}}}}}}]}}]}}',
    ],
)
def test_odd_rows_are_quarantined_and_never_a_traceback(tmp_path: Path, line: str) -> None:
    text = "\n".join([*map(json.dumps, good(20)), line])
    out = prepared(tmp_path, {"a.jsonl": text})
    assert [bad["line"] for bad in read(out / "quarantine.jsonl")] == [21]


def test_inspect_refuses_odd_wishes_and_hides_control_characters(tmp_path: Path) -> None:
    path = tmp_path / "a.jsonl"
    path.write_text(json.dumps(row("\x1b[2J hi", "a\rb")) + "\n")
    done = python("-m", "stages.data", "inspect", str(path))
    assert "\x1b" not in done.stdout and "\\x1b[2J hi" in done.stdout
    for words in (["--rows", "0"], ["--rows", "-5"], ["--html", str(tmp_path / "no" / "x.html")]):
        done = python("-m", "stages.data", "inspect", str(path), *words)
        assert done.returncode and "Traceback" not in done.stderr


def test_inspect_shows_untrained_turns(tmp_path: Path) -> None:
    path = tmp_path / "a.jsonl"
    turns = [user("q"), assistant("shown", weight=0), user("q"), assistant("learnt")]
    path.write_text(json.dumps({"messages": turns}) + "\n")
    done = python("-m", "stages.data", "inspect", str(path))
    assert "assistant: shown\n" in done.stdout and "[[learnt]]" in done.stdout


def test_no_rows_cannot_be_packed() -> None:
    from datasets import Dataset

    empty = Dataset.from_dict({"input_ids": [[1]]}).select([])
    with pytest.raises(StageError, match="no rows to pack"):
        packing.pack(empty, 8)


# --- templates

SAYS = "{{ '<|im_start|>' + m.role + '\\n' + m.content + '<|im_end|>\\n' }}"
ASKS = "{% if add_generation_prompt %}{{ '<|im_start|>assistant\\n' }}{% endif %}"
CHATML = "{% for m in messages %}" + SAYS + "{% endfor %}" + ASKS
CALLS = (
    "{% for m in messages %}{{ '<|im_start|>' + m.role + '\\n' + m.content }}"
    "{% for c in m.tool_calls or [] %}{{ c.function | tojson }}{% endfor %}{{ '<|im_end|>\\n' }}"
    "{% endfor %}" + ASKS
)
TEMPLATES = {
    "chatml": CHATML,
    "calls": CALLS,
    "calls_without_arguments": CALLS.replace("c.function | tojson", "c.function.name"),
    "no_system": CHATML.replace(SAYS, "{% if m.role != 'system' %}" + SAYS + "{% endif %}"),
    "last_question": CHATML.replace(
        SAYS,
        "{% if m.role != 'user' or loop.last or messages[loop.index0 + 1].role != 'user' %}"
        + SAYS
        + "{% endif %}",
    ),
    "last_user": "{% set us = messages | selectattr('role', 'equalto', 'user') | list %}"
    "{{ '<|im_start|>user\n' + us[-1].content + '<|im_end|>\n<|im_start|>assistant\n' }}"
    "{% if messages[-1].role == 'assistant' %}"
    "{{ messages[-1].content + '<|im_end|>\n' }}{% endif %}",
    "thinks_aloud": CHATML.replace(
        SAYS,
        "{% if m.role == 'assistant' %}{{ '<|im_start|>assistant\\nhm<|im_end|>\\n' }}{% endif %}"
        + SAYS,
    ),
    "thoughts": CHATML.replace("m.content", "(m.reasoning_content or '') + m.content"),
    "two_marks": CHATML.replace(
        SAYS,
        "{{ '<|im_start|>' + m.role + '\\n' }}{% if m.role == 'assistant' %}"
        "{% generation %}{{ m.reasoning_content }}{% endgeneration %}"
        "{% generation %}{{ m.content + '<|im_end|>' }}{% endgeneration %}"
        "{% else %}{{ m.content + '<|im_end|>' }}{% endif %}{{ '\\n' }}",
    ),
    "mark_behind_thoughts": CHATML.replace(
        SAYS,
        "{{ '<|im_start|>' + m.role + '\\n' }}{% if m.role == 'assistant' %}"
        "{{ m.reasoning_content }}"
        "{% generation %}{{ m.content + '<|im_end|>' }}{% endgeneration %}"
        "{% else %}{{ m.content + '<|im_end|>' }}{% endif %}{{ '\\n' }}",
    ),
    "syntax": "{% for m in messages %}{{ m.content",
    "filter": CHATML.replace("m.content", "m.content | no_such_filter"),
    "value": CHATML.replace("m.content", "m.content.split('')[0]"),
    "endless": "{% macro f(x) %}{{ f(x) }}{% endmacro %}{{ f(1) }}" + CHATML,
}


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> Any:
    """A function from a name in TEMPLATES to a folder that holds ``model/``."""
    from tokenizers import Tokenizer, decoders, pre_tokenizers, trainers
    from tokenizers import models as kinds
    from transformers import PreTrainedTokenizerFast

    root = tmp_path_factory.mktemp("models")

    @cache
    def model(name: str) -> Path:
        raw = Tokenizer(kinds.BPE())
        raw.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
        raw.decoder = decoders.ByteLevel()
        trainer = trainers.BpeTrainer(
            vocab_size=300,
            special_tokens=["<|im_start|>", "<|im_end|>"],
            initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
            show_progress=False,
        )
        raw.train_from_iterator(["the cat sat"], trainer)
        tokenizer = PreTrainedTokenizerFast(tokenizer_object=raw, eos_token="<|im_end|>")
        tokenizer.chat_template = TEMPLATES[name]
        tokenizer.save_pretrained(root / name / "model")
        return root / name

    return model


def tokenised(tmp_path: Path, model: Path, data: Path, **config: Any) -> str:
    """The text of the first training row."""
    from datasets import load_from_disk
    from transformers import AutoTokenizer

    out = tmp_path / "tokens"
    tokenize_data(TokenizeData(**config), Context(out), model=model, data=data)
    (ids,) = load_from_disk(out / "conversations" / "train").select([0])["input_ids"]
    return str(AutoTokenizer.from_pretrained(model / "model").decode(ids))


def written(tmp_path: Path, rows: list[Any], kind: str = "conversations") -> Path:
    folder = tmp_path / "data" / kind
    folder.mkdir(parents=True)
    text = "".join(json.dumps(one) + "\n" for one in rows)
    for side in ("train", "test"):
        (folder / f"{side}.jsonl").write_text(text)
    return tmp_path / "data"


CALLED = {
    "role": "assistant",
    "content": "",
    "tool_calls": [
        {"type": "function", "function": {"name": "get", "arguments": {"city": "PARIS"}}}
    ],
}
TOOL = {"name": "get", "description": "TELLS", "parameters": {"properties": {"city": {}}}}
FIRST = [user("FIRST"), assistant("a1"), user("u2")]


@pytest.mark.parametrize(
    ("name", "row", "rule"),
    [
        ("no_system", {"messages": [system("BE"), user("q"), assistant("a")]}, "turn_not_rendered"),
        (
            "last_question",
            {"messages": [user("UUU"), user("q"), assistant("a")]},
            "turn_not_rendered",
        ),
        (
            "last_user",
            {"prompt": FIRST, "chosen": [assistant("g")], "rejected": [assistant("b")]},
            "turn_not_rendered",
        ),
        ("calls_without_arguments", {"messages": [user("q"), CALLED]}, "tools_not_rendered"),
        (
            "calls",
            {"messages": [user("q"), CALLED], "tools": [{"type": "function", "function": TOOL}]},
            "tools_not_rendered",
        ),
        ("thinks_aloud", {"messages": [user("q"), assistant("answer")]}, "answer_cut"),
        (
            "chatml",
            {"messages": [user("q"), assistant("a why b", reasoning_content="why")]},
            "thoughts_not_rendered",
        ),
        (
            "two_marks",
            {"messages": [user("q"), assistant("a", reasoning_content="why")]},
            "answer_rewritten",
        ),
        ("value", {"messages": [user("q"), assistant("a")]}, "cannot_be_rendered"),
        ("endless", {"messages": [user("q"), assistant("a")]}, "cannot_be_rendered"),
    ],
)
def test_what_a_template_leaves_out_is_a_fault(
    tmp_path: Path, models: Any, name: str, row: Any, rule: str
) -> None:
    data = written(tmp_path, [row], "preferences" if "prompt" in row else "conversations")
    config = TokenizeData(drop_budget=1)
    with pytest.raises(StageError, match=rf"no row of .* is left \({rule} 1\)"):
        tokenize_data(config, Context(tmp_path / "out"), model=models(name), data=data)


@pytest.mark.parametrize(("name", "said"), [("syntax", "line 1"), ("filter", "no_such_filter")])
def test_a_broken_template_is_named(tmp_path: Path, models: Any, name: str, said: str) -> None:
    data = written(tmp_path, good(1))
    with pytest.raises(StageError, match=rf"{name}.model: the chat template cannot.*{said}"):
        tokenize_data(TokenizeData(), Context(tmp_path / "out"), model=models(name), data=data)


@pytest.mark.parametrize("content", ["{bad", "[1]", '{"eos_token_id": [99999]}'])
def test_a_damaged_generation_config_is_named(tmp_path: Path, models: Any, content: str) -> None:
    import shutil

    shutil.copytree(models("chatml"), tmp_path / "m")
    (tmp_path / "m" / "model" / "generation_config.json").write_text(content)
    data = written(tmp_path, good(1))
    with pytest.raises(StageError, match=r"generation_config\.json: "):
        tokenize_data(TokenizeData(), Context(tmp_path / "out"), model=tmp_path / "m", data=data)


def tokenizer_changed(model: Path, folder: Path, change: Callable[[Any], None]) -> Any:
    """A copy of ``model``'s tokenizer in ``folder/model``, changed."""
    from transformers import AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(model / "model")
    change(tokenizer)
    tokenizer.save_pretrained(folder / "model")
    return tokenizer


@pytest.mark.parametrize(
    ("stop", "rule"), [("<stop>", "special_token_in_text"), ("Ċ", "answer_cut")]
)
def test_no_answer_is_cut_at_a_stop_that_text_can_hold(
    tmp_path: Path, models: Any, stop: str, rule: str
) -> None:
    def change(tokenizer: Any) -> None:
        tokenizer.add_tokens([stop] if stop == "<stop>" else [])

    tokenizer = tokenizer_changed(models("chatml"), tmp_path, change)
    ids = [tokenizer.eos_token_id, tokenizer.convert_tokens_to_ids(stop)]
    config = json.dumps({"eos_token_id": ids})
    (tmp_path / "model" / "generation_config.json").write_text(config)
    shown = "\n" if stop == "Ċ" else stop
    data = written(tmp_path, [row("q", f"one{shown}two"), row("q", "one")])
    out = tmp_path / "out"
    metrics = tokenize_data(TokenizeData(drop_budget=1), Context(out), model=tmp_path, data=data)
    assert metrics["conversations/train/rows"] == 1
    assert [bad["rule"] for bad in read(out / "quarantine.jsonl")] == [rule, rule]


def test_what_closes_an_answer_and_is_no_stop_is_named(tmp_path: Path, models: Any) -> None:
    def change(tokenizer: Any) -> None:
        tokenizer.eos_token = "</s>"

    tokenizer_changed(models("chatml"), tmp_path, change)
    data = written(tmp_path, good(1))
    closing = (
        r"no_stop_token 1\) \(conversations/train\.jsonl:1: .*with '<\|im_end\|>'.*add its id 1 "
    )
    with pytest.raises(StageError, match=closing):
        tokenize_data(
            TokenizeData(drop_budget=1), Context(tmp_path / "out"), model=tmp_path, data=data
        )


def test_unknown_words_do_not_move_the_mask(tmp_path: Path) -> None:
    from datasets import load_from_disk
    from tokenizers import Tokenizer, pre_tokenizers
    from tokenizers import models as kinds
    from transformers import PreTrainedTokenizerFast

    words = ["[UNK]", "<|im_start|>", "<|im_end|>", "the", "cat", "sat"]
    raw = Tokenizer(kinds.WordLevel({one: n for n, one in enumerate(words)}, unk_token="[UNK]"))
    raw.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    tokenizer = PreTrainedTokenizerFast(
        tokenizer_object=raw,
        eos_token="<|im_end|>",
        unk_token="[UNK]",
        additional_special_tokens=["<|im_start|>"],
    )
    tokenizer.chat_template = CHATML
    tokenizer.save_pretrained(tmp_path / "model")
    turns = [system("no dog"), user("the dog sat"), assistant("the cat sat")]
    data, out = written(tmp_path, [{"messages": turns}]), tmp_path / "out"
    metrics = tokenize_data(TokenizeData(), Context(out), model=tmp_path, data=data)
    (one,) = load_from_disk(out / "conversations" / "train").to_list()
    assert one["labels"][-4:] == [3, 4, 5, 2] and set(one["labels"][:-4]) == {-100}
    assert one["prompt_ids"] == one["input_ids"][:-4]
    assert metrics["conversations/train/context_mismatch_rows"] == 0


def test_one_token_among_many_that_strips_its_surroundings_is_noticed(
    tmp_path: Path, models: Any
) -> None:
    from tokenizers import AddedToken

    def change(tokenizer: Any) -> None:
        many: list[Any] = [f"<|a_long_reserved_token_{number}|>" for number in range(40)]
        many.append(AddedToken("<|ends|>", rstrip=True, special=True))
        tokenizer.add_special_tokens({"additional_special_tokens": many})

    tokenizer_changed(models("chatml"), tmp_path, change)
    assert not templates.load(tmp_path / "model").splits
    assert templates.load(models("chatml") / "model").splits


def test_blank_thoughts_are_none(tmp_path: Path, models: Any) -> None:
    turns = [user("q"), assistant("a", reasoning_content=" \n")]
    data = written(tmp_path, [{"messages": turns}])
    assert tokenised(tmp_path, models("chatml"), data).endswith("assistant\na<|im_end|>")


def test_thoughts_that_differ_are_no_prompt_of_a_pair(tmp_path: Path, models: Any) -> None:
    from datasets import load_from_disk
    from transformers import AutoTokenizer

    sides = {
        "chosen": [assistant("a", reasoning_content="yes")],
        "rejected": [assistant("b", reasoning_content="no")],
    }
    data, out = written(tmp_path, [{"prompt": [user("q")], **sides}], "preferences"), tmp_path / "o"
    model = models("mark_behind_thoughts")
    tokenize_data(TokenizeData(), Context(out), model=model, data=data)
    (pair,) = load_from_disk(out / "preferences" / "train").to_list()
    decode = AutoTokenizer.from_pretrained(model / "model").decode
    assert decode(pair["prompt_ids"]).endswith("<|im_start|>assistant\n")
    assert decode(pair["chosen_ids"]) == "yesa<|im_end|>"
    assert decode(pair["rejected_ids"]) == "nob<|im_end|>"


def test_rows_over_the_length_are_told(
    tmp_path: Path, models: Any, capsys: pytest.CaptureFixture[str]
) -> None:
    data = written(tmp_path, [*good(3), row("q", "word " * 99)])
    config = TokenizeData(max_length=60)
    tokenize_data(config, Context(tmp_path / "o"), model=models("chatml"), data=data)
    said = "conversations/train.jsonl: of 4 rows 1 left out, longer than max_length 60 tokens"
    assert said in capsys.readouterr().out


@pytest.mark.parametrize("line", ["{bad", "[1]", '{"messages": [5]}'])
def test_a_damaged_line_of_prepared_rows_is_named(tmp_path: Path, models: Any, line: str) -> None:
    data = written(tmp_path, good(1))
    (data / "conversations" / "train.jsonl").write_text(json.dumps(good(1)[0]) + f"\n{line}\n")
    with pytest.raises(StageError, match=r"conversations/train\.jsonl:2: damaged"):
        tokenize_data(TokenizeData(), Context(tmp_path / "out"), model=models("chatml"), data=data)


def test_faults_of_tokenising_name_the_user_s_own_line(tmp_path: Path, models: Any) -> None:
    rows = [*good(20), row("a question", "an answer <|im_end|> and more")]
    out = prepared(tmp_path, {"chats.jsonl": rows}, PrepareData(test_fraction=0.5))
    config = TokenizeData(drop_budget=1)
    tokenize_data(config, Context(tmp_path / "t"), model=models("chatml"), data=out)
    (bad,) = read(tmp_path / "t" / "quarantine.jsonl")
    assert bad["origin"].endswith("chats.jsonl:21")
    with pytest.raises(StageError, match=r"chats\.jsonl:21 \(conversations/"):
        tokenize_data(TokenizeData(), Context(tmp_path / "u"), model=models("chatml"), data=out)


@pytest.mark.parametrize("overflow", ["drop", "truncate_prompt"])
def test_a_long_row_is_too_long_however_it_is_cut(
    tmp_path: Path, models: Any, overflow: str
) -> None:
    turns = [user("word " * 99), assistant("a1"), user("u"), assistant("a", train=False)]
    data = written(tmp_path, [*good(20), {"messages": turns}])
    config = TokenizeData(max_length=60, on_overflow=overflow)  # type: ignore[arg-type]
    metrics = tokenize_data(config, Context(tmp_path / "o"), model=models("chatml"), data=data)
    assert metrics["conversations/train/dropped/too_long"] == 1


def test_long_conversations_are_shortened_with_few_renderings(
    tmp_path: Path, models: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    from stages.data import templates

    calls = []
    plain = templates.render
    monkeypatch.setattr(templates, "render", lambda *a, **k: calls.append(1) or plain(*a, **k))
    turns = [turn for n in range(100) for turn in (user(f"turn {n}"), assistant("noted"))]
    data = written(tmp_path, [{"messages": turns}])
    config = TokenizeData(max_length=100, on_overflow="truncate_prompt")
    metrics = tokenize_data(config, Context(tmp_path / "o"), model=models("chatml"), data=data)
    assert metrics["conversations/train/truncated"] == 1
    assert 60 < metrics["conversations/train/longest"] <= 100
    assert len(calls) < 2 * 100 + 100  # one for each answer of both splits, and some to halve


# --- processes

JOB = (
    "import sys; from pathlib import Path\n"
    "sys.modules  # the stage is started as its own process\n"
    "import os; os.sched_getaffinity = lambda _: {0, 1}\n"
    "import stages.tokenize_data as stage_function\n"
    "stage = sys.modules['stages.tokenize_data']; stage.WORTH_A_PROCESS = 0\n"
    "import time; plain = stage.tokens.block\n"
    "def slow(*words): time.sleep(30); return plain(*words)\n"
    "stage.tokens.block = slow\n"
    "from stages.base import Context\n"
    "out, model, data = map(Path, sys.argv[1:])\n"
    "stage.tokenize_data(stage.TokenizeData(), Context(out), model=model, data=data)\n"
)


def started(tmp_path: Path, model: Path) -> tuple[Any, list[int]]:
    """A stage at work, and its workers."""
    data = written(tmp_path, good(50))
    words = map(str, (tmp_path / "out", model, data))
    root = Path(__file__).parents[2]
    process = subprocess.Popen(
        [sys.executable, "-c", JOB, *words], cwd=root, stderr=subprocess.PIPE, text=True
    )
    children = Path(f"/proc/{process.pid}/task/{process.pid}/children")
    for _ in range(600):
        if process.poll() is not None or len(children.read_text().split()) >= 2:
            break
        time.sleep(0.1)
    time.sleep(0.5)
    return process, [int(one) for one in children.read_text().split()]


@pytest.mark.skipif(sys.platform != "linux", reason="reads /proc")
def test_a_killed_worker_fails_the_stage_at_once(tmp_path: Path, models: Any) -> None:
    process, workers = started(tmp_path, models("chatml"))
    os.kill(workers[0], signal.SIGKILL)
    _, said = process.communicate(timeout=25)
    assert process.returncode and "a tokenising process was killed" in said


@pytest.mark.skipif(sys.platform != "linux", reason="reads /proc")
def test_workers_do_not_outlive_a_killed_stage(tmp_path: Path, models: Any) -> None:
    process, workers = started(tmp_path, models("chatml"))
    process.kill()
    process.communicate(timeout=20)
    for _ in range(50):
        if not any(Path(f"/proc/{one}").exists() for one in workers):
            break
        time.sleep(0.1)
    assert workers and not any(Path(f"/proc/{one}").exists() for one in workers)
