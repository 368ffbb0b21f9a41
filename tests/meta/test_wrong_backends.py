"""Every promise of backends is broken by something, and what is wrong in one way breaks just the promises about it."""

import pytest
import wrong_backend_context as context
import wrong_backend_passes as passes
import wrong_backend_states as states
import wrong_backend_steps as steps
from backends_made_wrong import Wrong
from breaking import require_broken

from skyrl_engine.testing import select_plugin
from skyrl_engine.testing.backends.bench import Bench
from skyrl_engine.testing.backends.promises import BACKEND_PROMISES
from skyrl_engine.testing.backends.subject import BackendSubject

FILES = {
    name: module.__file__
    for module in (context, passes, states, steps)
    for name, value in vars(module).items()
    if isinstance(value, Wrong)
}
"""Files by the names of the plugins that they hold."""


@pytest.fixture(scope="module")
def bench():
    with Bench() as opened:
        yield opened


def broken_by(bench, name, layout, promises=None):
    subject = BackendSubject(select_plugin("backend", f"{FILES[name]}:{name}", {}), bench, (layout,))
    findings = [promise.hold(subject) for promise in BACKEND_PROMISES if promises is None or promise.name in promises]
    return {finding.promise: finding for finding in findings if finding.status == "broken"}


ON_ONE_RANK = [
    ("twice", {"gradient", "temperature", "values", "logits"}, "the gradient is x2.00 of transformers' own model, under 1 rank"),
    (
        "mean_over_micro_batches",
        {"micro_batches_add_up"},
        "the gradient is x0.33 = 1 / number of micro-batches of a rank of the same samples in one micro-batch",
    ),
    ("last_call_only", {"calls_add_up"}, "the first call counts for nothing in the gradient"),
    ("stale_gradient", {"nothing_left_over"}, "is still there after the step"),
    ("silent_clipping", {"clipping"}, "as far as AdamW moves them without a limit, for a gradient of norm 50"),
    ("never_clips", {"clipping"}, "as far as AdamW moves them where max_grad_norm is 5"),
    ("norm_after_clipping", {"gradient_norm"}, "that is max_grad_norm, the norm after clipping to 5"),
    ("drops_by_a_step", {"dropped_gradient"}, "where a gradient was dropped before it"),
    ("drops_nothing", {"dropped_gradient"}, "is still there after zero_grad"),
    (
        "deaf_steps",
        {"step", "sgd_step", "further_steps", "clipping"},
        "step 2 reports the learning rate 0.01, where the call says 0.02",
    ),
    ("deaf_to_betas", {"step"}, "as far as AdamW moves them in step 3"),
    ("without_decay", {"step", "sgd_step", "further_steps"}, "moves them in step 1"),
    ("sgd_with_momentum", {"sgd_step"}, "as far as SGD moves them in step 2"),
    ("lion_undeclared", {"further_steps"}, "takes the numbers of lion, and does not declare 'lion'"),
    ("sgd_undeclared", {"undeclared_sgd"}, "takes the numbers of sgd, and does not declare 'sgd'"),
    ("steps_anyway", {"not_finite"}, "takes a step over a gradient that is not a number"),
    ("outputs_in_another_order", {"outputs"}, "which are those of sample"),
    ("loses_a_sample", {"outputs"}, "returns the samples"),
    ("dropout_in_forward", {"evaluation"}, "dropout is on"),
    ("forward_clears_gradients", {"evaluation"}, "forward changes the gradient of"),
    ("without_temperature", {"temperature"}, "at temperature 0.7"),
    ("makes_scores_up", {"needs"}, "says nothing where the objective needs 'reward'"),
    ("gate_changes_gradients", {"gate"}, "without per-token outputs the gradient of"),
    ("needs_a_token", {"unscored_micro_batch"}, "rank 0 fails in forward_backward: ZeroDivisionError: no token"),
    ("packs_without_borders", {"packed_rows", "images", "image_gradients"}, "over packed rows"),
    ("packs_undeclared", {"undeclared_packed_rows"}, "takes packed rows, which it does not declare"),
    ("shows_siblings", {"tree_rows"}, "over rows of trees"),
    ("shares_undeclared", {"undeclared_tree_rows"}, "takes rows of trees, which it does not declare"),
    ("labels_of_inputs", {"labels"}, "an objective of logprobs is"),
    ("logits_are_logprobs", {"logits"}, "an objective of logits and logprobs is"),
    ("normalisers_without_a_tenth", {"logsumexp"}, "an objective of logprobs and logsumexp is"),
    ("means_over_half_the_vocabulary", {"mean_logprob"}, "an objective of logprobs and mean_logprob is"),
    ("squares_of_half_the_vocabulary", {"log_sum_squares"}, "an objective of logprobs and log_sum_squares is"),
    ("candidates_from_behind", {"logprobs_at"}, "an objective of logprobs and logprobs_at:near is"),
    (
        "divergences_beyond_a_tenth",
        {"divergence"},
        "an objective of divergence:reverse:0.5:2.0 and divergence:jensen_shannon:0.3:1.0 is",
    ),
    ("values_undeclared", {"undeclared_value_head"}, "gives values although it does not declare 'value_head'"),
    (
        "sees_no_pixels",
        {"images", "images_matter", "image_gradients"},
        "nothing of sample 0 changes where its pixels are negated",
    ),
    ("leaves_the_tower_untrained", {"image_gradients"}, "Train the vision tower with the rest"),
    ("takes_any_number_of_images", {"miscounted_images"}, "says nothing where a sample has image tokens and no image"),
    ("names_samples_in_words", {"miscounted_images"}, "does not say that it is sample 0 whose image is missing"),
    ("images_undeclared", {"undeclared_images"}, "takes images although it does not declare 'vision'"),
    ("forgets_moments", {"save_and_load"}, "Save the optimizer's moments and step count, and load them"),
    ("loses_moments_when_offloaded", {"offloads"}, "all values of the optimizer"),
    ("loses_gradients_when_offloaded", {"offloads"}, "after it was offloaded, and"),
    ("keeps_gradients_when_loading", {"save_and_load"}, "clear the gradient when loading"),
    ("runs_code_of_checkpoints", {"no_code_in_checkpoints"}, "load runs the code that random-0.pt holds"),
    ("shows_a_copy", {"shown_memory"}, "after two steps than weights() gives"),
    ("other_names", {"names", "shown_memory"}, "does not give model.layers.0.self_attn."),
    ("stale_export", {"export"}, "it is the model from before training"),
    ("claims_pipeline_parallel", {"description"}, "declares 'pipeline_parallel'"),
    ("stands_elsewhere", {"coordinates", "outputs"}, "rank 0 stands at"),
    ("refuses_what_it_trains", {"rehearsal"}, "refuses while planning a model that it trains: no model is known to keep documents"),
    ("rehearsal_draws", {"rehearsal"}, "draws from a global random state when it rehearses"),
    ("once_a_process", {"working"}, "a second time in the same processes: rank 0 fails in setup"),
    ("compile_undeclared", {"undeclared_compile"}, "ignores model.compile, which it does not declare"),
    ("attention_undeclared", {"undeclared_attention"}, "ignores model.attention, which it does not declare"),
    ("noise_undeclared", {"undeclared_embedding_noise"}, "ignores model.neftune_alpha, which it does not declare"),
    ("freezing_undeclared", {"undeclared_freeze"}, "ignores model.freeze, which it does not declare"),
    ("trains_what_is_frozen", {"frozen_parameters"}, "gives a gradient of model.embed_tokens.weight, which model.freeze names"),
    ("takes_any_pattern", {"frozen_parameters"}, "'model.no_such_layer.*', which matches nothing"),
    ("decays_what_is_frozen", {"frozen_parameters"}, "a step changes model.embed_tokens.weight, which model.freeze names"),
    ("leaves_frozen_out_of_checkpoints", {"frozen_parameters"}, "Let checkpoints hold frozen parameters too"),
    ("truncates_where_it_rounds", {"rounded_weights"}, "other than rounded"),
    ("copies_nothing_when_it_stages", {"staged_saves"}, "differs from what save wrote at the same place"),
    ("hides_files_that_it_wrote", {"staged_saves"}, "the ranks say that they wrote __0_0.distcp, pieces.json, and there are"),
    ("averages_too_slowly", {"weight_averages"}, "after 2 steps is off by"),
    ("forgets_averages", {"weight_averages"}, "as an average over a resumed run"),
    ("deaf_to_noise", {"embedding_noise"}, "model with noise on its embeddings, over padded rows"),
    ("keeps_a_copy", {"declared_state"}, "of weights, gradients and optimizer state"),
    ("offers_what_it_has_not", {"offered_layouts"}, "offers layouts by the option 'stages', which it does not have"),
    ("takes_every_kernel", {"attention"}, 'takes model.attention = "flash" on the CPU'),
    ("rounds_compiled_gradients", {"compiled"}, "compiled, the gradients differ by"),
    (
        "scores_one_token_early",
        {"scores", "packed_rows", "values", "logits", "images", "images_matter", "image_gradients"},
        "where transformers' own model gives",
    ),
]
ON_TWO_RANKS = [
    ("mean_over_ranks", {"ranks_add_up"}, "the gradient is x0.50 = 1 / number of data-parallel ranks of the sum over 2"),
    ("dropped_rank", {"ranks_add_up", "image_gradients"}, "what rank 1 computed counts for nothing in the gradient"),
    ("all_outputs_of_rank_0", {"outputs"}, "rank 1 returns outputs as if it were at"),
    ("other_order_on_other_ranks", {"every_rank"}, "rank 1 yields other names in weights() than rank 0, or in another order"),
]
BY_DAY = [
    (
        "keeps_what_its_code_made",
        {"placed_weights"},
        "lambda_q1 of rank 0 is not what the model's files hold (8 such tensors)",
        "dp2",
    ),
    ("clips_every_micro_batch", {"clipping"}, "and a small one its own", "dp1"),
    ("trains_without_dropout", {"dropout"}, "seed nothing there", "dp1"),
    ("drops_where_it_is_off", {"dropout_off"}, "of a model whose dropout is switched off", "dp1"),
    ("stays_in_training", {"evaluation"}, "dropout is on", "dp1"),
    ("reference_with_adapters", {"reference_by_adapters"}, "where the base model gives", "dp1"),
    ("weights_of_the_base", {"adapters"}, "at the start than the base with its adapters merged", "dp1"),
    ("one_step_count_for_all_sets", {"adapter_sets"}, "is another one at the end than it is alone", "dp1"),
    ("model_of_the_class", {"second_model"}, "of the first model, the objective of step 2", "dp1"),
    ("adapters_undeclared", {"undeclared_adapters"}, "trains adapters although it does not declare 'lora'", "dp1"),
    ("four_bits_forgotten", {"four_bit_layers"}, "of PEFT's own model over weights rounded to 4 bits", "dp1"),
    ("four_bits_undeclared", {"undeclared_four_bit_layers"}, "although it does not declare 'load_in_4bit'", "dp1"),
    ("eight_micro_batches", {"many_micro_batches"}, "where a rank has 11 micro-batches", "dp1"),
    ("mask_on_the_cpu", {"one_device"}, "mixes devices", "dp1"),
    ("looks_at_every_score", {"host_waits"}, "waits for the device in every micro-batch of forward_backward", "dp1"),
]
BY_NIGHT = [
    ("changes_weights_when_it_stages", {"staged_saves"}, "differs from what save wrote at the same place", "dp1"),
    ("scores_without_programs", {"compiled"}, "compiled, forward gives other logprobs", "dp1"),
    ("clears_gradients_of_all", {"second_model"}, "of the first model, the gradient norm of step 1", "dp2"),
    ("one_random_state_for_all_sets", {"adapter_sets"}, "the objective of a call of step", "dp2"),
    ("clips_every_call", {"clipping"}, "and a small one its own", "dp1"),
    ("clips_every_score", {"clipping"}, "and a small one its own", "dp1"),
    ("clips_every_call", {"clipping"}, "and a small one its own", "dp2"),
    ("same_masks_on_all_ranks", {"dropout"}, "ranks 0 and 1 draw the same dropout masks", "dp2"),
    ("same_masks_in_all_passes", {"dropout"}, "gives the objective", "dp1"),
    ("remembers_the_limit", {"step"}, "as far as AdamW moves them in step 6", "dp1"),
    ("adapters_stay_off", {"reference_by_adapters"}, "after without_adapters", "dp1"),
    ("weights_beside_adapters", {"adapters"}, "gives at the start other names", "dp1"),
    ("weights_of_the_first_merge", {"adapters"}, "after a step", "dp1"),
    ("forgets_the_adapter", {"adapters"}, "where PEFT's own model gives", "dp1"),
    ("stops_at_nothing", {"many_micro_batches"}, "also one without a document", "dp1"),
    ("forgets_beyond_64", {"many_micro_batches"}, "whatever its width", "dp1"),
    ("scores_through_numpy", {"one_device"}, ".numpy() reads a tensor that is not on the CPU", "dp1"),
    ("norm_on_the_cpu", {"one_device"}, "mixes devices", "dp1"),
    ("reads_the_largest_score", {"host_waits"}, "in every micro-batch of forward over", "dp1"),
    ("copies_a_gradient_each_time", {"host_waits"}, ".cpu()", "dp1"),
    ("one_micro_batch_at_a_time", {"host_waits"}, "a copy sent ahead", "dp1"),
    ("sees_own_keys_alone", {"scores"}, "where transformers' own model gives", "cp2"),
    ("counts_positions_anew", {"scores"}, "where transformers' own model gives", "cp2"),
    ("keys_learn_from_own_queries", {"gradient"}, "of transformers' own model", "cp2"),
    ("adds_gradients_of_scores", {"gradient"}, "the gradient is x2.00", "cp2"),
]
FAULTS = [*((*fault, "dp1") for fault in ON_ONE_RANK), *((*fault, "dp2") for fault in ON_TWO_RANKS), *BY_DAY]
ODD = [("builds_all_at_first", "dp1"), ("builds_all_at_first", "dp2")]


