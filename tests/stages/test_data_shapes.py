"""Shapes beyond the plain ones, columns by name, mixtures, copies and contamination."""

import json
from pathlib import Path
from typing import Any

import pytest

from stages.base import Context, StageError
from stages.data import ledger, overlap
from stages.data.columns import Columns
from stages.prepare_data import PrepareData, Source, prepare_data
from tests.data_rows import assistant, both, calling, good, read, source, system, user

HALF = PrepareData(test_fraction=0.5, drop_budget=1.0)
WEATHER = {
    "name": "weather",
    "description": "Weather of a town.",
    "parameters": {"type": "object", "properties": {"town": {"type": "string"}}},
}
TOOLS = [{"type": "function", "function": WEATHER}]


def variants(raw: Any) -> list[Any]:
    """``raw`` and twenty rows that ask something else."""
    return [json.loads(json.dumps(raw).replace("ask", f"ask{n}")) for n in ("", *range(20))]


def prepared(
    tmp_path: Path, raw: Any, config: PrepareData = HALF, *, as_preferences: bool = False
) -> Path:
    """The output for ``raw`` and rows like it, with ``ask`` in their first question."""
    rows = source(tmp_path / "rows", {"rows.jsonl": variants(raw)})
    out = tmp_path / "out"
    if as_preferences:
        other = source(tmp_path / "c", {"c.jsonl": good(20)})
        prepare_data(config, Context(out), conversations=other, preferences=rows)
    else:
        prepare_data(config, Context(out), conversations=rows)
    return out


# --- tools, transcripts, texts, labels

ASK, RESULT = user("ask"), {"role": "tool", "content": "7 C"}
CALLED = [ASK, calling("weather", town="Bern"), RESULT, assistant("7 degrees.")]


@pytest.mark.parametrize(
    "raw",
    [
        pytest.param(
            {
                "messages": [
                    ASK,
                    {
                        "role": "assistant",
                        "content": None,
                        "tool_calls": [
                            {
                                "type": "function",
                                "function": {"name": "weather", "arguments": '{"town": "Bern"}'},
                            }
                        ],
                    },
                    RESULT,
                    assistant("7 degrees."),
                ],
                "tools": TOOLS,
            },
            id="OpenAI",
        ),
        pytest.param(
            {
                "messages": [
                    ASK,
                    {
                        "role": "assistant",
                        "function_call": {"name": "weather", "arguments": {"town": "Bern"}},
                    },
                    {"role": "function", "content": "7 C"},
                    assistant("7 degrees."),
                ],
                "tools": json.dumps([WEATHER]),
            },
            id="OpenAI's first form",
        ),
        pytest.param(
            {
                "conversations": [
                    {"from": "human", "value": "ask"},
                    {
                        "from": "function_call",
                        "value": '{"name": "weather", "arguments": {"town": "Bern"}}',
                    },
                    {"from": "observation", "value": "7 C"},
                    {"from": "gpt", "value": "7 degrees."},
                ],
                "tools": json.dumps([WEATHER]),
            },
            id="ShareGPT",
        ),
    ],
)
def test_tool_calls_take_one_form(tmp_path: Path, raw: Any) -> None:
    rows = both(prepared(tmp_path, raw))
    assert {"messages": CALLED, "tools": TOOLS} in rows and len(rows) == 21


def test_what_stands_beside_a_turn_is_kept(tmp_path: Path) -> None:
    turns = [
        {"role": "developer", "content": "s", "name": "x"},
        {
            "role": "user",
            "content": [{"type": "text", "text": "ask"}, {"type": "text", "text": "!"}],
        },
        {"role": "assistant", "content": "first", "weight": 0},
        user("more"),
        assistant("second", reasoning_content="because", weight=1),
    ]
    out = prepared(tmp_path, {"messages": turns})
    (row,) = [row for row in both(out) if row["messages"][1]["content"] == "ask!"]
    assert row["messages"] == [
        system("s"),
        user("ask!"),
        assistant("first", train=False),
        user("more"),
        assistant("second", reasoning_content="because"),
    ]


TALK = "\n\nHuman: ask\n\nAssistant: one\n\nHuman: more\nlines\n\nAssistant: two"


def test_a_transcript_becomes_turns(tmp_path: Path) -> None:
    rows = both(prepared(tmp_path, {"text": TALK}))
    turns = [user("ask"), assistant("one"), user("more\nlines"), assistant("two")]
    assert {"messages": turns} in rows


def test_transcripts_become_a_pair(tmp_path: Path) -> None:
    raw = {"chosen": TALK, "rejected": TALK.replace("two", "zwei")}
    rows = both(prepared(tmp_path, raw, as_preferences=True), "preferences")
    prompt = [user("ask"), assistant("one"), user("more\nlines")]
    pair = {"prompt": prompt, "chosen": [assistant("two")], "rejected": [assistant("zwei")]}
    assert pair in rows


