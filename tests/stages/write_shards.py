"""``write_shards.py OUT``: what sharded training leaves, by real FSDP2 and ZeRO ranks.

For each case ``OUT/CASE/model`` is a training stage's output and ``OUT/CASE/expected.pt`` the
weights as the training side gathers them; ``OUT/base/{tied,untied,even}/model`` are the bases.
"""

import os
import shutil
import sys
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from stages import cpu_ranks

VOCABULARY = 67
RANKS = 2
TEMPLATE = (
    "{% for m in messages %}<|turn|>{{ m.role }} {{ m.content }}<|end|>{% endfor %}"
    "{% if add_generation_prompt %}<|turn|>assistant {% endif %}"
)


def write_base(out: Path, *, tie: bool, even: bool = False, seed: int = 0) -> None:
    """A two-layer model; unless ``even`` its sizes are odd, so that no shard is like another."""
    import torch
    from tokenizers import Tokenizer, models, pre_tokenizers
    from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast

    torch.manual_seed(seed)
    config = LlamaConfig(
        vocab_size=VOCABULARY,
        hidden_size=64 if even else 35,
        intermediate_size=128 if even else 51,
        num_hidden_layers=2,
        num_attention_heads=2 if even else 5,
        num_key_value_heads=1,
        head_dim=32 if even else 6,
        tie_word_embeddings=tie,
        bos_token_id=None,
        eos_token_id=1,
        pad_token_id=0,
    )
    LlamaForCausalLM(config).save_pretrained(out)
    words = ["<|pad|>", "<|eos|>", "<|turn|>", "<|end|>", *(f"w{n}" for n in range(60))]
    words = Tokenizer(models.WordLevel({w: n for n, w in enumerate(words)}, unk_token="w0"))
    words.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    tokenizer = PreTrainedTokenizerFast(
        tokenizer_object=words,
        pad_token="<|pad|>",
        eos_token="<|eos|>",
        additional_special_tokens=["<|turn|>", "<|end|>"],
        chat_template=TEMPLATE,
    )
    tokenizer.save_pretrained(out)


def with_adapter(model: Any, **settings: Any) -> Any:
    """``model`` in PEFT, whose adapter already changes it."""
    import torch
    from peft import LoraConfig, get_peft_model

    torch.manual_seed(1)
    config = LoraConfig(task_type="CAUSAL_LM", r=3, lora_alpha=7, **settings)
    wrapped = get_peft_model(model, config)
    for name, parameter in wrapped.named_parameters():
        if "lora_B" in name or "lora_embedding_A" in name:
            torch.nn.init.normal_(parameter, std=0.3)
    return wrapped


def main(out: Path) -> None:
    """Two ranks forked from a process that has imported everything once, which halves the cost."""
    import bitsandbytes
    import deepspeed
    import peft
    import torch.distributed.checkpoint
    import torch.distributed.fsdp
    import torch.multiprocessing

    del bitsandbytes, deepspeed, peft
    write_base(out / "base" / "tied" / "model", tie=True)
    write_base(out / "base" / "untied" / "model", tie=False)
    write_base(out / "base" / "even" / "model", tie=False, even=True)
    torch.multiprocessing.start_processes(rank, (out,), nprocs=RANKS, start_method="fork")


def rank(number: int, out: Path) -> None:
    """Write every case, as one rank of a gloo group."""
    import torch.distributed as dist

    os.environ |= {"RANK": str(number), "LOCAL_RANK": str(number), "WORLD_SIZE": str(RANKS)}
    meeting = f"file://{out}/meeting"
    dist.init_process_group("gloo", init_method=meeting, rank=number, world_size=RANKS)
    cpu_ranks.start_deepspeed()
    for case, (base, build, save) in CASES.items():
        folder = out / case / "model"
        save(build(out / "base" / base / "model"), folder)
        if number == 0:
            _companions(out / "base" / base / "model", folder)
        dist.barrier()
    dist.destroy_process_group()


def _full(base: Path) -> Any:
    from transformers import AutoModelForCausalLM

    return AutoModelForCausalLM.from_pretrained(base, dtype="float32")


def _adapted(**settings: Any) -> Callable[[Path], Any]:
    return lambda base: with_adapter(_full(base), **settings)


def _quantised(base: Path) -> Any:
    import torch
    from transformers import AutoModelForCausalLM, BitsAndBytesConfig

    nf4 = BitsAndBytesConfig(
        load_in_4bit=True,
        bnb_4bit_quant_type="nf4",
        bnb_4bit_use_double_quant=True,
        bnb_4bit_quant_storage=torch.float32,
    )
    model = AutoModelForCausalLM.from_pretrained(
        base, dtype="float32", quantization_config=nf4, device_map={"": "cpu"}
    )
    return with_adapter(model, target_modules="all-linear")


def _step(forward: Any) -> Any:
    import torch
    import torch.distributed as dist

    ids = torch.arange(4, 16).reshape(1, 12) + dist.get_rank()
    return forward(input_ids=ids, labels=ids).loss


def _fsdp(model: Any, folder: Path) -> None:
    """Train a step under FSDP2 and save as accelerate does for SHARDED_STATE_DICT."""
    import torch.distributed.checkpoint as dcp

    state = _fsdp_step(model, folder)
    dcp.save({"model": state}, storage_writer=dcp.FileSystemWriter(folder / "pytorch_model_fsdp_0"))


