"""One document, many questions: it is prefilled and compressed once, and all read the same."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor

from kvc_server.generate import generate_body

from tests.engine.conftest import prompt
from tests.servers import assert_no_leak

DOCUMENT, QUESTIONS = 1000, 16
KNOB = {"rate": 8, "policy": "kv-compress"}


def questions(seed: str) -> list[list[int]]:
    return [prompt(18 + i % 3, seed=f"{seed}{i}") for i in range(QUESTIONS)]


def apart(question: list[int]) -> dict:
    return KNOB | {"question_tokens": len(question)}


def flush(server) -> None:
    assert server.client().post("/flush_cache", params={"timeout": 10}).status_code == 200


def cached(answer: dict) -> int:
    return answer["meta_info"]["cached_tokens"]


def test_a_document_is_prefilled_once_for_all_that_come_together(server):
    document, asked, alone = prompt(DOCUMENT, seed="together"), questions("together"), []
    for question in asked[:4]:
        flush(server)
        alone.append(server.generate(document + question, apart(question)))
    flush(server)
    with ThreadPoolExecutor(QUESTIONS) as pool:
        answers = list(pool.map(lambda q: server.generate(document + q, apart(q)), asked))
    assert sorted(map(cached, answers))[:2] == [0, 992]
    assert [a["output_ids"] for a in answers[:4]] == [a["output_ids"] for a in alone]
    assert [a["kv_compression"] for a in answers[:4]] == [a["kv_compression"] for a in alone]
    assert_no_leak(server)


def test_it_is_there_when_the_uncompressed_document_is_not(server):
    """And nobody else gets anything of it."""
    document, asked = prompt(DOCUMENT, seed="evicted"), questions("evicted")
    flush(server)
    first = server.generate(document + asked[0], apart(asked[0]))
    for seed in range(16):  # 60 blocks each of 1,024: a part of the document has to go
        server.generate(prompt(960, seed=f"other{seed}"))
    again = server.generate(document + asked[0], apart(asked[0]))
    assert cached(again) >= 992
    assert cached(server.generate(document, max_new_tokens=1)) < 900
    assert again["output_ids"] == first["output_ids"]
    flush(server)
    assert cached(server.generate(document + asked[0], apart(asked[0]))) == 0


def test_readers_that_leave_take_nothing_with_them(server):
    """Of those that come together every second one hangs up, wherever it is."""
    document, asked = prompt(DOCUMENT, seed="leave"), questions("leave")
    stays = [server.generate(document + q, apart(q))["output_ids"] for q in asked[1::2]]
    flush(server)

    def ask(i: int) -> list[int] | None:
        if i % 2:
            return server.generate(document + asked[i], apart(asked[i]))["output_ids"]
        body = generate_body(document + asked[i], apart(asked[i]), max_new_tokens=200)
        with server.client() as client, client.stream(
            "POST", "/generate", json=body | {"stream": True}
        ) as response:
            for _ in zip(range(i // 4), response.iter_lines(), strict=False):
                pass
        return None

    with ThreadPoolExecutor(QUESTIONS) as pool:
        answers = list(pool.map(ask, range(QUESTIONS)))
    assert answers[1::2] == stays
    assert_no_leak(server)


def test_the_last_message_of_a_chat_is_the_question(server):
    """The client counts nothing."""
    words = [i % 500 for i in range(600)]
    document, reports = " ".join(f"w{i}" for i in words), []
    flush(server)
    with server.client() as client:
        for question in ("w1 w2 w3", "w4", "w5 w6 w7 w8 w9"):
            messages = [
                {"role": "system", "content": document}, {"role": "user", "content": question}
            ]  # fmt: skip
            body = {
                "model": "tiny", "messages": messages, "max_tokens": 4, "temperature": 0,
                "custom_params": {"kv_compression": KNOB | {"question": "last_message"}},
            }  # fmt: skip
            answer = client.post("/v1/chat/completions", json=body).json()
            reports.append(answer["kv_compression"])
        knob = KNOB | {"question": "last_message"}
        refused = client.post("/generate", json=generate_body([5] * 99, knob))
    assert [report["skipped"] for report in reports] == [None] * 3
    tails = [report["kept_per_head"]["mean"] - 5 * 16 for report in reports]
    assert tails == [report["prompt_tokens"] - 592 for report in reports]
    ids = [i + 4 for i in words]  # the tokenizer's
    assert cached(server.generate([*ids, 7, 8], apart([7, 8]))) == 592, "the chats' segment"
    assert refused.status_code == 400
    assert "question_tokens" in refused.text
