"""The planner's bytes against bytes that were measured: fake tensors, real ranks, public runs."""

import warnings
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from pathlib import Path
from statistics import median
from typing import Any

import pytest

from backends import DDP, FSDP, DeepSpeed, Local, NamedBackend, Resources
from backends.planner.memory import memory, num_adapter_parameters
from backends.planner.model import find_model, read_config
from backends.planner.work import Method, Setup, Work
from tests.benchmarks import bench_planner_memory as bench
from tests.small import Run, run_jobs

ROWS, SEQUENCE = 4, 512
SHAPE = {
    "hidden_size": 256,
    "intermediate_size": 688,
    "num_hidden_layers": 2,
    "num_attention_heads": 8,
    "num_key_value_heads": 2,
    "vocab_size": 6000,
    "max_position_embeddings": SEQUENCE,
    "tie_word_embeddings": False,
}
EXPERTS = {"num_experts": 8, "num_experts_per_tok": 2, "moe_intermediate_size": 256}
CONFIGS: dict[str, dict[str, Any]] = {
    "llama": {"model_type": "llama", **SHAPE},
    "qwen": {"model_type": "qwen3", "head_dim": 32, **SHAPE},
    "mistral": {"model_type": "mistral", "sliding_window": None, **SHAPE},
    "mixture": {"model_type": "qwen3_moe", "head_dim": 32, **EXPERTS, **SHAPE},
    "tied": {"model_type": "llama", **SHAPE, "tie_word_embeddings": True},
}
JOINED: dict[str, dict[str, Any]] = {
    "phi3": {"model_type": "phi3", "pad_token_id": 0, **SHAPE},
    "gpt_neox": {"model_type": "gpt_neox", **SHAPE},
    "gpt2": {"model_type": "gpt2", "n_embd": 64, "n_layer": 2, "n_head": 4, "vocab_size": 600},
    "bloom": {
        "model_type": "bloom",
        "hidden_size": 64,
        "n_layer": 2,
        "n_head": 4,
        "vocab_size": 600,
    },
}
"""Architectures with queries, keys and values in one module."""


def causal(
    module: Any, query: Any, key: Any, value: Any, mask: Any, scaling: Any = None, **_: Any
) -> tuple[Any, None]:
    """What flash attention does on a GPU: grouped heads, no mask tensor."""
    from torch.nn.functional import scaled_dot_product_attention

    grouped = query.shape[1] != key.shape[1]
    out = scaled_dot_product_attention(
        query, key, value, is_causal=True, scale=scaling, enable_gqa=grouped
    )
    return out.transpose(1, 2).contiguous(), None


def build(config: dict[str, Any], *, lora: bool, precision: str) -> Any:
    import torch
    from transformers import AttentionInterface, AutoConfig, AutoModelForCausalLM

    AttentionInterface.register("causal", causal)
    fields = dict(config)
    shape = AutoConfig.for_model(fields.pop("model_type"), **fields, use_cache=False)
    dtype = torch.float32 if precision == "fp32-master" else torch.bfloat16
    model = AutoModelForCausalLM.from_config(shape, attn_implementation="causal", dtype=dtype)
    if "num_experts" in config:
        model.set_experts_implementation("grouped_mm")
    if not lora:
        return model.train()
    from peft import LoraConfig, get_peft_model

    adapters = LoraConfig(r=16, target_modules="all-linear", task_type="CAUSAL_LM")
    return get_peft_model(model, adapters).train()


def make_fake(model: Any, mode: Any) -> None:
    from torch import nn

    made: dict[Any, Any] = {}
    for module in model.modules():
        for name, parameter in list(module._parameters.items()):
            if parameter is not None:
                fake = nn.Parameter(mode.from_tensor(parameter.detach()))
                module._parameters[name] = made.setdefault(parameter, fake)
        for name, buffer in list(module._buffers.items()):
            if buffer is not None:
                module._buffers[name] = mode.from_tensor(buffer)


def tracker() -> Any:
    from torch.distributed._tools.mem_tracker import MemTracker

    class Tracker(MemTracker):
        """Takes frozen weights, which have no gradient to hook on to."""

        def _track_module_params_and_buffers(
            self, module: Any, install_grad_hooks: bool = True
        ) -> Any:
            return super()._track_module_params_and_buffers(module, install_grad_hooks=False)

    return Tracker()


