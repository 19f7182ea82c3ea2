"""``python -m stages.data inspect``: what it says of files, good and bad."""

import json
import subprocess
import sys
from pathlib import Path

import pytest

from tests.data_rows import assistant, good, user
from tests.small import ROOT, python


def inspect(*words: object) -> tuple[int, str, str]:
    done = python("-m", "stages.data", "inspect", *map(str, words))
    return done.returncode, done.stdout, done.stderr


def test_it_tells_shape_rows_problems_with_places_and_samples(tmp_path: Path) -> None:
    rows = [
        *good(30),
        *good(2),
        {"messages": [user("q"), assistant("")]},
        {"messages": [user("q")]},
    ]
    path = tmp_path / "chats.jsonl"
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    code, out, err = inspect(path, "--html", tmp_path / "page.html")
    assert code == 1 and not err
    assert "shape       messages" in out and "rows        34" in out
    assert "usable      32, 2 of them duplicates" in out and "user 32, assistant 32" in out
    assert "empty_turn 1: chats.jsonl:33 turn 1 (assistant) is empty" in out
    assert "no_assistant_turn 1: chats.jsonl:34" in out
    assert "-- chats.jsonl:3" in out and "| assistant: [[answer 2]]" in out
    page = (tmp_path / "page.html").read_text()
    assert "<mark>answer 2</mark>" in page and "empty_turn 1" in page


def test_a_model_s_template_marks_what_is_trained(tmp_path: Path, small: Path) -> None:
    path = tmp_path / "chats.csv"
    path.write_text('question,answer\n"w4 w5","w6 <b>"\n')
    code, out, err = inspect(
        path, "--model", small / "tied" / "model", "--html", tmp_path / "p.html"
    )
    assert code == 0, err
    assert "tokens      p50 4" in out and "| w3 w1[[w3 w1]]" in out  # w3 stands for all words
    assert "w3 w1<mark>w3 w1</mark>" in (tmp_path / "p.html").read_text()


def test_a_broken_file_and_a_missing_one_are_one_line(tmp_path: Path) -> None:
    (tmp_path / "cut.json").write_text('[{"messages": []}, {"mess')
    code, _, err = inspect(tmp_path / "cut.json")
    assert code == 1 and err.count("\n") == 1 and "cut.json:1:" in err
    code, _, err = inspect(tmp_path / "none.json")
    assert code == 1 and "no such file or folder" in err


@pytest.mark.parametrize("content", ["", "question,answer\n"])
def test_a_file_without_rows_is_a_fault(tmp_path: Path, content: str) -> None:
    (tmp_path / "a.csv").write_text(content)
    code, out, err = inspect(tmp_path / "a.csv")
    assert code == 1 and "no rows" in out and "none" not in out.splitlines()[-1] and not err


def test_what_cannot_be_written_or_loaded_is_one_line(tmp_path: Path) -> None:
    path = tmp_path / "a.jsonl"
    path.write_text('{"question": "q", "answer": "a"}\n')
    for words in (["--html", tmp_path], ["--model", tmp_path / "none"]):
        code, _, err = inspect(path, *words)
        assert code == 1 and err.count("\n") == 1 and str(words[1]) in err


def test_a_reader_that_has_read_enough_sees_no_traceback(tmp_path: Path) -> None:
    path = tmp_path / "a.jsonl"
    path.write_text("".join(json.dumps(row) + "\n" for row in good(3)))
    words = [sys.executable, "-m", "stages.data", "inspect", *[str(path)] * 400]
    with subprocess.Popen(words, cwd=ROOT, stdout=-1, stderr=-1, text=True) as process:
        assert process.stdout and process.stderr
        assert process.stdout.readline().strip() == str(path)
        process.stdout.close()
        assert process.stderr.read() == ""


def test_columns_are_named_on_the_command_line(tmp_path: Path) -> None:
    path = tmp_path / "rows.jsonl"
    path.write_text('{"frage": "q", "antwort": "a"}\n')
    assert inspect(path)[0] == 1
    code, out, _ = inspect(path, "--column", "question=frage", "--column", "answer=antwort")
    assert code == 0 and "question_answer (" in out and "frage as question" in out
