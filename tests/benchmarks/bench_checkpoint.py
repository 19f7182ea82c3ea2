"""Merging, converting, checking and hashing against the tools that people use, and against a copy.

``PYTHONPATH=. python tests/benchmarks/bench_checkpoint.py [LAYERS] [REPEATS] [FOLDER]``. Each work
runs in a process of its own, in turn with the others, from a page cache that was emptied of its
files, and is timed from its first read to the sync of its last file; imports are not timed.
"Memory" is the highest resident size above that of the interpreter with its imports.
"""

import json
import os
import resource
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from statistics import median
from typing import Any

BLOCK = 1 << 24
SHARD = "1GB"
SIZES = {
    "hidden_size": 2048,
    "intermediate_size": 8192,
    "num_attention_heads": 32,
    "num_key_value_heads": 8,
    "vocab_size": 32000,
}
SMALL = {
    "hidden_size": 1024,
    "intermediate_size": 4096,
    "num_attention_heads": 16,
    "num_key_value_heads": 4,
    "vocab_size": 32000,
}


def model_config(sizes: Mapping[str, int], layers: int) -> Any:
    from transformers import LlamaConfig

    ids = {"bos_token_id": None, "eos_token_id": 1, "pad_token_id": 0}
    return LlamaConfig(
        **sizes, **ids, num_hidden_layers=layers, tie_word_embeddings=False, dtype="bfloat16"
    )  # type: ignore[arg-type]


def make_model(out: Path, layers: int) -> None:
    """Random bfloat16 weights, streamed to the disk, beside a tokenizer; and a LoRA adapter."""
    import torch
    from peft import LoraConfig, get_peft_model
    from transformers import AutoModelForCausalLM

    from stages.checkpoint import export
    from stages.checkpoint.weights import Spec, Weights
    from tests.stages.write_shards import write_base

    write_base(out / "tiny", tie=False)
    config = model_config(SIZES, layers)
    model_folder = out / "model"
    shutil.copytree(out / "tiny", model_folder)
    (model_folder / "model.safetensors").unlink()
    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(config)
    specs = {n: Spec(tuple(t.shape), "bfloat16") for n, t in model.state_dict().items()}
    weights = Weights(specs, lambda n, a, b: torch.randn(b - a, *specs[n].row_shape) * 0.02)
    export.write(weights, model_folder, dtype="bfloat16", max_shard_size=SHARD)
    config.save_pretrained(model_folder)
    ids = {"eos_token_id": [1, 3]}
    (model_folder / "generation_config.json").write_text(json.dumps(ids))
    adapter = LoraConfig(task_type="CAUSAL_LM", r=16, target_modules="all-linear")
    adapted = get_peft_model(model, adapter).to_empty(device="cpu")
    for name, parameter in adapted.named_parameters():
        if "lora_" in name:
            torch.nn.init.normal_(parameter, std=0.02)
    adapted.save_pretrained(str(out / "adapter"))


def make_shards(out: Path) -> None:
    """ZeRO-3 shards and an FSDP2 directory of a float32 model, by two real ranks."""
    import torch.multiprocessing

    import stages.cpu_ranks  # noqa: F401

    torch.multiprocessing.start_processes(_rank, (out,), nprocs=2, start_method="spawn")


def _rank(number: int, out: Path) -> None:
    import torch
    import torch.distributed as dist
    import torch.distributed.checkpoint as dcp
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import fully_shard
    from transformers import AutoModelForCausalLM

    from stages import cpu_ranks

    os.environ |= {"RANK": str(number), "LOCAL_RANK": str(number), "WORLD_SIZE": "2"}
    os.environ["DS_ACCELERATOR"] = "cpu"
    dist.init_process_group("gloo", init_method=f"file://{out}/meeting", rank=number, world_size=2)
    cpu_ranks.start_deepspeed()
    import deepspeed

    config = model_config(SMALL, 16)
    settings = {
        "train_micro_batch_size_per_gpu": 1,
        "zero_optimization": {"stage": 3},
        "zero_force_ds_cpu_optimizer": False,
        "zero_allow_untested_optimizer": True,
    }
    model = AutoModelForCausalLM.from_config(config, dtype=torch.float32)
    if number == 0:
        config.save_pretrained(out / "zero")
    engine, *_ = deepspeed.initialize(
        model=model, optimizer=torch.optim.SGD(model.parameters(), lr=0.1), config=settings
    )
    engine.save_checkpoint(str(out / "zero"))
    del engine, model
    model = AutoModelForCausalLM.from_config(config, dtype=torch.float32)
    mesh = init_device_mesh("cpu", (2,))
    for layer in model.model.layers:
        fully_shard(layer, mesh=mesh)
    fully_shard(model, mesh=mesh)
    writer = dcp.FileSystemWriter(out / "dcp" / "pytorch_model_fsdp_0")
    dcp.save({"model": model.state_dict()}, storage_writer=writer)
    dist.barrier()
    dist.destroy_process_group()


