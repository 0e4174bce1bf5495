import pytest
import torch
from torch import nn

from mimicnorm.errors import ExampleError
from mimicnorm.memory import largest_batch, measure
from mimicnorm.memory.samples import with_samples


def test_every_tensor_with_the_batch_dimension_is_resized_in_its_layout():
    images = torch.arange(2.0).view(2, 1, 1, 1).expand(2, 3, 8, 8).contiguous(memory_format=torch.channels_last)
    images.requires_grad_()
    example = (images, {"mask": torch.zeros(2, 5), "table": torch.zeros(7, 2), "scale": torch.ones(())})
    resized, others = with_samples(example, 5)
    assert resized.is_contiguous(memory_format=torch.channels_last)
    assert resized.requires_grad
    assert resized[:, 0, 0, 0].tolist() == [0, 1, 0, 1, 0]  # values stay valid
    assert {name: tuple(tensor.shape) for name, tensor in others.items()} == {
        "mask": (5, 5),
        "table": (7, 2),
        "scale": (),
    }
    assert with_samples(example, 1)[0].shape == (1, 3, 8, 8)


def test_a_shape_is_resized_and_anything_else_left():
    assert with_samples((256, 3, 8, 8), 2) == (2, 3, 8, 8)
    assert with_samples("nothing", 2) == "nothing"


def test_an_example_without_a_batch_is_refused():
    with pytest.raises(ExampleError, match="no tensor with a batch dimension"):
        measure(nn.Linear(3, 2), torch.tensor(1.0), batch=4)


def test_real_batches_of_another_size_hold_valid_values():
    words = torch.randint(0, 5, (3, 6))
    model = nn.Sequential(nn.Embedding(5, 4), nn.Flatten(), nn.Linear(24, 5))
    assert largest_batch(model, words, "16 KiB", fake=False) == largest_batch(model, words, "16 KiB") > 3
