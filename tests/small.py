"""What tests share: a small model, tokenised rows, and a way to run stages on real ranks."""

import json
import os
import random
import subprocess
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from backends import AnyBackend, Local, Resources, split_batch
from stages import STAGES
from stages.base import Job

ROOT = Path(__file__).resolve().parent.parent
WORDS, PAD, EOS = 128, 0, 1
TO_GIVE = {
    "smollm2": ("conversations", "preferences"),
    "evaluate": ("model", "conversations"),
    "convert": ("trained", "base"),
}
"""By recipe, the sources of which the user has to name the path."""
ENV = {
    "OMP_NUM_THREADS": "1",
    "HF_HUB_OFFLINE": "1",
    "HF_HUB_DISABLE_TELEMETRY": "1",
    "DO_NOT_TRACK": "1",
    "PYTHONPATH": str(ROOT),
}


def write_model(out: Path, *, tie: bool) -> None:
    import torch
    from tokenizers import Tokenizer, models
    from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast

    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=WORDS,
        hidden_size=64,
        intermediate_size=128,
        num_hidden_layers=2,
        num_attention_heads=4,
        max_position_embeddings=128,
        tie_word_embeddings=tie,
        pad_token_id=PAD,
        eos_token_id=EOS,
        bos_token_id=2,
    )
    model = LlamaForCausalLM(config)
    model.generation_config.eos_token_id = EOS
    model.generation_config.pad_token_id = PAD
    model.save_pretrained(out)
    words = {f"w{number}": number for number in range(WORDS)}
    PreTrainedTokenizerFast(
        tokenizer_object=Tokenizer(models.WordLevel(words, unk_token="w3")),
        pad_token="w0",
        eos_token="w1",
        unk_token="w3",
        chat_template="{% for m in messages %}{{ m.content }} w1{% endfor %}",
    ).save_pretrained(out)


def write_rows(out: Path) -> None:
    from datasets import Dataset

    draw = random.Random(0)

    def ids(low: int, high: int, shortest: int, longest: int) -> list[int]:
        return [draw.randint(low, high) for _ in range(draw.randint(shortest, longest))]

    conversations, pairs = [], []
    for _ in range(200):
        prompt, answer = ids(4, 127, 2, 10), [*ids(4, 127, 4, 20), EOS]
        labels = [-100] * len(prompt) + answer
        conversations.append({"input_ids": prompt + answer, "labels": labels})
    for _ in range(160):
        chosen, rejected = [*ids(4, 60, 3, 9), EOS], [*ids(60, 127, 3, 9), EOS]
        prompt = ids(4, 127, 5, 5)
        pairs.append({"prompt_ids": prompt, "chosen_ids": chosen, "rejected_ids": rejected})
    Dataset.from_list(conversations).save_to_disk(out / "conversations" / "train")
    Dataset.from_list(pairs).save_to_disk(out / "preferences" / "train")


@dataclass(frozen=True)
class Run:
    """One stage run in a test."""

    out: Path
    stage: str
    config: Mapping[str, Any]
    inputs: Mapping[str, Path]
    backend: AnyBackend = field(default_factory=Local)
    resources: Resources = field(default_factory=Resources)
    settings: Mapping[str, Any] = field(default_factory=dict)

    @property
    def rows(self) -> list[dict[str, Any]]:
        return [json.loads(row) for row in (self.out / "metrics.jsonl").read_text().splitlines()]

    @property
    def losses(self) -> list[float]:
        return [row["loss"] for row in self.rows]

    @property
    def ranks(self) -> list[dict[str, Any]]:
        return [json.loads(p.read_text()) for p in sorted((self.out / "ranks").glob("*.json"))]


def write_job(run: Run) -> Path:
    """What ``flows.run_stage`` writes, for a run without a flow."""
    stage = STAGES[run.stage]
    config = stage.config_type.model_validate(run.config)
    launch = run.backend.plan(run.resources)
    settings = dict(launch.trainer_args)
    if rows := getattr(config, "global_batch_rows", None):
        micro, accumulated = split_batch(rows, run.resources)
        settings |= {
            "per_device_train_batch_size": micro,
            "gradient_accumulation_steps": accumulated,
            "save_steps": 1000,
            "save_total_limit": 2,
        }
    run.out.mkdir(parents=True, exist_ok=True)
    job = Job(
        stage=run.stage,
        config=config.model_dump(mode="json"),
        inputs=dict(run.inputs),
        trainer_args=settings | dict(run.settings),
        promise=dict(launch.promise),
        device=run.resources.device,
    )
    (run.out / "job.json").write_text(job.model_dump_json())
    return run.out / "job.json"


def run_jobs(runs: Sequence[Run]) -> None:
    """Run several jobs of one backend in the same ranks, so that imports are paid once."""
    paths = [str(write_job(each)) for each in runs]
    script = str(ROOT / "tests" / "stages" / "several_jobs.py")
    launch = runs[0].backend.plan(runs[0].resources, script, *paths)
    done = subprocess.run(
        launch.argv,
        env=os.environ | ENV | dict(launch.env),
        cwd=ROOT,
        capture_output=True,
        text=True,
        check=False,
    )
    logs = [log for run in runs for log in sorted((run.out / "logs").glob("*.log"))]
    said = "".join(log.read_text()[-6000:] for log in logs)
    assert done.returncode == 0, said + done.stdout[-2000:] + done.stderr[-6000:]


def given(recipe: Path) -> list[str]:
    """Overrides that give what the recipe leaves to the user."""
    return [f"{key}.config.source.path=x" for key in TO_GIVE.get(recipe.stem, ())]


def flow_alone(name: str, store: Path, *words: str) -> subprocess.CompletedProcess[str]:
    """``python -m flows.NAME`` without Prefect, with runs beside ``store``."""
    places = [f"store={store}", f"runs={store}-runs"]
    return python("-m", f"flows.{name}", "--engine", "inline", *words, *places)


def python(*argv: str, cwd: Path = ROOT, **env: str) -> subprocess.CompletedProcess[str]:
    """``python ARGV`` in a fresh process."""
    return subprocess.run(
        [sys.executable, *argv],
        env=os.environ | ENV | env,
        cwd=cwd,
        capture_output=True,
        text=True,
        check=False,
    )
