"""Published chat templates, row by row: ids, masks and stops are what the model's folder gives."""
# ruff: noqa: E501  (templates are left as they are published)

import json
from functools import cache
from pathlib import Path
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from stages.base import Context, StageError
from stages.tokenize_data import TokenizeData, tokenize_data
from tests.data_rows import assistant, calling, system, user

CHATML = (
    "{% for m in messages %}{{ '<|im_start|>' + m['role'] + '\\n' + m['content'] + '<|im_end|>\\n'"
    " }}{% endfor %}{% if add_generation_prompt %}{{ '<|im_start|>assistant\\n' }}{% endif %}"
)
MARKED = (
    "{% for m in messages %}{{ '<|im_start|>' + m['role'] + '\\n' }}"
    "{% if m['role'] == 'assistant' %}{% generation %}{{ m['content'] + '<|im_end|>' }}"
    "{% endgeneration %}{% else %}{{ m['content'] + '<|im_end|>' }}{% endif %}{{ '\\n' }}"
    "{% endfor %}{% if add_generation_prompt %}{{ '<|im_start|>assistant\\n' }}{% endif %}"
)
LLAMA31 = """{{- bos_token }}
{%- if not date_string is defined %}
    {%- if strftime_now is defined %}{%- set date_string = strftime_now("%d %b %Y") %}
    {%- else %}{%- set date_string = "26 Jul 2024" %}{%- endif %}
{%- endif %}
{%- if messages[0]['role'] == 'system' %}
    {%- set system_message = messages[0]['content'] | trim %}{%- set messages = messages[1:] %}
{%- else %}{%- set system_message = "" %}{%- endif %}
{{- "<|start_header_id|>system<|end_header_id|>\\n\\n" }}
{%- if tools is not none %}{{- "Environment: ipython\\n" }}{%- endif %}
{{- "Cutting Knowledge Date: December 2023\\nToday Date: " + date_string + "\\n\\n" }}
{%- if tools is not none %}
    {{- "You have access to the following functions.\\n\\n" }}
    {%- for t in tools %}{{- t | tojson(indent=4) }}{{- "\\n\\n" }}{%- endfor %}
{%- endif %}
{{- system_message }}{{- "<|eot_id|>" }}
{%- for message in messages %}
    {%- if not (message.role == 'tool' or 'tool_calls' in message) %}
        {{- '<|start_header_id|>' + message['role'] + '<|end_header_id|>\\n\\n' }}
        {{- message['content'] | trim + '<|eot_id|>' }}
    {%- elif 'tool_calls' in message %}
        {%- if not message.tool_calls | length == 1 %}
            {{- raise_exception("This model only supports single tool-calls at once!") }}
        {%- endif %}
        {%- set call = message.tool_calls[0].function %}
        {{- '<|start_header_id|>assistant<|end_header_id|>\\n\\n' }}
        {{- '{"name": "' + call.name + '", "parameters": ' + call.arguments | tojson + "}" }}
        {{- "<|eot_id|>" }}
    {%- else %}
        {{- "<|start_header_id|>ipython<|end_header_id|>\\n\\n" }}
        {{- message.content | tojson }}{{- "<|eot_id|>" }}
    {%- endif %}
{%- endfor %}
{%- if add_generation_prompt %}
    {{- '<|start_header_id|>assistant<|end_header_id|>\\n\\n' }}
{%- endif %}"""
QWEN_TOOLS = """
    {{- "# Tools\\n\\nYou may call one or more functions.\\n\\n<tools>" }}
    {%- for tool in tools %}{{- "\\n" }}{{- tool | tojson }}{%- endfor %}
    {{- "\\n</tools>\\n<|im_end|>\\n" }}"""
