"""Every loss and correction held to the engine's conformance kit, as an outsider's would be, with default options and with others."""

from typing import Any

import pytest

from skyrl_engine.testing import Conformance, CorrectionConformance, LossConformance
from skyrl_engine_losses import plugin

BY_NIGHT = {"simpo", "cpo", "orpo", "dppo, other options", "cispo, other options", "gspo, other options", "kl, other options"} | {
    *("dpo, nca_pair", "dpo, bco_pair", "dpo, sppo_hard", "dpo, aot_unpaired", "cpo, hinge"),
}
"""Losses of pairs, as `dpo` is, and options that take the same way through the code as the default ones."""

OF_FAMILIES = {
    *("cross_entropy", "ppo", "reinforce", "dppo", "gspo", "importance_sampling", "clip_cov", "value_clip", "divergence", "uld"),
    *("dpo", "kto", "bradley_terry", "entropy", "tis", "off_policy_sequence_mask"),
}
"""One loss or correction of each module and of each sort of input. They keep all promises by day; the others these:"""
OF_ALL = {"gradient", "micro_batch_split", "padding", "evaluation"}

KINDS: dict[str, type[Conformance]] = {"loss": LossConformance, "correction": CorrectionConformance}

OTHER_OPTIONS: dict[str, dict[str, Any]] = {
    "bradley_terry, other options": {"margins": True, "center_coefficient": 0.01},
    "cispo, other options": {"anchor": "rollout", "clip_low": 0.5},
    "dppo, other options": {"anchor": "rollout", "kind": "kl", "delta_low": 0.01, "delta_high": 0.02},
    "gspo, other options": {"clip_low": 3e-4, "clip_high": 4e-4},
    "kl, other options": {"estimator": "k1"},
    "kl, corrected": {"corrected": True},
    "kl, without a limit": {"corrected": True, "limit": None},
    "off_policy_sequence_mask, other options": {"anchor": "old", "threshold": 0.1},
    "top_entropy, other options": {"share": 0.5},
    "vespo, other options": {"anchor": "rollout", "k_neg": 0.0},
    "sequence_mask, other options": {"mean": "product"},
    "tis, other options": {"ratio": "sequence"},
    "dpo, exo_pair": {"form": "exo_pair", "label_smoothing": 0.1, "f_divergence": "alpha_divergence", "ld_alpha": 0.5},
    "dpo, discopop": {"form": "discopop", "f_divergence": "js_divergence", "weighted": True, "length_normalized": True},
    "dpo, sppo_hard": {"form": "sppo_hard"},
    "dpo, nca_pair": {"form": "nca_pair"},
    "dpo, bco_pair": {"form": "bco_pair"},
    "dpo, aot": {"form": "aot"},
    "dpo, aot_unpaired": {"form": "aot_unpaired", "label_smoothing": 0.1},
    "cpo, hinge": {"form": "hinge", "reward_alpha": 0.1, "length_normalized": True},
    "kto, apo_zero_unpaired": {"form": "apo_zero_unpaired"},
}


def suite(name: str, options: dict[str, Any]) -> type[Conformance]:
    """An outsider writes this as a class of three lines."""
    (base,) = (base for kind, base in KINDS.items() if hasattr(getattr(plugin, name), f"skyrl_engine_make_{kind}"))
    return type(base.__name__, (base,), {"plugin": f"skyrl-engine-losses:{name}", "options": options, "examples": 4})


SUITES = {name: suite(name, {}) for name in plugin.__all__} | {
    label: suite(label.partition(",")[0], options) for label, options in OTHER_OPTIONS.items()
}


def is_by_night(name: str, promise: Any) -> bool:
    return name in BY_NIGHT or not (name in OF_FAMILIES or promise.name in OF_ALL)


@pytest.mark.conformance
@pytest.mark.parametrize(
    ("suite", "promise"),
    [
        pytest.param(suite, promise, id=f"{name}-{promise.name}", marks=pytest.mark.nightly if is_by_night(name, promise) else ())
        for name, suite in SUITES.items()
        for subject in [suite().subject()]
        for promise in suite.promises
        if promise.exempt(subject) is None and (promise.name != "light_import" or name == "ppo")  # one module, one process
    ],
)
def test_promise(suite: type[Conformance], promise: Any) -> None:
    suite().test_promise(promise)
