"""Programs that try to make a store of files give a wrong answer, fail, or keep what it must not keep.

| attack | what must happen |
|---|---|
| a file cut short anywhere, emptied, or with a bit turned anywhere | a miss from there on; the file is set aside |
| files swapped, or of another model, namespace or block size under our names | the same |
| a file of a later release | a miss; the file stays |
| a writer killed at any point | no block that is not whole; leftovers are swept at the next opening |
| a full disk, a directory that is read-only or has vanished | the answer is right, the problem is counted |
| a directory that others can write to | refused |
| several processes that write, read and delete each other's files | every answer is right |
"""

from __future__ import annotations

import json
import os
import shutil
import stat
import subprocess
import sys
import time
from pathlib import Path

import pytest
import torch
from architectures import tiny_model
from safetensors import safe_open
from victim import ALL, BLOCKS, SIZE, TEXT, Victim, in_order

from hf_kvcache import PrefixStore, StorageError
from hf_kvcache.fingerprint import tensor_bytes
from hf_kvcache.prefix import files
from hf_kvcache.prefix.file_format import FileBlock, decode

BEFORE_THIRD = 2 * SIZE


def check_damage(victim: Victim, path: Path) -> None:
    """Found up to the damaged block; then the block is written anew, and found."""
    position = victim.files.index(path)
    store = victim.open()
    victim.check(store, hit_tokens=position * SIZE)
    assert store.stats().file_problems == {"bad_file": 1}
    assert path.with_suffix(".bad").exists()
    again = victim.open()
    victim.check(again, hit_tokens=ALL)
    # What was set aside counts against the quota, so that it goes in the end.
    assert again.stats().held_bytes["files"] == sum(path.stat().st_size for path in path.parent.iterdir())


def test_an_untouched_store_is_found_whole(victim: Victim) -> None:
    store = victim.open()
    victim.check(store, hit_tokens=ALL)
    assert store.stats().loaded_tokens == ALL
    assert store.stats().file_problems == {}
    assert store.stats().held_bytes["files"] == sum(path.stat().st_size for path in victim.whole_files)
    assert len(victim.whole_files) == BLOCKS


@pytest.mark.parametrize("share", [0.0, 0.001, 0.3, 0.7, 0.999])
def test_cut_short(victim: Victim, share: float) -> None:
    path = victim.files[2]
    data = path.read_bytes()
    path.write_bytes(data[: int(share * len(data))])
    check_damage(victim, path)


def test_longer_than_it_was(victim: Victim) -> None:
    path = victim.files[2]
    path.write_bytes(path.read_bytes() + b"more")
    check_damage(victim, path)


@pytest.mark.parametrize("place", [3, 40, 700, -5], ids=["length", "names", "header", "states"])
def test_a_bit_turned(victim: Victim, place: int) -> None:
    path = victim.files[2]
    data = bytearray(path.read_bytes())
    data[place] ^= 16
    path.write_bytes(data)
    check_damage(victim, path)


def test_no_bit_of_a_file_may_be_turned(victim: Victim) -> None:
    """Every byte of the header and every 17th of the rest; without a model, so that all can be tried."""
    block, data = block_of(victim.files[2]), victim.files[2].read_bytes()
    assert decode(data, block) is not None
    header = 8 + int.from_bytes(data[:8], "little")
    version = data.find(b'"version":"') + 11
    for place in [*range(header), *range(header, len(data), 17)]:
        turned = bytearray(data)
        turned[place] ^= 1 << place % 8
        try:
            assert decode(bytes(turned), block) is None
        except StorageError:
            continue
        assert version - 11 <= place <= version, "only the version itself may make it the file of a later release"


def block_of(path: Path) -> FileBlock:
    """What a file says it is."""
    with safe_open(path, framework="pt") as file:
        key, parent, root = (bytes.fromhex(file.metadata()[name]) for name in ("key", "parent", "root"))
        return FileBlock(key, parent, root, tensor_bytes(file.get_tensor("token_ids")))


def test_two_files_swapped(victim: Victim) -> None:
    one, other = victim.files[1], victim.files[2]
    data = one.read_bytes()
    one.write_bytes(other.read_bytes())
    other.write_bytes(data)
    store = victim.open()
    victim.check(store, hit_tokens=SIZE)
    assert store.stats().file_problems == {"bad_file": 1}


