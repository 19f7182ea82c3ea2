"""Bytes that one training step needs on a GPU, on a host and on disk; a pure function.

The peak is the largest of three instants: the loss (logits beside every checkpoint), the backward
pass of a layer, and the optimizer step. P = parameters, N = ranks that share. Sources: ZeRO,
arXiv:1910.02054 (what each stage divides); DeepSpeed's own estimators (host factor 1.5); PyTorch's
derivatives for what is saved (``block``); QLoRA, arXiv:2305.14314 (bytes of NF4). The constants
are sizes of PyTorch's and DeepSpeed's own buffers; none was fitted to a model.
"""

from collections.abc import Callable
from dataclasses import dataclass
from functools import lru_cache
from typing import Any, Literal

from backends import FSDP, DeepSpeed
from backends.planner.block import EXPERTS, FLOAT32, ROUTER, Layer, replay_layer, replay_loss
from backends.planner.model import Model
from backends.planner.tape import Replay
from backends.planner.work import Setup, Work, answers_at_once

Phase = Literal["loss", "backward", "step"]

ATTENTION = ("q", "k", "v", "qkv", "o")

CUBLAS_BYTES = 2 * 8_519_680
"""cuBLAS workspaces of the forward and of the autograd thread: 2 x 4096 + 8 x 16 KiB each."""

INPUT_BYTES = 3 * 8
"""Token, label and position of a token, as 64-bit integers."""

NF4_BYTES = 0.5
NF4_BLOCK, NF4_SECOND_BLOCK = 64, 256
"""bitsandbytes: one scale for 64 weights; with double quantisation one byte, in blocks of 256."""

EIGHT_BIT_BLOCK = 256
"""bitsandbytes' 8-bit AdamW: two float32 scales for so many values."""

SUB_GROUP = 1_000_000_000
"""Parameters that DeepSpeed's stage 3 steps at once."""

REUSE_WINDOW = 500_000_000
"""Parameters that stage 3 keeps from the end of forward to the start of backward: half of its
``max_reuse_distance``, since each is passed twice."""

HOST_FACTOR = 1.5
"""Host memory over what is kept there: DeepSpeed's estimators' ``additional_buffer_factor``."""

NVME_BUFFERS = 5
"""Pinned float32 buffers, of a sub-group each, through which NVMe offload moves."""


@dataclass(frozen=True)
class Memory:
    """Bytes at the peak instant; the six parts sum to ``total``."""

    total: int
    weights: int
    """At rest: of the policy, and of a critic, a reference and a reward model."""

    gradients: int
    optimizer: int
    activations: int
    """Checkpoints or saved tensors of all layers, and the layer at work."""

    logits: int
    """Last norm, head and loss; 0 outside the ``loss`` phase, but for what PPO's policy keeps while
    its critic is at work."""

    buffers: int
    """Gathered weights, buckets, temporaries of the step, KV cache, workspaces."""

    phase: Phase
    """``loss``: head and loss, or generation; ``backward``: a layer; ``step``: the optimizer."""

    resident: int
    """Weights, gradients and optimizer state, without anything that comes and goes."""

    host_bytes: int
    """Of a node."""

    disk_bytes: int
    """Of a node."""


@dataclass(frozen=True)
class Spread:
    """Over how many ranks a backend divides what, and what else it holds."""

    weights: int = 1
    gradients: int = 1
    optimizer: int = 1
    gathers: Literal["nothing", "layer", "model", "window"] = "nothing"
    """What of divided weights is whole while it is used."""

    whole_embedding: bool = False
    master: bool = False
    """The optimizer holds float32 copies of weights in the compute type."""

    computes_low: bool = False
    """Gathered weights are in the compute type, so hidden states are too."""

    bucket: Literal["none", "gradients", "zero"] = "none"
    weights_away: Literal["cpu", "nvme"] | None = None
    optimizer_away: Literal["cpu", "nvme"] | None = None
    gradients_leave: bool = False
    """Gradients go to the host as they are made."""

    keeps_gradient_buffer: bool = False
    retains_inputs: bool = False
    """Frozen units keep the layers' inputs and their gradients until backward ends: FSDP 1."""

    prefetches: bool = False
    """The next layer is gathered early, the last one's gradients are reduced late, and the
    embedding is let go between forward and backward: FSDP 2, as accelerate wraps a model.
    """

    reduces_in: int = 0
    """Bytes of an element in which gradients are summed."""


