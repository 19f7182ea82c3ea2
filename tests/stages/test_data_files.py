"""Files of every format: the same rows come out, in order, and damage has a place."""

import csv
import gzip
import io
import json
import sys
from pathlib import Path
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from stages.base import Context, StageError
from stages.data import files, readers, shapes
from stages.data.files import DataFile
from stages.prepare_data import PrepareData, prepare_data
from tests.data_rows import assistant, both, good, source, user
from tests.small import python

TEXT = 'naïve "quoted", \u2028 \U0001f600 line\nbreak\ttab;'
ROWS: list[dict[str, Any]] = [
    {"prompt": f"{n} {TEXT}", "completion": TEXT, "score": n} for n in range(1300)
]


def delimited(delimiter: str, *, end: str = "\n") -> bytes:
    text = io.StringIO(newline="")
    writer = csv.writer(text, delimiter=delimiter, lineterminator=end)
    writer.writerow(list(ROWS[0]))
    writer.writerows(row.values() for row in ROWS)
    return text.getvalue().encode()


def parquet() -> bytes:
    import pyarrow.parquet

    sink = io.BytesIO()
    pyarrow.parquet.write_table(pyarrow.Table.from_pylist(ROWS), sink, row_group_size=500)
    return sink.getvalue()


def arrow(kind: str) -> bytes:
    import pyarrow

    table = pyarrow.Table.from_pylist(ROWS)
    sink = io.BytesIO()
    with getattr(pyarrow.ipc, kind)(sink, table.schema) as writer:
        writer.write_table(table, max_chunksize=900)
    return sink.getvalue()


def same_names(kind: str) -> bytes:
    """A table with two columns of one name."""
    import pyarrow.parquet

    columns = [pyarrow.array(["a"]), pyarrow.array(["b"])]
    table = pyarrow.Table.from_arrays(columns, names=["question", "question"])
    sink = io.BytesIO()
    if kind == "parquet":
        pyarrow.parquet.write_table(table, sink)
        return sink.getvalue()
    with pyarrow.ipc.new_stream(sink, table.schema) as writer:
        writer.write_table(table)
    return sink.getvalue()


def zstd(content: bytes) -> bytes:
    import pyarrow

    return pyarrow.Codec("zstd").compress(content, asbytes=True)


LINES = "\n".join(json.dumps(row, ensure_ascii=False) for row in ROWS).encode()
ARRAY = json.dumps(ROWS).encode()
OBJECT_A_LINE = b"[\n" + b",\n".join(LINES.split(b"\n")) + b"\n]\n"


def content(name: str) -> bytes:
    plain = {
        "rows.jsonl": lambda: LINES,
        "rows.json": lambda: ARRAY,
        "lined_array.json": lambda: OBJECT_A_LINE,
        "pretty.json": lambda: json.dumps(ROWS, indent=2).encode(),
        "rows.csv": lambda: delimited(","),
        "crlf_bom.csv": lambda: b"\xef\xbb\xbf" + delimited(",", end="\r\n"),
        "rows.tsv": lambda: delimited("\t"),
        "rows.parquet": parquet,
        "stream.arrow": lambda: arrow("new_stream"),
        "file.arrow": lambda: arrow("new_file"),
    }
    base, _, compression = name.rpartition(".")
    if compression in ("gz", "zst"):
        return {"gz": gzip.compress, "zst": zstd}[compression](plain[base]())
    return plain[name]()


NAMES = [
    "rows.jsonl", "rows.json", "lined_array.json", "pretty.json", "rows.csv", "crlf_bom.csv",
    "rows.tsv", "rows.parquet", "stream.arrow", "file.arrow", "rows.jsonl.gz", "rows.jsonl.zst",
    "rows.json.gz", "rows.csv.zst", "rows.tsv.gz", "rows.parquet.gz", "file.arrow.zst",
]  # fmt: skip


