"""How long one optimizer step takes: arithmetic, what communication does not hide, offload.

Bytes on the wire and floating-point operations follow Rajbhandari et al. (ZeRO, arXiv:1910.02054),
Rasley/Ren et al. (ZeRO-Offload, arXiv:2101.06840) and Kaplan et al. (arXiv:2001.08361, 6PT). With P
parameters, T tokens of a micro-step, N ranks, f = (N-1)/N and g bytes of a gradient:

    full training 6PT, 8PT with recompute; adapters 4PT and 6PT: a frozen weight has no gradient
    DDP and ZeRO-1 move nothing in a micro-step, and 2gPf, or gPf + 2Pf, in an optimizer step
    ZeRO-2 moves gPf and 2Pf; shard-grad-op 2Pf + gPf and full shard 4Pf + gPf in each micro-step
"""

from dataclasses import dataclass, replace

from backends import DDP, FSDP, DeepSpeed
from backends.planner.hardware import GB, Link, Machine
from backends.planner.memory import (
    compute_bytes,
    num_adapter_parameters,
    quantised_bytes,
    reduce_bytes,
)
from backends.planner.model import Model
from backends.planner.work import Setup, Work, answers_at_once

PAIRS = ("dpo", "reward")
ROLLOUTS = ("ppo", "grpo")
ADAPTERS = ("lora", "dora", "qlora")
OFFLOADED = ("optimizer", "parameters")

ADAPTER_OVERHEAD = 1.12
"""Element-wise work does not shrink when weight gradients go: LoRA is 1.17 times as fast as full
training, not 8/6 (fms-hf-tuning's A100 table: 3844 and 3288 tokens/s)."""

UNFUSED_OVERHEAD = 1.04
"""Adapters as separate products: 3606 against 3844 tokens/s in the same table."""

DORA_OVERHEAD = 1.25
"""The norm of every adapted weight is computed anew in each forward pass (arXiv:2402.09353)."""

DDP_BUCKET = 25 * 2**20
"""PyTorch's default, in bytes: the last gradients to leave."""

DEQUANTISATION = 0.3
"""Share of memory bandwidth that turning NF4 into bfloat16 reaches."""

HOOKS = {"ddp": 1.0, "fsdp": 1.005, "deepspeed": 1.0, "zero3": 1.025}
"""Python around each module, as a factor on arithmetic: FSDP 3159 and ZeRO-3 3095 tokens/s where
both hide their traffic (huggingface/blog, deepspeed-to-fsdp-and-back)."""

NARROW = 0.2
"""Share of the time at width 4096 that grows as width falls, since element-wise work is a larger
part of a narrow layer: 7B models reach 1.15 to 1.2 times the rate of 1B ones on A100
(mlfoundations/open_lm#21)."""

LAUNCH = 0.5e-3
"""Seconds in which Python launches one layer's kernels, forward and backward."""

CPU_LAUNCH = 2e-3
"""The same on a CPU, where nothing hides it: a row of 40 tokens takes 1.7 to 3.6 times a sixteenth
of sixteen rows in small Llamas of 2 to 8 layers on one thread."""

EXPERT_LAUNCH = 0.25e-3
"""Seconds in which Python runs one expert of a loop forward, its shares of recomputation and
backward alike: find its tokens, which waits for the GPU, take them, three products, activation and
weighing, add them back. Some twenty launches; a whole layer has as many again in attention and
norms. So transformers 4 computes a mixture, whose experts are modules of their own."""

GATHER_HOOK = 0.8e-3
"""Seconds of ZeRO-3's hooks around a module in one pass: gather its weights, which no trace can
fetch ahead since the visited experts change, wait, release. Three modules an expert are most of the
91.2 s of Qwen3-30B-A3B on 16 A800 (Megatron-SWIFT's documentation, "Benchmark"), where Megatron
takes 9.6; DeepSpeed#6649 finds the same hooks to bind a mixture of 64 experts. That one row says
how long, against 14B dense ones of the same page; for other machines it is an order of magnitude.
"""

GROUPED_RATE = 0.5
"""Share of the dense rate that grouped products over stacked experts reach: tiles of a few hundred
tokens fill a GPU badly, and every token is copied to its experts and back."""

