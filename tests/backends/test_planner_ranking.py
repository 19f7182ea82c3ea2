"""The planner's times, rankings, ladders and answers, checked by hand-computed numbers."""

import json
import subprocess
import sys
import time
from dataclasses import replace
from itertools import pairwise
from pathlib import Path
from statistics import median

import pytest

from backends import DDP, FSDP, DeepSpeed, Local, NamedBackend, Resources
from backends.planner import ranking, seconds
from backends.planner.explain import explain
from backends.planner.hardware import GB, GIB, Link, Machine, find_machine, found_machine
from backends.planner.memory import reduce_bytes
from backends.planner.model import Model, find_model, read_config
from backends.planner.ranking import Limits, describe, judge, ladder, options, refusals
from backends.planner.seconds import StepTime, step_time, traffic
from backends.planner.table import WIDTH
from backends.planner.work import Setup, Work
from configs import RECIPES, load
from flows.sft_then_dpo import SFTThenDPO
from stages.dpo import DPO
from stages.training import Adapter, Training
from tests.benchmarks import bench_planner_time as bench

ROOT = Path(__file__).parents[2]
QWEN = "Qwen/Qwen3-8B"
ROUNDING = 1 + 1e-12
CLOCK = 3.0
"""How many times as long a busy machine may take: the bars are 50 ms and 1 s."""

SMALL = read_config(
    {
        "model_type": "llama",
        "num_hidden_layers": 2,
        "hidden_size": 8,
        "intermediate_size": 16,
        "num_attention_heads": 2,
        "vocab_size": 100,
    },
    name="small",
)


def setup(
    backend: NamedBackend,
    *,
    ranks: int = 4,
    micro: int = 1,
    nodes: int = 1,
    recompute: bool = False,
) -> Setup:
    resources = Resources(
        nodes=nodes,
        ranks_per_node=ranks,
        device="cuda",
        micro_batch_size=micro,
        gradient_checkpointing=recompute,
    )
    return Setup(backend, resources)


def bare(link: Link, machine: Machine) -> Machine:
    """``machine`` with ``link``, and arithmetic that hides nothing worth a look."""
    return replace(machine, link=link, gpu=replace(machine.gpu, flops=1e30, bandwidth=1e30))


# --- machines ------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("name", "nodes", "ranks", "gib", "link"),
    [
        ("8xH100", 1, 8, 79.1, "nvlink"),
        ("H100", 1, 1, 79.1, "nvlink"),
        ("4xA10", 1, 4, 22.0, "pcie4"),
        ("2x4090", 1, 2, 23.5, "pcie4x8"),
        ("4xA100-80GB", 1, 4, 79.1, "nvlink"),
        ("4 x a100-40gb", 1, 4, 39.4, "nvlink"),
        ("2x24GB", 1, 2, 23.4, "pcie4x8"),
        ("1x48GB", 1, 1, 46.8, "pcie4"),
        ("2x8xH100", 2, 8, 79.1, "nvlink"),
        ("NVIDIA A100-SXM4-80GB", 1, 1, 79.1, "nvlink"),
        ("8xNVIDIA H100 80GB HBM3", 1, 8, 79.1, "nvlink"),
        ("NVIDIA GeForce RTX 4090", 1, 1, 23.5, "pcie4"),
        ("NVIDIA RTX 6000 Ada Generation", 1, 1, 47.4, "pcie4"),
        ("8xH100-96GB", 1, 8, 94.56, "nvlink"),
    ],
)
def test_machines_by_the_names_people_use(
    name: str, nodes: int, ranks: int, gib: float, link: str
) -> None:
    machine = find_machine(name)
    assert (machine.nodes, machine.ranks_per_node, machine.link.name) == (nodes, ranks, link)
    assert machine.gpu.memory_bytes == pytest.approx(gib * GIB, rel=1e-3)
    assert machine.ranks == nodes * ranks and machine.device == "cuda"


@pytest.mark.parametrize(
    ("name", "link", "network", "said"),
    [
        ("8xH10", None, None, "GPU 'h10' is not known; the nearest are H100"),
        ("0x24GB", None, None, "counts to zero"),
        ("8x8x8xH100", None, None, "NODESxCOUNTxNAME"),
        ("", None, None, "COUNTxNAME"),
        ("2x4090", "nvlnk", None, "did you mean nvlink?"),
        ("2x4090", "nvlink", None, "RTX-4090 has no NVLink"),
        ("2x4090", "0", None, "must be more than zero"),
        ("2x4090", None, "ethernt-10", "did you mean ethernet-10?"),
    ],
)
def test_a_machine_that_is_not_known_names_the_nearest(
    name: str, link: str | None, network: str | None, said: str
) -> None:
    with pytest.raises(ValueError, match=r".") as error:
        find_machine(name, link, network)
    assert said in str(error.value) and "\n" not in str(error.value)


