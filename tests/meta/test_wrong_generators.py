"""Every promise to generators is broken by something."""

import breaking
import pytest
import wrong_generator_caches as caches
import wrong_generator_company as company
import wrong_generator_draws as draws
import wrong_generator_lives as lives
import wrong_generator_turns as turns
import wrong_generators as wrong

from skyrl_engine.contracts import GeneratorDescription
from skyrl_engine.testing import Subject
from skyrl_engine.testing.generators import lifecycle_promises as kit
from skyrl_engine.testing.generators.promises import GENERATOR_PROMISES
from skyrl_engine.testing.plugin_promises import PLUGIN_PROMISES

pytestmark = pytest.mark.of_sources("skyrl_engine/testing", "skyrl_engine/modeling", "tests/meta", "skyrl_engine/contracts")

FAULTS = [
    (wrong.LogprobsAtOne, {"log_probabilities"}, "where the model gives"),
    (wrong.TopTwenty, {"log_probabilities", "distribution", "temperatures"}, "of the whole vocabulary"),
    (wrong.ShiftedByOne, {"log_probabilities"}, "where the model gives"),
    (wrong.StopTokenLeftOut, {"stop_tokens", "something"}, "and keep that token"),
    (wrong.TemperatureOfTheFirst, {"log_probabilities"}, "and the request's temperature"),
    (wrong.OneTooMany, {"length"}, "Count the token that stops among max_tokens"),
    (wrong.GroupsShareASeed, {"distribution"}, "gives all attempts of a group the same token"),
    (wrong.SeedOfTheBatch, {"seeded"}, "Draw from a generator of each request's own seed"),
    (wrong.TakesTheMostLikely, {"distribution", "temperatures"}, "the same token"),
    (draws.ClampsTemperature, {"close_temperatures", "temperatures"}, "draws the same 480 tokens at the temperatures 0.37 and 0.4"),
    (draws.RoundsTemperature, {"close_temperatures"}, "at the temperatures 0.37 and 0.4 from equal seeds"),
    (draws.ReportsAtQuarters, {"log_probabilities"}, "where the model gives"),
    (draws.PenalizesRepeats, {"temperatures"}, "draws tokens that the row holds already"),
    (draws.NeverTheLastToken, {"distribution"}, "never draws token 127 of 128"),
    (draws.ReadsTheLastToDraw, {"long_rows"}, "times less likely than tokens are on average"),
    (draws.LongScoresAtOne, {"long_rows"}, "where the model gives"),
    (draws.GreedyUnderFilters, {"filters"}, "the distance of their places from a uniform distribution"),
    (draws.NotRenormalised, {"filters"}, "tokens from the likelier half of what {'temperature': 2.0, 'top_k': 3} leaves"),
    (draws.CutsByMinPFirst, {"filters"}, "'top_p': 0.4, 'min_p': 0.3}"),
    (draws.CutsBeforeItDivides, {"filters"}, "'temperature': 0.5"),
    (draws.CutsAtZero, {"filters"}, "temperature=0.0"),
    (draws.SeedPlusPlace, {"seeds_apart"}, "with the first numbers of the seeds +1"),
    (draws.SeedsOfFloat64, {"whole_seeds"}, "tokens from the seeds 18446744073709551610 and"),
    (draws.SeedWithTheId, {"seeded"}, "under other ids and sessions"),
    (draws.SeedWithTheVersion, {"seeded"}, "after an update to the same weights"),
    (caches.ReusesBySession, {"no_foreign_prefix"}, "neither ids nor lengths tell"),
    (caches.StaleQueries, {"updates"}, "Take every parameter of the last update"),
    (caches.StaleHead, {"updates"}, "Take every parameter of the last update"),
    (caches.TakesTheFirstUpdateAlone, {"updates"}, "Take every parameter of the last update"),
    (caches.CountsVersionsItself, {"updates"}, "after the update to version 5 are of version [2]"),
    (caches.UpdatesReachEveryTarget, {"targets"}, "one set of weights per target"),
    (caches.ScoresOfAbortedLost, {"aborts"}, "Keep the log-probabilities of what was sampled"),
    (caches.EndScoreLost, {"stop_tokens"}, "of the token that stops"),
    (caches.StringScoreLost, {"stop_strings"}, "of the tokens that complete a stop string"),
    (caches.StringsComeFirst, {"stop_strings"}, "from min_tokens on"),
    (caches.HearsThePrompt, {"stop_strings"}, "all sampled tokens"),
    (caches.ScoresOfKnownPromptsLost, {"prompt_scores"}, "NaN for the first"),
    (caches.TopScoresAtOne, {"top_scores"}, "most likely ones per sampled token"),
    (lives.VersionOfSubmission, {"updates_on_the_way"}, "are older than the update"),
    (lives.VersionOfTheEnd, {"updates_on_the_way"}, "tokens of the old weights are of the new version"),
    (lives.AbortLosesPartials, {"aborts"}, "Keep what was sampled when a request is aborted"),
    (lives.ShowsTheLastAlone, {"streams"}, "Show the tokens as they were sampled"),
    (lives.ShowsNothing, {"streams"}, "Show every token as soon as it was sampled"),
    (lives.ShowsTheAnswered, {"streams"}, "for a request that it has answered"),
    (lives.AnswersTwice, {"exactly_once"}, "Return every request once"),
    (lives.DropsOneOfTwo, {"exactly_once"}, "never answers request"),
    (lives.StalePrefix, {"no_stale_prefix"}, "Empty prefix caches when weights change"),
    (turns.OfPreviousWeights, {"no_stale_session"}, "Drop what is kept of all sessions when their weights change"),
    (turns.OfItsNeighbour, {"later_turns"}, "under its own session"),
    (turns.OneTokenShort, {"later_turns"}, "not the last sampled one"),
    (turns.WakesWithWhatItHad, {"wakes"}, "fill every weight in the update that follows"),
    (lives.IgnoresUpdates, {"updates"}, "sample from those weights"),
    (wrong.StopsInTheMiddle, {"stop_strings"}, "in the text of all sampled tokens"),
    (wrong.FirstEndTokenOnly, {"stop_tokens"}, "Stop after every end token"),
    (wrong.CutsMaxTokensDown, {"no_room"}, "do not cut max_tokens down"),
    (wrong.TakesAnyToken, {"vocabulary"}, "takes the prompt [128] of a vocabulary of 128"),
    (lives.TakesSomeBeforeItRefuses, {"vocabulary"}, "takes the requests before the one that it refuses"),
    (wrong.SamplesAtZero, {"greedy"}, "takes another token than the most likely one"),
    (wrong.DrawsGlobally, {"process_state"}, "draws from a global random state"),
    (wrong.WrongSpans, {"spans"}, "returned versions from [1] on for 1 tokens"),
    (lives.Silent, {"something"}, "returned float32[0] as logprobs"),
    (wrong.FilterIgnored, {"filters"}, "cuts off"),
    (wrong.PromptScoresFromZero, {"prompt_scores"}, "NaN for the first"),
    (wrong.NoTopScores, {"top_scores"}, "Fill Completion.top_logprobs"),
    (wrong.TopScoresBehindThePlace, {"top_prompt_scores"}, "most likely ones per place of the prompt"),
    (wrong.SeedsOf32Bits, {"whole_seeds"}, "from the seeds 5 and 4294967301"),
    (lives.TakesEveryTargetForThePolicy, {"targets"}, "Keep one set of weights per target"),
    (lives.PassesOverUnknownWeights, {"unknown_weights"}, "has a name that its model does not know"),
    (lives.IgnoresAborts, {"aborts_apart"}, "that were aborted as soon as they were sent"),
    (wrong.IgnoresTemperature, {"temperatures", "distribution"}, "times likelier at temperature 0.6 than at 0.3"),
    (wrong.IgnoresTemperatureLater, {"temperatures"}, "(a later turn; 1200 draws; the two are 0.4"),
    (wrong.ReadsTheLast, {"long_rows"}, "from its first one on"),
    (company.TellsTheLongest, {"batch_invariance"}, "differ from those of the same request alone: by"),
    (company.TellsTheFirstTurn, {"batch_invariance"}, "in a later turn"),
    (company.OtherRanksStay, {"sampling_together"}, "take its part of every update"),
]
BY_NIGHT = [
    (wrong.SameNumberForEveryToken, {"distribution"}, "draws pairs of an eighth of the first tokens"),
    (wrong.StopsOfTheFirst, {"stop_tokens"}, "(stop tokens: [3, 8, 30, 77, 78])"),
    (wrong.CutsLikeTheFirst, {"filters"}, "is due"),
    (wrong.SeedsOf16Bits, {"whole_seeds"}, "from the seeds 5 and 65541"),
    (wrong.MinTokensOfEndsAlone, {"stop_tokens"}, "min_tokens of stop tokens"),
    (lives.AbortsEverything, {"aborts_apart"}, "End the named requests alone"),
    (wrong.KnowsItsIds, {"aborts_apart"}, "no such request"),
    (wrong.WantsRoomForOneMore, {"no_room"}, "one of them just so"),
    (lives.RefusesHalfWay, {"unknown_weights"}, "before any weight changes"),
    (wrong.LengthComesFirst, {"length", "stop_tokens"}, "as 'length' after 1 tokens, the last of them"),
    (wrong.LosesMinPBesideTopP, {"filters"}, "is due"),
    *((each, {"filters"}, "'top_k': 20") for each in (wrong.LosesTopKBesideTheOthers, wrong.CutsByTopPFirst)),
    (draws.TakesAllAlike, {"filters"}, "the distance of their places"),
    (draws.ClampsTemperatureBelow, {"close_temperatures", "temperatures"}, "0.37 and 0.4"),
    (draws.ClampsTemperatureAbove, {"close_temperatures", "temperatures"}, "3 and 4"),
    *((each, {"whole_seeds"}, "Hand the whole seed") for each in (draws.SeedsOfFloat32, draws.SeedsOf61Bits)),
    (draws.SeedWithTheSession, {"seeded"}, "under other ids and sessions"),
    (draws.SeedWithTheStep, {"seeded"}, "once more"),
    (caches.ReusesByLength, {"no_foreign_prefix"}, "neither ids nor lengths tell"),
    (caches.ReusesByGroup, {"no_foreign_prefix"}, "neither ids nor lengths tell"),
    (turns.KeepsOneShort, {"later_turns"}, "not the last sampled one"),
    (turns.GoesOnByLength, {"later_turns"}, "read all that comes after them"),
    (turns.OfTheWeightsBefore, {"no_stale_session"}, "what rows under way have read too"),
    (turns.OfAnyTarget, {"no_stale_session"}, "keep it apart by target"),
    (wrong.TemperatureAFifthTooHigh, {"temperatures"}, "than at"),
    (wrong.TemperatureTwice, {"temperatures", "distribution"}, "times likelier at temperature 0.15 than at 0.3"),
    *(
        (each, {"long_rows"}, "from its first one on")
        for each in (wrong.ReadsTheLast32, wrong.ReadsTheLast100, wrong.ReadsTheLast128)
    ),
    *((each, {"long_rows"}, "from its first one on") for each in (wrong.ReadsTheLast256, wrong.ReadsTheLast512)),
    (wrong.EightAtMost, {"exactly_once"}, "there are more than eight requests"),
    (company.TellsTheCount, {"batch_invariance"}, "all at once"),
    (company.TellsTheOrder, {"batch_invariance"}, "all at once, in a first turn"),
    (company.TellsThePrompt, {"batch_invariance"}, "in a first turn"),
    (company.OtherTokens, {"batch_invariance", "seeded"}, "other tokens than alone"),
    (company.InOneBatch, {"batch_invariance"}, "Choose kernels by the row alone"),
    (company.JoinsNothing, {"sampling_together"}, "Join what each rank computes"),
    (company.FirstAloneAnswers, {"sampling_together"}, "and [] on the other, in poll"),
    (company.SeedOfTheGroup, {"sampling_together"}, "draws other tokens on two ranks"),
]
ODD = [
    wrong.OneRowAtATime,
    company.AloneAndInvariant,
    company.OnRanks,
    wrong.LastComesFirst,
    lives.PolicyAlone,
    wrong.Filtering,
    caches.PromptScores,
    caches.TopScores,
]


