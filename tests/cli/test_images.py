"""`sft`, `sft --dry-run` and `data preview` over rows with images, and what the person reads about bad ones."""

import json
from pathlib import Path

import pytest
from by_day import now
from PIL import Image


@pytest.fixture
def arguments(seeing):
    """Arguments of each command: the tiny model, and where tokens are kept."""
    return ("--model", seeing / "model", "data.cache=./cache", "run.device=cpu")


def make_row(*images):
    """A row of JSON; None is an image part that has no image."""
    parts = [{"type": "image"} if image is None else {"type": "image", "image": str(image)} for image in images]
    question = {"role": "user", "content": [*parts, {"type": "text", "text": "what is it"}]}
    return json.dumps({"messages": [question, {"role": "assistant", "content": "a cat"}]}) + "\n"


def test_sft_trains_on_images(command, seeing, arguments, tmp_path):
    sft = ("sft", *arguments, "--data", seeing / "train.jsonl", "--steps", "2", "--batch-size", "6", "--output", "run")
    planned = command(*sft, "--dry-run")
    assert planned.code == 0, planned.err
    assert "12 of 12 rows, 0 dropped" in planned.err
    assert "12 images of 45 tokens" in " ".join(planned.err.split())
    assert not (tmp_path / "run").exists()
    outcome = command(*sft)
    assert outcome.code == 0, outcome.err
    records = [json.loads(line) for line in (tmp_path / "run" / "metrics.jsonl").read_text().splitlines()]
    assert [record["step"] for record in records if record["kind"] == "step"] == [1, 2]
    before, after = (_tower(folder) for folder in (seeing / "model", tmp_path / "run" / "model"))
    assert not (before == after).all(), "the tower learns from the pictures"


def _tower(folder):
    from safetensors.numpy import load_file

    return load_file(folder / "model.safetensors")["model.visual.patch_embed.proj.weight"]


def read_by_preview(arguments):
    """The arguments without the device, which samples do not depend on."""
    return tuple(argument for argument in arguments if argument != "run.device=cpu")


def test_preview_shows_the_tokens_of_each_image(command, seeing, arguments):
    preview = ("data", "preview", *read_by_preview(arguments), "--data", seeing / "train.jsonl", "--samples", "3")
    outcome = command(*preview)
    assert outcome.code == 0, outcome.err
    one, two = "<image 1: 6 tokens, 24x16>", "<image 1: 1 tokens, 8x8><|vision_end|><|vision_start|><image 2: 4 tokens, 16x16>"
    assert f"<|vision_start|>{one}<|vision_end|>whatisit" in outcome.out
    assert f"<|vision_start|>{two}<|vision_end|>whatisit" in outcome.out
    assert "images 12, of 45 tokens" in " ".join(outcome.out.split())
    seen = json.loads(command(*preview, "--json").out)
    spans = [token["count"] for sample in seen["samples"] for token in sample["tokens"] if token["text"].startswith("<image ")]
    assert spans == [6, 1, 4]
    assert seen["counts"]["images"] == 12


def missing(folder: Path) -> str:
    return make_row(folder / "none.png")


def corrupt(folder: Path) -> str:
    Image.new("RGB", (16, 16)).save(folder / "cut.png")
    (folder / "cut.png").write_bytes((folder / "cut.png").read_bytes()[:-30])
    return make_row(folder / "cut.png")


def too_many_parts(folder: Path) -> str:
    return make_row(None)


def too_large(folder: Path) -> str:
    Image.new("RGB", (80, 60)).save(folder / "large.png")
    return make_row(folder / "large.png")


BAD = {
    missing: "there is no file",
    corrupt: "cut.png is no image that can be read",
    too_many_parts: "has 0 images for more image parts",
    too_large: "has 80 x 60 pixels, more than data.max_image_pixels = 4000",
}


@pytest.mark.parametrize("spoil", now(BAD, corrupt))
def test_bad_images_stop_or_drop(command, seeing, arguments, tmp_path, spoil):
    """Which sample, of which line, and why, in one line; dropped, it is counted, and the others are trained on."""
    data = tmp_path / "rows.jsonl"
    data.write_text(make_row(seeing / "a.png") + spoil(tmp_path) + make_row(seeing / "b.png"))
    line = ("--data", data, "data.max_image_pixels=4000")
    sft = ("sft", *arguments, *line, "--steps", "1", "--batch-size", "2")
    for stopped in (
        command(*sft, "--output", "stopped"),
        command(*sft, "--dry-run"),
        command("data", "preview", *read_by_preview(arguments), *line),
    ):
        assert stopped.code == 4
        assert f"sample 1 ({data} line 2)" in stopped.last_line
        assert BAD[spoil] in stopped.last_line
        assert 'data.bad_images = "drop"' in stopped.last_line
    planned = command(*sft, "--dry-run", "data.bad_images=drop")
    assert planned.code == 0, planned.err
    assert "2 of 3 rows, 1 dropped (1 with bad images)" in " ".join(planned.err.split())
    outcome = command(*sft, "data.bad_images=drop", "--output", "run")
    assert outcome.code == 0, outcome.err
    counts = json.loads((tmp_path / "run" / "run.json").read_text())["data"]["train"]
    assert (counts["rows"], counts["samples"], counts["dropped_bad_images"], counts["images"]) == (3, 2, 1, 2)
