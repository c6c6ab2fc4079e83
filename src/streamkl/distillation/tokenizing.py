"""``streamkl tokenize``: text to token shards, once, on all cores, in memory that does not grow with the text."""

from __future__ import annotations

import hashlib
import itertools
import json
import multiprocessing
import os
import signal
import threading
import time
from array import array
from collections import deque
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import Future, ProcessPoolExecutor
from concurrent.futures.process import BrokenProcessPool
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from streamkl import cache, durable
from streamkl.distillation.packing import texts
from streamkl.distillation.settings import split_sources
from streamkl.distillation.shards import INDEX, SUFFIX, dtype_of, fingerprint, read_index
from streamkl.text import TextError, files

START = (0, 0)
"""The position before the first text."""
CHUNK = 1 << 20
"""How many characters a worker tokenizes at a time."""
PARTIAL = ".partial"
"""The suffix of a shard that is being written."""


Encoded = tuple[np.ndarray, list[int]]
"""The ids of a chunk, and where in them documents end."""


class Chunk(NamedTuple):
    """Texts that are tokenized together.

    Attributes:
        texts: Each with whether a document ends with it.
        position: The number of the source that the last text is from, and how many texts of it were read.
        size: Characters.
    """

    texts: list[tuple[str, bool]]
    position: tuple[int, int]
    size: int


@dataclass(frozen=True)
class Progress:
    """How far the work is: shards that are whole, and tokens and characters, those of earlier runs included."""

    shards: int
    tokens: int
    characters: int


def tokenize(
    model: str,
    text: list[str],
    output: Path,
    *,
    field: str = "text",
    encoding: str = "utf-8",
    workers: int = 1,
    shard_tokens: int = 1 << 27,
    tell: Callable[[Progress], None] = lambda progress: None,
) -> Progress:
    """Packs text into token shards, or resumes after the last whole shard of a call that was interrupted.

    The result depends neither on the number of workers nor on interruptions.

    Args:
        model: A folder or a name, whose tokenizer is used.
        text: Files, folders, or datasets by ``dataset:NAME@SPLIT``.
        output: The folder of shards, which `streamkl distill` takes as text.
        field: The field of a JSONL line or a dataset's row that has the text.
        encoding: Of files.
        workers: Processes that tokenize.
        shard_tokens: A shard ends with the piece of text, of `CHUNK` characters, that makes it as long.
        tell: Called now and then.

    Raises:
        TextError: A source cannot be read or has changed, or the folder holds something else.
        BlockingIOError: Another process is writing the same folder.
        ChildProcessError: A worker was killed.
    """
    from transformers import AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(model)
    sources = expand(text)
    about = {
        "format": 1, "tokenizer": {"name": model, "digest": fingerprint(tokenizer)}, "dtype": dtype_of(tokenizer),
        "sources": [[name, *_stamp(name)] for name in sources], "field": field, "encoding": encoding,
        "shard_tokens": shard_tokens,
    }  # fmt: skip
    busy = f"another process is writing {output}: wait for it, or name another output"
    place = output.resolve()  # "." has a name, and a link is the folder that it names
    with cache.locked(place.with_name(f"{place.name}.lock"), busy):
        writer = Writer(output, about)
        if not writer.index["complete"]:
            try:
                for ids, ends, chunk in _tokenized(model, workers, chunks(sources, writer.position, field, encoding)):
                    writer.add(ids, ends, chunk)
                    tell(writer.progress)
                writer.finish()
            finally:
                writer.leave()
        tell(writer.progress)
    return writer.progress


def expand(text: list[str]) -> list[str]:
    """The files of a text one by one, then its datasets, each of which can be skipped."""
    named, datasets = split_sources(text)
    found = [os.path.abspath(file) for file in (files(named) if named else [])]
    return found + [f"dataset:{name}" for name in datasets]


def chunks(sources: list[str], position: tuple[int, int], field: str, encoding: str) -> Iterator[Chunk]:
    """The texts after a position, in pieces of about `CHUNK` characters that depend on the text alone."""
    held: list[tuple[str, bool]] = []
    size, at = 0, position
    for number, source in enumerate(sources):
        if number < position[0]:
            continue
        for count, (text, ends) in enumerate(_with_ends(texts(source, field, encoding)), 1):
            if (number, count) <= position:  # a whole shard has it
                continue
            held.append((text, ends))
            size, at = size + len(text), (number, count)
            if size >= CHUNK:
                yield Chunk(held, at, size)
                held, size = [], 0
    if held:
        yield Chunk(held, at, size)


