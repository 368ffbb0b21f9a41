"""Facts of the run that a factory gets in addition to its own config."""

from attrs import frozen


@frozen
class FactoryContext:
    """Facts of the run for `skyrl_engine_make_<kind>`: all plain values, equal on controller and workers."""

    seed: int = 0
    pad_token_id: int = 0
    max_sequence_length: int | None = None
