"""PPO on real ranks: the same update under every backend, and what must hold at any time."""

import json
import shutil
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from backends import DDP, FSDP, AnyBackend, DeepSpeed, Local, Resources
from stages import resume
from stages.base import Context, StageError
from tests.small import WORDS, Run, run_jobs
from tests.stages import bandit, sentences

UPDATES = 3
TWO = Resources(ranks_per_node=2)
WIDE = Resources(ranks_per_node=2, micro_batch_size=32)
BACKENDS: dict[str, tuple[AnyBackend, Resources]] = {
    "one process": (Local(), Resources()),
    "ddp": (DDP(), TWO),
    "fsdp": (FSDP(), TWO),
    "zero1": (DeepSpeed(zero_stage=1), TWO),
    "zero2": (DeepSpeed(zero_stage=2), TWO),
    "zero3": (DeepSpeed(zero_stage=3), TWO),
}
METHODS: dict[str, dict[str, Any]] = {
    "full": {"kind": "full"},
    "lora": {"kind": "lora", "rank": 8},
}
BASE: dict[str, Any] = {
    "learning_rate": 1e-3,
    "critic_learning_rate": 2e-3,
    "global_batch_size": 8,
    "minibatches": 2,
    "passes": 2,
    "max_steps": UPDATES,
    "max_new_tokens": 6,
    "temperature": 0.8,
    "kl": {"kind": "adaptive", "coefficient": 0.1, "target": 0.05, "horizon": 100},
    "missing_eos_penalty": 0.1,
    "rewards": [{"function": "tests.stages.test_ppo:evenness"}],
}
LOGGED = (
    *("reward", "reward/evenness", "score", "kl", "kl_coefficient", "entropy", "ratio"),
    *("clip_fraction", "policy_loss", "value_loss", "explained_variance", "answer_tokens"),
    *("eos_rate", "grad_norm", "learning_rate", "memory_bytes", "tokens_per_second"),
    *("tokens_per_second/rollout", "tokens_per_second/score", "tokens_per_second/train"),
)
TIMED = ("time", "seconds", "tokens_per_second", "memory_bytes", "save_seconds")


def evenness(
    prompts: Sequence[Any], completions: Sequence[str], rows: Sequence[Mapping[str, Any]]
) -> list[float]:
    """The share of even words, and a little for few."""
    words = [[int(w[1:]) for w in text.split() if w[1:].isdigit()] for text in completions]
    return [sum(w % 2 == 0 for w in each) / max(1, len(each)) - len(each) / 50 for each in words]


def broken(*_: Any) -> list[float]:
    raise KeyError("nothing here")


def not_a_number(_: Any, completions: Sequence[str], __: Any) -> list[float]:
    return [float("nan") for _ in completions]


def too_few(*_: Any) -> list[float]:
    return [1.0]


def noting_beats(
    _: Any, completions: Sequence[str], __: Any, *, beats: str, notes: str
) -> list[float]:
    """Writes down what the rank's last beat was when the answers were there."""
    with Path(notes).open("a") as file:
        file.write(Path(beats).read_text() + "\n")
    return [0.0 for _ in completions]


@pytest.fixture(scope="module")
def world(tmp_path_factory: pytest.TempPathFactory, small: Path) -> Path:
    """``policy/model`` (several stop tokens, so that answers end) and prompts of many lengths."""
    import random

    from datasets import Dataset

    folder = tmp_path_factory.mktemp("world")
    shutil.copytree(small / "tied" / "model", folder / "policy" / "model")
    settings = folder / "policy" / "model" / "generation_config.json"
    told = json.loads(settings.read_text()) | {"eos_token_id": [1, *range(100, WORDS)]}
    settings.write_text(json.dumps(told | {"repetition_penalty": 3.0}))
    draw = random.Random(0)
    rows = [
        {"prompt_ids": [draw.randint(4, 99) for _ in range(draw.randint(1, 9))], "answer": str(i)}
        for i in range(40)
    ]
    Dataset.from_list(rows).save_to_disk(folder / "data" / "conversations" / "train")
    return folder


def job(
    out: Path,
    world: Path,
    backend: AnyBackend | None = None,
    resources: Resources | None = None,
    settings: Mapping[str, Any] | None = None,
    **config: Any,
) -> Run:
    return Run(
        out=out,
        stage="ppo",
        config=BASE | config,
        inputs={"policy": world / "policy", "data": world / "data"},
        backend=backend or Local(),
        resources=resources or Resources(),
        settings=settings or {},
    )