QWEN25 = (
    """{%- if tools %}
    {{- '<|im_start|>system\\n' }}
    {%- if messages[0]['role'] == 'system' %}{{- messages[0]['content'] }}
    {%- else %}{{- 'You are Qwen, created by Alibaba Cloud.' }}{%- endif %}
    {{- "\\n\\n" }}"""
    + QWEN_TOOLS
    + """
{%- else %}
    {%- if messages[0]['role'] == 'system' %}
        {{- '<|im_start|>system\\n' + messages[0]['content'] + '<|im_end|>\\n' }}
    {%- else %}
        {{- '<|im_start|>system\\nYou are Qwen, created by Alibaba Cloud.<|im_end|>\\n' }}
    {%- endif %}
{%- endif %}
{%- for message in messages %}
    {%- if (message.role == "user") or (message.role == "system" and not loop.first) or (message.role == "assistant" and not message.tool_calls) %}
        {{- '<|im_start|>' + message.role + '\\n' + message.content + '<|im_end|>' + '\\n' }}
    {%- elif message.role == "assistant" %}
        {{- '<|im_start|>' + message.role }}
        {%- if message.content %}{{- '\\n' + message.content }}{%- endif %}
        {%- for tool_call in message.tool_calls %}
            {%- if tool_call.function is defined %}{%- set tool_call = tool_call.function %}{%- endif %}
            {{- '\\n<tool_call>\\n{"name": "' }}{{- tool_call.name }}{{- '", "arguments": ' }}
            {{- tool_call.arguments | tojson }}{{- '}\\n</tool_call>' }}
        {%- endfor %}
        {{- '<|im_end|>\\n' }}
    {%- elif message.role == "tool" %}
        {%- if (loop.index0 == 0) or (messages[loop.index0 - 1].role != "tool") %}
            {{- '<|im_start|>user' }}
        {%- endif %}
        {{- '\\n<tool_response>\\n' }}{{- message.content }}{{- '\\n</tool_response>' }}
        {%- if loop.last or (messages[loop.index0 + 1].role != "tool") %}
            {{- '<|im_end|>\\n' }}
        {%- endif %}
    {%- endif %}
{%- endfor %}
{%- if add_generation_prompt %}{{- '<|im_start|>assistant\\n' }}{%- endif %}"""
)
QWEN3 = (
    """{%- if tools %}
    {{- '<|im_start|>system\\n' }}
    {%- if messages[0].role == 'system' %}{{- messages[0].content + '\\n\\n' }}{%- endif %}"""
    + QWEN_TOOLS
    + """
{%- else %}
    {%- if messages[0].role == 'system' %}
        {{- '<|im_start|>system\\n' + messages[0].content + '<|im_end|>\\n' }}
    {%- endif %}
{%- endif %}
{%- set ns = namespace(multi_step_tool=true, last_query_index=messages|length - 1) %}
{%- for message in messages[::-1] %}
    {%- set index = (messages|length - 1) - loop.index0 %}
    {%- if ns.multi_step_tool and message.role == "user" and not(message.content.startswith('<tool_response>') and message.content.endswith('</tool_response>')) %}
        {%- set ns.multi_step_tool = false %}{%- set ns.last_query_index = index %}
    {%- endif %}
{%- endfor %}
{%- for message in messages %}
    {%- if (message.role == "user") or (message.role == "system" and not loop.first) %}
        {{- '<|im_start|>' + message.role + '\\n' + message.content + '<|im_end|>' + '\\n' }}
    {%- elif message.role == "assistant" %}
        {%- set content = message.content %}{%- set reasoning_content = '' %}
        {%- if message.reasoning_content is defined and message.reasoning_content is not none %}
            {%- set reasoning_content = message.reasoning_content %}
        {%- endif %}
        {%- if loop.index0 > ns.last_query_index %}
            {%- if loop.last or (not loop.last and reasoning_content) %}
                {{- '<|im_start|>' + message.role + '\\n<think>\\n' + reasoning_content.strip('\\n') + '\\n</think>\\n\\n' + content.lstrip('\\n') }}
            {%- else %}
                {{- '<|im_start|>' + message.role + '\\n' + content }}
            {%- endif %}
        {%- else %}
            {{- '<|im_start|>' + message.role + '\\n' + content }}
        {%- endif %}
        {%- if message.tool_calls %}
            {%- for tool_call in message.tool_calls %}
                {%- if (loop.first and content) or (not loop.first) %}{{- '\\n' }}{%- endif %}
                {%- if tool_call.function %}{%- set tool_call = tool_call.function %}{%- endif %}
                {{- '<tool_call>\\n{"name": "' }}{{- tool_call.name }}{{- '", "arguments": ' }}
                {{- tool_call.arguments | tojson }}{{- '}\\n</tool_call>' }}
            {%- endfor %}
        {%- endif %}
        {{- '<|im_end|>\\n' }}
    {%- elif message.role == "tool" %}
        {%- if loop.first or (messages[loop.index0 - 1].role != "tool") %}
            {{- '<|im_start|>user' }}
        {%- endif %}
        {{- '\\n<tool_response>\\n' }}{{- message.content }}{{- '\\n</tool_response>' }}
        {%- if loop.last or (messages[loop.index0 + 1].role != "tool") %}
            {{- '<|im_end|>\\n' }}
        {%- endif %}
    {%- endif %}
{%- endfor %}
{%- if add_generation_prompt %}{{- '<|im_start|>assistant\\n' }}{%- endif %}"""
)
GEMMA = (
    "{{ bos_token }}{% if messages[0]['role'] == 'system' %}"
    "{{ raise_exception('System role not supported') }}{% endif %}{% for m in messages %}"
    "{% if (m['role'] == 'user') != (loop.index0 % 2 == 0) %}"
    "{{ raise_exception('Conversation roles must alternate') }}{% endif %}"
    "{{ '<start_of_turn>' + ('model' if m['role'] == 'assistant' else m['role']) + '\\n' "
    "+ m['content'] | trim + '<end_of_turn>\\n' }}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<start_of_turn>model\\n' }}{% endif %}"
)
GEMMA3 = GEMMA.replace(
    "{{ raise_exception('System role not supported') }}",
    "{% set first = messages[0]['content'] + '\\n\\n' %}{% set messages = messages[1:] %}",
).replace(
    "+ m['content'] | trim", "+ (first if first and loop.first else '') + m['content'] | trim"
)
MISTRAL = """{%- if messages[0]["role"] == "system" %}
    {%- set system_message = messages[0]["content"] %}{%- set loop_messages = messages[1:] %}
{%- else %}{%- set loop_messages = messages %}{%- endif %}
{{- bos_token }}
{%- for message in loop_messages %}
    {%- if message["role"] == "user" %}
        {%- if tools is not none and (message == loop_messages[-1] or loop.first) %}
            {{- "[AVAILABLE_TOOLS] " + tools | tojson + "[/AVAILABLE_TOOLS]" }}
        {%- endif %}
        {%- if loop.first and system_message is defined %}
            {{- "[INST] " + system_message + "\\n\\n" + message["content"] + "[/INST]" }}
        {%- else %}{{- "[INST] " + message["content"] + "[/INST]" }}{%- endif %}
    {%- elif message.tool_calls is defined and message.tool_calls is not none %}
        {{- "[TOOL_CALLS] [" }}
        {%- for tool_call in message.tool_calls %}{{- tool_call.function | tojson }}{%- endfor %}
        {{- "]" + eos_token }}
    {%- elif message["role"] == "assistant" %}{{- " " + message["content"] | trim + eos_token }}
    {%- elif message["role"] == "tool" %}
        {{- '[TOOL_RESULTS] {"content": ' + message.content | string + "}[/TOOL_RESULTS]" }}
    {%- endif %}
{%- endfor %}"""
PHI3 = (
    "{% for m in messages %}{{ '<|' + m['role'] + '|>\\n' + m['content'] + '<|end|>\\n' }}"
    "{% endfor %}{% if add_generation_prompt %}{{ '<|assistant|>\\n' }}"
    "{% else %}{{ eos_token }}{% endif %}"
)
PHI4 = (
    "{% for m in messages %}{{ '<|im_start|>' + m['role'] + '<|im_sep|>' + m['content'] + "
    "'<|im_end|>' }}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|im_start|>assistant<|im_sep|>' }}{% endif %}"
)
ZEPHYR = (
    "{% for m in messages %}{{ '<|' + m['role'] + '|>\\n' + m['content'] + eos_token + '\\n' }}"
    "{% endfor %}{% if add_generation_prompt %}{{ '<|assistant|>\\n' }}{% endif %}"
)

