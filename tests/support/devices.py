"""Where kernels are tested: interpreted on the CPU (`make kernels`), or on a GPU (`make gpu`)."""

import os

import torch

DEVICE = torch.device(os.environ.get("PENSTOCK_TEST_DEVICE", "cpu"))
"""What the fixture `device` gives."""

ON_GPU = DEVICE.type != "cpu"

DTYPES = (torch.float32, torch.float16, *((torch.bfloat16,) if ON_GPU else ()))
"""To test kernels in. The interpreter is silently wrong in bfloat16."""


def runs_kernels() -> bool:
    """Whether kernels run on `DEVICE`: what a CPU needs is there from the start, or never."""
    return ON_GPU or os.environ.get("TRITON_INTERPRET") == "1"
