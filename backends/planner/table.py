"""The planner's answer as a table for a terminal, and as objects for a program."""

import textwrap
from collections.abc import Sequence
from dataclasses import asdict
from typing import Any

from backends.planner.explain import Rule
from backends.planner.hardware import GB, GIB, TERA, Machine, gib
from backends.planner.model import Model
from backends.planner.ranking import HOST_SHARE, Option, describe, reserved_bytes
from backends.planner.seconds import ADAPTERS
from backends.planner.work import OWN_LOSS, Work

WIDTH = 160
PARTS = ("weights", "gradients", "optimizer", "activations", "logits", "buffers")
HEAD = (
    "backend",
    "micro",
    "ckpt",
    "GiB",
    *("model", "grads", "optim", "activ", "logits", "buffer"),
    "host",
    "disk",
    "step s",
    "math",
    "comm",
    "offload",
    "write",
    "tok/s",
    "hours",
    "binds",
)
LEGEND = (
    "micro: rows x accumulation; GiB: a GPU's peak, its parts from model to buffer; host, disk: "
    "GiB a node; tok/s: all GPUs"
)


def as_text(
    model: Model,
    work: Work,
    machine: Machine,
    ranked: Sequence[Option],
    rules: Sequence[Rule],
    refused: Sequence[tuple[str, str]],
    *,
    rows: int | None = None,
    epochs: int = 1,
) -> str:
    """What fits, what does not, the rules: lines of at most ``WIDTH`` columns."""
    fitting = [option for option in ranked if option.fits]
    lacking = [option for option in ranked if not option.fits]
    blocks = [_question(model, work, machine)]
    if fitting:
        cells = [_cells(option, machine, hours(option, work, rows, epochs)) for option in fitting]
        blocks.append("\n".join((*_aligned((HEAD, *cells)), LEGEND)))
        blocks.append(_first(fitting[0], work, machine))
    else:
        blocks.append("Nothing fits.")
    if lacking:
        blocks.append("\n".join(("Does not fit:", *_lacking(lacking))))
    if refused:
        lines = (_wrapped(f"{name}: {reason}") for name, reason in refused)
        blocks.append("\n".join(("Refused:", *lines)))
    if rules:
        blocks.append("\n".join(("Rules of thumb:", *(_wrapped(str(rule)) for rule in rules))))
    return "\n\n".join(blocks)


def as_object(
    option: Option,
    model: Model,
    work: Work,
    machine: Machine,
    *,
    total_hours: float | None = None,
) -> dict[str, Any]:
    """One option as JSON: sizes in bytes, times in seconds, tokens/s of one GPU."""
    need, time = option.memory, option.time
    resources = option.setup.resources
    return {
        "backend": describe(option.setup.backend),
        "backend_config": option.setup.backend.model_dump(mode="json", exclude_none=True),
        "nodes": resources.nodes,
        "ranks_per_node": resources.ranks_per_node,
        "micro_batch": option.setup.micro_batch,
        "accumulation": option.accumulation,
        "gradient_checkpointing": resources.gradient_checkpointing,
        "peak_bytes_per_gpu": {"total": need.total} | {p: getattr(need, p) for p in PARTS},
        "phase": need.phase,
        "host_bytes": need.host_bytes,
        "disk_bytes": need.disk_bytes,
        "fits": option.fits,
        "short_by_bytes": option.short_by,
        "short_of": option.short_of,
        "reserved_bytes_per_gpu": round(reserved_bytes(option, work)),
        "step_seconds": time.seconds,
        "step_split_seconds": {
            key: asdict(time)[key]
            for key in ("compute", "exposed_communication", "offload", "generation")
        },
        "tokens_per_second_per_gpu": time.tokens_per_second_per_gpu,
        "hours": total_hours,
        "binds": time.binds,
        "why": option.why,
        "assumed": suppositions(model, work, machine),
        "warnings": warnings(model, work, machine),
    }


