"""Every backend and method: train on two ranks, export, and hand the export to the next stage."""

from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from backends import DDP, FSDP, AnyBackend, DeepSpeed, Resources
from stages.base import Context
from stages.checkpoint import describe, validate
from stages.convert import Convert, convert
from tests.small import Run, run_jobs

pytestmark = pytest.mark.slow

TWO = Resources(ranks_per_node=2)
CONFIG = {"learning_rate": 1e-3, "global_batch_size": 8, "max_steps": 3}
BACKENDS: dict[str, AnyBackend] = {
    "ddp": DDP(),
    "fsdp": FSDP(),
    "fsdp sharded": FSDP(checkpoints="sharded"),
    "zero2": DeepSpeed(zero_stage=2),
    "zero3": DeepSpeed(zero_stage=3),
}
METHODS = ("full", "lora", "dora")
QUANTISED: dict[str, AnyBackend] = {
    "ddp": DDP(),
    "fsdp": FSDP(),
    "fsdp sharded": FSDP(checkpoints="sharded"),
    "zero2": DeepSpeed(zero_stage=2),
}


@dataclass(frozen=True)
class Case:
    """One method on one model."""

    method: str
    base: str

    @property
    def name(self) -> str:
        return f"{self.method}-{self.base}"


CASES = [Case(method, base) for method in METHODS for base in ("tied", "untied")]


def through_two_stages(
    out: Path, small: Path, backend: AnyBackend, cases: list[Case]
) -> dict[str, dict[str, Any]]:
    """SFT, export, DPO from the export, export: the figures of both exports of each case."""
    figures: dict[str, dict[str, Any]] = {case.name: {} for case in cases}
    models = {case.name: small / case.base for case in cases}
    for stage, given in (("sft", "model"), ("dpo", "policy")):
        runs = {
            case.name: Run(
                out=out / f"{stage}-{case.name}",
                stage=stage,
                config=CONFIG | {"method": {"kind": case.method}},
                inputs={given: models[case.name], "data": small / "data"},
                backend=backend,
                resources=TWO,
            )
            for case in cases
        }
        run_jobs(list(runs.values()))
        for name, run in runs.items():
            export = out / f"convert-{stage}-{name}"
            figures[name][stage] = convert(
                Convert(export_dtype="float32"), Context(export), trained=run.out, base=models[name]
            )
            models[name] = export
            figures[name][f"{stage} losses"] = run.losses
            assert validate(export / "model", "float32") == ()
    return figures


@pytest.mark.parametrize("backend", BACKENDS)
def test_every_export_is_the_trained_model_and_trains_on(
    tmp_path: Path, small: Path, backend: str
) -> None:
    figures = through_two_stages(tmp_path, small, BACKENDS[backend], CASES)
    for case in CASES:
        found = figures[case.name]
        for stage in ("sft", "dpo"):
            parity = found[stage]["parity"]
            assert parity["logit_error"] < 1e-5 < parity["change"], (case, stage, parity)
            assert parity["change_kept"] == pytest.approx(1, abs=1e-3), (case, stage, parity)
            facts = describe(tmp_path / f"convert-{stage}-{case.name}" / "model")
            assert facts["tied"] is (case.base == "tied")
            assert found[stage]["untied"] is False
        assert found["dpo losses"][0] == pytest.approx(0.693147, abs=1e-5), case


@pytest.mark.parametrize("backend", QUANTISED)
def test_qlora_is_exported_as_it_was_trained(tmp_path: Path, small: Path, backend: str) -> None:
    cases = [Case("qlora", "tied"), Case("qlora", "untied")]
    figures = through_two_stages(tmp_path, small, QUANTISED[backend], cases)
    for case in cases:
        for stage in ("sft", "dpo"):
            found = figures[case.name][stage]
            assert found["merged_weights"] == "dequantised"
            assert found["merge_errors"]["original"] > 100 * found["parity"]["logit_error"]
            assert found["parity"]["logit_error"] < 1e-4, (case, stage, found)