def test_a_transcript_as_prompt_awaits_its_answers(tmp_path: Path) -> None:
    raw = {"prompt": "\n\nHuman: ask\n\nAssistant:", "chosen": " yes", "rejected": " no"}
    rows = both(prepared(tmp_path, raw, as_preferences=True), "preferences")
    assert {
        "prompt": [user("ask")],
        "chosen": [assistant(" yes")],
        "rejected": [assistant(" no")],
    } in rows


def test_texts_are_conversations_without_turns(tmp_path: Path) -> None:
    rows = both(prepared(tmp_path, {"text": "we ask\n\nHuman beings"}))
    assert {"text": "we ask\n\nHuman beings"} in rows and len(rows) == 21


def test_a_blank_text_is_quarantined(tmp_path: Path) -> None:
    rows = [*variants({"text": "we ask"}), {"text": " \n"}]
    folder = source(tmp_path / "in", {"rows.jsonl": rows})
    prepare_data(HALF, Context(tmp_path / "out"), conversations=folder)
    (bad,) = read(tmp_path / "out" / "quarantine.jsonl")
    assert (bad["line"], bad["rule"]) == (22, "empty_text")


@pytest.mark.parametrize("label", [True, "false", 1])
def test_judged_answers_are_a_kind_of_their_own(tmp_path: Path, label: Any) -> None:
    raw = {"prompt": "ask", "completion": "a", "label": label}
    out = prepared(tmp_path, raw, as_preferences=True)
    row = {"prompt": [user("ask")], "completion": [assistant("a")], "label": label != "false"}
    assert row in both(out, "unpaired") and not (out / "preferences").exists()


def test_judged_answers_are_not_trained_as_conversations(tmp_path: Path) -> None:
    raw = {"prompt": "ask", "completion": "a", "label": False}
    with pytest.raises(StageError, match=r"rows\.jsonl: holds unpaired .* give it as the pref"):
        prepared(tmp_path, raw)


def test_a_label_that_is_none_is_quarantined(tmp_path: Path) -> None:
    rows = variants({"prompt": "ask", "completion": "a", "label": True})
    rows.append({"prompt": "q", "completion": "a", "label": "maybe"})
    prepare_data(
        HALF,
        Context(tmp_path / "out"),
        conversations=source(tmp_path / "c", {"c.jsonl": good(20)}),
        preferences=source(tmp_path / "p", {"p.jsonl": rows}),
    )
    assert [bad["rule"] for bad in read(tmp_path / "out" / "quarantine.jsonl")] == ["not_a_label"]


# --- columns by name


def test_columns_can_be_named(tmp_path: Path) -> None:
    raw = {"frage": "ask", "antwort": "a", "question": "no", "answer": "no"}
    columns = Columns(question="frage", answer="antwort")
    out = prepared(tmp_path, raw, HALF.model_copy(update={"columns": columns}))
    assert {"messages": [user("ask"), assistant("a")]} in both(out)
    report = json.loads((out / "report.json").read_text())["conversations"]["sources"]
    assert report["rows.jsonl"]["columns"] == {"question": "frage", "answer": "antwort"}


def test_keys_and_roles_of_turns_can_be_named(tmp_path: Path) -> None:
    raw = {"messages": [{"who": "Kunde", "said": "ask"}, {"who": "Agent", "said": "a"}]}
    columns = Columns(role="who", content="said", user_roles=("Kunde",), assistant_roles=("Agent",))
    out = prepared(tmp_path, raw, HALF.model_copy(update={"columns": columns}))
    assert {"messages": [user("ask"), assistant("a")]} in both(out)


def test_usual_second_names_of_columns_are_known(tmp_path: Path) -> None:
    out = prepared(tmp_path, {"prompt": "ask", "response": "a"})
    assert {"messages": [user("ask"), assistant("a")]} in both(out)


# --- mixtures


def mixed(tmp_path: Path, *sources: Source, **config: Any) -> dict[str, int]:
    """Training rows by file of 400 and 100 questions."""
    folder = source(tmp_path / "in", {"big.jsonl": good(400), "little.jsonl": good(100, start=400)})
    out = tmp_path / "out"
    prepare_data(PrepareData(sources=sources, **config), Context(out), conversations=folder)
    report = json.loads((out / "report.json").read_text())["conversations"]
    assert report["totals"]["over_cap"] + report["totals"]["kept"] == 500
    return {name: facts["train"] for name, facts in report["sources"].items()}


def test_weights_take_as_many_as_the_scarcest_source_allows(tmp_path: Path) -> None:
    got = mixed(tmp_path, Source(files="big*", weight=0.7), Source(files="little*", weight=0.3))
    assert got["little.jsonl"] > 80 and abs(got["big.jsonl"] - got["little.jsonl"] * 7 / 3) < 1


