"""Requests train on any target, several targets, losses of plugins. Against transformers' own model in float64, and autograd."""

import re
from itertools import pairwise

import attrs
import numpy as np
import pytest
import torch
from transformers import AutoModelForCausalLM

from skyrl_engine.modeling.tiny import write_model, write_tokenizer
from skyrl_engine_tinker import losses
from skyrl_engine_tinker.errors import RequestError
from skyrl_engine_tinker.model import ServedModel
from skyrl_engine_tinker.settings import Settings
from skyrl_engine_tinker.wire import CLASSES, FLOAT32, INT64

SERVED = ("skyrl-engine-losses:ppo", "skyrl-engine-losses:top_k_divergence", "skyrl-engine-losses:dpo", "acme-focal-loss:focal")
RNG = np.random.default_rng(5)
TOKENS = [RNG.integers(0, 128, length) for length in (6, 4, 9)]
FOLLOWING = [np.append(each[1:], 77) for each in TOKENS]
OTHERS = [RNG.integers(0, 128, len(each)) for each in TOKENS]
SEVERAL = [RNG.integers(0, 128, (len(each), width)) for each, width in zip(TOKENS, (3, 1, 2), strict=True)]


def tensor(message, values):
    values = np.asarray(values)
    whole = values.dtype.kind == "i"
    message.dense, message.dtype = values.astype("<i8" if whole else "<f4").tobytes(), INT64 if whole else FLOAT32
    message.shape.extend(values.shape)


def sparse(message, values):
    """Compressed rows: the numbers that are not 0, the places where rows begin, and their columns."""
    rows, columns = np.nonzero(values)
    whole = values.dtype.kind == "i"
    csr = message.sparse_csr
    csr.values = values[rows, columns].astype("<i8" if whole else "<f4").tobytes()
    csr.crow_indices = np.searchsorted(rows, np.arange(len(values) + 1)).astype("<i8").tobytes()
    csr.col_indices, message.dtype = columns.astype("<i8").tobytes(), INT64 if whole else FLOAT32
    message.shape.extend(values.shape)


def request(name, inputs, *, tokens=TOKENS, encode=tensor, options=(), **fields):
    """A request with one datum per entry of `inputs`, which are mappings of arrays."""
    message = CLASSES["ForwardBackwardRequest"](loss_fn=name, **fields)
    for key, value in dict(options).items():
        if isinstance(value, str):
            message.loss_fn_config_v2[key].text = value
        else:
            message.loss_fn_config[key] = value
    for own, arrays in zip(tokens, inputs, strict=True):
        datum = message.data.add()
        datum.model_input.add().encoded_text.tokens = own.astype("<i4").tobytes()
        for key, values in arrays.items():
            (encode if np.ndim(values) > 1 else tensor)(datum.loss_fn_inputs[key], values)
    return message


def read_answer(answer):
    """The summed loss, other metrics, and every datum's log-probabilities in their shape."""
    message, arrays = CLASSES["ForwardBackwardOutput"].FromString(answer), []
    for record in message.loss_fn_outputs:
        field = record.fields["logprobs"]
        values, bounds = np.frombuffer(field.data, "<f4"), np.frombuffer(field.offsets, "<i8") // 4
        assert len(bounds) == record.num_datums + 1
        arrays += [values[first:end].reshape(-1, *field.trailing_shape) for first, end in pairwise(bounds)]
    metrics = dict(message.metrics)
    return metrics.pop("loss:sum"), metrics, arrays


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    folder = tmp_path_factory.mktemp("served")
    for name, family in (("model", "qwen3"), ("mixture", "qwen3_moe")):
        settings = {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 16} if name == "mixture" else {}
        write_model(folder / name, family, **settings)
        write_tokenizer(folder / name, ["a b c"], size=128)
    listed = ", ".join(f'"{reference}"' for reference in SERVED)
    (folder / "serve.toml").write_text(
        f'[serve]\nlosses = [{listed}]\nlongest = 16\n[serve.models]\ntiny = "model"\nmixture = "mixture"\n[model]\ndtype = "float64"\n'
    )
    return folder


@pytest.fixture(scope="module", params=["tiny", "mixture"])
def any_model(folder, request):
    model = ServedModel(Settings.read(folder / "serve.toml"), "model", request.param, 0)
    model.open()
    yield model
    model.close()


@pytest.fixture(scope="module")
def model(folder):
    model = ServedModel(Settings.read(folder / "serve.toml"), "model", "tiny", 0)
    model.open()
    yield model
    model.close()


