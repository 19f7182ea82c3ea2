"""Backend ``auto``: what the plan says, a move when memory really runs out, and the probe."""

import json
import os
import resource
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from backends import Auto, Resources
from flows import moves, planning
from flows.failures import HOST_MEMORY, Ended, Failure, diagnose
from flows.run_stage import Plan, plan
from flows.steps import Artifact, Lineage, Step
from stages import manifest
from stages.dpo import DPO
from stages.sft import SFT
from tests.small import ENV, ROOT

GROUPS = Path("/sys/fs/cgroup/memory")


def step(config: SFT | DPO, **resources: object) -> Step[SFT | DPO]:
    return Step[SFT | DPO](
        config=config, backend=Auto(), resources=Resources.model_validate(resources)
    )


def given(folder: Path, name: str, known: Lineage) -> Artifact:
    return Artifact(name, name, folder, folder.name, "reused", lineage=known)


@pytest.fixture
def known(small: Path) -> Lineage:
    return Lineage(str(small / "tied" / "model"), longest_conversation=64, longest_pair=32)


def planned(small: Path, store: Path, known: Lineage, asked: Step[SFT | DPO]) -> Plan:
    inputs = {
        "model": given(small / "tied", "fetch", known),
        "data": given(small / "data", "t", known),
    }
    return plan("sft", asked, store, label="sft", inputs=inputs)


def test_the_first_choice_is_ddp_where_memory_suffices(
    small: Path, tmp_path: Path, known: Lineage
) -> None:
    found = planned(small, tmp_path, known, step(SFT(global_batch_size=32)))
    first = found.remaining[0]
    assert first.step.backend.kind == "ddp" and first.why
    assert first.step.resources.world_size == os.cpu_count()
    totals = [way.memory.total for way in found.ways if way.memory]
    assert totals == sorted(totals, reverse=True) and len(set(totals)) == len(totals)


def test_every_way_keeps_the_global_batch(small: Path, tmp_path: Path, known: Lineage) -> None:
    for way in planned(small, tmp_path, known, step(SFT(global_batch_size=32))).ways:
        assert way.micro_batch_size and way.accumulation_steps
        world = way.step.resources.world_size
        assert way.micro_batch_size * way.accumulation_steps * world == 32


def test_what_the_recipe_says_of_resources_is_a_limit(
    small: Path, tmp_path: Path, known: Lineage
) -> None:
    asked = step(SFT(global_batch_size=32), micro_batch_size=4, gradient_checkpointing=True)
    for way in planned(small, tmp_path, known, asked).ways:
        assert (way.micro_batch_size or 99) <= 4
        assert way.step.resources.gradient_checkpointing


def test_the_identity_knows_nothing_of_auto(small: Path, tmp_path: Path, known: Lineage) -> None:
    asked = step(SFT(global_batch_size=32))
    named = Step[SFT](config=SFT(global_batch_size=32))
    assert (
        planned(small, tmp_path, known, asked).identity
        == planned(small, tmp_path, known, named).identity  # pyright: ignore[reportArgumentType]
    )


def test_nothing_is_chosen_before_the_model_is_known(small: Path, tmp_path: Path) -> None:
    assert planned(small, tmp_path, Lineage(), step(SFT(global_batch_size=32))).ways == ()


def test_work_is_what_the_config_says(known: Lineage) -> None:
    config = DPO.model_validate(
        {
            "method": {"kind": "qlora", "rank": 8, "targets": "attention"},
            "global_batch_size": 6,
            "load_dtype": "bfloat16",
            "optimizer": "paged_adamw_8bit",
        }
    )
    asked = planning.work(config, known)
    assert (asked.stage, asked.method, asked.lora_rank) == ("dpo", "qlora", 8)
    assert (asked.lora_targets, asked.precision) == ("attention", "bf16")
    assert (asked.global_batch, asked.seq_length) == (6, 32)
    packed = planning.work(SFT(pack_length=128, global_batch_size=4), known)
    assert (packed.seq_length, packed.packing) == (128, True)


def test_a_move_is_written_down_and_never_undone(
    small: Path, tmp_path: Path, known: Lineage
) -> None:
    found = planned(small, tmp_path, known, step(SFT(global_batch_size=32)))
    first, second, third, *_ = found.ways
    (found.out / "failures").mkdir(parents=True)
    said = moves.move(found.out, first, second, Failure(HOST_MEMORY, ""))
    assert first.text in said and second.text in said and "from the start" in said
    assert found.remaining == found.ways[1:]
    moves.move(found.out, second, third, Failure(HOST_MEMORY, ""))
    assert found.remaining == found.ways[2:]
    assert [fact["to"] for fact in moves.read(found.out)] == [second.text, third.text]


def test_a_move_that_a_full_disk_cuts_short_costs_none_of_those_before(
    small: Path, tmp_path: Path, known: Lineage
) -> None:
    found = planned(small, tmp_path, known, step(SFT(global_batch_size=32)))
    found.out.mkdir(parents=True)
    first, second, third, *_ = found.ways
    moves.move(found.out, first, second, Failure(HOST_MEMORY, ""))
    before = moves.read(found.out)
    size = (found.out / moves.NAME).stat().st_size
    limits = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (size + 10, limits[1]))
    try:
        with pytest.raises(OSError, match="File too large"):
            moves.move(found.out, second, third, Failure(HOST_MEMORY, ""))
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limits)
    assert moves.read(found.out) == before


