"""A teacher behind a server, which answers vLLM's `prompt_logprobs` with the scores of a real model: the columns, the runs, and every way in
which a server may fail or answer about something else.
"""

import json
import threading
from collections.abc import Callable, Iterator
from functools import partial
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from attrs import define, evolve, field
from transformers import AutoModelForCausalLM, AutoTokenizer

from skyrl_engine.cli import app
from skyrl_engine.config import from_dict, resolve
from skyrl_engine.config.schema import TeacherConfig
from skyrl_engine.contracts.values.columns import SampleColumns
from skyrl_engine.errors import ConfigError, EngineError, ModelError, UnsupportedError
from skyrl_engine.modeling.tiny import VOCABULARY
from skyrl_engine.run.metrics import read_metrics
from skyrl_engine.training import teacher_endpoint
from skyrl_engine.training.sft.prepare import prepare
from skyrl_engine.training.teacher_endpoint import EndpointTeacher, make_decode

ROWS = [
    {"prompt_ids": [3, 4 + number % 3], "response_ids": [5 + (number + place) % 5 for place in range(2 + number % 4)]}
    for number in range(8)
]
Answer = dict[str, Any]


@define
class Server:
    """The teacher's model behind HTTP. `bend` changes what it answers, `codes` are answered first, with `headers`; `seen` are the requests."""

    folder: Path
    url: str = ""
    bend: Callable[[Answer], Any] | None = None
    codes: list[int] = field(factory=list)
    headers: dict[str, str] = field(factory=dict)
    seen: list[tuple[str | None, Answer]] = field(factory=list)
    lock: Any = field(factory=threading.Lock)
    model: Any = None
    tokenizer: Any = None

    def answer(self, body: Answer) -> Answer:
        ids, width = body["prompt"], body["prompt_logprobs"]
        with self.lock, torch.no_grad():
            logprobs = self.model(torch.tensor([ids])).logits[0].log_softmax(-1)
        places: list[Any] = [None]
        for place, token in enumerate(ids[1:]):
            likeliest = logprobs[place].topk(width).indices.tolist() if width else []
            ranks = {number: rank for rank, number in enumerate(logprobs[place].argsort(descending=True).tolist(), 1)}
            places.append(
                {
                    str(number): {
                        "logprob": float(logprobs[place, number]),
                        "rank": ranks[number],
                        "decoded_token": self.tokenizer.decode([number]),
                    }
                    for number in {token, *likeliest}
                }
            )
        return {"choices": [{"text": "", "prompt_logprobs": places}]}

    def start(self) -> ThreadingHTTPServer:
        self.model = AutoModelForCausalLM.from_pretrained(self.folder).eval()
        self.tokenizer = AutoTokenizer.from_pretrained(self.folder)
        server = self

        class Handler(BaseHTTPRequestHandler):
            def do_POST(self) -> None:
                body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
                server.seen.append((self.headers.get("Authorization"), body))
                code = server.codes.pop(0) if server.codes else 200
                answer: Any = server.answer(body) if code == 200 else {"error": {"message": "not now"}}
                if code == 200 and server.bend is not None:
                    answer = server.bend(answer)
                text = answer if isinstance(answer, str) else json.dumps(answer)
                self.send_response(code)
                for name, value in server.headers.items():
                    self.send_header(name, value)
                self.end_headers()
                self.wfile.write(text.encode())

            def log_message(self, *_arguments: Any) -> None:
                pass

        serving = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        self.url = f"http://127.0.0.1:{serving.server_port}/v1"
        threading.Thread(target=serving.serve_forever, daemon=True).start()
        return serving


@pytest.fixture(scope="module")
def started(models: Path) -> Iterator[Server]:
    server = Server(models / "teacher")
    serving = server.start()
    yield server
    serving.shutdown()
    serving.server_close()


