"""What tensors a model must have, told by building it from its config without memory."""

import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from stages.base import StageError
from stages.checkpoint.garbled import GARBLED, first_line
from stages.checkpoint.heads import is_reward_model, labels, model_class
from stages.checkpoint.json_files import read_json

if TYPE_CHECKING:
    from torch import Tensor

Shapes = Mapping[str, tuple[int, ...]]


@dataclass(frozen=True)
class Architecture:
    """The names and shapes that a checkpoint of this model may have."""

    forms: tuple[Shapes, ...]
    """One mapping for each form that transformers loads: its own names, and where a family is
    saved under other names (mixtures of experts, whose experts are stacked on load) also those."""

    aliases: Mapping[str, str]
    """Tied parameter -> the one it shares its values with; only the latter is written."""

    vocabulary_rows: int

    integers: frozenset[str]
    """Tensors that hold whole numbers; all others hold floating-point ones."""

    ignored: tuple[str, ...] = ()
    """Patterns of tensors that older checkpoints of the family hold and that nothing reads."""

    def unread(self, names: Iterable[str]) -> set[str]:
        """Those of ``names`` that the model does not have and that loading ignores."""
        foreign = {name for name in names if not any(name in form for form in self.forms)}
        return {name for name in foreign if any(re.search(p, name) for p in self.ignored)}

    def nearest(self, names: Mapping[str, object]) -> Shapes:
        """The form that shares most names with a checkpoint."""
        return min(self.forms, key=lambda form: len(form.keys() ^ names.keys()))


def architecture(path: Path) -> Architecture:
    """What ``path/config.json`` describes. Raises :class:`StageError` for an unusable config."""
    from transformers.core_model_loading import revert_weight_conversion

    reward = is_reward_model(path)
    model = without_memory(path, reward=reward)
    aliases = dict(model.all_tied_weights_keys)
    state = {name: t for name, t in model.state_dict().items() if name not in aliases}
    saved = revert_weight_conversion(model, dict(state))
    forms = (state,) if saved.keys() == state.keys() else (state, saved)
    return Architecture(
        forms=tuple(map(_shapes, forms)),
        aliases=aliases,
        vocabulary_rows=model.get_input_embeddings().weight.shape[0],
        integers=frozenset(
            name for form in forms for name, t in form.items() if not t.is_floating_point()
        ),
        ignored=(
            *(model._keys_to_ignore_on_load_unexpected or ()),
            *((r"^lm_head\.",) if reward else ()),  # of the language model that it was made from
        ),
    )


def without_memory(path: Path, *, reward: bool, **settings: Any) -> Any:
    """The model of ``path/config.json``, with ``settings`` changed in it, on the meta device.
    Raises :class:`StageError` for an unusable config."""
    import torch
    from huggingface_hub.errors import StrictDataclassError
    from transformers import AutoConfig

    read_json(path / "config.json")
    changed = {**labels(reward=reward), **settings}
    try:
        config = AutoConfig.from_pretrained(path, trust_remote_code=False, **changed)
        with torch.device("meta"):
            return model_class(reward=reward).from_config(config, trust_remote_code=False)
    except (*GARBLED, StrictDataclassError) as error:
        what, why = "reward" if reward else "causal", first_line(error)
        raise StageError(f"{path / 'config.json'}: no {what} model can be built: {why}") from None


def attention_layers(path: Path) -> tuple[str, ...]:
    """The endings of names that mean the linear layers in the attention of the model in ``path``,
    and no others. Raises :class:`StageError` for a model without any."""
    from torch.nn import Linear
    from transformers.pytorch_utils import Conv1D

    modules = without_memory(path, reward=is_reward_model(path)).named_modules()
    linear = {name for name, module in modules if isinstance(module, Linear | Conv1D)}
    inside = {name for name in linear if re.search("attn|attention", _parent(name))}
    if not inside:
        raise StageError(f"{path}: no layer of an attention is known; name the targets")

    def ending(name: str) -> str:
        last = name.rpartition(".")[2]
        shared = any(other.endswith(f".{last}") for other in linear - inside)
        return f"{_parent(name)}.{last}" if shared else last

    return tuple(sorted({ending(name) for name in inside}))


def _parent(name: str) -> str:
    return name.rpartition(".")[0].rpartition(".")[2]


def _shapes(state: "Mapping[str, Tensor]") -> dict[str, tuple[int, ...]]:
    return {name: tuple(tensor.shape) for name, tensor in state.items()}
