"""The table of docs/compatibility.md: one check per row, run with both ways of centring."""

from __future__ import annotations

import copy
import pickle
import re
from collections.abc import Callable
from pathlib import Path

import nets
import numpy as np
import pytest
import sharded
import torch
import zoo
from torch import Tensor, nn
from torch.func import functional_call, grad, vmap
from torch.nn.functional import cross_entropy
from torch.utils.data import DataLoader, TensorDataset

import mimicnorm as mn

SHAPE = (6, 3, 8, 8)
ROWS: dict[str, Callable[[str, Path], None]] = {}


def row(feature: str):
    def register(check):
        ROWS[feature] = check
        return check

    return register


def converted(centre: str, make: Callable[[], nn.Module] = nets.resnet, **settings) -> nn.Module:
    model = make().double()
    mn.convert_(model, mn.MimicNorm(centre=centre, min_fan_in=8, **settings), example=SHAPE)
    return model


def batch() -> tuple[Tensor, Tensor]:
    return torch.randn(SHAPE, dtype=torch.float64), torch.arange(SHAPE[0]) % 5


def gradients(model: nn.Module, run: Callable, x: Tensor, y: Tensor) -> dict[str, Tensor]:
    """The gradients of the model's parameters by name, when ``run`` computes the logits."""
    model.zero_grad()
    cross_entropy(run(x), y).backward()
    return {name: p.grad.clone() for name, p in model.named_parameters()}


def steps(model: nn.Module, optimizer: torch.optim.Optimizer, x: Tensor, y: Tensor, count: int = 5) -> list[float]:
    losses = []
    for _ in range(count):
        optimizer.zero_grad()
        loss = cross_entropy(model(x), y)
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    return losses


@row("torch.compile")
def compiled(centre, folder):
    model, (x, y) = converted(centre), batch()
    expected = gradients(model, model, x, y)
    torch._dynamo.reset()
    run = torch.compile(model, fullgraph=True, backend="aot_eager")
    torch.testing.assert_close(gradients(model, run, x, y), expected)


@row("torch.export")
def exported(centre, folder):
    model, (x, _) = converted(centre).eval(), batch()
    batch_size = torch.export.Dim("batch")
    program = torch.export.export(model, (x,), dynamic_shapes=({0: batch_size},))
    torch.export.save(program, folder / "net.pt2")
    x = torch.randn(3, *SHAPE[1:], dtype=torch.float64)
    torch.testing.assert_close(torch.export.load(folder / "net.pt2").module()(x), model(x))


@row("AMP")
def autocast(centre, folder):
    def rounding(model: nn.Module) -> float:
        """How far bf16 moves the gradient, as a fraction of it."""
        x, y = batch()
        wide = gradients(model.float(), model, x.float(), y)
        with torch.autocast("cpu", torch.bfloat16):
            narrow = gradients(model, model, x.float(), y)
        assert all(g.dtype is torch.float32 for g in narrow.values())
        wide, narrow = (torch.cat([g.flatten() for g in grads.values()]) for grads in (wide, narrow))
        return float((narrow - wide).norm() / wide.norm())

    assert rounding(converted(centre)) < 2 * rounding(nets.resnet())


@row("channels_last")
def channels_last(centre, folder):
    model, (x, y) = converted(centre), batch()
    expected = gradients(model, model, x, y)
    model.to(memory_format=torch.channels_last)
    x = x.to(memory_format=torch.channels_last)
    assert model.stem(x).is_contiguous(memory_format=torch.channels_last)
    torch.testing.assert_close(gradients(model, model, x, y), expected)


def over_two_processes(kind, centre, folder):
    model = sharded.network(centre)
    expected = gradients(model, model, *sharded.batch())
    torch.testing.assert_close(sharded.gradients(kind, centre, folder), expected)


@row("DDP")
def ddp(centre, folder):
    over_two_processes("DDP", centre, folder)


@row("FSDP2")
def fsdp2(centre, folder):
    over_two_processes("FSDP2", centre, folder)


