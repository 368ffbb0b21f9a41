"""Whatever a method of a plugin returns, the engine refuses what is wrong with an error that names the plugin and the method.

The table holds every method of every kind and every hook: one that is new is missing from it, and a test says so. Errors are raised by the
function that a run calls.
"""

import inspect
from collections.abc import Callable, Mapping
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from attrs import evolve, frozen

from skyrl_engine.contracts.kinds import environment as episodes
from skyrl_engine.contracts.kinds.advantage import AdvantageBatch, AdvantageOutput, as_advantage_output
from skyrl_engine.contracts.kinds.backend import BackendDescription, OptimStep, as_optim_step, iterate_named_tensors
from skyrl_engine.contracts.kinds.environment import StepResult, Task
from skyrl_engine.contracts.kinds.generator import Completion, GeneratorDescription, TopLogprobs
from skyrl_engine.contracts.kinds.group_filter import as_drop_reason
from skyrl_engine.contracts.kinds.loss import LossOutput, as_loss_output
from skyrl_engine.contracts.kinds.reducer import BatchStructure, PerSequence
from skyrl_engine.contracts.values.columns import SampleColumns
from skyrl_engine.contracts.values.outputs import Metric, RankOutput, as_rank_output
from skyrl_engine.contracts.values.plan import Layout
from skyrl_engine.contracts.values.ragged import Ragged, offsets_of
from skyrl_engine.contracts.values.rollout import VersionSpans
from skyrl_engine.contracts.values.topology import Topology
from skyrl_engine.errors import ContractError
from skyrl_engine.hooks import spec
from skyrl_engine.objective.behind import Later
from skyrl_engine.objective.corrections import refuse_other_than_factors
from skyrl_engine.objective.objective import refuse_other_than_real_numbers
from skyrl_engine.registry.kinds import KINDS
from skyrl_engine.registry.product import contract_of
from skyrl_engine.registry.values import of_backend_description, of_generator_description
from skyrl_engine.rollout.episode_process import EpisodeServer
from skyrl_engine.run.observer_calls import ObserverBus
from skyrl_engine.spans import Spans
from skyrl_engine.testing.subject import part_of
from skyrl_engine.training.rl.tasks import task_at, tasks_in
from skyrl_engine.workers.batch import ShardBatch
from skyrl_engine.workers.dispatch import compact_weights, cut, merge_outputs, plan_batch
from skyrl_engine.workers.generation import GeneratorDriver, find_storage
from skyrl_engine_collators.padded.collator import PaddedCollator
from skyrl_engine_mergers.ordered import OrderedMerger

MINE = "plugin 'mine' of acme 1.0"

COLUMNS = SampleColumns.create(input_ids=np.arange(8), token_offsets=offsets_of([4, 4]), action_offsets=offsets_of([2, 2]))
ONE_RANK = Layout()
PLAN = plan_batch(part_of(PaddedCollator(), MINE, "collator"), COLUMNS, ONE_RANK)
(SHARD,) = cut(COLUMNS, PLAN.mini_batches[0], np.ones(4), ())
MICRO_BATCH = PLAN.mini_batches[0].ranks[0][0]
DENSE = PaddedCollator().build(COLUMNS, MICRO_BATCH)
STRUCTURE = BatchStructure(np.ones(4, np.uint8), offsets_of([2, 2]), np.arange(2), np.arange(2), np.zeros(2, np.int64))
ADVANTAGES = AdvantageBatch(
    np.ones(4),
    np.ones(4, np.uint8),
    offsets_of([2, 2]),
    np.zeros(2, np.int64),
    np.arange(2),
    np.zeros(2, np.int64),
    np.ones(2, bool),
)
RANK_OUTPUT = RankOutput(
    np.arange(2), np.full(2, 2), Ragged(np.array([0, 1, 0, 1], np.int32), offsets_of([2, 2])), metrics={"loss": Metric.sum(1.0)}
)
BATCH_OUTPUT = OrderedMerger().merge([RANK_OUTPUT], PLAN)
COMPLETION = Completion(0, np.array([3, 4], np.int32), np.zeros(2, np.float32), VersionSpans.one(0, 2), "length")
BACKEND = BackendDescription(Topology(), frozenset({"padded"}))
GENERATOR = GeneratorDescription(frozenset({"logprobs"}), ("tensors",), "rank", 1)

