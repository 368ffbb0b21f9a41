"""Every promise to losses is broken by something, and what breaks it breaks nothing else; the message says what is wrong."""

from functools import partial
from pathlib import Path

import breaking
import pytest
import torch
import wrong_losses as wrong

from skyrl_engine.config import SelectedPlugin
from skyrl_engine.registry.record import PluginRecord
from skyrl_engine.testing import Subject, Verdict
from skyrl_engine.testing.losses.promises import LOSS_PROMISES

pytestmark = pytest.mark.of_sources(
    "skyrl_engine/testing",
    "skyrl_engine/contracts",
    "skyrl_engine/objective",
    "skyrl_engine/workers",
    "skyrl_engine/config",
    "skyrl_engine/registry",
    "tests/meta/breaking.py",
    "tests/meta/wrong_losses.py",
)

broken_by = partial(breaking.broken_by, LOSS_PROMISES, examples=30)

FAULTS = [
    (wrong.MeanOverItsMask, {"micro_batch_split"}, "changes x2.00 under two micro-batches: it divides by its own mask"),
    (wrong.TimesTheTokens, {"micro_batch_split"}, "changes x0.50 under two micro-batches: it multiplies by the number of tokens"),
    (wrong.DividesByLoadedSequences, {"micro_batch_split"}, "changes x2.00 under two micro-batches"),
    (wrong.DividesByAllSequences, {"micro_batch_split", "padding"}, "it divides by the number of sequences, empty ones included"),
    (wrong.Whitens, {"micro_batch_split", "packing"}, "it takes something over the whole micro-batch"),
    (wrong.ReachesOverTheEnd, {"micro_batch_split", "packing", "sample_order"}, "reaches over the end of a sequence"),
    (wrong.SkipsTheFirstSequence, {"micro_batch_split", "sample_order", "padding"}, "depends on the place of a token"),
    (wrong.RemembersCalls, {"rank_split"}, "it keeps something from one call to the next"),
    (wrong.NanBesideEmptySequences, {"padding", "one_finite_value_per_token"}, "is not finite beside a sequence without tokens"),
    (wrong.FailsWithoutTokens, {"all_masked"}, "fails without a token"),
    (wrong.NanMetricWithoutTokens, {"all_masked", "empty_metrics"}, "the metric 'nothing' is NaN without a token"),
    (wrong.InfiniteAtCertainty, {"one_finite_value_per_token"}, "the loss of token 0 is -inf"),
    (wrong.InfiniteGradient, {"differentiable"}, "although the loss is finite"),
    (wrong.Detached, {"differentiable"}, "do not depend on the model"),
    (wrong.FailsInBackward, {"needs"}, "failed in its backward pass: RuntimeError"),
    (wrong.ScalarLoss, {"one_finite_value_per_token"}, "returned shape [] for"),
    (wrong.ReadsUndeclared, {"needs"}, "reads tokens.entropy but declares needs = ['advantages', 'logprobs']"),
    (wrong.Crashes, {"needs"}, "failed in its call: NameError"),
    (wrong.CrashesInTheWordsOfTheEngine, {"needs"}, "failed in its call: ValueError: the table returned values"),
    (wrong.GradientByHand, {"gradient"}, "where the values have the slope"),
    (wrong.HalfPrecision, {"gradient", "precision"}, "although its values do not move: something is rounded"),
    (wrong.HalfPrecisionAdvantages, {"precision"}, "computes in torch.float16, whatever the precision of its input"),
    (wrong.CountsInAByte, {"precision"}, "to torch.uint8, which holds no more than 255"),
    (wrong.BoundByDtype, {"precision"}, "loses precision: token 0 has"),
    (wrong.ShiftsAndBack, {"precision"}, "loses precision"),
    (wrong.WrongDtype, {"precision"}, "returns torch.float32 for torch.float64 scores"),
    (wrong.FalselyHomogeneous, {"homogeneous"}, "declares homogeneous, and advantages times 2"),
    (wrong.GradientBesideTheAdvantage, {"homogeneous", "zero_advantages"}, "take the gradient by logprobs of token"),
    (wrong.NearlyHomogeneous, {"zero_advantages"}, "where every advantage of its sequence is 0"),
    (wrong.MeanOfMeans, {"metrics", "empty_metrics"}, "it is a mean of means"),
    (wrong.DrawsGlobally, {"global_random_numbers"}, "draws from the global random state"),
    (wrong.DrawsFromTheMachine, {"replicas"}, "between two replicas: it draws from a source of its own"),
    (wrong.WritesInPlace, {"inputs_unchanged"}, "changes advantages in place"),
    (wrong.LearnsNothing, {"learns"}, "every gradient is 0 although its values seem to depend on the model"),
    (wrong.WarmsUpTheProcess, {"replicas"}, "counts its calls"),
    (wrong.AsksForItsRank, {"replicas"}, "asks which rank it is on"),
    (wrong.DividesByManyTokens, {"micro_batch_split"}, "it divides by its own mask"),
    (wrong.TakesGroupsForPlaces, {"labels"}, "fails where labels are other numbers"),
    (wrong.WritesAndUndoes, {"inputs_unchanged"}, "changes advantages in place"),
    (wrong.KeepsItsValues, {"memory"}, "keeps its values after the call"),
    (wrong.HomogeneousInSmallNumbers, {"homogeneous"}, "advantages times 1024"),
    (wrong.PairsByPlace, {"sample_order"}, "depends on the place of a token"),
    (wrong.ChangesAfterAWhile, {"rank_split"}, "after 64 calls"),
    (wrong.HoldsALambda, {"pickling"}, "its product cannot be pickled"),
]


