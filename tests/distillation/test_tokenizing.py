"""Text that is tokenized once: the same sequences, read one at a time, whatever interrupts the work."""

from __future__ import annotations

import itertools
import json
import multiprocessing
import os
import signal
import struct
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from transformers import AutoTokenizer

from streamkl.distillation import checkpoints, shards, tokenizing
from streamkl.distillation.order import shuffled
from streamkl.distillation.packing import packed
from streamkl.distillation.run import distill
from streamkl.distillation.shards import TokenSequences
from streamkl.distillation.tokenizing import tokenize, whole_shards
from streamkl.text import TextError

OFFLINE = {**os.environ, "OMP_NUM_THREADS": "1", "HF_HUB_OFFLINE": "1"}


@pytest.fixture(scope="session")
def tokenizer(llama: Path) -> Any:
    return AutoTokenizer.from_pretrained(llama)


@pytest.fixture
def lines(prose: Path, tmp_path: Path) -> Path:
    """A file of documents, some of them blank."""
    words, file = prose.read_text().split(), tmp_path / "lines.jsonl"
    texts = [" ".join(words[start : start + 3 + start % 37]) for start in range(0, len(words), 40)]
    file.write_text("".join(json.dumps({"text": text}) + "\n\n" + json.dumps({"text": " "}) + "\n" for text in texts))
    return file


def sequences(corpus: Path, tokenizer: Any, length: int) -> np.ndarray:
    found = TokenSequences(shards.find(str(corpus), tokenizer), length, np.zeros(0, np.uint32), len(tokenizer))
    return np.stack([found[number] for number in range(len(found))])


def content(folder: Path) -> dict[str, bytes]:
    return {path.name: path.read_bytes() for path in folder.iterdir()}