@row("gradient checkpointing")
def checkpointed(centre, folder):
    model, (x, y) = converted(centre), batch()

    def run(x):
        features = torch.utils.checkpoint.checkpoint_sequential(model.blocks, 3, model.stem(x), use_reentrant=False)
        return model.fc(features.mean((2, 3)))

    torch.testing.assert_close(gradients(model, run, x, y), gradients(model, model, x, y))


@row("EMA")
def averaged(centre, folder):
    model, (x, y) = converted(centre), batch()
    ema = torch.optim.swa_utils.AveragedModel(model, multi_avg_fn=torch.optim.swa_utils.get_ema_multi_avg_fn(0.9))
    ema.update_parameters(model)  # the first is a copy
    expected = {name: 0.9 * p.detach() for name, p in model.named_parameters()}
    steps(model, torch.optim.SGD(model.parameters(), 0.1), x, y, 1)
    ema.update_parameters(model)
    for name, p in model.named_parameters():
        torch.testing.assert_close(ema.module.get_parameter(name), expected[name] + 0.1 * p)
    torch.optim.swa_utils.update_bn([x], ema)  # the statistics of the last BN
    body = nn.Linear.forward(ema.module.fc, ema.module.blocks(ema.module.stem(x)).mean((2, 3)))
    torch.testing.assert_close(ema.module.fc.last_norm.running_mean, body.mean(0))


@row("torch.func")
def per_sample_by_vmap(centre, folder):
    model, (x, y) = converted(centre, last_norm=False), batch()
    values = {name: p.detach() for name, p in model.named_parameters()}
    loss = lambda p, x, y: cross_entropy(functional_call(model, p, (x[None],)), y[None])  # noqa: E731
    each = vmap(grad(loss), (None, 0, 0))(values, x, y)
    for i in range(len(x)):
        alone = gradients(model, model, x[i : i + 1], y[i : i + 1])
        torch.testing.assert_close({name: g[i] for name, g in each.items()}, alone)


def same_gradients(model, twin):
    x, y = batch()
    assert type(twin.fc) is type(model.fc)
    torch.testing.assert_close(gradients(twin, twin, x, y), gradients(model, model, x, y))
    assert not {p.data_ptr() for p in twin.parameters()} & {p.data_ptr() for p in model.parameters()}


@row("pickling")
def pickled(centre, folder):
    model = converted(centre)
    same_gradients(model, pickle.loads(pickle.dumps(model)))
    torch.save(model, folder / "net.pt")
    same_gradients(model, torch.load(folder / "net.pt", weights_only=False))


@row("deepcopy")
def copied(centre, folder):
    model = converted(centre)
    same_gradients(model, copy.deepcopy(model))


@row("SGD")
def sgd(centre, folder):
    model, (x, y) = converted(centre), batch()
    mn.project_(model)
    other = converted("backward" if centre == "forward" else "forward")
    other.load_state_dict(model.state_dict())
    losses = [steps(m, torch.optim.SGD(m.parameters(), 0.05, 0.9, weight_decay=1e-3), x, y) for m in (model, other)]
    assert losses[0][-1] < losses[0][0]
    torch.testing.assert_close(*losses)


@row("AdamW")
def adamw(centre, folder):
    model, (x, y) = converted(centre), batch()
    optimizer = torch.optim.AdamW(model.parameters(), 0.003)
    if centre == "backward":
        optimizer.register_step_post_hook(lambda *_: mn.project_(model))
    losses = steps(model, optimizer, x, y)
    assert losses[-1] < losses[0]
    centred = [m for m in model.modules() if isinstance(m, mn.layers.WeightMean)]
    assert centred
    for layer in centred:
        assert layer.effective_weight().mean((1, 2, 3)).abs().max() < 1e-12


@row("jit.trace")
def traced(centre, folder):
    model, (x, _) = converted(centre).eval(), batch()
    torch.jit.trace(model, x).save(folder / "net.pt")
    loaded = torch.jit.load(folder / "net.pt")
    x, y = torch.randn(3, *SHAPE[1:], dtype=torch.float64), torch.arange(3)
    torch.testing.assert_close(gradients(loaded, loaded, x, y), gradients(model, model, x, y))


