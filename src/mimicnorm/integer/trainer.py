"""Train a converted network in integers: no floating-point tensor once the images are codes."""

from __future__ import annotations

import math

import torch
from torch import Tensor, nn

from mimicnorm.arguments import finite, positive_int
from mimicnorm.errors import IntegerError, NonFiniteError
from mimicnorm.integer import build, fused
from mimicnorm.integer.counter import key, stochastic_shift
from mimicnorm.integer.formats import CODE, Block, encoded, fitting, peak
from mimicnorm.integer.operation import Pass
from mimicnorm.layers import LastNorm

CALIBRATION = 32
"""Samples of a batch from which exponents are taken that are not known yet."""
LARGEST = 40
"""The exponent from which on values are taken as infinite: training has diverged."""
_UNKNOWN = -(2**31)


class Trainer:
    """SGD with momentum on a converted ReLU network, in int8, int16 and int32.

    Every step is a function of (state, batch, step number). Integer sums do not depend on their order, so weights are
    bit-identical for any number of threads and any size of micro-batches.

    Args:
        model: A converted network: convolutions, linear layers, ReLUs, pooling, residual sums, concats, dropout of 0.5
            and a last BN. It is read, and changed by `write_back` only.
        lr: Learning rate; it may be set anew before each step.
        momentum: Rounded to eighths: 0.9 becomes 7/8. More than 15/16 is refused, since 7/8 is the largest.
        weight_decay: Added to the gradient.
        decay_scalars: Whether biases and residual scalars are decayed, too. A logit scale never is.
        scalar_rate: Multiplies the learning rate of scalars.
        seed: Of the random rounding.
        rounding: "stochastic", or "nearest" to see what it is good for.
        master_bits: Of the weights' masters: 16, or 8 to 15 to see what the others are good for.
        compile: Make codes by kernels of ``torch.compile``: the same bits, in less time after half a minute.

    Raises:
        IntegerError: The network has operations without an integer form (they are named), or nothing can be compiled.

    Example:
        >>> import mimicnorm as mn
        >>> from torch import nn
        >>> model = nn.Sequential(nn.Linear(64, 60), nn.BatchNorm1d(60), nn.ReLU(), nn.Linear(60, 3))
        >>> _ = mn.convert_(model, mn.MimicNorm(), example=(2, 64))
        >>> trainer = Trainer(model, lr=0.1)
        >>> loss, correct = trainer.step(torch.randn(8, 64), torch.arange(8) % 3)
    """

    def __init__(
        self,
        model: nn.Module,
        *,
        lr: float,
        momentum: float = 0.875,
        weight_decay: float = 0.0,
        decay_scalars: bool = True,
        scalar_rate: float = 1.0,
        seed: int = 0,
        rounding: str = "stochastic",
        master_bits: int = 16,
        compile: bool = False,
    ):
        for name, value in {"lr": lr, "weight_decay": weight_decay, "scalar_rate": scalar_rate}.items():
            finite(value, name, least=0, error=IntegerError)
        if not 0 <= momentum <= 15 / 16:
            raise IntegerError(f"{momentum=}: integers have eighths, from 0 to 0.875: use one of them")
        if rounding not in ("stochastic", "nearest"):
            raise IntegerError(f'{rounding=}: use "stochastic" or "nearest"')
        if positive_int(master_bits, "master_bits", least=8, error=IntegerError) > 16:
            raise IntegerError(f"{master_bits=}: use 8 to 16")
        self.model, self.lr, self.weight_decay, self.seed = model, lr, weight_decay, seed
        self.momentum, self.stochastic = min(round(momentum * 8), 7), rounding == "stochastic"
        self._settings = {  # what must be the same where a state is continued
            "seed": seed,
            "master_bits": master_bits,
            "momentum in eighths": self.momentum,
            "stochastic rounding": int(self.stochastic),
        }
        self.network = build.build(model, master_bits=master_bits, decay_scalars=decay_scalars, scalar_rate=scalar_rate)
        self.steps, self._input_saturation = 0, 0.0
        self.input_exponent: int | None = None
        self.compiled = compile
        if compile:
            fused.require()

    def encode(self, images: Tensor) -> Tensor:
        """Return int8 codes, channels last, of images (N, C, H, W) or vectors.

        The first images decide the exponent, so they must be training images.
        """
        largest = float(images.abs().max()) if images.numel() else 0.0
        if not math.isfinite(largest):
            raise IntegerError("the images have values that are not finite")
        if self.input_exponent is None:
            self.input_exponent = math.frexp(largest or 1.0)[1] - 7
        codes = encoded(images, self.input_exponent)
        return codes.permute(0, 2, 3, 1).contiguous() if codes.dim() == 4 else codes

    def _input(self, images: Tensor) -> Block:
        codes = images if images.dtype == torch.int8 else self.encode(images)
        if self.input_exponent is None:
            raise IntegerError("codes without an exponent: make them by this trainer's encode")
        return Block(codes, self.input_exponent)

    def step(self, images: Tensor, labels: Tensor, *, micro_batch: int | None = None) -> tuple[float, int]:
        """Take one step.

        Args:
            images: Floating point, or codes that `encode` gave.
            labels: Class numbers.
            micro_batch: Samples to run at once; None is all. The weights after the step are the same.

        Returns:
            The mean loss, and the number of correct answers.

        Raises:
            IntegerError: A layer cannot take the batch; it is named, and no weight has changed.
            NonFiniteError: An exponent is so large that training has diverged.
        """
        if labels.dim() != 1 or labels.dtype != torch.int64 or len(images) != len(labels):
            shape = tuple(labels.shape)
            raise IntegerError(f"labels of shape {shape} and {labels.dtype}: use one int64 for each of {len(images)}")
        if len(labels) < 2:
            raise IntegerError(f"a batch of {len(labels)}: use two samples or more")
        codes = self._input(images)
        self._input_saturation = int((codes.data.abs() == CODE).sum()) / codes.data.numel()
        size = positive_int(micro_batch or len(labels), "micro_batch", error=IntegerError)
        for watch in self.network.watches:
            watch.forget()
        if any(watch.exponent is None for watch in self.network.watches):
            self._calibrate(codes, labels)
        loss, correct = self._both_passes(codes, labels, size)
        self._update(len(labels))
        for watch in self.network.watches:
            watch.advance()
        self.steps += 1
        self._require_finite()
        return loss, correct

    def logits(self, images: Tensor) -> Tensor:
        """Return logits in evaluation mode, as integers in units of 2^-16; a sample's do not depend on the others."""
        if not self.steps:
            raise IntegerError("logits before the first step: exponents come from training batches")
        codes = self._input(images)
        self._prepare()
        at = Pass(0, self._key, training=False, compiled=self.compiled)
        return self.network.head.logits(self.network.forward(at, codes, save=False)[0])

    def saturation(self) -> dict[str, tuple[float, float]]:
        """Return, by layer, the fractions of activations and of errors that saturated in the last step.

        Exponents follow the step before, so a layer whose values grow saturates a few. The input's exponent is fixed.
        Of layers that share a name, the larger fraction is listed.
        """
        worst = {"input": (self._input_saturation, 0.0)}
        for operation in self.network.requantised:
            some = [w.saturated / max(w.count, 1) for w in (operation.output, operation.error)]
            before = worst.get(operation.name, (0.0, 0.0))
            worst[operation.name] = max(before[0], some[0]), max(before[1], some[1])
        return worst

    def evaluate(self, images: Tensor, labels: Tensor, batch: int = 256) -> float:
        """Return the fraction of samples whose largest logit is the right one."""
        parts = zip(images.split(batch), labels.split(batch), strict=True)
        right = sum(int((self.logits(some).argmax(1) == wanted).sum()) for some, wanted in parts)
        return right / len(labels)

    def write_back(self) -> nn.Module:
        """Write weights and statistics, in floating point, into the model; return it."""
        targets = dict(self.model.named_parameters())
        with torch.no_grad():
            for parameter in self.network.parameters:
                value = parameter.value()
                targets[parameter.name].copy_(value.permute(0, 3, 1, 2) if value.dim() == 4 else value)
            for norm in (m for m in self.model.modules() if isinstance(m, LastNorm)):
                mean, var = self.network.head.statistics()
                norm.running_mean.copy_(mean)  # pyrefly: ignore
                norm.running_var.copy_(var)  # pyrefly: ignore
                norm.num_batches_tracked.fill_(self.steps)  # pyrefly: ignore
        return self.model

    def state_dict(self) -> dict[str, Tensor]:
        """Return all that the next step depends on, as integer tensors."""
        exponents = [self.input_exponent, *(w.exponent for w in self.network.watches)]
        state = {"counters": torch.tensor([self.steps]), "settings": torch.tensor(list(self._settings.values()))}
        state["exponents"] = torch.tensor([_UNKNOWN if e is None else e for e in exponents], dtype=torch.int32)
        state |= {f"head.{name}": value for name, value in self.network.head.state().items()}
        for p in self.network.parameters:
            state |= {f"{p.name}.{name}": value for name, value in p.state().items()}
        return state

    def load_state_dict(self, state: dict[str, Tensor]) -> None:
        """Put back what `state_dict` returned; that of another network or of other settings is refused."""
        given, mine = ({n: (tuple(t.shape), t.dtype) for n, t in s.items()} for s in (state, self.state_dict()))
        for name in sorted(given.keys() ^ mine.keys()) or mine:
            if given.get(name) != mine.get(name):
                was, now = given.get(name, "missing"), mine.get(name, "not there")
                raise IntegerError(f"the state is of another network: {name} is {was}, and {now} here")
        for (name, now), was in zip(self._settings.items(), state["settings"].tolist(), strict=True):
            if was != now:
                raise IntegerError(f"the state is of other settings: {name} was {was} and is {now}")
        (self.steps,) = state["counters"].tolist()
        exponents = [None if e == _UNKNOWN else e for e in state["exponents"].tolist()]
        self.input_exponent = exponents[0]
        for watch, exponent in zip(self.network.watches, exponents[1:], strict=True):
            watch.exponent = exponent
        self.network.head.load({name: state[f"head.{name}"] for name in self.network.head.state()})
        for p in self.network.parameters:
            p.load({name: state[f"{p.name}.{name}"] for name in p.state()})

    # -- parts of a step --------------------------------------------------------------------------------------------

    def _require_finite(self) -> None:
        """Raise if a value has grown beyond all reason; integers saturate where floating point would be infinite."""
        exponents = {n.name: w.exponent for n in self.network.requantised for w in (n.output, n.error)}
        exponents |= {p.name: p.exponent + 14 for p in self.network.parameters}
        exponents["the last BN's variance"] = self.network.head.var_unit
        for name, exponent in exponents.items():
            if exponent is not None and exponent > LARGEST:
                raise NonFiniteError(f"{name}: values of 2^{exponent} at step {self.steps}: training has diverged")

    def _key(self, place: str) -> int:
        return key(self.seed, self.steps, place)

    def _prepare(self) -> None:
        for product in self.network.products:
            product.prepare()

    def _both_passes(self, codes: Block, labels: Tensor, size: int, calibrating: bool = False) -> tuple[float, int]:
        """Run forward and backward, ``size`` samples at a time; return the loss and the number of correct answers."""
        self._prepare()
        net, whole = self.network, size >= len(labels)
        parts = [slice(first, first + size) for first in range(0, len(labels), size)]

        def at(part: slice) -> Pass:
            return Pass(part.start, self._key, True, calibrating, self.stochastic, self.compiled)

        def forward(part: slice, save: bool) -> tuple[Block, list]:
            return net.forward(at(part), Block(codes.data[part], codes.exponent), save)

        outputs = [forward(part, save=whole) for part in parts]
        logits = Block(torch.cat([out.data for out, _ in outputs]), outputs[0][0].exponent)
        loss, correct, gradient = net.head.loss(logits, labels)
        # The last BN has seen the whole batch, so the exponent of its error may follow from this error's own maximum.
        exponent = fitting(peak(gradient.data), gradient.exponent)
        random = self._key("head") if self.stochastic else None
        error = stochastic_shift(gradient.data, exponent - gradient.exponent, random).clamp_(-CODE, CODE)
        for part, (_, saved) in zip(parts, outputs, strict=True):
            values = saved if whole else forward(part, save=True)[1]
            net.backward(at(part), values, Block(error[part].to(torch.int8), exponent))
        return loss, correct

    def _calibrate(self, codes: Block, labels: Tensor) -> None:
        """Take exponents that are not known from a few samples, always the same ones; only exponents change."""
        few, statistics = slice(CALIBRATION), self.network.head.state()
        self._both_passes(Block(codes.data[few], codes.exponent), labels[few], CALIBRATION, calibrating=True)
        self.network.head.load(statistics)
        for watch in self.network.watches:
            watch.forget()

    def _update(self, samples: int) -> None:
        pairs = [pair for product in self.network.products for pair in product.gradients()]
        head = self.network.head
        if head.scale is not None and head.scale_grad is not None:
            pairs.append((head.scale, head.scale_grad))
        for parameter, grad in pairs:
            lr, decay = self.lr * parameter.speed / samples, self.weight_decay * samples
            random = self._key(parameter.name) if self.stochastic else None
            parameter.update(grad, lr=lr, decay=decay, momentum=self.momentum, key=random)
