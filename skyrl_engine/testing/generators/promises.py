"""Promises of every generator, as far as its capabilities go."""

from typing import Any

from skyrl_engine.testing.generators.company_promises import batch_invariance
from skyrl_engine.testing.generators.distribution_promises import close_temperatures, distribution, temperatures
from skyrl_engine.testing.generators.filter_promises import filters
from skyrl_engine.testing.generators.lifecycle_promises import (
    aborts,
    aborts_apart,
    closes,
    missing_weights,
    no_room,
    other_shapes,
    process_state,
    streams,
    targets,
    unknown_weights,
    updates,
    updates_keep_requests,
    updates_on_the_way,
    vocabulary,
)
from skyrl_engine.testing.generators.reuse_promises import later_turns, no_foreign_prefix, no_stale_prefix, no_stale_session, wakes
from skyrl_engine.testing.generators.sampling_promises import (
    exactly_once,
    greedy,
    length,
    log_probabilities,
    long_rows,
    prompt_scores,
    seeded,
    seeds_apart,
    something,
    spans,
    stop_strings,
    stop_tokens,
    top_prompt_scores,
    top_scores,
    whole_seeds,
)
from skyrl_engine.testing.generators.together_promises import sampling_together
from skyrl_engine.testing.plugin_promises import PLUGIN_PROMISES
from skyrl_engine.testing.promise import Promise

GENERATOR_PROMISES: tuple[Promise[Any, Any], ...] = (
    exactly_once,
    length,
    something,
    stop_tokens,
    stop_strings,
    spans,
    log_probabilities,
    seeded,
    whole_seeds,
    seeds_apart,
    batch_invariance,
    sampling_together,
    distribution,
    temperatures,
    close_temperatures,
    long_rows,
    greedy,
    filters,
    prompt_scores,
    top_scores,
    top_prompt_scores,
    aborts,
    aborts_apart,
    streams,
    updates,
    updates_on_the_way,
    updates_keep_requests,
    no_stale_prefix,
    no_foreign_prefix,
    later_turns,
    no_stale_session,
    wakes,
    targets,
    unknown_weights,
    missing_weights,
    other_shapes,
    no_room,
    vocabulary,
    process_state,
    closes,
    *PLUGIN_PROMISES,
)
