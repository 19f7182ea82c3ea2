"""What the planner's two commands answer, to questions that people ask and to slips of the pen."""

import json
import re
from collections.abc import Callable
from dataclasses import replace
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest

from backends import DDP, FSDP, DeepSpeed, NamedBackend, Resources
from backends.planner import ranking, seconds
from backends.planner.__main__ import main
from backends.planner.block import Layer, replay_layer, replay_loss
from backends.planner.hardware import GB, Link, Machine, find_machine
from backends.planner.memory import memory
from backends.planner.model import find_model, read_config
from backends.planner.ranking import describe, ladder, options
from backends.planner.seconds import step_time
from backends.planner.table import warnings
from backends.planner.work import Setup, Work
from tests.small import ROOT

QWEN = "Qwen/Qwen3-8B"
Asked = tuple[int, str, str]
Ask = Callable[..., Asked]


@pytest.fixture
def ask(capsys: pytest.CaptureFixture[str]) -> Ask:
    """(exit code, stdout, stderr) of the command with these words."""

    def run(*words: str) -> Asked:
        try:
            code = main(words)
        except SystemExit as stop:
            code = int(stop.code or 0)
        out, err = capsys.readouterr()
        return code, out, err

    return run


@pytest.fixture
def estimate(ask: Ask) -> Callable[..., dict[str, Any]]:
    def run(*words: str, model: str = QWEN, gpus: str = "2xH100") -> dict[str, Any]:
        code, out, err = ask("estimate", "--model", model, "--gpus", gpus, "--json", *words)
        assert (code, err) == (0, "")
        return json.loads(out)

    return run


def setup(backend: NamedBackend, ranks: int = 2, *, nodes: int = 1, micro: int = 1) -> Setup:
    resources = Resources(
        nodes=nodes,
        ranks_per_node=ranks,
        device="cuda",
        micro_batch_size=micro,
        gradient_checkpointing=True,
    )
    return Setup(backend, resources)


# -- Offload ---------------------------------------------------------------------------------------


@pytest.mark.parametrize("stage", ["sft", "dpo", "ppo", "grpo"])
@pytest.mark.parametrize("method", ["full", "lora", "qlora"])
@pytest.mark.parametrize("offload", [False, True])
def test_one_gpu_never_needs_less_than_two(stage: Any, method: Any, offload: bool) -> None:
    """Under offload the layer at work, the root unit and, to write answers, the whole model are on
    the GPU whatever the number of ranks."""
    work, model = Work(stage=stage, method=method, seq_length=1024), find_model(QWEN)
    for sharding in ("full", "grad_op"):
        backend = FSDP(sharding=sharding, cpu_offload=offload)
        one, two = (memory(model, work, setup(backend, ranks)).total for ranks in (1, 2))
        assert one >= two


def test_answers_of_a_model_larger_than_the_gpu_do_not_fit(estimate: Any) -> None:
    found = estimate(
        *("--backend", "fsdp:offload", "--method", "lora", "--stage", "grpo", "--seq", "2048"),
        model="meta-llama/Llama-2-70b-hf",
        gpus="1xH100",
    )
    assert not found["fits"] and found["short_of"] == "GPU memory"
    assert found["peak_bytes_per_gpu"]["buffers"] > 2 * 68.9e9


@pytest.mark.parametrize("backend", ["fsdp:offload", "zero3:offload-all", "zero3:nvme"])
def test_every_model_of_a_stage_is_offloaded_and_copied(backend: str, estimate: Any) -> None:
    def asked(*words: str) -> tuple[float, float]:
        found = estimate("--backend", backend, *words, "--seq", "1024", "--micro-batch", "1")
        away = found["host_bytes"] + found["disk_bytes"]
        return away, found["step_split_seconds"]["offload"]

    sft, dpo, ppo = (asked("--stage", stage) for stage in ("sft", "dpo", "ppo"))
    cached = asked("--stage", "dpo", "--reference", "cached")
    assert sft[0] == cached[0] < dpo[0] < ppo[0]
    assert cached[1] < dpo[1] < ppo[1]
    assert ppo[1] > 1.9 * sft[1]  # policy and critic, and two frozen models


