"""Verifiable rewards: right, wrong and hostile answers; and what a misbehaving function says."""

import json
import signal
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from pydantic import ValidationError

from stages import rewards
from stages.base import StageError
from stages.evaluate import Evaluate
from stages.grpo import GRPO, in_our_words
from stages.ppo import PPO
from stages.rewards import RewardError, prompts, verifiable
from stages.rewards.config import Reward, names
from stages.rewards.verifiable import FUNCTIONS, number_in

GSM8K = Path(__file__).resolve().parents[3] / "shared" / "data" / "gsm8k_test.jsonl"


def scores(
    function: str, completions: Sequence[str], rows: Sequence[dict] | None = None, **options: Any
) -> list[float]:
    spec = Reward(function=function, options=options)
    given = list(rows) if rows else [{"answer": ""}] * len(completions)
    asked = [[{"role": "user", "content": "?"}]] * len(completions)
    return rewards.load((spec,), {}, "cpu")(asked, list(completions), given)["total"]


def answers(*texts: str) -> list[dict]:
    return [{"answer": text} for text in texts]


def test_exact_match_compares_whole_texts_or_their_last_match() -> None:
    assert scores("exact_match", [" 42\n", "42.", "43"], answers("42", "42", "42")) == [1, 0, 0]
    pattern = r"(\d+ [a-z]+)"
    said = ["Easy, 37000 m!", "37 km = 37000 m", "37000", "3700 m"]
    assert scores("exact_match", said, answers(*["37 km = 37000 m"] * 4), pattern=pattern) == [
        1, 1, 0, 0,
    ]  # fmt: skip
    assert scores("exact_match", ["YES"], answers("yes"), ignore_case=True) == [1]
    with pytest.raises(RewardError, match=r"finds nothing in 'none'"):
        scores("exact_match", ["1"], answers("none"), pattern=pattern)
    with pytest.raises(RewardError, match=r"the row has no 'solution'; it has answer"):
        scores("exact_match", ["1"], answers("1"), field="solution")


@pytest.mark.parametrize(
    ("text", "number"),
    [
        ("so it is\n#### 42", 42), ("#### 1,234.50 dollars", 1234.5), ("#### -3", -3),
        ("#### $70,000", 70000), ("16 - 3 - 4 = 9 eggs", 9), ("9 * 2 = $18.", 18),
        ("range 3-4", 4), ("x=-5", -5), ("\N{MINUS SIGN}7", -7), ("it weighs 42km", 42),
        ("1e3", 1000), (".5", 0.5), ("1,2,3", 3), ("1234,567", 567), ("v1.2", None),
        ("none at all", None), ("", None), ("####", None), ("7 #### none", None),
        ("#### 5 or 6", 5), ("\u0664\u0662", None), ("5.", 5), ("12 %", 12),
    ],
)  # fmt: skip
def test_a_number_is_found_however_it_is_written(text: str, number: float | None) -> None:
    found = number_in(text)
    assert (None if found is None else float(found)) == number


def test_numeric_compares_values_and_not_spellings() -> None:
    said = ["#### 5.00", "the answer is 5", "#### 6", "no idea", "5 ... 7"]
    assert scores("numeric", said, answers(*["... #### 5"] * 5)) == [1, 1, 0, 0, 0]
    marked = scores("numeric", said[:2], answers(*["#### 5"] * 2), require_marker=True)
    assert marked == [1, 0]
    assert scores("numeric", ["3.14"], answers("3.14159"), tolerance=0.01) == [1]
    with pytest.raises(RewardError, match=r"no number in 'what\?'"):
        scores("numeric", ["1"], answers("what?"))


def test_long_numbers_are_compared_to_the_last_digit() -> None:
    long = "1" * 40
    assert scores("numeric", [f"{long}1", long, f"{long[:-1]}2"], answers(*[long] * 3)) == [0, 1, 0]


@pytest.mark.skipif(not GSM8K.exists(), reason="the GSM8K rows are not here")
def test_every_gsm8k_solution_earns_its_own_reward_and_no_other() -> None:
    rows = [json.loads(line) for line in GSM8K.read_text().splitlines()]
    solutions = [row["answer"] for row in rows]
    assert set(scores("numeric", solutions, rows)) == {1.0}
    spoilt = [f"{text}1" for text in solutions]  # one more digit
    assert set(scores("numeric", spoilt, rows)) == {0.0}
    unmarked = [text.replace("#### ", "The answer is ") for text in solutions]
    assert set(scores("numeric", unmarked, rows)) == {1.0}


