"""JSON lines come back as they were written, whatever is in them and whatever a kill left."""

from pathlib import Path

from stages.data import lines


def test_separators_in_a_value_split_no_line_and_a_cut_one_is_left_out(tmp_path: Path) -> None:
    rows = [{"text": f"a{mark}b"} for mark in ("\u2028", "\u2029", "\u0085", "\n", "é")]
    path = tmp_path / "rows.jsonl"
    path.write_text(lines.join(map(lines.dump, rows)) + '{"text": {"cut": 1}', encoding="utf-8")
    assert lines.rows(path) == rows
    path.write_text('{"text": "raw \u2028 separator"}\n', encoding="utf-8")
    assert lines.rows(path) == [{"text": "raw \u2028 separator"}]
