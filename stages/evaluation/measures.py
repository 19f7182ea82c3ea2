"""From per-row results to the measures of an evaluation. Pure functions of numbers."""

import math
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from stages.evaluation.intervals import Estimate, Intervals

Items = Sequence[Mapping[str, Any]]
Measures = dict[str, Estimate | float]


def conversation_measures(items: Items, before: Items | None, intervals: Intervals) -> Measures:
    """Loss and perplexity over trained tokens; exact match, endings and lengths of answers.

    Loss is sum(loss) / sum(tokens) over all rows, in nats; perplexity is its exponential. With
    ``before``, the paired changes of loss and exact match too.
    """
    losses, tokens = -_column(items, "logp"), _column(items, "tokens")
    loss = intervals.ratio(losses, tokens)
    measures: Measures = {
        "loss": loss,
        "perplexity": {k: v if k == "n" else _exp(v) for k, v in loss.items()},
        "tokens": float(tokens.sum()),
    }
    if before is not None:
        measures["loss_change"] = intervals.ratio(losses + _column(before, "logp"), tokens)
    return measures | _answer_measures(items, before, intervals)


def _answer_measures(items: Items, before: Items | None, intervals: Intervals) -> Measures:
    places = [place for place, item in enumerate(items) if "match" in item]
    if not places:
        return {}
    answers = [items[place] for place in places]
    matches = _column(answers, "match")
    measures: Measures = {
        "exact_match": intervals.share(matches),
        "stopped": intervals.share(_column(answers, "stopped")),
        "answer_tokens": intervals.mean(_column(answers, "answer_tokens")),
    }
    earlier = [before[place] for place in places] if before is not None else []
    if earlier and all("match" in item for item in earlier):
        change = matches - _column(earlier, "match")
        measures["exact_match_change"] = intervals.mean(change)
    return measures


def preference_measures(
    items: Items, before: Items | None, intervals: Intervals, *, beta: float | None
) -> Measures:
    """Preference measures over pairs, in nats; ``before`` is the reference policy's.

    Without a reference: how often, and by how much, log p(chosen) > log p(rejected), whole and
    per token. With one: the changes against it. With ``beta`` too, which says that preferences were
    trained against it: reward = beta * (log p - log p_reference), its accuracy and margin, and
    the sigmoid loss -log sigmoid(beta * margin) of Rafailov et al. (2023), "Direct preference
    optimization", eq. 7, which is ln 2 for a policy equal to its reference. Ties count half.
    """
    chosen, rejected = _column(items, "chosen_logp"), _column(items, "rejected_logp")
    lengths = {side: _column(items, f"{side}_tokens") for side in ("chosen", "rejected")}
    margin = chosen - rejected
    per_token = chosen / lengths["chosen"] - rejected / lengths["rejected"]
    measures: Measures = {
        "accuracy": intervals.share(_wins(margin)),
        "accuracy_per_token": intervals.share(_wins(per_token)),
        "margin": intervals.mean(margin),
        "margin_per_token": intervals.mean(per_token),
        "chosen_logp": intervals.mean(chosen),
        "rejected_logp": intervals.mean(rejected),
        "chosen_tokens": float(lengths["chosen"].mean()),
        "rejected_tokens": float(lengths["rejected"].mean()),
    }
    if before is None:
        return measures
    reference_chosen = _column(before, "chosen_logp")
    reference_rejected = _column(before, "rejected_logp")
    chosen_change, rejected_change = chosen - reference_chosen, rejected - reference_rejected
    change = chosen_change - rejected_change
    gained = _wins(margin) - _wins(reference_chosen - reference_rejected)
    measures |= {
        "accuracy_change": intervals.mean(gained),
        "chosen_logp_change": intervals.mean(chosen_change),
        "rejected_logp_change": intervals.mean(rejected_change),
        "margin_change": intervals.mean(change),
    }
    if beta is not None:
        measures |= {
            "reward_accuracy": intervals.share(_wins(change)),
            "chosen_reward": intervals.mean(beta * chosen_change),
            "rejected_reward": intervals.mean(beta * rejected_change),
            "reward_margin": intervals.mean(beta * change),
            "dpo_loss": intervals.mean(np.logaddexp(0, -beta * change)),
        }
    return measures


def _column(items: Items, key: str) -> NDArray[np.float64]:
    return np.array([item[key] for item in items], dtype=float)


def _wins(margins: NDArray[np.float64]) -> NDArray[np.float64]:
    return (np.sign(margins) + 1) / 2


def _exp(loss: float) -> float:
    return math.exp(min(loss, 700.0))  # e^710 is beyond a double
