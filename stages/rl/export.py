"""What PPO leaves: plain folders of the policy and its critic. Imported only inside a rank."""

import shutil
from pathlib import Path
from typing import Any

from stages.checkpoint.lineage import note_base
from stages.rl.actor_critic import bare
from stages.rl.engine import Engine
from stages.rl.whole import gathered, named_parameters

FOLDERS = {"policy": "model", "critic": "critic"}


def export(engine: Engine, tokenizer: Any, out: Path) -> None:
    """Write ``OUT/model`` and ``OUT/critic`` aside and rename them. Every rank takes part."""
    main = engine.accelerator.is_main_process
    for part, name in FOLDERS.items():
        model = getattr(engine.module, part)
        weights = _weights(engine, model, keep=main)
        if main:
            partial, final = out / f"{name}.partial", out / name
            for old in (partial, final):
                shutil.rmtree(old, ignore_errors=True)
            _write(model, weights, partial)
            tokenizer.save_pretrained(partial)
            partial.rename(final)
        engine.accelerator.wait_for_everyone()


def _weights(engine: Engine, model: Any, *, keep: bool) -> dict[str, Any]:
    """The trained tensors, whole and on the CPU; tied ones stay one tensor. Empty if not kept."""
    copies: dict[int, Any] = {}
    found = {}
    for name, tensor in gathered(model, engine.device, only_trained=True):
        if keep:
            found[name] = copies.setdefault(id(tensor), tensor.cpu())
    parameters = {name for name, _ in named_parameters(model)}
    state = model.state_dict() if keep else {}
    return found | {name: state[name].cpu() for name in state.keys() - parameters}


def _write(model: Any, weights: dict[str, Any], folder: Path) -> None:
    if not hasattr(model, "peft_config"):
        model.save_pretrained(folder, state_dict=weights)
        return
    model.save_pretrained(folder, state_dict=weights, save_embedding_layers=False)
    note_base(folder)
    bare(model).config.save_pretrained(folder)
    if bare(model).can_generate():
        bare(model).generation_config.save_pretrained(folder)