EAGER_TRAFFIC = 20
"""Bytes that eager attention moves for a score in a forward pass: written, masked, softened in
float32 and cast back; backward moves twice as much."""

OPTIMIZER_TRAFFIC = {"adamw": 28, "paged_adamw": 12, "adamw_8bit": 5, "paged_adamw_8bit": 5}
"""Accesses of a parameter-sized tensor in one step, clipping included, in units of its type:
PyTorch's AdamW works through lists of tensors operation by operation."""

FUSED_ADAM_TRAFFIC = 40
"""Bytes a parameter of DeepSpeed's fused Adam with its float32 master weights."""

ZERO_HOST_RATE = 2.0 * GB
"""DeepSpeed copies tensor by tensor: two passes over 1.7e9 bytes of weights add 3.2 s to the step
of each of 8 GPUs (DeepSpeed#3901), whatever the lanes could carry."""

CPU_ADAM_BYTES = 28
"""Main-memory traffic of DeepSpeed's CPU Adam a parameter; PyTorch's AdamW on CPU moves twice."""


@dataclass(frozen=True)
class StepTime:
    """One optimizer step. The first field is the sum of the next four; all in seconds."""

    seconds: float
    compute: float
    """Forward, backward, and the optimizer where it steps on the GPU."""

    exposed_communication: float
    """Time between ranks that no computation hides."""

    offload: float
    """Copies to host or disk that nothing hides, and the optimizer's step on the CPU."""

    generation: float
    """Writing the answers of an RL stage."""

    tokens_per_second_per_gpu: float
    """Trained tokens, at the longest row; both answers of a pair count."""

    binds: str
    """What takes most of the time that could be less, in words."""


@dataclass(frozen=True)
class Passes:
    """Seconds of arithmetic in one micro-step."""

    forward: float
    """Of the trained model."""

    backward: float
    """With recomputation."""

    others: float
    """Forward passes of reference, reward model, critic and old policy."""

    @property
    def total(self) -> float:
        return self.forward + self.backward + self.others


@dataclass(frozen=True)
class Traffic:
    """Whole sizes, in bytes, of the tensors that ranks exchange."""

    forward_gather: float = 0.0
    backward_gather: float = 0.0
    others_gather: float = 0.0
    """Gathers that run outside the two phases: a sharded reference, reward model or critic."""

    micro_reduce: float = 0.0
    """Gradients scattered in each micro-step."""

    step_reduce: float = 0.0
    """Gradients reduced once, under the last backward pass. An all-reduce counts twice."""

    step_gather: float = 0.0
    """Weights gathered after the optimizer's step; nothing hides it."""

    replica_reduce: float = 0.0
    """Gradients summed between replicas of a shard group, in each micro-step."""

    first_unit: float = 0.0
    """The gather before which nothing can run."""

    last_unit: float = 0.0
    """The last gradients, after which nothing runs."""

    shard_ranks: int = 1
    """Ranks of the group that these tensors are cut over."""


@dataclass(frozen=True)
class Exposed:
    """Seconds that nothing hides, of one micro-step and of one optimizer step."""

    micro: float
    step: float
    hidden: float = 0.0
    """Seconds of a micro-step's arithmetic that are taken by what it hides."""


def step_time(model: Model, work: Work, setup: Setup, machine: Machine) -> StepTime:
    """The time of one optimizer step of ``work`` under ``setup``. Pure; asks for no GPU."""
    k = accumulation(work, setup)
    passes = arithmetic(model, work, setup, machine)
    exposed = communication(model, work, setup, machine, passes)
    host = offload(model, work, setup, machine, passes.total - exposed.hidden)
    written = generation(model, work, setup, machine)
    stepped = optimizer(model, work, setup, machine)
    parts = {
        "compute": k * passes.total + stepped,
        "exposed_communication": k * exposed.micro + exposed.step,
        "offload": k * host.micro + host.step,
        "generation": written,
    }
    seconds = sum(parts.values())
    tokens = work.global_batch * row_tokens(work) / setup.world_size
    return StepTime(
        seconds=seconds,
        **parts,
        tokens_per_second_per_gpu=tokens / seconds,
        binds=_binds(parts, k * host.micro, host.step, setup, machine)
        if not _experts_bind(parts, model, work, setup, machine)
        else "expert dispatch",
    )