ALSO = {
    "twice": {
        "adapters",
        "divergence",
        "four_bit_layers",
        "labels",
        "logprobs_at",
        "logsumexp",
        "many_micro_batches",
        "mean_logprob",
    },
    "mean_over_micro_batches": {"divergence", "many_micro_batches"},
    "never_clips": {"step", "sgd_step"},
    "drops_nothing": {"save_and_load"},
    "without_temperature": {"divergence", "logprobs_at", "logsumexp", "mean_logprob"},
    "makes_scores_up": {"divergence", "logprobs_at"},
    "needs_a_token": {"many_micro_batches"},
    "packs_without_borders": {"divergence"},
    "stale_export": {"adapters"},
    "stale_gradient": {"adapter_sets"},
    "forgets_moments": {"adapter_sets"},
    "stands_elsewhere": {"dropout"},
    "scores_one_token_early": {
        *(
            "adapters",
            "divergence",
            "four_bit_layers",
            "host_waits",
            "labels",
            "logprobs_at",
            "logsumexp",
            "many_micro_batches",
            "mean_logprob",
            "one_device",
            "reference_by_adapters",
        ),
    },
    "weights_of_the_base": {"four_bit_layers"},
    "mean_over_ranks": {"adapters", "four_bit_layers", "many_micro_batches"},
    "dropped_rank": {"adapters", "four_bit_layers", "many_micro_batches"},
    "all_outputs_of_rank_0": {"dropout"},
    "mask_on_the_cpu": {"logprobs_at"},
    "model_of_the_class": {"adapter_sets", "divergence"},
}
"""Promises that a fault breaks in addition to those by which it is known: theirs are sums of more, or start from what is wrong."""

