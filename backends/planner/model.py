"""A language model's shape, as plain numbers read from its Hugging Face config.json."""

import json
import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from difflib import get_close_matches
from functools import cache, cached_property
from pathlib import Path
from typing import Any, Literal

CATALOGUE = Path(__file__).with_name("catalogue.json")

HFConfig = Mapping[str, Any]
"""A parsed config.json."""


@dataclass(frozen=True)
class Model:
    """The shape of a decoder-only transformer. Widths are in elements, counts in parameters."""

    name: str
    architecture: str
    """``model_type`` of the config."""

    num_layers: int
    hidden_size: int
    mlp_width: int
    """Inner width of the plain MLP; of one expert, see ``expert_width``."""

    num_heads: int
    num_kv_heads: int
    head_dim: int
    vocab_size: int
    max_positions: int = 4096

    tied: bool = False
    """The head is the embedding."""

    gated: bool = True
    """The MLP has a gate beside up and down: three matrices, not two."""

    joined_qkv: bool = False
    """Queries, keys and values come from one linear module, which takes one adapter."""

    joined_gate: bool = False
    """Gate and up are one linear module."""

    qkv_bias: bool = False
    out_bias: bool = False
    mlp_bias: bool = False
    head_bias: bool = False

    norm_parameters: int = 1
    """Parameters of a norm per channel: RMSNorm 1, LayerNorm with bias 2, without any 0."""

    norms_per_layer: int = 2
    qk_norm: Literal["none", "head", "whole"] = "none"
    """Norms of queries and keys: none, one shared by the heads, one over all heads."""

    logit_softcap: bool = False
    """Logits go through a tanh, which saves its output."""

    attention_softcap: bool = False
    """Attention scores do; flash attention's kernels have it built in, eager attention saves it."""

    embedding_norm: bool = False
    position_rows: int = 0
    """Rows of a learned position embedding."""

    num_experts: int = 0
    """Routed experts of a mixture layer; 0 for a dense model."""

    num_active_experts: int = 0
    """Routed experts that one token visits."""

    expert_width: int = 0
    shared_expert_width: int = 0
    shared_expert_gate: bool = False
    num_dense_layers: int = 0
    """Layers of a mixture model that have the plain MLP."""

    left_out: tuple[str, ...] = ()
    """Parts beside the language model that are not counted, such as ``vision``."""

    quantised: str = ""
    """How the weights are stored, where that is in less than 16 bits."""

    def __hash__(self) -> int:
        return self._hash

    @cached_property
    def _hash(self) -> int:
        """Computed once: a model is the key of every cache of the planner."""
        return hash((self.name, self.architecture, self.num_layers, self.hidden_size))

    @property
    def query_width(self) -> int:
        return self.num_heads * self.head_dim

    @property
    def kv_width(self) -> int:
        """Width of the keys, and of the values."""
        return self.num_kv_heads * self.head_dim

    @property
    def is_mixture(self) -> bool:
        return self.num_experts > 0

    @property
    def num_mixture_layers(self) -> int:
        return self.num_layers - self.num_dense_layers if self.is_mixture else 0

    @property
    def num_matrices(self) -> int:
        """Matrices of one MLP."""
        return 3 if self.gated else 2

    @cached_property
    def attention_parameters(self) -> int:
        """Query, key, value and output projections of one layer, biases included."""
        weights = self.hidden_size * (2 * self.query_width + 2 * self.kv_width)
        biases = self.qkv_bias * (self.query_width + 2 * self.kv_width)
        return weights + biases + self.out_bias * self.hidden_size

    @cached_property
    def mlp_parameters(self) -> int:
        """The plain MLP of one layer."""
        biases = (self.num_matrices - 1) * self.mlp_width + self.hidden_size
        weights = self.num_matrices * self.hidden_size * self.mlp_width
        return weights + self.mlp_bias * biases

    @property
    def expert_parameters(self) -> int:
        """One routed expert."""
        return self.num_matrices * self.hidden_size * self.expert_width

    @cached_property
    def mixture_parameters(self) -> int:
        """Router, routed and shared experts of one mixture layer."""
        shared = self.num_matrices * self.hidden_size * self.shared_expert_width
        routers = self.hidden_size * (self.num_experts + self.shared_expert_gate)
        return routers + shared + self.num_experts * self.expert_parameters

    @cached_property
    def layer_norm_parameters(self) -> int:
        """Every norm of one layer."""
        width = {
            "none": 0,
            "head": 2 * self.head_dim,
            "whole": self.query_width + self.kv_width,
        }[self.qk_norm]
        channels = self.norms_per_layer * self.hidden_size * self.norm_parameters
        return channels + width

    @cached_property
    def dense_layer_parameters(self) -> int:
        return self.attention_parameters + self.mlp_parameters + self.layer_norm_parameters

    @cached_property
    def mixture_layer_parameters(self) -> int:
        return self.attention_parameters + self.mixture_parameters + self.layer_norm_parameters

    @cached_property
    def layer_parameters(self) -> int:
        """The largest layer."""
        if not self.num_mixture_layers:
            return self.dense_layer_parameters
        dense = self.dense_layer_parameters if self.num_dense_layers else 0
        return max(dense, self.mixture_layer_parameters)

    @cached_property
    def num_block_parameters(self) -> int:
        """All layers, without embedding, head and last norm."""
        dense = self.num_layers - self.num_mixture_layers
        return (
            dense * self.dense_layer_parameters
            + self.num_mixture_layers * self.mixture_layer_parameters
        )

    @property
    def num_embedding_parameters(self) -> int:
        """Token and position embeddings."""
        return (self.vocab_size + self.position_rows) * self.hidden_size

    @property
    def num_head_parameters(self) -> int:
        """The head's own; 0 where it is tied to the embedding."""
        own = 0 if self.tied else self.vocab_size * self.hidden_size
        return own + self.head_bias * self.vocab_size

    @property
    def root_parameters(self) -> int:
        """What belongs to no layer: embeddings, head, norms before and after the layers."""
        norms = (1 + self.embedding_norm) * self.hidden_size * self.norm_parameters
        return self.num_embedding_parameters + self.num_head_parameters + norms

    @cached_property
    def num_parameters(self) -> int:
        return self.num_block_parameters + self.root_parameters

    @cached_property
    def num_active_parameters(self) -> int:
        """Parameters that one token meets: all, less the experts that it does not visit."""
        idle = self.num_experts - self.num_active_experts
        return self.num_parameters - self.num_mixture_layers * idle * self.expert_parameters

    @cached_property
    def num_norm_parameters(self) -> int:
        """Every norm of the model."""
        outside = (1 + self.embedding_norm) * self.hidden_size * self.norm_parameters
        return outside + self.num_layers * self.layer_norm_parameters

    @cached_property
    def linear_widths(self) -> tuple[tuple[str, int, int], ...]:
        """(name, inputs, outputs) of each linear module of a layer that an adapter may take.

        Experts and routers are left out: transformers 5 holds a layer's experts in two stacked
        tensors, which are no linear modules; PEFT's ``all-linear`` and bitsandbytes pass them by.
        """
        h, q, kv = self.hidden_size, self.query_width, self.kv_width
        apart = (("q", h, q), ("k", h, kv), ("v", h, kv))
        attention = ((("qkv", h, q + 2 * kv),) if self.joined_qkv else apart) + (("o", q, h),)
        width = self.shared_expert_width if self.num_mixture_layers else self.mlp_width
        if not width:
            return attention
        if self.joined_gate:
            return (*attention, ("gate_up", h, 2 * width), ("down", width, h))
        gate = (("gate", h, width),) if self.gated else ()
        return (*attention, *gate, ("up", h, width), ("down", width, h))

    @cached_property
    def num_linear_parameters(self) -> int:
        """Weights of all linear modules of the layers: what 4-bit loading quantises."""
        return self.num_layers * sum(i * o for _, i, o in self.linear_widths)