@pytest.mark.parametrize(
    ("fault", "promises", "words"),
    FAULTS,
    ids=lambda value: getattr(value, "__name__", None),
)
def test_a_wrong_loss_breaks_its_promise(fault, promises, words):
    broken = broken_by(fault, promises)
    breaking.require_broken(broken, promises, words)
    assert all(finding.remedy for finding in broken.values())


def test_an_oracle_meets_long_sequences():
    def due(tokens):
        sequences = tokens.sequences
        places = torch.arange(len(tokens.logprobs)) - sequences.offsets[:-1][sequences.index]
        return -tokens.logprobs * tokens.advantages * 0.99**places

    assert "oracle" in broken_by(wrong.CountsInAByte, {"oracle"}, hooks={"oracle": due})


@pytest.mark.parametrize("right", [wrong.Plain, wrong.Pairs, wrong.PairsByRole, wrong.Whitened])
def test_what_is_right_breaks_nothing(right):
    assert broken_by(right, {"micro_batch_split", "sample_order", "padding", "packing"}) == {}


def test_every_promise_to_losses_is_broken_by_something():
    rest = {"oracle", "config_round_trip", "light_import", "process_settings", "another_process"}  # below, and in this folder
    rest |= {"devices", "empty_metrics", "evaluation"}  # by families, in test_wrong_by_family.py
    assert {promise.name for promise in LOSS_PROMISES} == {name for _, names, _ in FAULTS for name in names} | rest


def test_settings_of_the_process_are_put_back_where_a_loss_changes_them():
    before = torch.get_default_dtype()
    (promised,) = [promise for promise in LOSS_PROMISES if promise.name == "process_settings"]
    finding = promised.hold(Subject("test", wrong.SetsTheDefaultDtype), examples=5)
    assert finding.cause == "leaves the default dtype at torch.float64, where it was torch.float32"
    assert torch.get_default_dtype() == before


def test_gradients_of_candidates_are_compared_one_by_one():
    """Scores of k tokens per place have a gradient each: a right loss keeps the promise, one that leaves out a candidate's breaks it."""

    def due(tokens):
        return -(tokens.logprobs_at("teacher_ids") * tokens.teacher_logprobs.exp()).sum(-1)

    assert "oracle" not in broken_by(wrong.CrossEntropyOfCandidates, {"oracle"}, hooks={"oracle": due})
    broken = broken_by(wrong.DetachesACandidate, {"oracle"}, hooks={"oracle": due})
    assert "by logprobs_at:teacher_ids[0]" in broken["oracle"].cause
    assert "oracle" in broken_by(wrong.CandidatesInAWord, {"oracle"}, hooks={"oracle": due})


def test_a_turned_sign_is_seen_by_an_oracle():
    def due(tokens):
        return -tokens.logprobs * tokens.advantages

    broken = broken_by(wrong.SignFlipped, {"oracle"}, hooks={"oracle": due})
    assert set(broken) == {"oracle"}
    assert broken["oracle"].factor == pytest.approx(-1)
    assert "the sign is turned around" in broken["oracle"].cause
    assert broken_by(wrong.Plain, hooks={"oracle": due}) == {}


def test_a_function_that_nobody_can_find_again_cannot_be_pickled():
    assert set(broken_by(lambda: wrong.closure_loss(2.0))) == {"pickling"}


def test_options_that_change_when_they_are_written_down():
    text = Path(wrong.__file__).read_text()
    record = PluginRecord.of_file("loss", Path(wrong.__file__), "percent", text.encode())
    subject = Subject.of_plugin(SelectedPlugin.of(record, {"strength": 40.0}, "test"))
    verdict = Verdict.of(LOSS_PROMISES, subject, examples=10)
    broken = {finding.promise: finding for finding in verdict.of_status("broken")}
    assert set(broken) == {"config_round_trip", "another_process"}, "options reach another process through a lock"
    assert "its option strength is 0.4 before and 0.004 after it went through TOML" in broken["config_round_trip"].cause


def test_the_counterexample_is_the_smallest():
    finding = broken_by(wrong.MeanOverItsMask, {"micro_batch_split"})["micro_batch_split"]
    assert finding.factor == pytest.approx(2)
    assert finding.counterexample[0] == "2 sequences of 1, 1 loss-carrying tokens"
    assert finding.counterexample[-1] == "micro-batches of the sequences 0 | 1"
