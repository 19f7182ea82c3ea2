"""Updates a second and memory of the stage ``ppo`` against TRL 1.12.0's PPOTrainer, its last.

``pip install --no-deps --target TRL trl==1.12.0``, then
``PYTHONPATH=. python tests/benchmarks/bench_ppo_speed.py TRL [REPEATS]``. Both run one CPU process
with one thread, the same models, prompts, rollout size, answer length, passes and minibatches, and
the same torch and transformers; one after the other in turn.
"""

import json
import os
import random
import subprocess
import sys
import tempfile
from pathlib import Path
from statistics import median

from backends import Local, Resources
from tests.benchmarks.table import show, spread
from tests.small import ENV, ROOT, Run, write_job

UPDATES, SKIPPED = 6, 1
VOCABULARIES = (1024, 8192, 49_152)
PROMPT, ANSWER = 96, 16
MINIBATCH, MINIBATCHES, PASSES = 8, 4, 2
SCRIPT = """
import json, resource, sys, time
from datasets import load_from_disk
from transformers import (AutoModelForCausalLM, AutoModelForSequenceClassification, AutoTokenizer,
                          TrainerCallback)
from trl.experimental.ppo import PPOConfig, PPOTrainer
world, out, told = sys.argv[1], sys.argv[2], json.loads(sys.argv[3])
times = []
class Note(TrainerCallback):
    def on_step_end(self, *_, **__):
        times.append(time.time())
rows = load_from_disk(world + "/data/conversations/train")
rows = rows.select_columns(["prompt_ids"]).rename_column("prompt_ids", "input_ids")
tokenizer = AutoTokenizer.from_pretrained(world + "/policy/model", padding_side="left")
model, reference = (AutoModelForCausalLM.from_pretrained(world + "/policy/model") for _ in "ab")
value, reward = (AutoModelForSequenceClassification.from_pretrained(world + "/reward/model",
                 num_labels=1) for _ in "ab")
size = told["minibatch"] * told["minibatches"]
args = PPOConfig(output_dir=out, use_cpu=True, bf16=False, report_to="none", save_strategy="no",
                 disable_tqdm=True, gradient_checkpointing=False, logging_steps=1,
                 per_device_train_batch_size=size, gradient_accumulation_steps=1,
                 num_mini_batches=told["minibatches"], num_ppo_epochs=told["passes"],
                 total_episodes=told["updates"] * size, response_length=told["answer"],
                 local_rollout_forward_batch_size=size, stop_token="eos", temperature=1.0,
                 num_sample_generations=0, learning_rate=1e-5)
trainer = PPOTrainer(args, processing_class=tokenizer, model=model, ref_model=reference,
                     reward_model=reward, value_model=value, train_dataset=rows,
                     callbacks=[Note()])
trainer.train()
peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024
print("FOUND", json.dumps({"times": times, "peak": peak}))
"""


def write_world(out: Path, words: int) -> None:
    """A policy and a reward model of four layers, and prompts of one length."""
    import torch
    from datasets import Dataset
    from tokenizers import Tokenizer, models
    from transformers import (
        LlamaConfig,
        LlamaForCausalLM,
        LlamaForSequenceClassification,
        PreTrainedTokenizerFast,
    )

    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=words,
        hidden_size=64,
        intermediate_size=256,
        num_hidden_layers=4,
        num_attention_heads=4,
        max_position_embeddings=256,
        pad_token_id=0,
        eos_token_id=1,
        bos_token_id=2,
    )
    names = {f"w{number}": number for number in range(words)}
    tokenizer = PreTrainedTokenizerFast(
        tokenizer_object=Tokenizer(models.WordLevel(names, unk_token="w3")),
        pad_token="w0",
        eos_token="w1",
        unk_token="w3",
        chat_template="{% for m in messages %}{{ m.content }}"
        "{% if m.role == 'assistant' %}w1{% endif %} {% endfor %}",
    )
    for name, kind in (("policy", LlamaForCausalLM), ("reward", LlamaForSequenceClassification)):
        config.num_labels = 1
        kind(config).save_pretrained(out / name / "model")
        tokenizer.save_pretrained(out / name / "model")
    draw = random.Random(0)
    prompts = [[draw.randrange(4, words) for _ in range(PROMPT)] for _ in range(512)]
    rows = [{"prompt_ids": ids, "answer": ""} for ids in prompts]
    Dataset.from_list(rows).save_to_disk(out / "data" / "conversations" / "train")


