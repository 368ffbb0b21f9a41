"""All decorators that make plugins of functions."""

import pytest

from skyrl_engine import advantage, correction, group_filter, loss, reducer, reward


@pytest.mark.parametrize("decorator", [loss, reducer, correction, advantage, group_filter, reward])
def test_a_decorator_without_parentheses_says_how_it_is_written(decorator):
    name = decorator.__name__
    with pytest.raises(TypeError, match=rf"^@{name} takes options alone: write it with parentheses, @{name}\(...\)"):

        @decorator
        def of_a_stranger(*arguments):
            return arguments
