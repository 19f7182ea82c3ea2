"""The rules of thumb that people go by, each beside what the numbers say here."""

from collections.abc import Sequence
from dataclasses import dataclass

from backends import DDP, FSDP, DeepSpeed
from backends.planner.hardware import GB, GIB, Machine, gib
from backends.planner.model import Model
from backends.planner.ranking import CAUTION, TIE, Option, describe, offloads
from backends.planner.seconds import traffic
from backends.planner.work import Work

BILLION = 1e9


@dataclass(frozen=True)
class Rule:
    """A rule of thumb that applies, and whether the numbers agree with it."""

    rule: str
    agrees: bool
    numbers: str

    def __str__(self) -> str:
        verdict = "holds here" if self.agrees else "does not hold here"
        return f'"{self.rule}" {verdict}: {self.numbers}'


def explain(
    model: Model, work: Work, machine: Machine, ranked: Sequence[Option]
) -> tuple[Rule, ...]:
    """The rules that speak about this case, in the order in which people ask them."""
    rules = (_small_model, _large_model, _small_card, _network, _offload, _start_simple)
    found = (rule(model, work, machine, ranked) for rule in rules)
    return tuple(rule for rule in found if rule is not None)


def _small_model(
    model: Model, work: Work, machine: Machine, ranked: Sequence[Option]
) -> Rule | None:
    if model.num_parameters >= 13 * BILLION or machine.gpu.memory_bytes < 38 * GIB:
        return None
    rule = "under 13B and a card of 40 GB or more: DDP"
    ddp = _option(ranked, DDP)
    if ddp is None:
        return None
    if ddp.fits:
        return Rule(rule, _is_first(ddp, ranked), f"DDP {_place(ddp, ranked)}")
    return Rule(
        rule,
        False,
        f"DDP keeps {_bytes_a_parameter(ddp, model):.0f} bytes a parameter on each GPU, "
        f"{gib(ddp.memory.total)} of {gib(machine.gpu.memory_bytes)}; the rule is about adapters",
    )


def _large_model(
    model: Model, work: Work, machine: Machine, ranked: Sequence[Option]
) -> Rule | None:
    if model.num_parameters < 13 * BILLION or machine.ranks < 8:
        return None
    rule = "13B or more and 8 GPUs or more: FSDP"
    fsdp = _option(ranked, FSDP)
    if fsdp is None:
        return None
    if not fsdp.fits:
        return Rule(rule, False, f"{_name(fsdp)} lacks {gib(fsdp.short_by)} of {fsdp.short_of}")
    return Rule(rule, _is_first(fsdp, ranked), f"{_name(fsdp)} {_place(fsdp, ranked)}")


def _small_card(
    model: Model, work: Work, machine: Machine, ranked: Sequence[Option]
) -> Rule | None:
    if machine.device == "cpu" or machine.gpu.memory_bytes > 25 * GIB:
        return None
    rule = "cards of 24 GB or less: FSDP with CPU offload"
    offloaded = next((o for o in ranked if describe(o.setup.backend) == CPU_OFFLOAD), None)
    plain = [o for o in ranked if o.fits and not offloads(o)]
    if offloaded is None:
        return None
    if not offloaded.fits:
        return Rule(
            rule, False, f"even that lacks {gib(offloaded.short_by)} of {offloaded.short_of}"
        )
    if not plain:
        return Rule(rule, True, f"without offload nothing fits in {gib(machine.gpu.memory_bytes)}")
    best = plain[0]
    slower = offloaded.time.seconds / best.time.seconds
    numbers = f"{_name(best)} fits in {gib(best.memory.total)} without offload"
    if slower > TIE:
        return Rule(rule, False, f"{numbers}, and offload takes {slower:.2f} times as long")
    return Rule(rule, slower < 1 / CAUTION, f"{numbers}; offload may take {slower:.2f} of its time")


