"""Backends that are each wrong in one way: FSDP with one mistake. A function or two is what such a mistake takes."""

from collections.abc import Callable, Iterator
from typing import Any

import attrs

from skyrl_engine import hookimpl
from skyrl_engine.contracts import AdamWSettings, BackendDescription, Objective, OptimStep
from skyrl_engine_fsdp.plugin import FsdpConfig, fsdp

Make = Callable[[type[Any]], type[Any]]


@attrs.frozen
class Wrong:
    """A plugin whose backend is what `change` makes of FSDP's class, with `more` capabilities declared or fewer."""

    change: Make
    more: frozenset[str] = frozenset()
    fewer: frozenset[str] = frozenset()
    rehearse: Callable[[Any, bool], None] | None = None

    @hookimpl
    def skyrl_engine_config_schema(self) -> type[Any]:
        return FsdpConfig

    @hookimpl
    def skyrl_engine_describe_backend(self, config: Any, world_size: int) -> BackendDescription:
        described = as_fsdp_describes(config, world_size)
        rehearse = self.rehearse or described.rehearse
        return attrs.evolve(described, capabilities=(described.capabilities | self.more) - self.fewer, rehearse=rehearse)

    @hookimpl
    def skyrl_engine_make_backend(self, config: Any) -> Any:
        from skyrl_engine_fsdp.backend import FsdpBackend

        return self.change(FsdpBackend)(config or FsdpConfig())


def as_fsdp_describes(config: Any, world_size: int) -> BackendDescription:
    import inspect

    offered = {"config": config or FsdpConfig(), "world_size": world_size}
    taken = inspect.signature(fsdp.skyrl_engine_describe_backend).parameters
    return fsdp.skyrl_engine_describe_backend(**{name: offered[name] for name in taken})


def scaled(factor: Callable[[Any, Any], float]) -> Make:
    """The differentiated sum times `factor(backend, batch)`; what is reported stays."""

    def change(fsdp_backend: type[Any]) -> type[Any]:
        class Backend(fsdp_backend):
            def forward_backward(self, batch: Any, objective: Objective) -> Any:
                by = factor(self, batch)

                class Scaled:
                    needs, temperature = objective.needs, objective.temperature

                    def __call__(self, scores: Any, micro_batch: Any) -> Any:
                        total, output = objective(scores, micro_batch)
                        return total * by, output

                return super().forward_backward(batch, Scaled())

        return Backend

    return change


def overriding(**methods: Callable[..., Any]) -> Make:
    """Methods in place of FSDP's; each is given the original one before its own arguments."""

    def change(fsdp_backend: type[Any]) -> type[Any]:
        def bound(name: str, method: Callable[..., Any]) -> Callable[..., Any]:
            def call(self: Any, *arguments: Any) -> Any:
                def original(*others: Any) -> Any:
                    return getattr(fsdp_backend, name)(self, *others)

                return method(self, original, *arguments)

            return call

        return type("Backend", (fsdp_backend,), {name: bound(name, method) for name, method in methods.items()})

    return change


def world_size() -> int:
    import torch.distributed as dist

    return dist.get_world_size()


right = Wrong(overriding())
mean_over_ranks = Wrong(scaled(lambda _backend, _batch: 1 / world_size()))
mean_over_micro_batches = Wrong(scaled(lambda _backend, batch: 1 / len(batch)))
dropped_rank = Wrong(scaled(lambda backend, _batch: float(backend.coords.rank == 0)))
twice = Wrong(scaled(lambda _backend, _batch: 2.0))


def _last_call_only(self: Any, original: Any, batch: Any, objective: Any) -> Any:
    for parameter in self._parameters().values():
        parameter.grad = None
    return original(batch, objective)


last_call_only = Wrong(overriding(forward_backward=_last_call_only))


