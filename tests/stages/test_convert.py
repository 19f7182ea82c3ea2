"""Conversion of what real sharded training left, compared bit for bit with the training side."""

import inspect
import io
import itertools
import json
import os
import pickle
import shutil
import subprocess
import sys
from collections.abc import Callable, Mapping
from copy import deepcopy
from enum import Enum
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from stages import manifest, resume
from stages.base import Context, StageError
from stages.checkpoint import describe, fresh, gguf, parity, validate
from stages.checkpoint.adapter import read_adapter
from stages.checkpoint.gguf_tokenizer import SPLITS
from stages.checkpoint.lineage import fingerprint, note_base, noted_base
from stages.checkpoint.pickles import enum_member
from stages.checkpoint.trained import Training, base_model
from stages.checkpoint.universal import remove_universal, write_universal
from stages.convert import Convert, convert
from stages.fetch import Fetch, fetch
from stages.saves import Saves
from stages.sources.local import LocalCheckpoint, LocalModel
from stages.training import refuse_one_tied_end
from tests.stages.write_shards import CASES, with_adapter, write_base

SCRIPT = Path(__file__).with_name("write_shards.py")
ROOT = Path(__file__).parents[2]
FULL = [case for case in CASES if "full" in case]
ADAPTED: Mapping[str, Mapping[str, Any]] = {
    "dcp_lora": {"target_modules": ["q_proj", "down_proj", "embed_tokens"], "use_rslora": True},
    "zero2_lora": {"target_modules": ["q_proj", "down_proj", "embed_tokens"], "use_rslora": True},
    "dcp_dora": {"use_dora": True, "modules_to_save": ["lm_head"]},
    "ranks_dora": {"use_dora": True, "modules_to_save": ["lm_head"]},
    "zero1_dora": {"use_dora": True, "modules_to_save": ["lm_head"]},
    "zero3_dora": {"use_dora": True, "modules_to_save": ["lm_head"]},
    "dcp_qlora": {},
}
FLOAT32 = Convert(export_dtype="float32", merge_into="original", parity_probes=0)
AS_PEFT = FLOAT32.model_copy(update={"merge_arithmetic": "peft"})
"""For bits: the default multiplies and adds at once, which some processors round less often."""


