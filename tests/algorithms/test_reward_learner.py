"""The joint reward model: its loss and gradients, what is held out, and the reward that it becomes."""

from __future__ import annotations

import math
import random
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import Any, cast

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

from comlrl_lightning.agents.critic_settings import AdapterCritic, ModelCritic
from comlrl_lightning.agents.heads import CriticTeam
from comlrl_lightning.agents.reward_settings import JointRewardModel
from comlrl_lightning.agents.settings import LoraSettings, Separate
from comlrl_lightning.agents.team import AgentTeam
from comlrl_lightning.algorithms.reward_learner import LearnedReward, Moments, RewardLearner, build_reward_model
from comlrl_lightning.collaboration import TaggedSections
from comlrl_lightning.metrics import MetricTable
from comlrl_lightning.preferences.pairs import PreferencePair
from comlrl_lightning.rollouts.types import Completion, Prompt
from tests.agents.critics import head_of, said, state_at
from tests.agents.helpers import counting, model_of, shared_team, written
from tests.tiny_lm import tiny_gpt2, tiny_llama, tiny_tokenizer

KEYS = ("reward_model/loss", "reward_model/accuracy", "reward_model/held_out_accuracy")
SMALL = JointRewardModel(AdapterCritic(LoraSettings(rank=4)))


class PaperModel:
    """Scores the answers by a table of their texts, which is what is trained."""

    def __init__(self, scores: Mapping[str, float]) -> None:
        self.places = {text: place for place, text in enumerate(scores)}
        self.table = nn.Parameter(torch.tensor([*scores.values()], dtype=torch.float64))

    def values(self, samples: Sequence[Sequence[Completion]]) -> Tensor:
        return self.table[[self.places["".join(one.text for one in sample)] for sample in samples]].unsqueeze(1)

    def lengths(self, samples: Sequence[Sequence[Completion]]) -> list[int]:
        return [1] * len(samples)

    def parameter_groups(self) -> dict[str, dict[str, nn.Parameter]]:
        return {"reward_model": {"table": self.table}}


def on_paper(scores: Mapping[str, float], **settings: Any) -> RewardLearner:
    model = cast("CriticTeam", PaperModel(scores))
    return RewardLearner(model, JointRewardModel(**settings), 4096, MetricTable(KEYS))


def answer(text: str) -> tuple[Completion, ...]:
    return (Completion(0, "p", (), (), (), text, False),)


def preferred(winner: str, loser: str, item: int = 0) -> PreferencePair:
    return PreferencePair(item, answer(winner), answer(loser), 1.0, 0.0)


def table_of(learner: RewardLearner) -> nn.Parameter:
    return learner.parameter_groups()["reward_model"]["table"]


