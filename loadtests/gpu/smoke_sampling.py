"""Smoke cases of routing and sampling."""

from collections.abc import Iterator

import numpy as np
import torch
from torch import Tensor

from penstock.kernels.moe.routing import Routing, route, route_reference
from penstock.kernels.sampling.logit_filters import FilterParams, top_k_top_p_min_p_reference
from penstock.kernels.sampling.logprobs import logprobs, logprobs_reference
from penstock.kernels.sampling.op import SamplingTensors, sample
from penstock.kernels.sampling.penalties import (
    Penalties,
    apply_penalties_,
    apply_penalties_reference,
)
from penstock.kernels.sampling.philox import gumbel_noise
from penstock.kernels.sampling.token_mask import apply_token_mask_, apply_token_mask_reference
from penstock.loadtests.gpu.smoke_inputs import Case, Inputs, Result, wide


def sampling(inputs: Inputs) -> Iterator[Case]:
    """Yield the cases of routing and sampling. Token logits are always float32."""
    generator = torch.Generator().manual_seed(1)
    logits = 3 * torch.randn(6, 900 if inputs.small else 128_256, generator=generator)
    yield "routing", lambda: _route(inputs)
    yield "sampled tokens", lambda: _sample(inputs, logits)
    yield "log probabilities", lambda: _logprobs(inputs, logits)
    yield "penalties", lambda: _penalties(inputs, logits)
    yield "token masks", lambda: _masks(inputs, logits)


def _route(inputs: Inputs) -> Result:
    logits, routing = inputs.randn(21, 64), Routing(6, normalise=True)
    dense = torch.zeros(21, 64)
    experts, weights = route(logits, routing)
    expected, exact = route_reference(logits.cpu(), routing)
    found = dense.scatter(1, experts.cpu().long(), weights.cpu())
    return found, dense.scatter(1, expected, exact)


def _sample(inputs: Inputs, logits: Tensor) -> Result:
    """Return two tensors: 1 for each token that equals the CPU's token (otherwise 0), and ones."""
    temperature = torch.tensor([0.0, 0.7, 1.0, 1.0, 1.3, 0.9])
    cuts = FilterParams(
        torch.tensor([0, 0, 50, 0, 0, 40]),
        torch.tensor([1.0, 1.0, 1.0, 0.9, 1.0, 0.8]),
        torch.tensor([0.0, 0.0, 0.0, 0.0, 0.05, 0.01]),
    )
    seeds, indices, choices = torch.arange(6) * -(7**21), torch.arange(6) * 70_001, torch.arange(6)
    everything = torch.ones(6)
    params = (temperature, cuts.top_p, cuts.min_p, everything, cuts.top_k, seeds, indices, choices)
    on_device = SamplingTensors(*(each.to(inputs.device) for each in params))
    tokens, valid = sample(logits.to(inputs.device), on_device)
    bits = seeds.numpy().view(np.uint64)
    noise = gumbel_noise(bits, indices.numpy(), choices.numpy(), logits.shape[1])
    noise[0] = 0
    scores = logits / torch.where(temperature > 0, temperature, 1.0)[:, None]
    expected = (top_k_top_p_min_p_reference(scores, cuts) + noise).argmax(-1)
    return ((tokens.cpu() == expected) & valid.cpu()).double(), everything


def _logprobs(inputs: Inputs, logits: Tensor) -> Result:
    tokens = torch.arange(len(logits)) * 97
    found = logprobs(logits.to(inputs.device), tokens.to(inputs.device), 20)
    exact = logprobs_reference(logits, tokens, 20)
    values = torch.cat((found.chosen[:, None], found.values), 1).cpu()
    same = torch.cat((found.ranks[:, None], found.tokens), 1).cpu() == torch.cat(
        (exact.ranks[:, None], exact.tokens), 1
    )
    return (
        torch.where(same, values, torch.nan),
        torch.cat((exact.chosen[:, None], exact.values), 1),
    )


def _penalties(inputs: Inputs, logits: Tensor) -> Result:
    num_rows, vocab = logits.shape
    generator = torch.Generator().manual_seed(2)
    tokens = torch.randint(min(vocab, 300), (num_rows, 200), generator=generator)
    counts = torch.full((num_rows,), 90), torch.full((num_rows,), 180)
    values = Penalties(*(torch.rand(num_rows, generator=generator) + 0.5 for _ in range(3)))
    on_device = Penalties(
        *(each.to(inputs.device) for each in (values.repetition, values.presence, values.frequency))
    )
    num_prompt, num_tokens = (each.to(inputs.device) for each in counts)
    found = logits.to(inputs.device, copy=True)
    apply_penalties_(found, tokens.to(inputs.device), num_prompt, num_tokens, on_device)
    return found, apply_penalties_reference(wide(logits), tokens, *counts, values)


def _masks(inputs: Inputs, logits: Tensor) -> Result:
    vocab = logits.shape[1]
    generator, masked = torch.Generator().manual_seed(3), torch.tensor([4, 1])
    words = torch.randint(-(1 << 31), 1 << 31, (2, -(-vocab // 32)), generator=generator)
    words = words.to(torch.int32)
    found = logits.to(inputs.device, copy=True)
    apply_token_mask_(found, masked.to(inputs.device), words.to(inputs.device))
    exact = apply_token_mask_reference(logits, masked, words)
    return found.clamp(min=-100), exact.clamp(min=-100)
