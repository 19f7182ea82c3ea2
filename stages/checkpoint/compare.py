"""How two checkpoints differ: tensors, settings, tokenizer and template."""

from collections.abc import Iterator, Mapping
from math import inf
from pathlib import Path

from stages.checkpoint.facts import describe
from stages.checkpoint.json_files import read_json_if_there
from stages.checkpoint.readers import open_weights
from stages.checkpoint.weights import Weights

_INCIDENTAL = ("_name_or_path", "transformers_version", "torch_dtype")
_FACTS = ("tokenizer_sha256", "template_sha256", "stop_ids", "tied")


def differences(one: Path, two: Path) -> Iterator[str]:
    """One line for each thing in which the two differ; none means that they are the same model.

    Values are compared in float32, a block at a time, so layouts and types may differ. NaN equals
    NaN, and is infinitely far from a number. Raises :class:`~stages.base.StageError` before the
    first line for a folder without a checkpoint.
    """
    facts = describe(one), describe(two)
    weights = open_weights(one), open_weights(two)
    yield from _settings(one, two)
    for key in _FACTS:
        if facts[0][key] != facts[1][key]:
            yield f"{key}: {facts[0][key]} and {facts[1][key]}"
    yield from _tensors(*weights)


def _settings(one: Path, two: Path) -> Iterator[str]:
    for name in ("config.json", "generation_config.json", "adapter_config.json"):
        values = read_json_if_there(one / name), read_json_if_there(two / name)
        for key in sorted((values[0].keys() | values[1].keys()) - set(_INCIDENTAL)):
            if values[0].get(key) != values[1].get(key):
                yield f"{name} {key}: {values[0].get(key)!r} and {values[1].get(key)!r}"


def _tensors(one: Weights, two: Weights) -> Iterator[str]:
    for name in sorted(one.specs.keys() ^ two.specs.keys()):
        yield f"{name}: only in the {'first' if name in one.specs else 'second'}"
    for name in sorted(one.specs.keys() & two.specs.keys()):
        a, b = one.specs[name], two.specs[name]
        if a.shape != b.shape:
            yield f"{name}: shapes {a.shape} and {b.shape}"
            continue
        kinds = "" if a.dtype == b.dtype else f"{a.dtype} and {b.dtype}, "
        apart = _apart(one, two, name)
        if kinds or apart["values"]:
            yield (
                f"{name}: {kinds}{apart['values']:.0f} of {a.numel} values differ, "
                f"by {apart['largest']:.3g} at most"
            )


def _apart(one: Weights, two: Weights, name: str) -> Mapping[str, float]:
    values = largest = 0.0
    for a, b in zip(one.blocks(name), two.blocks(name), strict=True):
        a, b = a.float(), b.float()
        apart = (a != b) & ~(a.isnan() & b.isnan())
        if count := int(apart.count_nonzero()):
            gaps = (a - b).abs()[apart]
            values += count
            largest = max(largest, float(gaps.nan_to_num(nan=inf, posinf=inf).max()))
    return {"values": values, "largest": largest}
