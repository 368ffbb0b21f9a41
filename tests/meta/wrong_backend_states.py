"""Backends that show, save, export or set up their model wrongly, each in one way."""

from collections.abc import Iterator
from contextlib import nullcontext
from typing import Any

import attrs
from backends_made_wrong import Wrong, overriding

from skyrl_engine.contracts import AdamWSettings, OptimStep, RowKind


def _forgets_moments(self: Any, original: Any, directory: Any) -> None:
    original(directory)
    self._optimizer.state.clear()


def _forgets_averages(self: Any, original: Any, directory: Any) -> None:
    original(directory)
    self._averages.clear()


forgets_averages = Wrong(overriding(load=_forgets_averages))


def _averages_too_slowly(self: Any, original: Any, model: Any, optimizer: Any, environment: Any) -> None:
    original(model, optimizer, environment)
    if self._averages.decay is not None:
        self._averages.decay **= 0.5


averages_too_slowly = Wrong(overriding(setup=_averages_too_slowly))


def _reloads_without_moments(self: Any, original: Any) -> None:
    original()
    self._optimizer.state.clear()


loses_moments_when_offloaded = Wrong(overriding(reload=_reloads_without_moments))


def _reloads_without_gradients(self: Any, original: Any) -> None:
    original()
    for parameter in self._parameters().values():
        parameter.grad = None


loses_gradients_when_offloaded = Wrong(overriding(reload=_reloads_without_gradients))


def _cuts_digits_off(self: Any, _original: Any, dtype: Any) -> Iterator[tuple[str, Any]]:
    for name, weight in self.weights():
        yield name, (weight.view(weight.new_empty(()).int().dtype) & -65536).view(weight.dtype).to(dtype)


truncates_where_it_rounds = Wrong(overriding(weights_in=_cuts_digits_off))


def _writes_what_is_there_later(self: Any, _original: Any, directory: Any) -> Any:
    def write() -> list[str]:
        self.save(directory)
        return [path.name for path in directory.iterdir()]

    return write


copies_nothing_when_it_stages = Wrong(overriding(stage_save=_writes_what_is_there_later))


def _names_no_random_states(_self: Any, original: Any, directory: Any) -> Any:
    write = original(directory)
    return lambda: [name for name in write() if not name.startswith("random")]


hides_files_that_it_wrote = Wrong(overriding(stage_save=_names_no_random_states))


def _changes_weights(self: Any, original: Any, directory: Any) -> Any:
    for weight in self._parameters().values():
        weight.data.mul_(1.001)
    return original(directory)


changes_weights_when_it_stages = Wrong(overriding(stage_save=_changes_weights))


forgets_moments = Wrong(overriding(load=_forgets_moments))


def _keeps_gradients(self: Any, original: Any, directory: Any) -> None:
    gradients = {parameter: parameter.grad for parameter in self._parameters().values()}
    original(directory)
    for parameter, gradient in gradients.items():
        parameter.grad = gradient


keeps_gradients_when_loading = Wrong(overriding(load=_keeps_gradients))


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


def _keeps_what_its_code_made(self: Any, original: Any, model: Any, optimizer: Any, environment: Any) -> None:
    """Leave random values, on ranks above 0, in the parameters that modelling code does not make on the meta device."""
    import torch

    from skyrl_engine.model_facts.configuration import load_config
    from skyrl_engine.modeling.loading import build_causal_lm

    original(model, optimizer, environment)
    with torch.device("meta"):
        like = build_causal_lm(model, load_config(model, images=True))
    for name, parameter in like.named_parameters():
        if not parameter.is_meta and environment.rank > 0:
            torch.nn.init.normal_(self._model.get_parameter(name).detach().to_local())


keeps_what_its_code_made = Wrong(overriding(setup=_keeps_what_its_code_made))


claims_pipeline_parallel = Wrong(overriding(), more=frozenset({"pipeline_parallel"}))


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


def _rehearses_nothing_packed(_model: Any, rows: RowKind) -> None:
    from skyrl_engine import UnsupportedError

    if rows == "packed":
        raise UnsupportedError("no model is known to keep documents apart", remedy="Use the collator padded")


def _draws_in_rehearsal(_model: Any, _rows: RowKind) -> None:
    import torch

    torch.rand(1)


refuses_what_it_trains = Wrong(overriding(), rehearse=_rehearses_nothing_packed)