def both(out: Path, world: Path, name: str, **settings: Any) -> dict[str, Run]:
    backend, resources = BACKENDS[name]
    return {
        method: job(out / method, world, backend, resources, settings, method=METHODS[method])
        for method in METHODS
    }


def timeless(run: Run) -> list[dict[str, Any]]:
    return [
        {key: value for key, value in row.items() if not key.startswith(TIMED)} for row in run.rows
    ]


@pytest.fixture(scope="module")
def alone(tmp_path_factory: pytest.TempPathFactory, world: Path) -> dict[str, Run]:
    """One process: full and LoRA, and the same in other splits."""
    folder = tmp_path_factory.mktemp("alone")
    runs = both(folder, world, "one process", save_steps=2)
    for micro in (1, 4):
        resources = Resources(micro_batch_size=micro)
        runs[f"micro {micro}"] = job(folder / f"micro-{micro}", world, Local(), resources)
    run_jobs(list(runs.values()))
    return runs


def assert_same(run: Run, other: Run, *, method: str = "full") -> None:
    assert len(run.rows) == len(other.rows) == UPDATES
    for row, wanted in zip(timeless(run), timeless(other), strict=True):
        assert row.keys() == wanted.keys()
        for name, value in wanted.items():
            assert row[name] == pytest.approx(value, abs=1e-4, rel=1e-3), (row["step"], name)


@pytest.mark.parametrize("micro", [1, 4])
def test_splitting_a_minibatch_changes_nothing(alone: dict[str, Run], micro: int) -> None:
    assert_same(alone[f"micro {micro}"], alone["full"])


@pytest.mark.parametrize(
    "name",
    [
        "ddp",
        *(pytest.param(n, marks=pytest.mark.slow) for n in ("fsdp", "zero1", "zero2", "zero3")),
    ],
)
def test_every_backend_makes_the_same_updates(
    tmp_path: Path, world: Path, alone: dict[str, Run], name: str
) -> None:
    runs = both(tmp_path, world, name)
    run_jobs(list(runs.values()))
    for method, run in runs.items():
        assert_same(run, alone[method])
        assert [rank["wrapper"] for rank in run.ranks] == [
            {"ddp": "ddp", "fsdp": "fsdp"}.get(name, "deepspeed")
        ] * 2
        _assert_near(run.out, alone[method].out, "model")
        _assert_near(run.out, alone[method].out, "critic")


def _assert_near(out: Path, other: Path, name: str) -> None:
    from safetensors.torch import load_file

    (file,) = [p.name for p in (other / name).glob("*.safetensors")]
    ours, theirs = load_file(out / name / file), load_file(other / name / file)
    assert ours.keys() == theirs.keys()
    for key, tensor in theirs.items():
        assert (ours[key] - tensor).abs().max() < 2e-3, key  # Adam's first steps are sign-like


def test_the_first_update_starts_at_the_reference(alone: dict[str, Run]) -> None:
    """Ratio 1 and divergence 0 are checked in the stage, to the last bit, or it would have failed;
    the temperature is not 1 here."""
    for run in alone.values():
        first, *others = run.rows
        assert first["kl"] == 0 and first["kl_per_token"] == 0
        assert any(row["kl"] != 0 for row in others)
        assert {row["optimizer_steps"] for row in run.rows} == {4}


def test_a_wrong_reference_and_a_wrong_temperature_are_caught() -> None:
    import torch

    from stages.rl.learning import Seen, _check_ratio, check_reference

    work: Any = SimpleNamespace(ctx=Context(out=Path("x")))
    rolled: Any = SimpleNamespace(log_ratio=torch.tensor([[0.0, 1e-7]]))
    with pytest.raises(StageError, match="the policy and the reference differ by 1e-07"):
        check_reference(work, rolled)
    with pytest.raises(StageError, match=r"log ratio of a token is 0\.5 and must be 0"):
        _check_ratio(work, [Seen(torch.zeros(8), torch.tensor(0.5))])
    _check_ratio(work, [Seen(torch.zeros(8), torch.tensor(0.0))])


