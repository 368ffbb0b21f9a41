"""`skyrl-engine diff-backends`: the engine's own backend against itself, and against one that is wrong."""

import json
from pathlib import Path

import pytest
from by_day import rarely
from transformers import Llama4ForCausalLM, Llama4TextConfig, Qwen3Config, Qwen3ForCausalLM

from skyrl_engine.cli.app import main
from skyrl_engine.cli.demo.recipe import Exchange, write_exchanges
from skyrl_engine.cli.demo.tiny import make_model
from skyrl_engine.cli.diff_backends import _material, _with_backend
from skyrl_engine.cli.options import load_config
from skyrl_engine.proof.layouts import ParallelSizes

WRONG = '''
from skyrl_engine import hookimpl
from skyrl_engine_fsdp.plugin import FsdpConfig, fsdp

def described(world_size):
    import inspect
    offered = {"config": FsdpConfig(), "world_size": world_size}
    taken = inspect.signature(fsdp.skyrl_engine_describe_backend).parameters
    return fsdp.skyrl_engine_describe_backend(**{name: offered[name] for name in taken})

class Averaging:
    """FSDP, but for gradients that are averaged over the micro-batches of a rank."""

    @hookimpl
    def skyrl_engine_describe_backend(self, world_size):
        return described(world_size)

    @hookimpl
    def skyrl_engine_make_backend(self):
        from skyrl_engine_fsdp.backend import FsdpBackend

        class Backend(FsdpBackend):
            def forward_backward(self, batch, objective):
                self.count = len(batch)
                return super().forward_backward(batch, objective)

            def gradients(self):
                for name, gradient in super().gradients():
                    yield name, gradient / self.count

        return Backend(FsdpConfig())

averaging = Averaging()

class Astray(Averaging):
    """FSDP, but for the decoder's `layer`, whose states are a little mixed; None: the embedding's."""

    def __init__(self, layer):
        self.layer = layer

    @hookimpl
    def skyrl_engine_make_backend(self):
        from skyrl_engine_fsdp.backend import FsdpBackend
        layer = self.layer

        class Backend(FsdpBackend):
            def setup(self, model, optimizer, environment):
                super().setup(model, optimizer, environment)
                decoder = self._model.model
                if layer is None or layer < len(decoder.layers):
                    module = decoder.embed_tokens if layer is None else decoder.layers[layer]
                    module.register_forward_hook(lambda _module, _inputs, states: states + 0.1 * states.roll(1, -1))

        return Backend(FsdpConfig())

class NotFinite(Averaging):
    """FSDP, but for one parameter's gradient, which is `number`."""

    def __init__(self, number):
        self.number = number

    @hookimpl
    def skyrl_engine_make_backend(self):
        from skyrl_engine_fsdp.backend import FsdpBackend
        number = self.number

        class Backend(FsdpBackend):
            def gradients(self):
                for name, gradient in super().gradients():
                    yield name, gradient * number if "layers.1.self_attn.k_proj" in name else gradient

        return Backend(FsdpConfig())

nan, infinite = NotFinite(float("nan")), NotFinite(float("inf"))
astray_in_1, astray_in_2, astray_at_once = Astray(1), Astray(2), Astray(None)
'''


def test_a_backend_agrees_with_itself_over_another_cut(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["diff-backends", "--b", "fsdp", "--collator", "packed", "--micro-batch-tokens", "80", "--json"]) == 0
    report = json.loads(capsys.readouterr().out)
    assert report["agrees"] is True
    assert len(report["parameters"]) == 24
    assert {output["name"] for output in report["outputs"]} == {"logits", "logprobs", "entropy", "token_loss"}
    assert report["first_layer"] is None
    assert report["untried"] == {}


def test_two_libraries_agree(capsys: pytest.CaptureFixture[str]) -> None:
    pytest.importorskip("megatron.core", reason="NOT PROVED HERE: this needs megatron-core")
    assert main(["diff-backends", "--a", "fsdp", "--b", "megatron", "--json"]) == 0
    report = json.loads(capsys.readouterr().out)
    assert report["agrees"] is True
    assert len(report["parameters"]) == 24
    assert max(row["relative"] for row in report["parameters"]) > 0, "other kernels add in another order"
    assert {row["name"]: row["largest"] < 1e-4 for row in report["outputs"]}["logits"]