def test_cards_without_peer_to_peer_access_exchange_through_the_host() -> None:
    consumer, server = find_machine("2x4090", "pcie4"), find_machine("2xA10", "pcie4")
    assert consumer.link.bytes_per_second < server.link.bytes_per_second
    assert consumer.link.overlap < server.link.overlap


def test_a_machine_found_by_its_driver_keeps_the_drivers_memory() -> None:
    machine = found_machine("NVIDIA Z9 Prototype", 40 * GIB, 2, host_memory=64 * GB)
    assert (machine.gpu.memory_bytes, machine.ranks) == (40 * GIB, 2)
    assert "as of A100-40GB" in machine.assumptions[0]


def test_cpu_ranks_share_one_memory() -> None:
    machine = find_machine("2xCPU", host_memory=16 * GB)
    assert (machine.device, machine.gpu.memory_bytes) == ("cpu", 8_000_000_000)


# --- time ----------------------------------------------------------------------------------------


def test_operations_of_a_forward_pass_by_hand() -> None:
    # A layer: queries, keys, values, output 4 x 8 x 8, MLP 3 x 8 x 16, two norms of 8: 656; two of
    # them and the last norm: 1320. Head 100 x 8. Attention 4 x 2 layers x 8 wide x 5 tokens x 7.
    assert seconds.forward_flops(SMALL, 5, 7) == (2 * 1320 * 5, 2240, 2 * 800 * 5)


def test_frozen_weights_have_no_gradient_and_recompute_is_one_more_pass() -> None:
    model, machine = find_model(QWEN), find_machine("1xA100")
    work = Work(method="full", seq_length=2048)
    full = seconds.arithmetic(model, work, setup(DDP(), ranks=1, micro=4), machine)
    again = seconds.arithmetic(model, work, setup(DDP(), ranks=1, micro=4, recompute=True), machine)
    adapters = replace(work, method="lora")
    lora = seconds.arithmetic(model, adapters, setup(DDP(), ranks=1, micro=4), machine)
    assert full.backward == pytest.approx(2 * full.forward)  # 6PT: 2 forward, 4 backward
    layers, attention, head = (
        each / machine.gpu.flops for each in seconds.forward_flops(model, 4 * 2048, 2048)
    )
    share = attention / (layers + attention + head)
    assert lora.backward == pytest.approx((1 + share) * lora.forward)  # 4PT, attention 12LqTs
    assert again.backward - full.backward == pytest.approx(full.forward - head)  # 8PT, head kept


P, N, K = SMALL.num_parameters, 4, 3
ROOT_PARAMETERS = 2 * 800 + 8


@pytest.mark.parametrize(
    ("backend", "method", "micro_step", "step"),
    [
        # The table of bytes per GPU, without its factor f; bf16 weights and gradients.
        (DDP(), "full", 0, 2 * 2 * P),
        (FSDP(reduce_dtype="bfloat16"), "full", 4 * P - 2 * ROOT_PARAMETERS + 2 * P, 0),
        (FSDP(), "full", 4 * P - 2 * ROOT_PARAMETERS + 4 * P, 0),
        (FSDP(sharding="grad_op", reduce_dtype="bfloat16"), "full", 2 * P + 2 * P, 0),
        (DeepSpeed(zero_stage=1), "full", 0, 2 * P + 2 * P),
        (DeepSpeed(zero_stage=2), "full", 2 * P, 2 * P),
        (DeepSpeed(zero_stage=3), "full", 4 * P + 2 * P, 0),
        # Adapters of rank 16: 16 x (4 x (8 + 8) + 3 x (8 + 16)) x 2 layers = 4352, in float32.
        (DDP(), "lora", 0, 2 * 4 * 4352),
        (FSDP(), "lora", 4 * P - 2 * ROOT_PARAMETERS + 4 * 4352, 0),
    ],
    ids=lambda value: describe(value) if isinstance(value, DDP | FSDP | DeepSpeed) else str(value),
)
def test_bytes_on_the_wire(backend: NamedBackend, method: str, micro_step: int, step: int) -> None:
    """The root unit stays gathered between forward and backward, so FSDP gathers it once."""
    work = Work(method=method, global_batch=N * K, seq_length=4)  # pyright: ignore[reportArgumentType]
    slow = Link("slow", 1.0, overlap=0.0, latency=0.0)
    machine = bare(slow, find_machine("4xA100"))
    time = step_time(SMALL, work, setup(backend), machine)
    moved = (K * micro_step + step) * (N - 1) / N
    assert time.exposed_communication == pytest.approx(moved)
    assert time.binds == "slow"


