"""The planner's memory: each formula against a value computed by hand, and invariants."""

import json
import re
from dataclasses import fields, replace
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from backends import DDP, FSDP, DeepSpeed, Local, NamedBackend, Resources
from backends.planner.memory import (
    Memory,
    kv_cache_bytes,
    memory,
    num_adapter_parameters,
    quantised_bytes,
    state_bytes,
)
from backends.planner.model import READERS, Model, find_model, known_models, read_config
from backends.planner.tape import Tape, replay
from backends.planner.work import PPO_WRITES, Setup, Work
from stages.ppo import GENERATED_TOGETHER
from tests.small import python

LLAMA = find_model("meta-llama/Meta-Llama-3-8B")
P, H, F, V, L, KV = 8_030_261_248, 4096, 14336, 128_256, 32, 1024
TOKENS = 4 * 4096
WORKSPACES = 2 * 8_519_680
PARTS = ("weights", "gradients", "optimizer", "activations", "logits", "buffers")

PUBLISHED = {
    "Llama-2-7b-hf": 6_738_415_616,
    "Llama-2-13b-hf": 13_015_864_320,
    "Llama-2-70b-hf": 68_976_648_192,
    "CodeLlama-34b-hf": 33_743_970_304,
    "Llama-3.1-8B-Instruct": 8_030_261_248,
    "Llama-3.3-70B-Instruct": 70_553_706_496,
    "Llama-3.1-405B": 405_853_388_800,
    "Llama-3.2-1B": 1_235_814_400,
    "Llama-3.2-3B": 3_212_749_824,
    "TinyLlama_v1.1": 1_100_048_384,
    "Mistral-7B-v0.1": 7_241_732_096,
    "Mistral-7B-v0.3": 7_248_023_552,
    "Mistral-Nemo-Base-2407": 12_247_782_400,
    "Mistral-Small-24B-Base-2501": 23_572_403_200,
    "Mixtral-8x7B-v0.1": 46_702_792_704,
    "Qwen-1_8B": 1_836_828_672,
    "Qwen-7B-Chat": 7_721_324_544,
    "Qwen-14B": 14_167_290_880,
    "Qwen-72B": 72_287_920_128,
    "Qwen1.5-0.5B": 463_987_712,
    "Qwen1.5-32B": 32_512_218_112,
    "Qwen1.5-MoE-A2.7B": 14_315_784_192,
    "Qwen2-7B": 7_615_616_512,
    "Qwen2.5-0.5B-Instruct": 494_032_768,
    "Qwen2.5-3B": 3_085_938_688,
    "Qwen2.5-14B": 14_770_033_664,
    "Qwen2.5-32B": 32_763_876_352,
    "Qwen2.5-72B": 72_706_203_648,
    "Qwen3-0.6B": 596_049_920,
    "Qwen3-4B": 4_022_468_096,
    "Qwen3-8B": 8_190_735_360,
    "Qwen3-32B": 32_762_123_264,
    "Qwen3-30B-A3B": 30_532_122_624,
    "Qwen3-235B-A22B": 235_093_634_560,
    "gemma-2b": 2_506_172_416,
    "gemma-7b": 8_537_680_896,
    "gemma-2-9b": 9_241_705_984,
    "gemma-2-27b": 27_227_128_320,
    "gemma-3-270m": 268_098_176,
    "gemma-3-1b-it": 999_885_952,
    "phi-2": 2_779_683_840,
    "Phi-3-mini-4k-instruct": 3_821_079_552,
    "phi-4": 14_659_507_200,
    "SmolLM2-135M": 134_515_008,
    "SmolLM2-1.7B-Instruct": 1_711_376_384,
    "SmolLM3-3B": 3_075_098_624,
    "OLMo-1B-hf": 1_176_764_416,
    "OLMo-2-1124-7B": 7_298_617_344,
    "OLMoE-1B-7B-0924": 6_919_161_856,
    "granite-3.0-2b-base": 2_533_531_648,
    "granite-3.1-8b-instruct": 8_170_848_256,
    "falcon-7b": 6_921_720_704,
    "falcon-40b": 41_303_293_952,
    "Yi-6B": 6_061_035_520,
    "Yi-34B-Chat": 34_388_917_248,
    "Baichuan2-7B-Chat": 7_505_973_248,
    "Baichuan2-13B-Chat": 13_896_668_160,
    "chatglm3-6b": 6_243_584_000,
    "internlm2-7b": 7_737_708_544,
    "DeepSeek-R1-Distill-Qwen-1.5B": 1_777_088_000,
    "DeepSeek-R1-Distill-Llama-8B": 8_030_261_248,
    "gpt2": 124_439_808,
    "gpt2-xl": 1_557_611_200,
    "pythia-6.9b": 6_857_302_016,
    "bloomz-7b1": 7_069_016_064,
    "opt-1.3b": 1_315_758_080,
    "starcoder2-7b": 7_173_923_840,
    "stablelm-3b-4e1t": 2_795_443_200,
    "c4ai-command-r-v01": 34_980_831_232,
}
"""Parameters as the models' own pages and safetensors headers count them."""