rehearsal_draws = Wrong(overriding(), rehearse=_draws_in_rehearsal)


_set_up: list[bool] = []


once_a_process = Wrong(overriding(setup=_once))


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


reference_with_adapters = Wrong(overriding(without_adapters=lambda _self, _original: nullcontext()))


def _off_for_good(self: Any, original: Any) -> Any:
    self.left_off = original()
    self.left_off.__enter__()
    return nullcontext()


adapters_stay_off = Wrong(overriding(without_adapters=_off_for_good))


def _in_full_precision(self: Any, original: Any, model: Any, optimizer: Any, environment: Any) -> None:
    """Adapters over weights that are not rounded, where 4 bits are asked for."""
    if model.lora is not None:
        model = attrs.evolve(model, lora=attrs.evolve(model.lora, load_in_4bit=False))
    original(model, optimizer, environment)


four_bits_forgotten = Wrong(overriding(setup=_in_full_precision))
four_bits_undeclared = Wrong(overriding(), fewer=frozenset({"load_in_4bit"}))
adapters_undeclared = Wrong(overriding(), fewer=frozenset({"lora"}))


def _shares_its_count(self: Any, original: Any, *arguments: Any) -> Any:
    adapter_set = original(*arguments)
    adapter_set.count = self.count = getattr(self, "count", [0])
    return adapter_set


def _steps_of_all_sets(self: Any, original: Any, settings: AdamWSettings | None = None) -> OptimStep:
    """AdamW corrects its moments by the number of steps that all sets have taken."""
    if hasattr(self, "count"):
        for state in self._optimizer.state.values():
            state["step"].fill_(self.count[0])
        self.count[0] += 1
    return original(settings)


def _draws_of_the_process(self: Any, original: Any, *arguments: Any) -> Any:
    adapter_set = original(*arguments)
    adapter_set._draws = nullcontext
    return adapter_set


one_step_count_for_all_sets = Wrong(overriding(adapter_set=_shares_its_count, optim_step=_steps_of_all_sets))


one_random_state_for_all_sets = Wrong(overriding(adapter_set=_draws_of_the_process))


_SET_UP: list[Any] = []
"""The products of this process that are set up, in order: what a class attribute would remember."""


def _remembered(self: Any, original: Any, *arguments: Any) -> None:
    original(*arguments)
    _SET_UP.append(self)


def _forgotten(self: Any, original: Any) -> None:
    original()
    _SET_UP[:] = [backend for backend in _SET_UP if backend is not self]


def _on_the_latest(self: Any, _original: Any, *arguments: Any) -> Any:
    latest = _SET_UP[-1]
    return super(type(latest), latest).forward_backward(*arguments)


def _begins_without_gradients(self: Any, original: Any, *arguments: Any) -> None:
    for other in _SET_UP:
        for parameter in other._parameters().values():
            parameter.grad = None
    _remembered(self, original, *arguments)


model_of_the_class = Wrong(overriding(setup=_remembered, close=_forgotten, forward_backward=_on_the_latest))


clears_gradients_of_all = Wrong(overriding(setup=_begins_without_gradients, close=_forgotten))


def _keeps_a_copy(self: Any, original: Any, model: Any, optimizer: Any, environment: Any) -> None:
    original(model, optimizer, environment)
    self._kept = [parameter.detach().clone() for parameter in self._model.parameters()]


keeps_a_copy = Wrong(overriding(setup=_keeps_a_copy))


offers_what_it_has_not = Wrong(overriding(), offers={"tensor_parallel": (1,), "stages": (1, 2)})


def _thaws(self: Any, original: Any, model: Any, *arguments: Any) -> None:
    original(model, *arguments)
    if model.freeze:
        self._model.requires_grad_(True)


trains_what_is_frozen = Wrong(overriding(setup=_thaws))


def _decays_all(self: Any, original: Any, *settings: Any) -> OptimStep:
    for parameter in self._model.parameters():
        if self._spec.freeze and not parameter.requires_grad:
            parameter.data.mul_(0.999)
    return original(*settings)


decays_what_is_frozen = Wrong(overriding(optim_step=_decays_all))


def _trained_state(self: Any, original: Any) -> Any:
    state = original()
    return attrs.evolve(state, parameters=self._parameters()) if self._spec.freeze else state


leaves_frozen_out_of_checkpoints = Wrong(overriding(_state=_trained_state))