# Works: each is given the folder of what was made and an empty folder for what it makes.


def copy(made: Path, out: Path) -> None:
    """Read and write the files, and sync them."""
    for file in sorted(made.glob("*.safetensors")):
        with file.open("rb", buffering=0) as source, (out / file.name).open("wb") as target:
            while block := source.read(BLOCK):
                target.write(block)
    _sync(out)


def merge_here(made: Path, out: Path) -> None:
    from stages.checkpoint import export
    from stages.checkpoint.adapter import read_adapter
    from stages.checkpoint.merge import merge
    from stages.checkpoint.readers import open_weights

    merged = merge(open_weights(made / "model"), read_adapter(made / "adapter"), aliases={})
    export.write(merged, out, dtype="bfloat16", max_shard_size=SHARD)
    _sync(out)


def merge_peft(made: Path, out: Path) -> None:
    import torch
    from peft import PeftModel
    from transformers import AutoModelForCausalLM

    model = AutoModelForCausalLM.from_pretrained(made / "model", dtype=torch.bfloat16)
    merged: Any = PeftModel.from_pretrained(model, str(made / "adapter"))
    merged.merge_and_unload().save_pretrained(out, max_shard_size=SHARD)
    _sync(out)


def shards_here(made: Path, out: Path) -> None:
    from stages.checkpoint import export
    from stages.checkpoint.readers import open_weights

    export.write(open_weights(made), out, dtype="float32", max_shard_size="5GB")
    _sync(out)


def zero_to_fp32(made: Path, out: Path) -> None:
    from deepspeed.utils.zero_to_fp32 import convert_zero_checkpoint_to_fp32_state_dict

    convert_zero_checkpoint_to_fp32_state_dict(str(made), str(out), safe_serialization=True)
    _sync(out)


def dcp_to_torch(made: Path, out: Path) -> None:
    from torch.distributed.checkpoint.format_utils import dcp_to_torch_save

    dcp_to_torch_save(made / "pytorch_model_fsdp_0", out / "model.bin")
    _sync(out)


def read(made: Path, out: Path) -> None:
    """The file read speed: one thread, into one buffer."""
    view = memoryview(bytearray(BLOCK))
    for file in sorted(made.glob("*.safetensors")):
        with file.open("rb", buffering=0) as source:
            while source.readinto(view):  # type: ignore[attr-defined]
                pass


def validate_here(made: Path, out: Path) -> None:
    from stages.checkpoint import validate

    found = validate(made, "bfloat16", load=lambda path: ())
    assert not found, found


def hash_here(made: Path, out: Path) -> None:
    from stages.manifest import digest

    digest(made)


def mark_here(made: Path, out: Path) -> None:
    """What finishing a save does, to files that are on the disk already."""
    from stages.resume import mark_complete

    for file in made.glob("*.safetensors"):
        (out / file.name).hardlink_to(file)
    mark_complete(out, {})


WORKS: Mapping[str, Callable[[Path, Path], None]] = {
    work.__name__: work
    for work in (
        copy, merge_here, merge_peft, shards_here, zero_to_fp32, dcp_to_torch, read, validate_here,
        hash_here, mark_here,
    )
}  # fmt: skip
IMPORTS: Mapping[str, Sequence[str]] = {
    "merge_here": ("stages.checkpoint.merge", "stages.checkpoint.readers", "torch"),
    "merge_peft": ("peft", "transformers.models.llama.modeling_llama"),
    "shards_here": ("stages.checkpoint.readers", "torch.distributed.checkpoint"),
    "zero_to_fp32": ("deepspeed.utils.zero_to_fp32",),
    "dcp_to_torch": ("torch.distributed.checkpoint.format_utils",),
    "validate_here": ("transformers.models.llama.modeling_llama", "stages.checkpoint.faults"),
    "hash_here": ("stages.manifest",),
    "mark_here": ("stages.resume", "xxhash"),
}


def child(name: str, made: Path, out: Path) -> None:
    """Do one work, and print its seconds and its memory above the imports'."""
    for module in IMPORTS.get(name, ()):
        __import__(module)
    if name == "validate_here":  # what the first use of a tokenizer and of a config imports
        from stages.checkpoint.architecture import architecture
        from stages.checkpoint.conversation import load_tokenizer

        load_tokenizer(made)
        architecture(made)
    before = _resident()
    started = time.perf_counter()
    WORKS[name](made, out)
    seconds = time.perf_counter() - started
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024
    print(json.dumps({"seconds": seconds, "memory": peak - before}))


def _resident() -> int:
    import psutil

    return psutil.Process().memory_info().rss


def _sync(out: Path) -> None:
    for file in out.rglob("*"):
        handle = os.open(file, os.O_RDONLY)
        os.fsync(handle)
        os.close(handle)


def forget(folder: Path) -> None:
    """Empty the page cache of the files in ``folder``."""
    for file in folder.rglob("*"):
        if file.is_file():
            handle = os.open(file, os.O_RDONLY)
            os.fsync(handle)
            os.posix_fadvise(handle, 0, 0, os.POSIX_FADV_DONTNEED)
            os.close(handle)


