"""Every way to spread a piece of work over a machine: which fit, which is fastest, what next."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import takewhile
from pathlib import Path
from typing import Literal

from backends import DDP, FSDP, DeepSpeed, Local, NamedBackend, Resources
from backends.planner.hardware import GB, Machine, gib
from backends.planner.memory import Memory, memory
from backends.planner.model import FOUR_BIT, Model
from backends.planner.seconds import ADAPTERS, StepTime, accumulation, step_time
from backends.planner.work import Setup, Work

MARGIN_BYTES = int(0.8 * GB)
"""What a process needs beside its tensors: the CUDA context and NCCL's buffers, 0.5 to 1 GB."""

TIE = 1.02
"""Set-ups whose times differ by less are equal; the simplest goes first."""

CPU_TIE = 1.1
"""On CPU ranks, where time depends on what else the machine does."""

CAUTION = 1.25
"""What offload takes depends on threads, pinned memory and lanes: it has to promise this much more
speed to be put before a plan without."""

LARGEST_MICRO_BATCH = 128

HOST_SHARE = 0.9
"""Of host memory, what a plan may take: the rest is the system's, the data loaders' and the page
cache's, in which checkpoints are written."""

LEAST_GAIN = 0.01
"""A plan that needs less than this share less is no step down."""


@dataclass(frozen=True)
class Limits:
    """What a plan must keep to beside the machine's size."""

    margin_bytes: int = MARGIN_BYTES
    """Left free on each GPU."""

    largest_micro_batch: int = LARGEST_MICRO_BATCH
    always_recompute: bool = False
    """Leave out plans without gradient checkpointing."""

    nvme_path: Path | None = None
    """Directory on a fast disk; without one nothing is offloaded to disk."""

    activation_offloading: bool = False
    """Keep checkpoints in host memory."""

    @property
    def recompute(self) -> tuple[bool, ...]:
        return (True,) if self.always_recompute else (False, True)


DEFAULTS = Limits()


@dataclass(frozen=True)
class Option:
    """One way to run the work, judged."""

    setup: Setup
    accumulation: int
    memory: Memory
    time: StepTime
    fits: bool
    short_by: int
    """Bytes that lack on the GPU or, where the GPU suffices, in host memory; 0 when it fits."""

    short_of: Literal["GPU memory", "host memory", "memory"] | None
    """Where they lack; CPU ranks have one memory."""

    why: str
    """Its place in the ranking in words; what would make it fit, where it does not."""


@dataclass(frozen=True)
class Change:
    """Something a user can change so that a set-up fits, with what follows from it."""

    words: str
    work: Work
    setup: Setup
    machine: Machine


def options(
    model: Model,
    work: Work,
    machine: Machine,
    *,
    limits: Limits = DEFAULTS,
    margin_bytes: int | None = None,
) -> tuple[Option, ...]:
    """Every backend option with its best micro-batch: what fits, fastest first, then what does not,
    nearest to fitting first. ``margin_bytes`` stands for that of ``limits``.

    Raises ``ValueError`` when the global batch does not divide over the ranks, when ``work``
    contradicts itself or what the model is stored in, and when every backend is refused.
    """
    if reason := contradiction(work) or stored_otherwise(model, work):
        raise ValueError(reason)
    if margin_bytes is not None:
        limits = replace(limits, margin_bytes=margin_bytes)
    allowed = backends(work, machine, limits)
    if not allowed:
        raise ValueError(_nothing_allowed(work, machine, limits))
    found = [_best(model, work, backend, machine, limits) for backend in allowed]
    fitting = _ranked([option for option in found if option.fits], machine)
    lacking = sorted((option for option in found if not option.fits), key=_lack)
    return (
        *_placed(fitting),
        *(_mended(option, model, work, machine, limits) for option in lacking),
    )