# name: template, special tokens, added tokens that are not special, bos, eos, sets BOS, stops
Model = tuple[str, str, str, str | None, str, bool, list[str]]
MODELS: dict[str, Model] = {
    "chatml": (CHATML, "<|im_start|> <|im_end|>", "", None, "<|im_end|>", False, []),
    "marked": (MARKED, "<|im_start|> <|im_end|>", "", None, "<|im_end|>", False, []),
    "llama31": (
        LLAMA31,
        "<|begin_of_text|> <|end_of_text|> <|start_header_id|> <|end_header_id|> <|eot_id|>",
        "",
        "<|begin_of_text|>",
        "<|eot_id|>",
        True,
        ["<|end_of_text|>", "<|eot_id|>"],
    ),
    "qwen25": (
        QWEN25, "<|endoftext|> <|im_start|> <|im_end|>", "<tool_call> </tool_call>", None,
        "<|im_end|>", False, ["<|im_end|>", "<|endoftext|>"],
    ),
    "qwen3": (
        QWEN3, "<|endoftext|> <|im_start|> <|im_end|>",
        "<think> </think> <tool_call> </tool_call> <tool_response> </tool_response>", None,
        "<|im_end|>", False, ["<|im_end|>", "<|endoftext|>"],
    ),
    "gemma": (
        GEMMA, "<bos> <eos> <start_of_turn> <end_of_turn>", "", "<bos>", "<eos>", True,
        ["<eos>", "<end_of_turn>"],
    ),
    "gemma3": (
        GEMMA3, "<bos> <eos> <start_of_turn> <end_of_turn>", "", "<bos>", "<eos>", True,
        ["<eos>", "<end_of_turn>"],
    ),
    "mistral": (
        MISTRAL, "<s> </s> [INST] [/INST] [TOOL_CALLS] [AVAILABLE_TOOLS] [/AVAILABLE_TOOLS] "
        "[TOOL_RESULTS] [/TOOL_RESULTS]", "", "<s>", "</s>", True, ["</s>"],
    ),
    "mistral_without_marks": (MISTRAL, "<s> </s>", "", "<s>", "</s>", True, ["</s>"]),
    "phi3": (
        PHI3, "<|end|> <|user|> <|assistant|> <|system|> <|endoftext|>", "", None,
        "<|endoftext|>", False, ["<|end|>"],
    ),
    "phi4": (
        PHI4, "<|im_start|> <|im_sep|> <|im_end|> <|endoftext|>", "", None, "<|im_end|>", False, [],
    ),
    "zephyr": (ZEPHYR, "<s> </s>", "", "<s>", "</s>", True, ["</s>"]),
}  # fmt: skip
WITH_TOOLS = ["llama31", "qwen25", "qwen3", "mistral"]
NO_SYSTEM = ["gemma"]
STOPS = {
    "llama31": "<|eot_id|>", "gemma": "<end_of_turn>", "gemma3": "<end_of_turn>", "phi3": "<|end|>",
    "mistral": "</s>", "mistral_without_marks": "</s>", "zephyr": "</s>",
}  # fmt: skip
CORPUS = ["the cat sat on the mat and the dog sat on the cat; what is 12 + 30? it is 42."] * 20
DATE = "2024-07-26"


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> Any:
    """A function from a name in MODELS to a folder that holds ``model/``."""
    from tokenizers import AddedToken, Tokenizer, decoders, pre_tokenizers, processors, trainers
    from tokenizers import models as kinds
    from transformers import PreTrainedTokenizerFast

    root = tmp_path_factory.mktemp("models")

    @cache
    def model(name: str) -> Path:
        template, special, added, bos, eos, sets_bos, stops = MODELS[name]
        raw = Tokenizer(kinds.BPE())
        raw.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
        raw.decoder = decoders.ByteLevel()
        trainer = trainers.BpeTrainer(
            vocab_size=340,
            special_tokens=special.split(),
            initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
            show_progress=False,
        )
        raw.train_from_iterator(CORPUS, trainer)
        raw.add_tokens([AddedToken(one, special=False, normalized=False) for one in added.split()])
        if sets_bos and bos:
            raw.post_processor = processors.TemplateProcessing(
                single=f"{bos} $A", special_tokens=[(bos, raw.token_to_id(bos))]
            )
        tokenizer = PreTrainedTokenizerFast(tokenizer_object=raw, bos_token=bos, eos_token=eos)
        tokenizer.chat_template = template
        tokenizer.save_pretrained(root / name / "model")
        if stops:
            config = {"eos_token_id": [raw.token_to_id(stop) for stop in stops]}
            (root / name / "model" / "generation_config.json").write_text(json.dumps(config))
        return root / name

    return model


