"""Where the last message of a chat begins, whatever its template."""

from __future__ import annotations

from pathlib import Path

import kvc_recall
import pytest
from transformers import AutoTokenizer, PreTrainedTokenizerFast

from sgl_kvc.compat.chat import question_tokens
from tests import tiny_models

CHATML = (
    "{% for m in messages %}<|{{ m['role'] }}|>{{ m['content'] }}<|end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|assistant|>{% endif %}"
)
TRIMMED = CHATML.replace("m['content']", "m['content'] | trim")
NO_EMPTY = CHATML.replace("messages %}", "messages if m['content'] %}")
BARE = "{% for m in messages %}{{ m['content'] }} {% endfor %}"
DOCUMENT = {"role": "system", "content": "w1 w2 w3 w4"}
QUESTIONS = ["w5?", "w6 w7 w8", " leading space", "\nnew line", "a", "ab", "<|end|>", "", "w4"]


@pytest.fixture(scope="module", params=["bytes", "recall"])
def tokenizer(request):
    """Two that lose nothing of a text: what is unknown would look alike in all questions."""
    if request.param == "recall":
        return AutoTokenizer.from_pretrained(Path(kvc_recall.__path__[0]).parent / "recall")
    return PreTrainedTokenizerFast(tokenizer_object=tiny_models.characters())


@pytest.mark.parametrize("template", [CHATML, TRIMMED, NO_EMPTY, BARE])
@pytest.mark.parametrize("question", QUESTIONS)
def test_the_question_begins_where_prompts_with_other_questions_differ(
    tokenizer, template, question
):
    """Never behind that place; before it by the words of the message's header at most."""

    def ids(text: str) -> list[int]:
        messages = [DOCUMENT, {"role": "user", "content": text}]
        return tokenizer.apply_chat_template(
            messages, chat_template=template, add_generation_prompt=True, return_dict=False
        )

    prompt = ids(question)
    before = len(prompt) - question_tokens(prompt, ids)
    others = [ids(text) for text in QUESTIONS if text and text != question]
    shared = max(i for i in range(len(prompt) + 1) if all(o[:i] == prompt[:i] for o in others))
    assert before <= shared
    document = tokenizer.apply_chat_template([DOCUMENT], chat_template=template, return_dict=False)
    assert before >= len(document) - 1  # a word may end in the next message's header


def test_the_count_is_the_contents_tokens_and_what_the_template_puts_behind():
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=tiny_models.characters())

    def ids(text: str) -> list[int]:
        return tokenizer.encode(f"user: {text}; assistant:")

    assert question_tokens(ids("hello"), ids) == len("hello; assistant:")
    assert question_tokens(ids("a"), ids) == len("a; assistant:")
    assert question_tokens(ids("; a"), ids) == len("; a; assistant:")