class TestOnPaper:
    def test_the_loss_and_its_gradient(self) -> None:
        # -log sigmoid(1.2 - .4) = .371101, and sigmoid(.8) - 1 = -.310026.
        learner = on_paper({"a": 1.2, "b": 0.4})
        stats = learner.new_stats()
        (loss,) = learner.losses([preferred("a", "b")], stats)
        assert float(loss) == pytest.approx(0.371101, abs=1e-6)
        loss.backward()  # type: ignore[no-untyped-call]
        gradient = table_of(learner).grad
        assert gradient is not None
        assert gradient.tolist() == pytest.approx([-0.310026, 0.310026], abs=1e-6)

    def test_centering(self) -> None:
        # .01 * (1.2 + .4)^2 = .0256, and its slope .02 * 1.6 = .032 on both sides.
        learner = on_paper({"a": 1.2, "b": 0.4}, centering_coef=0.01)
        (loss,) = learner.losses([preferred("a", "b")], learner.new_stats())
        assert float(loss) == pytest.approx(0.371101 + 0.0256, abs=1e-6)
        loss.backward()  # type: ignore[no-untyped-call]
        gradient = table_of(learner).grad
        assert gradient is not None
        assert gradient.tolist() == pytest.approx([-0.278026, 0.342026], abs=1e-6)

    def test_losses_are_summed_and_metrics_averaged(self) -> None:
        # Pairs (0, 0): log 2, half right. (1, 0): log(1 + e^-1), right. (0, 1): log(1 + e), wrong.
        learner = on_paper({"a": 0.0, "b": 0.0, "c": 1.0})
        pairs = [preferred("a", "b"), preferred("c", "a"), preferred("b", "c")]
        expected = math.log(2) + math.log1p(math.exp(-1)) + math.log1p(math.exp(1))
        stats = learner.new_stats()
        assert float(sum(learner.losses(pairs, stats))) == pytest.approx(expected)
        stats.record(learner.table, 3)
        logged = learner.table.pop()
        assert logged == {
            "reward_model/loss": pytest.approx(expected / 3),
            "reward_model/accuracy": pytest.approx(0.5),
        }

    def test_steps_count_by_their_pairs(self) -> None:
        learner = on_paper({"a": 0.0, "b": 1.0})
        for pairs in ([preferred("b", "a")] * 3, [preferred("a", "b")], []):
            stats = learner.new_stats()
            list(learner.losses(pairs, stats))
            stats.record(learner.table, len(pairs))
        assert learner.table.pop()["reward_model/accuracy"] == pytest.approx(0.75)

    def test_nothing_to_learn_from(self) -> None:
        learner = on_paper({"a": 0.0})
        assert list(learner.losses([], learner.new_stats())) == []
        assert learner.active_groups([]) == set()
        assert learner.active_groups([preferred("a", "a")]) == {"reward_model"}
        assert math.isnan(learner.accuracy([]))
        learner.record_held_out([])
        assert learner.table.pop() == {}
        assert learner.scores([]).shape == (0,)
        assert learner.moments([]) == Moments(0.0, 1.0)

    def test_accuracy(self) -> None:
        learner = on_paper({"a": 0.0, "b": 0.0, "c": 1.0})
        pairs = [preferred("c", "a"), preferred("c", "b"), preferred("b", "c"), preferred("a", "b")]
        assert learner.accuracy(pairs) == pytest.approx(2.5 / 4)
        learner.record_held_out(pairs)
        assert learner.table.pop() == {"reward_model/held_out_accuracy": pytest.approx(0.625)}

    def test_moments_are_those_of_both_sides_of_all_pairs(self) -> None:
        # 5, 1, 5, 3: mean 3.5, squared distances 2.25 + 6.25 + 2.25 + .25 = 11, over 4.
        learner = on_paper({"a": 5.0, "b": 1.0, "c": 3.0})
        pairs = [preferred("a", "b"), preferred("a", "c")]
        assert learner.moments(pairs) == pytest.approx((3.5, math.sqrt(2.75)))
        assert on_paper({"a": 5.0, "b": 1.0, "c": 3.0}, standardize=False).moments(pairs) == Moments(0.0, 1.0)

    def test_equal_scores_are_centered_alone(self) -> None:
        pairs = [preferred("a", "b")]
        assert on_paper({"a": 5.0, "b": 5.0}).moments(pairs) == Moments(5.0, 1.0)
        assert on_paper({"a": 5.0, "b": 5.0 + 1e-7}).moments(pairs).scale == 1.0
        assert on_paper({"a": 5.0, "b": 5.0 + 1e-3}).moments(pairs).scale == pytest.approx(5e-4)

    def test_reset(self) -> None:
        learner = on_paper({"a": 1.0, "b": 2.0})
        table = table_of(learner)
        optimizer = torch.optim.Adam([table], 0.5)
        (loss,) = learner.losses([preferred("a", "b")], learner.new_stats())
        loss.backward()  # type: ignore[no-untyped-call]
        optimizer.step()
        assert table.tolist() != [1.0, 2.0]
        assert table in optimizer.state
        learner.reset(optimizer)
        assert table.tolist() == [1.0, 2.0]
        assert table not in optimizer.state
        with torch.no_grad():
            table.add_(1.0)
        learner.reset()
        assert table.tolist() == [1.0, 2.0]

    def test_going_on_from_the_last_round(self) -> None:
        learner = on_paper({"a": 1.0}, fresh_each_round=False)
        with torch.no_grad():
            table_of(learner).add_(1.0)
        learner.reset()
        assert table_of(learner).tolist() == [2.0]