def find_model(text: str) -> Model:
    """The model called ``text``: a name of the catalogue, a folder, or a config.json.

    Raises ``ValueError`` for a name that is neither, with the nearest known ones, and for an
    architecture that is not known.
    """
    path = Path(text)
    file = path / "config.json" if path.is_dir() else path
    if file.is_file():
        return _from_file(file)
    known = _catalogue()
    if found := known.get(_plain(text)) or known.get(_plain(text.replace("_", "-"))):
        name, config = found
        return read_config(config, name=name)
    raise ValueError(f"model {text!r} {_missing(text, path)}")


def _missing(text: str, path: Path) -> str:
    """What is wrong with a model that is neither a config nor in the catalogue."""
    if (path / "adapter_config.json").is_file():
        return "is an adapter; give the model that it was trained on"
    if text and path.is_dir():
        return "is a folder without config.json; give the folder of a model"
    if text.startswith(("/", "./", "../", "~")):
        return "does not exist; give the folder of a model, or its name on the hub"
    return f"is neither a folder nor in the catalogue; {_nearest(text)}"


def known_models() -> tuple[str, ...]:
    """Every name of the catalogue, as its hub spells it."""
    return tuple(sorted({name for name, _ in _catalogue().values()}))


def read_config(config: HFConfig, *, name: str) -> Model:
    """The shape that a config.json describes. Raises ``ValueError`` when it cannot be told."""
    name = _printable(name)
    if "model_type" not in config and "text_config" not in config:
        raise ValueError(f"{name}: the config has no model_type, so its shape cannot be read")
    inner = config.get("text_config")
    if inner is not None and not isinstance(inner, Mapping):
        raise ValueError(f"{name}: text_config is {_short(inner)} and must be an object")
    kind = (inner or config).get("model_type") or config.get("model_type")
    if not isinstance(kind, str):
        raise ValueError(f"{name}: model_type is {_short(kind)} and must be text")
    kind = _printable(kind)
    if kind not in READERS:
        near = get_close_matches(kind, READERS, n=3, cutoff=0.0)
        raise ValueError(
            f"{name}: architecture {kind!r} is not known to the planner; the nearest known are "
            f"{', '.join(near)} (all: {', '.join(sorted(READERS))})"
        )
    try:
        fields = READERS[kind](_Read(_text_config(config)))
    except KeyError as missing:
        raise ValueError(f"{name}: the {kind} config has no {missing}") from None
    except ValueError as error:
        raise ValueError(f"{name}: {error}") from None
    model = Model(
        name=name,
        architecture=kind,
        left_out=_left_out(config),
        quantised=_quantised(config),
        **fields,
    )
    _check(model)
    return model


