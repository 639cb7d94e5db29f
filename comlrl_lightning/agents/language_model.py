"""One Hugging Face language model, with the adapters of the agents that speak through it and their tokenizer."""

from __future__ import annotations

import inspect
import warnings
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from copy import deepcopy
from functools import partial
from typing import TYPE_CHECKING, Any

import torch
from peft import PeftModel
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from comlrl_lightning.agents.adapters import HALF, REFERENCE, Adapters, Grouping
from comlrl_lightning.agents.fingerprints import base_parameters, weights_sample
from comlrl_lightning.agents.kv_cache import RoomyLayer, fixed_rotations, new_cache, rotation_is_fixed, sees_everything
from comlrl_lightning.agents.modes import in_evaluation_mode, switch_off_dropout
from comlrl_lightning.agents.prompts import PromptEncoder
from comlrl_lightning.utilities.whole_weights import listed, not_finite

if TYPE_CHECKING:
    from transformers import PreTrainedModel, PreTrainedTokenizerBase


def adapter_name(agent: int) -> str:
    """Name of an agent's adapter, and of its folder."""
    return f"agent_{agent}"


class LanguageModel(nn.Module):
    """A causal language model that speaks for one agent (own weights) or for several (an adapter each).

    Args:
        network: The model, or the PEFT model around it with one adapter per agent.
        tokenizer: Its tokenizer.
        agents: Numbers of the agents that speak through it.
        prompts: Turns prompts into token ids.
        reference: "base" or "initial", see `TeamSettings`.
        names: Adapters to train; None: one per agent, called after it.
    """

    def __init__(
        self,
        network: PreTrainedModel | PeftModel,
        tokenizer: PreTrainedTokenizerBase,
        agents: Sequence[int],
        prompts: PromptEncoder,
        reference: str = "base",
        names: Sequence[str] | None = None,
    ) -> None:
        super().__init__()
        self.network = network
        self.tokenizer = tokenizer
        self.agents = tuple(agents)
        self.prompts = prompts
        self.reference = reference
        names = [adapter_name(agent) for agent in agents] if names is None else names
        self.adapters = Adapters(network, names) if isinstance(network, PeftModel) else None
        self.frozen: LanguageModel | None = None
        self.has_reference = isinstance(network, PeftModel) and reference == "base"
        self.base_sample = (
            [] if self.adapters is None else weights_sample(base_parameters(self.adapters.network).values())
        )
        """A few values of every weight below the adapters, as they were loaded."""
        switch_off_dropout(network)
        checkpointed = [one for one in self.causal.modules() if vars(one).get("gradient_checkpointing")]
        for module in checkpointed:
            vars(module)["gradient_checkpointing"] = False
        self._keep_adapters_in_float32()
        accepted = inspect.signature(self.causal.base_model.forward).parameters
        self._cache_argument = "cache" if "cache" in accepted else "past_key_values"
        self.takes_positions = "position_ids" in accepted
        """Whether it is told where tokens stand, and does not work it out by itself."""
        self.own_head = self._check_head()
        """Whether the logits are just the head's product with the hidden states."""
        config = self.causal.config
        plain = self.takes_positions and sees_everything(config) and rotation_is_fixed(config)
        self.reads_prompts_once = self.own_head and plain
        """Whether completions of the same prompt share its reading when they are scored."""
        with in_evaluation_mode(self.network):
            self._check_decoding()
        if checkpointed:
            self.checkpoint_activations()

    @property
    def causal(self) -> PreTrainedModel:
        """The model itself, adapter layers inside."""
        return self.network if self.adapters is None else self.adapters.network.get_base_model()

    @property
    def device(self) -> torch.device:
        """Where its inputs go."""
        device: torch.device = self.causal.get_input_embeddings().weight.device
        return device

    @property
    def vocabulary_size(self) -> int:
        """V, the width of its logits."""
        return int(self.causal.get_output_embeddings().weight.shape[0])

    @property
    def hidden_size(self) -> int:
        """H, the width of its hidden states."""
        return int(self.causal.get_output_embeddings().weight.shape[1])

    @property
    def end_ids(self) -> tuple[int, ...]:
        """Every token that ends a completion: the generation settings' and the tokenizer's."""
        ends = self.causal.generation_config.eos_token_id
        listed = ends if isinstance(ends, (list, tuple)) else [ends]
        given = {int(end) for end in (*listed, self.tokenizer.eos_token_id) if end is not None}
        return tuple(sorted(end for end in given if end < self.vocabulary_size))

    @property
    def max_positions(self) -> int | None:
        """Longest sequence that the model can read; None: no limit."""
        config = self.causal.config.get_text_config(decoder=True)
        # GPT-2 and its kin call it otherwise and map the usual name to theirs.
        name = "max_position_embeddings"
        positions: int | None = vars(config).get(config.attribute_map.get(name, name))
        return min((limit for limit in (positions, fixed_rotations(config)) if limit is not None), default=None)

    def prompt_limit(self, agent: int, max_new_tokens: int) -> int | None:
        """Longest prompt that leaves room for a completion; None: no limit.

        Raises:
            ValueError: There is no room for any prompt.
        """
        if self.max_positions is None:
            return None
        # The last sampled token is never read.
        limit = self.max_positions - max_new_tokens + 1
        if limit < 1:
            raise ValueError(
                f"Sampling(max_new_tokens={max_new_tokens}) leaves no room for a prompt: the model of agent_{agent} "
                f"reads {self.max_positions} tokens. Lower it."
            )
        return limit

    @property
    def mixes_agents(self) -> bool:
        """Whether rows of several agents can share a batch."""
        return self.adapters is not None and self.adapters.groupable

    @property
    def head_is_adapted(self) -> bool:
        """Whether the agents' heads differ."""
        if self.adapters is None:
            return False
        head = self.causal.get_output_embeddings()
        return any(name in path.split(".") for path, _ in head.named_parameters() for name in self.adapters.names)

    def acting_as(
        self, agents: Sequence[int], sizes: Sequence[int], *, reference: bool = False
    ) -> AbstractContextManager[Grouping | None]:
        """Let consecutive groups of rows speak as these agents; one agent at a time unless `mixes_agents`.

        Args:
            agents: `[G]` agent of each group.
            sizes: `[G]` rows of each group.
            reference: Speak as their reference policies instead.
        """
        if self.adapters is None:
            return nullcontext()
        if reference and self.reference == "base":
            return self._base()
        return self.acting_through([adapter_name(agent) + (REFERENCE if reference else "") for agent in agents], sizes)

    def acting_through(self, names: Sequence[str], sizes: Sequence[int]) -> AbstractContextManager[Grouping | None]:
        """Let consecutive groups of rows pass through these adapters; one at a time unless `mixes_agents`.

        Args:
            names: `[G]` adapter of each group.
            sizes: `[G]` rows of each group.
        """
        if self.adapters is None:
            return nullcontext()
        if self.adapters.groupable:
            return self.adapters.grouped(names, sizes)
        (name,) = names
        return self._single(name)

    @contextmanager
    def _base(self) -> Iterator[None]:
        assert self.adapters is not None
        with self.adapters.acting(None):
            yield

    @contextmanager
    def _single(self, name: str) -> Iterator[None]:
        assert self.adapters is not None
        with self.adapters.acting(name):
            yield

    def hidden_states(self, ids: Tensor, positions: Tensor, mask: Tensor | None = None, cache: Any = None) -> Tensor:
        """`[R, S, H]` last hidden states.

        Args:
            ids: `[R, S]` tokens.
            positions: `[R, S]` their positions.
            mask: `[R, past + S]` True at real tokens; None: all are, or the rest stands to their right.
            cache: Keys and values of the tokens before, grown by this call.
        """
        output: Tensor = self.causal.base_model(**self._arguments(ids, positions, mask, cache)).last_hidden_state
        return output

    def head(self, hidden: Tensor) -> Tensor:
        """`[..., V]` logits of `[..., H]` hidden states; only where the model's own logits are no more than that."""
        logits: Tensor = self.causal.get_output_embeddings()(hidden)
        return logits

    def head_as(self, agent: int, hidden: Tensor, *, reference: bool = False) -> Tensor:
        """`head`, with the adapter of one agent in it."""
        with self.acting_as([agent], [len(hidden)], reference=reference):
            return self.head(hidden)

    def next_logits(self, ids: Tensor, positions: Tensor, mask: Tensor | None, cache: Any) -> Tensor:
        """`[R, V]` logits of the token after the last; arguments as for `hidden_states`."""
        if self.own_head:
            # A view of the last position would make the product copy the head's weights for every row.
            return self.head(self.hidden_states(ids, positions, mask, cache)[:, -1].contiguous())
        return self._kept_logits(ids, positions, 1, mask, cache)[:, -1]

    def predictors(
        self, ids: Tensor, positions: Tensor, rows: Tensor, columns: Tensor
    ) -> tuple[Tensor, Callable[[Tensor], Tensor]]:
        """`[M, ...]` features at the places (row, column) and the function that makes them `[M, V]` logits.

        Args:
            ids: `[R, S]` tokens, padded on the right.
            positions: `[R, S]` their positions.
            rows: `[M]` places whose next token is wanted.
            columns: `[M]`.
        """
        if self.own_head:
            return self.hidden_states(ids, positions)[rows, columns], self.causal.get_output_embeddings()
        first = int(columns.min())
        return self._kept_logits(ids, positions, ids.shape[1] - first)[rows, columns - first], nn.Identity()

    def _kept_logits(
        self, ids: Tensor, positions: Tensor, keep: int, mask: Tensor | None = None, cache: Any = None
    ) -> Tensor:
        logits: Tensor = self.causal(**self._arguments(ids, positions, mask, cache), logits_to_keep=keep).logits
        return logits

    def _arguments(self, ids: Tensor, positions: Tensor, mask: Tensor | None, cache: Any) -> dict[str, Any]:
        arguments = {"input_ids": ids, "attention_mask": mask, "use_cache": cache is not None}
        if cache is not None:
            arguments[self._cache_argument] = cache
        if self.takes_positions:
            arguments["position_ids"] = positions
        return arguments

    @torch.no_grad()
    def _check_head(self) -> bool:
        """Compare body and head with the model's logits: soft-capping and scaling families do more than a product."""
        ids = torch.arange(6, device=self.device).view(2, 3) % self.vocabulary_size
        positions = torch.arange(3, device=self.device).expand(2, 3)
        with nullcontext() if self.adapters is None else self._base(), self._watching_rows(len(ids)):
            if self.causal.base_model is self.causal:  # a body without a name of its own
                self._kept_logits(ids, positions, 1)
                return False
            own = self.head(self.hidden_states(ids, positions))
            return torch.equal(own, self._kept_logits(ids, positions, 3))

    def _check_decoding(self) -> None:
        """Refuse a model whose answers would depend on the batch; warn where it may be no more than rounding.

        Raises:
            ValueError: It does not read texts in a batch, token by token, as it reads them alone and at once.
        """
        errors, is_rounded = self._decoding_errors(), self.causal.dtype in HALF
        # Rounding may send a token to other experts, but hardly in most texts.
        worst = float(errors.median(dim=1).values.max() if is_rounded else errors.max())
        if errors.isnan().any():
            raise ValueError(
                f"The logits of {type(self.causal).__name__} are not finite. {self.reason_not_finite(trained=False)}"
            )
        what = (
            f"{type(self.causal).__name__} reads texts otherwise beside longer ones, or token by token, than alone and"
            " at once"
        )
        if not worst <= (0.5 if is_rounded else 0.02):
            raise ValueError(
                f"{what}: answers would depend on the batch. Use a causal model that heeds position_ids or an"
                " attention_mask, and that keeps everything between two calls in its cache."
            )
        if worst > 0.1:
            warnings.warn(
                f"{what}: logits differ by {worst:.0%} of their spread. Load it once with dtype='float32', which is"
                " refused if this is more than rounding.",
                stacklevel=2,
            )

    def reason_not_finite(self, *, trained: bool = True) -> str:
        """Why logits may not be finite, and what to do about it.

        Args:
            trained: Whether weights that require gradients may have changed since they were loaded.
        """
        weights = [(name, weight) for name, weight in self.causal.named_parameters() if type(weight.data) is Tensor]
        named = [(name.replace(".base_layer", ""), weight) for name, weight in weights]
        if frozen := not_finite((name, weight) for name, weight in named if not (trained and weight.requires_grad)):
            return f"The model itself holds NaN or infinity in {listed(frozen)}. Load an intact one."
        if broken := not_finite(named):
            return f"Training has made {listed(broken)} NaN or infinite. Lower the learning rate."
        if self.causal.dtype == torch.float64:
            return (
                "All weights are. In 64 bits, attention of transformers hides padding by a number that is minus"
                ' infinity in 32 bits. Use dtype="float32" and Trainer(precision="32-true").'
            )
        return "All weights are. Use a wider dtype, or lower the learning rate."

    @torch.no_grad()
    def _decoding_errors(self, num_texts: int = 8, length: int = 8, start: int = 3) -> Tensor:
        """How far the logits after texts are off, for each over their spread, when they are read as samplers do.

        Half of the texts are the ends of the others and stand behind padding, and the rows of the batch change places
        before their last token.

        Args:
            num_texts: Texts that are not the end of another.
            length: Their tokens.
            start: Where their ends begin.

        Returns:
            `[2, num_texts]` errors: of the texts, and of their ends.
        """
        texts = torch.arange(num_texts * length, device=self.device).view(num_texts, length) % self.vocabulary_size
        places = torch.arange(length, device=self.device).expand(num_texts, -1)
        ids, places = texts.repeat(2, 1), torch.cat([places, places - start])
        mask, positions, cache = places >= 0, places.clamp(min=0), new_cache(self.causal.config)
        others = torch.arange(len(ids), device=self.device).flip(0)
        with nullcontext() if self.adapters is None else self._base():
            self.next_logits(ids[:, :-1], positions[:, :-1], mask[:, :-1], cache)
            if all(isinstance(layer, RoomyLayer) and not layer.is_initialized for layer in cache.layers):
                return torch.full((2, num_texts), torch.inf)  # nothing was written there
            cache.reorder_cache(others)
            found = self.next_logits(ids[others, -1:], positions[others, -1:], mask[others], cache)[others]
            whole = self._kept_logits(texts, positions[:num_texts], 1)
            ends = self._kept_logits(texts[:, start:], positions[num_texts:, start:], 1)
        expected = torch.cat([whole, ends])[:, -1].float()
        spread = (expected - expected.mean(-1, keepdim=True)).norm(dim=-1).clamp(min=1e-30)
        errors: Tensor = (found.float() - expected).norm(dim=-1) / spread
        return errors.view(2, num_texts)

    def _watching_rows(self, rows: int) -> AbstractContextManager[None]:
        return nullcontext() if self.adapters is None else self.adapters.watching(rows)

    def include_adapter(self, name: str, *, trained: bool = True) -> None:
        """Take in an adapter of no agent, trained or frozen, that the PEFT model has got after this object was made."""
        assert self.adapters is not None
        switch_off_dropout(self.network)
        self.adapters.include(name, trained=trained)
        self._keep_adapters_in_float32()
        self._check_head()

    def checkpoint_activations(self) -> None:
        """Recompute every layer's activations in the backward pass, under the adapters of the forward pass."""
        run = partial(checkpoint, use_reentrant=False)
        if self.adapters is not None:
            run = partial(run, context_fn=self.adapters.checkpoint_contexts)
        self.reads_prompts_once = False  # transformers gives no keys and values away while it checkpoints
        self.causal._set_gradient_checkpointing(enable=True, gradient_checkpointing_func=run)

    def add_reference(self) -> None:
        """Keep a frozen copy of the present policies, unless there is one or the base model is the reference."""
        if self.has_reference:
            return
        self.has_reference = True
        if self.adapters is None:
            copy = deepcopy(self.network).requires_grad_(False)
            self.frozen = LanguageModel(copy, self.tokenizer, self.agents, self.prompts)
        else:
            self.adapters.add_reference()
            switch_off_dropout(self.network)  # the copies come with the dropout of their settings
            self._keep_adapters_in_float32()

    def _apply(self, fn: Callable[[Tensor], Tensor], recurse: bool = True) -> LanguageModel:
        """Let a cast to half precision (Lightning's `bf16-true`) pass over the adapters: small updates would vanish."""
        adapters = self.adapter_parameters()
        before = [parameter.detach() for parameter in adapters]
        super()._apply(fn, recurse)  # type: ignore[no-untyped-call]
        for parameter, value in zip(adapters, before, strict=True):
            if parameter.dtype in HALF:
                parameter.data = value.to(parameter.device)
        return self

    def adapter_parameters(self) -> list[nn.Parameter]:
        """Everything that adapters have added to the model, trained or not."""
        if self.adapters is None:
            return []
        names = {name + end for name in self.adapters.names for end in ("", REFERENCE)} | {*self.adapters.extra_names}
        return [p for path, p in self.network.named_parameters() if names & set(path.split("."))]

    def _keep_adapters_in_float32(self) -> None:
        for parameter in self.adapter_parameters():
            if parameter.dtype in HALF:
                parameter.data = parameter.data.float()
