"""Every rank has rank 0's tensors after setup: parameters, buffers and plain attributes, whatever device the model's code makes them on."""

import json
from pathlib import Path

import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file

from skyrl_engine.contracts import AdamWSettings, LoraConfig, ModelConfig, Topology
from skyrl_engine.modeling.tiny import write_model
from skyrl_engine.testing import select_plugin
from skyrl_engine.testing.backends.bench import Bench
from skyrl_engine.testing.backends.held_backend import Opening, PassOrder
from skyrl_engine.testing.backends.ranks import BackendRanks

CODE = '''
import torch
from transformers import LlamaConfig, LlamaForCausalLM, LlamaModel


def drawn(size):
    """torch.FloatTensor takes no notice of torch.device("meta"); every process draws other numbers."""
    return torch.FloatTensor(size).normal_()


class OddConfig(LlamaConfig):
    model_type = "odd"


class OddModel(LlamaModel):
    config_class = OddConfig

    def __init__(self, config):
        super().__init__(config)
        size = config.hidden_size
        self.scale = torch.nn.Parameter(drawn(size))
        self.register_buffer("shift", drawn(size))
        self.register_buffer("tilt", drawn(size), persistent=False)
        self.lean = drawn(size)

    def _init_weights(self, module):
        super()._init_weights(module)
        if isinstance(module, OddModel):
            # transformers leaves buffers that no file holds to this method
            module.tilt.normal_()

    def forward(self, *arguments, **options):
        output = super().forward(*arguments, **options)
        output.last_hidden_state = output.last_hidden_state * self.scale + self.shift + self.tilt + self.lean
        return output


class OddForCausalLM(LlamaForCausalLM):
    config_class = OddConfig

    def __init__(self, config):
        super().__init__(config)
        self.model = OddModel(config)
        self.post_init()
'''
SETTINGS = [
    ("skyrl-engine-fsdp:fsdp", {}),
    ("skyrl-engine-deepspeed:deepspeed", {"zero_stage": 0}),
    ("skyrl-engine-deepspeed:deepspeed", {"zero_stage": 3}),
]
SAME_TEXT = PassOrder((((0,),), ((0,),)))
"""Both data-parallel ranks score one and the same document."""


@pytest.fixture(scope="module")
def bench():
    with Bench() as opened:
        yield opened


@pytest.fixture(scope="module")
def odd_model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A Llama of its own code, which makes a parameter, buffers and a plain tensor outside of the meta device."""
    folder = tmp_path_factory.mktemp("odd")
    write_model(folder, "llama")
    weights = load_file(folder / "model.safetensors")
    weights |= {"model.scale": torch.randn(48), "model.shift": torch.randn(48)}
    save_file(weights, folder / "model.safetensors", metadata={"format": "pt"})
    (folder / "modeling_odd.py").write_text(CODE)
    config = json.loads((folder / "config.json").read_text())
    own = {"AutoConfig": "modeling_odd.OddConfig", "AutoModelForCausalLM": "modeling_odd.OddForCausalLM"}
    config |= {"model_type": "odd", "architectures": ["OddForCausalLM"], "auto_map": own}
    (folder / "config.json").write_text(json.dumps(config))
    return folder


def open_ranks(bench: Bench, plugin: str, options: dict[str, object], model: ModelConfig, *, learns: bool = True) -> BackendRanks:
    lock = select_plugin("backend", plugin, options).to_lock_entry()
    optimizer = AdamWSettings(learning_rate=0.1, max_grad_norm=None) if learns else None
    return bench.ranks(Opening(lock, Topology(dp=2), model, optimizer, "cpu"))


def require_alike(ranks: BackendRanks, stored: Path) -> None:
    held = ranks.weights()
    for name, weight in load_file(stored / "model.safetensors").items():
        if name in held[0]:
            for rank in held:
                np.testing.assert_array_equal(rank[name], weight.numpy(), err_msg=name)
    assert {"model.scale"} <= held[0].keys()
    require_same_scores(ranks)


def require_same_scores(ranks: BackendRanks) -> None:
    first, second = (output.fields["logprobs"][0] for output in ranks.forward(SAME_TEXT))
    np.testing.assert_array_equal(first, second)


@pytest.mark.parametrize("learns", [True, False], ids=["learns", "scores"])
@pytest.mark.parametrize(("plugin", "options"), SETTINGS)
def test_own_code_that_makes_tensors_on_the_cpu(
    bench: Bench, odd_model: Path, plugin: str, options: dict[str, object], learns: bool
) -> None:
    model = ModelConfig(str(odd_model), trust_remote_code=True)
    with open_ranks(bench, plugin, options, model, learns=learns) as ranks:
        require_alike(ranks, odd_model)
        if learns:
            ranks.forward_backward(SAME_TEXT)
            ranks.optim_step()
            require_same_scores(ranks)


def test_another_precision_than_the_code_makes(bench: Bench, odd_model: Path) -> None:
    """The code makes float32 whatever it is asked for."""
    with open_ranks(bench, *SETTINGS[0], ModelConfig(str(odd_model), trust_remote_code=True, dtype="float64")) as ranks:
        assert {weight.dtype for rank in ranks.weights() for weight in rank.values()} == {np.dtype(np.float64)}
        require_alike(ranks, odd_model)
        ranks.forward_backward(SAME_TEXT)


def test_a_set_of_adapters_shares_what_own_code_makes_on_the_cpu(bench: Bench, odd_model: Path) -> None:
    """Its adapters are its own; every other tensor is the base model's, though its code gave it values."""
    with (
        open_ranks(bench, *SETTINGS[0], ModelConfig(str(odd_model), trust_remote_code=True, lora=LoraConfig(rank=2))) as ranks,
        ranks.adapter_set(LoraConfig(rank=1), 7) as further,
    ):
        # fresh adapters change nothing
        base, own = ranks.forward(SAME_TEXT), further.forward(SAME_TEXT)
        for one, other in zip(base, own, strict=True):
            np.testing.assert_array_equal(one.fields["logprobs"][0], other.fields["logprobs"][0])
        require_same_scores(further)
