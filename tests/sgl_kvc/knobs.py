"""What requests ask for in the lives of `test_cache.py`."""

from __future__ import annotations

KNOBS = [
    None,
    {"rate": 1},
    {"rate": 1.5, "min_tokens": 0},
    {"rate": 4, "min_tokens": 0},
    {"rate": 64, "min_tokens": 0, "window": 3, "sinks": 1},
    {"rate": 4, "min_tokens": 0, "policy": "snapkv"},
    {"budget": 9, "min_tokens": 0, "policy": "random"},
    {"rate": 3, "min_tokens": 0, "policy": "streaming-llm"},
    {"rate": 4, "min_tokens": 0, "question_tokens": 7, "recent": 3, "policy": "kv-compress"},
    {"rate": 4, "min_tokens": 0, "question_tokens": 7, "recent": 3, "part": 16},
    {"rate": 2, "min_tokens": 0, "question_tokens": 30, "policy": "random"},
    {"rate": 3, "min_tokens": 0, "policy": "h2o", "recent": 2},
    {"rate": 4, "min_tokens": 0, "prefix_tokens": 13, "sinks": 14},
    {"rate": 2, "min_tokens": 0, "prefix_tokens": 24, "question_tokens": 6, "policy": "h2o"},
    {"budget": 12, "recompress_every": 6, "recent": 3, "sinks": 2},
    {"rate": 3, "recompress_every": 1, "recent": 0, "policy": "snapkv", "window": 2},
    {"budget": 8, "recompress_every": 9, "question_tokens": 5, "policy": "kv-compress"},
    {"budget": 8, "recompress_every": 5, "question_tokens": 60, "policy": "kv-compress"},
    {"budget": 8, "recompress_every": 5, "prefix_tokens": 17},
    {"budget": 4, "recompress_every": 4, "prefix_tokens": 90, "question_tokens": 3,
     "policy": "kv-compress"},
    {"budget": 12, "recompress_every": 5, "policy": "h2o", "recent": 2},
    {"rate": 3, "recompress_every": 4, "policy": "streaming-llm"},
    {"budget": 12, "recompress_every": 5, "policy": "virtual-repeat", "question_tokens": 9},
    {"budget": 12, "recompress_every": 6, "policy": "r-kv", "window": 3},
    {"rate": 3, "recompress_every": 4, "policy": "r-kv", "prefix_tokens": 9, "question_tokens": 4},
    {"on_pressure": 4, "min_tokens": 0},
    {"on_pressure": 2, "min_tokens": 0, "policy": "h2o", "recent": 2},
    {"on_pressure": 3, "min_tokens": 0, "policy": "kv-compress", "prefix_tokens": 13},
    {"on_pressure": 4, "min_tokens": 0, "recompress_every": 5, "recent": 2},
    {"on_pressure": 3, "min_tokens": 0, "recompress_every": 1, "policy": "streaming-llm",
     "prefix_tokens": 9},
    {"rate": 4, "min_tokens": 0, "prefill_block": 9},
    {"budget": 9, "min_tokens": 0, "prefill_block": 16, "part": 16, "recent": 3},
    {"rate": 3, "min_tokens": 0, "prefill_block": 8, "policy": "kv-compress", "window": 3,
     "prefix_tokens": 13},
    {"rate": 4, "min_tokens": 0, "prefill_block": 12, "policy": "h2o", "prefix_tokens": 5},
    {"rate": 6, "min_tokens": 0, "prefill_block": 12, "question_tokens": 7, "recent": 3},
    {"rate": 3, "min_tokens": 0, "prefill_block": 4, "policy": "streaming-llm",
     "question_tokens": 30, "prefix_tokens": 8},
]
#: Compressed when memory is short.
PRESSED = [each for each in KNOBS if each and "on_pressure" in each]
#: A question apart.
APART = [each for each in KNOBS if each and "question_tokens" in each]
#: A chat's next turn.
TURNS = [
    None,
    {"rate": 1, "hold_s": 30},
    {"rate": 3, "min_tokens": 0, "policy": "kv-compress", "window": 3, "recent": 2},
    {"rate": 3, "min_tokens": 0, "policy": "kv-compress", "window": 3, "recent": 2,
     "reuse": "compressed"},
    {"budget": 12, "min_tokens": 0, "policy": "snapkv", "reuse": "both", "hold_s": 30},
    {"rate": 4, "min_tokens": 0, "policy": "kv-compress", "prefix_tokens": 9, "hold_s": 10,
     "reuse": "compressed"},
]