@pytest.mark.parametrize("name", NAMES)
def test_every_format_gives_the_same_rows(tmp_path: Path, name: str) -> None:
    (tmp_path / name).write_bytes(content(name))
    counted: list[int] = []
    found = list(readers.read(DataFile(tmp_path / name, name, name), tick=counted.append))
    assert [record.fault for record in found] == [None] * len(ROWS)
    values = [record.value for record in found]
    numbers = [int(value.pop("score")) for value in values]
    assert numbers == list(range(len(ROWS)))
    assert values == [{k: row[k] for k in ("prompt", "completion")} for row in ROWS]
    assert sum(counted) > 0 and str(found[7].place).startswith(name)


def test_cells_of_a_table_may_hold_json_and_may_be_empty(tmp_path: Path) -> None:
    turns = json.dumps([user("q"), assistant("a")])
    text = io.StringIO()
    csv.writer(text).writerows(
        [["messages", "system"], [turns, ""], [turns, "s"], ["[1", "s", "x"]]
    )
    (tmp_path / "t.csv").write_text(text.getvalue())
    one, two, three = readers.read(DataFile(tmp_path / "t.csv", "t.csv", "t.csv"))
    assert one.value == {"messages": turns, "system": None}
    form = shapes.detect([one.value], accepted=("conversations",), named=None)
    assert form and shapes.canonical(one.value, form) == {"messages": [user("q"), assistant("a")]}
    assert two.value["system"] == "s" and str(two.place) == "t.csv:3"
    assert three.fault and three.fault.rule == "wrong_number_of_cells"


def test_a_json_row_larger_than_the_window_is_read(tmp_path: Path) -> None:
    rows = [{"text": "x" * n} for n in (10, 3_000_000, 5, 2_500_000)]
    for name, text in (("a.json", json.dumps(rows)), ("b.json", json.dumps(rows, indent=1))):
        (tmp_path / name).write_text(text)
        found = readers.read(DataFile(tmp_path / name, name, name))
        assert [record.value for record in found] == rows


def test_readme_and_licence_beside_data_are_no_data(tmp_path: Path) -> None:
    folder = source(tmp_path, {"a.jsonl": good(3), "README.md": "# hi", "LICENSE": "MIT"})
    assert [file.name for file in files.of_input(folder, what="x")] == ["a.jsonl"]


def test_a_name_that_is_no_text_is_refused(tmp_path: Path) -> None:
    folder = source(tmp_path, {"bad\udcff.jsonl": good(3)})
    with pytest.raises(StageError, match=r"bad\\udcff\.jsonl: the name is not UTF-8; rename"):
        files.of_input(folder, what="x")


def test_a_saved_dataset_is_a_folder_of_arrow_files(tmp_path: Path) -> None:
    from datasets import Dataset

    Dataset.from_list(good(50)).save_to_disk(tmp_path / "in" / "data")
    prepare_data(
        PrepareData(test_fraction=0.5), Context(tmp_path / "out"), conversations=tmp_path / "in"
    )
    assert len(both(tmp_path / "out")) == 50


@pytest.mark.parametrize(
    ("given", "shown"),
    [
        ({"kind": "local_data", "path": "/home/me/chats.jsonl"}, "/home/me/chats.jsonl:1:"),
        ({"kind": "local_data", "path": "/home/me"}, "/home/me/chats.jsonl:1:"),
        (
            {"kind": "hub_data", "repo": "me/chats", "revision": "main"},
            "me/chats@main: chats.jsonl:1:",
        ),
    ],
)
def test_messages_name_the_file_as_it_was_given(tmp_path: Path, given: Any, shown: str) -> None:
    folder = source(tmp_path / "in", {"chats.jsonl": '{"messages": '})
    (folder / "source.json").write_text(json.dumps({"source": given}))
    with pytest.raises(StageError) as caught:
        prepare_data(PrepareData(), Context(tmp_path / "out"), conversations=folder)
    assert str(caught.value).startswith(shown)