def run(name: str, made: Path, scratch: Path) -> dict[str, float]:
    """One work in a fresh process, on files that are not in the page cache."""
    forget(made)
    out = scratch / "out"
    shutil.rmtree(out, ignore_errors=True)
    out.mkdir()
    argv = [sys.executable, __file__, "--child", name, str(made), str(out)]
    env = os.environ | {"DS_ACCELERATOR": "cpu", "HF_HUB_OFFLINE": "1"}
    done = subprocess.run(argv, check=True, stdout=subprocess.PIPE, text=True, env=env)
    return json.loads(done.stdout.splitlines()[-1])


def side_by_side(
    title: str, works: Mapping[str, tuple[str, Path]], *, scratch: Path, repeats: int
) -> None:
    """Measure ``works`` (label -> work and its folder) in turn; the first is the measure."""
    from tests.benchmarks.table import show, spread

    found: dict[str, list[dict[str, float]]] = {label: [] for label in works}
    for _ in range(repeats):
        for label, (name, made) in works.items():
            found[label].append(run(name, made, scratch))
    first = [each["seconds"] for each in found[next(iter(works))]]
    rows = []
    for label, facts in found.items():
        seconds = [each["seconds"] for each in facts]
        ratio = median(s / f for s, f in zip(seconds, first, strict=True))
        memory = median(each["memory"] for each in facts) / 1e6
        rows.append([label, spread(seconds), f"{ratio:.2f}", f"{memory:.0f}"])
    show(f"{title}, median (range) of {repeats}", ["what", "wall, s", "ratio", "memory, MB"], rows)


def main(layers: int, repeats: int, folder: Path) -> None:
    jobs = {"model": layers, "twice": 2 * layers}
    for name, depth in jobs.items():
        if not (folder / name / "adapter").exists():
            (folder / name).mkdir(parents=True, exist_ok=True)
            make_in_child("make_model", folder / name, depth)
    if not (folder / "dcp" / "pytorch_model_fsdp_0" / ".metadata").exists():
        make_in_child("make_shards", folder)
    model = folder / "model"
    size = sum(f.stat().st_size for f in (model / "model").iterdir()) / 1e9
    measure = {"scratch": folder, "repeats": repeats}
    side_by_side(
        f"LoRA merge of {size:.1f} GB in bfloat16",
        {
            "copy": ("copy", model / "model"),
            "here": ("merge_here", model),
            "PEFT": ("merge_peft", model),
        },
        **measure,
    )
    twice = {"copy": ("copy", folder / "twice" / "model"), "here": ("merge_here", folder / "twice")}
    side_by_side("LoRA merge of twice that", twice, scratch=folder, repeats=1)
    run("shards_here", folder / "zero", folder)
    plain = folder / "plain"
    shutil.rmtree(plain, ignore_errors=True)
    (folder / "out").rename(plain)
    side_by_side(
        "ZeRO-3 shards of two ranks to safetensors",
        {
            "copy of the result": ("copy", plain),
            "here": ("shards_here", folder / "zero"),
            "zero_to_fp32.py": ("zero_to_fp32", folder / "zero"),
        },
        **measure,
    )
    side_by_side(
        "FSDP2 directory of two ranks to safetensors",
        {
            "copy of the result": ("copy", plain),
            "here": ("shards_here", folder / "dcp"),
            "dcp_to_torch_save (to .bin)": ("dcp_to_torch", folder / "dcp"),
        },
        **measure,
    )
    side_by_side(
        f"Reading {size:.1f} GB",
        {
            "read": ("read", model / "model"),
            "validate": ("validate_here", model / "model"),
            "hash (SHA-256)": ("hash_here", model / "model"),
            "mark complete (XXH3)": ("mark_here", model / "model"),
        },
        **measure,
    )


def make_in_child(name: str, folder: Path, *args: int) -> None:
    argv = [sys.executable, __file__, "--make", name, str(folder), *map(str, args)]
    subprocess.run(argv, check=True, stdout=subprocess.DEVNULL)


if __name__ == "__main__":
    if sys.argv[1:2] == ["--child"]:
        child(sys.argv[2], Path(sys.argv[3]), Path(sys.argv[4]))
    elif sys.argv[1:2] == ["--make"]:
        makers: Mapping[str, Callable[..., None]] = {
            "make_model": make_model,
            "make_shards": make_shards,
        }
        makers[sys.argv[2]](Path(sys.argv[3]), *map(int, sys.argv[4:]))
    else:
        numbers = [int(word) for word in sys.argv[1:3]]
        num_layers, num_repeats = (*numbers, *(4, 5)[len(numbers) :])
        if sys.argv[3:]:
            main(num_layers, num_repeats, Path(sys.argv[3]))
        else:
            with tempfile.TemporaryDirectory() as temporary:
                main(num_layers, num_repeats, Path(temporary))
