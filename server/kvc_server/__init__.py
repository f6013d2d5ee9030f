"""The gateway: a thin OpenAI-compatible proxy in front of one SGLang worker.

It validates the compression knob, starts and supervises the worker, and turns every failure
into an OpenAI-shaped error. It imports neither torch nor SGLang.
"""
