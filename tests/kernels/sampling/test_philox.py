"""Compares Philox with published test vectors, and Gumbel noise with a Philox reference."""

import numpy as np
import pytest
import torch

from penstock.kernels.sampling.philox import (
    SAMPLE,
    gumbel_,
    gumbel_noise,
    gumbel_noise_reference,
    philox,
    philox_reference,
)

ALL = 0xFFFFFFFF

# Published test vectors of Random123 for philox4x32-10: (counter, key, output words).
KNOWN = [
    ((0, 0, 0, 0), (0, 0), (0x6627E8D5, 0xE169C58D, 0xBC57AC4C, 0x9B00DBD8)),
    ((ALL, ALL, ALL, ALL), (ALL, ALL), (0x408F276D, 0x41C83B0E, 0xA20BC7C6, 0x6D5451FD)),
    (
        (0x243F6A88, 0x85A308D3, 0x13198A2E, 0x03707344),
        (0xA4093822, 0x299F31D0),
        (0xD16CFE09, 0x94FDCCEB, 0x5001E420, 0x24126EA1),
    ),
]


@pytest.mark.parametrize(("counter", "key", "words"), KNOWN)
def test_known_answers(counter: tuple[int, ...], key: tuple[int, ...], words: object) -> None:
    found = philox_reference([torch.tensor(c) for c in counter], [torch.tensor(k) for k in key])
    assert tuple(found.tolist()) == words
    c, k = np.array(counter, np.uint32), np.array(key, np.uint32)
    even, odd = philox(c[::2, None, None], c[1::2, None, None], k[:, None, None])
    assert (*even.ravel()[:1], *odd.ravel()[:1], *even.ravel()[1:], *odd.ravel()[1:]) == words


def test_noise_is_derived_from_philox_of_seed_index_choice_and_token() -> None:
    seeds = np.array([3, 2**64 - 1, 0x1234567890ABCDEF], np.uint64)
    indices, choices = np.array([0, 9, 70000]), np.array([0, 2, 1])
    noise = gumbel_noise(seeds, indices, choices, 1003)
    assert noise.shape == (3, 1003)
    assert noise.dtype == torch.float32
    tokens = torch.arange(1003)
    for row, seed in enumerate(seeds.tolist()):
        counter = [tokens // 4, *(torch.tensor(int(n[row])) for n in (indices, choices))]
        key = [torch.tensor(seed & ALL), torch.tensor(seed >> 32)]
        words = philox_reference([*counter, torch.tensor(SAMPLE)], key)
        uniform = (words[tokens % 4, tokens].double() + 0.5) / 2**32
        expected = -torch.log(-torch.log1p(-uniform))
        torch.testing.assert_close(noise[row].double(), expected, rtol=1e-5, atol=1e-5)


def test_noise_bits_of_a_row_do_not_depend_on_the_batch() -> None:
    numbers = np.random.default_rng(0)
    seeds = numbers.integers(0, 2**64, 40, dtype=np.uint64)
    indices, choices = numbers.integers(0, 1000, 40), numbers.integers(0, 4, 40)
    # With this many tokens, the noise is generated in several chunks.
    batched = gumbel_noise(seeds, indices, choices, 2047)
    for row in range(40):
        at = slice(row, row + 1)
        assert torch.equal(gumbel_noise(seeds[at], indices[at], choices[at], 2047)[0], batched[row])


def test_noise_differs_for_another_seed_index_choice_or_purpose() -> None:
    def noise(seed: int, index: int, choice: int, purpose: int) -> torch.Tensor:
        return gumbel_noise(
            np.array([seed], np.uint64), np.array([index]), np.array([choice]), 64, purpose
        )

    cases = [(1, 2, 3, 0), (1 + 2**32, 2, 3, 0), (2, 2, 3, 0), (1, 3, 2, 0), (1, 2, 3, 1)]
    found = [noise(*case) for case in cases]
    for number, one in enumerate(found):
        assert not any(torch.equal(one, other) for other in found[:number])


def test_smallest_and_largest_words_give_finite_noise() -> None:
    words = np.array([0, 1, 2**31, 2**32 - 129, 2**32 - 128, 2**32 - 1], np.float32)
    noise = gumbel_(words)
    assert np.isfinite(noise).all()
    assert float(noise[0]) == pytest.approx(-np.log(2.0**-33), rel=1e-6)


def test_noise_has_float32_precision() -> None:
    words = np.random.default_rng(1).integers(0, 2**32, 100_000).astype(np.float32)
    uniform = np.minimum((words.astype(np.float64) + 0.5) / 2**32, 1 - 2.0**-24)
    uniform = uniform.astype(np.float32).astype(np.float64)  # `gumbel_` rounds to float32, too
    exact = -np.log(-np.log1p(-uniform))
    np.testing.assert_allclose(gumbel_(words), exact, rtol=4e-7, atol=4e-7)


def test_compiled_noise_has_the_bits_of_the_reference() -> None:
    fill_fast = pytest.importorskip("penstock.kernels.sampling.cpu_philox").gumbel_noise
    numbers = np.random.default_rng(2)
    for num_lanes in (1, 511, 512, 1500):
        counters = numbers.integers(0, 2**32, (3, 3), dtype=np.uint32)
        keys = numbers.integers(0, 2**32, (2, 3), dtype=np.uint32)
        plain, fast = np.full((2, 3, 4 * num_lanes), np.nan, np.float32)
        gumbel_noise_reference(plain, counters, keys)
        fill_fast(fast, counters, keys)
        assert np.array_equal(plain.view(np.int32), fast.view(np.int32))
