"""Episodes in environments, where some agents act at a time, against a slow version that plays one after the other."""

from __future__ import annotations

import functools
import math
import statistics
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, ClassVar

import numpy as np
import pytest
import torch

from comlrl_lightning import SharedBase, Task
from comlrl_lightning.agents.engine import GenerationRequest
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
from comlrl_lightning.callbacks import BatchCheckpoint, RolloutMetrics
from comlrl_lightning.data.datamodule import TaskDataModule
from comlrl_lightning.rollouts.credit import assign_credit, with_peers
from comlrl_lightning.types import Completion, Node, Rollouts
from comlrl_lightning.utilities.rng import key_digest
from tests.algorithms.reference import centered
from tests.algorithms.support import (
    ITEMS,
    Collected,
    MemoryLogger,
    RecordingSGD,
    echo,
    fit,
    make_module,
    make_trainer,
    tiny_agents,
    trained_a_little,
    uneven_reward,
    weights,
)

NUM_AGENTS, NUM_TURNS = 3, 5


class Relay:
    """Agents 0 and 1 take turns; agent 2 joins agent 0 after an even text; a text that fits ends the episode."""

    def reset(self, item: Mapping[str, Any], seed: int) -> dict[int, Any]:
        self.turn, self.seed = 0, seed
        return {0: item["prompt"]}

    def step(self, completions: Mapping[int, str]) -> tuple[dict[int, Any], float, bool]:
        self.turn += 1
        said = " ".join(completions[agent] for agent in sorted(completions))
        score = sum(said.encode()) % 11
        if self.turn % 2:
            prompts: dict[int, Any] = {1: f"so {said}"}
        else:
            prompts = {0: f"then {said}", **({2: f"judge {said}"} if score % 2 == 0 else {})}
        return prompts, score / 5, score in (3, 7)


class PerAgent(Relay):
    """The same with rewards by agent."""

    def step(self, completions: Mapping[int, str]) -> Any:
        prompts, reward, over = super().step(completions)
        return prompts, {0: reward, 2: -2 * reward}, over


def module_of(algorithm: type[CooperativeModule], environment: Any = Relay, **settings: Any) -> Any:
    defaults: dict[str, Any] = {
        "reward_func": None,
        "external_transition": None,
        "environment": environment,
        "num_turns": NUM_TURNS,
        "num_generations": 3,
    }
    num_agents = settings.pop("num_agents", NUM_AGENTS)
    return make_module(algorithm, tiny_agents(num_agents=num_agents), **{**defaults, **settings})


@dataclass
class Act:
    """One completion of the slow version."""

    agent: int
    turn: int
    completion: Completion
    reward_to_go: float = 0.0


@dataclass
class Play:
    """One episode of the slow version."""

    rewards: list[float]
    acts: list[Act]

    def to_go(self, turn: int, discount: float) -> float:
        """Discounted sum of the rewards from a turn on."""
        return sum(discount ** (later - turn) * self.rewards[later - 1] for later in range(turn, len(self.rewards) + 1))


def play(module: Any, item: Mapping[str, Any], index: int, sample: int, key: tuple[int, ...]) -> Play:
    """One episode, one completion at a time."""
    environment, played = Relay(), Play([], [])
    prompts = environment.reset(item, key_digest((*key, index)) % 2**63)
    path: tuple[int, ...] = (sample,)
    for turn in range(1, NUM_TURNS + 1):
        said = {}
        for agent, prompt in prompts.items():
            request = GenerationRequest(agent, prompt, ((*key, index, *path[:-1], agent, path[-1]),))
            ((completion,),) = module.team.generate([request], module.sampling)
            played.acts.append(Act(agent, turn, completion))
            said[agent] = completion.text
        prompts, reward, over = environment.step(said)
        played.rewards.append(reward)
        if over:
            break
        path = (*path, 0)
    return played