def test_what_an_update_logs(alone: dict[str, Run]) -> None:
    row = alone["full"].rows[-1]
    for name in LOGGED:
        assert name in row, name
    assert 0 < row["eos_rate"] < 1 and 1 <= row["answer_tokens"] <= 6
    shown = [json.loads(line) for line in (alone["full"].out / "samples.jsonl").open()]
    assert {each["step"] for each in shown} == {1, 2, 3}
    assert shown[0]["scores"]["evenness"] == shown[0]["scores"]["total"]


def test_both_models_learn(alone: dict[str, Run], world: Path) -> None:
    from safetensors.torch import load_file

    out, name = alone["full"].out, "model.safetensors"
    before = load_file(world / "policy" / "model" / name)
    after, critic = load_file(out / "model" / name), load_file(out / "critic" / name)
    assert after.keys() == before.keys()
    assert all((after[key] != before[key]).any() for key in before)
    assert critic["score.weight"].abs().max() > 0


@pytest.mark.parametrize("method", ["lora", pytest.param("full", marks=pytest.mark.slow)])
def test_the_exports_are_what_a_training_stage_leaves(
    alone: dict[str, Run], world: Path, tmp_path: Path, method: str
) -> None:
    import torch
    from peft import PeftModel
    from transformers import AutoModelForCausalLM, AutoModelForSequenceClassification

    from stages.convert import Convert, export_model

    def load(kind: Any, folder: Path) -> Any:
        if method == "full":
            return kind.from_pretrained(folder)
        base = kind.from_pretrained(origin, **({"num_labels": 1} if kind is heads else {}))
        return PeftModel.from_pretrained(base, str(folder))

    heads, ids = AutoModelForSequenceClassification, torch.tensor([[4, 5, 6]])
    origin, out = world / "policy" / "model", alone[method].out
    plain = Convert(export_dtype="float32")
    export_model(plain, tmp_path, source=out / "model", origin=origin)
    exported: Any = AutoModelForCausalLM.from_pretrained(tmp_path / "model")
    trained, critic = load(AutoModelForCausalLM, out / "model"), load(heads, out / "critic")
    assert torch.allclose(trained(input_ids=ids).logits, exported(input_ids=ids).logits, atol=1e-5)
    assert trained.generation_config.repetition_penalty == 3.0  # the model's own stay
    assert trained.config.use_cache
    assert critic(input_ids=ids).logits.shape == (1, 1)
    assert critic(input_ids=ids).logits.abs() > 0


@pytest.mark.parametrize(
    "name",
    [
        "one process",
        *(
            pytest.param(n, marks=pytest.mark.slow)
            for n in ("ddp", "fsdp", "zero1", "zero2", "zero3")
        ),
    ],
)
def test_resuming_is_bit_identical(
    tmp_path: Path, world: Path, alone: dict[str, Run], name: str
) -> None:
    """Policy, critic, optimizer, coefficient and prompts: what follows is the same to the bit."""
    whole, runs = alone, both(tmp_path / "again", world, name, save_steps=2)
    if name != "one process":
        whole = both(tmp_path / "whole", world, name, save_steps=2)
        run_jobs(list(whole.values()))
    for method, run in runs.items():
        shutil.copytree(whole[method].out, run.out)
        for folder in resume.complete(run.out)[1:]:
            shutil.rmtree(folder)
        shutil.rmtree(run.out / "model")
        shutil.rmtree(run.out / "critic")
        (run.out / "metrics.json").unlink()
    run_jobs(list(runs.values()))
    for method, run in runs.items():
        assert json.loads((run.out / "metrics.json").read_text())["resumed_from"] == 2
        assert timeless(run) == timeless(whole[method])
        assert (run.out / "samples.jsonl").read_text() == (
            whole[method].out / "samples.jsonl"
        ).read_text()
        for part in ("model", "critic"):
            (file,) = (run.out / part).glob("*.safetensors")
            assert file.read_bytes() == (whole[method].out / part / file.name).read_bytes()


def test_a_request_to_stop_saves_and_leaves(
    tmp_path: Path, world: Path, alone: dict[str, Run]
) -> None:
    run = job(tmp_path / "run", world)
    run.out.mkdir()
    (run.out / "stop").touch()
    with pytest.raises(AssertionError):
        run_jobs([run])
    assert [resume.step(folder) for folder in resume.complete(run.out)] == [1]
    assert not (run.out / "model").exists()
    (run.out / "stop").unlink()
    run_jobs([run])
    assert timeless(run) == timeless(alone["full"])


