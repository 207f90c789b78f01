"""Hashes the blocks of prompts, so that placement can find cached prefixes at workers.

The hashes are the same as those of the workers.
"""

from collections.abc import Awaitable, Callable, Collection, Mapping, Sequence
from typing import Protocol

import numpy as np

from penstock.common.block_hash import root_hash, short_prefix_hashes
from penstock.router.errors import ServingError
from penstock.router.requests.request import GenerationRequest

INLINE_BLOCKS = 64
"""Prompts up to this number of blocks are hashed on the event loop, in about 0.1 ms."""

CHARS_PER_BLOCK = 16
"""In the threads' queue, a block counts as this many characters, which take as long to tokenize."""

Hashes = Mapping[int, Sequence[int]]


class RunInThread(Protocol):
    """A function that runs `work` in a thread (see `EncodingLine.run`)."""

    def __call__(
        self, tenant: str, num_chars: int, work: Callable[[], Hashes]
    ) -> Awaitable[Hashes]: ...


class PromptHasher:
    """Computes the short hashes of prompts for the block sizes of the connected workers.

    Args:
        key: secret of the cluster; workers hash with the same key.
        block_sizes: returns the block sizes of the connected workers.
        run: runs long work in a thread.
    """

    def __init__(
        self, key: bytes, block_sizes: Callable[[], Collection[int]], run: RunInThread
    ) -> None:
        self._key = key
        self._block_sizes = block_sizes
        self._run = run

    async def hashes(self, request: GenerationRequest, packed: bytes) -> Hashes:
        """Return the short hashes of the prompt's full blocks, by block size.

        The result is empty if too much work waits for a thread. The request is then placed without
        regard to cached blocks. `packed` is the prompt as bytes
        (`protos.worker_codec.pack_tokens`).
        """
        sizes, num_tokens = self._block_sizes(), len(request.prompt)
        num_blocks = sum(num_tokens // size for size in sizes)
        if not num_blocks:
            return {}
        if num_blocks <= INLINE_BLOCKS:
            return self._hash(request, packed, sizes)
        try:
            return await self._run(
                request.tenant,
                num_blocks * CHARS_PER_BLOCK,
                lambda: self._hash(request, packed, sizes),
            )
        except ServingError:
            return {}

    def _hash(self, request: GenerationRequest, packed: bytes, sizes: Collection[int]) -> Hashes:
        root = root_hash(self._key, request.salt)
        tokens = np.frombuffer(packed, "<i4")
        return {size: short_prefix_hashes(root, tokens, size) for size in sizes}