def _keeps_gradient(self: Any, original: Any, *settings: Any) -> OptimStep:
    kept = {name: parameter.grad for name, parameter in self._parameters().items()}
    applied = original(*settings)
    for name, parameter in self._parameters().items():
        parameter.grad = kept[name]
    return applied


stale_gradient = Wrong(overriding(optim_step=_keeps_gradient))


def _told(self: Any, settings: AdamWSettings | None, **changes: Any) -> AdamWSettings:
    """The numbers of a call, with some of them changed."""
    return attrs.evolve(settings or self._settings, **changes)


def _clips(self: Any, original: Any, settings: AdamWSettings | None = None) -> OptimStep:
    limit = (settings or self._settings).max_grad_norm
    return original(_told(self, settings, max_grad_norm=1.0 if limit is None else min(1.0, limit)))


def _never_clips(self: Any, original: Any, settings: AdamWSettings | None = None) -> OptimStep:
    return original(_told(self, settings, max_grad_norm=None))


def _deaf(self: Any, original: Any, settings: AdamWSettings | None = None) -> OptimStep:
    return original()


def _deaf_to_betas(self: Any, original: Any, settings: AdamWSettings | None = None) -> OptimStep:
    return original(_told(self, settings, betas=self._settings.betas))


def _without_decay(self: Any, original: Any, settings: AdamWSettings | None = None) -> OptimStep:
    return original(_told(self, settings, weight_decay=0.0))


silent_clipping = Wrong(overriding(optim_step=_clips))
never_clips = Wrong(overriding(optim_step=_never_clips))
deaf_steps = Wrong(overriding(optim_step=_deaf))
deaf_to_betas = Wrong(overriding(optim_step=_deaf_to_betas))
without_decay = Wrong(overriding(optim_step=_without_decay))


def _norm_after_clipping(self: Any, original: Any, settings: AdamWSettings | None = None) -> OptimStep:
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


def _sorted_ids(self: Any, original: Any, batch: Any, objective: Any) -> Any:
    """Ids in order, values as they came."""
    import numpy as np

    output = original(batch, objective)
    return attrs.evolve(output, sample_ids=np.sort(output.sample_ids))


def _lossy(self: Any, original: Any, batch: Any, objective: Any) -> Any:
    import numpy as np

    output = original(batch, objective)
    return output.take(np.arange(len(output.sample_ids))[:-1])


def _as_rank_0(self: Any, original: Any, batch: Any, objective: Any) -> Any:
    from skyrl_engine.contracts import RankCoords

    return attrs.evolve(original(batch, objective), coords=RankCoords())


outputs_in_another_order = Wrong(overriding(forward_backward=_sorted_ids))
loses_a_sample = Wrong(overriding(forward=_lossy))
all_outputs_of_rank_0 = Wrong(overriding(forward_backward=_as_rank_0))


def _with_dropout(self: Any, original: Any, batch: Any, objective: Any) -> Any:
    evaluate, self._scorer.eval = self._scorer.eval, self._scorer.train
    try:
        return original(batch, objective)
    finally:
        self._scorer.eval = evaluate


dropout_in_forward = Wrong(overriding(forward=_with_dropout))


def _clears(self: Any, original: Any, batch: Any, objective: Any) -> Any:
    for parameter in self._parameters().values():
        parameter.grad = None
    return original(batch, objective)


forward_clears_gradients = Wrong(overriding(forward=_clears))


def _another_objective(**changes: Any) -> Callable[..., Any]:
    def method(self: Any, original: Any, batch: Any, objective: Any) -> Any:
        class Changed:
            needs = changes.get("needs", objective.needs)
            temperature = changes.get("temperature", objective.temperature)

            def __call__(self, scores: Any, micro_batch: Any) -> Any:
                return objective(scores, micro_batch)

        return original(batch, Changed())

    return method


without_temperature = Wrong(
    overriding(forward=_another_objective(temperature=1.0), forward_backward=_another_objective(temperature=1.0))
)


