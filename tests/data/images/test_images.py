"""Conversations with images: from what a row holds to the model's inputs, and what is done about bad ones."""

import base64
import gzip
import json
import os
import pickle
from importlib.metadata import version
from io import BytesIO
from itertools import pairwise

import datasets
import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from PIL import Image
from transformers.image_utils import load_image

from skyrl_engine.config.schema import DataConfig
from skyrl_engine.contracts.kinds.reducer import PerSequence
from skyrl_engine.contracts.values.columns import SampleColumns
from skyrl_engine.contracts.values.plan import Layout
from skyrl_engine.data.dataset import load_columns
from skyrl_engine.data.images import processor as vision_module
from skyrl_engine.data.preview import preview
from skyrl_engine.errors import DataError, ImageError, UnsupportedError
from skyrl_engine.spans import Spans
from skyrl_engine.testing.subject import part_of
from skyrl_engine.training.sft.state import fingerprint
from skyrl_engine.workers.batch import ShardBatch
from skyrl_engine.workers.dispatch import cut
from skyrl_engine_collators.packed.collator import PackedCollator
from skyrl_engine_collators.padded.collator import PaddedCollator

ONE = {"type": "image"}
ASK = {"type": "text", "text": "what?"}


def picture(width, height, *, seed=0, mode="RGB"):
    bands = len(mode)
    values = np.random.default_rng(seed).integers(0, 256, (height, width, bands), dtype=np.uint8)
    return Image.fromarray(values.squeeze() if bands == 1 else values, mode)


def encode(image, kind="PNG", **options):
    file = BytesIO()
    image.save(file, kind, **options)
    return file.getvalue()


def row(*images, reply="a cat"):
    """A question with these images, and a reply."""
    parts = [{**ONE, "image": image} for image in images]
    return {"messages": [{"role": "user", "content": [*parts, ASK]}, {"role": "assistant", "content": reply}]}


@pytest.fixture(scope="module")
def tokenizer(make_tokenizer):
    return make_tokenizer("pictures")


@pytest.fixture
def vision(tokenizer, make_vision):
    return make_vision(tokenizer)


@pytest.fixture
def files(tmp_path):
    """a.png of 64 x 96 pixels (6 tokens), b.png of 32 x 32 (1 token), c.jpg of 100 x 70, which is scaled to 96 x 64 (6 tokens)."""
    picture(64, 96, seed=1).save(tmp_path / "a.png")
    picture(32, 32, seed=2).save(tmp_path / "b.png")
    picture(100, 70, seed=3).save(tmp_path / "c.jpg")
    return tmp_path


def by_transformers(vision, *paths):
    """`pixel_values` and `image_grid_thw` as transformers makes them of the files."""
    features = vision.processor(images=[load_image(str(path)) for path in paths], return_tensors="np")
    return features["pixel_values"], features["image_grid_thw"]


def text_of(dataset, tokenizer, position):
    columns = dataset.columns
    return tokenizer.decode(columns.input_ids[columns.token_offsets[position] : columns.token_offsets[position + 1]].tolist())


def test_each_image_becomes_its_tokens_and_the_processor_s_numbers(load, tokenizer, vision, files, marked):
    rows = [row("a.png", "c.jpg"), row(), row("b.png")]
    dataset = load(rows, tokenizer, vision=vision)
    wrapped = "<|vision_start|>{}<|vision_end|>".format
    images = wrapped(6 * "<|image_pad|>") * 2
    assert marked(dataset, tokenizer) == (
        f"<|im_start|>user\n{images}what?<|im_end|>\n<|im_start|>assistant\n[[a cat<|im_end|>]]\n"
    )
    assert (dataset.counts.images, dataset.counts.image_tokens) == (3, 13)
    assert dataset.counts.tokens == len(dataset.columns.input_ids)

    batch = dataset.batch([2, 0, 1])
    assert "images" not in batch.extras
    pixels, grid, types = (batch.extras[name] for name in ("pixel_values", "image_grid_thw", "mm_token_type_ids"))
    for position, names in enumerate([["b.png"], ["a.png", "c.jpg"]]):
        expected_pixels, expected_grid = by_transformers(vision, *(files / name for name in names))
        assert pixels[position].dtype == np.float32
        assert np.array_equal(pixels[position], expected_pixels)
        assert grid[position].tolist() == expected_grid.tolist()
    assert (pixels[2].shape, grid[2].shape) == ((0, vision.patch_dim), (0, 3))
    assert np.array_equal(types.values, batch.input_ids == vision.image_token)
    assert types.lengths.tolist() == np.diff(batch.token_offsets).tolist()


