"""Every stage, by name. A new stage is one module here and one line below."""

from stages.base import Stage
from stages.convert import convert
from stages.dpo import dpo
from stages.evaluate import evaluate
from stages.fetch import fetch
from stages.grpo import grpo
from stages.longest_rows import longest_rows
from stages.ppo import ppo
from stages.prepare_data import prepare_data
from stages.reward import reward
from stages.sft import sft
from stages.tokenize_data import tokenize_data

STAGES = {
    stage.name: stage
    for stage in (
        Stage(fetch, online=True),
        Stage(prepare_data, version=4),
        Stage(tokenize_data, version=6),
        Stage(sft, version=3, beats=True),
        Stage(dpo, version=2, beats=True),
        Stage(reward, version=2, beats=True),
        Stage(ppo, beats=True),
        Stage(grpo, version=2, beats=True),
        Stage(convert, version=3),
        Stage(evaluate, beats=True),
        Stage(longest_rows),
    )
}
