"""Functions of verl 0.9.1, unchanged, by `masked_loss` and `padded_advantage`, against this engine's own of the same formula.

Run by `nox -s peers`, with verl on the path of modules. Prints each figure beside its limit and fails above one.
"""

import warnings
from collections.abc import Mapping
from typing import Any

import numpy as np
import torch
from verl.trainer.ppo import core_algos

from skyrl_engine.contracts import AdvantageClaims, LossTokens, Sequences
from skyrl_engine.errors import ContractError
from skyrl_engine.interop import masked_loss, padded_advantage
from skyrl_engine.testing.advantages import batches
from skyrl_engine_advantages import plugin as advantages
from skyrl_engine_losses import plugin as losses

LIMIT = 1e-6
CONFIG = {
    "clip_ratio": 0.2,
    "clip_ratio_low": None,
    "clip_ratio_high": None,
    "loss_agg_mode": "token-sum",
    "global_batch_info": {"dp_size": 1},
}
"""As docs/how-to/use-another-engines-loss.md has it."""

OUTCOME = AdvantageClaims(groups="needed", outcome=True)
AVERAGED = ("geo_mean",)
"""Functions that divide by their own mask, and are refused."""


def main() -> None:
    warnings.filterwarnings("ignore")
    compare_loss("vanilla", losses.ppo_dual_clip, {"clip_low": 0.2, "clip_high": 0.2, "dual_clip": 3.0})
    compare_loss("gpg", losses.reinforce, {})
    for name in ("dppo_tv", "dppo_kl"):
        run_loss(masked_loss(core_algos.get_policy_loss_fn(name), config=CONFIG, name=name))
        print(f"{name}: taken as it is")
    for name in AVERAGED:
        try:
            run_loss(masked_loss(core_algos.get_policy_loss_fn(name), config=CONFIG, name=name))
        except ContractError as error:
            print(f"{name}: refused, {error.cause}")
        else:
            raise SystemExit(f"{name} divides by its mask and was taken")
    compare_advantage("grpo", advantages.grpo, {"epsilon": 1e-6})
    compare_advantage("rloo", advantages.rloo, {})


def compare_loss(name: str, native: Any, options: Mapping[str, Any]) -> None:
    theirs = run_loss(masked_loss(core_algos.get_policy_loss_fn(name), config=CONFIG, name=name))
    schema = native.skyrl_engine_config_schema()
    ours = run_loss(native, None if schema is None else schema(**options))
    for what, got, due in zip(("losses", "gradients"), theirs, ours, strict=True):
        report(f"{name} beside {native.name}, {what}", got, due)


def run_loss(plugin: Any, config: Any = None) -> tuple[np.ndarray, np.ndarray]:
    """Return token losses and the gradient by log-probabilities."""
    draw = torch.Generator().manual_seed(0)
    counts = torch.tensor([5, 3, 7])
    rows = torch.arange(3)
    sequences = Sequences(torch.repeat_interleave(rows, counts), counts, rows, rows)
    logprobs = (-3 * torch.rand(15, generator=draw, dtype=torch.float64)).requires_grad_()
    old = logprobs.detach() + torch.randn(15, generator=draw, dtype=torch.float64)
    needs = {"logprobs": logprobs, "old_logprobs": old, "advantages": torch.randn(15, generator=draw, dtype=torch.float64)}
    schema = plugin.skyrl_engine_config_schema()
    loss = plugin.skyrl_engine_make_loss(config=(None if schema is None else schema()) if config is None else config)
    output = loss(LossTokens(needs, sequences, torch.Generator))
    values = getattr(output, "token_loss", output)
    values.sum().backward()
    assert logprobs.grad is not None
    return values.detach().numpy(), logprobs.grad.numpy()


def compare_advantage(name: str, native: Any, options: Mapping[str, Any]) -> None:
    batch = batches.make_crowd().batch()
    config = {"epsilon": 1e-6} if name == "grpo" else None
    plugin = padded_advantage(core_algos.get_adv_estimator_fn(name), config=config, claims=OUTCOME, name=name)
    schema = native.skyrl_engine_config_schema()
    ours = native.skyrl_engine_make_advantage(config=None if schema is None else schema(**options))(batch)
    theirs = plugin.skyrl_engine_make_advantage(config=plugin.skyrl_engine_config_schema()() if config else None)(batch)
    report(f"{name}, advantages", theirs.advantages, np.asarray(getattr(ours, "advantages", ours)))


def report(what: str, got: np.ndarray, due: np.ndarray) -> None:
    distance = float(np.abs(got - due).max())
    print(f"{what}: apart by {distance:.1e} (limit {LIMIT:g})")
    if not distance <= LIMIT:
        raise SystemExit(f"{what} are not the same")


if __name__ == "__main__":
    main()
