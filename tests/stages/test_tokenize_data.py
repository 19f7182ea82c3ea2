"""tokenize_data on real templates and tokenizers: masks, stops, BOS, overflow, counts."""

import json
import subprocess
import sys
from collections.abc import Sequence
from functools import cache
from pathlib import Path
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from stages.base import Context, StageError
from stages.evaluation.items import read_split
from stages.prepare_data import PrepareData, prepare_data
from stages.tokenize_data import TokenizeData, tokenize_data

REAL = Path(__file__).parents[2].parent / "shared" / "data"
needs_real = pytest.mark.skipif(not REAL.is_dir(), reason="the real data files are not here")

CHATML = (
    "{% for m in messages %}{{ '<|im_start|>' + m['role'] + '\\n' + m['content'] + '<|im_end|>\\n'"
    " }}{% endfor %}{% if add_generation_prompt %}{{ '<|im_start|>assistant\\n' }}{% endif %}"
)
LLAMA3 = (
    "{{ bos_token }}{% for m in messages %}{{ '<|start_header_id|>' + m['role'] + "
    "'<|end_header_id|>\\n\\n' + m['content'] | trim + '<|eot_id|>' }}{% endfor %}"
    "{% if add_generation_prompt %}"
    "{{ '<|start_header_id|>assistant<|end_header_id|>\\n\\n' }}{% endif %}"
)
MISTRAL = (
    "{{ bos_token }}{% if messages[0]['role'] == 'system' %}{% set intro = messages[0]['content'] "
    "+ '\\n\\n' %}{% set turns = messages[1:] %}{% else %}{% set intro = '' %}"
    "{% set turns = messages %}{% endif %}{% for m in turns %}"
    "{% if (m['role'] == 'user') != (loop.index0 % 2 == 0) %}"
    "{{ raise_exception('roles must alternate') }}{% endif %}"
    "{% if m['role'] == 'user' %}"
    "{{ '[INST] ' + (intro if loop.first else '') + m['content'] + ' [/INST]' }}"
    "{% else %}{{ ' ' + m['content'] | trim + eos_token }}{% endif %}{% endfor %}"
)
GEMMA = (
    "{{ bos_token }}{% if messages[0]['role'] == 'system' %}"
    "{{ raise_exception('System role not supported') }}{% endif %}{% for m in messages %}"
    "{{ '<start_of_turn>' + ('model' if m['role'] == 'assistant' else m['role']) + '\\n' "
    "+ m['content'] | trim + '<end_of_turn>\\n' }}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<start_of_turn>model\\n' }}{% endif %}"
)
PHI3 = (
    "{% for m in messages %}{{ '<|' + m['role'] + '|>\\n' + m['content'] + '<|end|>\\n' }}"
    "{% endfor %}{% if add_generation_prompt %}{{ '<|assistant|>\\n' }}"
    "{% else %}{{ eos_token }}{% endif %}"
)
# Qwen 3: only the last answer is rendered behind an empty thought, which no prompt holds.
QWEN3 = (
    "{% for m in messages %}{{ '<|im_start|>' + m['role'] + '\\n' }}"
    "{% if m['role'] == 'assistant' and loop.last %}{{ '<think>\\n\\n</think>\\n\\n' }}{% endif %}"
    "{{ m['content'] + '<|im_end|>\\n' }}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|im_start|>assistant\\n' }}{% endif %}"
)
# DeepSeek R1: inference begins a thought that history does not show.
R1 = CHATML.replace("assistant\\n' }}{% endif", "assistant\\n<think>\\n' }}{% endif")
FLIPPING = "{{ 'ready' if add_generation_prompt else 'done' }}" + CHATML
SHORT_ANSWER = CHATML.replace(
    "m['content'] +", "(m['content'][:5] if m['role'] == 'assistant' else m['content']) +"
)
NO_STOP = CHATML.replace("<|im_end|>", "")
TWO_BOS = "{{ bos_token }}" + LLAMA3