def test_a_batch_is_what_the_contract_of_columns_takes(load, tokenizer, vision, files):
    """`create` checks patches against grids and types against tokens; the batch went around it."""
    batch = load([row("a.png"), row(), row("b.png", "c.jpg")], tokenizer, vision=vision).batch([1, 2])
    checked = SampleColumns.create(
        input_ids=batch.input_ids,
        token_offsets=batch.token_offsets,
        action_offsets=batch.action_offsets,
        loss_weight=batch.loss_weight,
        extras=batch.extras,
    )
    for name, view in batch.extras.items():
        assert all(np.array_equal(view[sample], checked.extras[name][sample]) for sample in range(2))


@pytest.mark.parametrize(
    ("collator", "limit"),
    [(PaddedCollator(pad_token_id=0), {"micro_batch_rows": 2}), (PackedCollator(pad_token_id=0), {"micro_batch_tokens": 80})],
)
def test_every_rank_builds_its_own_samples_images(load, tokenizer, vision, files, collator, limit):
    """From the columns that name images over batch, plan, shards (as they travel) to dense fields."""
    names = [["a.png"], [], ["b.png", "c.jpg"], ["c.jpg"], []]
    dataset = load([row(*own) for own in names], tokenizer, vision=vision)
    columns = dataset.batch([4, 2, 0, 1, 3])
    (mini_batch,) = collator.plan(columns.lengths, Layout(dp=2, **limit)).mini_batches
    shards = cut(columns, mini_batch, PerSequence(np.ones(len(columns))), needs=())
    seen = []
    for shard in pickle.loads(pickle.dumps(list(shards))):
        for built in ShardBatch(shard, part_of(collator, "the collator", "collator"), "loss", Spans()):
            ids, types = built.inputs["input_ids"], built.inputs["mm_token_type_ids"]
            assert np.array_equal(types.numpy() == 1, ids.numpy() == vision.image_token)
            pixels, grid = (
                [built.inputs[name][start:stop].numpy() for start, stop in pairwise(built.ragged_offsets[name])]
                for name in ("pixel_values", "image_grid_thw")
            )
            for place, sample in enumerate(built.samples.sample_ids.tolist()):
                seen.append(sample)
                if names[sample]:
                    expected = by_transformers(vision, *(files / name for name in names[sample]))
                    assert np.array_equal(pixels[place], expected[0])
                    assert np.array_equal(grid[place], expected[1])
                else:
                    assert len(pixels[place]) == len(grid[place]) == 0
    assert sorted(seen) == [0, 1, 2, 3, 4]


def test_the_data_s_fingerprint_sees_another_picture_of_the_same_size(load, tokenizer, vision, files):
    """A checkpoint resumes on the same data alone; tokens and grids are those of the picture before."""
    before = fingerprint(load([row("a.png")], tokenizer, vision=vision).columns)
    assert fingerprint(load([row("a.png")], tokenizer, vision=vision).columns) == before
    picture(64, 96, seed=8).save(files / "a.png")
    os.utime(files / "a.png", (1, 1))
    assert fingerprint(load([row("a.png")], tokenizer, vision=vision).columns) != before


def test_a_batch_without_images_still_says_so(load, tokenizer, vision, files):
    batch = load([row("a.png"), row()], tokenizer, vision=vision).batch([1])
    assert {name: (view.lengths.tolist(), view.values.shape[1:]) for name, view in batch.extras.items()} == {
        "pixel_values": ([0], (vision.patch_dim,)),
        "image_grid_thw": ([0], (3,)),
        "mm_token_type_ids": ([len(batch.input_ids)], ()),
    }


