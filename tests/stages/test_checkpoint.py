"""The checkpoint contract: facts without tensors, one line per fault, exact safetensors."""

import json
import os
import re
import shutil
import subprocess
import sys
import zipfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from stages.base import StageError
from stages.checkpoint import describe, layout, validate
from stages.checkpoint.__main__ import main
from stages.checkpoint.conversation import load_tokenizer
from stages.checkpoint.export import write
from stages.checkpoint.fresh import load_faults
from stages.checkpoint.lineage import fingerprint, note_base
from stages.checkpoint.names import LowRank, Plain, Saved, Unknown, meaning, plain_name
from stages.checkpoint.quantised import quantised_parameters
from stages.checkpoint.readers import open_weights
from stages.checkpoint.trained import Training, filled, original_model, trained_model
from stages.checkpoint.weights import all_not_finite, of_tensors
from tests.stages.write_shards import VOCABULARY, with_adapter, write_base

ROOT = Path(__file__).parents[2]
INDEX = "model.safetensors.index.json"
SECOND = "model-00002-of-00004.safetensors"
QUERY = "model.layers.0.self_attn.q_proj"


@pytest.fixture(scope="module")
def sound(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A sound model in three indexed shards; ``model`` and ``peft`` beside each other."""
    from transformers import AutoModelForCausalLM

    out = tmp_path_factory.mktemp("sound")
    write_base(out / "whole", tie=False)
    model = AutoModelForCausalLM.from_pretrained(out / "whole")
    shutil.copytree(out / "whole", out / "model")
    (out / "model" / "model.safetensors").unlink()
    model.save_pretrained(out / "model", max_shard_size="30KB")
    edit_json(out / "model" / "generation_config.json", eos_token_id=[1, 3])
    with_adapter(model, target_modules=["q_proj"]).save_pretrained(out / "peft")
    return out


@pytest.fixture
def model(sound: Path, tmp_path: Path) -> Path:
    """A copy of the sound model, to be damaged."""
    return Path(shutil.copytree(sound / "model", tmp_path / "model"))


def edit_json(file: Path, **changes: Any) -> None:
    values = json.loads(file.read_text()) if file.exists() else {}
    file.write_text(json.dumps(values | changes))


def edit_tensors(model: Path, change: Callable[[dict[str, Any]], Any]) -> None:
    """Rewrite the shard that holds the first layer's query; the index stays as it is."""
    from safetensors.torch import load_file, save_file

    file = model / json.loads((model / INDEX).read_text())["weight_map"][f"{QUERY}.weight"]
    tensors = load_file(file)
    change(tensors)
    save_file(tensors, file, metadata={"format": "pt"})


def edit_index(model: Path, change: Callable[[dict[str, Any]], Any]) -> None:
    index = json.loads((model / INDEX).read_text())
    change(index["weight_map"])
    (model / INDEX).write_text(json.dumps(index))


def fresh(*argv: str) -> subprocess.CompletedProcess[str]:
    env = os.environ | {"PYTHONPATH": str(ROOT)}
    return subprocess.run([sys.executable, *argv], env=env, capture_output=True, text=True)


# Facts


def test_describing_and_converting_load_no_torch_on_import() -> None:
    loaded = "any(name in sys.modules for name in ('torch', 'transformers'))"
    done = fresh("-c", f"import stages.checkpoint, stages.convert, sys; sys.exit({loaded})")
    assert done.returncode == 0, done.stderr


def test_facts_of_a_whole_model(sound: Path) -> None:
    facts = json.loads(json.dumps(describe(sound / "model")))
    hashes = facts.pop("tokenizer_sha256"), facts.pop("template_sha256")
    assert all(len(digest) == 64 for digest in hashes)
    assert facts.pop("bytes") > 4 * 20615
    assert facts == {
        "layout": "safetensors",
        "architecture": "LlamaForCausalLM",
        "model_type": "llama",
        "parameters": 20615,
        "dtypes": {"float32": 20615},
        "vocabulary_rows": VOCABULARY,
        "tied": False,
        "adapter": None,
        "quantization": None,
        "precision": "float32",
        "resumable": False,
        "stop_ids": [1, 3],
    }
    whole = describe(sound / "whole")
    assert (whole["parameters"], whole["stop_ids"]) == (20615, [1])


def test_facts_of_an_adapter(sound: Path) -> None:
    facts = describe(sound / "peft")
    assert (facts["layout"], facts["parameters"]) == ("adapter", 2 * (3 * 35 + 30 * 3))
    assert facts["adapter"] == {
        "base": str(sound / "whole"),
        "base_fingerprint": None,
        "rank": 3,
        "alpha": 7,
        "dora": False,
        "rank_stabilised": False,
        "saved_whole": [],
    }
    assert facts["tokenizer_sha256"] is None


def test_a_head_that_is_not_there_tells_a_tied_model(tmp_path: Path) -> None:
    for tie in (True, False):
        write_base(tmp_path / str(tie), tie=tie)
        config = json.loads((tmp_path / str(tie) / "config.json").read_text())
        config.pop("tie_word_embeddings", None)
        (tmp_path / str(tie) / "config.json").write_text(json.dumps(config))
        assert describe(tmp_path / str(tie))["tied"] is tie


def test_the_tokenizers_hash_is_of_what_decides_the_ids(model: Path) -> None:
    before = describe(model)
    edit_json(
        model / "tokenizer.json",
        truncation={"direction": "Right", "max_length": 8, "strategy": "LongestFirst", "stride": 0},
    )
    assert describe(model)["tokenizer_sha256"] == before["tokenizer_sha256"]
    vocabulary = json.loads((model / "tokenizer.json").read_text())
    vocabulary["model"]["vocab"]["w59"], vocabulary["model"]["vocab"]["w58"] = 62, 63
    (model / "tokenizer.json").write_text(json.dumps(vocabulary))
    assert describe(model)["tokenizer_sha256"] != before["tokenizer_sha256"]
    (model / "chat_template.jinja").write_text("other")
    assert describe(model)["template_sha256"] != before["template_sha256"]


def test_a_template_inside_the_tokenizers_config_counts_the_same(model: Path) -> None:
    before = describe(model)["template_sha256"]
    text = (model / "chat_template.jinja").read_text()
    (model / "chat_template.jinja").unlink()
    assert describe(model)["template_sha256"] is None
    edit_json(model / "tokenizer_config.json", chat_template=text)
    assert describe(model)["template_sha256"] == before


def test_a_folder_without_weights_says_what_it_holds(tmp_path: Path) -> None:
    with pytest.raises(StageError, match="no such checkpoint folder"):
        layout(tmp_path / "absent")
    (tmp_path / "model-00001-of-00002.safetensors").write_bytes(b"")
    with pytest.raises(StageError, match=r"it holds model-00001-of-00002\.safetensors"):
        describe(tmp_path)


def test_an_adapter_file_without_tensors_is_no_layout(tmp_path: Path) -> None:
    from safetensors.torch import save_file

    save_file({}, tmp_path / "adapter_model.safetensors")
    (tmp_path / "global_step1").mkdir()
    (tmp_path / "global_step1" / "zero_pp_rank_0_mp_rank_00_optim_states.pt").write_bytes(b"")
    assert layout(tmp_path) == "zero"


@pytest.mark.parametrize("name", ["model.safetensors", "adapter_model.safetensors"])
def test_what_fsdp_gathers_to_resume_from_is_not_a_second_layout(tmp_path: Path, name: str) -> None:
    import torch
    from safetensors.torch import save_file

    save_file({"a": torch.ones(2)}, tmp_path / name)
    torch.save({"a": torch.ones(2)}, tmp_path / "pytorch_model_fsdp.bin")
    with pytest.raises(StageError, match="2 layouts"):
        layout(tmp_path)
    (tmp_path / "trainer_state.json").write_text("{}")
    assert layout(tmp_path) == ("safetensors" if name.startswith("model") else "adapter")


# Faults


def test_sound_checkpoints_have_no_faults(sound: Path, tmp_path: Path) -> None:
    assert validate(sound / "model", "float32", chat=True) == ()
    assert validate(sound / "peft", base=sound / "whole") == ()
    write_base(tmp_path, tie=True)
    edit_json(tmp_path / "generation_config.json", eos_token_id=3)
    assert validate(tmp_path) == ()


def truncate(model: Path) -> None:
    file = model / "model-00002-of-00004.safetensors"
    file.write_bytes(file.read_bytes()[:-40])


def garble(model: Path) -> None:
    file = model / "model-00002-of-00004.safetensors"
    content = bytearray(file.read_bytes())
    content[8:12] = b"????"
    file.write_bytes(content)


def poison(model: Path) -> None:
    def change(tensors: dict[str, Any]) -> None:
        tensors[f"{QUERY}.weight"][2, 3:5] = float("nan")

    edit_tensors(model, change)


def empty(model: Path) -> None:
    import torch

    edit_tensors(model, lambda t: t.update({f"{QUERY}.weight": torch.empty(0, 35)}))


def to_half(model: Path) -> None:
    edit_tensors(model, lambda t: t.update({f"{QUERY}.weight": t[f"{QUERY}.weight"].half()}))


def forget(model: Path) -> None:
    edit_tensors(model, lambda t: t.pop(f"{QUERY}.weight"))
    edit_index(model, lambda m: m.pop(f"{QUERY}.weight"))


def invent(model: Path) -> None:
    import torch

    edit_tensors(model, lambda t: t.update({"model.stray": torch.ones(2)}))
    file = json.loads((model / INDEX).read_text())["weight_map"][f"{QUERY}.weight"]
    edit_index(model, lambda m: m.update({"model.stray": file}))


def lengthen_vocabulary(model: Path) -> None:
    values = json.loads((model / "tokenizer.json").read_text())
    values["model"]["vocab"]["beyond"] = 90
    (model / "tokenizer.json").write_text(json.dumps(values))


def remove_tokenizer(model: Path) -> None:
    (model / "tokenizer.json").unlink()


def edit_header(model: Path, change: Callable[[dict[str, Any]], Any]) -> None:
    """Rewrite the header of the shard with the first layer's query; the bytes after it stay."""
    file = model / json.loads((model / INDEX).read_text())["weight_map"][f"{QUERY}.weight"]
    content = file.read_bytes()
    end = 8 + int.from_bytes(content[:8], "little")
    header = json.loads(content[8:end])
    change(header)
    written = json.dumps(header).encode()
    file.write_bytes(len(written).to_bytes(8, "little") + written + content[end:])


def edit_entry(model: Path, **facts: Any) -> None:
    edit_header(model, lambda header: header[f"{QUERY}.weight"].update(facts))


def nest(model: Path) -> None:
    deep = b"[" * 200_000
    (model / SECOND).write_bytes(len(deep).to_bytes(8, "little") + deep)


def make_folder(model: Path) -> None:
    (model / SECOND).unlink()
    (model / SECOND).mkdir()


def overlap(model: Path) -> None:
    """Two names for the same bytes, and a hole where the other's were."""

    def change(header: dict[str, Any]) -> None:
        other = next(f for n, f in header.items() if n.endswith("v_proj.weight"))
        other["data_offsets"] = header[f"{QUERY.replace('q_', 'k_')}.weight"]["data_offsets"]

    edit_header(model, change)


def write_twice(model: Path) -> None:
    import torch

    edit_tensors(model, lambda t: t.update({"model.norm.weight": torch.ones(35)}))


def lead_away(model: Path) -> None:
    (model / SECOND).rename(model.parent / SECOND)
    mapped = json.loads((model / INDEX).read_text())["weight_map"]
    away = {n: f"../{f}" if f == SECOND else f for n, f in mapped.items()}
    edit_index(model, lambda entries: entries.update(away))


def to_whole_numbers(model: Path) -> None:
    import torch

    edit_tensors(
        model,
        lambda t: t.update({f"{QUERY}.weight": torch.ones(30, 35, dtype=torch.int32)}),
    )


def to_eight_bits(model: Path) -> None:
    import torch

    edit_tensors(
        model,
        lambda t: t.update({f"{QUERY}.weight": t[f"{QUERY}.weight"].to(torch.float8_e4m3fn)}),
    )


FILE_DAMAGES: dict[str, tuple[Callable[[Path], Any], tuple[str, ...]]] = {
    "header nested deep": (nest, (f"{SECOND}: its safetensors header is garbled",)),
    "shard is a folder": (make_folder, (f"{SECOND}: cannot be read (Is a directory)",)),
    "one offset": (
        lambda m: edit_entry(m, data_offsets=[1]),
        ("header is garbled (not enough values to unpack",),
    ),
    "negative offset": (
        lambda m: edit_entry(m, data_offsets=[-8, 4192]),
        ("header is garbled (-8 is no length and no offset",),
    ),
    "fractional shape": (
        lambda m: edit_entry(m, shape=[30.0, 35]),
        ("header is garbled (30.0 is no length",),
    ),
    "unknown type": (
        lambda m: edit_entry(m, dtype="F7"),
        ("header is garbled (its data type 'F7' is not known)",),
    ),
    "overlapping tensors": (overlap, ("header is garbled (",)),
    "tensor in two shards": (write_twice, ("model.norm.weight stands in",)),
    "index leads away": (lead_away, (f"{INDEX}: names '../{SECOND}', and what it names must lie",)),
    "index names a number": (
        lambda m: edit_index(m, lambda e: e.update({f"{QUERY}.weight": 5})),
        (f"{INDEX}: names 5, and what it names must lie in",),
    ),
    "index is of another kind": (
        lambda m: edit_json(m / INDEX, weight_map=["a"]),
        (f"{INDEX}: has no weight_map",),
    ),
    "two models": (
        lambda m: shutil.copyfile(m / SECOND, m / "model.safetensors"),
        (f"holds model.safetensors and {INDEX}, and which is the model cannot be told",),
    ),
}
"""Faults of the files alone, at which no reader may go on."""


DAMAGES: dict[str, tuple[Callable[[Path], Any], tuple[str, ...]]] = {
    "truncated shard": (truncate, ("00002-of-00004.safetensors: truncated",)),
    "garbled shard": (garble, ("00002-of-00004.safetensors: its safetensors header is garbled",)),
    "absent shard": (
        lambda m: (m / "model-00002-of-00004.safetensors").unlink(),
        ("00002-of-00004.safetensors: missing",),
    ),
    "missing index entry": (
        lambda m: edit_index(m, lambda entries: entries.pop("model.norm.weight")),
        ("does not list model.norm.weight",),
    ),
    "index entry too many": (
        lambda m: edit_index(
            m, lambda e: e.update({"model.stray": "model-00002-of-00004.safetensors"})
        ),
        ("says that model.stray is in model-00002-of-00004.safetensors, where it is not",),
    ),
    "NaN": (poison, (f"{QUERY}.weight: 2 of its 1050 values are not finite",)),
    "empty tensor": (
        empty,
        (f"{QUERY}.weight: shape (0, 35), the config asks for (30, 35)", "empty, of shape (0, 35)"),
    ),
    "data type": (to_half, (f"{QUERY}.weight: is float16, float32 was asked",)),
    "missing tensor": (forget, (f"{QUERY}.weight: missing, the architecture has it",)),
    "tensor too many": (invent, ("model.stray: not expected, the architecture has no such",)),
    "vocabulary of the config": (
        lambda m: edit_json(m / "config.json", vocab_size=60),
        (
            "lm_head.weight: shape (67, 35), the config asks for (60, 35)",
            "model.embed_tokens.weight: shape (67, 35), the config asks for (60, 35)",
            "the tokenizer has ids up to 63, the embedding 60 rows",
        ),
    ),
    "vocabulary of the tokenizer": (
        lengthen_vocabulary,
        ("the tokenizer has ids up to 90, the embedding 67 rows",),
    ),
    "missing tokenizer": (remove_tokenizer, ("no tokenizer",)),
    "special id": (
        lambda m: edit_json(m / "generation_config.json", pad_token_id=67),
        ("generation_config.json pad_token_id is id 67, the embedding has 67 rows",),
    ),
    "padding of the embedding": (
        lambda m: edit_json(m / "config.json", pad_token_id=67),
        ("no causal model can be built: Padding_idx must be within num_embeddings",),
    ),
    "stop id": (
        lambda m: edit_json(m / "generation_config.json", eos_token_id=1),
        ("eos_token_id [1] lacks 3 ('<|end|>'), which ends a turn",),
    ),
    "missing template": (
        lambda m: (m / "chat_template.jinja").unlink(),
        ("no chat template, and a chat model needs one",),
    ),
    "template": (
        lambda m: (m / "chat_template.jinja").write_text("{% for %}"),
        ("the chat template cannot render",),
    ),
    "adapter config": (
        lambda m: edit_json(m / "adapter_config.json", r=1),
        ("an adapter_config.json beside a whole model",),
    ),
    "foreign file": (
        lambda m: shutil.copyfile(m / "model-00002-of-00004.safetensors", m / "x.safetensors"),
        ("x.safetensors: a foreign file",),
    ),
    "whole numbers": (
        to_whole_numbers,
        (f"{QUERY}.weight: is int32, the architecture has floating-point numbers there",),
    ),
    "8-bit floats": (to_eight_bits, (f"{QUERY}.weight: is float8_e4m3fn, float32 was asked",)),
    "stop id of several": (
        lambda m: edit_json(m / "generation_config.json", eos_token_id=[99, 3]),
        ("generation_config.json eos_token_id is id 99, the embedding has 67 rows",),
    ),
    "stop id that is a word": (
        lambda m: edit_json(m / "generation_config.json", eos_token_id="<|end|>"),
        ("generation_config.json: eos_token_id is '<|end|>', and an id is a whole number",),
    ),
    "no heads": (
        lambda m: edit_json(m / "config.json", num_attention_heads=0),
        ("no causal model can be built",),
    ),
    "template's bytes": (
        lambda m: (m / "chat_template.jinja").write_bytes(b"\xff\xfe"),
        ("chat_template.jinja: cannot be read",),
    ),
    "config": (lambda m: (m / "config.json").unlink(), ("config.json: missing",)),
    "config's JSON": (lambda m: (m / "config.json").write_text("{"), ("not readable JSON",)),
    "model type": (
        lambda m: edit_json(m / "config.json", model_type="nonesuch"),
        ("no causal model can be built",),
    ),
    "config's data type": (
        lambda m: edit_json(m / "config.json", dtype="float16"),
        ("config.json: dtype is 'float16', 'float32' was asked",),
    ),
    "layout": (
        lambda m: (m / "pytorch_model.bin").write_bytes(b""),
        ("weights in 2 layouts (safetensors, bin)",),
    ),
}


@pytest.mark.parametrize("damage", DAMAGES | FILE_DAMAGES)
def test_each_damage_gives_a_line_that_names_it(model: Path, damage: str) -> None:
    act, said = (DAMAGES | FILE_DAMAGES)[damage]
    act(model)
    faults = validate(model, "float32", chat=True)
    assert len(faults) == len(said), faults
    for fault, words in zip(faults, said, strict=True):
        assert words in fault
        assert "\n" not in fault


@pytest.mark.parametrize(
    "damage", [*FILE_DAMAGES, "absent shard", "missing index entry", "index entry too many"]
)
def test_nothing_is_read_of_files_that_are_not_right(model: Path, damage: str) -> None:
    """A conversion reads its source and its base so, and neither is validated before."""
    act, said = (DAMAGES | FILE_DAMAGES)[damage]
    act(model)
    for read in (open_weights, describe):
        with pytest.raises(StageError, match=re.escape(said[0])):
            read(model)


def test_values_of_eight_bits_are_looked_at_too() -> None:
    import torch

    tensor = torch.ones(4, 3)
    tensor[1, 2] = float("nan")
    held = of_tensors({"a": tensor.to(torch.float8_e4m3fn), "b": tensor.to(torch.float8_e5m2)})
    assert all_not_finite(held, held.specs) == {"a": 1, "b": 1}


def test_code_that_comes_with_a_checkpoint_never_runs(
    model: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Not even for one who says yes to the question that transformers asks."""
    asked: list[str] = []
    monkeypatch.setattr("builtins.input", lambda text="": asked.append(text) or "y")
    code = f"open({str(model / 'ran')!r}, 'w')\n"
    for name in ("configuration", "modeling", "tokenization"):
        (model / f"{name}_mine.py").write_text(code)
    mapped = {
        "AutoConfig": "configuration_mine.Config",
        "AutoModelForCausalLM": "modeling_mine.Model",
    }
    edit_json(model / "config.json", model_type="mine", auto_map=mapped)
    edit_json(
        model / "tokenizer_config.json",
        tokenizer_class="Mine",
        auto_map={"AutoTokenizer": ["tokenization_mine.Mine", None]},
    )
    faults, loaded = load_faults(model)
    assert loaded is None and "custom code" in faults[0]
    said = validate(model)
    assert len(said) == 1 and "custom code" in said[0] and "\n" not in said[0]
    training = Training(model, model, None)
    for act in (
        lambda: load_tokenizer(model),
        lambda: filled(model, open_weights(model)),
        lambda: trained_model(training),
        lambda: original_model(training),
        lambda: quantised_parameters(model, {"load_in_4bit": True}),
    ):
        with pytest.raises(ValueError, match=r"custom code|Mine"):
            act()
    assert not asked and not (model / "ran").exists()


def test_what_the_library_refuses_in_the_fresh_process_is_told(model: Path) -> None:
    edit_header(model, lambda header: header.update({"__metadata__": {"format": 1}}))
    (fault,) = validate(model)
    assert "from_pretrained fails: Error while deserializing header" in fault


def write_bin(folder: Path, payload: bytes) -> None:
    """What torch writes, with a pickle of our own in it."""
    folder.mkdir()
    with zipfile.ZipFile(folder / "pytorch_model.bin", "w") as archive:
        archive.writestr("archive/data.pkl", payload)


@pytest.mark.parametrize(
    "payload",
    [
        b"\x80\x020.",  # pops nothing
        b"\x80\x02N]K\x01a(K\x01K\x02u.",  # sets an item of a list
        b"\x80\x02K\x01Q.",  # a tensor that is a number
        b"\x80\x02K\x01}b.",  # a state for a number
        b"\x80\x02cbuiltins\nint\n(X\x03\x00\x00\x00abctR.",
        b"\x80\x02]K\x01a.",  # a list
        b"\x80\x02}K\x01K\x02s.",  # numbers
        b"",
    ],
)
def test_an_odd_pickle_is_one_line(tmp_path: Path, payload: bytes) -> None:
    write_bin(tmp_path / "bin", payload)
    with pytest.raises(StageError) as fault:
        open_weights(tmp_path / "bin")
    assert "pytorch_model.bin: " in str(fault.value) and "\n" not in str(fault.value)
    folder = tmp_path / "dcp" / "pytorch_model_fsdp_0"
    folder.mkdir(parents=True)
    (folder / ".metadata").write_bytes(payload)
    with pytest.raises(StageError, match=r"\.metadata: "):
        open_weights(tmp_path / "dcp")
    (tmp_path / "zero").mkdir()
    (tmp_path / "zero" / "latest").write_text("step")
    (tmp_path / "bin").rename(tmp_path / "zero" / "step")
    states = tmp_path / "zero" / "step" / "zero_pp_rank_0_mp_rank_00_optim_states.pt"
    (tmp_path / "zero" / "step" / "pytorch_model.bin").rename(states)
    with pytest.raises(StageError, match="zero/step"):
        open_weights(tmp_path / "zero")


def write_zero(path: Path, *, stage: int, steps: tuple[int, int]) -> None:
    """What DeepSpeed leaves of one parameter on two ranks, each after steps of its own."""
    import torch

    folder = path / "global_step3"
    folder.mkdir(parents=True)
    (path / "latest").write_text("global_step3")
    shapes = [{"model.norm.weight": torch.Size((6,))}]
    model: dict[str, Any] = {"param_shapes": shapes, "shared_params": {}, "module": {}}
    model |= {"buffer_names": [], "frozen_param_shapes": None, "frozen_param_fragments": None}
    for rank, step in enumerate(steps):
        state = {"state": {0: {"step": torch.tensor(float(step))}}}
        flat = [torch.arange(3.0) + 3 * rank]
        optimizer: dict[str, Any] = {"zero_stage": stage, "partition_count": 2}
        optimizer |= (
            {"fp32_flat_groups": flat, "optimizer_state_dict": state}
            if stage == 3
            else {"single_partition_of_fp32_groups": flat, "base_optimizer_state": state}
        )
        name = f"zero_pp_rank_{rank}_mp_rank_00"
        torch.save({"optimizer_state_dict": optimizer}, folder / f"{name}_optim_states.pt")
        if stage == 3 or rank == 0:
            whole = name if stage == 3 else "mp_rank_00"
            torch.save(model | {"global_steps": step}, folder / f"{whole}_model_states.pt")


@pytest.mark.parametrize("stage", [2, 3])
def test_shards_of_two_saves_are_not_put_together(tmp_path: Path, stage: int) -> None:
    import torch

    write_zero(tmp_path / "one", stage=stage, steps=(3, 3))
    whole = open_weights(tmp_path / "one").read("model.norm.weight")
    assert torch.equal(whole, torch.arange(6.0))
    write_zero(tmp_path / "two", stage=stage, steps=(3, 5))
    with pytest.raises(StageError, match=r"several saves: rank 0's is of step 3, rank 1's of 5"):
        open_weights(tmp_path / "two")


def test_no_layout_leads_a_reader_out_of_its_folder(tmp_path: Path) -> None:
    import torch
    import torch.distributed.checkpoint as dcp

    write_zero(tmp_path / "zero", stage=2, steps=(3, 3))
    (tmp_path / "zero" / "global_step3").rename(tmp_path / "away")
    (tmp_path / "zero" / "latest").write_text("../away\n")
    (tmp_path / "zero" / "x").mkdir()
    (tmp_path / "zero" / "x" / "zero_pp_rank_0_mp_rank_00_optim_states.pt").write_text("")
    with pytest.raises(StageError, match=r"latest: names '\.\./away'"):
        open_weights(tmp_path / "zero")
    folder = tmp_path / "dcp" / "pytorch_model_fsdp_0"
    dcp.save({"model": {"w": torch.ones(2)}}, checkpoint_id=folder, no_dist=True)
    metadata = (folder / ".metadata").read_bytes()
    name = b"__0_0.distcp"
    assert name in metadata
    (folder / ".metadata").write_bytes(metadata.replace(name, b"../away_file"))
    with pytest.raises(StageError, match=r"\.metadata: names '\.\./away_file'"):
        open_weights(tmp_path / "dcp")


def test_every_layout_tells_its_parameters_and_types(tmp_path: Path) -> None:
    import torch
    import torch.distributed.checkpoint as dcp

    tensors = {"a.weight": torch.ones(2, 3), "b.weight": torch.ones(5).bfloat16()}
    for name in ("bin", "ranks"):
        (tmp_path / name).mkdir()
    torch.save(tensors, tmp_path / "bin" / "pytorch_model.bin")
    torch.save(tensors, tmp_path / "ranks" / "pytorch_model_fsdp_0_rank0.bin")
    folder = tmp_path / "dcp" / "pytorch_model_fsdp_0"
    dcp.save({"model": tensors}, checkpoint_id=folder, no_dist=True)
    for name in ("bin", "ranks", "dcp"):
        facts = describe(tmp_path / name)
        assert facts["parameters"] == 11
        assert facts["dtypes"] == {"bfloat16": 5, "float32": 6}
    both = {"model.embed_tokens.weight": torch.ones(4, 2), "lm_head.weight": torch.ones(4, 2)}
    torch.save(both, tmp_path / "ranks" / "pytorch_model_fsdp_0_rank0.bin")
    for tied, number in ((True, 8), (False, 16)):
        edit_json(tmp_path / "ranks" / "config.json", tie_word_embeddings=tied)
        assert describe(tmp_path / "ranks")["parameters"] == number
    write_zero(tmp_path / "zero", stage=3, steps=(3, 3))
    assert describe(tmp_path / "zero")["parameters"] == 6
    adapted = {"base_model.model.a.base_layer.weight": torch.ones(2, 3)}
    adapted |= {"base_model.model.a.lora_A.default.weight": torch.ones(1, 3)}
    torch.save(adapted, tmp_path / "ranks" / "pytorch_model_fsdp_0_rank0.bin")
    edit_json(tmp_path / "ranks" / "adapter_config.json", r=1)
    assert describe(tmp_path / "ranks")["parameters"] == 3


@pytest.mark.parametrize(
    ("name", "key", "value"),
    [
        ("config.json", "quantization_config", "fp8"),
        ("config.json", "architectures", "LlamaForCausalLM"),
        ("adapter_config.json", "modules_to_save", "lm_head"),
    ],
)
def test_a_setting_of_another_kind_is_named(model: Path, name: str, key: str, value: str) -> None:
    edit_json(model / name, **{key: value})
    with pytest.raises(StageError, match=f"config.json: {key} is '{value}', and"):
        describe(model)


def test_files_of_a_pickled_model_are_checked_against_their_index(tmp_path: Path) -> None:
    import torch

    index = tmp_path / "pytorch_model.bin.index.json"
    for name in ("one", "two"):
        torch.save({name: torch.ones(2)}, tmp_path / f"{name}.bin")
    edit_json(index, weight_map={"one": "one.bin", "two": "two.bin"})
    assert open_weights(tmp_path).specs.keys() == {"one", "two"}
    for weight_map, said in (
        ({"one": "one.bin", "two": "one.bin"}, "says that two is in one.bin, where it is not"),
        ({"one": "one.bin", "two": "../two.bin"}, r"names '\.\./two.bin'"),
        (["one.bin"], "has no weight_map"),
    ):
        edit_json(index, weight_map=weight_map)
        with pytest.raises(StageError, match=said):
            open_weights(tmp_path)


def test_an_adapter_is_checked_against_its_base(sound: Path, tmp_path: Path) -> None:
    adapter = Path(shutil.copytree(sound / "peft", tmp_path / "peft"))
    assert describe(adapter)["adapter"]["base_fingerprint"] is None
    note_base(adapter)
    assert describe(adapter)["adapter"]["base_fingerprint"] == fingerprint(sound / "model")
    assert validate(adapter, base=sound / "model") == ()
    write_base(tmp_path / "other", tie=False, seed=1)
    (fault,) = validate(adapter, base=tmp_path / "other")
    assert "was trained on weights" in fault and "merge it into the base" in fault
    write_base(tmp_path / "even", tie=False, even=True)
    (adapter / "base.json").unlink()
    (fault,) = validate(adapter, base=tmp_path / "even")
    assert "q_proj.weight has shape (3, 35)" in fault and "asks for (3, 64)" in fault
    edit_json(adapter / "adapter_config.json", lora_alpha=0)
    (fault,) = validate(adapter, base=sound / "model")
    assert "drops the adapter" in fault


def test_a_trainers_checkpoint_is_resumable_and_holds_one_model(sound: Path, model: Path) -> None:
    assert describe(model)["resumable"] is False
    (model / "optimizer.pt").write_bytes(b"")
    (model / "trainer_state.json").write_text("{}")
    (model / "global_step2").mkdir()
    (model / "global_step2" / "zero_pp_rank_0_mp_rank_00_optim_states.pt").write_bytes(b"")
    assert (describe(model)["resumable"], layout(model)) == (True, "safetensors")


def test_a_tied_weight_written_twice_is_a_fault(tmp_path: Path) -> None:
    from safetensors.torch import load_file, save_file

    write_base(tmp_path, tie=True)
    edit_json(tmp_path / "generation_config.json", eos_token_id=3)
    tensors = load_file(tmp_path / "model.safetensors")
    tensors["lm_head.weight"] = tensors["model.embed_tokens.weight"].clone()
    save_file(tensors, tmp_path / "model.safetensors", metadata={"format": "pt"})
    (fault,) = validate(tmp_path)
    assert "it is tied to model.embed_tokens.weight" in fault


def test_what_is_not_yet_an_export_is_a_fault(sound: Path, tmp_path: Path) -> None:
    shutil.copytree(sound / "whole", tmp_path / "model")
    (tmp_path / "model" / "model.safetensors").rename(tmp_path / "model" / "pytorch_model.bin")
    (fault,) = validate(tmp_path / "model")
    assert "weights lie there as bin" in fault


def test_a_mixture_of_experts_may_have_either_of_its_two_forms(tmp_path: Path) -> None:
    from transformers import AutoModelForCausalLM, MixtralConfig

    sizes: dict[str, Any] = {"hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 1}
    config = MixtralConfig(
        vocab_size=VOCABULARY,
        num_attention_heads=2,
        num_key_value_heads=1,
        num_local_experts=3,
        eos_token_id=3,
        **sizes,
    )
    moe = AutoModelForCausalLM.from_config(config)
    for original in (True, False):
        out = tmp_path / str(original)
        write_base(out, tie=False)
        moe.save_pretrained(out, save_original_format=original)
        assert validate(out) == ()


# For people


def test_the_command_prints_a_line_per_fault_and_exits_1(
    model: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["validate", str(model), "--dtype", "float32"]) == 0
    assert capsys.readouterr().out == ""
    edit_json(model / "config.json", vocab_size=60)
    assert main(["validate", str(model)]) == 1
    assert len(capsys.readouterr().out.splitlines()) == 3
    assert main(["describe", str(model / "absent")]) == 1
    assert "no such checkpoint folder" in capsys.readouterr().out


def test_the_command_merges_and_compares(
    sound: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    argv = ["merge", str(sound / "peft"), str(tmp_path), "--base", str(sound / "model")]
    assert main([*argv, "--dtype", "float32"]) == 0
    assert json.loads(capsys.readouterr().out)["parity"]["logit_error"] < 1e-5
    assert main(["diff", str(sound / "whole"), str(sound / "model")]) == 1
    lines = capsys.readouterr().out.splitlines()
    assert "stop_ids: [1] and [1, 3]" in lines and not any("weight" in line for line in lines)
    assert main(["diff", str(sound / "model"), str(tmp_path / "model")]) == 1
    lines = [line for line in capsys.readouterr().out.splitlines() if "weight" in line]
    assert len(lines) == 2 and all("q_proj.weight: 1050 of 1050 values" in each for each in lines)
    assert main(["adapter", str(sound / "peft"), str(tmp_path / "alone")]) == 0
    assert validate(tmp_path / "alone", base=sound / "model") == ()
    other = str(tmp_path / "other")
    assert main(["merge", str(sound / "peft"), other, "--base", str(tmp_path)]) == 1
    assert "config.json: missing" in capsys.readouterr().out


def test_the_command_describes_in_a_fresh_process(model: Path) -> None:
    done = fresh("-m", "stages.checkpoint", "describe", str(model))
    assert json.loads(done.stdout) == describe(model)
    assert done.returncode == 0


# Names and files


@pytest.mark.parametrize(
    "wrapped",
    [
        "{}",
        "module.{}",
        "module.module.{}",
        "_orig_mod.{}",
        "module._orig_mod.{}",
        "base_model.model.{}",
        "_fsdp_wrapped_module.base_model.model.{}",
        "module.base_model.model.{}",
    ],
)
def test_wrappers_leave_no_trace_in_names(wrapped: str) -> None:
    name = "model.layers.0.self_attn.q_proj.weight"
    assert plain_name(wrapped.format(name)) == name
    inner = "model._fsdp_wrapped_module.layers.0._checkpoint_wrapped_module.self_attn.q_proj.weight"
    assert plain_name(wrapped.format(inner)) == name


def test_names_that_only_look_wrapped_are_kept() -> None:
    name = "model.my_orig_mod.module.base_model.model.weight"
    assert plain_name(name) == name


@pytest.mark.parametrize(
    ("name", "meant"),
    [
        ("a.q.lora_A.weight", LowRank("a.q.weight", "A", None, embedding=False)),
        ("a.q.lora_A.default.weight", LowRank("a.q.weight", "A", "default", embedding=False)),
        ("a.q.lora_B.default.bias", LowRank("a.q.bias", "bias", "default", embedding=False)),
        ("e.lora_embedding_B", LowRank("e.weight", "B", None, embedding=True)),
        ("e.lora_embedding_B.ref", LowRank("e.weight", "B", "ref", embedding=True)),
        ("a.q.lora_magnitude_vector", LowRank("a.q.weight", "magnitude", None, embedding=False)),
        (
            "a.q.lora_magnitude_vector.default.weight",
            LowRank("a.q.weight", "magnitude", "default", embedding=False),
        ),
        ("lm_head.modules_to_save.default.weight", Saved("lm_head.weight", "default")),
        ("lm_head.original_module.weight", Plain("lm_head.weight", wrapped=True)),
        ("a.q.base_layer.weight", Plain("a.q.weight", wrapped=True)),
        ("a.q.weight", Plain("a.q.weight", wrapped=False)),
        ("a.q.lora_diag.default", Unknown("a.q.lora_diag.default")),
        (
            "e.token_adapter.trainable_tokens_delta.default",
            Unknown("e.token_adapter.trainable_tokens_delta.default"),
        ),
    ],
)
def test_what_peft_adds_to_names_is_understood(name: str, meant: object) -> None:
    assert meaning(name) == meant


def test_what_torch_saved_is_read_where_it_lies(tmp_path: Path) -> None:
    import torch

    whole = torch.arange(24.0).reshape(4, 6)
    tensors = {
        "plain": whole,
        "view": whole[1:3],
        "turned": whole.T,
        "column": whole[:, 2],
        "half": torch.randn(3, 2).half(),
        "eighth": torch.randn(3, 2).to(torch.float8_e4m3fn),
        "parameter": torch.nn.Parameter(torch.ones(2)),
        "scalar": torch.tensor(5),
        "empty": torch.empty(0, 3),
    }
    torch.save(tensors, tmp_path / "pytorch_model.bin")
    ours = open_weights(tmp_path)
    for name, tensor in tensors.items():
        read = ours.read(name)
        assert (read.dtype, read.shape) == (tensor.dtype, tensor.shape), name
        assert torch.equal(read.float(), tensor.float()), name
    assert torch.equal(ours.rows("turned", 2, 4), whole.T[2:4])
    file = tmp_path / "pytorch_model.bin"
    torch.save(tensors, file, _use_new_zipfile_serialization=False)
    with pytest.raises(StageError, match=r"in the form that torch wrote before version 1\.6"):
        open_weights(tmp_path)


def test_written_safetensors_are_what_the_library_reads(tmp_path: Path) -> None:
    import torch
    from safetensors.torch import load_file

    torch.manual_seed(0)
    tensors = {
        "float32": torch.randn(5, 7),
        "turned": torch.randn(4, 6).T,
        "bfloat16": torch.randn(3).to(torch.bfloat16),
        "scalar": torch.tensor(2.5),
        "int64": torch.arange(6).reshape(2, 3),
        "bool": torch.tensor([True, False]),
        "empty": torch.empty(0, 4),
    }
    write(of_tensors(tensors), tmp_path, dtype="float16", max_shard_size="5GB")
    read, ours = load_file(tmp_path / "model.safetensors"), open_weights(tmp_path)
    assert read.keys() == tensors.keys() == ours.specs.keys()
    for name, tensor in tensors.items():
        wanted = tensor.half() if tensor.is_floating_point() else tensor
        assert read[name].dtype == wanted.dtype
        assert torch.equal(read[name], wanted)
        assert torch.equal(ours.read(name), wanted)


def test_shards_are_split_and_indexed_as_save_pretrained_does(sound: Path, tmp_path: Path) -> None:
    from transformers import AutoModelForCausalLM

    whole = AutoModelForCausalLM.from_pretrained(sound / "whole")
    write(of_tensors(whole.state_dict()), tmp_path, dtype="float32", max_shard_size="30KB")
    ours, theirs = (json.loads((p / INDEX).read_text()) for p in (tmp_path, sound / "model"))
    assert ours["metadata"]["total_size"] == theirs["metadata"]["total_size"]
    assert ours["weight_map"].keys() == theirs["weight_map"].keys()
    assert sorted(p.name for p in tmp_path.glob("*.safetensors")) == sorted(
        p.name for p in (sound / "model").glob("*.safetensors")
    )
