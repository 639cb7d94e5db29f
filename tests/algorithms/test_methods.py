"""How policies learn from rewards, as settings of their own: the defaults and checks of the algorithms' classes."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, cast, get_args

import pytest

from comlrl_lightning.agents.settings import LoraSettings, Sampling
from comlrl_lightning.algorithms import IAC, MAAC, MAGRPO, MAREINFORCE, MARLOO, CooperativeModule, MAReMax
from comlrl_lightning.algorithms.methods import (
    BASELINES,
    ActorCritic,
    ActorCriticName,
    CriticFree,
    CriticFreeName,
    policy_method,
)
from comlrl_lightning.critics.settings import AdapterCritic, ModelCritic, ValueHead
from comlrl_lightning.rollouts.collect import RolloutShape

CRITIC_FREE: dict[CriticFreeName, type[CooperativeModule]] = {
    "MAREINFORCE": MAREINFORCE,
    "MAGRPO": MAGRPO,
    "MARLOO": MARLOO,
    "MAReMax": MAReMax,
}
ACTOR_CRITIC: dict[ActorCriticName, type[CooperativeModule]] = {"IAC": IAC, "MAAC": MAAC}
SHAPE = RolloutShape(num_generations=4)


def test_every_algorithm_has_a_method() -> None:
    assert set(CRITIC_FREE) == set(get_args(CriticFreeName)) == set(BASELINES)
    assert set(ACTOR_CRITIC) == set(get_args(ActorCriticName))


def test_no_baseline_no_groups() -> None:
    normalized = {name: CriticFree(name, advantage_normalization=None).advantage_normalization for name in CRITIC_FREE}
    assert normalized == {"MAREINFORCE": False, "MAGRPO": "group", "MARLOO": "group", "MAReMax": "group"}
    assert CriticFree("MAREINFORCE", advantage_normalization="batch").advantage_normalization == "batch"
    assert CriticFree("MAGRPO", advantage_normalization=False).advantage_normalization is False


def test_the_plain_defaults() -> None:
    assert CriticFree() == CriticFree("MAGRPO") == policy_method("MAGRPO")
    assert ActorCritic() == ActorCritic("MAAC") == policy_method("MAAC")
    method = CriticFree("MARLOO", joint_mode="cross")
    assert policy_method(method) is method


def test_shapes() -> None:
    shape = CriticFree(joint_mode="cross").method_shape(SHAPE)
    assert shape == RolloutShape(num_generations=4, joint_mode="cross")
    shape = ActorCritic().method_shape(SHAPE)
    assert shape == RolloutShape(num_generations=4, trajectories=True)


@pytest.mark.parametrize(
    ("method", "groups", "rates"),
    [
        (CriticFree(), [], []),
        (ActorCritic("MAAC"), ["critic"], [1e-4]),
        (ActorCritic("IAC"), ["critic_0", "critic_1", "critic_2"], [1e-4] * 3),
        (ActorCritic("MAAC", critic=ModelCritic("a")), ["critic"], [5e-6]),
        (ActorCritic("MAAC", critic=ModelCritic("a", lora=LoraSettings())), ["critic"], [1e-4]),
        (
            ActorCritic("IAC", critic=ModelCritic("a"), critic_learning_rate=0.0),
            ["critic_0", "critic_1", "critic_2"],
            [0.0] * 3,
        ),
    ],
)
def test_groups_of_critics(method: CriticFree | ActorCritic, groups: list[str], rates: list[float]) -> None:
    assert method.critic_groups(3) == groups
    assert method.critic_rates(3) == rates


@pytest.mark.parametrize(
    ("build", "settings", "message"),
    [
        (
            CriticFree,
            {"algorithm": "PPO"},
            r"algorithm='PPO' is unknown. Use one of 'MAREINFORCE', .*'MAReMax'",
        ),
        (CriticFree, {"algorithm": "MAAC"}, r"algorithm='MAAC' is unknown"),
        (CriticFree, {"advantage_normalization": "std"}, r"advantage_normalization='std' is unknown"),
        (CriticFree, {"advantage_normalization": True}, r"advantage_normalization=True is unknown"),
        (
            CriticFree,
            {"algorithm": "MAREINFORCE", "advantage_normalization": "group"},
            r"MAREINFORCE\(advantage_normalization='group'\) has no baseline.* Use 'batch' or False",
        ),
        (ActorCritic, {"algorithm": "MAGRPO"}, r"algorithm='MAGRPO' is unknown. Use one of 'IAC', 'MAAC'\."),
        (ActorCritic, {"critic_type": "w"}, r"critic_type='w' is unknown"),
        (ActorCritic, {"gae_lambda": 1.5}, r"gae_lambda=1\.5 is out of range"),
        (ActorCritic, {"value_loss_coef": -1.0}, r"value_loss_coef=-1\.0 is out of range"),
        (ActorCritic, {"value_clip_range": 0.0}, r"value_clip_range=0\.0 is out of range"),
        (ActorCritic, {"critic_learning_rate": -0.1}, r"critic_learning_rate=-0\.1 is out of range"),
        (ActorCritic, {"advantage_normalization": "group"}, r"advantage_normalization='group' is unknown"),
        (policy_method, {"policy": "PPO"}, r"policy='PPO' is unknown. Use one of .*'IAC', 'MAAC', CriticFree\("),
        (policy_method, {"policy": None}, r"policy=None is unknown"),
    ],
)
def test_errors(build: Callable[..., Any], settings: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        build(**settings)


@pytest.mark.parametrize(
    ("method", "settings", "message"),
    [
        (
            CriticFree("MARLOO"),
            {"shape": RolloutShape(1)},
            r"MARLOO\(num_generations=1\) compares a completion with itself.* Use num_generations >= 2, or MAREINFORCE",
        ),
        (
            CriticFree("MAREINFORCE", advantage_normalization="batch"),
            {"shape": RolloutShape(1)},
            r"MAREINFORCE\(num_generations=1, advantage_normalization='batch'\) has no spread",
        ),
        (CriticFree("MAREINFORCE"), {"sampling": Sampling(top_p=0.9)}, r"MAREINFORCE: sampling with top_p=0\.9"),
        (
            CriticFree(joint_mode="cross"),
            {"shape": RolloutShape(4, 3), "max_nodes": 100},
            # Aligned: 1 + 4 + 16. Two turns: 1 + 16. K=3: 1 + 9 + 81.
            r"grows to 273 nodes per task item, above max_nodes=100\. Use joint_mode='aligned', num_turns=2,"
            r" num_generations=3, MAREINFORCE\(num_generations=1\), IAC or MAAC \(.*\) or a larger max_nodes\.$",
        ),
        (
            # 2^13 - 1 nodes: no smaller group is left but one of one.
            CriticFree(),
            {"shape": RolloutShape(2, 13)},
            r"joint_mode='aligned' grows to 8191 nodes .* Use num_turns=12, MAREINFORCE\(num_generations=1\), IAC or"
            r" MAAC \(.*\) or a larger max_nodes\.$",
        ),
        (
            CriticFree("MAREINFORCE"),
            {"shape": RolloutShape(2, 13)},
            r"Use num_turns=12, num_generations=1, IAC or MAAC \(.*\) or a larger max_nodes\.$",
        ),
        (
            CriticFree("MAREINFORCE", advantage_normalization="batch"),
            {"shape": RolloutShape(2, 3), "max_nodes": 2},
            r"Use num_turns=1 or a larger max_nodes\.$",
        ),
        (CriticFree(), {"shape": RolloutShape(4, 10_000)}, r"grows to over 10\*\*12 nodes per task item"),
        (
            # 40 * 3; 33 * 3 = 99.
            ActorCritic(),
            {"shape": RolloutShape(40, 3), "max_nodes": 100},
            r"num_generations=40 grows to 120 nodes per task item, .* Use num_turns=2, num_generations=33 or a larger",
        ),
        (CriticFree(joint_mode=cast("Any", "both")), {}, r"joint_mode='both' is unknown"),
        (ActorCritic(critic=cast("Any", "head")), {}, r"critic='head'"),
        (ActorCritic("MAAC", critic=ValueHead()), {}, r"critic=ValueHead"),
        (ActorCritic("IAC", critic=AdapterCritic(adapters=["a"])), {}, r"adapters"),
    ],
)
def test_what_does_not_go_together(method: CriticFree | ActorCritic, settings: dict[str, Any], message: str) -> None:
    given = {"shape": SHAPE, "sampling": Sampling(), "max_nodes": 4096, **settings}
    with pytest.raises(ValueError, match=message):
        method.check_method(method.method_shape(given["shape"]), 2, given["sampling"], given["max_nodes"])


def test_what_goes_together() -> None:
    CriticFree("MAREINFORCE").check_method(RolloutShape(1), 2, Sampling(), 4096)
    CriticFree("MAREINFORCE", advantage_normalization="batch").check_method(RolloutShape(2), 2, Sampling(), 4096)
    CriticFree("MARLOO").check_method(RolloutShape(2), 2, Sampling(), 4096)
    ActorCritic("IAC", critic=ValueHead()).check_method(
        ActorCritic().method_shape(RolloutShape(1)), 2, Sampling(), 4096
    )
    with pytest.warns(UserWarning, match=r"top_k=5"):
        CriticFree().check_method(SHAPE, 2, Sampling(top_k=5), 4096)
