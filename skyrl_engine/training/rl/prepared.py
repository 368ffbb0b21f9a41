"""A run by reinforcement before its ranks start: the draft that preparation fills, and the whole that it becomes."""

from attrs import define, field, frozen

from skyrl_engine.config import ResolvedConfig, SelectedPlugin
from skyrl_engine.config.automatic import budget_of, find_attempt_limit, find_prompt_limit
from skyrl_engine.contracts.kinds.advantage import Advantage
from skyrl_engine.contracts.kinds.context import FactoryContext
from skyrl_engine.contracts.kinds.environment import Environment
from skyrl_engine.contracts.kinds.generator import Sampling
from skyrl_engine.contracts.kinds.group_filter import GroupFilter
from skyrl_engine.contracts.values.plan import Layout
from skyrl_engine.engine.assembly import Assembly
from skyrl_engine.engine.automatic import Choice, Choices
from skyrl_engine.engine.frozen_model import FrozenModel
from skyrl_engine.engine.generator_placement import needs_no_ranks
from skyrl_engine.engine.model_files import ModelFiles
from skyrl_engine.registry.bound_plugin import BoundPlugin
from skyrl_engine.rollout.attempt import RolloutLimits
from skyrl_engine.rollout.chat_renderer import ChatRenderer
from skyrl_engine.rollout.columns import Overlong
from skyrl_engine.rollout.ledger import Order
from skyrl_engine.rollout.offline_source import Recording
from skyrl_engine.training.rl.reward_model import RewardModel
from skyrl_engine.training.rl.scoring import ScoringPasses
from skyrl_engine.training.rl.tasks import TaskOrder
from skyrl_engine.training.teacher_endpoint import EndpointTeacher


@frozen(eq=False)
class LiveRolloutSpec:
    """Rollouts that are to be sampled: tasks in their order, and what makes prompts of them."""

    tasks: TaskOrder
    renderer: ChatRenderer


@frozen(eq=False)
class PreparedRl:
    """A run that is ready to start its ranks. `environments` are selected plugins in their order, and `names` what they are called.

    `advantage` is None where pairs are trained on. Where `rollouts` is a recording, there are no `environments`, and `names` are those that it
    was sampled with. `choices` are what the engine chose where the configuration says "auto".
    """

    resolved: ResolvedConfig
    files: ModelFiles
    assembly: Assembly
    layout: Layout
    advantage: BoundPlugin[Advantage] | None
    filters: tuple[BoundPlugin[GroupFilter], ...]
    environments: tuple[SelectedPlugin, ...]
    names: tuple[str, ...]
    rollouts: "LiveRolloutSpec | Recording"
    scoring: ScoringPasses
    reference: FrozenModel | None
    teacher: FrozenModel | None
    endpoint: EndpointTeacher | None
    reward_models: tuple[RewardModel, ...]
    loads: bool
    """True where ranks load a model."""
    choices: tuple[Choice, ...] = ()

    @property
    def sampling(self) -> Sampling:
        """The distribution that attempts are sampled from, but for what an environment or the length says."""
        config = self.resolved.config.rl
        return Sampling(config.max_tokens, config.temperature, stop_strings=config.stop_strings)

    @property
    def overlong(self) -> Overlong | None:
        config = self.resolved.config.rl
        if config.overlong is None:
            return None
        return Overlong(config.overlong.start * config.max_tokens, config.max_tokens, config.overlong.penalty)

    @property
    def longest(self) -> int:
        """The largest number of tokens of an attempt, its prompt included."""
        return find_attempt_limit(self.resolved.config.rl)

    @property
    def in_flight_updates(self) -> bool:
        """Say whether generators get new weights while groups are under way, where sampling goes on beside training."""
        chosen = self.resolved.config.rl.in_flight_updates
        if chosen is None:
            generator = self.resolved.plugins["generator"]
            described = generator.loaded.describe_generator(generator.options)
            return "update_while_generating" in described.capabilities
        return chosen

    @property
    def order(self) -> Order:
        """The order in which groups are trained."""
        rl = self.resolved.config.rl
        if rl.order != "auto":
            return rl.order
        return "finished" if rl.staleness and self.in_flight_updates else "ticket"

    @property
    def optimizer_steps(self) -> int:
        """Count the optimizer steps of the whole run."""
        config = self.resolved.config.rl
        return config.steps * config.mini_batches * config.epochs

    @property
    def limits(self) -> RolloutLimits:
        """The limits of every attempt."""
        config = self.resolved.config
        return RolloutLimits(
            group_size=config.rl.group_size,
            max_prompt_tokens=find_prompt_limit(config.rl),
            max_tokens=config.rl.max_tokens,
            min_group_size=config.rollouts.fewest_finished(config.rl.group_size),
            max_failure_share=config.rollouts.max_failure_share,
            all_may_fail=config.rollouts.max_failure_share == 1,
            keeps_history=config.rl.history == "append",
            keeps_messages=any(model.renderer is not None for model in self.reward_models),
        )

    @property
    def environment_versions(self) -> dict[str, str]:
        """The version of every environment by its name: what it says of itself, and its plugin's. A recording is known by its content."""
        if isinstance(self.rollouts, Recording):
            return {"rl.rollouts": self.rollouts.digest}
        versions = {}
        for name, selected, part in zip(self.names, self.environments, self.rollouts.tasks.environments, strict=True):
            record = selected.loaded.record
            versions[name] = f"{record.version or record.sha256} {part.product.claims.version}".strip()
        return versions