def broken_by(make, promises):
    held = [promise for promise in GENERATOR_PROMISES if promise.name in promises]
    return breaking.broken_by(held, make, promises, examples=1, hooks={"description": lambda: make.description})


@pytest.mark.parametrize(("fault", "promises", "words"), FAULTS, ids=lambda value: getattr(value, "__name__", None))
def test_a_wrong_generator_breaks_its_promise(fault, promises, words):
    breaking.require_broken(broken_by(fault, promises), promises, words)


@pytest.mark.nightly
@pytest.mark.parametrize(("fault", "promises", "words"), BY_NIGHT, ids=lambda value: getattr(value, "__name__", None))
def test_other_wrong_generators_break_their_promises(fault, promises, words):
    breaking.require_broken(broken_by(fault, promises), promises, words)


OF_A_LAYER = [
    *(f"self_attn.{part}" for part in ("q_proj", "k_proj", "v_proj", "o_proj", "q_norm", "k_norm")),
    *(f"mlp.{part}" for part in ("gate_proj", "up_proj", "down_proj")),
    "input_layernorm",
    "post_attention_layernorm",
]


@pytest.mark.nightly
@pytest.mark.parametrize("stale", ["embed_tokens", "model.norm", *(f"{layer}.{part}" for layer in (0, 1) for part in OF_A_LAYER)])
def test_a_generator_that_keeps_a_parameter_stale_breaks_its_promise(stale):
    wrong_one = type("KeepsOneStale", (caches.KeepsOneStale,), {"stale": f"{stale}.weight"})
    breaking.require_broken(broken_by(wrong_one, {"updates"}), {"updates"}, "Take every parameter of the last update")


