"""The tiny SFT stage through the flow against the same TRL script under plain torchrun.

``PYTHONPATH=. python tests/benchmarks/bench_sft.py [REPEATS]``. Both train the same rows for
the same steps on two CPU ranks; one after the other in turn, so that a noisy machine treats them
alike.
"""

import json
import os
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from statistics import median

from tests.benchmarks.table import show, spread

ROOT = Path(__file__).resolve().parents[2]
STEPS = 100
SCRIPT = """
import sys
from datasets import load_from_disk
from transformers import AutoTokenizer
from trl import SFTConfig, SFTTrainer
model, data, out, settings = sys.argv[1], sys.argv[2], sys.argv[3], eval(sys.argv[4])
rows = load_from_disk(data).select_columns(["input_ids", "labels"])
args = SFTConfig(output_dir=out, max_length=None, bf16=False, use_cpu=True, report_to="none",
                 logging_steps=1, save_strategy="no", disable_tqdm=True,
                 gradient_checkpointing=False, model_init_kwargs={"dtype": "float32"},
                 dataset_kwargs={"skip_prepare_dataset": True}, ddp_backend="gloo", **settings)
trainer = SFTTrainer(model, args=args, train_dataset=rows,
                     processing_class=AutoTokenizer.from_pretrained(model))
trainer.train()
trainer.save_model(out + "/model")
"""


def flow(store: Path) -> dict[str, dict]:
    """Run the tiny recipe's SFT under DDP; the manifests of the store by stage."""
    words = [f"sft.config.max_steps={STEPS}", "sft.backend.kind=ddp", "sft.save_every=100000"]
    words += ["dpo.config.max_steps=2", "evaluate.config.generate_rows=0"]
    argv = [sys.executable, "-m", "flows.sft_then_dpo", "tiny", "--engine", "inline", *words]
    argv += [f"store={store}", f"runs={store}-runs"]
    subprocess.run(argv, cwd=ROOT, check=True, capture_output=True)
    found = {}
    for path in store.glob("*/*/manifest.json"):
        found[path.parent.parent.name] = json.loads(path.read_text()) | {"out": str(path.parent)}
    return found


def plain(scratch: Path, sft: dict) -> float:
    """Seconds of the plain script on the same rows."""
    job = json.loads((Path(sft["out"]) / "job.json").read_text())
    settings = {
        "per_device_train_batch_size": job["trainer_args"]["per_device_train_batch_size"],
        "gradient_accumulation_steps": job["trainer_args"]["gradient_accumulation_steps"],
        "max_steps": STEPS,
        "learning_rate": job["config"]["learning_rate"],
    }
    script = scratch / "plain.py"
    script.write_text(SCRIPT)
    rows = str(Path(job["inputs"]["data"]) / "conversations" / "train")
    argv = [sys.executable, "-m", "torch.distributed.run", "--nproc-per-node=2", "--nnodes=1"]
    argv += ["--rdzv-backend=c10d", "--rdzv-endpoint=localhost:0", str(script)]
    argv += [job["inputs"]["model"] + "/model", rows, str(scratch / "out"), repr(settings)]
    started = time.monotonic()
    subprocess.run(argv, check=True, capture_output=True, cwd=scratch)
    return time.monotonic() - started


def main(repeats: int) -> None:
    os.environ |= {"OMP_NUM_THREADS": "1", "HF_HUB_OFFLINE": "1", "HF_HUB_DISABLE_TELEMETRY": "1"}
    ours, theirs = [], []
    with tempfile.TemporaryDirectory() as scratch:
        for repeat in range(repeats):
            found = flow(Path(scratch) / f"store{repeat}")
            ours.append(found["sft"]["provenance"]["seconds"])
            theirs.append(plain(Path(scratch), found["sft"]))
    ratio = median(mine / other for mine, other in zip(ours, theirs, strict=True))
    rows = [
        ["SFT stage through the flow", spread(ours), f"{ratio:.2f}"],
        ["plain TRL script under torchrun", spread(theirs), "1.00"],
    ]
    head = ["what", "wall, s", "ratio"]
    show(f"SFT of {STEPS} steps on two ranks, median (range) of {repeats}", head, rows)


if __name__ == "__main__":
    main(int(sys.argv[1]) if len(sys.argv) > 1 else 3)