def test_settings_do_what_they_say(tmp_path: Path, world: Path) -> None:
    """One process for all: a warm-up of the critic, an early stop, one token, other minibatches."""
    runs = {
        "warm": job(tmp_path / "warm", world, critic_warmup=UPDATES - 1),
        "stop": job(tmp_path / "stop", world, stop_at_kl=1e-9, passes=4),
        "one token": job(tmp_path / "one", world, max_new_tokens=1, top_p=0.9),
        "cut": job(tmp_path / "cut", world, global_batch_size=4, minibatches=4, passes=1),
        "entropy": job(tmp_path / "entropy", world, entropy_coefficient=0.1, max_steps=1),
        "plain": job(
            tmp_path / "plain",
            world,
            value_clip=None,
            whiten_rewards=True,
            reward_clip=0.1,
            normalise_advantages=False,
            kl={"kind": "fixed", "coefficient": 0.0},
            kl_estimator="k3",
            weight_decay=0.1,
            max_grad_norm=0.0,
        ),
    }
    run_jobs(list(runs.values()))
    warm = runs["warm"].rows
    assert {row["kl"] for row in warm} == {0}  # of what was sampled before the policy learnt
    assert [row["policy_kl"] == 0 for row in warm] == [True, True, False]
    assert [row["learning_rate"] == 0 for row in warm] == [True, True, False]
    assert all(row["optimizer_steps"] < 8 for row in runs["stop"].rows)
    assert {row["answer_tokens"] for row in runs["one token"].rows} == {1}
    first, cut = runs["plain"].rows[0], runs["cut"].rows[0]
    for name in ("reward", "answer_tokens", "eos_rate", "kl"):  # what was sampled is the same
        assert first[name] == cut[name]
    assert runs["entropy"].rows[0]["loss"] < runs["entropy"].rows[0]["policy_loss"]