@dataclass(frozen=True)
class Sizes:
    """Parameters and bytes of the model, before anything is divided."""

    compute: int
    weights: float
    """Bytes of all weights."""

    root: float
    """Of these, embeddings, head and last norm, in the type they are gathered in."""

    layer: float
    """Of these, the largest layer, likewise."""

    undivided: float
    """Bytes that no backend divides: scales of 4-bit blocks."""

    trained: int
    """Parameters that are trained."""

    head_gradient: float
    gradient: int
    """Bytes of a gradient element at rest."""

    state: float
    """Bytes of optimizer state for a trained parameter."""

    paged: bool
    step_copy: int
    """Bytes for a trained parameter that the step adds."""

    joined: int
    """Models that are one module, whose root units FSDP gathers together: PPO's."""


@dataclass(frozen=True)
class _Instant:
    phase: Phase
    gradients: float
    activations: float
    logits: float
    buffers: float

    @property
    def total(self) -> float:
        return self.gradients + self.activations + self.logits + self.buffers


def memory(model: Model, work: Work, setup: Setup) -> Memory:
    """What ``work`` on ``model`` needs under ``setup``."""
    spread = SPREADS[setup.backend.kind](work, setup)
    sizes = _sizes(model, work, spread)
    base = _weights_at_rest(model, sizes, spread)
    state = 0.0 if spread.optimizer_away or sizes.paged else sizes.state
    optimizer = state * sizes.trained / spread.optimizer
    whole_gradients = _gradients_at_rest(sizes, spread)
    copies = _model_copies(work)
    weights = base * copies.policies + _others(model, copies, sizes, spread)
    optimizer *= copies.policies
    instants = _instants(model, work, setup, spread, sizes, whole_gradients, copies.policies)
    worst = max(instants, key=lambda each: each.total)
    parts = [
        round(part)
        for part in (
            weights,
            worst.gradients,
            optimizer,
            worst.activations,
            worst.logits,
            worst.buffers,
        )
    ]
    host, disk = _away(model, work, setup, spread, sizes, copies)
    return Memory(
        sum(parts),
        *parts,
        phase=worst.phase,
        resident=round(weights + optimizer + whole_gradients * copies.policies),
        host_bytes=round(host),
        disk_bytes=round(disk),
    )


# -- What the model weighs -------------------------------------------------------------------------


def unknown_buckets(setup: Setup) -> int:
    """Bytes that ZeRO-1 and 2 may take beyond `memory` when their bucket sizes are not known.

    `memory` counts buckets of hidden_size squared, as this project and ``auto`` set them. Published
    configurations name 2e8 elements of 2 bytes, and ``overlap_comm`` takes 4.5 times both buckets
    (huggingface.co/docs/transformers, DeepSpeed, "ZeRO configuration").
    """
    backend = setup.backend
    below_three = isinstance(backend, DeepSpeed) and backend.zero_stage < 3
    return int(4.5 * 2 * 2 * 2e8) if below_three and setup.world_size > 1 else 0


def adapter_modules(model: Model, work: Work) -> tuple[str, ...]:
    """Linear modules of a layer that get an adapter."""
    if work.method == "full":
        return ()
    if work.lora_targets == "attention":
        return ATTENTION
    experts = (ROUTER, EXPERTS) if model.is_mixture else ()
    return (*(name for name, _, _ in model.linear_widths), *experts)


