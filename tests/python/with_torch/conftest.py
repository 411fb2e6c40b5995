"""The tiny model, as it is and with kv4's attention, for tests on the CPU."""
import pytest
import torch

from tiny_model import tiny_model

torch.set_num_threads(1)
torch.set_grad_enabled(False)


@pytest.fixture(scope="module", params=["unmodified", "accelerated"])
def model(request):
    from kv4.transformers import accelerate

    return accelerate(tiny_model()) if request.param == "accelerated" else tiny_model()