class TestSplit:
    def items(self, pairs: Sequence[PreferencePair]) -> list[int]:
        return [pair.item_index for pair in pairs]

    def test_all_pairs_of_an_item_are_on_one_side(self) -> None:
        pairs = [preferred("a", "b", item) for _ in range(3) for item in range(200)]
        fitted, held_out = on_paper({"a": 0.0}, held_out_share=0.25).split(pairs, seed=3)
        assert not {*self.items(fitted)} & {*self.items(held_out)}
        assert len(fitted) + len(held_out) == 600
        # Binomial, 200 items at 1/4: 50 and a standard deviation of 6.1.
        assert 30 < len({*self.items(held_out)}) < 70
        order = self.items(pairs)
        assert [item for item in order if item in {*self.items(held_out)}] == self.items(held_out)

    def test_a_side_is_the_items_own(self) -> None:
        learner = on_paper({"a": 0.0}, held_out_share=0.5)
        pairs = [preferred("a", "b", item) for item in range(40)]
        _, held_out = learner.split(pairs, seed=1)
        _, of_half = learner.split(pairs[:20], seed=1)
        assert self.items(of_half) == [item for item in self.items(held_out) if item < 20]
        assert self.items(learner.split(pairs, seed=2)[1]) != self.items(held_out)

    @pytest.mark.parametrize("share", [1e-9, 1 - 1e-9])
    def test_both_sides_have_an_item_if_there_are_two(self, share: float) -> None:
        pairs = [preferred("a", "b", item) for item in (4, 9, 4)]
        fitted, held_out = on_paper({"a": 0.0}, held_out_share=share).split(pairs, seed=0)
        assert sorted([{*self.items(fitted)}, {*self.items(held_out)}], key=min) == [{4}, {9}]

    @pytest.mark.parametrize("share", [0.0, 1 - 1e-9])
    def test_a_single_item_is_fitted(self, share: float) -> None:
        pairs = [preferred("a", "b", 7)] * 2
        assert on_paper({"a": 0.0}, held_out_share=share).split(pairs, seed=0) == (pairs, [])
        assert on_paper({"a": 0.0}, held_out_share=share).split([], seed=0) == ([], [])

    def test_nothing_is_held_out_if_nothing_should_be(self) -> None:
        pairs = [preferred("a", "b", item) for item in range(5)]
        assert on_paper({"a": 0.0}, held_out_share=0).split(pairs, seed=0) == (pairs, [])


def learner_of(
    team: AgentTeam, settings: JointRewardModel = SMALL, tokens: int = 4096, noise: float = 0.3
) -> RewardLearner:
    """A reward model that has moved away from its start."""
    learner = RewardLearner(build_reward_model(settings, team), settings, tokens, MetricTable(KEYS))
    generator = torch.Generator().manual_seed(1)
    with torch.no_grad():
        for parameter in learner.parameter_groups()["reward_model"].values():
            parameter.add_(noise * torch.randn(parameter.shape, generator=generator))
    return learner


def joint(team: AgentTeam, prompts: Sequence[Prompt], texts: Sequence[str]) -> tuple[Completion, ...]:
    return tuple(said(team, agent, *pair) for agent, pair in enumerate(zip(prompts, texts, strict=True)))


def talk(team: AgentTeam) -> list[PreferencePair]:
    """Three pairs of two agents, of different lengths; the last two share their winner's texts."""
    words = [
        (("hello", "a longer prompt"), ("yes", "no"), ("certainly not", "a")),
        (("hello", "b"), ("y", ""), ("n", "n")),
        (("hello", "b"), ("y", ""), ("nobody", "knows it")),
    ]
    return [
        PreferencePair(item, joint(team, prompts, winner), joint(team, prompts, loser), 1.0, 0.0)
        for item, (prompts, winner, loser) in enumerate(words)
    ]


