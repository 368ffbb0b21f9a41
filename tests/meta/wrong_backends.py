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


def _giving(change: Callable[[dict[str, Any]], dict[str, Any]]) -> Callable[..., Any]:
    """A pass whose objective is given changed scores."""

    def wrong(self: Any, original: Any, batch: Any, objective: Any) -> Any:
        class Changed:
            needs, temperature = objective.needs, objective.temperature

            def __call__(self, scores: Any, micro_batch: Any) -> Any:
                return objective({**scores, **change(scores)}, micro_batch)

        return original(batch, Changed())

    return wrong


def _misgiving(change: Callable[[dict[str, Any]], dict[str, Any]]) -> Wrong:
    return Wrong(overriding(forward=_giving(change), forward_backward=_giving(change)))


logits_are_logprobs = _misgiving(lambda scores: {"logits": scores["logprobs"]} if "logits" in scores else {})


def _labels_of_inputs(_self: Any, original: Any, batch: Any, objective: Any) -> Any:
    """A pass that reads labels out of the rows, where the tokens that follow are."""

    def relabelled(micro_batch: Any) -> Any:
        ids = micro_batch.inputs["input_ids"].flatten()
        return attrs.evolve(micro_batch, labels=ids[(micro_batch.positions + 1).clamp(max=len(ids) - 1)])

    return original([relabelled(each) for each in batch], objective)


labels_of_inputs = Wrong(overriding(forward=_labels_of_inputs, forward_backward=_labels_of_inputs))
normalisers_without_a_tenth = _misgiving(
    lambda scores: {name: score * 0.9 for name, score in scores.items() if name == "logsumexp"}
)
means_over_half_the_vocabulary = _misgiving(
    lambda scores: {name: score * 2 for name, score in scores.items() if name == "mean_logprob"}
)
candidates_from_behind = _misgiving(
    lambda scores: {name: score.flip(-1) for name, score in scores.items() if name.startswith("logprobs_at")}
)
divergences_beyond_a_tenth = _misgiving(
    lambda scores: {name: score * 1.1 for name, score in scores.items() if name.startswith("divergence:jensen_shannon")}
)
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
    """Image tokens are words where nothing is known of images."""
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


def _limited(self: Any) -> None:
    """Clip what has been accumulated so far to the limit of setup."""
    import torch

    limit = None if self._settings is None else self._settings.max_grad_norm
    if limit is not None:
        torch.nn.utils.clip_grad_norm_(self._parameters().values(), limit)


def _clips_calls(self: Any, original: Any, batch: Any, objective: Any) -> Any:
    output = original(batch, objective)
    _limited(self)
    return output


def _clips_micro_batches(self: Any, original: Any, batch: Any, objective: Any) -> Any:
    from skyrl_engine.contracts import RankOutput

    parts = []
    for micro_batch in batch:
        parts.append(original([micro_batch], objective))
        _limited(self)
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


def _shares_its_count(self: Any, original: Any, *arguments: Any) -> Any:
    made = original(*arguments)
    made.count = self.count = getattr(self, "count", [0])
    return made


def _steps_of_all_sets(self: Any, original: Any, settings: AdamWSettings | None = None) -> OptimStep:
    """AdamW corrects its moments by the number of steps that all sets have taken."""
    if hasattr(self, "count"):
        for state in self._optimizer.state.values():
            state["step"].fill_(self.count[0])
        self.count[0] += 1
    return original(settings)


def _draws_of_the_process(self: Any, original: Any, *arguments: Any) -> Any:
    from contextlib import nullcontext

    made = original(*arguments)
    made._draws = nullcontext
    return made


one_step_count_for_all_sets = Wrong(overriding(adapter_set=_shares_its_count, optim_step=_steps_of_all_sets))
one_random_state_for_all_sets = Wrong(overriding(adapter_set=_draws_of_the_process))


def _base_alone(self: Any, original: Any) -> Iterator[tuple[str, Any]]:
    for name, parameter in self._model.named_parameters():
        if ".lora_" not in name:
            yield name.replace(".base_layer.", "."), parameter.detach()


def _as_peft_names(self: Any, original: Any) -> Iterator[tuple[str, Any]]:
    for name, parameter in self._model.named_parameters():
        yield name, parameter.detach()


def _merged_at_setup(self: Any, original: Any) -> Iterator[tuple[str, Any]]:
    if not hasattr(self, "kept"):
        self.kept = [(name, tensor.clone()) for name, tensor in original()]
    yield from self.kept


def _fresh_adapters(self: Any, original: Any, model: Any, optimizer: Any, environment: Any) -> None:
    """Adapters of the same shape as those that the path holds, and not those."""
    if model.lora is not None and model.lora.path is not None:
        model = attrs.evolve(model, lora=attrs.evolve(model.lora, path=None, rank=4, alpha=8))
    original(model, optimizer, environment)