def test_a_critic_is_offloaded_as_the_policy_is_by_hand() -> None:
    """DeepSpeed: 18 bytes a parameter of two trained models, 2 of the reference, times 1.5. The
    reward model stays whole on every GPU."""
    model = find_model(QWEN)
    both = DeepSpeed(zero_stage=3, offload_optimizer="cpu", offload_parameters="cpu")
    found = memory(model, Work(stage="ppo"), setup(both))
    assert found.host_bytes == pytest.approx(1.5 * (2 * 18 + 2) * model.num_parameters)
    paid_by_functions = memory(model, Work(stage="ppo", reward_models=0), setup(both))
    assert found.weights - paid_by_functions.weights == 2 * model.num_parameters


def test_a_share_of_host_memory_is_the_systems() -> None:
    model, work = find_model(QWEN), Work(precision="fp32-master", seq_length=512)
    given = setup(FSDP(cpu_offload=True))
    need = memory(model, work, given).host_bytes
    tight = find_machine("2xH100", host_memory=need / 0.96)
    ample = find_machine("2xH100", host_memory=need / 0.89)
    verdicts = [ranking.judge(model, work, given, each).fits for each in (tight, ample)]
    assert verdicts == [False, True]


# -- estimate --------------------------------------------------------------------------------------


def test_estimate_says_what_is_refused_and_keeps_the_numbers(estimate: Any, ask: Ask) -> None:
    found = estimate("--backend", "zero3", "--method", "qlora")
    assert found["refused"].startswith("ZeRO-3 does not shard a 4-bit base")
    assert found["fits"] is False and found["short_by_bytes"] == 0
    assert found["peak_bytes_per_gpu"]["total"] > 0
    assert estimate("--backend", "fsdp", "--method", "qlora")["refused"] is None
    words = ("estimate", "--model", QWEN, "--gpus", "2xH100", "--backend", "zero3")
    _, out, _ = ask(*words, "--method", "qlora")
    assert "\nrefused: ZeRO-3 does not shard" in out and "would fit, but is refused" in out
    code, out, err = ask(*words, "--reference", "cached")
    assert (code, out) == (2, "") and "has no reference model" in err


def test_two_answers_to_one_question_can_be_reconciled(estimate: Any, ask: Ask) -> None:
    words = ("--method", "lora", "--seq", "4096")
    found = estimate("--backend", "fsdp", *words)
    assert any(each.startswith("FSDP 1") for each in found["assumed"])
    assert any("host memory" in each for each in found["assumed"])
    assert any("nvlink" in each for each in found["assumed"])
    _, out, _ = ask("--model", QWEN, "--gpus", "2xH100", "--json", "--global-batch", "2", *words)
    ranked = {each["backend"]: each for each in json.loads(out)}
    assert "FSDP 2" in ranked["FSDP full"]["assumed"]
    recompute = () if ranked["FSDP full"]["gradient_checkpointing"] else ("--no-checkpointing",)
    same = estimate("--backend", "fsdp", "--fsdp-version", "2", *words, *recompute)
    assert same["peak_bytes_per_gpu"] == ranked["FSDP full"]["peak_bytes_per_gpu"]
    zero = estimate("--backend", "zero2", *words)
    assert any("buckets of unknown size" in each for each in zero["assumed"])