@pytest.fixture(scope="session")
def shards(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Every case of write_shards.py, written by two gloo ranks."""
    out = tmp_path_factory.mktemp("shards")
    argv = [sys.executable, str(SCRIPT), str(out)]
    env = os.environ | {"DS_ACCELERATOR": "cpu", "OMP_NUM_THREADS": "1", "PYTHONPATH": str(ROOT)}
    done = subprocess.run(argv, env=env, capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stderr[-3000:]
    return out


@pytest.fixture(scope="session")
def bases(tmp_path_factory: pytest.TempPathFactory) -> Path:
    out = tmp_path_factory.mktemp("bases")
    write_base(out / "tied" / "model", tie=True)
    write_base(out / "untied" / "model", tie=False)
    return out


@pytest.fixture(scope="session")
def exports(shards: Path, tmp_path_factory: pytest.TempPathFactory) -> Mapping[str, Path]:
    """Every case of ``shards`` converted to float32."""
    out = tmp_path_factory.mktemp("exports")
    for case, (base, *_) in CASES.items():
        convert(AS_PEFT, Context(out / case), trained=shards / case, base=shards / "base" / base)
    return {case: out / case for case in CASES}


def weights(output: Path) -> dict[str, Any]:
    from safetensors.torch import load_file

    files = sorted((output / "model").glob("*.safetensors"))
    return {name: tensor for file in files for name, tensor in load_file(file).items()}


def assert_equal(got: Mapping[str, Any], wanted: Mapping[str, Any]) -> None:
    import torch

    assert got.keys() == wanted.keys()
    different = [name for name in wanted if not torch.equal(got[name], wanted[name])]
    assert not different


def assert_nearly_exact(got: Mapping[str, Any], model: Any, units: float) -> None:
    """``got`` is PEFT's merge in double precision, within ``units`` of the last place of its type,
    taken from the largest value: where terms cancel, a small sum keeps the error of large ones."""
    import torch

    wanted = model.double().merge_and_unload().state_dict()
    assert got.keys() == wanted.keys()
    for name, tensor in wanted.items():
        allowed = units * torch.finfo(got[name].dtype).eps * float(tensor.abs().max())
        assert float((got[name].double() - tensor).abs().max()) <= allowed, name


def load(model: Path, **settings: Any) -> Any:
    from transformers import AutoModelForCausalLM

    return AutoModelForCausalLM.from_pretrained(model, dtype="float32", **settings)


def untied(model: Path) -> Any:
    """The model with a head of its own, so that PEFT merges each end by itself."""
    import torch

    loaded = load(model, tie_word_embeddings=False)
    head = load(model).get_output_embeddings().weight
    loaded.get_output_embeddings().weight = torch.nn.Parameter(head.detach().clone())
    return loaded


def logits(model: Any) -> Any:
    import torch

    with torch.no_grad():
        return model.eval()(input_ids=torch.arange(4, 40).reshape(2, 18)).logits


# Full models, sharded


@pytest.mark.parametrize("case", FULL)
def test_full_shards_become_the_training_sides_weights(
    shards: Path, exports: Mapping[str, Path], case: str
) -> None:
    import torch

    wanted = torch.load(shards / case / "expected.pt", weights_only=True)
    tied = "untied" not in case
    if tied:
        wanted.pop("lm_head.weight", None)
    assert_equal(weights(exports[case]), {n: t.float() for n, t in wanted.items()})
    facts = describe(exports[case] / "model")
    assert (facts["tied"], facts["dtypes"].keys()) == (tied, {"float32"})


def test_a_sharded_export_in_bfloat16_is_the_float32_one_cast(
    shards: Path, exports: Mapping[str, Path], tmp_path: Path
) -> None:
    import torch

    config = Convert(export_dtype="bfloat16", max_shard_size="20KB")
    figures = convert(
        config,
        Context(tmp_path),
        trained=shards / "zero3_full_untied",
        base=shards / "base" / "untied",
    )
    assert figures["dtypes"].keys() == {"bfloat16"}
    exact = weights(exports["zero3_full_untied"])
    assert_equal(weights(tmp_path), {n: t.to(torch.bfloat16) for n, t in exact.items()})
    files = sorted(p.name for p in (tmp_path / "model").glob("*.safetensors"))
    assert files == [f"model-0000{n}-of-00003.safetensors" for n in (1, 2, 3)]
    assert all((tmp_path / "model" / f).stat().st_size < 24_000 for f in files)
    assert json.loads((tmp_path / "model" / "config.json").read_text())["dtype"] == "bfloat16"


# Adapters in shards


@pytest.mark.parametrize("case", ADAPTED)
def test_adapters_in_shards_merge_as_peft_does(
    shards: Path, exports: Mapping[str, Path], case: str
) -> None:
    import torch

    state = torch.load(shards / case / "expected.pt", weights_only=True)
    base = shards / "base" / CASES[case][0] / "model"
    model = with_adapter(untied(base), **{"target_modules": "all-linear", **ADAPTED[case]})
    trained = {n: t for n, t in state.items() if "lora_" in n or "modules_to_save" in n}
    assert trained
    assert not model.load_state_dict(trained, strict=False).unexpected_keys
    wanted = logits(model)
    assert_equal(weights(exports[case]), model.merge_and_unload().state_dict())
    assert torch.allclose(logits(load(exports[case] / "model")), wanted, atol=1e-5)
    assert not torch.allclose(logits(load(base)), wanted, atol=1e-2)


def test_an_adapter_on_one_end_of_a_tie_unties_the_export(shards: Path, tmp_path: Path) -> None:
    import torch

    figures = convert(
        FLOAT32,
        Context(tmp_path),
        trained=shards / "zero2_lora",
        base=shards / "base" / "tied",
    )
    assert figures["untied"] is True
    got = weights(tmp_path)
    assert not torch.equal(got["lm_head.weight"], got["model.embed_tokens.weight"])
    assert_equal(
        {"head": got["lm_head.weight"]},
        {"head": weights(shards / "base" / "tied")["model.embed_tokens.weight"]},
    )


def test_qlora_merges_into_the_unquantised_base(shards: Path, tmp_path: Path) -> None:
    figures = convert(
        Convert(), Context(tmp_path), trained=shards / "dcp_qlora", base=shards / "base" / "even"
    )
    assert (figures["base_precision"], figures["merged_into"]) == ("nf4", "float32")
    assert describe(shards / "dcp_qlora" / "model")["quantization"] == "nf4"
    assert describe(tmp_path / "model")["quantization"] is None


def test_exports_load_in_a_fresh_process(exports: Mapping[str, Path]) -> None:
    program = (
        "import sys\n"
        "from transformers import AutoModelForCausalLM, AutoTokenizer\n"
        "for folder in sys.argv[1:]:\n"
        "    model, info = AutoModelForCausalLM.from_pretrained(folder, output_loading_info=True)\n"
        "    assert not any(info.values()), info\n"
        "    turn = [{'role': 'user', 'content': 'w3 w4'}]\n"
        "    ids = AutoTokenizer.from_pretrained(folder).apply_chat_template(\n"
        "        turn, add_generation_prompt=True, return_tensors='pt')\n"
        "    answer = model.generate(**ids, max_new_tokens=3, do_sample=False)\n"
        "    assert 3 in model.generation_config.eos_token_id\n"
        "    print('loaded', model.dtype)\n"
    )
    folders = [str(out / "model") for out in exports.values()]
    done = subprocess.run(
        [sys.executable, "-c", program, *folders], capture_output=True, text=True, timeout=120
    )
    assert done.returncode == 0, done.stderr[-2000:]
    assert done.stdout.split("\n")[:-1] == ["loaded torch.float32"] * len(folders)


# Adapters as PEFT saves them


def save_adapter(out: Path, base: Path, **settings: Any) -> Any:
    model = with_adapter(untied(base / "model"), **settings)
    model.save_pretrained(out / "model")
    return model


def gpt2(out: Path, **larger: int) -> None:
    """A family whose layers are stored (inputs, outputs)."""
    import torch
    from transformers import AutoTokenizer, GPT2Config, GPT2LMHeadModel

    write_base(out / "llama", tie=False)
    torch.manual_seed(0)
    sizes: dict[str, Any] = {"n_embd": 32, "n_layer": 2, "n_head": 2, "vocab_size": 67, **larger}
    config = GPT2Config(**sizes, eos_token_id=1, bos_token_id=1, tie_word_embeddings=False)
    GPT2LMHeadModel(config).save_pretrained(out / "model")
    AutoTokenizer.from_pretrained(out / "llama").save_pretrained(out / "model")


PEFT_KINDS: Mapping[str, Mapping[str, Any]] = {
    "lora": {"target_modules": "all-linear"},
    "rslora": {"target_modules": ["v_proj"], "use_rslora": True},
    "dora": {"target_modules": "all-linear", "use_dora": True},
    "patterns": {
        "target_modules": ["q_proj", "o_proj"],
        "rank_pattern": {"layers.0.self_attn.q_proj": 5},
        "alpha_pattern": {"o_proj": 2},
    },
    "embedding_dora": {"target_modules": ["embed_tokens", "k_proj"], "use_dora": True},
    "saved_whole": {"target_modules": ["q_proj"], "modules_to_save": ["embed_tokens", "lm_head"]},
}


@pytest.mark.parametrize("kind", PEFT_KINDS)
def test_peft_adapters_merge_exactly_and_as_peft_does(
    bases: Path, tmp_path: Path, kind: str
) -> None:
    import torch

    trained, base = tmp_path / "trained", bases / "untied"
    model = save_adapter(trained, base, **PEFT_KINDS[kind])
    wanted = logits(model)
    figures = convert(FLOAT32, Context(tmp_path), trained=trained, base=base)
    assert figures["peft_difference"]["largest"] < 1e-6
    assert torch.allclose(logits(load(tmp_path / "model")), wanted, atol=1e-5)
    assert_nearly_exact(weights(tmp_path), deepcopy(model), 2)
    convert(AS_PEFT, Context(tmp_path), trained=trained, base=base)
    assert_equal(weights(tmp_path), model.merge_and_unload().state_dict())


@pytest.mark.parametrize("settings", [{}, {"use_dora": True}, {"bias": "all"}, {"lora_bias": True}])
def test_layers_with_biases_stored_inputs_first_merge_too(
    tmp_path: Path, settings: Mapping[str, Any]
) -> None:
    import torch
    from safetensors.torch import load_file

    gpt2(tmp_path / "base")
    kind = {"target_modules": ["c_attn", "c_proj"], "fan_in_fan_out": True, **settings}
    model = with_adapter(load(tmp_path / "base" / "model"), **kind)
    for name, parameter in model.named_parameters():
        if parameter.requires_grad and name.endswith("bias"):
            torch.nn.init.normal_(parameter)
    model.save_pretrained(tmp_path / "trained" / "model")
    config = AS_PEFT.model_copy(update={"keep_adapter": True})
    convert(config, Context(tmp_path), trained=tmp_path / "trained", base=tmp_path / "base")
    saved, kept = (
        load_file(folder / "adapter_model.safetensors")
        for folder in (tmp_path / "trained" / "model", tmp_path / "adapter")
    )
    assert_equal(kept, saved)
    assert_equal(weights(tmp_path), model.merge_and_unload().state_dict())


def test_layers_stored_inputs_first_stand_beside_others(tmp_path: Path) -> None:
    """The config has one flag for all layers, which is wrong for some; the square ones among them
    would be merged turned around."""
    gpt2(tmp_path / "base")
    targets = r".*(attn\.c_proj|lm_head)"
    model = with_adapter(load(tmp_path / "base" / "model"), target_modules=targets)
    model.save_pretrained(tmp_path / "trained" / "model")
    said = json.loads((tmp_path / "trained" / "model" / "adapter_config.json").read_text())
    assert said["fan_in_fan_out"] is False
    convert(AS_PEFT, Context(tmp_path), trained=tmp_path / "trained", base=tmp_path / "base")
    assert_equal(weights(tmp_path), model.merge_and_unload().state_dict())


def test_layers_stored_inputs_first_merge_at_larger_sizes(tmp_path: Path) -> None:
    """Of a tensor with more values than a block, only the first rows are measured."""
    gpt2(tmp_path / "base", n_embd=512, n_layer=1, n_positions=1024)
    model = with_adapter(load(tmp_path / "base" / "model"), target_modules=["c_attn", "wpe"])
    model.save_pretrained(tmp_path / "trained" / "model")
    figures = convert(
        FLOAT32, Context(tmp_path), trained=tmp_path / "trained", base=tmp_path / "base"
    )
    assert figures["peft_difference"]["values"] < 1024 * 512
    assert figures["peft_difference"]["largest"] < 1e-6
    assert_nearly_exact(weights(tmp_path), model, 2)


def test_a_bfloat16_merge_is_within_one_rounding_of_the_exact_one(
    bases: Path, tmp_path: Path
) -> None:
    model = save_adapter(tmp_path / "trained", bases / "untied", target_modules="all-linear")
    convert(Convert(), Context(tmp_path), trained=tmp_path / "trained", base=bases / "untied")
    assert_nearly_exact(weights(tmp_path), model, 0.5)


def test_equal_ends_stay_tied_and_are_written_once(bases: Path, tmp_path: Path) -> None:
    trained = tmp_path / "trained"
    model = with_adapter(load(bases / "tied" / "model"), target_modules=["q_proj"])
    model.save_pretrained(trained / "model")
    figures = convert(FLOAT32, Context(tmp_path), trained=trained, base=bases / "tied")
    assert (figures["tied"], figures["untied"]) == (True, False)
    assert "lm_head.weight" not in weights(tmp_path)


ONE_END: Mapping[str, Mapping[str, Any]] = {
    "head": {"target_modules": ["lm_head", "q_proj"]},
    "embedding": {"target_modules": ["embed_tokens", "q_proj"]},
    "whole head": {"target_modules": ["q_proj"], "modules_to_save": ["lm_head"]},
    "whole embedding": {"target_modules": ["q_proj"], "modules_to_save": ["embed_tokens"]},
}


@pytest.mark.parametrize("end", ONE_END)
def test_ends_of_a_tie_that_were_trained_apart_are_untied(
    bases: Path, tmp_path: Path, end: str
) -> None:
    import torch

    model = with_adapter(load(bases / "tied" / "model"), **ONE_END[end])
    for name, parameter in model.named_parameters():
        if "modules_to_save" in name:
            torch.nn.init.normal_(parameter, std=0.3)
    wanted = logits(model)
    model.save_pretrained(tmp_path / "trained" / "model")
    trained = tmp_path / "trained"
    figures = convert(FLOAT32, Context(tmp_path), trained=trained, base=bases / "tied")
    assert (figures["tied"], figures["untied"]) == (False, True)
    assert torch.allclose(logits(load(tmp_path / "model")), wanted, atol=1e-5)


@pytest.mark.parametrize("end", ONE_END)
def test_an_adapter_on_one_end_of_a_tie_is_refused_before_training(bases: Path, end: str) -> None:
    with pytest.raises(StageError, match="is one end of a tie"):
        refuse_one_tied_end(with_adapter(load(bases / "tied" / "model"), **ONE_END[end]))
    refuse_one_tied_end(with_adapter(load(bases / "untied" / "model"), **ONE_END[end]))
    refuse_one_tied_end(with_adapter(load(bases / "tied" / "model"), target_modules=["q_proj"]))


def save_directory(trained: Path, model: Any, state: Mapping[str, Any]) -> None:
    """A DCP directory from one process, for states that need no second rank."""
    import torch.distributed.checkpoint as dcp

    writer = dcp.FileSystemWriter(trained / "model" / "pytorch_model_fsdp_0")
    dcp.save({"model": dict(state)}, storage_writer=writer, no_dist=True)
    model.peft_config["default"].save_pretrained(trained / "model")
    model.get_base_model().config.save_pretrained(trained / "model")


def test_a_sharded_directory_may_hold_the_adapter_alone(bases: Path, tmp_path: Path) -> None:
    from peft import get_peft_model_state_dict

    kind = {"target_modules": ["q_proj"], "modules_to_save": ["lm_head"]}
    model = with_adapter(load(bases / "untied" / "model"), **kind)
    save_directory(tmp_path / "trained", model, get_peft_model_state_dict(model))
    convert(AS_PEFT, Context(tmp_path), trained=tmp_path / "trained", base=bases / "untied")
    assert_equal(weights(tmp_path), model.merge_and_unload().state_dict())


def test_biases_trained_beside_an_adapter_are_taken_from_the_shards(tmp_path: Path) -> None:
    import torch

    gpt2(tmp_path / "base")
    kind = {"target_modules": ["c_attn"], "fan_in_fan_out": True, "bias": "all"}
    model = with_adapter(load(tmp_path / "base" / "model"), **kind)
    for name, parameter in model.named_parameters():
        if name.endswith("bias"):
            torch.nn.init.normal_(parameter)
    save_directory(tmp_path / "trained", model, model.state_dict())
    convert(AS_PEFT, Context(tmp_path), trained=tmp_path / "trained", base=tmp_path / "base")
    assert_equal(weights(tmp_path), model.merge_and_unload().state_dict())


def test_shards_of_a_resized_model_with_a_second_adapter(bases: Path, tmp_path: Path) -> None:
    from peft import LoraConfig

    model = load(bases / "tied" / "model")
    model.resize_token_embeddings(70)
    model = with_adapter(model, target_modules=["q_proj"])
    model.add_adapter("reference", LoraConfig(r=2, target_modules=["v_proj"]))
    save_directory(tmp_path / "trained", model, model.state_dict())
    figures = convert(AS_PEFT, Context(tmp_path), trained=tmp_path / "trained", base=bases / "tied")
    assert (figures["tied"], figures["merged_parameters"]) == (True, 2)
    wanted = model.merge_and_unload(adapter_names=["default"]).state_dict()
    wanted.pop("lm_head.weight")
    assert_equal(weights(tmp_path), wanted)


@pytest.mark.parametrize("base", ["tied", "untied"])
@pytest.mark.parametrize("with_config", [True, False])
def test_a_resized_vocabulary_is_kept(
    bases: Path, tmp_path: Path, base: str, *, with_config: bool
) -> None:
    trained = tmp_path / "trained" / "model"
    model = load(bases / base / "model")
    model.resize_token_embeddings(70)
    adapted = with_adapter(model, target_modules=["q_proj"])
    adapted.save_pretrained(trained, save_embedding_layers=True)
    if with_config:
        model.config.save_pretrained(trained)
    assert validate(trained, base=bases / base / "model") == ()
    convert(AS_PEFT, Context(tmp_path), trained=tmp_path / "trained", base=bases / base)
    wanted = adapted.merge_and_unload().state_dict()
    if base == "tied":
        wanted.pop("lm_head.weight")
    assert_equal(weights(tmp_path), wanted)
    assert describe(tmp_path / "model")["vocabulary_rows"] == 70


@pytest.mark.parametrize("case", ["zero2_lora", "dcp_dora"])
def test_the_adapter_can_be_kept_beside_the_merged_model(
    shards: Path, exports: Mapping[str, Path], tmp_path: Path, case: str
) -> None:
    import torch
    from peft import PeftModel

    config = Convert(export_dtype="float32", keep_adapter=True)
    base = shards / "base" / CASES[case][0]
    convert(config, Context(tmp_path), trained=shards / case, base=base)
    alone = PeftModel.from_pretrained(untied(base / "model"), str(tmp_path / "adapter"))
    assert torch.allclose(logits(alone), logits(load(exports[case] / "model")), atol=1e-5)


# Whole models in one process


@pytest.mark.parametrize("form", ["safetensors", "indexed", "bin", "fsdp_bin"])
def test_whole_models_are_copied(bases: Path, tmp_path: Path, form: str) -> None:
    import torch

    base = bases / "untied"
    model = load(base / "model")
    trained = tmp_path / "trained" / "model"
    if form in ("safetensors", "indexed"):
        model.save_pretrained(trained, max_shard_size="30KB" if form == "indexed" else "5GB")
    else:
        model.config.save_pretrained(trained)
        name = "pytorch_model.bin" if form == "bin" else "pytorch_model_fsdp.bin"
        state = {f"module._orig_mod.{n}": t for n, t in model.state_dict().items()}
        torch.save(state, trained / name)
    convert(FLOAT32, Context(tmp_path), trained=tmp_path / "trained", base=base)
    assert_equal(weights(tmp_path), model.state_dict())


def test_the_base_gives_what_training_did_not_leave(bases: Path, tmp_path: Path) -> None:
    base, trained = bases / "untied" / "model", tmp_path / "trained" / "model"
    model = load(base)
    model.config.use_cache = False
    model.save_pretrained(trained)
    convert(FLOAT32, Context(tmp_path), trained=tmp_path / "trained", base=bases / "untied")
    out = tmp_path / "model"
    for name in ("tokenizer.json", "tokenizer_config.json", "chat_template.jinja"):
        assert (out / name).read_text() == (base / name).read_text()
    assert json.loads((out / "config.json").read_text())["use_cache"] is True
    generation = json.loads((out / "generation_config.json").read_text())
    assert generation["eos_token_id"] == [1, 3]  # the tokenizer's, and the one that ends a turn


def test_an_interrupted_conversion_is_begun_anew(bases: Path, tmp_path: Path) -> None:
    base = bases / "untied"
    for leftover in ("convert.partial", "model"):
        (tmp_path / leftover).mkdir()
        (tmp_path / leftover / "model-00009-of-00009.safetensors").write_bytes(b"half")
    convert(FLOAT32, Context(tmp_path), trained=base, base=base)
    assert sorted(p.name for p in tmp_path.iterdir()) == ["model"]
    assert validate(tmp_path / "model", "float32") == ()


# Arithmetic

KINDS = ("lora", "dora", "embedding_dora", "saved_whole", "rslora", "embedding")
TYPES = ("float32", "bfloat16", "float16")
QUICK = (
    ("lora", "bfloat16", "bfloat16"),
    ("dora", "float16", "bfloat16"),
    ("embedding", "bfloat16", "float32"),
    ("saved_whole", "bfloat16", "float32"),
)
"""Kinds of adapter, types of base and of adapter that every run of the tests tries."""


@pytest.mark.parametrize(
    "case",
    [
        pytest.param(case, marks=() if case in QUICK else pytest.mark.slow, id="-".join(case))
        for case in itertools.product(KINDS, ("bfloat16", "float16"), TYPES)
    ],
)
def test_peft_arithmetic_gives_the_bits_of_merge_and_unload_after_a_plain_load(
    bases: Path, tmp_path: Path, case: tuple[str, str, str]
) -> None:
    import torch
    from peft import PeftModel
    from transformers import AutoModelForCausalLM

    kind, half, stored = case
    settings = {**PEFT_KINDS, "embedding": {"target_modules": ["embed_tokens"]}}[kind]
    trained, base = tmp_path / "trained", tmp_path / "base"
    shutil.copytree(bases / "untied", base)
    load(base / "model").to(getattr(torch, half)).save_pretrained(base / "model")
    adapted = with_adapter(load(bases / "untied" / "model"), **settings)
    adapted.to(getattr(torch, stored)).save_pretrained(trained / "model")
    start = AutoModelForCausalLM.from_pretrained(base / "model", dtype="auto")
    wanted = PeftModel.from_pretrained(start, str(trained / "model")).merge_and_unload()
    config = Convert.model_validate(
        {"export_dtype": half, "merge_arithmetic": "peft", "parity_probes": 0}
    )
    figures = convert(config, Context(tmp_path), trained=trained, base=base)
    assert_equal(weights(tmp_path), wanted.state_dict())
    assert figures["peft_difference"]["largest"] < 0.1


def test_qlora_is_merged_into_what_it_was_trained_on(shards: Path, tmp_path: Path) -> None:
    """The base as 4 bits held it is bitsandbytes' own, and answers as the trained model does."""
    import torch
    from bitsandbytes.functional import dequantize_4bit
    from bitsandbytes.nn import Linear4bit

    source, origin = shards / "dcp_qlora" / "model", shards / "base" / "even" / "model"
    training = Training(source, origin, read_adapter(source))
    ours = parity.dequantised_base(training)
    held = {
        f"{name}.weight": dequantize_4bit(module.weight.data, module.weight.quant_state)
        for name, module in base_model(training).named_modules()
        if isinstance(module, Linear4bit)
    }
    assert len(held) == 14
    assert_equal({name: ours.read(name) for name in held}, held)
    figures = {}
    for into in ("original", "dequantised", "measured"):
        config = Convert(export_dtype="float32", merge_into=into, parity_tolerance=1.0)
        figures[into] = convert(
            config,
            Context(tmp_path / into),
            trained=shards / "dcp_qlora",
            base=shards / "base" / "even",
        )
    best, original = figures["measured"], figures["original"]
    assert best["merged_weights"] == "dequantised"
    assert best["merge_errors"]["original"] == pytest.approx(original["parity"]["logit_error"])
    assert best["parity"]["logit_error"] < 1e-4 < 1e-2 < original["parity"]["logit_error"]
    assert_equal(weights(tmp_path / "measured"), weights(tmp_path / "dequantised"))
    assert not torch.equal(
        weights(tmp_path / "original")["model.layers.0.mlp.up_proj.weight"],
        weights(tmp_path / "measured")["model.layers.0.mlp.up_proj.weight"],
    )


# Parity


def with_pairs(out: Path) -> Path:
    from datasets import Dataset

    row = {"prompt_ids": [4, 5, 6], "chosen_ids": [7, 8, 1], "rejected_ids": [9, 1]}
    Dataset.from_list([row] * 9).save_to_disk(out / "preferences" / "test")
    return out


@pytest.mark.parametrize("case", ["zero3_full_tied", "zero2_lora"])
def test_the_export_answers_as_the_trained_model(shards: Path, tmp_path: Path, case: str) -> None:
    figures = convert(
        Convert(export_dtype="float32"),
        Context(tmp_path),
        trained=shards / case,
        base=shards / "base" / CASES[case][0],
        data=with_pairs(tmp_path / "data"),
    )["parity"]
    assert figures["logit_error"] < 1e-5 < 0.1 < figures["change"]
    assert figures["change_kept"] == pytest.approx(1, abs=1e-4)
    assert (figures["same_top_token"], figures["tolerance"]) == (1, 1e-3)
    assert max(figures["answer_logp_difference"], figures["margin_difference"]) < 1e-4


def examined(training: Training, model: Path, scratch: Path) -> list[str]:
    """What the gate says of ``model`` as the export of ``training``."""
    exam = parity.prepare(model, num=4, data=None, folder=scratch)
    assert fresh.load(model, probes=exam.probes, out=exam.out) == ()
    return parity.faults(parity.measure(exam, training), tolerance=1.0, dtype="bfloat16")


def test_an_export_that_ignores_the_adapter_is_caught(shards: Path, tmp_path: Path) -> None:
    source, origin = shards / "zero2_lora" / "model", shards / "base" / "tied" / "model"
    lora = Training(source, origin, read_adapter(source))
    shutil.copytree(origin, tmp_path / "model")
    edit_json(tmp_path / "model" / "generation_config.json", eos_token_id=[1, 3])
    said = examined(lora, tmp_path / "model", tmp_path)
    assert "it shows 0% of what training changed" in said[-1]


def test_a_change_that_the_type_is_too_coarse_for_is_caught(bases: Path, tmp_path: Path) -> None:
    import torch

    base = Path(shutil.copytree(bases / "untied", tmp_path / "base"))
    model = load(base / "model").to(torch.bfloat16)
    model.save_pretrained(base / "model")
    trained = tmp_path / "trained"
    adapted = with_adapter(model.float(), target_modules=["q_proj", "down_proj"])
    for name, parameter in adapted.named_parameters():
        if "lora_B" in name:
            torch.nn.init.normal_(parameter, std=1e-5)
    adapted.save_pretrained(trained / "model")
    with pytest.raises(StageError, match=r"of what training changed.*export_dtype: float32"):
        convert(Convert(), Context(tmp_path / "half"), trained=trained, base=base)
    whole = convert(
        Convert(export_dtype="float32"), Context(tmp_path / "out"), trained=trained, base=base
    )
    assert whole["parity"]["change_kept"] == pytest.approx(1, abs=1e-2)


def test_a_load_that_dies_is_a_fault_and_the_next_one_works(bases: Path, tmp_path: Path) -> None:
    """Each load has a process of its own; what kills one leaves the others alone."""
    probe = fresh.Probe([4, 5])
    assert fresh.load(bases / "untied" / "model", probes=[probe], out=tmp_path / "out") == ()
    (fault,) = fresh.load(bases / "untied" / "model", probes=[probe], out=tmp_path / "no" / "out")
    assert "ended with status 1" in fault
    assert fresh.load(bases / "untied" / "model") == ()


# Cut anew for other ranks and stages


@pytest.mark.parametrize("case", [case for case in CASES if case.startswith("zero")])
def test_zeros_optimizer_is_cut_anew_without_a_bit_changed(
    shards: Path, tmp_path: Path, case: str
) -> None:
    import torch

    model = tmp_path / "model"
    shutil.copytree(shards / case / "model", model)
    before = sorted(model.rglob("*"))
    write_universal(model)
    folder = model / (model / "latest_universal").read_text() / "zero"
    wanted = {"fp32": torch.load(shards / case / "expected.pt", weights_only=True)}
    wanted |= torch.load(shards / case / "moments.pt", weights_only=True)
    assert {f.parent.name for f in folder.glob("*/fp32.pt")} == wanted["fp32"].keys()
    for key, tensors in wanted.items():
        found = {n: torch.load(folder / n / f"{key}.pt", weights_only=True) for n in tensors}
        assert_equal({n: each["param"] for n, each in found.items()}, tensors)
    steps = {float(torch.load(f, weights_only=True)) for f in folder.glob("*/step.pt")}
    assert steps == {1.0}
    remove_universal(model)
    assert sorted(model.rglob("*")) == before


def test_only_adams_moments_are_cut_anew(shards: Path, tmp_path: Path) -> None:
    import torch

    model = tmp_path / "model"
    shutil.copytree(shards / "zero3_full_tied" / "model", model)
    for file in model.glob("*/*_optim_states.pt"):
        held = torch.load(file, weights_only=False)
        held["optimizer_state_dict"]["optimizer_state_dict"]["state"][0].pop("exp_avg_sq")
        torch.save(held, file)
    with pytest.raises(StageError, match="keeps exp_avg, step, and only Adam's can be recut"):
        write_universal(model)


# Other forms


def test_other_forms_answer_alike(bases: Path, tmp_path: Path) -> None:
    import torch
    from transformers import AutoModelForCausalLM

    out, base = tmp_path / "out", byte_level(tmp_path / "base")
    config = Convert(export_dtype="float32", also=("gguf_f16", "gguf_q8_0", "nf4"), parity_probes=0)
    convert(config, Context(out), trained=base, base=base)
    wanted = logits(load(out / "model"))
    for name, settings, error in (
        ("gguf", {"gguf_file": "model-f16.gguf"}, 0.01),
        ("gguf", {"gguf_file": "model-q8_0.gguf"}, 0.05),
        ("nf4", {}, 0.5),
    ):
        model = AutoModelForCausalLM.from_pretrained(out / name, dtype=torch.float32, **settings)
        apart = (logits(model) - wanted).square().mean().sqrt() / wanted.std()
        assert apart < error, (name, apart)
    assert describe(out / "nf4")["quantization"] == "nf4"
    convert(config.model_copy(update={"also": ()}), Context(out), trained=base, base=base)
    assert sorted(p.name for p in out.iterdir()) == ["model"]


TEXTS = (
    "the quick brown fox",
    " It's 12345 naïve ÜberGRÖSSE\n\n  x",
    "lazy<|end|>dog  the\tdog 漢字",
)


@pytest.mark.parametrize("split", [None, *SPLITS], ids=["gpt-2", *SPLITS.values()])
def test_a_byte_level_tokenizer_comes_back_from_gguf(tmp_path: Path, split: str | None) -> None:
    base = byte_level(tmp_path / "base", split=split) / "model"
    assert_same_tokens(base, tmp_path)


def test_a_sentencepiece_tokenizer_comes_back_from_gguf(tmp_path: Path) -> None:
    """As of Llama 2 and Mistral 7B: pieces with a space mark, and bytes for all else."""
    from transformers import LlamaTokenizer
    from transformers.tokenization_utils_base import generate_merges

    special = ["<unk>", "<s>", "</s>", *(f"<0x{byte:02X}>" for byte in range(256))]
    joined = ["th", "▁th", "▁the", "he", "er", "▁b", "▁br", "ro", "▁bro", "wn", "▁brown", "ow"]
    letters = sorted(set("▁thequickbrownfoxjumpslazydgI's123"))
    vocabulary = {token: number for number, token in enumerate([*special, *joined, *letters])}
    scores = {token: -float(number) for number, token in enumerate([*joined, *letters])}
    merges = generate_merges(vocabulary, scores)
    tokenizer = LlamaTokenizer(vocab=vocabulary, merges=merges)
    base = byte_level(tmp_path / "base", rows=len(vocabulary)) / "model"
    tokenizer.save_pretrained(base)
    assert_same_tokens(base, tmp_path)
    LlamaTokenizer(vocab=vocabulary, merges=merges[1:]).save_pretrained(base)
    with pytest.raises(StageError, match="are never merged"):
        gguf.write(base, tmp_path / "other.gguf", quantised=False)


def test_a_split_that_gguf_has_no_name_for_is_refused(tmp_path: Path) -> None:
    base = byte_level(tmp_path / "base", split="[a-z]+") / "model"
    with pytest.raises(StageError, match="no known name for a text split by '\\[a-z\\]\\+'"):
        gguf.write(base, tmp_path / "a.gguf", quantised=False)


def assert_same_tokens(model: Path, folder: Path) -> None:
    from transformers import AutoTokenizer

    gguf.write(model, folder / "a.gguf", quantised=False)
    back = AutoTokenizer.from_pretrained(folder, gguf_file="a.gguf")
    own = AutoTokenizer.from_pretrained(model)
    for text in TEXTS:
        assert back(text)["input_ids"] == own(text)["input_ids"], text


def byte_level(out: Path, *, split: str | None = None, rows: int = 280) -> Path:
    """A Llama with a tokenizer that GGUF is written for."""
    import torch
    from tokenizers import Regex, Tokenizer, decoders, models, pre_tokenizers, trainers
    from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast

    words = Tokenizer(models.BPE())
    bytewise = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=split is None)
    steps = [pre_tokenizers.Split(Regex(split), behavior="isolated")] if split else []
    words.pre_tokenizer = pre_tokenizers.Sequence([*steps, bytewise]) if steps else bytewise  # type: ignore[assignment]
    words.decoder = decoders.ByteLevel()  # type: ignore[assignment]
    trainer = trainers.BpeTrainer(
        vocab_size=280,
        special_tokens=["<|pad|>", "<|end|>"],
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    words.train_from_iterator(["the quick brown fox jumps over the lazy dog 12345"], trainer)
    PreTrainedTokenizerFast(
        tokenizer_object=words, pad_token="<|pad|>", eos_token="<|end|>"
    ).save_pretrained(out / "model")
    sizes: dict[str, Any] = {"hidden_size": 64, "intermediate_size": 128, "num_hidden_layers": 2}
    heads: dict[str, Any] = {"num_attention_heads": 4, "num_key_value_heads": 2}
    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=rows, pad_token_id=0, eos_token_id=1, bos_token_id=None, **sizes, **heads
    )
    LlamaForCausalLM(config).save_pretrained(out / "model")
    return out


