"""What a conversion must not do: remove what it reads, take damage for a model, or half write."""

import fcntl
import json
import re
import resource
import shutil
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

from stages import resume
from stages.base import Context, StageError
from stages.checkpoint import fresh, gguf, other_forms, validate
from stages.checkpoint.__main__ import main
from stages.checkpoint.heads import SCALE
from stages.checkpoint.lineage import note_base
from stages.convert import Convert, convert
from tests.stages.test_convert import byte_level
from tests.stages.write_shards import with_adapter, write_base

PLAIN = Convert(export_dtype="float32", parity_probes=0)


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run as people keep it: a model in ``base/model``, an adapter of it in ``lora/model``."""
    from transformers import AutoModelForCausalLM

    out = tmp_path_factory.mktemp("made")
    write_base(out / "base" / "model", tie=False)
    edit_json(out / "base" / "model" / "generation_config.json", eos_token_id=[1, 3])
    adapted = with_adapter(
        AutoModelForCausalLM.from_pretrained(out / "base" / "model"), target_modules=["q_proj"]
    )
    adapted.save_pretrained(out / "lora" / "model")
    note_base(out / "lora" / "model")
    return out


@pytest.fixture
def run(made: Path, tmp_path: Path) -> Path:
    """A copy of ``made``, to be damaged."""
    return Path(shutil.copytree(made, tmp_path / "run"))


@pytest.fixture(scope="module")
def spoken(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A model with a tokenizer that GGUF is written for."""
    return byte_level(tmp_path_factory.mktemp("spoken")) / "model"


def edit_json(file: Path, **changes: Any) -> None:
    file.write_text(json.dumps(json.loads(file.read_text()) | changes))


def edit_tensors(file: Path, change: Callable[[dict[str, Any]], Any]) -> None:
    from safetensors.torch import load_file, save_file

    tensors = load_file(file)
    change(tensors)
    save_file(tensors, file, metadata={"format": "pt"})


def contents(folder: Path) -> Mapping[str, bytes]:
    return {
        str(file.relative_to(folder)): file.read_bytes()
        for file in sorted(folder.rglob("*"))
        if file.is_file()
    }


def command(capsys: pytest.CaptureFixture[str], *argv: object) -> tuple[int, list[str]]:
    status = main([str(each) for each in argv])
    return status, capsys.readouterr().out.splitlines()


# What is there stays there


def whole_in_its_own_run(run: Path) -> tuple[Path, Path, Path]:
    return run / "base", run / "base", run / "base"


def base_in_the_result(run: Path) -> tuple[Path, Path, Path]:
    return run / "lora", run / "base", run / "base"


def adapter_beside_its_base(run: Path) -> tuple[Path, Path, Path]:
    shutil.move(run / "lora" / "model", run / "base" / "adapter")
    (run / "lora" / "model").symlink_to(run / "base" / "adapter")
    return run / "lora", run / "base", run / "base"


def linked_files(run: Path) -> tuple[Path, Path, Path]:
    (run / "links" / "model").mkdir(parents=True)
    for file in (run / "base" / "model").iterdir():
        (run / "links" / "model" / file.name).symlink_to(file)
    return run / "links", run / "links", run / "base"


def left_by_an_interrupted_one(run: Path) -> tuple[Path, Path, Path]:
    (run / "out").mkdir()
    shutil.move(run / "base", run / "out" / "convert.partial")
    return run / "out" / "convert.partial", run / "out" / "convert.partial", run / "out"


@pytest.mark.parametrize(
    "lay",
    [
        whole_in_its_own_run,
        base_in_the_result,
        adapter_beside_its_base,
        linked_files,
        left_by_an_interrupted_one,
    ],
)
def test_a_result_never_takes_the_place_of_what_it_is_made_from(
    run: Path, lay: Callable[[Path], tuple[Path, Path, Path]]
) -> None:
    trained, base, out = lay(run)
    before = contents(run)
    with pytest.raises(StageError, match="in whose place the result would come"):
        convert(PLAIN, Context(out), trained=trained, base=base)
    assert contents(run) == before


