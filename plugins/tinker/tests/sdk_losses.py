"""A client of the real SDK that trains on every loss, run in a process of its own: ADDRESS MODEL, the model's directory."""

import sys
import warnings

import numpy as np
import tinker
import torch
from sdk_versions import finish, settle
from tinker import types
from transformers import AutoModelForCausalLM

# torch says of every sparse tensor that they are new
warnings.filterwarnings("ignore", message="Sparse CSR")
address, directory = sys.argv[1:]
service = tinker.ServiceClient(base_url=address)
training = settle(service.create_lora_training_client(base_model="tiny", rank=0))
model = AutoModelForCausalLM.from_pretrained(directory, dtype=torch.float32)
draw = torch.Generator().manual_seed(4)
tokens = [torch.randint(0, 100, (length,), generator=draw) for length in (7, 5)]
following = [torch.cat([each[1:], torch.tensor([9])]) for each in tokens]
others = [torch.randint(0, 100, (len(each),), generator=draw) for each in tokens]
several = [torch.randint(1, 100, (len(each), width), generator=draw) for each, width in zip(tokens, (4, 2), strict=True)]
# most weights are 0, so that the SDK sends them sparse
sparse = [torch.zeros(each.shape).index_fill(0, torch.tensor([2]), 0.5) for each in several]


def expected(targets: list[torch.Tensor]) -> list[torch.Tensor]:
    """Return the log-probabilities that transformers' own model gives the targets, in their shape."""
    tables = [model(each[None]).logits[0].log_softmax(-1) for each in tokens]
    wide = [each if each.ndim > 1 else each[:, None] for each in targets]
    return [table.gather(1, ids).reshape(each.shape).detach() for table, ids, each in zip(tables, wide, targets, strict=True)]


def datums(inputs: list[dict]) -> list[types.Datum]:
    return [
        types.Datum(model_input=types.ModelInput.from_ints(row_tokens.tolist()), loss_fn_inputs=tensors)
        for row_tokens, tensors in zip(tokens, inputs, strict=True)
    ]


def norm() -> float:
    return training.optim_step(types.AdamParams(learning_rate=0.0)).result().metrics["grad_norm"]


def require_agreement(output, targets: list[torch.Tensor]) -> None:
    for record, due in zip(output.loss_fn_outputs, expected(targets), strict=True):
        got = np.array(record["logprobs"].data).reshape(record["logprobs"].shape)
        assert got.shape == due.shape, (got.shape, due.shape)
        assert np.abs(got - due.numpy()).max() < 1e-4, (got, due)


def check_custom_loss(data: list[types.Datum], formula, loss: float, length: float, name: str) -> None:
    """The client differentiates the formula, and the server applies what it sends back."""
    bare = [
        types.Datum(model_input=each.model_input, loss_fn_inputs={"target_tokens": each.loss_fn_inputs["target_tokens"]})
        for each in data
    ]
    output = training.forward_backward_custom(bare, lambda _, scored: (formula(scored), {})).result()
    assert abs(norm() / length - 1) < 1e-4, name
    # SDKs before this metric report the surrogate's sum as the loss
    if "surrogate_loss:sum" in output.metrics:
        assert abs(output.metrics["loss:sum"] - loss) < 1e-4 * max(1.0, abs(loss)), (name, output.metrics, loss)


for targets in (following, others, several):
    for weights in ([torch.ones(each.shape) for each in targets], sparse if targets is several else None, None):
        given = [{"target_tokens": each} for each in targets]
        if weights is not None:
            given = [{**each, "weights": own} for each, own in zip(given, weights, strict=True)]
        output = training.forward_backward(datums(given), "cross_entropy").result()
        require_agreement(output, targets)
        length, loss = norm(), output.metrics["loss:sum"]
        weighed = weights or [torch.ones(each.shape) for each in targets]
        due = -sum((own * each).sum() for own, each in zip(weighed, expected(targets), strict=True))
        assert abs(loss - due) < 1e-4 * abs(due), (loss, due)
        # SDKs of 0.25 forget the shape of log-probabilities here
        if targets is not several or hasattr(tinker.TrainingClient, "_compute_custom_loss"):
            check_custom_loss(
                datums(given),
                lambda found, w=weighed: -sum((own * each).sum() for own, each in zip(w, found, strict=True)),
                loss,
                length,
                "cross",
            )
    require_agreement(training.forward(datums([{"target_tokens": each} for each in targets]), "cross_entropy").result(), targets)

