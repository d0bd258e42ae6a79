"""FlexAttention's functions, traced into the language."""

from attngen.flex.attention import flex_attention, from_python

__all__ = ["flex_attention", "from_python"]