ANYTHING = (None, 3, "text", {}, [None], (1, 2), np.zeros((2, 2)), object())


def _product(**methods: Any) -> Any:
    made = {name: lambda *_args, _value=value, **_named: _value for name, value in methods.items()}
    return SimpleNamespace(rows="padded", **made)


def _part(kind: str, product: Any) -> Any:
    return part_of(product, MINE, kind)


def _poll(returned: object) -> None:
    generator = GeneratorDriver(_part("generator", _product(poll=returned)))
    generator._open = 1
    generator.poll(0.0, eager=False)


def _build(returned: object) -> None:
    list(ShardBatch(SHARD, _part("collator", _product(build=returned)), "loss", Spans()))


def _call_loss(returned: object) -> None:
    output = as_loss_output(MINE, returned, 4)  # type: ignore[arg-type]
    refuse_other_than_real_numbers(MINE, output.token_loss)


def _take_factors(returned: object) -> None:
    later = Later(torch.device("cpu"))
    refuse_other_than_factors(MINE, returned, 4, later)
    later.raise_now()


def _describe(check: Callable[[Any], Any]) -> Callable[[object], None]:
    def judge(returned: object) -> None:
        if problems := list(check(returned)):
            raise ContractError(f"{MINE}: {problems[0]}", remedy="Correct it")

    return judge


def _answer_episode(method: str) -> Callable[[object], None]:
    """Judge what an episode returned: in a run it fails its attempt, which the run names with environment and task."""

    def judge(returned: object) -> None:
        methods = {"begin": (), "step": StepResult(1.0), "close": None}
        opened = returned if method == "open" else _product(**{**methods, method: returned})
        environment = SimpleNamespace(open=lambda *_: opened, claims=episodes.EnvironmentClaims())
        server = EpisodeServer([environment])  # type: ignore[list-item]
        task = {"key": "k", "messages": [], "prompt_ids": [1], "data": {}, "tools": [], "images": []}
        answers = [server.handle({"do": "open", "episode": 0, "environment": 0, "task": task, "seed": 0})]
        action = {"text": "", "token_ids": [1, 2], "turn": 0, "finish": "stop", "tool_calls": [], "tool_problem": None}
        if method == "step":
            answers.append(server.handle({"do": "step", "episode": 0, "action": action}))
        server._loop.close()
        for answer in answers:
            if "failure" in answer:
                assert "traceback" not in answer, answer["traceback"]
                raise ContractError(f"{MINE}, {answer['failure']}", remedy="Correct it")

    return judge


@frozen
class Method:
    """A method: `judge` gives a returned value to the function that a run calls; `right` are kept, `wrong` refused by names of `words`."""

    judge: Callable[[object], object]
    right: tuple[object, ...]
    wrong: tuple[object, ...]
    words: str


def _list_replacements(value: Any, **changes: tuple[object, ...]) -> tuple[object, ...]:
    return tuple(evolve(value, **{name: change}) for name, several in changes.items() for change in several)


_INTS = (None, [0, 1], np.zeros(2), np.zeros((2, 1), np.int64), np.zeros(3, np.int64))
_MINI = PLAN.mini_batches[0]

