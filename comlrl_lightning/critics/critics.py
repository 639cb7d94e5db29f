"""Critics: the language models that read what agents are asked and answer, and the heads that make it values."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Iterator, Sequence
from contextlib import nullcontext
from dataclasses import dataclass
from functools import partial
from itertools import chain, groupby
from pathlib import Path
from typing import Literal

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from comlrl_lightning.agents.adapter_folders import save_adapters
from comlrl_lightning.agents.adapters import HALF
from comlrl_lightning.agents.language_model import LanguageModel, adapter_name
from comlrl_lightning.agents.threads import run_together
from comlrl_lightning.critics.inputs import CriticReader
from comlrl_lightning.types import Completion
from comlrl_lightning.utilities.whole_weights import check_values

CriticType = Literal["v", "q"]
"""Whether a critic reads prompts alone or prompts and completions."""
HEAD_FILE = "value_head.safetensors"
"""Where a folder holds the head of a critic."""


class Head(nn.Module):
    """Values of hidden states, 0 at first, in float32 or wider whatever the model computes in.

    Args:
        in_features: H of the model below.
        num_outputs: Values per row.
        hidden_size: Width of a hidden layer; None: none.
    """

    def __init__(self, in_features: int, num_outputs: int, hidden_size: int | None = None) -> None:
        super().__init__()
        dtype = torch.promote_types(torch.get_default_dtype(), torch.float32)
        self.hidden = None if hidden_size is None else nn.Linear(in_features, hidden_size, dtype=dtype)
        self.output = nn.Linear(hidden_size or in_features, num_outputs, dtype=dtype)
        nn.init.zeros_(self.output.weight)
        nn.init.zeros_(self.output.bias)

    def forward(self, states: Tensor) -> Tensor:
        """`[R, num_outputs]` values of `[R, H]` hidden states."""
        with torch.autocast(states.device.type, enabled=False):
            states = states.to(self.output.weight)
            values: Tensor = self.output(states if self.hidden is None else F.gelu(self.hidden(states)))
        return values

    def _apply(self, fn: Callable[[Tensor], Tensor], recurse: bool = True) -> Head:
        before = [parameter.detach() for parameter in self.parameters()]
        super()._apply(fn, recurse)  # type: ignore[no-untyped-call]
        for parameter, value in zip(self.parameters(), before, strict=True):
            if parameter.dtype in HALF:
                parameter.data = value.to(parameter.device)
        return self


@dataclass(frozen=True, slots=True)
class CriticBody:
    """What a critic has below its head."""

    name: str
    """Name of the critic, of its parameter group and of its folder."""
    model: LanguageModel
    reader: CriticReader
    adapter: str | None
    """The adapter that it reads through; None: the whole model is its own."""
    is_agent: bool
    """Whether the adapter, or the model, is that of the agent."""
    folder: str | None = None
    """Where its head is loaded from; None: a new head."""


class CriticTeam(nn.Module):
    """The critics of a team: one for each agent, or one for all.

    Args:
        bodies: One per agent, or a single one.
        own_models: The language models among theirs that are not the team's.
        centralized: Whether a single critic reads all agents.
        num_outputs: Values per joint completion of a central critic.
        hidden_size: Width of a hidden layer in the heads; None: none.
    """

    num_critics: int
    """1 if central, else N."""
    num_outputs: int
    """Columns of `values`: 1 or N if central, else N."""
    concurrent: bool
    """Whether the models of several critics read at the same time, each on a device of its own."""

    def __init__(
        self,
        bodies: Sequence[CriticBody],
        own_models: Sequence[LanguageModel],
        *,
        centralized: bool,
        num_outputs: int,
        hidden_size: int | None,
    ) -> None:
        super().__init__()
        self.concurrent = False
        self.num_critics = len(bodies)
        self.num_outputs = num_outputs if centralized else len(bodies)
        self.centralized = centralized
        self.own_models = nn.ModuleList(own_models)
        width = num_outputs if centralized else 1
        # Plain lists: the models that belong to the team are not part of this module.
        self.bodies = list(bodies)
        """What lies below each head."""
        self._trained = [_trained_names(body) for body in bodies]
        self._heads = [Head(body.model.hidden_size, width, hidden_size) for body in bodies]
        self.heads = nn.ModuleList(self._heads)
        for body, head in zip(bodies, self._heads, strict=True):
            if body.folder is not None:
                load_head(head, body.folder)

    def shares_parameters(self) -> bool:
        """Whether the loss of the values reaches parameters of the agents."""
        return any(body.is_agent for body in self.bodies)

    def values(self, samples: Sequence[Sequence[Completion]]) -> Tensor:
        """`[R, num_outputs]` (central) or `[R, N]` (agent i's own critic in column i), with gradients where enabled.

        Rows that read the same are read once. Agents that do not act have no value: 0 stands in their columns.

        Args:
            samples: `[R][N]` joint completions with their prompts; fewer where some agents do not act.
        """
        of_samples = [self._rows(sample) for sample in samples]
        rows = [row for found in of_samples for row in found]
        order = sorted(set(rows), key=lambda row: (row[0], len(row[1]), row[1]))
        device = self._heads[0].output.weight.device
        parts = [part.to(device) for part in self._read_all(order)]
        if not parts:
            return self._heads[0].output.weight.new_zeros(0, self.num_outputs)
        place = {row: position for position, row in enumerate(order)}
        index = torch.tensor([place[row] for row in rows], device=device)
        read = torch.cat(parts)[index]
        if len(rows) == len(samples) * self.num_critics:
            return read.view(len(samples), self.num_outputs)
        cells = [sample * self.num_outputs + critic for sample, found in enumerate(of_samples) for critic, _ in found]
        values = read.new_zeros(len(samples) * self.num_outputs)
        return values.index_put((torch.tensor(cells, device=device),), read[:, 0]).view(len(samples), self.num_outputs)

    def _read_all(self, order: Sequence[tuple[int, tuple[int, ...]]]) -> list[Tensor]:
        """Values of rows that are ordered by critic, batch after batch."""
        work: defaultdict[LanguageModel, list[int]] = defaultdict(list)
        batches = list(self._batches(order))
        for position, (model, _) in enumerate(batches):
            work[model].append(position)

        def of_model(positions: Sequence[int]) -> list[tuple[int, Tensor]]:
            return [(position, self._read(*batches[position])) for position in positions]

        tasks = [(model.device, partial(of_model, positions)) for model, positions in work.items()]
        read = run_together(tasks) if self.concurrent else [task() for _, task in tasks]
        return [values for _, values in sorted(chain.from_iterable(read), key=lambda entry: entry[0])]

    def lengths(self, samples: Sequence[Sequence[Completion]]) -> list[int]:
        """`[R]` padded tokens that the critics read of each joint completion.

        Args:
            samples: `[R][N]` joint completions with their prompts.
        """
        return [self.num_critics * max(len(ids) for _, ids in self._rows(sample)) for sample in samples]

    def _rows(self, sample: Sequence[Completion]) -> list[tuple[int, tuple[int, ...]]]:
        """Which critic reads which tokens of a joint completion."""
        if self.centralized:
            return [(0, self.bodies[0].reader.ids(sample))]
        return [(one.agent, self.bodies[one.agent].reader.ids((one,))) for one in sample]

    def _batches(
        self, rows: Sequence[tuple[int, tuple[int, ...]]]
    ) -> Iterator[tuple[LanguageModel, list[tuple[int, tuple[int, ...]]]]]:
        """Rows, ordered by critic, in as few forward passes as the models allow; the order stays."""

        def shared(row: tuple[int, tuple[int, ...]]) -> tuple[int, int]:
            model = self.bodies[row[0]].model
            return id(model), -1 if model.mixes_agents else row[0]

        for _, batch in groupby(rows, key=shared):
            listed = list(batch)
            yield self.bodies[listed[0][0]].model, listed

    def _read(self, model: LanguageModel, rows: Sequence[tuple[int, tuple[int, ...]]]) -> Tensor:
        """`[len(rows), outputs]` values of rows that one model reads, padded on the right as a causal model allows."""
        groups = [(critic, len(list(group))) for critic, group in groupby(rows, key=lambda row: row[0])]
        sizes = [size for _, size in groups]
        names = [name for critic, _ in groups if (name := self.bodies[critic].adapter) is not None]
        longest = max(len(ids) for _, ids in rows)
        padded = [[*ids, *ids[:1] * (longest - len(ids))] for _, ids in rows]
        ids = torch.tensor(padded, device=model.device)
        positions = torch.arange(longest, device=model.device).expand(len(rows), -1)
        with model.acting_through(names, sizes) if names else nullcontext():
            states = model.hidden_states(ids, positions)
        last = torch.tensor([len(ids) - 1 for _, ids in rows], device=states.device)
        states = states[torch.arange(len(rows), device=states.device), last]
        return torch.cat(
            [self._heads[critic](part) for (critic, _), part in zip(groups, torch.split(states, sizes), strict=True)]
        )

    def parameter_groups(self) -> dict[str, dict[str, nn.Parameter]]:
        """Trained parameters of ``critic``, or of ``critic_0``, ``critic_1``, ...; those of an agent are not in it."""
        return {
            body.name: {**_named(head, "head"), **({} if body.is_agent else _named(body.model, "model", names))}
            for body, head, names in zip(self.bodies, self._heads, self._trained, strict=True)
        }

    def save(self, folder: str | Path) -> None:
        """Write ``critic/``, ``critic_0/`` ..., or a head into each ``agent_i/``, to be loaded again by the settings.

        Args:
            folder: Where the agents are saved too.
        """
        from safetensors.torch import save_file

        for agent, (body, head) in enumerate(zip(self.bodies, self._heads, strict=True)):
            target = Path(folder, adapter_name(agent) if body.is_agent else body.name)
            if not body.is_agent:
                _save_body(body, target)
            target.mkdir(parents=True, exist_ok=True)
            save_file({name: value.contiguous() for name, value in head.state_dict().items()}, target / HEAD_FILE)


def load_head(head: Head, folder: str | Path) -> None:
    """Load the weights of a head from the folder of a critic or agent.

    Raises:
        ValueError: There is none, it is broken, or it has another shape.
    """
    from safetensors import SafetensorError
    from safetensors.torch import load_file

    path = Path(folder, HEAD_FILE)
    if not path.is_file():
        raise ValueError(f"The critic folder {str(folder)!r} holds no {HEAD_FILE}. Use one that save_agents wrote.")
    try:
        saved, own = load_file(path), head.state_dict()
    except SafetensorError as error:
        raise ValueError(f"The head in {str(path)!r} cannot be read: {error}. Give an intact one.") from error
    shapes = [{name: tuple(value.shape) for name, value in weights.items()} for weights in (saved, own)]
    if shapes[0] != shapes[1]:
        raise ValueError(
            f"The head in {str(path)!r} has the shapes {shapes[0]}, this critic {shapes[1]}. "
            "Use the same model, hidden_size and number of values."
        )
    check_values(f"The head in {str(path)!r}", saved)
    head.load_state_dict(saved)


def _named(module: nn.Module, prefix: str, names: frozenset[str] | None = None) -> dict[str, nn.Parameter]:
    """Parameters of a module, all or those of some names, with a prefix."""
    return {
        f"{prefix}.{path}": parameter for path, parameter in module.named_parameters() if names is None or path in names
    }


def _trained_names(body: CriticBody) -> frozenset[str]:
    """Names of the trained parameters below the head of a critic."""
    return frozenset(
        path
        for path, parameter in body.model.named_parameters()
        if parameter.requires_grad and (body.adapter is None or body.adapter in path.split("."))
    )


def _save_body(body: CriticBody, target: Path) -> None:
    adapters = body.model.adapters
    if adapters is None:
        body.model.causal.save_pretrained(target)
    else:
        assert body.adapter == target.name, "PEFT names the folder after the adapter"
        save_adapters(adapters.network, [body.adapter], target.parent)
    body.model.tokenizer.save_pretrained(target)
