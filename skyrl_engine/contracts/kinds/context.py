"""Facts of the run that a factory gets in addition to its own config."""

from typing import Literal

from attrs import frozen

MatmulPrecision = Literal["highest", "high"]
"""Precision of products of float32 matrices, as torch calls it: float32, or TF32."""


@frozen
class FactoryContext:
    """Facts of the run for `skyrl_engine_make_<kind>`: all plain values, equal on controller and workers.

    `matmul_precision` is in force on ranks and in replicas of generators: a factory has nothing to set.
    """

    seed: int = 0
    pad_token_id: int = 0
    max_sequence_length: int | None = None
    matmul_precision: MatmulPrecision = "highest"
