"""Files, folders and saved datasets of every kind give the same rows; what cannot be read is named."""

import json

import datasets
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from row_files import ROWS, WRITERS

from skyrl_engine.config.schema import DataConfig
from skyrl_engine.data.dataset import load_columns
from skyrl_engine.data.sources.locate import open_source
from skyrl_engine.errors import DataError


@pytest.fixture(autouse=True)
def quiet_datasets():
    datasets.disable_progress_bars()


@pytest.mark.parametrize("name", WRITERS)
def test_every_kind_of_source_gives_the_same_rows(tmp_path, make_tokenizer, name):
    path = tmp_path / name
    WRITERS[name](path)
    source = open_source(str(path), split="train")
    assert [row.values["messages"] for row in source.rows()] == [row["messages"] for row in ROWS]
    assert [row.number for row in source.rows()] == list(range(5))
    assert len(source) == 5
    again = open_source(str(path), split="train")
    assert again.digest == source.digest
    dataset = load_columns(DataConfig(train=str(path), cache=str(tmp_path / "cache")), make_tokenizer(), split="train")
    assert len(dataset) == 5


@pytest.mark.parametrize("name", WRITERS)
def test_a_row_alone_is_that_of_the_whole(tmp_path, name):
    WRITERS[name](tmp_path / name)
    source = open_source(str(tmp_path / name), split="train")
    if name.endswith(".gz"):
        with pytest.raises(DataError, match="is packed"):
            source.row(3)
    else:
        assert [source.row(number) for number in (4, 0, 3, 1)] == [list(source.rows())[number] for number in (4, 0, 3, 1)]


def test_rows_alone_are_counted_over_files_and_past_blank_lines(tmp_path):
    (tmp_path / "a.jsonl").write_text('\n{"text": "a"}\n\n{"text": "b"}\n', encoding="utf-8")
    (tmp_path / "b.jsonl").write_text('{"text": "c"}', encoding="utf-8")
    source = open_source(str(tmp_path), split="train")
    assert [source.row(number) for number in range(3)] == list(source.rows())
    assert source.row(1).where.endswith("a.jsonl line 4")
    assert source.row(2).folder == tmp_path


def test_a_folder_gives_its_split_s_files_in_order(tmp_path):
    (tmp_path / "data").mkdir()
    for name, values in {"train-1.jsonl": ["c"], "train-0.jsonl": ["a", "b"], "test.jsonl": ["d"]}.items():
        (tmp_path / "data" / name).write_text("".join(json.dumps({"text": v}) + "\n" for v in values), encoding="utf-8")
    (tmp_path / "README.md").write_text("nothing", encoding="utf-8")
    rows = list(open_source(str(tmp_path), split="train").rows())
    assert [row.values["text"] for row in rows] == ["a", "b", "c"]
    assert [row.where.split("/")[-1] for row in rows] == ["train-0.jsonl line 1", "train-0.jsonl line 2", "train-1.jsonl line 1"]
    assert [row.values["text"] for row in open_source(str(tmp_path), split="test", subset="data").rows()] == ["d"]
    with pytest.raises(DataError, match=r"no file of the split 'validation', only of test, train"):
        open_source(str(tmp_path), split="validation")
    with pytest.raises(DataError, match=r"the subset 'dat' is no folder .*Did you mean .*data\?"):
        open_source(str(tmp_path), split="train", subset="dat")


def test_a_folder_without_split_names_is_read_whole(tmp_path):
    for name in ("b.jsonl", "a.jsonl"):
        (tmp_path / name).write_text(json.dumps({"text": name}) + "\n", encoding="utf-8")
    assert [row.values["text"] for row in open_source(str(tmp_path), split="train").rows()] == ["a.jsonl", "b.jsonl"]


def test_a_saved_dataset_without_the_split(tmp_path):
    WRITERS["saved_splits"](tmp_path / "saved")
    with pytest.raises(DataError, match="no split 'test', only train"):
        open_source(str(tmp_path / "saved"), split="test")