@pytest.mark.parametrize("fault", ["unreadable", "not finite", "another base"])
def test_a_failed_conversion_leaves_earlier_results_as_they_were(
    run: Path, tmp_path: Path, fault: str
) -> None:
    import torch

    out = tmp_path / "out"
    for name in ("model", "adapter", "gguf", "nf4"):
        (out / name).mkdir(parents=True)
        (out / name / "earlier").write_text(name)
    weights = run / "base" / "model" / "model.safetensors"
    if fault == "unreadable":
        weights.unlink()
    elif fault == "not finite":
        edit_tensors(weights, lambda t: t["lm_head.weight"].fill_(torch.nan))
    else:
        edit_json(run / "base" / "model" / "config.json", hidden_size=40)
    before = contents(out)
    trained = run / ("lora" if fault == "another base" else "base")
    with pytest.raises(StageError):
        convert(PLAIN, Context(out), trained=trained, base=run / "base")
    assert contents(out) == before
    assert sorted(path.name for path in out.iterdir()) == ["adapter", "gguf", "model", "nf4"]


@pytest.mark.parametrize("name", ["model", "adapter", "gguf", "nf4"])
def test_the_command_replaces_nothing(
    run: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str], name: str
) -> None:
    (tmp_path / "out" / name).mkdir(parents=True)
    (tmp_path / "out" / name / "earlier").write_text("kept")
    status, lines = command(capsys, "convert", run / "base" / "model", tmp_path / "out")
    assert status == 1
    assert lines == [
        f"{tmp_path / 'out' / name}: is there already; give another folder for the result, "
        "or remove it"
    ]
    assert (tmp_path / "out" / name / "earlier").read_text() == "kept"


@pytest.mark.parametrize("kind", ["link", "file"])
def test_what_is_no_folder_is_refused_before_the_work(run: Path, tmp_path: Path, kind: str) -> None:
    out = tmp_path / "out"
    out.mkdir()
    (tmp_path / "elsewhere").mkdir()
    if kind == "link":
        (out / "model").symlink_to(tmp_path / "elsewhere")
    else:
        (out / "model").write_text("")
    with pytest.raises(StageError, match=f"is a {kind}, and a conversion makes a folder"):
        convert(PLAIN, Context(out), trained=run / "base", base=run / "base")
    assert [path.name for path in out.iterdir()] == ["model"]


def test_two_conversions_do_not_write_to_one_folder(run: Path, tmp_path: Path) -> None:
    out = tmp_path / "out"
    (out / "convert.partial" / "model").mkdir(parents=True)
    with (out / "convert.lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        with pytest.raises(StageError, match="another conversion writes to it"):
            convert(PLAIN, Context(out), trained=run / "base", base=run / "base")
        assert (out / "convert.partial" / "model").is_dir()
    convert(PLAIN, Context(out), trained=run / "base", base=run / "base")
    assert [path.name for path in out.iterdir()] == ["model"]


# Damage


@pytest.mark.parametrize("name", ["base", "lora"])
def test_files_that_are_not_what_was_saved_are_refused(
    run: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str], name: str
) -> None:
    model = run / name / "model"
    resume.mark_complete(model, {})
    convert(PLAIN, Context(tmp_path / "good"), trained=run / name, base=run / "base")
    (file,) = model.glob("*.safetensors")
    content = bytearray(file.read_bytes())
    content[-2] ^= 1
    file.write_bytes(content)
    base = run / "base" / "model"
    verbs = [("convert", model, tmp_path / "out", "--base", base)]
    verbs += [("merge", run / "lora" / "model", tmp_path / "out", "--base", model)]
    verbs += [("adapter", model, tmp_path / "out")]
    for argv in verbs if name == "lora" else verbs[:2]:
        status, lines = command(capsys, *argv)
        assert (status, len(lines)) == (1, 1)
        assert f"{file}: is not what was saved" in lines[0]