def _nothing_allowed(work: Work, machine: Machine, limits: Limits) -> str:
    """Every reason once, with the backends that it is about."""
    names: dict[str, list[str]] = {}
    for name, reason in refused(work, machine, limits):
        names.setdefault(reason, []).append(name)
    reasons = "; ".join(f"{', '.join(about)}: {reason}" for reason, about in names.items())
    return f"no backend may be combined with this work on {machine.name}: {reasons}"


def ladder(
    model: Model,
    work: Work,
    machine: Machine,
    first: Option | None = None,
    *,
    limits: Limits = DEFAULTS,
) -> tuple[Option, ...]:
    """The plans to try one after another when memory runs out, from ``first`` or the best plan.

    Smaller micro-batches with more accumulation, then checkpointing, then the backends in the
    order DDP, FSDP shard-grad-op, full shard, ZeRO-3, offload. Each needs at least 1 % less GPU
    memory than the one before and, where such a plan exists, at most 0.9 of it; the global batch
    is the same in all. Raises ``ValueError`` when no ``first`` is given and nothing fits or every
    backend is refused.
    """
    rungs = [first or _first(model, work, machine, limits)]
    while found := _next_rung(rungs[-1], model, work, machine, limits):
        rungs.append(found)
    return tuple(rungs)


def _first(model: Model, work: Work, machine: Machine, limits: Limits) -> Option:
    best = options(model, work, machine, limits=limits)[0]
    if not best.fits:
        raise ValueError(
            f"nothing fits {model.name} on {machine.name}: {describe(best.setup.backend)} comes "
            f"nearest, {gib(best.short_by)} of {best.short_of} short; {best.why}"
        )
    return best


def judge(
    model: Model,
    work: Work,
    setup: Setup,
    machine: Machine,
    *,
    limits: Limits = DEFAULTS,
) -> Option:
    """Memory, time and verdict of one given set-up."""
    need = memory(model, work, setup)
    gpu_lack = need.total + limits.margin_bytes - machine.gpu.memory_bytes
    host_lack = need.host_bytes - usable_host_bytes(machine) if machine.device == "cuda" else 0
    lack = max(0, gpu_lack) or max(0, host_lack)
    time = step_time(model, work, setup, machine)
    why = f"{time.binds} binds"
    if gpu_lack <= 0 < host_lack:
        why = (
            f"needs {gib(need.host_bytes)} of host memory a node, and {HOST_SHARE:.0%} of "
            f"{gib(machine.host_memory_bytes)} are for it"
        )
    own = "GPU memory" if machine.device == "cuda" else "memory"
    short_of = own if gpu_lack > 0 else "host memory" if host_lack > 0 else None
    return Option(setup, accumulation(work, setup), need, time, lack == 0, int(lack), short_of, why)


def usable_host_bytes(machine: Machine) -> int:
    """Of a node's memory, what plans may take."""
    return int(HOST_SHARE * machine.host_memory_bytes)


def reserved_bytes(option: Option, work: Work) -> float:
    """What ``nvidia-smi`` may show: PyTorch keeps freed blocks, which is no reason to run out.

    Medians of 53 published pairs of allocated and shown memory: one GPU 1.13 with packed rows,
    FSDP 1.26 with adapters and 1.48 without, 1.6 with rows of varying length.
    """
    if not work.packing:
        return 1.6 * option.memory.total
    if isinstance(option.setup.backend, FSDP):
        return (1.26 if work.method in ADAPTERS else 1.48) * option.memory.total
    return 1.13 * option.memory.total


# --- what there is to choose from ----------------------------------------------------------------


def micro_batches(work: Work, machine: Machine, limits: Limits = DEFAULTS) -> tuple[int, ...]:
    """Micro-batches that divide the global batch over the ranks, small ones first."""
    rows, rest = divmod(work.global_batch, machine.ranks)
    if rest or not rows:
        near = sorted({max(1, rows) * machine.ranks, (rows + 1) * machine.ranks})
        near = near[:1] if not rows else near
        raise ValueError(
            f"a global batch of {work.global_batch} rows does not divide over {machine.ranks} "
            f"ranks; the nearest that {'does is' if len(near) == 1 else 'do are'} "
            f"{' and '.join(map(str, near))}"
        )
    largest = min(rows, limits.largest_micro_batch)
    return tuple(micro for micro in range(1, largest + 1) if rows % micro == 0)