# Refusals


def refused(tmp_path: Path, trained: Path, base: Path) -> str:
    with pytest.raises(StageError) as error:
        convert(FLOAT32, Context(tmp_path / "out"), trained=trained, base=base)
    assert not (tmp_path / "out" / "model").exists()
    return str(error.value)


def test_a_base_that_the_training_did_not_have_is_refused(bases: Path, tmp_path: Path) -> None:
    for name in ("trained", "base"):
        shutil.copytree(bases / "untied", tmp_path / name)
    start = manifest.Identity(stage="fetch", version=1, config={}, inputs={})
    manifest.write(tmp_path / "base", manifest.Manifest(identity=start))
    for given in (start.fingerprint, "0123456789abcdef"):
        training = manifest.Identity(stage="sft", version=1, config={}, inputs={"model": given})
        manifest.write(tmp_path / "trained", manifest.Manifest(identity=training))
        if given == start.fingerprint:
            convert(
                FLOAT32,
                Context(tmp_path / "good"),
                trained=tmp_path / "trained",
                base=tmp_path / "base",
            )
    message = refused(tmp_path, tmp_path / "trained", tmp_path / "base")
    assert start.fingerprint in message
    assert "model 0123456789abcdef" in message


@pytest.mark.parametrize("case", CASES)
def test_folders_from_elsewhere_convert_as_where_they_lay(
    shards: Path, exports: Mapping[str, Path], tmp_path: Path, case: str
) -> None:
    """Fetched first; of what a fetched folder was trained from no manifest tells."""
    base, *_ = CASES[case]
    places = {
        "trained": LocalCheckpoint(path=shards / case / "model"),
        "base": LocalModel(path=shards / "base" / base / "model"),
    }
    for name, source in places.items():
        fetch(Fetch(source=source), Context(tmp_path / name))
        known = manifest.Identity(stage="fetch", version=1, config={"at": name}, inputs={})
        manifest.write(tmp_path / name, manifest.Manifest(identity=known))
    assert not list(tmp_path.rglob("*.py"))
    out = tmp_path / "out"
    convert(AS_PEFT, Context(out), trained=tmp_path / "trained", base=tmp_path / "base")
    assert_equal(weights(out), weights(exports[case]))


