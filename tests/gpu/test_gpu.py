"""One GPU, a few minutes: the same stages through NCCL, in bfloat16, and what needs a GPU."""

import json
import math
from pathlib import Path
from typing import Any

import pytest

from backends import DDP, FSDP, AnyBackend, DeepSpeed, Local, Resources
from backends.placement.local import num_gpus
from stages import resume
from tests.small import Run, run_jobs

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(num_gpus() == 0, reason="needs a CUDA device"),
]
ONE = Resources(device="cuda")
BF16 = {"load_dtype": "float32", "compute_dtype": "bfloat16"}
BASE = {"learning_rate": 1e-3, "global_batch_size": 8, "max_steps": 6} | BF16
BACKENDS: dict[str, AnyBackend] = {
    "local": Local(),
    "ddp": DDP(),
    "fsdp": FSDP(),
    "zero2": DeepSpeed(zero_stage=2),
    "zero3": DeepSpeed(zero_stage=3),
}


def job(
    out: Path, small: Path, stage: str, backend: AnyBackend, settings: Any = None, **config: Any
) -> Run:
    base = {"sft": "model", "dpo": "policy"}[stage]
    return Run(
        out=out,
        stage=stage,
        config=BASE | config,
        inputs={base: small / "tied", "data": small / "data"},
        backend=backend,
        resources=ONE,
        settings=settings or {},
    )


@pytest.fixture(scope="module")
def trained(tmp_path_factory: pytest.TempPathFactory, small: Path) -> dict[str, dict[str, Run]]:
    found = {}
    for name, backend in BACKENDS.items():
        folder = tmp_path_factory.mktemp(name)
        found[name] = {s: job(folder / s, small, s, backend) for s in ("sft", "dpo")}
        run_jobs(list(found[name].values()))
    return found


@pytest.mark.parametrize("stage", ["sft", "dpo"])
@pytest.mark.parametrize("name", [name for name in BACKENDS if name != "local"])
def test_backends_agree_in_bfloat16(trained: dict, name: str, stage: str) -> None:
    assert trained[name][stage].losses == pytest.approx(trained["local"][stage].losses, abs=2e-2)


def test_dpo_starts_at_ln_2(trained: dict) -> None:
    for runs in trained.values():
        assert runs["dpo"].losses[0] == pytest.approx(math.log(2), abs=1e-3)


@pytest.mark.parametrize("name", ["local", "fsdp", "zero2"])
def test_qlora_with_a_paged_optimizer(tmp_path: Path, small: Path, name: str) -> None:
    method = {"kind": "qlora", "rank": 8}
    optimizer = "adamw" if name == "zero2" else "paged_adamw_8bit"
    config = {"method": method, "optimizer": optimizer, "load_dtype": "bfloat16"}
    run = job(tmp_path, small, "sft", BACKENDS[name], **config)
    run_jobs([run])
    assert run.losses[-1] < run.losses[0] + 0.05


def test_packing_keeps_documents_apart(tmp_path: Path, small: Path) -> None:
    run = job(tmp_path, small, "sft", Local(), pack_length=128)
    run_jobs([run])
    assert len(run.losses) == 6 and all(map(math.isfinite, run.losses))


@pytest.mark.parametrize("name", ["fsdp", "zero2"])
def test_resuming_gives_the_same_losses(
    trained: dict, tmp_path: Path, small: Path, name: str
) -> None:
    whole = trained[name]["sft"]
    first = job(tmp_path, small, "sft", BACKENDS[name], {"save_steps": 3})
    run_jobs([first])
    for folder in resume.complete(first.out)[1:]:
        (folder / resume.MARKER).unlink()
    resume.discard_incomplete(first.out)
    run_jobs([first])
    assert json.loads((first.out / "metrics.json").read_text())["resumed_from"] == 3
    assert first.losses == pytest.approx(whole.losses, abs=1e-3)
