"""A small Llama with a tokenizer of its own, made from a seed."""

from dataclasses import astuple
from pathlib import Path
from typing import Any, Literal, Self

from pydantic import NonNegativeInt, PositiveInt, model_validator

from configs import Config
from stages.sources import new_task

PAD, TURN, END = "<|pad|>", "<|im_start|>", "<|im_end|>"
CHAT_TEMPLATE = (
    "{% for message in messages %}"
    "{{ '<|im_start|>' + message['role'] + '\n' + message['content'] + '<|im_end|>\n' }}"
    "{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"
)


class NewModel(Config):
    """Random weights: a model that knows nothing yet."""

    kind: Literal["new_model"] = "new_model"

    hidden_size: PositiveInt = 128
    """Width of the model."""

    intermediate_size: PositiveInt = 256
    """Width inside each MLP."""

    num_hidden_layers: PositiveInt = 2
    """Decoder layers."""

    num_attention_heads: PositiveInt = 4
    """Heads of each layer; each head needs an even share of ``hidden_size``."""

    num_key_value_heads: PositiveInt | None = None
    """Heads that hold keys and values; unset: as many as there are heads."""

    max_position_embeddings: PositiveInt = 256
    """Longest text in tokens."""

    tie_word_embeddings: bool = True
    """Use the embedding as the output layer too."""

    dtype: Literal["float32", "bfloat16"] = "float32"
    """Type of the saved weights."""

    seed: NonNegativeInt = 0
    """Draws the weights."""

    @model_validator(mode="after")
    def _heads_fit(self) -> Self:
        heads = self.num_attention_heads
        if self.hidden_size % (2 * heads):
            raise ValueError(
                f"hidden_size {self.hidden_size} gives {heads} heads no even share; "
                f"use a multiple of {2 * heads}"
            )
        if self.num_key_value_heads and heads % self.num_key_value_heads:
            raise ValueError(
                f"num_key_value_heads {self.num_key_value_heads} does not divide "
                f"num_attention_heads {heads}"
            )
        return self


def bring(source: NewModel, into: Path) -> dict[str, Any]:
    """Write the model with tokenizer, chat template and generation config.

    The same source gives the same bytes. Returns ``parameters``, the number of weights.
    """
    import torch
    from transformers import GenerationConfig, LlamaForCausalLM

    tokenizer = make_tokenizer(source.max_position_embeddings)
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(source.seed)
        model = LlamaForCausalLM(_shape(source, tokenizer)).to(getattr(torch, source.dtype))
    model.generation_config = GenerationConfig(
        eos_token_id=tokenizer.eos_token_id, pad_token_id=tokenizer.pad_token_id
    )
    model.save_pretrained(into)
    tokenizer.save_pretrained(into)
    return {"parameters": model.num_parameters()}


def _shape(source: NewModel, tokenizer: Any) -> Any:
    from transformers import LlamaConfig

    return LlamaConfig(
        **source.model_dump(exclude={"kind", "seed", "num_key_value_heads"}),
        num_key_value_heads=source.num_key_value_heads or source.num_attention_heads,
        vocab_size=len(tokenizer),
        bos_token_id=None,
        eos_token_id=tokenizer.eos_token_id,
        pad_token_id=tokenizer.pad_token_id,
    )


def make_tokenizer(max_length: int) -> Any:
    """Byte-level BPE with one token for each digit: any text has its tokens and comes back whole.

    The merges are learned from the sentences of :mod:`stages.sources.new_task`, to keep its rows
    short. A turn ends with the EOS token, and padding has a token of its own.
    """
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
    from transformers import PreTrainedTokenizerFast

    bpe = Tokenizer(models.BPE())
    bpe.pre_tokenizer = pre_tokenizers.Sequence(
        [
            pre_tokenizers.Digits(individual_digits=True),
            pre_tokenizers.ByteLevel(add_prefix_space=False),
        ]
    )
    bpe.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=512,  # more than the sentences have merges for
        special_tokens=[PAD, TURN, END],
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    bpe.train_from_iterator(_sentences(), trainer)
    return PreTrainedTokenizerFast(
        tokenizer_object=bpe,
        pad_token=PAD,
        eos_token=END,
        additional_special_tokens=[TURN],
        model_max_length=max_length,
        clean_up_tokenization_spaces=False,
        chat_template=CHAT_TEMPLATE,
    )


def _sentences() -> list[str]:
    """Every wording that the task has, and the roles as the chat template sets them."""
    some = range(0, new_task.NUM_QUESTIONS, len(new_task.NUMBERS) // 3)
    exchanges = [text for index in some for text in astuple(new_task.exchange(index))]
    return [*exchanges, *["system\n", "user\n", "assistant\n"] * len(exchanges)]