def _text_config(config: HFConfig) -> HFConfig:
    """The language model's own part, which may leave to the whole whether its ends are tied."""
    inner, tied = dict(config.get("text_config") or config), "tie_word_embeddings"
    if inner.get(tied) is None:
        inner[tied] = config.get(tied)
    return inner


def _left_out(config: HFConfig) -> tuple[str, ...]:
    """Models beside a ``text_config``, each with a config of its own."""
    if not config.get("text_config"):
        return ()
    whole = {"text_config", "generation_config"}
    parts = (k for k, v in config.items() if k.endswith("_config") and isinstance(v, Mapping))
    return tuple(_printable(part.removesuffix("_config")) for part in parts if part not in whole)


def _quantised(config: HFConfig) -> str:
    """How the weights are stored, by the config of the whole or of its language model."""
    inner = config.get("text_config") or {}
    found = config.get("quantization_config") or inner.get("quantization_config")
    if not isinstance(found, Mapping):
        return _short(found) if found else ""
    if found.get("load_in_4bit") is True:
        return FOUR_BIT
    return _short(found.get("quant_method") or found)


FOUR_BIT = "4-bit bitsandbytes"
"""The one form of stored weights that can be trained on: by QLoRA."""


class _Read(dict[str, Any]):
    """A config whose values are checked as they are read. ``null`` is as good as nothing, but for
    the caps of Gemma 2, where it says that there is none.
    """

    def __init__(self, config: HFConfig) -> None:
        kept = {k: v for k, v in config.items() if v is not None or k in CAPS}
        super().__init__(kept)

    def __getitem__(self, key: str) -> Any:
        value = super().__getitem__(key)
        _check_value(key, value)
        return value

    def get(self, key: str, default: Any = None) -> Any:
        try:
            return self[key]
        except KeyError:
            return default


CAPS = ("final_logit_softcapping", "attn_logit_softcapping")
SWITCHES = (
    "tie_word_embeddings",
    "attention_bias",
    "mlp_bias",
    "qkv_bias",
    "use_bias",
    "use_qkv_bias",
    "new_decoder_architecture",
    "multi_query",
    "parallel_attn",
    "bias",
    "multi_query_attention",
    "add_bias_linear",
    "add_qkv_bias",
)
MAY_BE_ZERO = ("shared_expert_intermediate_size",)
LAYERS = ("num_hidden_layers", "n_layer", "num_layers")
MOST_LAYERS, MOST = 10_000, 10**9