def accumulation(work: Work, setup: Setup) -> int:
    """Micro-steps of an optimizer step; micro-batch x accumulation x ranks is the global batch.

    Raises ``ValueError`` when they cannot be equal.
    """
    rows = setup.micro_batch * setup.world_size
    steps, rest = divmod(work.global_batch, rows)
    if rest or not steps:
        raise ValueError(
            f"a global batch of {work.global_batch} rows is no multiple of micro-batch "
            f"{setup.micro_batch} x {setup.world_size} ranks = {rows}"
        )
    return steps


def row_tokens(work: Work) -> int:
    """Tokens of one row of the global batch; a pair is two answers with their prompts."""
    return work.seq_length * (2 if work.stage in PAIRS else 1)


def trained_parameters(model: Model, work: Work) -> int:
    """Every weight, or the adapters alone."""
    return model.num_parameters if work.method == "full" else num_adapter_parameters(model, work)


def weight_bytes(model: Model, work: Work) -> float:
    """The whole model as it is computed with, and so as it travels; NF4 stays packed, and its
    scales stay in every rank.
    """
    if work.method != "qlora":
        return compute_bytes(work) * float(model.num_parameters)
    packed, _ = quantised_bytes(model.num_linear_parameters, double=work.double_quantisation)
    blocks = model.num_block_parameters - model.num_linear_parameters
    return packed + 2 * blocks + root_bytes(model, work)


def root_bytes(model: Model, work: Work) -> float:
    """Embeddings, head and last norm, likewise."""
    upcast = work.method == "qlora" and work.frozen_upcast
    return (4 if upcast else compute_bytes(work)) * float(model.root_parameters)


# --- arithmetic ----------------------------------------------------------------------------------


def forward_flops(model: Model, tokens: float, seq_length: int) -> tuple[float, float, float]:
    """(layers, attention, head) operations of one forward pass: 2PT, and 4LqTs of attention.

    Looking an embedding up costs nothing; a tied head multiplies all the same. Of attention a
    causal mask leaves half, and its kernels reach about half the rate of plain products, so it is
    counted whole.
    """
    head = model.vocab_size * model.hidden_size
    outside = model.num_embedding_parameters + model.num_head_parameters
    body = model.num_active_parameters - outside
    attention = 4 * model.num_layers * model.query_width * tokens * seq_length
    return 2.0 * body * tokens, float(attention), 2.0 * head * tokens


def arithmetic(model: Model, work: Work, setup: Setup, machine: Machine) -> Passes:
    """Seconds of one micro-step on one rank."""
    tokens = setup.micro_batch * row_tokens(work)
    slow = 1.0 if work.precision != "fp32" or machine.device == "cpu" else 4.0
    rate = machine.gpu.flops / (slow * _narrowness(model, machine))
    operations = forward_flops(model, tokens, work.seq_length)
    layers, attention, head = (each / rate for each in operations)
    layers += _dispatch(model, work, setup, tokens, rate)
    attention += _score_seconds(model, work, tokens, machine)
    once = layers + attention + head
    recompute = layers + attention if setup.resources.gradient_checkpointing else 0.0
    # Attention has no weights: its backward is two passes, whatever is trained.
    gradients = once + attention if work.method in ADAPTERS else 2 * once
    factor = _method_factor(work) * _hooks(setup)
    unpack = _dequantisation(model, work, machine)
    trained = _trained_models(work)
    passes = Passes(
        forward=trained * (factor * once + unpack),
        backward=trained * (factor * (recompute + gradients) + unpack * (2 if recompute else 1)),
        others=(_sharded_forwards(work) + work.num_reward_models / work.passes) * (once + unpack),
    )
    return _no_faster_than_python(passes, model, setup, machine)


