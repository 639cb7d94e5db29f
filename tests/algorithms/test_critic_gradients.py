"""Every gradient of an actor-critic training step against slow formulas, one unpadded row at a time.

The reference is plain PEFT and autograd: advantages are sums over the turns that follow, values are heads on the state
of one row, and statistics come from `statistics`.
"""

from __future__ import annotations

import statistics
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Literal, cast

import pytest
import torch
from peft import get_peft_model
from torch import Tensor, nn

from comlrl_lightning.algorithms import IAC, MAAC
from comlrl_lightning.algorithms.actor_critic import ActorCriticModule
from comlrl_lightning.critics.critics import CriticTeam
from comlrl_lightning.critics.settings import AdapterCritic, ValueHead
from comlrl_lightning.types import Completion, Node, Rollouts
from tests.algorithms.reference import Agent
from tests.algorithms.support import (
    ITEMS,
    LORA,
    Collected,
    RecordingSGD,
    fit,
    make_module,
    tiny_model,
    trained_a_little,
)
from tests.algorithms.test_gradients import bare, lora_config
from tests.tiny_lm import tiny_tokenizer

CriticType = Literal["v", "q"]
Kind = Literal["shared head", "own critics", "central critic"]
DISCOUNT, LAMBDA, COEFFICIENT = 0.9, 0.5, 0.6
MAX_NEW_TOKENS = 4
"""Of `make_module`: what divides the sum over a completion's tokens."""


def reward(*completions: list[str], turn: int) -> list[float]:
    """Below 1, without any pattern; the first trajectory gets 2 at turn 2, where it can be made to end."""
    rewards = [
        sum(sum(text.encode()) * (n + 1) for n, text in enumerate(joint)) % 97 / 97
        for joint in zip(*completions, strict=True)
    ]
    return [2.0 if turn == 2 and k == 0 else value for k, value in enumerate(rewards)]


@dataclass(frozen=True)
class Speakers:
    """A plain PEFT model with the adapters of agents and critics, and the critics' heads."""

    network: Any
    critic_adapters: Sequence[str]
    heads: Sequence[nn.Module]
    joint: bool
    critic_type: CriticType

    def value(self, sample: Sequence[Completion], critic: int) -> Tensor:
        """`[]` what one critic says of a joint completion."""
        self.network.set_adapter(self.critic_adapters[critic])
        read = [*sample] if self.joint else [sample[critic]]
        ids = self._joint_ids(read) if self.joint else list(read[0].prompt_ids)
        if self.critic_type == "q" and not self.joint:
            ids += read[0].token_ids
        states = self.network.get_base_model().model(input_ids=torch.tensor([ids])).last_hidden_state
        value: Tensor = self.heads[critic](states[:, -1])[0, 0]
        return value

    def _joint_ids(self, sample: Sequence[Completion]) -> list[int]:
        text = "\n\n".join(f"[Prompt of agent {one.agent}]\n{one.prompt}" for one in sample)
        if self.critic_type == "q":
            text += "".join(f"\n\n[Completion of agent {one.agent}]\n{one.text}" for one in sample)
        ids: list[int] = tiny_tokenizer()(text).input_ids
        return ids


def speakers(module: ActorCriticModule, kind: Kind, critic_type: CriticType) -> Speakers:
    critics = module.critics
    names = {"shared head": ["agent_0", "agent_1"], "own critics": ["critic_0", "critic_1"]}.get(kind, ["critic"])
    network = get_peft_model(tiny_model(0), lora_config(), "agent_0")
    for name in ["agent_1", *(name for name in names if name.startswith("critic"))]:
        network.add_adapter(name, lora_config())
    ours = {bare(f".{name}"): value for name, value in module.team.named_parameters() if ".network." in f".{name}"}
    for name, parameter in network.named_parameters():
        parameter.data = ours[name].detach().clone()
    heads = [_copied(head) for head in critics.heads]
    return Speakers(network, names, heads, kind == "central critic", critic_type)


def _copied(head: nn.Module) -> nn.Linear:
    weight, bias = (value.detach() for value in head.state_dict().values())
    linear = nn.Linear(weight.shape[1], weight.shape[0], dtype=weight.dtype)
    linear.load_state_dict({"weight": weight, "bias": bias})
    return linear


def path_of(rollouts: Rollouts, node: Node) -> list[Node]:
    """The node and those that follow it in its trajectory, in order."""
    following = [one for one in rollouts.nodes if one.path[: len(node.path)] == node.path]
    return sorted(following, key=lambda one: one.turn)


def credit(rollouts: Rollouts, values: dict[Node, float], critic_type: CriticType) -> dict[Node, tuple[float, float]]:
    """Advantage and target of every node."""
    result = {}
    for node in rollouts.nodes:
        ahead = path_of(rollouts, node)
        deltas = [
            one.rewards[0] + (DISCOUNT * values[after] if after is not None else 0.0) - values[one]
            for one, after in zip(ahead, [*ahead[1:], None], strict=True)
        ]
        advantage = sum((DISCOUNT * LAMBDA) ** steps * delta for steps, delta in enumerate(deltas))
        result[node] = advantage, advantage + values[node]
    if critic_type == "v":
        return result
    weighed = {}
    for node, (_, target) in result.items():
        others = [values[one] for one in rollouts.nodes if one.turn == node.turn == 1 and one is not node]
        weighed[node] = target - statistics.fmean(others) if others else target, target
    return weighed