def test_estimate_takes_what_the_machine_has(estimate: Any, ask: Ask) -> None:
    offload = ("--backend", "fsdp:offload", "--seq", "512")
    poor = estimate(*offload, "--host-memory", "64")
    assert not poor["fits"] and poor["short_of"] == "host memory"
    assert estimate(*offload, "--host-memory", "512")["fits"]
    fast, slow = (
        estimate("--backend", "fsdp", "--tflops", rate)["step_seconds"] for rate in ("400", "100")
    )
    assert slow > 2 * fast
    _, out, _ = ask(
        "estimate", "--model", QWEN, "--gpus", "2xH100", *offload, "--host-memory", "64"
    )
    assert re.search(r"does not fit: [0-9.]+ GB of host memory short", out)
    assert estimate("--backend", "zero3:nvme", "--nvme", "/fast")["ignored"] == []


def test_what_changes_nothing_is_said(estimate: Any, ask: Ask) -> None:
    found = estimate("--backend", "ddp", "--lora-rank", "8", "--nvme", "/fast")
    assert [each.split()[0] for each in found["ignored"]] == ["--lora-rank", "--nvme"]
    varied = estimate("--backend", "ddp", "--no-packing")
    plain = estimate("--backend", "ddp")
    assert varied["reserved_bytes_per_gpu"] > plain["reserved_bytes_per_gpu"]
    assert varied["peak_bytes_per_gpu"] == plain["peak_bytes_per_gpu"]


# -- Mixtures --------------------------------------------------------------------------------------


def test_experts_in_a_loop_take_most_of_a_published_step() -> None:
    """Qwen3-30B-A3B under ZeRO-3 on 16 A800, rows of 8192: 91.2 s (Megatron-SWIFT)."""
    model, machine = find_model("Qwen/Qwen3-30B-A3B"), find_machine("2x8xA800")
    work = Work(precision="fp32-master", seq_length=8192, global_batch=16)
    given = setup(DeepSpeed(zero_stage=3), 8, nodes=2)
    loop = step_time(model, work, given, machine)
    assert loop.seconds == pytest.approx(91.2, rel=0.25)
    assert loop.binds == "expert dispatch"
    grouped = step_time(model, replace(work, experts="grouped"), given, machine)
    assert grouped.seconds < loop.seconds / 4
    dense = find_model(QWEN)
    times = {
        step_time(dense, replace(work, experts=how), given, machine).seconds
        for how in ("loop", "grouped")
    }
    assert len(times) == 1


# -- Rates and names -------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("text", "rate"),
    [
        ("50", 50),
        ("50GB/s", 50),
        ("12.5 GB/s", 12.5),
        ("400Gb/s", 50),
        ("400Gbit/s", 50),
        ("25gbps", 3.125),
        ("64Gbps", 8),
        (".5", 0.5),
    ],
)
def test_lower_case_b_is_bits(text: str, rate: float) -> None:
    assert find_machine("2xA100", text).link.bytes_per_second == pytest.approx(rate * GB)
    assert find_machine("2x2xA100", network=text).network.bytes_per_second == rate * GB


@pytest.mark.parametrize("text", ["25gb/s", "25GBPS", "25GB", "25gb", ".", "1e300", "1e-300", "-1"])
@pytest.mark.parametrize("option", ["--link", "--network"])
def test_a_rate_that_says_nothing_is_refused(text: str, option: str, ask: Ask) -> None:
    code, out, err = ask("--model", QWEN, "--gpus", "2xA100", f"{option}={text}")
    assert (code, out, err.count("\n")) == (2, "", 1)


SLIPS = {
    "--seq ²": "whole number",
    "--seq 1e300": "whole number",
    f"--seq {'9' * 400}": "is more than",
    "--tflops 1e300": "is not between",
    "--host-memory 1e300": "is not between",
    "--margin-gb 1e300": "is not between",
    "--margin-gb nan": "is not between",
    "--global-batch 7": "the nearest that does is 8",
    "--backend zero3": "estimate",
    "--micro-batch 2": "estimate",
    "--lora-rank 8": "belongs to adapters",
    "--new-tokens 8": "belongs to ppo and grpo",
    "--passes 2": "belongs to ppo and grpo",
    "--reward-models 0": "belongs to ppo and grpo",
    "--epochs 2": "without --rows",
    "--network ethernet-25": "joins nodes",
    "--experts grouped": "belongs to mixtures",
    "--stage reward --loss hf": "stage reward has its own",
    "--stage ppo --loss fused": "stage ppo has its own",
    "--method lora --nvme /fast": "is for full training",
}