def test_between_replicas_only_the_shard_is_summed() -> None:
    """HSDP on 2 nodes of 4: the full shard inside a node, 2g(P/G)(M-1)/M of each GPU between."""
    work = Work(global_batch=8, seq_length=4)
    machine = find_machine("2x4xA100")
    wire = Link("wire", 1.0, overlap=0.0, latency=0.0)
    fast = Link("fast", 1e30, overlap=0.0, latency=0.0)
    machine = replace(bare(fast, machine), network=wire)
    backend = FSDP(sharding="hybrid", reduce_dtype="bfloat16")
    time = step_time(SMALL, work, setup(backend, nodes=2), machine)
    a_gpu = 2 * 2 * (P / 4) * 1 / 2
    assert time.exposed_communication == pytest.approx(4 * a_gpu)  # 4 GPUs share a node's adapter


def test_offload_by_hand() -> None:
    """2P/N up, gP/N down at 2 GB/s, and 28 bytes a parameter of CPU Adam on one thread."""
    model, machine = find_model("tiiuae/falcon-7b"), find_machine("8xA100-40GB")
    work = Work(precision="fp32-master", global_batch=8)
    backend = DeepSpeed(zero_stage=3, offload_optimizer="cpu")
    time = step_time(model, work, setup(backend, ranks=8), machine)
    shard = model.num_parameters / 8
    assert time.offload == pytest.approx(4 * shard / 2e9 + 28 * shard / 6e9)


def test_fsdp_offload_by_hand() -> None:
    """Weights in twice, gradients out, and PyTorch's AdamW at twice the traffic of DeepSpeed's."""
    model, machine = find_model("tiiuae/falcon-7b"), find_machine("8xA100-40GB")
    work, given = Work(global_batch=8), setup(FSDP(cpu_offload=True), ranks=8)
    shard = model.num_parameters / 8
    host = seconds.offload(model, work, given, machine, idle=0.0)
    assert host.micro == pytest.approx((2 * 2 * shard + 4 * shard) / 20e9)
    assert host.step == pytest.approx(56 * shard / 6e9)
    hiding = seconds.offload(model, work, given, machine, idle=1e9)
    assert hiding.micro == pytest.approx(0.2 * host.micro)


def test_slow_lanes_slow_the_way_to_the_host_too() -> None:
    assert find_machine("2x4090", "slow-pcie").host_link < 6e9
    assert find_machine("2x4090", "pcie4").host_link == 20e9
    assert find_machine("8xA100").host_link == 20e9


def test_a_mixture_computes_what_it_visits_and_moves_what_it_has() -> None:
    model = find_model("Qwen/Qwen3-30B-A3B")
    dense = replace(
        model, num_experts=0, num_active_experts=0, expert_width=0, mlp_width=model.expert_width * 8
    )
    work, given = Work(global_batch=8), setup(FSDP(), ranks=8)
    layers, *_ = seconds.forward_flops(model, 1, 1)
    alike, *_ = seconds.forward_flops(dense, 1, 1)
    assert layers == pytest.approx(alike, rel=0.01)  # the router is all that differs
    assert (
        traffic(model, work, given).forward_gather > 8 * traffic(dense, work, given).forward_gather
    )


def test_a_reference_costs_one_forward_pass_unless_it_is_cached() -> None:
    model, machine = find_model(QWEN), find_machine("8xH100")
    given = setup(FSDP(), ranks=8, recompute=True)
    dpo = Work(stage="dpo", global_batch=8)
    resident = seconds.arithmetic(model, dpo, given, machine)
    cached = seconds.arithmetic(model, replace(dpo, reference="cached"), given, machine)
    assert cached.others == 0
    assert resident.others == pytest.approx(resident.forward, rel=0.01)
    free = Work(stage="grpo", reference="none", global_batch=8)
    priced = seconds.arithmetic(model, replace(free, reference="resident"), given, machine)
    unpriced = seconds.arithmetic(model, free, given, machine)
    assert priced.others - unpriced.others == pytest.approx(priced.forward, rel=0.01)
    sft = seconds.arithmetic(model, Work(global_batch=8), given, machine)
    assert resident.forward == pytest.approx(2 * sft.forward)  # a pair is two rows


