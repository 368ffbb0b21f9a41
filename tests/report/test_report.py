"""Reports of real runs: what they were, their curves, their samples and attempts, in one file that asks nobody for anything."""

import json
import re
import shutil
from html.parser import HTMLParser
from pathlib import Path

import pytest
from pair_runs import runs_over, write_pairs
from rl_runs import write_world

from skyrl_engine.config import from_dict, resolve
from skyrl_engine.errors import ConfigError, EngineError
from skyrl_engine.report.run_facts import read_run
from skyrl_engine.report.write import write_comparison, write_report
from skyrl_engine.training.preference.trainer import run_preference
from skyrl_engine.training.rl.run import run_rl
from skyrl_engine.training.sft.trainer import run_sft


@pytest.fixture(scope="module")
def runs(tmp_path_factory):
    """Finished runs by name: `preference`, `sft`, and `rl`, whose environment answers in between."""
    root = tmp_path_factory.mktemp("reported")
    pairs = write_pairs(root / "pairs")
    run_preference(runs_over(pairs, "preference", root)("preference"))
    run_sft(runs_over(pairs, "sft", root)("sft", data={"map": {"completion": "chosen"}}, evaluation={"every": 2}))
    world = write_world(root / "world")
    tables = {
        "trainer": "rl",
        "model": {"path": str(world / "model")},
        "environments": [{"use": f"{world}/world.py:world"}],
        "rl": {"steps": 3, "groups": 2, "group_size": 3, "max_tokens": 12, "max_prompt_tokens": 64},
        "run": {"directory": str(root / "rl"), "device": "cpu"},
    }
    run_rl(resolve(from_dict(tables, "test")))
    return {name: root / name for name in ("preference", "sft", "rl")}


class Page(HTMLParser):
    """Collects ids, links, figures with their labels, and the text outside of scripts and styles; checks that elements are closed."""

    VOID = ("meta", "link", "br")

    def __init__(self, text):
        super().__init__()
        self.ids, self.links, self.figures, self.words, self._open = [], [], [], [], []
        self.feed(text)
        assert not self._open, self._open

    def handle_starttag(self, tag, attributes):
        named = dict(attributes)
        if tag not in self.VOID:
            self._open.append(tag)
        if "id" in named:
            self.ids.append(named["id"])
        self.links += [value for name, value in attributes if name in ("href", "src")]
        if named.get("role") == "img":
            self.figures.append(named["aria-label"])

    def handle_endtag(self, tag):
        assert self._open.pop() == tag, (tag, self._open)

    def handle_data(self, data):
        if not {"script", "style"} & set(self._open):
            self.words.append(data)

    @property
    def text(self):
        return " ".join(" ".join(self.words).split())


def report_of(run: Path) -> Page:
    facts = read_run(run)
    write_report(facts, facts.directory.report)
    return Page(facts.directory.report.read_text())


@pytest.mark.parametrize("name", ["sft", "preference", "rl"])
def test_a_report_holds_all_it_needs(runs, name):
    page = report_of(runs[name])
    assert all(link == "data:," or link.removeprefix("#") in page.ids for link in page.links), page.links
    assert page.figures
    assert all(re.search(r" from .+ at step .+ to .+ at step ", label) for label in page.figures)
    assert "ended at step" in page.text
    assert (runs[name] / "report.html").stat().st_size < 5_000_000


def test_pages_share_a_library_beside_them(runs, tmp_path):
    library, page = tmp_path / "shared" / "bokeh.min.js", tmp_path / "pages" / "sft.html"
    library.parent.mkdir()
    page.parent.mkdir()
    write_report(read_run(runs["sft"]), page, script=library)
    text = page.read_text()
    assert '<script src="../shared/bokeh.min.js"></script>' in text
    assert "script-src 'unsafe-inline' 'self';" in text
    assert len(text) < 300_000 < library.stat().st_size
    write_report(read_run(runs["preference"]), page, script=library)  # both may be written again
    library.write_text("mine")
    with pytest.raises(ConfigError, match="no script of Bokeh"):
        write_report(read_run(runs["sft"]), page, script=library)
    assert library.read_text() == "mine"


def test_facts_are_those_of_the_manifest(runs):
    page = report_of(runs["preference"])
    manifest = json.loads((runs["preference"] / "run.json").read_text())
    for facts in manifest["plugins"].values():
        assert f"{facts['distribution']}:{facts['name']} {facts['version']}" in page.text
    assert "optimizer.learning_rate 0.01" in page.text  # set in the configuration
    assert "optimizer.epsilon" not in page.text  # a default


def test_every_metric_is_in_a_picture(runs):
    for run in runs.values():
        page, facts = report_of(run), read_run(run)
        for source in (facts.metrics.steps, facts.metrics.evaluations):
            for name in source:
                bounds = name in ("reward/min", "reward/max") or name.endswith(("_low", "_high"))
                titles = {
                    "loss": "Loss",
                    "learning_rate": "Learning rate",
                    "grad_norm": "Gradient norm",
                    "seconds": "Time of a step",
                }
                drawn = name.removeprefix("time/")
                assert bounds or any(drawn in label or titles.get(name, name) in label for label in page.figures), (run, name)


