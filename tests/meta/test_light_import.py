"""An installed distribution whose entry point imports torch is found out in a fresh interpreter; one that waits is not."""

import sys

import pytest

from skyrl_engine.config import SelectedPlugin
from skyrl_engine.registry.resolve import Registry
from skyrl_engine.testing import Subject
from skyrl_engine.testing.plugin_promises import light_import

MODULE = """{head}
from skyrl_engine import loss


@loss(needs=("logprobs",))
def plain(tokens, config):
    import torch

    return -tokens.logprobs
"""


def install(folder, name, head):
    """A distribution as pip leaves it, with one loss."""
    information = folder / f"{name}-1.0.0.dist-info"
    information.mkdir(parents=True)
    (information / "METADATA").write_text(
        f"Metadata-Version: 2.4\nName: {name}\nVersion: 1.0.0\nRequires-Dist: skyrl-engine>=0.1\n"
    )
    (information / "entry_points.txt").write_text(f"[skyrl_engine.loss]\nplain = {name}:plain\n")
    (folder / f"{name}.py").write_text(MODULE.format(head=head))


def test_a_file_of_the_current_folder_does_not_stand_in_for_the_package(tmp_path, monkeypatch):
    """Who tried a loss from ./my_losses.py has that file still when the package my_losses is installed."""
    install(tmp_path / "site", "my_losses", "")
    (tmp_path / "work").mkdir()
    (tmp_path / "work/my_losses.py").write_text("raise SystemExit('the wrong file')")
    monkeypatch.syspath_prepend(tmp_path / "site")
    monkeypatch.chdir(tmp_path / "work")
    record = Registry.discover().resolve("loss", "my_losses:plain")
    try:
        finding = light_import.hold(Subject.of_plugin(SelectedPlugin.of(record, {}, "test")))
    finally:
        sys.modules.pop("my_losses", None)
    assert finding.status == "kept", finding.lines


@pytest.mark.parametrize(("name", "head", "status"), [("heavy_losses", "import torch", "broken"), ("light_losses", "", "kept")])
def test_what_an_entry_point_imports(tmp_path, monkeypatch, name, head, status):
    install(tmp_path, name, head)
    monkeypatch.syspath_prepend(tmp_path)
    record = Registry.discover().resolve("loss", f"{name}:plain")
    try:
        finding = light_import.hold(Subject.of_plugin(SelectedPlugin.of(record, {}, "test")))
    finally:
        sys.modules.pop(name, None)
    assert finding.status == status
    if status == "broken":
        assert f"importing {name} imports torch" in finding.cause
        assert finding.remedy == "Import it inside the functions that use it"
