"""A client of a gRPC port that sends single HTTP/2 frames, so it can violate the protocol."""

import asyncio
import contextlib
import re
from collections.abc import AsyncIterator
from typing import NamedTuple

PREFACE = b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n"
DATA, HEADERS, RST_STREAM, SETTINGS, PING, GOAWAY, WINDOW_UPDATE = 0, 1, 3, 4, 6, 7, 8
ACK = END_STREAM = 1
END_HEADERS = 4
REFUSALS = (7, 11)  # codes of REFUSED_STREAM and ENHANCE_YOUR_CALM
INITIAL_WINDOW_SIZE = 4

TIMEOUT_SECONDS = 60.0  # a limit that only failing tests reach


class Frame(NamedTuple):
    """A frame of HTTP/2."""

    kind: int
    flags: int
    stream: int
    payload: bytes = b""

    def encode(self) -> bytes:
        length = len(self.payload).to_bytes(3, "big")
        return (
            length + bytes((self.kind, self.flags)) + self.stream.to_bytes(4, "big") + self.payload
        )


def settings(**values: int) -> Frame:
    """Return a SETTINGS frame; the only known name is `initial_window_size`."""
    payload = b"".join(
        {"initial_window_size": INITIAL_WINDOW_SIZE}[name].to_bytes(2, "big")
        + value.to_bytes(4, "big")
        for name, value in values.items()
    )
    return Frame(SETTINGS, 0, 0, payload)


def header_block(path: str, *metadata: tuple[str, str]) -> bytes:
    """Return the HPACK form of the headers of a call, without compression."""
    fields = [
        *((":method", "POST"), (":scheme", "http"), (":path", path), (":authority", "test")),
        *(("te", "trailers"), ("content-type", "application/grpc"), *metadata),
    ]
    return b"".join(b"\x00" + _string(name) + _string(value) for name, value in fields)


def headers(stream: int, path: str, *metadata: tuple[str, str]) -> Frame:
    """Return the frame that opens a call."""
    return Frame(HEADERS, END_HEADERS, stream, header_block(path, *metadata))


def message(stream: int, data: bytes) -> Frame:
    """Return a frame with a whole message of a call."""
    return Frame(DATA, 0, stream, b"\x00" + len(data).to_bytes(4, "big") + data)


def window_update(stream: int, num_bytes: int) -> Frame:
    """Return the frame that lets the server send more of a call's messages."""
    return Frame(WINDOW_UPDATE, 0, stream, num_bytes.to_bytes(4, "big"))


def _string(text: str) -> bytes:
    data = text.encode()
    assert len(data) < 127
    return bytes((len(data),)) + data


class RawHttp2:
    """A connection; acknowledges SETTINGS and PINGs, and keeps all other frames."""

    def __init__(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self.frames: list[Frame] = []
        self.is_closed = False  # True once the server has closed the connection
        self._reader, self._writer = reader, writer
        self._changed = asyncio.Condition()
        self._task = asyncio.create_task(self._read())

    def send(self, *frames: Frame | bytes) -> None:
        data = (each if isinstance(each, bytes) else each.encode() for each in frames)
        self._writer.write(b"".join(data))

    async def frame(self, kind: int, stream: int = 0, flags: int = 0) -> Frame:
        """Wait for a frame of this kind, with these flags, on this stream."""

        def found() -> list[Frame]:
            same = [each for each in self.frames if (each.kind, each.stream) == (kind, stream)]
            return [each for each in same if each.flags & flags == flags]

        async with asyncio.timeout(TIMEOUT_SECONDS), self._changed:
            await self._changed.wait_for(lambda: found() or self.is_closed)
        assert found(), f"the connection was closed after {self.frames}"
        return found()[0]

    async def status(self, stream: int) -> int:
        """Wait for the status of the call `stream`, which must be the connection's first call."""
        trailer = await self.frame(HEADERS, stream, END_STREAM)
        found = re.search(rb"grpc-status.(\d+)", trailer.payload)
        assert found, trailer
        return int(found[1])

    async def until_closed(self) -> None:
        async with asyncio.timeout(TIMEOUT_SECONDS), self._changed:
            await self._changed.wait_for(lambda: self.is_closed)

    async def close(self) -> None:
        self._task.cancel()
        self._writer.close()

    async def _read(self) -> None:
        with contextlib.suppress(asyncio.IncompleteReadError, ConnectionError):
            while True:
                head = await self._reader.readexactly(9)
                payload = await self._reader.readexactly(int.from_bytes(head[:3], "big"))
                frame = Frame(head[3], head[4], int.from_bytes(head[5:], "big"), payload)
                if frame.kind in (SETTINGS, PING) and not frame.flags & ACK:
                    answer = payload if frame.kind == PING else b""
                    self.send(Frame(frame.kind, ACK, 0, answer))
                await self._add(frame)
        await self._add(None)

    async def _add(self, frame: Frame | None) -> None:
        async with self._changed:
            if frame is None:
                self.is_closed = True
            else:
                self.frames.append(frame)
            self._changed.notify_all()


@contextlib.asynccontextmanager
async def raw_http2(
    address: str, *frames: Frame | bytes, source: str = "127.0.0.1"
) -> AsyncIterator[RawHttp2]:
    """Connect to `host:port` from the address `source`, and send exactly these frames."""
    host, _, port = address.rpartition(":")
    client = RawHttp2(*await asyncio.open_connection(host, int(port), local_addr=(source, 0)))
    client.send(*frames)
    yield client
    await client.close()