@pytest.mark.parametrize("other", ["model", "namespace", "block_size"])
def test_files_of_another_under_our_names(victim: Victim, tmp_path: Path, other: str) -> None:
    model = tiny_model("llama", seed=1 if other == "model" else 0)
    foreign = PrefixStore.open(
        f"file://{tmp_path / 'foreign'}",
        model,
        block_size=2 * SIZE if other == "block_size" else SIZE,
        namespace="theirs" if other == "namespace" else None,
    )
    foreign.generate(model, input_ids=TEXT, max_new_tokens=6, do_sample=False)
    for path, ours in zip(in_order(tmp_path / "foreign"), victim.files, strict=False):
        shutil.copyfile(path, ours)
    store = victim.open()
    victim.check(store, hit_tokens=0)
    assert store.stats().file_problems["bad_file"] >= 1


def test_a_file_of_a_later_release_is_left_alone(victim: Victim) -> None:
    path = victim.files[2]
    data = path.read_bytes().replace(b'"version":"1"', b'"version":"2"')
    path.write_bytes(data)
    store = victim.open()
    victim.check(store, hit_tokens=BEFORE_THIRD)
    assert store.stats().file_problems == {"newer_format": 1}
    assert path.read_bytes() == data


@pytest.mark.parametrize(
    "content",
    [b"", b"\xff" * 100, b"\x02\0\0\0\0\0\0\0{}", b"\x08\0\0\0\0\0\0\0[1,2,3] "],
    ids=["empty", "not a length", "no metadata", "no table"],
)
def test_no_safetensors_at_all(victim: Victim, content: bytes) -> None:
    victim.files[2].write_bytes(content)
    store = victim.open()
    victim.check(store, hit_tokens=BEFORE_THIRD)
    assert store.stats().file_problems == {"bad_file": 1}


def test_a_header_that_promises_everything(victim: Victim) -> None:
    header = json.dumps(
        {"__metadata__": {"format": "hf_kvcache.prefix"}, "x": {"dtype": "F64", "shape": [2**62]}}
    ).encode()
    victim.files[2].write_bytes(len(header).to_bytes(8, "little") + header)
    store = victim.open()
    victim.check(store, hit_tokens=BEFORE_THIRD)
    assert store.stats().file_problems == {"bad_file": 1}


# ------------------------------------------------------------------------------------------------- killed writers

WRITER = f"""
import os, sys
import torch
sys.path.insert(0, {str(Path(__file__).parents[1])!r})
torch.set_num_threads(1)
from architectures import tiny_model
from hf_kvcache import PrefixStore
from hf_kvcache.prefix import files

done = 0

def dies(act):
    def acting(*arguments, **options):
        global done
        done += 1
        if done == step:
            os.kill(os.getpid(), 9)
        return act(*arguments, **options)
    return acting

class Dying:
    def __init__(self, file):
        self.file = file
    def __enter__(self):
        return self
    def __exit__(self, *error):
        self.file.close()
    def write(self, data):
        for begin in range(0, len(data), len(data) // 3):
            dies(self.file.write)(data[begin : begin + len(data) // 3])
            self.file.flush()

class DyingPath(type(files.Path())):
    def mkdir(self, *arguments, **options):
        return dies(super().mkdir)(*arguments, **options)
    def open(self, *arguments, **options):
        return Dying(dies(super().open)(*arguments, **options))
    def replace(self, target):
        return dies(super().replace)(target)

model = tiny_model("llama")
text = torch.randint(3, 97, (1, 22), generator=torch.Generator().manual_seed(0))
for step in map(int, sys.argv[2].split(",")):
    child = os.fork()
    if child == 0:
        store = PrefixStore.open("file://" + sys.argv[1] + "-" + str(step), model, block_size=4)
        files.Path = DyingPath
        store.generate(model, input_ids=text, max_new_tokens=6, do_sample=False)
        os._exit(0)
    _, status = os.waitpid(child, 0)
    assert os.WIFSIGNALED(status) and os.WTERMSIG(status) == 9, (step, status)
"""


def test_killed_while_it_writes(victim: Victim, tmp_path: Path) -> None:
    """At every step of writing the first block, and at some later ones: what is there is whole."""
    steps = [*range(1, 8), 12, 31]
    command = [sys.executable, "-c", WRITER, str(tmp_path / "killed"), ",".join(map(str, steps))]
    parent = subprocess.run(command, capture_output=True, text=True, check=False)
    assert parent.returncode == 0, parent.stderr
    found = []
    for step in steps:
        after = Victim(tmp_path / f"killed-{step}", victim.answer, [])
        whole = len(after.whole_files)
        store = after.open()
        assert not list(after.folder.glob("*/*.tmp")), "a leftover of a dead process stayed"
        after.check(store, hit_tokens=min(whole, 5) * SIZE)
        assert store.stats().file_problems == {}
        found.append(whole)
    assert found == sorted(found)
    assert found[0] == 0
    assert found[-1] >= 3


