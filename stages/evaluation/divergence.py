"""How far a policy has moved from its reference, measured on answers that it samples."""

import math
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from stages.base import StageError

Divergence = tuple[float, int]
"""KL(policy || reference) of one answer in nats, and its tokens, a stop token included."""


def measure(
    policy: Any, reference: Any, folder: Path, *, max_new_tokens: int, seed: int
) -> Callable[[list[tuple[int, list[int]]]], list[Divergence]]:
    """A function of some (place, prompt ids) that answers them and compares the models.

    Answers are sampled at temperature 1 from the policy; what is drawn depends on ``seed`` and the
    place alone. Raises :class:`StageError` where the policy names no stop token.
    """
    from stages.rl.generation import Sampling, transformers_generator, uniforms

    stops = policy.generation_config.eos_token_id
    if stops is None:
        raise StageError(
            f"{folder}: generation_config.json names no eos_token_id, so no answer would end; "
            "add it, or set evaluate.config.kl_rows to 0"
        )
    stops = (stops,) if isinstance(stops, int) else tuple(stops)
    sampling = Sampling(1.0, 1.0, max_new_tokens, stops, pad=stops[0])

    def compare(prompts: list[tuple[int, list[int]]]) -> list[Divergence]:
        generate = transformers_generator(policy, sampling, batch_size=len(prompts))
        drawn = uniforms(seed, 0, [place for place, _ in prompts], max_new_tokens)
        answers = generate([ids for _, ids in prompts], drawn)
        pairs = zip(prompts, answers, strict=True)
        return divergences(policy, reference, [(ids, answer.ids) for (_, ids), answer in pairs])

    return compare


def divergences(
    policy: Any, reference: Any, rows: Sequence[tuple[list[int], list[int]]]
) -> list[Divergence]:
    """KL(policy || reference) along each (prompt, answer), an answer that the policy has sampled.

    The sum over the answer's tokens of the divergence between the two whole distributions of the
    next token, in float32: its mean over answers is that of log pi(y) - log pi_ref(y), of which
    it is the expectation token by token, with less variance (Rao-Blackwell). Raises
    :class:`StageError` for one that is not finite.
    """
    import torch

    width = max(len(prompt) + len(answer) for prompt, answer in rows)
    ids = torch.zeros(len(rows), width, dtype=torch.long)
    mask = torch.zeros_like(ids)
    for number, (prompt, answer) in enumerate(rows):
        both = [*prompt, *answer]
        ids[number, : len(both)] = torch.tensor(both)
        mask[number, : len(both)] = 1
    found = []
    with torch.inference_mode():
        logits = [
            model(
                input_ids=ids.to(model.device),
                attention_mask=mask.to(model.device),
                use_cache=False,
            ).logits
            for model in (policy, reference)
        ]
        for number, (prompt, answer) in enumerate(rows):
            steps = slice(len(prompt) - 1, len(prompt) + len(answer) - 1)
            logp, logq = (each[number, steps].float().log_softmax(-1) for each in logits)
            terms = logp.exp() * (logp - logq.to(logp.device))
            # A token that the policy cannot say adds nothing: p log p ends at 0.
            kl = terms.masked_fill(logp.isneginf(), 0.0).sum()
            found.append((_finite(float(kl.double())), len(answer)))
    return found


def _finite(nats: float) -> float:
    if math.isfinite(nats):
        return nats
    raise StageError(
        f"the divergence of an answer is {nats}: the model may say a token that the reference "
        "never says, or values overflow in this dtype (evaluate.config.dtype); "
        "evaluate.config.kl_rows=0 measures none"
    )


def require_same_vocabulary(policy: Any, reference: Any, folder: Path) -> None:
    """Raise :class:`StageError` unless both models speak of the same tokens."""
    ours, theirs = (m.get_output_embeddings().weight.shape[0] for m in (policy, reference))
    if ours != theirs:
        raise StageError(
            f"{folder}: the reference knows {theirs} tokens and the model {ours}, so that they "
            "cannot be compared; give the model that training started from"
        )