@pytest.mark.parametrize("case", ["dcp_dora", "zero1_dora", "zero3_dora"])
def test_shards_tell_a_swapped_base_by_its_weights(shards: Path, tmp_path: Path, case: str) -> None:
    write_base(tmp_path / "other" / "model", tie=False, seed=1)
    message = refused(tmp_path, shards / case, tmp_path / "other")
    assert "is not what the adapter was trained on" in message


def test_another_architecture_is_refused(shards: Path, bases: Path, tmp_path: Path) -> None:
    write_base(tmp_path / "even" / "model", tie=False, even=True)
    assert "hidden_size is 35" in refused(tmp_path, bases / "untied", tmp_path / "even")
    save_adapter(tmp_path / "trained", bases / "untied", target_modules=["q_proj"])
    message = refused(tmp_path, tmp_path / "trained", tmp_path / "even")
    assert "q_proj.weight has shape (3, 35)" in message and "asks for (3, 64)" in message
    gpt2(tmp_path / "gpt2")
    message = refused(tmp_path, tmp_path / "trained", tmp_path / "gpt2")
    assert "PEFT makes no adapter of it" in message


def edit_json(file: Path, **changes: Any) -> None:
    file.write_text(json.dumps(json.loads(file.read_text()) | changes))


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        ({"lora_alpha": 0}, "drops the adapter"),
        ({"lora_alpha": "8"}, "lora_alpha is '8', and a number was expected"),
        ({"alpha_pattern": {"q_proj": None}}, "alpha_pattern 'q_proj' is None"),
        ({"alpha_pattern": {"(q_proj": 3}}, "'(q_proj' is no regular expression"),
        ({"alpha_pattern": ["q_proj"]}, "a mapping was expected"),
        ({"target_modules": "(q_proj"}, "PEFT makes no adapter of it"),
        ({"init_lora_weights": "pissa"}, "'pissa' changes the base weights"),
        ({"peft_type": "IA3"}, "peft_type 'IA3'"),
        ({"target_parameters": ["experts"]}, "target_parameters"),
    ],
)
def test_adapters_that_are_not_lora_are_refused(
    bases: Path, tmp_path: Path, changes: Mapping[str, Any], said: str
) -> None:
    save_adapter(tmp_path / "trained", bases / "untied", target_modules=["q_proj"])
    edit_json(tmp_path / "trained" / "model" / "adapter_config.json", **changes)
    assert said in refused(tmp_path, tmp_path / "trained", bases / "untied")


