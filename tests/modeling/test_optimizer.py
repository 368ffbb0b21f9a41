"""Which parameters decay, steps against their formulas in float64, and numbers that change from step to step."""

import sys
from collections.abc import Iterator

import pytest
import torch
from attrs import evolve
from torch import Tensor

from skyrl_engine.contracts.kinds.optimizer_settings import (
    OPTIMIZERS,
    AdafactorSettings,
    AdamW8BitSettings,
    AdamWSettings,
    LionSettings,
    MuonSettings,
    OptimizerSettings,
    ParameterGroup,
    SgdSettings,
)
from skyrl_engine.errors import ConfigError, UnsupportedError
from skyrl_engine.modeling.optimizer import build_optimizer, make_zero_state, refuse_empty_groups, require_adamw, use_settings


def parameters_of(dtype: torch.dtype = torch.float64) -> dict[str, torch.nn.Parameter]:
    """An embedding, matrices of a layer, wide and high, and a vector."""
    torch.manual_seed(0)
    shapes = {"embed.weight": (7, 4), "layers.0.up.weight": (6, 4), "layers.0.down.weight": (4, 6), "layers.0.norm.weight": (4,)}
    return {name: torch.nn.Parameter(torch.randn(shape, dtype=dtype)) for name, shape in shapes.items()}


@pytest.mark.parametrize("kind", OPTIMIZERS.values(), ids=OPTIMIZERS)
def test_only_matrices_decay(kind: type[OptimizerSettings]) -> None:
    """With a zero gradient a step multiplies what decays by 1 - rate * decay and leaves the rest as it is."""
    parameters = parameters_of(torch.float32)
    before = {name: parameter.detach().clone() for name, parameter in parameters.items()}
    optimizer = build_optimizer(parameters, kind(weight_decay=0.5))
    use_settings(optimizer, kind(learning_rate=0.1, weight_decay=0.5))
    for parameter in parameters.values():
        parameter.grad = torch.zeros_like(parameter)
    optimizer.step()
    for name, parameter in parameters.items():
        torch.testing.assert_close(parameter.detach(), before[name] * (0.95 if parameter.ndim == 2 else 1.0))


def adamw(name: str, weight: Tensor, numbers: OptimizerSettings) -> Iterator[Tensor]:
    """Loshchilov and Hutter 2019, algorithm 2: is sent a gradient and the settings, and yields the update for rate 1 without decay."""
    first, second, step = torch.zeros_like(weight), torch.zeros_like(weight), 0
    gradient, numbers = yield weight
    while True:
        step += 1
        (beta1, beta2), epsilon = numbers.betas, numbers.epsilon
        first = beta1 * first + (1 - beta1) * gradient
        second = beta2 * second + (1 - beta2) * gradient**2
        gradient, numbers = yield first / (1 - beta1**step) / ((second / (1 - beta2**step)).sqrt() + epsilon)


def sgd(name: str, weight: Tensor, numbers: OptimizerSettings) -> Iterator[Tensor]:
    gradient, _ = yield weight
    while True:
        gradient, _ = yield gradient


def lion(name: str, weight: Tensor, numbers: OptimizerSettings) -> Iterator[Tensor]:
    """Chen et al. 2023, algorithm 2."""
    moment = torch.zeros_like(weight)
    gradient, numbers = yield weight
    while True:
        beta1, beta2 = numbers.betas
        update = torch.sign(beta1 * moment + (1 - beta1) * gradient)
        moment = beta2 * moment + (1 - beta2) * gradient
        gradient, numbers = yield update


