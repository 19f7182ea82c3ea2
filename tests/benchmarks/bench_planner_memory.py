"""The planner's memory against public measurements, beside the static rules of other tools.

``PYTHONPATH=. python tests/benchmarks/bench_planner_memory.py``. Exact rows are allocated bytes;
reported rows are what an allocator had reserved or a tool showed, so two constants a kind turn
planned into reported bytes: reported = planned + context + (stretch - 1) * activations and logits.
They are fitted on all *other* sources, so no row is scored by a constant that has seen its source.
"""

import csv
import itertools
import re
import sys
from collections import defaultdict
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from statistics import mean, median
from time import perf_counter
from typing import Any

from backends import DDP, FSDP, DeepSpeed, Local, NamedBackend, Resources
from backends.planner.memory import Memory, memory, unknown_buckets
from backends.planner.model import Model, find_model
from backends.planner.work import Setup, Work
from tests.benchmarks.table import show

FOLDER = Path(__file__).resolve().parents[3] / "shared" / "knowledge" / "memory"
GB, GIB = 1e9, 2**30
MARGIN = 0.8 * GB
STRETCHES = [1 + 0.1 * step for step in range(31)]
CONTEXTS = [0.25 * GB * step for step in range(13)]

HF = Work(loss="hf", packing=False, lora_rank=8, fsdp_version=1)
UNSLOTH = {"fused_kernels": True, "fused_norms": True, "loss": "fused", "lora_dropout": 0.0}
METHODS: dict[str, dict[str, Any]] = {
    "lora": {"method": "lora"},
    "lora bf16": {"method": "lora"},
    "lora fsdp": {"method": "lora"},
    "full": {"method": "full"},
    "full fsdp": {"method": "full"},
    "pretrain full": {
        "method": "full",
        "precision": "fp32-master",
        "packing": True,
        "fsdp_version": 2,
    },
    "full (8-bit opt)": {"method": "full", "optimizer": "adamw_8bit"},
    "qlora": {"method": "qlora"},
    "qlora (compile)": {"method": "qlora", "fused_norms": True},
    "lora int4 (bnb)": {"method": "qlora", "frozen_upcast": True},
    "lora HF": {"method": "lora", "attention": "eager"},
    "lora HF+FA2": {"method": "lora"},
    "lora unsloth": {"method": "lora", **UNSLOTH},
    "qlora HF": {"method": "qlora", "attention": "eager"},
    "qlora HF+FA2": {"method": "qlora"},
    "qlora unsloth": {"method": "qlora", **UNSLOTH},
}
"""Methods that the planner covers; GPTQ, 8-bit bases, optimizers stepped inside backward and
layers spread over cards by ``device_map`` are others."""

BACKENDS: dict[str, NamedBackend] = {
    "single": Local(),
    "ddp": DDP(),
    "fsdp": FSDP(),
    "fsdp2": FSDP(),
    "fsdp offload": FSDP(cpu_offload=True),
    "zero2": DeepSpeed(zero_stage=2),
    "zero3": DeepSpeed(zero_stage=3),
    "zero2 offload opt": DeepSpeed(zero_stage=2, offload_optimizer="cpu"),
    "zero3 offload params": DeepSpeed(zero_stage=3, offload_parameters="cpu"),
    "zero3 offload opt+params": DeepSpeed(
        zero_stage=3, offload_optimizer="cpu", offload_parameters="cpu"
    ),
}
SOURCES: dict[str, dict[str, Any]] = {
    "ms-swift v2 bench": {"lora_targets": "attention"},
    "LLaMA-Factory wiki": {"lora_dropout": 0.0, "packing": True},
    "DeepSpeed#3901": {"precision": "fp32-master", "packing": True, "attention": "eager"},
    "axolotl examples": {"packing": True, "lora_rank": 32},
    "PEFT README": {"precision": "fp32"},
    "torchtune README 2024-09 @ca0a6de": {"lora_targets": "attention", "packing": True},
    "torchtune README 2024-05 @7d05579": {"lora_targets": "attention"},
}
SHORT = {"alpaca var": 512}
"""Tokens of the longest row, where a source names its data instead."""


@dataclass(frozen=True)
class Row:
    source: str
    kind: str
    model: Model
    work: Work
    setup: Setup
    measured: float | None
    """Bytes; ``None`` for a run that ran out of memory."""

    capacity: float

    @property
    def planned(self) -> Memory:
        return memory(self.model, self.work, self.setup)


def read(name: str) -> list[dict[str, str]]:
    with (FOLDER / name).open() as file:
        return list(csv.DictReader(file))


