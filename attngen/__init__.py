"""attngen: attention variants from a small language to fast, readable CUDA."""

__version__ = "0.1.0"
