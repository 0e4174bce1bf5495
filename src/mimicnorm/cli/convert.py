"""``mimicnorm convert``: show what conversion would do to a network, and what it would save."""

from __future__ import annotations

from dataclasses import dataclass

from mimicnorm.cli.network import Network
from mimicnorm.training.recipes import Init


@dataclass
class Convert(Network):
    """Print the plan for a network, line by line, and the memory it would save."""

    method: str = "mimicnorm"
    """mimicnorm, weight-mean, last-bn, nonorm, batchnorm, fixup, skipinit, groupnorm-ws or scaled-ws."""
    head: str | None = None
    """Qualified name of the module that makes class scores; for none, take --method weight-mean."""
    allow_mixing: tuple[str, ...] = ()
    """Qualified names of modules that are meant to work across the batch."""
    init: Init = "auto"
    """Initial weights to plan for; for a trained model anything but auto."""
    json: bool = False
    """Print plain JSON instead of the table."""

    def run(self) -> None:
        """Plan, measure before and after, print."""
        from mimicnorm import memory
        from mimicnorm.cli.console import print_json
        from mimicnorm.errors import ExampleError
        from mimicnorm.methods import method
        from mimicnorm.surgery.convert import convert
        from mimicnorm.surgery.planning import plan

        chosen = method(self.method).resolved(trained=self.init == "keep")
        model, shape = self.build()
        if shape[0] == 1 and chosen.last_norm:
            raise ExampleError("a last BN has no variance to divide by in a batch of one: use --batch 2 or more")
        how: dict = {"example": shape, "head": self.head, "allow_mixing": self.allow_mixing}
        planned = plan(model, chosen, init=None if self.init == "none" else self.init, **how)
        planned.require()
        if not self.json:
            print(planned)
        after = (
            model
            if not chosen.removes_norm
            else convert(model, chosen, init="keep" if self.init == "keep" else None, **how)
        )
        before_bytes = memory.measure(model, shape).saved_bytes
        after_bytes = memory.measure(after, shape).saved_bytes
        saving = {"before": before_bytes, "after": after_bytes, "ratio": after_bytes / max(before_bytes, 1)}
        if self.json:
            print_json({"model": self.model, "shape": list(shape), **planned.as_dict(), "saved_bytes": saving})
            return
        per = f"per sample of {' x '.join(map(str, shape[1:]))}"
        print(
            f"saved for backward {per}: {memory.format_bytes(before_bytes // shape[0])} -> "
            f"{memory.format_bytes(after_bytes // shape[0])} ({saving['ratio']:.0%} of before)"
        )