def edit_adapter(trained: Path, change: Callable[[dict[str, Any]], None]) -> None:
    from safetensors.torch import load_file, save_file

    file = trained / "model" / "adapter_model.safetensors"
    tensors = load_file(file)
    change(tensors)
    save_file(tensors, file)


def test_damaged_adapters_are_named(bases: Path, tmp_path: Path) -> None:
    import torch

    key = "base_model.model.model.layers.0.self_attn.q_proj.lora_{}.weight"
    damages: list[tuple[Callable[[dict[str, Any]], Any], str]] = [
        (lambda t: t.update({key.format("A"): torch.empty(0, 35)}), "lora_A.weight: empty"),
        (lambda t: t[key.format("B")].fill_(float("nan")), "not finite"),
        (lambda t: t.pop(key.format("B")), "has one of lora_A and lora_B"),
        (lambda t: t.clear(), "holds no weights"),
    ]
    for damage, said in damages:
        save_adapter(tmp_path / "trained", bases / "untied", target_modules=["q_proj"])
        edit_adapter(tmp_path / "trained", damage)
        assert said in refused(tmp_path, tmp_path / "trained", bases / "untied")


def add_magnitude(tensors: dict[str, Any], *, length: int) -> None:
    import torch

    module = "base_model.model.model.layers.0.self_attn.q_proj"
    tensors[f"{module}.lora_magnitude_vector"] = torch.ones(length)


