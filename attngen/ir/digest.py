"""A digest that names what an attention variant computes."""

from __future__ import annotations

from hashlib import sha256

from attngen.ir.attention import Attention
from attngen.ir.printer import print_attention

__all__ = ["digest_attention"]


def digest_attention(attention: Attention) -> str:
    """SHA-256 of the canonical text, in hexadecimal."""
    return sha256(print_attention(attention).encode()).hexdigest()