METHODS: Mapping[tuple[str, str], Method] = {
    ("collator", "plan"): Method(
        lambda returned: plan_batch(_part("collator", _product(plan=returned)), COLUMNS, ONE_RANK),
        (PLAN,),
        (
            *ANYTHING,
            *_list_replacements(PLAN, mini_batches=(None, 3, (None,)), layout=(None,), sample_ids=(None, [0, 1])),
            *(evolve(PLAN, mini_batches=(evolve(_MINI, ranks=ranks),)) for ranks in (None, (None,), ((None,),))),
            *(
                evolve(PLAN, mini_batches=(evolve(_MINI, ranks=((rows,),)),))
                for rows in _list_replacements(
                    MICRO_BATCH, samples=_INTS, row_offsets=(*_INTS, np.array([0, 5])), width=(None, 2.5, -1, True)
                )
            ),
        ),
        "plan",
    ),
    ("collator", "build"): Method(
        _build,
        (DENSE,),
        (
            *ANYTHING,
            *_list_replacements(
                DENSE, fields=(None, [], {}, {"input_ids": None}, {"input_ids": np.zeros((2, 4))}), gather=(None, {})
            ),
            *(
                evolve(DENSE, fields={**DENSE.fields, "input_ids": ids})
                for ids in (
                    torch.zeros(2, 4),
                    torch.zeros(8, dtype=torch.int64),
                    torch.zeros((2, 4), dtype=torch.int64, device="meta"),
                )
            ),
            *(
                evolve(DENSE, gather=gather)
                for gather in _list_replacements(DENSE.gather, rows=(*_INTS, DENSE.gather.rows + 9), columns=_INTS, actions=_INTS)
            ),
        ),
        "build",
    ),
    ("loss", "__call__"): Method(
        _call_loss,
        (torch.zeros(4), LossOutput(torch.zeros(4))),
        (
            *ANYTHING,
            np.zeros(4),
            torch.zeros(()),
            torch.zeros((4, 1)),
            torch.zeros(4, dtype=torch.int64),
            torch.zeros(4, dtype=torch.complex64),
            *(
                LossOutput(torch.zeros(4), metrics)
                for metrics in (None, [], {"a": 1.0}, {3: Metric.sum(1)}, {"loss": Metric.sum(1)})
            ),
        ),
        "returned",
    ),
    ("correction", "__call__"): Method(
        _take_factors,
        (torch.ones(4), torch.ones(4, dtype=torch.int64)),
        (
            *ANYTHING,
            np.ones(4),
            torch.ones(3),
            torch.ones((4, 1)),
            torch.ones(4) > 0,
            torch.ones(4, dtype=torch.complex64),
            -torch.ones(4),
            torch.full((4,), torch.nan),
        ),
        "returned",
    ),
    ("reducer", "weights"): Method(
        lambda returned: compact_weights(_part("reducer", _product(weights=returned)), STRUCTURE),
        (np.ones(4), PerSequence(np.ones(2))),
        (
            *ANYTHING,
            *(np.ones(4, dtype) for dtype in (np.float32, np.int64, np.complex128, object)),
            np.ones((4, 1)),
            torch.ones(4, dtype=torch.float64),
            *(PerSequence(divisor) for divisor in (None, [1.0, 1.0], 2.0, np.ones(3), np.ones(2, np.float32))),
        ),
        "weights",
    ),
    ("merger", "merge"): Method(
        lambda returned: merge_outputs(_part("merger", _product(merge=returned)), [RANK_OUTPUT], PLAN),
        (BATCH_OUTPUT,),
        (
            *ANYTHING,
            RANK_OUTPUT,
            *_list_replacements(
                BATCH_OUTPUT,
                sample_ids=_INTS,
                action_lengths=_INTS,
                scored=(None, [], Ragged(np.zeros(4), offsets_of([2, 2])), Ragged(np.zeros(4, np.int32), offsets_of([4]))),
                fields=(None, [], {"logprobs": None}, {"logprobs": np.zeros(4)}, {"x": Ragged(np.zeros(4), offsets_of([2, 2]))}),
                metrics=(None, [], {"loss": 1.0}),
            ),
        ),
        "merge",
    ),
    ("advantage", "__call__"): Method(
        lambda returned: as_advantage_output(MINE, returned, ADVANTAGES, returns=False),  # type: ignore[arg-type]
        (np.ones(4), AdvantageOutput(np.ones(4))),
        (
            *ANYTHING,
            torch.ones(4),
            [1.0] * 4,
            *(np.ones(4, dtype) for dtype in (np.int64, np.float16, np.complex128, object)),
            np.full(4, np.inf),
            AdvantageOutput(np.ones(4), [1.0] * 4),  # type: ignore[arg-type]
            *(AdvantageOutput(np.ones(4), metrics=metrics) for metrics in (None, {"a": 1.0}, {3: Metric.sum(1)})),  # type: ignore[dict-item, arg-type]
        ),
        "returned",
    ),
    ("environment", "tasks"): Method(
        lambda returned: task_at(part := _part("environment", _product(tasks=returned)), tasks_in(part, "train"), 0),
        ([Task("k", prompt_ids=(1,))],),
        (
            None,
            3,
            "text",
            {},
            object(),
            iter([]),
            [None],
            [{}],
            *(
                [task]
                for task in _list_replacements(
                    Task("k"), key=(None, 3), messages=(None, "text", ("text",)), prompt_ids=(3,), data=(None,)
                )
            ),
        ),
        "task",
    ),
    ("environment", "open"): Method(
        _answer_episode("open"), (_product(begin=(), step=None, close=None),), ANYTHING, "open returned"
    ),
    ("episode", "begin"): Method(_answer_episode("begin"), ((), []), (None, 3, "text", {"a": 1}, [None], (1, 2)), "begin gave"),
    ("episode", "step"): Method(
        _answer_episode("step"),
        (StepResult(1.0), StepResult(np.float64(0.5))),  # type: ignore[arg-type]
        (
            *ANYTHING,
            *_list_replacements(
                StepResult(1.0),
                reward=(None, "1", np.ones(2), 1 + 2j, np.nan, True),
                done=(None, 1, False),
                messages=(None, "text", (3,)),
                parts=(None, {"a": "b"}),
                metrics=(None, [1]),
                success=(1, "yes"),
                info=(None,),
                token_rewards=(1.0, (1.0,), ("a", "b")),
                sampling=(None, {"top_p": 1}),
                columns=(None, {"other": 1.0}),
            ),
        ),
        "",
    ),
    ("group_filter", "__call__"): Method(
        lambda returned: as_drop_reason(MINE, returned),
        (None, "easy"),
        (3, True, False, "", "a\nb", "x" * 99, [], np.bool_(True), object(), "failed"),
        "",
    ),
    ("generator", "poll"): Method(
        _poll,
        ([], [COMPLETION]),
        (
            None,
            3,
            "text",
            {},
            (COMPLETION,),
            [None],
            [[3, 4]],
            [(0, [3, 4])],
            [{"request_id": 0}],
            *(
                [completion]
                for completion in _list_replacements(
                    COMPLETION,
                    request_id=(None, "0", 0.5),
                    token_ids=(None, [3, 4], np.zeros(2, np.int64), np.zeros((1, 2), np.int32)),
                    logprobs=(None, [0.0, 0.0], np.zeros(2), np.zeros(3, np.float32)),
                    versions=(None, 0, VersionSpans.one(0, 0), VersionSpans(np.array([1], np.int32), np.array([0]))),
                    finish=(None, "done", 3),
                    prompt_logprobs=([0.0],),
                    top_logprobs=([], TopLogprobs(np.zeros(2, np.int32), np.zeros((2, 1), np.float32))),
                )
            ),
        ),
        "poll",
    ),
    ("backend", "forward"): Method(
        lambda returned: as_rank_output(MINE, "forward", returned),
        (RANK_OUTPUT, RankOutput.empty()),
        (*ANYTHING, BATCH_OUTPUT, *_list_replacements(RANK_OUTPUT, metrics=(None, {"loss": 1.0}), coords=(None, 0))),
        "forward",
    ),
    ("backend", "optim_step"): Method(
        lambda returned: as_optim_step(MINE, returned),
        (OptimStep(1.0, 0.1), OptimStep(np.float32(1.0), 1)),  # type: ignore[arg-type]
        (*ANYTHING, *_list_replacements(OptimStep(1.0, 0.1), grad_norm=(None, "1", torch.ones(1)), learning_rate=(None,))),
        "optim_step",
    ),
    ("backend", "weights"): Method(
        lambda returned: list(iterate_named_tensors(MINE, "weights", returned)),
        ([("a", torch.ones(1))], iter(())),
        (None, 3, {"a": torch.ones(1)}, [None], [torch.ones(1)], [("a", None)], [(3, torch.ones(1))]),
        "weights",
    ),
    ("backend", "storage"): Method(
        lambda returned: find_storage(_product(storage=returned), MINE), (None, {}), (3, [], "text", torch.ones(1)), "storage"
    ),
    ("hook", "skyrl_engine_describe_backend"): Method(
        _describe(of_backend_description),
        (BACKEND,),
        (
            *ANYTHING,
            *_list_replacements(BACKEND, topology=(None, 1), capabilities=(None, "padded", {"other"}), refuse_model=(None,)),
        ),
        "",
    ),
    ("hook", "skyrl_engine_describe_generator"): Method(
        _describe(of_generator_description),
        (GENERATOR,),
        (
            *ANYTHING,
            *_list_replacements(
                GENERATOR, capabilities=(None, {"other"}, "logprobs"), accepts=(None, 3, ("other",)), concurrency=(0, "1")
            ),
        ),
        "",
    ),
}

