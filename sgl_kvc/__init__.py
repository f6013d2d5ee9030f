"""sgl-kvc: KV-cache compression for SGLang, with per-head budgets and freed pages."""

__version__ = "0.1.0"
