"""The devices that tests can use here."""
import pytest
import torch

import kv4

WHY_NO_GPU = kv4.why_no_cuda() or ("" if torch.cuda.is_available() else "torch finds no GPU")
needs_gpu = pytest.mark.skipif(bool(WHY_NO_GPU), reason=f"no GPU: {WHY_NO_GPU}")
DEVICES = ["cpu", pytest.param("cuda", marks=needs_gpu)]