def adafactor(name: str, weight: Tensor, numbers: OptimizerSettings) -> Iterator[Tensor]:
    """Shazeer and Stern 2018, algorithms 4 and 5, with the bounds of torch.optim.Adafactor."""
    epsilon, step = torch.finfo(weight.dtype).eps, 0
    rows = columns = second = torch.zeros(())
    gradient, numbers = yield weight
    while True:
        step += 1
        beta = 1 - step**-0.8
        if weight.ndim == 2:
            rows = beta * rows + (1 - beta) * (gradient**2).mean(1, keepdim=True)
            columns = beta * columns + (1 - beta) * (gradient**2).mean(0, keepdim=True)
            estimate = rows @ columns / rows.mean().clamp(min=epsilon)
        else:
            estimate = second = beta * second + (1 - beta) * gradient**2
        update = gradient / estimate.clamp(min=epsilon**2).sqrt()
        update = update / max(1.0, float(update.square().mean().sqrt()))
        size = max(1e-3, float(weight.detach().square().mean().sqrt()))
        # the caller multiplies by the rate
        gradient, numbers = yield size * min(numbers.learning_rate, step**-0.5) / numbers.learning_rate * update


def muon(name: str, weight: Tensor, numbers: OptimizerSettings) -> Iterator[Tensor]:
    """Jordan et al. 2024, with the scale of Liu et al. 2025, eq. 4; AdamW for what is no matrix of a layer."""
    if not name.startswith("layers.") or weight.ndim != 2:
        yield from adamw(name, weight, numbers)
    moment = torch.zeros_like(weight)
    gradient, numbers = yield weight
    while True:
        moment = numbers.momentum * moment + (1 - numbers.momentum) * gradient
        nesterov = numbers.momentum * moment + (1 - numbers.momentum) * gradient
        is_high = nesterov.shape[0] > nesterov.shape[1]
        matrix = (nesterov.T if is_high else nesterov).bfloat16()
        matrix = matrix / matrix.norm().clamp(min=1e-7)
        for _ in range(5):
            gram = matrix @ matrix.T
            # rounded to bfloat16 after each sum of a product and a term, and nowhere else
            polynomial = torch.addmm(gram, gram, gram, beta=-4.7750, alpha=2.0315)
            matrix = torch.addmm(matrix, polynomial, matrix, beta=3.4445)
        gradient, numbers = yield 0.2 * max(weight.shape) ** 0.5 * (matrix.T if is_high else matrix).double()


REFERENCES = {"adamw": adamw, "adamw_8bit": adamw, "sgd": sgd, "lion": lion, "adafactor": adafactor, "muon": muon}


@pytest.mark.parametrize("kind", OPTIMIZERS.values(), ids=OPTIMIZERS)
def test_twenty_steps_follow_the_formula(kind: type[OptimizerSettings]) -> None:
    """In float64, with a rate, a decay and other numbers that change on the way; decay is decoupled in each, and from the weights before."""
    settings = kind(learning_rate=0.05, weight_decay=0.1)
    parameters, plain = parameters_of(), {name: parameter.detach().clone() for name, parameter in parameters_of().items()}
    optimizer = build_optimizer(parameters, settings)
    references = {name: REFERENCES[kind.use](name, weight, settings) for name, weight in plain.items()}
    for reference in references.values():
        next(reference)  # type: ignore[call-overload] # to where it waits for a gradient
    for step in range(20):
        changes = {"learning_rate": 0.05 / (step + 1), "weight_decay": 0.1 + 0.01 * step}
        changes |= {"betas": (0.8, 0.95)} if step == 10 and hasattr(settings, "betas") else {}
        changes |= {"momentum": 0.8} if step == 15 and hasattr(settings, "momentum") else {}
        settings = evolve(settings, **changes)
        use_settings(optimizer, settings)
        for name, parameter in parameters.items():
            parameter.grad = torch.randn(parameter.shape, dtype=torch.float64)
            update = references[name].send((parameter.grad, settings))  # type: ignore[attr-defined] # a generator
            decay = settings.weight_decay if parameter.ndim == 2 else 0.0
            plain[name] -= settings.learning_rate * (update + decay * plain[name])
        optimizer.step()
        for name, parameter in parameters.items():
            torch.testing.assert_close(parameter.detach(), plain[name], rtol=1e-12, atol=1e-12 * settings.learning_rate)
            plain[name].copy_(parameter.detach())