@pytest.mark.parametrize(
    ("name", "damage", "message"),
    [
        ("q.csv", b'prompt,completion\na,b\nc,"d', r"q\.csv:3: not a table"),
        ("h.csv", b"prompt,prompt\na,b\n", r"h\.csv:1: the header must name every column once"),
        ("t.parquet", same_names("parquet"), r"t\.parquet: the header must name every column"),
        ("t.arrow", same_names("arrow"), r"t\.arrow: the header must name every column"),
        ("cut.arrow", arrow("new_stream")[:-8], r"cut\.arrow: damaged .* after row 1300 \(it does"),
        ("two.arrow", 2 * arrow("new_stream"), r"two\.arrow: damaged .* after row 1300 \(it does"),
        ("u.tsv", b"prompt\tcompletion\na\t\xff\n", r"u\.tsv:2: not UTF-8 \(byte 0xff\)"),
        ("p.parquet", b"PAR1 nothing", r"p\.parquet: damaged Parquet file, after row 0"),
        ("a.arrow", b"nothing", r"a\.arrow: damaged Arrow file, after row 0"),
        ("z.jsonl.zst", b"nothing", r"z\.jsonl\.zst: damaged zstd file"),
        ("m.json", b'[{"a": 1}] [2]', r"m\.json:1:12: not JSON \(more follows the array\)"),
        ("c.json", b'[\n{"a": 1}\n{"a": 2}]', r"c\.json:3:1: not JSON \(Expecting ','\)"),
    ],
)
def test_a_damaged_file_is_named_with_its_place(
    tmp_path: Path, name: str, damage: bytes, message: str
) -> None:
    folder = source(tmp_path / "in", {name: damage})
    with pytest.raises(StageError, match=message):
        prepare_data(PrepareData(), Context(tmp_path / "out"), conversations=folder)


WHOLE = {name: content(name) for name in ("rows.csv", "rows.parquet", "stream.arrow", "rows.json")}


@settings(
    max_examples=80, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture]
)
@given(
    name=st.sampled_from(sorted(WHOLE)),
    packed=st.sampled_from(["", ".gz", ".zst"]),
    where=st.floats(0, 1),
    length=st.integers(0, 300),
    patch=st.binary(max_size=16),
)
def test_damage_ends_in_rows_or_in_an_error_with_a_place(
    tmp_path_factory: pytest.TempPathFactory,
    name: str,
    packed: str,
    where: float,
    length: int,
    patch: bytes,
) -> None:
    data = WHOLE[name]
    if packed:
        data = {".gz": lambda: gzip.compress(data, 1), ".zst": lambda: zstd(data)}[packed]()
    at = int(where * len(data))
    path = tmp_path_factory.mktemp("damaged") / f"{name}{packed}"
    path.write_bytes(data[:at] + patch + data[at + length :])
    try:
        for record in readers.read(DataFile(path, path.name, path.name)):
            assert record.place.file == path.name
    except StageError as error:
        assert str(error).startswith(path.name)


def test_memory_does_not_grow_with_the_rows(tmp_path: Path) -> None:
    """Sixteen times the rows: what grows is the ledger, forty bytes a row, and no more."""
    peaks = []
    for number in (2_000, 32_000):
        folder = tmp_path / str(number)
        (folder / "data").mkdir(parents=True)
        with (folder / "data" / "rows.jsonl").open("w") as file:
            for n in range(number):
                file.write(
                    json.dumps({"prompt": f"{n} " * 60, "completion": f"{n} x " * 90}) + "\n"
                )
        code = (
            "import resource, sys; from pathlib import Path\n"
            "from stages.base import Context\n"
            "from stages.prepare_data import PrepareData, prepare_data\n"
            "prepare_data(PrepareData(), Context(Path(sys.argv[1]) / 'out'),"
            " conversations=Path(sys.argv[1]))\n"
            "print(resource.getrusage(resource.RUSAGE_SELF).ru_maxrss // 1024)\n"
        )
        done = python("-c", code, str(folder))
        assert done.returncode == 0, done.stderr
        peaks.append(int(done.stdout))
    size = (tmp_path / "32000" / "data" / "rows.jsonl").stat().st_size >> 20
    if sys.platform == "linux":
        assert size > 20 and peaks[1] - peaks[0] < 16, (size, peaks)
