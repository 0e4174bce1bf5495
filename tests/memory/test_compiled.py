import copy

import pytest
import torch
from torch import nn
from torch.autograd.graph import saved_tensors_hooks
from torch.nn import functional as F

from mimicnorm.memory import measure

SHAPE = (4, 3, 10, 10)
pytestmark = pytest.mark.filterwarnings("ignore:`torch.jit.script_method` is deprecated")  # PyTorch's own use


def small():
    return nn.Sequential(nn.Conv2d(3, 8, 3, bias=False), nn.BatchNorm2d(8), nn.ReLU(), nn.Flatten(), nn.Linear(512, 10))


def test_a_compiled_network_saves_what_the_partitioner_saves():
    model = nn.Sequential(*small()[:3], nn.Conv2d(8, 8, 3), nn.BatchNorm2d(8), nn.GELU(), nn.Flatten())
    eager = measure(model, SHAPE)
    predicted = measure(torch.compile(model), SHAPE)

    compiled = torch.compile(copy.deepcopy(model), backend="aot_eager_decomp_partition")
    images = torch.rand(SHAPE)
    given = {t.untyped_storage()._cdata for t in (images, *compiled.parameters(), *compiled.buffers())}
    storages = {}

    def pack(tensor):
        storage = tensor.untyped_storage()
        if storage._cdata not in given:
            storages[storage._cdata] = storage.nbytes()
        return tensor

    with saved_tensors_hooks(pack, lambda tensor: tensor):
        loss = F.cross_entropy(compiled(images), torch.zeros(4, dtype=torch.long))
    assert predicted.saved_bytes == sum(storages.values())
    del loss
    assert predicted.saved_bytes < 0.9 * eager.saved_bytes


def test_compiled_parts_are_named_and_stay_compiled():
    model = small()
    eager = measure(model, SHAPE)
    model[1] = torch.compile(nn.Sequential(model[1], nn.Tanh(), nn.Sigmoid(), nn.Tanh()))
    part = measure(model, SHAPE)
    assert set(part.by_module()) == {"1", "2", "(loss)"}
    assert part.by_module()["2"] == eager.by_module()["2"]
    with torch._dynamo.config.patch(recompile_limit=1):  # after which the compiler would give up silently
        for batch in (5, 6, 7):
            again = measure(model, (batch, *SHAPE[1:]))
            statistics = part.by_module()["1"] % 4096
            assert (again.by_module()["1"] - statistics) * 4 == (part.by_module()["1"] - statistics) * batch
    assert isinstance(model[1], torch._dynamo.eval_frame.OptimizedModule)


def test_a_module_compiled_in_place_stays_as_it_was():
    model, wrapped = small(), torch.compile(small())
    model.compile()
    call = model._compiled_call_impl
    assert measure(model, SHAPE).as_dict() == measure(wrapped, SHAPE).as_dict()
    assert model._compiled_call_impl is call
    assert set(measure(model, SHAPE).by_module()) == {"(model)", "(loss)"}
