"""SGLang's engine in this process, without a server: by itself, and for programs."""

import sglang as sgl
from kvc_recall import model_path

from sgl_kvc.lang import gen, kv_compression
from sgl_kvc.lang.engine import EngineBackend

DOCUMENT = "the code for red falcon is tango seven kilo . "
DOCUMENT += "the old river waits near the quiet village . " * 100
QUESTION = "what is the code for red falcon ? <answer>"


@sgl.function
def ask(s, question):
    s += DOCUMENT + question
    s += gen("answer", max_tokens=8, temperature=0)


@sgl.function
def ask_twice(s, questions):
    s += DOCUMENT
    branches = s.fork(len(questions))  # the document is compressed once, for all of them
    for branch, question in zip(branches.states, questions, strict=True):
        branch += question
        branch += gen("answer", max_tokens=8, temperature=0)
    s["reports"] = [each.get_meta_info("answer")["kv_compression"] for each in branches.states]
    branches.join()


def main() -> None:
    engine = sgl.Engine(
        model_path=str(model_path()), attention_backend="kvc", max_total_tokens=16384
    )
    knob = {"kv_compression": {"rate": 8}}
    sampling = {"temperature": 0, "max_new_tokens": 8, "custom_params": knob}
    answer = engine.generate(DOCUMENT + QUESTION, sampling)
    print(answer["text"], answer["kv_compression"])

    with EngineBackend(engine) as backend, kv_compression(rate=8, force=True):
        for state in ask.run_batch([{"question": QUESTION}] * 3, backend=backend):
            print(state["answer"], state.get_meta_info("answer")["kv_compression"])
        state = ask.run(question=QUESTION, backend=backend, stream=True)
        print(*state.text_iter("answer"), sep="|")
        state = ask_twice.run(questions=[QUESTION, "and " + QUESTION], backend=backend)
        print(*state["answer"], *state["reports"])
    engine.shutdown()


if __name__ == "__main__":  # the engine starts processes that import this file
    main()
