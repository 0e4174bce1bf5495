import sys
from pathlib import Path

import pytest
import torch

from mimicnorm.data import Memory

sys.path.insert(0, str(Path(__file__).parent))


@pytest.fixture
def source():
    """Eight images that look like CIFAR-100's."""
    images = torch.randint(0, 256, (8, 3, 32, 32), dtype=torch.uint8, generator=torch.Generator().manual_seed(0))
    numbers = (0.5, 0.5, 0.5), (0.2, 0.2, 0.2)
    return Memory("cifar100", 100, (3, 32, 32), "cifar", "standard", *numbers, images, torch.arange(8), 4, True)
