"""What stages ask the planner under ``auto``: ranks, links, limits, garbled files."""

import json
from pathlib import Path
from typing import Any

import pytest

from backends import Auto, Resources
from backends.placement import local
from flows import planning
from flows.steps import Lineage, Step
from stages.sft import SFT

LLAMA = {
    "model_type": "llama",
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "vocab_size": 100,
}


@pytest.fixture
def known(tmp_path: Path) -> Lineage:
    folder = tmp_path / "model"
    folder.mkdir()
    (folder / "config.json").write_text(json.dumps(LLAMA))
    return Lineage(str(folder), longest_conversation=64)


@pytest.fixture(autouse=True)
def six_cores(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")
    monkeypatch.setattr(local, "num_cores", lambda: 6)
    monkeypatch.setattr(local, "available_memory", lambda: 16 * 10**9)


def step(auto: Auto, rows: int = 12, optimizer: Any = "adamw", **resources: Any) -> Step[SFT]:
    return Step[SFT](
        config=SFT(global_batch_size=rows, optimizer=optimizer),
        backend=auto,
        resources=Resources.model_validate(resources),
    )


def test_all_ranks_are_what_the_machine_has(known: Lineage) -> None:
    asked = step(Auto(), ranks_per_node=64)
    found = list(planning.choices(asked, known))
    assert {chosen.resources.world_size for chosen, _ in found} == {6}
    assert planning.obstacle(asked) is None
    given = step(Auto(ranks="given"), ranks_per_node=64)
    assert list(planning.choices(given, known)) == []
    assert "64" in (planning.obstacle(given) or "")
    assert "0 GPUs" in (planning.obstacle(step(Auto(), device="cuda")) or "")


@pytest.mark.parametrize(("rows", "ranks"), [(12, 6), (8, 4), (7, 1), (9, 3), (4, 4)])
def test_a_batch_takes_the_ranks_over_which_it_divides(
    rows: int, ranks: int, known: Lineage
) -> None:
    for chosen, rung in planning.choices(step(Auto(), rows), known):
        assert chosen.resources.world_size == ranks
        assert rung.setup.micro_batch * rung.accumulation * ranks == rows
        assert (f"{ranks} of 6 cores" in rung.why) == (ranks < 6)


def test_what_named_backends_refuse_auto_refuses(known: Lineage) -> None:
    def plan(asked: Step[SFT]) -> None:
        list(planning.choices(asked, known))

    with pytest.raises(ValueError, match="activation_offloading needs device: cuda"):
        plan(step(Auto(), activation_offloading=True))
    with pytest.raises(ValueError, match="did you mean nvlink"):
        plan(step(Auto(link="nvlnk")))
    with pytest.raises(ValueError, match="adamw_8bit needs a GPU; use adamw"):
        plan(step(Auto(), optimizer="adamw_8bit"))


@pytest.mark.parametrize(
    "text",
    [
        "",
        "[]",
        '{"model_type": "llama", "hidden_size": NaN}',
        json.dumps(LLAMA | {"vocab_size": []}),
    ],
)
def test_a_garbled_config_says_nothing_of_the_disk(text: str, known: Lineage) -> None:
    asked = step(Auto())
    assert (planning.disk_bytes(asked, known) or 0) > 0
    (Path(str(known.model)) / "config.json").write_text(text)
    assert planning.disk_bytes(asked, known) is None
