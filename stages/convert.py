"""Conversion: whatever a training stage left becomes one plain Hugging Face folder."""

import os
import tempfile
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Annotated, Any, Literal

from pydantic import Field, NonNegativeInt, PositiveFloat

from configs import Config
from stages import manifest, resume
from stages.base import Context, Metrics, StageError
from stages.checkpoint import companions, export, fresh, other_forms, parity, places
from stages.checkpoint.adapter import Adapter, faults, read_adapter
from stages.checkpoint.architecture import Architecture, architecture
from stages.checkpoint.conversation import template
from stages.checkpoint.facts import describe, quantization
from stages.checkpoint.faults import validate
from stages.checkpoint.fit import fitted
from stages.checkpoint.json_files import read_json_if_there
from stages.checkpoint.layouts import is_adapter, layout
from stages.checkpoint.lineage import check_base, noted_base
from stages.checkpoint.merge import Arithmetic, comparable, difference, merge
from stages.checkpoint.parity import Start
from stages.checkpoint.readers import open_weights
from stages.checkpoint.ties import settle
from stages.checkpoint.trained import Training, write_adapter
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

    also: tuple[other_forms.Form, ...] = ()
    """Further forms of the model: ``gguf_f16`` and ``gguf_q8_0`` as ``OUT/gguf/*.gguf`` for
    llama.cpp (needs the package gguf), ``nf4`` as ``OUT/nf4``, in bitsandbytes' 4 bits."""

    merge_arithmetic: Arithmetic = "float32"
    """``float32`` rounds a merged weight once. ``peft`` gives the bits of ``merge_and_unload``."""

    merge_into: Literal["measured", "original", "dequantised"] = "measured"
    """What an adapter that was trained on a 4-bit base is merged into: the original weights, or
    those weights as the 4 bits held them. ``measured`` tries both on the probes."""

    parity_probes: NonNegativeInt = 4
    """Fixed probes of 32 tokens on which the export is compared with the model as it was trained,
    and as many held-out preference pairs if there are any. 0 leaves the comparison out, which
    holds the whole model in float32 twice."""

    parity_tolerance: PositiveFloat | None = None
    """Largest root mean square difference of log-probabilities, in units of their standard
    deviation; unset is 0.001, 0.01 and 0.05 for float32, float16 and bfloat16."""


def convert(
    config: Convert, ctx: Context, *, trained: Path, base: Path, data: Path | None = None
) -> Metrics:
    """Turn ``TRAINED/model``, in any layout, into ``OUT/model``, which ``from_pretrained`` loads.

    ``BASE/model`` is what the training started from: an adapter is merged into its weights, some
    rows at a time, and it gives the tokenizer, template and generation config that training did
    not leave. The result is written aside, validated, loaded in a fresh process, compared there
    with the model as it was trained (on the held-out preference pairs of ``data`` too), and
    renamed. Raises ``StageError`` with a line for each fault when the inputs do not fit together
    or are not what was saved, the result is not a sound checkpoint, or it does not answer like
    the trained model.
    """
    _check_alone()
    _check_lineage(trained, base)
    source, origin = _model(trained), _model(base)
    return export_model(config, ctx.out, source=source, origin=origin, data=data, replace=True)


def export_model(
    config: Convert,
    out: Path,
    *,
    source: Path,
    origin: Path,
    data: Path | None = None,
    replace: bool = False,
) -> Metrics:
    """:func:`convert` for bare checkpoint folders. Results that are in ``out`` already are refused,
    or with ``replace`` make room once the new ones are whole."""
    started = time.monotonic()
    inputs = (source, origin, *([data] if data else []))
    with places.aside(out, inputs=inputs, replace=replace) as made:
        fresh.start()
        training = _training(source, origin)
        figures = _make(config, made, training, data=data)
        places.put_in_place(made, out)
    return {
        "seconds": time.monotonic() - started,
        **figures,
        **_figures(out / "model", source, origin, training.adapter),
    }


def export_adapter(out: Path, *, source: Path) -> None:
    """Write the adapter in ``source``, of any layout, to the new folder ``out`` as PEFT loads it.

    Raises ``StageError`` when it is not sound, or ``out`` is there already.
    """
    resume.require_saved(source)
    adapter = _adapter(source)
    with places.new_folder(out) as folder:
        write_adapter(adapter, source, folder)


def _training(source: Path, origin: Path) -> Training:
    """What there is to convert. Raises ``StageError`` where it is damaged or does not fit."""
    for folder in {source, origin}:
        resume.require_saved(folder)
    if not _is_adapted(source):
        return Training(source, origin, None)
    adapter = _adapter(source)
    check_base(source, origin)
    return Training(source, origin, fitted(adapter, source, origin))


def _make(config: Convert, made: Path, training: Training, *, data: Path | None) -> dict[str, Any]:
    """Fill the folders in ``made``; what was decided and measured on the way."""
    model = made / "model"
    figures = _write(config, model, training)
    figures |= _check(config, model, training, data=data)
    for form in config.also:
        other_forms.write(form, model, made)
    if training.adapter and config.keep_adapter:
        (made / "adapter").mkdir()
        write_adapter(training.adapter, training.source, made / "adapter")
    return figures


