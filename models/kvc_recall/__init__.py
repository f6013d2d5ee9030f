"""A small Llama that recalls facts from a document, and what made it.

It exists so that the project can be tried and tested end to end where no other weights are at
hand: it answers questions about English-like documents of up to a few thousand tokens, and what a
policy evicts shows in its answers. `models/recall` holds the weights; `tasks.sample` makes prompts.
"""

from pathlib import Path


def model_path() -> Path:
    """The folder of the trained model, in Hugging Face format."""
    return Path(__file__).resolve().parent / "recall"  # in the source tree a link to models/recall