@pytest.mark.parametrize("kind", OPTIMIZERS.values(), ids=OPTIMIZERS)
def test_zero_state_is_what_a_step_leaves(kind: type[OptimizerSettings]) -> None:
    """A checkpoint is read into it: names, shapes, dtypes and devices."""
    parameters = parameters_of(torch.float32)
    optimizer = build_optimizer(parameters, kind())
    for parameter in parameters.values():
        parameter.grad = torch.ones_like(parameter)
    optimizer.step()
    for name, parameter in parameters.items():
        zeros = make_zero_state(kind(), name, parameter)
        kept = {key: value for key, value in optimizer.state.get(parameter, {}).items() if value is not None}
        facts = [{key: (value.shape, value.dtype, value.device) for key, value in state.items()} for state in (zeros, kept)]
        assert facts[0] == facts[1]


GROUPS = (
    ParameterGroup("layers.0.up.*", rate_factor=2.0, weight_decay=0.5),
    ParameterGroup("layers.*.norm.weight", rate_factor=0.0),
    ParameterGroup("layers.[0-3].*", weight_decay=0.0),
)


@pytest.mark.parametrize("kind", OPTIMIZERS.values(), ids=OPTIMIZERS)
def test_groups_have_rates_and_decays_of_their_own(kind: type[OptimizerSettings]) -> None:
    """A parameter steps as it does alone, by an optimizer with the numbers of the first group that matches it; matrices alone decay."""
    settings = kind(learning_rate=0.01, weight_decay=0.1, groups=GROUPS)
    parameters = parameters_of()
    together = build_optimizer(parameters, settings)
    numbers = {
        "embed.weight": (1.0, 0.1),
        "layers.0.up.weight": (2.0, 0.5),
        "layers.0.norm.weight": (0.0, 0.1),
        "layers.0.down.weight": (1.0, 0.0),
    }
    alone = {name: torch.nn.Parameter(parameter.detach().clone()) for name, parameter in parameters.items()}
    hidden = "layers.0.up.weight"  # without a matrix of a layer there is no Muon; it has no gradient where it is not meant
    optimizers = {name: build_optimizer({hidden: alone[hidden], name: alone[name]}, kind()) for name in alone}
    for step in range(3):
        now = evolve(settings, learning_rate=0.01 * (step + 1))
        for parameter in parameters.values():
            parameter.grad = torch.randn(parameter.shape, dtype=torch.float64)
        for name, optimizer in optimizers.items():
            for other in alone.values():
                other.grad = None
            factor, decay = numbers[name]
            alone[name].grad = parameters[name].grad.clone()
            use_settings(optimizer, kind(learning_rate=now.learning_rate * factor, weight_decay=decay))
            optimizer.step()
        use_settings(together, now)
        together.step()
    for name, parameter in parameters.items():
        assert torch.equal(parameter, alone[name]), name


def test_groups_that_match_nothing_are_refused() -> None:
    refuse_empty_groups(
        parameters_of(), (ParameterGroup("*.norm.*", rate_factor=2.0), ParameterGroup("layers.0.*", weight_decay=0.1))
    )
    wrong = (
        ParameterGroup("layers.*", rate_factor=2.0),
        ParameterGroup("*.up.*", weight_decay=0.1),
        ParameterGroup("Embed*", weight_decay=0.1),
    )
    with pytest.raises(ConfigError) as caught:
        refuse_empty_groups(parameters_of(), wrong)
    assert [(problem.where, problem.cause) for problem in caught.value.problems] == [
        ("optimizer.groups[1].match", "'*.up.*': groups before it have all parameters that it matches"),
        ("optimizer.groups[2].match", "'Embed*': it matches no parameter that is trained"),
    ]