def _write(config: Convert, partial: Path, training: Training) -> dict[str, Any]:
    """Fill ``partial``; what was decided on the way."""
    partial.mkdir()
    source, origin, dtype = training.source, training.origin, config.export_dtype
    rows = training.adapter.vocabulary_rows if training.adapter else None
    settings = companions.model_config(source, origin, vocabulary_rows=rows)
    companions.write_config(partial, settings, dtype=dtype)
    plan = architecture(partial)
    figures: dict[str, Any] = {}
    if training.adapter:
        whole, figures = _merged(config, training, plan)
    else:
        whole = _whole(source, settings)
    weights, tied = settle(whole.without(plan.unread(whole.specs)), plan.aliases)
    companions.write_config(partial, settings, dtype=dtype, tied=tied)
    companions.copy_tokenizer(partial, source, origin)
    companions.copy_scale(partial, source)
    companions.write_generation_config(partial, source, origin)
    export.write(weights, partial, dtype=dtype, max_shard_size=config.max_shard_size)
    return {"untied": bool(plan.aliases) and not tied, **figures}


def _check(
    config: Convert, partial: Path, training: Training, *, data: Path | None
) -> dict[str, Any]:
    """Raise ``StageError`` unless the export is sound and answers as the trained model does."""
    dtype = config.export_dtype
    chat = bool(template(training.source) or template(training.origin))
    with tempfile.TemporaryDirectory() as folder:
        exam = parity.prepare(partial, num=config.parity_probes, data=data, folder=Path(folder))
        lines = validate(
            partial,
            dtype,
            chat=chat,
            load=lambda path: fresh.load(path, probes=exam.probes, out=exam.out),
        )
        if lines:
            raise StageError(_listed("faults in the export, which is not kept", lines))
        if not exam.probes:
            return {}
        figures = parity.measure(exam, training)
    tolerance = config.parity_tolerance or parity.TOLERANCES[dtype]
    if lines := parity.faults(figures, tolerance=tolerance, dtype=dtype):
        what = f"{training.source}: its export is not the trained model, and is not kept"
        raise StageError(_listed(what, lines))
    return {"parity": {**figures, "tolerance": tolerance}}


def _check_alone() -> None:
    ranks = int(os.environ.get("WORLD_SIZE", "1"))
    if ranks > 1:
        raise StageError(f"convert is one process, and {ranks} ranks were started; give it one")


def _check_lineage(trained: Path, base: Path) -> None:
    """Where both are outputs with a manifest, the training must have had this very base. Of a
    folder that was fetched no more is known than what lies in it."""
    training, start = manifest.read(trained), manifest.read(base)
    if training is None or start is None or not training.identity.inputs:
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


def _merged(
    config: Convert, training: Training, plan: Architecture
) -> tuple[Weights, dict[str, Any]]:
    """The merged weights, and how they were merged."""
    adapter, origin = training.adapter, training.origin
    assert adapter
    facts = describe(origin)
    if facts["adapter"] or facts["quantization"]:
        what = "an adapter itself" if facts["adapter"] else f"held in {facts['quantization']}"
        raise StageError(f"{origin}: is {what}; an adapter is merged into plain, whole weights")
    arithmetic, dtype = config.merge_arithmetic, config.export_dtype

    def merged(start: Weights) -> Weights:
        return merge(start, adapter, aliases=plan.aliases, arithmetic=arithmetic)

    starts = _starts(config, training)
    kind: Start = "dequantised" if "dequantised" in starts else "original"
    errors: Mapping[Start, float] = {}
    if len(starts) > 1:
        candidates: dict[Start, Weights] = {n: merged(start) for n, start in starts.items()}
        kind, errors = parity.nearest(training, candidates, dtype=dtype, num=config.parity_probes)
    result = merged(starts[kind])
    apart = difference(starts[kind], adapter, aliases=plan.aliases, dtype=dtype)
    figures = {"merged_weights": kind, "peft_difference": apart}
    return result, figures | ({"merge_errors": dict(errors)} if errors else {})


def _starts(config: Convert, training: Training) -> Mapping[Start, Weights]:
    """The weights that the adapter may be merged into; several are to be measured."""
    original = open_weights(training.origin)
    if not training.quantization:
        return {"original": original}
    starts: dict[Start, Weights] = {
        "original": original,
        "dequantised": parity.dequantised_base(training),
    }
    if config.merge_into == "measured" and config.parity_probes:
        return starts
    kind: Start = "original" if config.merge_into == "original" else "dequantised"
    return {kind: starts[kind]}


def _listed(what: str, lines: Sequence[str]) -> str:
    return "\n".join((f"{what} ({len(lines)}):", *lines)) if lines[1:] else f"{what}: {lines[0]}"


def _figures(model: Path, source: Path, origin: Path, adapter: Adapter | None) -> dict[str, Any]:
    """What was made, of what. ``base_precision`` is how the base was held while an adapter was
    trained, ``merged_into`` the types of the weights it was merged into: QLoRA's are not the same.
    ``base_verified`` is whether the adapter's folder itself tells that this was its base, by a
    fingerprint or by frozen weights.
    """
    facts = describe(model)
    made = {key: facts[key] for key in ("parameters", "bytes", "dtypes", "tied")}
    figures = {"layout": layout(source), **made}
    if adapter:
        trained = read_json_if_there(source / "config.json")
        compared = comparable(open_weights(origin), adapter)
        figures["base_verified"] = bool(noted_base(source) or compared)
        figures["merged_parameters"] = len(adapter.updates)
        figures["base_precision"] = quantization(trained) or trained.get("dtype")
        figures["merged_into"] = "+".join(describe(origin)["dtypes"] or ())
    return figures
