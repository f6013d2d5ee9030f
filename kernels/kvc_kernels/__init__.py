"""Kernels of sgl-kvc: one operation a file, each with the reference it is tested against.

Nothing here knows SGLang: arguments are tensors and numbers. The words are those of
docs/design.md (block, head page, span, segment, tail); shapes use ``L`` layers, ``H`` KV heads,
``G`` query heads per KV head, ``D`` head dim, ``P`` block size in tokens, ``B`` batch.
"""
