from __future__ import annotations

import pytest
import torch


@pytest.fixture(autouse=True)
def one_thread():
    # the tensors are small: threads would only wait for each other
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)


@pytest.fixture
def inputs() -> torch.Tensor:
    """Six vectors of different norms with correlations of both signs."""
    rng = torch.Generator().manual_seed(3)
    x = torch.randn(6, 5, dtype=torch.float64, generator=rng) + 0.4
    return x * torch.tensor([0.3, 0.7, 1.0, 1.4, 2.0, 3.0], dtype=torch.float64)[:, None]