ONE = [user("what is 12 + 30?"), assistant("42")]
TWO = [
    user("the cat?"),
    assistant("it sat. "),
    user(" the dog?\n"),
    assistant("on the <b>mat</b>."),
]
SYSTEM = [system("be kind"), *TWO]
TOOL = {"type": "function", "function": {"name": "weather", "parameters": {"type": "object"}}}
TOOLED = [
    user("the weather?"),
    calling("weather", town="Bern"),
    {"role": "tool", "content": "7"},
    assistant("it is 7."),
]


def run(tmp_path: Path, model: Path, rows: list[dict[str, Any]], **config: Any) -> Any:
    """The tokenised rows of both sides, which hold the same, and the metrics."""
    from datasets import load_from_disk

    for kind in ("conversations", "preferences", "unpaired"):
        key = {"conversations": ("messages", "text"), "preferences": ("chosen",)}.get(kind)
        mine = [row for row in rows if any(one in row for one in key or ("completion",))]
        if mine:
            (tmp_path / "data" / kind).mkdir(parents=True)
            for side in ("train", "test"):
                text = "".join(json.dumps(row) + "\n" for row in mine)
                (tmp_path / "data" / kind / f"{side}.jsonl").write_text(text)
    config = {"template_date": DATE, "drop_budget": 0, "max_length": 4096, **config}
    metrics = tokenize_data(
        TokenizeData(**config), Context(tmp_path / "out"), model=model, data=tmp_path / "data"
    )
    out = tmp_path / "out"
    found = {kind.name: load_from_disk(kind / "train").to_list() for kind in out.glob("*s")}
    found |= {kind.name: load_from_disk(kind / "train").to_list() for kind in out.glob("unpaired")}
    return found, metrics


