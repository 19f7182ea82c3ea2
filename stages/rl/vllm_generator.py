"""Sampling answers through vLLM, with the policy's weights of the moment.

Imported only inside a rank: it loads vllm.
"""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import nn
from vllm import LLM, SamplingParams  # pyright: ignore[reportMissingImports]: not pinned

from stages.rl.generation import Answer, Generator, Ids, MakeGenerator, Sampling
from stages.rl.generators import WithVLLM
from stages.rl.merged import weights

SEEDS = 2**31


def vllm_generator(
    folder: Path, config: WithVLLM, sampling: Sampling, *, longest: int, dtype: str
) -> MakeGenerator:
    """An engine for the model in ``folder``; ``longest`` is a prompt with its answer, in tokens.

    It shares the GPU with the training in this process, and sleeps while that goes on.
    """
    engine = LLM(
        model=str(folder),
        dtype=dtype,
        max_model_len=longest,
        gpu_memory_utilization=config.memory,
        enable_sleep_mode=True,
        distributed_executor_backend="external_launcher",  # this rank is the worker
    )
    engine.sleep(level=2)

    def make(policy: nn.Module) -> Generator:
        def generate(prompts: Sequence[Ids], uniforms: np.ndarray) -> list[Answer]:
            with _awake(engine, policy):
                found = engine.generate(
                    [{"prompt_token_ids": prompt} for prompt in prompts],
                    [_as_told(sampling, row) for row in uniforms],
                    use_tqdm=False,
                )
            return [_answer(list(each.outputs[0].token_ids), sampling) for each in found]

        return generate

    return make


@contextmanager
def _awake(engine: LLM, policy: nn.Module) -> Iterator[None]:
    """The engine with the policy's weights; its cache comes after them, when room is clear."""

    def load(model: Any) -> None:
        model.load_weights(weights(policy))

    torch.cuda.empty_cache()
    engine.wake_up(tags=["weights"])
    with torch.no_grad():
        engine.apply_model(load)
    engine.wake_up(tags=["kv_cache"])
    try:
        yield
    finally:
        engine.sleep(level=2)


def _as_told(sampling: Sampling, drawn: np.ndarray) -> SamplingParams:
    """One answer's settings. Its seed is made from its own random numbers, whatever company the
    prompt keeps."""
    return SamplingParams(
        temperature=sampling.temperature,
        top_p=sampling.top_p,
        max_tokens=sampling.max_new_tokens,
        stop_token_ids=list(sampling.stops),
        ignore_eos=True,  # the stops are all that end an answer
        seed=int(drawn[0] * SEEDS),
        detokenize=False,
    )


def _answer(ids: Ids, sampling: Sampling) -> Answer:
    return Answer(ids, ended=ids[-1] in sampling.stops)
