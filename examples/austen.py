"""Jane Austen's six novels as files of text, from the Debian package ``r-cran-janeaustenr`` (MIT).

    apt-get download r-cran-janeaustenr
    python examples/austen.py r-cran-janeaustenr_*.deb books

The package holds each novel as an R vector of lines, in a file of zlib-compressed records that is read here without R.
Lines of a paragraph are joined, since prose is what models know.
"""

from __future__ import annotations

import io
import re
import struct
import subprocess
import sys
import tarfile
import zlib
from collections.abc import Iterator
from pathlib import Path

DATA = "./usr/lib/R/site-library/janeaustenr/data/Rdata.rdb"
STRINGS, STRING = 16, 9
"""R's numbers for a vector of strings, and for one of them."""


def main(package: Path, folder: Path) -> list[Path]:
    """Writes a file for each novel of the package, and returns their paths."""
    folder.mkdir(parents=True, exist_ok=True)
    written = []
    for record in records(database(package)):
        lines = strings(record)
        title = lines[0].strip().lower().replace(" ", "-")
        written.append(folder / f"{title}.txt")
        written[-1].write_text(paragraphs(lines), encoding="utf-8")
    return written


def database(package: Path) -> bytes:
    """The file of records, out of the package."""
    contents = subprocess.run(["dpkg-deb", "--fsys-tarfile", str(package)], capture_output=True, check=True).stdout
    with tarfile.open(fileobj=io.BytesIO(contents)) as archive:
        file = archive.extractfile(DATA)
        assert file is not None, "the archive has the file"
        return file.read()


def records(data: bytes) -> Iterator[bytes]:
    """The records: each is the length that it has when it is unpacked, and what zlib made of it."""
    at = 0
    while at < len(data):
        (length,) = struct.unpack_from(">I", data, at)
        unpack = zlib.decompressobj()
        record = unpack.decompress(data[at + 4 :])
        assert len(record) == length, "a record is as long as it says"
        yield record
        at = len(data) - len(unpack.unused_data)


def strings(record: bytes) -> list[str]:
    """A vector of strings, as R writes it: format 3 in the network's byte order."""
    magic, version, _, _, encoding = struct.unpack_from(">2s4I", record)
    assert (magic, version) == (b"X\n", 3), "the record is of this format"
    at = 18 + encoding

    def number() -> int:
        nonlocal at
        (found,) = struct.unpack_from(">i", record, at)
        at += 4
        return found

    assert number() & 0xFF == STRINGS, "the record is a vector of strings"
    lines = []
    for _ in range(number()):
        assert number() & 0xFF == STRING, "its elements are strings"
        length = number()
        lines.append(record[at : at + length].decode("utf-8"))
        at += length
    return lines


def paragraphs(lines: list[str]) -> str:
    """Paragraphs of one line each, with an empty line between them."""
    parts = re.split(r"\n\s*\n", "\n".join(lines))
    return "\n\n".join(" ".join(part.split()) for part in parts if part.strip()) + "\n"


if __name__ == "__main__":
    for path in main(Path(sys.argv[1]), Path(sys.argv[2] if len(sys.argv) > 2 else "books")):
        print(f"{path}  {path.stat().st_size:,} bytes")