def _rank_files(model: Any, folder: Path) -> None:
    """The same, saved as accelerate does without DCP."""
    import torch
    import torch.distributed as dist

    state = _fsdp_step(model, folder)
    folder.mkdir(parents=True, exist_ok=True)
    torch.save(state, folder / f"pytorch_model_fsdp_0_rank{dist.get_rank()}.bin")


def _fsdp_step(model: Any, folder: Path) -> dict[str, Any]:
    """Train a step under FSDP2; this rank's part of the weights."""
    import torch
    import torch.distributed as dist
    from torch.distributed.checkpoint.state_dict import StateDictOptions, get_model_state_dict
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import fully_shard

    mesh = init_device_mesh("cpu", (dist.get_world_size(),))
    bare = model.get_base_model() if hasattr(model, "peft_config") else model
    for layer in bare.model.layers:
        fully_shard(layer, mesh=mesh)
    fully_shard(model, mesh=mesh)
    trained = [p for p in model.parameters() if p.requires_grad]
    optimizer = torch.optim.AdamW(trained, lr=1e-2)
    _step(model).backward()
    optimizer.step()
    state = get_model_state_dict(model, options=StateDictOptions(cpu_offload=True))
    folder.mkdir(parents=True, exist_ok=True)
    whole = StateDictOptions(full_state_dict=True, cpu_offload=True)
    _expect(model, get_model_state_dict(model, options=whole), folder)
    return state


def _zero(stage: int, *, bf16: bool = False, exclude: bool = False) -> Callable[[Any, Path], None]:
    """Train a step under ZeRO and save with the engine, frozen parameters or not."""

    def save(model: Any, folder: Path) -> None:
        import deepspeed
        import torch
        from deepspeed.utils import safe_get_full_fp32_param, safe_get_full_optimizer_state

        trained = [p for p in model.parameters() if p.requires_grad]
        settings = {
            "train_micro_batch_size_per_gpu": 1,
            "zero_optimization": {"stage": stage},
            "bf16": {"enabled": bf16},
            "zero_force_ds_cpu_optimizer": False,
            "zero_allow_untested_optimizer": True,
        }
        engine, *_ = deepspeed.initialize(
            model=model, optimizer=torch.optim.AdamW(trained, lr=1e-2), config=settings
        )
        engine.backward(_step(engine))
        engine.step()
        engine.save_checkpoint(str(folder), exclude_frozen_parameters=exclude)
        state = {
            name: safe_get_full_fp32_param(parameter)
            for name, parameter in model.named_parameters()
            if parameter.requires_grad
        }
        moments = {
            key: {
                name: safe_get_full_optimizer_state(parameter, key)
                for name, parameter in model.named_parameters()
                if parameter.requires_grad
            }
            for key in ("exp_avg", "exp_avg_sq")
        }
        if torch.distributed.get_rank() == 0:
            torch.save(moments, folder.parent / "moments.pt")
        _expect(model, state, folder)

    return save


def _expect(model: Any, state: Mapping[str, Any], folder: Path) -> None:
    import torch
    import torch.distributed as dist

    if dist.get_rank() == 0:
        torch.save(dict(state), folder.parent / "expected.pt")
        if adapters := getattr(model, "peft_config", None):
            adapters["default"].save_pretrained(folder)
        model.config.save_pretrained(folder)


def _companions(base: Path, folder: Path) -> None:
    for file in ("generation_config.json", "tokenizer.json", "tokenizer_config.json"):
        shutil.copyfile(base / file, folder / file)
    shutil.copyfile(base / "chat_template.jinja", folder / "chat_template.jinja")


_LORA = _adapted(target_modules=["q_proj", "down_proj", "embed_tokens"], use_rslora=True)
_DORA = _adapted(target_modules="all-linear", use_dora=True, modules_to_save=["lm_head"])
CASES: Mapping[str, tuple[str, Callable[[Path], Any], Callable[[Any, Path], None]]] = {
    "dcp_full_tied": ("tied", _full, _fsdp),
    "dcp_full_untied": ("untied", _full, _fsdp),
    "dcp_lora": ("tied", _LORA, _fsdp),
    "dcp_dora": ("untied", _DORA, _fsdp),
    "dcp_qlora": ("even", _quantised, _fsdp),
    "ranks_full_tied": ("tied", _full, _rank_files),
    "ranks_full_untied": ("untied", _full, _rank_files),
    "ranks_dora": ("untied", _DORA, _rank_files),
    "zero1_full_untied": ("untied", _full, _zero(1, bf16=True)),
    "zero1_dora": ("untied", _DORA, _zero(1)),
    "zero2_full_tied": ("tied", _full, _zero(2)),
    "zero2_lora": ("tied", _LORA, _zero(2, exclude=True)),
    "zero3_full_tied": ("tied", _full, _zero(3)),
    "zero3_full_untied": ("untied", _full, _zero(3, bf16=True)),
    "zero3_dora": ("untied", _DORA, _zero(3)),
}

if __name__ == "__main__":
    main(Path(sys.argv[1]))
