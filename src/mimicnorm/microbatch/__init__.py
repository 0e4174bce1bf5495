"""The exact gradient of a batch of any size, with the memory of a micro-batch.

    loss = mimicnorm.microbatch.backward(model, loss_fn, inputs, targets, micro_batch=8)

docs/microbatch.md says how. Start reading in ``exact.py``.
"""

from mimicnorm.layers.last_norm import AccumulationWarning
from mimicnorm.layers.regression_loss import RegressionLossWarning
from mimicnorm.microbatch.exact import backward
from mimicnorm.microbatch.loss import LastNormCrossEntropy

__all__ = ["AccumulationWarning", "LastNormCrossEntropy", "RegressionLossWarning", "backward"]