def read_alone(learner: RewardLearner, sample: Sequence[Completion]) -> tuple[Tensor, Tensor]:
    """`[1, H]` state of the last token of what is read, without any padding, and `[]` its score."""
    text = "\n\n".join(
        [f"[Prompt of agent {one.agent}]\n{one.prompt}" for one in sample]
        + [f"[Completion of agent {one.agent}]\n{one.text}" for one in sample]
    )
    (body,) = learner.model.bodies
    ids = body.model.tokenizer(text).input_ids
    if body.model.adapters is None:
        state = state_at(body.model.causal, ids)
    else:
        with body.model.adapters.acting("reward_model"):
            state = state_at(body.model.causal, ids)
    return state, head_of(learner.model)(state)[0, 0]


def gradients(learner: RewardLearner, pairs: Sequence[PreferencePair]) -> list[Tensor]:
    parameters = [*learner.parameter_groups()["reward_model"].values()]
    for parameter in parameters:
        parameter.grad = None
    for loss in learner.losses(pairs, learner.new_stats()):
        loss.backward()  # type: ignore[no-untyped-call]
    return [parameter.grad if parameter.grad is not None else torch.zeros(()) for parameter in parameters]


def another_model() -> ModelCritic:
    return ModelCritic(tiny_gpt2(n_positions=512), tokenizer=tiny_tokenizer(reverse=True))


class TestGradients:
    @pytest.mark.parametrize("centering", [0.0, 0.1])
    @pytest.mark.parametrize("model", ["adapter", "another model"])
    def test_every_gradient_against_rows_read_one_by_one(self, model: str, centering: float) -> None:
        """Of the head 2 c (s_w + s_l)(h_w + h_l) - sigmoid(s_l - s_w)(h_w - h_l); below it by autograd."""
        team = shared_team()
        reader = AdapterCritic(LoraSettings(rank=4)) if model == "adapter" else another_model()
        learner = learner_of(team, JointRewardModel(reader, centering_coef=centering), noise=0.05)
        pairs, named = talk(team), learner.parameter_groups()["reward_model"]
        found = dict(zip(named, gradients(learner, pairs), strict=True))
        by_hand, total = torch.zeros(1, 32), torch.zeros(())
        for pair in pairs:
            (h_w, s_w), (h_l, s_l) = (read_alone(learner, side) for side in (pair.winner, pair.loser))
            slope = torch.sigmoid(s_l - s_w)
            by_hand = by_hand + (2 * centering * (s_w + s_l) * (h_w + h_l) - slope * (h_w - h_l)).detach()
            total = total + F.softplus(s_l - s_w) + centering * (s_w + s_l) ** 2
        torch.testing.assert_close(found["head.output.weight"], by_hand, rtol=1e-3, atol=1e-4)
        expected = torch.autograd.grad(total, [*named.values()])
        for (name, gradient), wanted in zip(found.items(), expected, strict=True):
            torch.testing.assert_close(gradient, wanted, rtol=1e-3, atol=1e-4, msg=name)
        assert all(gradient.abs().max() > 1e-6 for gradient in found.values()) or centering == 0

    def test_the_last_token_counts(self) -> None:
        team = shared_team()
        learner = learner_of(team)
        one, other = (joint(team, ("p", "q"), ("yes", last)) for last in ("no!", "no?"))
        scores = learner.scores([one, other])
        assert abs(float(scores[0] - scores[1])) > 1e-3

    @pytest.mark.parametrize("side", ["left", "right"])
    def test_padding_changes_no_score(self, side: str) -> None:
        team = shared_team()
        model_of(team).tokenizer.padding_side = side
        learner = learner_of(team)
        samples = [sample for pair in talk(team) for sample in (pair.winner, pair.loser)]
        with torch.no_grad():
            alone = torch.stack([read_alone(learner, sample)[1] for sample in samples]).double()
        scores = learner.scores(samples)
        assert scores.dtype == torch.float64
        assert not scores.requires_grad
        torch.testing.assert_close(scores, alone, rtol=1e-4, atol=1e-4)
        torch.testing.assert_close(learner.scores(samples[::-1]).flip(0), alone, rtol=1e-4, atol=1e-4)

    def test_micro_batches_change_no_score_and_no_gradient(self) -> None:
        team = shared_team()
        learner = learner_of(team, noise=0.05)
        pairs = talk(team)
        samples = [sample for pair in pairs for sample in (pair.winner, pair.loser)]
        results = []
        for tokens, sizes in ((4096, [5]), (1, [2, 2, 2])):
            learner.micro_batch_tokens = tokens
            with counting(model_of(team).causal.base_model) as calls:
                found = gradients(learner, pairs)
            # Whole pairs; a winner of two pairs of one batch is read once.
            assert [shape[0] for shape in calls] == sizes
            results.append([learner.scores(samples), *found])
        for one, other in zip(*results, strict=True):
            torch.testing.assert_close(one, other, rtol=1e-3, atol=1e-4)

    def test_a_batch_stays_within_the_budget(self) -> None:
        team = shared_team()
        learner = learner_of(team)
        pairs = talk(team)
        lengths = [max(learner.model.lengths([pair.winner, pair.loser])) for pair in pairs]
        # Room for two pairs of the longest kind, not for three.
        learner.micro_batch_tokens = 4 * max(lengths)
        with counting(model_of(team).causal.base_model) as calls:
            list(learner.losses(pairs, learner.new_stats()))
        assert len(calls) == 2
        assert all(rows * width <= 4 * max(lengths) for rows, width in calls)

    def test_agents_stay_what_they_are(self) -> None:
        team, rows = shared_team(), written(0, [0, 1])
        learner = learner_of(team)
        before = team.log_probs(rows, temperature=1.0).log_probs.detach()
        assert all(gradient.any() for gradient in gradients(learner, talk(team))[:-1])
        torch.optim.SGD(learner.parameter_groups()["reward_model"].values(), 1.0).step()
        assert torch.equal(team.log_probs(rows, temperature=1.0).log_probs, before)
        assert all(one.grad is None for agent in range(2) for one in team.agent_parameters(agent).values())

    def test_it_starts_without_a_preference(self) -> None:
        team = shared_team()
        learner = RewardLearner(build_reward_model(SMALL, team), SMALL, 4096, MetricTable(KEYS))
        assert learner.accuracy(talk(team)) == 0.5

    def test_reset_of_an_adapter(self) -> None:
        team = shared_team()
        learner = learner_of(team)
        learner.reset()
        weights = learner.parameter_groups()["reward_model"]
        assert not weights["head.output.weight"].any()
        assert not learner.scores([pair.winner for pair in talk(team)]).any()