def test_writing_answers_is_bound_by_memory_bandwidth() -> None:
    model = find_model("meta-llama/Llama-3.1-70B")
    work = Work(stage="grpo", global_batch=8, new_tokens=100)
    machine = find_machine("8xH100")
    once = seconds.generation(model, work, setup(FSDP(), ranks=8), machine)
    slower = replace(machine, gpu=replace(machine.gpu, bandwidth=machine.gpu.bandwidth / 2))
    assert seconds.generation(model, work, setup(FSDP(), ranks=8), slower) == pytest.approx(
        2 * once
    )


def test_what_an_answer_takes_once_is_shared_by_the_passes_over_it() -> None:
    model, machine = find_model(QWEN), find_machine("8xH100")
    given = setup(FSDP(), ranks=8)
    once, twice = (Work(stage="ppo", global_batch=8, passes=number) for number in (1, 2))
    for part in (seconds.generation, lambda *a: seconds.arithmetic(*a).others):
        assert part(model, once, given, machine) == pytest.approx(
            2 * part(model, twice, given, machine)
        )
    one, two = (seconds.step_time(model, each, given, machine).seconds for each in (once, twice))
    assert one / 2 < two < one


@pytest.mark.parametrize("case", list(bench.published()), ids=lambda case: case.name)
def test_published_directions_and_ratios(case: bench.Case) -> None:
    found = case.ratio()
    assert bench.right(case.published, found)
    assert abs(found / case.published - 1) <= 0.25


def test_both_halves_sum_gradients_in_the_type_that_training_sums_them_in() -> None:
    """Under float32 compute ``reduce_dtype`` is not read, and a bit is a bit."""
    half = FSDP(reduce_dtype="bfloat16")
    fp32, bf16 = Work(precision="fp32"), Work(precision="bf16")
    assert [reduce_bytes(half, fp32), reduce_bytes(half, bf16)] == [4, 2]
    assert reduce_bytes(FSDP(), bf16) == 4
    model, one_bit = find_model(QWEN), DeepSpeed(zero_stage=1, communication="one_bit_adam")
    sent = [traffic(model, work, setup(one_bit, ranks=8)).step_reduce for work in (fp32, bf16)]
    assert sent == [model.num_parameters / 8] * 2


def test_relative_speeds_of_the_exact_table() -> None:
    if not bench.FOLDER.is_dir():
        pytest.skip("the table of exact measurements is not here")
    pairs = [(said, found) for _, said, found in bench.exact_rows()]
    scale = median(found / said for said, found in pairs)
    assert median(abs(found / said / scale - 1) for said, found in pairs) <= 0.05


@pytest.mark.parametrize("name", [QWEN, "Qwen/Qwen3-30B-A3B", "HuggingFaceTB/SmolLM2-135M"])
@pytest.mark.parametrize("method", ["full", "lora", "qlora"])
def test_time_goes_the_way_of_its_causes(name: str, method: str) -> None:
    """Faster parts never make a step longer, longer rows never make it shorter, and the parts sum
    up to the whole."""
    model = find_model(name)
    machine = find_machine("2x8xA100", network="ethernet-100")
    work = Work(method=method, global_batch=32)  # pyright: ignore[reportArgumentType]
    for backend in ranking.backends(work, machine):
        given = setup(backend, ranks=8, nodes=2, recompute=True)

        def timed(machine: Machine, work: Work = work, given: Setup = given) -> StepTime:
            return step_time(model, work, given, machine)

        now = timed(machine)
        parts = now.compute + now.exposed_communication + now.offload + now.generation
        assert now.seconds == pytest.approx(parts)
        assert min(now.compute, now.exposed_communication, now.offload, now.generation) >= 0
        gpu = replace(machine.gpu, flops=2 * machine.gpu.flops)
        assert timed(replace(machine, gpu=gpu)).seconds <= now.seconds * ROUNDING
        for wire in ("link", "network"):
            link: Link = getattr(machine, wire)
            faster = replace(link, bytes_per_second=2 * link.bytes_per_second)
            assert timed(replace(machine, **{wire: faster})).seconds <= now.seconds * ROUNDING
        assert timed(machine, replace(work, seq_length=8192)).seconds >= now.seconds / ROUNDING


# --- ranking -------------------------------------------------------------------------------------