def _all_it_knows(self: Any, original: Any, batch: Any, objective: Any) -> Any:
    """Scores that it does not compute are answered with zeros."""
    known = self._scorer.computes

    class Filled:
        needs, temperature = objective.needs & known, objective.temperature

        def __call__(self, scores: Any, micro_batch: Any) -> Any:
            like = next(iter(scores.values()))
            return objective({**scores, **dict.fromkeys(objective.needs - known, like * 0)}, micro_batch)

    return original(batch, Filled())


makes_scores_up = Wrong(overriding(forward=_all_it_knows, forward_backward=_all_it_knows))


def _more_without_outputs(self: Any, original: Any, batch: Any, objective: Any) -> Any:
    output = original(batch, objective)
    if not output.fields:
        for parameter in self._parameters().values():
            parameter.grad *= 2
    return output


gate_changes_gradients = Wrong(overriding(forward_backward=_more_without_outputs))


def _skips_unscored(self: Any, original: Any, batch: Any, objective: Any) -> Any:
    if any(not len(micro_batch.positions) for micro_batch in batch):
        raise ZeroDivisionError("no token")
    return original(batch, objective)


needs_a_token = Wrong(overriding(forward_backward=_skips_unscored))


def _one_document_a_row(self: Any, original: Any, batch: Any, objective: Any) -> Any:
    """Packed rows as if each were one document: neighbours see each other."""
    return original([attrs.evolve(each, sequence_lengths=_joined(each)) for each in batch], objective)


def _joined(micro_batch: Any) -> Any:
    import numpy as np

    from skyrl_engine.contracts import Ragged

    if (micro_batch.sequence_lengths.lengths <= 1).all():
        return micro_batch.sequence_lengths
    width = micro_batch.inputs["input_ids"].shape[1]
    return Ragged.from_list([[width]] * len(micro_batch.sequence_lengths), np.int64)


packs_without_borders = Wrong(overriding(forward=_one_document_a_row, forward_backward=_one_document_a_row))
packs_undeclared = Wrong(packs_without_borders.change, fewer=frozenset({"packed"}))


def _logits_of_probabilities(self: Any, original: Any, batch: Any, objective: Any) -> Any:
    """Logits less what softmax divides by."""

    class Normalised:
        needs, temperature = objective.needs, objective.temperature

        def __call__(self, scores: Any, micro_batch: Any) -> Any:
            return objective({**scores, "logits": scores["logprobs"]} if "logits" in scores else scores, micro_batch)

    return original(batch, Normalised())


logits_are_logprobs = Wrong(overriding(forward=_logits_of_probabilities, forward_backward=_logits_of_probabilities))
values_undeclared = Wrong(overriding(), fewer=frozenset({"value_head"}))


def _forgets_moments(self: Any, original: Any, directory: Any) -> None:
    original(directory)
    self._optimizer.state.clear()


forgets_moments = Wrong(overriding(load=_forgets_moments))


def _reads_any_pickle(self: Any, original: Any, directory: Any) -> None:
    import torch

    torch.load(directory / "random-0.pt", weights_only=False)
    original(directory)


runs_code_of_checkpoints = Wrong(overriding(load=_reads_any_pickle))


def _shows_a_copy(self: Any, original: Any) -> Any:
    return {name: tensor.clone() for name, tensor in original().items()}


shows_a_copy = Wrong(overriding(storage=_shows_a_copy))


def _renamed(self: Any, original: Any) -> Iterator[tuple[str, Any]]:
    for name, tensor in original():
        yield name.replace("self_attn", "attention"), tensor


def _own_order(self: Any, original: Any) -> Iterator[tuple[str, Any]]:
    pairs = list(original())
    yield from pairs if self.coords.rank == 0 else reversed(pairs)


other_names = Wrong(overriding(weights=_renamed, gradients=_renamed))
other_order_on_other_ranks = Wrong(overriding(weights=_own_order))