def _dispatch(model: Model, work: Work, setup: Setup, tokens: float, rate: float) -> float:
    """Seconds that the experts of one forward pass take beyond their operations at full rate."""
    if not model.is_mixture:
        return 0.0
    visits = model.num_mixture_layers * model.num_active_experts * tokens
    slower = 2.0 * visits * model.expert_parameters / rate * (1 / GROUPED_RATE - 1)
    if work.experts == "grouped":
        return slower
    backend = setup.backend
    hooked = isinstance(backend, DeepSpeed) and backend.zero_stage == 3
    each = EXPERT_LAUNCH + hooked * model.num_matrices * GATHER_HOOK
    met = min(model.num_experts, model.num_active_experts * tokens)
    return max(slower, model.num_mixture_layers * met * each)


def _experts_bind(
    parts: dict[str, float], model: Model, work: Work, setup: Setup, machine: Machine
) -> bool:
    """Whether dispatching experts takes most of the part that is largest, arithmetic."""
    if not model.is_mixture or max(parts, key=lambda part: parts[part]) != "compute":
        return False
    tokens = setup.micro_batch * row_tokens(work)
    rate = machine.gpu.flops / _narrowness(model, machine)
    useful = sum(forward_flops(model, tokens, work.seq_length)) / rate
    return _dispatch(model, work, setup, tokens, rate) > useful


def _score_seconds(model: Model, work: Work, tokens: float, machine: Machine) -> float:
    """Eager attention keeps whole score matrices in memory."""
    if work.attention != "eager":
        return 0.0
    scores = model.num_layers * model.num_heads * tokens * work.seq_length
    return EAGER_TRAFFIC * scores / machine.gpu.bandwidth


def _narrowness(model: Model, machine: Machine) -> float:
    if machine.device == "cpu":
        return 1.0
    return 1 - NARROW + NARROW * 4096 / model.hidden_size


def _method_factor(work: Work) -> float:
    if work.method not in ADAPTERS:
        return 1.0
    unfused = 1.0 if work.fused_kernels else UNFUSED_OVERHEAD
    return ADAPTER_OVERHEAD * unfused * (DORA_OVERHEAD if work.method == "dora" else 1.0)


def _hooks(setup: Setup) -> float:
    match setup.backend:
        case DeepSpeed(zero_stage=3):
            return HOOKS["zero3"]
        case backend:
            return HOOKS.get(backend.kind, 1.0)


def _dequantisation(model: Model, work: Work, machine: Machine) -> float:
    """Reading NF4 and writing bfloat16, once a pass."""
    if work.method != "qlora":
        return 0.0
    return 2.5 * model.num_linear_parameters / (DEQUANTISATION * machine.gpu.bandwidth)


def _sharded_forwards(work: Work) -> float:
    """Forward passes without gradients, in an optimizer step, of what is divided as the policy is:
    the reference, of RL stages the policy that sampled, of PPO its critic."""
    reference = 0 if work.reference in ("cached", "none") else 1
    found = {"dpo": reference, "grpo": reference + 1, "ppo": reference + 2}.get(work.stage, 0)
    return found / work.passes


def _no_faster_than_python(passes: Passes, model: Model, setup: Setup, machine: Machine) -> Passes:
    again = 1.5 if setup.resources.gradient_checkpointing else 1.0
    if machine.device == "cpu":
        each = CPU_LAUNCH * again * model.num_layers / 3
        return replace(passes, forward=passes.forward + each, backward=passes.backward + 2 * each)
    least = LAUNCH * again * model.num_layers
    short = max(1.0, least / (passes.forward + passes.backward))
    return replace(passes, forward=short * passes.forward, backward=short * passes.backward)


def optimizer(model: Model, work: Work, setup: Setup, machine: Machine) -> float:
    """Seconds of the optimizer's step where it runs on the GPU: memory traffic, no arithmetic."""
    backend = setup.backend
    trained = trained_parameters(model, work) * _trained_models(work)
    width = 2 if work.precision == "bf16" and work.method == "full" else 4
    traffic = width * OPTIMIZER_TRAFFIC[work.optimizer]
    match backend:
        case DeepSpeed():
            if backend.offload_optimizer:
                return 0.0
            trained /= setup.world_size
            traffic = FUSED_ADAM_TRAFFIC
        case FSDP():
            if backend.cpu_offload:
                return 0.0
            trained /= setup.shard_ranks
        case _:
            pass
    return trained * traffic / machine.gpu.bandwidth


