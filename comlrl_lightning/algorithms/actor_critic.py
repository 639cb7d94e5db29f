"""The actor-critic family: independent trajectories, values from critics, a policy per agent."""

from __future__ import annotations

from dataclasses import replace
from typing import Any, ClassVar, Literal

from comlrl_lightning.algorithms.methods import ActorCritic, ActorCriticName
from comlrl_lightning.algorithms.module import CooperativeModule
from comlrl_lightning.critics.settings import AdapterCritic, ModelCritic, ValueHead
from comlrl_lightning.utilities.checks import check_choice
from comlrl_lightning.utilities.plain import from_plain, to_plain


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

    algorithm: ClassVar[ActorCriticName]
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
        method = ActorCritic(
            self.algorithm,
            from_plain("critic", critic),
            critic_type,
            critic_learning_rate,
            value_loss_coef,
            value_clip_range,
            gae_lambda,
            advantage_normalization,
        )
        super().__init__(*args, **kwargs)
        given = {**vars(method), "critic": to_plain(critic), "per_agent_rewards": per_agent_rewards}
        self.save_hyperparameters({name: value for name, value in given.items() if name != "algorithm"})
        check_choice((True, False), per_agent_rewards=per_agent_rewards)
        reward = self.interface.reward.of_trajectories(per_agent_rewards, several_turns=self.num_turns > 1)
        self.interface = replace(self.interface, reward=reward)
        self._set_up_method(method)


class IAC(ActorCriticModule):
    """Independent actor-critic: every agent has a critic of its own, which sees that agent's history alone.

    The advantages of each agent are generalized ones (https://arxiv.org/abs/1506.02438) over the turns of a
    trajectory, with its own critic's values. The other agents are part of the environment
    (https://arxiv.org/abs/1705.08926 calls this IAC).
    """

    algorithm = "IAC"


class MAAC(ActorCriticModule):
    """Multi-agent actor-critic: one critic, used in training only, sees the histories of all agents.

    It reads all agents' prompts as one text. Every joint completion enters its loss once, and all agents share its
    advantages; with `per_agent_rewards` it has one output per agent.
    """

    algorithm = "MAAC"