@given(st.text())
def test_no_text_makes_a_number_raise(text: str) -> None:
    found = number_in(text)
    assert found is None or found.is_finite()


def test_regex_wants_the_whole_answer_unless_told_otherwise() -> None:
    pattern = r"<think>.*</think>\s*<answer>\d+</answer>"
    good = "<think>one\ntwo</think>\n<answer>3</answer>"
    assert scores("regex", [good, f"{good} and more", ""], pattern=pattern) == [1, 0, 0]
    assert scores("regex", [f"{good} more"], pattern=pattern, whole=False) == [1]
    assert scores("regex", ["YES"], pattern="yes", ignore_case=True) == [1]


def test_json_schema_takes_what_the_schema_accepts() -> None:
    schema = {
        "type": "object",
        "properties": {"name": {"type": "string"}, "age": {"type": "integer", "minimum": 0}},
        "required": ["name", "age"],
        "additionalProperties": False,
    }
    said = [
        '{"name": "a", "age": 3}', '{"name": "a", "age": -3}', '{"name": "a"}', "no", "",
        '{"name": "a", "age": NaN}', "[" * 100_000, '{"name": "a", "age": 3, "x": 1}',
    ]  # fmt: skip
    assert scores("json_schema", said, schema=schema) == [1, 0, 0, 0, 0, 0, 0, 0]
    assert scores("json_schema", said[1:4], schema=schema, for_json=0.5) == [0.5, 0.5, 0]
    fenced = f"Here:\n```json\n{said[0]}\n```\nDone."
    assert scores("json_schema", [fenced], schema=schema) == [0]
    multiple = {"type": "number", "multipleOf": 0.01}
    assert scores("json_schema", ["1e400", "2"], schema=multiple) == [0, 1]
    assert scores("json_schema", [fenced], schema=schema, fenced=True) == [1]


def test_a_schema_that_wants_the_network_is_named() -> None:
    with pytest.raises(RewardError, match=r"refers to 'http://127\.0\.0\.1:9/x'"):
        scores("json_schema", ["1"], schema={"$ref": "http://127.0.0.1:9/x"})


@pytest.mark.parametrize(
    ("function", "said", "options"),
    [
        ("regex", "a" * 40 + "!", {"pattern": "(a+)+"}),
        ("exact_match", "a" * 40 + "!", {"pattern": "((?:a+)+)b"}),
        ("json_schema", json.dumps("a" * 40 + "!"), {"schema": {"pattern": "^(a+)+$"}}),
    ],
)
def test_a_pattern_that_takes_for_ever_is_named_with_the_answer(
    monkeypatch: pytest.MonkeyPatch, function: str, said: str, options: dict
) -> None:
    monkeypatch.setattr(verifiable, "PATIENCE", 0.2)
    rang = signal.signal(signal.SIGALRM, signal.SIG_IGN)
    try:
        with pytest.raises(RewardError, match=r"no verdict on .*aaaa!.* after 0\.2 s; write"):
            scores(function, [said], answers("aab"), **options)
        assert signal.getsignal(signal.SIGALRM) == signal.SIG_IGN
        assert signal.getitimer(signal.ITIMER_REAL) == (0.0, 0.0)
    finally:
        signal.signal(signal.SIGALRM, rang)


def test_length_falls_beside_its_range() -> None:
    said = ["a" * n for n in (0, 5, 10, 12, 15, 20)]
    assert scores("length", said, most=10) == [1, 1, 1, 0, 0, 0]
    assert scores("length", said, most=10, least=5, margin=5) == pytest.approx([0, 1, 1, 0.6, 0, 0])
    assert scores("length", ["one two three", "one"], most=2, unit="words") == [0, 1]


# --- how rewards are named and added


def test_each_reward_has_its_name_and_the_sum_its_weights() -> None:
    specs = (
        Reward(function="regex", options={"pattern": "a+"}, weight=2),
        Reward(function="regex", options={"pattern": "b+"}, weight=-1),
        Reward(function="length", options={"most": 1}, weight=0.5),
    )
    assert names(specs) == ["regex", "regex_2", "length"]
    found = rewards.load(specs, {}, "cpu")([[], []], ["aa", "b"], [{}, {}])
    assert found["regex"] == [1, 0] and found["regex_2"] == [0, 1] and found["length"] == [0, 1]
    assert found["total"] == [2.0, -0.5]