LOW, HIGH, BETA = 0.8, 1.2, 0.05
signs = [torch.where(torch.arange(len(each)) % 2 == 0, 1.5, -0.5) for each in tokens]
masks = [(torch.arange(len(each)) != 1).float() for each in tokens]


def ratios(scored: list[torch.Tensor], name: str) -> list[torch.Tensor]:
    drifts = [own - each for own, each in zip(scored, sampled, strict=True)]
    if name != "gspo":
        return [each.exp() for each in drifts]
    means = [(each * mask).sum() / mask.sum() for each, mask in zip(drifts, masks, strict=True)]
    return [mean.detach().exp() * (own - own.detach()).exp() for own, mean in zip(scored, means, strict=True)]


def formula(name: str, scored: list[torch.Tensor]) -> torch.Tensor:
    total = torch.zeros(())
    for p, q, r, a in zip(scored, sampled, ratios(scored, name), signs, strict=True):
        match name:
            case "importance_sampling":
                value = r * a
            case "ppo" | "gspo":
                value = torch.minimum(r * a, r.clamp(LOW, HIGH) * a)
            case "cispo":
                value = r.detach().clamp(LOW, HIGH) * p * a
            case _:
                value = p * a - BETA / 2 * (p - q) ** 2
        total = total - value.sum()
    return total


PLUGIN = "skyrl-engine-losses:ppo"
found = {}
for targets in (following, others):
    sampled = [each + 0.3 * torch.randn(each.shape, generator=draw) for each in expected(targets)]
    for name in ("importance_sampling", "ppo", "cispo", "dro", "gspo", PLUGIN):
        given = [
            {"target_tokens": own, ("old_logprobs" if name == PLUGIN else "logprobs"): q, "advantages": a}
            for own, q, a in zip(targets, sampled, signs, strict=True)
        ]
        given = (
            [{**each, "sequence_ratio_mask": mask} for each, mask in zip(given, masks, strict=True)] if name == "gspo" else given
        )
        data, options = datums(given), {"clip_low": 0.2, "clip_high": 0.2} if name == PLUGIN else None
        output = training.forward_backward(data, name, options).result()
        require_agreement(output, targets)
        found[name] = output.metrics["loss:sum"], norm()
        alone = [training.forward_backward([each], name, options) for each in data]
        assert abs(sum(each.result().metrics["loss:sum"] for each in alone) - found[name][0]) < 1e-4, name
        assert abs(norm() / found[name][1] - 1) < 1e-4, name
        if name != PLUGIN:
            check_custom_loss(data, lambda given, own=name: formula(own, given), *found[name], name)
    # its bounds are distances from 1: the same function
    assert np.allclose(found[PLUGIN], found["ppo"], rtol=1e-5), found
    assert len({round(each[1], 5) for each in found.values()}) == 5, found

for name, options, words in (
    (
        "stable_reinforce",
        None,
        f"there is no loss 'stable_reinforce' here; there are cross_entropy, importance_sampling, ppo, cispo, dro, gspo, {PLUGIN}",
    ),
    ("./loss.py:mine", None, "there is no loss './loss.py:mine' here"),
    (PLUGIN, {"clip_lo": 0.1}, f"options of {PLUGIN}: clip_lo is not a known key"),
):
    try:
        message = ""
        training.forward_backward(datums([{"target_tokens": each} for each in following]), name, options).result()
    except tinker.RequestFailedError as error:
        message = str(error)
    assert words in message, message
finish(address, service)
print("done")
