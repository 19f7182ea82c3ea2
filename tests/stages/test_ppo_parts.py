"""The formulas of PPO against numbers computed by hand."""

import math
from itertools import pairwise

import numpy as np
import pytest
import torch

from stages.dpo import DPO
from stages.grpo import GRPO
from stages.ppo import PPO
from stages.reward import RewardModelling
from stages.rl.advantages import advantages_and_returns, explained_variance, whiten
from stages.rl.generation import Answer, Draw, Sampling, _to_stop, uniforms
from stages.rl.kl import ESTIMATORS, AdaptiveKL, FixedKL, next_coefficient
from stages.rl.learning import after_idling, learning_rate
from stages.rl.losses import policy_loss, value_loss
from stages.rl.rollout import Rollout, Sample, Split, batch, describe, rollout, targets
from stages.rl.work import prompt_order
from stages.sft import SFT


def row(*values: float) -> torch.Tensor:
    return torch.tensor([values], dtype=torch.float32)


def test_kl_estimators_have_the_right_expectations() -> None:
    p, q = torch.tensor([0.7, 0.3]), torch.tensor([0.5, 0.5])
    expected = {name: float((p * f((p / q).log())).sum()) for name, f in ESTIMATORS.items()}
    assert expected["k1"] == pytest.approx(0.0822829, abs=1e-7)
    assert expected["k3"] == pytest.approx(0.0822829, abs=1e-7)
    assert expected["k2"] == pytest.approx(0.0787662, abs=1e-7)


def test_the_adaptive_coefficient_rises_and_falls() -> None:
    config = AdaptiveKL(coefficient=0.15, target=6, horizon=10_000)
    assert next_coefficient(config, 0.15, kl=12, num=256) == pytest.approx(0.150768, abs=1e-9)
    assert next_coefficient(config, 0.15, kl=1, num=256) == pytest.approx(0.15 * (1 - 0.00512))
    assert next_coefficient(config, 0.15, kl=6.3, num=256) == pytest.approx(0.15 * (1 + 0.00128))
    assert next_coefficient(FixedKL(coefficient=0.2), 0.2, kl=12, num=256) == 0.2


def test_a_price_of_divergence_can_not_become_negative() -> None:
    with pytest.raises(ValueError, match="a fifth of the 128 answers"):
        PPO.model_validate({"kl": {"kind": "adaptive", "horizon": 25}, "global_batch_size": 32})


def test_steps_after_a_warm_up_are_as_long_as_without_one() -> None:
    def lengths(idle: int) -> list[float]:
        weight = torch.nn.Parameter(torch.zeros(1))
        adam, seen = torch.optim.Adam([weight], lr=1.0), [0.0]
        for step in range(1 - idle, 31):
            factor = after_idling((0.9, 0.999), step, idle=idle)
            assert (factor == 0) == (step < 1)
            adam.param_groups[0]["lr"] = factor
            weight.grad = torch.full((1,), float(step > 0) * (1 + step % 3))
            adam.step()
            if step > 0:
                seen.append(float(weight.detach()))
        return [after - before for before, after in pairwise(seen)]

    assert lengths(160) == pytest.approx(lengths(0), rel=1e-3)


@pytest.mark.parametrize("padding", [0, 1, 5])
def test_gae_gives_the_numbers_of_the_paper_whatever_the_padding(padding: int) -> None:
    junk = [7.0] * padding
    advantages, returns = advantages_and_returns(
        row(0, 0, 1, *junk),
        row(0.5, 0.5, 0.5, *junk),
        row(1, 1, 1, *([0.0] * padding)),
        gamma=1.0,
        lam=0.95,
    )
    nothing = [0.0] * padding
    assert advantages[0].tolist() == pytest.approx([0.45125, 0.475, 0.5, *nothing])
    assert returns[0].tolist() == pytest.approx([0.95125, 0.975, 1.0, *nothing])


def test_an_answer_of_one_token_has_the_plain_error_as_its_advantage() -> None:
    advantages, returns = advantages_and_returns(row(2.0), row(0.5), row(1.0), gamma=0.9, lam=0.95)
    assert advantages.tolist() == [[1.5]] and returns.tolist() == [[2.0]]


def test_whitening_is_over_everything_that_counts() -> None:
    grid = torch.arange(12, 21).reshape(3, 3) / 10
    kept = whiten(grid, torch.ones(3, 3), keep_mean=True)
    assert kept[0, 0] == pytest.approx(0.0508, abs=1e-4)
    assert kept[2, 2] == pytest.approx(3.1492, abs=1e-4)
    padded = torch.cat([grid, torch.full((3, 2), 99.0)], dim=1)
    mask = torch.cat([torch.ones(3, 3), torch.zeros(3, 2)], dim=1)
    assert torch.allclose(whiten(padded, mask, keep_mean=True)[:, :3], kept)
    shifted = whiten(grid, torch.ones(3, 3))
    assert shifted.mean() == pytest.approx(0, abs=1e-6)