@contextmanager
def quiet() -> Iterator[None]:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        yield


def peak_of_a_step(config: dict[str, Any], *, lora: bool, precision: str, recompute: bool) -> int:
    """Bytes at the peak of the second step: forward, backward, AdamW."""
    import torch
    from torch._subclasses.fake_tensor import FakeTensorMode

    model = build(config, lora=lora, precision=precision)
    mode = nullcontext() if lora else FakeTensorMode(allow_non_fake_inputs=True)
    if not lora:
        make_fake(model, mode)
    if recompute:
        model.gradient_checkpointing_enable({"use_reentrant": True})
        model.enable_input_require_grads()
    trained = [each for each in model.parameters() if each.requires_grad]
    autocast = lora or precision == "fp32-master"
    with mode:
        optimizer = torch.optim.AdamW(trained, foreach=True)
        tracked = tracker()
        tracked.track_external(model, optimizer)
        with tracked, quiet():
            for _ in range(2):
                tracked.reset_mod_stats()
                ids = torch.randint(0, config["vocab_size"], (ROWS, SEQUENCE))
                with torch.autocast("cpu", torch.bfloat16, enabled=autocast):
                    loss = model(input_ids=ids, labels=ids).loss
                loss.backward()
                del loss
                optimizer.step()
                optimizer.zero_grad()
        return tracked.get_tracker_snapshot("peak")[torch.device("cpu")]["Total"]


@pytest.mark.parametrize("name", JOINED)
def test_a_joined_module_has_one_adapter(name: str) -> None:
    import torch

    config = JOINED[name]
    with torch.device("meta"):
        model = build(config, lora=True, precision="bf16")
    made = sum(p.numel() for n, p in model.named_parameters() if "lora_" in n)
    assert num_adapter_parameters(read_config(config, name=name), Work(method="lora")) == made


@pytest.mark.parametrize(
    ("name", "lora", "precision", "recompute"),
    [
        *((name, False, "bf16", True) for name in CONFIGS),
        *((name, True, "bf16", True) for name in CONFIGS),
        ("llama", False, "bf16", False),
        ("llama", True, "bf16", False),
        ("mixture", False, "bf16", False),
        ("phi3", False, "bf16", False),
        pytest.param("phi3", True, "bf16", False, marks=pytest.mark.slow),
        pytest.param("gpt_neox", True, "bf16", False, marks=pytest.mark.slow),
        ("llama", False, "fp32-master", True),
        ("llama", False, "fp32-master", False),
        ("llama", True, "fp32-master", False),
    ],
)
def test_planned_peak_is_within_two_percent_of_a_real_training_step(
    name: str, lora: bool, precision: Any, recompute: bool
) -> None:
    config = (CONFIGS | JOINED)[name]
    measured = peak_of_a_step(config, lora=lora, precision=precision, recompute=recompute)
    work = Work(
        method="lora" if lora else "full",
        precision=precision,
        loss="hf",
        seq_length=SEQUENCE,
        global_batch=ROWS,
        lora_dropout=0.0,
    )
    resources = Resources(micro_batch_size=ROWS, gradient_checkpointing=recompute)
    model = read_config(config, name=name)
    planned = memory(model, work, Setup(Local(), resources)).total
    assert planned == pytest.approx(measured, rel=0.02)


def actor_critic(config: dict[str, Any], *, precision: str, recompute: bool) -> Any:
    """A policy whose reference costs nothing, and its critic: of a tied model as large as it."""
    import torch
    from transformers import AutoConfig, AutoModelForSequenceClassification

    from stages.rl.actor_critic import ActorCritic

    policy = build(config, lora=False, precision=precision)
    fields = dict(config)
    shape = AutoConfig.for_model(fields.pop("model_type"), **fields, use_cache=False, num_labels=1)
    dtype = torch.float32 if precision == "fp32-master" else torch.bfloat16
    critic = AutoModelForSequenceClassification.from_config(
        shape, attn_implementation="causal", dtype=dtype
    )
    for model in (policy, critic.train()):
        if recompute:
            model.gradient_checkpointing_enable({"use_reentrant": False})
    return ActorCritic(policy, critic, None)


