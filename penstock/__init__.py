"""Penstock serves large language models on a cluster. See docs/architecture.md."""

__version__ = "0.1.0"
