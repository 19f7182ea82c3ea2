"""A causal language model for evaluation: loading, scoring token sequences, greedy answers."""

import os
from collections.abc import Sequence
from inspect import signature
from pathlib import Path
from typing import Any

from stages.base import StageError
from stages.evaluation.items import IGNORED

Labelled = tuple[list[int], list[int]]
"""Token ids, and their labels: -100 where a token does not count."""

Score = tuple[float, int]
"""The sum of the labels' log-probabilities in nats, and how many labels there are."""

Answer = tuple[list[int], bool]
"""Generated ids without the stop id, and whether a stop id ended them."""


def load(folder: Path, *, dtype: str, device: str) -> Any:
    """The model in ``folder``, in eval mode: a whole copy on this rank's device.

    A process alone with several GPUs spreads a model over them. Raises :class:`StageError` for
    a folder that is not one complete Hugging Face checkpoint.
    """
    if (folder / "adapter_config.json").exists():
        raise StageError(
            f"{folder}: an adapter without its base; evaluate what convert makes of it"
        )
    if not (folder / "config.json").exists():
        raise StageError(f"{folder}: no config.json; evaluate takes an output of fetch or convert")
    import torch
    from transformers import AutoModelForCausalLM

    placement = {"device_map": _device_map()} if device == "cuda" else {}
    loaded: Any = AutoModelForCausalLM.from_pretrained(
        folder, dtype=getattr(torch, dtype), output_loading_info=True, **placement
    )
    model, report = loaded
    # transformers fills what a checkpoint lacks with random numbers and goes on.
    if missing := sorted(report["missing_keys"]):
        raise StageError(
            f"{folder}: {len(missing)} weights are missing ({', '.join(missing[:3])}, ...); "
            "convert the training output again"
        )
    return model


def _device_map() -> str | dict[str, int]:
    if int(os.environ.get("WORLD_SIZE", "1")) == 1:
        return "auto"
    return {"": int(os.environ["LOCAL_RANK"])}


def require_vocabulary(model: Any, ids: Sequence[Sequence[int]], folder: Path) -> None:
    """Raise :class:`StageError` when ``ids`` hold a token that the model does not know."""
    size = model.get_input_embeddings().num_embeddings
    largest = max(max(row) for row in ids)
    if largest >= size:
        raise StageError(
            f"{folder}: the data holds token {largest}, but the model knows only {size}; "
            "tokenise the data with this model's tokenizer"
        )


def score(model: Any, rows: Sequence[Labelled]) -> list[Score]:
    """How likely ``model`` finds the labels of each row.

    The first label does not count: nothing precedes it. Rows are padded on the right, where a
    causal model cannot look. Log-probabilities are taken in float32 and added in float64.
    """
    import torch

    ids, mask = _pad([ids for ids, _ in rows], device=model.device, left=False)
    places = [[t - 1 for t, y in enumerate(labels) if t and y != IGNORED] for _, labels in rows]
    first = min(row[0] for row in places)
    # The logits of prompts are the largest tensor of all and nobody reads them.
    keep = {"logits_to_keep": ids.shape[1] - first} if _keeps_logits(model) else {}
    with torch.inference_mode():
        logits = model(input_ids=ids, attention_mask=mask, use_cache=False, **keep).logits
    skipped = ids.shape[1] - logits.shape[1]
    scores = []
    for row, (where, (_, labels)) in enumerate(zip(places, rows, strict=True)):
        targets = torch.tensor([labels[t + 1] for t in where], device=logits.device)
        steps = torch.tensor(where, device=logits.device) - skipped
        log_probs = logits[row, steps].float().log_softmax(-1)
        picked = log_probs.gather(-1, targets[:, None]).double().sum()
        scores.append((picked.item(), len(where)))
    return scores


def decode_greedily(model: Any, folder: Path, *, max_new_tokens: int) -> None:
    """Make ``model`` answer with its most likely tokens, to one of its own stop ids.

    Raises :class:`StageError` when its generation config names no stop id.
    """
    from transformers import GenerationConfig

    stops = model.generation_config.eos_token_id
    if stops is None:
        raise StageError(
            f"{folder}: generation_config.json names no eos_token_id, so no answer would end; "
            "add it, or set evaluate.config.generate_rows to 0"
        )
    stops = [stops] if isinstance(stops, int) else list(stops)
    # generate() fills what a given config leaves open from the model's own, which may sample or
    # penalise repetition: only replacing that one makes the decoding plainly greedy.
    model.generation_config = GenerationConfig(
        do_sample=False,
        num_beams=1,
        max_new_tokens=max_new_tokens,
        eos_token_id=stops,
        pad_token_id=stops[0],
        use_cache=True,
    )


def answer(model: Any, prompts: Sequence[list[int]]) -> list[Answer]:
    """What ``model``, prepared by :func:`decode_greedily`, answers to each prompt.

    Prompts are padded on the left, masked and counted from their first real token, so that the
    company a prompt keeps in a batch does not change its answer.
    """
    import torch

    ids, mask = _pad(prompts, device=model.device, left=True)
    with torch.inference_mode():
        output = model.generate(input_ids=ids, attention_mask=mask)
    stops = set(model.generation_config.eos_token_id)
    return [_to_stop(row, stops) for row in output[:, ids.shape[1] :].tolist()]


def _to_stop(ids: list[int], stops: set[int]) -> Answer:
    end = next((place for place, token in enumerate(ids) if token in stops), None)
    return ids[:end], end is not None


def _keeps_logits(model: Any) -> bool:
    return "logits_to_keep" in signature(model.forward).parameters


def _pad(rows: Sequence[list[int]], *, device: Any, left: bool) -> tuple[Any, Any]:
    """(ids, attention mask), each (rows, longest). Padded places hold 0 and are masked."""
    import torch

    shape = (len(rows), max(len(row) for row in rows))
    ids, mask = torch.zeros(shape, dtype=torch.long), torch.zeros(shape, dtype=torch.long)
    for number, row in enumerate(rows):
        place = slice(shape[1] - len(row), None) if left else slice(len(row))
        ids[number, place] = torch.tensor(row)
        mask[number, place] = 1
    return ids.to(device), mask.to(device)
