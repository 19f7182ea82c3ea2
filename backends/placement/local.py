"""This machine: the ranks run under a supervisor beside the flow."""

import os
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any, Literal

from pydantic import PositiveFloat

from backends.auto import Auto
from backends.base import Launch, Resources
from backends.placement import supervise
from backends.placement.slots import release, take
from backends.planner.hardware import Machine, find_machine, found_machine
from configs import Config


class Silence(Config):
    """Minutes without a sign of life, by what a rank was doing at its last one."""

    start_minutes: PositiveFloat = 30.0
    """Importing, loading the model, the first step."""

    step_minutes: PositiveFloat = 5.0
    """One step, or ``step_factor`` times the median step if that is longer."""

    step_factor: PositiveFloat = 20.0
    """See ``step_minutes``."""

    save_minutes: PositiveFloat = 30.0
    """Writing a checkpoint or the model, gathering results."""


class ThisMachine(Config):
    """Run here, and end every process when the flow ends."""

    kind: Literal["local"] = "local"

    grace_seconds: PositiveFloat = 10.0
    """Time between SIGTERM and SIGKILL when a job is ended."""

    stop_seconds: PositiveFloat = 60.0
    """Time that training ranks have to finish a step, save and leave, before that."""

    on_parent_exit: Literal["stop", "keep"] = "stop"
    """What becomes of a job whose flow is gone: it is stopped, or kept for the next run of the same
    work, which waits for it and takes its output."""

    share_gpus: bool = False
    """Take GPUs that another job of this machine has taken already."""

    silence: Silence = Silence()
    """How long a rank may be silent before its job is ended as stuck."""

    def obstacle(self, resources: Resources) -> str | None:
        """Why these resources are not to be had here, or ``None``."""
        if resources.nodes != 1:
            return f"resources.nodes is {resources.nodes}, and this machine is one"
        have, what = (
            (num_gpus(), "GPU") if resources.device == "cuda" else (num_cores(), "CPU core")
        )
        if resources.ranks_per_node > have:
            return (
                f"resources.ranks_per_node is {resources.ranks_per_node}, "
                f"and this machine has {have} {what}{'s' * (have != 1)}"
            )
        return None

    def machine(self, resources: Resources, auto: Auto) -> Machine:
        """What this machine has for the planner: GPUs as the driver sees them, else cores.

        Raises ``ValueError`` when ``resources`` asks for GPUs, and no driver answers.
        """
        cuda = resources.device == "cuda" or (auto.ranks == "all" and num_gpus() > 0)
        given = resources.ranks_per_node if auto.ranks == "given" else None
        host = available_memory()
        if not cuda:
            return find_machine(f"{given or num_cores()}xCPU", host_memory=host)
        name, memory = driver_gpu()
        ranks = given or num_gpus()
        found = found_machine(name, memory, ranks, link=auto.link, host_memory=host)
        return replace(found, threads_per_rank=threads_per_rank(ranks))

    def ended(self, folder: Path) -> dict[str, Any] | None:
        """How the last job of ``folder`` ended; ``None`` while it runs, or if nobody knows."""
        return supervise.ended(folder)

    def run(
        self,
        launch: Launch,
        *,
        gpus: int,
        log: Path,
        lock: int,
        poll: Callable[[], None],
        queued: Callable[[str], None] = lambda why: None,
    ) -> int:
        """Run ``launch`` to its end and return its exit code (negative: the signal).

        It gets ``gpus`` GPUs that no other job has, and waits for them: ``queued`` is told why,
        and the empty text when it is over.
        """
        names, slots_held = (
            take(gpus, visible=visible_gpus(), poll=poll, queued=queued)
            if gpus and not self.share_gpus
            else (visible_gpus()[:gpus], [])
        )
        # No more than it asks for: a process without torchrun would spread its batch over all.
        mine = {
            "CUDA_VISIBLE_DEVICES": ",".join(names),
            "OMP_NUM_THREADS": f"{threads_per_rank(gpus)}",
        } if gpus else {}  # fmt: skip
        job = supervise.Job(
            argv=launch.argv,
            env={**os.environ, "TORCH_ELASTIC_SHUTDOWN_TIMEOUT": f"{self.grace_seconds:.0f}"}
            | mine
            | dict(launch.env),
            log=log,
            grace_seconds=self.grace_seconds,
            stop_seconds=self.stop_seconds,
            limits=supervise.Limits(
                start=60 * self.silence.start_minutes,
                step=60 * self.silence.step_minutes,
                step_factor=self.silence.step_factor,
                save=60 * self.silence.save_minutes,
            ),
            outlives_flow=self.on_parent_exit == "keep",
            held=(lock, *slots_held),
        )
        try:
            return supervise.run(job, poll=poll)
        finally:
            release(slots_held)


def num_cores() -> int:
    """Cores that this process may use, which in a container is fewer than the machine has."""
    if hasattr(os, "sched_getaffinity"):
        return len(os.sched_getaffinity(0))
    return os.cpu_count() or 1


def num_gpus() -> int:
    """NVIDIA GPUs that this process may use."""
    return len(visible_gpus())


def visible_gpus() -> list[str]:
    """Their names as ``CUDA_VISIBLE_DEVICES`` takes them, found without loading a driver."""
    visible = os.environ.get("CUDA_VISIBLE_DEVICES")
    if visible is not None:
        return [name.strip() for name in visible.split(",") if name.strip() not in ("", "-1")]
    devices = [path for path in Path("/dev").glob("nvidia[0-9]*") if path.name[6:].isdigit()]
    return [str(number) for number in range(len(devices))]


def driver_gpu() -> tuple[str, int]:
    """The first GPU's name and bytes, from NVML. Raises ``ValueError`` without a driver."""
    import pynvml

    try:
        pynvml.nvmlInit()
        handle = pynvml.nvmlDeviceGetHandleByIndex(0)
        memory = pynvml.nvmlDeviceGetMemoryInfo(handle)
        return pynvml.nvmlDeviceGetName(handle), int(memory.total)
    except pynvml.NVMLError as error:
        raise ValueError(f"the NVIDIA driver does not answer ({error}); name a backend") from None


def threads_per_rank(ranks: int) -> int:
    """Cores for each rank that has a GPU; torchrun would give one, and offload steps on them."""
    return max(1, num_cores() // ranks)


def available_memory() -> int:
    """Bytes that new processes here can have without swapping, control groups considered."""
    import psutil

    return min([psutil.virtual_memory().available, *_group_limits()])


def _group_limits() -> Iterator[int]:
    """What the control groups of this process leave of their memory limits (versions 1 and 2)."""
    groups = Path("/proc/self/cgroup")
    for line in groups.read_text().splitlines() if groups.exists() else ():
        _, controllers, path = line.split(":", 2)
        if controllers not in ("", "memory"):
            continue
        root = Path("/sys/fs/cgroup") / controllers
        names = ("memory.max", "memory.current") if controllers == "" else (
            "memory.limit_in_bytes", "memory.usage_in_bytes"
        )  # fmt: skip
        for folder in {root, root / path.lstrip("/")}:
            limit, used = (folder / name for name in names)
            if limit.exists() and (text := limit.read_text().strip()) != "max":
                yield int(text) - int(used.read_text())
