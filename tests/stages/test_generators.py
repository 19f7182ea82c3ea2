"""Engines beside the policy's own ``generate``."""

import copy
import sys
from collections.abc import Sequence
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest

from stages.ppo import PPO
from stages.rl.generators import WithVLLM
from tests.small import write_model

METHODS: dict[str, dict[str, Any]] = {
    "full": {"kind": "full"},
    "lora": {"kind": "lora", "rank": 4},
    "lora of queries": {"kind": "lora", "rank": 4, "targets": ["q_proj"]},
}


def test_a_machine_without_it_is_told_so() -> None:
    assert PPO().obstacle("cpu") is None
    vllm = PPO(generation=WithVLLM())
    assert "vllm needs a GPU" in (vllm.obstacle("cpu") or "")
    assert "vllm is not installed" in (vllm.obstacle("cuda") or "")


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    write_model(out := tmp_path_factory.mktemp("policy") / "model", tie=True)
    return out


def policy_of(folder: Path, method: dict[str, Any]) -> Any:
    """A policy that is no longer what is in the folder."""
    import torch
    from peft import get_peft_model
    from transformers import AutoModelForCausalLM

    from stages import training

    torch.manual_seed(1)
    policy: Any = AutoModelForCausalLM.from_pretrained(folder)
    if adapters := training.peft_config(PPO.model_validate({"method": method}).method, folder):
        policy = get_peft_model(policy, adapters)
    for parameter in policy.parameters():
        if parameter.requires_grad:
            torch.nn.init.normal_(parameter, std=0.3)
    return policy.eval()


@pytest.mark.parametrize("method", METHODS.values(), ids=list(METHODS))
def test_its_weights_are_those_of_the_merged_policy(folder: Path, method: dict[str, Any]) -> None:
    import torch

    from stages.rl.merged import weights

    policy = policy_of(folder, method)
    before = copy.deepcopy(policy.state_dict())
    told = {name: tensor.clone() for name, tensor in weights(policy)}
    whole = copy.deepcopy(policy)
    if method["kind"] != "full":
        whole = whole.merge_and_unload()
    merged = dict(whole.named_parameters())
    assert told.keys() == merged.keys()
    for name, tensor in merged.items():
        assert torch.equal(told[name], tensor), name
    for name, tensor in policy.state_dict().items():
        assert torch.equal(tensor, before[name]), name
    assert not any(getattr(each, "merged", False) for each in policy.modules())


class StandIn:
    """What vLLM promises of its ``LLM``, done by transformers on the CPU, without sampling."""

    def __init__(self, *, model: str, **settings: Any) -> None:
        from transformers import AutoModelForCausalLM

        self.settings, self.happened = settings, list[str]()
        self.model: Any = AutoModelForCausalLM.from_pretrained(model).eval()
        self.model.load_weights = self._load
        made.append(self)

    def _load(self, weights: Any) -> None:
        assert self.happened[-1] == "wake weights"
        told = dict(weights)
        left = self.model.load_state_dict(told, strict=False)
        assert not left.unexpected_keys and left.missing_keys == ["lm_head.weight"]

    def sleep(self, level: int) -> None:
        self.happened.append(f"sleep {level}")

    def wake_up(self, tags: Sequence[str]) -> None:
        self.happened.append(f"wake {' '.join(tags)}")

    def apply_model(self, function: Any) -> list[Any]:
        return [function(self.model)]

    def generate(self, prompts: Sequence[Any], settings: Sequence[Any], use_tqdm: bool) -> Any:
        pairs = zip(prompts, settings, strict=True)
        return [self._one(each["prompt_token_ids"], to) for each, to in pairs]

    def _one(self, prompt: list[int], settings: Any) -> Any:
        import torch

        ids = list(prompt)
        for _ in range(settings.max_tokens):
            with torch.no_grad():
                ids.append(int(self.model(torch.tensor([ids])).logits[0, -1].argmax()))
            if ids[-1] in settings.stop_token_ids:
                break
        return SimpleNamespace(outputs=[SimpleNamespace(token_ids=tuple(ids[len(prompt) :]))])


made: list[StandIn] = []


def test_it_answers_with_the_weights_of_the_moment(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from stages.rl.generation import Sampling, uniforms

    vllm: Any = ModuleType("vllm")
    vllm.LLM, vllm.SamplingParams = StandIn, SimpleNamespace
    monkeypatch.setitem(sys.modules, "vllm", vllm)
    monkeypatch.delitem(sys.modules, "stages.rl.vllm_generator", raising=False)
    from stages.rl.vllm_generator import vllm_generator

    prompts, drawn = [[5, 6, 7], [9]], uniforms(0, 0, range(2), 4)
    policy = policy_of(folder, METHODS["lora"])
    sampling = Sampling(1.0, 1.0, 4, stops=(1,), pad=0)
    make = vllm_generator(folder, WithVLLM(), sampling, longest=8, dtype="float32")
    (engine,) = made
    stale = [list(engine._one(prompt, _settings(4)).outputs[0].token_ids) for prompt in prompts]
    answers = make(policy)(prompts, drawn)
    merged = copy.deepcopy(policy).merge_and_unload()
    engine.model = merged
    fresh = [list(engine._one(prompt, _settings(4)).outputs[0].token_ids) for prompt in prompts]
    assert [each.ids for each in answers] == fresh != stale
    assert [each.ended for each in answers] == [ids[-1] == 1 for ids in fresh]
    assert engine.happened == ["sleep 2", "wake weights", "wake kv_cache", "sleep 2"]
    assert engine.settings["max_model_len"] == 8


def _settings(tokens: int) -> Any:
    return SimpleNamespace(max_tokens=tokens, stop_token_ids=[1])
