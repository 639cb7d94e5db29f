"""The command line ``comlrl-lightning``: Lightning's, for every algorithm by name, on task items."""

from __future__ import annotations

import difflib
import inspect
import os
import re
import sys
import traceback
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pkgutil import resolve_name
from typing import Any, NoReturn

from jsonargparse import Namespace, set_parsing_settings
from lightning import LightningModule, Trainer
from lightning.pytorch.cli import ArgsType, LightningArgumentParser, LightningCLI, SaveConfigCallback
from lightning.pytorch.utilities import rank_zero_warn
from typing_extensions import override

from comlrl_lightning import callbacks
from comlrl_lightning.agents.settings import Sampling, Separate, SharedBase
from comlrl_lightning.algorithms import ALGORITHMS
from comlrl_lightning.algorithms.checks import check_precision_flag, check_trainer_flags
from comlrl_lightning.algorithms.methods import ActorCritic, CriticFree
from comlrl_lightning.algorithms.module import CooperativeModule
from comlrl_lightning.callbacks.run_path import run_folder
from comlrl_lightning.critics.settings import AdapterCritic, ModelCritic, ValueHead
from comlrl_lightning.data.datamodule import TaskDataModule
from comlrl_lightning.environment.joint_format import TaggedSections as TaggedSections  # known by its name in YAML
from comlrl_lightning.reports import say, sturdy_output
from comlrl_lightning.tasks.task import Task, load_task
from comlrl_lightning.utilities.quiet import quiet_libraries

# Settings that are one of several dataclasses keep their class_path, also inside of others.
CHOICES: list[type | str] = [SharedBase, Separate, ValueHead, AdapterCritic, ModelCritic, CriticFree, ActorCritic]
set_parsing_settings(docstring_parse_attribute_docstrings=True, subclasses_enabled=CHOICES)

RUN_CONFIG = "run-config.yaml"
"""Where the folder of a run holds its whole configuration: a name that no file of the user is likely to have."""

FLAGS = ("config", "trainer", "model", "data", "seed_everything", "ckpt_path", "output", "print_config", "help")
"""What stands beside the settings of trainer, model and data."""
MISTAKES = (
    (r"(?:Option '|unrecognized arguments: -*)([\w.]+)", "is not a setting"),
    (r"Expected a dot import path string: (\S+)", "is neither a known name nor an import path"),
    (r"(module '\S+' has no attribute '\S+?')", "and so the import path leads nowhere"),
    (r"(No module named '\S+?')", "and so the import path leads nowhere"),
)
"""Causes in the parser's long messages, and what they mean."""


class CooperativeParser(LightningArgumentParser):
    """Lightning's parser, whose errors end with their cause, and whose defaults come last."""

    has_settings = False
    """Whether it reads settings itself and leaves them to no subcommand."""

    @override
    def parse_args(  # type: ignore[override]
        self,
        args: Sequence[str] | None = None,
        namespace: Namespace | None = None,
        env: bool | None = None,
        defaults: bool = True,
        **kwargs: Any,
    ) -> Namespace:
        """Parse what is written alone and fill in defaults afterwards.

        Done at once, a flag that changes a class would take the defaults of the file's class for settings of the file.
        """
        if not (self.has_settings and defaults):
            return super().parse_args(args, namespace, env, defaults, **kwargs)
        given = sys.argv[1:] if args is None else list(args)
        printing = [one for one in given if one.partition("=")[0] == "--print_config"]
        written = [one for one in given if one not in printing]
        settings = super().parse_args(written, namespace, env, False, **kwargs)
        return super().parse_args(printing, settings, env, True, **kwargs)

    @override
    def error(self, message: str, ex: Exception | None = None) -> NoReturn:
        plain = re.sub(r"\n *Given value(?: type: .*_namespace\.Namespace'>|: Namespace\(.*)(?=\n|$)", "", message)
        super().error(f"{plain}\n\n{cause}" if (cause := cause_of(message)) else plain, ex)


