"""Calls to a store are tried again a bounded number of times, and what is wrong is said: the package, the protocol, a secret, no answer."""

import sys

import pytest
from failing_store import StoreOfTest

from skyrl_engine.errors import StoreError
from skyrl_engine.object_store import place as places
from skyrl_engine.object_store.address import hide_secrets, is_address
from skyrl_engine.object_store.place import PAUSES, StorePlace


@pytest.fixture
def slept(monkeypatch) -> list[float]:
    pauses: list[float] = []
    monkeypatch.setattr(places.time, "sleep", pauses.append)
    StoreOfTest.begin()
    return pauses


def test_an_address_begins_with_a_protocol() -> None:
    assert [is_address(text) for text in ("s3://b/x", "file:///x", "owner/name", "C:\\x", "./a://b", "")] == [
        True,
        True,
        *[False] * 4,
    ]


@pytest.mark.parametrize(
    "address",
    [
        "s3://AKIA:geheim@bucket/x",
        "https://host/x.jsonl?X-Amz-Signature=geheim&a=b",
        "https://host/x?sig=geheim",
        "ftp://ada:geheim@host/x",
    ],
)
def test_an_address_with_a_secret_is_refused_and_the_secret_is_not_said(address) -> None:
    with pytest.raises(StoreError, match="holds a secret") as caught:
        StorePlace.of(address)
    assert "geheim" not in str(caught.value)
    assert "(hidden)" in caught.value.cause


def test_an_account_in_an_address_is_no_secret() -> None:
    for address in ("abfs://rows@account.dfs.core.windows.net/x", "sftp://ada@host/x", "s3://bucket/x?versionId=3"):
        assert hide_secrets(address) == address


def test_a_package_that_is_missing_is_named_with_the_command(monkeypatch) -> None:
    monkeypatch.setitem(sys.modules, "s3fs", None)
    monkeypatch.setitem(sys.modules, "gcsfs", None)
    with pytest.raises(StoreError, match=r"s3:// addresses need the package s3fs, .*\. Install it: python -m pip install s3fs"):
        StorePlace.of("s3://bucket/x")
    with pytest.raises(StoreError, match=r"python -m pip install gcsfs"):
        StorePlace.of("gs://bucket/x")


def test_a_protocol_that_nobody_knows_is_refused() -> None:
    with pytest.raises(StoreError, match=r"s4://b/x cannot be used: .*s4.* Correct the protocol"):
        StorePlace.of("s4://b/x")


def test_a_store_that_fails_is_asked_again_and_gives_the_same(slept) -> None:
    place = StorePlace.of("failing://b/x")
    place.files.pipe_file(place.path, b"abc")

    def fail(number: int, name: str) -> None:
        if number <= len(PAUSES):
            raise ConnectionError("no route")

    StoreOfTest.expect(fail)
    assert place.size() == 3
    assert slept == list(PAUSES)


def test_a_store_that_does_not_answer_is_given_up_with_its_address(slept) -> None:
    def fail(number: int, name: str) -> None:
        raise TimeoutError("https://ada:geheim@host/ does not answer")

    StoreOfTest.expect(fail)
    with pytest.raises(
        StoreError, match=r"the store cannot list failing://b after 4 tries: TimeoutError: .*\(hidden\)@host"
    ) as caught:
        StorePlace.of("failing://b").find()
    assert slept == list(PAUSES)
    assert "geheim" not in str(caught.value)


def test_what_the_next_try_meets_again_is_tried_once(slept) -> None:
    def fail(number: int, name: str) -> None:
        raise PermissionError("Access Denied")

    StoreOfTest.expect(fail)
    with pytest.raises(StoreError, match=r"the store cannot read failing://b/x: PermissionError: Access Denied"):
        StorePlace.of("failing://b/x").size()
    with pytest.raises(FileNotFoundError):
        StoreOfTest.expect() or StorePlace.of("failing://b/x").size()
    assert slept == []


def test_names_below_a_folder_are_found_and_its_neighbours_are_not() -> None:
    StoreOfTest.begin()
    place = StorePlace.of("failing://b/runs/")
    for name in ("runs/a", "runs/x/b", "runs2/c"):
        place.files.pipe_file(f"/b/{name}", b"123")
    assert place.find() == {"a": 3, "x/b": 3}
    assert (place / "x").find() == {"b": 3}
    assert StorePlace.of("failing://nothing").find() == {}
