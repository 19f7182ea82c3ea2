"""A decoder layer, and the head with its loss, as tapes of tensor operations.

Names follow transformers' Llama: every size is bytes of a tensor of ``tokens`` rows. Saved tensors
are those of PyTorch's derivatives: a product saves both factors, a linear layer its input when its
weight is trained, RMSNorm in plain PyTorch its input in float32, flash attention queries, keys,
values, output and one float32 a head.
"""

from dataclasses import dataclass
from functools import lru_cache

from backends.planner.model import Model
from backends.planner.tape import Replay, Tape, replay

FLOAT32 = 4
MASK = 1
"""Bytes of an element of a dropout mask."""

ROUTER, EXPERTS = "router", "experts"
"""Modules of a mixture that an adapter may take."""

TILE_TOKENS = 4096
"""A chunked loss holds the logits of this many tokens at most, of a slice of the vocabulary."""


@dataclass(frozen=True)
class Layer:
    """How the layers are computed. Sizes of elements in bytes."""

    tokens: int
    seq_length: int
    compute: int
    residual: int
    """Of the hidden states between layers."""

    trains_base: bool
    cast_weights: bool
    """Weights are held in float32 and cast for the products."""

    gradient: int
    """Of the gradient that a weight's backward leaves."""

    adapted: tuple[str, ...] = ()
    """Linear modules that have an adapter."""

    rank: int = 0
    dropout: bool = False
    dora: bool = False
    quantised: bool = False
    fused_adapters: bool = False
    fused_norms: bool = False
    fused_mlp: bool = False
    eager_attention: bool = False
    recomputes: bool = True
    reentrant: bool = True
    """Recomputation runs to the layer's end, and its output stays."""


@lru_cache(maxsize=4096)
def replay_layer(model: Model, layer: Layer, *, mixture: bool) -> Replay:
    """One layer forward and backward; its input is a checkpoint where the layer recomputes."""
    builder = _Builder(model, layer)
    tape = builder.decoder_layer(mixture)
    kept = layer.recomputes and layer.reentrant
    return replay(tape, input_is_kept=layer.recomputes, output_is_kept=kept)


@lru_cache(maxsize=4096)
def replay_loss(
    model: Model, layer: Layer, *, loss: str, num_rows: int, answered: float = 1.0
) -> Replay:
    """Last norm, head and loss, from the last hidden states to their gradient. ``answered`` is the
    share of the tokens whose logits are made."""
    builder = _Builder(model, layer)
    tape = builder.head_and_loss(loss, num_rows, answered)
    return replay(tape, input_is_kept=False, output_is_kept=False)