def num_adapter_parameters(model: Model, work: Work) -> int:
    """n = layers * rank * (inputs + outputs), summed over the adapted modules; a magnitude for each
    output under DoRA (arXiv:2402.09353). PEFT 0.21 adapts stacked experts too, each with ``rank``;
    gate and up, which are one tensor, with twice that.
    """
    taken = set(adapter_modules(model, work))
    magnitudes = work.method == "dora"
    linear = model.num_layers * sum(
        work.lora_rank * (n_in + n_out) + magnitudes * n_out
        for name, n_in, n_out in model.linear_widths
        if name in taken
    )
    if EXPERTS not in taken:
        return linear
    hidden, width, count = model.hidden_size, model.expert_width, model.num_experts
    expert = 2 * (hidden + 2 * width) + width + hidden
    mixture = work.lora_rank * (count * expert + hidden + count)
    return linear + model.num_mixture_layers * mixture


def quantised_bytes(weights: int, *, double: bool) -> tuple[float, float]:
    """(packed NF4, scales): 0.5 bytes a weight, and a scale for each block of 64.

    A scale is a float32 (0.5625 bytes a weight in all); double quantisation makes it one byte and a
    float32 for 256 scales (0.5159).
    """
    blocks = weights / NF4_BLOCK
    scales = blocks * (1 + FLOAT32 / NF4_SECOND_BLOCK) if double else blocks * FLOAT32
    return weights * NF4_BYTES, scales


def state_bytes(optimizer: str, element: int) -> float:
    """Bytes of optimizer state for a parameter: two moments, of ``element`` bytes or of one."""
    if optimizer.endswith("8bit"):
        return 2 + 2 * FLOAT32 / EIGHT_BIT_BLOCK
    return 2 * (FLOAT32 if optimizer == "paged_adamw" else element)


@lru_cache(maxsize=4096)
def _sizes(model: Model, work: Work, spread: Spread) -> Sizes:
    compute = compute_bytes(work)
    held = FLOAT32 if work.precision != "bf16" and not spread.master else compute
    full = work.method == "full"
    element = (compute if spread.master else held) if full else FLOAT32
    gathered = compute if spread.computes_low or spread.master else held
    base = compute if work.method == "qlora" else held
    adapters = 0 if full else num_adapter_parameters(model, work)
    adapter_element = compute if spread.master else FLOAT32
    blocks, undivided, layer = _base_bytes(model, work, base)
    outside = FLOAT32 if work.frozen_upcast and work.method == "qlora" else held
    in_use = base if work.method == "qlora" else gathered
    state = state_bytes(work.optimizer, FLOAT32 if spread.master else element)
    eight_bit = work.optimizer != "adamw"
    return Sizes(
        compute=compute,
        weights=blocks + outside * model.root_parameters + adapter_element * adapters,
        root=(outside if work.method == "qlora" else in_use) * _root_in_use(model, spread),
        layer=layer * in_use / base,
        undivided=undivided,
        trained=model.num_parameters if full else adapters,
        head_gradient=gathered * model.vocab_size * model.hidden_size if full else 0,
        gradient=compute if spread.master else element,
        state=state + FLOAT32 * spread.master,
        paged=work.optimizer.startswith("paged"),
        step_copy=(0 if eight_bit else (FLOAT32 if spread.master else element))
        + FLOAT32 * spread.master,
        joined=_joined(work),
    )


def _joined(work: Work) -> int:
    copies = _model_copies(work)
    return copies.policies + copies.frozen if work.stage == "ppo" else 1


def _root_in_use(model: Model, spread: Spread) -> int:
    """Root parameters that are gathered from the loss to the end of backward."""
    if spread.whole_embedding or (spread.prefetches and not model.tied):
        return model.root_parameters - model.num_embedding_parameters
    return model.root_parameters


def compute_bytes(work: Work) -> int:
    """Bytes of a value in the matrix products."""
    return FLOAT32 if work.precision == "fp32" else 2


def _base_bytes(model: Model, work: Work, element: int) -> tuple[float, float, float]:
    """(all layers without undivided scales, undivided scales, the largest layer)."""
    if work.method != "qlora":
        return element * model.num_block_parameters, 0.0, element * model.layer_parameters
    linear = model.num_linear_parameters
    packed, scales = quantised_bytes(linear, double=work.double_quantisation)
    plain = element * (model.num_block_parameters - linear)
    share = packed / model.num_layers
    return packed + plain, scales, share + plain / model.num_layers