QUESTIONS = {
    "lora on two small cards": (QWEN, "2x24GB", Work(method="lora")),
    "qlora on two small cards": (QWEN, "2x24GB", Work(method="qlora")),
    "full on a board": (QWEN, "8xH100", Work(precision="fp32-master", global_batch=128)),
    "two nodes": ("Qwen/Qwen3-32B", "2x8xH100", Work(precision="fp32-master", global_batch=128)),
    "too large": ("meta-llama/Llama-3.1-405B", "8xA100", Work(precision="fp32-master")),
    "mixture": ("Qwen/Qwen3-30B-A3B", "8xH100", Work(precision="fp32-master")),
    "dpo": (QWEN, "8xA100", Work(stage="dpo", precision="fp32-master")),
    "ppo": (QWEN, "8xH100", Work(stage="ppo", precision="fp32-master", seq_length=2048)),
    "one card": ("Qwen/Qwen3-0.6B", "1xA10", Work(precision="fp32-master", loss="hf")),
    "cpu": ("HuggingFaceTB/SmolLM2-135M", "2xCPU", Work(precision="fp32", seq_length=256)),
}


@pytest.fixture(params=QUESTIONS, scope="module")
def question(request: pytest.FixtureRequest) -> tuple[Model, Machine, Work]:
    name, gpus, work = QUESTIONS[request.param]
    return find_model(name), find_machine(gpus), work


def test_what_fits_comes_first_and_the_global_batch_is_kept(
    question: tuple[Model, Machine, Work],
) -> None:
    model, machine, work = question
    ranked = options(model, work, machine)
    assert len({describe(option.setup.backend) for option in ranked}) == len(ranked)
    fits = [option.fits for option in ranked]
    assert fits == sorted(fits, reverse=True)
    for option in ranked:
        rows = option.setup.micro_batch * option.accumulation * option.setup.world_size
        assert rows == work.global_batch and option.setup.world_size == machine.ranks
        assert option.fits == (option.short_by == 0)
        assert refusals(work, option.setup) is None
        option.setup.backend.plan(option.setup.resources)
        if option.fits:
            room = machine.gpu.memory_bytes - ranking.MARGIN_BYTES
            assert option.memory.total <= room
    lacks = [option.short_by for option in ranked if not option.fits]
    assert lacks == sorted(lacks)
    first = ranked[0]
    if first.fits:
        plain = [o.time.seconds for o in ranked if o.fits and not ranking.offloads(o)]
        tie = ranking.CPU_TIE if machine.device == "cpu" else ranking.TIE
        assert first.time.seconds <= tie * min(plain or [first.time.seconds])


def test_the_best_micro_batch_is_kept(question: tuple[Model, Machine, Work]) -> None:
    model, machine, work = question
    for option in options(model, work, machine):
        if not option.fits:
            continue
        for micro in ranking.micro_batches(work, machine):
            for recompute in (False, True):
                resources = option.setup.resources.model_copy(
                    update={"micro_batch_size": micro, "gradient_checkpointing": recompute}
                )
                other = judge(model, work, Setup(option.setup.backend, resources), machine)
                if other.fits:
                    assert option.time.seconds <= 1.01 * other.time.seconds + 1e-9


def test_the_simplest_of_equals_goes_first() -> None:
    model, machine = find_model("Qwen/Qwen3-0.6B"), find_machine("8xH100")
    ranked = options(model, Work(global_batch=64), machine)
    assert isinstance(ranked[0].setup.backend, DDP)
    assert min(o.time.seconds for o in ranked) < ranked[0].time.seconds  # not the fastest alone


def test_offload_goes_after_what_needs_none_unless_it_gains_much() -> None:
    model, machine = find_model("meta-llama/Llama-3.1-70B"), find_machine("2x48GB")
    work = Work(method="qlora", seq_length=1024, global_batch=32)
    ranked = options(model, work, machine)
    assert not ranking.offloads(ranked[0])
    later = next(option for option in ranked if ranking.offloads(option))
    assert later.time.seconds < ranked[0].time.seconds < ranking.CAUTION * later.time.seconds
    assert "if the host keeps up" in later.why


def test_cpu_ranks_take_ddp_when_it_fits() -> None:
    name, gpus, work = QUESTIONS["cpu"]
    assert isinstance(options(find_model(name), work, find_machine(gpus))[0].setup.backend, DDP)


def test_a_change_that_is_said_to_make_it_fit_does() -> None:
    model, machine = find_model(QWEN), find_machine("4x4090")
    work = Work(precision="fp32-master", loss="hf")
    found = {describe(o.setup.backend): o for o in options(model, work, machine)}
    assert "fits with the chunked loss" in found["ZeRO-2, optimizer on cpu"].why
    fixed = judge(
        model, replace(work, loss="chunked"), found["ZeRO-2, optimizer on cpu"].setup, machine
    )
    assert fixed.fits
    assert "fits with LoRA" in found["ZeRO-3"].why
    assert judge(model, Work(method="lora"), found["ZeRO-3"].setup, machine).fits