@pytest.mark.parametrize("words", SLIPS)
def test_a_slip_is_one_line(words: str, ask: Ask) -> None:
    code, out, err = ask("--model", QWEN, "--gpus", "8xH100", *words.split())
    assert (code, out, err.count("\n")) == (2, "", 1)
    assert SLIPS[words] in err


def test_an_option_of_the_other_command_is_led_there(ask: Ask) -> None:
    code, _, err = ask("estimate", "--model", QWEN, "--gpus", "8xH100", "--global-batch", "64")
    assert code == 2 and "estimate has --micro-batch and --accumulation" in err


def test_what_changes_nothing_in_an_estimate_is_listed(estimate: Any) -> None:
    words = "--network ethernet-10 --experts grouped --buckets auto --stage reward --loss hf"
    ignored = estimate("--backend", "zero3", *words.split())["ignored"]
    named = [each.split()[0] for each in ignored]
    assert named == ["--network", "--experts", "--loss", "--buckets"]


@pytest.mark.parametrize(
    ("gpus", "said"),
    [
        ("8x24", "24GB"),
        ("8x...GB", "not known"),
        ("8x99999999GB", "more than any"),
        ("²xH100", ""),
        ("8 H100", "did you mean 8xh100?"),
        ("H100x8", "did you mean 8xh100?"),
        ("RTX 4099", "give its memory"),
    ],
)
def test_gpus_that_are_not(gpus: str, said: str, ask: Ask) -> None:
    code, out, err = ask("--model", QWEN, "--gpus", gpus)
    assert (code, out, err.count("\n")) == (2, "", 1) and said in err


def test_a_sign_of_multiplication_is_an_x() -> None:
    assert find_machine("2\u00d78\u00d7H100") == find_machine("2x8xH100")


@pytest.mark.parametrize("words", ["--tflops 3", "--link 3", "--nvme /fast"])
def test_a_cpu_has_no_lanes(words: str, ask: Ask) -> None:
    code, _, err = ask("--model", "gpt2", "--gpus", "2xCPU", *words.split())
    assert code == 2 and "describes GPUs" in err


def test_rows_beyond_the_models_positions_are_a_warning(ask: Ask, estimate: Any) -> None:
    code, out, _ = ask("--model", "meta-llama/Llama-2-7b-hf", "--gpus", "8xH100", "--seq", "8192")
    assert code == 0 and "warning: rows of 8192 tokens are longer than the 4096" in out
    found = estimate("--backend", "ddp", "--seq", "8192", model="meta-llama/Llama-2-7b-hf")
    assert "4096 positions" in found["warnings"][0]


def test_what_is_more_likely_a_slip_is_a_warning(ask: Ask) -> None:
    said = {
        "--tflops 5000": "more than the H100's data sheet promises, 989",
        "--method lora --lora-rank 5000": "wider than what they adapt, 1024 channels",
    }
    for words, warning in said.items():
        code, out, _ = ask("--model", QWEN, "--gpus", "8xH100", *words.split())
        assert code == 0 and warning in out


def test_cpu_ranks_lack_no_memory_of_a_gpu(ask: Ask) -> None:
    _, out, _ = ask("--model", QWEN, "--gpus", "2xCPU")
    assert "GiB of memory short" in out and "GPU memory" not in out
    _, out, _ = ask("estimate", "--model", QWEN, "--gpus", "2xCPU", "--backend", "fsdp")
    assert "GPU memory" not in out and "nvidia-smi" not in out


# -- Ranking ---------------------------------------------------------------------------------------


