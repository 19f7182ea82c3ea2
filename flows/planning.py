"""What the planner is asked about a stage, and its answer as steps."""

import json
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from backends import FSDP, Auto, DeepSpeed
from backends.planner.hardware import Machine, check_link
from backends.planner.memory import num_adapter_parameters
from backends.planner.model import find_model
from backends.planner.ranking import LARGEST_MICRO_BATCH, Limits, Option, ladder, refusals
from backends.planner.work import Precision, Setup, Stage, Work
from flows.steps import Lineage, Step
from stages.dpo import DPO
from stages.fetch import Fetch
from stages.grpo import GRPO
from stages.ppo import PPO
from stages.reward import RewardModelling
from stages.sft import SFT
from stages.sources.hub import HubModel
from stages.sources.local import LocalModel
from stages.tokenize_data import TokenizeData
from stages.training import Adapter, Training


def lineage(step: Step[Any], out: Path, inputs: Sequence[Lineage]) -> Lineage:
    """What is known of the model and the rows once ``step`` has filled, or will fill, ``out``."""
    model = _model(step.config, out) or next((each.model for each in inputs if each.model), None)
    known = next((each for each in inputs if each.longest_conversation), Lineage())
    if isinstance(step.config, TokenizeData):
        known = _longest(step.config, out)
    return replace(known, model=model)


def _model(config: Any, out: Path) -> str | None:
    """Where to read the shape of the model in ``out``; ``None`` if ``out`` tells nothing new."""
    if (out / "model" / "config.json").exists():
        return str(out / "model")
    source = config.source if isinstance(config, Fetch) else None
    if isinstance(source, LocalModel):
        return str(source.path)
    if isinstance(source, HubModel):
        try:
            find_model(source.repo)
        except ValueError:  # not one that the planner knows by name; its config.json will tell
            return None
        return source.repo
    return None


def _longest(config: TokenizeData, out: Path) -> Lineage:
    path = out / "metrics.json"
    counts = json.loads(path.read_text()) if path.exists() else {}
    return Lineage(
        longest_conversation=counts.get("conversations/train/longest", config.max_length),
        longest_pair=counts.get("preferences/train/longest", config.max_length),
    )


def choices(step: Step[Any], known: Lineage) -> Iterator[tuple[Step[Any], Option]]:
    """The planner's ladder for a step under ``auto``: each rung as a step, with its figures.

    None while the model, the rows or the GPUs are not known. Raises ``ValueError`` for a stage that
    is not training, for a model whose architecture the planner does not know, for a link that no
    GPU has, when every backend is refused and when nothing fits.
    """
    auto = step.backend
    assert isinstance(auto, Auto)
    if not isinstance(step.config, Training):
        raise ValueError(
            "backend.kind auto plans training stages; name local, ddp, fsdp or deepspeed here"
        )
    if known.model is None or known.longest_conversation is None:
        return
    if auto.link is not None:
        check_link(auto.link)
    if obstacle(step):
        return
    asked = work(step.config, known)
    machine, about_ranks = _machine(step, auto, asked.global_batch)
    if step.resources.activation_offloading and machine.device == "cpu":
        raise ValueError("activation_offloading needs device: cuda; host memory is all a CPU has")
    limits = Limits(
        margin_bytes=round(1e9 * auto.margin_gb),
        largest_micro_batch=step.resources.micro_batch_size or LARGEST_MICRO_BATCH,
        always_recompute=step.resources.gradient_checkpointing,
        activation_offloading=step.resources.activation_offloading,
    )
    for rung in ladder(find_model(known.model), asked, machine, limits=limits):
        changed = rung.setup.resources.model_dump(
            include={"nodes", "ranks_per_node", "device", "micro_batch_size",
                     "gradient_checkpointing", "activation_offloading"}
        )  # fmt: skip
        resources = step.resources.model_copy(update=changed)
        update = {"backend": rung.setup.backend, "resources": resources}
        yield step.model_copy(update=update), replace(rung, why=f"{rung.why}{about_ranks}")


def obstacle(step: Step[Any]) -> str | None:
    """Why this placement cannot have what a step under ``auto`` asks for. With ``ranks: all`` the
    number of ranks is what there is, so that only a device or nodes can lack.
    """
    auto, resources = step.backend, step.resources
    if isinstance(auto, Auto) and auto.ranks == "all":
        resources = resources.model_copy(update={"ranks_per_node": 1})
    return step.placement.obstacle(resources)


