"""Three prompts and every answer of up to three tokens: what the best policy is can be enumerated.

An answer that does not end within three tokens is worth ``PENALTY`` less.
"""

import itertools
import random
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from tests.small import EOS

PROMPTS = [[4, 5], [6], [7, 8, 9]]
WORDS = 10
LONGEST = 3
PENALTY = 0.5

_draw = random.Random(2)
WORTHS = [{word: _draw.gauss(0, 0.5) for word in range(4, WORDS)} for _ in PROMPTS]
"""For each prompt, what each word adds to an answer."""


def worth(
    prompts: Sequence[Any], completions: Sequence[str], rows: Sequence[Mapping[str, Any]]
) -> list[float]:
    """The sum over the words; ``answer`` names the prompt."""
    found = []
    for text, row in zip(completions, rows, strict=True):
        words = [int(word[1:]) for word in text.split()]
        found.append(_sum(int(row["answer"]), words))
    return found


def _sum(prompt: int, words: Sequence[int]) -> float:
    return sum(WORTHS[prompt].get(word, 0.0) for word in words)


def write_world(out: Path) -> None:
    """A small model of ten words as it was born, which is nearly indifferent, and the prompts."""
    import torch
    from datasets import Dataset
    from tokenizers import Tokenizer, models
    from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast

    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=WORDS,
        hidden_size=64,
        intermediate_size=128,
        num_hidden_layers=2,
        num_attention_heads=4,
        max_position_embeddings=32,
        pad_token_id=0,
        eos_token_id=EOS,
        bos_token_id=2,
    )
    LlamaForCausalLM(config).save_pretrained(out / "policy" / "model")
    words = {f"w{number}": number for number in range(WORDS)}
    PreTrainedTokenizerFast(
        tokenizer_object=Tokenizer(models.WordLevel(words, unk_token="w3")),
        pad_token="w0",
        eos_token="w1",
        unk_token="w3",
        chat_template="{% for m in messages %}{{ m.content }} w1{% endfor %}",
    ).save_pretrained(out / "policy" / "model")
    rows = [{"prompt_ids": ids, "answer": str(i)} for i, ids in enumerate(PROMPTS)]
    Dataset.from_list(rows * 64).save_to_disk(out / "data" / "conversations" / "train")


def answers() -> list[tuple[int, ...]]:
    """Every answer: a stop token ends it, or the limit does."""
    others = [word for word in range(WORDS) if word != EOS]
    found = []
    for size in range(LONGEST):
        found += [(*words, EOS) for words in itertools.product(others, repeat=size)]
    return found + list(itertools.product(others, repeat=LONGEST))


def distribution(folder: Path) -> Any:
    """(prompts, answers) log-probabilities of the model in ``folder``, in float64."""
    import torch
    from transformers import AutoModelForCausalLM

    model = AutoModelForCausalLM.from_pretrained(folder)
    rows = []
    for prompt in PROMPTS:
        known: dict[tuple[int, ...], Any] = {}
        for size in range(LONGEST):
            prefixes = [a[:size] for a in answers() if len(a) > size]
            prefixes = sorted(set(prefixes))
            ids = torch.tensor([[*prompt, *prefix] for prefix in prefixes])
            with torch.no_grad():
                said = model(input_ids=ids).logits[:, -1].double().log_softmax(-1)
            known |= dict(zip(prefixes, said, strict=True))
        rows.append([sum(float(known[a[:t]][a[t]]) for t in range(len(a))) for a in answers()])
    return torch.tensor(rows, dtype=torch.float64)


def scores() -> Any:
    """(prompts, answers): the reward, the penalty included."""
    import torch

    rows = [
        [_sum(prompt, a) - PENALTY * (a[-1] != EOS) for a in answers()]
        for prompt in range(len(PROMPTS))
    ]
    return torch.tensor(rows, dtype=torch.float64)


def measure(policy: Any, reference: Any) -> dict[str, float]:
    """E[r] and KL(policy || reference) in nats an answer, means over the prompts."""
    p = policy.exp()
    return {
        "reward": float((p * scores()).sum(1).mean()),
        "kl": float((p * (policy - reference)).sum(1).mean()),
    }


def optimum(reference: Any, beta: float) -> Any:
    return (reference + scores() / beta).log_softmax(-1)