SAME = {("backend", "forward_backward"): ("backend", "forward"), ("backend", "gradients"): ("backend", "weights")}
"""Methods whose answer is read by the function of another method."""

UNREAD = (
    {("backend", name) for name in ("setup", "zero_grad", "save", "load", "export", "close")}
    | {("generator", name) for name in ("start", "submit", "abort", "update", "release", "close")}
    | {("episode", "close")}
)
"""Methods whose answer nobody reads, so that nothing that they return is wrong."""

READ_HOOKS = {"skyrl_engine_describe_backend", "skyrl_engine_describe_generator"}


def _list_methods() -> set[tuple[str, str]]:
    contracts = {name: contract_of(kind) for name, kind in KINDS.items() if kind.contract is not None}
    contracts["episode"] = episodes.Episode
    return {
        (kind, name)
        for kind, contract in contracts.items()
        for name, value in vars(contract).items()
        if inspect.isfunction(value) and (not name.startswith("_") or name == "__call__") and name != "__init__"
    }


def test_the_table_holds_every_method_of_every_kind() -> None:
    listed = _list_methods()
    further = {("backend", "storage")}
    assert {key for key in METHODS if key[0] != "hook"} | SAME.keys() | UNREAD == listed | further


def test_the_table_holds_every_hook() -> None:
    """Factories are held by tests/registry/test_product.py and test_factories.py, `manifest_extra` by the test below; events return nothing."""
    hooks = {name for name in vars(spec) if name.startswith("skyrl_engine_")}
    factories = {kind.factory_hook for kind in KINDS.values()}
    events = {name for name in KINDS["observer"].product_hooks if name != "skyrl_engine_manifest_extra"}
    assert hooks - factories - events == READ_HOOKS | {"skyrl_engine_manifest_extra", "skyrl_engine_config_schema"}
    assert {name for kind, name in METHODS if kind == "hook"} == READ_HOOKS


@pytest.mark.parametrize("key", METHODS, ids=".".join)
def test_what_is_right_is_taken(key: tuple[str, str]) -> None:
    for returned in METHODS[key].right:
        METHODS[key].judge(returned)


@pytest.mark.parametrize("key", METHODS, ids=".".join)
def test_what_is_wrong_is_refused_by_names(key: tuple[str, str]) -> None:
    method = METHODS[key]
    for returned in method.wrong:
        with pytest.raises(ContractError) as refused:
            method.judge(returned)
        assert refused.value.exit_code == 3
        assert MINE in refused.value.cause, (returned, refused.value.cause)
        assert method.words in refused.value.cause, (returned, refused.value.cause)


@pytest.mark.parametrize("facts", [3, "text", [], ("a", 1)])
def test_facts_of_an_observer_are_a_table(facts: object) -> None:
    from skyrl_engine import hookimpl

    class Mine:
        @hookimpl
        def skyrl_engine_manifest_extra(self) -> object:
            return facts

    bus = ObserverBus()
    bus.register(Mine(), MINE)
    with pytest.raises(ContractError, match="skyrl_engine_manifest_extra of plugin 'mine'"):
        bus.manifest_extra()
