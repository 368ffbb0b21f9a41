"""Backends whose forward and backward passes are each wrong in one way: scores, outputs, rows, images, devices."""

from collections.abc import Callable, Iterator
from typing import Any

import attrs
from backends_made_wrong import Wrong, overriding


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


def _stays_as_it_was(self: Any, original: Any, batch: Any, objective: Any) -> Any:
    """Scores in the mode in which the last pass left the model: at first that of loading, which is evaluation."""
    mode, evaluate, train = getattr(self, "trained", False), self._scorer.eval, self._scorer.train
    self._scorer.eval = (lambda: train(True)) if mode else evaluate
    try:
        return original(batch, objective)
    finally:
        self._scorer.eval = evaluate


def _trains(self: Any, original: Any, batch: Any, objective: Any) -> Any:
    self.trained = True
    return original(batch, objective)


stays_in_training = Wrong(overriding(forward=_stays_as_it_was, forward_backward=_trains))
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
    return original([attrs.evolve(micro_batch, sequence_lengths=_join_lengths(micro_batch)) for micro_batch in batch], objective)


def _join_lengths(micro_batch: Any) -> Any:
    import numpy as np

    from skyrl_engine.contracts import Ragged

    if (micro_batch.sequence_lengths.lengths <= 1).all():
        return micro_batch.sequence_lengths
    width = micro_batch.inputs["input_ids"].shape[1]
    return Ragged.from_list([[width]] * len(micro_batch.sequence_lengths), np.int64)


packs_without_borders = Wrong(overriding(forward=_one_document_a_row, forward_backward=_one_document_a_row))


packs_undeclared = Wrong(packs_without_borders.change, fewer=frozenset({"packed"}))


def _siblings_in_chains(self: Any, original: Any, batch: Any, objective: Any) -> Any:
    """Trees as if every segment continued the one before it: answers see their siblings."""
    return original([attrs.evolve(micro_batch, tree=_chain_segments(micro_batch.tree)) for micro_batch in batch], objective)


def _chain_segments(tree: Any) -> Any:
    import numpy as np

    from skyrl_engine.contracts import Ragged

    if tree is None:
        return None
    return attrs.evolve(tree, parents=Ragged.from_list([np.arange(-1, len(row) - 1)[: len(row)] for row in tree.parents], np.int64))


shows_siblings = Wrong(overriding(forward=_siblings_in_chains, forward_backward=_siblings_in_chains))


shares_undeclared = Wrong(shows_siblings.change, fewer=frozenset({"tree"}))


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

    def relabel(micro_batch: Any) -> Any:
        ids = micro_batch.inputs["input_ids"].flatten()
        return attrs.evolve(micro_batch, labels=ids[(micro_batch.positions + 1).clamp(max=len(ids) - 1)])

    return original([relabel(each) for each in batch], objective)


labels_of_inputs = Wrong(overriding(forward=_labels_of_inputs, forward_backward=_labels_of_inputs))


normalisers_without_a_tenth = _misgiving(
    lambda scores: {name: score * 0.9 for name, score in scores.items() if name == "logsumexp"}
)


