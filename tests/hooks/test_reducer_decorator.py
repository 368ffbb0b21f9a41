"""`@reducer` makes a plugin of a function: what it carries and what it guards."""

import numpy as np
import pluggy
import pytest
from attrs import define

from skyrl_engine import BatchStructure, reducer
from skyrl_engine.contracts.kinds.context import FactoryContext
from skyrl_engine.errors import DataError
from skyrl_engine.hooks import spec
from skyrl_engine.hooks.markers import PROJECT


@define
class Scale:
    factor: float = 2.0
    empty_sequence: str = "skip"


@reducer(config=Scale)
def scaled(structure, config):
    return structure.loss_weight * config.factor


@reducer(negative_weights=True)
def signed(structure, config):
    assert config is None
    return structure.loss_weight.astype(np.float64)


def structure_of(weights: list[float]) -> BatchStructure:
    ids = np.zeros(1, dtype=np.int64)
    return BatchStructure(np.array(weights, dtype=np.float32), np.array([0, len(weights)]), ids, ids, ids)


def test_the_engine_makes_it_through_the_hooks() -> None:
    manager = pluggy.PluginManager(PROJECT)
    manager.add_hookspecs(spec)
    manager.register(scaled)
    manager.check_pending()
    assert manager.hook.skyrl_engine_config_schema() is Scale
    reducer = manager.hook.skyrl_engine_make_reducer(config=Scale(3.0), context=FactoryContext())
    assert reducer.weights(structure_of([1, 2])).tolist() == [3, 6]
    assert (reducer.name, reducer.empty_sequence, reducer.batch_local) == ("scaled", "skip", False)


def test_it_declares_that_it_depends_on_the_cut() -> None:
    local = reducer(batch_local=True)(signed.function)
    assert local.skyrl_engine_make_reducer(None).batch_local is True


def test_it_stays_a_function() -> None:
    assert scaled(structure_of([1]), Scale()).tolist() == [2]


def test_negative_weights_only_where_declared() -> None:
    with pytest.raises(DataError, match=r"sample 0 has the loss weight -1\.0 at response token 1"):
        scaled.skyrl_engine_make_reducer(Scale()).weights(structure_of([1, -1]))
    assert signed.skyrl_engine_make_reducer(None).weights(structure_of([1, -1])).tolist() == [1, -1]
