"""A made-up kind of device, ``second:0``, ``second:1`` ..., on which torch really computes, in the memory of the CPU.

Its tensors refuse to meet those of another device, as those of a GPU do. Registering a kind of device cannot be undone,
so this belongs into a process of its own.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.utils._pytree import tree_flatten, tree_map, tree_map_only
from torch.utils.backend_registration import _DummyBackendModule, _setup_privateuseone_for_python_backend

NAME = "second"
COUNT = 3
"""Devices of the kind."""
INDEXING = ("index", "index_put", "index_put_", "_index_put_impl_")
"""Operations that take indices from the CPU, too."""
MAKERS = {
    "empty.memory_format": torch.ops.aten.empty.memory_format,
    "empty_strided": torch.ops.aten.empty_strided.default,
    "arange": torch.ops.aten.arange.default,
    "arange.start": torch.ops.aten.arange.start,
    "arange.start_step": torch.ops.aten.arange.start_step,
}
"""Operations that make tensors out of nothing."""
COPIES = ("copy_", "_to_copy", "_copy_from", "set_data")


class SecondTensor(Tensor):
    """A tensor on the made-up device, around one on the CPU."""

    on_cpu: Tensor

    @staticmethod
    def __new__(cls, inner: Tensor, device: torch.device) -> SecondTensor:
        made: SecondTensor = torch.Tensor._make_wrapper_subclass(
            cls,
            inner.size(),
            strides=inner.stride(),
            storage_offset=inner.storage_offset(),
            dtype=inner.dtype,
            device=device,
        )
        made.on_cpu = inner
        return made

    def __repr__(self, *, tensor_contents: Any = None) -> str:  # type: ignore[override]
        return f"SecondTensor({self.on_cpu!r}, {self.device})"

    def tolist(self) -> Any:
        """Torch refuses to list the numbers of subclasses."""
        return self.on_cpu.tolist()

    def __reduce_ex__(self, protocol: Any) -> Any:
        """Checkpoints are loaded to the CPU."""
        return self.on_cpu.__reduce_ex__(protocol)  # type: ignore[no-untyped-call]

    @classmethod
    def __torch_dispatch__(  # type: ignore[override]
        cls, func: Any, types: Any, args: Sequence[Any] = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        kwargs = dict(kwargs or {})
        name = func.overloadpacket.__name__
        given = [leaf for leaf in tree_flatten((args, kwargs))[0] if isinstance(leaf, Tensor)]
        device = _common_device(name, given)
        if isinstance(wanted := kwargs.get("device"), torch.device):
            device = wanted
            kwargs["device"] = torch.device("cpu")
        result = func(*tree_map(_inner, args), **tree_map(_inner, kwargs))
        if name.endswith("_") and not name.startswith("_") and isinstance(args[0], Tensor):
            return args[0]
        if device.type != NAME:
            return result
        return tree_map_only(Tensor, lambda one: SecondTensor(one, device), result)


def _inner(value: Any) -> Any:
    return value.on_cpu if isinstance(value, SecondTensor) else value


def _common_device(name: str, given: Sequence[Tensor]) -> torch.device:
    """Where an operation runs: scalars may come from the CPU, as may indices."""
    devices = {one.device for one in given if one.dim() or one.device.type != "cpu"}
    if name in COPIES:
        return given[0].device
    if name in INDEXING and given[0].device.type != "cpu":
        devices.discard(torch.device("cpu"))
    if len(devices) > 1:
        raise RuntimeError(f"{name}: tensors on {' and '.join(sorted(map(str, devices)))}")
    return devices.pop() if devices else torch.device("cpu")


class _Module(_DummyBackendModule):
    def device_count(self) -> int:
        return COUNT

    def current_device(self) -> int:
        return 0

    def get_amp_supported_dtype(self) -> list[torch.dtype]:
        return [torch.bfloat16]


def register() -> None:
    """Make torch know the devices."""
    _setup_privateuseone_for_python_backend(NAME, backend_module=_Module())

    def made(function: Callable[..., Tensor]) -> Callable[..., Tensor]:
        def make(*args: Any, device: Any = None, **kwargs: Any) -> Tensor:
            kwargs.pop("pin_memory", None)
            kwargs.pop("layout", None)
            place = torch.device(device)
            return SecondTensor(function(*args, device="cpu", **kwargs), torch.device(NAME, place.index or 0))

        return make

    library = torch.library.Library("aten", "IMPL")  # type: ignore[no-untyped-call]
    for name, function in MAKERS.items():
        library.impl(name, made(function), "PrivateUse1")  # type: ignore[no-untyped-call]
    library.impl("_copy_from", _copied, "PrivateUse1")  # type: ignore[no-untyped-call]
    _KEPT.append(library)


def _copied(source: Tensor, target: Tensor, non_blocking: bool = False) -> Tensor:
    """What `torch.tensor` calls, past the dispatch to Python."""
    _inner(target).copy_(_inner(source))
    return target


_KEPT: list[Any] = []
"""A library is gone with its object."""
