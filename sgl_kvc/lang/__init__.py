"""SGLang programs (``@sglang.function``) that say how they are compressed (docs/programs.md).

    import sglang as sgl
    from sgl_kvc.lang import RuntimeEndpoint, gen, kv_compression

    @sgl.function
    def ask(s, document, question):
        s += document + question
        s += gen("answer", max_tokens=32, kv_compression={"rate": 8})

    with kv_compression(rate=4):
        state = ask.run(document, question, backend=RuntimeEndpoint("http://127.0.0.1:8000"))
    state["answer"], state.get_meta_info("answer")["kv_compression"]

Without a server, ``sgl_kvc.lang.engine.EngineBackend(sgl.Engine(...))`` is the backend.

Importing this has SGLang run programs in our executor, a subclass of its own that carries knobs;
a program without a knob runs as before. Nothing else of the plugin imports it.
"""

from sgl_kvc.lang.endpoint import RuntimeEndpoint
from sgl_kvc.lang.executor import install
from sgl_kvc.lang.program import gen, kv_compression, select

__all__ = ["RuntimeEndpoint", "gen", "kv_compression", "select"]

install()  # before a program runs: one that runs already would drop its knobs silently