def test_moments_in_eight_bits_step_as_the_package_does() -> None:
    """Bitsandbytes' own optimizer, bit for bit, over matrices of a layer with rows of whole blocks; experts in one tensor are such; torch's
    AdamW for an embedding, odd rows, small matrices and vectors, which the package's would step in 32 bits with other roundings.
    """
    from bitsandbytes.optim import AdamW8bit

    shapes = {"embed.weight": (16, 512), "layers.0.up.weight": (9, 512), "layers.0.experts": (2, 8, 256)}
    others = {"layers.0.odd.weight": (64, 384), "layers.0.small.weight": (15, 256), "layers.0.norm.weight": (8192,)}
    torch.manual_seed(0)
    parameters = {name: torch.nn.Parameter(torch.randn(shape)) for name, shape in {**shapes, **others}.items()}
    due = {name: torch.nn.Parameter(parameter.detach().clone()) for name, parameter in parameters.items()}
    settings = AdamW8BitSettings(learning_rate=0.02, betas=(0.8, 0.95), weight_decay=0.1)
    optimizer = build_optimizer(parameters, settings)
    held = [name for name in shapes if name != "embed.weight"]
    package = AdamW8bit([due[name] for name in held], lr=0.02, betas=(0.8, 0.95), weight_decay=0.1)
    rest = build_optimizer({name: parameter for name, parameter in due.items() if name not in held}, AdamWSettings())
    use_settings(rest, AdamWSettings(learning_rate=0.02, betas=(0.8, 0.95), weight_decay=0.1))
    for step in range(20):
        for name, parameter in parameters.items():
            parameter.grad = torch.randn_like(parameter) * 10.0**-step
            due[name].grad = parameter.grad.clone()
        for each in (optimizer, package, rest):
            each.step()
    for name, parameter in parameters.items():
        assert torch.equal(parameter, due[name]), name
        eight_bit = optimizer.state[parameter]["exp_avg"].dtype == torch.uint8
        assert eight_bit == (name in held)
        zeros = make_zero_state(settings, name, parameter)
        kept = optimizer.state[parameter]
        assert {key: (value.shape, value.dtype) for key, value in zeros.items()} == {
            key: (value.shape, value.dtype) for key, value in kept.items()
        }


def test_frozen_parameters_stay_out() -> None:
    layer = torch.nn.Linear(2, 2)
    layer.weight.requires_grad_(False)
    (group,) = build_optimizer(dict(layer.named_parameters()), AdamWSettings()).param_groups
    assert group["params"] == [layer.bias]


def test_what_cannot_be_built_is_refused_by_name(monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(UnsupportedError, match="muon steps the matrices of a model's layers, and none"):
        build_optimizer({"embed.weight": torch.nn.Parameter(torch.zeros(2, 2))}, MuonSettings())
    wide = {"layers.0.up.weight": torch.nn.Parameter(torch.zeros(16, 256, dtype=torch.float64))}
    with pytest.raises(UnsupportedError, match="steps in float32, and the weights are in float64"):
        build_optimizer(wide, AdamW8BitSettings())
    monkeypatch.setitem(sys.modules, "bitsandbytes", None)
    with pytest.raises(UnsupportedError, match="needs the package bitsandbytes"):
        build_optimizer(wide, AdamW8BitSettings())
    monkeypatch.setitem(sys.modules, "lion_pytorch", None)
    with pytest.raises(UnsupportedError, match="needs the package lion-pytorch"):
        build_optimizer(parameters_of(), LionSettings())


def test_backends_of_adamw_alone_refuse_others_by_name() -> None:
    settings = AdamWSettings()
    assert require_adamw(settings, "other") is settings
    assert require_adamw(None, "other") is None
    for other in (SgdSettings(), AdafactorSettings()):
        with pytest.raises(UnsupportedError, match=f"backend other steps by adamw alone, and the settings are of {other.use}"):
            require_adamw(other, "other")
    with pytest.raises(UnsupportedError, match="backend other has one learning rate and one weight decay"):
        require_adamw(AdamWSettings(groups=GROUPS), "other")