squares_of_half_the_vocabulary = _misgiving(
    lambda scores: {name: score * 1.1 for name, score in scores.items() if name == "log_sum_squares"}
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


def _next_position(self: Any, original: Any, batch: Any, objective: Any) -> Any:
    return original(
        [attrs.evolve(micro_batch, positions=(micro_batch.positions - 1).clamp(min=0)) for micro_batch in batch], objective
    )


scores_one_token_early = Wrong(overriding(forward=_next_position, forward_backward=_next_position))


def _on_inputs(change: Callable[[Any], Any]) -> Callable[..., Any]:
    """Every micro-batch with images as `change` makes it."""

    def method(self: Any, original: Any, batch: Any, objective: Any) -> Any:
        return original(
            [change(micro_batch) if "pixel_values" in micro_batch.inputs else micro_batch for micro_batch in batch], objective
        )

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
        return original([_text_in_the_place_of_images(micro_batch) for micro_batch in batch], objective)


def _naming_samples_in_words(self: Any, original: Any, batch: Any, objective: Any) -> Any:
    from skyrl_engine import DataError

    try:
        return original(batch, objective)
    except DataError as error:
        raise DataError(error.cause, remedy=error.remedy) from error


def _without_tower(self: Any, original: Any) -> Iterator[tuple[str, Any]]:
    for name, tensor in original():
        yield name, tensor * (0 if ".visual." in name else 1)


sees_no_pixels = Wrong(overriding(forward=_on_inputs(_black), forward_backward=_on_inputs(_black)))


leaves_the_tower_untrained = Wrong(overriding(gradients=_without_tower))


takes_any_number_of_images = Wrong(overriding(forward=_without_the_missing))


names_samples_in_words = Wrong(overriding(forward=_naming_samples_in_words))


images_undeclared = Wrong(overriding(), fewer=frozenset({"vision"}))


def _first_eight(self: Any, original: Any, batch: Any, objective: Any) -> Any:
    return original(list(batch)[:8], objective)


def _documents_only(self: Any, original: Any, batch: Any, objective: Any) -> Any:
    """A batch ends with the first micro-batch that has nothing in it."""
    from itertools import takewhile

    return original(list(takewhile(lambda micro_batch: micro_batch.inputs["attention_mask"].any(), batch)), objective)


def _short_rows(self: Any, original: Any, batch: Any, objective: Any) -> Any:
    """Scores of long rows are without a gradient, as where a window of attention ends."""

    class Windowed:
        needs, temperature = objective.needs, objective.temperature

        def __call__(self, scores: Any, micro_batch: Any) -> Any:
            width = micro_batch.inputs["input_ids"].shape[1]
            inside = micro_batch.positions % width < 64
            return objective({name: values.where(inside, values.detach()) for name, values in scores.items()}, micro_batch)

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
    """A norm that is kept on the CPU, next to gradients that are not."""
    import torch

    total = torch.zeros(1)
    for parameter in self._parameters().values():
        if parameter.grad is not None:
            total = total + parameter.grad.square().sum().reshape(1)
    return original(settings)


def _moves_each_gradient(self: Any, original: Any, batch: Any, objective: Any) -> Any:
    """Gradients are copied to the CPU after every micro-batch."""
    from skyrl_engine.contracts import RankOutput

    parts = []
    for micro_batch in batch:
        parts.append(original([micro_batch], objective))
        self.copies = [parameter.grad.cpu() for parameter in self._parameters().values() if parameter.grad is not None][:1]
    return RankOutput.concat(parts, self.coords)


mask_on_the_cpu = Wrong(overriding(forward_backward=_seen_by(_with_a_mask_on_the_cpu)))


scores_through_numpy = Wrong(overriding(forward=_seen_by(_through_numpy)))


norm_on_the_cpu = Wrong(overriding(optim_step=_step_on_the_cpu))


looks_at_every_score = Wrong(overriding(forward_backward=_seen_by(_looking_at_every_score)))


reads_the_largest_score = Wrong(overriding(forward=_seen_by(_largest)))


copies_a_gradient_each_time = Wrong(overriding(forward_backward=_moves_each_gradient))


def _one_at_a_time(self: Any, original: Any, batch: Any, objective: Any) -> Any:
    """A pass of its own for every micro-batch: right, but each waits for its outputs before the next one is launched."""
    from skyrl_engine.contracts import RankOutput

    return RankOutput.concat([original([micro_batch], objective) for micro_batch in batch], self.coords)


def _all_at_first(self: Any, original: Any, batch: Any, objective: Any) -> Any:
    """Odd and right: every micro-batch is built before the first is scored."""
    return original(list(batch), objective)


def _sorted_weights(self: Any, original: Any) -> Iterator[tuple[str, Any]]:
    """Odd and right: by name, and in memory of their own."""
    yield from sorted((name, tensor.clone()) for name, tensor in original())


one_micro_batch_at_a_time = Wrong(overriding(forward=_one_at_a_time, forward_backward=_one_at_a_time))


builds_all_at_first = Wrong(overriding(forward=_all_at_first, forward_backward=_all_at_first, weights=_sorted_weights))


def _scores_without_programs(self: Any, original: Any, batch: Any, objective: Any) -> Any:
    """Score by the layers as they are, and train by their programs."""
    layers = [module for module in self._scorer.modules() if "forward" in vars(module)]
    programs = [vars(layer).pop("forward") for layer in layers]
    try:
        return original(batch, objective)
    finally:
        for layer, program in zip(layers, programs, strict=True):
            layer.forward = program


def _rounds_compiled_gradients(self: Any, original: Any, batch: Any, objective: Any) -> Any:
    import torch

    output = original(batch, objective)
    if self._spec.compile:
        for parameter in self._parameters().values():
            parameter.grad = parameter.grad.to(torch.bfloat16).to(parameter.dtype)
    return output


def _without(**fields: Any) -> Callable[..., Any]:
    """Set the model up as if the run had asked for no such thing."""

    def setup(self: Any, original: Any, model: Any, optimizer: Any, environment: Any) -> None:
        original(attrs.evolve(model, **fields), optimizer, environment)

    return setup


drops_where_it_is_off = Wrong(overriding(setup=_without(dropout="model")))
scores_without_programs = Wrong(overriding(forward=_scores_without_programs))
rounds_compiled_gradients = Wrong(overriding(forward_backward=_rounds_compiled_gradients))
compile_undeclared = Wrong(overriding(setup=_without(compile=False)), fewer=frozenset({"compile"}))
attention_undeclared = Wrong(overriding(setup=_without(attention="auto")), fewer=frozenset({"attention"}))
noise_undeclared = Wrong(overriding(setup=_without(neftune_alpha=None)), fewer=frozenset({"embedding_noise"}))
freezing_undeclared = Wrong(overriding(setup=_without(freeze=())), fewer=frozenset({"freeze"}))
takes_any_pattern = Wrong(overriding(setup=_without(freeze=())))
takes_every_kernel = Wrong(overriding(setup=_without(attention="auto")))


def _without_noise(self: Any, original: Any, batch: Any, objective: Any) -> Any:
    return original([attrs.evolve(micro_batch, noise=None) for micro_batch in batch], objective)


deaf_to_noise = Wrong(overriding(forward_backward=_without_noise))