def _check_value(key: str, value: Any) -> None:
    """Raise ``ValueError`` unless ``value`` is of the kind that ``key`` has: most are counts."""
    if key in CAPS:
        number = isinstance(value, int | float) and not isinstance(value, bool)
        if value is not None and not (number and 0 < value < MOST):
            raise ValueError(f"{key} is {_short(value)} and must be a number above zero or null")
    elif key in SWITCHES:
        if not isinstance(value, bool):
            raise ValueError(f"{key} is {_short(value)} and must be true or false")
    elif key == "mlp_only_layers":
        if not isinstance(value, list) or not all(type(each) is int for each in value):
            raise ValueError(f"{key} is {_short(value)} and must be a list of layers")
    else:
        least, most = int(key not in MAY_BE_ZERO), MOST_LAYERS if key in LAYERS else MOST
        if type(value) is not int or not least <= value <= most:
            raise ValueError(
                f"{key} is {_short(value)} and must be a whole number from {least} to {most}"
            )


def _short(value: Any) -> str:
    """``value`` as JSON, on one line and not long."""
    text = _printable(json.dumps(value, default=repr))
    return text if len(text) <= 40 else f"{text[:37]}..."


def _printable(text: str) -> str:
    """Control characters as Python would write them, so that an answer keeps its lines."""
    return "".join(each if each.isprintable() else repr(each)[1:-1] for each in text)


def _check(model: Model) -> None:
    """What no single key can tell."""
    if model.num_heads % model.num_kv_heads:
        raise ValueError(
            f"{model.name}: {model.num_heads} attention heads do not divide over "
            f"num_key_value_heads {model.num_kv_heads}"
        )
    if model.num_active_experts > model.num_experts:
        raise ValueError(
            f"{model.name}: num_experts_per_tok is {model.num_active_experts}, and there are "
            f"{model.num_experts} experts"
        )


def _head_dim(config: HFConfig, hidden: int, heads: int, key: str = "head_dim") -> int:
    """Named, or an equal share of the hidden size."""
    if (named := config.get(key)) is not None:
        return named
    if hidden % heads:
        raise ValueError(
            f"hidden_size {hidden} does not divide over {heads} attention heads, and the config "
            f"has no {key}"
        )
    return hidden // heads


def _from_file(path: Path) -> Model:
    try:
        config = json.loads(path.read_text(encoding="utf-8-sig"), parse_constant=_no_constant)
    except (ValueError, RecursionError) as error:
        raise ValueError(f"{path}: not a JSON config: {error}") from None
    if not isinstance(config, dict):
        raise ValueError(f"{path}: a config.json holds one object, not a {type(config).__name__}")
    named = config.get("_name_or_path")
    name = named if named and isinstance(named, str) else path.resolve().parent.name
    return read_config(config, name=name)


def _no_constant(word: str) -> float:
    raise ValueError(f"{word} is no number of a shape")


def _plain(name: str) -> str:
    """``name`` without owner, case and separators; ``1_8b`` is ``1.8b``."""
    last = name.rstrip("/").rsplit("/", 1)[-1].lower()
    return re.sub(r"[-_ ]", "", re.sub(r"(?<=\d)_(?=\d)", ".", last))


def _nearest(text: str) -> str:
    spelled = {key: name for key, (name, _) in _catalogue().items()}
    near = get_close_matches(_plain(text), spelled, n=3, cutoff=0.5)
    if near:
        return "the nearest known are " + ", ".join(dict.fromkeys(spelled[key] for key in near))
    return "give the folder of its config.json"


@cache
def _catalogue() -> dict[str, tuple[str, HFConfig]]:
    """(hub id, config) by plain name. A name that begins with ``-`` is a suffix of the first."""
    found: dict[str, tuple[str, HFConfig]] = {}
    for entry in json.loads(CATALOGUE.read_text()):
        first, *others = entry["names"]
        names = [first] + [first + name if name.startswith("-") else name for name in others]
        for name in names:
            found[_plain(name)] = (name, entry["config"])
    return found