def test_an_adapter_alone_still_knows_its_base(
    run: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    write_base(tmp_path / "other", tie=False, seed=1)
    assert command(capsys, "adapter", run / "lora" / "model", tmp_path / "alone") == (0, [])
    assert validate(tmp_path / "alone", base=run / "base" / "model") == ()
    argv = ("merge", tmp_path / "alone", tmp_path / "out", "--base", tmp_path / "other")
    status, lines = command(capsys, *argv)
    assert (status, len(lines)) == (1, 1)
    assert "was trained on weights" in lines[0]


def test_an_unsound_adapter_is_refused_and_leaves_nothing(
    run: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    import torch

    out, source = tmp_path / "new" / "alone", run / "lora" / "model"
    sound = shutil.copytree(source, tmp_path / "sound")
    edit_tensors(
        source / "adapter_model.safetensors", lambda t: next(iter(t.values())).fill_(torch.nan)
    )
    status, lines = command(capsys, "adapter", source, out)
    assert (status, len(lines)) == (1, 1)
    assert "not finite" in lines[0]
    assert not out.exists()
    assert command(capsys, "adapter", sound, out) == (0, [])
    assert [path.name for path in out.parent.iterdir()] == ["alone"]
    status, lines = command(capsys, "adapter", sound, out)
    assert (status, len(lines)) == (1, 1)
    assert "is there already" in lines[0]


# Other forms


def test_four_bits_of_a_reward_model_are_a_reward_model(spoken: Path, tmp_path: Path) -> None:
    import torch
    from safetensors.torch import load_file
    from transformers import AutoModelForSequenceClassification

    model = reward_model(spoken, tmp_path / "trained" / "model")
    (model / SCALE).write_text('{"mean": 1.0, "std": 2.0}')
    config = Convert(export_dtype="float32", also=("nf4",), parity_probes=0)
    out, trained = tmp_path / "out", tmp_path / "trained"
    convert(config, Context(out), trained=trained, base=trained)
    loaded, told = AutoModelForSequenceClassification.from_pretrained(
        out / "nf4", output_loading_info=True
    )
    assert not told["missing_keys"]
    wanted = load_file(model / "model.safetensors")["score.weight"]
    assert torch.equal(loaded.score.weight.float(), wanted)
    assert (out / "nf4" / SCALE).read_text() == (model / SCALE).read_text()
    edit_tensors(out / "model" / "model.safetensors", lambda t: t.pop("score.weight"))
    with pytest.raises(StageError, match=r"score\.weight \(1 such\) is not in the model"):
        other_forms.write("nf4", out / "model", tmp_path)


def reward_model(start: Path, folder: Path) -> Path:
    from transformers import AutoModelForSequenceClassification

    shutil.copytree(start, folder)
    heads = AutoModelForSequenceClassification.from_pretrained(start, num_labels=1)
    heads.save_pretrained(folder)
    return folder


SCALED: Mapping[str, Mapping[str, Any]] = {
    "llama3 of old": {
        "rope_theta": 500000.0,
        "rope_scaling": {
            "rope_type": "llama3",
            "factor": 8.0,
            "low_freq_factor": 1.0,
            "high_freq_factor": 4.0,
            "original_max_position_embeddings": 64,
        },
    },
    "linear of old": {"rope_scaling": {"type": "linear", "factor": 4.0}},
    "linear": {"rope_parameters": {"rope_type": "linear", "factor": 4.0, "rope_theta": 1e4}},
}


@pytest.mark.parametrize("spelling", SCALED)
def test_gguf_is_not_written_without_the_scaling_of_positions(
    spoken: Path, tmp_path: Path, spelling: str
) -> None:
    model = respelled(spoken, tmp_path / "model", **SCALED[spelling])
    with pytest.raises(StageError, match="scaled or partial positions are not written"):
        gguf.write(model, tmp_path / "a.gguf", quantised=False)


def test_gguf_has_the_settings_that_transformers_reads(spoken: Path, tmp_path: Path) -> None:
    model = respelled(spoken, tmp_path / "model", rope_theta=5000.0, rope_scaling=None)
    gguf.write(model, tmp_path / "a.gguf", quantised=False)
    assert read_gguf(tmp_path / "a.gguf", "llama.rope.freq_base") == 5000.0
    assert read_gguf(tmp_path / "a.gguf", "llama.context_length") == 2048
    edit_json(model / "config.json", model_type="mistral", sliding_window=128)
    gguf.write(model, tmp_path / "b.gguf", quantised=False)
    assert read_gguf(tmp_path / "b.gguf", "llama.context_length") == 128
    edit_json(model / "config.json", hidden_act="gelu")
    with pytest.raises(StageError, match="have silu, not 'gelu'"):
        gguf.write(model, tmp_path / "c.gguf", quantised=False)


def respelled(start: Path, folder: Path, **settings: Any) -> Path:
    shutil.copytree(start, folder)
    config = json.loads((folder / "config.json").read_text())
    config.pop("rope_parameters")
    (folder / "config.json").write_text(json.dumps(config | settings))
    return folder


def read_gguf(file: Path, key: str) -> float:
    from gguf import GGUFReader

    return GGUFReader(file).fields[key].parts[-1][0]


@pytest.mark.parametrize(
    ("value", "fits"),
    [(60000.0, ("f16", "q8_0")), (70000.0, ("q8_0",)), (1e7, ())],
)
def test_gguf_holds_no_infinite_value(
    spoken: Path, tmp_path: Path, value: float, fits: tuple[str, ...]
) -> None:
    model = Path(shutil.copytree(spoken, tmp_path / "model"))
    name = "model.layers.0.mlp.up_proj.weight"
    edit_tensors(model / "model.safetensors", lambda t: t[name][3].fill_(-value))
    for kind in ("f16", "q8_0"):
        if kind in fits:
            gguf.write(model, tmp_path / f"{kind}.gguf", quantised=kind == "q8_0")
            continue
        with pytest.raises(StageError, match=re.escape(f"{name} holds {value:.6g}, and")):
            gguf.write(model, tmp_path / f"{kind}.gguf", quantised=kind == "q8_0")


# One line, not a traceback


@pytest.mark.parametrize(
    ("options", "said"),
    [
        (("--max-shard-size", "5gb"), "max_shard_size"),
        (("--parity-probes", "-1"), "parity_probes"),
    ],
)
def test_an_unusable_option_is_one_line(
    run: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str], options: Any, said: str
) -> None:
    argv = ("convert", run / "base" / "model", tmp_path / "out", *options)
    status, lines = command(capsys, *argv)
    assert (status, len(lines)) == (2, 1)
    assert said in lines[0] and f"got {options[1]!r}".replace("'-1'", "-1") in lines[0]
    assert not (tmp_path / "out").exists()


@pytest.mark.parametrize("verb", ["convert", "adapter"])
def test_a_file_where_a_folder_should_come_is_one_line(
    run: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str], verb: str
) -> None:
    (tmp_path / "file").write_text("")
    source = run / ("base" if verb == "convert" else "lora") / "model"
    for out in (tmp_path / "file", tmp_path / "file" / "out"):
        status, lines = command(capsys, verb, source, out)
        assert (status, len(lines)) == (1, 1)
        assert str(tmp_path / "file") in lines[0]


