"""The planner's step times against published ones.

``PYTHONPATH=. python tests/benchmarks/bench_planner_time.py``

Each case is two set-ups that somebody timed on one machine. What is compared is the ratio of
their times; the direction is right when the planner puts the same one first, or when the two are
within 3 % of one another in both. What a source leaves unsaid (row length, cards) is filled in as
the comment beside the case says.
"""

from collections.abc import Iterator
from dataclasses import dataclass, replace
from statistics import median

from backends import DDP, FSDP, DeepSpeed, NamedBackend, Resources
from backends.planner.hardware import Machine, find_machine
from backends.planner.model import find_model, read_config
from backends.planner.seconds import step_time
from backends.planner.work import Setup, Work
from tests.benchmarks.bench_planner_memory import FOLDER, exact, read
from tests.benchmarks.table import show

EXACT = "exact_llama3_8b.csv"
TIE = 1.03
LLAMA_2B = {
    # 1.98e9 parameters: the llama2b of oumi's benchmarks, a Llama of 24 layers of 2560.
    "model_type": "llama",
    "num_hidden_layers": 24,
    "hidden_size": 2560,
    "intermediate_size": 6912,
    "num_attention_heads": 20,
    "num_key_value_heads": 20,
    "vocab_size": 32000,
}


@dataclass(frozen=True)
class Case:
    """``slow`` took ``published`` times as long as ``fast``, for a token of each GPU."""

    name: str
    source: str
    published: float
    model: str | dict
    machine: Machine
    fast: tuple[Work, NamedBackend, int]
    slow: tuple[Work, NamedBackend, int]
    """(work, backend, micro-batch)"""

    checkpointing: bool = True
    slow_model: str | None = None
    """Where ``slow`` is another model, on ``slow_machine``."""

    slow_machine: Machine | None = None

    def ratio(self) -> float:
        """Time of a token under ``slow`` over that under ``fast``."""
        fast = self._rate(self.model, self.machine, *self.fast)
        slow = (self.slow_model or self.model, self.slow_machine or self.machine)
        return fast / self._rate(*slow, *self.slow)

    def _rate(
        self, spec: str | dict, machine: Machine, work: Work, backend: NamedBackend, micro: int
    ) -> float:
        model = find_model(spec) if isinstance(spec, str) else read_config(spec, name="2B")
        setup = Setup(backend, resources(machine, micro, self.checkpointing))
        return step_time(model, work, setup, machine).tokens_per_second_per_gpu


def resources(machine: Machine, micro: int, checkpointing: bool = True) -> Resources:
    return Resources(
        nodes=machine.nodes,
        ranks_per_node=machine.ranks_per_node,
        device=machine.device,
        micro_batch_size=micro,
        gradient_checkpointing=checkpointing,
    )