def test_a_wrong_backend_is_named_by_its_factor(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "wrong.py").write_text(WRONG)
    arguments = ["diff-backends", "--b", f"{tmp_path / 'wrong.py'}:averaging", "training.micro_batch_rows=4"]
    assert main(arguments) == 1
    out = capsys.readouterr().out
    assert "gradients of every parameter differ by one factor: x4.00 = micro-batches of a rank of a" in out
    assert [line.split() for line in out.splitlines() if line.startswith("token_loss")] == [["token_loss", "none"]], "no place"


@pytest.fixture(scope="module")
def five_layers(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The configuration of a run over a model of five layers."""
    folder = tmp_path_factory.mktemp("five-layers")
    write_run(folder)
    (folder / "wrong.py").write_text(WRONG)
    config = Qwen3Config.from_pretrained(folder / "model")
    config.num_hidden_layers = 5
    config.layer_types = ["full_attention"] * 5
    Qwen3ForCausalLM(config).save_pretrained(folder / "model")
    return folder


def write_run(folder: Path, more: str = "") -> None:
    """run.toml in the folder, with its data and a model of two layers; `more` are further tables."""
    exchanges = [Exchange(f"Say {number:03d}", f"{number:03d}") for number in range(9)]
    make_model(folder / "model", exchanges)
    write_exchanges(folder / "data.jsonl", exchanges)
    (folder / "run.toml").write_text(
        f'[model]\npath = "{folder / "model"}"\n[data]\ntrain = "{folder / "data.jsonl"}"\ncache = "./cache"\n'
        f"[training]\nsteps = 1\nbatch_size = 8\n{more}"
    )


@pytest.mark.parametrize(
    ("wrong", "layer", "words"),
    [
        ("astray_in_2", "model.layers.2", "model.layers.2 is the first layer to diverge: cut before it, the model agrees"),
        rarely(
            "astray_at_once",
            None,
            "they do so with model.layers.0 alone: it is in there, in the embedding, the final norm or the head",
        ),
    ],
)
def test_a_layer_that_computes_something_else_is_named(
    five_layers: Path, wrong: str, layer: str | None, words: str, capsys: pytest.CaptureFixture[str]
) -> None:
    """Every gradient differs then, and those of the head first; the model is cut short until its forward passes agree."""
    arguments = ["diff-backends", str(five_layers / "run.toml"), "--b", f"{five_layers / 'wrong.py'}:{wrong}", "--json"]
    assert main(arguments) == 1
    out, err = capsys.readouterr()
    report = json.loads(out)
    assert report["first_layer"] == layer
    assert report["explanation"] == f"the passes differ in logprobs, logits, token_loss; {words}"
    assert next(output for output in report["outputs"] if output["name"] == "logits")["largest"] > 1e-3
    assert "comparing them with the first 3 of 5 layers" in err


@pytest.mark.parametrize("wrong", ["nan", "infinite"])
def test_a_gradient_that_is_not_finite_is_named(tmp_path: Path, wrong: str, capsys: pytest.CaptureFixture[str]) -> None:
    """And comes out as null: JSON has no NaN."""
    (tmp_path / "wrong.py").write_text(WRONG)
    assert main(["diff-backends", "--b", f"{tmp_path / 'wrong.py'}:{wrong}", "--json"]) == 1
    report = json.loads(capsys.readouterr().out, parse_constant=pytest.fail)
    parameter = "model.layers.1.self_attn.k_proj.weight"
    assert report["explanation"] == f"the gradient of {parameter} is not finite on the second"
    assert report["first_layer"] == "model.layers.1"
    assert [row["name"] for row in report["parameters"] if row["relative"] is None] == [parameter]
    assert report["gradient_norm"]["b"] is None


def test_what_trains_on_padded_rows_alone_is_compared_on_them(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    write_run(tmp_path)
    config = Llama4TextConfig(
        **{name: getattr(Qwen3Config.from_pretrained(tmp_path / "model"), name) for name in ("vocab_size", "pad_token_id")},
        hidden_size=32,
        intermediate_size=64,
        intermediate_size_mlp=64,
        num_local_experts=2,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=8,
    )
    Llama4ForCausalLM(config).save_pretrained(tmp_path / "model")
    capsys.readouterr()  # transformers imports DeepSpeed to save a model, and DeepSpeed's import writes to stdout
    arguments = ["diff-backends", str(tmp_path / "run.toml"), "--b", "fsdp", "--collator"]
    assert main([*arguments, "padded", "--json"]) == 0
    report = json.loads(capsys.readouterr().out)
    assert report["agrees"] is True
    assert report["untried"] == {"attention_chunk_size": 8192}
    assert main([*arguments, "padded"]) == 0
    assert "the model changes at 8,192 tokens (attention_chunk_size)" in " ".join(capsys.readouterr().out.split())
    assert main([*arguments, "packed"]) == 2
    assert "cannot be trained on packed rows" in capsys.readouterr().err


def test_without_a_configuration_the_layer_is_named_too(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "wrong.py").write_text(WRONG)
    assert main(["diff-backends", "--b", f"{tmp_path / 'wrong.py'}:astray_in_1"]) == 1
    assert "model.layers.1 is the first layer to diverge" in capsys.readouterr().out.replace("\n", " ")


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--b", "fsdp", "--layout", "tp2pp2"], "not of the form tp2xpp2xdp1"),
        (["--b", "fsdp", "--layout", "tp2xtp2"], "at most once"),
        (["--b", "fsdp", "--layout", "dp99999"], "takes 99999 processes on this machine"),
        (["--b", "fsdp", "--layout", "pp2"], "--layout: backend.pipeline_parallel: backend 'fsdp'"),
        (["--b", "fsdp", "--layout-a", "pp2"], "--layout-a: backend.pipeline_parallel: backend 'fsdp'"),
        (["--b", "fsdpp"], "there is no backend 'fsdpp'"),
        ([], "Missing option '--b'"),
    ],
)
def test_what_cannot_be_compared(arguments: list[str], message: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["diff-backends", *arguments]) in (2, 3)
    assert message in capsys.readouterr().err


@pytest.mark.parametrize(("layout", "sizes"), [("tp2", {"tensor_parallel": 2}), ("dp2", {}), ("dp1", {})])
def test_layouts_say_how_many_ranks_there_are_whatever_the_file_has(tmp_path: Path, layout: str, sizes: dict[str, int]) -> None:
    """The run of the file is planned for the layout's ranks; what is no size of a layout stays."""
    write_run(
        tmp_path,
        "[backend]\ntensor_parallel = 4\nreshard_after_forward = false\n"
        '[run]\nlaunch = "ray"\nranks = 8\nray_address = "nowhere:1"\n',
    )
    chosen = ParallelSizes.parse(layout)
    raw = _with_backend(load_config(tmp_path / "run.toml", (), {}), "b", "fsdp", chosen)
    with _material(raw, "qwen3") as (resolved, _, columns, _):
        assert (resolved.config.run.ranks, resolved.config.run.ray_address) == (chosen.ranks, None)
        options = resolved.plugins["backend"].options
        assert (options.tensor_parallel, options.reshard_after_forward) == (sizes.get("tensor_parallel", 1), False)
        assert len(columns) == 8


@pytest.mark.parametrize("text", ["backend = 4", 'run = "ray"', 'loss = "ppo"'])
def test_what_is_no_table_is_named(tmp_path: Path, text: str, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "run.toml").write_text(text + "\n")
    assert main(["diff-backends", str(tmp_path / "run.toml"), "--b", "fsdp"]) == 2
    error = capsys.readouterr().err
    assert f"run.toml:1: {text.split(maxsplit=1)[0]}: " in error
    assert "unexpected" not in error


@pytest.mark.parametrize("tolerance", ["nan", "-1", "inf"])
def test_a_tolerance_that_decides_nothing_is_refused(tolerance: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["diff-backends", "--b", "fsdp", "--tolerance", tolerance]) == 2
    assert "is not a finite number from 0 up" in capsys.readouterr().err
