"""Frozen weights in shards, a part on each rank (FSDP2), and passes of such models that cannot wait for ever.

The weights of a decoder layer come together on all ranks while it computes: every forward and backward pass is a
collective call. Ranks want different numbers of them, as their prompts, completions, turns and mini-batches differ.
They agree before each pass on what is done next; a rank that does not want it does it on one token.
"""

from __future__ import annotations

import inspect
from collections.abc import Sequence
from contextlib import nullcontext
from functools import partial
from typing import Any
from weakref import WeakKeyDictionary

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor

from comlrl_lightning.agents.language_model import LanguageModel
from comlrl_lightning.agents.team import AgentTeam


def shard_frozen(module: nn.Module, mesh: DeviceMesh) -> Lockstep:
    """Shard the frozen language models below a module, decoder layer by decoder layer.

    Adapters, embeddings, the last norm and heads stay whole on every rank, and so does a model that is trained in full.

    Args:
        module: What holds the models; models that are sharded already stay as they are.
        mesh: The ranks, in one dimension.

    Returns:
        What their passes go through.

    Raises:
        ValueError: An agent's model is not frozen, or cannot be sharded.
    """
    for team in (part for part in module.modules() if isinstance(part, AgentTeam)):
        for model in team.language_models():
            if not _is_frozen(model):
                raise ValueError(
                    f"agent_{model.agents[0]} trains all weights of its model, and ShardedParallel() shards only"
                    " frozen ones. Use lora=LoraSettings() in agents=, or strategy='ddp'."
                )
    models = [part for part in module.modules() if isinstance(part, LanguageModel) and _is_frozen(part)]
    for model in models:
        if not is_sharded(model):
            _shard(model, mesh)
    return Lockstep(models)


_LOCKSTEPS: WeakKeyDictionary[nn.Module, Lockstep] = WeakKeyDictionary()


def lockstep_of(module: nn.Module, mesh: DeviceMesh) -> Lockstep:
    """Agreement on the passes of a module's models, which are sharded when it is asked for the first time.

    Args:
        module: Its models are loaded.
        mesh: The ranks, in one dimension.

    Raises:
        ValueError: An agent's model is not frozen, or cannot be sharded.
    """
    if module not in _LOCKSTEPS:
        _LOCKSTEPS[module] = shard_frozen(module, mesh)
    return _LOCKSTEPS[module]


def is_sharded(module: nn.Module) -> bool:
    """Whether weights below a module are in shards."""
    return any(isinstance(parameter, DTensor) for parameter in module.parameters())


def _is_frozen(model: LanguageModel) -> bool:
    """Whether nothing but adapters is trained."""
    adapters = set(model.adapter_parameters())
    return not any(one.requires_grad for one in model.network.parameters() if one not in adapters)


def _shard(model: LanguageModel, mesh: DeviceMesh) -> None:
    from torch.distributed.fsdp import fully_shard

    if "ignored_params" not in inspect.signature(fully_shard).parameters:
        raise ValueError(f"ShardedParallel() needs torch 2.7, and this is {torch.__version__}. Install a newer one.")
    body = model.causal.base_model
    model.reads_prompts_once = False  # all ranks must go through the same layers in the same order, backwards too
    adapters = set(model.adapter_parameters())
    for layer in _decoder_layers(model):
        fully_shard(layer, mesh=mesh, reshard_after_forward=True, ignored_params=adapters)
    # The root owns no weights: it makes the layers' states one.
    fully_shard(body, mesh=mesh, ignored_params=set(body.parameters()))
    # Each pass with gradients then goes back through every layer, whichever adapters act in it.
    model.causal.get_input_embeddings().register_forward_hook(_require_gradient)


def _decoder_layers(model: LanguageModel) -> list[nn.Module]:
    """The layers of which transformers says that they stay together, as far as they are not inside each other.

    Raises:
        ValueError: There are none.
    """
    names = set(model.causal._no_split_modules or ())
    layers: list[nn.Module] = []
    inside: set[nn.Module] = set()
    for module in model.causal.base_model.modules():
        if type(module).__name__ in names and module not in inside:
            layers.append(module)
            inside.update(module.modules())
    if not layers:
        raise ValueError(
            f"{type(model.causal).__name__} does not say what its decoder layers are, so that ShardedParallel()"
            " cannot shard it. Use strategy='ddp'."
        )
    return layers


def _require_gradient(module: nn.Module, args: tuple[Any, ...], output: Tensor) -> None:
    if torch.is_grad_enabled():
        output.requires_grad_(True)


class Lockstep:
    """The agreement of all ranks on the next pass of the sharded models.

    Each rank says what it wants: a pass of a model without or with gradients, a backward pass, or nothing more. The
    lowest number of all ranks is done by all, and then the others ask again.

    Args:
        models: The sharded models, the same on every rank.
    """

    def __init__(self, models: Sequence[LanguageModel]) -> None:
        self._models = list(models)
        self._backward, self._nothing = 2 * len(models), 2 * len(models) + 1
        self._idle_states: list[Tensor] = []
        """Results of passes with gradients that only others wanted; they go back together with the others'."""
        self._is_agreed = False
        for number, model in enumerate(self._models):
            # Before FSDP2's own hook, which begins to gather weights.
            model.causal.base_model.register_forward_pre_hook(partial(self._before_pass, number), prepend=True)

    def meet(self) -> None:
        """Do what others want until nobody wants anything more."""
        self._agree_on(self._nothing)
        self._idle_states.clear()

    def with_idle(self, loss: Tensor) -> Tensor:
        """Agree on a backward pass; the loss comes back with the passes in it that only others wanted, times 0."""
        self._agree_on(self._backward)
        return loss + self._idle_loss().to(loss.device) if self._idle_states else loss

    def _before_pass(self, number: int, module: nn.Module, args: tuple[Any, ...]) -> None:
        """Do what others want until all want this."""
        if not self._is_agreed:
            self._agree_on(2 * number + torch.is_grad_enabled())

    def _agree_on(self, wanted: int) -> None:
        while (chosen := self._lowest(wanted)) != wanted:
            if chosen < self._backward:
                self._pass_idle(self._models[chosen // 2], with_gradients=bool(chosen % 2))
            elif self._idle_states:
                self._idle_loss().backward()  # type: ignore[no-untyped-call]

    def _lowest(self, wanted: int) -> int:
        number = torch.tensor(wanted, device=self._models[0].device)
        dist.all_reduce(number, dist.ReduceOp.MIN)
        return int(number)

    def _pass_idle(self, model: LanguageModel, *, with_gradients: bool) -> None:
        token = torch.zeros(1, 1, dtype=torch.long, device=model.device)
        self._is_agreed = True
        try:
            with (
                torch.set_grad_enabled(with_gradients),
                nullcontext() if model.adapters is None else model.adapters.acting(None),
            ):
                states = model.hidden_states(token, token)
        finally:
            self._is_agreed = False
        if with_gradients:
            self._idle_states.append(states)

    def _idle_loss(self) -> Tensor:
        """`[]` 0, with a gradient of 0 to all idle passes so far."""
        total = torch.stack([states.float().sum() for states in self._idle_states]).sum() * 0
        self._idle_states.clear()
        return total
