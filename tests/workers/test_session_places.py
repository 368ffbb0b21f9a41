"""Sessions among generators: a new one goes where least is under way, and one that is known stays."""

from typing import Any

import numpy as np

from skyrl_engine.contracts.kinds.generator import GenerationRequest, Sampling
from skyrl_engine.workers.session_places import SessionPlaces


def request(number: int, session: int, tokens: int = 10, **settings: Any) -> GenerationRequest:
    prompt = np.ones(tokens - 5, dtype=np.int32)
    return GenerationRequest(number, prompt, Sampling(max_tokens=5), seed=number, session=session, **settings)


def where(places: SessionPlaces, *requests: GenerationRequest) -> list[int]:
    shares = places.share(requests)
    return [next(place for place, share in enumerate(shares) if each in share) for each in requests]


def test_a_new_session_goes_to_the_place_with_the_fewest_tokens_under_way() -> None:
    places = SessionPlaces(3)
    assert where(places, request(0, 0, 90), request(1, 1, 20), request(2, 2, 30), request(3, 3, 20)) == [0, 1, 2, 1]
    assert places.loads == [90, 40, 30]
    assert where(places, request(4, 6)) == [2]
    places.finish([0])
    assert where(places, request(5, 9)) == [0]
    assert places.busy == {0, 1, 2}


def test_a_session_stays_until_it_ends_or_the_weights_change() -> None:
    places = SessionPlaces(2)
    assert where(places, request(0, 7), request(1, 8, 50)) == [0, 1]
    places.finish([0, 1, 99])
    assert where(places, request(2, 5, 100)) == [0]
    # its keys and values are there, however much is under way there
    assert where(places, request(3, 7)) == [0]
    places.end([7, 8, 99])
    # something of session 7 is under way still
    assert where(places, request(4, 7), request(5, 8)) == [0, 1]
    places.finish([3, 4])
    places.forget_idle()
    assert where(places, request(6, 7)) == [1]


def test_nothing_is_held_of_a_session_after_its_last_turn() -> None:
    places = SessionPlaces(2)
    where(places, request(0, 3, last_turn=True), request(1, 3))
    places.finish([1])
    places.finish([0])
    assert places.loads == [0, 0]
    assert not places._places
    assert not places._under_way
    assert not places._open
