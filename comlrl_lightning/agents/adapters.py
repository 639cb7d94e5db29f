"""Which adapter of a PEFT model acts: one of them, none, or several at once on the rows of one batch.

PEFT's own `set_adapter` walks the model and flips `requires_grad`, and its `adapter_names` works in evaluation mode
only. `acting` and `grouped` switch two attributes per layer instead and never touch `requires_grad`; the tests hold
them against PEFT's public calls.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from functools import partial
from types import TracebackType
from typing import Any

import torch
from peft import PeftModel
from peft.tuners.lora.layer import Embedding, LoraLayer, MultiheadAttention, ParamWrapper
from peft.tuners.tuners_utils import BaseTunerLayer
from peft.utils.other import AuxiliaryTrainingWrapper, ModulesToSaveWrapper
from torch import Tensor, nn
from torch.nn import functional as F

from comlrl_lightning.utilities.quiet import without_noise

HALF = (torch.float16, torch.bfloat16)
"""Formats in which adapters and heads are not trained."""
FEW_ROWS = 16
"""Rows up to which small products in half precision are slower than in float32, as measured on a CPU."""
REFERENCE = "_reference"
"""What the name of an adapter's frozen initial copy ends with."""


class Grouping:
    """Rows of a batch in consecutive groups, one adapter per group.

    Args:
        names: `[G]` adapter of each group.
        sizes: `[G]` rows of each group; settable, as rows leave a batch.
    """

    def __init__(self, names: Sequence[str], sizes: Sequence[int]) -> None:
        self.names = tuple(names)
        self.sizes = tuple(sizes)
        self._stacks: dict[tuple[int, torch.dtype], tuple[Tensor, Tensor]] = {}

    def keep(self, groups: Sequence[int], size: int) -> None:
        """Go on with some of the groups, each `size` rows long."""
        if len(groups) < len(self.names):
            self.names = tuple(self.names[group] for group in groups)
            self._stacks = {key: (down[groups], up[groups]) for key, (down, up) in self._stacks.items()}
        self.sizes = (size,) * len(groups)

    def add(self, index: int, layer: LoraLayer, x: Tensor, output: Tensor) -> Tensor:
        """`[rows, ..., out]` output of layer `index` with each group's adapter added to it.

        Args:
            index: Number of the layer.
            layer: The layer, which holds the adapters' factors.
            x: `[rows, ..., in]` its input.
            output: `[rows, ..., out]` output of the frozen layer.
        """
        if not any(name in layer.lora_A for name in self.names):
            return output
        dtype = _dtype_of_products(output)
        down, up = self._factors(index, layer, dtype)
        x = x.to(dtype)
        if len(set(self.sizes)) == 1:
            return _add_stacked(x, output, down, up)
        sizes = list(self.sizes)
        cuts = (torch.split(x, sizes), torch.split(output, sizes), torch.split(down, 1), torch.split(up, 1))
        return torch.cat([_add_stacked(*part) for part in zip(*cuts, strict=True)])

    def _factors(self, index: int, layer: LoraLayer, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
        if (index, dtype) not in self._stacks:
            down, up = _stack(layer, self.names)
            self._stacks[index, dtype] = down.to(dtype), up.to(dtype)
        return self._stacks[index, dtype]


def _dtype_of_products(output: Tensor) -> torch.dtype:
    """That of the frozen layer's output, but float32 for a few rows on a CPU: half precision takes twice as long."""
    few = output.device.type == "cpu" and output.dtype in HALF and output.numel() <= FEW_ROWS * output.shape[-1]
    return torch.float32 if few else output.dtype


def _add_stacked(x: Tensor, output: Tensor, down: Tensor, up: Tensor) -> Tensor:
    groups = len(down)
    low = torch.bmm(x.reshape(groups, -1, x.shape[-1]), down.mT)
    base = output.reshape(groups, -1, output.shape[-1])
    if base.dtype == low.dtype:
        return torch.baddbmm(base, low, up.mT).view(output.shape)
    return (base + torch.bmm(low, up.mT)).to(output.dtype).view(output.shape)


def _stack(layer: LoraLayer, names: Sequence[str]) -> tuple[Tensor, Tensor]:
    """`[G, r, in]` and `[G, out, r]` factors, the scale in the second, ranks filled up with zeros to the largest."""
    factors = [_factor(layer, name) for name in names]
    if len(factors) == 1:
        return factors[0][0].unsqueeze(0), factors[0][1].unsqueeze(0)
    rank = max(len(down) for down, _ in factors)
    down = torch.stack([F.pad(down, (0, 0, 0, rank - len(down))) if len(down) < rank else down for down, _ in factors])
    up = torch.stack([F.pad(up, (0, rank - up.shape[1])) if up.shape[1] < rank else up for _, up in factors])
    return down, up


def _factor(layer: LoraLayer, name: str) -> tuple[Tensor, Tensor]:
    if name in layer.lora_A:
        return layer.lora_A[name].weight, layer.lora_B[name].weight * layer.scaling[name]
    like = next(iter(layer.lora_A.values())).weight
    return like.new_zeros(1, layer.in_features), like.new_zeros(layer.out_features, 1)


def _groupable(module: nn.Module) -> bool:
    """Whether a layer is a plain low-rank product on the rows of its input."""
    return (
        isinstance(module, LoraLayer)
        and not isinstance(module, (Embedding, MultiheadAttention, ParamWrapper))
        and not module.lora_variant
        and all(isinstance(down, nn.Linear) for down in module.lora_A.values())
        and all(isinstance(up, nn.Linear) and up.bias is None for up in module.lora_B.values())
    )


class Adapters:
    """The adapters of one PEFT model.

    Args:
        network: The PEFT model, all its adapters loaded.
        names: Adapters that are trained and have a reference.
    """

    def __init__(self, network: PeftModel, names: Sequence[str]) -> None:
        self.network = network
        self.names = tuple(names)
        self.extra_names: tuple[str, ...] = ()
        """Adapters that speak for no agent: they have no reference."""
        self._frozen: tuple[str, ...] = ()
        self.groupable = True
        self._switches: list[BaseTunerLayer | AuxiliaryTrainingWrapper] = []
        self._bridged: set[nn.Module] = set()
        self._grouping: Grouping | None = None
        self._again: Callable[[], AbstractContextManager[Any]] = nullcontext
        self._take_layers()
        self.freeze_all_but_trained()

    def include(self, name: str, *, trained: bool = True) -> None:
        """Take in an adapter that the network has got from elsewhere, to be trained or not."""
        self.extra_names += (name,)
        self._frozen += () if trained else (name,)
        self._take_layers()
        self.freeze_all_but_trained()

    def _take_layers(self) -> None:
        """Find the layers that have come to carry adapters, and let groups of rows use them."""
        layers = [m for m in self.network.modules() if isinstance(m, (BaseTunerLayer, AuxiliaryTrainingWrapper))]
        self.groupable &= all(map(_groupable, layers))
        for layer in layers:
            if layer in self._switches:
                continue
            layer.register_forward_hook(partial(self._add, len(self._switches)))
            self._switches.append(layer)
            if isinstance(layer, ModulesToSaveWrapper):
                layer.register_forward_hook(_back_to_original_dtype)
        self._bridge_dtypes()

    def _bridge_dtypes(self) -> None:
        """Let fully trained copies of layers compute in their own dtype inside a model of another one."""
        for wrapper in self._switches:
            if isinstance(wrapper, ModulesToSaveWrapper):
                for copy in wrapper.modules_to_save.values():
                    if copy not in self._bridged:
                        self._bridged.add(copy)
                        copy.register_forward_pre_hook(_to_own_dtype)

    def _add(self, index: int, layer: nn.Module, args: tuple[Any, ...], output: Tensor) -> Tensor | None:
        grouping = self._grouping
        return None if grouping is None else grouping.add(index, layer, args[0], output)

    @property
    def copies_layers(self) -> bool:
        """Whether an adapter has copies of whole layers (`modules_to_save`)."""
        return any(isinstance(layer, ModulesToSaveWrapper) for layer in self._switches)

    @contextmanager
    def watching(self, rows: int) -> Iterator[None]:
        """Find out during a forward pass of `rows` rows whether every adapted layer still sees them as rows."""

        def watch(layer: nn.Module, args: tuple[Any, ...]) -> None:
            self.groupable &= args[0].shape[0] == rows

        hooks = [layer.register_forward_pre_hook(watch) for layer in self._switches if self.groupable]
        try:
            yield
        finally:
            for hook in hooks:
                hook.remove()

    def freeze_all_but_trained(self) -> None:
        """Leave exactly the trained adapters with `requires_grad`, whatever PEFT made of it."""
        trained = {*self.names, *self.extra_names} - {*self._frozen}
        for name, parameter in self.network.named_parameters():
            parameter.requires_grad_(not trained.isdisjoint(name.split(".")))

    def add_reference(self) -> None:
        """Add a frozen copy of every agent's adapter as it is now."""
        with without_noise():
            for name in self.names:
                self.network.add_adapter(name + REFERENCE, self.network.peft_config[name])
        parameters = dict(self.network.named_parameters())
        for path, parameter in parameters.items():
            parts = path.split(".")
            if any(part.endswith(REFERENCE) for part in parts):
                source = parameters[".".join(part.removesuffix(REFERENCE) for part in parts)]
                parameter.data = source.detach().clone()
        self._take_layers()
        self.freeze_all_but_trained()

    @contextmanager
    def acting(self, name: str | None) -> Iterator[None]:
        """Let one adapter act on all rows, or none of them (the base model)."""
        former = [(layer._active_adapter, layer._disable_adapters) for layer in self._switches]
        state = self._grouping, self._again
        self._grouping, self._again = None, partial(self.acting, name)
        for layer in self._switches:
            layer._disable_adapters = name is None
            if name is not None:
                layer._active_adapter = [name]
        try:
            yield
        finally:
            self._grouping, self._again = state
            for layer, (active, disabled) in zip(self._switches, former, strict=True):
                layer._active_adapter, layer._disable_adapters = active, disabled

    @contextmanager
    def grouped(self, names: Sequence[str], sizes: Sequence[int]) -> Iterator[Grouping]:
        """Let adapter `names[g]` act on the g-th group of rows, `sizes[g]` rows long.

        The adapters' factors are stacked and added to the output of the frozen layers, which run with adapters off.
        """
        assert set(names) <= set(self.network.peft_config), "a missing adapter would pass for the base model"
        with self.acting(None):
            self._grouping = Grouping(names, sizes)
            self._again = partial(self.grouped, names, sizes)
            yield self._grouping

    def checkpoint_contexts(self) -> tuple[AbstractContextManager[Any], AbstractContextManager[Any]]:
        """Contexts for `torch.utils.checkpoint`: the recomputation sees the adapters that the forward pass saw."""
        return nullcontext(), _Again(self._again)


def _to_own_dtype(module: nn.Module, args: tuple[Any, ...]) -> tuple[Any, ...]:
    dtype = next(module.parameters()).dtype
    return tuple(arg.to(dtype) if isinstance(arg, Tensor) and arg.is_floating_point() else arg for arg in args)


def _back_to_original_dtype(wrapper: ModulesToSaveWrapper, args: tuple[Any, ...], output: Any) -> Any:
    if isinstance(output, Tensor) and not torch.is_autocast_enabled(output.device.type):
        return output.to(next(wrapper.original_module.parameters()).dtype)
    return output


class _Again(AbstractContextManager[None]):
    """A context that can be entered once for every backward pass."""

    def __init__(self, make: Callable[[], AbstractContextManager[Any]]) -> None:
        self._make = make

    def __enter__(self) -> None:
        self._context = self._make()
        self._context.__enter__()

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self._context.__exit__(kind, error, traceback)
