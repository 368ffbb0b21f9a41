"""The same five rows in files of every format that sources read."""

import gzip
import json

import datasets
import pyarrow as pa
import pyarrow.parquet as pq

ROWS = [
    {"messages": [{"role": "user", "content": f"q{i}"}, {"role": "assistant", "content": f"a{i}"}], "note": None if i else "x"}
    for i in range(5)
]


def write_jsonl(path):
    path.write_text("\n".join(json.dumps(row) for row in ROWS) + "\n\n", encoding="utf-8")


def write_gzip(path):
    with gzip.open(path, "wt", encoding="utf-8") as file:
        file.writelines(json.dumps(row) + "\n" for row in ROWS)


def write_ipc(path):
    table = pa.Table.from_pylist(ROWS)
    with pa.OSFile(str(path), "wb") as file, pa.ipc.new_file(file, table.schema) as writer:
        writer.write_table(table, max_chunksize=2)


def write_stream(path):
    table = pa.Table.from_pylist(ROWS)
    with pa.OSFile(str(path), "wb") as file, pa.ipc.new_stream(file, table.schema) as writer:
        writer.write_table(table, max_chunksize=2)


WRITERS = {
    "rows.jsonl": write_jsonl,
    "lines.json": write_jsonl,
    "rows.jsonl.gz": write_gzip,
    "array.json": lambda path: path.write_text(json.dumps(ROWS), encoding="utf-8"),
    "rows.parquet": lambda path: pq.write_table(pa.Table.from_pylist(ROWS), path, row_group_size=2),
    "file.arrow": write_ipc,
    "stream.arrow": write_stream,
    "saved": lambda path: datasets.Dataset.from_list(ROWS).save_to_disk(str(path)),
    "saved_splits": lambda path: datasets.DatasetDict({"train": datasets.Dataset.from_list(ROWS)}).save_to_disk(str(path)),
}