def plays(module: Any, items: Sequence[Mapping[str, Any]] = ITEMS[:2]) -> list[list[Play]]:
    """`[B][K]` the episodes of the first training step."""
    key = (module.seed, 0, 0)
    return [
        [play(module, item, index, sample, key) for sample in range(module.num_generations)]
        for index, item in enumerate(items)
    ]


def test_episodes_are_those_of_one_sequence_at_a_time() -> None:
    module = trained_a_little(module_of(MAGRPO))
    expected = plays(module)
    (rollouts,) = collected(module)
    found: dict[tuple[int, int], list[Node]] = {}
    for node in rollouts.nodes:
        found.setdefault((node.task, node.path[0]), []).append(node)
    lengths = set()
    for task, of_item in enumerate(expected):
        for sample, one in enumerate(of_item):
            nodes = found[task, sample]
            assert [node.rewards[0] for node in nodes] == one.rewards
            acts = [(done.agent, node.turn, done) for node in nodes for done in node.joint_completion(0)]
            assert acts == [(act.agent, act.turn, act.completion) for act in one.acts]
            lengths.add(len(nodes))
    assert len(lengths) > 1, "episodes of one length say little"
    assert rollouts.num_unfinished == sum(len(one.rewards) == NUM_TURNS for of_item in expected for one in of_item)
    assert {act.agent for of_item in expected for one in of_item for act in one.acts} == {0, 1, 2}


def collected(module: Any, **settings: Any) -> list[Rollouts]:
    watch = Collected()
    fit(module, ITEMS[:2], 2, [watch], **settings)
    return watch.rollouts


def test_one_generation_per_step(monkeypatch: pytest.MonkeyPatch) -> None:
    module = module_of(MAGRPO)
    module.configure_model()
    sizes: list[int] = []
    generate = module.team.generate

    def counted(requests: Sequence[GenerationRequest], *args: Any, **kwargs: Any) -> Any:
        sizes.append(len(requests))
        return generate(requests, *args, **kwargs)

    monkeypatch.setattr(module.team, "generate", counted)
    (rollouts,) = collected(module)
    assert len(sizes) == max(node.turn for node in rollouts.nodes)
    assert sizes[0] == 2 * 3  # two items, three episodes each, one agent acts


