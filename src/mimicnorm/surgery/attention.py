"""Products of two projections, such as queries and keys, that BatchNorms bounded and nothing bounds without them.

A BatchNorm holds the scale of its output whatever the weights before it do, and so the scale of q k^T. Without them
q k^T grows with the square of the weights and of the residual stream: as the stream grows, attention sharpens, and its
branch makes the stream grow faster. A branch that starts small leaves time for the other layers to learn first
(benchmarks/attention_start.py); the products stay unbounded, which the plan says.
"""

from __future__ import annotations

from collections.abc import Container
from dataclasses import dataclass

from mimicnorm.surgery import flow
from mimicnorm.surgery.graph import Graph, Node
from mimicnorm.surgery.ops import Kind

VARIANCE = 0.1
"""Of a residual branch around such a product at the start, over that of other branches."""
_PRODUCTS = ("matmul", "bmm", "mm", "baddbmm", "einsum", "scaled_dot_product_attention")
_BOUNDED = ("sigmoid", "hardsigmoid", "tanh", "hardtanh", "relu6", "softsign", "clamp", "clip", "sin", "cos", "sign")
_THROUGH = (*flow.RESHAPED, Kind.ACTIVATION)


@dataclass(frozen=True)
class Product:
    """A matrix product whose two operands were made by layers that lose their BatchNorm.

    Attributes:
        node: Its call.
        makers: The BatchNorms, or the layers before them, that make the operands.
    """

    node: Node
    makers: tuple[str, ...]


def unbounded_products(graph: Graph, planned: Container[str]) -> list[Product]:
    """Every matrix product of two projections, in execution order.

    Args:
        graph: The network.
        planned: The BatchNorms to be removed, and the layers that they normalised.
    """
    products = []
    for node in graph.nodes:
        if node.op in _PRODUCTS and len(node.inputs) > 1:
            ends = [flow.walk_back(operand, _THROUGH, _is_bounded) for operand in node.inputs[:2]]
            makers = [end.norm or end.layer for end in ends]
            if all(maker is not None and maker in planned for maker in makers):
                products.append(Product(node, tuple(dict.fromkeys(maker for maker in makers if maker is not None))))
    return products


def _is_bounded(node: Node) -> bool:
    return node.kind is Kind.ACTIVATION and node.op in _BOUNDED


def note(products: list[Product], smaller: bool) -> str:
    """What a plan says of such products: which they are, what to expect, what to do.

    Args:
        products: At least one.
        smaller: Whether residual branches around them start small.
    """
    named = list(dict.fromkeys(" with ".join(product.makers) for product in products))
    listed = ", ".join((*named[:2], *[f"and {len(named) - 2} more"][: len(named) > 2]))
    start = f"Their branches start with a variance of {VARIANCE:g} for that reason. " if smaller else ""
    return (
        f"attention: BatchNorm bounded the products of queries and keys ({listed}), and nothing bounds them without "
        f"it: they grow with the square of the weights. {start}The largest learning rates that BatchNorm allows may "
        "diverge: use a lower one or clip gradients, or leave the BatchNorms of queries and keys with where="
    )
