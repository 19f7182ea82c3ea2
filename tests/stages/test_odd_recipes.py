"""Recipes and models that are odd but real: they train as they say, or are refused in a line."""

import json
import math
import shutil
from dataclasses import replace
from pathlib import Path
from typing import Any, get_args

import pytest

from backends import DDP, Resources
from stages import resume
from stages.base import StageError
from stages.checkpoint.architecture import attention_layers
from stages.dpo import DPO, SMOOTHED, Loss
from stages.training import LoRA, peft_config, refuse_lost_targets
from tests.small import PAD, WORDS, Run, run_jobs

SHORT = {"learning_rate": 1e-3, "global_batch_size": 8, "max_steps": 2}


def training(out: Path, small: Path, stage: str = "sft", **config: Any) -> Run:
    base = {"sft": "model", "dpo": "policy"}[stage]
    inputs = {base: small / "tied", "data": small / "data"}
    return Run(out=out, stage=stage, config=SHORT | config, inputs=inputs)


def smoothing(loss: str) -> dict[str, Any]:
    return {"loss": loss, "label_smoothing": 0.1 if loss in SMOOTHED else 0.0}


def write_experts(out: Path, small: Path) -> Path:
    """A mixture of experts whose router adds its balance to the loss."""
    import torch
    from transformers import MixtralConfig, MixtralForCausalLM

    shutil.copytree(small / "tied" / "model", out / "model")
    torch.manual_seed(0)
    config = MixtralConfig(
        vocab_size=WORDS,
        hidden_size=32,
        intermediate_size=32,
        num_hidden_layers=1,
        num_attention_heads=2,
        num_key_value_heads=2,
        num_local_experts=4,
        router_aux_loss_coef=0.02,
        pad_token_id=PAD,
    )
    MixtralForCausalLM(config).save_pretrained(out / "model")
    return out


def write_greedy(out: Path, small: Path) -> Path:
    """As many published models are: a temperature without ``do_sample``, and no pad token."""
    shutil.copytree(small / "tied", out)
    settings = {"temperature": 0.9, "top_p": 0.6, "eos_token_id": 1}
    (out / "model" / "generation_config.json").write_text(json.dumps(settings))
    return out


@pytest.fixture(scope="module")
def trained(tmp_path_factory: pytest.TempPathFactory, small: Path) -> dict[str, Run]:
    """Everything that has to train, in one process."""
    out = tmp_path_factory.mktemp("odd")
    experts = write_experts(out / "experts", small)
    greedy = write_greedy(out / "greedy", small)
    runs = {loss: training(out / loss, small, "dpo", **smoothing(loss)) for loss in get_args(Loss)}
    runs["experts"] = replace(
        training(out / "of experts", small, "dpo"),
        inputs={"policy": experts, "data": small / "data"},
    )
    for method in ("full", "lora"):
        run = training(out / f"greedy {method}", small, method={"kind": method})
        runs[f"greedy {method}"] = replace(run, inputs={**run.inputs, "model": greedy})
    runs["constant"] = training(
        out / "constant", small, schedule="constant", warmup_fraction=0.5, max_steps=4
    )
    for micro in (1, 8):
        run = training(out / f"{micro} rows", small, "dpo", sft_weight=1.0, max_steps=4)
        resources = Resources(micro_batch_size=micro)
        runs[f"sft term {micro}"] = replace(run, resources=resources)
    run_jobs(list(runs.values()))
    return runs


def test_a_smoothing_that_nothing_would_read_is_refused() -> None:
    for loss in set(get_args(Loss)).difference(SMOOTHED):
        with pytest.raises(ValueError, match=f"loss: {loss} reads no label_smoothing"):
            DPO(loss=loss, label_smoothing=0.1)
    with pytest.raises(ValueError, match="exo_pair needs a label_smoothing above 0"):
        DPO(loss="exo_pair")


@pytest.mark.parametrize("loss", get_args(Loss))
def test_every_loss_of_dpo_begins_at_its_own_zero(trained: dict[str, Run], loss: str) -> None:
    at_zero = {
        **dict.fromkeys(("sigmoid", "robust", "sigmoid_norm"), math.log(2)),
        **dict.fromkeys(("hinge", "apo_zero", "apo_down"), 1.0),
        "ipo": 25.0,
        "exo_pair": math.log(0.5) - (math.log(0.9) + math.log(0.1)) / 2,
    }
    first = trained[loss].rows[0]
    assert first["loss"] == pytest.approx(at_zero[loss], rel=1e-5)
    assert first["rewards/chosen"] == first["rewards/rejected"] == 0


def test_the_balance_of_experts_is_no_sign_of_a_wrong_reference(trained: dict[str, Run]) -> None:
    first = trained["experts"].rows[0]
    assert first["aux_loss"] > 1 and first["rewards/chosen"] == 0
    assert first["loss"] == pytest.approx(math.log(2) + 0.02 * first["aux_loss"], abs=1e-5)


@pytest.mark.parametrize("method", ["full", "lora"])
def test_generation_settings_that_do_not_fit_together_are_kept(
    trained: dict[str, Run], method: str
) -> None:
    saved = trained[f"greedy {method}"].out / "model" / "generation_config.json"
    settings = json.loads(saved.read_text())
    assert (settings["temperature"], settings["top_p"]) == (0.9, 0.6)
    assert "do_sample" not in settings and settings["pad_token_id"] == PAD