def published() -> Iterator[Case]:
    """Every direction that is known to have been measured."""
    # Rows of 2048; cards not named: 48 GB ones on slow lanes fit both speeds.
    work = Work(precision="fp32-master", seq_length=2048, global_batch=256)
    yield Case(
        "OLMo-1B, DDP / FSDP",
        "allenai/OLMo#762",
        8034 / 1747,
        "allenai/OLMo-1B-hf",
        find_machine("4xA6000", "slow-pcie"),
        (work, DDP(), 2),
        (work, FSDP(), 2),
        checkpointing=False,
    )
    lora = Work(method="lora", seq_length=2048, global_batch=64, loss="hf", lora_rank=64)
    source = "AnswerDotAI/fsdp_qlora benchmarks_03_2024"
    desk = find_machine("2x3090", "slow-pcie")
    yield Case(
        "Llama-2-7B LoRA 2x3090, DDP / FSDP, 4 rows",
        source,
        1366 / 881,
        "meta-llama/Llama-2-7b-hf",
        desk,
        (lora, DDP(), 4),
        (lora, FSDP(), 4),
    )
    six = Work(method="lora", seq_length=2048, global_batch=48, loss="hf", lora_rank=64)
    yield Case(
        "Llama-2-7B LoRA 2x3090, DDP 4 / FSDP 6 rows",
        source,
        1199 / 881,
        "meta-llama/Llama-2-7b-hf",
        desk,
        (lora, DDP(), 4),
        (six, FSDP(), 6),
    )
    qlora = Work(method="qlora", seq_length=2048, global_batch=160, loss="hf", lora_rank=64)
    yield Case(
        "Llama-2-7B QLoRA 2x3090, DDP 8 / FSDP 10 rows",
        source,
        936 / 875,
        "meta-llama/Llama-2-7b-hf",
        desk,
        (qlora, DDP(), 8),
        (qlora, FSDP(), 10),
    )
    yield Case(
        "Llama-2-7B LoRA 2x4090, DDP 4 / FSDP 6 rows",
        source,
        481 / 437,
        "meta-llama/Llama-2-7b-hf",
        find_machine("2x4090", "pcie4"),
        (lora, DDP(), 4),
        (six, FSDP(), 6),
    )
    yield Case(
        "Llama-2-7B QLoRA 2x4090, DDP 8 / FSDP 10 rows",
        source,
        466 / 450,
        "meta-llama/Llama-2-7b-hf",
        find_machine("2x4090", "pcie4"),
        (qlora, DDP(), 8),
        (qlora, FSDP(), 10),
    )
    # One row a GPU.
    long = Work(precision="fp32-master", seq_length=8192, global_batch=8)
    yield Case(
        "14B at 8k on 8xA800, ZeRO-2 / ZeRO-3",
        "collected: 10.32, 10.56 s/it",
        10.56 / 10.32,
        "Qwen/Qwen1.5-14B",
        find_machine("8xA800"),
        (long, DeepSpeed(zero_stage=2), 1),
        (long, DeepSpeed(zero_stage=3), 1),
    )
    # The same page, rows and framework; one row a GPU again.
    yield Case(
        "ZeRO-3 at 8k, 14B on 8xA800 / 30B-A3B on 16xA800",
        "Megatron-SWIFT's documentation: 10.56, 91.2 s/it",
        91.2 / 10.56,
        "Qwen/Qwen1.5-14B",
        find_machine("8xA800"),
        (long, DeepSpeed(zero_stage=3), 1),
        (replace(long, global_batch=16), DeepSpeed(zero_stage=3), 1),
        slow_model="Qwen/Qwen3-30B-A3B",
        slow_machine=find_machine("2x8xA800"),
    )
    # Google's 4-GPU A100 nodes have 50 Gbit/s; 21.7 samples/s at MFU 0.373 on one node says 4 GPUs.
    pretrain = Work(precision="fp32-master", seq_length=2048, global_batch=256)
    yield Case(
        "2B on 4 nodes, HSDP / full shard",
        "oumi-ai/oumi#213",
        74.41 / 55.349,
        LLAMA_2B,
        find_machine("4x4xA100-40GB", network="ethernet-50"),
        (pretrain, FSDP(sharding="hybrid", reduce_dtype="bfloat16"), 16),
        (pretrain, FSDP(reduce_dtype="bfloat16"), 16),
    )
    falcon = Work(precision="fp32-master", seq_length=4096, global_batch=8, loss="hf")
    eight = find_machine("8xA100-40GB")
    zero = DeepSpeed(zero_stage=3)
    for name, backend, seconds in (
        ("FSDP", FSDP(), 2.93),
        ("+ parameter offload", DeepSpeed(zero_stage=3, offload_parameters="cpu"), 6.05),
        (
            "+ both offloads",
            DeepSpeed(zero_stage=3, offload_parameters="cpu", offload_optimizer="cpu"),
            13.70,
        ),
        ("ZeRO-2 + optimizer offload", DeepSpeed(zero_stage=2, offload_optimizer="cpu"), 9.60),
    ):
        yield Case(
            f"Falcon-7B 8xA100-40, ZeRO-3 / {name}",
            "deepspeedai/DeepSpeed#3901",
            seconds / 2.86,
            "tiiuae/falcon-7b",
            eight,
            (falcon, zero, 1),
            (falcon, backend, 1),
        )
    granite = Work(precision="fp32-master", seq_length=4096, global_batch=32)
    yield Case(
        "Granite-7B 4xA100, FSDP / ZeRO-3",
        "huggingface/blog deepspeed-to-fsdp-and-back",
        3159 / 3095,
        "ibm/granite-7b-base",
        find_machine("4xA100-80GB"),
        (granite, FSDP(), 8),
        (granite, DeepSpeed(zero_stage=3), 8),
    )
    # Rows of 2048; lanes not named.
    four = Work(precision="fp32-master", seq_length=2048, global_batch=24)
    tiny = find_machine("2x4090")
    one = Work(precision="fp32-master", seq_length=2048, global_batch=6)
    yield Case(
        "TinyLlama 2x4090 DDP, accumulation 4 / 1",
        "whyNLP/tinyllama#1",
        2.7 / 1.5,
        "TinyLlama/TinyLlama-1.1B-Chat-v1.0",
        tiny,
        (four, DDP(), 3),
        (one, DDP(), 3),
        checkpointing=False,
    )


def right(published: float, predicted: float) -> bool:
    """The same order, or a tie in both."""
    tie = 1 / TIE <= published <= TIE and 1 / TIE <= predicted <= TIE
    return tie or (published > 1) == (predicted > 1)


def exact_rows() -> Iterator[tuple[str, float, float]]:
    """(row, published, predicted) tokens/s of each GPU in the exact table."""
    for raw in read(EXACT):
        row = exact(raw)
        machine = find_machine(f"{raw['gpus']}xA100-80GB")
        rate = step_time(row.model, row.work, row.setup, machine).tokens_per_second_per_gpu
        yield row.source, float(raw["tokens_per_s_per_gpu"]), rate


def main() -> None:
    rows = []
    for case in published():
        found = case.ratio()
        error = found / case.published - 1
        verdict = "right" if right(case.published, found) else "WRONG"
        rows.append(
            (
                case.name,
                f"{case.published:.2f}",
                f"{found:.2f}",
                f"{error:+.0%}",
                verdict,
                case.source,
            )
        )
    head = ("faster / slower", "published", "planner", "off", "direction", "source")
    show("How many times as long the second takes", head, rows)
    if not FOLDER.is_dir():
        return
    exact = list(exact_rows())
    scale = median(found / said for _, said, found in exact)
    errors = [found / said / scale - 1 for _, said, found in exact]
    worst = max(range(len(exact)), key=lambda index: abs(errors[index]))
    table = [
        (name, f"{said:.0f}", f"{found:.0f}", f"{error:+.0%}")
        for (name, said, found), error in zip(exact, errors, strict=True)
    ]
    head = ("Llama-3-8B on A100-80GB", "published", "planner", "off, after one scale")
    show("Tokens a second of each GPU", head, table)
    print(
        f"\nrelative speeds: median off {median(map(abs, errors)):.1%}, worst "
        f"{abs(errors[worst]):.0%} ({exact[worst][0]}); planner over published: {scale:.2f}"
    )


if __name__ == "__main__":
    main()
