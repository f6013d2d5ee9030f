"""An SGLang program: one document, two questions, each compressed as the context says."""

import os

import sglang as sgl

from sgl_kvc.lang import RuntimeEndpoint, gen, kv_compression

FILLER = "the old river waits near the quiet village . "


@sgl.function
def ask(s, document, questions):
    s += document
    forks = s.fork(len(questions))
    for fork, question in zip(forks.states, questions, strict=True):
        fork += question + " <answer>"
        fork += gen("answer", max_tokens=8, temperature=0)
    forks.join()
    s["reports"] = [fork.get_meta_info("answer")["kv_compression"] for fork in forks.states]


def main() -> None:
    url = os.environ.get("SGL_KVC_URL", "http://127.0.0.1:8000")
    backend = RuntimeEndpoint(url, api_key=os.environ.get("SGL_KVC_KEY"))
    with kv_compression(rate=4):  # the document once, for both: docs/programs.md
        state = ask.run(
            document="the code for red falcon is tango seven kilo . " + FILLER * 50
            + "the code for blue heron is delta two echo . " + FILLER * 50,
            questions=["what is the code for red falcon ?", "what is the code for blue heron ?"],
            backend=backend,
        )  # fmt: skip
    for answer, report in zip(state["answer"], state["reports"], strict=True):
        print(answer, report)


if __name__ == "__main__":
    main()