@pytest.fixture(scope="module")
def theirs(folder):
    return AutoModelForCausalLM.from_pretrained(folder / "model", dtype=torch.float64)


def logprobs_of(theirs, targets):
    """Log-probabilities of every datum at its targets, [N] or [N, K], with their graph."""
    rows = []
    for tokens, target_ids in zip(TOKENS, targets, strict=True):
        table = theirs(torch.as_tensor(tokens)[None]).logits[0].log_softmax(-1)
        ids = torch.as_tensor(target_ids)
        rows.append(table.gather(1, ids if ids.ndim > 1 else ids[:, None]).reshape(ids.shape))
    return rows


def gradients(model):
    gradients_by_name = model.engine.gradients()
    model.engine.discard()
    return gradients_by_name


def require_equal(theirs, total, due_logprobs, model, answer):
    """Value and gradient in float64; log-probabilities as the wire's float32 holds them."""
    value, _, arrays = read_answer(answer)
    assert abs(value - total.item()) < 1e-10 * max(1.0, abs(total.item()))
    for got, due in zip(arrays, due_logprobs, strict=True):
        assert got.shape == due.shape
        np.testing.assert_allclose(got, due.detach().numpy(), rtol=1e-6)
    theirs.zero_grad()
    total.backward()
    due = {name: parameter.grad.numpy() for name, parameter in theirs.named_parameters()}
    for name, gradient in gradients(model).items():
        scale = np.abs(due[name]).max()
        assert np.abs(gradient - due[name]).max() <= 1e-10 * scale, name
        assert scale > 0, name


@pytest.mark.parametrize("encode", [tensor, sparse])
@pytest.mark.parametrize("weighted", [True, False])
def test_several_targets_per_token(model, theirs, encode, weighted):
    """Datums of three widths in one request; weights that are not given are 1."""
    weights = [RNG.normal(size=each.shape) * (RNG.random(each.shape) < 0.5) for each in SEVERAL]
    weights = [each.astype(np.float32) for each in weights] if weighted else [np.ones(each.shape, np.float32) for each in SEVERAL]
    inputs = [{"target_tokens": own, **({"weights": each} if weighted else {})} for own, each in zip(SEVERAL, weights, strict=True)]
    due = logprobs_of(theirs, SEVERAL)
    total = -sum((torch.as_tensor(each).double() * own).sum() for each, own in zip(weights, due, strict=True))
    answer = model.forward_backward(request("cross_entropy", inputs, encode=encode))
    require_equal(theirs, total, due, model, answer)


def policy(targets, name="ppo"):
    """Inputs of a loss of samples, with an advantage of 0 at the first token; by column, too."""
    rng = np.random.default_rng(3)
    inputs = []
    for target_ids in targets:
        q = (-4.8 + rng.normal(size=len(target_ids)) * 0.3).astype(np.float32)
        advantages = rng.normal(size=len(target_ids)).astype(np.float32)
        advantages[0] = 0
        inputs.append({"target_tokens": target_ids, "logprobs": q, "advantages": advantages})
        if name == "gspo":
            inputs[-1]["sequence_ratio_mask"] = (rng.random(len(target_ids)) < 0.7).astype(np.float32)
    return inputs


LOW, HIGH, BETA = (float(np.float32(each)) for each in (0.8, 1.2, 0.05))
"""Defaults as a column holds them."""


def compute_defined_loss(name, p, inputs, low=LOW, high=HIGH, beta=BETA):
    """The API's formulas, of one datum."""
    q, advantages = (torch.as_tensor(inputs[column]).double() for column in ("logprobs", "advantages"))
    ratio = (p - q).exp()
    if name == "gspo":
        mask = torch.as_tensor(inputs["sequence_ratio_mask"]).double()
        ratio = ((((p - q) * mask).sum() / mask.sum()).exp()).detach() * (p - p.detach()).exp()
    match name:
        case "importance_sampling":
            return -(ratio * advantages).sum()
        case "ppo" | "gspo":
            return -torch.minimum(ratio * advantages, ratio.clamp(low, high) * advantages).sum()
        case "cispo":
            return -(ratio.detach().clamp(low, high) * p * advantages).sum()
        case _:
            return -(p * advantages - beta / 2 * (p - q) ** 2).sum()