class TestCredit:
    def test_peers_by_hand(self) -> None:
        # Discount 1/2. Episode 0: rewards 1, 2. Episode 1: reward 5 at its only step. Agent 1 acts at step 2 alone.
        act = Completion(0, "p", (1,), (2,), (0.0,), "a", False)
        nodes = (
            Node(0, 1, (0,), None, ("p", ""), ((act,), ()), ((0, 0),), (1.0,)),
            Node(0, 1, (1,), None, ("p", ""), ((act,), ()), ((0, 0),), (5.0,)),
            Node(0, 2, (0, 0), (0, 0), ("", "p"), ((), (act,)), ((0, 0),), (2.0,)),
        )
        rollouts = Rollouts((ITEMS[0],), (0,), nodes, num_unfinished=0)
        credited = with_peers(assign_credit(rollouts, 0.5), 0.5)
        assert [entry.peers for entry in credited] == [((2.0, 5.0),) * 2, ((2.0, 5.0),) * 2, ((2.0, 0.0),) * 2]
        assert [entry.returns for entry in credited] == [((2.0,), ()), ((5.0,), ()), ((), (2.0,))]

    @pytest.mark.parametrize(
        ("algorithm", "baseline"), [(MAGRPO, "mean"), (MARLOO, "others"), (MAReMax, "max"), (MAREINFORCE, "none")]
    )
    @pytest.mark.parametrize("normalization", ["group", "batch", False])
    def test_advantages(self, algorithm: Any, baseline: str, normalization: Any) -> None:
        if normalization == "group" and baseline == "none":
            normalization = False
        module = trained_a_little(module_of(algorithm, discount=0.9, advantage_normalization=normalization))
        expected = plays(module)
        (rollouts,) = collected(trained_a_little(module_of(algorithm, discount=0.9)))
        buffer = module.learner.credit(rollouts, 0.9)
        found = module.learner.advantages(buffer, NUM_TURNS, None)
        for entry, rows in zip(buffer, found, strict=True):
            for agent, row in enumerate(rows):
                if not entry.node.acts(agent):
                    assert row.numel() == 0
                    continue
                group = [one.to_go(entry.node.turn, 0.9) for one in expected[entry.node.task]]
                scale = 1.0
                if normalization == "group":
                    scale = statistics.pstdev(group) + 1e-4
                if normalization == "batch":
                    scale = batch_scale(expected, agent, entry.node.turn)
                value = centered(group, baseline)[entry.node.path[0]] / scale
                assert row.tolist() == pytest.approx([value], rel=1e-9, abs=1e-12)

    @pytest.mark.parametrize("algorithm", [MAGRPO, MARLOO])
    def test_gradients(self, algorithm: Any) -> None:
        """One backward pass per act; one agent acts rarely."""
        settings: dict[str, Any] = {"optimizer": RecordingSGD, "max_grad_norm": None, "discount": 0.9}
        settings["loss_aggregation"] = "sum"
        module = trained_a_little(module_of(algorithm, advantage_normalization=False, **settings))
        expected = plays(module)
        trainer = fit(module, ITEMS[:2], 2)
        recorded = trainer.optimizers[0].recorded[0]  # type: ignore[attr-defined]
        divisor = 2 * 3 * NUM_TURNS  # two items, three episodes, whatever their length
        fresh = trained_a_little(module_of(algorithm, advantage_normalization=False, **settings))
        for agent in range(NUM_AGENTS):
            named = fresh.team.agent_parameters(agent)
            total = [torch.zeros_like(one) for one in named.values()]
            for of_item in expected:
                for sample, one in enumerate(of_item):
                    for act in one.acts:
                        if act.agent != agent:
                            continue
                        group = [other.to_go(act.turn, 0.9) for other in of_item]
                        advantage = centered(group, "mean" if algorithm is MAGRPO else "others")[sample]
                        scores = fresh.team.log_probs([act.completion], temperature=1.0)
                        loss = -advantage * scores.log_probs.sum() / divisor
                        gradients = torch.autograd.grad(loss, list(named.values()))
                        total = [old + new for old, new in zip(total, gradients, strict=True)]
            assert max(float(one.abs().max()) for one in total) > 1e-4
            torch.testing.assert_close(recorded[agent], total, rtol=1e-4, atol=1e-6)  # norms compute in float32

    @pytest.mark.parametrize("gae_lambda", [0.0, 0.5, 1.0])
    def test_values_of_an_agent_between_its_acts(self, gae_lambda: float) -> None:
        module = trained_a_little(module_of(IAC, discount=0.9, gae_lambda=gae_lambda, num_generations=2))
        fit(module, ITEMS[:2], 2)  # values that are not 0
        (rollouts,) = collected(module)
        credited = module.learner.credit(rollouts, 0.9)
        seen = 0
        for sample, task in [(0, 0), (1, 0), (0, 1), (1, 1)]:
            chain = [one for one in credited if one.node.task == task and one.node.path[0] == sample]
            for agent in range(NUM_AGENTS):
                acting = [one for one in chain if one.node.acts(agent)]
                advantage = 0.0
                for place in reversed(range(len(acting))):
                    # Everything from this act to the next one, discounted from this act on.
                    here = acting[place].node.turn
                    then = acting[place + 1].node.turn if place + 1 < len(acting) else len(chain) + 1
                    reward = sum(0.9 ** (turn - here) * chain[turn - 1].node.rewards[0] for turn in range(here, then))
                    following = critique(acting[place + 1]).values[agent] if place + 1 < len(acting) else 0.0
                    factor = 0.9 ** (then - here)
                    delta = reward + factor * following - critique(acting[place]).values[agent]
                    advantage = delta + factor * gae_lambda * advantage
                    assert critique(acting[place]).advantages[agent] == pytest.approx(advantage, abs=1e-12)
                    target = advantage + critique(acting[place]).values[agent]
                    assert critique(acting[place]).targets[agent] == pytest.approx(target, abs=1e-12)
                    seen += place + 1 < len(acting)
        assert seen > 0, "no agent acts twice"

    @pytest.mark.parametrize("algorithm", POLICY_GRADIENT_ALGORITHMS)
    def test_rewards_by_agent(self, algorithm: Any) -> None:
        module = trained_a_little(module_of(algorithm, PerAgent, per_agent_rewards=True, num_generations=2))
        (rollouts,) = collected(module)
        nodes = rollouts.nodes
        assert all(node.agent_rewards is not None and len(node.agent_rewards[0]) == 3 for node in nodes)
        for node in nodes:
            assert node.agent_rewards is not None
            first, second, third = node.agent_rewards[0]
            assert (second, third) == (0.0, -2 * first)
            assert node.rewards[0] == pytest.approx((first + third) / 3)
        entry = next(one for one in module.learner.credit(rollouts, 1.0) if one.node.acts(0) and one.node.turn == 1)
        chain = [node for node in nodes if (node.task, node.path[0]) == (entry.node.task, entry.node.path[0])]
        own = sum(node.agent_rewards[0][0] for node in chain if node.agent_rewards is not None)
        assert entry.returns[0][0] == pytest.approx(own)


