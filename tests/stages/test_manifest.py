"""The manifest: an identity that was written down is the same one when it is read again."""

import datetime
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