class SaveRunConfig(SaveConfigCallback):
    """Write the configuration into the folder of the run, also without a logger or with one that has no folders."""

    @override
    def setup(self, trainer: Trainer, pl_module: LightningModule, stage: str) -> None:
        run_folder(trainer)  # agreed on by all ranks
        super().setup(trainer, pl_module, stage)

    @override
    def save_config(self, trainer: Trainer, pl_module: LightningModule, stage: str) -> None:
        text = self.parser.dump(self.config, skip_none=False)
        (run_folder(trainer) / self.config_filename).write_text(text)


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
            save_config_callback=SaveRunConfig,
            save_config_kwargs={"save_to_log_dir": False, "config_filename": RUN_CONFIG},
            parser_class=CooperativeParser,
            args=args,
            run=run,
        )

    @override
    def add_arguments_to_parser(self, parser: LightningArgumentParser) -> None:
        parser.add_argument(
            "--task",
            type=str | None,
            default=None,
            help="Import path of a task set: brings items, formatters, reward, transition and metrics, "
            "as far as they are not given themselves.",
        )
        assert isinstance(parser, CooperativeParser)
        parser.has_settings = True

    @override
    def _prepare_subcommand_parser(self, klass: type, subcommand: str, **kwargs: Any) -> LightningArgumentParser:
        parser = super()._prepare_subcommand_parser(klass, subcommand, **kwargs)
        if subcommand == "predict":
            parser.add_argument(
                "--output",
                type=str | None,
                default=None,
                help="JSON lines of the joint completions. null: predictions.jsonl in the folder of the run.",
            )
        return parser

    @override
    def _parse_ckpt_path(self) -> None:
        """Let YAML and flags win over the settings in a checkpoint: the module compares those that must not change."""

    @override
    def before_instantiate_classes(self) -> None:
        self._pass_task_on()
        trainer = self._get(self.config, "trainer")
        with self._telling_mistakes():
            check_trainer_flags(trainer)
            if self.subcommand in (None, "fit"):
                check_precision_flag(trainer.precision)

    @override
    def instantiate_classes(self) -> None:
        with self._telling_mistakes():
            super().instantiate_classes()
            if (path := self._get(self.config_init, "task")) is not None:
                self._add_metrics(load_task(path))

    def _pass_task_on(self) -> None:
        """Give the task set to the algorithm and to the data, unless they have one of their own."""
        task = self._get(self.config, "task")
        for settings in (self._get(self.config, "model").init_args, self._get(self.config, "data")):
            if settings.task is None:
                settings.task = task

    def _add_metrics(self, task: Task) -> None:
        """Add the callbacks for the metrics of a task, unless the configuration has its own."""
        present: list[Any] = self.trainer.callbacks  # type: ignore[attr-defined]
        if (
            task.eval_logger
            and task.eval_aggregator
            and not any(isinstance(one, callbacks.EvalMetrics) for one in present)
        ):
            present.append(callbacks.EvalMetrics(task.eval_logger, task.eval_aggregator))
        if task.metrics_callback is not None and not any(isinstance(one, callbacks.RolloutMetrics) for one in present):
            present.append(callbacks.RolloutMetrics(task.metrics_callback))

    def predict(self, **kwargs: Any) -> None:
        """Sample joint completions for the evaluation split and write them to ``--output``."""
        self._warn_if_untrained()
        writer = callbacks.JSONPredictions(self._get(self.config, "output"))
        self.trainer.callbacks.append(writer)  # type: ignore[attr-defined]
        self.trainer.predict(**kwargs)
        if self.trainer.is_global_zero:
            say(f"{writer.num_items} items written to {writer.path}\n")

    def before_validate(self) -> None:
        """Say when what is measured was never trained."""
        self._warn_if_untrained()

    before_test = before_validate

    def _warn_if_untrained(self) -> None:
        agents: SharedBase | Separate = self.model.agents
        starts_fresh = isinstance(agents, SharedBase) and agents.adapters is None
        if starts_fresh and self._get(self.config_init, "ckpt_path") is None:
            rank_zero_warn(
                "The agents are untrained: their adapters are fresh. "
                "Pass --ckpt_path CHECKPOINT, or --model.agents.adapters FOLDER as save_agents wrote it."
            )

    @contextmanager
    def _telling_mistakes(self) -> Iterator[None]:
        """Say what is wrong with a setting without the traceback through the parser."""
        try:
            yield
        except ValueError as error:
            self.parser.error(users_message(error), error)