OF_GENERATORS = {each.name for each in GENERATOR_PROMISES} - {each.name for each in PLUGIN_PROMISES}


def test_what_the_faults_are_made_of_is_right():
    assert broken_by(wrong.Plain, OF_GENERATORS) == {}


@pytest.mark.nightly
@pytest.mark.parametrize("right", ODD, ids=lambda value: value.__name__)
def test_an_odd_generator_that_is_right_breaks_none(right):
    assert broken_by(right, OF_GENERATORS) == {}


def test_a_generator_that_keeps_caches_rightly_breaks_none():
    """By the promises that see what is kept: others draw thousands of tokens, which it computes one by one."""
    assert broken_by(turns.Sleeps, {"later_turns", "no_stale_session", "no_stale_prefix", "no_foreign_prefix", "wakes"}) == {}


def test_a_generator_that_shows_tokens_rightly_breaks_none():
    assert broken_by(lives.Streaming, {"streams"}) == {}


def test_a_generator_that_does_not_end_is_seen(monkeypatch):
    """By a clock that the test moves."""
    now = [0.0]
    monkeypatch.setattr(kit, "monotonic", lambda: now[0])

    class Slow(lives.SlowToClose):
        @staticmethod
        def wait():
            now[0] += 11

    assert "takes 11 seconds to close" in broken_by(Slow, {"closes"})["closes"].cause


def test_what_needs_weights_is_not_claimed_by_an_endpoint():
    subject = Subject("test", wrong.Plain, hooks={"description": lambda: GeneratorDescription(frozenset(), (), "remote", 4)})
    reasons = [promise.exempt(subject) for promise in GENERATOR_PROMISES if promise not in PLUGIN_PROMISES]
    assert set(reasons) == {"the generator takes no weights that the kit could give it: no module, tensors or directory"}


def test_every_promise_to_generators_is_broken_by_something():
    # above, and broken by others in this folder
    elsewhere = {
        "closes",
        "config_round_trip",
        "light_import",
        "pickling",
        "missing_weights",
        "other_shapes",
        "updates_keep_requests",
    }
    assert {promise.name for promise in GENERATOR_PROMISES} == {name for _, names, _ in FAULTS for name in names} | elsewhere