def test_a_constant_rate_is_warmed_up_too(trained: dict[str, Run]) -> None:
    rates = [row["learning_rate"] for row in trained["constant"].rows]
    assert rates == pytest.approx([0, 5e-4, 1e-3, 1e-3])


def test_an_added_sft_term_does_not_depend_on_how_the_step_is_split(
    trained: dict[str, Run], tmp_path: Path
) -> None:
    whole = trained["sft term 8"]
    assert trained["sft term 1"].losses == pytest.approx(whole.losses, abs=1e-4)
    resources = Resources(ranks_per_node=2, micro_batch_size=2)
    ranks = replace(whole, out=tmp_path, backend=DDP(), resources=resources)
    run_jobs([ranks])
    assert ranks.losses == pytest.approx(whole.losses, abs=1e-4)
    assert whole.losses[0] > math.log(2) + 1


def test_one_step_at_a_rate_of_zero_is_no_training(tmp_path: Path, small: Path) -> None:
    run = training(tmp_path / "idle", small, max_steps=1)
    with pytest.raises(AssertionError, match=r"nothing was trained; set config\.warmup_fraction=0"):
        run_jobs([run])
    assert not (run.out / "model").exists()
    run_jobs([training(tmp_path / "at once", small, max_steps=1, warmup_fraction=0)])


def test_a_target_that_the_model_does_not_have_is_named(small: Path) -> None:
    from peft import get_peft_model
    from transformers import AutoModelForCausalLM

    def adapted(targets: Any) -> Any:
        model = AutoModelForCausalLM.from_pretrained(small / "tied" / "model")
        config = peft_config(LoRA(rank=4, targets=targets), small / "tied" / "model")
        assert config is not None
        return get_peft_model(model, config)

    for sound in ("all_linear", "attention", ("mlp.up_proj",)):
        refuse_lost_targets(adapted(sound))
    with pytest.raises(StageError, match=r"no layer qkv_proj, and only o_proj would be trained"):
        refuse_lost_targets(adapted(("qkv_proj", "o_proj")))


@pytest.mark.parametrize(
    ("family", "layers"),
    [
        ("llama", ("k_proj", "o_proj", "q_proj", "v_proj")),
        ("phi3", ("o_proj", "qkv_proj")),
        ("gpt2", ("attn.c_proj", "c_attn")),  # the MLP has a c_proj too
        ("gpt_neox", ("dense", "query_key_value")),
        ("bloom", ("dense", "query_key_value")),
    ],
)
def test_attention_is_what_the_family_calls_it(
    tmp_path: Path, family: str, layers: tuple[str, ...]
) -> None:
    from peft import get_peft_model
    from transformers import AutoConfig, AutoModelForCausalLM

    shape = {"num_hidden_layers": 2, "hidden_size": 32, "vocab_size": 50, "pad_token_id": 0}
    heads = {"num_attention_heads": 4, "intermediate_size": 64}
    AutoConfig.for_model(family, **shape, **heads).save_pretrained(tmp_path)
    assert attention_layers(tmp_path) == layers
    config = peft_config(LoRA(rank=4, targets="attention"), tmp_path)
    model = AutoModelForCausalLM.from_config(AutoConfig.from_pretrained(tmp_path))
    assert config is not None
    adapted = get_peft_model(model, config)
    refuse_lost_targets(adapted)
    assert not [name for name in adapted.base_model.targeted_module_names if "mlp" in name]


def test_the_best_by_a_metric_that_nobody_logs_is_refused_at_the_first_step(
    tmp_path: Path, small: Path
) -> None:
    keep = {"keep_last": 2, "metric": "eval_loss", "larger": False}
    run = replace(training(tmp_path, small), settings={"save_steps": 1, "keep": keep})
    with pytest.raises(AssertionError, match=r"best_by: eval_loss is never logged here.*grad_norm"):
        run_jobs([run])
    assert not (run.out / "metrics.jsonl").exists() and resume.newest(run.out) is None


def test_a_resumed_run_counts_on_and_saves_as_often_as_it_is_told(
    tmp_path: Path, small: Path
) -> None:
    run = replace(training(tmp_path, small, max_steps=6), settings={"save_steps": 2})
    run_jobs([run])
    tokens = [row["tokens"] for row in run.rows]
    for folder in resume.complete(run.out)[1:]:
        shutil.rmtree(folder)
    shutil.rmtree(run.out / "model")
    run_jobs([replace(run, settings={"save_steps": 3})])
    assert [row["tokens"] for row in run.rows] == tokens
    assert [resume.step(folder) for folder in resume.complete(run.out)] == [2, 3, 6]


def test_a_tokenizer_with_more_tokens_than_the_model_is_refused(
    tmp_path: Path, small: Path
) -> None:
    """A pad token that was added without a row, as some published models have it."""
    from transformers import AutoTokenizer

    model = tmp_path / "padded"
    shutil.copytree(small / "tied", model)
    tokenizer = AutoTokenizer.from_pretrained(model / "model")
    tokenizer.add_special_tokens({"pad_token": "[PAD]"})
    tokenizer.save_pretrained(model / "model")
    run = training(tmp_path / "sft", small)
    with pytest.raises(AssertionError, match=r"has a token 128 \('\[PAD\]'\), and the model 128"):
        run_jobs([replace(run, inputs={**run.inputs, "model": model})])
