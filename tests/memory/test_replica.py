import pytest
import torch
from torch import nn
from torch._subclasses.fake_tensor import FakeTensor

from mimicnorm.errors import ExampleError, MemoryPredictionError
from mimicnorm.memory.replica import first_samples, replicate


def small():
    return nn.Sequential(nn.Conv2d(3, 4, 3), nn.BatchNorm2d(4), nn.Flatten(), nn.Linear(144, 2))


def test_a_fake_replica_keeps_shapes_ties_and_layouts():
    model = nn.Sequential(nn.Conv2d(4, 4, 3), nn.Conv2d(4, 4, 3)).to(memory_format=torch.channels_last)
    model[1].weight = model[0].weight
    model[0].weight.grad = torch.ones_like(model[0].weight)
    twin = replicate(model, (2, 4, 8, 8)).model
    assert isinstance(twin[0].weight, FakeTensor)
    assert isinstance(twin[0].weight, nn.Parameter)
    assert twin[1].weight is twin[0].weight
    assert twin[0].weight.stride() == model[0].weight.stride()
    assert twin[0].weight.grad is None
    assert model[0].weight.grad is not None


def test_a_model_in_evaluation_mode_is_taken_to_training_and_frozen_parts_stay_frozen():
    model = small().eval()
    assert all(module.training for module in replicate(model, (2, 3, 8, 8)).model.modules())
    model.train()
    model[1].eval()
    assert not replicate(model, (2, 3, 8, 8)).model[1].training


def test_every_input_with_the_batch_dimension_is_resized_in_its_layout():
    images = torch.zeros(2, 3, 8, 8).to(memory_format=torch.channels_last)
    replica = replicate(small(), (images, {"mask": torch.zeros(2, 5), "table": torch.zeros(7, 2)}), batch=640)
    shapes = [tuple(tensor.shape) for tensor in replica.inputs]
    assert shapes == [(640, 3, 8, 8), (640, 5), (7, 2)]
    assert replica.inputs[0].is_contiguous(memory_format=torch.channels_last)


def test_first_samples_of_any_example():
    tensors = {"x": torch.arange(10).view(5, 2), "scale": torch.ones(())}
    assert first_samples((256, 3, 8, 8), 2) == (2, 3, 8, 8)
    assert first_samples((1, 3), 2) == (1, 3)
    assert first_samples(tensors, 2)["x"].tolist() == [[0, 1], [2, 3]]
    assert first_samples(tensors, 2)["scale"].dim() == 0


def test_nothing_to_train_is_said():
    with pytest.raises(MemoryPredictionError, match="no parameter that requires a gradient"):
        replicate(small().requires_grad_(False), (2, 3, 8, 8))


@pytest.mark.filterwarnings("ignore:Lazy modules")
def test_a_lazy_parameter_is_named():
    with pytest.raises(MemoryPredictionError, match=r"'1\.weight' has no shape yet"):
        replicate(nn.Sequential(nn.Linear(2, 2), nn.LazyLinear(3)), (2, 2))


def test_an_example_without_a_batch_is_refused():
    with pytest.raises(ExampleError, match="no tensor with a batch dimension"):
        replicate(small(), torch.tensor(1.0), batch=4)