# -- How a backend divides it ----------------------------------------------------------------------


def reduce_bytes(backend: FSDP, work: Work) -> int:
    """Bytes of a gradient while FSDP sums it; ``reduce_dtype`` counts under bfloat16 compute."""
    return FLOAT32 if backend.reduce_dtype == "float32" else compute_bytes(work)


def _whole(_: Work, setup: Setup) -> Spread:
    return Spread(bucket="gradients" if setup.world_size > 1 else "none")


def _fsdp(work: Work, setup: Setup) -> Spread:
    backend: Any = setup.backend
    group = setup.shard_ranks
    away = "cpu" if backend.cpu_offload else None
    gathers = "model" if backend.sharding == "grad_op" else "layer"
    return Spread(
        weights=group,
        gradients=group,
        optimizer=group,
        gathers=gathers,  # whole units are copies beside the shard, of one rank too
        whole_embedding=backend.whole_embedding,
        computes_low=True,
        weights_away=away,
        optimizer_away=away,
        gradients_leave=backend.cpu_offload,
        retains_inputs=work.fsdp_version == 1,
        prefetches=work.fsdp_version == 2,
        reduces_in=reduce_bytes(backend, work),
    )


def _zero(_: Work, setup: Setup) -> Spread:
    backend: Any = setup.backend
    ranks, stage = setup.world_size, backend.zero_stage
    return Spread(
        weights=ranks if stage == 3 else 1,
        gradients=ranks if stage >= 2 else 1,
        optimizer=ranks,
        gathers="window" if stage == 3 else "nothing",
        master=True,
        computes_low=True,
        bucket="zero",
        weights_away=backend.offload_parameters,
        optimizer_away=backend.offload_optimizer,
        gradients_leave=backend.offload_optimizer is not None,
        keeps_gradient_buffer=stage == 3,
    )


SPREADS: dict[str, Callable[[Work, Setup], Spread]] = {
    "local": _whole,
    "ddp": _whole,
    "fsdp": _fsdp,
    "deepspeed": _zero,
}


def _weights_at_rest(model: Model, sizes: Sizes, spread: Spread) -> float:
    whole = 0.0
    if spread.whole_embedding:
        whole = sizes.weights * model.num_embedding_parameters / model.num_parameters
    if spread.weights_away:
        return whole + sizes.undivided
    return whole + (sizes.weights - whole) / spread.weights + sizes.undivided


def _gradients_at_rest(sizes: Sizes, spread: Spread) -> float:
    if spread.gradients_leave:
        return 0.0
    return sizes.gradient * sizes.trained / spread.gradients


@dataclass(frozen=True)
class _Copies:
    policies: int
    """Trained models of the policy's size: policy and critic."""

    frozen: int
    """References, held as the policy's weights are."""

    whole: int
    """Reward models, whole in every rank whatever becomes of the policy."""


def _model_copies(work: Work) -> _Copies:
    adapters = work.method != "full"
    reference = work.reference or ("adapter_base" if adapters else "resident")
    needs_reference = work.stage in ("dpo", "ppo", "grpo")
    frozen = int(needs_reference and reference == "resident")
    policies = 1 + (work.stage == "ppo")
    return _Copies(policies=policies, frozen=frozen, whole=work.num_reward_models)


def _others(model: Model, copies: _Copies, sizes: Sizes, spread: Spread) -> float:
    """Frozen models in the compute type; a reference is divided as the policy's weights are."""
    whole = copies.whole * sizes.compute * model.num_parameters
    return whole + (0.0 if spread.weights_away else _frozen_shard(model, copies, sizes, spread))


def _frozen_shard(model: Model, copies: _Copies, sizes: Sizes, spread: Spread) -> float:
    return copies.frozen * sizes.compute * model.num_parameters / spread.weights


# -- The three instants ----------------------------------------------------------------------------


def num_tokens(work: Work, setup: Setup) -> int:
    """Tokens of one forward pass on one GPU; of a pair both answers go through it."""
    pair = 2 if work.stage in ("dpo", "reward") else 1
    return pair * setup.micro_batch * work.seq_length