def normalized(rollouts: Rollouts, node: Node, advantages: dict[Node, float]) -> float:
    same_turn = [advantages[one] for one in rollouts.nodes if one.turn == node.turn]
    if len(same_turn) < 4:
        return advantages[node]
    return (advantages[node] - statistics.fmean(same_turn)) / (statistics.pstdev(same_turn) + 1e-4)


def expected_loss(plain: Speakers, rollouts: Rollouts) -> Tensor:
    """`[]` sum of the losses of all agents and critics; each reaches its own parameters alone, but a shared head's."""
    total = torch.zeros((), dtype=torch.float64)
    shared = plain.critic_adapters[0] == "agent_0"
    num_roots = sum(node.turn == 1 for node in rollouts.nodes)
    num_turns = max(node.turn for node in rollouts.nodes)
    for agent in range(2):
        critic = 0 if plain.joint else agent
        with torch.no_grad():
            values = {node: float(plain.value(node.joint_completion(0), critic)) for node in rollouts.nodes}
        credited = credit(rollouts, values, plain.critic_type)
        advantages = {node: advantage for node, (advantage, _) in credited.items()}
        speaker = Agent(plain.network, f"agent_{agent}")
        for node in rollouts.nodes:
            log_probs, _ = speaker.scores(node.completions[agent][0], 1.0)
            mean = log_probs.sum() / MAX_NEW_TOKENS
            total = total - normalized(rollouts, node, advantages) * mean / (num_roots * num_turns)
            if plain.joint and agent:
                continue
            error = plain.value(node.joint_completion(0), critic) - credited[node][1]
            total = total + (COEFFICIENT / MAX_NEW_TOKENS if shared else 1.0) * error.square() / len(rollouts.nodes)
    return total


def expected_gradients(plain: Speakers, rollouts: Rollouts) -> dict[str, Tensor]:
    # PEFT's `set_adapter` leaves only the acting adapter with gradients: all of them are to get theirs in one pass.
    set_adapter = plain.network.set_adapter

    def keep_gradients(name: str) -> None:
        set_adapter(name)
        for path, parameter in plain.network.named_parameters():
            parameter.requires_grad_("lora_" in path)

    plain.network.set_adapter = keep_gradients
    expected_loss(plain, rollouts).backward()  # type: ignore[no-untyped-call]
    named = dict(plain.network.named_parameters())
    for critic, head in enumerate(plain.heads):
        named |= {f"{critic}.{name}": parameter for name, parameter in head.named_parameters()}
    return {name: value.grad for name, value in named.items() if value.grad is not None}


def compare(
    module: ActorCriticModule, recorded: Sequence[Sequence[Tensor | None]], expected: dict[str, Tensor]
) -> None:
    groups = [[bare(name) for name in module.team.agent_parameters(agent)] for agent in range(2)]
    for critic, group in enumerate(module.critics.parameter_groups().values()):
        groups.append([bare(name) or name.replace("head.output", str(critic)) for name in group])
    assert [len(group) for group in groups] == [len(gradients) for gradients in recorded]
    for names, gradients in zip(groups, recorded, strict=True):
        assert any(expected[name].abs().max() > 1e-3 for name in names)
        for name, gradient in zip(names, gradients, strict=True):
            assert gradient is not None
            torch.testing.assert_close(gradient, expected[name], rtol=1e-5, atol=1e-7)


def stir(critics: CriticTeam) -> None:
    """Fresh critics give 0 whatever they read."""
    critics.double()
    generator = torch.Generator().manual_seed(5)
    for group in critics.parameter_groups().values():
        for parameter in group.values():
            parameter.data = 0.05 * torch.randn(parameter.shape, generator=generator, dtype=torch.float64)


@pytest.mark.filterwarnings("ignore:early_termination_threshold=1.5 stopped a joint")
@pytest.mark.parametrize("critic_type", ["v", "q"])
@pytest.mark.parametrize(
    ("num_turns", "threshold", "num_nodes"),
    [(1, None, 2), (3, None, 6), (3, 1.5, 5)],
    ids=["one turn", "three turns", "one ends at turn 2 of 3"],
)
@pytest.mark.parametrize("kind", ["shared head", "own critics", "central critic"])
def test_both_gradients(
    kind: Kind, num_turns: int, threshold: float | None, num_nodes: int, critic_type: CriticType
) -> None:
    module = make_module(
        MAAC if kind == "central critic" else IAC,
        critic=ValueHead() if kind == "shared head" else AdapterCritic(LORA),
        critic_type=critic_type,
        gae_lambda=LAMBDA,
        discount=DISCOUNT,
        value_loss_coef=COEFFICIENT,
        num_turns=num_turns,
        early_termination_threshold=threshold,
        reward_func=reward,
        optimizer=RecordingSGD,
        max_grad_norm=None,
    )
    assert isinstance(module, ActorCriticModule)
    trained_a_little(module)
    stir(module.critics)
    plain = speakers(module, kind, critic_type)
    collected = Collected()
    trainer = fit(module, ITEMS[:1], batch_size=1, callbacks=[collected])
    (rollouts,) = collected.rollouts
    assert len(rollouts.nodes) == num_nodes
    (recorded,) = cast("RecordingSGD", trainer.optimizers[0]).recorded
    compare(module, recorded, expected_gradients(plain, rollouts))
