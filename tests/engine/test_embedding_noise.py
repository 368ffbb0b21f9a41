"""NEFTune's noise: by seed, step, sample and place alone, so that no split changes a gradient; in training, and nowhere else."""

import math
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from transformers import AutoModelForCausalLM

from skyrl_engine import Engine
from skyrl_engine.contracts.values.columns import SampleColumns
from skyrl_engine.errors import EngineError, UnsupportedError
from skyrl_engine.modeling.embedding_noise import draw_noise

SEED, ALPHA = 7, 9.0
LENGTHS = (5, 9, 3, 7)
IDS = (40, 10, 30, 20)
STILL = {"use": "sgd", "learning_rate": 1e-30, "max_grad_norm": None}
_BITS = 2**64 - 1


def split_mix(state: int) -> int:
    """SplitMix64's output at a state, by Python's integers."""
    word = (state + 0x9E3779B97F4A7C15) & _BITS
    word = ((word ^ (word >> 30)) * 0xBF58476D1CE4E5B9) & _BITS
    word = ((word ^ (word >> 27)) * 0x94D049BB133111EB) & _BITS
    return word ^ (word >> 31)


def define_noise(sample: int, place: int, component: int, step: int) -> float:
    """The definition, one number at a time: uniform in [-1, 1)."""
    golden = 0x9E3779B97F4A7C15
    base = int(np.random.SeedSequence([SEED, step]).generate_state(1, np.uint64)[0])
    key = split_mix(split_mix((base + split_mix(sample)) & _BITS) + place * golden & _BITS)
    return (split_mix((key + (component - 1) * golden) & _BITS) >> 40) * 2.0**-23 - 1


def make_columns() -> SampleColumns:
    draw = np.random.default_rng(1)
    ids = [draw.integers(3, 60, length).tolist() for length in LENGTHS]
    return SampleColumns.from_lists(input_ids=ids, num_actions=[length - 2 for length in LENGTHS], sample_ids=list(IDS))


def open_engine(model: Path, alpha: float | None = ALPHA, *, recompute: bool = False, **tables: Any) -> Engine:
    described: dict[str, Any] = {"path": str(model), "dtype": "float64", "activation_checkpointing": recompute}
    if alpha is not None:
        described["neftune_alpha"] = alpha
    base = {"model": described, "optimizer": STILL, "reducer": {"use": "sum"}, "run": {"seed": SEED, "device": "cpu"}}
    return Engine.open({**base, **tables})


def gradients(engine: Engine, columns: SampleColumns) -> dict[str, Any]:
    engine.forward_backward(engine.plan(columns))
    return engine.gradients()


def define_gradients(model: Path, columns: SampleColumns, step: int) -> dict[str, Any]:
    """Differentiate each sample alone, in a plain model whose embeddings are given with their noise."""
    plain = AutoModelForCausalLM.from_pretrained(model, dtype=torch.float64)
    plain.train()
    for number, (sample, length) in enumerate(zip(IDS, LENGTHS, strict=True)):
        ids = torch.from_numpy(
            columns.input_ids[columns.token_offsets[number] : columns.token_offsets[number + 1]].astype(np.int64)
        )
        embedded = plain.get_input_embeddings()(ids)
        width = embedded.shape[1]
        drawn = [[define_noise(sample, place, index, step) for index in range(width)] for place in range(length)]
        noisy = embedded + torch.tensor(drawn, dtype=torch.float64) * (ALPHA / math.sqrt(length * width))
        logprobs = plain(inputs_embeds=noisy[None]).logits[0].log_softmax(-1)
        (-logprobs[1:-1].gather(1, ids[2:, None]).sum()).backward()
    return {name: parameter.grad.numpy() for name, parameter in plain.named_parameters() if parameter.grad is not None}


@pytest.fixture(scope="module")
def still_model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A model without dropout."""
    from skyrl_engine.modeling.tiny import write_model, write_tokenizer

    folder = tmp_path_factory.mktemp("model")
    write_model(folder, attention_dropout=0.0)
    write_tokenizer(folder, ["a few words"])
    return folder


def test_gradients_are_those_of_the_definition_in_every_split(still_model: Path) -> None:
    """In float64, to rounding: padded one by one and together, packed into one row, in another order of samples, and with recomputation."""
    columns = make_columns()
    due = define_gradients(still_model, columns, step=1)
    layouts: list[dict[str, Any]] = [
        {"collator": {"use": "padded"}, "training": {"micro_batch_rows": 1}},
        {"collator": {"use": "padded"}, "training": {"micro_batch_rows": 4}},
        {"collator": {"use": "packed"}, "training": {"micro_batch_tokens": 64}, "recompute": True},
    ]
    for layout in layouts:
        for chosen in (columns, columns.take(np.array([2, 0, 3, 1]))):
            with open_engine(still_model, **layout) as engine:
                got = gradients(engine, chosen)
            assert got.keys() == due.keys()
            for name, value in due.items():
                np.testing.assert_allclose(got[name], value, rtol=1e-9, atol=1e-14, err_msg=name)


def test_every_step_has_other_noise_and_none_is_in_evaluation(still_model: Path) -> None:
    columns = make_columns()
    with open_engine(still_model) as noisy, open_engine(still_model, None) as plain:
        plan = noisy.plan(columns)
        losses = [noisy.train(plan).metrics["loss"] for _ in range(2)]
        assert len({*losses, plain.train(plan).metrics["loss"]}) == 3
        evaluated, due = (engine.evaluate(plan).result().metrics["loss"] for engine in (noisy, plain))
        assert evaluated == due


def test_drawn_numbers_are_those_of_split_mix_and_uniform() -> None:
    keys = torch.arange(-300, 300) * 12345678901234567
    drawn = draw_noise(keys, 500).numpy()
    for token, component in ((0, 0), (17, 3), (599, 499)):
        state = (int(keys[token]) + (component - 1) * 0x9E3779B97F4A7C15) & _BITS
        assert drawn[token, component] == np.float32((split_mix(state) >> 40) * 2.0**-23 - 1)
    # of 300,000 numbers: six standard deviations
    assert abs(drawn.mean()) < 6 / math.sqrt(3 * drawn.size)
    assert abs(drawn.var() - 1 / 3) < 6 * math.sqrt(4 / 45 / drawn.size)
    assert -1 <= drawn.min() < -0.9999 < 0.9999 < drawn.max() < 1


def test_layouts_without_it_refuse_it(still_model: Path) -> None:
    tables = {"optimizer": {}, "backend": {"use": "fsdp", "tensor_parallel": 2}, "run": {"launch": "ray", "ranks": 2}}
    with pytest.raises(UnsupportedError, match="'embedding_noise'") as caught:
        open_engine(still_model, **tables)
    assert caught.value.remedy.startswith("Remove model.neftune_alpha, or")


@pytest.mark.parametrize("use", ["fsdp", "megatron"])
def test_shared_prefixes_are_refused(still_model: Path, use: str) -> None:
    with pytest.raises(EngineError, match="noise of its own"):
        open_engine(still_model, collator={"use": "tree"}, backend={"use": use}, optimizer={})