def test_a_micro_batch_that_ends_accumulation_may_fit_where_a_smaller_one_does_not() -> None:
    """The gradients of earlier passes wait for the logits of the next one."""
    model, machine = find_model(QWEN), find_machine("1xH100")
    work = Work(optimizer="adamw_8bit", loss="hf", seq_length=1024, global_batch=2)
    one, two = (memory(model, work, setup(DDP(), 1, micro=micro)).total for micro in (1, 2))
    assert two < one
    between = replace(machine, gpu=replace(machine.gpu, memory_bytes=(one + two) // 2))
    best = next(o for o in options(model, work, between, margin_bytes=0) if o.fits)
    assert (best.setup.micro_batch, best.accumulation) == (2, 1)


def test_ddp_goes_first_when_it_is_even_with_who_would() -> None:
    model, machine = find_model("Qwen/Qwen2.5-0.5B"), find_machine("8xH100")
    ranked = options(model, Work(precision="fp32-master"), machine)
    assert isinstance(ranked[0].setup.backend, DDP)
    fastest = min(ranked, key=lambda option: option.time.seconds)
    slower = ranked[0].time.seconds / fastest.time.seconds - 1
    assert slower > 0.02  # not even with the fastest, but with what is even with the fastest
    name = describe(fastest.setup.backend)
    assert ranked[0].why.startswith(f"simpler than {name}, which is {slower:.1%} faster")


def test_nothing_allowed_is_said_with_the_reasons(ask: Ask) -> None:
    model, machine = find_model("gpt2"), find_machine("2xCPU")
    work = Work(optimizer="adamw_8bit", seq_length=64)
    for ask_for in (options, ladder):
        with pytest.raises(ValueError, match=r"no backend may .*: adamw_8bit needs a GPU"):
            ask_for(model, work, machine)
    code, out, err = ask("--model", "gpt2", "--gpus", "2xCPU", "--optimizer", "adamw_8bit")
    assert (code, out) == (2, "") and "needs a GPU" in err


@pytest.mark.parametrize("name", ["Qwen/Qwen3-1.7B", "Qwen/Qwen3-0.6B"])
@pytest.mark.parametrize("gpus", ["8xH100", "4x4090", "2xCPU"])
@pytest.mark.parametrize("method", ["full", "lora"])
def test_every_rung_gains_at_least_a_hundredth(name: str, gpus: str, method: Any) -> None:
    work = Work(method=method, seq_length=128)
    machine = find_machine(gpus, host_memory=1000 * GB)
    rungs = ladder(find_model(name), work, machine)
    totals = [rung.memory.total for rung in rungs]
    assert len(totals) > 1
    assert all(after <= 0.99 * before for before, after in pairwise(totals))


# -- Shapes ----------------------------------------------------------------------------------------


def test_a_frozen_base_is_held_as_it_was_loaded() -> None:
    """Two more bytes a frozen weight under ``fp32-master``; of QLoRA, of embeddings and head."""
    model = find_model(QWEN)
    for method, held_wide in (("lora", model.num_parameters), ("qlora", model.root_parameters)):
        work = Work(method=method, seq_length=64)  # pyright: ignore[reportArgumentType]
        low, wide = (
            memory(model, replace(work, precision=precision), setup(DDP())).weights
            for precision in ("bf16", "fp32-master")
        )
        assert wide - low == pytest.approx(2 * held_wide)


def test_a_capped_score_is_saved_once_more() -> None:
    """Gemma 2: tanh(x / cap) * cap. Of logits and, in eager attention, of scores."""
    gemma = find_model("google/gemma-2-2b")
    assert gemma.logit_softcap and gemma.attention_softcap
    plain = replace(gemma, name="uncapped", logit_softcap=False, attention_softcap=False)
    layer = Layer(
        tokens=256,
        seq_length=256,
        compute=2,
        residual=2,
        trains_base=True,
        cast_weights=False,
        gradient=2,
        recomputes=False,
        eager_attention=True,
    )
    capped, free = (replay_layer(model, layer, mixture=False) for model in (gemma, plain))
    assert capped.saved - free.saved == 2 * gemma.num_heads * 256 * 256
    capped, free = (replay_loss(model, layer, loss="hf", num_rows=1) for model in (gemma, plain))
    assert capped.saved - free.saved == 2 * gemma.vocab_size * 256
    flash = replace(layer, eager_attention=False)
    capped, free = (replay_layer(model, flash, mixture=False) for model in (gemma, plain))
    assert capped == free


def test_a_shard_group_across_nodes_uses_the_network() -> None:
    """Groups of 6 on nodes of 4 lie across borders; of 4 they do not."""
    wire = Link("wire", 1e9, overlap=0.0, latency=0.0)
    fast = Link("fast", 1e30, overlap=0.0, latency=0.0)
    machine: Machine = replace(find_machine("3x4xA100"), link=fast, network=wire)
    assert seconds.ring(6e9, 4, machine, 1)[0] == pytest.approx(0.0)
    assert seconds.ring(6e9, 12, machine, 1)[0] == pytest.approx(6 * 2 / 3)
    # Two nodes are spanned; the middle one carries both groups.
    assert seconds.ring(6e9, 6, machine, 1)[0] == pytest.approx(2 * 6 * 1 / 2)
    # A node holds 4 of 6 shards, each of which two replicas share.
    assert seconds.between_groups(6e9, 6, machine) == pytest.approx(6 * 4 / 6 * 1 / 2)


LLAMA: dict[str, Any] = {
    "model_type": "llama",
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "vocab_size": 100,
    "max_position_embeddings": 128,
}
QWEN_MOE = {
    **LLAMA,
    "model_type": "qwen3_moe",
    "head_dim": 16,
    "num_experts": 4,
    "num_experts_per_tok": 2,
    "moe_intermediate_size": 32,
}
ODD = [[1], {"a": 1}, "text", True, -1, 0, 1.5, 10**12]


@pytest.mark.parametrize("value", ODD, ids=repr)
@pytest.mark.parametrize("key", [key for key in QWEN_MOE if key != "model_type"])
def test_every_key_is_checked(key: str, value: Any, tmp_path: Path, ask: Ask) -> None:
    path = tmp_path / "config.json"
    path.write_text(json.dumps(QWEN_MOE | {key: value}))
    code, out, err = ask("--model", str(path), "--gpus", "8xH100")
    assert (code, out, err.count("\n")) == (2, "", 1)
    assert key in err


@pytest.mark.parametrize("key", ["hidden_size", "num_hidden_layers", "vocab_size"])
def test_a_missing_value_is_named(key: str) -> None:
    with pytest.raises(ValueError, match=f"has no '{key}'"):
        read_config(LLAMA | {key: None}, name="odd")


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        ({"tie_word_embeddings": "yes"}, "tie_word_embeddings"),
        ({"attention_bias": 1}, "attention_bias"),
        ({"num_attention_heads": 5, "num_key_value_heads": 5}, "5 attention heads"),
        ({"num_key_value_heads": 3}, "num_key_value_heads 3"),
        ({"model_type": ["llama"]}, "model_type"),
        ({"text_config": [1]}, "text_config"),
        ({"model_type": "a\x1b[31mb\nc"}, r"a\\x1b[31mb\\nc"),
        ({"model_type": "gemma2", "final_logit_softcapping": -1}, "final_logit_softcapping"),
    ],
)
def test_what_does_not_go_together_is_named(
    changes: dict[str, Any], said: str, tmp_path: Path, ask: Ask
) -> None:
    path = tmp_path / "config.json"
    path.write_text(json.dumps(LLAMA | changes))
    code, out, err = ask("--model", str(path), "--gpus", "8xH100")
    assert (code, out, err.count("\n")) == (2, "", 1)
    assert said in err and "\x1b" not in err


