"""The building blocks of environments: tasks out of tables, functions as rewards, functions as tools. For authors of environments; no torch.

Authors import from here; the files that define them may move between minor versions.
"""

from skyrl_engine.environments.functions import FunctionEnvironment, group_reward, make_weighted_reward, reward
from skyrl_engine.environments.prompts import PromptOptions
from skyrl_engine.environments.table_tasks import TableOptions, TableTasks
from skyrl_engine.environments.tools import Tool, tool_message
from skyrl_engine.registry.function_references import content_of, function_of

__all__ = [
    "FunctionEnvironment",
    "PromptOptions",
    "TableOptions",
    "TableTasks",
    "Tool",
    "content_of",
    "function_of",
    "group_reward",
    "make_weighted_reward",
    "reward",
    "tool_message",
]