def drop_layer(tensors: dict[str, Any]) -> None:
    for name in [name for name in tensors if "layers.1." in name]:
        del tensors[name]


UNFIT: Mapping[str, tuple[Mapping[str, Any], Callable[[dict[str, Any]], Any] | None, str]] = {
    "lacks a layer": ({}, drop_layer, "lacks lora_A of model.layers.1.self_attn.q_proj.weight"),
    "other rank": ({"r": 16}, None, "has shape (3, 35), and"),
    "lacks a whole tensor": ({"modules_to_save": ["lm_head"]}, None, "lacks lm_head.weight"),
    "lacks magnitudes": ({"use_dora": True}, None, "lacks lora_magnitude_vector"),
    "magnitude of no DoRA": (
        {},
        lambda t: add_magnitude(t, length=30),
        "holds lora_magnitude_vector of model.layers.0.self_attn.q_proj.weight",
    ),
    "other module": ({"target_modules": ["k_proj"]}, None, "(4 such)"),
}


@pytest.mark.parametrize("case", UNFIT)
def test_an_adapter_has_the_tensors_that_peft_makes_of_its_config(
    bases: Path, tmp_path: Path, case: str
) -> None:
    changes, damage, said = UNFIT[case]
    trained, base = tmp_path / "trained", bases / "untied"
    save_adapter(trained, base, target_modules=["q_proj"])
    assert validate(trained / "model", base=base / "model") == ()
    edit_json(trained / "model" / "adapter_config.json", **changes)
    if damage:
        edit_adapter(trained, damage)
    lines = validate(trained / "model", base=base / "model")
    assert said in lines[0] and "adapter_config.json on" in lines[0]
    assert refused(tmp_path, trained, base).splitlines() == list(lines)