class TestLearnedReward:
    def test_it_is_the_standardized_score_of_what_was_sampled(self) -> None:
        team = shared_team()
        learner = learner_of(team)
        chat: list[dict[str, str]] = [{"role": "user", "content": "hi"}]
        samples = [joint(team, (chat, "b"), texts) for texts in (("yes", "no"), ("x", ""), ("maybe", "so"))]
        reward = LearnedReward(learner, Moments(2.0, 4.0)).checked(2)
        texts = [[sample[agent].text for sample in samples] for agent in range(2)]
        values = reward(texts, item={"prompt": "unread"}, prompts=[chat, "b"], turn=1)
        torch.testing.assert_close(torch.tensor(values).double(), (learner.scores(samples) - 2) / 4)
        assert (reward.per_agent, reward.part_names, reward.pop_parts()) == (False, (), {})
        again = reward.of_trajectories(False, several_turns=False)
        assert again(texts, item={}, prompts=[chat, "b"], turn=1) == values

    def test_standardized_scores_of_the_pairs(self) -> None:
        team = shared_team()
        learner = learner_of(team)
        pairs = talk(team)
        reward = LearnedReward(learner, learner.moments(pairs))
        values = [
            value
            for pair in pairs
            for side in (pair.winner, pair.loser)
            for value in reward(*([one.text] for one in side), prompts=[one.prompt for one in side])
        ]
        assert sum(values) / 6 == pytest.approx(0.0, abs=1e-5)
        assert sum(value**2 for value in values) / 6 == pytest.approx(1.0, abs=1e-5)

    def test_a_model_that_writes_all_answers(self) -> None:
        # One completion of one agent holds both answers; what is read are the merged prompt and both.
        team, sections = shared_team(num_agents=1), TaggedSections()
        settings = JointRewardModel(AdapterCritic(LoraSettings(rank=4)))
        model = build_reward_model(settings, team)
        learner = RewardLearner(model, settings, 4096, MetricTable(KEYS), sections, num_agents=2)
        with torch.no_grad():
            head_of(model).output.weight.fill_(1.0)
        merged = sections.build_prompt(["one", "two"])
        text = "so: <agent_1>no</agent_1> and <agent_0> yes </agent_0>"
        sample = (Completion(0, merged, (), (), (), text, False),)
        expected = Completion(0, f"{merged}\n\n[Completion of agent 0]\nyes", (), (), (), "", False)
        tokenizer = model_of(team).tokenizer
        read = f"[Prompt of agent 0]\n{expected.prompt}\n\n[Completion of agent 1]\nno"
        (adapters,) = [body.model.adapters for body in model.bodies]
        assert adapters is not None
        with torch.no_grad(), adapters.acting("reward_model"):
            by_hand = state_at(model_of(team).causal, tokenizer(read).input_ids).sum()
        assert float(learner.scores([sample])) == pytest.approx(float(by_hand), rel=1e-4, abs=1e-3)
        (value,) = LearnedReward(learner).checked(2)([["yes"], ["no"]], item={}, prompts=["one", "two"], turn=1)
        assert value == pytest.approx(float(learner.scores([sample])))
        pair = PreferencePair(0, sample, (replace(sample[0], text="nothing"),), 1.0, 0.0)
        assert learner.moments([pair]).scale > 0
        (loss,) = learner.losses([pair], learner.new_stats())
        assert math.isfinite(float(loss))