def test_host_memory_is_a_limit_too() -> None:
    model, work = find_model("Qwen/Qwen3-32B"), Work(precision="fp32-master", seq_length=2048)
    plenty = find_machine("8xA100", host_memory=2000 * GB)
    little = find_machine("8xA100", host_memory=300 * GB)
    name = "ZeRO-3, optimizer on cpu"
    by_name = [
        {describe(o.setup.backend): o for o in options(model, work, machine)}[name]
        for machine in (plenty, little)
    ]
    assert [option.fits for option in by_name] == [True, False]
    assert by_name[1].short_by == by_name[1].memory.host_bytes - 270_000_000_000
    assert by_name[1].short_of == "host memory"
    assert "of host memory a node" in by_name[1].why


def test_limits_are_kept() -> None:
    model, machine = find_model("Qwen/Qwen3-0.6B"), find_machine("8xH100")
    limits = Limits(largest_micro_batch=2, always_recompute=True, nvme_path=Path("/fast"))
    ranked = options(model, Work(precision="fp32-master"), machine, limits=limits)
    assert max(option.setup.micro_batch for option in ranked) == 2
    assert all(option.setup.resources.gradient_checkpointing for option in ranked)
    assert any("nvme" in describe(option.setup.backend) for option in ranked)
    roomy = options(model, Work(), machine, margin_bytes=int(1e12))
    assert not any(option.fits for option in roomy)


def test_the_whole_grid_takes_milliseconds() -> None:
    slowest = 0.0
    for name, gpus, work in QUESTIONS.values():
        model, machine = find_model(name), find_machine(gpus)
        runs = []
        for _ in range(5):
            start = time.perf_counter()
            options(model, work, machine)
            runs.append(time.perf_counter() - start)
        slowest = max(slowest, min(runs))
    assert slowest < 0.05 * CLOCK


# --- refusals ------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("work", "backend", "said"),
    [
        (Work(method="qlora"), DeepSpeed(zero_stage=3), "use FSDP full"),
        (Work(optimizer="adamw_8bit"), FSDP(), "use adamw"),
        (Work(method="lora", optimizer="paged_adamw"), FSDP(), "use adamw"),
        (
            Work(optimizer="adamw_8bit"),
            DeepSpeed(zero_stage=2, offload_optimizer="cpu"),
            "use adamw with offload",
        ),
        (
            Work(method="lora"),
            DeepSpeed(zero_stage=1, communication="one_bit_adam"),
            "use communication: plain",
        ),
        (Work(reference="adapter_base", stage="dpo"), DDP(), "use --reference resident"),
        (Work(reference="cached"), DDP(), "has no reference model"),
        (Work(stage="ppo", reference="cached"), DDP(), "use --reference resident"),
        (Work(stage="dpo", reference="none"), DDP(), "use --reference resident"),
        (Work(stage="grpo", seq_length=512), DDP(), "raise --seq"),
        (Work(), Local(), "use backend.kind ddp"),
        (Work(), FSDP(sharding="hybrid", shard_ranks=3), "does not divide"),
    ],
)
def test_what_cannot_be_combined_is_refused_with_the_alternative(
    work: Work, backend: NamedBackend, said: str
) -> None:
    reason = refusals(work, setup(backend))
    assert reason is not None and said in reason


def test_what_can_be_combined_is_not_refused() -> None:
    assert refusals(Work(method="qlora"), setup(FSDP())) is None
    assert refusals(Work(method="qlora"), setup(DeepSpeed(zero_stage=2))) is None
    assert refusals(Work(optimizer="adamw_8bit"), setup(DDP())) is None


# --- the ladder ----------------------------------------------------------------------------------


def test_every_rung_needs_less_and_keeps_the_batch(question: tuple[Model, Machine, Work]) -> None:
    model, machine, work = question
    first = options(model, work, machine)[0]
    rungs = ladder(model, work, machine, None if first.fits else first)
    assert rungs[0] == first
    for before, after in pairwise(rungs):
        assert after.memory.total < before.memory.total
    for rung in rungs:
        rows = rung.setup.micro_batch * rung.accumulation * rung.setup.world_size
        assert rows == work.global_batch
        assert refusals(work, rung.setup) is None
    known = [rung.setup.backend for rung in rungs if rung.setup.backend in ranking.ESCALATION]
    places = [ranking.ESCALATION.index(backend) for backend in known]
    assert places == sorted(places)


