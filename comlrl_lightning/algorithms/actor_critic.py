"""The actor-critic family: independent trajectories, values from critics, a policy per agent."""

from dataclasses import replace

from typing_extensions import override

from comlrl_lightning.algorithms.methods import ActorCriticMethod, PolicyMethod
from comlrl_lightning.algorithms.policy_gradient import PolicyGradientModule
from comlrl_lightning.environment.functions import TaskFunctions


class ActorCriticModule(ActorCriticMethod, PolicyGradientModule):
    """Policy gradients with critics; the algorithms of this family differ in what a critic sees.

    `num_generations` trajectories per task item are rolled out independently of each other, one joint completion per
    turn; one is enough. A node is one turn of one trajectory: that is what `rollout_buffer_size` and
    `train_batch_size` count, and all nodes weigh the same. The reward function is called once per item and turn with
    all trajectories that still run; it gets ``prompts`` at the first turn only, where they share them.
    """

    @override
    def check_settings(self) -> None:
        super().check_settings()
        self.value_settings()

    @override
    def make_task_functions(self) -> TaskFunctions:
        functions = super().make_task_functions()
        reward = functions.reward.of_trajectories(self.per_agent_rewards, several_turns=self.num_turns > 1)
        return replace(functions, reward=reward)

    @property
    @override
    def method(self) -> PolicyMethod:
        return self

    @property
    @override
    def method_name(self) -> str:
        return type(self).__name__


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
