"""Fixed token sequences on which two forms of one model are compared, and their comparison."""

import random
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

from stages.checkpoint.heads import SCORE

if TYPE_CHECKING:
    from torch import Tensor

LENGTH = 32
"""Tokens of a fixed probe."""

LONGEST = 1024
"""Longest preference pair that is looked at, in tokens."""


class Probe(NamedTuple):
    """Tokens that a model is given."""

    ids: Sequence[int]
    answer: int = 0
    """Where the answer of a preference pair starts; 0 for a probe that is not one side of one."""


def fixed(num: int, rows: int) -> tuple[Probe, ...]:
    """``num`` sequences that depend on the number of ids alone, so that anybody can repeat them."""
    draw = random.Random(rows)
    return tuple(Probe([draw.randrange(rows) for _ in range(LENGTH)]) for _ in range(num))


def pairs(data: Path | None, num: int) -> tuple[Probe, ...]:
    """The first ``num`` held-out preference pairs of a tokenised data set, chosen before rejected;
    none where there are none."""
    folder = data / "preferences" / "test" if data else None
    if folder is None or not folder.is_dir():
        return ()
    from datasets import load_from_disk

    found: list[Probe] = []
    for row in load_from_disk(str(folder)):
        sides = [[*row["prompt_ids"], *row[side]] for side in ("chosen_ids", "rejected_ids")]  # type: ignore[index]
        if max(map(len, sides)) <= LONGEST and row["prompt_ids"]:  # type: ignore[index]
            found += [Probe(side, len(row["prompt_ids"])) for side in sides]  # type: ignore[index]
        if len(found) == 2 * num:
            break
    return tuple(found)


def answers(model: Any, probes: Sequence[Probe]) -> "list[Tensor]":
    """Log-probabilities of every next token, (length, vocabulary); of a pair's side the
    log-probability of each token of the answer, (answer,).

    Of a reward model the score at every token, (length, 1); of a pair's side the last, (1,).
    """
    import torch

    found = []
    scored: list[Tensor] = []
    head = next((m for n, m in model.named_modules() if f".{n}".endswith(f".{SCORE}")), None)
    if head is not None:
        head.register_forward_hook(lambda _, __, given: scored.append(given))
    with torch.inference_mode():
        for probe in probes:
            ids = torch.tensor([list(probe.ids)])
            if head is not None:
                scored.clear()
                model.eval()(input_ids=ids, use_cache=False)
                found.append(
                    scored[-1][0].float() if not probe.answer else scored[-1][0, -1].float()
                )
                continue
            logp = model.eval()(input_ids=ids, use_cache=False).logits[0].float().log_softmax(-1)
            if probe.answer:
                logp = logp[:-1].gather(1, ids[0, 1:, None])[probe.answer - 1 :, 0]
            found.append(logp)
    return found


def compared(
    trained: "Sequence[Tensor]", exported: "Sequence[Tensor]", before: "Sequence[Tensor]"
) -> Mapping[str, float]:
    """How the export answers the fixed probes, against the model as it was trained.

    ``logit_error`` is the root mean square of the difference of the log-probabilities, in
    units of their standard deviation over the vocabulary; ``kl`` the mean
    KL(trained || export) in nats a token; ``same_top_token`` the share of positions with the same
    likeliest token. ``change`` is what training did to the base, in the units of ``logit_error``,
    and ``change_kept`` the share of it that the export shows: the projection of (export - base) on
    (trained - base), which rounding alone hardly moves.
    """
    import torch

    one, two, base = (torch.cat(list(each)).double() for each in (trained, exported, before))
    scale = one.std(dim=-1).square().mean().sqrt()
    changed = one - base
    norm = float(changed.square().sum())
    return {
        "logit_error": float((two - one).square().mean().sqrt() / scale),
        "largest_difference": float((two - one).abs().max()),
        "kl": float((one.exp() * (one - two)).sum(-1).mean()),
        "same_top_token": float((one.argmax(-1) == two.argmax(-1)).double().mean()),
        "change": float(changed.square().mean().sqrt() / scale),
        "change_kept": float(((two - base) * changed).sum()) / norm if norm else 1.0,
    }


def compared_scores(
    trained: "Sequence[Tensor]", exported: "Sequence[Tensor]"
) -> Mapping[str, float]:
    """How an exported reward model scores the fixed probes, against the model as it was trained.

    ``logit_error`` is the root mean square of the difference of the scores at every token, in
    units of their standard deviation over all of them.
    """
    import torch

    one, two = (torch.cat(list(each)).double() for each in (trained, exported))
    apart = two - one
    return {
        "logit_error": float(apart.square().mean().sqrt() / one.std()),
        "largest_difference": float(apart.abs().max()),
    }


def compared_pairs(
    trained: "Sequence[Tensor]", exported: "Sequence[Tensor]"
) -> Mapping[str, float]:
    """The largest differences in nats: of an answer's log-probability a token, and of the margin
    by which a pair's chosen answer is the likelier."""
    sums = [[float(each.sum()) for each in side] for side in (trained, exported)]
    lengths = [len(each) for each in trained]
    margins = [[a - b for a, b in zip(s[::2], s[1::2], strict=True)] for s in sums]
    return {
        "answer_logp_difference": max(
            abs(a - b) / n for a, b, n in zip(*sums, lengths, strict=True)
        ),
        "margin_difference": max(abs(a - b) for a, b in zip(*margins, strict=True)),
    }