@cache
def tokenizer_of(model: Path) -> Any:
    from transformers import AutoTokenizer

    return AutoTokenizer.from_pretrained(model / "model")


def ids_of(model: Path, turns: Any, **options: Any) -> list[int]:
    """What the folder gives to whoever serves it, on the day that the data was made for."""
    import datetime

    from transformers.utils import chat_template_utils

    tokenizer = tokenizer_of(model)
    compiled = chat_template_utils._compile_jinja_template(tokenizer.chat_template)
    kept = compiled.globals.get("strftime_now")
    compiled.globals["strftime_now"] = datetime.date.fromisoformat(DATE).strftime
    try:
        ids = tokenizer.apply_chat_template(turns, **options)["input_ids"]
    finally:
        compiled.globals["strftime_now"] = kept
    return [tokenizer.bos_token_id, *ids] if model.name == "zephyr" else ids


def trained(row: Any, model: Path) -> str:
    return tokenizer_of(model).decode([one for one in row["labels"] if one != -100])


@pytest.mark.parametrize("name", MODELS)
def test_ids_are_the_folder_s_own_for_every_row(tmp_path: Path, models: Any, name: str) -> None:
    model = models(name)
    rows: list[Any] = [{"messages": ONE}, {"messages": TWO}]
    rows += [{"messages": SYSTEM}] * (name not in NO_SYSTEM)
    rows += [{"messages": TOOLED, "tools": [TOOL]}] * (name in WITH_TOOLS)
    found, metrics = run(tmp_path, model, rows)
    assert metrics["conversations/train/rows"] == len(rows)
    bos = tokenizer_of(model).bos_token_id
    for row, ours in zip(rows, found["conversations"], strict=True):
        turns, tools = row["messages"], row.get("tools")
        whole, ids = ids_of(model, turns, tools=tools), ours["input_ids"]
        assert ids == whole[: len(ids)]
        assert ours["prompt_ids"] == ids_of(
            model, turns[:-1], tools=tools, add_generation_prompt=True
        )
        assert ours["length"] == len(ids) and ours["labels"][-1] == ids[-1] == stop_id(model)
        assert bos is None or (ids[0] == bos and ids.count(bos) == 1)


def stop_id(model: Path) -> int:
    tokenizer = tokenizer_of(model)
    return tokenizer.convert_tokens_to_ids(STOPS.get(model.name, tokenizer.eos_token))


@pytest.mark.parametrize("name", MODELS)
def test_the_mask_is_the_answers_with_their_stops(tmp_path: Path, models: Any, name: str) -> None:
    model = models(name)
    found, _ = run(tmp_path, model, [{"messages": TWO}])
    stop = tokenizer_of(model).decode([stop_id(model)])
    strips = name in ("llama31", "gemma", "gemma3") or name.startswith("mistral")
    lead = " " if name.startswith("mistral") else ""
    first = f"{lead}{'it sat.' if strips else 'it sat. '}{stop}"
    thought = "<think>\n\n</think>\n\n" if name == "qwen3" else ""
    last = f"{lead}{thought}on the <b>mat</b>.{stop}"
    assert trained(found["conversations"][0], model) == first + last