def test_a_rank_is_not_silent_within_an_update(
    tmp_path: Path, world: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """An update may take much longer than a rank may be silent: sampling beats too."""
    from stages import beats

    monkeypatch.setattr(beats, "PAUSE", 0.0)
    out, notes = tmp_path / "out", tmp_path / "notes"
    options = {"beats": str(out / "beats" / "rank-0.json"), "notes": str(notes)}
    call(
        world,
        out,
        rewards=[{"function": "tests.stages.test_ppo:noting_beats", "options": options}],
        kl={"kind": "fixed"},
    )
    rows = [json.loads(row) for row in (out / "metrics.jsonl").read_text().splitlines()]
    ended = [0.0, *(row["time"] for row in rows)]
    noted = [json.loads(line) for line in notes.read_text().splitlines()]
    assert [(each["phase"], each["step"]) for each in noted] == [
        ("start", 0), ("step", 1), ("step", 2)
    ]  # fmt: skip
    for beat, before in zip(noted, ended[:-1], strict=True):
        assert beat["time"] > before


def call(world: Path, out: Path, policy: Path | None = None, **config: Any) -> None:
    """The stage in this process, for what fails before it starts."""
    from stages.ppo import PPO, ppo

    settings = {
        "use_cpu": True,
        "per_device_train_batch_size": 8,
        "gradient_accumulation_steps": 1,
        "save_steps": 1000,
    }
    ctx = Context(out=out, trainer_args=settings, promise={"wrapper": "none", "world_size": 1})
    ppo(
        PPO.model_validate(BASE | config),
        ctx,
        policy=policy or world / "policy",
        data=world / "data",
    )


@pytest.mark.parametrize(
    ("config", "said"),
    [
        ({"max_new_tokens": 125}, r"row \d+: a prompt of 9 tokens and max_new_tokens 125 exceed"),
        ({"critic": "reward"}, "critic: reward needs the input `reward`"),
        ({"critic_warmup": 3, "max_steps": None}, "would learn in none of 3 updates"),
        ({"rewards": [{"model": True}]}, "no input `reward`"),
        (
            {"rewards": [{"function": "tests.stages.test_ppo:broken"}]},
            "reward broken raised, .*nothing here",
        ),
        (
            {"rewards": [{"function": "tests.stages.test_ppo:not_a_number"}]},
            "reward not_a_number gave nan",
        ),
        (
            {"rewards": [{"function": "tests.stages.test_ppo:too_few"}]},
            "reward too_few returned 1 scores for 16",
        ),
    ],
)
def test_bad_settings_are_told_in_one_line(
    tmp_path: Path, world: Path, config: dict[str, Any], said: str
) -> None:
    with pytest.raises(StageError, match=said):
        call(world, tmp_path / "out", **config)


def test_models_that_do_not_fit_are_told(tmp_path: Path, world: Path) -> None:
    def changed(name: str, **told: Any) -> Path:
        folder = tmp_path / name
        shutil.copytree(world / "policy", folder)
        for file, values in told.items():
            path = folder / "model" / f"{file}.json"
            path.write_text(json.dumps(json.loads(path.read_text()) | values))
        return folder

    endless = changed("endless", generation_config={"eos_token_id": None})
    path = endless / "model" / "tokenizer_config.json"
    settings = json.loads(path.read_text())
    settings.pop("eos_token", None)
    path.write_text(json.dumps(settings))
    with pytest.raises(StageError, match="names an eos token"):
        call(world, tmp_path / "a", policy=endless)
    adapter = changed("adapter")
    (adapter / "model" / "adapter_config.json").write_text("{}")
    with pytest.raises(StageError, match="an adapter without its base"):
        call(world, tmp_path / "b", policy=adapter)


def test_a_policy_of_which_no_critic_can_be_made_is_told(tmp_path: Path, world: Path) -> None:
    from transformers import OPTConfig, OPTForCausalLM

    folder = tmp_path / "policy"
    shutil.copytree(world / "policy", folder)
    sizes: Any = {
        "hidden_size": 16,
        "ffn_dim": 16,
        "num_hidden_layers": 1,
        "num_attention_heads": 2,
    }
    OPTForCausalLM(OPTConfig(vocab_size=WORDS, **sizes)).save_pretrained(folder / "model")
    with pytest.raises(StageError, match="of type opt no critic can be made"):
        call(world, tmp_path / "out", policy=folder)


def test_a_critic_reads_the_policys_tokens(tmp_path: Path, world: Path) -> None:
    from transformers import AutoModelForSequenceClassification, AutoTokenizer

    from stages.ppo import PPO
    from stages.rl import models

    origin, reward = world / "policy" / "model", tmp_path / "reward" / "model"
    scorer: Any = AutoModelForSequenceClassification.from_pretrained(origin, num_labels=1)
    scorer.config.pad_token_id = 0
    scorer.save_pretrained(reward)
    AutoTokenizer.from_pretrained(origin).save_pretrained(reward)
    module = models.load(PPO(critic="reward"), origin, reward)
    assert (module.critic.score.weight == scorer.score.weight).all()
    text = (reward / "tokenizer.json").read_text()
    (reward / "tokenizer.json").write_text(text.replace('"w77"', '"other"'))
    with pytest.raises(StageError, match=r"has other tokens .* set ppo.config.critic: policy"):
        models.load(PPO(critic="reward"), origin, reward)


def test_company_and_padding_change_no_answer_and_no_score(world: Path) -> None:
    import torch

    from stages.ppo import PPO
    from stages.rl import models
    from stages.rl.actor_critic import token_log_probs, token_values
    from stages.rl.generation import Sampling, transformers_generator, uniforms
    from stages.rl.rollout import batch

    module = models.load(PPO(), world / "policy" / "model", None).eval()
    torch.nn.init.normal_(module.critic.score.weight)
    prompts = [[5], [6, 7, 8, 9, 10, 11, 12], [13, 14, 15]]
    sampling = Sampling(0.7, 0.9, 5, stops=(1, *range(100, WORDS)), pad=0)
    drawn = uniforms(0, 0, range(3), 5)
    together = transformers_generator(module.policy, sampling, batch_size=3)(prompts, drawn)
    singly = transformers_generator(module.policy, sampling, batch_size=1)(prompts, drawn)
    assert together == singly
    lora = PPO.model_validate({"method": {"kind": "lora"}})
    adapted = models.load(lora, world / "policy" / "model", None).eval().policy
    theirs = adapted.get_base_model().generation_config.to_dict()
    assert transformers_generator(adapted, sampling, batch_size=3)(prompts, drawn) == together
    assert adapted.get_base_model().generation_config.to_dict() == theirs  # it is exported
    assert len({len(answer.ids) for answer in together}) > 1
    pairs = [(prompt, answer.ids) for prompt, answer in zip(prompts, together, strict=True)]
    whole = batch(pairs, torch.device("cpu"))
    with torch.no_grad():
        found = [token_log_probs(module.policy, whole, temperature=0.7)[0]]
        found.append(token_values(module.critic, whole))
        for row, pair in enumerate(pairs):
            one = batch([pair], torch.device("cpu"))
            size = len(pair[1])
            single = [token_log_probs(module.policy, one, temperature=0.7)[0]]
            single.append(token_values(module.critic, one))
            for table, alone in zip(found, single, strict=True):
                assert torch.allclose(table[row, :size], alone[0], atol=1e-5)
                assert (table[row, size:] == 0).all()


def test_log_probs_are_those_of_the_tempered_model(world: Path) -> None:
    """Against the textbook: one row, no padding, all logits."""
    import torch

    from stages.ppo import PPO
    from stages.rl import models
    from stages.rl.actor_critic import token_log_probs
    from stages.rl.rollout import batch

    module = models.load(PPO(), world / "policy" / "model", None).eval()
    prompt, answer = [5, 6, 7], [8, 9, 1]
    with torch.no_grad():
        found, entropy = token_log_probs(
            module.policy,
            batch([(prompt, answer)], torch.device("cpu")),
            temperature=0.5,
            entropy="told",
        )
        logits = module.policy(input_ids=torch.tensor([prompt + answer])).logits[0] / 0.5
    log_probs = logits.log_softmax(-1)
    wanted = [log_probs[2 + t, token].item() for t, token in enumerate(answer)]
    assert found[0].tolist() == pytest.approx(wanted, abs=1e-5)
    spread = -(log_probs.exp() * log_probs).sum(-1)[2:5]
    assert entropy[0].tolist() == pytest.approx(spread.tolist(), abs=1e-4)


@pytest.mark.slow
@pytest.mark.parametrize("beta", [2.0, 1.0, 0.5, 0.2])
def test_ppo_reaches_the_enumerated_optimum(tmp_path: Path, beta: float) -> None:
    """Two gloo ranks; the whole frontier is in tests/benchmarks/bench_ppo_frontier.py."""
    bandit.write_world(tmp_path / "world")
    run = replace(job(tmp_path / "run", tmp_path / "world", DDP(), WIDE), config=frontier(beta))
    run_jobs([run])
    reference = bandit.distribution(tmp_path / "world" / "policy" / "model")
    reached = bandit.measure(bandit.distribution(run.out / "model"), reference)
    exact = bandit.measure(bandit.optimum(reference, beta), reference)
    assert reached["reward"] == pytest.approx(exact["reward"], abs=0.06)
    assert reached["kl"] == pytest.approx(exact["kl"], abs=0.06)


@pytest.mark.slow
@pytest.mark.parametrize("beta", [1.0, 0.5])
def test_ppo_reaches_the_optimum_of_answers_of_several_tokens(tmp_path: Path, beta: float) -> None:
    """Divergence at every token, answers that end early, and a price for those that do not."""
    sentences.write_world(tmp_path / "world")
    settings = frontier(beta, max_new_tokens=3, missing_eos_penalty=sentences.PENALTY)
    settings["rewards"] = [{"function": "tests.stages.sentences:worth"}]
    run = replace(job(tmp_path / "run", tmp_path / "world", DDP(), WIDE), config=settings)
    run_jobs([run])
    reference = sentences.distribution(tmp_path / "world" / "policy" / "model")
    reached = sentences.measure(sentences.distribution(run.out / "model"), reference)
    exact = sentences.measure(sentences.optimum(reference, beta), reference)
    assert reached["reward"] == pytest.approx(exact["reward"], abs=0.06)
    assert reached["kl"] == pytest.approx(exact["kl"], abs=0.06)


def frontier(beta: float, **changes: Any) -> dict[str, Any]:
    """Settings that converge in seconds on the bandit.

    The critic goes first and the policy slowly: an answer that early luck has made improbable is
    seldom drawn, and comes back slowly.
    """
    return {
        "learning_rate": 1e-3,
        "critic_learning_rate": 1e-2,
        "critic_warmup": 8,
        "schedule": "linear",
        "global_batch_size": 64,
        "minibatches": 2,
        "passes": 2,
        "epochs": 1000,
        "max_steps": 100,
        "max_new_tokens": 1,
        "kl": {"kind": "fixed", "coefficient": beta},
        "normalise_advantages": False,
        "value_clip": None,
        "rewards": [{"function": "tests.stages.bandit:worth"}],
        **changes,
    }