def _layer(model: Model, work: Work, setup: Setup, spread: Spread, sizes: Sizes) -> Layer:
    full = work.method == "full"
    wide = work.precision == "fp32-master" and not spread.computes_low
    casts = wide and work.method != "qlora"
    norms = work.loss != "hf" if work.fused_norms is None else work.fused_norms
    return Layer(
        tokens=num_tokens(work, setup),
        seq_length=work.seq_length,
        compute=sizes.compute,
        residual=FLOAT32 if wide else sizes.compute,
        trains_base=full,
        cast_weights=casts,
        gradient=FLOAT32 if casts else sizes.compute,
        adapted=adapter_modules(model, work),
        rank=work.lora_rank,
        dropout=work.lora_dropout > 0,
        dora=work.method == "dora",
        quantised=work.method == "qlora",
        fused_adapters=work.fused_kernels and not full,
        fused_norms=norms,
        fused_mlp=work.fused_mlp,
        eager_attention=work.attention == "eager",
        recomputes=setup.resources.gradient_checkpointing,
        reentrant=work.reentrant,
    )


@dataclass(frozen=True)
class _Layers:
    """Activations of all layers."""

    kept: float
    """From forward to backward, of all layers."""

    kept_on_host: float
    first: Replay
    last: Replay
    hidden: int
    """Hidden states between two layers."""


def _layers(model: Model, layer: Layer, *, offloaded: bool) -> _Layers:
    mixtures = model.num_mixture_layers
    hidden = layer.tokens * model.hidden_size * layer.residual
    kinds = [(mixtures, True), (model.num_layers - mixtures, False)]
    replays = [(n, replay_layer(model, layer, mixture=kind)) for n, kind in kinds if n]
    largest = max((each for _, each in replays), key=lambda each: each.backward)
    if layer.recomputes:
        on_gpu = min(2, model.num_layers) if offloaded else model.num_layers
        kept = float(on_gpu * hidden)
        away = float(hidden * (model.num_layers - on_gpu))
    else:
        kept, away = float(sum(n * each.saved for n, each in replays)), 0.0
    return _Layers(kept, away, largest, largest, hidden)


def _instants(
    model: Model,
    work: Work,
    setup: Setup,
    spread: Spread,
    sizes: Sizes,
    of_one: float,
    policies: int,
) -> list[_Instant]:
    """``of_one``: bytes of the gradients of one trained model."""
    gradients = of_one * policies
    layer = _layer(model, work, setup, spread, sizes)
    layers = _layers(model, layer, offloaded=setup.resources.activation_offloading)
    always = _always(model, setup, spread, sizes, layer, policies)
    accumulates = work.global_batch > setup.world_size * setup.micro_batch
    resident = gradients if accumulates or spread.keeps_gradient_buffer else 0.0
    critic = gradients - of_one  # it was passed backward before the policy's loss is
    return [
        _at_loss(model, work, spread, sizes, layer, layers, always, max(resident, critic)),
        *_at_backward(
            model, work, spread, sizes, layer, layers, always, resident, gradients, policies
        ),
        _at_step(spread, sizes, always, gradients, policies),
        *_at_generation(model, work, setup, spread, sizes, always, resident),
    ]


def _always(
    model: Model, setup: Setup, spread: Spread, sizes: Sizes, layer: Layer, policies: int
) -> float:
    """What is there at every instant: inputs, workspaces, buckets."""
    inputs = INPUT_BYTES * layer.tokens
    workspace = CUBLAS_BYTES if setup.resources.device == "cuda" else 0
    bucket = 0.0
    if spread.bucket == "gradients":
        bucket = float(sizes.gradient * sizes.trained * policies)
    if spread.bucket == "zero" and setup.world_size > 1:
        pair = 2 if setup.resources.device == "cuda" else 1
        bucket = float(pair * sizes.compute * min(model.hidden_size**2, sizes.trained))
    return inputs + workspace + bucket


