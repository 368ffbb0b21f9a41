"""`function`: any Python file as an environment."""

import hashlib

from skyrl_engine import DataError
from skyrl_engine.contracts import EnvironmentClaims
from skyrl_engine.environments import FunctionEnvironment, content_of, function_of, make_weighted_reward
from skyrl_engine.environments.tools import Tool
from skyrl_engine_environments.options import FunctionOptions, RewardTable


def make(config: FunctionOptions) -> FunctionEnvironment:
    """Make the environment that the options describe. Raises DataError for functions that are not there, or that are no tools."""
    named = (config.reward,) if isinstance(config.reward, str) else config.reward or ()
    tables = [*(RewardTable(reference) for reference in named), *config.rewards]
    if not tables:
        raise DataError("the environment function has no reward", remedy='Set reward = "./file.py:name"')
    rewards = [
        make_weighted_reward(function_of(table.use), table.use.rpartition(":")[2], table.weight, config.form) for table in tables
    ]
    if len({reward.name for reward in rewards}) < len(rewards):
        raise DataError("two rewards have the same name, under which their parts are shown", remedy="Rename one of the functions")
    tools = [Tool.of(function_of(tool)) for tool in config.tools]
    files = "".join(content_of(reference) for reference in (*(table.use for table in tables), *config.tools))
    claims = EnvironmentClaims(
        max_turns=config.max_turns if tools else 1,
        random=config.random,
        pass_threshold=config.pass_threshold,
        version=hashlib.sha256(files.encode()).hexdigest()[:12],
    )
    return FunctionEnvironment(config, rewards, tools, claims)