# name: template, special tokens, tokenizer's bos / eos, whether it sets BOS itself, eos in the
# generation config
MODELS: dict[str, tuple[str, str, str | None, str, bool, list[str]]] = {
    "chatml": (CHATML, "<|im_start|> <|im_end|>", None, "<|im_end|>", False, []),
    "llama3": (
        LLAMA3,
        "<|begin|> <|end_of_text|> <|start_header_id|> <|end_header_id|> <|eot_id|>",
        "<|begin|>",
        "<|end_of_text|>",
        True,
        ["<|end_of_text|>", "<|eot_id|>"],
    ),
    "mistral": (MISTRAL, "<s> </s>", "<s>", "</s>", True, ["</s>"]),
    "gemma": (
        GEMMA,
        "<bos> <eos> <start_of_turn> <end_of_turn>",
        "<bos>",
        "<eos>",
        True,
        ["<eos>", "<end_of_turn>"],
    ),
    "phi3": (
        PHI3,
        "<|end|> <|user|> <|assistant|> <|system|> <|endoftext|>",
        None,
        "<|endoftext|>",
        False,
        ["<|end|>"],
    ),
    "qwen3": (QWEN3, "<|im_start|> <|im_end|>", None, "<|im_end|>", False, []),
    "r1": (R1, "<|im_start|> <|im_end|>", None, "<|im_end|>", False, []),
    "bos_is_a_role_mark": (
        CHATML,
        "<|im_start|> <|im_end|>",
        "<|im_start|>",
        "<|im_end|>",
        True,
        [],
    ),
    "bos_outside_the_template": (CHATML, "<s> <|im_end|>", "<s>", "<|im_end|>", True, []),
    "flipping": (FLIPPING, "<|im_start|> <|im_end|>", None, "<|im_end|>", False, []),
    "short_answer": (SHORT_ANSWER, "<|im_start|> <|im_end|>", None, "<|im_end|>", False, []),
    "no_stop": (NO_STOP, "<|im_start|> <|im_end|>", None, "<|im_end|>", False, []),
    "two_bos": (
        TWO_BOS,
        "<|begin|> <|start_header_id|> <|end_header_id|> <|eot_id|>",
        "<|begin|>",
        "<|eot_id|>",
        False,
        [],
    ),
}
COMMON = ["chatml", "llama3", "mistral", "gemma", "phi3"]
CORPUS = ["the cat sat on the mat and the dog sat on the cat; what is 12 + 30? it is 42."] * 20


def train_tokenizer(special: Sequence[str], *, bos: str | None) -> Any:
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers, processors, trainers

    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=330,
        special_tokens=list(special),
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    tokenizer.train_from_iterator(CORPUS, trainer)
    if bos:
        tokenizer.post_processor = processors.TemplateProcessing(
            single=f"{bos} $A", special_tokens=[(bos, tokenizer.token_to_id(bos))]
        )
    return tokenizer


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> Any:
    """A function from a name in MODELS to a folder that holds ``model/``."""
    from transformers import PreTrainedTokenizerFast

    root = tmp_path_factory.mktemp("models")

    @cache
    def model(name: str) -> Path:
        template, special, bos, eos, sets_bos, stops = MODELS[name]
        raw = train_tokenizer(special.split(), bos=bos if sets_bos else None)
        tokenizer = PreTrainedTokenizerFast(tokenizer_object=raw, bos_token=bos, eos_token=eos)
        tokenizer.chat_template = template
        tokenizer.save_pretrained(root / name / "model")
        if stops:
            ids = [raw.token_to_id(stop) for stop in stops]
            config = {"eos_token_id": ids if len(ids) > 1 else ids[0]}
            (root / name / "model" / "generation_config.json").write_text(json.dumps(config))
        return root / name

    return model


def user(content: str) -> dict[str, str]:
    return {"role": "user", "content": content}


def assistant(content: str) -> dict[str, str]:
    return {"role": "assistant", "content": content}


def system(content: str) -> dict[str, str]:
    return {"role": "system", "content": content}


TWO_TURNS = [user("the cat?"), assistant("it sat."), user("the dog?"), assistant("on the mat.")]
ONE_TURN = [user("what is 12 + 30?"), assistant("42")]
PAIR = {"prompt": ONE_TURN[:1], "chosen": [assistant("42")], "rejected": [assistant("it is 43.")]}