def _given(config: HFConfig, key: str, default: Any) -> Any:
    """``null`` in a config.json means the default, as it does to transformers."""
    value = config.get(key)
    return default if value is None else value


def _common(config: HFConfig, *, tied: bool = False, kv_heads: int | None = None) -> dict[str, Any]:
    """Llama's keys, which most architectures share; ``tied`` is the architecture's default."""
    heads = config["num_attention_heads"]
    hidden = config["hidden_size"]
    return {
        "num_layers": config["num_hidden_layers"],
        "hidden_size": hidden,
        "mlp_width": config["intermediate_size"],
        "num_heads": heads,
        "num_kv_heads": _given(config, "num_key_value_heads", kv_heads or heads),
        "head_dim": _head_dim(config, hidden, heads),
        "vocab_size": config["vocab_size"],
        "max_positions": _given(config, "max_position_embeddings", 2048),
        "tied": _given(config, "tie_word_embeddings", tied),
    }


def _llama(config: HFConfig) -> dict[str, Any]:
    bias = _given(config, "attention_bias", False)
    return _common(config) | {
        "qkv_bias": bias,
        "out_bias": bias,
        "mlp_bias": _given(config, "mlp_bias", False),
    }


def _mistral(config: HFConfig) -> dict[str, Any]:
    return _common(config, kv_heads=8)


def _mixtral(config: HFConfig) -> dict[str, Any]:
    return _common(config, kv_heads=8) | _experts(config, "num_local_experts", "intermediate_size")


def _experts(config: HFConfig, count: str, width: str) -> dict[str, Any]:
    """transformers 5 writes ``num_local_experts`` where older configs say ``num_experts``."""
    other = "num_experts" if count == "num_local_experts" else "num_local_experts"
    return {
        "num_experts": config[count] if count in config else config[other],
        "num_active_experts": config["num_experts_per_tok"],
        "expert_width": config[width],
    }


def _dense_layers(config: HFConfig) -> int:
    """Qwen's mixtures may keep some layers dense."""
    listed = set(_given(config, "mlp_only_layers", ()))
    every = _given(config, "decoder_sparse_step", 1)
    layers = range(config["num_hidden_layers"])
    return sum(layer in listed or (layer + 1) % every != 0 for layer in layers)


def _qwen(config: HFConfig) -> dict[str, Any]:
    """The first generation: ``intermediate_size`` counts gate and up together."""
    heads, hidden = config["num_attention_heads"], config["hidden_size"]
    return {
        "num_layers": config["num_hidden_layers"],
        "hidden_size": hidden,
        "mlp_width": config["intermediate_size"] // 2,
        "num_heads": heads,
        "num_kv_heads": heads,
        "head_dim": _head_dim(config, hidden, heads, "kv_channels"),
        "vocab_size": config["vocab_size"],
        "max_positions": _given(config, "max_position_embeddings", 8192),
        "tied": _given(config, "tie_word_embeddings", False),
        "qkv_bias": True,
        "joined_qkv": True,
    }


def _qwen2(config: HFConfig) -> dict[str, Any]:
    return _common(config) | {"qkv_bias": True}


def _qwen2_moe(config: HFConfig) -> dict[str, Any]:
    return (
        _common(config)
        | _experts(config, "num_experts", "moe_intermediate_size")
        | {
            "qkv_bias": _given(config, "qkv_bias", True),
            "shared_expert_width": config["shared_expert_intermediate_size"],
            "shared_expert_gate": True,
            "num_dense_layers": _dense_layers(config),
        }
    )


def _qwen3(config: HFConfig) -> dict[str, Any]:
    bias = _given(config, "attention_bias", False)
    return _common(_Read({"head_dim": 128, **config})) | {
        "qkv_bias": bias,
        "out_bias": bias,
        "qk_norm": "head",
    }


def _qwen3_moe(config: HFConfig) -> dict[str, Any]:
    heads, hidden = config["num_attention_heads"], config["hidden_size"]
    return (
        _qwen3(config)
        | _experts(config, "num_experts", "moe_intermediate_size")
        | {
            "head_dim": _head_dim(config, hidden, heads),
            "num_dense_layers": _dense_layers(config),
        }
    )


def _gemma(config: HFConfig) -> dict[str, Any]:
    bias = _given(config, "attention_bias", False)
    return _common(_Read({"head_dim": 256, **config}), tied=True) | {
        "qkv_bias": bias,
        "out_bias": bias,
    }


