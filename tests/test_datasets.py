import json
import os
import subprocess
import sys
from itertools import islice

import pyarrow as pa
import pytest
from hypothesis import given
from hypothesis import strategies as st
from pyarrow import parquet

from hf_kvcache.errors import InputError
from hf_kvcache.evaluation.datasets import load_text, split_articles


def test_stdlib_is_several_hundred_kilobytes_in_a_fixed_order():
    documents = load_text("stdlib")
    assert sum(map(len, documents)) > 300_000
    assert list(documents) == list(documents)
    assert next(iter(documents)).startswith('The "assert" statement')


def test_plain_text_is_one_document(tmp_path):
    path = tmp_path / "a.txt"
    path.write_text("One.\n\nTwo = 2\n = = not an article = = \n", encoding="utf-8")
    assert list(load_text(f"file:{path}")) == [path.read_text(encoding="utf-8")]


def test_wikitext_is_split_at_articles_and_not_at_sections_or_formulas(tmp_path):
    first = " = Du Fu = \n Poet . \n = = Life = = \n x \n = 1 henry and capacitance C = \n y \n"
    second = " = 1933 Treasure Coast hurricane = \n Wind . \n"
    path = tmp_path / "wiki.raw"
    path.write_text(" \n" + first + second, encoding="utf-8")
    assert list(load_text(f"file:{path}")) == [first, second]


def test_wikitext_2_has_its_sixty_articles(wikitext_file):
    if not wikitext_file.is_file():
        pytest.skip("WikiText-2 does not lie beside this checkout")
    documents = list(load_text(f"file:{wikitext_file}"))
    assert len(documents) == 60
    assert "".join(documents) == wikitext_file.read_text(encoding="utf-8")


SPECIAL = [" = A = ", " = = A = = ", " = ", " =  = ", "a = b = "]
LINE = st.one_of(st.text(max_size=6), st.sampled_from(SPECIAL))


@given(st.lists(LINE.map(lambda line: line.replace("\n", "") + "\n")))
def test_splitting_loses_nothing_and_opens_every_document_but_the_first_with_a_title(lines):
    documents = list(split_articles(lines))
    assert "".join(documents) == "".join(lines)
    assert all(document.startswith(" = ") for document in documents[1:])
    assert len(documents) == max(1, sum(line == " = A = \n" for line in lines[1:]) + 1)


def test_jsonl_and_parquet_give_the_rows_without_the_blank_ones(tmp_path):
    texts = ["One = 1\n", "  ", "Zwei – 二"]
    rows = tmp_path / "a.jsonl"
    lines = [json.dumps({"id": 1, "text": text}) for text in texts]
    rows.write_text("\n".join(lines) + "\n\n", encoding="utf-8")
    columns = tmp_path / "a.parquet"
    parquet.write_table(pa.table({"id": [1, 2, 3], "text": texts, "body": ["a", "b", "c"]}), columns)
    assert list(load_text(f"file:{rows}")) == [texts[0], texts[2]]
    assert list(load_text(f"file:{columns}")) == [texts[0], texts[2]]
    assert list(load_text(f"file:{columns}", column="body")) == ["a", "b", "c"]


def test_reading_is_lazy(tmp_path):
    path = tmp_path / "a.jsonl"
    path.write_text('{"text": "good"}\n{"text": "also good"}\nnot JSON\n', encoding="utf-8")
    documents = load_text(f"file:{path}")
    assert list(islice(documents, 2)) == ["good", "also good"]
    with pytest.raises(InputError, match="line 3 does not parse"):
        list(documents)


@pytest.mark.parametrize(
    ("name", "content", "message"),
    [
        ("a.txt", b"", "none: every document is blank"),
        ("a.txt", b" \n\n", "none: every document is blank"),
        ("a.jsonl", b"", "none: every document is blank"),
        ("a.txt", b"\xff\xfe\x00", "UTF-8"),
        ("a.jsonl", b"\xff\xfe\x00", "UTF-8"),
        ("a.jsonl", b'{"text": 3}', "holds a int"),
        ("a.jsonl", b"[1]", "line 1 is a list"),
        ("a.jsonl", b'{"body": "x", "id": 1}', r"\['body', 'id'\]"),
        ("a.parquet", b"no parquet", "expected a Parquet file"),
    ],
)
def test_bad_files_are_refused_at_once(tmp_path, name, content, message):
    (tmp_path / name).write_bytes(content)
    with pytest.raises(InputError, match=message):
        load_text(f"file:{tmp_path / name}")


def test_parquet_without_the_column_names_those_it_has(tmp_path):
    parquet.write_table(pa.table({"id": [1], "body": ["a"]}), tmp_path / "a.parquet")
    with pytest.raises(InputError, match=r"\['body', 'id'\]"):
        load_text(f"file:{tmp_path / 'a.parquet'}")


def test_a_missing_file_is_named():
    with pytest.raises(InputError, match=r"no-such-file\.txt, but there is none"):
        load_text("file:no-such-file.txt")


@pytest.mark.parametrize("spec", ["", "a:b:c:d", "a::test"])
def test_a_malformed_hub_spec_is_refused(spec):
    with pytest.raises(InputError, match="ID:CONFIG:SPLIT"):
        load_text(spec)


@pytest.mark.parametrize("spec", ["wikitext-2", "nobody/no-such-data"])
def test_an_unreachable_hub_leads_to_a_file_or_stdlib(tmp_path, spec):
    # In a process of its own: the hub libraries read their settings when they are imported.
    code = f"from hf_kvcache.evaluation.datasets import load_text; load_text({spec!r})"
    environment = {**os.environ, "HF_HUB_OFFLINE": "1", "HF_HOME": str(tmp_path)}
    result = subprocess.run([sys.executable, "-c", code], env=environment, capture_output=True, text=True, check=False)
    assert "InputError" in result.stderr
    assert "pass file:PATH (.txt, .jsonl or .parquet), or stdlib" in result.stderr