def _gathered(model: Model, sizes: Sizes, spread: Spread, *, layers: int) -> float:
    """Weights that are whole beside the shards while ``layers`` layers are at work."""
    if spread.gathers == "nothing":
        return 0.0
    if spread.gathers == "layer":
        ahead = layers * spread.prefetches
        reduced = spread.reduces_in * model.layer_parameters if sizes.head_gradient else 0
        return sizes.joined * sizes.root + (layers + ahead) * sizes.layer + ahead * reduced
    everything = sizes.root + model.num_layers * sizes.layer
    if spread.gathers == "model":
        return sizes.joined * everything
    window = sizes.compute * max(REUSE_WINDOW, model.num_head_parameters)
    return min(everything, window + sizes.layer + 0.9 * sizes.compute * model.hidden_size**2)


def _positions(model: Model, layer: Layer) -> float:
    """cos and sin of the rotary embedding, which every layer saves; fused kernels need none."""
    rotary = not layer.fused_norms and not model.position_rows
    return 2.0 * rotary * layer.tokens * model.head_dim * layer.compute


def _casts(model: Model, sizes: Sizes, layer: Layer) -> float:
    """Autocast's copies of trained weights, kept while the forward pass lasts."""
    if layer.cast_weights and not layer.recomputes:
        return 0.0  # each is saved by its layer, and counted there
    if layer.cast_weights and layer.trains_base:  # casts of frozen weights are not cached
        return float(sizes.compute * model.num_block_parameters)
    return float(sizes.compute * sizes.trained) if layer.adapted and sizes.compute < 4 else 0.0


def _loss(model: Model, work: Work, layer: Layer) -> Replay:
    """A reward model has one score a row; PPO takes the log-probabilities of its answers' tokens,
    and of the one before them, from whole logits."""
    kind = {"reward": "score", "ppo": "sampled"}.get(work.stage, work.loss)
    written = min(1.0, (work.new_tokens + 1) / work.seq_length)
    return replay_loss(
        model,
        layer,
        loss=kind,
        num_rows=layer.tokens // work.seq_length,
        answered=written if work.stage == "ppo" else 1.0,
    )


def _at_loss(
    model: Model,
    work: Work,
    spread: Spread,
    sizes: Sizes,
    layer: Layer,
    layers: _Layers,
    always: float,
    resident: float,
) -> _Instant:
    loss = _loss(model, work, layer)
    casts = _casts(model, sizes, layer)
    peak = max(loss.forward + casts, loss.backward)
    return _Instant(
        "loss",
        gradients=resident + loss.weight_gradients,
        activations=layers.kept + _positions(model, layer),
        logits=peak - loss.weight_gradients,
        buffers=always + _gathered(model, sizes, spread, layers=0),
    )


def _at_backward(
    model: Model,
    work: Work,
    spread: Spread,
    sizes: Sizes,
    layer: Layer,
    layers: _Layers,
    always: float,
    resident: float,
    gradients: float,
    policies: int,
) -> list[_Instant]:
    """PPO's critic comes first, while what the policy has saved waits; then the policy."""
    own = gradients / policies
    found = []
    if policies > 1:
        waits = _Waits(layers.kept, _loss(model, work, layer).saved, made=0.0, head=0.0)
        found += _through_layers(
            model, spread, sizes, layer, layers, always, resident, own, waits=waits
        )
    before = _Waits(0.0, 0.0, made=gradients - own, head=sizes.head_gradient)
    found += _through_layers(
        model, spread, sizes, layer, layers, always, resident, own, waits=before
    )
    return found


@dataclass(frozen=True)
class _Waits:
    """What is there while the layers of one model are passed backward."""

    activations: float
    logits: float
    made: float
    """Gradients of a model that was passed before."""

    head: float
    """The head's gradient, which comes before the layers'."""


