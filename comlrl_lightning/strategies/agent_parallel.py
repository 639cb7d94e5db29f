"""Several devices in one process: each language model of a team on a device of its own."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from lightning.pytorch import LightningModule, Trainer
from lightning.pytorch.plugins import MixedPrecision
from lightning.pytorch.strategies import SingleDeviceStrategy
from torch import Tensor
from torch.optim import Optimizer
from typing_extensions import override

from comlrl_lightning.agents.settings import Separate, SharedBase
from comlrl_lightning.agents.team import AgentTeam
from comlrl_lightning.critics.critics import CriticTeam
from comlrl_lightning.keywords import KnownKeywords

Device = str | torch.device


class AgentParallel(SingleDeviceStrategy, KnownKeywords):
    """Trains ``agents=Separate(...)`` with each model on a device of its own, all in one process.

    Rollouts, scores and updates of the agents run at the same time, in a thread per model, and change no result: what
    one device computes, several compute. Each device needs room for ``micro_batch_tokens`` of its own. Everything that
    is no language model is on the first device, and so is a `FixedModel` that answers for all.

    Args:
        agent_devices: Device of each agent's model, such as ``["cuda:0", "cuda:1"]``; one may be named several times.
        critic_device: Device of the critics and of the reward model that are models of their own. None: that of the
            agent whose critic it is, the first agent's for a central critic and a reward model.
        reference_device: Device of the frozen copies that full fine-tuning keeps as reference policies. None: those of
            the agents. With adapters the reference is part of the agent's model.
    """

    strategy_name = "agent_parallel"

    def __init__(
        self,
        agent_devices: Sequence[Device],
        critic_device: Device | None = None,
        reference_device: Device | None = None,
    ) -> None:
        if isinstance(agent_devices, str | torch.device) or not agent_devices:
            raise ValueError(
                f"AgentParallel(agent_devices={agent_devices!r}) is no list of devices. Give one per agent, for "
                'example ["cuda:0", "cuda:1"].'
            )
        self.agent_devices = [checked_device("agent_devices", device) for device in agent_devices]
        self.critic_device, self.reference_device = (
            None if device is None else checked_device(name, device)
            for name, device in (("critic_device", critic_device), ("reference_device", reference_device))
        )
        super().__init__(self.agent_devices[0])

    @property
    def parallel_devices(self) -> list[torch.device]:
        """Where Lightning looks up which accelerator these devices belong to."""
        return self.agent_devices

    @override
    def connect(self, model: LightningModule) -> None:
        self._check(model)
        super().connect(model)

    def _check(self, module: LightningModule) -> None:
        """Refuse, before weights load, what cannot be placed."""
        agents = vars(module).get("agents")
        if not isinstance(agents, SharedBase | Separate):
            raise ValueError(
                f"AgentParallel(...) places the models of agents, and {type(module).__name__} has none. Use an "
                "algorithm of comlrl_lightning, or another strategy."
            )
        if not isinstance(agents, Separate):
            raise ValueError(
                "AgentParallel(...) gives each agent's model a device, but agents=SharedBase(...) is one model for all."
                f" Use Separate([model] * {agents.num_agents}, lora=LoraSettings()), or leave out strategy=: a shared"
                " base fits on one device, and strategy='ddp' uses several."
            )
        if len(self.agent_devices) != agents.num_agents:
            raise ValueError(
                f"AgentParallel(agent_devices=...) names {len(self.agent_devices)} devices for {agents.num_agents}"
                " agents. Give one per agent; several agents may have the same."
            )
        kinds = sorted({device.type for device in self._all_devices()})
        if isinstance(self.precision_plugin, MixedPrecision) and len(kinds) > 1:
            raise ValueError(
                f"Trainer(precision={self.precision_plugin.precision!r}) works on one kind of device, but"
                f" AgentParallel(...) names {' and '.join(kinds)}. Use one kind, or precision='32-true'."
            )

    def _all_devices(self) -> list[torch.device]:
        given = (*self.agent_devices, self.critic_device, self.reference_device)
        return [device for device in given if device is not None]

    @contextmanager
    @override
    def tensor_init_context(self, empty_init: bool | None = None) -> Iterator[None]:
        # Models load on the CPU: the first device has no room for all of them.
        with self.precision_plugin.tensor_init_context():
            yield

    @override
    def model_to_device(self) -> None:
        module = self.lightning_module
        assert module is not None
        teams = [part for part in module.modules() if isinstance(part, AgentTeam)]
        critics = [part for part in module.modules() if isinstance(part, CriticTeam)]
        self._check_needed(teams, critics)
        for team in teams:
            self._place_agents(team)
        for critic in critics:
            self._place_critics(critic)
        for part in module.children():
            if not isinstance(part, AgentTeam | CriticTeam):
                part.to(self.root_device)
        module._apply(lambda tensor: tensor.to(self.root_device), recurse=False)  # type: ignore[no-untyped-call]
        # What `module.to(device)` writes down, without moving what has its place.
        module._device = self.root_device

    def _check_needed(self, teams: Sequence[AgentTeam], critics: Sequence[CriticTeam]) -> None:
        frozen = [model for team in teams for model in team.language_models() if model.frozen is not None]
        if self.reference_device is not None and not frozen:
            raise ValueError(
                f"AgentParallel(reference_device={str(self.reference_device)!r}) has nothing to place: the reference is"
                " part of the agents' models, or there is none. Leave it out."
            )
        if self.critic_device is not None and not any(len(critic.own_models) for critic in critics):
            raise ValueError(
                f"AgentParallel(critic_device={str(self.critic_device)!r}) has nothing to place: critics are part of"
                " the agents' models, or there are none. Leave it out, or use critic=ModelCritic(model=...)."
            )

    def _place_agents(self, team: AgentTeam) -> None:
        for model, device in zip(team.language_models(), self.agent_devices, strict=True):
            model.network.to(device)
            if model.frozen is not None:
                model.frozen.network.to(self.reference_device or device)
        team.concurrent = True

    def _place_critics(self, critics: CriticTeam) -> None:
        placed = set()
        for position, (body, head) in enumerate(zip(critics.bodies, critics.heads, strict=True)):
            if body.model in critics.own_models and body.model not in placed:
                placed.add(body.model)
                body.model.to(self.critic_device or self.agent_devices[position])
            head.to(body.model.device)
        critics.concurrent = True

    @override
    def setup(self, trainer: Trainer) -> None:
        super().setup(trainer)
        for optimizer in self.optimizers:
            _follow_parameters(optimizer)

    @override
    def load_optimizer_state_dict(self, checkpoint: Mapping[str, Any]) -> None:
        # Each state goes to the device of its parameter, wherever it was saved.
        for optimizer, state in zip(self.optimizers, checkpoint["optimizer_states"], strict=True):
            optimizer.load_state_dict(state)

    @override
    def teardown(self) -> None:
        super().teardown()
        for part in () if self.lightning_module is None else self.lightning_module.modules():
            if isinstance(part, AgentTeam | CriticTeam):
                part.concurrent = False


def checked_device(name: str, device: Device) -> torch.device:
    """A device that this machine has, with its number.

    Raises:
        ValueError: It has none of that name.
    """
    try:
        parsed = torch.device(device)
        count = 1 if parsed.type == "cpu" else torch.get_device_module(parsed).device_count()
    except (RuntimeError, TypeError, AttributeError) as error:
        raise ValueError(
            f"AgentParallel({name}={device!r}) names no device that computes. Use names such as 'cuda:0' or 'cpu'."
        ) from error
    if parsed.type == "cpu":
        return torch.device("cpu")
    index = parsed.index or 0
    if index >= count:
        raise ValueError(
            f"AgentParallel({name}={device!r}) names a device that is not there: this machine has {count} of the kind"
            f" {parsed.type!r}. Correct the number, or use 'cpu'."
        )
    return torch.device(parsed.type, index)


def _follow_parameters(optimizer: Optimizer) -> None:
    """Bring what an optimizer knows about a parameter to its device: Lightning moves all of it to the first one."""
    for parameter, state in optimizer.state.items():
        for key, value in state.items():
            if isinstance(value, Tensor) and value.shape == parameter.shape:
                state[key] = value.to(parameter.device)