def users_message(error: BaseException) -> str:
    """What is wrong with a setting, out of the parser's errors about it."""
    if _raised_in(error).startswith("jsonargparse"):
        # Of a setting that may be one of several types it lists what each of them says.
        told = re.findall(r"^ *- (?!Expected a )(.+)", str(error), re.MULTILINE)
        if told:
            return str(told[-1])
    return str(users_error(error))


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
    if not key:
        return cause_beside(message)
    if missing := re.findall(r"the following arguments are required: (.+)", message):
        return f"{key}: {missing[-1]} must be given. Add {flags(key, missing[-1])}, or a file with --config FILE."
    for pattern, meaning in MISTAKES:
        if found := re.findall(pattern, message):
            name = str(found[-1])
            if name in settings_of_candidates(message):
                return wrong_value(key, name, message)
            close = difflib.get_close_matches(name.rpartition(".")[2], set(known_names()) - {name}, n=1)
            return f"{key}: {name} {meaning}. {f'Did you mean {close[0]}?' if close else 'Correct it.'}"
    return wrong_value(key, key.rpartition(".")[2], message)


def cause_beside(message: str) -> str:
    """The same where the setting is none of the model's."""
    found = re.search(r"(?:Group|Subcommand) '([\w.]+)' does not accept option '([\w.]+)'", message)
    name = (
        ".".join(found.groups())
        if found
        else next(iter(re.findall(r"unrecognized arguments: -+([\w.]+)", message)), "")
    )
    if not name:
        return ""
    *groups, last = name.split(".")
    group = groups[-1] if groups else ""
    kinds: dict[str, type] = {"data": TaskDataModule, "trainer": Trainer}
    known = [*inspect.signature(kinds[group]).parameters] if group in kinds else FLAGS
    close = difflib.get_close_matches(last, known, n=1)
    where = f"{group}: " if group in kinds else ""
    return f"{where}{last} is not a setting. {f'Did you mean {close[0]}?' if close else 'Leave it out.'}"


def flags(key: str, names: str) -> str:
    """The flags of some settings, named with commas between them."""
    return " ".join(f"--{key}.{name}" for name in names.split(", "))


def settings_of_candidates(message: str) -> set[str]:
    """Settings of the classes that the parser tried a value on."""
    classes = map(resolve_name, re.findall(r"given class_path '([\w.]+)'", message))
    return {name for cls in classes for name in inspect.signature(cls).parameters}


def wrong_value(key: str, name: str, message: str) -> str:
    """What a setting takes, where the message says so."""
    one = rf'Parser key "{name}":\s+Expected a ([^\n]+?)\. Got value'
    several = rf'Parser key "{name}":\s+Does not validate.*\s+Subtypes: \[(.*)\]'
    types = re.search(one, message) or re.search(several, message)
    if types is None:
        return ""
    plain = re.sub(r"<class '(?:\w+\.)*(\w+)'>", r"\1", types[1]).replace("NoneType", "None")
    return f"{key}: the value is not of type {plain.replace(', ', ' or ')}. Correct it."


def known_names() -> list[str]:
    """Algorithms, callbacks and their settings."""
    classes = {*(base for cls in ALGORITHMS for base in cls.__mro__ if issubclass(base, CooperativeModule))}
    described = (*classes, TaskDataModule, SharedBase, Separate, Sampling)
    settings = {name for cls in described for name in inspect.signature(cls).parameters}
    return sorted({*settings, *callbacks.__all__, *(cls.__name__ for cls in classes)})


def main(args: ArgsType = None) -> None:
    """Run the command line.

    Args:
        args: The arguments, in place of those of the process.
    """
    quiet_libraries()
    if "" not in sys.path and os.getcwd() not in sys.path:
        sys.path.insert(0, os.getcwd())  # as `python -m` does: functions of the user's are named by import path
    with sturdy_output():
        CooperativeCLI(args)