def backends(work: Work, machine: Machine, limits: Limits = DEFAULTS) -> tuple[NamedBackend, ...]:
    """Backend options that make sense for ``work`` on ``machine`` and may be combined with it."""
    found = tuple(_every_backend(work, machine, limits.nvme_path))
    away = limits.activation_offloading
    return tuple(b for b in found if refusals(work, _setup(b, machine, 1, True, away)) is None)


def refused(work: Work, machine: Machine, limits: Limits = DEFAULTS) -> tuple[tuple[str, str], ...]:
    """(backend, reason) of those that may not be combined with ``work``."""
    every = _every_backend(work, machine, limits.nvme_path)
    away = limits.activation_offloading
    asked = [(describe(b), refusals(work, _setup(b, machine, 1, True, away))) for b in every]
    return tuple((name, reason) for name, reason in asked if reason is not None)


def _every_backend(work: Work, machine: Machine, nvme_path: Path | None) -> Iterator[NamedBackend]:
    """From the simplest to the most involved. Adapters leave nothing for ZeRO-1 and 2 to shard;
    ZeRO++ and 1-bit Adam round what they send, which nobody chooses for you.
    """
    full = work.method not in ADAPTERS
    yield DDP()
    if machine.ranks > 1:
        yield FSDP()
        yield FSDP(sharding="grad_op")
        if machine.nodes > 1 and machine.ranks_per_node > 1:
            yield FSDP(sharding="hybrid")
        if full:
            yield DeepSpeed(zero_stage=1)
            yield DeepSpeed(zero_stage=2)
        yield DeepSpeed(zero_stage=3)
    if machine.device == "cpu":
        return
    yield FSDP(cpu_offload=True)
    if full:
        yield DeepSpeed(zero_stage=2, offload_optimizer="cpu")
        yield DeepSpeed(zero_stage=3, offload_optimizer="cpu")
    yield DeepSpeed(zero_stage=3, offload_optimizer="cpu", offload_parameters="cpu")
    if nvme_path is not None and full:
        yield DeepSpeed(
            zero_stage=3,
            offload_optimizer="nvme",
            offload_parameters="nvme",
            nvme_path=nvme_path,
        )


def _setup(
    backend: NamedBackend,
    machine: Machine,
    micro: int,
    checkpointing: bool,
    activation_offloading: bool = False,
) -> Setup:
    resources = Resources(
        nodes=machine.nodes,
        ranks_per_node=machine.ranks_per_node,
        device=machine.device,
        micro_batch_size=micro,
        gradient_checkpointing=checkpointing,
        activation_offloading=activation_offloading,
    )
    return Setup(backend, resources)


def describe(backend: NamedBackend) -> str:
    """A backend option in a few words: ``FSDP full``, ``ZeRO-3, optimizer on cpu``."""
    match backend:
        case FSDP():
            parts = [f"FSDP {backend.sharding.replace('_', '-')}"]
            parts += ["all on cpu"] * backend.cpu_offload
            parts += ["whole embedding"] * backend.whole_embedding
            return ", ".join(parts)
        case DeepSpeed():
            parts = [f"ZeRO-{backend.zero_stage}", *_places(backend)]
            if backend.communication != "plain":
                parts.append(backend.communication)
            return ", ".join(parts)
        case DDP():
            return "DDP"
        case Local():
            return "one process"


def _places(backend: DeepSpeed) -> Iterator[str]:
    state, weights = backend.offload_optimizer, backend.offload_parameters
    if state and state == weights:
        yield f"all on {state}"
        return
    if state:
        yield f"optimizer on {state}"
    if weights:
        yield f"weights on {weights}"