# --- communication -------------------------------------------------------------------------------


def traffic(model: Model, work: Work, setup: Setup) -> Traffic:
    """What a micro-step and an optimizer step move; PPO trains a critic beside the policy."""
    trained_models = _trained_models(work)
    weights = trained_models * weight_bytes(model, work)
    root = trained_models * root_bytes(model, work)
    trained = float(trained_models * trained_parameters(model, work))
    others = _sharded_forwards(work) * weight_bytes(model, work)
    match setup.backend:
        case FSDP() as backend:
            return _fsdp_traffic(backend, model, work, setup, weights, root, trained, others)
        case DeepSpeed() as backend:
            return _zero_traffic(backend, model, work, setup, weights, trained, others)
        case DDP():
            # Weight gradients of full training have the weights' type; adapters are float32.
            width = 2 if work.precision == "bf16" and work.method == "full" else 4
            summed = 2 * width * trained
            bucket = min(DDP_BUCKET, summed)
            return Traffic(step_reduce=summed, last_unit=bucket, shard_ranks=setup.world_size)
        case _:
            return Traffic()


def _zero_traffic(
    backend: DeepSpeed,
    model: Model,
    work: Work,
    setup: Setup,
    weights: float,
    trained: float,
    others: float,
) -> Traffic:
    """Gradients travel in the compute type; stages 1 and 2 gather the stepped weights."""
    ranks, gradients = setup.world_size, compute_bytes(work) * trained
    last = gradients / (model.num_layers + 1)
    if backend.zero_stage == 1:
        # After its warm-up 1-bit Adam sends a bit of each value, whatever its type.
        sent = trained / 8 if backend.communication == "one_bit_adam" else gradients
        return Traffic(step_reduce=sent, step_gather=sent, shard_ranks=ranks)
    if backend.zero_stage == 2:
        return Traffic(
            micro_reduce=gradients, step_gather=gradients, last_unit=last, shard_ranks=ranks
        )
    return Traffic(
        forward_gather=weights,
        backward_gather=weights,
        others_gather=others,
        micro_reduce=gradients,
        first_unit=compute_bytes(work) * float(model.num_embedding_parameters),
        last_unit=last,
        shard_ranks=ranks,
    )


def _fsdp_traffic(
    backend: FSDP,
    model: Model,
    work: Work,
    setup: Setup,
    weights: float,
    root: float,
    trained: float,
    others: float,
) -> Traffic:
    """The root unit stays gathered from forward to backward; ``grad_op`` keeps every unit."""
    width = reduce_bytes(backend, work)
    kept = root if backend.whole_embedding else 0.0
    group = setup.shard_ranks
    return Traffic(
        forward_gather=weights - kept,
        backward_gather=0.0 if backend.sharding == "grad_op" else weights - root,
        others_gather=others,
        micro_reduce=width * trained,
        step_reduce=2 * width * float(model.root_parameters) if kept else 0.0,
        replica_reduce=2 * width * trained if group < setup.world_size else 0.0,
        first_unit=root - kept,
        last_unit=width * trained / (model.num_layers + 1),
        shard_ranks=group,
    )


def communication(
    model: Model, work: Work, setup: Setup, machine: Machine, passes: Passes
) -> Exposed:
    """Seconds of traffic that neither forward nor backward hides.

    A phase lasts as long as the longer of arithmetic and traffic, as far as the link lets the two
    pass at once; the first gather and the last reduction stand alone.
    """
    if setup.world_size == 1:
        return Exposed(0.0, 0.0)
    moved = traffic(model, work, setup)
    quantised = _zeropp(setup)
    units = model.num_layers + 1
    forward, link = ring(moved.forward_gather * quantised, moved.shard_ranks, machine, units)
    backward, _ = ring(moved.backward_gather * quantised, moved.shard_ranks, machine, units)
    others, _ = ring(moved.others_gather * quantised, moved.shard_ranks, machine, units)
    reduce, _ = ring(moved.micro_reduce * quantised, moved.shard_ranks, machine, units)
    replicas = between_groups(moved.replica_reduce, moved.shard_ranks, machine)
    first, _ = ring(moved.first_unit * quantised, moved.shard_ranks, machine, 1)
    last, _ = ring(moved.last_unit * quantised, moved.shard_ranks, machine, 1)
    alone = min(first, forward) + min(last, reduce)
    micro = (
        _unhidden(max(0.0, forward - first), link.overlap, passes.forward)
        + _phase(passes.backward, backward, max(0.0, reduce - last) + replicas, link)
        + _unhidden(others, link.overlap, passes.others)
        + alone
    )
    hidden = forward + backward + reduce + replicas + others - micro
    once, wire = ring(moved.step_reduce, moved.shard_ranks, machine, 1)
    step = _unhidden(max(0.0, once - last), wire.reduce_overlap, passes.backward) + min(once, last)
    step += ring(moved.step_gather, moved.shard_ranks, machine, 1)[0]
    return Exposed(micro, step, hidden)


