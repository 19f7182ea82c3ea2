"""Beats are written over one another, and a reader never takes half of one for a whole."""

import json
from pathlib import Path

from backends.placement import supervise
from stages.beats import SIZE, Beats


def test_beats_are_written_over_one_another(tmp_path: Path) -> None:
    beats = Beats(tmp_path)
    file = tmp_path / "beats" / "rank-0.json"
    beats.beat("start")
    first = file.stat()
    for step in range(9, 12):
        beats.beat("step", step=step, total_steps=100)
        assert supervise._beats(str(tmp_path))[0]["step"] == step
    assert (file.stat().st_ino, file.stat().st_size) == (first.st_ino, SIZE)
    file.unlink()
    beats.beat("save")
    assert supervise._beats(str(tmp_path))[0]["phase"] == "save"
    assert [each.name for each in file.parent.iterdir()] == [file.name]


def test_half_a_beat_is_passed_over(tmp_path: Path) -> None:
    beats = Beats(tmp_path)
    file = tmp_path / "beats" / "rank-0.json"
    beats.beat("save", step=1)
    old = file.read_bytes()
    beats.beat("step", step=2)
    new = file.read_bytes()
    whole = [json.loads(old), json.loads(new)]
    for cut in range(1, SIZE):
        for torn in (new[:cut] + old[cut:], old[:cut] + new[cut:]):
            file.write_bytes(torn)
            assert all(beat in whole for beat in supervise._beats(str(tmp_path)).values())