def test_more_experts_a_token_than_there_are() -> None:
    with pytest.raises(ValueError, match="num_experts_per_tok is 5, and there are 4"):
        read_config(QWEN_MOE | {"num_experts_per_tok": 5}, name="odd")


def test_weights_that_are_stored_quantised_are_not_counted_as_bfloat16(
    tmp_path: Path, ask: Ask
) -> None:
    def asked(stored: Any, method: str) -> Asked:
        config = LLAMA | {"quantization_config": stored}
        (tmp_path / "config.json").write_text(json.dumps(config))
        return ask("--model", str(tmp_path), "--gpus", "2xH100", "--method", method)

    four = {"quant_method": "bitsandbytes", "load_in_4bit": True}
    assert asked(four, "qlora")[0] == 0
    for stored, method in (({"quant_method": "fp8"}, "qlora"), (four, "lora"), ("gptq", "full")):
        code, out, err = asked(stored, method)
        assert (code, out) == (2, "") and "stored quantised" in err


def test_the_whole_of_a_model_of_several_senses() -> None:
    """The language model may leave it to the whole whether its ends are tied."""
    config = {"model_type": "llava", "text_config": LLAMA, "vision_config": {"hidden_size": 8}}
    apart, tied = (
        read_config(config | {"tie_word_embeddings": value}, name="seeing")
        for value in (False, True)
    )
    assert apart.num_parameters - tied.num_parameters == 64 * LLAMA["vocab_size"]
    own = LLAMA | {"tie_word_embeddings": False}
    given = read_config(config | {"text_config": own, "tie_word_embeddings": True}, name="seeing")
    assert not given.tied
    assert given.left_out == ("vision",)
    machine = find_machine("1xH100")
    assert "not counted: vision of seeing" in warnings(given, Work(), machine)[0]