def exact(raw: dict[str, str]) -> Row:
    ranks, micro_batch = int(raw["gpus"]), int(raw["batch_per_gpu"])
    method: Any = raw["method"]
    work = Work(
        method=method,
        precision="fp32-master" if raw["backend"] == "fsdp32" else "bf16",
        loss="fused" if raw["loss"] == "foak" else "chunked",
        lora_targets="attention",
        fused_kernels=method == "qlora",
        fsdp_version=1,
        global_batch=ranks * micro_batch,
    )
    backend = Local() if raw["backend"] == "single" else FSDP()
    setup = Setup(backend, _resources(ranks, micro_batch, recompute=True))
    label = f"{raw['backend']} x{ranks} {method} {micro_batch} {raw['loss']}"
    return Row(
        label,
        "allocated",
        find_model(raw["model"]),
        work,
        setup,
        float(raw["peak_bytes"]),
        80 * GIB,
    )


def _resources(ranks: int, micro_batch: int, *, recompute: bool) -> Resources:
    return Resources(
        ranks_per_node=ranks,
        device="cuda",
        micro_batch_size=micro_batch,
        gradient_checkpointing=recompute,
    )


def reported(raw: dict[str, str]) -> Row | None:
    """A row as the planner sees it, or ``None`` for what it does not cover."""
    backend, method = raw["backend"], raw["method"]
    if backend == "single" and method in BACKENDS:
        backend, method = method, "full"
    if backend not in BACKENDS or method not in METHODS or "selective" in raw["settings"]:
        return None
    if "+" in raw["mem"] or raw["model"] == "Llama-2-70B":
        # Sums over two cards; a table whose 26 GB are less than the weights and inputs of 16,384
        # tokens, so its rows were shorter than its heading says.
        return None
    try:
        model = find_model(raw["model"])
    except ValueError:
        return None
    settings = raw["settings"]
    seq = int(raw["seq"]) if raw["seq"].isdigit() else SHORT.get(raw["seq"], 64)
    ranks, micro_batch = int(raw["gpus"]), int(raw["bs_per_gpu"])
    changes = SOURCES.get(raw["source"], {}) | METHODS[method] | {"seq_length": seq}
    if "FA2=False" in settings:
        changes["attention"] = "eager"
    work = replace(HF, global_batch=ranks * micro_batch, **changes)
    resources = _resources(ranks, micro_batch, recompute="gc=False" not in settings)
    offloads = "unsloth" in method  # its checkpointing keeps hidden states in host memory
    setup = Setup(
        BACKENDS[backend], resources.model_copy(update={"activation_offloading": offloads})
    )
    unit = GIB if raw["unit"] == "GiB" else GB
    measured = None if raw["mem"] == "OOM" else float(raw["mem"]) * unit
    found = re.search(r"(\d+)G\b", raw["gpu"])
    capacity = 24 * GIB if "4090" in raw["gpu"] else int(found[1]) * GIB if found else 80 * GIB
    kind = "of varying length" if not work.packing else "of one length"
    return Row(raw["source"], kind, model, work, setup, measured, capacity)


def shown(row: Row, stretch: float, context: float) -> float:
    """What an allocator reserves for the planned bytes; never more than the card has."""
    need = row.planned
    moving = need.activations + need.logits
    return min(need.total + (stretch - 1) * moving + context, row.capacity)


def fit(rows: Iterable[Row]) -> tuple[float, float]:
    """The (stretch, context) of least mean error."""
    rows = list(rows)
    return min(
        itertools.product(STRETCHES, CONTEXTS),
        key=lambda pair: mean(_error(row, shown(row, *pair)) for row in rows),
    )


def _error(row: Row, planned: float) -> float:
    assert row.measured is not None
    return abs(planned / row.measured - 1)


def left_out(rows: Sequence[Row], group: Any) -> list[tuple[Row, float]]:
    """(row, planned), by constants fitted on the rows of its kind in all other groups, or on all
    other rows where no other group has its kind."""
    found = []
    for name in dict.fromkeys(group(row) for row in rows):
        others = [row for row in rows if group(row) != name]
        for kind in dict.fromkeys(row.kind for row in rows if group(row) == name):
            same = [row for row in others if row.kind == kind] or others
            constants = fit(same)
            found += [
                (row, shown(row, *constants))
                for row in rows
                if group(row) == name and row.kind == kind
            ]
    return found


# The rules as the two tools publish them.
LLAMA_FACTORY = {"full": 18.0, "lora": 2.0, "qlora": 0.5}


def llama_factory(row: Row) -> float:
    """README's table: gigabytes a billion parameters, 18 full, 2 LoRA, 0.5 QLoRA; divided by N."""
    return LLAMA_FACTORY[row.work.method] * row.model.num_parameters / _divisor(row)