weights_of_the_base = Wrong(overriding(weights=_base_alone))
weights_beside_adapters = Wrong(overriding(weights=_as_peft_names))
weights_of_the_first_merge = Wrong(overriding(weights=_merged_at_setup))
forgets_the_adapter = Wrong(overriding(setup=_fresh_adapters))
adapters_undeclared = Wrong(overriding(), fewer=frozenset({"lora"}))


def _first_eight(self: Any, original: Any, batch: Any, objective: Any) -> Any:
    return original(list(batch)[:8], objective)


def _documents_only(self: Any, original: Any, batch: Any, objective: Any) -> Any:
    """A batch ends with the first micro-batch that has nothing in it."""
    from itertools import takewhile

    return original(list(takewhile(lambda each: each.inputs["attention_mask"].any(), batch)), objective)


def _short_rows(self: Any, original: Any, batch: Any, objective: Any) -> Any:
    """Scores of long rows are without a gradient, as where a window of attention ends."""

    class Windowed:
        needs, temperature = objective.needs, objective.temperature

        def __call__(self, scores: Any, micro_batch: Any) -> Any:
            width = micro_batch.inputs["input_ids"].shape[1]
            inside = micro_batch.positions % width < 64
            return objective({name: each.where(inside, each.detach()) for name, each in scores.items()}, micro_batch)

    return original(batch, Windowed())


eight_micro_batches = Wrong(overriding(forward_backward=_first_eight))
stops_at_nothing = Wrong(overriding(forward_backward=_documents_only))
forgets_beyond_64 = Wrong(overriding(forward_backward=_short_rows))


def _seen_by(change: Callable[[Any, Any], Any]) -> Callable[..., Any]:
    """The objective is called with what `change` makes of the scores and the micro-batch."""

    def method(self: Any, original: Any, batch: Any, objective: Any) -> Any:
        class Changed:
            needs, temperature = objective.needs, objective.temperature

            def __call__(self, scores: Any, micro_batch: Any) -> Any:
                return objective(change(scores, micro_batch), micro_batch)

        return original(batch, Changed())

    return method


def _with_a_mask_on_the_cpu(scores: Any, _micro_batch: Any) -> Any:
    import torch

    return {name: score * torch.ones(len(score)) for name, score in scores.items()}


def _through_numpy(scores: Any, _micro_batch: Any) -> Any:
    for score in scores.values():
        assert not (score.detach().numpy() > 1e9).any(), "no score is so large"
    return scores


def _looking_at_every_score(scores: Any, _micro_batch: Any) -> Any:
    for score in scores.values():
        assert not score.isinf().any(), "a score is infinite"
    return scores


def _largest(scores: Any, _micro_batch: Any) -> Any:
    for score in scores.values():
        if len(score):
            score.detach().max().item()
    return scores


def _step_on_the_cpu(self: Any, original: Any, settings: Any = None) -> Any:
    """A norm that is kept on the CPU, beside gradients that are not."""
    import torch

    total = torch.zeros(1)
    for parameter in self._parameters().values():
        if parameter.grad is not None:
            total = total + parameter.grad.square().sum().reshape(1)
    return original(settings)


def _moves_each_gradient(self: Any, original: Any, batch: Any, objective: Any) -> Any:
    """Gradients are copied to the CPU behind every micro-batch."""
    from skyrl_engine.contracts import RankOutput

    parts = []
    for micro_batch in batch:
        parts.append(original([micro_batch], objective))
        self.copies = [each.grad.cpu() for each in self._parameters().values() if each.grad is not None][:1]
    return RankOutput.concat(parts, self.coords)


mask_on_the_cpu = Wrong(overriding(forward_backward=_seen_by(_with_a_mask_on_the_cpu)))
scores_through_numpy = Wrong(overriding(forward=_seen_by(_through_numpy)))
norm_on_the_cpu = Wrong(overriding(optim_step=_step_on_the_cpu))
looks_at_every_score = Wrong(overriding(forward_backward=_seen_by(_looking_at_every_score)))
reads_the_largest_score = Wrong(overriding(forward=_seen_by(_largest)))
copies_a_gradient_each_time = Wrong(overriding(forward_backward=_moves_each_gradient))


def _one_at_a_time(self: Any, original: Any, batch: Any, objective: Any) -> Any:
    """Odd and right: a pass of its own for every micro-batch."""
    from skyrl_engine.contracts import RankOutput

    return RankOutput.concat([original([each], objective) for each in batch], self.coords)


def _all_at_first(self: Any, original: Any, batch: Any, objective: Any) -> Any:
    """Odd and right: every micro-batch is built before the first is scored."""
    return original(list(batch), objective)


def _sorted_weights(self: Any, original: Any) -> Iterator[tuple[str, Any]]:
    """Odd and right: by name, and in memory of their own."""
    yield from sorted((name, tensor.clone()) for name, tensor in original())


one_micro_batch_at_a_time = Wrong(overriding(forward=_one_at_a_time, forward_backward=_one_at_a_time))
builds_all_at_first = Wrong(overriding(forward=_all_at_first, forward_backward=_all_at_first, weights=_sorted_weights))