KILLED = "Root Cause (first observed failure):\n  rank      : 1\n  exitcode  : -9 (pid: 7)\n"


@pytest.mark.parametrize(
    ("said", "kills", "memory"),
    [
        ("RuntimeError: [enforce fail] DefaultCPUAllocator: can't allocate memory", 0, True),
        ("torch.OutOfMemoryError: CUDA out of memory. Tried to allocate 2 GiB", 0, True),
        (KILLED, 1, True),
        (KILLED, 0, False),
        ("KeyError: 'x'", 1, False),
    ],
)
def test_only_memory_counts_as_memory(tmp_path: Path, said: str, kills: int, memory: bool) -> None:
    log = tmp_path / "log.txt"
    log.write_text(f"CUDA out of memory in an earlier attempt\n{said}\n")
    ended = Ended(1, log, since=len("CUDA out of memory in an earlier attempt\n"), oom_kills=kills)
    assert (diagnose("sft", tmp_path, ended).kind.policy == "less memory") is memory


# Real memory, really running out.

SCRIPT = """
import sys
from pathlib import Path
from backends import Auto, Resources
from flows.run_stage import plan, run_stage
from flows.steps import Artifact, Lineage, Step
from stages.sft import SFT

folder, store = Path(sys.argv[1]), Path(sys.argv[2])
known = Lineage(str(folder / "large" / "model"), longest_conversation=32, longest_pair=32)
step = Step[SFT](
    config=SFT(global_batch_size=8, max_steps=2, learning_rate=1e-4), backend=Auto(margin_gb=0)
)
inputs = {
    name: Artifact(name, name, folder / name, name, "reused", lineage=known)
    for name in ("model", "data")
}
inputs["model"] = Artifact("model", "fetch", folder / "large", "large", "reused", lineage=known)
print(run_stage(plan("sft", step, store, label="sft", inputs=inputs), say=print).path)
"""


@pytest.fixture
def group() -> Iterator[Path]:
    """A control group whose parent has a memory limit that the planner is not told of."""
    outer = GROUPS / f"pytest-{os.getpid()}"
    inner = outer / "run"
    try:
        inner.mkdir(parents=True)
        (outer / "memory.limit_in_bytes").write_text(str(3_200_000_000))
    except OSError:
        pytest.skip("needs the right to make control groups of version 1")
    yield inner
    inner.rmdir()
    outer.rmdir()


def write_large(folder: Path) -> None:
    import torch
    from datasets import Dataset
    from transformers import AutoTokenizer, LlamaConfig, LlamaForCausalLM

    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=128,
        hidden_size=768,
        intermediate_size=3072,
        num_hidden_layers=6,
        num_attention_heads=12,
        max_position_embeddings=64,
        pad_token_id=0,
        eos_token_id=1,
        bos_token_id=2,
    )
    LlamaForCausalLM(config).save_pretrained(folder / "large" / "model")
    AutoTokenizer.from_pretrained(folder / "tied" / "model").save_pretrained(
        folder / "large" / "model"
    )
    ids = [[4 + (row * 7 + place * (row + 3)) % 120 for place in range(32)] for row in range(16)]
    rows = Dataset.from_list([{"input_ids": row, "labels": row} for row in ids])
    rows.save_to_disk(folder / "data" / "conversations" / "train")


@pytest.mark.slow
def test_a_killed_rank_moves_to_a_plan_that_needs_less(
    small: Path, tmp_path: Path, group: Path
) -> None:
    folder = tmp_path / "inputs"
    (folder / "tied").mkdir(parents=True)
    (folder / "tied" / "model").symlink_to(small / "tied" / "model")
    write_large(folder)

    def run(store: str, into: Path | None) -> subprocess.CompletedProcess[str]:
        def enter() -> None:
            if into is not None:
                (into / "cgroup.procs").write_text(str(os.getpid()))

        return subprocess.run(
            [sys.executable, "-c", SCRIPT, str(folder), str(tmp_path / store)],
            env=os.environ | ENV,
            cwd=ROOT,
            capture_output=True,
            text=True,
            check=False,
            preexec_fn=enter,
        )

    moved, free = run("limited", group), run("free", None)
    assert (moved.returncode, free.returncode) == (0, 0), moved.stdout + moved.stderr + free.stderr
    lines = [line for line in moved.stdout.splitlines() if "out of memory under" in line]
    out = Path(moved.stdout.splitlines()[-1])
    done, undisturbed = manifest.read(out), manifest.read(Path(free.stdout.splitlines()[-1]))
    assert done and undisturbed and done.identity == undisturbed.identity
    told = done.provenance["moves"]
    assert told and [f"sft: {moves.describe(fact)}" for fact in told] == lines
    assert not undisturbed.provenance["moves"]
    assert undisturbed.provenance["choice"][0] == told[0]["from"]
    assert done.provenance["choice"][0] == told[-1]["to"]

    def losses(made: Path) -> list[float]:
        return [
            json.loads(row)["loss"] for row in (made / "metrics.jsonl").read_text().splitlines()
        ]

    assert losses(out) == pytest.approx(losses(Path(free.stdout.splitlines()[-1])), abs=1e-4)