def _zeropp(setup: Setup) -> float:
    """ZeRO++ sends a quarter between nodes (arXiv:2306.10209)."""
    backend = setup.backend
    plus = isinstance(backend, DeepSpeed) and backend.communication == "zero++"
    return 0.25 if plus and setup.resources.nodes > 1 else 1.0


def _unhidden(seconds: float, overlap: float, compute: float) -> float:
    return seconds - min(overlap * seconds, compute)


def _phase(compute: float, gather: float, reduce: float, link: Link) -> float:
    hidden = min(link.overlap * gather + link.reduce_overlap * reduce, compute)
    return gather + reduce - hidden


def ring(size: float, ranks: int, machine: Machine, collectives: int) -> tuple[float, Link]:
    """(seconds, slowest link) to gather or to reduce-scatter ``size`` bytes over ``ranks``.

    Each rank moves size x (n-1)/n over its link; between nodes the whole machine's adapters
    carry size x (m-1)/m.
    """
    if size <= 0 or ranks < 2:
        return 0.0, machine.link
    inside = min(ranks, machine.ranks_per_node)
    nodes, groups = _spanned(ranks, machine)
    local = size * (inside - 1) / inside / machine.link.bytes_per_second
    remote = groups * size * (nodes - 1) / nodes / machine.network.bytes_per_second
    link = machine.network if remote > local else machine.link
    return max(local, remote) + collectives * link.latency, link