def test_a_file_that_is_being_written_is_not_swept(victim: Victim) -> None:
    writing = victim.files[0].with_name(f"0a.{files._HOST}.{os.getpid()}.0b.tmp")
    elsewhere = victim.files[0].with_name("0a.elsewhere.1.0b.tmp")
    abandoned = victim.files[0].with_name("0c.elsewhere.1.0b.tmp")
    for path in (writing, elsewhere, abandoned):
        path.write_bytes(b"half")
    os.utime(abandoned, (0, time.time() - 2 * 86_400))
    victim.open()
    assert writing.exists()
    assert elsewhere.exists()
    assert not abandoned.exists()


# ------------------------------------------------------------------------------------------------- the place


def test_a_full_disk(victim: Victim, monkeypatch: pytest.MonkeyPatch) -> None:
    class Full(type(Path())):
        def open(self, *arguments: object, **options: object) -> object:
            file = super().open(*arguments, **options)
            if self.suffix == ".tmp":
                file.write(b"some of it")
                file.close()
                raise OSError(28, "No space left on device")
            return file

    shutil.rmtree(victim.folder)
    store = victim.open()
    monkeypatch.setattr(files, "Path", Full)
    victim.check(store, hit_tokens=0)
    assert store.stats().file_problems == {"not_written": 1}
    assert not [path for path in victim.folder.rglob("*") if path.is_file()]
    monkeypatch.undo()
    victim.check(store, hit_tokens=ALL)
    assert victim.whole_files == sorted(victim.files), "what could not be written is written when there is room again"


def test_a_directory_that_has_vanished(victim: Victim) -> None:
    store = victim.open()
    shutil.rmtree(victim.folder)
    victim.check(store, hit_tokens=0)
    assert store.stats().file_problems["not_written"] >= 1
    victim.check(store, hit_tokens=ALL)
    assert not victim.folder.exists(), "where another disk was mounted, nothing is written into its mount point"


def test_a_directory_that_cannot_be_written(victim: Victim) -> None:
    store = victim.open()
    folder = victim.files[0].parent
    shutil.rmtree(victim.folder)
    # What stands in the way is a file: also for the superuser, for whom no directory is read-only.
    victim.folder.mkdir()
    folder.write_bytes(b"")
    victim.check(store, hit_tokens=0)
    assert store.stats().file_problems["not_written"] >= 1


def test_a_file_that_cannot_be_read(victim: Victim) -> None:
    path = victim.files[2]
    path.unlink()
    path.mkdir()
    store = victim.open()
    victim.check(store, hit_tokens=BEFORE_THIRD)
    assert sum(store.stats().file_problems.values()) >= 1


def test_it_is_private(victim: Victim) -> None:
    assert stat.S_IMODE(victim.folder.stat().st_mode) == 0o700
    assert stat.S_IMODE(victim.files[0].parent.stat().st_mode) == 0o700
    victim.folder.chmod(0o770)
    with pytest.raises(StorageError, match="0700"):
        victim.open()


def test_places_that_do_not_exist(tmp_path: Path) -> None:
    (tmp_path / "file").write_bytes(b"")
    for url in (f"file://{tmp_path}/file/below", "nosuch://place"):
        with pytest.raises(StorageError, match="cannot keep blocks"):
            PrefixStore.open(url, tiny_model("llama"))


def test_the_quota_holds_and_the_oldest_goes(victim: Victim) -> None:
    bytes_of_six = sum(path.stat().st_size for path in victim.files)
    store = victim.open(file_capacity=bytes_of_six + 100)
    victim.check(store, hit_tokens=ALL)
    other = torch.randint(3, 97, (1, 9), generator=torch.Generator().manual_seed(1))
    store.generate(store.model, input_ids=other, max_new_tokens=1)
    assert store.stats().held_bytes["files"] <= bytes_of_six + 100
    assert store.stats().held_bytes["files"] == sum(path.stat().st_size for path in victim.whole_files)
    # Two blocks were needed: the sixth, which the prompt does not reach, and the deepest of the five it read.
    victim.check(victim.open(), hit_tokens=4 * SIZE)