def _through_layers(
    model: Model,
    spread: Spread,
    sizes: Sizes,
    layer: Layer,
    layers: _Layers,
    always: float,
    resident: float,
    gradients: float,
    *,
    waits: _Waits,
) -> list[_Instant]:
    """At the last layer, where every checkpoint is alive, and at the first, where every other
    layer's gradient is.
    """
    buffers = always + _gathered(model, sizes, spread, layers=1) + _positions(model, layer)
    work_set = layers.last.backward - layers.last.weight_gradients
    own = layers.last.weight_gradients
    others = 0 if layer.recomputes else layers.last.saved
    last = _Instant(
        "backward",
        gradients=max(resident, waits.made) + waits.head + own,
        activations=layers.kept - others + work_set + waits.activations,
        logits=waits.logits,
        buffers=buffers,
    )
    share = model.num_block_parameters / model.num_parameters if layer.trains_base else 1.0
    made = waits.made + gradients * share * (1 - 1 / model.num_layers)
    input_kept = layers.hidden if layer.recomputes else 0
    retained = 0.0
    if spread.retains_inputs and layer.adapted and layer.recomputes:
        retained = (layers.kept - input_kept) + layers.hidden * max(0, model.num_layers - 2)
    first = _Instant(
        "backward",
        gradients=max(resident, made) + waits.head + own,
        activations=input_kept + retained + work_set + waits.activations,
        logits=waits.logits,
        buffers=buffers,
    )
    return [last, first]


def _at_step(
    spread: Spread, sizes: Sizes, always: float, gradients: float, policies: int
) -> _Instant:
    """AdamW's multi-tensor form makes one more copy of what it steps; ZeRO one in float32 too."""
    stepped = policies * sizes.trained / spread.optimizer
    if spread.gathers == "window":
        stepped = min(stepped, SUB_GROUP)
    copy = 0.0 if spread.optimizer_away else sizes.step_copy * stepped
    return _Instant("step", gradients, 0.0, 0.0, always + copy)


def _at_generation(
    model: Model,
    work: Work,
    setup: Setup,
    spread: Spread,
    sizes: Sizes,
    always: float,
    gradients: float,
) -> list[_Instant]:
    """Rollouts: a KV cache of 2 * layers * kv_heads * head_dim elements a token, whole weights."""
    if work.stage not in ("ppo", "grpo"):
        return []
    rows = answers_at_once(work, setup)
    tokens = rows * work.seq_length  # prompt and answer
    cache = kv_cache_bytes(model, element=sizes.compute) * tokens
    logits = rows * model.vocab_size * (sizes.compute + FLOAT32)
    whole = sizes.root + model.num_layers * sizes.layer
    gathered = 0.0 if spread.gathers == "nothing" else whole
    return [_Instant("loss", gradients, 0.0, logits, always + cache + gathered)]


def kv_cache_bytes(model: Model, *, element: int = 2) -> int:
    """Of one token: keys and values of every layer."""
    return 2 * model.num_layers * model.kv_width * element


# -- Host and disk ---------------------------------------------------------------------------------


def _away(
    model: Model, work: Work, setup: Setup, spread: Spread, sizes: Sizes, copies: _Copies
) -> tuple[float, float]:
    """(host, disk) bytes of a node. DeepSpeed keeps 16 bytes a trained parameter on the host for
    the optimizer and 2 for the parameter, times 1.5; on NVMe up to 16 and 2, with buffers on the
    host. A critic is offloaded as the policy is, frozen models as its weights are.
    """
    node = setup.resources.ranks_per_node
    host = disk = 0.0
    optimizer = (sizes.state + FLOAT32) * sizes.trained / spread.optimizer * copies.policies
    weights = sizes.weights / spread.weights * copies.policies
    weights += _frozen_shard(model, copies, sizes, spread)
    factor = HOST_FACTOR if spread.master else 1.0
    buffers = NVME_BUFFERS * FLOAT32 * min(SUB_GROUP, sizes.trained / spread.optimizer)
    if spread.optimizer_away == "cpu" or (sizes.paged and not spread.optimizer_away):
        host += factor * optimizer
    if spread.optimizer_away == "nvme":
        host, disk = host + min(buffers, factor * optimizer), disk + optimizer
    if spread.weights_away == "cpu":
        host += factor * weights
    if spread.weights_away == "nvme":
        host, disk = host + min(buffers, factor * weights), disk + weights
    if setup.resources.activation_offloading:
        layer = _layer(model, work, setup, spread, sizes)
        host += _layers(model, layer, offloaded=True).kept_on_host
    return node * host, node * disk
