"""Imported by every process whose PYTHONPATH names this folder: breaks a training rank on request.

``FAULT`` is ``KIND:RANK:STEP``, or ``KIND:RANK:STEP:FILE`` to strike only once. The product knows
nothing of it: the callback that watches training is wrapped from outside once it has been imported.
For ``unsupervised`` and ``drown`` STEP is the length of a block of steps, see `_in_blocks`.
"""

import os
import sys
import threading
import time
from pathlib import Path
from typing import Any

LINE = "a line of a library that says too much\n"


def _break(kind: str) -> None:
    import signal

    import torch

    if kind == "exception":
        raise RuntimeError("injected")
    if kind == "exit":
        os._exit(3)
    if kind == "segfault":
        os.kill(os.getpid(), signal.SIGSEGV)
    if kind == "cuda_oom":
        raise torch.cuda.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 GiB")
    if kind == "deadlock":
        time.sleep(10_000)
    if kind == "stop":
        os.kill(os.getpid(), signal.SIGSTOP)
    if kind == "flood":
        sys.stdout.write(LINE * 1_000_000)
    if kind == "memory":
        eaten = [bytearray(os.urandom(1 << 20)) * 64 for _ in range(200)]
        raise AssertionError(f"nobody minded {len(eaten)} blocks")
    if kind == "preempt":
        os.kill(os.getpid(), signal.SIGUSR1)


def _wrap() -> None:
    kind, rank, step, *once = os.environ["FAULT"].split(":")
    while "stages.watch" not in sys.modules or not hasattr(sys.modules["stages.watch"], "Watch"):
        time.sleep(0.01)
    watched = sys.modules["stages.watch"].Watch
    step_end, log = watched.on_step_end, watched.on_log
    mine = os.environ.get("RANK") == rank
    slow = float(os.environ.get("SLOW", "0.1"))

    def on_step_end(self, args, state, control, **more):
        time.sleep(slow)
        if mine and state.global_step == int(step) and not any(map(os.path.exists, once)):
            for path in once:
                Path(path).touch()
            _break(kind)
        return step_end(self, args, state, control, **more)

    def on_log(self, args, state, control, logs=None, **more):
        if mine and kind == "nan" and state.global_step == int(step) and logs and "loss" in logs:
            logs = {**logs, "loss": float("nan")}
        return log(self, args, state, control, logs=logs, **more)

    watched.on_step_end, watched.on_log = on_step_end, on_log
    if kind in ("unsupervised", "drown"):
        watched.on_step_end = _in_blocks(kind, step_end, int(step), noisy=mine)


def _in_blocks(kind: str, step_end: Any, length: int, *, noisy: bool) -> Any:
    """Blocks of ``length`` steps by turns: supervised and not, or with ten thousand lines a step
    into the log and into nothing."""
    beats, stopping = sys.modules["stages.beats"].Beats, sys.modules["stages.stopping"].StopRequest
    kept = beats.beat, stopping.agreed
    nowhere = Path(os.devnull).open("w")  # noqa: SIM115

    def on_step_end(self: Any, args: Any, state: Any, control: Any, **more: Any) -> Any:
        plain = (state.global_step - 1) // length % 2 == 1
        if kind == "drown" and noisy:
            (nowhere if plain else sys.stdout).write(LINE * 10_000)
        if kind == "unsupervised":
            unheard = lambda *_, **__: None, lambda *_: False
            beats.beat, stopping.agreed = unheard if plain else kept
        return step_end(self, args, state, control, **more)

    return on_step_end


if os.environ.get("FAULT") and "RANK" in os.environ:
    threading.Thread(target=_wrap, daemon=True).start()