SIMPLEST = (
    "one process",
    "DDP",
    "FSDP full",
    "FSDP grad-op",
    "FSDP hybrid",
    "ZeRO-1",
    "ZeRO-2",
    "ZeRO-3",
)
"""Who goes first among equals; offload and quantised traffic come after all of them."""


def _simplicity(option: Option) -> int:
    name = describe(option.setup.backend)
    return SIMPLEST.index(name) if name in SIMPLEST else len(SIMPLEST)


# --- refusals ------------------------------------------------------------------------------------


def refusals(work: Work, setup: Setup) -> str | None:
    """Why ``work`` may not run under ``setup``, with the alternative; ``None`` when it may."""
    return contradiction(work) or next(
        (reason for broken, reason in _rules(work, setup) if broken), _own_refusal(setup)
    )


def contradiction(work: Work) -> str | None:
    """What in ``work`` itself cannot be meant."""
    full = work.method not in ADAPTERS
    if work.reference is not None and work.stage in ("sft", "reward"):
        return f"stage {work.stage} has no reference model; leave --reference out"
    if full and work.reference == "adapter_base":
        return (
            "full training moves every weight, so there is no frozen base to refer to; "
            "use --reference resident or cached, or an adapter method"
        )
    if work.stage in ("ppo", "grpo") and work.reference == "cached":
        return (
            f"{work.stage} writes new answers in every step, so no reference can be computed "
            "beforehand; use --reference resident or adapter_base"
        )
    if work.reference == "none" and work.stage != "grpo":
        return (
            f"{work.stage} measures how far the policy is from its reference; "
            "use --reference resident, or adapter_base with an adapter method"
        )
    if work.stage in ("ppo", "grpo") and work.new_tokens >= work.seq_length:
        return (
            f"{work.new_tokens} new tokens leave no room for a prompt in rows of "
            f"{work.seq_length}; raise --seq or lower --new-tokens"
        )
    if min(work.seq_length, work.global_batch, work.lora_rank, work.new_tokens) < 1:
        return "lengths, batch, rank and new tokens must all be at least 1"
    return None


def stored_otherwise(model: Model, work: Work) -> str | None:
    """Why ``work`` cannot be done on a model whose weights are stored in few bits."""
    if not model.quantised or (model.quantised == FOUR_BIT and work.method == "qlora"):
        return None
    return (
        f"{model.name}: its weights are stored quantised ({model.quantised}), and sizes and times "
        "here are of 16 or 32 bits; give the model that it was made from, with --method qlora to "
        "train adapters on a 4-bit base"
    )


def _rules(work: Work, setup: Setup) -> Iterator[tuple[bool, str]]:
    backend = setup.backend
    cpu = setup.resources.device == "cpu"
    bitsandbytes = work.optimizer != "adamw"
    on_host = _steps_on_host(backend)
    yield (
        work.method == "qlora" and isinstance(backend, DeepSpeed) and backend.zero_stage == 3,
        "ZeRO-3 does not shard a 4-bit base: every rank keeps a copy and memory grows; use FSDP "
        "full, or DDP where the base fits",
    )
    yield (
        bitsandbytes and isinstance(backend, FSDP),
        f"{work.optimizer} is bitsandbytes', which cannot step FSDP2's sharded tensors; use adamw, "
        "or DDP where it fits",
    )
    yield (
        bitsandbytes and on_host,
        f"{work.optimizer} steps on the GPU, but the offload puts the optimizer on the CPU; use "
        "adamw with offload, or no offload",
    )
    yield (
        bitsandbytes and cpu,
        f"{work.optimizer} needs a GPU; use adamw on CPU ranks",
    )
    yield (
        isinstance(backend, DeepSpeed)
        and backend.communication == "one_bit_adam"
        and (bitsandbytes or on_host or cpu or work.method != "full"),
        "one_bit_adam is an AdamW of its own for full training on GPUs without offload; use "
        "communication: plain",
    )
    yield (
        cpu and on_host,
        "CPU ranks hold everything in host memory already; leave the offload out",
    )
    yield (
        setup.resources.activation_offloading and isinstance(backend, FSDP) and backend.cpu_offload,
        "activations and weights would share the lanes to the host; offload one of the two",
    )