def prepared(
    folder: Path,
    conversations: Sequence[Sequence[dict[str, str]]],
    preferences: Sequence[dict[str, Any]] = (),
) -> Path:
    """An output of prepare_data with the given training rows and one held-out row of each kind."""
    held = [ONE_TURN], [PAIR]
    rows = [{"messages": turns} for turns in conversations], list(preferences)
    for kind, train, test in zip(("conversations", "preferences"), rows, held, strict=True):
        if train:
            (folder / kind).mkdir(parents=True)
            test = [{"messages": turns} for turns in test] if kind == "conversations" else test
            for side, content in (("train", train), ("test", test)):
                text = "".join(json.dumps(row) + "\n" for row in content)
                (folder / kind / f"{side}.jsonl").write_text(text)
    return folder


def run(
    tmp_path: Path,
    model: Path,
    conversations: Sequence[Sequence[dict[str, str]]],
    preferences: Sequence[dict[str, Any]] = (),
    **config: Any,
) -> tuple[Path, Any]:
    data = prepared(tmp_path / "data", conversations, preferences)
    metrics = tokenize_data(
        TokenizeData(**config), Context(tmp_path / "out"), model=model, data=data
    )
    return tmp_path / "out", metrics


def rows(out: Path, split: str = "conversations/train") -> list[dict[str, Any]]:
    from datasets import load_from_disk

    return load_from_disk(out / split).to_list()


@cache
def tokenizer_of(model: Path) -> Any:
    from transformers import AutoTokenizer

    return AutoTokenizer.from_pretrained(model / "model")


def trained(row: dict[str, Any], tokenizer: Any) -> str:
    return tokenizer.decode([label for label in row["labels"] if label != -100])


def faults(out: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in (out / "quarantine.jsonl").read_text().splitlines()]


# --- masks

STOPS = {
    "chatml": "<|im_end|>",
    "llama3": "<|eot_id|>",
    "mistral": "</s>",
    "gemma": "<end_of_turn>",
    "phi3": "<|end|>",
}


@pytest.mark.parametrize("name", COMMON)
def test_the_mask_is_exactly_the_answers_and_their_stop_tokens(
    tmp_path: Path, models: Any, name: str
) -> None:
    out, metrics = run(tmp_path, models(name), [TWO_TURNS, ONE_TURN])
    tokenizer, stop = tokenizer_of(models(name)), STOPS[name]
    lead = " " if name == "mistral" else ""
    two, one = rows(out)
    assert trained(two, tokenizer) == f"{lead}it sat.{stop}{lead}on the mat.{stop}"
    assert trained(one, tokenizer) == f"{lead}42{stop}"
    assert two["answer"] == "on the mat." and one["answer"] == "42"
    assert [json.loads(row["prompt"]) for row in (two, one)] == [TWO_TURNS[:-1], ONE_TURN[:-1]]
    assert metrics["conversations/train/context_mismatch_rows"] == 0


@pytest.mark.parametrize("name", [*COMMON, "qwen3", "bos_is_a_role_mark"])
def test_ids_are_the_template_s_own(tmp_path: Path, models: Any, name: str) -> None:
    out, _ = run(tmp_path, models(name), [TWO_TURNS], [PAIR])
    tokenizer = tokenizer_of(models(name))

    def ids(turns: Any, **options: Any) -> list[int]:
        return tokenizer.apply_chat_template(turns, **options)["input_ids"]

    (row,) = rows(out)
    whole = ids(TWO_TURNS)
    assert row["input_ids"] == whole[: len(row["input_ids"])]
    assert row["prompt_ids"] == ids(TWO_TURNS[:-1], add_generation_prompt=True)
    assert row["input_ids"][: len(row["prompt_ids"])] == row["prompt_ids"]
    assert row["labels"][-1] == row["input_ids"][-1]
    (pair,) = rows(out, "preferences/train")
    assert pair["prompt_ids"] == ids(PAIR["prompt"], add_generation_prompt=True)
    for side in ("chosen", "rejected"):
        both = pair["prompt_ids"] + pair[f"{side}_ids"]
        assert both == ids(PAIR["prompt"] + PAIR[side])[: len(both)]
        assert pair[f"{side}_ids"][-1] == row["input_ids"][-1]


def test_the_text_behind_the_last_stop_token_is_cut_off(tmp_path: Path, models: Any) -> None:
    out, _ = run(tmp_path, models("chatml"), [ONE_TURN])
    tokenizer = tokenizer_of(models("chatml"))
    assert tokenizer.apply_chat_template(ONE_TURN, tokenize=False).endswith("<|im_end|>\n")
    assert tokenizer.decode(rows(out)[0]["input_ids"]).endswith("42<|im_end|>")