def test_a_magnitude_has_one_length_for_each_output(bases: Path, tmp_path: Path) -> None:
    trained, base = tmp_path / "trained", bases / "untied"
    save_adapter(trained, base, target_modules=["q_proj"], use_dora=True)
    edit_adapter(trained, lambda tensors: add_magnitude(tensors, length=7))
    (line,) = validate(trained / "model", base=base / "model")
    assert "lora_magnitude_vector" in line and "has shape (7,), and" in line


def edit_base(base: Path, change: Callable[[dict[str, Any]], Any]) -> None:
    from safetensors.torch import load_file, save_file

    file = base / "model" / "model.safetensors"
    tensors = load_file(file)
    change(tensors)
    save_file(tensors, file, metadata={"format": "pt"})


@pytest.mark.parametrize(
    "name", ["model.norm.weight", "model.layers.1.self_attn.q_proj.weight", "lm_head.weight"]
)
def test_every_frozen_tensor_in_shards_must_be_the_bases(
    bases: Path, tmp_path: Path, name: str
) -> None:
    trained, other = tmp_path / "trained", tmp_path / "other"
    model = with_adapter(load(bases / "untied" / "model"), target_modules=["q_proj"])
    save_directory(trained, model, model.state_dict())
    shutil.copytree(bases / "untied", other)
    edit_base(other, lambda tensors: tensors[name].mul_(1.01))
    assert f"{name} is not what the adapter was" in refused(tmp_path, trained, other)
    figures = convert(FLOAT32, Context(tmp_path), trained=trained, base=bases / "untied")
    assert figures["base_verified"] is True


def test_weights_that_training_loaded_in_half_precision_are_still_the_bases(
    bases: Path, tmp_path: Path
) -> None:
    import torch

    rounded = load(bases / "untied" / "model").to(torch.bfloat16).float()
    model = with_adapter(rounded, target_modules=["q_proj"])
    save_directory(tmp_path / "trained", model, model.state_dict())
    convert(FLOAT32, Context(tmp_path), trained=tmp_path / "trained", base=bases / "untied")


def test_the_figures_say_when_an_adapter_does_not_tell_its_base(
    bases: Path, tmp_path: Path
) -> None:
    trained, base = tmp_path / "trained", bases / "untied"
    save_adapter(trained, base, target_modules=["q_proj"])
    verified = []
    for known in (False, True):
        if known:
            note_base(trained / "model")
        out = Context(tmp_path / str(known))
        verified.append(convert(FLOAT32, out, trained=trained, base=base)["base_verified"])
    assert verified == [False, True]


def test_a_fingerprint_changes_with_rows_inside_a_tensor(bases: Path, tmp_path: Path) -> None:
    base = tmp_path / "base"
    shutil.copytree(bases / "untied", base)
    before = fingerprint(base / "model")
    edit_base(base, lambda t: t["model.embed_tokens.weight"][10:-10].add_(1e-3))
    assert fingerprint(base / "model") != before


