"""Mistakes that show before any weight is loaded, and those that a trainer brings along."""

from __future__ import annotations

import warnings
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch.optim.lr_scheduler import CosineAnnealingLR, LinearLR, ReduceLROnPlateau, SequentialLR

from comlrl_lightning.agents.settings import Sampling, SharedBase
from comlrl_lightning.algorithms import (
    IAC,
    MAAC,
    MAGRPO,
    MAREINFORCE,
    MARLOO,
    POLICY_GRADIENT_ALGORITHMS,
    CooperativeModule,
    MAReMax,
)
from comlrl_lightning.algorithms.checks import learning_rates
from comlrl_lightning.data.datamodule import TaskDataModule
from tests.algorithms.support import ITEMS, fit, make_module, make_trainer, uneven_reward, weights

UNLOADED = SharedBase("not/loaded", num_agents=2)


def construct(algorithm: type[CooperativeModule] = MAGRPO, **settings: Any) -> CooperativeModule:
    return make_module(algorithm, settings.pop("agents", UNLOADED), **settings)


def lone_argument(first: list[str]) -> list[float]:
    return [0.0] * len(first)


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"agents": "a/name"}, r"agents='a/name' is not .* Give SharedBase\(...\) or Separate\(...\)"),
        ({"sampling": {"temperature": 1.0}}, r"sampling={'temperature': 1.0} is not .* Give Sampling\(...\)"),
        ({"eval_sampling": 0.5}, r"eval_sampling=0.5 is not .* Give Sampling\(...\)"),
        ({"num_generations": 0}, r"num_generations=0 is out of range"),
        ({"num_generations": 2.5}, r"num_generations=2.5 is out of range. Use a whole number of at least 1"),
        ({"num_generations": True}, r"num_generations=True is out of range"),
        ({"seed": -1}, r"seed=-1 is out of range. Use a whole number of at least 0"),
        ({"seed": 1.5}, r"seed=1.5 is out of range"),
        ({"early_termination_threshold": "0.5"}, r"early_termination_threshold='0.5' is out of range"),
        ({"early_termination_threshold": float("nan")}, r"early_termination_threshold=nan .* Use a finite number"),
        ({"discount": "all"}, r"discount='all' is out of range"),
        ({"num_turns": 0}, r"num_turns=0 is out of range"),
        ({"joint_mode": "paired"}, r"joint_mode='paired' is unknown. Use one of 'aligned', 'cross'"),
        ({"discount": 1.5}, r"discount=1.5 is out of range. Use a number from 0 to 1"),
        ({"discount": -0.1}, r"discount=-0.1 is out of range"),
        ({"max_nodes": 0}, r"max_nodes=0 is out of range"),
        ({"sampling": Sampling(temperature=0)}, r"sampling.temperature=0 samples greedily.*0 in eval_sampling"),
        ({"reference_kl_coef": -1.0}, r"reference_kl_coef=-1.0 is out of range. Use a number of at least 0"),
        ({"reference_kl_coef": float("nan")}, r"reference_kl_coef=nan is out of range"),
        ({"entropy_coef": -0.1}, r"entropy_coef=-0.1 is out of range"),
        ({"clip_epsilon": 0.0}, r"clip_epsilon=0.0 is out of range. Use a number above 0"),
        ({"clip_epsilon": 1.0}, r"clip_epsilon=1.0 is out of range. Use a number below 1"),
        ({"clip_epsilon": 0.2, "clip_epsilon_high": -0.2}, r"clip_epsilon_high=-0.2 is out of range"),
        ({"clip_epsilon_high": 0.2}, r"clip_epsilon_high=0.2 needs clip_epsilon. Give both"),
        ({"clip_epsilon": 0.2, "dual_clip": 1.0}, r"dual_clip=1.0 is out of range. Use a number above 1"),
        ({"dual_clip": 3.0}, r"dual_clip=3.0 needs clip_epsilon. Give both"),
        ({"loss_aggregation": "mean"}, r"loss_aggregation='mean' is unknown. Use one of 'sum', 'constant', 'sequ"),
        ({"importance_level": "word"}, r"importance_level='word' is unknown. Use one of 'token', 'sequence'"),
        (
            {"advantage_normalization": "turn"},
            r"advantage_normalization='turn' is unknown. Use one of 'group', 'batch'",
        ),
        ({"advantage_normalization": True}, r"advantage_normalization=True is unknown"),
        ({"advantage_normalization": 0}, r"advantage_normalization=0 is unknown"),
        ({"max_nodes": None}, r"max_nodes=None is out of range"),
        ({"reference_kl_coef": None}, r"reference_kl_coef=None is out of range"),
        ({"entropy_coef": None}, r"entropy_coef=None is out of range"),
        ({"logging_steps": None}, r"logging_steps=None is out of range"),
        ({"external_prompt_passthrough": "no"}, r"external_prompt_passthrough='no' is neither True nor False"),
        ({"rollout_buffer_size": 0}, r"rollout_buffer_size=0 is out of range. Use a whole number of at least 1"),
        ({"train_batch_size": 2.5}, r"train_batch_size=2.5 is out of range. Use a whole number"),
        ({"train_batch_size": 0}, r"train_batch_size=0 is out of range"),
        ({"num_inner_epochs": 0}, r"num_inner_epochs=0 is out of range"),
        ({"micro_batch_tokens": 0}, r"micro_batch_tokens=0 is out of range"),
        ({"logging_steps": 0}, r"logging_steps=0 is out of range"),
        ({"max_grad_norm": 0.0}, r"max_grad_norm=0.0 is out of range. Use a number above 0"),
        ({"on_nonfinite": "ignore"}, r"on_nonfinite='ignore' is unknown. Use one of 'raise', 'skip'"),
        ({"agent_learning_rate": [1e-4] * 3}, r"agent_learning_rate=\[.*\] has 3 entries for 2 agents"),
        ({"agent_learning_rate": "fast"}, r"agent_learning_rate='fast' is out of range"),
        ({"agent_learning_rate": -1.0}, r"agent_learning_rate=-1.0 is out of range"),
        ({"agent_learning_rate": [1e-4, float("inf")]}, r"agent_learning_rate=inf is out of range"),
        ({"optimizer": partial(torch.optim.AdamW, lr=0.5)}, r"optimizer sets lr=0.5.*agent_learning_rate"),
        ({"optimizer": 0.001}, r"optimizer=0.001 is not callable. Give a class or a function"),
        ({"lr_scheduler": 0.5}, r"lr_scheduler=0.5 is not callable"),
        ({"optimizer": lambda groups: groups}, r"optimizer=.* returns list. Return a torch.optim.Optimizer"),
        ({"lr_scheduler": ReduceLROnPlateau}, r"ReduceLROnPlateau, which waits for a metric"),
        ({"num_turns": 2, "external_transition": None}, r"num_turns=2 needs prompts .* Give external_transition"),
        ({"reward_func": lone_argument}, r"reward_func=.*lone_argument cannot be called with 2 lists"),
        ({"reward_func": "no.such.module"}, r"reward_func='no.such.module' cannot be imported"),
        ({"reward_processor": 3}, r"reward_processor=3 is not callable"),
        ({"formatters": [str]}, r"formatters=.* does not fit 2 agents"),
        ({"external_transition": lambda answers: ["", ""], "num_turns": 2}, r"external_transition=.* cannot be called"),
    ],
)
def test_a_wrong_argument_is_named(settings: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        construct(**settings)


class MatricesOnly(torch.optim.SGD):
    """An optimizer of the kind of Muon."""

    def __init__(self, params: Any, lr: float = 1e-3) -> None:
        super().__init__(params, lr=lr)
        if any(parameter.ndim != 2 for group in self.param_groups for parameter in group["params"]):
            raise ValueError("matrices only")


def test_an_optimizer_for_matrices_trains_adapters() -> None:
    module = make_module(MAGRPO, optimizer=MatricesOnly, agent_learning_rate=0.1)
    module.configure_model()
    before = weights(module, 0)
    fit(module, ITEMS[:1])
    assert any(not torch.equal(value, before[name]) for name, value in weights(module, 0).items())


class TestAdapterFolders:
    @pytest.fixture
    def agents(self, tmp_path: Path) -> SharedBase:
        """Two agents with the adapters that a centralized team saves: one."""
        (tmp_path / "agent_0").mkdir()
        return SharedBase("not/loaded", num_agents=2, adapters=str(tmp_path))

    def test_a_missing_one_is_named_before_anything_loads(self, agents: SharedBase) -> None:
        with pytest.raises(ValueError, match=r"SharedBase\(adapters='.*'\) holds no folder 'agent_1'. Give the folder"):
            construct(agents=agents)

    def test_one_model_that_answers_for_all_needs_one(self, agents: SharedBase, tmp_path: Path) -> None:
        module = construct(agents=agents, collaboration="centralized")
        assert module.team_settings == SharedBase("not/loaded", 1, adapters=[str(tmp_path / "agent_0")])
        assert module.num_agents == 2


class TestGroups:
    @pytest.mark.parametrize("algorithm", [MAGRPO, MARLOO, MAReMax])
    def test_a_group_of_one_has_nothing_to_compare(self, algorithm: type[CooperativeModule]) -> None:
        with pytest.raises(
            ValueError, match=rf"{algorithm.__name__}\(num_generations=1\) compares a completion with it"
        ):
            construct(algorithm, num_generations=1)

    def test_reinforce_needs_no_group(self) -> None:
        assert construct(MAREINFORCE, num_generations=1).shape.num_generations == 1

    def test_reinforce_refuses_group_normalization(self) -> None:
        with pytest.raises(ValueError, match=r"MAREINFORCE\(advantage_normalization='group'\) has no baseline"):
            construct(MAREINFORCE, advantage_normalization="group")


class TestTree:
    def test_a_tree_that_grows_too_large_is_refused_at_once(self) -> None:
        # 1 + 4^3 + 4^6 = 4161 nodes.
        settings: dict[str, Any] = {"num_generations": 4, "num_turns": 3, "joint_mode": "cross"}
        agents = SharedBase("not/loaded", num_agents=3)
        with pytest.raises(ValueError, match=r"grows to 4161 nodes per task item, above max_nodes=4096"):
            construct(agents=agents, **settings)
        assert construct(agents=agents, max_nodes=4161, **settings).max_nodes == 4161

    def test_aligned_trees_stay_small(self) -> None:
        assert construct(agents=SharedBase("not/loaded", num_agents=3), num_generations=4, num_turns=3)


class TestCutSampling:
    @pytest.mark.parametrize("sampling", [Sampling(top_p=0.9), Sampling(top_k=50), Sampling(min_new_tokens=1)])
    def test_it_is_biased(self, sampling: Sampling) -> None:
        with pytest.warns(UserWarning, match="constant positive advantage then pushes the kept tokens up"):
            construct(sampling=sampling)

    def test_and_refused_without_a_baseline(self) -> None:
        with pytest.raises(ValueError, match=r"MAREINFORCE: sampling with top_p=0.9.* or use an algorithm with"):
            construct(MAREINFORCE, sampling=Sampling(top_p=0.9))

    def test_what_a_cut_distribution_does(self) -> None:
        # pi = (.5, .3, .2), the nucleus of .7 keeps (.5, .3), hence draws with (.625, .375, 0). A constant advantage
        # of 1 pushes the logits by E[one-hot - pi] = (.125, .075, -.2), though all choices earn the same, and the
        # entropy falls.
        pi = torch.tensor([0.5, 0.3, 0.2], dtype=torch.float64)
        drawn = torch.tensor([0.625, 0.375, 0.0], dtype=torch.float64)
        logits = pi.log().requires_grad_()
        torch.autograd.backward((drawn * logits.log_softmax(0)).sum())
        assert logits.grad is not None
        torch.testing.assert_close(logits.grad, torch.tensor([0.125, 0.075, -0.2], dtype=torch.float64))
        pushed = (logits.detach() + 0.1 * logits.grad).softmax(0)
        assert -(pushed * pushed.log()).sum() < -(pi * pi.log()).sum()

    def test_evaluation_may_cut(self) -> None:
        with warnings.catch_warnings():
            warnings.simplefilter("error")
            construct(MAREINFORCE, eval_sampling=Sampling(top_p=0.9, temperature=0))


class TestAccepted:
    @pytest.mark.parametrize("algorithm", POLICY_GRADIENT_ALGORITHMS)
    def test_the_issue_at_hand_is_enough(self, algorithm: type[CooperativeModule]) -> None:
        module = algorithm(agents=UNLOADED, reward_func=uneven_reward)
        assert module.num_agents == 2
        assert module.shape.num_generations == 4

    def test_the_seed_alone_repeats_the_first_weights(self) -> None:
        state = torch.get_rng_state()
        first, again, other = (make_module(MAGRPO, seed=seed) for seed in (1, 1, 2))
        for module in (first, again, other):
            torch.manual_seed(module.seed + 7)
            module.configure_model()
        torch.set_rng_state(state)
        pairs = zip(weights(first, 0).values(), weights(again, 0).values(), weights(other, 0).values(), strict=True)
        same = [(torch.equal(one, two), torch.equal(one, three)) for one, two, three in pairs]
        assert all(equal for equal, _ in same)
        assert not all(equal for _, equal in same)

    def test_nothing_is_loaded_at_construction(self) -> None:
        assert list(construct().parameters()) == []

    def test_defaults_of_the_normalization(self) -> None:
        defaults = {
            algorithm: construct(algorithm).hparams["advantage_normalization"]
            for algorithm in POLICY_GRADIENT_ALGORITHMS
        }
        groups: dict[Any, Any] = {MAREINFORCE: False, MAGRPO: "group", MARLOO: "group", MAReMax: "group"}
        assert defaults == {**groups, IAC: "batch", MAAC: "batch"}

    def test_functions_may_be_import_paths(self) -> None:
        module = construct(reward_func="tests.algorithms.support.uneven_reward", num_turns=2)
        reward = module.task_functions.reward
        assert reward([["a"], ["b"]], item={}, prompts=("", ""), turn=1) == uneven_reward(["a"], ["b"])


class TestSchedules:
    def test_one_with_its_own_learning_rates_is_refused(self) -> None:
        with pytest.raises(ValueError, match=r"OneCycleLR, which brings learning rates of its own .*LambdaLR"):
            construct(lr_scheduler=partial(torch.optim.lr_scheduler.OneCycleLR, max_lr=0.1, total_steps=10))

    def test_a_factory_must_return_one(self) -> None:
        with pytest.raises(ValueError, match=r"lr_scheduler=.* returns NoneType. Return a schedule"):
            construct(lr_scheduler=lambda optimizer: None)

    def test_what_a_checkpoint_says_about_schedules(self) -> None:
        def warm(optimizer: torch.optim.Optimizer) -> torch.optim.lr_scheduler.LRScheduler:
            parts = [LinearLR(optimizer, 0.1, total_iters=2), CosineAnnealingLR(optimizer, T_max=5)]
            return SequentialLR(optimizer, parts, milestones=[2])

        schedule = construct(lr_scheduler=warm).optimization["lr_scheduler"]
        assert schedule["class"] == "torch.optim.lr_scheduler.SequentialLR"
        assert schedule["_milestones"] == [2]
        assert schedule["schedules"] == [
            {"start_factor": 0.1, "end_factor": 1.0, "total_iters": 2},
            {"T_max": 5, "eta_min": 0.0},
        ]


def test_learning_rates_are_builtin_floats() -> None:
    assert [type(rate) for rate in learning_rates([np.float64(0.1), 1], 2)] == [float, float]


class TestTrainerFlags:
    def test_gradient_clipping(self) -> None:
        with pytest.raises(ValueError, match=r"gradient_clip_val=1.0.* use max_grad_norm"):
            fit(construct(), gradient_clip_val=1.0)

    def test_accumulation(self) -> None:
        with pytest.raises(ValueError, match=r"accumulate_grad_batches=2.*rollout_buffer_size"):
            fit(construct(), accumulate_grad_batches=2)

    @pytest.mark.parametrize("run", ["fit", "validate", "predict"])
    def test_a_compiled_module(self, run: str) -> None:
        module, trainer, data = make_module(MAGRPO), make_trainer(), TaskDataModule(ITEMS[:1], ITEMS[:1])
        runs: dict[str, Any] = {"fit": trainer.fit, "validate": trainer.validate, "predict": trainer.predict}
        compiled: Any = torch.compile(module)
        with pytest.raises(ValueError, match=r"torch.compile\(module\) would .*\. Pass the module itself\.$"):
            runs[run](compiled, datamodule=data)
        runs[run](module, datamodule=data)
        assert module.env_step == (2 if run == "fit" else 0)

    def test_half_precision_with_a_scaler(self) -> None:
        module = make_module(MAGRPO)
        with pytest.raises(ValueError, match=r"precision='16-true'.* Use 'bf16-mixed' or '32-true'"):
            fit(module, precision="16-true")