def test_loss_on_all_turns_with_images_between_them_and_in_a_reply(load, tokenizer, vision, files, marked):
    messages = [
        {"role": "user", "content": [{**ONE, "image": "a.png"}, ASK]},
        {"role": "assistant", "content": "a cat"},
        {"role": "user", "content": [ASK, {**ONE, "image": "b.png"}]},
        {"role": "assistant", "content": [{"type": "text", "text": "this "}, {**ONE, "image": "b.png"}]},
    ]
    dataset = load([{"messages": messages}], tokenizer, vision=vision, loss_on="all")
    shown = marked(dataset, tokenizer)
    assert "[[a cat<|im_end|>]]" in shown
    assert "[[this <|vision_start|>]]<|image_pad|>[[<|vision_end|><|im_end|>]]" in shown
    assert shown.count("[[") == 3


DATA_ADDRESS = "data:image/png;base64," + base64.b64encode(encode(picture(64, 96, seed=1))).decode()
FORMS = {
    "path": {**ONE, "path": "a.png"},
    "file address": {**ONE, "url": "file://{folder}/a.png"},
    "absolute": {**ONE, "image": "{folder}/a.png"},
    "data address": {**ONE, "image": DATA_ADDRESS},
    "as chat interfaces write it": {"type": "image_url", "image_url": {"url": DATA_ADDRESS}},
}


@pytest.mark.parametrize("form", FORMS)
def test_every_form_of_an_image_in_json_gives_the_same(load, tokenizer, vision, files, form):
    part = {key: value.replace("{folder}", str(files)) if isinstance(value, str) else value for key, value in FORMS[form].items()}
    rows = [row("b.png"), {"messages": [{"role": "user", "content": [part, ASK]}, {"role": "assistant", "content": "x"}]}]
    batch = load(rows, tokenizer, vision=vision).batch([1, 0])
    assert np.array_equal(batch.extras["pixel_values"][0], by_transformers(vision, files / "a.png")[0])
    assert np.array_equal(batch.extras["pixel_values"][1], by_transformers(vision, files / "b.png")[0])


def with_column(images):
    """Rows whose image parts take their images from a column."""
    messages = [{"role": "user", "content": [ONE, ONE, ASK]}, {"role": "assistant", "content": "x"}]
    return [{"messages": json.dumps(messages), "images": own} for own in images]


def write_parquet(rows, path):
    pq.write_table(pa.Table.from_pylist(rows), path / "rows.parquet", row_group_size=2)
    return path / "rows.parquet"


def write_saved(rows, path):
    features = datasets.Features({"messages": datasets.Value("string"), "images": datasets.List(datasets.Image())})
    datasets.Dataset.from_list(rows, features=features).save_to_disk(str(path / "saved"))
    return path / "saved"


@pytest.mark.parametrize("write", [write_parquet, write_saved])
def test_images_inside_the_rows_are_read_again_when_they_are_wanted(tmp_path, tokenizer, vision, write):
    """Bytes in Parquet; PIL images in a saved dataset of Hugging Face, which stores them as bytes with a name that is no path."""
    datasets.disable_progress_bars()
    pictures = [[picture(32 + 16 * i, 64, seed=i), picture(64, 64, seed=10 + i)] for i in range(5)]
    stored = pictures if write is write_saved else [[{"bytes": encode(one), "path": "x.png"} for one in own] for own in pictures]
    data = DataConfig(train=str(write(with_column(stored), tmp_path)), cache=str(tmp_path / "cache"))
    dataset = load_columns(data, tokenizer, split="train", vision=vision)
    order = [4, 0, 3, 1, 2]
    batch = dataset.batch(order)
    for position, sample in enumerate(order):
        expected = vision.processor(images=pictures[sample], return_tensors="np")
        assert np.array_equal(batch.extras["pixel_values"][position], expected["pixel_values"])
        assert np.array_equal(batch.extras["image_grid_thw"][position], expected["image_grid_thw"])
    assert dataset.cache_file.stat().st_size < 30_000, "references are kept, neither pixels nor files"


def test_images_inside_a_packed_file_are_refused_before_a_batch_needs_them(tmp_path, tokenizer, vision):
    with gzip.open(tmp_path / "rows.jsonl.gz", "wt", encoding="utf-8") as file:
        file.write(json.dumps(row(DATA_ADDRESS)) + "\n")
    data = DataConfig(train=str(tmp_path / "rows.jsonl.gz"), cache=str(tmp_path / "cache"))
    with pytest.raises(DataError, match="is packed, and images inside its rows are read in any order"):
        load_columns(data, tokenizer, split="train", vision=vision)


