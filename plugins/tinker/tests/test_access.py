"""Who may call: without a key, programs of this machine, and no web page that its browser shows; addresses of others need a word."""

import http.client
import re
from pathlib import Path
from urllib.parse import urlsplit

import pytest
from click.testing import CliRunner

from skyrl_engine_tinker.access import is_loopback, is_named_loopback
from skyrl_engine_tinker.command import serve


@pytest.fixture(scope="module")
def keyless(settings, serving_of):
    with serving_of(settings, key=None) as client:
        yield urlsplit(client.address)


def send_request(address, headers, method="POST", path="/api/v1/create_session"):
    connection = http.client.HTTPConnection(address.hostname, address.port, timeout=30)
    connection.putrequest(method, path, skip_host=True)
    for name, value in headers:
        connection.putheader(name, value)
    connection.putheader("Content-Length", "2")
    connection.endheaders(b"{}")
    answer = connection.getresponse()
    reply = answer.status, answer.read().decode()
    connection.close()
    return reply


@pytest.mark.parametrize("host", ["127.0.0.1:{port}", "localhost:{port}", "LOCALHOST", "127.3.2.1", "[::1]:{port}"])
def test_programs_of_this_machine_may_call(keyless, host):
    host = host.format(port=keyless.port)
    assert send_request(keyless, [("Host", host)])[0] == 200
    assert send_request(keyless, [("Host", host), ("Origin", f"http://{host}")])[0] == 200


PATHS = [
    ("POST", "/api/v1/create_session"),
    ("GET", "/api/v1/sessions"),
    ("GET", "/metrics"),
    ("POST", "/api/v1/sessions/x/finish"),
]


@pytest.mark.parametrize(("method", "path"), PATHS)
@pytest.mark.parametrize(
    "host",
    [
        *("evil.example", "evil.example:{port}", "127.0.0.1.evil.example", "localhost.evil.example", "127.0.0.1@evil.example"),
        *("0.0.0.0:{port}", "10.0.0.1", "", "2130706433.evil.example"),
    ],
)
def test_another_host_is_refused(keyless, host, method, path):
    """DNS rebinding: the name of a page leads to this machine, and the browser takes both for one origin."""
    status, text = send_request(keyless, [("Host", host.format(port=keyless.port))], method, path)
    assert status in (400, 403), text
    assert status == 400 or "Host is not this machine's loopback address" in text


@pytest.mark.parametrize("origin", ["https://evil.example", "null", "http://localhost:1", "http://localhost", "", "file://"])
def test_a_web_page_is_refused(keyless, origin):
    for path in ("/api/v1/create_session", "/api/v1/telemetry"):
        status, text = send_request(keyless, [("Host", f"localhost:{keyless.port}"), ("Origin", origin)], path=path)
        assert status == 403
        assert "--api-key-file" in text


def test_with_a_key_or_with_a_word_every_name_will_do(client, settings, serving_of):
    with serving_of(settings, key=None, anyone=True) as other:
        assert send_request(urlsplit(other.address), [("Host", "gpu.example"), ("Origin", "https://page.example")])[0] == 200
    headers = [("Host", "gpu.example"), ("X-API-Key", "tml-test")]
    assert send_request(urlsplit(client.address), headers)[0] == 200
    assert send_request(urlsplit(client.address), headers[:1])[0] == 401


@pytest.mark.parametrize("host", ["0.0.0.0", "::", "192.0.2.1", "no-such-host.invalid", ""])
def test_an_address_of_others_needs_a_key_or_a_word(tmp_path: Path, host: str) -> None:
    (tmp_path / "serve.toml").write_text("[serve.models]\na = 'nowhere'\n")
    result = CliRunner().invoke(serve, [str(tmp_path / "serve.toml"), "--host", host])
    assert result.exit_code == 2
    assert "--api-key-file FILE, or --allow-anyone" in " ".join(result.output.replace("│", " ").split())


def test_a_key_and_everybody_contradict_each_other(tmp_path: Path) -> None:
    key = tmp_path / "key"
    key.write_text("tml-x")
    result = CliRunner().invoke(serve, [str(key), "--api-key-file", str(key), "--allow-anyone"])
    assert result.exit_code == 2
    assert re.search("asks for\\s+no key", result.output)


def test_what_is_loopback() -> None:
    assert all(map(is_loopback, ("127.0.0.1", "127.9.9.9", "::1", "localhost")))
    assert not any(map(is_loopback, ("0.0.0.0", "::", "8.8.8.8", "", "a b", "x" * 300)))
    assert not any(map(is_named_loopback, ("localhost:port", "localhost/x", "a@localhost", "[::1", "::1:80:")))
