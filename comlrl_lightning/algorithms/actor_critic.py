"""The actor-critic family: independent trajectories, values from critics, a policy per agent."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any, ClassVar, Literal

from typing_extensions import override

from comlrl_lightning.agents.critic_settings import AdapterCritic, ModelCritic, ValueHead, check_critic
from comlrl_lightning.agents.heads import CriticTeam
from comlrl_lightning.algorithms.checks import check_choice, check_nodes, check_sampling
from comlrl_lightning.algorithms.cooperative import CooperativeModule
from comlrl_lightning.algorithms.critic_learner import ActorCriticLearner
from comlrl_lightning.algorithms.hparams import from_plain, to_plain
from comlrl_lightning.algorithms.settings import ValueSettings, gathered
from comlrl_lightning.distributed import rank


class ActorCriticModule(CooperativeModule):
    """What the actor-critic algorithms share; they differ in who is judged by which critic.

    `num_generations` trajectories per task item are rolled out independently of each other, one joint completion per
    turn; one is enough. A node is one turn of one trajectory: that is what `rollout_buffer_size` and
    `train_batch_size` count, and all nodes weigh the same. The reward function is called once per item and turn with
    all trajectories that still run; it gets ``prompts`` at the first turn only, where they share them.

    Args:
        critic: What judges: `AdapterCritic` (one more adapter on the agents' frozen base), `ModelCritic` (another
            model) or `ValueHead` (a head on the agent's own hidden states). Values start at 0.
        critic_type: ``"v"`` reads the prompts of a turn, ``"q"`` the completions, too. Under ``"q"`` a completion's
            advantage is its target minus the mean value of the other trajectories' completions of the same prompts.
        critic_learning_rate: Of the critics. None: 1e-4, or 5e-6 where all weights of a model are trained.
        value_loss_coef: Weight of the value loss where it shares parameters with the policy, which is under
            `ValueHead` only: there it trains the agent's own adapter along.
        value_clip_range: Largest change of a value, in units of reward, that a buffer's updates are paid for. None: no
            limit.
        gae_lambda: From 1 (advantages are returns minus values) to 0 (TD errors: the critic is trusted).
        per_agent_rewards: ``reward_func`` returns one row of N rewards per joint completion, and each agent is credited
            with its own. Early termination and reward metrics then look at the mean over the agents.
        advantage_normalization: ``"batch"`` centers and scales advantages per agent and turn over the buffer; a buffer
            of one node stays as it is. False leaves them alone.
    """

    centralized: ClassVar[bool]
    """Whether one critic judges all."""
    fixed_settings = (
        *CooperativeModule.fixed_settings,
        "critic",
        "critic_type",
        "gae_lambda",
        "per_agent_rewards",
        "advantage_normalization",
    )

    def __init__(
        self,
        *args: Any,
        critic: ValueHead | AdapterCritic | ModelCritic = AdapterCritic(),  # noqa: B008  (frozen)
        critic_type: Literal["v", "q"] = "v",
        critic_learning_rate: float | None = None,
        value_loss_coef: float = 0.6,
        value_clip_range: float | None = None,
        gae_lambda: float = 1.0,
        per_agent_rewards: bool = False,
        advantage_normalization: Literal["batch", False] = "batch",
        **kwargs: Any,
    ) -> None:
        given = {
            "critic_type": critic_type,
            "critic_learning_rate": critic_learning_rate,
            "value_loss_coef": value_loss_coef,
            "value_clip_range": value_clip_range,
            "gae_lambda": gae_lambda,
            "advantage_normalization": advantage_normalization,
        }
        super().__init__(*args, **kwargs)
        self.save_hyperparameters({**given, "critic": to_plain(critic), "per_agent_rewards": per_agent_rewards})
        self.value = gathered(ValueSettings, given)
        check_choice((True, False), per_agent_rewards=per_agent_rewards)
        self.critic: ValueHead | AdapterCritic | ModelCritic = from_plain("critic", critic)
        check_critic(self.critic, self.num_agents, self.centralized)
        self.shape = replace(self.shape, trajectories=True)
        reward = self.interface.reward.of_trajectories(per_agent_rewards, several_turns=self.num_turns > 1)
        self.interface = replace(self.interface, reward=reward)
        check_sampling(type(self).__name__, self.sampling, refuse=False)
        check_nodes(self.shape, self.num_agents, self.max_nodes)

    @override
    def critic_groups(self) -> list[str]:
        return ["critic"] if self.centralized else [f"critic_{agent}" for agent in range(self.num_agents)]

    @override
    def build_learner(self) -> ActorCriticLearner:
        one_output = self.centralized and not self.interface.reward.per_agent
        self.critics = CriticTeam.build(
            self.critic,
            self.team,
            centralized=self.centralized,
            critic_type=self.value.critic_type,
            num_outputs=1 if one_output else self.num_agents,
        )
        return ActorCriticLearner(
            self.team, self.critics, self.policy, self.value, self.updates.micro_batch_tokens, self.training_metrics
        )

    @override
    def initial_learning_rates(self) -> list[float]:
        trains_all = isinstance(self.critic, ModelCritic) and self.critic.lora is None
        default = 5e-6 if trains_all else 1e-4
        rate = default if self.value.critic_learning_rate is None else self.value.critic_learning_rate
        return [*super().initial_learning_rates(), *[rate] * len(self.critic_groups())]

    @override
    def save_agents(self, folder: str | Path) -> None:
        """Write the agents as every algorithm does, and the critics beside them: ``critic/``, or one per agent."""
        super().save_agents(folder)
        if rank() == 0:
            self.critics.save(folder)


class IAC(ActorCriticModule):
    """Independent actor-critic: every agent has a critic of its own, which sees that agent's history alone.

    The advantages of each agent are generalized ones (https://arxiv.org/abs/1506.02438) over the turns of a
    trajectory, with its own critic's values. The other agents are part of the environment
    (https://arxiv.org/abs/1705.08926 calls this IAC).
    """

    centralized = False


class MAAC(ActorCriticModule):
    """Multi-agent actor-critic: one critic, used in training only, sees the histories of all agents.

    It reads all agents' prompts as one text. Every joint completion enters its loss once, and all agents share its
    advantages; with `per_agent_rewards` it has one output per agent.
    """

    centralized = True
