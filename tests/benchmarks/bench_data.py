"""The data stages against the raw tokenizer, plain ``datasets.map`` and TRL's packing.

``PYTHONPATH=. python tests/benchmarks/bench_data.py [REPEATS] [MEMORY_ROWS]``. The text is that of
Python's own manual, the tokenizer is trained on it; each measurement is a process of its own, and
the candidates take turns, so that a noisy machine treats them alike. ``MEMORY_ROWS`` rows of a
kilobyte go through preparing in one process whose peak memory is shown.
"""

import json
import os
import random
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path
from statistics import median

from tests.benchmarks.table import show, spread

ROOT = Path(__file__).resolve().parents[2]
ROWS = 30_000
WORDS = 160
CHATML = (
    "{% for m in messages %}{{ '<|im_start|>' + m['role'] + '\n' + m['content'] + '<|im_end|>\n' }}"
    "{% endfor %}{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"
)
SETUP = """
import json, os, sys, time
from pathlib import Path
from transformers import AutoTokenizer
scratch = Path(sys.argv[1])
def clocks():
    return time.perf_counter(), sum(os.times()[:4])  # CPU of this process and of its own
def tell(started):
    print(*(now - before for now, before in zip(clocks(), started)))
tokenizer = AutoTokenizer.from_pretrained(scratch / "model" / "model")
"""
TOKENISING = {
    "raw encode_batch, rendered text given": SETUP
    + """
rows = [json.loads(row)["messages"] for row in (scratch / "data/conversations/train.jsonl").open()]
texts = [tokenizer.apply_chat_template(row, tokenize=False) for row in rows]
encode = tokenizer.backend_tokenizer.encode_batch
started = clocks()
encode(texts, add_special_tokens=False)
tell(started)
""",
    "tokenize_data: template, masks, Arrow": SETUP
    + """
from stages.base import Context
from stages.tokenize_data import TokenizeData, tokenize_data
model, data = scratch / "model", scratch / "data"
started = clocks()
tokenize_data(TokenizeData(max_length=4096), Context(scratch / sys.argv[2]), model=model, data=data)
tell(started)
""",
    "plain datasets.map: template, no masks": SETUP
    + """
from datasets import disable_caching, disable_progress_bars, load_dataset
disable_progress_bars()
files = str(scratch / "data/conversations/train.jsonl")
rows = load_dataset("json", data_files=files, split="train", cache_dir=str(scratch / sys.argv[2]))
started = clocks()
def tokenise(batch):
    return {"input_ids": tokenizer.apply_chat_template(batch["messages"])["input_ids"]}
rows.map(tokenise, batched=True, remove_columns=rows.column_names).save_to_disk(
    str(scratch / sys.argv[2] / "saved"))
tell(started)
""",
}
PACKING = """
import json, sys, time
import numpy as np
from datasets import Dataset, Features, List, Value, disable_progress_bars
disable_progress_bars()
lengths = np.clip(np.random.default_rng(0).lognormal(5.3, 0.9, int(sys.argv[1])), 8, 9000)
lengths = lengths.astype(int)
ids = np.random.default_rng(1).integers(0, 30000, lengths.sum(), dtype=np.int32)
import pyarrow
offsets = np.concatenate(([0], np.cumsum(lengths))).astype(np.int32)
kinds = Features({name: List(Value("int32")) for name in ("input_ids", "labels")})
column = pyarrow.ListArray.from_arrays(offsets, ids)
table = pyarrow.table({"input_ids": column, "labels": column}).cast(kinds.arrow_schema)
rows = Dataset(table)
from stages.data import packing
from trl import pack_dataset
capacity, whole = int(sys.argv[2]), {"batch_size": len(rows)}
work = {
    "ours": lambda rows: packing.pack(rows, capacity),
    "trl_whole": lambda rows: pack_dataset(rows, capacity, strategy="bfd_split", map_kwargs=whole),
    "trl_default": lambda rows: pack_dataset(rows, capacity, strategy="bfd_split"),
}
found = {}
for name, pack in work.items():
    pack(Dataset(table.slice(0, 100)))  # what a first call imports is nobody's work
    started = time.process_time()
    packed = pack(rows)
    found[name] = [time.process_time() - started, len(packed)]
pieces = np.diff(packing.piece_starts(offsets, capacity))
found["bound"] = packing.lower_bound(pieces, capacity)
print(json.dumps(found))
"""
PREPARING = """
import resource, sys, time
from pathlib import Path
from stages.base import Context
from stages.prepare_data import PrepareData, prepare_data
scratch = Path(sys.argv[1])
started = time.perf_counter()
metrics = prepare_data(PrepareData(), Context(scratch / "out"), conversations=scratch)
peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024
print(metrics["conversations/kept"], time.perf_counter() - started, peak)
"""


def paragraphs() -> list[str]:
    """Prose of a few kilobytes each."""
    from pydoc_data.topics import topics

    return [" ".join(text.split()) for text in topics.values() if len(text) > 500]


def messages(number: int) -> Iterator[str]:
    """JSON lines of conversations of about a kilobyte, no two alike."""
    draw = random.Random(0)
    words = [text.split() for text in paragraphs()]
    for index in range(number):
        source = draw.choice(words)
        start = draw.randrange(max(1, len(source) - WORDS))
        said = source[start : start + WORDS]
        turns = [
            {"role": "user", "content": f"Passage {index}: {' '.join(said[:30])}?"},
            {"role": "assistant", "content": " ".join(said[30:])},
        ]
        yield json.dumps({"messages": turns}) + "\n"