def hours(option: Option, work: Work, rows: int | None, epochs: int) -> float | None:
    """Hours for ``rows`` rows of data, ``epochs`` times over; the last step is filled up."""
    if rows is None:
        return None
    steps = -(-rows * epochs // work.global_batch)
    return steps * option.time.seconds / 3600


def _wrapped(text: str) -> str:
    return textwrap.fill(text, WIDTH, initial_indent="  ", subsequent_indent="      ")


def _question(model: Model, work: Work, machine: Machine) -> str:
    active = model.num_active_parameters
    size = f"{_count(model.num_parameters)} parameters"
    size += f", {_count(active)} active" if active != model.num_parameters else ""
    method = work.method if work.method == "full" else f"{work.method} rank {work.lora_rank}"
    reference = f", reference {work.reference}" if work.reference else ""
    loss = "" if work.stage in OWN_LOSS else f", {work.loss} loss"
    lines = [
        f"{model.name} ({size}): {work.stage}, {method}, {work.precision}, {work.optimizer}{loss}"
        f"{reference}",
        f"{work.global_batch} rows of {work.seq_length} tokens a step on {machine.name}, "
        f"{gib(machine.gpu.memory_bytes)} and {machine.gpu.flops / TERA:.3g} TFLOP/s each",
    ]
    supposed = "; ".join(suppositions(model, work, machine))
    lines.append(textwrap.fill(f"supposed: {supposed}", WIDTH, subsequent_indent="    "))
    for warning in warnings(model, work, machine):
        lines.append(textwrap.fill(f"warning: {warning}", WIDTH, subsequent_indent="    "))
    return "\n".join(lines)


def _count(number: int) -> str:
    return f"{number / GB:.2f}e9" if number >= 1e7 else f"{number / 1e6:.2f}e6"


def suppositions(model: Model, work: Work, machine: Machine) -> list[str]:
    """What was not told, or is the planner's own choice, and changes the answer."""
    found = list(machine.assumptions)
    if machine.device == "cuda":
        found.append(f"{HOST_SHARE:.0%} of host memory for the run, the rest for the system")
    if machine.ranks > 1 or machine.device == "cuda":
        found.append(f"FSDP {work.fsdp_version}")
    if model.is_mixture:
        found.append(
            "experts in a loop, as transformers 4 computes them (--experts grouped: as 5 does)"
            if work.experts == "loop"
            else "experts as grouped products, as transformers 5 computes them"
        )
    return found


def warnings(model: Model, work: Work, machine: Machine) -> list[str]:
    """What may be meant, and is more likely a slip; what the answer leaves out."""
    found = []
    if model.left_out:
        found.append(
            f"not counted: {' and '.join(model.left_out)} of {model.name}, neither weights nor work"
        )
    narrow = min(model.hidden_size, model.query_width, model.kv_width)
    if work.method in ADAPTERS and work.lora_rank > narrow:
        found.append(
            f"adapters of rank {work.lora_rank} are wider than what they adapt, {narrow} channels "
            "at the narrowest"
        )
    if machine.gpu.flops > machine.gpu.peak_flops:
        found.append(
            f"{machine.gpu.flops / TERA:.3g} TFLOP/s are more than the {machine.gpu.name}'s data "
            f"sheet promises, {machine.gpu.peak_flops / TERA:.3g}"
        )
    if work.seq_length > model.max_positions:
        found.append(
            f"rows of {work.seq_length} tokens are longer than the {model.max_positions} positions "
            f"that {model.name} was made for"
        )
    if model.is_mixture:
        found.append(
            "times of mixtures rest on one published row; take them as an order of magnitude"
        )
    return found


def _cells(option: Option, machine: Machine, total_hours: float | None) -> tuple[str, ...]:
    need, time = option.memory, option.time
    shown = [getattr(need, part) for part in PARTS]
    return (
        describe(option.setup.backend),
        f"{option.setup.micro_batch}x{option.accumulation}",
        "yes" if option.setup.resources.gradient_checkpointing else "no",
        _number(need.total),
        *(_number(size) for size in shown),
        _number(need.host_bytes),
        _number(need.disk_bytes),
        _seconds(time.seconds),
        _seconds(time.compute),
        _seconds(time.exposed_communication),
        _seconds(time.offload),
        _seconds(time.generation),
        f"{time.tokens_per_second_per_gpu * machine.ranks:.0f}",
        "" if total_hours is None else f"{total_hours:.1f}",
        time.binds,
    )


def _number(size: float) -> str:
    """GiB; ``-`` for nothing."""
    return f"{size / GIB:.1f}" if size else "-"


def _seconds(seconds: float) -> str:
    return f"{seconds:.2f}" if seconds >= 0.005 else "-"


def _aligned(rows: Sequence[Sequence[str]]) -> list[str]:
    """Words to the left, numbers to the right; a column in which no row says anything goes."""
    kept = [
        column
        for column in zip(*rows, strict=True)
        if any(cell not in ("", "-") for cell in column[1:])
    ]
    widths = [max(map(len, column)) for column in kept]
    lines = []
    for row in zip(*kept, strict=True):
        cells = [
            cell.ljust(width) if index in (0, len(kept) - 1) else cell.rjust(width)
            for index, (cell, width) in enumerate(zip(row, widths, strict=True))
        ]
        lines.append("  ".join(cells).rstrip())
    return lines


def _first(option: Option, work: Work, machine: Machine) -> str:
    """The choice in a sentence, with the warning about what the driver will show."""
    lines = [f"First choice: {describe(option.setup.backend)}, {option.why}."]
    shown = reserved_bytes(option, work)
    if machine.device == "cuda" and shown > machine.gpu.memory_bytes:
        lines.append(
            "nvidia-smi will show the GPU as full: PyTorch keeps freed blocks, up to "
            f"{gib(shown)} in runs like this;\nset PYTORCH_ALLOC_CONF=expandable_segments:True."
        )
    return "\n".join(lines)


def _lacking(options: Sequence[Option]) -> list[str]:
    rows = [
        (
            describe(option.setup.backend),
            f"{gib(option.memory.total)} at micro-batch {option.setup.micro_batch}",
            f"{gib(option.short_by)} of {option.short_of} short",
            option.why,
        )
        for option in options
    ]
    widths = [max(len(row[index]) for row in rows) for index in range(3)]
    lines = []
    for row in rows:
        columns = (cell.ljust(width) for cell, width in zip(row, widths, strict=False))
        lines.append(_wrapped("  ".join((*columns, row[3]))))
    return lines
