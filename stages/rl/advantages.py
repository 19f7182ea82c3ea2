"""From per-token rewards and values to advantages. Imported only inside a rank: it loads torch.

Every tensor is (answers, tokens), padded on the right; ``mask`` is 1 where a token counts.
"""

import torch
from torch import Tensor

SMALL = 1e-8


def advantages_and_returns(
    rewards: Tensor, values: Tensor, mask: Tensor, *, gamma: float, lam: float
) -> tuple[Tensor, Tensor]:
    """Generalised advantage estimation (arXiv:1506.02438, equation 16), and the critic's targets.

    A_t = d_t + gamma lam A_(t+1) with d_t = r_t + gamma V_(t+1) - V_t. What follows the last token
    of an answer is worth 0, whatever stands in the padding; the return is A_t + V_t.
    """
    rewards, values = rewards * mask, values * mask
    num = rewards.shape[1]
    advantages = torch.zeros_like(rewards)
    following = torch.zeros_like(rewards[:, 0])
    for t in reversed(range(num)):
        after = values[:, t + 1] if t + 1 < num else torch.zeros_like(following)
        delta = rewards[:, t] + gamma * after - values[:, t]
        following = (delta + gamma * lam * following) * mask[:, t]
        advantages[:, t] = following
    return advantages, (advantages + values) * mask


def whiten(values: Tensor, mask: Tensor, *, keep_mean: bool = False) -> Tensor:
    """``values`` scaled to variance 1 over all that ``mask`` counts, and shifted to mean 0.

    The variance is the biased one, the mean over all counted values (arXiv:1909.08593, as in the
    code that came with it); ``keep_mean`` shifts back, so that the sign of a reward stays.
    """
    mean = masked_mean(values, mask)
    variance = masked_mean((values - mean) ** 2, mask)
    whitened = (values - mean) * torch.rsqrt(variance + SMALL)
    return (whitened + mean if keep_mean else whitened) * mask


def masked_mean(values: Tensor, mask: Tensor) -> Tensor:
    """The mean of what ``mask`` counts, over rows and tokens alike."""
    return (values * mask).sum() / mask.sum()


def explained_variance(values: Tensor, returns: Tensor, mask: Tensor) -> float:
    """1 - Var(return - value) / Var(return): 1 for a perfect critic, 0 for a constant one.

    0 too where all returns are equal and there is nothing to explain.
    """
    errors, counted = (returns - values)[mask > 0], returns[mask > 0]
    spread = counted.var(correction=0)
    if spread < SMALL:
        return 0.0
    return float(1 - errors.var(correction=0) / spread)
