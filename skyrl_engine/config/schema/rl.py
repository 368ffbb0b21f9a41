"""`[rl]`, `[rollouts]`, `[reference]`, `[teacher]` and `[[environments]]`: the tables of training by reinforcement."""

from typing import Literal, cast

from attrs import field, frozen
from attrs.validators import and_, deep_iterable, ge, gt, in_, le, lt, min_len, optional

from skyrl_engine.config.schema.auto_or import AutoOr
from skyrl_engine.config.schema.reward_model import RewardModelTable
from skyrl_engine.config.schema.tables import PluginTable
from skyrl_engine.contracts.values.model import CODE, PLACE

Old = Literal["auto", "current", "score", "rollout"]
Truncated = Literal["keep", "mask", "zero_reward"]
Estimator = Literal["k1", "k2", "k3"]
_FINITE = lt(float("inf"))


@frozen
class OverlongConfig:
    """A soft punishment of long attempts (DAPO, Yu et al. 2025, eq. 13), which grows evenly from `start` to `rl.max_tokens`."""

    start: float = field(default=0.8, validator=[ge(0.0), lt(1.0)])
    """Length, as a share of `rl.max_tokens`, up to which nothing is punished."""

    penalty: float = field(default=1.0, validator=[ge(0.0), _FINITE])
    """Reward that is taken off at `rl.max_tokens`."""


@frozen
class RewardKlConfig:
    """A penalty in the reward for leaving the reference model, per sampled token."""

    coef: float = field(validator=[ge(0.0), _FINITE])
    """Coefficient of the penalty; with `target` the one to begin with."""

    estimator: Estimator = field(default="k1", validator=in_(("k1", "k2", "k3")))
    """Estimator of the divergence (Schulman 2020): `k1` is the log-ratio, `k2` half its square, `k3` ratio - 1 - log-ratio."""

    target: float | None = field(default=None, validator=optional(gt(0.0)))
    """Divergence per attempt, in nats, that the coefficient is steered to (Ziegler et al. 2019); none: the coefficient stays."""

    horizon: int = field(default=10_000, validator=ge(1))
    """Attempts over which the coefficient is steered."""


@frozen
class EntropyControlConfig:
    """Steering of the coefficient of the term `entropy`, once per optimizer step (Skywork-OR1, He et al. 2025, arXiv:2505.22312)."""

    target: float = field(validator=[gt(0.0), _FINITE])
    """Mean entropy per token, in nats, at or below which the bonus is applied and its coefficient rises; above it falls, unapplied."""

    delta: float = field(default=0.005, validator=[gt(0.0), _FINITE])
    """Change of the coefficient after each optimizer step."""

    lowest: float = field(default=0.0, validator=[ge(0.0), _FINITE])
    """Smallest coefficient."""

    highest: float = field(default=1.0, validator=[ge(0.0), _FINITE])
    """Largest coefficient; not below `lowest`."""