def test_each_save_of_an_adapter_tells_its_base(bases: Path, tmp_path: Path) -> None:
    """Also one of which the trainer writes shards alone, without a config."""
    from transformers import AutoTokenizer

    base = bases / "untied" / "model"
    trainer = SimpleNamespace(
        model=with_adapter(load(base), target_modules=["q_proj"]),
        processing_class=AutoTokenizer.from_pretrained(base),
        args=SimpleNamespace(process_index=0),
        is_deepspeed_enabled=False,
        accelerator=SimpleNamespace(wait_for_everyone=lambda: None, unwrap_model=lambda m: m),
    )
    (tmp_path / resume.SAVING / "checkpoint-3" / "pytorch_model_fsdp_0").mkdir(parents=True)
    saves = Saves(trainer, Context(tmp_path))
    saves.begin()
    saves.written(3)
    saves.finish()
    newest = resume.newest(tmp_path)
    assert newest and noted_base(newest) == fingerprint(base)
    marked = json.loads((newest / resume.MARKER).read_text())["files"]
    assert {"base.json", "adapter_config.json", "config.json", "tokenizer.json"} <= marked.keys()


def test_a_quantised_whole_model_and_base_are_refused(bases: Path, tmp_path: Path) -> None:
    nf4 = {"load_in_4bit": True, "bnb_4bit_quant_type": "nf4", "quant_method": "bitsandbytes"}
    shutil.copytree(bases / "untied", tmp_path / "nf4")
    edit_json(tmp_path / "nf4" / "model" / "config.json", quantization_config=nf4)
    assert "held in nf4" in refused(tmp_path, tmp_path / "nf4", bases / "untied")
    save_adapter(tmp_path / "trained", bases / "untied", target_modules=["q_proj"])
    message = refused(tmp_path, tmp_path / "trained", tmp_path / "nf4")
    assert "held in nf4; an adapter is merged into plain, whole weights" in message


def test_several_ranks_are_refused(
    bases: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("WORLD_SIZE", "2")
    assert "2 ranks" in refused(tmp_path, bases / "untied", bases / "untied")


def copy(shards: Path, case: str, tmp_path: Path) -> tuple[Path, Path]:
    shutil.copytree(shards / case, tmp_path / case, dirs_exist_ok=True)
    return tmp_path / case, shards / "base" / CASES[case][0]


def test_damaged_shards_are_named(shards: Path, tmp_path: Path) -> None:
    import torch

    def cut(file: Path) -> None:
        file.write_bytes(file.read_bytes()[:-2000])

    dcp, ranks, zero = "dcp_full_untied", "ranks_full_untied", "zero3_full_untied"
    rank1 = "global_step1/bf16_zero_pp_rank_1_mp_rank_00_optim_states.pt"
    damages: list[tuple[str, Callable[[Path], Any], str]] = [
        (dcp, lambda m: (m / "pytorch_model_fsdp_0/.metadata").unlink(), "this save was cut off"),
        (dcp, lambda m: cut(m / "pytorch_model_fsdp_0/__1_0.distcp"), "cannot be read"),
        (dcp, lambda m: (m / "pytorch_model_fsdp_0/__1_0.distcp").unlink(), "missing"),
        (ranks, lambda m: (m / "pytorch_model_fsdp_0_rank0.bin").unlink(), "file of rank 0 is"),
        (ranks, lambda m: (m / "pytorch_model_fsdp_0_rank1.bin").unlink(), "the 1 files hold"),
        (ranks, lambda m: cut(m / "pytorch_model_fsdp_0_rank1.bin"), "perhaps cut off"),
        (zero, lambda m: (m / "latest").unlink(), "latest: missing"),
        (zero, lambda m: (m / "latest").write_text("global_step9"), "names 'global_step9'"),
        (zero, lambda m: (m / rank1).unlink(), "1 optimizer shards of 2 ranks"),
        (zero, lambda m: torch.save({"a": 1}, m / rank1), "have no 'optimizer_state_dict'"),
        (zero, lambda m: cut(m / rank1), "perhaps cut off"),
        (zero, lambda m: (m / "model.safetensors").write_bytes(b"?"), "2 layouts"),
        (zero, lambda m: shutil.rmtree(m / "global_step1"), "no weights in a known layout"),
    ]
    for case, damage, said in damages:
        trained, base = copy(shards, case, tmp_path)
        damage(trained / "model")
        assert said in refused(tmp_path, trained, base)
        shutil.rmtree(trained)


class ByName(pickle.Pickler):
    """Writes as Python 3.11.2 writes members of enumerations, and 3.13 paths."""

    def reducer_override(self, value: Any) -> Any:
        if isinstance(value, Enum):
            return getattr, (type(value), value.name)
        return NotImplemented


@pytest.mark.parametrize("case", ["dcp_full_untied", "zero3_full_untied", "zero2_full_tied"])
def test_what_other_versions_of_python_pickled_is_read(
    shards: Path, tmp_path: Path, case: str
) -> None:
    import torch

    trained, _ = copy(shards, case, tmp_path)
    before = describe(trained / "model")
    files = [*trained.rglob(".metadata"), *trained.rglob("*_states.pt")]
    module = SimpleNamespace(**(vars(pickle) | {"Pickler": ByName}))
    for file in files:
        if file.name == ".metadata":
            held = io.BytesIO()
            ByName(held, protocol=2).dump(pickle.loads(file.read_bytes()))
            file.write_bytes(held.getvalue().replace(b"cpathlib\n", b"cpathlib._local\n"))
        else:
            held = torch.load(file, weights_only=False)
            torch.save(held, file, pickle_module=module)
    assert any(b"getattr" in file.read_bytes() for file in files)
    assert {**describe(trained / "model"), "bytes": before["bytes"]} == before


def test_only_members_of_enumerations_are_reached_for() -> None:
    assert enum_member(inspect._ParameterKind, "POSITIONAL_ONLY").value == 0
    for kind, name in ((os, "mkdir"), (inspect._ParameterKind, "__class__"), (Bomb, "__reduce__")):
        with pytest.raises(pickle.UnpicklingError, match="in what is no enumeration"):
            enum_member(kind, name)


class Bomb:
    def __reduce__(self) -> Any:
        return os.mkdir, ("exploded",)


@pytest.mark.parametrize(
    ("case", "place"),
    [
        ("zero3_full_untied", "global_step1/zero_pp_rank_0_mp_rank_00_model_states.pt"),
        ("dcp_full_untied", "pytorch_model_fsdp_0/.metadata"),
        ("ranks_full_untied", "pytorch_model_fsdp_0_rank1.bin"),
        ("bin", "pytorch_model.bin"),
        ("bin", "adapter_model.bin"),
    ],
)
def test_pickles_cannot_run_code(
    shards: Path,
    bases: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    case: str,
    place: str,
) -> None:
    import torch

    monkeypatch.chdir(tmp_path)
    trained, base = tmp_path / "trained", bases / "untied"
    if case == "bin":
        save_adapter(trained, base, target_modules=["q_proj"])
        (trained / "model" / "adapter_model.safetensors").unlink()
        if place == "pytorch_model.bin":
            (trained / "model" / "adapter_config.json").unlink()
    else:
        trained, base = copy(shards, case, tmp_path)
    file = trained / "model" / place
    if place.endswith(".metadata"):
        file.write_bytes(pickle.dumps(Bomb()))
    else:
        torch.save({"weight": Bomb()}, file)
    message = refused(tmp_path, trained, base)
    assert "refused" in message or "it names posix.mkdir" in message
    assert not (tmp_path / "exploded").exists()