def ours(world: Path, out: Path) -> dict:
    config = {
        "global_batch_size": MINIBATCH,
        "minibatches": MINIBATCHES,
        "passes": PASSES,
        "max_steps": UPDATES,
        "max_new_tokens": ANSWER,
        "learning_rate": 1e-5,
        "critic": "reward",
        "epochs": 100,
        "rewards": [{"model": True}],
    }
    inputs = {"policy": world / "policy", "data": world / "data", "reward": world / "reward"}
    resources = Resources(micro_batch_size=MINIBATCH)
    run = Run(out, "ppo", config, inputs, Local(), resources)
    argv = [sys.executable, "-m", "stages", str(write_job(run))]
    subprocess.run(argv, cwd=ROOT, check=True, capture_output=True, env=os.environ | ENV)
    rows = run.rows
    peak = max(row["memory_bytes"] for row in rows)
    parts = {
        what: median(row[f"seconds/{what}"] for row in rows[SKIPPED:])
        for what in ("rollout", "score", "train")
    }
    return {"times": [row["time"] for row in rows], "peak": peak, "parts": parts}


def theirs(world: Path, out: Path, trl: Path) -> dict:
    told = {
        "minibatch": MINIBATCH,
        "minibatches": MINIBATCHES,
        "passes": PASSES,
        "updates": UPDATES,
        "answer": ANSWER,
    }
    out.mkdir()
    script = out / "plain.py"
    script.write_text(SCRIPT)
    argv = [sys.executable, str(script), str(world), str(out), json.dumps(told)]
    env = os.environ | ENV | {"PYTHONPATH": str(trl), "TRL_EXPERIMENTAL_SILENCE": "1"}
    done = subprocess.run(argv, capture_output=True, text=True, env=env, check=False)
    found = [line for line in done.stdout.splitlines() if line.startswith("FOUND ")]
    assert found, done.stderr[-3000:]
    return json.loads(found[0].removeprefix("FOUND "))


def rate(found: dict) -> float:
    """Updates a second, after the first few."""
    times = found["times"][SKIPPED:]
    return (len(times) - 1) / (times[-1] - times[0])


def compare(trl: Path, repeats: int, words: int) -> list[list[str]]:
    """Rows of the table for a vocabulary of ``words``."""
    mine, others = [], []
    with tempfile.TemporaryDirectory() as scratch:
        place = Path(scratch)
        write_world(place / "world", words)
        for number in range(repeats):
            mine.append(ours(place / "world", place / f"ours-{number}"))
            others.append(theirs(place / "world", place / f"theirs-{number}", trl))
    ratio = median(rate(a) / rate(b) for a, b in zip(mine, others, strict=True))
    parts = " ".join(f"{name} {seconds:.2f}" for name, seconds in mine[0]["parts"].items())
    rows = []
    for name, found, told in (
        ("stage ppo", mine, [f"{ratio:.2f}", parts]),
        ("TRL 1.12.0 PPOTrainer", others, ["1.00", ""]),
    ):
        peaks = [each["peak"] / 1e6 for each in found]
        rows.append(
            [f"{words}", name, spread([rate(e) for e in found], 3), spread(peaks, 0), *told]
        )
    return rows


def main(trl: Path, repeats: int) -> None:
    rows = [row for words in VOCABULARIES for row in compare(trl, repeats, words)]
    head = ["vocabulary", "what", "updates/s", "peak MB", "ratio", "seconds an update"]
    show(f"PPO, {UPDATES} updates, one CPU process, median (range) of {repeats}", head, rows)


if __name__ == "__main__":
    main(Path(sys.argv[1]), int(sys.argv[2]) if len(sys.argv) > 2 else 3)