def test_sources_can_be_capped_and_the_whole_too(tmp_path: Path) -> None:
    got = mixed(tmp_path / "a", Source(files="big*", max_rows=50))
    assert got["big.jsonl"] == 50 and got["little.jsonl"] > 80
    got = mixed(
        tmp_path / "b", Source(files="big*", weight=3), Source(files="*", weight=1),
        max_conversations=80,
    )  # fmt: skip
    assert got == {"big.jsonl": 60, "little.jsonl": 20}


@pytest.mark.parametrize(
    ("have", "weights", "limit", "want"),
    [
        ([100, 100], [None, None], None, [100, 100]),
        ([100, 10], [1.0, 1.0], None, [10, 10]),
        ([100, 10, 7], [9.0, 1.0, None], None, [90, 10, 7]),
        ([100, 10], [0.7, 0.3], None, [23, 10]),
        ([100, 100], [3.0, 1.0], 40, [30, 10]),
        ([100, 0], [1.0, 1.0], None, [100, 0]),
    ],
)
def test_shares(have: Any, weights: Any, limit: int | None, want: list[int]) -> None:
    assert ledger.shares(have, weights, limit=limit) == want


# --- copies and contamination

LONG = "one two three four five six seven eight nine ten eleven twelve thirteen"


def test_test_files_hold_out_their_rows_and_clean_the_rest(tmp_path: Path) -> None:
    copies = good(5)  # the same rows in both
    same_question = [{"messages": [user("question 7"), assistant("another answer")]}]
    leaked = [{"messages": [user("x"), assistant(f"So, {LONG.upper()}!")]}]
    folder = source(
        tmp_path / "in",
        {
            "train.jsonl": [*good(40, start=100), *copies, *same_question, *leaked],
            "my_test.jsonl": [*good(10), {"messages": [user("y"), assistant(f"{LONG} fourteen")]}],
        },
    )
    out = tmp_path / "out"
    metrics = prepare_data(PrepareData(test_files=("*test*",)), Context(out), conversations=folder)
    assert metrics["conversations/test"] == 11 and metrics["conversations/train"] == 40
    assert metrics["conversations/duplicates"] == 5
    assert metrics["conversations/contaminated"] == 2


def test_shared_words_are_found_whatever_case_and_punctuation() -> None:
    def row(text: str) -> Any:
        return {"messages": [user("why"), assistant(text)]}

    shared = overlap.overlap([row(f"a {LONG} b"), row("short one")], length=13)
    assert shared(row(f"xx {LONG.title().replace(' ', ', ')}."))
    assert not shared(row(LONG.replace("seven", "seventh") + " " + LONG[:-9]))
    assert shared(row("Short -- one!")) and not shared(row("short two"))


def test_words_in_many_held_out_rows_are_no_contamination() -> None:
    rows = [{"messages": [user(f"{LONG} {n}"), assistant("a")]} for n in range(3)]
    assert not overlap.overlap(rows, length=13)(rows[0] | {"messages": [user(f"{LONG} 9")]})
    assert overlap.overlap(rows[:2], length=13)({"messages": [user(f"{LONG} 9")]})


def test_stretches_are_those_of_a_plain_search() -> None:
    said = b"a bb a bb a ccc a bb"
    words = said.split()
    for length in (1, 2, 3, 8):
        found = overlap.stretches(said, length)
        assert found is not None and len(found) == len(words) - length + 1
        texts = [b" ".join(words[n : n + length]) for n in range(len(found))]
        assert len(set(found.tolist())) == len(set(texts))
        for text, value in zip(texts, found.tolist(), strict=True):
            (alone,) = overlap.stretches(text, length)  # type: ignore[misc]
            assert alone == value
    assert overlap.stretches(said, 9) is None


def test_more_stretches_than_memory_holds_are_sampled(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(overlap, "MOST_STRETCHES", 2_000)
    rows = [
        {"messages": [user(" ".join(f"w{number}x{n}" for n in range(100)))]} for number in range(90)
    ]
    shared = overlap.overlap(rows, length=13)
    assert all(map(shared, rows))  # of 88 stretches of each, about every fourth is looked for
    other = {"messages": [user(" ".join(f"v{n}" for n in range(100)))]}
    assert not shared(other)


def test_near_copies_are_left_out_where_asked(tmp_path: Path) -> None:
    pytest.importorskip("datasketch")
    words = [f"word{n}" for n in range(300)]
    rows = good(30)
    for n in range(4):
        said = [*words[:40], f"changed{n}", *words[41:]]
        rows.append({"messages": [user("tell"), assistant(" ".join(said))]})
    folder = source(tmp_path / "in", {"a.jsonl": rows})
    config = HALF.model_copy(update={"near_duplicates": 0.7, "contamination_words": None})
    metrics = prepare_data(config, Context(tmp_path / "out"), conversations=folder)
    assert metrics["conversations/near_duplicates"] == 3
    assert metrics["conversations/kept"] == 31