def _spanned(ranks: int, machine: Machine) -> tuple[int, int]:
    """(nodes that a group of consecutive ranks spans, such groups that share a node's adapters).

    A group that does not fill whole nodes, nor divides one, lies across a border with its
    neighbour.
    """
    per_node = machine.ranks_per_node
    nodes = -(-ranks // per_node)
    if ranks % per_node == 0 or (nodes == 1 and per_node % ranks == 0) or machine.nodes == 1:
        return nodes, 1
    return max(2, nodes), 2


def between_groups(size: float, group: int, machine: Machine) -> float:
    """Seconds to sum ``size`` bytes, cut over ``group`` ranks, between the groups."""
    groups = machine.ranks // group
    if size <= 0 or groups < 2:
        return 0.0
    if machine.nodes == 1:
        return size / group * (groups - 1) / groups / machine.link.bytes_per_second
    # A node holds its ranks' shards; replicas inside a node are summed before anything leaves it.
    held = size * min(1.0, machine.ranks_per_node / group)
    replicas = groups if group >= machine.ranks_per_node else machine.nodes
    return held * (replicas - 1) / replicas / machine.network.bytes_per_second


# --- offload and generation ----------------------------------------------------------------------


def offload(model: Model, work: Work, setup: Setup, machine: Machine, idle: float) -> Exposed:
    """Seconds of copies to host or disk, and of the optimizer on the CPU.

    ``idle`` seconds of a micro-step's arithmetic hide no communication yet.
    """
    match setup.backend:
        case FSDP(cpu_offload=True):
            return _fsdp_offload(model, work, setup, machine, idle)
        case DeepSpeed() as backend if backend.offload_optimizer or backend.offload_parameters:
            return _zero_offload(backend, model, work, setup, machine)
        case _:
            return Exposed(0.0, 0.0)


def _fsdp_offload(model: Model, work: Work, setup: Setup, machine: Machine, idle: float) -> Exposed:
    """Pinned copies block by block, which hide under arithmetic; PyTorch's AdamW on the CPU."""
    ranks = setup.shard_ranks
    trained = _trained_models(work) * trained_parameters(model, work) / ranks
    stored = 2 if work.precision == "fp32-master" and work.method != "qlora" else 1
    passes = stored * _copied_passes(work) + _sharded_forwards(work)
    copies = passes * weight_bytes(model, work) / ranks / machine.host_link
    gradients = 4 * trained / machine.host_link
    overlap = 0.8 if machine.gpu.peer_to_peer else machine.link.overlap
    hidden = min(overlap * (copies + gradients), idle)
    stepped = 2 * CPU_ADAM_BYTES * trained / machine.cpu_adam_bandwidth
    return Exposed(copies + gradients - hidden, stepped)


def _trained_models(work: Work) -> int:
    """The policy, and the critic of PPO."""
    return 2 if work.stage == "ppo" else 1


def _copied_passes(work: Work) -> float:
    """Times that trained models are brought in: forward, backward, and once to write answers."""
    return 2 * _trained_models(work) + (work.stage in ROLLOUTS) / work.passes


def _zero_offload(
    backend: DeepSpeed, model: Model, work: Work, setup: Setup, machine: Machine
) -> Exposed:
    ranks = setup.world_size
    trained = _trained_models(work) * trained_parameters(model, work) / ranks
    width = compute_bytes(work)
    rate = min(machine.host_link, ZERO_HOST_RATE)
    weights = (_copied_passes(work) + _sharded_forwards(work)) * weight_bytes(model, work)
    micro = step = 0.0
    if backend.offload_parameters:
        micro += weights / ranks / rate
    if backend.offload_parameters == "nvme":
        micro += weights / machine.nodes / machine.nvme_bandwidth
    if backend.offload_optimizer:
        micro += width * trained / rate
        step += width * trained / rate + CPU_ADAM_BYTES * trained / machine.cpu_adam_bandwidth
    if backend.offload_optimizer == "nvme":
        step += 24 * trained * machine.ranks_per_node / machine.nvme_bandwidth
    return Exposed(micro, step)


def generation(model: Model, work: Work, setup: Setup, machine: Machine) -> float:
    """Seconds to write an optimizer step's answers token by token: reading weights and cache binds.
    Of answers that are learned from several times, one time's share.

    The weights are gathered once and stay; every token reads them and the cache of its rows.
    """
    if work.stage not in ROLLOUTS:
        return 0.0
    rows = answers_at_once(work, setup)
    times = work.global_batch / setup.world_size / rows  # of PPO a rollout covers several steps
    width = compute_bytes(work)
    visited = min(model.num_parameters, model.num_active_parameters * rows)
    share = visited / model.num_parameters
    cache = 2 * model.num_layers * model.kv_width * width * rows * work.seq_length / 2
    read = (weight_bytes(model, work) * share + cache) / (0.7 * machine.gpu.bandwidth)
    products = 2 * model.num_active_parameters * rows / machine.gpu.flops
    launch = 0.0 if machine.device == "cpu" else LAUNCH * 1.5 * model.num_layers
    if model.is_mixture and work.experts == "loop":
        met = min(model.num_experts, model.num_active_experts * rows)
        launch += EXPERT_LAUNCH * model.num_mixture_layers * met
    unpack = _dequantisation(model, work, machine)
    return times * work.new_tokens * max(read + unpack, products, launch) / work.passes


def _binds(
    parts: dict[str, float], copies: float, stepped: float, setup: Setup, machine: Machine
) -> str:
    """The largest part of the step, in the words of what would have to be faster."""
    largest = max(parts, key=lambda part: parts[part])
    if largest == "exposed_communication":
        inside = setup.shard_ranks <= machine.ranks_per_node
        return (machine.link if inside else machine.network).name
    if largest == "offload":
        if "nvme" in (getattr(setup.backend, f"offload_{what}", None) for what in OFFLOADED):
            return "NVMe"
        return "CPU optimizer" if stepped > copies else "host copies"
    return {"compute": "arithmetic", "generation": "generation"}[largest]