def _network(model: Model, work: Work, machine: Machine, ranked: Sequence[Option]) -> Rule | None:
    """The rule is about memory; speed goes the other way."""
    if machine.ranks == 1:
        return None
    rule = "fast network: DDP; slow network: FSDP"
    ddp, full = _option(ranked, DDP), _named(ranked, "FSDP full")
    if ddp is None or full is None:
        return None
    moved, once = traffic(model, work, full.setup), traffic(model, work, ddp.setup)
    share = (machine.ranks - 1) / machine.ranks
    each = share * (moved.forward_gather + moved.backward_gather + moved.micro_reduce) / GB
    step = share * once.step_reduce / GB
    times = "micro-step" if full.accumulation == 1 else f"of {full.accumulation} micro-steps"
    bytes_moved = (
        f"full shard moves {each:.1f} GB a GPU in each {times}, DDP {step:.1f} GB once a step"
    )
    exposed = full.time.exposed_communication
    numbers = (
        f"{bytes_moved}; {exposed:.1f} of full shard's {full.time.seconds:.1f} s stay unhidden on "
        f"{_link_name(machine)}"
    )
    if not ddp.fits:
        return Rule(
            rule,
            _is_slow(machine),
            f"{numbers}, but DDP lacks {gib(ddp.short_by)} of {ddp.short_of}",
        )
    faster = full.time.seconds / ddp.time.seconds
    agrees = faster < 1 / TIE if _is_slow(machine) else faster >= 1 / TIE
    return Rule(rule, agrees, f"{numbers}, and it takes {faster:.2f} times as long as DDP")


def _offload(model: Model, work: Work, machine: Machine, ranked: Sequence[Option]) -> Rule | None:
    if model.num_parameters <= 30 * BILLION:
        return None
    rule = "over 30B, or offload to CPU or disk: DeepSpeed"
    zero, fsdp = _option(ranked, DeepSpeed), _option(ranked, FSDP)
    if zero is None or fsdp is None:
        return None
    if not (zero.fits or fsdp.fits):
        return Rule(rule, False, "neither DeepSpeed nor FSDP fits")
    if not zero.fits:
        return Rule(
            rule,
            False,
            f"{_name(fsdp)} fits and {_name(zero)} lacks {gib(zero.short_by)} of {zero.short_of}",
        )
    if not fsdp.fits:
        return Rule(
            rule,
            True,
            f"{_name(zero)} fits and {_name(fsdp)} lacks {gib(fsdp.short_by)} of {fsdp.short_of}",
        )
    slower = fsdp.time.seconds / zero.time.seconds
    numbers = f"{_name(fsdp)} takes {slower:.2f} times as long as {_name(zero)}"
    return Rule(rule, slower > TIE, numbers)


def _start_simple(
    model: Model, work: Work, machine: Machine, ranked: Sequence[Option]
) -> Rule | None:
    rule = "start with DDP, move to FSDP when memory is short"
    ddp = _option(ranked, DDP)
    if ddp is None or not ranked[0].fits:
        return None
    if not ddp.fits:
        return Rule(
            rule,
            True,
            f"DDP lacks {gib(ddp.short_by)} of {ddp.short_of}, so {_name(ranked[0])} is next",
        )
    return Rule(rule, _is_first(ddp, ranked), f"DDP {_place(ddp, ranked)}")


CPU_OFFLOAD = "FSDP full, all on cpu"


def _option(ranked: Sequence[Option], kind: type) -> Option | None:
    """The best option of one backend; ``ranked`` has what fits first."""
    return next((o for o in ranked if isinstance(o.setup.backend, kind)), None)


def _named(ranked: Sequence[Option], name: str) -> Option | None:
    return next((o for o in ranked if describe(o.setup.backend) == name), None)


def _name(option: Option) -> str:
    return describe(option.setup.backend)


def _is_first(option: Option, ranked: Sequence[Option]) -> bool:
    return option.fits and option.time.seconds <= TIE * ranked[0].time.seconds


def _place(option: Option, ranked: Sequence[Option]) -> str:
    fits = f"fits in {gib(option.memory.total)}"
    if option is ranked[0]:
        return f"{fits} and is the first choice"
    slower = option.time.seconds / ranked[0].time.seconds
    if slower < 1 / TIE:
        return f"{fits} and takes {slower:.2f} of the time of {_name(ranked[0])}, which is simpler"
    if slower <= TIE:
        return f"{fits} and is as fast as {_name(ranked[0])}"
    return f"{fits} but takes {slower:.2f} times as long as {_name(ranked[0])}"


def _bytes_a_parameter(option: Option, model: Model) -> float:
    need = option.memory
    return (need.weights + need.gradients + need.optimizer) / model.num_parameters


def _is_slow(machine: Machine) -> bool:
    link = machine.network if machine.nodes > 1 else machine.link
    per_gpu = machine.ranks_per_node if machine.nodes > 1 else 1
    return link.bytes_per_second / per_gpu < 15 * GB


def _link_name(machine: Machine) -> str:
    return (machine.network if machine.nodes > 1 else machine.link).name
