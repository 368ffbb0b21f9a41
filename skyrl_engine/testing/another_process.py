"""Another process, as another rank or run is: it hashes texts in its own way, and so orders sets in another, its clocks are ahead, and it has
the rank's environment variables.

One process lives as long as the kit and imports it once; every question is answered in a fork of it, so that no answer changes the next. A
further one is started for a plugin that uses the order of a set which the first orders as this one does, by chance.
"""

import atexit
import gc
import os
import pickle
import subprocess
import sys
from ast import literal_eval
from collections.abc import Callable, Iterable, Iterator, Mapping
from copy import deepcopy
from functools import cache, partial
from itertools import combinations
from multiprocessing import Pipe
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

from attrs import frozen

from skyrl_engine.config import SelectedPlugin
from skyrl_engine.testing.another_rank import ANOTHER_RANK
from skyrl_engine.testing.another_time import put_clocks_ahead
from skyrl_engine.testing.promise import Broken, Promise, Undecidable, promise
from skyrl_engine.testing.recorded_sets import Orders, Texts, find_sources, record_sets
from skyrl_engine.testing.subject import Subject

_SEEDS = tuple(map(str, range(1, 1000)))
_MOST = 20
"""Further processes that may be asked: a set of two texts has one order in all of them once in a million plugins."""

Answer = Callable[[Subject[Any], Any], object]

TEXTS = (*combinations(("math", "code", "math/easy"), 2), ("logprobs", "token_loss", "entropy", "values", "a_field_of_my_own"))
"""Sets of the kit's texts that the other process orders otherwise, so that it never has the order of this one by chance."""


@frozen
class Question:
    """A call, pickled, and what it needs in the other process: this one's import path, folder, environment and number of threads."""

    path: list[str]
    folder: str
    environment: dict[str, str]
    threads: int | None
    call: bytes


def start() -> None:
    """Start the other process, which takes seconds to import what this one has imported of the kit, while this one goes on."""
    _process(_choose_first_seed())


def ask(function: Callable[..., Any], *arguments: object, seed: str | None = None) -> Any:
    """Return what a function of a module returns in the other process, or in that of `seed`. All that goes there and back is pickled.

    Raises Undecidable where the arguments cannot be, and Broken where the function fails.
    """
    try:
        call = pickle.dumps(partial(function, *arguments))
    except Exception as error:
        raise Undecidable(f"it cannot be pickled: {_format_error(error)}") from error
    # its devices stay: a plugin may hold a model on one
    environment = {**os.environ, **{name: value for name, value in ANOTHER_RANK.items() if name != "CUDA_VISIBLE_DEVICES"}}
    threads = sys.modules["torch"].get_num_threads() if "torch" in sys.modules else None
    question = pickle.dumps(Question(_import_path(), str(Path.cwd()), environment, threads, call))
    process = _process(seed or _choose_first_seed())
    try:
        process.send_bytes(question)
        failure, value = pickle.loads(process.recv_bytes())  # noqa: S301 -- of our own process
    except BaseException:
        _process.cache_clear()  # an answer that nobody waited for would be taken for the next one
        raise
    if failure is not None:
        raise Broken(f"fails in a fresh process: {failure}", "Import what it needs in its own module, and ask for no rank")
    return value


@cache
def _process(seed: str) -> Connection:
    here, there = Pipe()
    kit = ", ".join(name for name in sys.modules if name.startswith(f"{__package__}."))
    process = subprocess.Popen(  # noqa: S603 -- this interpreter, with a text of our own
        [sys.executable, "-P", "-c", f"import {kit}; {__name__}.serve({there.fileno()})"],
        pass_fds=(there.fileno(),),
        stdin=subprocess.DEVNULL,
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
        env={**os.environ, "PYTHONPATH": os.pathsep.join(_import_path()), "PYTHONHASHSEED": seed},
    )
    there.close()

    def end() -> None:
        here.close()
        process.wait()

    atexit.register(end)
    return here


def _import_path() -> list[str]:
    return [path for path in sys.path if path]


def ask_in_other_orders(plugin: SelectedPlugin, function: Callable[..., Any], *arguments: object) -> Iterator[Any]:
    """Yield what a function returns, which loads the plugin, in several other processes, and in one where the plugin's code is not known.

    Each set of texts whose order the plugin's own code uses there has different orders in two of them. Raises as `ask` does.
    """
    sources = find_sources(plugin.loaded.record)
    if sources is None:
        yield ask(function, *arguments)
        return
    answer, unmoved = ask(record_sets, sources, function, *arguments)
    yield answer
    unasked = [seed for seed in _SEEDS[: _MOST + 1] if seed != _choose_first_seed()]
    while unmoved and unasked:
        seed = next((seed for seed in unasked if 2 * _count_reordered_sets(seed, unmoved) >= len(unmoved)), unasked[0])
        unasked.remove(seed)
        answer, there = ask(record_sets, sources, function, *arguments, seed=seed)
        yield answer
        unmoved = {members: orders for members, orders in unmoved.items() if orders & there.get(members, frozenset())}