def _gemma2(config: HFConfig) -> dict[str, Any]:
    """Norms before and after both halves of a layer."""
    return (
        _gemma(_Read({"num_key_value_heads": 4, **config}))
        | {"norms_per_layer": 4}
        | _softcaps(config, True)
    )


def _softcaps(config: HFConfig, default: bool) -> dict[str, bool]:
    """A cap that is ``null`` is off; one that is not named is what the architecture has."""
    return {
        "logit_softcap": bool(config.get("final_logit_softcapping", default)),
        "attention_softcap": bool(config.get("attn_logit_softcapping", default)),
    }


def _gemma3(config: HFConfig) -> dict[str, Any]:
    """The text model; a vision tower is not counted. Its 4B's config leaves out defaults."""
    defaults = {"num_attention_heads": 8, "vocab_size": 262_208, "max_position_embeddings": 131_072}
    return _gemma2(_Read(defaults | dict(config))) | _softcaps(config, False) | {"qk_norm": "head"}


def _phi(config: HFConfig) -> dict[str, Any]:
    """One LayerNorm feeds attention and MLP in parallel."""
    return _ungated(_common(config)) | _layer_norm(per_layer=1) | {"head_bias": True}


JOINED_QKV = {"joined_qkv": True}


def _layer_norm(*, per_layer: int = 2, parameters: int = 2) -> dict[str, Any]:
    return {"norm_parameters": parameters, "norms_per_layer": per_layer}


def _ungated(fields: dict[str, Any], *, bias: bool = True) -> dict[str, Any]:
    every = ("qkv_bias", "out_bias", "mlp_bias")
    return fields | dict.fromkeys(every, bias) | {"gated": False}


def _olmo(config: HFConfig) -> dict[str, Any]:
    """LayerNorm without parameters."""
    return _llama(config) | _layer_norm(parameters=0)


def _olmo2(config: HFConfig) -> dict[str, Any]:
    return _llama(config) | {"qk_norm": "whole"}


def _olmoe(config: HFConfig) -> dict[str, Any]:
    return _olmo2(config) | _experts(config, "num_experts", "intermediate_size")


def _granitemoe(config: HFConfig) -> dict[str, Any]:
    return _llama(config) | _experts(config, "num_local_experts", "intermediate_size")


def _smollm3(config: HFConfig) -> dict[str, Any]:
    tied = _given(config, "tie_word_embeddings", True)
    return _llama(config) | {"tied": tied}


def _starcoder2(config: HFConfig) -> dict[str, Any]:
    bias = _given(config, "use_bias", True)
    return _ungated(_common(config, tied=True, kv_heads=2), bias=bias) | _layer_norm()


def _stablelm(config: HFConfig) -> dict[str, Any]:
    return _common(config) | _layer_norm() | {"qkv_bias": _given(config, "use_qkv_bias", False)}


def _cohere(config: HFConfig) -> dict[str, Any]:
    return _common(config, tied=True) | _layer_norm(per_layer=1, parameters=1)


def _falcon(config: HFConfig) -> dict[str, Any]:
    heads, hidden = config["num_attention_heads"], config["hidden_size"]
    decoder = _given(config, "new_decoder_architecture", False)
    multi_query = _given(config, "multi_query", True)
    kv_heads = _given(config, "num_kv_heads", heads) if decoder else 1 if multi_query else heads
    parallel = _given(config, "parallel_attn", True)
    norms = _given(config, "num_ln_in_parallel_attn", 2 if decoder else None)
    fields = {
        "num_layers": config["num_hidden_layers"],
        "hidden_size": hidden,
        "mlp_width": _given(config, "ffn_hidden_size", 4 * hidden),
        "num_heads": heads,
        "num_kv_heads": kv_heads,
        "head_dim": _head_dim(config, hidden, heads),
        "vocab_size": config["vocab_size"],
        "max_positions": _given(config, "max_position_embeddings", 2048),
        "tied": _given(config, "tie_word_embeddings", True),
    }
    per_layer = norms or (1 if parallel else 2)
    bias = _given(config, "bias", False)
    return _ungated(fields, bias=bias) | _layer_norm(per_layer=per_layer) | JOINED_QKV