def critique(entry: Any) -> Any:
    assert entry.critique is not None
    return entry.critique


def batch_scale(expected: Sequence[Sequence[Play]], agent: int, turn: int) -> float:
    """Root mean square over the acts of an agent at a turn, each with the mean square of its group."""
    squares = []
    for of_item in expected:
        group = [one.to_go(turn, 0.9) for one in of_item]
        for one in of_item:
            if any((act.agent, act.turn) == (agent, turn) for act in one.acts):
                squares.append(statistics.pvariance(group))
    return math.sqrt(statistics.fmean(squares)) + 1e-4


class Plain:
    """The task of `uneven_reward` and `echo` as an environment."""

    num_turns = 2

    def reset(self, item: Mapping[str, Any], seed: int) -> dict[int, str]:
        self.turn = 0
        return dict.fromkeys(range(2), item["prompt"])

    def step(self, completions: Mapping[int, str]) -> tuple[dict[int, str], float, bool]:
        self.turn += 1
        texts = [completions[0], completions[1]]
        return dict(enumerate(echo(texts))), uneven_reward(*([text] for text in texts))[0], False


@pytest.mark.parametrize("algorithm", [IAC, MAAC])
def test_a_task_as_an_environment_is_the_same_run(algorithm: type[CooperativeModule]) -> None:
    module = module_of(algorithm, Plain, num_turns=2, num_agents=2)
    plain = make_module(algorithm, num_turns=2, num_generations=3)
    for one in (module, plain):
        fit(one, ITEMS, 2)
    assert module.env_step == plain.env_step == 4 * 3 * 2
    for agent in range(2):
        ours, theirs = weights(module, agent), weights(plain, agent)
        assert ours.keys() == theirs.keys()
        for name, value in ours.items():
            assert torch.equal(value, theirs[name]), name


def test_logs_and_records() -> None:
    logger = MemoryLogger()
    records: list[Any] = []

    def count(rollouts: list[Any]) -> dict[str, float]:
        records.extend(rollouts)
        return {"acts": float(len(rollouts))}

    module = module_of(MAGRPO)
    data = TaskDataModule(ITEMS[:2], ITEMS[2:], batch_size=2)
    watch = Collected()
    trainer = make_trainer([watch, RolloutMetrics(count)], logger=logger)
    trainer.fit(module, data)
    (rollouts,) = watch.rollouts
    logged = {key: value for _, row in logger.rows for key, value in row.items()}
    returns: dict[tuple[int, int], float] = {}
    for node in rollouts.nodes:
        place = (node.task, node.path[0])
        returns[place] = returns.get(place, 0.0) + node.rewards[0]
    assert logged["episode/return_mean"] == pytest.approx(statistics.fmean(returns.values()))
    assert logged["episode/turns_mean"] == pytest.approx(len(rollouts.nodes) / 6)
    assert logged["episode/unfinished_share"] == pytest.approx((rollouts.num_unfinished or 0) / 6)
    assert module.env_step == len(rollouts.nodes)
    trained = records[: int(logged["acts"])]
    assert len(trained) == sum(len(node.joint_completion(0)) for node in rollouts.nodes) < 3 * len(rollouts.nodes)
    assert all(record.prompt for record in trained)
    predictions = [row for batch in trainer.predict(module, data) or [] for row in batch]
    assert predictions
    for row in predictions:
        silent = [prompt is None for prompt in row["prompts"]]
        assert silent == [text is None for text in row["completions"]]
        assert any(silent)