@define(eq=False)
class RlDraft:
    """A run under preparation. What could not be made is None, or missing from its list; each check runs where the parts that it reads are.

    `trains` is false for a run that only evaluates. `longest_prompt` is the number of tokens of the longest prompt among the first tasks, once
    they were rendered.
    """

    resolved: ResolvedConfig
    files: ModelFiles
    trains: bool
    choices: Choices = field(kw_only=True)
    assembly: Assembly | None = None
    advantage: BoundPlugin[Advantage] | None = None
    filters: list[BoundPlugin[GroupFilter]] = field(factory=list)
    environments: list[BoundPlugin[Environment]] = field(factory=list)
    rollouts: LiveRolloutSpec | Recording | None = None
    scoring: ScoringPasses | None = None
    reference: FrozenModel | None = None
    teacher: FrozenModel | None = None
    endpoint: EndpointTeacher | None = None
    reward_models: tuple[RewardModel, ...] = ()
    longest_prompt: int = 0

    @property
    def longest(self) -> int:
        """The largest number of tokens of an attempt, its prompt included."""
        return find_attempt_limit(self.resolved.config.rl)

    @property
    def loads(self) -> bool:
        """True where ranks load a model: false for an evaluation by a generator that drives servers with weights of their own."""
        config = self.resolved.config
        return self.trains or bool(config.rl.reward_models) or not needs_no_ranks(self.resolved.plugins["generator"])

    @property
    def has_pairs(self) -> bool:
        """True where pairs of attempts are trained on, and no advantages are estimated."""
        return self.resolved.config.rl.pairs is not None

    @property
    def is_live(self) -> bool:
        """True where rollouts are sampled, False where they are read."""
        return self.resolved.config.rl.rollouts is None

    @property
    def context(self) -> FactoryContext:
        """The context that plugins are made in."""
        return FactoryContext(self.resolved.config.run.seed, 0, self.longest) if self.assembly is None else self.assembly.context

    def layout_of(self, assembly: Assembly) -> Layout:
        """Return the limits of micro-batches on the ranks of the run."""
        settings = self.resolved.config.rl
        return assembly.layout(micro_batch_rows=settings.micro_batch_rows, micro_batch_tokens=budget_of(settings))

    def selected(self, key: str) -> tuple[SelectedPlugin, ...]:
        """Return the plugins of a list of the configuration, in its order."""
        count = len(getattr(self.resolved.config, key))
        return tuple(self.resolved.plugins[f"{key}[{number}]"] for number in range(count))