def make_model(folder: Path) -> None:
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
    from transformers import PreTrainedTokenizerFast

    raw = Tokenizer(models.BPE())
    raw.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    raw.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=16_000,
        special_tokens=["<|im_start|>", "<|im_end|>"],
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    raw.train_from_iterator(paragraphs(), trainer)
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=raw, eos_token="<|im_end|>")
    tokenizer.chat_template = CHATML
    tokenizer.save_pretrained(folder)


def make_rows(scratch: Path) -> None:
    folder = scratch / "data" / "conversations"
    folder.mkdir(parents=True)
    rows = list(messages(ROWS))
    (folder / "train.jsonl").write_text("".join(rows))
    (folder / "test.jsonl").write_text("".join(rows[:10]))


def measure(code: str, *words: object) -> str:
    """The last line that ``python -c CODE WORDS`` prints."""
    env = os.environ | {"PYTHONPATH": str(ROOT), "HF_HUB_OFFLINE": "1"}
    argv = [sys.executable, "-c", code, *map(str, words)]
    done = subprocess.run(argv, env=env, check=True, stdout=subprocess.PIPE, text=True)
    return done.stdout.splitlines()[-1]


def tokenising(scratch: Path, repeats: int) -> None:
    found: dict[str, list[tuple[float, float]]] = {name: [] for name in TOKENISING}
    for repeat in range(repeats):
        for place, (name, code) in enumerate(TOKENISING.items()):
            wall, cpu = measure(code, scratch, f"out-{place}-{repeat}").split()
            found[name].append((float(wall), float(cpu)))
    raw = next(iter(found.values()))
    rows = []
    for name, took in found.items():
        row = [name]
        for clock in (0, 1):
            mine, theirs = [one[clock] for one in took], [one[clock] for one in raw]
            ratio = median(other / own for own, other in zip(mine, theirs, strict=True))
            row += [spread(mine), f"{ratio:.2f}"]
        rows.append(row)
    title = f"Tokenising {ROWS} rows on {len(os.sched_getaffinity(0))} cores, median (range) of "
    head = ["what", "wall, s", "speed of raw", "CPU, s", "speed of raw"]
    show(f"{title}{repeats}", head, rows)


def cached(scratch: Path, repeats: int) -> None:
    from flows.run_stage import plan, run_stage
    from flows.steps import Artifact, Step
    from stages.tokenize_data import TokenizeData

    def given(name: str) -> Artifact:
        return Artifact(name, "fetch", scratch / name, name, "reused", 0.0)

    step = Step[TokenizeData](config=TokenizeData(max_length=4096))
    first, second = [], []
    for repeat in range(repeats):
        for times in (first, second):
            started = time.perf_counter()
            inputs = {name: given(name) for name in ("model", "data")}
            store = scratch / f"store-{repeat}"
            planned = plan("tokenize_data", step, store, label="tokenize data", inputs=inputs)
            run_stage(planned, say=lambda _: None)
            times.append(time.perf_counter() - started)
    ratio = median(one / two for one, two in zip(first, second, strict=True))
    rows = [
        ["first run of the stage", spread(first), "1"],
        ["second run, reused", f"{median(second):.4f}", f"{ratio:,.0f} times faster"],
    ]
    show(f"The same {ROWS} rows again, median (range) of {repeats}", ["what", "wall, s", ""], rows)


def packing(repeats: int) -> None:
    rows = []
    for number, capacity in ((20_000, 4096), (100_000, 4096), (100_000, 16_384)):
        found = [json.loads(measure(PACKING, number, capacity)) for _ in range(repeats)]
        for name, label in (
            ("ours", "ours, whole split"),
            ("trl_whole", "TRL bfd_split, whole split"),
            ("trl_default", "TRL bfd_split, its chunks of 1000"),
        ):
            took = [one[name][0] for one in found]
            ratio = median(one["ours"][0] / one[name][0] for one in found)
            bins = f"{found[0][name][1]} ({found[0]['bound']})"
            rows.append([f"{number} into {capacity}", label, spread(took), f"{ratio:.3f}", bins])
    head = ["rows", "what", "CPU, s", "ours / this", "sequences (bound)"]
    show(f"Packing with the Arrow result, median (range) of {repeats}", head, rows)


def memory(scratch: Path, number: int) -> None:
    folder = scratch / "large"
    (folder / "data").mkdir(parents=True)
    path = folder / "data" / "rows.jsonl"
    with path.open("w") as file:
        file.writelines(messages(number))
    size = path.stat().st_size / 1e9
    kept, seconds, peak = measure(PREPARING, folder).split()
    rows = [[f"{number:,}", f"{size:.2f}", f"{float(seconds):.0f}", f"{float(peak):.0f}", kept]]
    head = ["rows", "GB", "wall, s", "peak resident, MB", "kept"]
    show("Preparing one JSONL file, duplicates and contamination included", head, rows)


def main(repeats: int, memory_rows: int) -> None:
    with tempfile.TemporaryDirectory() as place:
        scratch = Path(place)
        if repeats:
            make_model(scratch / "model" / "model")
            make_rows(scratch)
            tokenising(scratch, repeats)
            cached(scratch, repeats)
            packing(repeats)
        if memory_rows:
            memory(scratch, memory_rows)


if __name__ == "__main__":
    given = [int(word) for word in sys.argv[1:]]
    main(*(given + [5, 2_000_000][len(given) :]))