@contextmanager
def full_disk(size: int) -> Iterator[None]:
    """No file may grow beyond ``size`` bytes."""
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (size, hard))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))


def test_a_full_disk_is_one_line_and_leaves_nothing_half_written(
    run: Path, spoken: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    fresh.start()  # before the limit, which it would inherit
    plain = ("--dtype", "bfloat16", "--parity-probes", 0)
    small = (*plain, "--max-shard-size", "50KB", "--also")
    said = "File too large"
    verbs: list[tuple[str, Path, tuple[object, ...], int, str]] = [
        ("convert", run / "base" / "model", plain, 30_000, said),
        ("convert", spoken, (*small, "gguf_f16"), 60_000, "requested and"),  # numpy's words
        ("convert", spoken, (*small, "nf4"), 60_000, said),
        ("adapter", run / "lora" / "model", (), 1000, said),
    ]
    for number, (verb, source, options, size, said) in enumerate(verbs):
        out = tmp_path / f"out-{number}"
        with full_disk(size):
            status, lines = command(capsys, verb, source, out, *options)
        assert (status, len(lines)) == (1, 1), lines
        assert lines[0].startswith(str(out)) and said in lines[0]
        assert not list(tmp_path.glob("**/*.partial"))
        assert not list(out.rglob("*"))


def test_comparing_with_no_checkpoint_is_one_line(
    run: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    for other in (tmp_path / "absent", tmp_path):
        status, lines = command(capsys, "diff", run / "base" / "model", other)
        assert (status, len(lines)) == (1, 1)
        assert str(other) in lines[0]


def test_values_that_are_not_numbers_and_empty_tensors_are_compared(
    run: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    import torch

    one = run / "base" / "model"

    def spoil(tensors: dict[str, Any]) -> None:
        tensors["lm_head.weight"][2, :4] = torch.tensor([torch.nan, torch.inf, -torch.inf, 1.0])
        tensors["empty"] = torch.empty(5, 0)

    edit_tensors(one / "model.safetensors", spoil)
    two = Path(shutil.copytree(one, tmp_path / "two"))
    assert command(capsys, "diff", one, two) == (0, [])
    edit_tensors(two / "model.safetensors", lambda t: t["lm_head.weight"][2, :2].fill_(1))
    status, lines = command(capsys, "diff", one, two)
    assert (status, len(lines)) == (1, 1)
    assert lines[0] == "lm_head.weight: 2 of 2345 values differ, by inf at most"
