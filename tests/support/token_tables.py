"""Histories of tokens as sequence tables, which the sampler reads."""

from dataclasses import dataclass

import numpy as np

from penstock.workers.scheduling.sequence import Ints


@dataclass
class Table:
    """A sequence table with one row per sequence."""

    tokens: Ints
    num_tokens: Ints
    num_prompt: Ints


def table(num_rows: int, vocab_size: int, seed: int = 0) -> Table:
    """Return a table of short prompts and answers with random tokens."""
    numbers = np.random.default_rng(seed)
    num_prompt = numbers.integers(1, 9, num_rows).astype(np.int32)
    answers = numbers.integers(0, 9, num_rows).astype(np.int32)
    tokens = numbers.integers(0, vocab_size, (num_rows, 20)).astype(np.int32)
    return Table(tokens, num_prompt + answers, num_prompt)


def one_row_table(prompt: list[int], answer: list[int]) -> Table:
    """Return a table with one sequence."""
    tokens = np.array([prompt + answer], np.int32)
    return Table(tokens, *(np.array([n], np.int32) for n in (tokens.size, len(prompt))))