def plan(
    work: Work, backend: NamedBackend | None = None, *, ranks: int = 1, **resources: Any
) -> Memory:
    given_resources: dict[str, Any] = {
        "device": "cuda",
        "micro_batch_size": 4,
        "gradient_checkpointing": True,
    }
    setup = Setup(
        backend or Local(), Resources(ranks_per_node=ranks, **(given_resources | resources))
    )
    return memory(LLAMA, work, setup)


def one_step(**changes: Any) -> Work:
    """No accumulation: the gradients of earlier passes are not there."""
    usual: dict[str, Any] = {"seq_length": 4096, "global_batch": 4}
    return Work(**(usual | changes))


# -- Models ----------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", PUBLISHED)
def test_parameters_are_those_that_are_published(name: str) -> None:
    assert find_model(name).num_parameters == PUBLISHED[name]


def test_every_catalogued_model_can_be_read() -> None:
    for name in known_models():
        model = find_model(name)
        assert 5e7 < model.num_active_parameters <= model.num_parameters < 5e11


SMALL = {
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "vocab_size": 128,
    "max_position_embeddings": 64,
}
EXPERTS = {
    "num_experts": 4,
    "num_local_experts": 4,
    "num_experts_per_tok": 2,
    "moe_intermediate_size": 32,
    "shared_expert_intermediate_size": 48,
}
OTHERS: dict[str, dict[str, Any]] = {
    "bloom": {"hidden_size": 64, "n_layer": 2, "n_head": 4, "vocab_size": 128},
    "falcon": {
        "hidden_size": 64,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "vocab_size": 128,
    },
    "gpt2": {"n_embd": 64, "n_layer": 2, "n_head": 4, "n_positions": 64, "vocab_size": 128},
    "opt": SMALL | {"ffn_dim": 96, "word_embed_proj_dim": 64},
}
REMOTE = {"baichuan", "chatglm", "internlm2", "qwen", "gemma3"}
"""Architectures whose code is not transformers' own, or that bring a vision tower."""


@pytest.mark.parametrize("kind", sorted(set(READERS) - REMOTE))
def test_parameters_are_those_of_the_model_that_transformers_builds(kind: str) -> None:
    import torch
    from transformers import AutoConfig, AutoModelForCausalLM

    keys = OTHERS.get(kind, SMALL | EXPERTS)
    config = AutoConfig.for_model(kind, **keys, pad_token_id=0)
    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(config)
    shape = read_config(json.loads(config.to_json_string(use_diff=False)), name=kind)
    assert shape.num_parameters == sum(each.numel() for each in model.parameters())


def test_a_folder_or_a_config_file_names_a_model(tmp_path: Path) -> None:
    config = {"model_type": "llama", **SMALL}
    (tmp_path / "config.json").write_text(json.dumps(config))
    assert find_model(str(tmp_path)) == find_model(str(tmp_path / "config.json"))
    assert find_model(str(tmp_path)).hidden_size == 64


