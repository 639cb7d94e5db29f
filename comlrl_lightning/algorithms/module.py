"""The base class of all algorithms: rollouts in `training_step`, a buffer, updates, evaluation and checkpoints."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, Literal

import torch
from lightning.pytorch import Callback, Trainer
from lightning.pytorch.trainer.states import TrainerFn
from typing_extensions import override

from comlrl_lightning.agents.settings import Sampling, Separate, SharedBase
from comlrl_lightning.agents.team import AgentTeam
from comlrl_lightning.algorithms.checkpoint import (
    FIXED_SETTINGS,
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
    check_trainer_flags,
    check_uncompiled,
    learning_rates,
)
from comlrl_lightning.algorithms.construction import FUNCTION_ARGUMENTS, task_interface, team_settings
from comlrl_lightning.algorithms.evaluating import TRAIN, Evaluations
from comlrl_lightning.algorithms.lightning_callbacks import prepare_callbacks
from comlrl_lightning.algorithms.methods import ActorCritic, Method
from comlrl_lightning.algorithms.module_callbacks import TellWhatStopped
from comlrl_lightning.data.datamodule import TaskBatch
from comlrl_lightning.environment.joint_format import JointFormat
from comlrl_lightning.files import whole_folder
from comlrl_lightning.keywords import KnownKeywords
from comlrl_lightning.learning.actor_critic import ActorCriticLearner
from comlrl_lightning.learning.gradients import IdleSteps
from comlrl_lightning.learning.settings import PolicySettings, UpdateSettings, gathered
from comlrl_lightning.loggers import keep_run_ids
from comlrl_lightning.metrics import UNPARSED, MetricTable, evaluation_keys, training_keys
from comlrl_lightning.rollouts.collect import RolloutShape, TaskInterface
from comlrl_lightning.rollouts.credit import CreditedNode
from comlrl_lightning.rollouts.recording import (
    ForgetStep,
    record_collection,
    record_nodes,
    stops_with_reward,
    warn_of_rewarded_stops,
)
from comlrl_lightning.types import Rollouts
from comlrl_lightning.utilities.checks import check_finite, check_kind, check_share, check_whole
from comlrl_lightning.utilities.distributed import meet, rank, sum_over_ranks, world_size
from comlrl_lightning.utilities.plain import (
    callable_from_plain,
    from_plain,
    functions_not_held,
    not_held,
    refuse,
    to_plain,
)
from comlrl_lightning.utilities.rng import seeded


class CooperativeModule(Evaluations, KnownKeywords):
    """A team of language models that answers tasks together and learns from one shared reward.

    Args:
        agents: The language models: `SharedBase` (one frozen base, a LoRA adapter per agent) or `Separate` (own weights
            per agent). Weights load in `configure_model`.
        reward_func: ``reward_func(*completions, batch_items=[item])`` gets one list of J texts per agent and returns J
            finite rewards. Keywords ``batch_items``, ``prompts`` and ``turn`` are passed if its signature has them.
        formatters: None (prompts are ``item["prompt"]``), one function for all agents, or one per agent; each returns a
            text or chat messages.
        reward_processor: Maps each reward, in training and in evaluation, for example
            ``RewardProcessors.scale(factor=10.0)``.
        external_transition: Returns the N next prompts after a joint completion; needed when ``num_turns > 1``.
        external_prompt_passthrough: Use the transition's prompts as they are, without the formatters.
        collaboration: ``"decentralized"``: each agent answers by itself. ``"centralized"``: one language model writes
            the answers of all agents in tagged sections; ``agents=SharedBase(...)`` then counts the answers. A
            `JointFormat` does the same with prompts and sections of its own.
        reward_workers: Nodes of a turn that are scored at the same time, in any order, each as soon as all its
            completions are sampled; the rewards are the same. `reward_func` must not use the agents' models then.
            0: in place, one after the other, after sampling.
        reward_backend: ``"thread"``, or ``"process"`` for functions that keep Python busy, crash or hang: it takes a
            function from the top level of a module, without modules of torch, and gives each worker a copy.
        reward_timeout_seconds: A call of `reward_func` that takes longer is an error. A ``"process"`` is then killed
            and replaced; a ``"thread"`` cannot be, and stays behind. None: no limit.
        reward_timeout_value: Reward, before `reward_processor`, of all joint completions of such a call instead of the
            error; their number is logged as ``reward_timeouts``.
        reward_none: What a reward of None means. ``"error"``: it stops the run. ``"skip"``: its joint completion is
            left out of its group as if it had not been sampled. Baselines, normalization, weights, `env_step` and logs
            then know the others alone (rewards 1, None and 4 have the mean 2.5). A completion is left out with the last
            joint completion that holds it: in ``"cross"`` mode it stays while one of its combinations has a reward.
            Where all joint completions that follow one are left out, its return is unknown, and it is left out, too;
            so are an actor-critic's trajectory with None at any turn, an evaluated item likewise, and an item without
            any reward. Preferences pair what is left. Predictions keep None. The number is logged as ``left_out``.
        num_turns: T, the largest number of turns per task item.
        num_generations: K, completions per agent and node, on each rank.
        discount: Factor per turn of later rewards in a return, from 0 to 1.
        early_termination_threshold: A node whose mean processed reward exceeds it is not continued, in training and in
            evaluation. Stopping means reward 0 ever after: with positive rewards it punishes the better branch. None:
            never.
        max_nodes: Largest number of nodes that one task item may grow to; a larger tree is refused at construction.
        sampling: How completions are sampled in training.
        eval_sampling: How they are sampled in evaluation. None: as in training.
        reference_kl_coef: Weight, per nat of sequence KL to the reference policy, in the advantage of the completion
            that has it (a surrogate: earlier turns are not charged for it). 0: no reference policy.
        rollout_buffer_size: Nodes, over all ranks, that are collected before an update. None: those of one batch.
        train_batch_size: Nodes, over all ranks, per optimizer step. None: the whole buffer.
        num_inner_epochs: Passes over the buffer per update.
        clip_epsilon: Importance ratios are clipped below ``1 - clip_epsilon``. None: no clipping.
        clip_epsilon_high: And above ``1 + clip_epsilon_high``. None: `clip_epsilon`.
        importance_level: One importance ratio per ``"token"`` or per ``"sequence"``.
        entropy_coef: Weight, per nat, of the entropy summed over a completion's tokens; it rewards diversity.
        agent_learning_rate: One for all agents or one per agent. None: 1e-4 with LoRA, 5e-6 without.
        optimizer: Makes the optimizer from parameter groups, one per agent; without a learning rate of its own. None:
            AdamW.
        lr_scheduler: Makes a learning-rate schedule that steps once per optimizer step, as Lightning's ``max_steps``
            counts them: also where a step has nothing to learn (all advantages are 0) or is left out (`on_nonfinite`),
            so that no weight moves. None: constant.
        max_grad_norm: Largest gradient norm, per agent. None: no clipping.
        micro_batch_tokens: Padded tokens per forward and backward pass; changes memory and speed, never the result.
        logging_steps: At least so many env_steps, or optimizer steps where nothing is scored, lie between two training
            logs; the end of a fit logs what is left.
        on_nonfinite: ``"raise"`` stops at a loss or gradient that is not finite, ``"skip"`` leaves that update out;
            their share is logged as ``nonfinite_updates``.
        seed: Seeds the adapters' first weights, and every sampled completion together with its epoch, item, path, agent
            and sample. A second fit from epoch 0 draws the same numbers again.
    """

    fixed_settings: tuple[str, ...] = FIXED_SETTINGS
    """Settings that must not change when a run goes on from a checkpoint."""
    method: Method | None = None
    """How the team learns from rewards."""

    def __init__(
        self,
        agents: SharedBase | Separate,
        reward_func: Callable[..., Any],
        formatters: list[Callable[..., Any]] | Callable[..., Any] | None = None,
        reward_processor: Callable[[float], float] | None = None,
        external_transition: Callable[..., Any] | None = None,
        external_prompt_passthrough: bool = False,
        collaboration: Literal["decentralized", "centralized"] | JointFormat = "decentralized",
        reward_workers: int = 0,
        reward_backend: Literal["thread", "process"] = "thread",
        reward_timeout_seconds: float | None = None,
        reward_timeout_value: float | None = None,
        reward_none: Literal["error", "skip"] = "error",
        num_turns: int = 1,
        num_generations: int = 4,
        discount: float = 1.0,
        early_termination_threshold: float | None = None,
        max_nodes: int = 4096,
        sampling: Sampling = Sampling(),  # noqa: B008  (frozen)
        eval_sampling: Sampling | None = None,
        reference_kl_coef: float = 0.0,
        rollout_buffer_size: int | None = None,
        train_batch_size: int | None = None,
        num_inner_epochs: int = 1,
        clip_epsilon: float | None = None,
        clip_epsilon_high: float | None = None,
        importance_level: Literal["token", "sequence"] = "token",
        entropy_coef: float = 0.0,
        agent_learning_rate: float | list[float] | None = None,
        optimizer: OptimizerFactory | None = None,
        lr_scheduler: SchedulerFactory | None = None,
        max_grad_norm: float | None = 1.0,
        micro_batch_tokens: int = 4096,
        logging_steps: int = 1,
        on_nonfinite: Literal["raise", "skip"] = "raise",
        seed: int = 0,
    ) -> None:
        given = {name: value for name, value in locals().items() if name not in ("self", "__class__")}
        super().__init__()
        self.save_hyperparameters(to_plain(given))
        functions = {name: value for name, value in given.items() if name in FUNCTION_ARGUMENTS}
        others = {name: given[name] for name in ("agents", "sampling", "eval_sampling", "collaboration")}
        refuse({**not_held(**others), **functions_not_held(**functions)})
        self.automatic_optimization = False
        self.strict_loading = False  # frozen weights are not in checkpoints; `on_load_checkpoint` checks the rest
        self.agents: SharedBase | Separate = from_plain("agents", agents)
        self.sampling: Sampling = from_plain("sampling", sampling)
        self.eval_sampling: Sampling = from_plain("eval_sampling", eval_sampling) or self.sampling
        check_kind(SharedBase, Separate, agents=self.agents)
        check_kind(Sampling, sampling=self.sampling, eval_sampling=self.eval_sampling)
        self.shape = RolloutShape(num_generations, num_turns, "aligned", early_termination_threshold)
        self.policy = gathered(PolicySettings, {**given, "temperature": self.sampling.temperature})
        self.updates = gathered(UpdateSettings, given)
        check_share(discount=discount)
        check_finite(early_termination_threshold=early_termination_threshold)
        check_whole(1, max_nodes=max_nodes)
        check_whole(0, seed=seed)
        self.discount, self.max_nodes, self.seed, self.num_turns = discount, max_nodes, seed, num_turns
        self.interface = task_interface(given, self.agents.num_agents)
        self.team_settings = team_settings(self.agents, self.interface.joint_format)
        self.num_agents, self.team_size = self.agents.num_agents, self.team_settings.num_agents
        self._set_up_optimizer(agent_learning_rate, optimizer, lr_scheduler)
        self._set_up_state()

    def _set_up_optimizer(
        self,
        agent_learning_rate: float | list[float] | None,
        optimizer: OptimizerFactory | None,
        lr_scheduler: SchedulerFactory | None,
    ) -> None:
        self._given_rates = learning_rates(agent_learning_rate, self.team_size)
        factories = {"optimizer": optimizer or torch.optim.AdamW, "lr_scheduler": lr_scheduler}
        # What a checkpoint could not hold is missed by the next fit only, not by an evaluation.
        self.missing_factories = functions_not_held(**factories)
        self.optimization: dict[str, Any] = {}
        if not self.missing_factories:
            self.optimizer = callable_from_plain("optimizer", factories["optimizer"])
            self.lr_scheduler = callable_from_plain("lr_scheduler", lr_scheduler)
            self.optimization = check_optimizer(self.optimizer, self.lr_scheduler)

    def _set_up_state(self) -> None:
        self.env_step = 0
        self.update_step = 0
        self.idle_steps = IdleSteps()
        self.eval_seed: int | None = None
        self.rollouts: Rollouts | None = None
        self.buffer: list[CreditedNode] = []
        self._evaluated: list[Rollouts] = []
        self.last_log = (0, 0)
        self.step_start: StepStart | None = None
        self.fit_trainer: Trainer | None = None
        self._warned_of_stops = False
        self._resumed: dict[str, Any] | None = None

    def _set_up_method(self, method: Method) -> None:
        """Learn from rewards in this way; the constructor of each such algorithm ends here."""
        self.method = method
        self.shape = method.rollout_shape(self.shape)
        method.check(self.shape, self.team_size, self.sampling, self.max_nodes)
        self._set_up_metrics()

    def _set_up_metrics(self, extra: Sequence[str] = ()) -> None:
        with_kl, parts = self.policy.reference_kl_coef > 0, self.interface.reward.part_names
        critics = [] if self.method is None else self.method.critic_groups(self.team_size)
        sections = [] if self.interface.joint_format is None else [UNPARSED]
        keys = training_keys(self.num_turns, self.team_size, with_kl, parts, critics)
        self.training_metrics = MetricTable([*keys, *sections, *extra])
        keys = evaluation_keys(self.num_turns, with_kl, parts)
        self.evaluation_metrics = MetricTable([*keys, *sections], prefix="eval/")

    @override
    def configure_callbacks(self) -> Sequence[Callback] | Callback:
        check_uncompiled(self)
        # The only hook of the module that runs before Lightning refuses these flags without naming ours.
        check_trainer_flags(self.trainer)
        callbacks: list[Callback] = self.trainer.callbacks  # type: ignore[attr-defined]
        check_checkpoints(callbacks)
        prepare_callbacks(self.trainer)
        present = {type(callback) for callback in callbacks}
        own = [kind() for kind in (ForgetStep, TellWhatStopped) if kind not in present]
        return [*own, *keep_run_ids(self.trainer)]

    @override
    def load_models(self) -> None:
        with seeded(self.seed, torch.get_default_device()):
            self.team = AgentTeam.build(self.team_settings)
            if self.uses_reference:
                self.team.add_reference()
            self.build_learners()
        self.learning_rates = self.initial_learning_rates()

    @property
    def uses_reference(self) -> bool:
        """Whether completions are scored under the reference policies, too."""
        return self.policy.reference_kl_coef > 0

    def build_learners(self) -> None:
        """Make what learns from rewards, for `team`; here critics load, too."""
        assert self.method is not None
        per_agent = self.interface.reward.per_agent
        settings = self.policy, self.updates.micro_batch_tokens, self.training_metrics
        self.learner = self.method.learner(self.team, *settings, per_agent)
        if isinstance(self.learner, ActorCriticLearner):
            self.critics = self.learner.critics

    def initial_learning_rates(self) -> list[float]:
        """Learning rate of each parameter group, in the order of `parameter_groups`."""
        defaults = [1e-4 if self.team.trains_adapter(agent) else 5e-6 for agent in range(self.team_size)]
        rates = [default if rate is None else rate for rate, default in zip(self._given_rates, defaults, strict=True)]
        return rates if self.method is None else [*rates, *self.method.critic_rates(self.team_size)]

    @override
    def setup(self, stage: str) -> None:
        check_data(self.trainer)
        self._resumed = None  # a fit that was refused after it had read its checkpoint may have left something

    @override
    def on_fit_start(self) -> None:
        check_precision(self.trainer.precision, (one for one in self.team.parameters() if one.requires_grad))
        check_shares(self.updates.train_batch_size, world_size())
        # Lightning compares its own logging interval, which our logs do not use, with the length of an epoch.
        warnings.filterwarnings("ignore", message="The number of training batches .* is smaller than the logging")
        self.fit_trainer = self.trainer
        self._forget_leftovers()
        self.train()

    def _forget_leftovers(self) -> None:
        """Leave nothing of a stopped fit to another one; a resumed fit restores its own later."""
        self.buffer.clear()
        self.step_start = None
        self.idle_steps = IdleSteps()
        self.training_metrics.pop()
        self.interface.reward.pop_parts()

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
        self._train_on(batch, is_last)
        batch.mark_trained(is_last)
        has_scored = self.env_step > self.step_start.env_step
        self.step_start = None
        self._log_training(has_scored)
        meet()

    def _train_on(self, batch: TaskBatch, is_last: bool) -> None:
        """Roll out the items, credit what was said, and learn once enough has come together."""
        self.rollouts = self._collect(batch, TRAIN, self.sampling, self.shape, interface=self._training_interface())
        credited = self.learner.credit(self.rollouts, self.discount)
        self._record_collection(self.rollouts, credited)
        self.buffer += credited
        if self._buffer_is_full() or is_last:
            self._update()

    def _training_interface(self) -> TaskInterface:
        """The user's functions that training rolls out with."""
        return self.interface

    def _record_collection(self, rollouts: Rollouts, credited: Sequence[CreditedNode]) -> None:
        self.env_step += round(sum_over_ranks(rollouts.num_scored))
        record_nodes(self.training_metrics, credited, self.interface.reward.pop_parts())
        record_collection(self.training_metrics, rollouts)
        if self.shape.early_termination_threshold is None or self._warned_of_stops:
            return
        if sum_over_ranks(stops_with_reward(rollouts, self.shape)):
            self._warned_of_stops = True
            warn_of_rewarded_stops(self.shape)

    def _log_training(self, has_scored: bool) -> None:
        # Where nothing is scored, as in steps on pairs, optimizer steps count instead.
        since = self.env_step - self.last_log[0] if has_scored else self.update_step - self.last_log[1]
        if since < self.updates.logging_steps:
            return
        self.last_log = (self.env_step, self.update_step)
        self.log_now(self.training_metrics.pop())

    def log_now(self, metrics: Mapping[str, float]) -> None:
        """Write metrics to every logger at the current `env_step`, and to `trainer.callback_metrics`.

        Args:
            metrics: The same on every rank.
        """
        self._write(metrics)
        for key, value in metrics.items():
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

    def save_agents(self, folder: str | Path) -> None:
        """Write ``agent_0/``, ``agent_1/`` ...: standard PEFT or model folders with tokenizers, and critics beside.

        ``contents.json`` lists the files that belong to them; what an earlier save wrote there is replaced.

        Args:
            folder: A local folder, or an address such as ``s3://bucket/agents`` that fsspec reaches.
        """
        self.configure_model()
        if rank() == 0:
            with whole_folder(folder, self) as part:
                self._save_parts(part)

    def _save_parts(self, folder: Path) -> None:
        self.team.save(folder)
        if isinstance(self.method, ActorCritic):
            self.critics.save(folder)

    def __getstate__(self) -> dict[str, Any]:
        return {**super().__getstate__(), "fit_trainer": None}  # as Lightning leaves its trainer out

    @override
    def load_state_dict(self, state_dict: Mapping[str, Any], strict: bool = True, assign: bool = False) -> Any:
        """Load weights as any module does; frozen weights and metrics, which checkpoints leave out, are not missed."""
        self.configure_model()  # a fit in processes of its own brings its weights to a module that has none yet
        keys = super().load_state_dict(state_dict, strict=False, assign=assign)
        return without_left_out(self, keys, strict=strict)

    def progress(self) -> Any:
        """What else a training step of this algorithm changes, as a value that nobody changes afterwards."""
        return None

    def progress_state(self, progress: Any) -> dict[str, Any]:
        """That value as plain values and tensors for a checkpoint. Call it on every rank."""
        return {}

    def restore_progress(self, state: Mapping[str, Any]) -> None:
        """Inverse of `progress_state`."""

    @override
    def on_save_checkpoint(self, checkpoint: dict[str, Any]) -> None:
        save_run(self, checkpoint)

    @override
    def on_load_checkpoint(self, checkpoint: dict[str, Any]) -> None:
        fitting = self._trainer is not None and self.trainer.state.fn == TrainerFn.FITTING
        state = load_run(self, checkpoint, fitting=fitting)
        self._resumed = state if fitting else None