def test_a_ladder_without_a_first_rung_is_an_error() -> None:
    name, gpus, work = QUESTIONS["too large"]
    with pytest.raises(
        ValueError, match=r"nothing fits .* comes nearest, .* GiB of GPU memory short; "
    ):
        ladder(find_model(name), work, find_machine(gpus))


def test_the_ladder_takes_the_steps_in_their_order() -> None:
    model, machine = find_model("Qwen/Qwen3-0.6B"), find_machine("8xH100")
    work = Work(global_batch=256, seq_length=1024)
    first = judge(model, work, setup(DDP(), ranks=8, micro=32), machine)
    rungs = ladder(model, work, machine, first)
    seen = [
        (describe(rung.setup.backend), rung.setup.resources.gradient_checkpointing)
        for rung in rungs
    ]
    changes = [seen[0], *(after for before, after in pairwise(seen) if before != after)]
    assert changes[:4] == [
        ("DDP", False),
        ("DDP", True),
        ("FSDP grad-op", True),
        ("FSDP full", True),
    ]
    shrinking = [
        rung.setup.micro_batch
        for rung, what in zip(rungs, seen, strict=True)
        if what == ("DDP", False)
    ]
    assert shrinking == [32, 16, 8, 4, 2, 1]


# --- explanation ---------------------------------------------------------------------------------


def rules(name: str, gpus: str, work: Work, link: str | None = None) -> dict[str, bool]:
    model, machine = find_model(name), find_machine(gpus, link)
    found = explain(model, work, machine, options(model, work, machine))
    assert all("\n" not in str(rule) and any(c.isdigit() for c in rule.numbers) for rule in found)
    return {rule.rule: rule.agrees for rule in found}


def test_rules_of_thumb_hold_where_they_hold() -> None:
    small = "under 13B and a card of 40 GB or more: DDP"
    assert rules(QWEN, "4xA100", Work(method="lora"))[small]
    assert not rules(QWEN, "4xA100", Work(precision="fp32-master"))[small]
    card = "cards of 24 GB or less: FSDP with CPU offload"
    assert not rules(QWEN, "2x24GB", Work(method="lora"))[card]
    assert rules(QWEN, "4x4090", Work(precision="fp32-master"))[card]
    network = "fast network: DDP; slow network: FSDP"
    assert not rules("Qwen/Qwen3-0.6B", "2x4090", Work(global_batch=32), "slow-pcie")[network]
    large = "13B or more and 8 GPUs or more: FSDP"
    assert rules("Qwen/Qwen3-32B", "2x8xH100", Work(precision="fp32-master"))[large]


# --- the command ---------------------------------------------------------------------------------

ASK = ("--model", QWEN, "--method", "lora", "--gpus", "2x24GB", "--link", "pcie4")


def ask(*words: str) -> subprocess.CompletedProcess[str]:
    argv = [sys.executable, "-m", "backends.planner", *words]
    return subprocess.run(argv, cwd=ROOT, capture_output=True, text=True, check=False)


def test_the_command_answers_in_a_second_without_torch() -> None:
    argv = (*ASK, "--seq", "4096", "--global-batch", "64", "--rows", "50000")
    done, runs = ask(*argv), []
    for _ in range(3):
        start = time.perf_counter()
        ask(*argv)
        runs.append(time.perf_counter() - start)
    assert done.returncode == 0 and done.stderr == ""
    assert min(runs) < 1.0 * CLOCK
    assert "First choice: DDP" in done.stdout and "hours" in done.stdout
    code = (
        "import sys; from backends.planner.__main__ import main; "
        f"main({list(argv)}); sys.exit('torch' in sys.modules or 'transformers' in sys.modules)"
    )
    subprocess.run([sys.executable, "-c", code], cwd=ROOT, check=True, capture_output=True)


@pytest.mark.parametrize(
    "words",
    [
        ASK,
        (
            "--model",
            QWEN,
            "--gpus",
            "8xH100",
            "--stage",
            "grpo",
            "--seq",
            "2048",
            "--rows",
            "99999",
        ),
        ("--model", "Qwen/Qwen3-30B-A3B", "--gpus", "8xH100", "--nvme", "/fast", "--rows", "99999"),
        ("--model", "meta-llama/Llama-3.1-70B", "--gpus", "2x48GB", "--method", "qlora"),
        ("--model", "meta-llama/Llama-3.1-405B", "--gpus", "8xA100"),
    ],
)
def test_tables_fit_a_terminal(words: tuple[str, ...]) -> None:
    done = ask(*words)
    assert done.returncode == 0
    assert max(map(len, done.stdout.splitlines())) <= WIDTH


