"""Integer training: a converted network in int8, int16 and int32, from codes of images to updated weights.

trainer = mimicnorm.integer.Trainer(model, lr=0.1, weight_decay=5e-4)
loss, correct = trainer.step(images, labels)
"""

from mimicnorm.integer.trainer import Trainer

__all__ = ["Trainer"]
