"""The clipped losses of PPO (arXiv:1707.06347). Imported only inside a rank: it loads torch.

Every tensor is (answers, tokens); a loss is the *sum* over the tokens that ``mask`` counts. The
caller divides by the number of tokens of the whole optimizer step, over all ranks, so that the
gradient does not depend on how the step was cut.
"""

from dataclasses import dataclass

import torch
from torch import Tensor


@dataclass(frozen=True)
class PolicyLoss:
    """Sums over tokens. Only ``loss`` carries a gradient."""

    loss: Tensor
    clipped: Tensor
    """Tokens at which the clipped term is the larger loss, which therefore teach nothing."""

    ratio: Tensor
    kl: Tensor
    """Divergence of the policy that sampled from the one being trained, by k3."""

    furthest: Tensor
    """The largest |log ratio|; not a sum."""


def policy_loss(
    log_probs: Tensor, old_log_probs: Tensor, advantages: Tensor, mask: Tensor, *, clip: float
) -> PolicyLoss:
    """sum max(-A r, -A clip(r, 1 - clip, 1 + clip)), r = pi / pi_old (equation 7)."""
    log_ratio = (log_probs - old_log_probs) * mask
    ratio = log_ratio.exp()
    plain = -advantages * ratio
    held = -advantages * ratio.clamp(1 - clip, 1 + clip)
    with torch.no_grad():
        kl = ((ratio - 1 - log_ratio) * mask).sum()  # drawn from pi_old, so that r is its q / p
        clipped = ((held > plain) * mask).sum()
    return PolicyLoss(
        loss=(torch.maximum(plain, held) * mask).sum(),
        clipped=clipped,
        ratio=(ratio.detach() * mask).sum(),
        kl=kl,
        furthest=log_ratio.detach().abs().max(),
    )


def value_loss(
    values: Tensor, old_values: Tensor, returns: Tensor, mask: Tensor, *, clip: float | None
) -> tuple[Tensor, Tensor]:
    """(sum max((V - R)^2, (V_clipped - R)^2) / 2, tokens at which the clipped term is larger).

    V_clipped keeps within ``clip`` of the value at the rollout (the code of arXiv:1707.06347;
    arXiv:2005.12729 section 3); ``None`` is the plain squared error.
    """
    plain = (values - returns) ** 2
    if clip is None:
        return (plain * mask).sum() / 2, torch.zeros((), device=values.device)
    held = old_values + (values - old_values).clamp(-clip, clip)
    clipped = (held - returns) ** 2
    with torch.no_grad():
        left = (values - old_values).abs() > clip  # or rounding would count where nothing is held
        num = (left * (clipped > plain) * mask).sum()
    return (torch.maximum(plain, clipped) * mask).sum() / 2, num