@pytest.mark.parametrize("name", [each for each in losses.INPUTS if each != "cross_entropy"])
@pytest.mark.parametrize("targets", [FOLLOWING, OTHERS], ids=["following", "others"])
def test_a_loss_scores_whatever_targets_it_is_given(model, theirs, name, targets):
    inputs = policy(targets, name)
    due = logprobs_of(theirs, targets)
    total = sum(compute_defined_loss(name, p, datum) for p, datum in zip(due, inputs, strict=True))
    require_equal(theirs, total, due, model, model.forward_backward(request(name, inputs)))


def test_other_targets_leave_the_input_as_it_is(model, theirs):
    """The model is fed the datum's tokens, and not the targets: forward alone says so, at the last position too."""
    inputs = [{"target_tokens": each, "weights": np.zeros(len(each), np.float32)} for each in OTHERS]
    value, _, arrays = read_answer(model.forward_backward(request("cross_entropy", inputs, forward_only=True)))
    assert value == 0
    for got, due in zip(arrays, logprobs_of(theirs, OTHERS), strict=True):
        np.testing.assert_allclose(got, due.detach().numpy(), rtol=1e-6)


@pytest.mark.parametrize("kind", ["several", "others", "plugin"])
def test_one_call_is_one_call_per_datum(any_model, kind):
    """This holds for a mixture of experts too, whose routers have no losses of their own here."""
    name, inputs = {
        "several": ("cross_entropy", [{"target_tokens": each} for each in SEVERAL]),
        "others": ("importance_sampling", policy(OTHERS)),
        "plugin": ("skyrl-engine-losses:ppo", make_plugin_inputs(OTHERS)),
    }[kind]
    together = read_answer(any_model.forward_backward(request(name, inputs)))
    whole = gradients(any_model)
    alone = [
        read_answer(any_model.forward_backward(request(name, [datum], tokens=[tokens])))
        for tokens, datum in zip(TOKENS, inputs, strict=True)
    ]
    assert abs(together[0] - sum(each[0] for each in alone)) < 1e-10
    for got, (_, _, (due,)) in zip(together[2], alone, strict=True):
        np.testing.assert_allclose(got, due, rtol=1e-6)
    added = gradients(any_model)
    assert any("experts" in each for each in added) == (any_model.base_model == "mixture")
    for parameter, gradient in whole.items():
        assert np.abs(gradient - added[parameter]).max() <= 1e-10 * max(np.abs(gradient).max(), 1e-3), parameter


def make_plugin_inputs(targets, *, weighted=True):
    inputs = [{"old_logprobs": each.pop("logprobs"), **each} for each in policy(targets)]
    for datum in inputs if weighted else ():
        datum["weights"] = np.array([0.0] + [0.5] * (len(datum["advantages"]) - 1), np.float32)
    return inputs


def test_a_loss_of_a_plugin_is_added_up_with_its_weights(model, theirs):
    """Its bounds are distances from 1, and its options have the plugin's names; a token of weight 0 is scored all the same."""
    inputs = make_plugin_inputs(OTHERS)
    options = {"clip_low": 0.25, "clip_high": 0.5}
    due = logprobs_of(theirs, OTHERS)
    total = sum(
        compute_defined_loss("ppo", p[1:], {"logprobs": each["old_logprobs"][1:], "advantages": each["advantages"][1:]}, 0.75, 1.5)
        * 0.5
        for p, each in zip(due, inputs, strict=True)
    )
    answer = model.forward_backward(request("skyrl-engine-losses:ppo", inputs, options=options))
    assert "clip_fraction:mean" in read_answer(answer)[1]
    require_equal(theirs, total, due, model, answer)


def test_options_are_read_by_the_plugins_own_schema(model, theirs):
    """A whole number for a float, and a text; the divergence of two candidates' own shares, by its definition."""
    name, width = "skyrl-engine-losses:top_k_divergence", 2
    rng = np.random.default_rng(9)
    ids = [rng.integers(0, 128, (len(each), width)) for each in TOKENS]
    teacher = [np.log(rng.dirichlet([1, 1, 1], len(each))[:, :width]).astype(np.float32) for each in TOKENS]
    inputs = [
        {"target_tokens": own, "teacher_ids": each, "teacher_logprobs": teacher_logprobs}
        for own, each, teacher_logprobs in zip(FOLLOWING, ids, teacher, strict=True)
    ]
    options = {"divergence": "forward", "rest": "none"}
    student = logprobs_of(theirs, ids)
    total = sum(
        (torch.as_tensor(teacher_logprobs).double().exp() * (teacher_logprobs - p)).sum()
        for teacher_logprobs, p in zip(map(torch.as_tensor, teacher), student, strict=True)
    )
    answer = model.forward_backward(request(name, inputs, options=options))
    require_equal(theirs, total, logprobs_of(theirs, FOLLOWING), model, answer)
    focal = request("acme-focal-loss:focal", [{"target_tokens": each} for each in FOLLOWING], options={"gamma": 2.0})
    p = logprobs_of(theirs, FOLLOWING)
    require_equal(theirs, -sum(((1 - each.exp()) ** 2 * each).sum() for each in p), p, model, model.forward_backward(focal))


