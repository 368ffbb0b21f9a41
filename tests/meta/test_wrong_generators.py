"""Every promise to generators is broken by something."""

import breaking
import pytest
import wrong_generator_company as company
import wrong_generator_lives as lives
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
    (lives.VersionOfSubmission, {"updates_on_the_way"}, "are older than the update"),
    (lives.VersionOfTheEnd, {"updates_on_the_way"}, "tokens of the old weights are of the new version"),
    (lives.AbortLosesPartials, {"aborts"}, "Keep what was sampled when a request is aborted"),
    (lives.AnswersTwice, {"exactly_once"}, "Return every request once"),
    (lives.DropsOneOfTwo, {"exactly_once"}, "never answers request"),
    (lives.StalePrefix, {"no_stale_prefix"}, "Empty prefix caches when weights change"),
    (lives.IgnoresUpdates, {"updates"}, "Sample from the weights of the last update"),
    (wrong.StopsInTheMiddle, {"stop_strings"}, "Look for stop strings in the text of all tokens"),
    (wrong.FirstEndTokenOnly, {"stop_tokens"}, "Stop behind every end token"),
    (wrong.CutsMaxTokensDown, {"no_room"}, "do not cut max_tokens down"),
    (wrong.TakesAnyToken, {"vocabulary"}, "takes the prompt [128] of a vocabulary of 128"),
    (lives.TakesSomeBeforeItRefuses, {"vocabulary"}, "takes the requests before the one that it refuses"),
    (wrong.SamplesAtZero, {"greedy"}, "takes another token than the most likely one"),
    (wrong.DrawsGlobally, {"process_state"}, "draws from a global random state"),
    (wrong.WrongSpans, {"spans"}, "Start a span at 0"),
    (lives.Silent, {"something"}, "0 log-probabilities"),
    (wrong.FilterIgnored, {"filters"}, "cuts off"),
    (wrong.PromptScoresFromZero, {"prompt_scores"}, "NaN for the first"),
    (wrong.NoTopScores, {"top_scores"}, "Fill Completion.top_logprobs"),
    (wrong.TopScoresBehindThePlace, {"top_prompt_scores"}, "most likely ones per place of the prompt"),
    (wrong.SeedsOf32Bits, {"whole_seeds"}, "from the seeds 5 and 5 + 2**32"),
    (lives.TakesEveryTargetForThePolicy, {"targets"}, "Keep one set of weights per target"),
    (lives.PassesOverUnknownWeights, {"unknown_weights"}, "has a name that its model does not know"),
    (lives.IgnoresAborts, {"aborts_apart"}, "that were aborted as soon as they were sent"),
    (wrong.IgnoresTemperature, {"temperatures", "distribution"}, "times likelier at temperature 1 than at 0.5"),
    (wrong.IgnoresTemperatureLater, {"temperatures"}, "(a later turn; 2000 draws; the two are 0.4"),
    (wrong.ReadsTheLast, {"long_rows"}, "from its first one on"),
    (company.TellsTheLongest, {"batch_invariance"}, "differ from those of the same request alone: by"),
    (company.TellsTheFirstTurn, {"batch_invariance"}, "in a later turn"),
]
BY_NIGHT = [
    (wrong.SameNumberForEveryToken, {"distribution"}, "draws pairs of an eighth of the first tokens"),
    (wrong.StopsOfTheFirst, {"stop_tokens"}, "(stop tokens: [3, 8, 30, 77, 78])"),
    (wrong.CutsLikeTheFirst, {"filters"}, "is due"),
    (wrong.SeedsOf16Bits, {"whole_seeds"}, "from the seeds 5 and 5 + 2**16"),
    (wrong.MinTokensOfEndsAlone, {"stop_tokens"}, "min_tokens of stop tokens"),
    (lives.AbortsEverything, {"aborts_apart"}, "End the named requests alone"),
    (wrong.KnowsItsIds, {"aborts_apart"}, "no such request"),
    (wrong.WantsRoomForOneMore, {"no_room"}, "one of them just so"),
    (lives.RefusesHalfWay, {"unknown_weights"}, "before any weight changes"),
    (wrong.LengthComesFirst, {"length", "stop_tokens"}, "as 'length' behind 1 tokens, the last of them"),
    (wrong.LosesMinPBesideTopP, {"filters"}, "cuts off"),
    *((each, {"filters"}, "{'top_k': 20") for each in (wrong.LosesTopKBesideTheOthers, wrong.CutsByTopPFirst)),
    (wrong.TemperatureAFifthTooHigh, {"temperatures"}, "than at"),
    (wrong.TemperatureTwice, {"temperatures", "distribution"}, "times likelier at temperature 0.25 than at 0.5"),
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
]
ODD = [wrong.OneRowAtATime, company.AloneAndInvariant, wrong.LastComesFirst, lives.PolicyAlone, wrong.Filtering]


def broken_by(make, promises):
    held = [each for each in GENERATOR_PROMISES if each.name in promises]
    return breaking.broken_by(held, make, promises, examples=1, hooks={"description": lambda: make.description})


@pytest.mark.parametrize(("fault", "promises", "words"), FAULTS, ids=lambda value: getattr(value, "__name__", None))
def test_a_wrong_generator_breaks_its_promise(fault, promises, words):
    breaking.require_broken(broken_by(fault, promises), promises, words)


@pytest.mark.nightly
@pytest.mark.parametrize(("fault", "promises", "words"), BY_NIGHT, ids=lambda value: getattr(value, "__name__", None))
def test_other_wrong_generators_break_their_promises(fault, promises, words):
    breaking.require_broken(broken_by(fault, promises), promises, words)


OF_GENERATORS = {each.name for each in GENERATOR_PROMISES} - {each.name for each in PLUGIN_PROMISES}


def test_what_the_faults_are_made_of_is_right():
    assert broken_by(wrong.Plain, OF_GENERATORS) == {}


@pytest.mark.nightly
@pytest.mark.parametrize("right", ODD, ids=lambda value: value.__name__)
def test_an_odd_generator_that_is_right_breaks_none(right):
    assert broken_by(right, OF_GENERATORS) == {}


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
    reasons = [each.exempt(subject) for each in GENERATOR_PROMISES if each not in PLUGIN_PROMISES]
    assert set(reasons) == {"the generator takes no weights that the kit could give it: neither a module nor tensors"}


def test_every_promise_to_generators_is_broken_by_something():
    elsewhere = {"closes", "config_round_trip", "light_import", "pickling"}  # above, and broken by others in this folder
    assert {each.name for each in GENERATOR_PROMISES} == {name for _, names, _ in FAULTS for name in names} | elsewhere