def test_the_stored_types_are_int32_lists(tmp_path: Path, models: Any) -> None:
    from datasets import List, Value, load_from_disk

    out, _ = run(tmp_path, models("chatml"), [ONE_TURN], [PAIR])
    ids = List(Value("int32"))
    assert load_from_disk(out / "conversations" / "test").features == {
        "input_ids": ids,
        "labels": ids,
        "prompt_ids": ids,
        "prompt": Value("string"),
        "tools": Value("string"),
        "answer": Value("string"),
        "length": Value("int32"),
    }
    assert load_from_disk(out / "preferences" / "test").features == {
        "prompt_ids": ids,
        "chosen_ids": ids,
        "rejected_ids": ids,
        "length": Value("int32"),
    }


@pytest.mark.parametrize(
    "name", ["llama3", "mistral", "gemma", "bos_is_a_role_mark", "bos_outside_the_template"]
)
def test_exactly_one_bos(tmp_path: Path, models: Any, name: str) -> None:
    out, _ = run(tmp_path, models(name), [TWO_TURNS], [PAIR])
    bos = tokenizer_of(models(name)).bos_token_id
    (row,), (pair,) = rows(out), rows(out, "preferences/train")
    for ids in (row["input_ids"], row["prompt_ids"], pair["prompt_ids"]):
        assert ids[0] == bos and ids[1] != bos
        if name != "bos_is_a_role_mark":
            assert ids.count(bos) == 1
    assert bos not in pair["chosen_ids"] + pair["rejected_ids"]


def test_all_tokens_can_be_trained(tmp_path: Path, models: Any) -> None:
    out, metrics = run(tmp_path, models("chatml"), [TWO_TURNS], assistant_only_loss=False)
    (row,) = rows(out)
    assert row["labels"] == row["input_ids"]
    assert metrics["conversations/train/trained_tokens"] == len(row["input_ids"])


# --- training context against inference context


def test_a_thought_that_no_prompt_holds_is_trained(tmp_path: Path, models: Any) -> None:
    out, metrics = run(tmp_path, models("qwen3"), [TWO_TURNS])
    text = trained(rows(out)[0], tokenizer_of(models("qwen3")))
    assert text == "it sat.<|im_end|><think>\n\n</think>\n\non the mat.<|im_end|>"
    assert metrics["conversations/train/context_mismatch_rows"] == 0


def test_a_prompt_that_training_does_not_show_is_counted(tmp_path: Path, models: Any) -> None:
    out, metrics = run(tmp_path, models("r1"), [TWO_TURNS, ONE_TURN], [PAIR])
    tokenizer = tokenizer_of(models("r1"))
    two, _ = rows(out)
    assert trained(two, tokenizer) == "it sat.<|im_end|>on the mat.<|im_end|>"
    assert tokenizer.decode(two["prompt_ids"]).endswith("<think>\n")
    assert metrics["conversations/train/context_mismatch_rows"] == 2
    (pair,) = rows(out, "preferences/train")
    assert tokenizer.decode(pair["prompt_ids"]).endswith("assistant\n")
    assert tokenizer.decode(pair["chosen_ids"]) == "42<|im_end|>"
    assert metrics["preferences/train/context_mismatch_rows"] == 1


