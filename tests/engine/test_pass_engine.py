"""An engine is whole once it is made: what proofs need of one, without a model's files, is a class of its own."""

import ast
import inspect
from pathlib import Path

import numpy as np
import pytest

from skyrl_engine.config import from_dict, resolve
from skyrl_engine.contracts.values.model import ModelConfig
from skyrl_engine.engine import engine, pass_engine, sampling
from skyrl_engine.engine.assembly import Assembly
from skyrl_engine.engine.engine import Engine
from skyrl_engine.engine.pass_engine import PassEngine
from skyrl_engine.errors import EngineClosedError
from skyrl_engine.modeling.tiny import write_model
from skyrl_engine.proof.ranks import CONTEXT
from skyrl_engine.proof.rollouts import make_rollouts
from skyrl_engine.workers.launch import launch_workers


def test_an_engine_is_made_whole() -> None:
    """Nothing may be left out, and no verb asserts that something was given."""
    for engine_class in (Engine, PassEngine):
        parameters = [parameter for name, parameter in inspect.signature(engine_class).parameters.items() if name != "self"]
        assert [parameter.name for parameter in parameters if parameter.default is not inspect.Parameter.empty] == []
    for module in (engine, pass_engine, sampling):
        asserts = [node for node in ast.walk(ast.parse(inspect.getsource(module))) if isinstance(node, ast.Assert)]
        assert asserts == [], module.__name__


def test_passes_need_no_files_of_a_model(tmp_path: Path) -> None:
    write_model(tmp_path)
    assembly = Assembly.of(resolve(from_dict({"collator": {"use": "padded"}}, "test"), need=()).plugins, CONTEXT, 1)
    columns = make_rollouts(())
    with launch_workers(assembly.worker_spec(ModelConfig(str(tmp_path)), None, device="cpu"), launch="inline") as group:
        passes = PassEngine(assembly, group, assembly.layout(micro_batch_rows=2))
        plan = passes.plan(columns)
        learned = passes.forward_backward(plan).result()
        gradients = passes.gradients()
        assert gradients.keys() == passes.weights().keys()
        assert any(gradient.any() for gradient in gradients.values())
        passes.discard()
        evaluated = passes.evaluate(plan).result()
        assert evaluated.output.sample_ids.tolist() == learned.output.sample_ids.tolist() == columns.sample_ids.tolist()
        np.testing.assert_array_equal(evaluated.output.fields["logprobs"].values, learned.output.fields["logprobs"].values)
    with pytest.raises(EngineClosedError):
        passes.plan(columns)