@pytest.mark.parametrize("name", WITH_TOOLS)
def test_tool_calls_are_trained_and_results_are_not(tmp_path: Path, models: Any, name: str) -> None:
    model = models(name)
    found, _ = run(tmp_path, model, [{"messages": TOOLED, "tools": [TOOL]}])
    text = trained(found["conversations"][0], model)
    assert text.count('"weather"') == 1 and "Bern" in text and "it is 7." in text
    stop = tokenizer_of(model).decode([stop_id(model)])
    assert text.count(stop) == 2 and "the weather?" not in text and "tool_response" not in text


def test_a_template_that_ignores_tools_refuses_such_rows(tmp_path: Path, models: Any) -> None:
    rows = [{"messages": ONE}, {"messages": ONE, "tools": [TOOL]}, {"messages": TOOLED}]
    _, metrics = run(tmp_path, models("phi4"), rows, drop_budget=1)
    assert metrics["conversations/train/dropped/tools_not_rendered"] == 2


def test_a_thought_is_rendered_by_a_template_that_knows_it(tmp_path: Path, models: Any) -> None:
    turns = [user("a"), assistant("b", reasoning_content="hmm")]
    found, _ = run(tmp_path, models("qwen3"), [{"messages": turns}])
    text = trained(found["conversations"][0], models("qwen3"))
    assert text == "<think>\nhmm\n</think>\n\nb<|im_end|>"


@pytest.mark.parametrize("name", ["chatml", "marked"])
def test_an_answer_can_be_left_untrained(tmp_path: Path, models: Any, name: str) -> None:
    turns = [*TWO[:1], assistant("it sat. ", train=False), *TWO[2:]]
    rows = [{"messages": turns}, {"messages": [ONE[0], assistant("42", train=False)]}]
    found, metrics = run(tmp_path, models(name), rows, drop_budget=1)
    (row,) = found["conversations"]
    assert trained(row, models(name)) == "on the <b>mat</b>.<|im_end|>"
    assert metrics["conversations/train/dropped/no_trained_token"] == 1
    assert metrics["conversations/train/trained_tokens"] == sum(x != -100 for x in row["labels"])


def test_marks_and_prefixes_find_the_same(tmp_path: Path, models: Any) -> None:
    rows = [{"messages": turns} for turns in (ONE, TWO, SYSTEM)]
    marked, _ = run(tmp_path / "a", models("marked"), rows)
    plain, _ = run(tmp_path / "b", models("chatml"), rows)
    assert marked == plain


# --- the date


def test_a_template_that_writes_the_date_needs_one(tmp_path: Path, models: Any) -> None:
    with pytest.raises(StageError, match=r"llama31.model: .*today's date.*template_date"):
        run(tmp_path / "a", models("llama31"), [{"messages": ONE}], template_date=None)
    found, _ = run(tmp_path / "b", models("llama31"), [{"messages": ONE}])
    text = tokenizer_of(models("llama31")).decode(found["conversations"][0]["input_ids"])
    assert "Today Date: 26 Jul 2024\n" in text


# --- other kinds of rows


def test_pairs_and_judged_answers_end_with_a_stop(tmp_path: Path, models: Any) -> None:
    model = models("chatml")
    pair = {"prompt": ONE[:1], "chosen": [assistant("42")], "rejected": [assistant("no")]}
    judged = {"prompt": ONE[:1], "completion": [assistant("42")], "label": True}
    found, metrics = run(tmp_path, model, [pair, judged, {**judged, "label": False}])
    prompt = ids_of(model, ONE[:1], add_generation_prompt=True)
    answer = ids_of(model, ONE)[len(prompt) : -1]
    (row,) = found["preferences"]
    assert (row["prompt_ids"], row["chosen_ids"]) == (prompt, answer)
    good, bad = found["unpaired"]
    assert (good["prompt_ids"], good["completion_ids"], good["label"]) == (prompt, answer, True)
    assert bad["label"] is False and metrics["unpaired/train/rows"] == 2
    assert metrics["unpaired/train/trained_tokens"] == 2 * len(answer)


