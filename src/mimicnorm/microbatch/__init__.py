"""The exact gradient of a batch of any size, with the memory of a micro-batch.

    loss = mimicnorm.microbatch.backward(model, loss_fn, inputs, targets, micro_batch=8)

A converted network has one layer that looks at more than one sample, the LastNorm, and it sees only the logits.
So the logits of the whole batch come first, without a graph; they give the loss and its gradient at the logits;
then each micro-batch runs once more, with a graph, and takes its share of that gradient. Start reading in
``exact.py``.
"""

from mimicnorm.layers.last_norm import AccumulationWarning
from mimicnorm.layers.regression_loss import RegressionLossWarning
from mimicnorm.microbatch.exact import backward
from mimicnorm.microbatch.loss import LastNormCrossEntropy

__all__ = ["AccumulationWarning", "LastNormCrossEntropy", "RegressionLossWarning", "backward"]