def _with_ends(found: Iterable[tuple[bool, str]]) -> Iterator[tuple[str, bool]]:
    """The texts of a source, each with whether a document ends with it instead of whether one starts."""
    held: str | None = None
    for starts, text in found:
        if held is not None:
            yield held, starts
        held = text
    if held is not None:
        yield held, True


class Writer:
    """The folder of shards: whole ones, of which the index tells, and one that is being written.

    Args:
        folder: Created if it does not exist.
        about: What the shards are made from and how.
    """

    def __init__(self, folder: Path, about: dict[str, Any]) -> None:
        self.folder = folder
        self.index = _resumed(folder, about)
        self.name = str(self.index["tokenizer"]["name"])
        self._write_index()  # before any shard, so that a folder that was begun says so
        for left in folder.glob(f"*{PARTIAL}"):
            left.unlink()
        self._open()

    @property
    def position(self) -> tuple[int, int]:
        """Up to where the whole shards have the text."""
        shards = self.index["shards"]
        return (shards[-1]["position"][0], shards[-1]["position"][1]) if shards else START

    @property
    def progress(self) -> Progress:
        """How far the work is."""
        shards = self.index["shards"]
        tokens, characters = (sum(shard[name] for shard in shards) for name in ("tokens", "characters"))
        return Progress(len(shards), tokens + self.tokens, characters + self.characters)

    def add(self, ids: np.ndarray, ends: list[int], chunk: Chunk) -> None:
        """Appends the ids of a chunk, and completes the shard if it has enough of them."""
        if self.file is None:
            self.file = self._path(PARTIAL).open("wb")
        data = ids.tobytes()
        self.file.write(data)
        self.sha.update(data)
        self.ends.extend(self.tokens + end for end in ends)
        self.tokens, self.characters, self.last = self.tokens + len(ids), self.characters + chunk.size, chunk.position
        if self.tokens >= self.index["shard_tokens"]:
            self._close()

    def finish(self) -> None:
        """Completes the last shard, and the folder."""
        if self.tokens:
            self._close()
        if not self.index["shards"]:
            raise TextError(f"no text in {', '.join(name for name, *_ in self.index['sources'][:3])}")
        self.index["complete"] = True
        self._write_index()

    def leave(self) -> None:
        """Drops a shard that is not whole."""
        if self.file is not None:
            self.file.close()
            self._path(PARTIAL).unlink(missing_ok=True)

    def _open(self) -> None:
        self.file, self.sha = None, hashlib.sha256()
        self.tokens, self.characters, self.ends, self.last = 0, 0, array("Q"), START

    def _path(self, suffix: str = "") -> Path:
        return self.folder / f"{len(self.index['shards']):05d}{SUFFIX}{suffix}"

    def _close(self) -> None:
        """Gives the shard its name, its documents' ends and its metadata, then adds it to the index."""
        assert self.file is not None
        self.file.close()
        durable.sync(self._path(PARTIAL))
        if not self.ends or self.ends[-1] != self.tokens:
            self.ends.append(self.tokens)  # of a document that goes on in the next shard
        size = np.dtype(self.index["dtype"]).itemsize
        self._path(".index").write_bytes(np.asarray(self.ends, dtype="<u8").tobytes())
        self._path(".metadata").write_text(f"{self.name}|{size}\n{self.tokens}\n{self.tokens:,} tokens\n")
        os.replace(self._path(PARTIAL), self._path())
        self.index["shards"].append({
            "file": self._path().name, "tokens": self.tokens, "characters": self.characters,
            "documents": len(self.ends), "sha256": self.sha.hexdigest(), "position": self.last,
        })  # fmt: skip
        self._write_index()
        self._open()

    def _write_index(self) -> None:
        with durable.replacing_files(self.folder, [INDEX]) as staged:
            (staged / INDEX).write_text(json.dumps(self.index, indent=1) + "\n")


