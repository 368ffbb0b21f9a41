"""Runs over real vLLM servers that they start: many updates, a reward that climbs as with `hf`, and servers that are stale."""

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from attrs import evolve
from vllm_checks import Adapters, require_right, sample
from vllm_runs import reinforce

from skyrl_engine import RolloutError
from skyrl_engine.contracts import GeneratorStart, LoraConfig, ModelConfig
from skyrl_engine.modeling.loading import load_causal_lm
from skyrl_engine.modeling.tiny import write_model
from skyrl_engine.run.metrics import read_metrics
from skyrl_engine.testing.generators.bench import TinyWeights, requests_of
from skyrl_engine_vllm.generator import VllmGenerator
from skyrl_engine_vllm.options import VllmOptions

pytestmark = [pytest.mark.nightly, pytest.mark.timeout(1800)]

OwnServers = Callable[..., VllmOptions]
Starts = Callable[..., GeneratorStart]

UPDATES = 50

SIZES = {"num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 32}
"""Heads of a width that vLLM's attention knows on CPUs."""

GAP = 2e-5
"""Nats between log-probabilities of a server and of the trainer, in float32."""


class UntiedWeights(TinyWeights):
    """Weights of a model whose head is a matrix of its own."""

    def __init__(self, folder: Path) -> None:
        super().__init__("tensors")
        write_model(folder, **SIZES, max_position_embeddings=640, tie_word_embeddings=False)
        self.model = load_causal_lm(ModelConfig(str(folder))).eval()


def begin(which: str, plain: GeneratorStart, folder: Path) -> GeneratorStart:
    if which == "tied":
        return plain
    if which == "untied":
        return evolve(plain, model=ModelConfig(str(folder / "model")), weights=UntiedWeights(folder / "model"))
    return evolve(plain, model=evolve(plain.model, lora=LoraConfig(rank=4, alpha=8)), weights=Adapters(folder))


@pytest.mark.filterwarnings("ignore:`is_gradient_checkpointing` is deprecated:FutureWarning")
@pytest.mark.parametrize("which", ["tied", "untied", "adapters"])
def test_every_update_arrives(own_servers: OwnServers, starts: Starts, tmp_path: Path, which: str) -> None:
    start = begin(which, starts("tensors", folder=tmp_path), tmp_path)
    weights: Any = start.weights
    generator = VllmGenerator(own_servers())
    try:
        generator.start(start)
        for version in range(1, UPDATES + 1):
            if isinstance(weights, Adapters):
                weights.renew()
            else:
                weights.change(version)
            generator.update(weights, version)
            requests = requests_of(3, first=10 * version)
            require_right(weights, requests, sample(generator, requests), version)
    finally:
        generator.close()


def test_a_reward_climbs_as_with_hf(own_servers: OwnServers, tmp_path: Path) -> None:
    """From the same seeds both sample their own tokens; the sampler's log-probabilities are the trainer's at every step."""
    learning = {"steps": 25, "groups": 4, "group_size": 8, "max_tokens": 16}
    climbs = {}
    for use, generator in {"vllm": keys_of(own_servers()), "hf": {"use": "hf"}}.items():
        run = reinforce(tmp_path, generator, use, sizes=SIZES, **learning)
        steps = [record["metrics"] for record in read_metrics(run / "metrics.jsonl") if record["kind"] == "step"]
        assert len(steps) == 25
        rewards = [step["reward/mean"] for step in steps]
        climbs[use] = np.mean(rewards[:3]), np.mean(rewards[-3:])
        gap = max(step["policy/gap_max"] for step in steps)
        print(f"{use}: reward {climbs[use][0]:.3f} -> {climbs[use][1]:.3f}, largest gap {gap:.1e} nats")
        assert gap < GAP
    for before, after in climbs.values():
        assert after > before + 0.2


def keys_of(options: VllmOptions, **more: Any) -> dict[str, Any]:
    return {
        "use": "vllm",
        "venv": options.venv,
        "arguments": list(options.arguments),
        "environment": dict(options.environment),
        **more,
    }


STALE = '''
"""The generator vllm without its own proofs, over servers that are stale in one way."""
from skyrl_engine import hookimpl
from skyrl_engine_vllm.delivery import Delivery, Proof
from skyrl_engine_vllm.generator import VllmGenerator
from skyrl_engine_vllm.plugin import VllmPlugin

deliver = Delivery.deliver
Proof.require = lambda self, *arguments: None
Delivery._require_checksums = lambda self, *arguments: None


def claim(self, twin, tag, checksums):
    """Say that the weights are there."""
    self._client.post("/update_weight_version", {"new_version": tag})


def is_first(tag):
    return tag.endswith(":0")


def ignore(self, twin, tag, checksums):
    (deliver if is_first(tag) else claim)(self, twin, tag, checksums)


def give_one_of_two(self, twin, tag, checksums):
    (deliver if is_first(tag) or self is SERVERS[0].all[0].delivery else claim)(self, twin, tag, checksums)


def keep_rows(self, twin, tag, checksums):
    """Keep the prefix cache: keys and values of the last weights."""
    post = self._client.post

    def post_without_reset(path, *words, **more):
        if path == "/reset_prefix_cache":
            return None
        return post(path, *words, **more, **({"clear_cache": "false"} if path == "/pause" else {}))

    self._client.post = post_without_reset
    try:
        deliver(self, twin, tag, checksums)
    finally:
        self._client.post = post


def deliver_no_adapter(self, twin, tag, checksums):
    if not is_first(tag):
        self._load_adapter = lambda twin: None
    deliver(self, twin, tag, checksums)


SERVERS = []


class Stale(VllmGenerator):
    def start(self, start):
        super().start(start)
        SERVERS.append(self._servers)
        Delivery.deliver = WAY


class Plugin(VllmPlugin):
    @hookimpl
    def skyrl_engine_make_generator(self, config):
        return Stale(config)


stale = Plugin()
'''

WAYS = {
    "update ignored": ("ignore", {}),
    "one of two updated": ("give_one_of_two", {"servers": 2}),
    "prefix cache kept": ("keep_rows", {}),
    "adapter not delivered": ("deliver_no_adapter", {"weights": "adapter"}),
}


@pytest.fixture
def proofs_stay() -> Iterator[None]:
    """Give the plugin its proofs back, which a stale generator took away."""
    from skyrl_engine_vllm.delivery import Delivery, Proof

    kept = {(Proof, "require"): Proof.require, (Delivery, "deliver"): Delivery.deliver}
    kept |= {(Delivery, "_require_checksums"): Delivery._require_checksums}
    yield
    for (owner, name), value in kept.items():
        setattr(owner, name, value)


@pytest.mark.usefixtures("proofs_stay")
@pytest.mark.filterwarnings("ignore:`is_gradient_checkpointing` is deprecated:FutureWarning")
@pytest.mark.parametrize(
    ("way", "staleness"),
    [(way, staleness) for way in WAYS for staleness in (0, 1) if (way, staleness) != ("adapter not delivered", 1)],
)
def test_a_stale_server_is_stopped_within_two_steps(own_servers: OwnServers, tmp_path: Path, way: str, staleness: int) -> None:
    """By the run's own guard: the proofs of the plugin, which would lose the server at once, are switched off.

    Beside training, servers of adapters have those proofs alone: vLLM tells no log-probabilities of prompts while it serves adapters.
    """
    function, keys = WAYS[way]
    (tmp_path / "stale.py").write_text(STALE.replace("WAY", function))
    options = own_servers()
    generator = keys_of(options, use=f"{tmp_path / 'stale.py'}:stale", **keys)
    # keys and values of whole blocks alone are kept
    generator["arguments"] += ["--block-size", "32"]
    model = {"lora": {"rank": 4, "alpha": 8}} if "weights" in keys else {}
    with pytest.raises(RolloutError, match=r"differ|apart|gap|weights"):
        reinforce(
            tmp_path,
            generator,
            sizes={**SIZES, "max_position_embeddings": 640},
            prompts=("go " * 30, "go " * 31),
            model=model,
            groups=2,
            steps=6,
            max_prompt_tokens=200,
            staleness=staleness,
        )
    records = list(read_metrics(tmp_path / "run" / "metrics.jsonl"))
    assert sum(record["kind"] == "step" for record in records) <= 3
