"""Conversion: whatever a training stage left becomes one plain Hugging Face folder."""

import os
import shutil
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Annotated, Any, Literal

from pydantic import Field

from configs import Config
from stages import manifest
from stages.base import Context, Metrics, StageError
from stages.checkpoint import companions, export
from stages.checkpoint.adapter import Adapter, faults, peft_weights, read_adapter
from stages.checkpoint.architecture import Architecture, architecture
from stages.checkpoint.facts import describe, quantization
from stages.checkpoint.faults import validate
from stages.checkpoint.json_files import read_json_if_there
from stages.checkpoint.layouts import is_adapter, layout
from stages.checkpoint.merge import merge
from stages.checkpoint.readers import open_weights
from stages.checkpoint.ties import settle
from stages.checkpoint.weights import Weights


class Convert(Config):
    """What the export looks like."""

    export_dtype: Literal["float32", "bfloat16", "float16"] = "bfloat16"
    """Type of every floating-point tensor. ``bfloat16`` is half the size of what training keeps
    and what inference engines load; ``float32`` loses nothing on the way to another training."""

    max_shard_size: Annotated[str, Field(pattern=f"^{export.SIZE.pattern}$")] = "5GB"
    """Largest weight file, in decimal KB, MB or GB; a larger tensor gets a file of its own."""

    keep_adapter: bool = False
    """Leave the adapter beside the merged model too, in ``OUT/adapter``, as PEFT loads it."""


def convert(config: Convert, ctx: Context, *, trained: Path, base: Path) -> Metrics:
    """Turn ``TRAINED/model``, in any layout, into ``OUT/model``, which ``from_pretrained`` loads.

    ``BASE/model`` is what the training started from: an adapter is merged into its weights, tensor
    by tensor, and it gives the tokenizer, template and generation config that training did not
    leave. The result is written aside, validated, and renamed. Raises ``StageError`` with a line
    for each fault when the inputs do not fit together or the result is not a sound checkpoint.
    """
    _check_alone()
    _check_lineage(trained, base)
    started = time.monotonic()
    source, origin = _model(trained), _model(base)
    partial = _fresh(ctx.out)
    adapter = _adapter(source) if _is_adapted(source) else None
    untied = _write(config, partial, source=source, origin=origin, adapter=adapter)
    if lines := validate(partial, config.export_dtype):
        raise StageError(_listed(f"{partial}: faults in the export", lines))
    if adapter and config.keep_adapter:
        _keep(adapter, source, ctx.out)
    _publish(partial, ctx.out / "model")
    return {
        "seconds": time.monotonic() - started,
        "untied": untied,
        **_figures(ctx.out / "model", source, origin, adapter),
    }


def _write(
    config: Convert, partial: Path, *, source: Path, origin: Path, adapter: Adapter | None
) -> bool:
    """Fill ``partial``; whether ends that the base's config ties had to be untied."""
    dtype = config.export_dtype
    settings = companions.model_config(source, origin)
    companions.write_config(partial, settings, dtype=dtype)
    plan = architecture(partial)
    whole = _merged(origin, adapter, plan) if adapter else _whole(source, settings)
    weights, tied = settle(whole.without(plan.unread(whole.specs)), plan.aliases)
    companions.write_config(partial, settings, dtype=dtype, tied=tied)
    companions.copy_tokenizer(partial, source, origin)
    companions.write_generation_config(partial, source, origin)
    export.write(weights, partial, dtype=dtype, max_shard_size=config.max_shard_size)
    return bool(plan.aliases) and not tied


def _check_alone() -> None:
    ranks = int(os.environ.get("WORLD_SIZE", "1"))
    if ranks > 1:
        raise StageError(f"convert is one process, and {ranks} ranks were started; give it one")


def _check_lineage(trained: Path, base: Path) -> None:
    """Where both are outputs with a manifest, the training must have had this very base."""
    training, start = manifest.read(trained), manifest.read(base)
    if training is None or start is None:
        return
    inputs = training.identity.inputs
    if start.identity.fingerprint not in inputs.values():
        given = ", ".join(f"{name} {fingerprint}" for name, fingerprint in inputs.items())
        raise StageError(
            f"{base} is {start.identity.stage} {start.identity.fingerprint}, and {trained} was "
            f"trained from {given}: convert it with the model that it was trained from"
        )


def _model(output: Path) -> Path:
    folder = output / "model"
    if not folder.is_dir():
        raise StageError(f"{folder}: no such folder; a stage that makes a model leaves one there")
    return folder


def _fresh(out: Path) -> Path:
    """An empty ``OUT/model.partial``; what an interrupted conversion left is begun anew."""
    partial = out / "model.partial"
    for old in (partial, out / "model", out / "adapter.partial", out / "adapter"):
        shutil.rmtree(old, ignore_errors=True)
    partial.mkdir(parents=True)
    return partial


def _whole(source: Path, settings: Mapping[str, Any]) -> Weights:
    if held := quantization(settings):
        raise StageError(
            f"{source}: its weights are held in {held}, from which the model's own cannot be had "
            "back; train an adapter on the quantised base instead"
        )
    return open_weights(source)


def _is_adapted(source: Path) -> bool:
    return is_adapter(source) or layout(source) == "adapter"


def _adapter(source: Path) -> Adapter:
    adapter = read_adapter(source)
    if lines := faults(adapter):
        raise StageError(_listed(f"{source}: faults in the adapter", lines))
    return adapter


def _merged(origin: Path, adapter: Adapter, plan: Architecture) -> Weights:
    facts = describe(origin)
    if facts["adapter"] or facts["quantization"]:
        kind = "an adapter itself" if facts["adapter"] else f"held in {facts['quantization']}"
        raise StageError(f"{origin}: is {kind}; an adapter is merged into plain, whole weights")
    return merge(open_weights(origin), adapter, aliases=plan.aliases)


def _listed(what: str, lines: tuple[str, ...]) -> str:
    return "\n".join((f"{what} ({len(lines)}):", *lines)) if lines[1:] else f"{what}: {lines[0]}"


def _keep(adapter: Adapter, source: Path, out: Path) -> None:
    partial = out / "adapter.partial"
    partial.mkdir()
    weights = peft_weights(adapter)
    export.write_file(partial / "adapter_model.safetensors", weights, weights.specs)
    shutil.copyfile(source / "adapter_config.json", partial / "adapter_config.json")
    _publish(partial, out / "adapter")


def _publish(partial: Path, final: Path) -> None:
    export.sync(partial)
    partial.rename(final)


def _figures(model: Path, source: Path, origin: Path, adapter: Adapter | None) -> dict[str, Any]:
    """What was made, of what. ``base_precision`` is how the base was held while an adapter was
    trained, ``merged_into`` the types of the weights it was merged into: QLoRA's are not the same.
    """
    facts = describe(model)
    made = {key: facts[key] for key in ("parameters", "bytes", "dtypes", "tied")}
    figures = {"layout": layout(source), **made}
    if adapter:
        trained = read_json_if_there(source / "config.json")
        figures["merged_parameters"] = len(adapter.updates)
        figures["base_precision"] = quantization(trained) or trained.get("dtype")
        figures["merged_into"] = "+".join(describe(origin)["dtypes"] or ())
    return figures