class _Builder:
    """Appends the operations of one model and one ``Layer`` to a tape."""

    def __init__(self, model: Model, layer: Layer) -> None:
        self.model, self.layer = model, layer
        self.tape = Tape()
        self.linears = {name: (i, o) for name, i, o in model.linear_widths}

    def wide(self, width: float, *, tokens: float = 1.0, element: int | None = None) -> int:
        """Bytes of a tensor of ``width`` columns."""
        size = self.layer.compute if element is None else element
        return int(self.layer.tokens * tokens * width * size)

    def decoder_layer(self, mixture: bool) -> Tape:
        model, layer = self.model, self.layer
        hidden = self.wide(model.hidden_size, element=layer.residual)
        start = self.tape.value(hidden)
        normed = self.norm(start, model.hidden_size)
        attended = self.attention(normed)
        if model.norms_per_layer == 4:
            attended = self.norm(attended, model.hidden_size)
        parallel = model.norms_per_layer == 1
        middle = start
        if not parallel:
            middle = self.add(start, attended)
            normed = self.norm(middle, model.hidden_size)
        out = self.mixture(normed) if mixture else self.mlp(normed, model.mlp_width)
        if model.norms_per_layer == 4:
            out = self.norm(out, model.hidden_size)
        if parallel:
            out = self.add(attended, out)
        self.add(middle, out)
        return self.tape

    def add(self, left: int, right: int) -> int:
        size = max(self.tape.sizes[left], self.tape.sizes[right])
        return self.tape.run((left, right), size, passes_gradient=True)

    def norm(self, x: int, width: int, *, tokens: float = 1.0) -> int:
        """RMSNorm, or LayerNorm's one kernel, whose input and statistics are saved."""
        layer, size = self.layer, self.tape.sizes[x]
        trained = layer.gradient * width if layer.trains_base else 0
        statistics = self.wide(1, tokens=tokens, element=FLOAT32)
        if layer.fused_norms or self.model.norm_parameters != 1:
            return self.tape.run(
                (x,), size, saved=(x,), saved_bytes=statistics, weight_gradient=trained
            )
        whole = self.wide(width, tokens=tokens, element=FLOAT32)
        if size < whole:
            x = self.tape.run((x,), whole)
        # x * rsqrt(mean(x * x)): the square is a temporary, the product soon cast.
        scaled = self.tape.run(
            (x,),
            whole,
            saved=(x,),
            saved_bytes=statistics,
            backward_bytes=2 * whole,
        )
        if size < whole:
            scaled = self.tape.run((scaled,), size)
        return self.tape.run(
            (scaled,),
            size,
            saved=(scaled,) if layer.trains_base else (),
            backward_bytes=size if layer.trains_base else 0,
            weight_gradient=trained,
        )

    def cast(self, x: int, width: int) -> int:
        """To the compute type, as autocast does before every product."""
        size = self.wide(width)
        return x if self.tape.sizes[x] <= size else self.tape.run((x,), size)

    def linear(self, x: int, name: str, *, n_in: int = 0, n_out: int = 0) -> int:
        """One linear module, and its adapter."""
        layer = self.layer
        n_in, n_out = self.linears.get(name, (n_in, n_out))
        x = self.cast(x, n_in)
        weight = layer.compute * n_in * n_out
        temporary = weight if layer.quantised else 0
        out = self.tape.run(
            (x,),
            self.wide(n_out),
            saved=(x,) if layer.trains_base else (),
            saved_bytes=weight if layer.cast_weights else 0,
            forward_bytes=temporary,
            backward_bytes=temporary or (weight if layer.cast_weights else 0),
            weight_gradient=layer.gradient * n_in * n_out if layer.trains_base else 0,
        )
        if name not in layer.adapted:
            return out
        return self.adapter(x, out, n_in, n_out)

    def adapter(self, x: int, out: int, n_in: int, n_out: int) -> int:
        """PEFT's ``result + lora_B(lora_A(dropout(x))) * scaling``, under autocast."""
        layer, rank = self.layer, self.layer.rank
        wide, size = self.wide(n_in), self.wide(n_out)
        gradient = FLOAT32 * rank
        if layer.fused_adapters:
            dropped = wide if layer.dropout else 0
            return self.tape.run(
                (x, out),
                size,
                saved=(x,),
                saved_bytes=dropped,
                weight_gradient=gradient * (n_in + n_out),
            )
        whole = self.wide(n_in, element=FLOAT32)
        casts = whole > wide
        if casts:
            x = self.tape.run((x,), whole)
        if layer.dropout:
            x = self.tape.run((x,), whole, saved_bytes=self.wide(n_in, element=MASK))
        if casts:
            x = self.tape.run((x,), wide)
        inner = self.tape.run((x,), self.wide(rank), saved=(x,), weight_gradient=gradient * n_in)
        added = self.tape.run((inner,), size, saved=(inner,), weight_gradient=gradient * n_out)
        if layer.dora:
            return self.dora(out, added, n_in, n_out)
        scaled = self.tape.run((added,), size)
        return self.tape.run((out, scaled), size, passes_gradient=True)

    def dora(self, out: int, added: int, n_in: int, n_out: int) -> int:
        """(m - 1) * base + m * scaling * adapter, m = magnitude / ||W + scaling * B A||.

        Both results are saved for the gradient of the magnitude; the norm's matrices are temporary.
        """
        size, whole = self.wide(n_out), FLOAT32 * n_in * n_out
        base = self.tape.run((out,), size, saved=(out,), forward_bytes=3 * whole)
        scaled = self.tape.run((added,), size, saved=(added,), saved_bytes=size)
        both = self.tape.run((base, scaled), size, passes_gradient=True)
        return self.tape.run((out, both), size, passes_gradient=True)

    def attention(self, x: int) -> int:
        model = self.model
        # Slices of one product are views: whoever keeps one keeps the whole.
        joined = self.linear(x, "qkv") if model.joined_qkv else None
        q, k, v = (self.linear(x, n) if joined is None else joined for n in ("q", "k", "v"))
        if model.qk_norm != "none":
            q = self.norm(q, model.query_width)
            k = self.norm(k, model.kv_width)
        if not model.position_rows:
            q = self.rotate(q, model.query_width)
            k = self.rotate(k, model.kv_width)
        core = self.eager_core if self.layer.eager_attention else self.flash_core
        return self.linear(core(q, k, v), "o")

    def rotate(self, x: int, width: int) -> int:
        """x * cos + rotate_half(x) * sin; cos and sin are shared by all layers."""
        size = self.wide(width)
        temporary = 0 if self.layer.fused_norms else 2 * size
        return self.tape.run((x,), size, forward_bytes=temporary, backward_bytes=temporary)

    def flash_core(self, q: int, k: int, v: int) -> int:
        size = self.wide(self.model.query_width)
        read = tuple(dict.fromkeys((q, k, v)))
        return self.tape.run(
            read,
            size,
            saved=read,
            saves_output=True,
            saved_bytes=self.wide(self.model.num_heads, element=FLOAT32),
            backward_bytes=self.wide(self.model.query_width, element=FLOAT32),
        )

    def eager_core(self, q: int, k: int, v: int) -> int:
        """Scores and probabilities are whole: heads * seq_length of them for every token."""
        model, size = self.model, self.wide(self.model.query_width)
        groups = model.num_heads > model.num_kv_heads
        k = self.tape.run((k,), size) if groups else k
        v = self.tape.run((v,), size) if groups else v
        width = model.num_heads * self.layer.seq_length
        scores = self.tape.run((q, k), self.wide(width), saved=(q, k))
        if model.attention_softcap:
            scores = self.softcap(scores)
        scores = self.tape.run((scores,), self.wide(width))
        shares = self.tape.run((scores,), self.wide(width, element=FLOAT32), saves_output=True)
        if self.layer.compute < FLOAT32:
            shares = self.tape.run((shares,), self.wide(width))
        out = self.tape.run((shares, v), size, saved=(shares, v))
        return self.tape.run((out,), size)

    def softcap(self, x: int) -> int:
        """tanh(x / cap) * cap: the tanh saves its output."""
        size = self.tape.sizes[x]
        bounded = self.tape.run((x,), size, saves_output=True, forward_bytes=size)
        return self.tape.run((bounded,), size)

    def mlp(self, x: int, width: int) -> int:
        if not self.model.gated:
            up = self.linear(x, "up", n_in=self.model.hidden_size, n_out=width)
            acted = self.tape.run((up,), self.tape.sizes[up], saved=(up,))
            return self.linear(acted, "down", n_in=width, n_out=self.model.hidden_size)
        if self.model.joined_gate:
            both = self.linear(x, "gate_up")
            half = self.wide(width)  # of the gate when acted on; of a gradient beside both halves'
            out = self.tape.run((both,), half, saved=(both,), saved_bytes=half, backward_bytes=half)
            return self.linear(out, "down")
        gate = self.linear(x, "gate", n_in=self.model.hidden_size, n_out=width)
        if self.layer.fused_mlp:
            up = self.linear(x, "up", n_in=self.model.hidden_size, n_out=width)
            out = self.tape.run(
                (gate, up), self.tape.sizes[up], saved=(gate, up), passes_gradient=True
            )
        else:
            acted = self.tape.run((gate,), self.tape.sizes[gate], saved=(gate,))
            up = self.linear(x, "up", n_in=self.model.hidden_size, n_out=width)
            out = self.tape.run((acted, up), self.tape.sizes[up], saved=(acted, up))
        return self.linear(out, "down", n_in=width, n_out=self.model.hidden_size)

    def mixture(self, x: int) -> int:
        """Router, the visited experts as grouped products over stacked weights, shared experts."""
        model, layer = self.model, self.layer
        times = float(model.num_active_experts)
        routed = self.wide(model.hidden_size, tokens=times)
        x = self.cast(x, model.hidden_size)
        scores = self.wide(model.num_experts, element=FLOAT32)
        taken = self.tape.run((x,), routed, saved_bytes=scores + self.wide(4 * times, element=8))
        adapted = EXPERTS in layer.adapted
        weights = layer.gradient if layer.trains_base else 0
        needs_input = layer.trains_base or adapted
        expert = model.num_experts * model.hidden_size * model.expert_width
        # PEFT adds an adapter's product to the stacked weights, and multiplies by the sum.
        merged = layer.compute * expert if adapted else 0
        factors = model.num_experts * (3 * model.hidden_size + 5 * model.expert_width)
        casts = (FLOAT32 + layer.compute) * layer.rank * factors if adapted else 0
        both = self.tape.run(
            (taken,),
            self.wide(2 * model.expert_width, tokens=times),
            saved=(taken,) if needs_input else (),
            saved_bytes=2 * merged + casts,
            backward_bytes=2 * merged,
            weight_gradient=2 * weights * expert,
        )
        half = self.wide(model.expert_width, tokens=times)
        acted = self.tape.run((both,), half, saved=(both,))
        product = self.tape.run((acted, both), half, saved=(acted, both))
        down = self.tape.run(
            (product,),
            routed,
            saved=(product,) if needs_input else (),
            saved_bytes=merged,
            backward_bytes=merged,
            weight_gradient=weights * expert,
        )
        # The router's weights are float32, and so is what they multiply.
        whole = self.wide(model.hidden_size, tokens=times, element=FLOAT32)
        weighed = self.tape.run((down,), whole, saved=(down,), backward_bytes=2 * whole)
        sorted_back = self.tape.run((weighed,), whole)
        out = self.tape.run((sorted_back,), self.wide(model.hidden_size))
        if not model.shared_expert_width:
            return out
        shared = self.mlp(x, model.shared_expert_width)
        return self.add(out, shared)

    def head_and_loss(self, loss: str, num_rows: int, answered: float) -> Tape:
        """``loss`` is ``hf``, ``fused``, ``chunked``, ``score`` for a head of one column, or
        ``sampled`` for the log-probabilities of an answer."""
        model, layer = self.model, self.layer
        last = self.tape.value(self.wide(model.hidden_size, element=layer.residual))
        normed = self.norm(last, model.hidden_size)
        hidden = self.cast(normed, model.hidden_size)
        head = model.hidden_size * model.vocab_size
        trained = layer.gradient * head if layer.trains_base else 0
        kept = (hidden,) if layer.trains_base else ()
        if loss == "score":
            self.tape.run((hidden,), self.wide(1), saved=kept)
            return self.tape
        if loss == "chunked":
            tile = min(layer.tokens, TILE_TOKENS) * model.hidden_size * (layer.compute + FLOAT32)
            tile += tile * model.logit_softcap
            self.tape.run(
                (hidden,),
                0,
                saved=(hidden,),
                forward_bytes=tile,
                backward_bytes=tile,
                weight_gradient=trained,
            )
            return self.tape
        whole = self.wide(model.vocab_size, tokens=answered, element=FLOAT32)
        logits = self.tape.run(
            (hidden,),
            self.wide(model.vocab_size, tokens=answered),
            saved=kept,
            saved_bytes=layer.compute * head if layer.cast_weights else 0,
            weight_gradient=trained,
        )
        if model.logit_softcap:
            logits = self.softcap(logits)
        if loss == "sampled":
            return self.answers(logits, whole)
        # The model's variables hold hidden states and logits until the forward pass returns.
        held = 0 if layer.trains_base else self.tape.sizes[normed]
        if loss == "fused":
            logits = self.tape.run((logits,), whole, forward_bytes=held)
            shifted = whole - num_rows * model.vocab_size * FLOAT32
            shifted_logits = self.tape.run((logits,), shifted, forward_bytes=held)
            self.tape.run((shifted_logits,), 0, saved=(shifted_logits,))
            return self.tape
        if layer.compute < FLOAT32:
            logits = self.tape.run((logits,), whole, forward_bytes=held)
            held += self.wide(model.vocab_size)
        log_shares = self.tape.run((logits,), whole, saves_output=True, forward_bytes=held)
        self.tape.run((log_shares,), 0)
        return self.tape

    def answers(self, logits: int, whole: int) -> Tape:
        """PPO's log-probabilities: logits in float32 and their log-sum-exp, which saves them;
        entropies are told beside it without a gradient, and the gradients of both meet."""
        held = self.tape.sizes[logits]
        if self.layer.compute < FLOAT32:
            logits = self.tape.run((logits,), whole)
        number = self.wide(1, element=FLOAT32)
        normaliser = self.tape.run(
            (logits,),
            number,
            saved=(logits,),
            forward_bytes=2 * whole + held,
            backward_bytes=2 * whole,
        )
        picked = self.tape.run((logits,), number)
        self.tape.run((normaliser, picked), number)
        return self.tape
