"""A sequence-classification model as a reward function."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from string import Formatter
from typing import TYPE_CHECKING, Any

from comlrl_lightning.keywords import KnownKeywords
from comlrl_lightning.utilities.special_tokens import starts_with_bos

if TYPE_CHECKING:
    from torch import Tensor

Template = str | Callable[[Mapping[str, Any], Sequence[str]], Any]
"""A text with fields, or a function of the task item and the `[N]` completions that returns a text or chat messages."""


class RewardModel(KnownKeywords):
    """Scores joint completions with a model that has a single-score classification head.

    It is used as it is: nothing trains, saves or casts it, and a loaded model stays where it is.

    Args:
        model_name: Name or folder of a model, or a loaded `PreTrainedModel`.
        template: What the model reads for one joint completion. In a text, ``{completion_1}`` is the first agent's
            completion and so on, every other field is one of the task item, as ``{prompt}``. Or a function that takes
            the task item and the `[N]` completions and returns a text or chat messages.
        tokenizer: Name, folder or loaded tokenizer; None takes the one of `model_name`, if that is a name.
        batch_size: Joint completions that are scored at once; a loaded model whose configuration has no padding token
            scores one at a time.
        device: Where a model given by name runs; None is the CPU.
        max_length: Tokens of a text beyond which its tokenizer truncates it; None keeps all.
        model_kwargs: More arguments for `from_pretrained`, such as ``{"dtype": "bfloat16"}``.

    Raises:
        ValueError: If the template names no completion, the model has no trained head with one score, or the arguments
            do not fit together.
    """

    def __init__(
        self,
        model_name: str | Any,
        template: str | Callable[..., Any],
        tokenizer: str | Any | None = None,
        batch_size: int = 16,
        device: str | None = None,
        max_length: int | None = None,
        model_kwargs: dict[str, Any] | None = None,
    ) -> None:
        for argument, value in (("batch_size", batch_size), ("max_length", max_length)):
            if value is not None and value < 1:
                raise ValueError(f"{argument}={value} is not positive. Give 1 or more.")
        self._fields = _template_fields(template)
        self._template = template
        self._tokenizer = _tokenizer(model_name, tokenizer)
        self._model: Any = model_name
        self._device = None
        if isinstance(model_name, str):
            self._model = _load(model_name, model_kwargs or {}, self._tokenizer)
            self._device = device or "cpu"
        elif device is not None or model_kwargs is not None:
            raise ValueError(
                "device and model_kwargs are for a model given by name. Leave them out for a loaded model."
            )
        if (num_labels := self._model.config.num_labels) != 1:
            raise ValueError(
                f"model_name={_name(model_name)} gives {num_labels} scores. Give a reward model, whose head has one."
            )
        self._batch_size = batch_size
        self._max_length = max_length

    def __call__(self, *completions: Sequence[str], batch_items: Sequence[Mapping[str, Any]]) -> list[float]:
        """`[J]` scores of the joint completions."""
        import torch

        model, rows = self._model, [self._encode(batch_items[0], joint) for joint in zip(*completions, strict=True)]
        if self._device is not None:
            model.to(self._device)
        was_training = model.training
        if was_training:
            model.eval()
        try:
            with torch.no_grad():
                return [score for batch in self._batches(rows) for score in self._score(*batch)]
        finally:
            if was_training:
                model.train()

    def _encode(self, item: Mapping[str, Any], completions: tuple[str, ...]) -> list[int]:
        text, chat = self._text(item, completions), False
        if not isinstance(text, str):
            text, chat = self._tokenizer.apply_chat_template(text, tokenize=False), True
        chat = chat or starts_with_bos(self._tokenizer, text)  # a function may have used the template, too
        cut = self._max_length is not None
        tokens = self._tokenizer(text, add_special_tokens=not chat, truncation=cut, max_length=self._max_length)
        ids: list[int] = tokens["input_ids"]
        return ids

    def _text(self, item: Mapping[str, Any], completions: tuple[str, ...]) -> Any:
        if not isinstance(self._template, str):
            return self._template(item, completions)
        fields = {**item, **{f"completion_{agent}": text for agent, text in enumerate(completions, start=1)}}
        if missing := sorted(self._fields - fields.keys()):
            raise ValueError(f"template needs {missing}, but there are only {sorted(fields)}. Name one of these.")
        return self._template.format(**fields)

    def _batches(self, rows: list[list[int]]) -> Iterator[tuple[Tensor, Tensor]]:
        """`[batch, P]` token ids and attention mask, padded on the right."""
        import torch

        pad = self._model.config.get_text_config().pad_token_id
        size = 1 if pad is None else self._batch_size
        for start in range(0, len(rows), size):
            batch = rows[start : start + size]
            width = max(len(row) for row in batch)
            ids = [row + [pad] * (width - len(row)) for row in batch]
            mask = [[1] * len(row) + [0] * (width - len(row)) for row in batch]
            yield torch.tensor(ids, device=self._model.device), torch.tensor(mask, device=self._model.device)

    def _score(self, input_ids: Tensor, attention_mask: Tensor) -> list[float]:
        logits: Tensor = self._model(input_ids=input_ids, attention_mask=attention_mask).logits
        return [float(score) for score in logits[:, 0]]


def _template_fields(template: Template) -> frozenset[str]:
    if not isinstance(template, str):
        return frozenset()
    names = [re.split(r"[.\[]", field)[0] for _, field, _, _ in Formatter().parse(template) if field is not None]
    if not any(re.fullmatch(r"completion_[1-9]\d*", name) for name in names) or not all(names):
        raise ValueError(
            f"template={template!r} must name its fields, with {{completion_1}} or another agent's completion among "
            "them. Write for instance '{prompt} {completion_1} {completion_2}'."
        )
    return frozenset(names)


def _tokenizer(model_name: str | Any, tokenizer: str | Any | None) -> Any:
    if tokenizer is not None and not isinstance(tokenizer, str):
        return tokenizer
    name = model_name if tokenizer is None else tokenizer
    if not isinstance(name, str):
        raise ValueError(f"tokenizer=None, but model_name={_name(model_name)} is a loaded model. Give its tokenizer.")
    from transformers import AutoTokenizer

    return AutoTokenizer.from_pretrained(name)


def _load(name: str, model_kwargs: Mapping[str, Any], tokenizer: Any) -> Any:
    from transformers import AutoModelForSequenceClassification

    from comlrl_lightning.utilities.whole_weights import check_report

    loaded = AutoModelForSequenceClassification.from_pretrained(name, output_loading_info=True, **model_kwargs)
    model, report = loaded
    if report["missing_keys"]:
        raise ValueError(
            f"model_name={name} lacks the weights {sorted(report['missing_keys'])}, which would be random. "
            "Give a trained reward model."
        )
    check_report(f"model_name={name}", model, report)
    config = model.config.get_text_config()
    if config.pad_token_id is None:
        config.pad_token_id = tokenizer.eos_token_id if tokenizer.pad_token_id is None else tokenizer.pad_token_id
    return model


def _name(model: object) -> str:
    return model if isinstance(model, str) else type(model).__name__