def test_a_row_in_the_middle_of_a_saved_dataset_is_named_by_its_number(tmp_path, make_tokenizer):
    rows = [{"text": "fine"}] * 1500 + [{"text": None}]
    datasets.Dataset.from_list(rows).save_to_disk(str(tmp_path / "saved"))
    data = DataConfig(train=str(tmp_path / "saved"), cache=str(tmp_path / "cache"))
    with pytest.raises(DataError, match=r"sample 1500 \(.*saved row 1500\)"):
        load_columns(data, make_tokenizer(None), split="train")


def test_keys_that_arrow_adds_to_structs_are_removed(tmp_path):
    messages = [{"role": "assistant", "tool_calls": [{"a": 1}]}, {"role": "user", "content": "x", "tool_calls": [{"b": 2}]}]
    pq.write_table(pa.Table.from_pylist([{"messages": messages}]), tmp_path / "a.parquet")
    (row,) = open_source(str(tmp_path / "a.parquet"), split="train").rows()
    assert row.values["messages"] == messages


def test_tokens_in_arrow_are_read_as_arrays(tmp_path):
    table = pa.table({"input_ids": pa.array([[1, 2], [3]], pa.list_(pa.int32())), "num_actions": [1, 1]})
    pq.write_table(table, tmp_path / "a.parquet")
    rows = list(open_source(str(tmp_path / "a.parquet"), split="train").rows())
    assert rows[1].values["input_ids"].tolist() == [3]
    assert rows[0].values["input_ids"].base is not None


@pytest.mark.parametrize(
    ("name", "content", "message"),
    [
        ("a.jsonl", b'{"text": "x"}\n\n{"text": \n', r"a.jsonl line 3 is not valid JSON: Expecting value at character 11"),
        ("a.jsonl", b'{"text": "x"}\n[1]\n', r"a.jsonl line 2 holds a JSON list"),
        ("a.jsonl", b'{"text": "\xff"}\n', r"a.jsonl line 1 is not UTF-8: invalid start byte at byte 10"),
        ("a.jsonl", b'{"text": "x\n', r"a.jsonl line 1 is not valid JSON: Invalid control character at character 12"),
        (
            "a.jsonl",
            b'{"text": "x"}\n{"text": "y", "text": "z"}\n',
            r"a.jsonl line 2 has the key 'text' twice in one object\. Remove",
        ),
        ("a.jsonl", b'{"text": "x", "of": [{"b": 1, "a": 2, "a": 2}]}\n', r"a.jsonl line 1 has the key 'a' twice"),
        ("a.json", b'[{"text": "x"}, {"text": "y", "text": "z"}]', r"a.json has the key 'text' twice"),
        ("a.json", b'[{"text": "x"}', r"a.json is not valid JSON"),
        ("a.json", b'[{"text": "x"}, 3]', r"a.json element 1 holds a JSON int"),
        ("a.parquet", b"PAR1 not", r"a.parquet cannot be read as Parquet"),
        ("a.arrow", b"ARROW1 not", r"a.arrow cannot be read as Arrow"),
        ("a.xlsx", b"text\nx", r"a.xlsx is not in a format that can be read"),
        ("a.jsonl", b"\n", r"has no rows"),
        ("a.jsonl.gz", b"not gzip", r"a.jsonl.gz cannot be read"),
    ],
)
def test_files_that_cannot_be_read_are_named(tmp_path, make_tokenizer, name, content, message):
    (tmp_path / name).write_bytes(content)
    with pytest.raises(DataError, match=message):
        load_columns(DataConfig(train=str(tmp_path / name), cache=str(tmp_path / "cache")), make_tokenizer(None), split="train")