@pytest.mark.parametrize("name", ["Qwen/Qwen3-8B", "qwen3-8b", "QWEN3_8B", "qwen/qwen3-8b"])
def test_names_go_without_case_and_owner(name: str) -> None:
    assert find_model(name).name == "Qwen/Qwen3-8B"


def test_an_unknown_name_is_answered_with_near_ones() -> None:
    with pytest.raises(ValueError, match=r"'Qwn3-8B'.*Qwen/Qwen3-8B"):
        find_model("Qwn3-8B")


@pytest.mark.parametrize(
    ("config", "message"),
    [
        ({"model_type": "llamaa", **SMALL}, "llamaa.*llama"),
        (SMALL, "no model_type"),
        ({"model_type": "llama", "hidden_size": 64}, "num_attention_heads"),
        ({"model_type": "llama", **SMALL, "num_hidden_layers": 0}, "num_hidden_layers is 0"),
    ],
)
def test_a_config_that_cannot_be_read_says_why(
    config: dict[str, Any], message: str, tmp_path: Path
) -> None:
    (tmp_path / "config.json").write_text(json.dumps(config))
    with pytest.raises(ValueError, match=message):
        find_model(str(tmp_path))


def test_a_broken_config_file_is_named(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text("{")
    with pytest.raises(ValueError, match=r"config\.json: not a JSON config"):
        find_model(str(tmp_path))


# -- Formulas --------------------------------------------------------------------------------------


def test_adapter_parameters() -> None:
    """n = layers * rank * (inputs + outputs), arXiv:2106.09685: q and o are h -> h, k and v
    h -> 1024, gate and up h -> f, down f -> h."""
    attention = L * 16 * (2 * 2 * H + 2 * (H + KV))
    every = attention + L * 16 * 3 * (H + F)
    assert attention == 13_631_488
    assert num_adapter_parameters(LLAMA, Work(method="lora", lora_targets="attention")) == attention
    assert num_adapter_parameters(LLAMA, Work(method="qlora")) == every == 41_943_040
    magnitudes = L * (2 * H + 2 * KV + 2 * F + H)
    assert num_adapter_parameters(LLAMA, Work(method="dora")) == every + magnitudes


def test_nf4_bytes_of_a_weight() -> None:
    """QLoRA, arXiv:2305.14314, section 3: 4 bits and 0.127 bits with double quantisation, else 0.5
    bits: 0.5159 and 0.5625 bytes."""
    assert sum(quantised_bytes(10_000, double=True)) == pytest.approx(5159, abs=0.5)
    assert sum(quantised_bytes(10_000, double=False)) == 5625


def test_optimizer_states() -> None:
    """Two moments; bitsandbytes' 8-bit blocks of 256 carry two float32 scales."""
    assert state_bytes("adamw", 4) == 8
    assert state_bytes("adamw", 2) == 4
    assert state_bytes("adamw_8bit", 4) == 2 + 8 / 256


def test_kv_cache_of_a_token() -> None:
    """2 * layers * kv_heads * head_dim * 2 bytes."""
    assert kv_cache_bytes(LLAMA) == 2 * L * 8 * 128 * 2 == 131_072


@pytest.mark.parametrize(
    ("work", "backend", "ranks", "total"),
    [
        # 2 + 2 + 4 bytes, and AdamW's copy of 2: 10 bytes a parameter.
        (one_step(), Local(), 1, 10 * P),
        # 4 + 4 + 8 and a copy of 4: 20 bytes a parameter, over 4 ranks.
        (one_step(precision="fp32-master", global_batch=16), FSDP(), 4, 20 * P / 4),
        # The gradients' buckets are a second copy of them.
        (one_step(global_batch=8), DDP(), 2, 12 * P),
        # ZeRO, arXiv:1910.02054: 2P + 2P + 12P/N; float32 gradients and AdamW's copy of the shard,
        # and two buckets of h * h.
        (one_step(global_batch=32), DeepSpeed(zero_stage=1), 8, 4 * P + 20 * P / 8 + 4 * H * H),
        (one_step(global_batch=32), DeepSpeed(zero_stage=2), 8, 2 * P + 22 * P / 8 + 4 * H * H),
    ],
)
def test_peak_at_the_step(work: Work, backend: NamedBackend, ranks: int, total: float) -> None:
    found = plan(work, backend, ranks=ranks)
    assert found.phase == "step"
    assert found.total == pytest.approx(total + WORKSPACES + 24 * TOKENS, rel=1e-6)


@pytest.mark.parametrize(
    ("backend", "weights", "gradients", "optimizer"),
    [
        (DDP(), 2, 2, 4),
        (FSDP(), 2 / 8, 2 / 8, 4 / 8),
        (FSDP(sharding="grad_op"), 2 / 8, 2 / 8, 4 / 8),
        (FSDP(sharding="hybrid", shard_ranks=4), 2 / 4, 2 / 4, 4 / 4),
        (DeepSpeed(zero_stage=1), 2, 2, 12 / 8),
        (DeepSpeed(zero_stage=2), 2, 2 / 8, 12 / 8),
        (DeepSpeed(zero_stage=3), 2 / 8, 2 / 8, 12 / 8),
        (DeepSpeed(zero_stage=3, offload_optimizer="cpu"), 2 / 8, 0, 0),
        (FSDP(cpu_offload=True), 0, 0, 0),
    ],
)
def test_bytes_at_rest(
    backend: NamedBackend, weights: float, gradients: float, optimizer: float
) -> None:
    """The table of arXiv:1910.02054, section 3, for N = 8; plain bfloat16 under DDP and FSDP."""
    found = plan(one_step(), backend, ranks=8)
    assert found.weights == pytest.approx(weights * P)
    assert found.optimizer == pytest.approx(optimizer * P)
    assert found.resident == pytest.approx((weights + gradients + optimizer) * P, rel=1e-9)


def test_offload_moves_bytes_to_the_host() -> None:
    """DeepSpeed's estimators: 16 bytes a parameter for the optimizer, 18 with parameters, times
    1.5."""
    optimizer = DeepSpeed(zero_stage=3, offload_optimizer="cpu")
    both = DeepSpeed(zero_stage=3, offload_optimizer="cpu", offload_parameters="cpu")
    disk = DeepSpeed(
        zero_stage=3, offload_optimizer="nvme", offload_parameters="nvme", nvme_path=Path("disk")
    )
    assert plan(one_step(), optimizer, ranks=8).host_bytes == pytest.approx(1.5 * 16 * P)
    assert plan(one_step(), both, ranks=8).host_bytes == pytest.approx(1.5 * 18 * P)
    found = plan(one_step(), disk, ranks=8)
    assert found.disk_bytes == pytest.approx(18 * P)
    assert 0 < found.host_bytes < plan(one_step(), both, ranks=8).host_bytes


def test_backward_of_full_training() -> None:
    """Recomputed layer, fused norms: checkpoints 2hL; the MLP's product is the peak, where gate,
    silu(gate), up and the gradients of product, silu(gate) and up are alive (12f), with the inputs
    of q/k/v and gate/up, the attention's q, k, v and output, the middle and the last hidden state
    and its gradient, one float32 a head, and the statistics of two norms."""
    work = one_step(precision="fp32-master", global_batch=64, fsdp_version=1)
    found = plan(work, FSDP(), ranks=4, micro_batch_size=16)
    tokens = 16 * 4096
    layer = 12 * F + 2 * (7 * H + 2 * KV) + 4 * 32 + 2 * 4
    assert found.phase == "backward"
    assert found.activations == pytest.approx((2 * H * L + layer) * tokens, rel=2e-3)


def test_backward_of_adapters_with_dropout() -> None:
    """As above without the inputs of trained weights (10h + 4 * 1024), and for each of four
    adapters its input, a mask of one byte (3h) and the product of rank 16 (32 bytes)."""
    found = plan(one_step(method="lora", lora_targets="attention"))
    layer = 12 * F + 2 * (5 * H + 2 * KV) + 4 * (3 * H + 32) + 4 * 32 + 2 * 4
    assert found.phase == "backward"
    assert found.activations == (2 * H * L + layer) * TOKENS
    dry = plan(one_step(method="lora", lora_targets="attention", lora_dropout=0.0))
    assert found.activations - dry.activations == 4 * H * TOKENS


def test_logits_of_the_losses() -> None:
    """Bytes a token at the loss: log-probabilities, their gradient and that of the logits in
    float32 (12V) in plain PyTorch; float32 logits and their shifted copy (8V) before a fused
    kernel; a tile at a time in a chunked one."""
    sizes = {
        loss: plan(one_step(method="lora", lora_targets="attention", loss=loss, fused_norms=True))
        for loss in ("hf", "fused")
    }
    assert sizes["hf"].logits == pytest.approx(12 * V * TOKENS, rel=0.02)
    assert sizes["fused"].logits == pytest.approx((8 * V + 4 * H) * TOKENS, rel=0.002)
    chunked = plan(one_step(method="lora", loss="chunked"))
    assert chunked.phase == "backward"


def test_fsdp_1_retains_inputs_of_frozen_layers_and_fsdp_2_does_not() -> None:
    """2h a token for each of L - 2 gradients, beside the checkpoints; seen in the first and not in
    the second, whose early gather is a layer instead."""
    one = plan(one_step(method="lora", global_batch=8, fsdp_version=1), FSDP(), ranks=2)
    two = plan(one_step(method="lora", global_batch=8), FSDP(), ranks=2)
    assert one.activations - two.activations == 2 * H * (L - 2) * TOKENS


def test_a_preference_pair_doubles_the_tokens_and_may_hold_a_reference() -> None:
    sft = plan(one_step(method="lora"))
    dpo = plan(one_step(method="lora", stage="dpo"))
    assert dpo.activations == 2 * sft.activations
    assert dpo.weights == sft.weights
    resident = plan(one_step(stage="dpo"))
    cached = plan(one_step(stage="dpo", reference="cached"))
    assert resident.weights - cached.weights == 2 * P


def test_ppo_holds_four_models_and_a_cache() -> None:
    """Policy and critic are trained; reference and reward model are frozen, in 2 bytes."""
    found = plan(one_step(stage="ppo"))
    assert found.weights == (2 + 2 + 2 + 2) * P
    assert found.optimizer == 2 * 4 * P
    assert plan(one_step(stage="ppo", reward_models=0)).weights == (2 + 2 + 2) * P
    assert plan(one_step(stage="grpo", reward_models=1)).weights == (2 + 2 + 2) * P
    assert plan(one_step(stage="grpo", reference="none")).weights == 2 * P
    grpo = plan(one_step(stage="grpo", method="qlora", seq_length=65_536, optimizer="adamw"))
    short = plan(one_step(stage="grpo", method="qlora", new_tokens=1024))
    assert short == plan(one_step(stage="grpo", method="qlora", new_tokens=2048))
    assert grpo.total > short.total


def test_ppos_models_are_one_module_whose_roots_are_gathered_together() -> None:
    """Of three models the head, in two bytes, beside what two ranks divide; under shard-grad-op
    every layer of all three."""

    def buffers(sharding: Any, reference: Any) -> int:
        work = one_step(stage="ppo", reference=reference, method="lora", new_tokens=2048)
        return plan(work, FSDP(sharding=sharding), ranks=2).buffers

    for sharding, whole in (("full", V * H), ("grad_op", P - V * H)):
        more = buffers(sharding, "resident") - buffers(sharding, "adapter_base")
        assert more == pytest.approx(2 * whole, rel=0.001)


def test_answers_that_are_written_at_once_fill_the_cache() -> None:
    """GRPO writes all of a rank's step together, PPO those of four micro-batches."""
    wide = replace(LLAMA, num_kv_heads=32)
    cache = kv_cache_bytes(wide) * 65_536
    work = one_step(method="lora", seq_length=65_536, loss="chunked", reward_models=0)

    def buffers(stage: Any, rows: int) -> int:
        asked = replace(work, stage=stage, global_batch=rows, new_tokens=1)
        given = Resources(device="cuda", micro_batch_size=4, gradient_checkpointing=True)
        return memory(wide, asked, Setup(Local(), given)).buffers

    assert buffers("grpo", 32) - buffers("grpo", 16) == pytest.approx(16 * cache, rel=0.01)
    assert buffers("ppo", 32) == pytest.approx(PPO_WRITES * 4 * cache, rel=0.02)
    assert PPO_WRITES == GENERATED_TOGETHER


def test_checkpointing_offloading_and_eager_attention() -> None:
    work = one_step(method="lora", loss="hf")
    recomputed = plan(work)
    kept = plan(work, gradient_checkpointing=False)
    eager = plan(replace(work, attention="eager"), gradient_checkpointing=False)
    away = plan(work, activation_offloading=True)
    assert recomputed.total < kept.total < eager.total
    assert away.total < recomputed.total
    assert away.host_bytes == 2 * H * (L - 2) * TOKENS


def test_accumulated_gradients_are_there_at_the_loss() -> None:
    alone = plan(one_step(loss="hf", optimizer="adamw_8bit"))
    more = plan(one_step(loss="hf", optimizer="adamw_8bit", global_batch=8))
    assert more.total > alone.total


def test_replay_follows_autograd() -> None:
    """x -> silu saves its input, the product both factors: 12 bytes at the product's backward."""
    tape = Tape()
    x = tape.value(2)
    gate = tape.run((x,), 2)
    acted = tape.run((gate,), 2, saved=(gate,))
    up = tape.run((x,), 2)
    tape.run((acted, up), 2, saved=(acted, up))
    found = replay(tape, input_is_kept=True, output_is_kept=False)
    assert found.saved == 6
    assert found.backward == 6 + 2 + 2 + 2


def test_replay_counts_what_is_saved_beside_the_values() -> None:
    tape = Tape()
    x = tape.value(2)
    dropped = tape.run((x,), 2, saved_bytes=1)
    tape.run((dropped,), 2, saved=(dropped,))
    found = replay(tape, input_is_kept=False, output_is_kept=False)
    assert found.saved == 2 + 1
    assert found.backward == 2 + 1 + 2 + 2  # the gradients of the output and of `dropped`


def test_replay_lets_go_of_what_was_saved() -> None:
    tape = Tape()
    x = tape.value(10)
    narrow = tape.run((x,), 2)
    tape.run((narrow,), 2, saved_bytes=5)
    found = replay(tape, input_is_kept=True, output_is_kept=False)
    assert found.backward == 2 + 10  # the gradients of `narrow` and of the input


# -- What must always hold -------------------------------------------------------------------------

MODELS = ("Llama-3.2-1B", "Qwen3-8B", "Mixtral-8x7B-v0.1", "gemma-2-2b", "phi-2", "Qwen2.5-3B")
WORKS = st.builds(
    Work,
    stage=st.sampled_from(["sft", "dpo", "reward", "ppo", "grpo"]),
    method=st.sampled_from(["full", "lora", "dora", "qlora"]),
    lora_rank=st.sampled_from([4, 16, 64]),
    lora_targets=st.sampled_from(["all", "attention"]),
    precision=st.sampled_from(["bf16", "fp32-master", "fp32"]),
    loss=st.sampled_from(["hf", "fused", "chunked"]),
    optimizer=st.sampled_from(["adamw", "adamw_8bit", "paged_adamw_8bit"]),
    seq_length=st.integers(16, 32_768),
    fused_kernels=st.booleans(),
    fused_norms=st.sampled_from([None, True, False]),
    fused_mlp=st.booleans(),
    attention=st.sampled_from(["flash", "eager"]),
    fsdp_version=st.sampled_from([1, 2]),
    lora_dropout=st.sampled_from([0.0, 0.05]),
)
SHARDED: list[NamedBackend] = [
    FSDP(),
    FSDP(sharding="grad_op"),
    FSDP(cpu_offload=True),
    FSDP(whole_embedding=True),
    DeepSpeed(zero_stage=1),
    DeepSpeed(zero_stage=2),
    DeepSpeed(zero_stage=3),
    DeepSpeed(zero_stage=2, offload_optimizer="cpu"),
    DeepSpeed(zero_stage=3, offload_optimizer="cpu", offload_parameters="cpu"),
]


def of(model: Model, work: Work, backend: NamedBackend, ranks: int, **resources: Any) -> Memory:
    resources = {"micro_batch_size": 2, "device": "cuda"} | resources
    return memory(model, work, Setup(backend, Resources(ranks_per_node=ranks, **resources)))


@settings(max_examples=150, deadline=None)
@given(
    name=st.sampled_from(MODELS),
    work=WORKS,
    backend=st.sampled_from([DDP(), *SHARDED]),
    ranks=st.sampled_from([2, 4, 8]),
    recompute=st.booleans(),
)
def test_the_parts_sum_to_the_peak_and_none_is_negative(
    name: str, work: Work, backend: NamedBackend, ranks: int, recompute: bool
) -> None:
    found = of(find_model(name), work, backend, ranks, gradient_checkpointing=recompute)
    parts = [getattr(found, part) for part in PARTS]
    assert sum(parts) == found.total
    assert min(parts) >= 0
    assert all(isinstance(getattr(found, f.name), int | str) for f in fields(found))


@settings(max_examples=150, deadline=None)
@given(
    name=st.sampled_from(MODELS),
    work=WORKS,
    backend=st.sampled_from([DDP(), *SHARDED]),
    ranks=st.sampled_from([2, 4, 16]),
    recompute=st.booleans(),
)
def test_more_gpus_never_need_more_memory_each(
    name: str, work: Work, backend: NamedBackend, ranks: int, recompute: bool
) -> None:
    model = find_model(name)
    few, many = (
        of(model, work, backend, count, gradient_checkpointing=recompute)
        for count in (ranks, 2 * ranks)
    )
    assert many.total <= few.total


@settings(max_examples=150, deadline=None)
@given(
    name=st.sampled_from(MODELS),
    work=WORKS,
    backend=st.sampled_from([DDP(), *SHARDED]),
    more=st.integers(1, 4096),
    recompute=st.booleans(),
)
def test_longer_sequences_never_need_less(
    name: str, work: Work, backend: NamedBackend, more: int, recompute: bool
) -> None:
    model = find_model(name)
    longer = replace(work, seq_length=work.seq_length + more)
    short, long = (
        of(model, each, backend, 4, gradient_checkpointing=recompute) for each in (work, longer)
    )
    assert long.total >= short.total


# -- The command -----------------------------------------------------------------------------------

QUESTION = ("-m", "backends.planner", "estimate", "--model", "Llama-3-8B", "--gpus", "4xA100-80GB")


def test_estimate_answers_in_json_without_torch() -> None:
    options = (
        "--backend fsdp --method lora --precision bf16 --loss fused --micro-batch 4 --seq 4096 "
        "--lora-rank 16 --lora-targets attention --json"
    )
    done = python(*QUESTION, *options.split())
    found = json.loads(done.stdout)
    assert found["peak_bytes_per_gpu"]["total"] == pytest.approx(27_551_078_912, rel=0.005)
    assert found["peak_bytes_per_gpu"].keys() == {"total", *PARTS}
    assert found["phase"] == "loss"
    assert found["fits"] is True
    assert found["step_seconds"] > 0


def test_the_planner_loads_no_torch() -> None:
    code = (
        "import sys; from backends.planner import estimate; "
        "sys.exit(any(name in sys.modules for name in ('torch', 'transformers', 'numpy')))"
    )
    assert python("-c", code).returncode == 0


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (("--backend", "zero9"), "zero9.*did you mean zero"),
        (("--backend", "fsdp", "--zero-stage", "2"), "belongs to --backend deepspeed"),
        (("--backend", "local"), "one process, but 4 ranks"),
        (("--backend", "fsdp", "--micro-batch", "0"), "at least 1"),
        (("--backend", "fsdp", "--seq", "-5"), "at least 1"),
        (("--backend", "fsdp", "--method", "loraa"), "did you mean lora"),
    ],
)
def test_a_question_that_cannot_be_meant_is_one_line(
    options: tuple[str, ...], message: str
) -> None:
    done = python(*QUESTION, *options)
    assert done.returncode == 2
    assert done.stderr.count("\n") == 1
    assert re.search(message, done.stderr)
