"""What each recorded operation is to the analysis: a sum, a view, an activation, a weight layer ...

Operations are known by the name of their function, as ``torch.overrides`` reports it. A name that
is not listed is ``OPAQUE``: the analysis stops there rather than guess.
"""

from __future__ import annotations

import enum
from collections.abc import Sequence


class Kind(enum.Enum):
    """The role of an operation in the data flow."""

    INPUT = "input"
    LAYER = "layer"
    NORM = "batch norm"
    OTHER_NORM = "other norm"
    SUM = "sum"
    PRODUCT = "product"
    CONCAT = "concat"
    CONSTANT = "with a constant"
    VIEW = "view"
    PAD = "pad"
    DROPOUT = "dropout"
    POOL = "pool"
    RESIZE = "resize"
    ACTIVATION = "activation"
    SOFTMAX = "softmax"
    OPAQUE = "opaque"


_NAMES: dict[Kind, str] = {
    Kind.SUM: "add sub subtract",
    Kind.PRODUCT: "mul multiply div divide true_divide",
    Kind.CONCAT: "cat concat concatenate stack hstack vstack dstack overwrite",
    Kind.VIEW: """view reshape flatten permute transpose t adjoint squeeze unsqueeze expand expand_as view_as
        reshape_as contiguous clone detach movedim moveaxis swapaxes swapdims chunk tensor_split split
        split_with_sizes unsafe_chunk unsafe_split unbind narrow select slice getitem get unflatten roll flip
        fliplr flipud rot90 repeat tile repeat_interleave pixel_shuffle pixel_unshuffle channel_shuffle
        native_channel_shuffle index_select to float half bfloat16 double type type_as cpu cuda alias
        as_strided broadcast_to diagonal ravel requires_grad_ unfold fold masked_select""",
    Kind.PAD: "pad constant_pad_nd",
    Kind.DROPOUT: """dropout dropout1d dropout2d dropout3d alpha_dropout feature_dropout
        feature_alpha_dropout""",
    Kind.POOL: """max_pool1d max_pool2d max_pool3d _max_pool1d _max_pool2d _max_pool3d max_pool1d_with_indices
        max_pool2d_with_indices max_pool3d_with_indices avg_pool1d avg_pool2d avg_pool3d adaptive_avg_pool1d
        adaptive_avg_pool2d adaptive_avg_pool3d adaptive_max_pool1d adaptive_max_pool2d adaptive_max_pool3d
        _adaptive_max_pool1d _adaptive_max_pool2d _adaptive_max_pool3d lp_pool1d lp_pool2d lp_pool3d
        fractional_max_pool2d fractional_max_pool3d mean sum amax max median nanmean logsumexp
        boolean_dispatch fn""",
    Kind.RESIZE: "interpolate upsample grid_sample max_unpool1d max_unpool2d max_unpool3d",
    Kind.ACTIVATION: """relu relu6 leaky_relu prelu rrelu elu selu celu gelu silu mish hardswish hardsigmoid
        sigmoid tanh softplus softsign logsigmoid hardtanh clamp clip clamp_min clamp_max threshold tanhshrink
        hardshrink softshrink exp abs square sqrt rsqrt pow erf sin cos log log1p expm1 neg negative maximum
        minimum sign""",
    Kind.SOFTMAX: """softmax log_softmax softmin cross_entropy nll_loss
        binary_cross_entropy_with_logits""",
    Kind.OTHER_NORM: """layer_norm group_norm instance_norm rms_norm local_response_norm normalize""",
    Kind.LAYER: """conv1d conv2d conv3d conv_transpose1d conv_transpose2d conv_transpose3d linear bilinear
        embedding embedding_bag multi_head_attention_forward lstm gru rnn_tanh rnn_relu""",
}

_KINDS = {name: kind for kind, names in _NAMES.items() for name in names.split()}

FACTORIES = frozenset(
    {
        *("new_empty", "new_zeros", "new_ones", "new_full", "new_tensor", "new_empty_strided"),
        *("empty_like", "zeros_like", "ones_like", "full_like", "rand_like", "randn_like", "randint_like"),
        *("size", "numel", "dim", "stride", "is_floating_point", "is_complex"),
    }
)
"""Functions of a tensor whose result depends on its shape and type alone."""


def canonical(name: str) -> str:
    """The plain name of a function: ``__iadd__``, ``add_``, ``__radd__`` and ``add`` are one.

    Example:
        >>> canonical("__iadd__"), canonical("relu_"), canonical("__getitem__")
        ('add', 'relu', 'getitem')
    """
    if name.startswith("__") and name.endswith("__"):
        name = name[2:-2]
        if name[:1] in "ir" and (name[1:] in _KINDS or name[1:] == "truediv"):
            name = name[1:]
        name = {"truediv": "div"}.get(name, name)
    elif name.endswith("_") and not name.startswith("_") and name != "requires_grad_":
        name = name.rstrip("_")
    return name


def kind_of(op: str, data_operands: int, first_is_data: bool = True, numbers: Sequence[float] = ()) -> Kind:
    """The kind of an operation with so many data-dependent operands.

    Args:
        op: Its canonical name.
        data_operands: How many.
        first_is_data: Whether its first operand is one of them. If not, data says what is looked up in a table.
        numbers: What else it was given.
    """
    kind = _KINDS.get(op, Kind.OPAQUE)
    if op == "masked_fill" and list(numbers) == [0]:
        return Kind.PAD  # positions that are no data, as those behind the end of a shorter sequence
    if kind is Kind.VIEW and not first_is_data:
        return Kind.OPAQUE
    if kind in (Kind.SUM, Kind.PRODUCT) and data_operands < 2:
        return Kind.CONSTANT
    return kind