def test_a_merge_over_the_boundary_is_trained_and_counted(tmp_path: Path, models: Any) -> None:
    """'x:' and '=' become one token ':=', so the answer begins inside a token."""
    from tokenizers import Tokenizer, decoders
    from tokenizers import models as kinds
    from transformers import PreTrainedTokenizerFast

    letters = ["</s>", *"abx:=", ":="]
    raw = Tokenizer(kinds.BPE({letter: n for n, letter in enumerate(letters)}, [(":", "=")]))
    raw.decoder = decoders.Fuse()
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=raw, eos_token="</s>")
    tokenizer.chat_template = (
        "{% for m in messages %}{{ m['content'] }}{% if m['role'] == 'assistant' %}"
        "{{ '</s>' }}{% else %}{{ 'x:' }}{% endif %}{% endfor %}"
    )
    model = tmp_path / "model"
    tokenizer.save_pretrained(model / "model")
    pair = {"prompt": [user("a")], "chosen": [assistant("b")], "rejected": [assistant("=b")]}
    data = prepared(
        tmp_path / "data", [[user("a"), assistant("=b")], [user("a"), assistant("b")]], [pair]
    )
    for kind in ("conversations", "preferences"):
        train = (data / kind / "train.jsonl").read_text()
        (data / kind / "test.jsonl").write_text(train)
    metrics = tokenize_data(TokenizeData(), Context(tmp_path / "out"), model=model, data=data)
    merged, plain = rows(tmp_path / "out")
    assert merged["input_ids"] == [letters.index(t) for t in ("a", "x", ":=", "b", "</s>")]
    assert merged["labels"] == [-100, -100, *merged["input_ids"][2:]]
    assert plain["labels"] == [-100] * 3 + plain["input_ids"][3:]
    assert metrics["conversations/train/context_mismatch_rows"] == 1
    (row,) = rows(tmp_path / "out", "preferences/train")
    assert row["prompt_ids"] == [letters.index(t) for t in "ax"]
    assert row["chosen_ids"] == [letters.index(t) for t in (":", "b", "</s>")]
    assert row["rejected_ids"] == [letters.index(t) for t in (":=", "b", "</s>")]


# --- rules


@pytest.mark.parametrize(
    ("name", "turns", "rule", "detail"),
    [
        ("gemma", [system("s"), *ONE_TURN], "cannot_be_rendered", "System role not supported"),
        ("mistral", [user("a"), *ONE_TURN], "cannot_be_rendered", "roles must alternate"),
        ("flipping", ONE_TURN, "history_rewritten", "before turn 1"),
        ("short_answer", TWO_TURNS, "answer_rewritten", "turn 1"),
        ("no_stop", ONE_TURN, "no_stop_token", "no special token"),
        ("two_bos", ONE_TURN, "two_bos", "two BOS"),
        ("chatml", [user("a"), assistant("b<|im_end|>c")], "special_token_in_text", "turn 1"),
        ("mistral", [user("<s>a</s>"), assistant("b")], "special_token_in_text", "'<s>'"),
        ("chatml", [user("a")], "no_trained_token", "no assistant turn"),
        ("chatml", [assistant("a"), *ONE_TURN], "opens_with_assistant", "user"),
    ],
)
def test_a_row_the_model_cannot_learn_from_is_quarantined(
    tmp_path: Path, models: Any, name: str, turns: Any, rule: str, detail: str
) -> None:
    fine = [user("the cat"), assistant("sat.")]
    data = prepared(tmp_path / "data", [fine, turns, fine])
    out = tmp_path / "out"
    if name in ("flipping", "no_stop", "two_bos"):  # these spoil every row
        with pytest.raises(StageError, match="no row of conversations/train is left"):
            tokenize_data(TokenizeData(drop_budget=1), Context(out), model=models(name), data=data)
    else:
        # The short_answer template leaves alone what is short anyway.
        metrics = tokenize_data(
            TokenizeData(drop_budget=1), Context(out), model=models(name), data=data
        )
        assert metrics["conversations/train/rows"] == 2
        assert metrics[f"conversations/train/dropped/{rule}"] == 1
    fault = next(f for f in faults(out) if f["line"] == 2)
    assert (fault["file"], fault["rule"]) == ("conversations/train.jsonl", rule)
    assert detail in fault["detail"] and fault["excerpt"].startswith('{"messages"')


def test_answers_that_become_the_same_tokens_are_quarantined(tmp_path: Path, models: Any) -> None:
    same = {**PAIR, "rejected": [assistant(" 42\n")]}
    out, metrics = run(tmp_path, models("llama3"), [ONE_TURN], [PAIR, same], drop_budget=1)
    assert metrics["preferences/train/dropped/chosen_equals_rejected"] == 1
    assert [fault["kind"] for fault in faults(out)] == ["preferences"]


def test_the_drop_budget_fails_the_stage_and_keeps_the_quarantine(
    tmp_path: Path, models: Any
) -> None:
    with pytest.raises(StageError) as caught:
        run(tmp_path, models("gemma"), [ONE_TURN, [system("s"), *ONE_TURN]])
    message = str(caught.value)
    assert "1 of 3 conversations are unusable" in message
    assert "cannot_be_rendered 1 (conversations/train.jsonl:2: the chat template says" in message
    assert len(faults(tmp_path / "out")) == 1
    assert not (tmp_path / "out" / "conversations").exists()