def test_no_two_rewards_have_one_name() -> None:
    """Or the scores of one would stand in for the other's in the sum."""
    named = ("m:regex_2", "regex", "regex", "m:total")
    options = {"regex": {"pattern": "a"}}
    specs = [Reward(function=each, options=options.get(each, {})) for each in named]
    assert names(specs) == ["regex_2", "regex", "regex_3", "total_2"]


def test_your_own_function_is_found_by_module_or_by_file(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = tmp_path / "my_rewards.py"
    path.write_text(
        "def vowels(prompts, completions, rows, *, weight=1):\n"
        "    assert prompts[0][0]['role'] == 'user' and rows[0]['answer'] == ''\n"
        "    return [weight * sum(c in 'aeiou' for c in text) for text in completions]\n"
    )
    by_file = Reward(function="my_rewards:vowels", file=path, options={"weight": 2})
    asked = [[{"role": "user", "content": "?"}]]
    found = rewards.load((by_file,), {}, "cpu")(asked, ["banana"], [{"answer": ""}])
    assert found == {"vowels": [6.0], "total": [6.0]}
    monkeypatch.syspath_prepend(tmp_path)
    assert scores("my_rewards:vowels", ["banana"]) == [3]
    with pytest.raises(RewardError, match=r"my_rewards\.py has no function consonants"):
        scores("my_rewards:consonants", ["banana"])
    with pytest.raises(RewardError, match=r"cannot be imported: ModuleNotFoundError"):
        scores("no_such_module:f", ["a"])


def test_the_tiny_task_rewards_the_asked_style_and_the_right_result() -> None:
    said = ["37 km = 37000 m", "Easy, 37000 m!", "38 km = 37000 m", "37 km = 3700 m"]
    asked = [[{"role": "user", "content": "37 km = ? m"}]] * 4
    spec = Reward(function="stages.sources.new_task:filled_in")
    rows = answers(*["Great question! 37 km are 37000 m. Anything else?"] * 4)
    assert rewards.load((spec,), {}, "cpu")(asked, said, rows)["filled_in"] == [1, 0, 0, 0]


def test_an_edited_file_is_another_reward(tmp_path: Path) -> None:
    from stages import STAGES, manifest

    path = tmp_path / "mine.py"
    path.write_text("def f(p, c, r): return [0.0] * len(r)\n")

    def identity() -> str:
        config = GRPO.model_validate({"rewards": [{"function": "mine:f", "file": str(path)}]})
        return manifest.identify(STAGES["grpo"], config, {}).fingerprint

    before = identity()
    assert identity() == before
    path.write_text("def f(p, c, r): return [1.0] * len(r)\n")
    assert identity() != before


# --- misbehaviour


def misbehave(tmp_path: Path, body: str) -> str:
    path = tmp_path / "bad.py"
    path.write_text(f"def bad(prompts, completions, rows):\n    {body}\n")
    spec = Reward(function="bad:bad", file=path)
    asked = [[{"role": "user", "content": f"q{n}"}] for n in range(3)]
    rows = [{"answer": f"a{n}", "input_ids": [1]} for n in range(3)]
    with pytest.raises(RewardError) as caught:
        rewards.load((spec,), {}, "cpu")(asked, ["c0", "c1", "c2"], rows)
    assert isinstance(caught.value, StageError) and "\n" not in str(caught.value)
    return str(caught.value)


def test_a_reward_that_raises_is_named_with_its_batch(tmp_path: Path) -> None:
    said = misbehave(tmp_path, "return [1 / 0]")
    assert said.startswith("reward bad raised, on a batch that begins with ")
    assert '"content": "q0"' in said and '"completion": "c0"' in said and '"answer": "a0"' in said
    assert said.endswith("ZeroDivisionError: division by zero") and "input_ids" not in said
    several = misbehave(tmp_path, "raise ValueError('one' + chr(10) + '  two')")
    assert several.endswith("ValueError: one two")


def test_the_wrong_number_of_scores_is_named(tmp_path: Path) -> None:
    assert "bad returned 2 scores for 3 completions" in misbehave(tmp_path, "return [1.0, 2.0]")
    assert "returned NoneType and not a list" in misbehave(tmp_path, "pass")
    assert "returned generator" in misbehave(tmp_path, "return (1.0 for _ in rows)")
    assert "returned NoneType" in misbehave(tmp_path, "rows.clear(); completions.clear()")


@pytest.mark.parametrize("value", ["float('nan')", "float('inf')", "None", "'1'"])
def test_the_first_row_without_a_finite_number_is_named(tmp_path: Path, value: str) -> None:
    said = misbehave(tmp_path, f"return [1.0, {value}, {value}]")
    assert "not a finite number" in said and '"c1"' in said and '"c0"' not in said


def test_arrays_and_truths_are_numbers_too(tmp_path: Path) -> None:
    path = tmp_path / "good.py"
    path.write_text(
        "import numpy as np\n"
        "def array(p, c, r): return np.ones(len(r), dtype=np.float32)\n"
        "def truths(p, c, r): return [True for _ in r]\n"
        "def array_truths(p, c, r): return [np.True_ for _ in r]\n"
    )
    for name in ("array", "truths", "array_truths"):
        spec = Reward(function=f"good:{name}", file=path)
        found = rewards.load((spec,), {}, "cpu")([[]], ["c"], [{}])
        assert found["total"] == [1.0] and type(found["total"][0]) is float


def test_a_number_beyond_any_float_and_an_exit_are_no_scores(tmp_path: Path) -> None:
    said = misbehave(tmp_path, "return [1.0, 10**400, 1.0]")
    assert "gave one beyond any float, not a finite number" in said and '"c1"' in said
    assert "not a finite number" in misbehave(tmp_path, "return [1e300] * 3")
    assert misbehave(tmp_path, "raise SystemExit(0)").endswith("SystemExit: 0")


def test_a_file_does_not_stand_in_for_a_library(tmp_path: Path) -> None:
    (tmp_path / "json.py").write_text("def one(p, c, r): return [1.0 for _ in r]\n")
    spec = Reward(function="json:one", file=tmp_path / "json.py")
    assert rewards.load((spec,), {}, "cpu")([[]], ["c"], [{}])["one"] == [1.0]
    assert sys.modules["json"] is json


def test_what_one_reward_does_to_its_rows_is_not_for_the_next(tmp_path: Path) -> None:
    (tmp_path / "rude.py").write_text(
        "def rude(prompts, completions, rows):\n"
        "    prompts[0][0]['content'] = rows[0].pop('answer')\n"
        "    completions.reverse()\n"
        "    return [0.0 for _ in rows]\n"
    )
    rude = Reward(function="rude:rude", file=tmp_path / "rude.py")
    scorer = rewards.load((rude, Reward(function="exact_match")), {}, "cpu")
    asked = [[{"role": "user", "content": "?"}]] * 2
    assert scorer(asked, ["a", "b"], answers("a", "a"))["exact_match"] == [1, 0]
    assert asked[0][0]["content"] == "?"


def test_ctrl_c_inside_a_reward_is_no_reward_error(tmp_path: Path) -> None:
    path = tmp_path / "stop.py"
    path.write_text("def stop(p, c, r): raise KeyboardInterrupt\n")
    scorer = rewards.load((Reward(function="stop:stop", file=path),), {}, "cpu")
    with pytest.raises(KeyboardInterrupt):
        scorer([[]], ["c"], [{}])


@pytest.mark.parametrize(
    ("spec", "says"),
    [
        ({}, "either a function or model: true"),
        ({"function": "regex", "model": True}, "either a function or model: true"),
        ({"function": "exact"}, r"'exact' is no built-in reward \(exact_match, "),
        ({"function": "mod:"}, "written module:function"),
        ({"function": "regex"}, "regex needs the option pattern"),
        ({"function": "regex", "options": {"patern": "a"}}, "regex has no option patern; it takes"),
        ({"model": True, "options": {"a": 1}}, "belong to a function"),
        ({"function": "regex", "options": {"pattern": "a"}, "file": "x.py"}, "regex is built in"),
        ({"function": "regex", "options": {"pattern": "("}}, "not a regular expression"),
        ({"function": "regex", "options": {"pattern": 5}}, "option pattern: .* valid string"),
        (
            {"function": "regex", "options": {"pattern": "a", "whole": "no"}},
            "regex: the option whole: .* valid boolean",
        ),
        (
            {"function": "exact_match", "options": {"pattern": "(a)(b)"}},
            "has 2 groups; mark what is compared by one",
        ),
        ({"function": "numeric", "options": {"tolerance": -1}}, "tolerance: .* equal to 0"),
        ({"function": "json_schema", "options": {"schema": {"type": "x"}}}, "not a JSON schema"),
        (
            {"function": "json_schema", "options": {"schema": {}, "for_json": 2}},
            "for_json: .* equal to 1",
        ),
        ({"function": "length", "options": {"most": 9, "unit": "tokens"}}, "unit: .* 'words'"),
        ({"function": "length", "options": {"most": "9"}}, "most: .* valid integer"),
        ({"function": "length", "options": {"most": 1, "least": 2}}, "at least 2 and at most 1"),
    ],
)
def test_a_reward_that_cannot_be_is_refused_at_once(spec: dict, says: str) -> None:
    with pytest.raises(ValidationError, match=says):
        Reward.model_validate(spec)


def test_rewards_that_only_watch_teach_nothing() -> None:
    watching = {"rewards": [{"function": "numeric", "weight": 0}]}
    for config in (GRPO, PPO):
        with pytest.raises(ValidationError, match="every reward has weight 0"):
            config.model_validate(watching)
    assert Evaluate.model_validate(watching).rewards


def test_a_row_that_cannot_be_rated_is_named_before_the_work() -> None:
    numeric = rewards.load((Reward(function="numeric"),), {}, "cpu")
    rows = [{"prompt_ids": [1], "answer": text} for text in ("#### 5", "I do not know")]
    rewards.check_rows(numeric, rows[:1], None, max_new_tokens=8)
    said = r"conversations/train, row 1: reward numeric: there is no number in 'I do .*; mend the"
    with pytest.raises(RewardError, match=said):
        rewards.check_rows(numeric, rows, None, max_new_tokens=8)


def test_a_reward_model_that_was_not_given_is_named() -> None:
    with pytest.raises(RewardError, match="reward_model: the stage was given no input `reward`"):
        rewards.load((Reward(model=True),), {}, "cpu")
    with pytest.raises(RewardError, match="no reward is named"):
        rewards.load((), {}, "cpu")


def test_every_built_in_is_documented_and_listed() -> None:
    page = (Path(__file__).parents[2] / "docs" / "rewards.md").read_text()
    for name, function in FUNCTIONS.items():
        assert function.__doc__ and f"`{name}`" in page


# --- prompts, and the words of the RL trainers


def test_rows_without_messages_are_one_user_turn() -> None:
    class Tokenizer:
        def decode(self, ids: list[int], *, skip_special_tokens: bool) -> str:
            assert skip_special_tokens
            return " ".join(map(str, ids))

    said = [{"role": "system", "content": "s"}, {"role": "user", "content": "u"}]
    row = {"prompt_ids": [1, 2], "prompt": json.dumps(said), "answer": "a", "length": 3}
    assert prompts.messages(row, Tokenizer()) == said
    assert prompts.facts([row]) == [{"answer": "a"}]
    del row["prompt"]
    assert prompts.messages(row, Tokenizer()) == [{"role": "user", "content": "1 2"}]


def test_missing_prompts_are_one_clear_line(tmp_path: Path) -> None:
    with pytest.raises(StageError, match="no such split; prompts are those of tokenised"):
        prompts.read(tmp_path)


def test_trl_s_words_become_ours() -> None:
    told = in_our_words(
        {
            "loss": 0.5, "kl": 0.25, "reward": 1.5, "rewards/regex/mean": 1.0,
            "rewards/regex/std": 0.1, "completions/mean_length": 8.0,
            "completions/clipped_ratio": 0.25, "clip_ratio/region_mean": 0.125, "entropy": 2.0,
        }
    )  # fmt: skip
    assert told == {
        "loss": 0.5, "reward": 1.5, "entropy": 2.0, "kl_per_token": 0.25, "kl": 2.0,
        "answer_tokens": 8.0, "eos_rate": 0.75, "clip_fraction": 0.125, "reward/regex": 1.0,
    }  # fmt: skip


def test_answers_come_in_whole_groups() -> None:
    spec = {"rewards": [{"function": "length", "options": {"most": 3}}]}
    config = GRPO.model_validate(spec | {"global_batch_size": 24, "num_generations": 8})
    assert config.prompts_per_step == 3 and config.global_batch_rows == 24
    with pytest.raises(ValidationError, match="num_generations 8 does not divide"):
        GRPO.model_validate(spec | {"global_batch_size": 20, "num_generations": 8})
