"""From a model to a converted one.

In reading order: ``isolate`` runs a model without a trace, ``record`` turns one forward pass into a ``graph``, ``flow``
reads it, ``planning`` decides what becomes of every BatchNorm and layer, ``proof`` rehearses the plan, ``operate``
carries it out, ``init`` sets the initial weights, ``convert`` does all of it.
"""
