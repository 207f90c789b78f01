"""A pickle that creates a file when it is loaded."""

import asyncio
import pickle
from pathlib import Path

TIMEOUT_SECONDS = 60


class PickleBomb:
    """A pickle in `data`, which creates the file `path` when a process loads it."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self.data = pickle.dumps(self)

    def __reduce__(self) -> tuple[object, tuple[object, ...]]:
        return Path.touch, (self.path,)

    def was_loaded(self) -> bool:
        """Return True if a process has loaded the pickle; if not, check that loading it works."""
        if self.path.exists():
            return True
        pickle.loads(self.data)
        assert self.path.exists(), "loading the pickle creates no file: the test proves nothing"
        self.path.unlink()
        return False


async def send_raw(address: str, sent: bytes) -> bytes:
    """Send bytes to `host:port`; return all bytes of the reply once the peer has closed."""
    host, _, port = address.rpartition(":")
    async with asyncio.timeout(TIMEOUT_SECONDS):
        reader, writer = await asyncio.open_connection(host, int(port))
        writer.write(sent)
        writer.write_eof()
        try:
            return await reader.read()
        finally:
            writer.close()