PLUGIN = "skyrl-engine-losses:ppo"
ONE = {"target_tokens": FOLLOWING[1]}


@pytest.mark.parametrize(
    ("name", "given", "options", "words"),
    [
        (
            "stable_reinforce",
            ONE,
            {},
            "there is no loss 'stable_reinforce' here; there are cross_entropy, importance_sampling, ppo,",
        ),
        ("ppo_dual_clip", ONE, {}, "acme-focal-loss:focal"),
        ("skyrl-engine-losses:gspo", ONE, {}, "there is no loss 'skyrl-engine-losses:gspo' here"),
        ("./loss.py:mine", ONE, {}, "there is no loss './loss.py:mine' here"),
        (f"{losses.__file__}:ppo", ONE, {}, "there is no loss"),
        (PLUGIN, ONE, {}, "datum 0 lacks old_logprobs, which skyrl-engine-losses:ppo reads"),
        (
            PLUGIN,
            make_plugin_inputs(FOLLOWING)[1],
            {"clip_lo": 0.1},
            "options of skyrl-engine-losses:ppo: clip_lo is not a known key",
        ),
        (PLUGIN, make_plugin_inputs(FOLLOWING)[1], {"clip_low": -1.0}, "clip_low must be at least 0.0, is -1"),
        (PLUGIN, make_plugin_inputs(FOLLOWING)[1], {"clip_low": "low"}, "clip_low must be a number"),
        ("skyrl-engine-losses:dpo", ONE, {}, "makes sense only with the reducers sequence_mean, not with sum; this server adds up"),
        (
            PLUGIN,
            {**make_plugin_inputs(FOLLOWING)[1], "rewards": [1.0] * 4},
            {},
            "has the input 'rewards', which skyrl-engine-losses:ppo does not",
        ),
        (
            PLUGIN,
            {**make_plugin_inputs(FOLLOWING)[1], "target_tokens": SEVERAL[1]},
            {},
            "are [4, 1]; skyrl-engine-losses:ppo takes one per token",
        ),
        ("cross_entropy", ONE, {"beta": 1.0}, "cross_entropy has no option 'beta'; it has none"),
        ("dro", policy(FOLLOWING)[1], {"beta": -1.0}, "the option 'beta' of dro is -1; it must be a number of 0 or more"),
        ("dro", policy(FOLLOWING)[1], {"beta": "1"}, "the option 'beta' of dro is 1; it must be a number"),
        (
            "ppo",
            {**policy(FOLLOWING)[1], "weights": [1.0] * 4},
            {},
            "has the input 'weights', which ppo does not read; it reads advantages",
        ),
        ("cross_entropy", {}, {}, "datum 0 lacks target_tokens, which every loss reads"),
        ("cross_entropy", {"target_tokens": [5, 128, 6, 7]}, {}, "target 1 of datum 0 is 128; the model knows 128 token ids"),
        ("cross_entropy", {"target_tokens": [[5, 6], [-1, 7]] * 2}, {}, "target 2 of datum 0 is -1"),
        ("cross_entropy", {"target_tokens": [5.0, 1.0, 6.0, 7.0]}, {}, "are float32; token ids are whole numbers"),
        ("cross_entropy", {"target_tokens": [5, 6]}, {}, "target_tokens of datum 0 has the shape [2] for 4 tokens"),
        ("cross_entropy", {**ONE, "weights": [[1.0]] * 4}, {}, "weights of datum 0 are [4, 1]; cross_entropy takes one per token"),
        (
            "cross_entropy",
            {"target_tokens": SEVERAL[1], "weights": [1.0] * 4},
            {},
            "weights of datum 0 are [4], and its target_tokens [4, 1]",
        ),
        ("cross_entropy", {**ONE, "weights": [1.0, np.nan, 0.0, 0.0]}, {}, "weights of datum 0 is not finite at index 1"),
    ],
)
def test_a_mistake_is_told_with_its_place_and_trains_nothing(model, name, given, options, words):
    with pytest.raises(RequestError, match=re.escape(words)):
        model.forward_backward(request(name, [given], tokens=[TOKENS[1]], options=options))
    assert not model.engine._gradient.parts