def test_so_is_one_beside_an_unpacked_file_in_a_folder(tmp_path, tokenizer, vision):
    """Each file of a folder is asked for a row of its own."""
    (tmp_path / "rows").mkdir()
    line = json.dumps(row(DATA_ADDRESS)) + "\n"
    (tmp_path / "rows" / "a.jsonl").write_text(line, encoding="utf-8")
    data = DataConfig(train=str(tmp_path / "rows"), cache=str(tmp_path / "cache"))
    assert len(load_columns(data, tokenizer, split="train", vision=vision).batch([0]).extras["pixel_values"][0]) == 24
    with gzip.open(tmp_path / "rows" / "b.jsonl.gz", "wt", encoding="utf-8") as file:
        file.write(line)
    with pytest.raises(DataError, match=r"b.jsonl.gz is packed, and images inside its rows are read in any order"):
        load_columns(data, tokenizer, split="train", vision=vision)


def test_an_empty_column_hides_no_other(load, tokenizer, vision, files):
    prompt = [{"role": "user", "content": [ONE, ASK]}, {"role": "assistant", "content": "x"}]
    for others in ({"images": [], "image": "a.png"}, {"images": ["a.png"], "image": []}, {"images": None, "image": ["a.png"]}):
        batch = load([{"messages": prompt, **others}], tokenizer, vision=vision).batch([0])
        assert np.array_equal(batch.extras["pixel_values"][0], by_transformers(vision, files / "a.png")[0])
    with pytest.raises(ImageError, match=r"sample 0 .* has images in the columns 'images', 'image'"):
        load([{"messages": prompt, "images": ["a.png"], "image": "b.png"}], tokenizer, vision=vision)


@pytest.mark.parametrize(
    ("kind", "columns"),
    [
        ("text", {"text": "a cat"}),
        ("tokens", {"input_ids": [1, 2], "labels": [1, 2]}),
        ("rollouts", {"prompt_ids": [1], "response_ids": [2]}),
    ],
)
def test_images_that_a_format_has_no_place_for_are_refused(load, tokenizer, vision, files, kind, columns):
    assert load([{**columns, "images": [], "image": None}], tokenizer, vision=vision).format == kind
    for images in ({"images": ["a.png"]}, {"image": "a.png"}):
        with pytest.raises(
            DataError, match=rf"sample 0 .*'{next(iter(images))}': it holds images, and format '{kind}' has no place"
        ):
            load([{**columns, **images}], tokenizer, vision=vision)


def test_orientation_and_modes_are_those_of_transformers(load, tokenizer, vision, tmp_path):
    exif = Image.Exif()
    exif[0x0112] = 6  # on its side
    picture(64, 96, seed=5).save(tmp_path / "turned.jpg", exif=exif)
    picture(64, 64, seed=6, mode="RGBA").save(tmp_path / "alpha.png")
    picture(64, 64, seed=7, mode="L").save(tmp_path / "grey.png")
    names = ["turned.jpg", "alpha.png", "grey.png"]
    batch = load([row(name) for name in names], tokenizer, vision=vision).batch([0, 1, 2])
    assert batch.extras["image_grid_thw"][0].tolist() == [[1, 4, 6]]
    for position, name in enumerate(names):
        assert np.array_equal(batch.extras["pixel_values"][position], by_transformers(vision, tmp_path / name)[0])


def test_length_counts_the_images_tokens_and_nothing_is_cut(load, tokenizer, vision, files):
    rows = [row("a.png"), row(), row("b.png")]
    length = len(load(rows, tokenizer, vision=vision).columns.take([0]).input_ids)
    for policy in ("drop", "truncate"):
        dataset = load(rows, tokenizer, vision=vision, max_length=length - 1, overlong=policy)
        assert (len(dataset), dataset.counts.dropped_overlong, dataset.counts.truncated) == (2, 1, 0)
        assert dataset.columns.sample_values["row"].tolist() == [1, 2]
        assert np.array_equal(dataset.batch([1]).extras["pixel_values"][0], by_transformers(vision, files / "b.png")[0])
    with pytest.raises(DataError, match=rf"sample 0 .* has {length} tokens, more than data.max_length = {length - 1}"):
        load(rows, tokenizer, vision=vision, max_length=length - 1)
    assert len(load(rows, tokenizer, vision=vision, max_length=length)) == 3


