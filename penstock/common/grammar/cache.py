"""A bounded cache of compiled grammars. The least recently used grammar is evicted first."""

import threading
from collections import OrderedDict
from collections.abc import Callable

from penstock.common.grammar.matcher import CompiledGrammar, GrammarVocabulary
from penstock.common.structured_outputs import StructuredOutputs

MAX_BYTES = 64 << 20
"""Limit of the memory of the cached grammars, by the estimate of `grammar_bytes`."""


class GrammarCache:
    """Compiles constraints and caches the compiled grammars. Thread-safe.

    Args:
        make_vocabulary: builds the vocabulary when it is first needed.
        max_bytes: limit of the memory of the cached grammars. The newest grammar is always kept.
    """

    def __init__(
        self,
        make_vocabulary: Callable[[], GrammarVocabulary],
        max_bytes: int = MAX_BYTES,
    ) -> None:
        self.num_compiled = 0
        self._make_vocabulary = make_vocabulary
        self._max_bytes = max_bytes
        self._vocabulary: GrammarVocabulary | None = None
        self._grammars: OrderedDict[StructuredOutputs, CompiledGrammar] = OrderedDict()
        self._num_bytes = 0
        self._lock = threading.Lock()
        self._compiling = threading.Lock()

    def find(self, wanted: StructuredOutputs) -> CompiledGrammar | None:
        """Return the grammar of a constraint if it is cached, and None otherwise.

        This method does not wait for a compilation.
        """
        with self._lock:
            found = self._grammars.get(wanted)
            if found is not None:
                self._grammars.move_to_end(wanted)
            return found

    def compile(self, wanted: StructuredOutputs) -> CompiledGrammar:
        """Return the grammar of a constraint. If the grammar is not cached, compile it first.

        Raises:
            InvalidParameterError: the constraint is invalid, not supported or too large.
            ValueError: the model has no end token.
        """
        with self._compiling:
            found = self.find(wanted)
            if found is not None:
                return found
            if self._vocabulary is None:
                self._vocabulary = self._make_vocabulary()
            found = self._vocabulary.compile(wanted)
            self.num_compiled += 1
            self._add(found)
            return found

    def _add(self, grammar: CompiledGrammar) -> None:
        with self._lock:
            self._grammars[grammar.wanted] = grammar
            self._num_bytes += grammar_bytes(grammar)
            while self._num_bytes > self._max_bytes and len(self._grammars) > 1:
                _, oldest = self._grammars.popitem(last=False)
                self._num_bytes -= grammar_bytes(oldest)


def grammar_bytes(grammar: CompiledGrammar) -> int:
    """Estimate the memory of a compiled grammar with its lexer states, in bytes.

    The numbers were measured with schemas of 0.1 to 4 kB: such a grammar takes 80 to 360 KiB.
    """
    return (128 << 10) + 80 * len(grammar.wanted.text.encode())