@frozen
class RlConfig:
    """Training by reinforcement: the length of training, its batches, and what is computed from rollouts."""

    preset: str = "grpo"
    """A published recipe by name; every key of the configuration wins over it. `none` takes the engine's own defaults."""

    steps: int = field(default=100, validator=ge(1))
    """Batches of rollouts to train on."""

    groups: int = field(default=16, validator=ge(1))
    """Tasks per step."""

    group_size: int = field(default=8, validator=ge(1))
    """Attempts per task."""

    pairs: int | None = field(default=None, validator=optional(ge(1)))
    """Pairs of attempts per task that a loss of preferences, such as `dpo`, is trained on: the attempt of the highest reward against the one of
    the lowest, the second from above against the second from below, while rewards differ. none: all attempts are trained on, by their
    advantages."""

    mini_batches: int = field(default=1, validator=ge(1))
    """Optimizer steps per pass over a batch; groups stay whole."""

    epochs: int = field(default=1, validator=ge(1))
    """Passes over a batch."""

    max_prompt_tokens: Literal["auto"] | int = field(default="auto", validator=AutoOr(ge(1)))
    """Longest prompt of a task; longer ones are refused while planning, as far as it looks, and later fail their attempts. `auto`: 1,024, or
    what `max_tokens` leaves of the model's positions where that is less."""

    max_tokens: int = field(default=512, validator=ge(1))
    """Most tokens of an attempt after its prompt: those of all its turns together, sampled ones and observations of the environment."""

    temperature: float = field(default=1.0, validator=[gt(0.0), _FINITE])
    """Temperature that attempts are sampled and scored with."""

    template: Literal["auto", "none"] = field(default="auto", validator=in_(("auto", "none")))
    """Writing of prompts that are texts, by the rule of `data.template`: `auto` has the model's chat template write them where its tokenizer
    has one; `none` samples after the texts as they are. Messages, several turns and tools need the chat template."""

    stop_strings: tuple[str, ...] = field(default=(), validator=deep_iterable(min_len(1)))
    """Texts that end a turn, in addition to the model's end tokens; they stay in it. Environments may set others for later turns."""

    staleness: int = field(default=0, validator=ge(0))
    """Most steps (S) between the weights that a group was started with and those that it trains. 0 samples and trains in turns; above it,
    sampling goes on while the ranks train, and no group is thrown away for its age."""

    order: Literal["auto", "finished", "ticket"] = field(default="auto", validator=in_(("auto", "finished", "ticket")))
    """Groups that a step takes where `staleness` is above 0: `finished` those that ended first, as far as the bound allows; `ticket` in the
    order in which they were started. `auto`: `finished` with `in_flight_updates`, else `ticket`."""

    in_flight_updates: bool | None = None
    """Give new weights to generators while they sample, which go on with them, where `staleness` is above 0. False: an update waits until the
    groups under way have ended; with the order `ticket` such a run has the same bits every time. None: where the generator can."""

    concurrency: int | None = field(default=None, validator=optional(ge(1)))
    """Most groups that are sampled at once; none: as many as `staleness` allows."""

    old: Old = field(default="auto", validator=in_(("auto", "current", "score", "rollout")))
    """The old policy's log-probabilities: `current` are those of the training pass itself, `score` those of a pass before the first update,
    `rollout` the sampler's own, whose last bits depend on what was sampled at the same time, so that resumed runs equal others within rounding
    only; `auto` takes `current` where a batch is one optimizer step and `[rl.kl]` is not set, else `score`."""

    history: Literal["append", "template"] = field(default="append", validator=in_(("append", "template")))
    """Tokens in front of a later turn: `append` all tokens as they were, `template` the messages rendered again; a preset's mean over sequences
    is then `trajectory_mean`, which counts an attempt once."""

    truncated: Truncated = field(default="keep", validator=in_(("keep", "mask", "zero_reward")))
    """Attempts that ended at `rl.max_tokens`: `keep` trains on them, `mask` gives them no loss, `zero_reward` no reward."""

    missing_eos_penalty: float | None = field(default=None, validator=optional(and_(gt(0.0), _FINITE)))
    """Reward that is taken off an attempt whose last turn the model did not end itself, by an end token or a stop string, so that the length
    cut it. It counts in pairs, advantages and `reward/mean`. none: nothing is taken off."""

    max_gap: float | None = field(default=None, validator=optional(gt(0.0)))
    """Mean distance in nats between the sampler's log-probabilities and the model's that is too large; none: 1e-3 in float32 and 0.05 in
    bfloat16."""

    on_gap: Literal["stop", "warn"] = field(default="stop", validator=in_(("stop", "warn")))
    """Answer to two steps in a row above `max_gap`: a sampler that does not hold the weights it was given trains another model."""

    max_idle_steps: int | None = field(default=cast("int | None", 20), validator=optional(ge(1)))
    """Steps in a row whose gradient is exactly 0 after which the run writes a checkpoint and ends; none: never. The first is logged with its
    reason, such as attempts that are all cut off or equal rewards."""

    repeat_tasks: bool = True
    """Begin again, in another order, when every task was attempted; otherwise too few tasks are refused."""

    skip_zero_gradients: bool = True
    """Compute attempts without gradients where theirs is known to be 0: all advantages are 0, the loss and its terms are `homogeneous` in
    them, and no correction is used. Metrics and outputs stay about all tokens. Attempts without a token that carries loss are not computed."""

    entropy_metric: bool = True
    """Report the entropy of the model over sampled tokens."""

    micro_batch_rows: int | None = field(default=None, validator=optional(ge(1)))
    """Rows per micro-batch, of one sample each; give this or `micro_batch_tokens`."""

    micro_batch_tokens: Literal["auto"] | int | None = field(default="auto", validator=AutoOr(optional(ge(1))))
    """Most tokens that a micro-batch computes, padding included. `auto`: 2,048 on CPU, planned from the model and the memory of the device
    elsewhere, and never less than the longest attempt may take. none: each rank computes all its samples in one micro-batch. Give this
    or `micro_batch_rows`."""

    rollouts: str | None = field(default=None, validator=optional(min_len(1)), metadata={PLACE: "path"})
    """Rollouts to train on instead of sampling: a run directory, a file that `rollouts export` wrote, or one in the data format `rollouts` with
    rewards."""

    overlong: OverlongConfig | None = None
    """`[rl.overlong]`: a soft punishment of long attempts."""

    kl: RewardKlConfig | None = None
    """`[rl.kl]`: a penalty in the reward for leaving the reference model."""

    entropy: EntropyControlConfig | None = None
    """`[rl.entropy]`: an entropy bonus whose coefficient is steered to a target, of the term `entropy` in `[[loss.terms]]`."""

    reward_models: tuple[RewardModelTable, ...] = ()
    """`[[rl.reward_models]]`: frozen models whose values of attempts are parts of their rewards; none: environments alone give rewards."""