def test_json_says_the_same_as_the_table() -> None:
    done = ask(*ASK, "--rows", "6400", "--json")
    found = json.loads(done.stdout)
    machine, work = find_machine("2x24GB", "pcie4"), Work(method="lora")
    ranked = options(find_model(QWEN), work, machine)
    assert [o["backend"] for o in found] == [describe(o.setup.backend) for o in ranked]
    first = found[0]
    peak = first["peak_bytes_per_gpu"]
    assert sum(size for part, size in peak.items() if part != "total") == peak["total"]
    assert first["micro_batch"] * first["accumulation"] * 2 == 64
    assert first["hours"] == pytest.approx(100 * first["step_seconds"] / 3600)
    assert {"phase", "fits", "step_seconds", "host_bytes", "disk_bytes", "binds"} <= set(first)


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (("--model", "Qwen/Qwen3-9B", "--gpus", "8xH100"), "Qwen/Qwen3-8B"),
        (("--model", QWEN, "--gpus", "8xH10"), "H100"),
        (("--model", QWEN, "--gpus", "8xH100", "--method", "lorra"), "did you mean lora?"),
        (("--model", QWEN, "--gpus", "8xH100", "--globl-batch", "8"), "--global-batch"),
        (("--model", QWEN, "--gpus", "8xH100", "--global-batch", "0"), "at least 1"),
        (("--model", QWEN, "--gpus", "8xH100", "--global-batch", "12"), "8 and 16"),
        (("--model", QWEN, "--gpus", "8xH100", "--margin-gb", "-1"), "--margin-gb"),
        (("--model", QWEN, "--gpus", "8xH100", "--reference", "cached"), "no reference model"),
        (("--gpus", "8xH100"), "--model"),
        (("--model", "CONFIG", "--gpus", "8xH100"), "llamma"),
        (("estimate", "--model", QWEN), "--gpus"),
    ],
)
def test_a_mistake_is_one_line(tmp_path: Path, words: tuple[str, ...], said: str) -> None:
    config = tmp_path / "config.json"
    config.write_text('{"model_type": "llamma", "hidden_size": 8}')
    done = ask(*(str(config) if word == "CONFIG" else word for word in words))
    assert done.returncode == 2 and done.stdout == ""
    assert done.stderr.startswith("planner: ") and said in done.stderr
    assert len(done.stderr.splitlines()) == 1


# --- the project's own recipes -------------------------------------------------------------------

RECIPE_MACHINES = {
    "qwen3_8b_full_8xh100": "8xH100",
    "qwen3_8b_lora_1x24gb": "1x24GB",
    "qwen3_8b_qlora_2x24gb": "2x24GB",
    "qwen3_32b_full_8x80gb": "8x80GB",
    "llama3_70b_qlora_2x48gb": "2x48GB",
}
PRECISIONS = {
    ("float32", "bfloat16"): "fp32-master",
    ("bfloat16", "bfloat16"): "bf16",
    ("float32", "float32"): "fp32",
}


def work_of(config: Training, max_length: int) -> Work:
    """A training stage's config as the planner sees it."""
    method = config.method
    return Work(
        stage="dpo" if isinstance(config, DPO) else "sft",
        method=method.kind,
        lora_rank=method.rank if isinstance(method, Adapter) else 16,
        precision=PRECISIONS[config.load_dtype, config.compute_dtype],  # pyright: ignore[reportArgumentType]
        optimizer=config.optimizer,
        seq_length=max_length,
        global_batch=config.global_batch_rows,
        packing=getattr(config, "pack_length", None) is not None,
    )


@pytest.mark.parametrize("stage", ["sft", "dpo"])
@pytest.mark.parametrize("name", RECIPE_MACHINES)
def test_the_projects_recipes_can_run(name: str, stage: str) -> None:
    recipe = load(SFTThenDPO, RECIPES / f"{name}.yaml")
    step = getattr(recipe, stage)
    model = find_model(recipe.model.config.source.repo)
    machine = find_machine(RECIPE_MACHINES[name])
    work = work_of(step.config, recipe.tokenize_data.config.max_length)
    given = Setup(step.backend, step.resources)
    assert given.world_size == machine.ranks
    assert refusals(work, given) is None
    assert judge(model, work, given, machine).fits