def _steps_on_host(backend: NamedBackend) -> bool:
    match backend:
        case FSDP():
            return backend.cpu_offload
        case DeepSpeed():
            return backend.offload_optimizer is not None
        case _:
            return False


def _own_refusal(setup: Setup) -> str | None:
    """What the backend itself says against these resources."""
    try:
        setup.backend.plan(setup.resources)
    except ValueError as error:
        return str(error)
    return None


# --- choosing ------------------------------------------------------------------------------------


def _best(
    model: Model, work: Work, backend: NamedBackend, machine: Machine, limits: Limits
) -> Option:
    """The fastest micro-batch that fits, with or without recompute; else the smallest plan.

    Memory grows with the micro-batch, so the first that is too large ends the search; but the
    largest may end accumulation, whose gradients wait, and is looked at besides.
    """
    micros = micro_batches(work, machine, limits)
    away = limits.activation_offloading

    def judged(micro: int, recompute: bool) -> Option:
        setup = _setup(backend, machine, micro, recompute, away)
        return judge(model, work, setup, machine, limits=limits)

    fitting: list[Option] = []
    for recompute in limits.recompute:
        largest = judged(micros[-1], recompute)
        smaller = (judged(micro, recompute) for micro in micros[:-1])
        fitting += takewhile(lambda option: option.fits, smaller)
        fitting += [largest] * largest.fits
    if not fitting:
        return judge(model, work, _setup(backend, machine, 1, True, away), machine, limits=limits)
    fastest = min(option.time.seconds for option in fitting)
    even = [option for option in fitting if option.time.seconds <= 1.01 * fastest]
    return min(even, key=lambda option: option.memory.total)


def _ranked(fitting: Sequence[Option], machine: Machine) -> tuple[Option, ...]:
    """Fastest first; within a tie with the fastest of a group the simplest first."""
    tie = CPU_TIE if machine.device == "cpu" else TIE
    rest = sorted(fitting, key=_cautious_seconds)
    ranked: list[Option] = []
    while rest:
        limit = tie * _cautious_seconds(rest[0])
        group = [option for option in rest if _cautious_seconds(option) <= limit]
        ranked += sorted(group, key=_simplicity)
        rest = rest[len(group) :]
    return _simplest_first(ranked, tie)


def _simplest_first(ranked: list[Option], tie: float) -> tuple[Option, ...]:
    """Who goes first may itself be slower than the fastest: what is simpler and even with it has
    the same claim.
    """
    if not ranked:
        return ()
    limit = tie * _cautious_seconds(ranked[0])
    even = [option for option in ranked if _cautious_seconds(option) <= limit]
    first = min(even, key=_simplicity)
    return (first, *(option for option in ranked if option is not first))


def _cautious_seconds(option: Option) -> float:
    return option.time.seconds * (CAUTION if offloads(option) else 1.0)


def offloads(option: Option) -> bool:
    """Whether weights or optimizer state live outside the GPUs."""
    match option.setup.backend:
        case FSDP() as backend:
            return backend.cpu_offload
        case DeepSpeed() as backend:
            return bool(backend.offload_optimizer or backend.offload_parameters)
        case _:
            return False


def _placed(ranked: Sequence[Option]) -> Iterator[Option]:
    for place, option in enumerate(ranked):
        first = place == 0
        words = _about_first(option, ranked[1:]) if first else _beside_first(option, ranked[0])
        yield replace(option, why=f"{words}; {option.time.binds} binds")