def test_locations_that_do_not_exist(tmp_path):
    (tmp_path / "train.jsonl").touch()
    with pytest.raises(DataError, match=r"does not exist. Did you mean .*train.jsonl\?"):
        open_source(str(tmp_path / "trian.jsonl"), split="train")
    with pytest.raises(DataError, match=r"does not begin with its protocol. Name a file"):
        open_source("x=https://example.com/train.jsonl", split="train")
    with pytest.raises(DataError, match=r"the file .* has no subsets"):
        open_source(str(tmp_path / "train.jsonl"), split="train", subset="x")
    with pytest.raises(DataError, match=r"/dev/null is neither a file nor a folder"):
        open_source("/dev/null", split="train")
    (tmp_path / "empty").mkdir()
    with pytest.raises(DataError, match="holds no data file"):
        open_source(str(tmp_path / "empty"), split="train")


def test_a_hub_id_is_loaded_with_its_subset_and_split(monkeypatch):
    def load_dataset(path, name, *, split):
        return datasets.Dataset.from_list([{"text": f"{path} {name} {split}"}])

    monkeypatch.setattr(datasets, "load_dataset", load_dataset)
    source = open_source("somebody/something", split="validation", subset="small")
    assert [(row.where, row.values["text"]) for row in source.rows()] == [
        ("somebody/something row 0", "somebody/something small validation")
    ]
    assert source.digest != open_source("somebody/something", split="train", subset="small").digest


def test_a_hub_id_without_network_is_a_clear_error(tmp_path, monkeypatch):
    monkeypatch.setattr("datasets.config.HF_HUB_OFFLINE", True)
    monkeypatch.setattr("datasets.config.HF_DATASETS_CACHE", tmp_path)
    with pytest.raises(DataError, match="'nobody/nothing' is no file or folder here and cannot be loaded from the hub"):
        open_source("nobody/nothing", split="train")


@pytest.mark.parametrize("weights", ["model.safetensors", "pytorch_model-00001-of-00002.bin", "tokenizer.json"])
def test_a_model_s_folder_is_told_from_data(tmp_path, weights):
    (tmp_path / "config.json").write_text('{\n  "model_type": "qwen3"\n}', encoding="utf-8")
    (tmp_path / weights).touch()
    with pytest.raises(DataError, match=r"is the folder of a model, not of data\. Name the model in model\.path"):
        open_source(str(tmp_path), split="train")


def rows_of(location, **settings):
    return [dict(row.values) for row in open_source(str(location), split="train", **settings).rows()]


@pytest.mark.parametrize(
    ("name", "text"),
    [
        ("a.csv", 'question,answer\n"1, 2?","say ""3"""\n\nBärbel,"two\nlines"\n'),
        ("a.csv", '\ufeffquestion;answer\r\n"1, 2?";"say ""3"""\r\nBärbel;"two\nlines"\r\n'),
        ("a.tsv", 'question\tanswer\n1, 2?\t"say ""3"""\nBärbel\t"two\nlines"\n'),
    ],
)
def test_csv_is_read_with_the_names_of_its_first_line(tmp_path, name, text):
    (tmp_path / name).write_text(text, encoding="utf-8", newline="")
    expected = [{"question": "1, 2?", "answer": 'say "3"'}, {"question": "Bärbel", "answer": "two\nlines"}]
    source = open_source(str(tmp_path / name), split="train")
    assert rows_of(tmp_path / name) == expected
    assert len(source) == 2
    assert source.row(1).values == expected[1]
    assert [row.where.partition(" line ")[2] for row in source.rows()] == (["2", "4"] if "\n\n" in text else ["2", "3"])


def test_a_csv_value_may_be_as_long_as_a_conversation(tmp_path):
    (tmp_path / "a.csv").write_text(f"text\n{'long ' * 50_000}\n", encoding="utf-8")
    assert len(rows_of(tmp_path / "a.csv")[0]["text"]) == 250_000


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (b"a,b\n1,2\n3\n", r"a\.csv line 3 has 1 values for 2 columns"),
        (b"a,b\n1,2,3\n", r"a\.csv line 2 has 3 values for 2 columns"),
        (b'a,b\n1,2\n"3,4\n', r"a\.csv line 3 is not valid CSV"),
        (b"a,a\n1,2\n", r"a\.csv line 1 does not name its columns, each by a name of its own: 'a', 'a'"),
        (b"a,\n1,2\n", r"a\.csv line 1 does not name its columns"),
        (b"", r"a\.csv line 1 does not name its columns, each by a name of its own: nothing"),
        (b"a\n\xff\n", r"a\.csv is not UTF-8"),
    ],
)
def test_a_csv_that_cannot_be_meant_is_refused_by_line(tmp_path, content, message):
    (tmp_path / "a.csv").write_bytes(content)
    with pytest.raises(DataError, match=message):
        len(open_source(str(tmp_path / "a.csv"), split="train"))


