"""Opens files that end in .gz or .zst as what they hold, in bounded memory."""

import io
import shutil
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import BinaryIO

CODECS = {".gz": "gzip", ".zst": "zstd"}
FREE_BYTES, BYTES_PER_BYTE = 64 << 20, 1000  # a file of any size may expand to the first, else so many times


def data_suffix(path: str | Path) -> str:
    """The suffix that says what a file holds, in lower case: ".csv" for data.CSV and for data.csv.gz."""
    path = Path(path)
    return (path.with_suffix("") if path.suffix.lower() in CODECS else path).suffix.lower()


def open_bytes(path: Path) -> BinaryIO:
    """The file opened for reading, decompressed while it is read; only an uncompressed one can be read twice."""
    codec = CODECS.get(path.suffix.lower())
    return io.BufferedReader(_Decompressed(path, codec), 1 << 18) if codec else open(path, "rb")


@contextmanager
def open_seekable(path: Path) -> Iterator[BinaryIO]:
    """Gives the file opened for reading at any place; a compressed one is decompressed to a temporary file."""
    with open_bytes(path) as file:
        if file.seekable():
            yield file
            return
        with tempfile.TemporaryFile() as copy:
            shutil.copyfileobj(file, copy)
            copy.seek(0)
            yield copy


class _Decompressed(io.RawIOBase):
    """The decompressed bytes of a file; reading raises ValueError if it is damaged, cut, or expands without limit."""

    def __init__(self, path, codec):
        import pyarrow as pa  # reading options, which needs data_suffix, must stay fast

        self.name, self.num_read = str(path), 0
        self.source = open(path, "rb")
        self.limit = FREE_BYTES + BYTES_PER_BYTE * path.stat().st_size
        self.stream = pa.CompressedInputStream(self.source, codec)

    def readable(self):
        return True

    def tell(self):
        return self.num_read

    def readinto(self, buffer):
        try:
            data = self.stream.read(len(buffer))
        except OSError as error:
            raise ValueError(f"{self.name}: damaged or cut ({error}); write or download it again") from None
        self.num_read += len(data)
        if self.num_read > self.limit:
            raise ValueError(
                f"{self.name}: it expands to more than {BYTES_PER_BYTE:,} times its size, far more than a file of "
                "texts does; write it again"
            )
        buffer[: len(data)] = data
        return len(data)

    def close(self):
        self.source.close()
        super().close()
