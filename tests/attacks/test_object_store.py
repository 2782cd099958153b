"""A real S3 server, started here, spoken to over HTTP through the package that users would take."""

from __future__ import annotations

import uuid
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from architectures import tiny_model
from victim import ALL, BLOCKS, SIZE, TEXT

from hf_kvcache import PrefixStore, StorageError

pytest.importorskip("s3fs", reason="s3fs, fsspec's file system for S3, is not installed")
server_module = pytest.importorskip("moto.server", reason="moto, the S3 server of the tests, is not installed")

BUCKET = "prefixes"


@pytest.fixture(scope="module")
def options() -> Iterator[dict[str, Any]]:
    server = server_module.ThreadedMotoServer(ip_address="127.0.0.1", port=0, verbose=False)
    server.start()
    host, port = server.get_host_and_port()
    options = {
        "endpoint_url": f"http://{host}:{port}",
        "key": "key",
        "secret": "secret",
        "config_kwargs": {"retries": {"max_attempts": 0}, "connect_timeout": 2},
    }
    files_of(options).mkdir(BUCKET)
    yield options
    server.stop()


def files_of(options: dict[str, Any]) -> Any:
    import s3fs

    return s3fs.S3FileSystem(**options, skip_instance_cache=True)


def opened(url: str, options: dict[str, Any], **more: Any) -> PrefixStore:
    """As another process would: with connections and listings of its own."""
    options = {**options, "skip_instance_cache": True}
    return PrefixStore.open(url, tiny_model("llama"), block_size=SIZE, file_options=options, **more)


def generate(store: PrefixStore, ids: torch.Tensor = TEXT) -> int:
    """The answer is right; tells how many tokens of the prompt were found."""
    before = store.stats().hit_tokens
    output = store.generate(store.model, input_ids=ids, max_new_tokens=6, do_sample=False)
    expected = store.model.generate(ids, attention_mask=torch.ones_like(ids), max_new_tokens=6, do_sample=False)
    assert torch.equal(output, expected)
    store.check_integrity()
    return store.stats().hit_tokens - before


@pytest.fixture
def url() -> str:
    return f"s3://{BUCKET}/{uuid.uuid4().hex}"


def test_others_find_what_one_stored_and_no_other_namespace_does(options: dict[str, Any], url: str) -> None:
    assert generate(opened(url, options)) == 0
    assert generate(opened(url, options, namespace="theirs")) == 0
    again = opened(url, options)
    assert generate(again) == ALL
    assert again.stats().loaded_tokens == ALL
    held = files_of(options).du(url)
    assert again.stats().held_bytes["files"] == held > 0
    again.clear("theirs")
    assert files_of(options).du(url) == held // 2
    again.clear()
    assert generate(opened(url, options)) == 0


def test_damaged_objects_are_set_aside_and_written_again(options: dict[str, Any], url: str) -> None:
    generate(opened(url, options))
    files = files_of(options)
    paths = files.find(url)
    assert len(paths) == BLOCKS
    for path in paths:
        files.pipe_file(path, files.cat_file(path)[:-1])
    for _ in paths:
        # What is not asked for is not found to be bad: the next one turns up when the ones before it are whole.
        store = opened(url, options)
        assert generate(store) < ALL
        assert store.stats().file_problems == {"bad_file": 1}
        if store.stats().hits:
            break
    assert len([path for path in files.find(url) if path.endswith(".bad")]) == 2


def test_what_was_written_first_goes_first(options: dict[str, Any], url: str) -> None:
    store = opened(url, options)
    generate(store)
    room = store.stats().held_bytes["files"] + 100
    store = opened(url, options, file_capacity=room)
    generate(store, TEXT.flip(1))
    assert store.stats().held_bytes["files"] == files_of(options).du(url) <= room
    assert generate(opened(url, options), TEXT.flip(1)) == ALL
    assert generate(opened(url, options)) == 0


def test_a_bucket_that_is_missing_or_goes_away(options: dict[str, Any]) -> None:
    files = files_of(options)
    files.mkdir("passing")
    store = opened("s3://passing", options)
    assert generate(store) == 0
    files.rm("passing", recursive=True)
    store._index.clear()
    assert generate(store) == 0
    assert store.stats().file_problems["not_written"] == 1
    assert generate(store) == ALL, "memory goes on"


def test_a_server_that_is_not_there(options: dict[str, Any]) -> None:
    with pytest.raises(StorageError, match="cannot keep blocks"):
        opened("s3://anything", {**options, "endpoint_url": "http://127.0.0.1:9"})
