"""The base class of all algorithms: a team, the user's functions, evaluation, logging and checkpoints."""

import inspect
import warnings
from collections.abc import Callable, Mapping, Sequence
from contextlib import nullcontext
from dataclasses import field, replace
from pathlib import Path
from typing import Any, Literal, Self, TypeVar

import torch
from lightning.pytorch import Callback, Trainer
from lightning.pytorch.core.optimizer import LightningOptimizer
from lightning.pytorch.trainer.states import TrainerFn
from lightning.pytorch.utilities.types import OptimizerLRScheduler
from torch import Tensor
from torch.nn import Parameter
from torch.nn.parallel import DistributedDataParallel
from torch.optim.lr_scheduler import LRScheduler
from torch.optim.swa_utils import SWALR
from typing_extensions import override

from comlrl_lightning.agents.loading import build_team
from comlrl_lightning.agents.settings import Sampling, Separate, SharedBase
from comlrl_lightning.algorithms.checkpoint import (
    StepStart,
    load_run,
    restore_run,
    save_run,
    without_left_out,
)
from comlrl_lightning.algorithms.checks import (
    OptimizerFactory,
    SchedulerFactory,
    check_batch,
    check_checkpoints,
    check_data,
    check_optimizer,
    check_precision,
    check_shares,
    check_strategy,
    check_temperature,
    check_trainer_flags,
    check_uncompiled,
    learning_rates,
)
from comlrl_lightning.algorithms.dataclass_module import DataclassModule
from comlrl_lightning.algorithms.lightning_callbacks import prepare_callbacks
from comlrl_lightning.algorithms.module_callbacks import ForgetStep, TellWhatStopped
from comlrl_lightning.data.datamodule import TaskBatch
from comlrl_lightning.environment.functions import TaskFunctions
from comlrl_lightning.environment.joint_format import JointFormat, joint_format_of
from comlrl_lightning.environment.reward_workers import RewardWorkers
from comlrl_lightning.environment.text_environment import Environments
from comlrl_lightning.files import whole_folder
from comlrl_lightning.keywords import check_keywords
from comlrl_lightning.learning.gradients import IdleSteps
from comlrl_lightning.learning.updates import OptimizerSteps, StepLearner, StepStats
from comlrl_lightning.loggers import keep_run_ids
from comlrl_lightning.metrics import EPISODE_METRICS, UNPARSED, MetricTable, evaluation_keys, training_keys
from comlrl_lightning.rollouts.collect import Collector, RolloutShape, Sampler
from comlrl_lightning.rollouts.credit import CreditedNode, assign_credit
from comlrl_lightning.rollouts.episodes import EpisodeCollector
from comlrl_lightning.rollouts.recording import (
    prediction,
    record_episodes,
    record_final_rewards,
    record_late,
    record_left_out,
    record_nodes,
    record_unparsed,
)
from comlrl_lightning.tasks.task import FUNCTIONS, Task, load_task
from comlrl_lightning.types import RolloutListener, Rollouts, merge_rollouts
from comlrl_lightning.utilities.calls import check_sent
from comlrl_lightning.utilities.checks import check_choice, check_kind, check_positive, check_whole
from comlrl_lightning.utilities.distributed import gather_objects, rank, world_size
from comlrl_lightning.utilities.plain import (
    argument_to_plain,
    callable_from_plain,
    from_plain,
    functions_not_held,
    not_held,
    refuse,
    to_plain,
)
from comlrl_lightning.utilities.rng import seeded

TRAIN, EVALUATE, PREDICT, COMPARE = range(4)
"""Stages that keep the random streams of completions apart."""

FUNCTION_SETTINGS = (
    "reward_func",
    "formatters",
    "reward_processor",
    "external_transition",
    "environment",
    "optimizer",
    "lr_scheduler",
)
"""Settings that are functions, which a checkpoint holds as import paths."""

R = TypeVar("R")
S = TypeVar("S", bound=StepStats)


