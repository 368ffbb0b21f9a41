"""Data of a step that is refused leaves no step on the rest, and errors count datums as the client listed them."""

import numpy as np
import pytest
from by_day import now

from skyrl_engine_tinker.client_lists import ClientLists
from skyrl_engine_tinker.wire import CLASSES

STEP = {"adam_params": {"learning_rate": 1e-2}}
WRONG = 999
"""No token of the tiny model."""


def datums(model, number, tokens, *, forward_only=False, loss="cross_entropy"):
    """A request of one datum per list of tokens, each with the target 8 at its end."""
    request = CLASSES["ForwardBackwardRequest"](model_id=model, seq_id=number, loss_fn=loss, forward_only=forward_only)
    for own in tokens:
        datum = request.data.add()
        datum.model_input.add().encoded_text.tokens = np.asarray(own, "<i4").tobytes()
        targets = datum.loss_fn_inputs["target_tokens"]
        targets.dense, targets.dtype = np.asarray([*own[1:], 8], "<i8").tobytes(), 2
        targets.shape.append(len(own))
    return request.SerializeToString()


def numbers():
    return iter(range(1, 1000))


def step(client, model, number):
    return client.complete("optim_step", {"model_id": model, "seq_id": number, **STEP})


def send_as_sdk(client, requests):
    """Post the parts of one list as the SDK does: the first one last. Returns the answers in their order."""
    rest = [client.post("forward_backward", body)[1] for body in requests[1:]]
    first = client.post("forward_backward", requests[0])[1]
    return [client.wait_for(promise) for promise in (first, *rest)]


@pytest.mark.parametrize("rank", now([0, 4], 4))
@pytest.mark.parametrize("other_client", [{}], indirect=True, ids=[""])
def test_a_step_with_refused_data_is_refused_and_the_next_one_is_clean(other_client, rank):
    """Bad data first, last and in between; the steps after it are those of a model that never met it."""
    client, good, bad = other_client, [[5, 6, 7]], [[5, WRONG, 7]]
    norms = []
    for bad_passes in ([], [bad], [good, bad], [bad, good]):
        model, seq = client.open_model(rank), numbers()
        step_norms = []
        for _ in range(2):
            for tokens in bad_passes:
                client.complete("forward_backward", datums(model, next(seq), tokens))
            if bad_passes:
                refused = step(client, model, next(seq))
                assert refused["category"] == "user"
                assert refused["error"].startswith(
                    "no step was taken, and its gradient was dropped: a forward_backward of it failed: "
                )
                assert "token 1 of datum 0 is 999" in refused["error"]
                assert "Send all data of the step again" in refused["error"]
            assert isinstance(client.complete("forward_backward", datums(model, next(seq), good)), bytes)
            step_norms.append(step(client, model, next(seq))["metrics"]["grad_norm"])
        norms.append(step_norms)
        client.finish(model)
    assert norms == [norms[0]] * 4


@pytest.mark.parametrize("other_client", [{}], indirect=True, ids=[""])
def test_an_unknown_loss_spoils_a_step_and_a_forward_spoils_none(other_client):
    client, model, seq = other_client, other_client.open_model(), numbers()
    assert isinstance(client.complete("forward_backward", datums(model, next(seq), [[5, 6, 7]])), bytes)
    assert "error" in client.complete("forward_backward", datums(model, next(seq), [[5, WRONG]], forward_only=True))
    assert "metrics" in step(client, model, next(seq))
    client.complete("forward_backward", datums(model, next(seq), [[5, 6, 7]]))
    assert "error" in client.complete("forward_backward", datums(model, next(seq), [[5, 6, 7]], loss="nonsense"))
    assert "nonsense" in step(client, model, next(seq))["error"]


@pytest.mark.parametrize("other_client", [{}], indirect=True, ids=[""])
def test_errors_count_datums_in_the_list_of_the_client(other_client):
    """Datum 4 of one list, sent as three requests; then a list of its own, which begins at 0 again."""
    client, model, seq = other_client, other_client.open_model(), numbers()
    client.complete("forward_backward", datums(model, next(seq), [[5, 6]] * 3))
    parts = [[[5, 6]] * 2, [[6, 7]] * 2, [[5, WRONG], [6, 7]]]
    answers = send_as_sdk(client, [datums(model, next(seq), each) for each in parts])
    assert [isinstance(each, bytes) for each in answers] == [True, True, False]
    assert answers[2]["error"].startswith("token 1 of datum 4 is 999")
    assert "datum 4 is 999" in step(client, model, next(seq))["error"]
    refused = client.complete("forward_backward", datums(model, next(seq), [[5, 6], [5, WRONG]]))
    assert refused["error"].startswith("token 1 of datum 1 is 999")
    assert "datum 1 is 999" in step(client, model, next(seq))["error"]


@pytest.mark.parametrize("other_client", [{"gap_timeout_s": 0.5}], indirect=True, ids=[""])
def test_a_request_that_never_comes_spoils_its_step(other_client):
    client, model = other_client, other_client.open_model()
    client.complete("forward_backward", datums(model, 1, [[5, 6, 7]]))
    assert "request 2 did not arrive" in step(client, model, 3)["error"]
    client.complete("forward_backward", datums(model, 4, [[5, 6, 7]]))
    assert "metrics" in step(client, model, 5)


def test_parts_of_a_list_are_known_by_the_order_in_which_they_come():
    lists = ClientLists()
    lists.arrive(2, 10)
    # three parts, the later ones in any order, and one of them twice
    for number in (5, 4, 5, 3):
        lists.arrive(number, 1024)
    lists.arrive(7, 8)
    assert [lists.before(each) for each in (2, 3, 4, 5, 7)] == [0, 0, 1024, 2048, 0]
    lists.forget_before(4)
    assert lists.before(5) == 2048
    lists.forget_before(7)
    assert lists.before(7) == 0
    assert lists.before(100) == 0