def test_agents_that_train_all_weights_need_another_model() -> None:
    team = AgentTeam.build(Separate([tiny_llama(), tiny_llama(1)], tokenizers=[tiny_tokenizer(), tiny_tokenizer()]))
    with pytest.raises(ValueError, match=r"JointRewardModel\(model=AdapterCritic\(\)\) needs a frozen model under it"):
        build_reward_model(JointRewardModel(), team)
    learner = learner_of(team, JointRewardModel(another_model()))
    assert learner.scores([pair.winner for pair in talk(team)]).shape == (3,)


def separable(team: AgentTeam, num_items: int) -> list[PreferencePair]:
    """The better answers hold more of the letter a, of both agents together."""
    words = random.Random(0)

    def answers(num_a: int) -> list[str]:
        letters = list("a" * num_a + "b" * (8 - num_a))
        words.shuffle(letters)
        return ["".join(letters[:4]), "".join(letters[4:])]

    def prompts() -> list[str]:
        return ["".join(words.choices("xyz", k=words.randint(1, 6))) for _ in range(2)]

    pairs = []
    for item in range(num_items):
        asked = prompts()
        sides = (joint(team, asked, answers(words.randint(5, 7))), joint(team, asked, answers(words.randint(1, 3))))
        pairs.append(PreferencePair(item, *sides, 1.0, 0.0))
    return pairs


@pytest.mark.parametrize(
    "make", [lambda: SMALL.model, another_model], ids=["adapter on the agents' base", "another model"]
)
def test_it_learns_what_can_be_told_apart(make: Callable[[], AdapterCritic | ModelCritic]) -> None:
    """Accuracy on items that it was not fitted to."""
    team = shared_team()
    settings = JointRewardModel(make(), held_out_share=0.3)
    learner = RewardLearner(build_reward_model(settings, team), settings, 16_384, MetricTable(KEYS))
    fitted, held_out = learner.split(separable(team, 64), seed=0)
    assert len(held_out) >= 12
    assert learner.accuracy(held_out) == 0.5
    optimizer = torch.optim.Adam(learner.parameter_groups()["reward_model"].values(), 3e-3)
    for _ in range(25):
        optimizer.zero_grad()
        for loss in learner.losses(fitted, learner.new_stats()):
            (loss / len(fitted)).backward()
        optimizer.step()
    assert learner.accuracy(held_out) > 0.8
