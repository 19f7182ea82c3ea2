"""The flow that makes a plain model of what a training left: a folder of the user's own."""

import json
from pathlib import Path

import pytest

from tests.small import flow_alone
from tests.stages.write_shards import with_adapter, write_base


def words(trained: Path, base: Path) -> list[str]:
    """As the README has them."""
    places = {"trained": trained, "base": base}
    return ["convert", *(f"{key}.config.source.path={path}" for key, path in places.items())]


@pytest.fixture(scope="module")
def brought(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """``base``, an ``adapter`` of it as PEFT saves it, and ``other``, a wider base."""
    from transformers import AutoModelForCausalLM

    folder = tmp_path_factory.mktemp("brought")
    write_base(folder / "base", tie=False)
    write_base(folder / "other", tie=False, even=True)
    model = AutoModelForCausalLM.from_pretrained(folder / "base", dtype="float32")
    with_adapter(model, target_modules=["q_proj", "down_proj"]).save_pretrained(folder / "adapter")
    (folder / "adapter" / "optimizer.pt").write_text("what conversion does not read")
    return folder


@pytest.mark.slow
def test_an_adapter_from_elsewhere_is_merged_and_the_report_says_how_true_it_is(
    brought: Path, tmp_path: Path
) -> None:
    given = [*words(brought / "adapter", brought / "base"), "convert.config.export_dtype=float32"]
    done = flow_alone("convert", tmp_path / "store", *given)
    assert done.returncode == 0, done.stdout[-3000:] + done.stderr[-3000:]
    run = tmp_path / "store-runs" / "convert"
    assert (run / "convert" / "model" / "model.safetensors").is_file()
    assert not list((run / "fetch-trained").rglob("optimizer.pt"))
    parity = json.loads((run / "convert" / "metrics.json").read_text())["parity"]
    assert parity["change"] > 0.1 and parity["change_kept"] == pytest.approx(1, abs=1e-3)
    (row,) = [
        line for line in (run / "report.md").read_text().splitlines()
        if line.startswith("| convert | adapter, merged into float32 weights |")
    ]  # fmt: skip
    assert "at most 0.001" in row and row.endswith("| 100.0 |")


@pytest.mark.slow
def test_an_adapter_of_another_model_is_one_clear_line(brought: Path, tmp_path: Path) -> None:
    given = words(brought / "adapter", brought / "other")
    done = flow_alone("convert", tmp_path / "store", *given)
    assert done.returncode == 1
    assert "it was trained on another base" in done.stderr, done.stderr
    assert "Traceback" not in done.stderr


@pytest.mark.slow
def test_the_recipe_works_as_it_is(tmp_path: Path) -> None:
    done = flow_alone("convert", tmp_path / "store")
    assert done.returncode == 0, done.stdout[-3000:] + done.stderr[-3000:]
    model = tmp_path / "store-runs" / "tiny_convert" / "convert" / "model"
    files = list(model.glob("*.safetensors"))
    assert len(files) > 2 and max(file.stat().st_size for file in files) < 210_000