@frozen
class RolloutsConfig:
    """Episodes of environments: their processes, their failures, and what is kept of them."""

    workers: int | None = field(default=None, validator=optional(ge(1)))
    """Processes for environments; none: one less than the machine has cores, at least one."""

    timeout_s: float = field(default=60.0, validator=[gt(0.0), _FINITE])
    """Seconds that an environment may take to answer; then its process is ended and the attempt has failed."""

    retries: int = field(default=1, validator=ge(0))
    """Further tries, with the same seed, at an attempt that failed."""

    min_group_size: int | None = field(default=None, validator=optional(ge(1)))
    """Attempts of a group that must not have failed; with fewer the group is dropped. None: 2, and of groups of one attempt that one."""

    max_failure_share: float = field(default=0.1, validator=and_(ge(0.0), le(1.0)))
    """Share of failed attempts among the last 200 above which the run stops."""

    max_drop_share: float = field(default=0.9, validator=and_(ge(0.0), le(1.0)))
    """Share of groups that filters dropped, of the last 20 batches, above which `on_starved` decides."""

    on_starved: Literal["train", "stop"] = field(default="train", validator=in_(("train", "stop")))
    """`train` keeps the groups that filters would drop beyond that share, `stop` ends the run."""

    keep: int | None = field(default=cast("int | None", 200), validator=optional(ge(1)))
    """Steps whose rollouts are kept in the run directory; none: all."""

    def fewest_finished(self, group_size: int) -> int:
        """Return how many attempts of a group of this size must not have failed."""
        return min(2, group_size) if self.min_group_size is None else self.min_group_size


@frozen
class ReferenceConfig:
    """The frozen model that a KL term or penalty, or a loss of preferences, compares with; it is loaded where somebody reads `ref_logprobs`."""

    path: str | None = field(default=None, validator=optional(min_len(1)), metadata={PLACE: "path"})
    """A Hugging Face directory or hub id; none: the model as it was before training."""

    revision: str | None = None
    """Branch, tag or commit of a model on the hub."""

    adapters_off: bool | None = None
    """Use the trained model without its adapters, which takes no memory; none: where adapters are trained and no path is given."""

    precompute: bool = False
    """Score all data with the reference before the first step, and keep the scores in the folder `data.cache`, of trainer preference. A later
    run over the same data and reference reads them, and does not load the reference."""

    refresh_every: int | None = field(default=None, validator=optional(ge(1)))
    """Steps after which the trained model is mixed into the reference, of trainers rl and preference; none: never."""

    mixup: float = field(default=1.0, validator=[gt(0.0), le(1.0)])
    """Share of the trained weights in the reference after `refresh_every` steps, beside the reference's own; 1: it becomes a copy."""


@frozen
class TeacherConfig:
    """The frozen model that a student is distilled from: it scores the student's rows, which gives the column `teacher_logprobs`, or a loss
    such as `divergence` compares the student with it.
    """

    path: str | None = field(default=None, validator=optional(min_len(1)), metadata={PLACE: "path"})
    """A Hugging Face directory or hub id; none: there is no teacher. It has the tokenizer of the trained model, except with the losses `uld`
    and `gold`, which align the tokens of both by their text."""

    revision: str | None = None
    """Branch, tag or commit of a model on the hub."""

    url: str | None = field(default=None, validator=optional(min_len(1)), metadata={CODE: True})
    """Base URL of a server that holds the teacher, instead of `path`, as far as its routes begin: `http://HOST:8000/v1`. It answers vLLM's
    `prompt_logprobs`, and has the tokenizer of the trained model."""

    model: str | None = field(default=None, validator=optional(min_len(1)))
    """The teacher's name at `url`."""

    api_key_env: str | None = field(default=None, validator=optional(min_len(1)), metadata={CODE: True})
    """Name of the environment variable that holds the key of `url`. The key itself is in no configuration or log. None: no key is sent."""

    top_k: int | None = field(default=None, validator=optional(ge(1)))
    """Number of the likeliest tokens that `url` is asked for at every token, for the loss `top_k_divergence` in trainer sft; none: it is
    asked for the samples' own tokens, for `teacher_kl` and `reverse_kl`."""

    concurrency: int = field(default=32, validator=ge(1))
    """Requests under way to `url` at once."""

    request_seconds: float = field(default=600.0, validator=[gt(0.0), _FINITE])
    """Seconds in which `url` must have answered a request; also the longest wait that it may ask for."""

    retries: int = field(default=5, validator=ge(0))
    """Times that a request to `url` is sent again after 429, a status of 500 or more, or a lost connection; then the run ends."""


@frozen
class EnvironmentTable(PluginTable):
    """An environment to draw tasks from, and its share of them."""

    weight: float = field(default=1.0, validator=[gt(0.0), _FINITE], kw_only=True)
    """Share of the groups, relative to the other environments."""