class TestResume:
    @pytest.mark.parametrize("algorithm", [MAGRPO, MAAC])
    def test_a_half_full_buffer_goes_on(self, algorithm: type[CooperativeModule], tmp_path: Path) -> None:
        settings: dict[str, Any] = {"rollout_buffer_size": 40, "agent_learning_rate": 1e-2, "num_generations": 2}
        whole = module_of(algorithm, **settings)
        fit(whole, ITEMS, 1, [BatchCheckpoint(1, keep=None, dirpath=tmp_path)], enable_checkpointing=True)
        resumed = module_of(algorithm, **settings)
        make_trainer().fit(resumed, TaskDataModule(ITEMS, batch_size=1), ckpt_path=tmp_path / "batch-000002.ckpt")
        assert torch.load(tmp_path / "batch-000002.ckpt", weights_only=True)["comlrl_lightning"]["ranks"][0]["buffer"]
        assert (resumed.env_step, resumed.update_step) == (whole.env_step, whole.update_step)
        for agent in range(NUM_AGENTS):
            assert all(
                torch.equal(value, weights(whole, agent)[name]) for name, value in weights(resumed, agent).items()
            )

    def test_checkpoints_name_the_environment(self, tmp_path: Path) -> None:
        module = module_of(MAGRPO, functools.partial(Relay))
        assert module.hparams["environment"]["func"].endswith("test_environments.Relay")
        fit(module).save_checkpoint(tmp_path / "run.ckpt")
        loaded = MAGRPO.load_from_checkpoint(tmp_path / "run.ckpt", agents=tiny_agents(num_agents=3))
        assert isinstance(loaded.environment, functools.partial)


class Returns:
    """Returns what a test wants."""

    first: ClassVar[Any] = {0: "go"}
    answer: ClassVar[Any] = ({1: "on"}, 1.0, False)

    def reset(self, item: Any, seed: int) -> Any:
        return self.first

    def step(self, completions: Any) -> Any:
        return self.answer


class Sized(Relay):
    """Needs an argument."""

    def __init__(self, size: int) -> None:
        self.size = size