def _gpt2(config: HFConfig) -> dict[str, Any]:
    hidden, heads = config["n_embd"], config["n_head"]
    positions = _given(config, "n_positions", 1024)
    fields = {
        "num_layers": config["n_layer"],
        "hidden_size": hidden,
        "mlp_width": _given(config, "n_inner", 4 * hidden),
        "num_heads": heads,
        "num_kv_heads": heads,
        "head_dim": _head_dim(config, hidden, heads),
        "vocab_size": config["vocab_size"],
        "max_positions": positions,
        "position_rows": positions,
        "tied": _given(config, "tie_word_embeddings", True),
    }
    return _ungated(fields) | _layer_norm() | JOINED_QKV


def _gpt_neox(config: HFConfig) -> dict[str, Any]:
    heads = config["num_attention_heads"]
    return _ungated(_common(config)) | _layer_norm() | JOINED_QKV | {"num_kv_heads": heads}


def _bloom(config: HFConfig) -> dict[str, Any]:
    hidden = config["hidden_size" if "hidden_size" in config else "n_embed"]
    heads = config["n_head" if "n_head" in config else "num_attention_heads"]
    fields = {
        "num_layers": config["n_layer" if "n_layer" in config else "num_hidden_layers"],
        "hidden_size": hidden,
        "mlp_width": 4 * hidden,
        "num_heads": heads,
        "num_kv_heads": heads,
        "head_dim": _head_dim(config, hidden, heads),
        "vocab_size": config["vocab_size"],
        "tied": _given(config, "tie_word_embeddings", True),
        "embedding_norm": True,
    }
    return _ungated(fields) | _layer_norm() | JOINED_QKV


def _opt(config: HFConfig) -> dict[str, Any]:
    """Learned positions start at row 2. A projected embedding (350M) is not covered."""
    common = _common(_Read({"intermediate_size": config.get("ffn_dim"), **config}), tied=True)
    rows = common["max_positions"] + 2
    fields = {"position_rows": rows, "num_kv_heads": common["num_heads"]}
    return _ungated(common) | _layer_norm() | fields


def _baichuan(config: HFConfig) -> dict[str, Any]:
    return _common(config) | JOINED_QKV


def _phi3(config: HFConfig) -> dict[str, Any]:
    return _common(config) | JOINED_QKV | {"joined_gate": True}


def _chatglm(config: HFConfig) -> dict[str, Any]:
    heads = config["num_attention_heads"]
    grouped = _given(config, "multi_query_attention", False)
    bias = _given(config, "add_bias_linear", False)
    return {
        "num_layers": config["num_layers"],
        "hidden_size": config["hidden_size"],
        "mlp_width": config["ffn_hidden_size"],
        "num_heads": heads,
        "num_kv_heads": config["multi_query_group_num"] if grouped else heads,
        "head_dim": config["kv_channels"],
        "vocab_size": config["padded_vocab_size"],
        "max_positions": _given(config, "seq_length", 8192),
        "qkv_bias": bias or _given(config, "add_qkv_bias", False),
        "out_bias": bias,
        "mlp_bias": bias,
        "joined_qkv": True,
        "joined_gate": True,
    }


READERS: dict[str, Callable[[HFConfig], dict[str, Any]]] = {
    "baichuan": _baichuan,
    "bloom": _bloom,
    "chatglm": _chatglm,
    "cohere": _cohere,
    "falcon": _falcon,
    "gemma": _gemma,
    "gemma2": _gemma2,
    "gemma3": _gemma3,
    "gemma3_text": _gemma3,
    "gpt2": _gpt2,
    "gpt_neox": _gpt_neox,
    "granite": _llama,
    "granitemoe": _granitemoe,
    "internlm2": _baichuan,
    "llama": _llama,
    "mistral": _mistral,
    "mixtral": _mixtral,
    "olmo": _olmo,
    "olmo2": _olmo2,
    "olmo3": _olmo2,
    "olmoe": _olmoe,
    "opt": _opt,
    "phi": _phi,
    "phi3": _phi3,
    "qwen": _qwen,
    "qwen2": _qwen2,
    "qwen2_moe": _qwen2_moe,
    "qwen3": _qwen3,
    "qwen3_moe": _qwen3_moe,
    "smollm3": _smollm3,
    "stablelm": _stablelm,
    "starcoder2": _starcoder2,
}
"""How each architecture's config is read."""