def test_shards_have_the_sequences_that_packing_makes(
    llama: Path, prose: Path, lines: Path, tokenizer: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(tokenizing, "CHUNK", 500)
    text = [str(lines), str(prose)]
    done = tokenize(str(llama), text, tmp_path / "corpus")
    expected = packed(tokenizer, text, 32, 10**6, field="text", encoding="utf-8")
    found = sequences(tmp_path / "corpus", tokenizer, 32)
    assert len(found) > 100
    assert np.array_equal(found, expected)
    index = json.loads((tmp_path / "corpus" / "corpus.json").read_text())
    assert [shard["tokens"] for shard in index["shards"]] == [done.tokens]
    ids, ends = (
        np.fromfile(tmp_path / "corpus" / f"00000.ds{end}", kind) for end, kind in (("", "<u2"), (".index", "<u8"))
    )
    assert np.array_equal(ends, np.flatnonzero(ids == tokenizer.eos_token_id) + 1)
    assert ends[-1] == len(ids) == done.tokens


def test_a_dataset_is_tokenized_like_any_other_text(llama: Path, tokenizer: Any, tmp_path: Path) -> None:
    import datasets

    datasets.Dataset.from_dict({"text": ["abcdef", " ", "ghijklmno"]}).save_to_disk(tmp_path / "saved")
    tokenize(str(llama), [f"dataset:{tmp_path / 'saved'}"], tmp_path / "corpus")
    found = sequences(tmp_path / "corpus", tokenizer, 8)
    assert [tokenizer.decode(ids) for ids in found] == ["abcdef<end>g", "hijklmno"]


def test_an_interrupted_packing_resumes_after_its_last_whole_shard_with_the_same_bytes(
    llama: Path, prose: Path, lines: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(tokenizing, "CHUNK", 500)
    text = [str(lines), str(prose)]
    tokenize(str(llama), text, tmp_path / "whole", shard_tokens=900)
    read: list[int] = []
    for stop in (3, 5, 4, 10**6):
        calls = itertools.count()

        def tell(progress: tokenizing.Progress, stop: int = stop, calls: Iterator[int] = calls) -> None:
            read.append(progress.characters)
            if next(calls) == stop:
                raise KeyboardInterrupt

        try:
            tokenize(str(llama), text, tmp_path / "cut", tell=tell, shard_tokens=900)
        except KeyboardInterrupt:
            assert not json.loads((tmp_path / "cut" / "corpus.json").read_text())["complete"]
    assert len(content(tmp_path / "whole")) > 3 * 7
    assert content(tmp_path / "cut") == content(tmp_path / "whole")
    assert len(read) < 1.5 * len(set(read)), "whole shards were made again"


@pytest.mark.slow
def test_a_packing_that_is_killed_and_resumed_has_the_same_bytes_with_any_number_of_workers(
    llama: Path, prose: Path, tmp_path: Path
) -> None:
    text = tmp_path / "long.txt"
    text.write_text(prose.read_text() * 80)
    tokenize(str(llama), [str(text)], tmp_path / "whole", shard_tokens=500_000)
    command = [
        sys.executable, "-m", "streamkl", "tokenize", "--model", str(llama), "--text", str(text), "--output",
        str(tmp_path / "cut"), "--workers", "2", "--shard-tokens", "500000",
    ]  # fmt: skip
    process = subprocess.Popen(command, env=OFFLINE, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE)
    until, index = time.monotonic() + 300, tmp_path / "cut" / "corpus.json"
    while not index.exists() or len(json.loads(index.read_text())["shards"]) < 1:
        assert time.monotonic() < until
        assert process.poll() is None, process.communicate()
        time.sleep(0.005)
    process.send_signal(signal.SIGKILL)
    process.communicate()
    kept = json.loads(index.read_text())
    assert 1 <= len(kept["shards"]) < 3
    with pytest.raises(TextError, match="is not complete: the command that makes it, given again, resumes"):
        shards.find(str(tmp_path / "cut"), AutoTokenizer.from_pretrained(llama))
    made = (tmp_path / "cut" / "00000.ds").stat().st_mtime_ns
    done = subprocess.run(command, env=OFFLINE, capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stderr
    assert (tmp_path / "cut" / "00000.ds").stat().st_mtime_ns == made, "a whole shard was made again"
    assert content(tmp_path / "cut") == content(tmp_path / "whole")


def test_the_folder_may_be_the_one_that_one_is_in(
    llama: Path, prose: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "here").mkdir()
    monkeypatch.chdir(tmp_path / "here")
    assert tokenize(str(llama), [str(prose)], Path(".")).shards == 1
    assert (tmp_path / "here" / shards.INDEX).is_file()


def test_a_folder_that_another_process_writes_is_refused_at_once(llama: Path, prose: Path, tmp_path: Path) -> None:
    output = tmp_path / "corpus"
    refusals: list[str] = []

    def second(progress: tokenizing.Progress) -> None:
        with pytest.raises(BlockingIOError, match=r"another process is writing .*corpus: wait for it") as refused:
            tokenize(str(llama), [str(prose)], output)
        refusals.append(str(refused.value))

    tokenize(str(llama), [str(prose)], output, tell=second)
    first = {path.name: path.read_bytes() for path in output.iterdir()}
    assert refusals
    tokenize(str(llama), [str(prose)], output)  # the lock is free again
    assert {path.name: path.read_bytes() for path in output.iterdir()} == first


@pytest.mark.slow
def test_a_packing_whose_worker_is_killed_says_so_and_resumes(
    llama: Path, lines: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(tokenizing, "CHUNK", 500)
    tokenize(str(llama), [str(lines)], tmp_path / "whole", shard_tokens=900)

    def kill(progress: tokenizing.Progress) -> None:
        for process in multiprocessing.active_children():
            process.kill()
            process.join()

    with pytest.raises(ChildProcessError, match=r"was killed.*: fewer --workers take less; the same command resumes"):
        tokenize(str(llama), [str(lines)], tmp_path / "cut", shard_tokens=900, workers=2, tell=kill)
    tokenize(str(llama), [str(lines)], tmp_path / "cut", shard_tokens=900)
    assert content(tmp_path / "cut") == content(tmp_path / "whole")


@pytest.mark.nightly
def test_ctrl_c_ends_a_packing_with_one_sentence(llama: Path, prose: Path, tmp_path: Path) -> None:
    text = tmp_path / "long.txt"
    text.write_text(prose.read_text() * 1000)
    process = subprocess.Popen(
        [
            sys.executable, "-m", "streamkl", "tokenize", "--model", str(llama), "--text", str(text), "--output",
            str(tmp_path / "cut"), "--workers", "2", "--shard-tokens", "1000000",
        ],
        env=OFFLINE, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE, text=True, start_new_session=True,
        preexec_fn=lambda: signal.signal(signal.SIGINT, signal.default_int_handler),
    )  # fmt: skip
    until, index = time.monotonic() + 300, tmp_path / "cut" / "corpus.json"
    while not index.exists() or len(json.loads(index.read_text())["shards"]) < 1:
        assert time.monotonic() < until
        assert process.poll() is None, process.communicate()
        time.sleep(0.005)
    os.killpg(process.pid, signal.SIGINT)  # as a terminal does it: to the workers, too
    _, said = process.communicate(timeout=300)
    assert process.returncode == 130, said
    assert "Stopped: the same command resumes after the last whole shard." in said
    assert "Traceback" not in said


PEAK = """
import json, resource, sys
from pathlib import Path
from streamkl.distillation.tokenizing import tokenize
before = None
def tell(progress):
    global before
    if before is None and progress.characters >= 4_000_000:
        before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
tokenize(sys.argv[1], [sys.argv[2]], Path(sys.argv[3]), tell=tell)
print(resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before)
"""


@pytest.mark.nightly
def test_packing_takes_as_much_memory_for_much_text_as_for_little(llama: Path, prose: Path, tmp_path: Path) -> None:
    text = tmp_path / "long.txt"
    text.write_text(prose.read_text() * 600)
    command = [sys.executable, "-c", PEAK, str(llama), str(text), str(tmp_path / "corpus")]
    done = subprocess.run(command, env=OFFLINE, capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stderr
    more = int(done.stdout.splitlines()[-1])
    print(f"{more} KB more after 12 MB of text than after 4 MB")
    assert more < 8_000, "8 MB of text are 16 MB of tokens"


def datatrove_shard(path: Path, ids: list[int], size: int) -> Path:
    """A shard in the layout of datatrove 0.10."""
    path.write_bytes(struct.pack(f"<{len(ids)}{'I' if size == 4 else 'H'}", *ids))
    path.with_name(f"{path.name}.index").write_bytes(struct.pack("<2Q", 3, len(ids)))
    path.with_name(f"{path.name}.metadata").write_text(f"some/tokenizer|{size}\n{len(ids)}\n{len(ids)} T")
    return path


@pytest.mark.parametrize("size", [2, 4])
def test_shards_of_datatrove_are_read_and_no_sequence_crosses_two(tokenizer: Any, tmp_path: Path, size: int) -> None:
    datatrove_shard(tmp_path / "00000_shuffled.ds", list(range(10)), size)
    datatrove_shard(tmp_path / "00001_shuffled.ds", list(range(100, 109)), size)
    found = sequences(tmp_path, tokenizer, 4)
    assert found.tolist() == [[0, 1, 2, 3], [4, 5, 6, 7], [100, 101, 102, 103], [104, 105, 106, 107]]
    alone = sequences(tmp_path / "00001_shuffled.ds", tokenizer, 4)
    assert alone.tolist() == found[2:].tolist()


def test_paths_may_be_spelled_otherwise_when_a_packing_goes_on(
    llama: Path, prose: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    corpus = tmp_path / "corpus"
    first = tokenize(str(llama), [str(prose)], corpus)
    before = content(corpus)
    monkeypatch.chdir(prose.parent)
    assert tokenize(os.path.relpath(llama), [prose.name], corpus) == first
    assert content(corpus) == before
    index = json.loads((corpus / "corpus.json").read_text())
    assert whole_shards(corpus) == 0
    (corpus / "corpus.json").write_text(json.dumps({**index, "complete": False}))
    assert whole_shards(corpus) == 1


def test_shards_that_do_not_fit_are_refused_with_the_reason(
    tiny: Any, llama: Path, prose: Path, tokenizer: Any, tmp_path: Path
) -> None:
    foreign = datatrove_shard(tmp_path / "foreign.ds", [1, 2, 60_000, 3], 2)
    with pytest.raises(TextError, match="has the token 60,000, and the tokenizer only 257"):
        sequences(foreign, tokenizer, 4)
    with pytest.raises(TextError, match="the largest shard has 4 tokens, less than one sequence of 5"):
        sequences(foreign, tokenizer, 5)
    foreign.with_name("foreign.ds.metadata").write_text("gpt2\n4\n")
    with pytest.raises(TextError, match=r"foreign.ds.metadata must start with a line TOKENIZER\|BYTES, 2 or 4"):
        shards.find(str(foreign), tokenizer)
    (tmp_path / "mine").mkdir()
    (tmp_path / "mine" / "corpus.json").write_text("[]")
    for call in (lambda: shards.find(str(tmp_path / "mine"), tokenizer),
                 lambda: tokenize(str(llama), [str(prose)], tmp_path / "mine")):  # fmt: skip
        with pytest.raises(TextError, match=r"mine/corpus.json is not an index of token shards"):
            call()
    corpus = tmp_path / "corpus"
    tokenize(str(llama), [str(prose)], corpus)
    with pytest.raises(TextError, match=r"was begun with other text: .* is another, or changed"):
        tokenize(str(llama), [str(foreign.with_suffix(".ds.metadata"))], corpus)
    changed = tmp_path / "changed.txt"
    changed.write_text("one two three")
    tokenize(str(llama), [str(changed)], tmp_path / "of-changed")
    before = changed.stat()
    changed.write_text("one two seven")
    os.utime(changed, ns=(before.st_atime_ns, before.st_mtime_ns + 1_000_000))  # coarse clocks may not have moved
    assert changed.stat().st_size == before.st_size
    with pytest.raises(TextError, match=r"was begun with other text: .*/changed.txt is another, or changed"):
        tokenize(str(llama), [str(changed)], tmp_path / "of-changed")
    with pytest.raises(TextError, match=r"/prose.txt was not part of it"):
        tokenize(str(llama), [str(prose), str(prose)], corpus)
    with pytest.raises(TextError, match=f"was begun with shard_tokens = {1 << 27}: got 5"):
        tokenize(str(llama), [str(prose)], corpus, shard_tokens=5)
    (corpus / "00000.ds").rename(corpus / "away")
    with pytest.raises(TextError, match=r"00000.ds is missing"):
        shards.find(str(corpus), tokenizer)
    (corpus / "away").rename(corpus / "00000.ds")
    with pytest.raises(TextError, match="is there already and holds no shards"):
        tokenize(str(llama), [str(prose)], prose.parent)
    with pytest.raises(ValueError, match="has token shards, and the rest of the text has not"):
        distill(tiny.settings(llama, [str(corpus), str(prose)], tmp_path / "run"))
    other = AutoTokenizer.from_pretrained(llama)
    other.add_tokens(["more"])
    with pytest.raises(TextError, match=r"was made with the tokenizer of .*, which is another one"):
        shards.find(str(corpus), other)
    with (corpus / "00000.ds").open("ab") as file:
        file.write(b"12")
    with pytest.raises(TextError, match=r"00000.ds has 40,004 bytes, and should have 40,002: it was cut off"):
        shards.find(str(corpus), tokenizer)


@pytest.mark.slow
def test_a_run_on_shards_has_the_bits_of_a_run_on_the_text(tiny: Any, llama: Path, tmp_path: Path) -> None:
    text = tiny.prose(tmp_path / "short.txt", 2000)  # all of which a run reads
    tokenize(str(llama), [str(text)], tmp_path / "corpus")
    for source, run in ((text, "text"), (tmp_path / "corpus", "shards")):
        distill(tiny.settings(llama, source, tmp_path / run))
    one, other = ((tmp_path / run / "indexers" / "indexers.safetensors").read_bytes() for run in ("text", "shards"))
    assert one == other


def test_a_resumed_run_reads_its_samples_and_none_that_came_before(
    tiny: Any, llama: Path, prose: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    import shutil

    tokenize(str(llama), [str(prose)], tmp_path / "corpus")
    settings = {"steps": 6, "save_every": 4, "keep": 9}
    distill(tiny.settings(llama, tmp_path / "corpus", tmp_path / "run", **settings))
    shutil.rmtree(tmp_path / "run" / "checkpoint-6")
    assert checkpoints.latest(tmp_path / "run") == tmp_path / "run" / "checkpoint-4"
    read: list[int] = []
    take = TokenSequences.__getitem__
    monkeypatch.setattr(TokenSequences, "__getitem__", lambda self, n: (read.append(n), take(self, n))[1])
    distill(tiny.settings(llama, tmp_path / "corpus", tmp_path / "run", resume=True, **settings))
    assert read == [shuffled(number, 20_000 // 96, 0, 0) for number in range(8, 12)]  # two per step


def test_the_order_is_a_permutation_that_seed_and_epoch_choose() -> None:
    orders = {
        (seed, epoch): [shuffled(n, 1000, seed, epoch) for n in range(1000)] for seed in (0, 1) for epoch in (0, 1)
    }
    assert all(sorted(order) == list(range(1000)) for order in orders.values())
    assert len({tuple(order) for order in orders.values()}) == 4
    for count in (1, 2, 3, 4, 5, 17):
        assert sorted(shuffled(n, count, 3, 0) for n in range(count)) == list(range(count))
    order = np.array(orders[0, 0])
    assert abs(np.corrcoef(order, np.arange(1000))[0, 1]) < 0.1
    assert abs(np.corrcoef(order[1:], order[:-1])[0, 1]) < 0.1
    assert shuffled(123_456_789, 10**12, 0, 0) < 10**12
