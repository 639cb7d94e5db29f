"""A joint reward model on tiny language models: gradients, scores, and the reward that it becomes."""

from __future__ import annotations

import math
import random
from collections.abc import Callable, Sequence
from dataclasses import replace

import pytest
import torch
from torch import Tensor
from torch.nn import functional as F

from comlrl_lightning.agents.loading import build_team
from comlrl_lightning.agents.settings import LoraSettings, Separate
from comlrl_lightning.agents.team import AgentTeam
from comlrl_lightning.critics.reward_settings import JointRewardModel
from comlrl_lightning.critics.settings import AdapterCritic, ModelCritic
from comlrl_lightning.environment.joint_format import TaggedSections
from comlrl_lightning.learning.reward_model import LearnedReward, Moments, RewardLearner, build_reward_model
from comlrl_lightning.metrics import MetricTable
from comlrl_lightning.preferences.pairs import PreferencePair
from comlrl_lightning.types import Completion, Prompt
from tests.agents.critics import head_of, said, state_at
from tests.agents.helpers import counting, model_of, shared_team, written
from tests.algorithms.test_reward_learner import KEYS
from tests.tiny_lm import tiny_gpt2, tiny_llama, tiny_tokenizer

SMALL = JointRewardModel(AdapterCritic(LoraSettings(rank=4)))


@pytest.fixture(autouse=True)
def _seed() -> None:
    """PEFT draws new adapters from the global random state."""
    torch.manual_seed(0)


def learner_of(
    team: AgentTeam, settings: JointRewardModel = SMALL, tokens: int = 4096, noise: float = 0.3
) -> RewardLearner:
    """A reward model that has moved away from its start."""
    learner = RewardLearner(build_reward_model(settings, team, team.num_agents), settings, tokens, MetricTable(KEYS))
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
        assert by_hand.abs().max() > 1e-2
        # A constant cancels between the sides of a pair, unless scores are kept around 0.
        assert bool(found["head.output.bias"].abs().max() > 1e-6) == (centering > 0)

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
        found = zip(learner.parameter_groups()["reward_model"], gradients(learner, talk(team)), strict=True)
        assert all(gradient.any() for name, gradient in found if name != "head.output.bias")
        torch.optim.SGD(learner.parameter_groups()["reward_model"].values(), 1.0).step()
        assert torch.equal(team.log_probs(rows, temperature=1.0).log_probs, before)
        assert all(one.grad is None for agent in range(2) for one in team.agent_parameters(agent).values())

    def test_it_starts_without_a_preference(self) -> None:
        team = shared_team()
        learner = RewardLearner(build_reward_model(SMALL, team, team.num_agents), SMALL, 4096, MetricTable(KEYS))
        assert learner.accuracy(talk(team)) == 0.5

    def test_a_head_alone(self) -> None:
        learner = learner_of(shared_team(), replace(SMALL, freeze_backbone=True))
        assert [*learner.parameter_groups()["reward_model"]] == ["head.output.weight", "head.output.bias"]

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
        assert (reward.per_agent, reward.part_names) == (False, ())
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
        model = build_reward_model(settings, team, team.num_agents)
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
        assert math.isfinite(loss.item())


def test_agents_that_train_all_weights_need_another_model() -> None:
    team = build_team(Separate([tiny_llama(), tiny_llama(1)], tokenizers=[tiny_tokenizer(), tiny_tokenizer()]))
    with pytest.raises(ValueError, match=r"JointRewardModel\(model=AdapterCritic\(\)\) needs a frozen model under it"):
        build_reward_model(JointRewardModel(), team, team.num_agents)
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
    ("make", "rate"),
    [(lambda: SMALL.model, 1e-2), (another_model, 3e-3)],
    ids=["adapter on the agents' base", "another model"],
)
def test_it_learns_what_can_be_told_apart(make: Callable[[], AdapterCritic | ModelCritic], rate: float) -> None:
    """Accuracy on items that it was not fitted to."""
    team = shared_team()
    settings = JointRewardModel(make(), held_out_share=0.3)
    learner = RewardLearner(build_reward_model(settings, team, team.num_agents), settings, 16_384, MetricTable(KEYS))
    fitted, held_out = learner.split(separable(team, 80), seed=0)
    assert len(held_out) >= 20
    assert learner.accuracy(held_out) == 0.5
    optimizer = torch.optim.Adam(learner.parameter_groups()["reward_model"].values(), rate)
    for _ in range(25):
        optimizer.zero_grad()
        for loss in learner.losses(fitted, learner.new_stats()):
            (loss / len(fitted)).backward()  # type: ignore[no-untyped-call]
        optimizer.step()
    assert learner.accuracy(held_out) > 0.8