def accelerate(row: Row) -> float:
    """``accelerate estimate-memory``: training with Adam takes 4 times the model's bytes."""
    element = 0.5 if row.work.method == "qlora" else 2
    return 4 * element * row.model.num_parameters / _divisor(row)


def _divisor(row: Row) -> int:
    return 1 if row.setup.backend.kind in ("local", "ddp") else row.setup.world_size


RULES = {"LLaMA-Factory": llama_factory, "accelerate": accelerate}


def show_exact(rows: Sequence[Row]) -> None:
    lines, errors = [], []
    for row in rows:
        need = row.planned
        assert row.measured is not None
        error = need.total / row.measured - 1
        errors.append(abs(error))
        lines.append(
            [
                row.source,
                f"{row.measured / GB:.3f}",
                f"{need.total / GB:.3f}",
                f"{error:+.2%}",
                need.phase,
            ]
        )
    show("Exact rows, GB allocated", ["run", "measured", "planned", "error", "phase"], lines)
    print(f"median {median(errors):.3%}, mean {mean(errors):.3%}, worst {max(errors):.3%}")
    for name, rule in RULES.items():
        wrong = [_error(row, rule(row)) for row in rows]
        print(f"{name}'s rule: median {median(wrong):.0%}, mean {mean(wrong):.0%}")


def show_reported(rows: Sequence[Row]) -> None:
    rows = [row for row in rows if row.measured is not None]
    by_source = left_out(rows, lambda row: row.source)
    by_model = left_out(rows, lambda row: (row.source, row.model.name))
    lines = []
    groups: dict[tuple[str, str], list[int]] = defaultdict(list)
    for place, (row, _) in enumerate(by_source):
        groups[(row.source, row.kind)].append(place)
    finer = {id(row): planned for row, planned in by_model}
    for (source, kind), places in groups.items():
        pairs = [by_source[place] for place in places]
        lines.append(
            [
                source,
                kind,
                str(len(pairs)),
                f"{mean(_error(*pair) for pair in pairs):.1%}",
                f"{mean(_error(row, finer[id(row)]) for row, _ in pairs):.1%}",
                *(
                    f"{mean(_error(row, rule(row)) for row, _ in pairs):.0%}"
                    for rule in RULES.values()
                ),
            ]
        )
    everything = [_error(*pair) for pair in by_source]
    lines.append(
        [
            "all",
            "",
            str(len(everything)),
            f"{mean(everything):.1%}",
            f"{mean(_error(*pair) for pair in by_model):.1%}",
            *(f"{mean(_error(row, rule(row)) for row in rows):.0%}" for rule in RULES.values()),
        ]
    )
    head = ["source", "rows", "number", "source left out", "source's model left out", *RULES]
    show("Reported rows, mean error", head, lines)
    for kind in dict.fromkeys(row.kind for row in rows):
        stretch, context = fit(row for row in rows if row.kind == kind)
        print(f"all rows {kind}: stretch {stretch:.2f}, context {context / GB:.2f} GB")


def show_verdicts(rows: Sequence[Row]) -> None:
    wrong, alarms, failed = [], [], 0
    for row in rows:
        need = row.planned
        says_it_fits = need.total + MARGIN + unknown_buckets(row.setup) <= row.capacity
        ran = row.measured is not None
        failed += not ran
        name = f"{row.source}: {row.model.name}, {row.work.method}, {row.work.seq_length} tokens"
        if says_it_fits and not ran:
            wrong.append(f"{name}: {need.total / GB:.1f} GB")
        if not says_it_fits and ran:
            alarms.append(f"{name}: {need.total / GB:.1f} GB of {row.capacity / GB:.1f}")
    print(f"\nVerdicts at a margin of {MARGIN / GB} GB: {len(rows)} runs, {failed} out of memory")
    print(f"called fitting though they did not: {len(wrong)} {wrong}")
    print(f"false alarms: {len(alarms)} ({len(alarms) / (len(rows) - failed):.1%}) {alarms}")


def show_speed(rows: Sequence[Row]) -> None:
    started = perf_counter()
    for row in rows:
        memory(row.model, row.work, row.setup)
    each = (perf_counter() - started) / len(rows)
    print(f"\nmemory(): {each * 1e6:.0f} microseconds a call, over {len(rows)} calls")


def main() -> None:
    if not FOLDER.is_dir():
        sys.exit(f"the measured rows are not here: {FOLDER} is no folder; nothing to score")
    precise = [exact(raw) for raw in read("exact_llama3_8b.csv")]
    show_speed(precise)
    show_exact(precise)
    loose = [row for raw in read("reported.csv") if (row := reported(raw))]
    print(f"\nreported rows covered: {len(loose)} of {len(read('reported.csv'))}")
    show_reported(loose)
    show_verdicts([*precise, *loose])


if __name__ == "__main__":
    main()