def test_explained_variance() -> None:
    returns, mask = row(1, 2, 3, 99), row(1, 1, 1, 0)
    assert explained_variance(row(1, 2, 3, 0), returns, mask) == 1
    assert explained_variance(row(5, 5, 5, 0), returns, mask) == pytest.approx(0)
    assert explained_variance(row(1, 2, 3, 0), row(4, 4, 4, 4), mask) == 0


def test_the_policy_loss_is_clipped_on_the_side_that_would_gain() -> None:
    old, mask = torch.zeros(1, 4), torch.ones(1, 4)
    log_probs = torch.log(row(1.5, 0.5, 1.5, 0.5)).requires_grad_()
    loss = policy_loss(log_probs, old, row(1, 1, -1, -1), mask, clip=0.2)
    # gains are held at 1.2 and 0.8; losses are not
    assert loss.loss.item() == pytest.approx(-1.2 - 0.5 + 1.5 + 0.8)
    assert loss.clipped.item() == 2
    loss.loss.backward()
    assert log_probs.grad is not None
    assert log_probs.grad[0].tolist() == pytest.approx([0, -0.5, 1.5, 0])
    assert loss.furthest.item() == pytest.approx(math.log(2))
    assert loss.kl.item() == pytest.approx(2 * (0.5 - math.log(1.5)) + 2 * (-0.5 + math.log(2)))


def test_the_value_loss_takes_the_worse_of_clipped_and_plain() -> None:
    values, old, returns = row(1.0, 0.1), row(0.0, 0.0), row(1.0, 1.0)
    loss, clipped = value_loss(values, old, returns, torch.ones(1, 2), clip=0.2)
    assert loss.item() == pytest.approx((0.8**2 + 0.9**2) / 2)
    assert clipped.item() == 1
    plain, none = value_loss(values, old, returns, torch.ones(1, 2), clip=None)
    assert plain.item() == pytest.approx(0.9**2 / 2) and none.item() == 0


def test_masked_tokens_move_no_loss() -> None:
    mask = row(1.0, 0.0)
    wild = policy_loss(row(0.1, 50.0), row(0.0, -50.0), row(1.0, 9.0), mask, clip=0.2)
    tame = policy_loss(row(0.1), row(0.0), row(1.0), row(1.0), clip=0.2)
    assert wild.loss == tame.loss and wild.furthest == tame.furthest and wild.kl == tame.kl
    assert value_loss(row(1.0, 9.0), row(0.0, 3.0), row(2.0, 0.0), mask, clip=None)[0] == 0.5


def sample(answer: list[int], total: float, ended: bool, ref: float = -1.0) -> Sample:
    size = len(answer)
    return Sample(
        prompt=[5, 6],
        answer=answer,
        ended=ended,
        scores={"rule": total, "total": total},
        log_probs=np.full(size, -0.5, dtype=np.float32),
        reference=np.full(size, ref, dtype=np.float32),
        values=np.zeros(size, dtype=np.float32),
    )


def rolled() -> Rollout:
    return rollout([sample([9, 8, 1], 5.0, ended=True), sample([9], 1.0, ended=False)])


def test_the_score_stands_at_the_last_token_and_divergence_at_each() -> None:
    config = PPO(reward_clip=2.0, missing_eos_penalty=4.0, normalise_advantages=False, gae_lambda=0)
    taught = targets(config, rolled(), kl_coefficient=0.1)
    assert taught.scores.tolist() == [2.0, -3.0]  # clipped, and penalised after that
    # with lambda 0 and values 0 an advantage is the reward of its token
    assert taught.advantages[0].tolist() == pytest.approx([-0.05, -0.05, 1.95])
    assert taught.advantages[1].tolist() == pytest.approx([-3.05, 0, 0])
    k2 = config.model_copy(update={"kl_estimator": "k2"})
    assert targets(k2, rolled(), kl_coefficient=0.1).advantages[0, 0] == pytest.approx(-0.0125)


def test_advantages_are_normalised_over_the_whole_rollout() -> None:
    taught = targets(PPO(), rolled(), kl_coefficient=0.1)
    counted = taught.advantages[rolled().mask > 0]
    assert counted.mean() == pytest.approx(0, abs=1e-6)
    assert counted.std(correction=0) == pytest.approx(1, abs=1e-5)


def test_what_is_logged_of_a_rollout() -> None:
    found = describe(rolled(), targets(PPO(), rolled(), kl_coefficient=0.0))
    assert found["reward"] == found["reward/rule"] == 3
    assert found["kl"] == pytest.approx(1.0) and found["kl_per_token"] == pytest.approx(0.5)
    assert found["answer_tokens"] == 2 and found["eos_rate"] == 0.5
    assert found["length_reward_correlation"] == pytest.approx(1)