def test_what_was_evicted_is_gone_from_the_files(victim: Victim) -> None:
    store = victim.open()
    victim.check(store, hit_tokens=ALL)
    assert victim.open().evict(victim.answer[0]) == BLOCKS * SIZE
    assert victim.whole_files == []
    store.clear()
    victim.check(victim.open(), hit_tokens=0)


# ------------------------------------------------------------------------------------------------- others at work

NEIGHBOURS = f"""
import os, sys
import torch
sys.path.insert(0, {str(Path(__file__).parents[1])!r})
torch.set_num_threads(1)
from architectures import tiny_model
from hf_kvcache import PrefixStore

folder, room = sys.argv[1], int(sys.argv[2])
model = tiny_model("llama")
begin = torch.randint(3, 97, (1, 12), generator=torch.Generator().manual_seed(0))
texts = [torch.cat([begin, torch.full((1, 6), 5 + number)], dim=1) for number in range(4)]
options = dict(do_sample=False, max_new_tokens=3)
expected = [model.generate(text, attention_mask=torch.ones_like(text), **options) for text in texts]

def work(process):
    for turn in range(16):
        number = (turn * 3 + process) % 4
        if turn % 8 == 0:
            store = PrefixStore.open("file://" + folder, model, block_size=4, file_capacity=room)
        if turn % 3 == 0:
            store._index.clear()  # the memory alone
        assert torch.equal(store.generate(model, input_ids=texts[number], **options), expected[number])
        store.check_integrity()
        assert not store.stats().file_problems, store.stats()

children = []
for process in range(3):
    child = os.fork()
    if child == 0:
        try:
            work(process)
        except BaseException as error:
            print(repr(error), file=sys.stderr, flush=True)
            os._exit(1)
        os._exit(0)
    children.append(child)
assert all(os.waitpid(child, 0)[1] == 0 for child in children)
"""


def test_several_processes_at_once(tmp_path: Path, victim: Victim) -> None:
    """They write the same blocks, and have room for half of them, so that they delete what others are about to read."""
    room = 5 * victim.files[0].stat().st_size
    command = [sys.executable, "-c", NEIGHBOURS, str(tmp_path / "together"), str(room)]
    parent = subprocess.run(command, capture_output=True, text=True, check=False)
    assert parent.returncode == 0, parent.stderr
    assert not list((tmp_path / "together").glob("*/*.tmp"))
    assert not list((tmp_path / "together").glob("*/*.bad"))


def test_other_file_systems() -> None:
    """Anything fsspec knows: here its memory, where nothing is renamed and no time of use is kept."""
    model = tiny_model("llama")
    stores = [PrefixStore.open("memory://prefixes/of/tests", model, block_size=SIZE) for _ in range(2)]
    outputs = [store.generate(model, input_ids=TEXT, max_new_tokens=6, do_sample=False) for store in stores]
    assert torch.equal(*outputs)
    assert [store.stats().hit_tokens for store in stores] == [0, ALL]
    stores[0].clear()
    assert PrefixStore.open("memory://prefixes/of/tests", model, block_size=SIZE).stats().held_bytes["files"] == 0


def test_what_only_memory_has_seen_used_does_not_go_before_what_follows_it(victim: Victim) -> None:
    """The beginning is found in memory each time; in the files it must not look forgotten."""
    store = victim.open()
    victim.check(store, hit_tokens=ALL)
    for path in victim.files:
        os.utime(path, (0, 0))
    longer = torch.cat([victim.answer, torch.full((1, 5), 7)], dim=1)
    store.generate(store.model, input_ids=longer, max_new_tokens=1)
    ages = [path.stat().st_mtime_ns for path in in_order(victim.folder)]
    assert len(ages) > BLOCKS
    assert ages == sorted(ages, reverse=True)
    assert ages[-1] > 0
    victim.files[0].unlink()
    store.generate(store.model, input_ids=longer, max_new_tokens=1)
    assert len(in_order(victim.folder)) == len(ages), "a beginning that was lost is written again from memory"


def test_files_whose_lifetime_is_over_are_gone(victim: Victim) -> None:
    store = victim.open(lifetime_seconds=1000.0)
    for path in victim.files[2:]:
        os.utime(path, (0, time.time() - 1001))
    victim.check(store, hit_tokens=BEFORE_THIRD)
    for path in victim.files:
        os.utime(path, (0, time.time() - 1001))
    victim.open(lifetime_seconds=1000.0)
    assert victim.whole_files == []