@pytest.fixture
def server(started: Server, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Server:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(teacher_endpoint, "_FIRST_WAIT", 0.01)
    Path("rows.jsonl").write_text("".join(json.dumps(row) + "\n" for row in ROWS))
    started.bend, started.codes, started.headers = None, [], {}
    started.seen.clear()
    return started


def ask(server: Server, models: Path, **settings: Any) -> EndpointTeacher:
    table = TeacherConfig(url=server.url, model="t", **settings)
    return EndpointTeacher.of(table, make_decode(AutoTokenizer.from_pretrained(models / "student")), VOCABULARY)


def columns() -> SampleColumns:
    masks = [[1] * len(row["response_ids"]) for row in ROWS]
    masks[2] = [0] * len(masks[2])
    return SampleColumns.from_lists(input_ids=[row["prompt_ids"] + row["response_ids"] for row in ROWS], loss_mask=masks)


def whole_logprobs(path: Path, row: dict[str, Any]) -> torch.Tensor:
    """[n, v] about the response's tokens, in float64, of transformers' own model."""
    model = AutoModelForCausalLM.from_pretrained(path, dtype=torch.float64).eval()
    ids = row["prompt_ids"] + row["response_ids"]
    with torch.no_grad():
        return model(torch.tensor([ids])).logits[0, len(row["prompt_ids"]) - 1 : -1].log_softmax(-1)


def test_the_columns_are_the_teachers_scores_of_the_samples_tokens(server: Server, models: Path) -> None:
    """float32 against float64; a sample without loss is not asked about."""
    scored = ask(server, models).score(columns())["teacher_logprobs"]
    due = [
        [float(whole_logprobs(models / "teacher", row)[place, token]) for place, token in enumerate(row["response_ids"])]
        for row in ROWS
    ]
    due[2] = [0.0] * len(due[2])
    assert scored.tolist() == pytest.approx([value for values in due for value in values], abs=1e-5)
    assert len(server.seen) == len(ROWS) - 1
    assert {key for key, _ in server.seen} == {None}


def test_the_likeliest_tokens_are_the_teachers(server: Server, models: Path) -> None:
    given = ask(server, models, top_k=3).score(columns())
    ids, logprobs = given["teacher_ids"], given["teacher_logprobs"]
    assert (ids.dtype, logprobs.dtype) == (np.int64, np.float32)
    start = 0
    for number, row in enumerate(ROWS):
        if number != 2:
            due = whole_logprobs(models / "teacher", row).topk(3)
            assert ids[start : start + len(due.indices)].tolist() == due.indices.tolist()
            np.testing.assert_allclose(logprobs[start : start + len(due.indices)], due.values, atol=1e-5)
        start += len(row["response_ids"])


def distill(models: Path, *more: str, output: str = "run") -> list[dict[str, float]]:
    arguments = [
        *(
            "distill",
            "--model",
            str(models / "student"),
            "--data",
            "rows.jsonl",
            "--batch-size",
            "8",
            "--output",
            output,
            "--quiet",
        ),
        *("run.device=cpu", "data.cache=./cache", *more),
    ]
    assert app.main(arguments) == 0
    return [record["metrics"] for record in read_metrics(Path(output) / "metrics.jsonl") if record["kind"] == "step"]


def test_runs_equal_those_of_the_same_teacher_on_the_ranks(server: Server, models: Path) -> None:
    """`teacher_kl` on rows and on the student's samples; and `top_k_divergence` over k tokens equals that of rows which hold them."""
    behind = [f"teacher.url={server.url}", "teacher.model=t"]
    beside = [f"teacher.path={models / 'teacher'}"]
    keys = ["--steps", "3", "--learning-rate", "1e-2", "--loss", "teacher_kl"]
    for name, more in (("rows", []), ("mixed", ["--sample-share", "0.6", "--max-tokens", "4"])):
        remote, local = (
            distill(models, *keys, *more, *which, output=f"{name}-{place}") for place, which in enumerate((behind, beside))
        )
        assert [step["loss"] for step in remote] == pytest.approx([step["loss"] for step in local], rel=1e-3)
    likeliest = distill(models, "--steps", "1", "--learning-rate", "1e-30", "teacher.top_k=4", *behind, output="top")
    rows = []
    for row in ROWS:
        due = whole_logprobs(models / "teacher", row).topk(4)
        rows.append({**row, "teacher_ids": due.indices.tolist(), "teacher_logprobs": due.values.tolist()})
    Path("rows.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    held = distill(models, "--steps", "1", "--learning-rate", "1e-30", output="held")
    assert likeliest[0]["loss"] == pytest.approx(held[0]["loss"], rel=1e-5)
    assert likeliest[0]["grad_norm"] == pytest.approx(held[0]["grad_norm"], rel=1e-4)


def test_rl_distills_from_a_server(server: Server, models: Path) -> None:
    """The preset on_policy_distill: the column of the sampled tokens is the server's; the divergence is that of a teacher on the ranks."""
    Path("prompts.jsonl").write_text("".join(json.dumps({"prompt": text}) + "\n" for text in ("one", "two three")))
    behind = [f"teacher.url={server.url}", "teacher.model=t"]
    first = {}
    for name, which in (("behind", behind), ("beside", [f"teacher.path={models / 'teacher'}"])):
        arguments = ["distill", "--model", str(models / "student"), "--prompts", "prompts.jsonl", "--steps", "1", "--groups", "2"]
        arguments += ["--max-tokens", "4", "--output", name, "--quiet", "run.device=cpu", "rl.max_prompt_tokens=16", *which]
        assert app.main(arguments) == 0
        (step,) = [each["metrics"] for each in read_metrics(Path(name) / "metrics.jsonl") if each["kind"] == "step"]
        first[name] = step["teacher/divergence"]
    assert first["behind"] == pytest.approx(first["beside"], rel=1e-4)


def test_a_request_is_sent_again_until_the_server_answers(server: Server, models: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    server.codes, server.headers = [503, 429], {"Retry-After": "0.01"}
    monkeypatch.setenv("TEACHER_KEY", "secret")
    teacher = ask(server, models, retries=2, concurrency=1, api_key_env="TEACHER_KEY")
    assert teacher.ask([3, 4, 5]).logprobs.shape == (3,)
    assert [key for key, _ in server.seen] == ["Bearer secret"] * 3
    assert "secret" not in repr(teacher)


def without(place: int) -> Callable[[Answer], Answer]:
    def bend(answer: Answer) -> Answer:
        del answer["choices"][0]["prompt_logprobs"][place]
        return answer

    return bend


def change(edit: Callable[[Answer], None]) -> Callable[[Answer], Answer]:
    """Edit what is told of the second token asked about, `5`."""

    def bend(answer: Answer) -> Answer:
        edit(answer["choices"][0]["prompt_logprobs"][2])
        return answer

    return bend


def rename(entries: Answer) -> None:
    entries["6"] = entries.pop("5")


@pytest.mark.parametrize(
    ("bend", "words"),
    [
        (without(1), "answered for 2 tokens where 3 were asked about"),
        (change(rename), "answered at token 2 about other tokens than 5"),
        (change(lambda entries: entries["5"].update(logprob=0.5)), "answered with 0.5 as a log-probability at token 2"),
        (change(lambda entries: entries["5"].update(logprob=float("nan"))), "answered with nan as a log-probability at token 2"),
        (change(lambda entries: entries["5"].update(logprob=None)), "answered with None as a log-probability"),
        (
            change(lambda entries: entries.update(word={"logprob": -1.0})),
            "at token 2 with what is no log-probability of a token's id",
        ),
        (change(lambda entries: entries.update({"6": -1.0})), "at token 2 with what is no log-probability of a token's id"),
        (lambda _answer: {"choices": [{"text": "hello"}]}, "answered without prompt_logprobs"),
        (lambda _answer: [], "answered without prompt_logprobs"),
        (lambda _answer: "<html>", "with what is no JSON"),
    ],
)
def test_an_answer_about_something_else_ends_the_run(server: Server, models: Path, bend: Any, words: str) -> None:
    server.bend = bend
    with pytest.raises(ModelError, match=words):
        ask(server, models).ask([3, 4, 5])
    assert len(server.seen) == 1, "no retry can help"


def test_probabilities_beyond_one_are_refused(server: Server, models: Path) -> None:
    def raise_all(entries: Answer) -> None:
        for entry in entries.values():
            entry["logprob"] = -0.1

    server.bend = change(raise_all)
    with pytest.raises(ModelError, match=r"answered at token 2 with probabilities that add up to 3\.6"):
        ask(server, models, top_k=4).ask([3, 4, 5])


def test_a_likely_token_beyond_the_vocabulary_is_refused(server: Server, models: Path) -> None:
    def rename_likeliest(entries: Answer) -> None:
        likeliest = next(number for number, entry in entries.items() if entry["rank"] == 1)
        assert likeliest != "5"
        entries[str(VOCABULARY)] = entries.pop(likeliest)

    server.bend = change(rename_likeliest)
    with pytest.raises(
        ModelError, match=f"at token 2 that token {VOCABULARY} is likely, and the trained model has {VOCABULARY} tokens"
    ):
        ask(server, models, top_k=4).ask([3, 4, 5])


def test_fewer_likeliest_tokens_than_were_asked_for_are_refused(server: Server, models: Path) -> None:
    def keep(entries: Answer, count: int) -> None:
        ranked = sorted(entries, key=lambda number: entries[number]["rank"])
        for number in ranked[count:]:
            if number != "5":
                del entries[number]

    for count in (2, 3):
        server.bend = change(partial(keep, count=count))
        with pytest.raises(ModelError) as caught:
            ask(server, models, top_k=4).ask([3, 4, 5])
        assert "of the 4 likeliest tokens" in caught.value.cause
        assert "--max-logprobs" in str(caught.value.remedy)


def test_another_tokenizer_is_noticed_by_the_names_of_tokens(server: Server, models: Path) -> None:
    ids = AutoTokenizer.from_pretrained(models / "student")("one two").input_ids

    def rename_token(answer: Answer) -> Answer:
        answer["choices"][0]["prompt_logprobs"][1][str(ids[1])]["decoded_token"] = " three"
        return answer

    assert ask(server, models).ask(ids).logprobs[1] < 0
    server.bend = rename_token
    with pytest.raises(
        UnsupportedError, match=r"has another tokenizer: it calls the token .* 'three', which is 'two' to the trained model"
    ):
        ask(server, models).ask(ids)


def test_a_server_that_fails_ends_the_run_with_its_words(server: Server, models: Path) -> None:
    server.codes = [500, 502]
    with pytest.raises(ModelError, match=r"2 attempts failed, the last one so: answered /completions with 502: .*not now"):
        ask(server, models, retries=1).ask([3, 4])
    server.codes, server.seen = [400], []
    with pytest.raises(ModelError, match=r"answered /completions with 400: .*not now"):
        ask(server, models).ask([3, 4])
    assert len(server.seen) == 1
    server.codes, server.headers = [429], {"Retry-After": "900"}
    with pytest.raises(ModelError, match="429"):
        ask(server, models, request_seconds=5.0).ask([3, 4])
    nowhere = evolve(TeacherConfig(url="http://127.0.0.1:1/v1", model="t"), retries=1)
    with pytest.raises(ModelError, match="2 attempts failed, the last one so: cannot be reached"):
        EndpointTeacher.of(nowhere, str).ask([3, 4])


def test_what_cannot_work_is_refused_while_planning(server: Server, models: Path) -> None:
    def require_refusal(error: type[EngineError], words: str, loss: str = "teacher_kl", **teacher: Any) -> None:
        options = {
            "model": {"path": str(models / "student")},
            "data": {"train": "rows.jsonl", "cache": "cache"},
            "training": {"steps": 1, "batch_size": 4},
            "loss": {"use": loss},
            "teacher": {"url": server.url, "model": "t", **teacher},
        }
        with pytest.raises(error, match=words):
            prepare(resolve(from_dict(options, "test")))

    require_refusal(UnsupportedError, "over the whole vocabulary, and a server tells a few tokens", loss="divergence")
    require_refusal(UnsupportedError, "teacher.url is set, and no part of the run reads teacher_logprobs", loss="cross_entropy")
    require_refusal(ConfigError, "teacher.path is set too", path=str(models / "teacher"))
    require_refusal(ConfigError, "is asked for a model by its name", model=None)
    require_refusal(ConfigError, "is no base URL of a server", url="ftp://host")
    require_refusal(
        ConfigError, "teacher.top_k(?s:.)*is of a teacher behind teacher.url, which is not set", url=None, model=None, top_k=3
    )
    require_refusal(UnsupportedError, "NOT_THERE, which holds the teacher's API key, is not set", api_key_env="NOT_THERE")