def spoil(path):
    (path / "cut.png").write_bytes((path / "a.png").read_bytes()[:-400])
    (path / "cut.jpg").write_bytes((path / "c.jpg").read_bytes()[:-400])
    (path / "text.png").write_text("not an image", encoding="utf-8")
    picture(8, 1700).save(path / "strip.png")
    picture(1100, 1000, mode="L").save(path / "large.png")
    (path / "folder.png").mkdir()


BAD = {
    "missing": (row("none.png"), r"image 1: there is no file .*none\.png"),
    "cut png": (row("a.png", "cut.png"), r"image 2: .*cut\.png is no image that can be read"),
    "cut jpg": (row("cut.jpg"), r"cut\.jpg is no image that can be read"),
    "text": (row("text.png"), r"text\.png is no image that can be read"),
    "folder": (row("folder.png"), r"folder\.png cannot be read"),
    "strip": (row("strip.png"), r"8 x 1700 pixels: the image processor refuses it: .*aspect ratio"),
    "too large": (row("large.png"), r"1100 x 1000 pixels, more than data.max_image_pixels = 1048576"),
    "address": (row("https://example.org/a.png"), "nothing is fetched over the network"),
    "no base64": (row("data:image/png,abc"), "a data: address that cannot be read: it is not in base64"),
    "broken base64": (row("data:image/png;base64,a$"), "a data: address that cannot be read"),
    "number": (row(3), "image 1 is a int"),
    "nobody's home": (row("~nobody-of-this-name/a.png"), "image 1 is .*which is no path"),
    "no address": (row("file://[a.png"), "image 1 is .*which is no path"),
    "base64 alone": (row("iVBORw0KGgo" * 500), "cannot be read .File name too long"),
    "empty": (row({}), "image 1 is an object with nothing, without bytes or a path"),
    "image tokens as text": (row("a.png", reply="<|image_pad|>"), "has 2 places for images in its text, and 1 images"),
    "image tokens without images": (row(reply="<|image_pad|>"), "has 1 places for images in its text, and 0 images"),
    "more parts than images": (
        {**row(), "messages": [{"role": "user", "content": [ONE]}, row()["messages"][1]]},
        "has 0 images for",
    ),
    "more images than parts": ({**row("a.png"), "images": ["b.png"]}, "1 images for 0 image parts"),
}


@pytest.mark.parametrize("kind", BAD)
def test_a_bad_image_stops_the_run_or_drops_its_sample(load, tokenizer, vision, files, kind):
    spoil(files)
    bad, message = BAD[kind]
    with pytest.raises(ImageError, match=message) as caught:
        load([row("a.png"), bad], tokenizer, vision=vision)
    assert "sample 1 (" in caught.value.cause
    dataset = load([row("a.png"), bad, row("b.png")], tokenizer, vision=vision, bad_images="drop")
    assert dataset.columns.sample_values["row"].tolist() == [0, 2]
    assert (dataset.counts.rows, dataset.counts.samples, dataset.counts.dropped_bad_images, dataset.counts.dropped) == (3, 2, 1, 1)
    assert np.array_equal(dataset.batch([1]).extras["pixel_values"][0], by_transformers(vision, files / "b.png")[0])


def test_a_template_that_leaves_out_an_image_is_noticed(load, make_tokenizer, vision, files):
    tokenizer = make_tokenizer("pictures")
    tokenizer.chat_template = tokenizer.chat_template.replace("if part.type == 'image'", "if part.type == 'image' and loop.first")
    with pytest.raises(ImageError, match="has 1 places for images in its text, and 2 images"):
        load([row("a.png", "b.png")], tokenizer, vision=vision)


def test_a_file_larger_than_pillow_itself_takes(load, tokenizer, vision, files, monkeypatch):
    monkeypatch.setattr(Image, "MAX_IMAGE_PIXELS", 1000)
    with pytest.raises(ImageError, match="has more pixels than Pillow takes"):
        load([row("a.png")], tokenizer, vision=vision)