def _resumed(folder: Path, about: dict[str, Any]) -> dict[str, Any]:
    """The index of a folder that was begun with the same text, or a new one."""
    if not (folder / INDEX).is_file():
        if folder.is_dir() and any(path.name not in (durable.STAGING, durable.READY) for path in folder.iterdir()):
            raise TextError(f"{folder} is there already and holds no shards: name another output folder")
        return {**about, "shards": [], "complete": False}
    found = read_index(folder)
    if found["tokenizer"]["digest"] != about["tokenizer"]["digest"]:
        raise TextError(
            f"{folder} was begun with the tokenizer of {found['tokenizer']['name']}, which is another one: name "
            f"another output"
        )
    for name in ("dtype", "field", "encoding", "shard_tokens", "format"):
        if found.get(name) != about[name]:
            raise TextError(f"{folder} was begun with {name} = {found.get(name)}: got {about[name]}")
    for before, now in itertools.zip_longest(found.get("sources", ()), about["sources"]):
        if before != now:
            source = (now or before)[0]
            what = "was not part of it" if before is None else "is missing" if now is None else "is another, or changed"
            raise TextError(f"{folder} was begun with other text: {source} {what}; name another output")
    return found


def whole_shards(folder: Path) -> int:
    """How many whole shards a folder has from a call that was interrupted; 0 if it is complete."""
    index = read_index(folder) if (folder / INDEX).is_file() else {"shards": (), "complete": True}
    return 0 if index["complete"] else len(index["shards"])


def _tokenized(model: str, workers: int, pieces: Iterable[Chunk]) -> Iterator[tuple[np.ndarray, list[int], Chunk]]:
    """Chunks with their ids, in order; as many are held at a time as keep all workers busy."""
    if workers == 1:
        _load(model)
        for chunk in pieces:
            yield *_encode(chunk.texts), chunk
        return
    context = multiprocessing.get_context("spawn")  # a fork would copy the threads of tokenizers without their locks
    pool = ProcessPoolExecutor(workers, context, _start, (model, os.getpid()))
    waiting: deque[tuple[Future[Encoded], Chunk]] = deque()
    try:
        for chunk in pieces:
            waiting.append((pool.submit(_encode, chunk.texts), chunk))
            if len(waiting) > 2 * workers:
                future, done = waiting.popleft()
                yield *future.result(), done
        while waiting:
            future, done = waiting.popleft()
            yield *future.result(), done
    except BrokenProcessPool as error:
        raise ChildProcessError(
            "a process that tokenizes was killed, which a lack of memory may do: fewer --workers take less; the same "
            "command resumes after the last whole shard"
        ) from error
    finally:
        pool.shutdown(wait=True, cancel_futures=True)


_worker: dict[str, Any] = {}


def _start(model: str, parent: int) -> None:
    """Sets up a worker, which ends when its parent was killed, and leaves Ctrl-C to it."""

    def watch() -> None:
        while os.getppid() == parent:
            time.sleep(1)
        os._exit(1)

    signal.signal(signal.SIGINT, signal.SIG_IGN)
    threading.Thread(target=watch, daemon=True).start()
    os.environ["TOKENIZERS_PARALLELISM"] = "false"  # processes are the parallelism
    _load(model)


def _load(model: str) -> None:
    from transformers import AutoTokenizer

    _worker["tokenizer"] = AutoTokenizer.from_pretrained(model)


def _encode(texts: list[tuple[str, bool]]) -> Encoded:
    """The ids of texts, with an end-of-text token after each document."""
    tokenizer = _worker["tokenizer"]
    end = [] if tokenizer.eos_token_id is None else [tokenizer.eos_token_id]
    parts, ends, count = [], [], 0
    encoded = tokenizer(
        [text for text, _ in texts], add_special_tokens=False, return_attention_mask=False, verbose=False
    )["input_ids"]
    for (_, is_end), ids in zip(texts, encoded, strict=True):
        parts.append(np.asarray(ids + end if is_end else ids, dtype=dtype_of(tokenizer)))
        count += len(parts[-1])
        if is_end:
            ends.append(count)
    return np.concatenate(parts), ends


def _stamp(source: str) -> tuple[int, int] | tuple[()]:
    """The size of a file, and when it was last written, in nanoseconds; nothing of a dataset."""
    if not Path(source).is_file():
        return ()
    found = Path(source).stat()
    return found.st_size, found.st_mtime_ns