@row("jit.script")
def scripted(centre, folder):
    model, (x, _) = converted(centre).eval(), batch()
    with pytest.raises(mn.MimicNormError, match=r"torch\.jit\.script cannot compile WeightMeanConv2d.*mimicnorm\.fold"):
        torch.jit.script(model)
    torch.testing.assert_close(torch.jit.script(mn.fold(model))(x), model(x))


@row("safetensors")
def saved_as_safetensors(centre, folder):
    from safetensors.torch import load_model, save_model

    model, (x, _) = converted(centre), batch()
    model(x)  # moves the statistics of the last BN
    save_model(model, folder / "net.safetensors")
    twin = converted(centre)
    load_model(twin, folder / "net.safetensors")
    torch.testing.assert_close(twin.eval()(x), model.eval()(x))


@row("ONNX")
def onnx(centre, folder):
    import onnxruntime

    model = converted(centre).float().eval()
    mn.deploy.export(mn.fold(model), "onnx", folder / "net.onnx", example=SHAPE)
    x = torch.randn(3, *SHAPE[1:])
    session = onnxruntime.InferenceSession(folder / "net.onnx")
    (got,) = session.run(None, {session.get_inputs()[0].name: x.numpy()})
    np.testing.assert_allclose(got, model(x).detach().numpy(), rtol=1e-3, atol=1e-5)


@row("Lightning")
def lightning(centre, folder):
    zoo.torchvision()  # torchmetrics imports it
    import lightning

    class Classifier(lightning.LightningModule):
        def __init__(self):
            super().__init__()
            self.model = converted(centre)

        def training_step(self, batch):
            return cross_entropy(self.model(batch[0]), batch[1])

        def configure_optimizers(self):
            return torch.optim.SGD(self.parameters(), 0.1, momentum=0.9)

    classifier, (x, y) = Classifier(), batch()
    alone = copy.deepcopy(classifier.model)
    steps(alone, torch.optim.SGD(alone.parameters(), 0.1, momentum=0.9), x, y, 3)
    quiet = {
        "logger": False,
        "enable_checkpointing": False,
        "enable_progress_bar": False,
        "enable_model_summary": False,
    }
    trainer = lightning.Trainer(max_epochs=3, accelerator="cpu", devices=1, default_root_dir=folder, **quiet)
    trainer.fit(classifier, DataLoader(TensorDataset(x, y), len(x)))
    torch.testing.assert_close(classifier.model.state_dict(), alone.state_dict())


@row("Opacus")
def opacus(centre, folder):
    """Without noise and clipping, a private step is a plain one."""
    from opacus import PrivacyEngine

    model, (x, y) = converted(centre, nets.preact, last_norm=False), batch()
    alone = copy.deepcopy(model)
    steps(alone, torch.optim.SGD(alone.parameters(), 0.1), x, y, 2)
    mn.opacus.prepare_(model)
    private, optimizer, _ = PrivacyEngine().make_private(
        module=model,
        optimizer=torch.optim.SGD(model.parameters(), 0.1),
        data_loader=DataLoader(TensorDataset(x, y), len(x)),
        noise_multiplier=0.0,
        max_grad_norm=1e6,
        poisson_sampling=False,
    )
    steps(private, optimizer, x, y, 2)
    torch.testing.assert_close(model.state_dict(), alone.state_dict())


@pytest.mark.filterwarnings("ignore")  # of PyTorch, Lightning and Opacus
@pytest.mark.parametrize("centre", ["forward", "backward"])
@pytest.mark.parametrize("feature", ROWS)
def test_compatible(feature, centre, tmp_path):
    ROWS[feature](centre, tmp_path)


def test_the_page_has_these_rows():
    page = (Path(__file__).parents[1] / "docs/compatibility.md").read_text()
    assert re.findall(r"^\| `?(.+?)`? \| (?:yes|no) \|", page, re.MULTILINE) == list(ROWS)
