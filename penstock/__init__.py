"""Penstock serves large language models on a cluster: see docs/architecture.md."""

__version__ = "0.1.0"