of_every_fault = pytest.mark.parametrize(("name", "promises", "words", "layout"), FAULTS, ids=[fault[0] for fault in FAULTS])


of_its_sources = pytest.mark.of_sources(
    "skyrl_engine/testing",
    "skyrl_engine/contracts",
    "skyrl_engine/modeling",
    "skyrl_engine/model_facts",
    "skyrl_engine/objective",
    "skyrl_engine/workers",
    "plugins/fsdp/src",
    "tests/meta/breaking.py",
    "tests/meta/backends_made_wrong.py",
    "tests/meta/wrong_backend_context.py",
    "tests/meta/wrong_backend_passes.py",
    "tests/meta/wrong_backend_states.py",
    "tests/meta/wrong_backend_steps.py",
)


@pytest.mark.proof
@of_its_sources
@of_every_fault
def test_a_wrong_backend_breaks_its_promises(bench, name, promises, words, layout):
    require_broken(broken_by(bench, name, layout, promises), promises, words)


@pytest.mark.nightly
@pytest.mark.parametrize(("name", "promises", "words", "layout"), BY_NIGHT, ids=[f"{fault[0]}-{fault[3]}" for fault in BY_NIGHT])
def test_other_wrong_backends_break_their_promises(bench, name, promises, words, layout):
    require_broken(broken_by(bench, name, layout, promises), promises, words)


@pytest.mark.nightly
@pytest.mark.parametrize(("name", "layout"), ODD)
def test_an_odd_backend_that_is_right_breaks_none(bench, name, layout):
    assert broken_by(bench, name, layout) == {}


@pytest.mark.nightly
@of_every_fault
def test_a_wrong_backend_breaks_no_other_promise(bench, name, promises, words, layout):
    if name == "once_a_process":
        pytest.skip("nearly every promise sets it up twice")
    require_broken(broken_by(bench, name, layout), promises | ALSO.get(name, set()), words)


@pytest.mark.proof
@of_its_sources
def test_what_the_faults_are_made_of_is_right(bench):
    assert broken_by(bench, "right", "dp1") == {}


def test_every_promise_to_backends_is_broken_by_something():
    of_any_plugin = {"config_round_trip", "light_import"}  # broken by losses, in this folder
    assert {promise.name for promise in BACKEND_PROMISES} == {name for _, names, _, _ in FAULTS for name in names} | of_any_plugin