def test_any_split_sees_the_same_minibatches() -> None:
    def seen(micro: int, world_size: int) -> list[list[int]]:
        ranks = [Split(24, 8, micro, rank, world_size) for rank in range(world_size)]
        cuts = [list(each.minibatches(3, 2, 1)) for each in ranks]
        for minibatch in zip(*cuts, strict=True):
            mine = [place for _, micros in minibatch for rows in micros for place in rows]
            assert mine == list(minibatch[0][0])
            assert all(len(rows) == micro for _, micros in minibatch for rows in micros)
        return [list(whole) for whole, _ in cuts[0]]

    alone = seen(8, 1)
    assert sorted(place for whole in alone for place in whole) == list(range(24))
    assert seen(2, 1) == seen(4, 2) == seen(1, 4) == alone
    other = [list(whole) for whole, _ in Split(24, 8, 8, 0, 1).minibatches(3, 2, 0)]
    assert other != alone


def test_a_batch_is_no_wider_than_its_rows() -> None:
    cut = batch([([4, 5, 6], [7, 1]), ([8], [9])], torch.device("cpu"))
    assert cut.ids.tolist() == [[4, 5, 6, 7, 1], [8, 9, 0, 0, 0]]
    assert cut.before.tolist() == [[2, 3], [0, 0]]
    assert cut.mask.tolist() == [[1, 1], [1, 0]]


def test_prompts_come_in_full_rollouts() -> None:
    config = PPO(epochs=2, global_batch_size=4, minibatches=2, seed=1)
    order = prompt_order(10, config)
    assert len(order) == 24 and sorted(order[:10]) == list(range(10)) == sorted(order[10:20])
    assert order[20:].tolist() == order[:4].tolist()
    assert len(prompt_order(10, config.model_copy(update={"max_steps": 1}))) == 8
    assert len(prompt_order(1, config)) == 8  # one prompt is asked eight times


def test_the_learning_rate_rises_and_falls() -> None:
    config = PPO(warmup_fraction=0.2, schedule="linear")
    rates = [learning_rate(config, step, 10) for step in range(10)]
    assert rates[:3] == pytest.approx([1 / 3, 2 / 3, 1])
    assert all(a > b for a, b in pairwise(rates[2:])) and rates[-1] == pytest.approx(1 / 8)
    cosine = config.model_copy(update={"schedule": "cosine"})
    assert learning_rate(cosine, 6, 10) == pytest.approx(0.5)
    constant = PPO(warmup_fraction=0, schedule="constant")
    assert {learning_rate(constant, step, 10) for step in range(10)} == {1.0}


def test_tokens_are_drawn_as_often_as_they_are_likely() -> None:
    scores = torch.log(torch.tensor([0.5, 0.0, 0.3, 0.2]))
    drawn = torch.from_numpy(uniforms(0, 0, range(4000), 3))
    picked = Draw(drawn, start=2)(torch.zeros(4000, 3), scores.expand(4000, 4)).argmax(-1)
    shares = picked.bincount(minlength=4) / 4000
    assert shares[1] == 0
    assert shares.tolist() == pytest.approx([0.5, 0, 0.3, 0.2], abs=0.03)


def test_random_numbers_depend_on_seed_update_and_row_alone() -> None:
    whole = uniforms(5, 2, range(6), 4)
    assert np.array_equal(uniforms(5, 2, [4, 1], 4), whole[[4, 1]])
    assert not np.array_equal(uniforms(5, 3, range(6), 4), whole)
    assert not np.array_equal(uniforms(6, 2, range(6), 4), whole)


def test_an_answer_ends_with_the_first_stop_token() -> None:
    sampling = Sampling(1.0, 1.0, 4, stops=(1, 9), pad=1)
    assert _to_stop([4, 9, 1, 1], sampling) == Answer([4, 9], ended=True)
    assert _to_stop([1, 1, 1, 1], sampling) == Answer([1], ended=True)
    assert _to_stop([4, 5, 6, 7], sampling) == Answer([4, 5, 6, 7], ended=False)


@pytest.mark.parametrize(
    ("fields", "said"),
    [
        ({"method": {"kind": "dora"}}, "full or lora, not dora"),
        ({"method": {"kind": "lora", "dropout": 0.1}}, "dropout must be 0"),
        ({"liger_kernel": True}, "no liger_kernel"),
        ({"rewards": []}, "names no reward"),
        ({"critic_warmup": 5, "max_steps": 5}, "would learn in none of 5 updates"),
        ({"top_p": 0.0}, "greater than 0"),
        ({"kl": {"kind": "adaptive", "target": 0}}, "greater than 0"),
    ],
)
def test_settings_that_mean_nothing_are_refused(fields: dict, said: str) -> None:
    with pytest.raises(ValueError, match=said):
        PPO.model_validate(fields)


def test_dropout_that_no_trainer_of_preferences_or_rewards_uses_is_refused() -> None:
    dropped = {"method": {"kind": "lora", "dropout": 0.1}, "rewards": [{"function": "numeric"}]}
    for config in (PPO, GRPO, DPO, RewardModelling):
        told = {name: value for name, value in dropped.items() if name in config.model_fields}
        with pytest.raises(ValueError, match=r"method\.dropout must be 0: .* without dropout"):
            config.model_validate(told)
    assert SFT.model_validate({"method": dropped["method"]}).uses_dropout