class CooperativeModule(DataclassModule):
    """A team of language models that answers tasks together and learns from one shared reward.

    A subclass declares its settings as annotated attributes with a docstring each, checks them in `check_settings`,
    makes what learns in `build_learners`, and learns from a batch of task items in `train_on`.
    """

    agents: SharedBase | Separate = field(kw_only=False)
    """The language models: `SharedBase` (one frozen base, a LoRA adapter per agent) or `Separate` (own weights per
    agent). Weights load in `configure_model`."""
    reward_func: Callable[..., Any] | None = field(default=None, kw_only=False)
    """``reward_func(*completions, batch_items=[item])`` gets one list of J texts per agent and returns J finite
    rewards. Keywords ``batch_items``, ``prompts``, ``turn``, ``num_tokens`` and ``truncated`` (`[N][J]` lists: sampled
    tokens, whether the token limit ended a completion) are passed if its signature has them. None: that of `task`."""
    formatters: list[Callable[..., Any]] | Callable[..., Any] | None = field(default=None, kw_only=False)
    """None (prompts are ``item["prompt"]``), one function for all agents, or one per agent; each returns a text or chat
    messages."""
    task: Task | str | None = None
    """A task set, or its import path: brings `reward_func`, `formatters` and a transition, as far as they are not given
    themselves."""
    reward_processor: Callable[[float], float] | None = None
    """Maps each reward, in training and in evaluation, for example ``RewardProcessors.scale(factor=10.0)``."""
    collaboration: Literal["decentralized", "centralized"] | JointFormat = "decentralized"
    """``"decentralized"``: each agent answers by itself. ``"centralized"``: one language model writes the answers of
    all agents in tagged sections; ``agents=SharedBase(...)`` then counts the answers. A `JointFormat` does the same
    with prompts and sections of its own."""
    reward_workers: int = 0
    """Nodes of a turn that are scored at the same time, in any order, each as soon as all its completions are sampled;
    the rewards are the same. `reward_func` must not use the agents' models then. 0: in place, one after the other,
    after sampling."""
    reward_backend: Literal["thread", "process"] = "thread"
    """``"thread"``, or ``"process"`` for functions that keep Python busy, crash or hang: it takes a function from the
    top level of a module, without modules of torch, and gives each worker a copy."""
    reward_timeout_seconds: float | None = None
    """A call of `reward_func` that takes longer is an error. A ``"process"`` is then killed and replaced; a
    ``"thread"`` cannot be, and stays behind. None: no limit."""
    reward_timeout_value: float | None = None
    """Reward, before `reward_processor`, of all joint completions of such a call instead of the error; their number is
    logged as ``reward_timeouts``."""
    reward_none: Literal["error", "skip"] = "error"
    """What a reward of None means. ``"error"``: it stops the run. ``"skip"``: its joint completion is left out of its
    group as if it had not been sampled. Baselines, normalization, weights, `env_step` and logs then know the others
    alone (rewards 1, None and 4 have the mean 2.5). A completion is left out with the last joint completion that holds
    it: in ``"cross"`` mode it stays while one of its combinations has a reward. Where all joint completions that follow
    one are left out, its return is unknown, and it is left out, too; so are an actor-critic's trajectory with None at
    any turn, an evaluated item likewise, and an item without any reward. Preferences pair what is left. Predictions
    keep None. The number is logged as ``left_out``."""
    sampling: Sampling = Sampling()
    """How completions are sampled in training."""
    eval_sampling: Sampling | None = None
    """How completions are sampled in evaluation. None: as in training."""
    train_batch_size: int | None = None
    """Nodes, or pairs in MADPO, over all ranks, per optimizer step. None: the whole buffer, or a training step's share
    of the pairs."""
    agent_learning_rate: float | list[float] | None = None
    """One for all agents or one per agent. None: 1e-4 with LoRA, 5e-6 without."""
    optimizer: OptimizerFactory | None = None
    """Makes the optimizer from parameter groups, one per agent; without a learning rate of its own. None: AdamW."""
    lr_scheduler: SchedulerFactory | None = None
    """Makes a learning-rate schedule that steps once per optimizer step, as Lightning's ``max_steps`` counts them: also
    where a step has nothing to learn (all advantages are 0) or is left out (`on_nonfinite`), so that no weight moves.
    None: constant."""
    max_grad_norm: float | None = 1.0
    """Largest gradient norm, per agent; ``agent_i/clipped_update_share`` is the share of the updates that it shortened.
    None: no clipping."""
    micro_batch_tokens: int = 4096
    """Padded tokens per forward and backward pass; changes memory and speed, never the result."""
    logging_steps: int = 1
    """At least so many env_steps, or optimizer steps where nothing is scored, lie between two training logs; the end of
    a fit logs what is left."""
    on_nonfinite: Literal["raise", "skip"] = "raise"
    """``"raise"`` stops at a loss or gradient that is not finite, ``"skip"`` leaves that update out; their share is
    logged as ``nonfinite_updates``."""
    seed: int = 0
    """Seeds the adapters' first weights, and every sampled completion together with its epoch, item, path, agent and
    sample. A second fit from epoch 0 draws the same numbers again."""
    num_turns: int = field(init=False, default=1)
    """T, the largest number of turns per task item."""

    def __post_init__(self) -> None:
        self._take_functions_of_task()
        plain = {
            name: to_plain(value) if name in FUNCTION_SETTINGS else argument_to_plain(value)
            for name, value in self.settings().items()
        }
        self.save_hyperparameters(plain)
        self.automatic_optimization = False
        self.strict_loading = False  # frozen weights are not in checkpoints; `on_load_checkpoint` checks the rest
        self._resolve_settings()
        self.check_settings()
        self.num_agents = self.agents.num_agents
        self.functions = self.make_functions()
        self.team_settings = team_settings(self.agents, self.functions.joint_format)
        self.team_size = self.team_settings.num_agents
        self._agent_rates = learning_rates(self.agent_learning_rate, self.team_size)
        self.optimization: dict[str, Any] = {}
        if not self.missing_factories:
            self.optimization = check_optimizer(self.optimizer or torch.optim.AdamW, self.lr_scheduler)
        self.shape = self.rollout_shape()
        self.check_rollouts()
        self.training_metrics = MetricTable(self.training_metric_keys())
        self.evaluation_metrics = MetricTable(self.evaluation_metric_keys(), prefix="eval/")
        self.optimizer_steps = OptimizerSteps(self.training_metrics, self.max_grad_norm, self.on_nonfinite)
        self._set_up_state()

    def _take_functions_of_task(self) -> None:
        """Fill in what the task brings: settings, also those in checkpoints, then name each function by itself."""
        if self.task is not None:
            task, settings = load_task(self.task), self.settings()
            if settings.get("environment") is not None:
                names: Sequence[str] = ()
            elif self.reward_func is not None:
                names = [name for name in FUNCTIONS if name != "environment"]
            else:
                names = FUNCTIONS
            for name in names:
                if name in settings and settings[name] is None:
                    setattr(self, name, getattr(task, name))
            num_agents = getattr(from_plain("agents", self.agents), "num_agents", None)
            if task.num_agents not in (None, num_agents):
                raise ValueError(
                    f"The task is made for {task.num_agents} agents, and agents= has {num_agents}. Use as many."
                )
            self.task = None
        self.check_reward()

    def check_reward(self) -> None:
        """Refuse a module without a reward.

        Raises:
            ValueError: If there is none.
        """
        if self.reward_func is None:
            raise ValueError("There is no reward. Give reward_func=, or task= with one.")

    def _resolve_settings(self) -> None:
        """Turn the plain settings of a checkpoint into objects and functions; others stay as they are."""
        settings = self.settings()
        # An optimizer that a checkpoint could not hold is missed by the next fit only, not by an evaluation.
        self.missing_factories = functions_not_held(optimizer=self.optimizer, lr_scheduler=self.lr_scheduler)
        factories = ("optimizer", "lr_scheduler")
        functions = {name: settings[name] for name in FUNCTION_SETTINGS if name in settings and name not in factories}
        others = {name: value for name, value in settings.items() if name not in FUNCTION_SETTINGS}
        refuse({**not_held(**others), **functions_not_held(**functions)})
        for name, value in settings.items():
            if name in self.missing_factories:
                continue
            if name in FUNCTION_SETTINGS:
                self.__dict__[name] = callable_from_plain(name, value)
            else:
                self.__dict__[name] = from_plain(name, value)

    def _set_up_state(self) -> None:
        self.env_step = 0
        self.update_step = 0
        """Optimizer steps that changed weights; Lightning's `global_step` counts the others, too."""
        self.idle_steps = IdleSteps()
        self.eval_seed: int | None = None
        self.rollouts: Rollouts | None = None
        self.buffer: list[CreditedNode] = []
        """Nodes that were collected and wait for an update; algorithms without a buffer leave it empty."""
        self.last_log = (0, 0)
        self.step_start: StepStart | None = None
        self.fit_trainer: Trainer | None = None
        self._evaluated: list[Rollouts] = []
        self._gathered: Rollouts | None = None
        self._resumed: dict[str, Any] | None = None

    # Settings: what a family of algorithms adds to.

    def check_settings(self) -> None:
        """Refuse settings that are out of range, before any weight is loaded.

        Raises:
            ValueError: If one is; it names the setting, its value and what is allowed.
        """
        check_kind(SharedBase, Separate, agents=self.agents)
        self.eval_sampling = self.eval_sampling or self.sampling
        check_kind(Sampling, sampling=self.sampling, eval_sampling=self.eval_sampling)
        check_temperature(self.sampling)
        check_whole(1, micro_batch_tokens=self.micro_batch_tokens, logging_steps=self.logging_steps)
        if self.train_batch_size is not None:
            check_whole(1, train_batch_size=self.train_batch_size)
        check_positive(max_grad_norm=self.max_grad_norm)
        check_choice(("raise", "skip"), on_nonfinite=self.on_nonfinite)
        check_choice(("error", "skip"), reward_none=self.reward_none)
        check_whole(0, seed=self.seed)

    def make_functions(self) -> TaskFunctions | Environments:
        """The user's functions, or environments, behind checked calls.

        Raises:
            ValueError: If a function does not fit.
        """
        return self.make_task_functions()

    @property
    def task_functions(self) -> TaskFunctions:
        """The user's functions, of a task without an environment."""
        assert isinstance(self.functions, TaskFunctions)
        return self.functions

    def make_task_functions(self) -> TaskFunctions:
        """The user's functions behind checked calls.

        Raises:
            ValueError: If a function does not fit.
        """
        assert self.reward_func is not None
        return TaskFunctions.of_functions(
            self.num_agents,
            self.reward_func,
            self.formatters,
            self.reward_processor,
            joint_format=joint_format(self.collaboration, self.agents),
            none_as_nan=self.reward_none == "skip",
            workers=RewardWorkers(
                self.reward_workers, self.reward_backend, self.reward_timeout_seconds, self.reward_timeout_value
            ),
        )

    def rollout_shape(self) -> RolloutShape:
        """Width and depth of the rollouts that are learned from."""
        return RolloutShape(1)

    def check_rollouts(self) -> None:
        """Refuse rollouts that an algorithm cannot learn from, such as groups of one completion.

        Raises:
            ValueError: If `shape`, `sampling` and the algorithm do not go together.
        """

    def training_metric_keys(self) -> list[str]:
        """All metrics that training may log."""
        keys = training_keys(self.num_turns, self.team_size, self.penalizes_kl, self.functions.part_names)
        return [*keys, *self._other_keys()]

    def evaluation_metric_keys(self) -> list[str]:
        """All metrics that an evaluation may log, without the prefix ``eval/``."""
        keys = evaluation_keys(self.num_turns, self.penalizes_kl, self.functions.part_names)
        return [*keys, *self._other_keys()]

    def _other_keys(self) -> list[str]:
        if isinstance(self.functions, Environments):
            return list(EPISODE_METRICS)
        return [] if self.functions.joint_format is None else [UNPARSED]

    @property
    def penalizes_kl(self) -> bool:
        """Whether advantages pay for leaving the reference policy, which is then logged."""
        return False

    @property
    def uses_reference(self) -> bool:
        """Whether completions are scored under the reference policies, too."""
        return self.penalizes_kl

    # Models and what learns.

    @override
    def configure_callbacks(self) -> Sequence[Callback] | Callback:
        check_uncompiled(self)
        # The only hook of the module that runs before Lightning refuses these flags without naming ours.
        check_trainer_flags(self.trainer)
        callbacks: list[Callback] = self.trainer.callbacks  # type: ignore[attr-defined]
        check_checkpoints(callbacks)
        check_data(self.trainer)
        prepare_callbacks(self.trainer)
        present = {type(callback) for callback in callbacks}
        own = [kind() for kind in (ForgetStep, TellWhatStopped) if kind not in present]
        return [*own, *keep_run_ids(self.trainer)]

    @override
    def configure_model(self) -> None:
        if self._modules.get("team") is None:
            with seeded(self.seed, torch.get_default_device()):
                self.team = build_team(self.team_settings)
                if self.uses_reference:
                    self.team.add_reference()
                self.build_learners()
            self.learning_rates = self.initial_learning_rates()
            self.trained_names = frozenset(name for name, one in self.named_parameters() if one.requires_grad)
            """Names of the weights that were trained when the models had loaded, also while a callback freezes some."""
        if self._trainer is not None:
            check_strategy(self.trainer.strategy, self.team)

    def build_learners(self) -> None:
        """Make what learns, for `team`; critics and reward models load here."""

    def parameter_groups(self) -> dict[str, dict[str, Parameter]]:
        """Everything that is trained, by group; each group has its own learning rate and gradient norm."""
        raise NotImplementedError

    def initial_learning_rates(self) -> list[float]:
        """Learning rate of each parameter group, in the order of `parameter_groups`."""
        defaults = [1e-4 if self.team.trains_adapter(agent) else 5e-6 for agent in range(self.team_size)]
        return [default if rate is None else rate for rate, default in zip(self._agent_rates, defaults, strict=True)]

    @override
    def configure_optimizers(self) -> OptimizerLRScheduler:
        refuse(self.missing_factories)
        named = self.parameter_groups().items()
        groups = [
            {"params": list(parameters.values()), "name": name, "lr": rate}
            for (name, parameters), rate in zip(named, self.learning_rates, strict=True)
        ]
        optimizer = (self.optimizer or torch.optim.AdamW)(groups)
        if self.lr_scheduler is None:
            return optimizer
        return {"optimizer": optimizer, "lr_scheduler": {"scheduler": self.lr_scheduler(optimizer), "name": "lr"}}

    # Training.

    @override
    def setup(self, stage: str) -> None:
        check_data(self.trainer)
        self._resumed = None  # a fit that was refused after it had read its checkpoint may have left something

    @override
    def on_fit_start(self) -> None:
        check_precision(self.trainer.precision, (one for one in self.team.parameters() if one.requires_grad))
        check_shares(self.train_batch_size, world_size())
        # Lightning compares its own logging interval, which our logs do not use, with the length of an epoch.
        warnings.filterwarnings("ignore", message="The number of training batches .* is smaller than the logging")
        self.fit_trainer = self.trainer
        self.discard_unfinished_step()
        self.train()

    def discard_unfinished_step(self) -> None:
        """Drop what a stopped fit has left; a resumed fit restores its own later."""
        self.buffer.clear()
        self.step_start = None
        self.idle_steps = IdleSteps()
        self.training_metrics.pop()

    @override
    def on_train_start(self) -> None:
        if self._resumed is not None:
            restore_run(self, self._resumed)
            self._resumed = None

    @override
    def on_train_end(self) -> None:
        self._write(self.training_metrics.pop())

    @override
    def training_step(self, batch: TaskBatch, batch_idx: int) -> None:
        check_batch(batch)
        self.step_start = StepStart.of(self, batch.epoch, batch.start)
        # Lightning does not see the end of a stream that is shorter than `limit_train_batches`.
        is_last = self.trainer.is_last_batch or batch.is_last
        self.train_on(batch, is_last)
        batch.mark_trained(is_last)
        has_scored = self.env_step > self.step_start.env_step
        self.step_start = None
        self._log_training(has_scored)

    def train_on(self, batch: TaskBatch, is_last: bool) -> None:
        """Learn from a batch of task items.

        Args:
            batch: The items of this rank.
            is_last: Whether the epoch ends here.
        """
        raise NotImplementedError

    def collect(
        self,
        batch: TaskBatch,
        stage: int,
        sampling: Sampling,
        shape: RolloutShape,
        functions: TaskFunctions | Environments,
        sampler: Sampler | None = None,
    ) -> Rollouts:
        """Roll out the items of a batch.

        Args:
            batch: The items.
            stage: Keeps random streams apart.
            sampling: How completions are drawn.
            shape: Width and depth.
            functions: The user's functions, or environments.
            sampler: Source of the completions; None: the team.
        """
        evaluates = stage in (EVALUATE, PREDICT)
        seed = self.eval_seed if evaluates and self.eval_seed is not None else self.seed
        key = (seed, stage, 0 if evaluates else batch.epoch)
        team = self.team if sampler is None else sampler
        if isinstance(functions, Environments):
            episodes = EpisodeCollector(team, functions, shape, sampling, key, self._show_progress)
            return episodes.collect(batch.items, batch.indices)
        collector = Collector(team, functions, shape, sampling, key, self._show_progress)
        return collector.collect(batch.items, batch.indices, keep_unscored=stage == PREDICT)

    def _show_progress(self, turn: int, rows_running: int) -> None:
        for callback in self.trainer.callbacks:  # type: ignore[attr-defined]
            if isinstance(callback, RolloutListener):
                callback.on_rollout_progress(turn, rows_running)

    def optimizer_step_on(self, learner: StepLearner[R, S], rows: Sequence[R]) -> None:
        """One step of the optimizer on a mini-batch of this rank's rows, which may be empty.

        Args:
            learner: Loss over rows.
            rows: Nodes or pairs.
        """
        self._emptied_optimizer()
        outcome = self.optimizer_steps.accumulate(learner, rows, self._backward, self.env_step)
        if outcome == "nonfinite":
            self._emptied_optimizer()
        else:
            self.idle_steps.count(is_idle=outcome == "idle")
        self._count_step(moves=outcome == "moves")

    def idle_step(self) -> None:
        """The step of a mini-batch that has nothing to learn from. Call it on every rank."""
        self._emptied_optimizer()
        self._count_step(moves=False)
        self.idle_steps.count(is_idle=True)

    def _count_step(self, *, moves: bool) -> None:
        """Step optimizer and schedule. Without gradients no weight moves, momentum or not, but Lightning counts."""
        optimizer, scheduler = self.optimizers(), self.lr_schedulers()
        assert isinstance(optimizer, LightningOptimizer)
        self.update_step += moves  # before the step: from here on the weights may be others
        if moves:
            self.team.mark_changed()
        optimizer.step()
        if isinstance(scheduler, LRScheduler) and not isinstance(scheduler, SWALR):  # that one counts epochs
            scheduler.step()

    def _emptied_optimizer(self) -> LightningOptimizer:
        """The optimizer, whose parameters have no gradients."""
        optimizer = self.optimizers()
        assert isinstance(optimizer, LightningOptimizer)
        optimizer.zero_grad(set_to_none=True)
        return optimizer

    def _backward(self, loss: Tensor) -> None:
        """Gradients of this rank alone; they are added over the ranks once per optimizer step."""
        if not loss.requires_grad:  # a callback has frozen all that it depends on
            return
        model = self.trainer.strategy.model
        with model.no_sync() if isinstance(model, DistributedDataParallel) else nullcontext():
            self.manual_backward(loss)

    # Evaluation and prediction: one completion per agent and turn.

    @override
    def on_validation_epoch_start(self) -> None:
        self._evaluated.clear()
        self._gathered = None
        self.evaluation_metrics.pop()  # an evaluation that failed may have left something

    @override
    def validation_step(self, batch: TaskBatch, batch_idx: int) -> None:
        check_batch(batch)
        assert self.eval_sampling is not None
        rollouts = self.collect(batch, EVALUATE, self.eval_sampling, self._single_path, self.functions)
        self._evaluated.append(rollouts)
        self._gathered = None
        credited = assign_credit(rollouts, self.return_discount)
        record_nodes(self.evaluation_metrics, credited, rollouts.reward_parts)
        record_final_rewards(self.evaluation_metrics, rollouts)
        record_unparsed(self.evaluation_metrics, rollouts)
        record_late(self.evaluation_metrics, rollouts)
        record_left_out(self.evaluation_metrics, rollouts)
        record_episodes(self.evaluation_metrics, rollouts)
        self.record_evaluation(rollouts)

    @property
    def return_discount(self) -> float:
        """Factor per turn of later rewards in a return."""
        return 1.0

    def record_evaluation(self, rollouts: Rollouts) -> None:
        """Log what an algorithm adds to an evaluation."""

    @override
    def on_validation_epoch_end(self) -> None:
        metrics = self.evaluation_metrics.pop()
        if metrics and not self.trainer.barebones:
            # "step" is what Lightning takes for the x-axis of its loggers. All ranks have the same values already:
            # their maximum is exact, and Lightning does not ask for a reduction.
            steps = {"env_step": float(self.env_step), "step": float(self.env_step)}
            self.log_dict({**metrics, **steps}, batch_size=1, sync_dist=True, reduce_fx="max")

    @override
    def on_validation_end(self) -> None:
        self._gathered = None

    on_test_epoch_start = on_validation_epoch_start
    test_step = validation_step
    on_test_epoch_end = on_validation_epoch_end
    on_test_end = on_validation_end

    @property
    def _single_path(self) -> RolloutShape:
        return replace(self.shape, num_generations=1, joint_mode="aligned")

    def evaluation_rollouts(self) -> Rollouts:
        """Everything that the running evaluation has sampled, from all ranks in item order. Call it on every rank.

        It is gathered once, however many callbacks ask.
        """
        if self._gathered is None:
            self._gathered = merge_rollouts(gather_objects(self._evaluated))
        return self._gathered

    @override
    def predict_step(self, batch: TaskBatch, batch_idx: int) -> list[dict[str, Any]]:
        check_batch(batch)
        assert self.eval_sampling is not None
        rollouts = self.collect(batch, PREDICT, self.eval_sampling, self._single_path, self.functions)
        return [prediction(rollouts, node) for node in rollouts.nodes]

    # Logs.

    def _log_training(self, has_scored: bool) -> None:
        # Where nothing is scored, as in steps on pairs, optimizer steps count instead.
        since = self.env_step - self.last_log[0] if has_scored else self.update_step - self.last_log[1]
        if since < self.logging_steps:
            return
        self.last_log = (self.env_step, self.update_step)
        self.log_now(self.training_metrics.pop())

    def log_now(self, metrics: Mapping[str, float]) -> None:
        """Write metrics to every logger at the current `env_step`, and to `trainer.callback_metrics`.

        Args:
            metrics: The same on every rank.
        """
        self._write(metrics)
        for key, value in () if self.trainer.barebones else metrics.items():
            self.log(key, value, logger=False, batch_size=1, prog_bar=key.endswith("reward_mean"))

    @property
    def is_resuming(self) -> bool:
        """Whether the state of a checkpoint waits for the start of training."""
        return self._resumed is not None

    def counters(self) -> dict[str, float]:
        """What stands beside every training log; `env_step` is the x-axis."""
        return {"env_step": float(self.env_step)}

    def _write(self, metrics: Mapping[str, float]) -> None:
        for logger in self.trainer.loggers if metrics else ():
            logger.log_metrics({**metrics, **self.counters()}, step=self.env_step)
            logger.save()

    # Files and checkpoints.

    def save_agents(self, folder: str | Path) -> None:
        """Write ``agent_0/``, ``agent_1/`` ...: standard PEFT or model folders with tokenizers, and critics beside.

        ``contents.json`` lists the files that belong to them; what an earlier save wrote there is replaced.

        Args:
            folder: A local folder, or an address such as ``s3://bucket/agents`` that fsspec reaches.
        """
        self.configure_model()
        if rank() == 0:
            with whole_folder(folder, self) as part:
                self.save_models(part)

    def save_models(self, folder: Path) -> None:
        """Write the models of `save_agents` to a local folder, from this process."""
        self.team.save(folder)

    def __getstate__(self) -> dict[str, Any]:
        check_sent({name: value for name, value in self.settings().items() if name in FUNCTION_SETTINGS})
        return {**super().__getstate__(), "fit_trainer": None}  # as Lightning leaves its trainer out

    @classmethod
    def load_from_checkpoint(cls, *args: Any, **kwargs: Any) -> Self:
        """Load a trained module for evaluation, see Lightning's method of the same name; settings win over the file's.

        Raises:
            TypeError: If a keyword is neither Lightning's nor a setting, which Lightning would leave out in silence.
        """
        known = inspect.signature(DataclassModule.load_from_checkpoint).parameters
        check_keywords(cls, [name for name in kwargs if name not in known])
        return super().load_from_checkpoint(*args, **kwargs)

    @override
    def load_state_dict(self, state_dict: Mapping[str, Any], strict: bool = True, assign: bool = False) -> Any:
        """Load weights as any module does; frozen weights and metrics, which checkpoints leave out, are not missed."""
        self.configure_model()  # a fit in processes of its own brings its weights to a module that has none yet
        keys = super().load_state_dict(state_dict, strict=False, assign=assign)
        self.team.mark_changed()
        return without_left_out(self, keys, strict=strict)

    @override
    def get_extra_state(self) -> dict[str, int]:
        """The counters, which go with the weights: a fit in processes of its own brings back nothing else."""
        return {"env_step": self.env_step, "update_step": self.update_step}

    @override
    def set_extra_state(self, state: dict[str, int]) -> None:
        self.env_step, self.update_step = state["env_step"], state["update_step"]

    def round_state(self) -> Any:
        """What else a training step of this algorithm changes, as an immutable value."""
        return None

    def round_state_to_plain(self, state: Any) -> dict[str, Any]:
        """`round_state` as plain values and tensors for a checkpoint. Call it on every rank."""
        return {}

    def restore_round_state(self, state: Mapping[str, Any]) -> None:
        """Inverse of `round_state_to_plain`."""

    @override
    def on_save_checkpoint(self, checkpoint: dict[str, Any]) -> None:
        save_run(self, checkpoint)

    @override
    def on_load_checkpoint(self, checkpoint: dict[str, Any]) -> None:
        fitting = self._trainer is not None and self.trainer.state.fn == TrainerFn.FITTING
        state = load_run(self, checkpoint, fitting=fitting)
        self._resumed = state if fitting else None


def joint_format(collaboration: Any, agents: SharedBase | Separate) -> JointFormat | None:
    """How one language model answers for all agents; None where each answers by itself.

    Raises:
        ValueError: If it is neither a known name nor a format, or the agents are separate models.
    """
    given = joint_format_of(collaboration)
    if given is not None and isinstance(agents, Separate):
        raise ValueError(
            f"collaboration={collaboration!r} is one model that answers for all, but agents=Separate(...) are several."
            " Use SharedBase(model, num_agents=N), which counts the answers."
        )
    return given


def team_settings(agents: SharedBase | Separate, joint_format: JointFormat | None) -> SharedBase | Separate:
    """The settings of the language models that answer: a single one where it answers for all.

    Args:
        agents: As the user wrote them, with one agent per answer.
        joint_format: How one model answers for all; None where each agent answers by itself.

    Raises:
        ValueError: If a folder of adapters lacks that of a model.
    """
    if isinstance(agents, Separate):
        return agents
    return agents.of_size(agents.num_agents if joint_format is None else 1)