def test_a_tokenizer_without_a_template_names_the_model(tmp_path: Path, models: Any) -> None:
    from transformers import PreTrainedTokenizerFast

    bare = PreTrainedTokenizerFast(tokenizer_object=train_tokenizer(["</s>"], bos=None))
    bare.save_pretrained(tmp_path / "bare" / "model")
    with pytest.raises(StageError, match="names an EOS token"):
        run(tmp_path / "a", tmp_path / "bare", [ONE_TURN])
    bare.eos_token = "</s>"
    bare.save_pretrained(tmp_path / "bare" / "model")
    with pytest.raises(StageError, match=r"bare.model: the tokenizer has no chat template.*jinja"):
        run(tmp_path / "b", tmp_path / "bare", [ONE_TURN])
    (tmp_path / "none" / "model").mkdir(parents=True)
    with pytest.raises(StageError, match=r"none.model: no tokenizer can be loaded"):
        run(tmp_path / "c", tmp_path / "none", [ONE_TURN])


def test_an_input_that_is_no_prepared_data_is_named(tmp_path: Path, models: Any) -> None:
    with pytest.raises(StageError, match="holds none of conversations, preferences"):
        tokenize_data(
            TokenizeData(), Context(tmp_path / "out"), model=models("chatml"), data=tmp_path
        )


# --- overflow

LONG = [
    system("sys"),
    user("FIRST the cat sat on the mat"),
    assistant("FIRST it sat."),
    user("SECOND " + "the dog sat on the cat; " * 4 + "END?"),
    assistant("SECOND on the mat."),
]


def length(model: Path, turns: Any) -> int:
    return len(tokenizer_of(model).apply_chat_template(turns)["input_ids"]) - 1  # "\n" is cut


def test_overflow_drops_the_row_counts_it_and_is_free(tmp_path: Path, models: Any) -> None:
    model = models("chatml")
    limit = length(model, LONG)
    out, metrics = run(tmp_path / "a", model, [LONG, ONE_TURN], max_length=limit)
    assert metrics["conversations/train/longest"] == limit
    assert "conversations/train/dropped/too_long" not in metrics
    out, metrics = run(tmp_path / "b", model, [LONG, ONE_TURN], max_length=limit - 1, drop_budget=0)
    assert metrics["conversations/train/dropped/too_long"] == 1
    assert len(rows(out)) == 1 and faults(out)[0]["rule"] == "too_long"
    with pytest.raises(StageError, match=r"no row of conversations/train is left \(too_long 1\)"):
        run(tmp_path / "c", model, [LONG], max_length=limit - 1)


def test_a_side_that_nothing_was_prepared_for_stays_empty(tmp_path: Path, models: Any) -> None:
    data = prepared(tmp_path / "data", [ONE_TURN, LONG])
    (data / "conversations" / "train.jsonl").write_text("")
    out = tmp_path / "out"
    metrics = tokenize_data(TokenizeData(), Context(out), model=models("chatml"), data=data)
    assert metrics["conversations/train/rows"] == metrics["conversations/train/longest"] == 0
    assert metrics["conversations/test/rows"] > 0
    assert read_split(out, "conversations/train", limit=5) == []
    with pytest.raises(StageError, match="no rows; hold some out"):
        read_split(out, "conversations/train")


def test_overflow_can_be_an_error_with_its_place(tmp_path: Path, models: Any) -> None:
    model = models("chatml")
    limit = length(model, LONG)
    message = rf"conversations/train.jsonl:2: {limit} tokens, max_length is {limit - 1}"
    with pytest.raises(StageError, match=message):
        run(tmp_path, model, [ONE_TURN, LONG], max_length=limit - 1, on_overflow="error")


def test_truncation_takes_the_oldest_turns_and_keeps_the_answer(
    tmp_path: Path, models: Any
) -> None:
    model = models("chatml")
    limit = length(model, LONG) - 1
    out, metrics = run(tmp_path, model, [LONG], max_length=limit, on_overflow="truncate_prompt")
    tokenizer = tokenizer_of(model)
    (row,) = rows(out)
    shorter = [LONG[0], *LONG[3:]]
    assert row["input_ids"] == tokenizer.apply_chat_template(shorter)["input_ids"][:-1]
    assert trained(row, tokenizer) == "SECOND on the mat.<|im_end|>"
    assert metrics["conversations/train/truncated"] == 1


