"""Four prompts, eight one-token answers and a reward of each: the best policy can be enumerated.

Under a KL penalty of weight beta it is pi_ref(y|x) exp(r(x, y) / beta) / Z(x) (arXiv:2305.18290,
equation 4), here over the whole vocabulary.
"""

import random
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from tests.small import WORDS, write_model

PROMPTS = [[10, 11], [12], [13, 14, 15], [16, 17]]
ANSWERS = range(40, 48)
OTHER = -1.0
"""What every other word is worth."""

_draw = random.Random(1)
TABLE = [{word: _draw.gauss(0, 1) for word in ANSWERS} for _ in PROMPTS]
"""For each prompt, what each answer is worth."""


def worth(
    prompts: Sequence[Any], completions: Sequence[str], rows: Sequence[Mapping[str, Any]]
) -> list[float]:
    """The reward: ``answer`` names the prompt."""
    return [
        TABLE[int(row["answer"])].get(_word(text), OTHER)
        for text, row in zip(completions, rows, strict=True)
    ]


def _word(text: str) -> int:
    return int(text[1:]) if text.startswith("w") and text[1:].isdigit() else -1


def write_world(out: Path) -> None:
    """``out/policy/model``, trained to give the answers some probability each, and ``out/data``."""
    import torch
    from datasets import Dataset
    from transformers import AutoModelForCausalLM

    write_model(out / "policy" / "model", tie=True)
    model = AutoModelForCausalLM.from_pretrained(out / "policy" / "model")
    draw = torch.Generator().manual_seed(0)
    wanted = torch.full((len(PROMPTS), WORDS), 1e-4)
    wanted[:, list(ANSWERS)] = torch.rand(len(PROMPTS), len(ANSWERS), generator=draw) + 0.3
    wanted /= wanted.sum(1, keepdim=True)
    optimizer = torch.optim.Adam(model.parameters(), lr=3e-3)
    for _ in range(150):
        loss = -(wanted * _log_probs(model)).sum(1).mean()
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
    model.save_pretrained(out / "policy" / "model")
    rows = [{"prompt_ids": ids, "answer": str(i)} for i, ids in enumerate(PROMPTS)]
    Dataset.from_list(rows * 64).save_to_disk(out / "data" / "conversations" / "train")


def _log_probs(model: Any) -> Any:
    """(prompts, words): of the first word after each prompt."""
    import torch

    rows = [model(input_ids=torch.tensor([ids])).logits[0, -1] for ids in PROMPTS]
    return torch.stack(rows).log_softmax(-1)


def rewards() -> Any:
    """(prompts, words) the reward of each word as an answer, in float64."""
    import torch

    table = torch.full((len(PROMPTS), WORDS), OTHER, dtype=torch.float64)
    for row, worths in zip(table, TABLE, strict=True):
        for word, value in worths.items():
            row[word] = value
    return table


def distribution(folder: Path) -> Any:
    """(prompts, words) log-probabilities of the model in ``folder``, in float64."""
    import torch
    from transformers import AutoModelForCausalLM

    with torch.no_grad():
        return _log_probs(AutoModelForCausalLM.from_pretrained(folder)).double()


def measure(policy: Any, reference: Any, table: Any = None) -> dict[str, float]:
    """E[r] and KL(policy || reference), means over the prompts, of (prompts, words) tables."""
    p = policy.exp()
    return {
        "reward": float((p * (rewards() if table is None else table)).sum(1).mean()),
        "kl": float((p * (policy - reference)).sum(1).mean()),
    }


def among_answers(policy: Any) -> Any:
    """``policy`` with every other word forbidden: preferences between answers say nothing of those,
    and DPO lets probability go there."""
    import torch

    allowed = torch.full((WORDS,), -torch.inf, dtype=policy.dtype)
    allowed[list(ANSWERS)] = 0.0
    return (policy + allowed).log_softmax(-1).clamp(min=-1e4)


def optimum(reference: Any, beta: float, table: Any = None) -> Any:
    """The best (prompts, words) log-probabilities under a penalty of ``beta`` a nat."""
    return (reference + (rewards() if table is None else table) / beta).log_softmax(-1)