def test_a_folder_that_holds_no_model_is_called_a_folder(tmp_path: Path, ask: Ask) -> None:
    def said(path: Path) -> str:
        code, out, err = ask("--model", str(path), "--gpus", "8xH100")
        assert (code, out) == (2, "")
        return err

    assert "is a folder without config.json" in said(tmp_path)
    assert "does not exist" in said(tmp_path / "nothing")
    (tmp_path / "adapter_config.json").write_text("{}")
    assert "is an adapter" in said(tmp_path)


@pytest.mark.parametrize("text", ['{"hidden_size": NaN}', "[" * 100_000, "1", "", '"x"'])
def test_a_file_that_is_no_config(text: str, tmp_path: Path, ask: Ask) -> None:
    path = tmp_path / "config.json"
    path.write_text(text)
    code, _, err = ask("--model", str(path), "--gpus", "8xH100")
    assert (code, err.count("\n")) == (2, 1)


def test_a_byte_order_mark_and_a_coloured_name_are_taken(tmp_path: Path, ask: Ask) -> None:
    path = tmp_path / "config.json"
    named = LLAMA | {"_name_or_path": "a\x1b[31mb\nc"}
    path.write_text(json.dumps(named), encoding="utf-8-sig")
    code, out, _ = ask("--model", str(path), "--gpus", "8xH100", "--seq", "64")
    assert code == 0 and out.startswith(r"a\x1b[31mb\nc (")


# -- The documentation -----------------------------------------------------------------------------


def test_the_documented_answer_is_the_commands(ask: Ask) -> None:
    """docs/planner.md's first block is what its command prints."""
    block = (ROOT / "docs" / "planner.md").read_text().split("```")[1]
    command, _, answer = block.strip().replace("\\\n", "").partition("\n")
    words = command.split()
    assert words[:4] == ["$", "python", "-m", "backends.planner"]
    code, out, _ = ask(*words[4:])
    assert (code, out.strip()) == (0, answer.strip())