def _machine(step: Step[Any], auto: Auto, global_batch: int) -> tuple[Machine, str]:
    """(machine, a word about ranks that are left out). With ``ranks: all`` a global batch that does
    not divide over all of them takes the largest number over which it does.
    """
    machine = step.placement.machine(step.resources, auto)
    if auto.ranks == "given" or global_batch % machine.ranks == 0:
        return machine, ""
    ranks = next(n for n in range(machine.ranks_per_node, 0, -1) if global_batch % n == 0)
    fewer = {"ranks_per_node": ranks, "device": machine.device}
    given = auto.model_copy(update={"ranks": "given"})
    smaller = step.placement.machine(step.resources.model_copy(update=fewer), given)
    what = "GPUs" if machine.device == "cuda" else "cores"
    words = f"; {ranks} of {machine.ranks} {what}, over which {global_batch} rows divide"
    return smaller, words


def refuse(step: Step[Any], known: Lineage) -> None:
    """Raise ``ValueError`` for a training stage whose method and backend cannot be combined."""
    assert not isinstance(step.backend, Auto)
    if isinstance(step.config, Training):
        setup = Setup(step.backend, step.resources)
        if reason := refusals(work(step.config, known), setup):
            raise ValueError(reason)


def disk_bytes(step: Step[Any], known: Lineage) -> int | None:
    """What a training stage will keep on disk at most: checkpoints, one more while it is written,
    the best one if it is asked for, and the model. ``None`` for other stages, and while the model
    is not known.
    """
    config = step.config
    if not isinstance(config, Training) or known.model is None:
        return None
    try:
        model = find_model(known.model)
    except (ValueError, OSError):  # an architecture or a file that the planner cannot read
        return None
    trained = model.num_parameters
    if isinstance(config.method, Adapter):
        trained = num_adapter_parameters(model, work(config, known))
    models = 2 if isinstance(config, PPO) else 1  # the critic is saved as the policy is
    saves = step.keep_checkpoints + 1 + (step.best_by is not None)
    return models * trained * (saves * _saved_bytes(step) + FLOAT32)


FLOAT32 = 4


def _saved_bytes(step: Step[Any]) -> int:
    """Of a trained parameter in one checkpoint, with AdamW's two moments. FSDP and ZeRO hold
    trained weights in float32 whatever they are loaded in, adapters are float32 everywhere; what is
    saved under DeepSpeed is written in the compute type, once more by stages 1 and 2."""
    config = step.config
    bf16 = config.load_dtype == "bfloat16"
    computed = 2 if bf16 or config.compute_dtype == "bfloat16" else FLOAT32
    match step.backend:
        case FSDP(checkpoints="sharded"):
            return 3 * FLOAT32
        case FSDP():
            return 4 * FLOAT32
        case DeepSpeed(zero_stage=3):
            return 3 * FLOAT32 + computed
        case DeepSpeed():
            return 3 * FLOAT32 + 2 * computed
        case _:
            return 3 * (2 if bf16 and not isinstance(config.method, Adapter) else FLOAT32)


STAGES: Mapping[type[Training], Stage] = {
    DPO: "dpo",
    RewardModelling: "reward",
    PPO: "ppo",
    GRPO: "grpo",
}
"""What the planner calls the stage of a config; it takes every other for ``sft``."""


OF_PAIRS = ("dpo", "reward")
"""Stages whose rows are preference pairs."""


def stage(config: Training) -> Stage:
    return STAGES.get(type(config), "sft")


def work(config: Training, known: Lineage) -> Work:
    """``config`` as the planner asks for it; rows of which nothing is known count as one token."""
    rows = known.longest_pair if stage(config) in OF_PAIRS else known.longest_conversation
    # Of a row that is answered the prompt counts, which is shorter than the row.
    answer = config.max_new_tokens if isinstance(config, PPO | GRPO) else 0
    judged = isinstance(config, PPO | GRPO) and any(each.model for each in config.rewards)
    packed = config.pack_length if isinstance(config, SFT) else None
    method = config.method
    adapter = method if isinstance(method, Adapter) else None
    return Work(
        stage=stage(config),
        method=method.kind,
        lora_rank=adapter.rank if adapter else Work.lora_rank,
        lora_targets="attention" if adapter and adapter.targets == "attention" else "all",
        precision=_precision(config),
        loss="chunked",  # TRL's own: the head is part of the loss
        optimizer=config.optimizer,
        seq_length=packed or (rows or 1) + answer,
        reference="none" if isinstance(config, GRPO) and config.beta == 0 else None,
        new_tokens=answer or Work.new_tokens,
        passes=config.learned_from,
        reward_models=int(judged),
        global_batch=config.global_batch_rows,
        packing=packed is not None,
        attention="eager" if config.attention == "eager" else "flash",
        lora_dropout=adapter.dropout if adapter else 0.0,
        fused_norms=config.liger_kernel,
        fused_mlp=config.liger_kernel,
        reentrant=False,
        experts="grouped",  # transformers 5's own
        double_quantisation=getattr(method, "double_quantisation", True),
    )


def _precision(config: Training) -> Precision:
    if config.load_dtype == "bfloat16":
        return "bf16"
    return "fp32-master" if config.compute_dtype == "bfloat16" else "fp32"
