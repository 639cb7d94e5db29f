"""The command line ``comlrl-lightning``: Lightning's, for every algorithm by name, on task items."""

from __future__ import annotations

import difflib
import inspect
import re
import traceback
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any, NoReturn

from jsonargparse import set_parsing_settings
from lightning.pytorch.cli import ArgsType, LightningArgumentParser, LightningCLI
from typing_extensions import override

from comlrl_lightning import callbacks
from comlrl_lightning.algorithms import ALGORITHMS
from comlrl_lightning.algorithms.checks import check_trainer_flags
from comlrl_lightning.algorithms.cooperative import CooperativeModule
from comlrl_lightning.data import TaskDataModule

set_parsing_settings(docstring_parse_attribute_docstrings=True)

RUN_CONFIG = "run-config.yaml"
"""Where the folder of a run holds its whole configuration: a name that no file of the user is likely to have."""

MISTAKES = (
    (r"(?:Option '|unrecognized arguments: -*)([\w.]+)", "is not a setting"),
    (r"Expected a dot import path string: (\S+)", "is neither a known name nor an import path"),
    (r"(module '\S+' has no attribute '\S+?')", "and so the import path leads nowhere"),
    (r"(No module named '\S+?')", "and so the import path leads nowhere"),
)
"""Causes in the parser's long messages, and what they mean."""


class CooperativeParser(LightningArgumentParser):
    """Lightning's parser, whose errors end with their cause."""

    @override
    def error(self, message: str, ex: Exception | None = None) -> NoReturn:
        super().error(f"{message}\n\n{cause}" if (cause := cause_of(message)) else message, ex)


class CooperativeCLI(LightningCLI):
    """LightningCLI on the base class of all algorithms: ``--model MAGRPO``, ``--model.help MAGRPO``.

    Args:
        args: The arguments, in place of those of the process.
        run: Run the subcommand; False only builds trainer, module and data, without a subcommand.
    """

    def __init__(self, args: ArgsType = None, run: bool = True) -> None:
        super().__init__(
            CooperativeModule,
            TaskDataModule,
            subclass_mode_model=True,
            auto_configure_optimizers=False,
            save_config_kwargs={"overwrite": True, "config_filename": RUN_CONFIG},
            parser_class=CooperativeParser,
            args=args,
            run=run,
        )

    @override
    def _prepare_subcommand_parser(self, klass: type, subcommand: str, **kwargs: Any) -> LightningArgumentParser:
        parser = super()._prepare_subcommand_parser(klass, subcommand, **kwargs)
        if subcommand == "predict":
            parser.add_argument(
                "--output", type=str, default="predictions.jsonl", help="JSON lines of the joint completions."
            )
        return parser

    @override
    def _parse_ckpt_path(self) -> None:
        """Let YAML and flags win over the settings in a checkpoint: the module compares those that must not change."""

    @override
    def before_instantiate_classes(self) -> None:
        trainer = self._get(self.config, "trainer")
        with self._telling_mistakes():
            check_trainer_flags(trainer.gradient_clip_val, trainer.accumulate_grad_batches)

    @override
    def instantiate_classes(self) -> None:
        with self._telling_mistakes():
            super().instantiate_classes()

    def predict(self, **kwargs: Any) -> None:
        """Sample joint completions for the evaluation split and write them to ``--output``."""
        writer = callbacks.JSONPredictions(self._get(self.config, "output"))
        self.trainer.callbacks.append(writer)  # type: ignore[attr-defined]
        self.trainer.predict(**kwargs)

    @contextmanager
    def _telling_mistakes(self) -> Iterator[None]:
        """Say what is wrong with a setting without the traceback through the parser."""
        try:
            yield
        except ValueError as error:
            self.parser.error(str(users_error(error)), error)


def users_error(error: BaseException) -> BaseException:
    """The outermost error of a chain that the parser did not raise to report another one."""
    while (inner := error.__cause__ or error.__context__) is not None and _raised_in(error).startswith("jsonargparse"):
        error = inner
    return error


def _raised_in(error: BaseException) -> str:
    """Name of the module that raised an error."""
    frames = [frame for frame, _ in traceback.walk_tb(error.__traceback__)]
    return str(frames[-1].f_globals["__name__"]) if frames else ""


def cause_of(message: str) -> str:
    """One sentence on what a long message of the parser comes from, with a name that may have been meant; or ``""``."""
    key = ".".join(dict.fromkeys(re.findall(r'Parser key "([\w.]+)"', message)))
    for pattern, meaning in MISTAKES:
        if key and (found := re.findall(pattern, message)):
            name = str(found[-1])
            close = difflib.get_close_matches(name.rpartition(".")[2], known_names(), n=1)
            return f"{key}: {name} {meaning}. {f'Did you mean {close[0]}?' if close else 'Correct it.'}"
    return ""


def known_names() -> list[str]:
    """Algorithms, callbacks and their settings."""
    classes = {*(base for cls in ALGORITHMS for base in cls.__mro__ if issubclass(base, CooperativeModule))}
    settings = {name for cls in (*classes, TaskDataModule) for name in inspect.signature(cls).parameters}
    return sorted({*settings, *callbacks.__all__, *(cls.__name__ for cls in classes)})


def main(args: ArgsType = None) -> None:
    """Run the command line.

    Args:
        args: The arguments, in place of those of the process.
    """
    CooperativeCLI(args)
