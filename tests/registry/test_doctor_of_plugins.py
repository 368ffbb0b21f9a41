"""`doctor` over installed distributions: what pip left half done has a finding with one remedy, and hides nothing else."""

from skyrl_engine.doctor.installed import examine_distributions, examine_plugins


def find(findings, topic):
    return [finding for finding in findings if finding.topic == topic]


def test_stale_and_broken_and_unfit_plugins_are_problems(install, install_loss):
    install("acme-stale", entry_points={"loss": {"gone": "acme_stale.losses:gone"}})
    install_loss("acme-old", loss="old", requires=("skyrl-engine>=0.1,<0.2",))
    install_loss("acme-raises", loss="raises", source="raise OSError('no disk')")
    findings = list(examine_plugins())
    for name, word in (("gone", "acme_stale"), ("old", "<0.2"), ("raises", "no disk")):
        (finding,) = find(findings, f"loss {name}")
        assert finding.state == "problem"
        assert word in finding.found
        assert finding.remedy
    assert find(findings, "plugins")[-1].state == "ok"


def test_a_name_that_two_offer_is_a_warning(install_loss):
    for name in ("acme-one", "acme-two"):
        install_loss(name, loss="same")
    (finding,) = find(examine_plugins(), "loss same")
    assert finding.state == "warning"
    assert "acme-one and acme-two" in finding.found
    assert "acme-one:same" in finding.remedy


def test_doubled_installations_and_unmet_requirements_are_named(install_loss, install_into, tmp_path, monkeypatch):
    install_loss("acme-twice", "1.0.0")
    install_into(tmp_path / "other", "acme-twice", "2.0.0", entry_points={"loss": {"plain": "acme_twice.plugin:plain"}})
    monkeypatch.syspath_prepend(tmp_path / "other")
    install_loss("acme-needs", requires=("attrs<1", "no-such-package>=3"))
    findings = list(examine_distributions())
    (twice,) = find(findings, "acme-twice")
    assert twice.state == "warning"
    assert "installed 2 times (versions 2.0.0, 1.0.0)" in twice.found
    assert "pip uninstall acme-twice" in twice.remedy
    (needs,) = find(findings, "acme-needs")
    assert needs.state == "problem"
    assert "no-such-package>=3, which is not installed" in needs.found
    assert "attrs<1, and" in needs.found