def _about_first(first: Option, others: Sequence[Option]) -> str:
    fastest = min([*others, first], key=_cautious_seconds)
    if fastest is first or offloads(fastest):
        return "the fastest that fits"
    slower = first.time.seconds / fastest.time.seconds - 1
    return f"simpler than {describe(fastest.setup.backend)}, which is {slower:.1%} faster"


def _beside_first(option: Option, first: Option) -> str:
    slower = option.time.seconds / first.time.seconds
    if slower > TIE:
        return f"takes {slower:.2f} times as long as the first"
    if slower >= 1 / TIE:
        return "as fast as the first"
    if offloads(option) and not offloads(first):
        return f"may take {slower:.2f} of the first's time, if the host keeps up"
    return f"takes {slower:.2f} of the first's time and is less simple"


def _lack(option: Option) -> tuple[int, int]:
    return option.short_by, _simplicity(option)


# --- what would make it fit ----------------------------------------------------------------------


def _mended(option: Option, model: Model, work: Work, machine: Machine, limits: Limits) -> Option:
    """``option`` with the cheapest change that makes it fit in its ``why``."""
    about_host = f"{option.why}; " if "host memory" in option.why else ""
    for change in _changes(work, option.setup, machine):
        if refusals(change.work, change.setup):
            continue
        changed = judge(model, change.work, change.setup, change.machine, limits=limits)
        if changed.fits:
            need = gib(changed.memory.total)
            return replace(option, why=f"{about_host}fits with {change.words} ({need})")
    return replace(option, why=f"{about_host}no single change makes it fit")


