"""Rounds of preferences at their edges: no pairs, a second fit, one model for all agents, gradients that break."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Literal

import pytest
import torch

from comlrl_lightning.agents.settings import SharedBase
from comlrl_lightning.algorithms import (
    MADPO,
    MAGRPO,
    MARLHF,
    CooperativeModule,
    PreferenceModule,
)
from comlrl_lightning.critics.reward_settings import JointRewardModel
from comlrl_lightning.critics.settings import AdapterCritic
from comlrl_lightning.data.datamodule import TaskDataModule
from comlrl_lightning.learning import preferences as preference_learner
from comlrl_lightning.learning import reward_model as reward_learner
from comlrl_lightning.preferences.comparators import HistoryPolicy
from comlrl_lightning.preferences.pairs import PreferencePair
from comlrl_lightning.preferences.replay import AllHistory
from comlrl_lightning.types import Prompt
from tests.algorithms.preferences import DEFAULTS, MAKERS, AtEnds, Rows, begun, direct, indirect, run, same, trained
from tests.algorithms.support import ITEMS, LORA, fit, make_trainer, tiny_agents, uneven_reward
from tests.tiny_lm import save_tiny, tiny_llama, tiny_tokenizer


def constant(*completions: list[str]) -> list[float]:
    return [0.5] * len(completions[0])


class ConstantFrom:
    """Uneven rewards, and equal ones from the n-th call on, from 1."""

    def __init__(self, call: int) -> None:
        self.calls_left = call

    def __call__(self, *completions: list[str]) -> list[float]:
        self.calls_left -= 1
        return uneven_reward(*completions) if self.calls_left > 0 else constant(*completions)


class FailAt:
    """Uneven rewards, and an error at the n-th call, from 1."""

    def __init__(self, call: int) -> None:
        self.calls_left = call

    def __call__(self, *completions: list[str]) -> list[float]:
        self.calls_left -= 1
        if self.calls_left == 0:
            raise RuntimeError("no reward today")
        return uneven_reward(*completions)


def test_what_a_stopped_collection_has_brought_does_not_count_twice() -> None:
    # Four calls in round 1; round 2 fails at its third item, and the same trainer begins that epoch again.
    module, data = direct(reward_func=FailAt(7)), TaskDataModule(ITEMS)
    trainer = make_trainer(max_epochs=2 * module.epochs_per_round)
    with pytest.raises(RuntimeError, match="no reward today"):
        trainer.fit(module, data)
    trainer.fit(module, data)
    assert module.last_round is not None
    assert module.last_round.number == 1
    indices = [pair.item_index for pair in module.last_round.pairs]
    # Four candidates make at most two pairs.
    assert all(indices.count(index) <= 2 for index in range(4))
    assert set(indices) == {0, 1, 2, 3}


class TestNoPairs:
    @pytest.mark.filterwarnings("ignore:Round . has no pair", "ignore:The last 10 optimizer steps had nothing to learn")
    @pytest.mark.parametrize("make", MAKERS)
    @pytest.mark.parametrize("num_rounds", [1, 2])
    def test_equal_rewards_change_nothing_and_warn(
        self, make: Callable[..., PreferenceModule], num_rounds: int
    ) -> None:
        module = make(reward_func=constant)
        start = begun(module)
        with pytest.warns(UserWarning, match=f"Round {num_rounds} has no pair to learn from: .* raise num_candidates"):
            rows = run(module, num_rounds)
        assert same(trained(module), start)
        assert module.update_step == 0
        # Four items of four candidates per round; nothing is asked for without a reward model.
        assert module.env_step == module.rounds.task_reward_scores == 16 * num_rounds
        assert [row["preference/pairs_per_item"] for row in rows.training] == [0.0] * 4 * num_rounds
        assert not any("reward_gap" in key or "loss" in key for row in rows.training for key in row)

    def test_a_later_round_keeps_the_reward_model(self) -> None:
        # Four calls for the candidates of round 1, all others are equal.
        module = indirect(reward_func=ConstantFrom(5))

        def look(module: MARLHF) -> Any:
            return trained(module, "reward_network"), trained(module, "team"), module.rounds.scale, module.update_step

        ends = AtEnds(look)
        with pytest.warns(UserWarning, match="Round 2 has no pair"):
            run(module, 2, [ends])
        (collected, fitted, learned, recollected, refitted, relearned) = ends.seen
        assert not same(fitted[0], collected[0])
        assert all(same(later[0], fitted[0]) for later in (learned, recollected, refitted, relearned))
        assert fitted[2] == relearned[2] != 1.0
        # What the round has nothing to say about, it leaves alone.
        assert same(relearned[1], refitted[1])
        assert relearned[3] == refitted[3]

    def test_old_pairs_are_learned_when_there_are_no_new_ones(self) -> None:
        module = direct(reward_func=ConstantFrom(5), replay=AllHistory())
        ends = AtEnds(trained)
        with warnings.catch_warnings():
            warnings.filterwarnings("error", message="Round .* has no pair")
            run(module, 2, [ends])
        _, _, recollected, relearned = ends.seen
        assert module.last_round is not None
        assert module.last_round.pairs == ()
        assert not same(relearned, recollected)


class TestEpochs:
    @pytest.mark.parametrize(("make", "per_round"), [(direct, 2), (indirect, 3)])
    def test_a_run_that_ends_inside_a_round_warns(self, make: Callable[..., PreferenceModule], per_round: int) -> None:
        wanted = rf"max_epochs={per_round + 1}\) ends inside a round of {per_round} epochs.*module.epochs_per_round"
        with pytest.warns(UserWarning, match=wanted):
            fit(make(), ITEMS[:1], 1, max_epochs=per_round + 1)

    def test_a_whole_number_of_rounds_does_not(self) -> None:
        with warnings.catch_warnings():
            warnings.filterwarnings("error", message=".*ends inside a round")
            fit(direct(), ITEMS[:1], 1, max_epochs=4)

    @pytest.mark.parametrize("batch_size", [3, None])
    def test_each_learning_epoch_is_one_pass_over_the_pairs(self, batch_size: int | None) -> None:
        module = direct(learning_epochs=2, train_batch_size=batch_size)
        taken: list[tuple[int, list[PreferencePair]]] = []
        step: Any = module.optimizer_step_on

        def noted(learner: Any, rows: list[PreferencePair]) -> None:
            taken.append((module.current_epoch, rows))
            step(learner, rows)

        module.optimizer_step_on = noted  # type: ignore[method-assign, assignment]
        run(module)
        pairs = module.rounds.pairs
        orders = [[pair for epoch, rows in taken if epoch == wanted for pair in rows] for wanted in (1, 2)]
        for order in orders:
            assert len(order) == len(pairs) == len(set(pairs))
            assert set(order) == set(pairs)
        assert orders[0] != orders[1]
        # Four items bring two pairs each: 8 pairs make mini-batches of 3, 3, 2, and shares are two each.
        sizes = [len(rows) for _, rows in taken]
        assert sizes == ([3, 3, 2] if batch_size else [2, 2, 2, 2]) * 2

    def test_a_round_has_as_many_epochs_as_were_asked_for(self) -> None:
        assert direct(learning_epochs=3).epochs_per_round == 4
        model = JointRewardModel(num_epochs=2)
        assert indirect(learning_epochs=3, reward_model=model).epochs_per_round == 6


class TestSecondFit:
    def test_it_begins_anew(self) -> None:
        # Without learning the same answers come again, and with them the same pairs and the same reward model.
        model = JointRewardModel(num_epochs=2, learning_rate=0.01)
        module = indirect(agent_learning_rate=0.0, replay=AllHistory(), reward_model=model)

        def look(module: MARLHF) -> Any:
            return trained(module, "reward_network"), [one.number for one in module.rounds.kept], module.rounds

        first = AtEnds(look)
        run(module, 2, [first])
        second = AtEnds(look)
        run(module, 2, [second])
        assert [numbers for _, numbers, _ in second.seen] == [[0], [0], [0], [0], [0, 1], [0, 1], [0, 1], [0, 1]]
        for (weights, _, rounds), (weights_again, _, rounds_again) in zip(first.seen, second.seen, strict=True):
            # Before round 1 fits it, the reward model is what the former run left.
            assert rounds.is_fitted == rounds_again.is_fitted
            assert not rounds.is_fitted or same(weights, weights_again)
            scores = rounds.task_reward_scores + module.rounds.task_reward_scores // 2
            assert rounds_again == replace(rounds, task_reward_scores=scores)

    @pytest.mark.parametrize("fresh", [True, False])
    def test_a_reward_model_starts_over_in_each_round_if_it_is_to(self, fresh: bool) -> None:
        def look(module: MARLHF) -> tuple[int, float]:
            """Optimizer steps so far, and those that Adam knows of for the head of the reward model."""
            optimizer = module.trainer.optimizers[0]
            head = module.reward_learner.parameter_groups()["reward_model"]["head.output.weight"]
            return module.update_step, float(optimizer.state[head].get("step", 0))

        model = JointRewardModel(num_epochs=2, learning_rate=0.01, fresh_each_round=fresh)
        ends = AtEnds(look)
        run(indirect(reward_model=model), 2, [ends])
        # Of each round: collect, fit, fit, learn.
        updates = [number for number, _ in ends.seen]
        first, second = updates[2] - updates[0], updates[6] - updates[4]
        known = 0 if fresh else first
        half = updates[5] - updates[4]
        assert [steps for _, steps in ends.seen[2:]] == [
            first,
            first,
            first,
            known + half,
            known + second,
            known + second,
        ]
        assert 0 < half < second

    @pytest.mark.parametrize("rounds_back", [0, 1])
    def test_a_comparator_forgets_the_former_run(self, rounds_back: int) -> None:
        comparator = HistoryPolicy(rounds_back)
        module = direct(comparator=comparator)
        run(module)
        now = trained(module)
        kept = AtEnds(lambda module: comparator.state_dict()["weights"])
        run(module, callbacks=[kept])
        weights = kept.seen[0][0]
        assert list(kept.seen[0]) == [0]
        assert all(any(torch.equal(value, other) for other in weights.values()) for value in now.values())


@pytest.fixture(scope="module")
def base(tmp_path_factory: pytest.TempPathFactory) -> str:
    return save_tiny(tmp_path_factory.mktemp("base"), tiny_llama(max_position_embeddings=1024))


class TestSaving:
    def test_the_reward_model_lies_beside_the_agents(self, base: str, tmp_path: Path) -> None:
        agents = SharedBase(base, num_agents=2, lora=LORA)
        module = indirect(agents=agents)
        run(module)
        module.save_agents(tmp_path)
        assert sorted(path.name for path in tmp_path.iterdir() if path.is_dir()) == [
            "agent_0",
            "agent_1",
            "reward_model",
        ]
        model = JointRewardModel(AdapterCritic(adapters=[str(tmp_path / "reward_model")]))
        again = indirect(agents=agents, reward_model=model)
        again.configure_model()
        assert module.last_round is not None
        pairs: tuple[PreferencePair, ...] = module.last_round.pairs
        winners = [pair.winner for pair in pairs]
        scores = module.reward_learner.scores(winners)
        assert len(set(scores.tolist())) > 1
        torch.testing.assert_close(again.reward_learner.scores(winners), scores)


@dataclass(frozen=True)
class Halves:
    """Half of a completion for each of two agents, where there are two characters."""

    def build_prompt(self, prompts: Sequence[Prompt]) -> Prompt:
        return " and ".join(map(str, prompts))

    def split_completion(self, text: str, num_agents: int) -> list[str] | None:
        return [text[: len(text) // 2], text[len(text) // 2 :]] if len(text) > 1 else None


class TestCentralized:
    @pytest.mark.parametrize(
        ("algorithm", "settings"),
        [
            (MAGRPO, {"num_generations": 4}),
            (MADPO, {"num_candidates": 4}),
            (MADPO, {"num_candidates": 4, "comparator": HistoryPolicy(1)}),
            (MARLHF, {"num_candidates": 4, "num_generations": 3}),
            (MARLHF, {"num_candidates": 4, "num_generations": 3, "policy": "MAAC"}),
        ],
    )
    def test_one_model_that_answers_for_all_learns(
        self, algorithm: type[CooperativeModule], settings: dict[str, Any]
    ) -> None:
        more = {name: DEFAULTS[name] for name in ("reward_func", "sampling", "agent_learning_rate", "seed")}
        module = algorithm(tiny_agents(), collaboration=Halves(), **{**more, **settings})
        module.configure_model()
        start = trained(module, "team")
        rows = Rows()
        epochs = module.epochs_per_round if isinstance(module, PreferenceModule) else 2
        fit(module, ITEMS[:2], 1, max_epochs=epochs, logger=rows)
        assert module.team.num_agents == 1
        assert not same(trained(module, "team"), start)
        shares = [row["unparsed_share"] for row in rows.training if "unparsed_share" in row]
        assert all(0 <= share <= 1 for share in shares)
        # Every step that samples logs it: all of MAGRPO's, MADPO's first epoch, MARLHF's first and last.
        assert len(shares) == (2 if algorithm is MADPO else 4)
        assert not any(key.startswith("agent_1/") for row in rows.training for key in row)

    def test_a_reward_model_without_room_for_all_answers_is_found_before_any_round(self) -> None:
        # Its headings take 99 bytes for three agents; for the one model that answers for them 60 would do.
        model = JointRewardModel(model=AdapterCritic(max_tokens=60))
        module = indirect(agents=tiny_agents(num_agents=3), collaboration=Halves(), reward_model=model)
        with pytest.raises(ValueError, match=r"can read 60 tokens, but .* leaves no room for the answers of 3 agents"):
            module.configure_model()

    @pytest.mark.parametrize("algorithm", [MAGRPO, MADPO, MARLHF])
    def test_a_model_without_any_tag_says_so(self, algorithm: type[CooperativeModule]) -> None:
        agents = SharedBase(tiny_llama(max_position_embeddings=1024).double(), 2, lora=LORA, tokenizer=tiny_tokenizer())
        module = algorithm(
            agents, collaboration="centralized", reward_func=uneven_reward, sampling=DEFAULTS["sampling"]
        )
        rows = Rows()
        with warnings.catch_warnings():
            warnings.filterwarnings("ignore", message="Round . has no pair|The last 10 optimizer steps had nothing")
            fit(module, ITEMS[:2], 1, max_epochs=6, logger=rows)
        shares = {row["unparsed_share"] for row in rows.training if "unparsed_share" in row}
        assert shares == {1.0}


class TestNonfinite:
    @staticmethod
    def broken(make: Callable[..., PreferenceModule], on_nonfinite: Literal["raise", "skip"]) -> PreferenceModule:
        module = make(on_nonfinite=on_nonfinite)
        module.configure_model()
        learner: Any = module.preference_learner if isinstance(module, MADPO) else vars(module)["reward_learner"]
        losses = learner.losses
        learner.losses = lambda pairs, stats: (loss * float("nan") for loss in losses(pairs, stats))
        return module

    @pytest.mark.parametrize(("make", "group"), [(direct, "agent_0"), (indirect, "reward_model")])
    def test_it_stops_the_run(self, make: Callable[..., PreferenceModule], group: str) -> None:
        module = self.broken(make, "raise")
        with pytest.raises(ValueError, match=f"The gradient of {group} is not finite at env_step 16.*on_nonfinite"):
            run(module)

    @pytest.mark.parametrize(("make", "part"), [(direct, ""), (indirect, "reward_network")])
    def test_or_leaves_the_update_out(self, make: Callable[..., PreferenceModule], part: str) -> None:
        module = self.broken(make, "skip")
        start = trained(module, part)
        rows = Rows()
        with pytest.warns(UserWarning, match="An update was left out"):
            fit(module, ITEMS, 1, max_epochs=module.epochs_per_round, logger=rows)
        assert same(trained(module, part), start)
        assert module.update_step == 0
        assert next(row["nonfinite_updates"] for row in rows.training if "nonfinite_updates" in row) == 1.0


class TestNonfiniteLoss:
    """An infinite constant beside a loss has no gradient."""

    @pytest.fixture(autouse=True)
    def _endless(self, monkeypatch: pytest.MonkeyPatch) -> None:
        for where, name in ((preference_learner, "joint_preference_loss"), (reward_learner, "bradley_terry_loss")):
            loss = vars(where)[name]
            monkeypatch.setattr(where, name, lambda *args, loss=loss, **how: loss(*args, **how) + float("inf"))

    @pytest.mark.parametrize(("make", "name"), [(direct, "the pairs"), (indirect, "reward_model")])
    def test_it_stops_the_run(self, make: Callable[..., PreferenceModule], name: str) -> None:
        with pytest.raises(ValueError, match=f"The loss of {name} is not finite at env_step 16.*on_nonfinite"):
            run(make())

    @pytest.mark.filterwarnings("ignore:Trainer\\(max_epochs=2\\) ends inside a round")
    @pytest.mark.parametrize(("make", "name"), [(direct, "the pairs"), (indirect, "reward_model")])
    def test_or_leaves_the_update_out(self, make: Callable[..., PreferenceModule], name: str) -> None:
        module = make(on_nonfinite="skip")
        start = begun(module)
        with pytest.warns(UserWarning, match=f"An update was left out: the losses of {name} are not finite"):
            fit(module, ITEMS, 1, max_epochs=2)
        assert module.update_step == 0
        assert same(trained(module), start)


class Stream:
    """The items without a length."""

    def __iter__(self) -> Any:
        return iter(ITEMS)


@pytest.mark.parametrize("make", MAKERS)
def test_a_stream_is_as_good_as_a_list(make: Callable[..., PreferenceModule]) -> None:
    modules = []
    for items in (ITEMS, Stream()):
        module, rows = make(comparator=HistoryPolicy(1)), Rows()
        make_trainer(max_epochs=2 * module.epochs_per_round, logger=rows).fit(module, TaskDataModule(items))
        modules.append((module, rows.training))
    (module, rows_of_list), (other, rows_of_stream) = modules
    assert rows_of_list == rows_of_stream
    assert module.rounds == other.rounds
    assert same(trained(module), trained(other))
