"""Settings of MADPO and MARLHF: what is refused, what a checkpoint keeps, and what may change when a run goes on."""

from __future__ import annotations

import warnings
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from comlrl_lightning.agents.settings import LoraSettings, Sampling, SharedBase
from comlrl_lightning.algorithms import MADPO, MARLHF, PREFERENCE_ALGORITHMS, PreferenceModule
from comlrl_lightning.algorithms.methods import ActorCritic, CriticFree
from comlrl_lightning.critics.reward_settings import JointRewardModel
from comlrl_lightning.critics.settings import AdapterCritic, ModelCritic
from comlrl_lightning.data.datamodule import TaskDataModule
from comlrl_lightning.environment.joint_format import TaggedSections
from comlrl_lightning.preferences.comparators import (
    APIComparator,
    Comparator,
    CurrentPolicy,
    FixedModel,
    FrozenCopy,
    HistoryPolicy,
)
from comlrl_lightning.preferences.replay import AllHistory, CurrentRound, LambdaDecay, NearestK, Replay
from comlrl_lightning.utilities.plain import to_plain
from tests.algorithms.preferences import MAKERS, direct, indirect, same, trained
from tests.algorithms.support import ITEMS, LORA, fit, make_trainer, tiny_agents, tiny_model, uneven_reward
from tests.tiny_lm import save_tiny, tiny_tokenizer

UNLOADED = SharedBase("not/loaded", num_agents=2)


def construct(algorithm: type[PreferenceModule], **settings: Any) -> PreferenceModule:
    return algorithm(settings.pop("agents", UNLOADED), reward_func=uneven_reward, **settings)