def test_sparse_tensors_that_lie_are_refused(model):
    def wrong(shape=(4, 2), rows=(0, 1, 1, 1, 2), columns=(0, 1), values=(5, 6)):
        body = request("cross_entropy", [{}], tokens=[TOKENS[1]])
        message = body.data[0].loss_fn_inputs["target_tokens"]
        message.dtype = INT64
        message.shape.extend(shape)
        csr = message.sparse_csr
        csr.values, csr.crow_indices, csr.col_indices = (np.array(numbers, "<i8").tobytes() for numbers in (values, rows, columns))
        return body

    assert isinstance(model.forward_backward(wrong()), bytes)
    model.engine.discard()
    for lie in (
        {"rows": (0, 1, 1, 2)},
        {"rows": (1, 1, 1, 1, 2)},
        {"rows": (0, 1, 0, 1, 2)},
        {"rows": (0, 1, 1, 1, 3)},
        {"columns": (0, 2)},
        {"columns": (-1, 0)},
        {"columns": (0,)},
        {"rows": ()},
    ):
        with pytest.raises(RequestError, match="rows and columns do not fit"):
            model.forward_backward(wrong(**lie))
    for shape in ((4,), (4, 2, 1), (-4, 2), (4, 2**40)):
        with pytest.raises(RequestError, match="is sparse and has the shape"):
            model.forward_backward(wrong(shape=shape))


def test_many_small_sparse_tensors_make_no_large_request(model):
    """Each would fit alone, with five million numbers on a few bytes; sixteen million fit."""
    body = request("cross_entropy", [{}] * 4, tokens=[np.array([5])] * 4)
    for datum in body.data:
        message = datum.loss_fn_inputs["target_tokens"]
        sparse(message, np.zeros((1, 1), np.int64))
        message.shape[:] = [1, 5_000_000]
    with pytest.raises(RequestError, match=r"target_tokens of datum 3 is sparse .* there is room for 1,777,216 numbers"):
        model.forward_backward(body)


def test_a_small_request_makes_no_large_column(model):
    """A wide datum next to long ones would pad them with zeros."""
    small = ServedModel(attrs.evolve(model.settings, serve=attrs.evolve(model.settings.serve, body_bytes=400)), "small", "tiny", 0)
    small._engine, small._loss = model._engine, model._loss
    inputs = [{"target_tokens": target_ids} for target_ids in (OTHERS[0], np.ones((4, 20), np.int64), OTHERS[2])]
    with pytest.raises(RequestError, match="19 times 20 numbers; this server takes 100"):
        small.forward_backward(request("cross_entropy", inputs))


@pytest.mark.parametrize(
    "reference", ["ppo", "./loss.py:mine", "skyrl-engine-losses:nothing", "other-losses:ppo", 3, "skyrl_engine_losses.plugin:ppo"]
)
def test_only_installed_losses_are_served(folder, reference):
    text = (
        (folder / "serve.toml")
        .read_text()
        .replace('"acme-focal-loss:focal"', f'"{reference}"' if isinstance(reference, str) else "3")
    )
    (folder / "wrong.toml").write_text(text)
    with pytest.raises(Exception, match=r"installed|must be"):
        Settings.read(folder / "wrong.toml")


def test_one_loss_need_be_no_list(folder):
    (folder / "one.toml").write_text('[serve]\nlosses = "acme-focal-loss:focal"\n[serve.models]\ntiny = "model"\n')
    assert Settings.read(folder / "one.toml").serve.losses == ("acme-focal-loss:focal",)


def test_losses_of_routers_are_refused_when_the_model_is_opened(folder):
    """They are means over a step, and requests of a step are added up one by one."""
    (folder / "routers.toml").write_text(
        '[serve]\n[serve.models]\nmixture = "mixture"\n[backend]\nuse = "megatron"\nrouter_balance_coefficient = 0.01\n'
    )
    served = ServedModel(Settings.read(folder / "routers.toml"), "model", "mixture", 0)
    with pytest.raises(RequestError, match="router_balance_coefficient and router_z_coefficient to 0"):
        served.open()
    assert served._engine is None