def _changes(work: Work, setup: Setup, machine: Machine) -> Iterator[Change]:
    """The cheapest first: what costs nothing, some accuracy, the method, more GPUs, time."""
    away = setup.resources.activation_offloading
    small = _setup(setup.backend, machine, 1, True, away)
    if work.loss != "chunked":
        yield Change("the chunked loss", replace(work, loss="chunked"), small, machine)
    if work.optimizer == "adamw" and work.method == "full":
        eight = replace(work, optimizer="adamw_8bit")
        yield Change("the 8-bit optimizer", eight, small, machine)
    if work.method == "full" and work.precision != "bf16":
        yield Change("bf16 weights", replace(work, precision="bf16"), small, machine)
    if work.method == "full":
        yield Change("LoRA", _adapters(work, "lora"), small, machine)
    if work.method != "qlora":
        yield Change("QLoRA", _adapters(work, "qlora"), small, machine)
    for times in (2, 4, 8):
        more = _more_gpus(machine, times)
        if work.global_batch % more.ranks == 0:
            words = f"{more.ranks} GPUs"
            yield Change(words, work, _setup(setup.backend, more, 1, True, away), more)
    for offloaded in _offloaded(setup.backend, machine):
        words = f"offload ({describe(offloaded)})"
        yield Change(words, work, _setup(offloaded, machine, 1, True), machine)
    for part in (2, 4):
        if work.seq_length % part == 0 and work.seq_length // part > work.new_tokens:
            shorter = replace(work, seq_length=work.seq_length // part)
            yield Change(f"rows of {shorter.seq_length} tokens", shorter, small, machine)


def _adapters(work: Work, method: str) -> Work:
    """The same work with adapters, whose frozen base is the reference."""
    base = "adapter_base" if work.reference == "resident" else work.reference
    optimizer = "adamw" if work.optimizer.endswith("8bit") else work.optimizer
    return replace(work, method=method, reference=base, precision="bf16", optimizer=optimizer)


def _more_gpus(machine: Machine, times: int) -> Machine:
    """``times`` the GPUs: up to 8 in a node, then more nodes."""
    ranks = machine.ranks * times
    per_node = max(machine.ranks_per_node, min(8, machine.ranks_per_node * times))
    host = machine.host_memory_bytes * per_node // machine.ranks_per_node
    nodes = ranks // per_node
    return replace(machine, ranks_per_node=per_node, nodes=nodes, host_memory_bytes=host)


def _offloaded(backend: NamedBackend, machine: Machine) -> tuple[NamedBackend, ...]:
    if machine.device == "cpu":
        return ()
    zero3 = DeepSpeed(zero_stage=3, offload_optimizer="cpu")
    both = DeepSpeed(zero_stage=3, offload_optimizer="cpu", offload_parameters="cpu")
    match backend:
        case FSDP(cpu_offload=False):
            return (FSDP(cpu_offload=True),)
        case DeepSpeed(offload_optimizer=None):
            return (zero3, both)
        case DeepSpeed(offload_parameters=None):
            return (both,)
        case _:
            return ()


# --- the ladder ----------------------------------------------------------------------------------

ESCALATION: tuple[NamedBackend, ...] = (
    DDP(),
    FSDP(sharding="grad_op"),
    FSDP(),
    DeepSpeed(zero_stage=3),
    DeepSpeed(zero_stage=3, offload_optimizer="cpu"),
    FSDP(cpu_offload=True),
    DeepSpeed(zero_stage=3, offload_optimizer="cpu", offload_parameters="cpu"),
)
"""Where a run moves when memory is short, in this order."""


def _next_rung(
    last: Option, model: Model, work: Work, machine: Machine, limits: Limits
) -> Option | None:
    """The first plan of the order that needs less than ``last``."""
    for setups in _steps(last, work, machine, limits):
        judged = [judge(model, work, setup, machine, limits=limits) for setup in setups]
        found = [option for option in judged if _is_lower(option, last, machine)]
        if not found:
            continue
        much = [option for option in found if option.memory.total <= 0.9 * last.memory.total]
        chosen = much[0] if much else found[-1]
        return replace(chosen, why=f"needs {_saved(last, chosen)} less than the plan before")
    return None


def _is_lower(option: Option, last: Option, machine: Machine) -> bool:
    on_gpu = machine.device == "cuda"
    host_suffices = not on_gpu or option.memory.host_bytes <= usable_host_bytes(machine)
    gains = option.memory.total <= (1 - LEAST_GAIN) * last.memory.total
    return gains and host_suffices


def _saved(last: Option, chosen: Option) -> str:
    return gib(last.memory.total - chosen.memory.total)


def _steps(last: Option, work: Work, machine: Machine, limits: Limits) -> Iterator[list[Setup]]:
    """Sets of plans to look into, each with the larger micro-batches first."""
    backend, resources = last.setup.backend, last.setup.resources
    down = micro_batches(work, machine, limits)[::-1]
    away = limits.activation_offloading
    recompute = resources.gradient_checkpointing
    less = [micro for micro in down if micro < last.setup.micro_batch]
    yield [_setup(backend, machine, micro, recompute, away) for micro in less]
    if not recompute:
        no_more = [micro for micro in down if micro <= last.setup.micro_batch]
        yield [_setup(backend, machine, micro, True, away) for micro in no_more]
    allowed = backends(work, machine, limits)
    for later in _later(backend, limits.nvme_path):
        if later in allowed:
            yield [_setup(later, machine, micro, True, away) for micro in down]


def _later(backend: NamedBackend, nvme_path: Path | None) -> tuple[NamedBackend, ...]:
    """The backends after ``backend``; one outside the order goes on after what it is like."""
    order = [*ESCALATION]
    if nvme_path is not None:
        order.append(
            DeepSpeed(
                zero_stage=3,
                offload_optimizer="nvme",
                offload_parameters="nvme",
                nvme_path=nvme_path,
            )
        )
    match backend:
        case FSDP(sharding="hybrid") | DeepSpeed(zero_stage=2):
            place = 1
        case DeepSpeed(zero_stage=1) | Local():
            place = 0
        case DeepSpeed(zero_stage=3, offload_optimizer=None):
            place = 3
        case known if known in order:
            place = order.index(known)
        case _:
            place = 2
    return tuple(order[place + 1 :])