def test_texts_are_trained_whole_and_end_with_eos(tmp_path: Path, models: Any) -> None:
    found, _ = run(tmp_path, models("zephyr"), [{"text": "the cat"}, {"text": "a </s> b"}],
                   drop_budget=1)  # fmt: skip
    (row,) = found["conversations"]
    assert row["labels"] == row["input_ids"] and row["prompt_ids"] == row["input_ids"][:1]
    assert tokenizer_of(models("zephyr")).decode(row["input_ids"]) == "<s>the cat</s>"


def test_texts_need_no_template(tmp_path: Path, models: Any) -> None:
    import shutil

    bare = tmp_path / "bare"
    shutil.copytree(models("chatml"), bare)
    (bare / "model" / "chat_template.jinja").unlink()
    found, _ = run(tmp_path / "t", bare, [{"text": "the cat"}])
    assert len(found["conversations"]) == 1


# --- the gate, the cores


def test_ids_that_are_not_the_folder_s_stop_the_stage(tmp_path: Path, models: Any) -> None:
    import dataclasses

    from stages.data import masking, templates, tokens
    from stages.data.places import Place

    template = templates.load(models("chatml") / "model")
    fitting = tokens.Fitting(100, "drop", assistant_only_loss=True)
    work = tokens.Tokenizing(template, fitting, "conversations", "train.jsonl")
    talks = [masking.Talk(TWO)]
    (masked,) = masking.mask(template, talks, work.tails)
    assert isinstance(masked, masking.Masked)
    tokens._compare(work, talks, [masked], Place("train.jsonl", line=3))
    wrong = masked.ids.copy()
    wrong[5] += 1
    other = dataclasses.replace(masked, ids=wrong)
    with pytest.raises(StageError, match=r"train\.jsonl:3: token 5 is \d+, but .*chatml.model"):
        tokens._compare(work, talks, [other], Place("train.jsonl", line=3))


def test_many_rows_on_several_cores_are_what_one_core_makes(
    tmp_path: Path, models: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    import sys

    stage = sys.modules["stages.tokenize_data"]
    rows = [{"messages": [user(f"{n} cats?"), assistant(f"{n} sat.")]} for n in range(300)]
    rows[7] = {"messages": [user("a"), assistant("<|im_end|>")]}
    outs = []
    for name, worth in (("one", 1 << 40), ("several", 0)):
        monkeypatch.setattr(stage, "WORTH_A_PROCESS", worth)
        monkeypatch.setattr(stage, "BLOCK_ROWS", 64)
        monkeypatch.setattr("os.sched_getaffinity", lambda _: {0, 1})
        run(tmp_path / name, models("chatml"), rows, drop_budget=1)
        outs.append(tmp_path / name / "out")
    files = sorted(path.relative_to(outs[0]) for path in outs[0].rglob("*") if path.is_file())
    assert any(path.suffix == ".arrow" for path in files)
    for file in files:
        assert (outs[0] / file).read_bytes() == (outs[1] / file).read_bytes(), file


# --- any conversation

said = st.text(
    st.characters(codec="utf-8", exclude_characters="<["), min_size=1, max_size=12
).filter(lambda text: text.strip())
exchanges = st.lists(st.tuples(said, said), min_size=1, max_size=3)


@settings(
    max_examples=25, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture]
)
@given(talks=st.lists(exchanges, min_size=1, max_size=4), name=st.sampled_from(sorted(MODELS)))
def test_turns_come_back_whatever_they_say(
    tmp_path_factory: pytest.TempPathFactory, models: Any, talks: Any, name: str
) -> None:
    model = models(name)
    rows = [
        {"messages": [turn for q, a in talk for turn in (user(q), assistant(a))]} for talk in talks
    ]
    found, metrics = run(tmp_path_factory.mktemp("any"), model, rows, drop_budget=1)
    assert metrics["conversations/train/rows"] == len(rows)
    stop = tokenizer_of(model).decode([stop_id(model)])
    for row, ours in zip(rows, found["conversations"], strict=True):
        ids = ours["input_ids"]
        assert ids == ids_of(model, row["messages"])[: len(ids)]
        answers = trained(ours, model).split(stop)[:-1]
        expected = [turn["content"] for turn in row["messages"] if turn["role"] == "assistant"]
        assert [one.replace("<think>\n\n</think>\n\n", "").strip() for one in answers] == [
            one.strip() for one in expected
        ]