def test_samples_carry_their_loss_weights(runs):
    page = report_of(runs["preference"])
    assert "Chosen" in page.text
    assert "Rejected" in page.text
    assert 'class="weight gap0"' in (runs["preference"] / "report.html").read_text()
    kept = json.loads((runs["preference"] / "samples.json").read_text())["samples"]
    assert [sample["role"] for sample in kept] == [0, 1] * 4
    for sample in kept:
        trained = sum(weight != 0 for weight in sample["loss_weights"])
        assert f"with loss {trained}" in page.text


def test_attempts_are_the_best_the_median_and_the_worst(runs):
    page = report_of(runs["rl"])
    for words in ("Step 1", "Step 2", "Step 3", "Best", "Median", "Worst", "advantage", "largest gap"):
        assert words in page.text
    text = (runs["rl"] / "report.html").read_text()
    assert 'class="context' in text
    assert 'class="plus' in text or 'class="minus' in text


def test_a_comparison_says_what_differs_and_draws_both(runs, tmp_path):
    other = tmp_path / "other"
    shutil.copytree(runs["sft"], other)
    manifest = json.loads((other / "run.json").read_text())
    manifest["config"]["optimizer"]["learning_rate"] = 0.5
    manifest["plugins"]["loss"]["version"] = "9.9"
    (other / "run.json").write_text(json.dumps(manifest))
    output = tmp_path / "comparison.html"
    write_comparison([read_run(runs["sft"]), read_run(other)], output)
    page = Page(output.read_text())
    assert "optimizer.learning_rate 0.01 0.5" in page.text
    assert "cross_entropy 9.9" in page.text
    assert "optimizer.epsilon" not in page.text
    (loss,) = [label for label in page.figures if label.startswith("Loss: sft")]
    assert "; other from" in loss
    with pytest.raises(ConfigError, match="is named twice"):
        write_comparison([read_run(other), read_run(other)], output)


def test_names_and_texts_of_others_are_no_code(runs, tmp_path):
    """Metrics, causes and tokens may hold anything; none of it becomes an element of the page, or ends a script."""
    bad = "</script><script>alert(1)</script><img src=x onerror=alert(1)>"
    run = tmp_path / "bad"
    shutil.copytree(runs["rl"], run)
    lines = (run / "metrics.jsonl").read_text().splitlines()
    records = [json.loads(line) for line in lines]
    for record in records:
        if record["kind"] == "step":
            record["metrics"][bad] = 1.0
            record["metrics"][f"time/{bad}"] = 1.0
    (run / "metrics.jsonl").write_text("".join(json.dumps(record) + "\n" for record in records))
    manifest = json.loads((run / "run.json").read_text())
    manifest["sessions"][-1]["error"] = bad
    manifest["config"]["model"]["path"] = bad
    (run / "run.json").write_text(json.dumps(manifest))
    report_of(run)
    text = (run / "report.html").read_text()
    assert text.count("</script>") == 3, "one for the library, one for the figures, one for the colours"
    assert "<img" not in text
    assert "failed at step" in text


def test_folders_that_are_no_run_are_refused(runs, tmp_path):
    with pytest.raises(ConfigError, match="nothing: is no folder"):
        read_run(tmp_path / "nothing")
    (tmp_path / "empty").mkdir()
    with pytest.raises(ConfigError, match="holds no run that started"):
        read_run(tmp_path / "empty")
    for content, words in (
        ("{", "is damaged"),
        ('{"format": 7, "sessions": []}', "no run manifest of format 1"),
        ('{"format": 1, "sessions": []}', "lacks 'config'"),
    ):
        (tmp_path / "empty" / "run.json").write_text(content)
        with pytest.raises(EngineError, match=words):
            read_run(tmp_path / "empty")
    mine = tmp_path / "mine.html"
    mine.write_text("<p>mine</p>")
    with pytest.raises(ConfigError, match="no report of this engine"):
        write_report(read_run(runs["sft"]), mine)
    assert mine.read_text() == "<p>mine</p>"


def test_a_run_without_its_rest_is_reported_as_far_as_it_goes(runs, tmp_path):
    """No metrics, no journal, no samples, no tokenizer: the page says what is missing."""
    for name, left in (("sft", ("run.json",)), ("rl", ("run.json", "metrics.jsonl"))):
        run = tmp_path / name
        run.mkdir()
        for file in left:
            shutil.copy(runs[name] / file, run / file)
        page = report_of(run)
        assert ("This run kept no samples" if name == "sft" else "holds no attempt that was trained on") in page.text
    run = tmp_path / "without_tokenizer"
    shutil.copytree(runs["sft"], run)
    shutil.rmtree(run / "model")
    shutil.rmtree(run / "checkpoints")
    manifest = json.loads((run / "run.json").read_text())
    manifest["config"]["model"] |= {"path": str(tmp_path / "gone"), "tokenizer": None}
    (run / "run.json").write_text(json.dumps(manifest))
    assert "Token ids are shown" in report_of(run).text