def peak_of_an_update(
    config: dict[str, Any], answer: int, *, precision: str, recompute: bool
) -> int:
    """Bytes at the peak of PPO's second step: answers of ``answer`` tokens behind their prompts."""
    import torch

    from stages.rl.actor_critic import Batch

    module = actor_critic(config, precision=precision, recompute=recompute)
    optimizer = torch.optim.AdamW(module.parameters(), foreach=True)
    tracked = tracker()
    tracked.track_external(module, optimizer)
    before = torch.arange(SEQUENCE - answer - 1, SEQUENCE - 1).expand(ROWS, answer).contiguous()
    with tracked, quiet():
        for _ in range(2):
            tracked.reset_mod_stats()
            ids = torch.randint(0, config["vocab_size"], (ROWS, SEQUENCE))
            batch = Batch(ids, before, torch.ones(ROWS, answer))
            with torch.autocast("cpu", torch.bfloat16, enabled=precision == "fp32-master"):
                found = module("learners", batch, temperature=1.0, entropy="told")
                loss = found[0].exp().sum() + found[2].square().sum()
            loss.backward()
            del loss, found
            optimizer.step()
            optimizer.zero_grad()
    return tracked.get_tracker_snapshot("peak")[torch.device("cpu")]["Total"]


@pytest.mark.parametrize(
    ("answer", "recompute", "precision"),
    [(256, True, "bf16"), (256, False, "fp32-master"), (64, True, "bf16")],
)
def test_planned_peak_of_ppo_is_within_two_percent_of_a_real_update(
    answer: int, recompute: bool, precision: Any
) -> None:
    """Its logits are whole, and policy and critic wait for each other."""
    config = CONFIGS["tied"]
    measured = peak_of_an_update(config, answer, precision=precision, recompute=recompute)
    work = Work(
        stage="ppo",
        precision=precision,
        reference="adapter_base",
        reward_models=0,
        seq_length=SEQUENCE,
        new_tokens=answer,
        global_batch=ROWS,
        fused_norms=False,
        reentrant=False,
    )
    resources = Resources(micro_batch_size=ROWS, gradient_checkpointing=recompute)
    planned = memory(read_config(config, name="tied"), work, Setup(Local(), resources)).total
    assert planned == pytest.approx(measured, rel=0.02)


TWO = Resources(ranks_per_node=2)
BACKENDS: dict[str, NamedBackend] = {
    "ddp": DDP(),
    "fsdp": FSDP(),
    "zero1": DeepSpeed(zero_stage=1),
    "zero2": DeepSpeed(zero_stage=2),
    "zero3": DeepSpeed(zero_stage=3),
}


NAMES = [
    pytest.param(name, marks=pytest.mark.slow if name in ("ddp", "zero1", "zero2") else ())
    for name in BACKENDS
]


@pytest.mark.parametrize("name", NAMES)
def test_two_real_ranks_hold_what_was_planned(name: str, small: Path, tmp_path: Path) -> None:
    """Weights and optimizer state of each rank, with ZeRO's float32 copies, after real steps."""
    methods: tuple[Method, ...] = ("full", "lora")
    runs = [
        Run(
            out=tmp_path / method,
            stage="sft",
            config={"global_batch_size": 8, "max_steps": 2, "method": {"kind": method}},
            inputs={"model": small / "untied", "data": small / "data"},
            backend=BACKENDS[name],
            resources=TWO,
        )
        for method in methods
    ]
    run_jobs(runs)
    model = find_model(str(small / "untied" / "model"))
    for method, run in zip(methods, runs, strict=True):
        work = Work(method=method, precision="fp32", seq_length=128, global_batch=8)
        resources = Resources(ranks_per_node=2, micro_batch_size=4)
        planned = memory(model, work, Setup(BACKENDS[name], resources))
        for rank in run.ranks:
            assert planned.weights == pytest.approx(rank["parameter_bytes"], rel=0.02)
            assert planned.optimizer == pytest.approx(rank["optimizer_bytes"], rel=0.02)


def test_published_exact_peaks() -> None:
    if not bench.FOLDER.is_dir():
        pytest.skip("the measured rows are not beside this project")
    rows = list(map(bench.exact, bench.read("exact_llama3_8b.csv")))
    errors = [abs(row.planned.total / row.measured - 1) for row in rows if row.measured]
    assert len(errors) == len(rows)
    assert median(errors) <= 0.005
    assert max(errors) <= 0.02
