"""The manifest: an identity that was written down is the same one when it is read again."""

import datetime
import shutil
from pathlib import Path

from stages import STAGES, manifest
from stages.manifest import Manifest, identify
from stages.tokenize_data import TokenizeData


def test_an_output_made_for_a_date_is_found_whole_again(tmp_path: Path) -> None:
    config = TokenizeData(template_date=datetime.date(2026, 1, 1))
    wanted = identify(STAGES["tokenize_data"], config, {})
    manifest.write(tmp_path, Manifest(identity=wanted))
    found = manifest.read(tmp_path)
    assert found is not None and found.identity == wanted
    assert manifest.damage(tmp_path, found, wanted) is None
    assert wanted.config["template_date"] == "2026-01-01"


def test_logs_may_be_cleared_away_and_weights_may_not(tmp_path: Path) -> None:
    wanted = identify(STAGES["tokenize_data"], TokenizeData(), {})
    for name in ("model/weights", "logs/rank-0.log", "beats/rank-0.json", "stacks/rank-0.txt"):
        (tmp_path / name).parent.mkdir()
        (tmp_path / name).write_text("some")
    assert manifest.sizes(tmp_path) == {"model/weights": 4}
    older = Manifest(identity=wanted, files={"model/weights": 4, "logs/rank-0.log": 4})
    shutil.rmtree(tmp_path / "logs")
    assert manifest.damage(tmp_path, older, wanted) is None
    (tmp_path / "model" / "weights").unlink()
    assert manifest.damage(tmp_path, older, wanted) == "model/weights is missing and was 4 bytes"