def test_dropped_samples_are_announced_once(load, tokenizer, vision, files, caplog):
    load([row("none.png"), row("a.png"), row("neither.png")], tokenizer, vision=vision, bad_images="drop")
    (record,) = [record for record in caplog.records if record.levelname == "WARNING"]
    assert "there is no file" in record.getMessage()


def test_a_model_without_vision_refuses_images(load, tokenizer, files):
    with pytest.raises(UnsupportedError, match=r"sample 1 .* has images, and no model takes them"):
        load([row(), row("a.png")], tokenizer)


def test_a_cached_table_reads_the_same_images_and_sees_changed_files(load, tokenizer, vision, files):
    rows = [row("a.png"), row("late.png"), row("b.png")]
    assert len(load(rows, tokenizer, vision=vision, bad_images="drop")) == 2
    cached = load(rows, tokenizer, vision=vision, bad_images="drop")
    assert cached.counts.from_cache
    assert np.array_equal(cached.batch([1]).extras["pixel_values"][0], by_transformers(vision, files / "b.png")[0])

    picture(64, 32, seed=9).save(files / "late.png")
    complete = load(rows, tokenizer, vision=vision, bad_images="drop")
    assert (complete.counts.from_cache, len(complete)) == (False, 3)
    picture(96, 96, seed=9).save(files / "b.png")
    changed = load(rows, tokenizer, vision=vision, bad_images="drop")
    assert (changed.counts.from_cache, changed.counts.image_tokens) == (False, complete.counts.image_tokens + 9 - 1)


def test_what_decides_the_tokens_of_images_decides_the_cache_file(load, tokenizer, make_vision, files):
    settings = {"vision": make_vision(tokenizer)}, {"vision": make_vision(tokenizer, longest_edge=32 * 64)}
    first, smaller = (load([row("a.png")], tokenizer, **chosen) for chosen in settings)
    assert first.cache_file != smaller.cache_file
    assert (first.counts.image_tokens, smaller.counts.image_tokens) == (6, 1)
    others = (
        {"vision": make_vision(tokenizer, max_pixels=2**19)},
        {"vision": make_vision(tokenizer), "bad_images": "drop"},
    )
    assert len({load([row("a.png")], tokenizer, **chosen).cache_file for chosen in (*settings, *others)}) == 4


def test_another_pillow_looks_at_the_images_again(load, tokenizer, vision, files, monkeypatch):
    """It may read a file that the one before could not, or turn it another way."""
    first = load([row("a.png")], tokenizer, vision=vision)
    monkeypatch.setattr(vision_module.metadata, "version", lambda name: "0.1" if name == "pillow" else version(name))
    second = load([row("a.png")], tokenizer, vision=vision)
    assert not second.counts.from_cache
    assert first.cache_file != second.cache_file


def test_an_image_that_changes_during_a_run_is_noticed(load, tokenizer, vision, files):
    dataset = load([row("b.png"), row("a.png")], tokenizer, vision=vision)
    status = (files / "a.png").stat()
    picture(64, 96, seed=8).save(files / "a.png")
    os.utime(files / "a.png", ns=(status.st_atime_ns, status.st_mtime_ns))
    with pytest.raises(ImageError, match=r"sample 1 of .*, image 1 has changed since the data was tokenized"):
        dataset.batch([0, 1])
    (files / "b.png").unlink()
    with pytest.raises(ImageError, match=r"sample 0 of .*, image 1: there is no file"):
        dataset.batch([0])


def test_a_preview_shows_an_image_in_one_piece(load, tokenizer, vision, files):
    dataset = load([row("a.png", "b.png")], tokenizer, vision=vision)
    (sample,) = preview(dataset, tokenizer).samples
    assert "".join(token.text for token in sample.tokens) == (
        "<|im_start|>user\n<|vision_start|><image 1: 6 tokens, 64x96><|vision_end|>"
        "<|vision_start|><image 2: 1 tokens, 32x32><|vision_end|>what?<|im_end|>\n<|im_start|>assistant\na cat<|im_end|>\n"
    )
    assert "".join(token.text for token in sample.tokens if token.loss) == "a cat<|im_end|>"
    assert sample.length == len(dataset.columns.input_ids)
