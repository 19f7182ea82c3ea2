"""What a run of PPO works with, the same from update to update. Imported only inside a rank."""

import math
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np

from stages.base import Context
from stages.rewards import Scorer
from stages.rl.engine import Engine
from stages.rl.generation import MakeGenerator, Sampling
from stages.rl.rollout import Split

if TYPE_CHECKING:
    from stages.ppo import PPO


@dataclass(frozen=True)
class Work:
    """What stays the same from update to update."""

    config: "PPO"
    ctx: Context
    engine: Engine
    tokenizer: Any
    rows: Any
    """The data set: ``prompt_ids``, ``answer``."""

    order: np.ndarray
    """Row numbers, in the order in which they are asked."""

    score: Scorer
    sampling: Sampling
    generator: MakeGenerator
    split: Split

    @property
    def num_updates(self) -> int:
        return len(self.order) // self.split.num

    @property
    def steps_an_update(self) -> int:
        return self.config.passes * self.config.minibatches


def prompt_order(num: int, config: "PPO") -> np.ndarray:
    """Row numbers of all rollouts: ``epochs`` permutations drawn from ``seed``, one after the
    other, the last rollout filled up from the front."""
    rng = np.random.default_rng(config.seed)
    order = np.concatenate([rng.permutation(num) for _ in range(config.epochs)])
    updates = math.ceil(len(order) / config.rollout_size)
    if config.max_steps is not None:
        updates = min(updates, config.max_steps)
    return np.resize(order, updates * config.rollout_size)
