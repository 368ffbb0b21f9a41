"""`prompts`: rows of a table as tasks that nobody scores, for runs in which something else says what an attempt is worth."""

from skyrl_engine.contracts import EnvironmentClaims
from skyrl_engine.environments import FunctionEnvironment
from skyrl_engine_environments.options import PromptsOptions


def make(config: PromptsOptions) -> FunctionEnvironment:
    """Make the environment: one turn, the reward 0, and neither success nor failure."""
    return FunctionEnvironment(config, (), claims=EnvironmentClaims(pass_threshold=None))