def _count_reordered_sets(seed: str, unmoved: Orders) -> int:
    """Return how many sets another process likely orders otherwise, as far as it adds their members in the order of their `repr`."""
    sets = tuple(tuple(sorted(members, key=repr)) for members in unmoved)
    return sum(order not in seen for order, seen in zip(_order_sets(seed, sets), unmoved.values(), strict=True))


@cache
def _choose_first_seed() -> str:
    """Return the first PYTHONHASHSEED under which each set of `TEXTS` has another order than here."""
    here = [tuple(set(texts)) for texts in TEXTS]
    return next(seed for seed in _SEEDS if not any(map(tuple.__eq__, here, _order_sets(seed, TEXTS))))


@cache
def _order_sets(seed: str, sets: tuple[Texts, ...]) -> tuple[Texts, ...]:
    """Return the members of each set, added in the order given, in the set's order under a PYTHONHASHSEED."""
    process = subprocess.run(  # noqa: S603 -- this interpreter, with a text of our own
        [sys.executable, "-S", "-c", f"print(tuple(tuple(set(members)) for members in {sets!r}))"],
        env={**os.environ, "PYTHONHASHSEED": seed},
        capture_output=True,
        check=True,
    )
    orders: tuple[Texts, ...] = literal_eval(process.stdout.decode())
    return orders


def _no_plugin(subject: Subject[Any]) -> str | None:
    return "there is no plugin that another process could load" if subject.plugin is None else None


def another_process(answer: Answer, cases: Callable[[Subject[Any]], Iterable[Any]]) -> Promise[Any, Any]:
    """Return the promise of a kind. `answer`, a function of a module, makes the product and returns what it gives for a case, in values that
    `==` compares and that can be pickled. It raises Undecidable where the product fails.
    """

    @promise(
        "Another process, which orders sets of texts otherwise and has another date, gives the same answers",
        exempt=_no_plugin,
    )
    def another_process(subject: Subject[Any], _case: None) -> None:
        assert subject.plugin is not None, "exempt without a plugin"
        chosen = list(cases(subject))
        here = [_answer(answer, subject, case) for case in deepcopy(chosen)]
        if all(value is None for value in here):
            raise Undecidable("it answers none of the cases")
        processes = list(ask_in_other_orders(subject.plugin, _answers, answer, subject.plugin.to_lock_entry(), chosen))
        for case, mine, theirs in (told for there in processes for told in zip(chosen, here, there, strict=True)):
            # one that answers differently every time breaks another promise
            if mine != theirs and _answer(answer, subject, deepcopy(case)) == mine:
                raise Broken(
                    "answers otherwise in another process, where a set of texts has another order, it is another day, and its module has not "
                    "been called before",
                    "Sort what comes out of a set, number texts with np.unique(..., return_inverse=True), ask for no time, and keep nothing in "
                    "a module",
                    case=case,
                )

    return another_process


def _answers(answer: Answer, lock: Mapping[str, Any], cases: Iterable[Any]) -> list[object]:
    subject: Subject[Any] = Subject.of_plugin(SelectedPlugin.from_lock(lock))
    return [_answer(answer, subject, case) for case in cases]


def _answer(answer: Answer, subject: Subject[Any], case: Any) -> object:
    """Return the answer, None where the product fails."""
    try:
        return answer(subject, case)
    except Undecidable:
        return None


# --- in the other process ----------------------------------------------------------------------------------------------------------


def serve(descriptor: int) -> None:
    """Answer the questions of a connection, each in a fork of this process, until nobody can ask any more."""
    questions = Connection(descriptor)
    gc.freeze()
    while True:
        try:
            question = questions.recv_bytes()
        except (EOFError, ConnectionResetError):
            return
        child = os.fork()
        if not child:
            try:
                questions.send_bytes(_answer_to(pickle.loads(question)))  # noqa: S301 -- of the process that started this one
            finally:
                os._exit(0)  # what this process would do at its end is not the fork's to do
        _, status = os.waitpid(child, 0)
        if status:
            questions.send_bytes(pickle.dumps((f"it ended with status {os.waitstatus_to_exitcode(status)}", None)))


def _answer_to(question: Question) -> bytes:
    """Return the pickled failure and value of a call."""
    try:
        sys.path[:] = question.path
        os.environ.clear()
        os.environ.update(question.environment)
        os.chdir(question.folder)
        if question.threads is not None:
            sys.modules["torch"].set_num_threads(question.threads)
        put_clocks_ahead()
        return pickle.dumps((None, pickle.loads(question.call)()))  # noqa: S301 -- of the process that started this one
    except BaseException as error:  # noqa: BLE001 - whatever a plugin raises is an answer
        return pickle.dumps((_format_error(error), None))


def _format_error(error: BaseException) -> str:
    return f"{type(error).__name__}: {' '.join(str(error).split())[:200]}"