def _keeps_start(self: Any, original: Any, model: Any, optimizer: Any, environment: Any) -> None:
    original(model, optimizer, environment)
    self._source = model.path


def _exports_start(self: Any, original: Any, directory: Any) -> None:
    import shutil
    from pathlib import Path

    for path in Path(self._source).iterdir():
        shutil.copy(path, directory)


stale_export = Wrong(overriding(setup=_keeps_start, export=_exports_start))
claims_context_parallel = Wrong(overriding(), more=frozenset({"context_parallel"}))


def _elsewhere(self: Any, original: Any, model: Any, optimizer: Any, environment: Any) -> None:
    original(model, optimizer, environment)
    self.coords = attrs.evolve(self.coords, tp=1)


stands_elsewhere = Wrong(overriding(setup=_elsewhere))


def _once(self: Any, original: Any, *arguments: Any) -> None:
    """Every second setup fails, as where the first one left something behind."""
    _set_up.append(True)
    if len(_set_up) % 2 == 0:
        raise RuntimeError("already set up in this process")
    original(*arguments)


def _rehearses_nothing_packed(_model: Any, packed_rows: bool) -> None:
    from skyrl_engine import UnsupportedError

    if packed_rows:
        raise UnsupportedError("no model is known to keep documents apart", remedy="Use the collator padded")


def _draws_in_rehearsal(_model: Any, _packed_rows: bool) -> None:
    import torch

    torch.rand(1)


refuses_what_it_trains = Wrong(overriding(), rehearse=_rehearses_nothing_packed)
rehearsal_draws = Wrong(overriding(), rehearse=_draws_in_rehearsal)

_set_up: list[bool] = []
once_a_process = Wrong(overriding(setup=_once))


def _next_position(self: Any, original: Any, batch: Any, objective: Any) -> Any:
    return original([attrs.evolve(each, positions=(each.positions - 1).clamp(min=0)) for each in batch], objective)


scores_one_token_early = Wrong(overriding(forward=_next_position, forward_backward=_next_position))


def _on_inputs(change: Callable[[Any], Any]) -> Callable[..., Any]:
    """Every micro-batch with images as `change` makes it."""

    def method(self: Any, original: Any, batch: Any, objective: Any) -> Any:
        return original([change(each) if "pixel_values" in each.inputs else each for each in batch], objective)

    return method


def _black(micro_batch: Any) -> Any:
    pixels = micro_batch.inputs["pixel_values"]
    return attrs.evolve(micro_batch, inputs={**micro_batch.inputs, "pixel_values": pixels * 0})


def _text_in_the_place_of_images(micro_batch: Any) -> Any:
    """Where nothing is known of images, image tokens are words."""
    from skyrl_engine.modeling.tiny import IMAGE_TOKEN

    ids = micro_batch.inputs["input_ids"]
    text = {name: micro_batch.inputs[name] for name in ("attention_mask", "position_ids")}
    inputs = {**text, "input_ids": ids.where(ids != IMAGE_TOKEN, 1)}
    return attrs.evolve(micro_batch, inputs=inputs, ragged_offsets={})


def _without_the_missing(self: Any, original: Any, batch: Any, objective: Any) -> Any:
    from skyrl_engine import DataError

    try:
        return original(batch, objective)
    except DataError:
        return original([_text_in_the_place_of_images(each) for each in batch], objective)


def _without_tower(self: Any, original: Any) -> Iterator[tuple[str, Any]]:
    for name, tensor in original():
        yield name, tensor * (0 if ".visual." in name else 1)


sees_no_pixels = Wrong(overriding(forward=_on_inputs(_black), forward_backward=_on_inputs(_black)))
leaves_the_tower_untrained = Wrong(overriding(gradients=_without_tower))
takes_any_number_of_images = Wrong(overriding(forward=_without_the_missing))
images_undeclared = Wrong(overriding(), fewer=frozenset({"vision"}))
