"""Promises of a backend about devices, checked on the CPU: no operation mixes devices, and the host waits for outputs alone."""

from collections import Counter
from typing import Literal

from skyrl_engine.testing.backends.held_backend import PassOrder
from skyrl_engine.testing.backends.ranks import RankMixesDevices
from skyrl_engine.testing.backends.subject import BackendCase, BackendSubject, backend_promise, require_working
from skyrl_engine.testing.promise import Broken, Promise


@backend_promise(
    "On another device than the CPU, a whole step mixes no devices: scores, objective, outputs, gradients and optimizer"
)
def one_device(subject: BackendSubject, case: BackendCase) -> None:
    passes = [("forward", PassOrder(case.cut(micro_batches=2))), ("forward_backward", PassOrder(case.cut(micro_batches=2)))]
    if subject.declares("packed"):
        passes.append(("forward_backward", PassOrder(case.cut(micro_batches=2), rows="packed")))
    try:
        with subject.on_another_device(case) as ranks:
            ranks.elsewhere(passes)
    except RankMixesDevices as failed:
        require_working(subject, case)
        raise Broken(
            f"a step that is not on the CPU fails: {failed.operation}",
            "Make tensors with device=..., and move inputs with .to(device)",
        ) from failed


@backend_promise(
    "The host waits for the device for outputs alone, when all micro-batches are launched: without a pipeline, none costs a wait before"
)
def host_waits(subject: BackendSubject, case: BackendCase) -> None:
    """Pipelines are left out: their stages may send each other the lengths of rows, which is another matter."""
    if case.sizes.topology.pp > 1:
        return
    rows: tuple[Literal["padded", "packed"], ...] = ("padded", "packed") if subject.declares("packed") else ("padded",)
    few, many = (
        [(mode, PassOrder(case.cut(micro_batches=count), rows=form)) for form in rows for mode in ("forward", "forward_backward")]
        for count in (1, 3)
    )
    try:
        with subject.on_another_device(case) as ranks:
            waits_by_rank = ranks.elsewhere([*few, *many])
    except RankMixesDevices:  # `one_device` is about it
        require_working(subject, case)
        return
    for rank, waits in enumerate(waits_by_rank):
        for (mode, work), one, three in zip(few, waits[: len(few)], waits[len(few) :], strict=True):
            more = Counter(three) - Counter(one)
            if more:
                places = ", ".join(f"{count / 2:g} times {what}" for what, count in more.most_common(3))
                raise Broken(
                    f"rank {rank} waits for the device in every micro-batch of {mode} over {work.rows} rows: {places}",
                    "Read what a pass needs once, after its last micro-batch, or compute it on the device; the objective's output is read by "
                    "RankOutput.concat",
                )


DEVICE_PROMISES: tuple[Promise[BackendSubject, BackendCase], ...] = (one_device, host_waits)
