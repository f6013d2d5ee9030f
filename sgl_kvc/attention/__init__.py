"""The attention backend SGLang calls."""
