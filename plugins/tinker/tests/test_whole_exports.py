"""A checkpoint's model holds every tensor of the base model, those too that training does not use."""

import torch
from safetensors.torch import load_file, save_file

from skyrl_engine.modeling.tiny import write_model, write_tokenizer
from skyrl_engine_tinker.checkpoints import Address
from skyrl_engine_tinker.model import ServedModel
from skyrl_engine_tinker.settings import Settings


def test_a_checkpoint_keeps_what_training_does_not_use(tmp_path):
    """Also one that is written after training went on from such a checkpoint."""
    folder = tmp_path / "model"
    write_model(folder)
    write_tokenizer(folder, ["a b c"], size=64)
    weights = load_file(folder / "model.safetensors") | {"mtp.fc.weight": torch.ones(2, 2)}
    save_file(weights, folder / "model.safetensors", metadata={"format": "pt"})
    (tmp_path / "serve.toml").write_text('[serve]\n[serve.models]\ntiny = "model"\n')
    settings = Settings.read(tmp_path / "serve.toml")
    model_id = f"{'0' * 32}:train:0"
    model = ServedModel(settings, model_id, "tiny", 0)
    model.open()
    for name in ("one", "two"):
        address = Address(model_id, "weights", name)
        model.save(address, overwrite=False, ttl=None, metadata=None)
        files = (address.folder(settings.directory) / "model").glob("*.safetensors")
        assert {key for file in files for key in load_file(file)} == weights.keys()
        model.load(address.path, optimizer=False, create=False)
    model.close()
