"""Backends that sum gradients, step or draw dropout masks wrongly, each in one way."""

from typing import Any

import attrs
from backends_made_wrong import Wrong, overriding, scale, world_size

from skyrl_engine import EngineError
from skyrl_engine.contracts import AdamWSettings, OptimizerSettings, OptimStep

right = Wrong(overriding())


mean_over_ranks = Wrong(scale(lambda _backend, _batch: 1 / world_size()))


mean_over_micro_batches = Wrong(scale(lambda _backend, batch: 1 / len(batch)))


dropped_rank = Wrong(scale(lambda backend, _batch: float(backend.coords.rank == 0)))


twice = Wrong(scale(lambda _backend, _batch: 2.0))


def _last_call_only(self: Any, original: Any, batch: Any, objective: Any) -> Any:
    for parameter in self._parameters().values():
        parameter.grad = None
    return original(batch, objective)


last_call_only = Wrong(overriding(forward_backward=_last_call_only))


def _keeps_gradient(self: Any, original: Any, *settings: Any) -> OptimStep:
    gradients = {name: parameter.grad for name, parameter in self._parameters().items()}
    applied = original(*settings)
    for name, parameter in self._parameters().items():
        parameter.grad = gradients[name]
    return applied


stale_gradient = Wrong(overriding(optim_step=_keeps_gradient))


def _steps_at_rate_0(self: Any, original: Any) -> None:
    """Drop a gradient by a step that moves no weight, which moments and the count of steps remember."""
    settings = attrs.evolve(self._settings, learning_rate=0.0, weight_decay=0.0, max_grad_norm=None)
    try:
        type(self).__base__.optim_step(self, settings)
    except EngineError:
        return  # not finite, and cleared
    self._steps_done -= 1


drops_by_a_step = Wrong(overriding(zero_grad=_steps_at_rate_0))


drops_nothing = Wrong(overriding(zero_grad=lambda _self, _original: None))


def _change_numbers(self: Any, settings: OptimizerSettings | None, **changes: Any) -> OptimizerSettings:
    """The numbers of a call, with some of them changed."""
    return attrs.evolve(settings or self._settings, **changes)


def _clips(self: Any, original: Any, settings: OptimizerSettings | None = None) -> OptimStep:
    limit = (settings or self._settings).max_grad_norm
    return original(_change_numbers(self, settings, max_grad_norm=1.0 if limit is None else min(1.0, limit)))


def _never_clips(self: Any, original: Any, settings: OptimizerSettings | None = None) -> OptimStep:
    return original(_change_numbers(self, settings, max_grad_norm=None))


def _deaf(self: Any, original: Any, settings: OptimizerSettings | None = None) -> OptimStep:
    return original()


def _deaf_to_betas(self: Any, original: Any, settings: OptimizerSettings | None = None) -> OptimStep:
    wanted = settings or self._settings
    return original(_change_numbers(self, wanted, betas=self._settings.betas) if isinstance(wanted, AdamWSettings) else wanted)


def _without_decay(self: Any, original: Any, settings: OptimizerSettings | None = None) -> OptimStep:
    return original(_change_numbers(self, settings, weight_decay=0.0))


def _remembers_the_limit(self: Any, original: Any, settings: OptimizerSettings | None = None) -> OptimStep:
    """Clips by the last limit that any step was given."""
    if settings is not None and settings.max_grad_norm is not None:
        self.limit = settings.max_grad_norm
    limit = getattr(self, "limit", (settings or self._settings).max_grad_norm)
    return original(_change_numbers(self, settings, max_grad_norm=limit))


remembers_the_limit = Wrong(overriding(optim_step=_remembers_the_limit))
silent_clipping = Wrong(overriding(optim_step=_clips))


never_clips = Wrong(overriding(optim_step=_never_clips))


deaf_steps = Wrong(overriding(optim_step=_deaf))


deaf_to_betas = Wrong(overriding(optim_step=_deaf_to_betas))


without_decay = Wrong(overriding(optim_step=_without_decay))


def _adds_momentum(self: Any, original: Any, settings: OptimizerSettings | None = None) -> OptimStep:
    for group in self._optimizer.param_groups:
        if "momentum" in group:
            group["momentum"] = 0.9
    return original(settings)


sgd_with_momentum = Wrong(overriding(optim_step=_adds_momentum))


lion_undeclared = Wrong(overriding(), fewer=frozenset({"lion"}))


sgd_undeclared = Wrong(overriding(), fewer=frozenset({"sgd"}))


def _norm_after_clipping(self: Any, original: Any, settings: OptimizerSettings | None = None) -> OptimStep:
    applied = original(settings)
    limit = (settings or self._settings).max_grad_norm
    return applied if limit is None else attrs.evolve(applied, grad_norm=min(applied.grad_norm, limit))


norm_after_clipping = Wrong(overriding(optim_step=_norm_after_clipping))


def _steps_anyway(self: Any, original: Any, *settings: Any) -> OptimStep:
    for parameter in self._parameters().values():
        if parameter.grad is not None:
            parameter.grad.nan_to_num_(0.0)
    return original(*settings)


steps_anyway = Wrong(overriding(optim_step=_steps_anyway))


def _limit(self: Any) -> None:
    """Clip what has been accumulated so far to the limit of setup."""
    import torch

    limit = None if self._settings is None else self._settings.max_grad_norm
    if limit is not None:
        torch.nn.utils.clip_grad_norm_(self._parameters().values(), limit)


def _clips_calls(self: Any, original: Any, batch: Any, objective: Any) -> Any:
    output = original(batch, objective)
    _limit(self)
    return output


def _clips_micro_batches(self: Any, original: Any, batch: Any, objective: Any) -> Any:
    from skyrl_engine.contracts import RankOutput

    parts = []
    for micro_batch in batch:
        parts.append(original([micro_batch], objective))
        _limit(self)
    return RankOutput.concat(parts, self.coords)


def _clips_scores(self: Any, original: Any, batch: Any, objective: Any) -> Any:
    """Bounds the gradient of every score, as against outliers."""

    class Bounded:
        needs, temperature = objective.needs, objective.temperature

        def __call__(self, scores: Any, micro_batch: Any) -> Any:
            for score in scores.values():
                score.register_hook(lambda gradient: gradient.clamp(-0.05, 0.05))
            return objective(scores, micro_batch)

    return original(batch, Bounded())


clips_every_call = Wrong(overriding(forward_backward=_clips_calls))


clips_every_micro_batch = Wrong(overriding(forward_backward=_clips_micro_batches))


clips_every_score = Wrong(overriding(forward_backward=_clips_scores))


def _without_dropout(self: Any, original: Any, batch: Any, objective: Any) -> Any:
    train = self._scorer.train
    self._scorer.train = lambda _mode=True: train(False)
    try:
        return original(batch, objective)
    finally:
        self._scorer.train = train


def _one_seed(self: Any, original: Any, batch: Any, objective: Any) -> Any:
    import torch

    self.passes = getattr(self, "passes", 0) + 1
    torch.manual_seed(self.passes)
    return original(batch, objective)


def _seeds_every_pass(self: Any, original: Any, batch: Any, objective: Any) -> Any:
    import torch

    torch.manual_seed(self.coords.rank)
    return original(batch, objective)


trains_without_dropout = Wrong(overriding(forward_backward=_without_dropout))


same_masks_on_all_ranks = Wrong(overriding(forward_backward=_one_seed))


same_masks_in_all_passes = Wrong(overriding(forward_backward=_seeds_every_pass))
