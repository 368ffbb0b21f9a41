"""A step's CPU time is counted under spans that somebody classified: the engine's own work, or the model's."""

from engine_overhead import ENGINE_SPANS, MODEL_SPANS, read_steps

from skyrl_engine.training.sft.trainer import run_sft


def test_every_span_of_a_step_is_the_engines_or_the_models(configure):
    """A span that nobody classified could hide in the share of the engine that `nox -s bench` prints beside its bar."""
    result = run_sft(configure("run", training={"steps": 3}, checkpoint={"every": "none", "at_end": False}))
    steps = read_steps(result.directory / "metrics.jsonl")
    assert len(steps) == 3
    assert {name for step in steps for name in step} == ENGINE_SPANS | MODEL_SPANS