@pytest.mark.parametrize("algorithm", PREFERENCE_ALGORITHMS)
@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"num_candidates": 1}, r"num_candidates=1 is out of range. Use a whole number of at least 2"),
        ({"num_candidates": 0, "comparator": CurrentPolicy()}, r"num_candidates=0 .* of at least 1"),
        ({"num_candidates": 2.5}, r"num_candidates=2.5 is out of range"),
        ({"num_candidates": True}, r"num_candidates=True is out of range"),
        ({"pair_selection": "best"}, r"pair_selection='best' is unknown. Use one of .*'disjoint'.*, or None"),
        ({"pair_selection": "comparator_reward"}, r"pair_selection='comparator_reward' needs a comparator"),
        (
            {"pair_selection": "disjoint", "comparator": CurrentPolicy()},
            r"pair_selection='disjoint' pairs .* with each",
        ),
        ({"pair_selection": "all", "num_pairs_per_item": 2}, r"num_pairs_per_item=2 contradicts pair_selection='all'"),
        ({"num_pairs_per_item": 0}, r"num_pairs_per_item=0 is out of range. Use a whole number from 1, or None"),
        ({"num_pairs_per_item": 1.5}, r"num_pairs_per_item=1.5 is out of range"),
        ({"comparator": "me"}, r"comparator='me' is no comparator. Use CurrentPolicy\("),
        ({"comparator": HistoryPolicy}, r"comparator=.*HistoryPolicy.* is no comparator"),
        (
            {"comparator_num_candidates": 0, "comparator": CurrentPolicy()},
            r"comparator_num_candidates=0 is out of range",
        ),
        ({"comparator_num_candidates": 4}, r"comparator_num_candidates=4 needs a comparator, and comparator=None"),
        ({"replay": "all"}, r"replay='all' is no replay. Use CurrentRound\("),
        ({"replay": None}, r"replay=None is no replay"),
        ({"learning_epochs": 0}, r"learning_epochs=0 is out of range. Use a whole number of at least 1"),
        ({"learning_epochs": 1.0}, r"learning_epochs=1.0 is out of range"),
        ({"sampling": Sampling(temperature=0)}, r"sampling.temperature=0 samples greedily"),
        ({"train_batch_size": 0}, r"train_batch_size=0 is out of range"),
        ({"collaboration": "together"}, r"collaboration='together' is unknown"),
    ],
)
def test_a_wrong_argument_is_named(algorithm: type[PreferenceModule], settings: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        construct(algorithm, **settings)


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"beta": 0}, r"beta=0 is out of range. Use a number above 0"),
        ({"beta": -0.1}, r"beta=-0.1 is out of range"),
        ({"beta": float("nan")}, r"beta=nan is out of range"),
        ({"loss_type": "hinge"}, r"loss_type='hinge' is unknown. Use 'sigmoid' or 'ipo'"),
        ({"label_smoothing": 0.5}, r"label_smoothing=0.5 is out of range. Use a number from 0 to below 0.5"),
        ({"nll_coef": -1.0}, r"nll_coef=-1.0 is out of range"),
        ({"beta": None}, r"beta=None is out of range"),
        ({"reference_free": 1}, r"reference_free=1 is neither True nor False"),
        ({"length_normalized": "yes"}, r"length_normalized='yes' is neither True nor False"),
    ],
)
def test_a_wrong_argument_of_madpo_is_named(settings: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        construct(MADPO, **settings)


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"reward_model": AdapterCritic()}, r"reward_model=AdapterCritic.* is not .* Give JointRewardModel\(...\)"),
        ({"reward_model": None}, r"reward_model=None is not a setting of that kind"),
        ({"policy": "PPO"}, r"policy='PPO' is unknown. Use one of 'MAREINFORCE', .*'MAAC', CriticFree\(...\)"),
        ({"policy": MADPO}, r"policy=<class .*MADPO'> is unknown"),
        ({"preference_scoring": "both"}, r"preference_scoring='both' is unknown. Use one of 'task', 'reward_model'"),
        ({"num_generations": 1}, r"MAGRPO\(num_generations=1\) compares a completion with itself"),
        (
            {"policy": "MAREINFORCE", "reward_model": JointRewardModel(standardize=False)},
            r"policy='MAREINFORCE' has no baseline, .* Use standardize=True",
        ),
        ({"policy": "MAREINFORCE", "sampling": Sampling(top_p=0.9)}, r"MAREINFORCE: sampling with top_p=0.9"),
        ({"policy": CriticFree(joint_mode="cross"), "max_nodes": 0}, r"max_nodes=0 is out of range"),
    ],
)
def test_a_wrong_argument_of_marlhf_is_named(settings: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        construct(MARLHF, **settings)


@pytest.mark.parametrize(
    ("setting", "owner"), [("joint_mode", "CriticFree or MAGRPO"), ("critic_type", "ActorCritic or IAC or MAAC")]
)
def test_settings_of_the_policy_are_those_of_its_class(setting: str, owner: str) -> None:
    with pytest.raises(TypeError, match=rf"MARLHF\({setting}=...\) has no such setting. It is one of {owner}"):
        construct(MARLHF, **{setting: "q"})


@pytest.mark.parametrize("algorithm", PREFERENCE_ALGORITHMS)
@pytest.mark.parametrize(
    "setting",
    [
        "num_turns",
        "discount",
        "early_termination_threshold",
        "external_transition",
        "external_prompt_passthrough",
    ],
)
def test_there_is_one_turn(algorithm: type[PreferenceModule], setting: str) -> None:
    message = rf"{algorithm.__name__}\({setting}=...\) has no such setting. It is one of IAC or MAAC or MAGRPO"
    with pytest.raises(TypeError, match=message):
        construct(algorithm, **{setting: 1})


@pytest.mark.parametrize(
    "setting",
    [
        "num_generations",
        "max_nodes",
        "reference_kl_coef",
        "rollout_buffer_size",
        "num_inner_epochs",
        "clip_epsilon",
        "clip_epsilon_high",
        "dual_clip",
        "importance_level",
        "loss_aggregation",
        "entropy_coef",
    ],
)
def test_madpo_has_no_policy_gradient(setting: str) -> None:
    with pytest.raises(TypeError, match=rf"MADPO\({setting}=...\) has no such setting. It is one of .*MARLHF"):
        construct(MADPO, **{setting: 1})


def test_agents_with_all_weights_need_a_reward_model_of_their_own() -> None:
    module = indirect(agents=tiny_agents("full"))
    with pytest.raises(ValueError, match=r"JointRewardModel\(model=AdapterCritic\(\)\) needs a frozen model"):
        module.configure_model()


class TestDefaults:
    @pytest.mark.parametrize("algorithm", PREFERENCE_ALGORITHMS)
    def test_the_pairs(self, algorithm: type[PreferenceModule]) -> None:
        assert construct(algorithm).resolved_selection == "disjoint"
        assert construct(algorithm, comparator=CurrentPolicy()).resolved_selection == "comparator_reward"
        module = construct(algorithm, num_candidates=3, comparator=CurrentPolicy())
        assert module.comparator_shape.num_generations == 3
        assert construct(algorithm).candidate_shape.num_generations == 8

    def test_nothing_is_loaded_at_construction(self) -> None:
        comparator = FixedModel(SharedBase("not/loaded", num_agents=2))
        for algorithm in PREFERENCE_ALGORITHMS:
            assert list(construct(algorithm, comparator=comparator).parameters()) == []


@pytest.fixture(scope="module")
def base(tmp_path_factory: pytest.TempPathFactory) -> str:
    return save_tiny(tmp_path_factory.mktemp("base"), tiny_model())


def comparators(base: str) -> list[Comparator | None]:
    agents = SharedBase(base, num_agents=2, lora=LORA)
    return [
        None,
        CurrentPolicy(),
        HistoryPolicy(2),
        FrozenCopy(),
        FixedModel(agents, sampling=Sampling(max_new_tokens=3)),
        FixedModel(replace(agents, num_agents=1), generation=TaggedSections("role_{i}")),
        APIComparator("openai", "judge", "http://localhost:1/v1", api_key_env="NO_KEY", generation="centralized"),
    ]


REPLAYS: tuple[Replay, ...] = (
    CurrentRound(),
    NearestK(2, sample_size=5),
    AllHistory(weigh_by_size=True),
    LambdaDecay(0.5),
)


class TestCheckpoints:
    @pytest.mark.parametrize("make", MAKERS)
    @pytest.mark.parametrize("index", range(7))
    def test_every_comparator_and_replay_comes_back(
        self, make: Callable[..., PreferenceModule], index: int, base: str, tmp_path: Path
    ) -> None:
        agents = SharedBase(base, num_agents=2, lora=LORA)
        module = make(agents=agents, comparator=comparators(base)[index], replay=REPLAYS[index % 4])
        assert is_plain(dict(module.hparams))
        trainer = make_trainer()
        trainer.validate(module, TaskDataModule(ITEMS, ITEMS[:1]), verbose=False)
        trainer.save_checkpoint(tmp_path / "run.ckpt")
        torch.load(tmp_path / "run.ckpt", weights_only=True)
        with warnings.catch_warnings():
            warnings.filterwarnings("error", message="Found keys")
            loaded = type(module).load_from_checkpoint(tmp_path / "run.ckpt")
        assert loaded.hparams == module.hparams
        assert loaded.agents == agents
        assert to_plain(loaded.comparator) == to_plain(module.comparator)
        assert type(loaded.comparator) is type(module.comparator)
        assert loaded.replay == module.replay
        assert same(trained(loaded), trained(module))

    @pytest.mark.parametrize("make", MAKERS)
    def test_a_trained_run_holds_adapters_and_heads_only(
        self, make: Callable[..., PreferenceModule], base: str, tmp_path: Path
    ) -> None:
        agents = SharedBase(base, num_agents=2, lora=LORA)
        module = make(agents=agents, comparator=FixedModel(agents))
        trainer = fit(module, ITEMS[:2], 1, max_epochs=module.epochs_per_round)
        trainer.save_checkpoint(tmp_path / "run.ckpt")
        state = torch.load(tmp_path / "run.ckpt", weights_only=True)["state_dict"]
        assert state
        assert all("lora_" in name or name.startswith("reward_network.heads") for name in state)
        assert not any("comparator" in name for name in state)
        loaded = type(module).load_from_checkpoint(tmp_path / "run.ckpt")
        assert same(trained(loaded), trained(module))

    def test_settings_of_others_are_no_hyperparameters(self) -> None:
        # They would come back as arguments, which the constructors refuse.
        assert not {"num_turns", "discount", "num_generations", "clip_epsilon"} & set(construct(MADPO).hparams)
        assert {"num_generations", "clip_epsilon"} <= set(construct(MARLHF).hparams)
        assert "num_turns" not in construct(MARLHF).hparams
        assert "num_turns" not in construct(MARLHF).hparams_initial

    def test_policies_come_back(self) -> None:
        for policy in ("MAAC", CriticFree("MARLOO", joint_mode="cross"), ActorCritic("IAC", gae_lambda=0.5)):
            module = construct(MARLHF, policy=policy)
            again = MARLHF(**module.hparams)
            assert again.method == module.method
            assert again.reward_model == module.reward_model
            assert again.hparams == module.hparams


def is_plain(value: Any) -> bool:
    if isinstance(value, dict):
        return all(isinstance(key, str) and is_plain(entry) for key, entry in value.items())
    if isinstance(value, list):
        return all(map(is_plain, value))
    return value is None or type(value) in (bool, int, float, str)


@pytest.fixture(scope="module")
def paths(tmp_path_factory: pytest.TempPathFactory) -> dict[Any, Path]:
    """Checkpoints of a collecting epoch."""
    paths = {}
    for make in MAKERS:
        paths[make] = tmp_path_factory.mktemp("runs") / "run.ckpt"
        with pytest.warns(UserWarning, match="ends inside a round"):
            fit(make(comparator=HistoryPolicy(1)), ITEMS[:1], 1).save_checkpoint(paths[make])
    return paths


@pytest.mark.filterwarnings("ignore:Trainer\\(max_epochs=1\\) ends inside a round")
class TestGoingOn:
    def resume(self, module: PreferenceModule, path: Path) -> PreferenceModule:
        trainer = make_trainer(max_epochs=module.epochs_per_round)
        trainer.fit(module, TaskDataModule(ITEMS[:1]), ckpt_path=path)
        return module

    @pytest.mark.parametrize("make", MAKERS)
    @pytest.mark.parametrize(
        ("settings", "message"),
        [
            ({"num_candidates": 3}, r"^num_candidates=3 differs from the checkpoint's num_candidates=4"),
            ({"pair_selection": "random"}, r"^pair_selection='random' differs .* pair_selection=None"),
            ({"num_pairs_per_item": 2}, r"^num_pairs_per_item=2 differs"),
            ({"comparator": HistoryPolicy(2)}, r"^comparator.rounds_back=2 differs .* comparator.rounds_back=1"),
            ({"comparator": None}, r"^comparator=None differs .* comparator=\{.*HistoryPolicy"),
            ({"comparator": CurrentPolicy()}, r"^comparator.*CurrentPolicy.* differs .*HistoryPolicy"),
            (
                {"comparator_num_candidates": 4},
                r"^comparator_num_candidates=4 differs .* comparator_num_candidates=None",
            ),
            ({"replay": AllHistory()}, r"^replay.*AllHistory.* differs .*CurrentRound"),
            ({"learning_epochs": 2}, r"^learning_epochs=2 differs"),
            ({"collaboration": "centralized"}, r"^collaboration='centralized' differs"),
            ({"seed": 9}, r"^seed=9 differs"),
        ],
    )
    def test_another_run_is_refused_by_name(
        self, make: Callable[..., PreferenceModule], settings: dict[str, Any], message: str, paths: dict[Any, Path]
    ) -> None:
        with pytest.raises(ValueError, match=message):
            self.resume(make(**{"comparator": HistoryPolicy(1), **settings}), paths[make])

    @pytest.mark.parametrize(
        ("settings", "message"),
        [
            ({"beta": 0.2}, r"^beta=0.2 differs from the checkpoint's beta=0.1: going on would mix two runs"),
            ({"reference_free": False}, r"^reference_free=False differs"),
            ({"length_normalized": True}, r"^length_normalized=True differs"),
        ],
    )
    def test_of_madpo_too(self, settings: dict[str, Any], message: str, paths: dict[Any, Path]) -> None:
        with pytest.raises(ValueError, match=message):
            self.resume(direct(comparator=HistoryPolicy(1), **settings), paths[direct])

    @pytest.mark.parametrize(
        ("settings", "message"),
        [
            ({"policy": "MARLOO"}, r"^policy='MARLOO' differs from the checkpoint's policy='MAGRPO'"),
            ({"policy": "MAAC"}, r"^policy='MAAC' differs"),
            ({"preference_scoring": "reward_model"}, r"^preference_scoring='reward_model' differs"),
            ({"num_generations": 3}, r"^num_generations=3 differs"),
            (
                {"reward_model": JointRewardModel(learning_rate=0.01, num_epochs=2)},
                r"^reward_model.num_epochs=2 differs from the checkpoint's reward_model.num_epochs=1",
            ),
        ],
    )
    def test_and_of_marlhf(self, settings: dict[str, Any], message: str, paths: dict[Any, Path]) -> None:
        with pytest.raises(ValueError, match=message):
            self.resume(indirect(comparator=HistoryPolicy(1), **settings), paths[indirect])

    def test_another_algorithm_is_refused(self, paths: dict[Any, Path]) -> None:
        with pytest.raises(ValueError, match="algorithm='MARLHF' differs from the checkpoint's algorithm='MADPO'"):
            self.resume(indirect(comparator=HistoryPolicy(1)), paths[direct])

    def test_a_new_learning_rate_is_welcome(self, paths: dict[Any, Path]) -> None:
        module = self.resume(direct(comparator=HistoryPolicy(1), agent_learning_rate=0.5), paths[direct])
        assert module.update_step == 1

    def test_what_costs_memory_or_time_may_change(self, base: str, tmp_path: Path) -> None:
        def module(checkpointing: bool) -> PreferenceModule:
            model = ModelCritic(base, lora=LoraSettings(rank=2), gradient_checkpointing=checkpointing)
            fixed = FixedModel(SharedBase(base, 2, gradient_checkpointing=checkpointing))
            return indirect(reward_model=JointRewardModel(model), comparator=fixed)

        fit(module(False), ITEMS[:1], 1).save_checkpoint(tmp_path / "run.ckpt")
        assert self.resume(module(True), tmp_path / "run.ckpt").update_step > 0

    def test_so_may_the_way_to_a_server(self, tmp_path: Path) -> None:
        # Whoever ran out of patience goes on with more of it.
        def module(**settings: Any) -> PreferenceModule:
            return direct(comparator=APIComparator("openai", **{"model": "judge", "api_key_env": "A", **settings}))

        trainer = make_trainer()
        trainer.validate(module(), TaskDataModule(ITEMS, ITEMS[:1]), verbose=False)
        trainer.save_checkpoint(tmp_path / "run.ckpt")
        state = torch.load(tmp_path / "run.ckpt", weights_only=True)
        patient = module(max_retries=9, timeout_seconds=120.0, max_concurrency=1, api_key_env="B")
        patient.trainer = make_trainer()
        patient.trainer.state.fn = "fit"  # type: ignore[assignment]
        patient.configure_model()
        patient.on_load_checkpoint(state)
        other = module(model="jury")
        other.trainer = patient.trainer
        with pytest.raises(ValueError, match=r"^comparator.model='jury' differs from .* comparator.model='judge'"):
            other.on_load_checkpoint(state)


def test_a_loaded_comparator_must_be_passed_again(tmp_path: Path) -> None:
    fixed = FixedModel(SharedBase(tiny_model(), num_agents=2, tokenizer=tiny_tokenizer()))
    fit(direct(comparator=fixed), ITEMS[:1], 1, max_epochs=2).save_checkpoint(tmp_path / "run.ckpt")
    with pytest.raises(ValueError, match=r"comparator was <.* Pass comparator= to load it"):
        MADPO.load_from_checkpoint(tmp_path / "run.ckpt", agents=tiny_agents())
    loaded = MADPO.load_from_checkpoint(tmp_path / "run.ckpt", agents=tiny_agents(), comparator=fixed)
    assert loaded.comparator is fixed