def test_columns_are_read_under_the_names_of_data_map(tmp_path):
    (tmp_path / "a.jsonl").write_text('{"question": "q", "answer": "a", "prompt": "other", "kept": 1}\n', encoding="utf-8")
    names = {"prompt": "question", "completion": "answer"}
    assert rows_of(tmp_path / "a.jsonl", names=names) == [{"prompt": "q", "completion": "a", "kept": 1}]
    swapped = {"question": "answer", "answer": "question"}
    assert rows_of(tmp_path / "a.jsonl", names=swapped) == [{"question": "a", "answer": "q", "prompt": "other", "kept": 1}]
    with pytest.raises(
        DataError, match=r"sample 0 .* has no column 'questions', which data\.map\.prompt names.* Write data\.map\.prompt=question"
    ):
        rows_of(tmp_path / "a.jsonl", names={"prompt": "questions"})


def test_a_list_of_datasets_is_read_in_order(tmp_path):
    (tmp_path / "b.jsonl").write_text('{"text": "b"}\n', encoding="utf-8")
    (tmp_path / "folder").mkdir()
    (tmp_path / "folder" / "a.csv").write_text("text\na\n", encoding="utf-8")
    both = [str(tmp_path / "b.jsonl"), str(tmp_path / "folder")]
    source = open_source(both, split="train")
    assert [row.values["text"] for row in source.rows()] == ["b", "a"]
    assert source.name == ", ".join(both)
    assert source.digest != open_source(both[::-1], split="train").digest


def test_rows_of_another_format_in_a_later_file_are_refused_by_line(tmp_path, make_tokenizer):
    (tmp_path / "a.jsonl").write_text('{"prompt": "a", "response": "b"}\n', encoding="utf-8")
    (tmp_path / "b.jsonl").write_text('{"text": "b"}\n', encoding="utf-8")
    data = DataConfig(train=(str(tmp_path / "a.jsonl"), str(tmp_path / "b.jsonl")), cache=str(tmp_path / "cache"))
    with pytest.raises(
        DataError, match=r"sample 1 \(.*b\.jsonl line 1\) has no column 'prompt', which format 'prompt_completion' needs"
    ):
        load_columns(data, make_tokenizer("chatml"), split="train")


def test_the_cache_knows_the_names_of_columns(tmp_path, make_tokenizer, marked):
    tokenizer = make_tokenizer(None)
    (tmp_path / "a.csv").write_text("one,two\nleft,right\n", encoding="utf-8")
    texts = []
    for names in ({"prompt": "one", "completion": "two"}, {"prompt": "two", "completion": "one"}):
        data = DataConfig(train=str(tmp_path / "a.csv"), map=names, cache=str(tmp_path / "cache"))
        texts.append(marked(load_columns(data, tokenizer, split="train"), tokenizer))
    assert texts == ["left[[right<|end|>]]", "right[[left<|end|>]]"]


def test_tables_beside_other_data_files_of_a_folder_are_passed_over(tmp_path):
    """They are often statistics; alone in a folder they are the data."""
    (tmp_path / "notes.csv").write_text("text\na\n", encoding="utf-8")
    assert rows_of(tmp_path) == [{"text": "a"}]
    (tmp_path / "b.jsonl").write_text('{"text": "b"}\n', encoding="utf-8")
    assert rows_of(tmp_path) == [{"text": "b"}]