class TestMistakes:
    @pytest.mark.parametrize(
        ("settings", "message"),
        [
            ({"environment": Relay()}, r"environment=<tests.algorithms.* is not callable. Give a class"),
            ({"environment": Sized}, r"cannot be called without arguments: .* Bind them with functools.partial"),
            ({"reward_func": uneven_reward}, r"reward_func= does not go with environment="),
            ({"formatters": lambda item: "p"}, r"formatters= does not go with environment="),
            ({"external_transition": echo}, r"external_transition= does not go with environment="),
            ({"early_termination_threshold": 0.5}, r"early_termination_threshold=0.5 does not go with environment="),
            ({"joint_mode": "cross"}, r"MAGRPO\(joint_mode='cross'\) combines completions of the same prompts"),
            ({"collaboration": "centralized"}, r"collaboration='centralized' does not go with environment="),
            ({"reward_none": "skip"}, r"reward_none='skip' does not go with environment="),
            ({"reward_workers": 2}, r"reward_workers=2 does not go with environment="),
            ({"external_prompt_passthrough": True}, r"external_prompt_passthrough=True does not go with environment="),
        ],
    )
    def test_settings(self, settings: dict[str, Any], message: str) -> None:
        with pytest.raises(ValueError, match=message):
            module_of(MAGRPO, settings.pop("environment", Relay), **settings)

    @pytest.mark.parametrize(
        ("first", "answer", "message"),
        [
            ({}, None, r"Returns.reset returned the prompts \{\} for task item 0 .*at least one while"),
            ({3: "p"}, None, r"names agent 3 for task item 0 .* Agents are the numbers 0 to 2"),
            ({"0": "p"}, None, r"names agent '0'"),
            ({0: 5}, None, r"Returns.reset returned 5 for .*Return a text or a list of chat messages"),
            ("go", None, r"returned the prompts 'go'"),
            (None, 1.0, r"Returns.step returned 1.0 for .*Return a tuple \(prompts, rewards, over\)"),
            (None, ({1: "p"}, 1.0, 0), r"returned over=0 for .* Return True or False"),
            (None, ({}, 1.0, False), r"Returns.step returned the prompts \{\} for .* at turn 2"),
            (None, ({1: "p"}, None, False), r"Returns.step=?.* gave None for .*not a number"),
            (None, ({1: "p"}, float("nan"), False), r"gave nan for .*Return a finite float"),
            (None, ({1: "p"}, {0: 1.0}, False), r"returned rewards by agent for .* per_agent_rewards=True"),
        ],
    )
    def test_answers(self, monkeypatch: pytest.MonkeyPatch, first: Any, answer: Any, message: str) -> None:
        if first is not None:
            monkeypatch.setattr(Returns, "first", first)
        if answer is not None:
            monkeypatch.setattr(Returns, "answer", answer)
        with pytest.raises(ValueError, match=message):
            fit(module_of(MAGRPO, Returns), ITEMS[:1], 1)

    def test_a_method_that_is_missing_is_named(self) -> None:
        with pytest.raises(ValueError, match=r"environment=builtins.dict made \{\}, which lacks reset or step"):
            fit(module_of(MAGRPO, dict), ITEMS[:1], 1)

    def test_numpy_is_taken(self, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr(Returns, "first", {np.int64(0): "p"})
        monkeypatch.setattr(Returns, "answer", ({np.int64(1): "p"}, np.float32(1.0), np.bool_(False)))
        module = module_of(MAGRPO, Returns, num_turns=2)
        fit(module, ITEMS[:1], 1)
        assert module.env_step == 2 * 3

    def test_an_error_of_the_environment_keeps_its_type(self) -> None:
        class Broken(Relay):
            def step(self, completions: Mapping[int, str]) -> Any:
                raise KeyError("no such door")

        with pytest.raises(KeyError, match="no such door") as caught:
            fit(module_of(MAGRPO, Broken), ITEMS[:1], 1)
        assert any("step" in note and "task item 0" in note and "at turn 1" in note for note in caught.value.__notes__)


def test_a_task_names_its_environment() -> None:
    task = Task(environment=Relay, num_agents=3, train_items=ITEMS)
    module = MAGRPO(SharedBase("not/loaded", num_agents=3), task=task, num_turns=4)
    assert module.environment is Relay
    assert module.shape.trajectories
    given = MAGRPO(SharedBase("not/loaded", num_agents=3), uneven_reward, task=task)
    assert given.environment is None


def test_episodes_of_an_item_begin_with_one_seed() -> None:
    seeds: list[int] = []

    class Seeds(Relay):
        def reset(self, item: Mapping[str, Any], seed: int) -> dict[int, Any]:
            seeds.append(seed)
            return super().reset(item, seed)

    fit(module_of(MAGRPO, Seeds), ITEMS[:2], 2, max_epochs=2)
    by_item = [set(seeds[start : start + 3]) for start in range(0, len(seeds), 3)]
    assert [len(one) for one in by_item] == [1] * 4
    assert len(set.union(*by_item)) == 4, "another seed for each item and epoch"