def test_truncation_then_shortens_the_question_at_its_start(tmp_path: Path, models: Any) -> None:
    model = models("chatml")
    limit = length(model, [LONG[0], *LONG[3:]]) - 20
    pair = {"prompt": LONG[:4], "chosen": LONG[4:], "rejected": [assistant("no")]}
    out, _ = run(tmp_path, model, [LONG], [pair], max_length=limit, on_overflow="truncate_prompt")
    tokenizer = tokenizer_of(model)
    (row,), (kept,) = rows(out), rows(out, "preferences/train")
    prompt = tokenizer.decode(row["prompt_ids"])
    assert prompt.startswith("<|im_start|>system\nsys<|im_end|>\n<|im_start|>user\n")
    assert prompt.endswith("cat; END?<|im_end|>\n<|im_start|>assistant\n")
    assert "FIRST" not in prompt and "SECOND" not in prompt
    assert limit - 12 < len(row["input_ids"]) <= limit
    assert trained(row, tokenizer) == "SECOND on the mat.<|im_end|>"
    assert kept["prompt_ids"] == row["prompt_ids"]
    assert tokenizer.decode(kept["chosen_ids"]) == "SECOND on the mat.<|im_end|>"
    assert tokenizer.decode(kept["rejected_ids"]) == "no<|im_end|>"


def test_truncation_never_touches_an_answer(tmp_path: Path, models: Any) -> None:
    turns = [user("hi"), assistant("the cat sat on the mat " * 9)]
    pair = {"prompt": [user("hi")], "chosen": [assistant("no")], "rejected": turns[1:]}
    out, metrics = run(
        tmp_path,
        models("chatml"),
        [turns, ONE_TURN],
        [pair, PAIR],
        max_length=40,
        on_overflow="truncate_prompt",
    )
    assert metrics["conversations/train/dropped/too_long"] == 1
    assert metrics["preferences/train/dropped/too_long"] == 1
    assert len(rows(out)) == len(rows(out, "preferences/train")) == 1


# --- counts, places, determinism


def test_the_metrics_count_rows_and_tokens(tmp_path: Path, models: Any) -> None:
    model = models("chatml")
    rising = [[user("a" * n), assistant("b")] for n in range(1, 21)]
    out, metrics = run(tmp_path, model, rising, [PAIR])
    kept = rows(out)
    lengths = sorted(len(row["input_ids"]) for row in kept)
    got = {name.removeprefix("conversations/train/"): n for name, n in metrics.items()}
    assert got["rows"] == 20 and got["tokens"] == sum(lengths)
    assert (got["p50"], got["p95"], got["longest"]) == (lengths[9], lengths[18], lengths[19])
    assert got["trained_tokens"] == sum(x != -100 for row in kept for x in row["labels"])
    (pair,) = rows(out, "preferences/train")
    prompt, chosen, rejected = (len(pair[f"{n}_ids"]) for n in ("prompt", "chosen", "rejected"))
    assert metrics["preferences/train/trained_tokens"] == chosen + rejected
    assert metrics["preferences/train/tokens"] == 2 * prompt + chosen + rejected
    assert metrics["preferences/train/longest"] == prompt + max(chosen, rejected)
    assert metrics["conversations/test/rows"] == metrics["preferences/test/rows"] == 1


def test_without_preferences_there_is_no_such_folder(tmp_path: Path, models: Any) -> None:
    out, metrics = run(tmp_path, models("chatml"), [ONE_TURN])
    assert {path.name for path in out.iterdir()} == {
        "conversations",
        "quarantine.jsonl",
        "template.json",
    }
    assert {path.name for path in (out / "conversations").iterdir()} == {"train", "test"}
    assert not any(name.startswith("preferences") for name in metrics)


