"""A fresh process that loads an export as anybody would, with plain ``from_pretrained``."""

import atexit
import json
import os
import subprocess
import sys
from collections.abc import Sequence
from contextlib import suppress
from functools import cache
from pathlib import Path
from typing import Any

from stages.checkpoint.garbled import GARBLED, first_line
from stages.checkpoint.heads import is_reward_model, model_class
from stages.checkpoint.probes import Probe

_RANKED = ("RANK", "LOCAL_RANK", "WORLD_SIZE", "LOCAL_WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT")
_ROOT = Path(__file__).resolve().parents[2]


def start() -> None:
    """Let the other process import its libraries while there is other work to do here."""
    _server()


def load(path: Path, *, probes: Sequence[Probe] = (), out: Path | None = None) -> tuple[str, ...]:
    """The faults that loading ``path`` in a process of its own shows.

    The answers to ``probes`` are left in ``out``, as :func:`stages.checkpoint.probes.answers`
    gives them.
    """
    if _server().poll() is not None:  # it was killed since
        _server.cache_clear()
    server = _server()
    assert server.stdin and server.stdout
    job = {"path": str(path), "out": str(out), "probes": [list(probe) for probe in probes]}
    server.stdin.write(json.dumps(job) + "\n")
    server.stdin.flush()
    answer = server.stdout.readline()
    if not answer:
        _server.cache_clear()
        return (f"{path}: a process that loads it ended with status {server.wait()}; see the log",)
    return tuple(json.loads(answer))


@cache
def _server() -> "subprocess.Popen[str]":
    """A process that forks one for each load, so that imports are paid once; it ends with this."""
    env = {name: value for name, value in os.environ.items() if name not in _RANKED}
    env |= {"HF_HUB_OFFLINE": "1", "HF_HUB_DISABLE_PROGRESS_BARS": "1"}
    env["PYTHONPATH"] = os.pathsep.join(filter(None, (str(_ROOT), env.get("PYTHONPATH"))))
    argv = [sys.executable, "-c", "from stages.checkpoint.fresh import main; main()"]
    server = subprocess.Popen(
        argv, env=env, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    )
    atexit.register(_stop, server)
    return server


def _stop(server: "subprocess.Popen[str]") -> None:
    if server.stdin:
        with suppress(BrokenPipeError):
            server.stdin.close()
    server.wait()


def load_faults(path: Path) -> tuple[list[str], Any]:
    """What loading with ``from_pretrained`` shows to be wrong, and the model if it loaded."""
    import torch
    from safetensors import SafetensorError

    loader = model_class(reward=is_reward_model(path))
    try:
        loaded: Any = loader.from_pretrained(
            path, dtype="auto", output_loading_info=True, trust_remote_code=False
        )
    except (*GARBLED, SafetensorError) as error:
        return [f"{path}: from_pretrained fails: {first_line(error)}"], None
    model, info = loaded
    faults = [
        f"{path}: from_pretrained reports {kind}: {sorted(map(str, info[kind]))[:3]}"
        for kind in ("missing_keys", "unexpected_keys", "mismatched_keys", "error_msgs")
        if info[kind]
    ]
    return faults, model.to(torch.float32) if not getattr(model, "hf_quantizer", None) else model


def main() -> None:
    """Answer each job, a line of JSON, with a line of faults by a child of its own."""
    from transformers import AutoModelForCausalLM

    from stages.checkpoint.probes import answers

    del AutoModelForCausalLM, answers  # imported now, for the children
    for line in sys.stdin:
        child = os.fork()
        if child == 0:
            _answer(json.loads(line))
            os._exit(0)
        _, status = os.waitpid(child, 0)
        if status:
            path, code = json.loads(line)["path"], os.waitstatus_to_exitcode(status)
            _say([f"{path}: a process that loads it ended with status {code}; see the log"])


def _answer(job: dict[str, Any]) -> None:
    import torch

    from stages.checkpoint.probes import answers

    faults, model = load_faults(Path(job["path"]))
    if job["probes"] and not faults:
        torch.save(answers(model, [Probe(*probe) for probe in job["probes"]]), job["out"])
    _say(faults)


def _say(faults: Sequence[str]) -> None:
    sys.stdout.write(json.dumps(list(faults)) + "\n")
    sys.stdout.flush()
