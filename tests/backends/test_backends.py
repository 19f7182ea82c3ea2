"""A backend's plan is a pure value: a command, an environment, trainer settings, a promise."""

import sys
from typing import Literal

import pytest
from pydantic import ValidationError

from backends import DDP, FSDP, DeepSpeed, Local, Resources, split_batch
from backends.base import Launch
from backends.placement import ThisMachine

TWO = Resources(ranks_per_node=2)
GPUS = Resources(nodes=2, ranks_per_node=8, device="cuda", gradient_checkpointing=True)
RUN = (sys.executable, "-m", "torch.distributed.run")


def test_one_node_meets_on_a_free_port_and_more_nodes_meet_where_the_cluster_says() -> None:
    alone = DDP().plan(TWO, "-m", "stages", "job.json").argv
    assert alone == (
        *RUN,
        "--nnodes=1",
        "--nproc-per-node=2",
        "--rdzv-backend=c10d",
        "--rdzv-endpoint=localhost:0",
        "-m",
        "stages",
        "job.json",
    )
    assert DDP().plan(GPUS, "-m", "stages").argv == (
        *RUN,
        "--nnodes=2",
        "--nproc-per-node=8",
        "-m",
        "stages",
    )


@pytest.mark.parametrize("device", ["cpu", "cuda"])
def test_a_rank_that_is_alone_is_one_plain_process(device: Literal["cpu", "cuda"]) -> None:
    alone = Resources(device=device)
    launch = DDP(bucket_cap_mb=50).plan(alone, "-m", "stages")
    assert launch == Local().plan(alone, "-m", "stages")
    assert launch.argv == (sys.executable, "-m", "stages")
    assert launch.promise == {"wrapper": "none", "world_size": 1}


def test_fsdp_plan_matches_the_record() -> None:
    launch = FSDP(sharding="hybrid", reduce_dtype="bfloat16", checkpoints="sharded").plan(GPUS, "x")
    assert launch.trainer_args == {
        "use_cpu": False,
        "gradient_checkpointing": False,
        "activation_offloading": False,
        "ddp_timeout": 1800,
        "ddp_backend": "nccl",
        "fsdp": True,
        "fsdp_config": {
            "version": 2,
            "auto_wrap_policy": "TRANSFORMER_BASED_WRAP",
            "reshard_after_forward": True,
            "cpu_offload": False,
            "activation_checkpointing": True,
            "state_dict_type": "SHARDED_STATE_DICT",
        },
        "fsdp_plugin": {"reduce_dtype": "bfloat16", "dp_replicate_size": 2, "dp_shard_size": 8},
        "accelerator_config": {"gradient_accumulation_kwargs": {"sync_each_batch": True}},
        "whole_embedding": False,
    }
    assert launch.promise == {
        "wrapper": "fsdp",
        "world_size": 16,
        "shard_ranks": 8,
        "checkpoints": "sharded",
    }
    assert launch.env == {}


def test_deepspeed_plan_matches_the_record() -> None:
    launch = DeepSpeed(offload_optimizer="cpu").plan(TWO, "x")
    zero = launch.trainer_args["deepspeed"]["zero_optimization"]
    assert zero == {
        "stage": 3,
        "overlap_comm": False,
        "contiguous_gradients": True,
        "reduce_bucket_size": "auto",
        "stage3_prefetch_bucket_size": "auto",
        "stage3_param_persistence_threshold": "auto",
        "stage3_gather_16bit_weights_on_model_save": True,
        "offload_optimizer": {"device": "cpu", "pin_memory": True},
    }
    assert launch.promise == {"wrapper": "deepspeed", "world_size": 2, "zero_stage": 3}
    assert launch.env == {"OMP_NUM_THREADS": "1", "DS_ACCELERATOR": "cpu"}


@pytest.mark.parametrize("backend", [DDP(), FSDP(), DeepSpeed()], ids=lambda b: b.kind)
def test_planning_is_pure(backend: DDP | FSDP | DeepSpeed) -> None:
    first, second = (backend.plan(TWO, "-m", "stages") for _ in range(2))
    assert first == second and isinstance(first, Launch)


@pytest.mark.parametrize(
    ("make", "says"),
    [
        (lambda: Local().plan(TWO), "2 ranks are asked for"),
        (lambda: FSDP().plan(Resources()), "shards nothing"),
        (lambda: DeepSpeed().plan(Resources()), "shards nothing"),
        (lambda: FSDP(shard_ranks=2).plan(TWO), "read only by sharding: hybrid"),
        (lambda: FSDP(sharding="hybrid", shard_ranks=3).plan(TWO), "does not divide 2 ranks"),
        (lambda: DDP().plan(Resources(activation_offloading=True)), "needs device: cuda"),
    ],
)
def test_plans_that_cannot_be_are_refused(make, says: str) -> None:
    with pytest.raises(ValueError, match=says):
        make()


@pytest.mark.parametrize(
    "fields",
    [
        {"zero_stage": 2, "offload_parameters": "cpu"},
        {"zero_stage": 2, "offload_optimizer": "nvme", "nvme_path": "/tmp"},
        {"offload_optimizer": "nvme"},
        {"nvme_path": "/tmp"},
        {"zero_stage": 2, "communication": "zero++"},
        {"communication": "one_bit_adam"},
        {"zero_stage": 2, "checkpoints": "sharded"},
        {"one_bit_freeze_step": 7},
    ],
)
def test_deepspeed_options_that_do_not_fit_together_are_errors(fields: dict) -> None:
    with pytest.raises(ValidationError):
        DeepSpeed.model_validate(fields)


@pytest.mark.parametrize(
    ("rows", "resources", "expected"),
    [
        (32, TWO, (8, 2)),
        (8, Resources(), (8, 1)),
        (6, TWO, (1, 3)),
        (32, TWO.model_copy(update={"micro_batch_size": 4}), (4, 4)),
        (1024, GPUS, (8, 8)),
    ],
)
def test_the_global_batch_is_kept(rows: int, resources: Resources, expected: tuple) -> None:
    micro, accumulated = split_batch(rows, resources)
    assert (micro, accumulated) == expected
    assert micro * accumulated * resources.world_size == rows


def test_a_batch_that_does_not_divide_is_refused_with_the_nearest_that_do() -> None:
    with pytest.raises(ValueError, match="the nearest that do are 32 and 34"):
        split_batch(33, TWO)
    with pytest.raises(ValueError, match="micro_batch_size 3 does not divide"):
        split_batch(32, TWO.model_copy(update={"micro_batch_size": 3}))


def test_this_machine_says_what_it_lacks() -> None:
    assert ThisMachine().obstacle(Resources()) is None
    many = ThisMachine().obstacle(Resources(ranks_per_node=4096))
    assert many and many.startswith("resources.ranks_per_node is 4096, and this machine has")
    nodes = ThisMachine().obstacle(Resources(nodes=2))
    assert nodes and "this machine is one" in nodes