def test_another_process_writes_the_same_bytes_over_a_broken_run(
    tmp_path: Path, models: Any
) -> None:
    out, _ = run(tmp_path, models("chatml"), [TWO_TURNS, LONG], [PAIR])
    again = tmp_path / "again"
    for broken in ("conversations/train", "conversations/train.partial"):
        (again / broken).mkdir(parents=True)
        (again / broken / "junk.arrow").write_text("junk")
    code = (
        "import sys; from pathlib import Path\n"
        "from stages.base import Context\n"
        "from stages.tokenize_data import TokenizeData, tokenize_data\n"
        "assert not {'torch', 'transformers', 'datasets'} & set(sys.modules)\n"
        "out, model, data = map(Path, sys.argv[1:])\n"
        "tokenize_data(TokenizeData(), Context(out), model=model, data=data)\n"
    )
    root = Path(__file__).parents[2]
    arguments = map(str, (again, models("chatml"), tmp_path / "data"))
    subprocess.run([sys.executable, "-c", code, *arguments], cwd=root, check=True)
    files = sorted(path.relative_to(out) for path in out.rglob("*") if path.is_file())
    assert files == sorted(p.relative_to(again) for p in again.rglob("*") if p.is_file())
    for file in files:
        assert (out / file).read_bytes() == (again / file).read_bytes(), file


# --- from raw files to tokens and back

words = st.text(
    st.characters(codec="utf-8", exclude_characters="<"), min_size=1, max_size=20
).filter(lambda text: text.strip())
conversations = st.lists(
    st.builds(
        lambda start, turns: [
            *([system(start)] if start else []),
            *(turn for question, answer in turns for turn in (user(question), assistant(answer))),
        ],
        st.none() | words,
        st.lists(st.tuples(words, words), min_size=1, max_size=3),
    ),
    min_size=1,
    max_size=5,
)


@settings(
    max_examples=30, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture]
)
@given(conversations=conversations, name=st.sampled_from(["chatml", "llama3", "mistral", "phi3"]))
def test_turns_survive_preparing_tokenising_and_decoding(
    tmp_path_factory: pytest.TempPathFactory, models: Any, conversations: Any, name: str
) -> None:
    folder = tmp_path_factory.mktemp("trip")
    anchors = [[user(f"anchor {n}"), assistant("a")] for n in range(12)]  # so that both sides fill
    (folder / "raw" / "data").mkdir(parents=True)
    raw = [{"messages": turns} for turns in [*conversations, *anchors]]
    (folder / "raw" / "data" / "rows.json").write_text(json.dumps(raw))
    prepare_data(
        PrepareData(test_fraction=0.5, drop_budget=0),
        Context(folder / "prepared"),
        conversations=folder / "raw",
    )
    out = folder / "out"
    tokenize_data(
        TokenizeData(drop_budget=0),
        Context(out),
        model=models(name),
        data=folder / "prepared",
    )
    tokenizer, stop = tokenizer_of(models(name)), STOPS[name]
    trims = name in ("llama3", "mistral")
    expected = set()
    for turns in [*conversations, *anchors]:
        answers = [turn["content"] for turn in turns if turn["role"] == "assistant"]
        shown = [text.strip() if trims else text for text in answers]
        lead = " " if name == "mistral" else ""
        expected.add(("".join(f"{lead}{text}{stop}" for text in shown), answers[-1]))
    got = {
        (trained(row, tokenizer), row["answer"])
        for side in ("train", "test")
        for row in rows(out, f"conversations/{side}")
    }
    assert got == expected


@needs_real
def test_real_files(tmp_path: Path, models: Any) -> None:
    for name, file in (("c", "alpaca_en_demo.json"), ("p", "dpo_en_demo.json")):
        (tmp_path / name / "data").mkdir(parents=True)
        (tmp_path / name / "data" / file).write_bytes((REAL / file).read_bytes())
    prepare_data(
        PrepareData(
            max_conversations=150,
            max_preferences=50,
            max_conversation_chars=1500,
            max_pair_chars=1500,
        ),
        Context(tmp_path / "prepared"),
        conversations=tmp_path / "c",
        preferences=tmp_path / "p",
    )
    metrics = tokenize_data(
        TokenizeData(max_length=4096, drop_budget=0),
        Context(tmp_path / "out"),
        model=models("chatml"),
        data=tmp_path / "prepared",
    )
    assert metrics["conversations/train/rows"] == 150
    assert metrics["preferences/train/rows"] == 50
    assert metrics["conversations/train/context_mismatch_rows"] == 0
    tokenizer = tokenizer_of(models("chatml"))
    for row in rows(tmp_path / "out", "conversations/test"):
        assert trained(row, tokenizer) == row["answer"] + "<|im_end|>"
