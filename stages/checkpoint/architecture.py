"""What tensors a model must have, told by building it from its config without memory."""

import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from stages.base import StageError
from stages.checkpoint.heads import is_reward_model, model_class
from stages.checkpoint.json_files import read_json

if TYPE_CHECKING:
    from torch import Tensor

_UNUSABLE = (
    ValueError,
    KeyError,
    TypeError,
    AttributeError,
    AssertionError,
    ImportError,
    OSError,
    RuntimeError,
)
"""What transformers and torch raise for settings out of which no model can be built."""

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
    import torch
    from transformers import AutoConfig
    from transformers.core_model_loading import revert_weight_conversion

    read_json(path / "config.json")
    reward = is_reward_model(path)
    try:
        config = AutoConfig.from_pretrained(path)
        with torch.device("meta"):
            model = model_class(reward=reward).from_config(config)
    except _UNUSABLE as error:
        first = (str(error) or repr(error)).splitlines()[0]
        what = "reward" if reward else "causal"
        raise StageError(f"{path / 'config.json'}: no {what} model can be built: {first}") from None
    aliases = dict(model.all_tied_weights_keys)
    state = {name: t for name, t in model.state_dict().items() if name not in aliases}
    saved = revert_weight_conversion(model, dict(state))
    forms = (state,) if saved.keys() == state.keys() else (state, saved)
    return Architecture(
        forms=tuple(map(_shapes, forms)),
        aliases=aliases,
        vocabulary_rows=model.get_input_embeddings().weight.shape[0],
        ignored=(
            *(model._keys_to_ignore_on_load_unexpected or ()),
            *((r"^lm_head\.",) if reward else ()),  # of the language model that it was made from
        ),
    )


def _shapes(state: "Mapping[str, Tensor]") -> dict[str, tuple[int, ...]]:
    return {name: tuple(tensor.shape) for name, tensor in state.items()}
