"""The embedded recall model: its tokenizer, its documents, its weights and what it recalls."""

from __future__ import annotations

from itertools import pairwise
from random import Random

import pytest
import torch
from kvc_recall import model_path, tasks, vocabulary
from kvc_recall.evaluate import complete, held_out, recalled
from kvc_recall.mixture import GO_ON_OR_STOP, KINDS, NO_ANSWER, draw_prompt, pack
from kvc_recall.tasks import TASKS, sample
from transformers import AutoModelForCausalLM, AutoTokenizer

# At 1,024 tokens, a little below what is asked of the weights, for few prompts.
LEAST = {
    "single": 0.95,
    "needles8": 0.95,
    "needles32": 0.87,
    "questions8": 0.95,
    "copy32": 0.80,
    "votes": 0.90,
}


@pytest.fixture(scope="module")
def tokenizer():
    return AutoTokenizer.from_pretrained(model_path())


@pytest.fixture(scope="module")
def model():
    threads = torch.get_num_threads()
    torch.set_num_threads(1)  # a second one costs more than it gives where cores are shared
    yield AutoModelForCausalLM.from_pretrained(model_path(), dtype=torch.float32).eval()
    torch.set_num_threads(threads)


# --- tokenizer ---------------------------------------------------------------------------------


def test_words_survive_a_round_trip(tokenizer):
    text = "the code for red falcon is tango seven kilo ."
    ids = tokenizer.encode(text, add_special_tokens=False)
    assert ids == vocabulary.encode(text)
    assert tokenizer.decode(ids) == text


def test_text_as_people_type_it(tokenizer):
    typed = "The code for RED falcon is\n tango seven  kilo.  What is the code for red falcon?"
    ids = tokenizer.encode(typed)
    assert tokenizer.decode(ids, skip_special_tokens=True) == (
        "the code for red falcon is tango seven kilo . what is the code for red falcon ?"
    )
    assert ids[0] == tokenizer.bos_token_id


def test_every_word_is_one_token(tokenizer):
    plain = [w for w in vocabulary.WORDS if not w.startswith("<")]
    assert tokenizer.encode(" ".join(plain), add_special_tokens=False) == [
        vocabulary.INDEX[w] for w in plain
    ]
    assert len(tokenizer) == len(vocabulary.WORDS)


def test_unknown_words_become_unk(tokenizer):
    ids = tokenizer.encode("the Schrödinger code", add_special_tokens=False)
    unk = tokenizer.unk_token_id
    assert ids == [vocabulary.INDEX["the"], unk, vocabulary.INDEX["code"]]


@pytest.mark.parametrize("content", ["who has most votes ?", [{"type": "text", "text": "hello"}]])
def test_chat_template_asks_for_a_reply(tokenizer, content):
    chat = [{"role": "user", "content": content}]
    text = content if isinstance(content, str) else "hello"
    asked = tokenizer.apply_chat_template(chat, tokenize=False, add_generation_prompt=True)
    plain = tokenizer.apply_chat_template(chat, tokenize=False, add_generation_prompt=False)
    assert asked == vocabulary.render(text)
    assert plain == f"<bos> {text}"


def test_chat_template_renders_earlier_turns_as_in_training(tokenizer):
    prompt = draw_prompt("dense", 256, Random(0))
    turn = prompt.later[0]
    chat = [
        {"role": "user", "content": prompt.text},
        {"role": "assistant", "content": prompt.answer},
        {"role": "user", "content": turn.question},
    ]
    ids = tokenizer.apply_chat_template(chat, add_generation_prompt=True, return_dict=False)
    row, _ = pack(prompt, 256)
    assert ids == row[: len(ids)].tolist()


def test_chat_template_puts_the_system_text_first(tokenizer):
    chat = [{"role": "system", "content": "hello ."}, {"role": "user", "content": "thanks ."}]
    text = tokenizer.apply_chat_template(chat, tokenize=False, add_generation_prompt=True)
    assert text == "<bos> hello . thanks . <answer>"


# --- documents ---------------------------------------------------------------------------------


@pytest.mark.parametrize("length", [512, 1024, 2048])
@pytest.mark.parametrize("task", TASKS)
def test_a_prompt_is_exactly_as_long_as_asked(task, length, tokenizer):
    for seed in range(5):
        prompt = sample(task, length, Random(seed))
        chat = [{"role": "user", "content": prompt.text}]
        rendered = tokenizer.apply_chat_template(
            chat, add_generation_prompt=True, return_dict=False
        )
        assert len(rendered) == length
        assert tokenizer.unk_token_id not in rendered


@pytest.mark.parametrize("task", TASKS)
def test_a_seed_gives_one_prompt(task):
    assert sample(task, 512, Random(3)) == sample(task, 512, Random(3))
    assert sample(task, 512, Random(3)) != sample(task, 512, Random(4))


@pytest.mark.parametrize("task", ["single", "needles8", "needles32"])
def test_the_code_asked_for_stands_once_in_the_document(task):
    for seed in range(20):
        prompt = sample(task, 1024, Random(seed))
        document, _, key = prompt.text.removesuffix(" ?").rpartition(" what is the code for ")
        assert document.count(f"the code for {key} is {prompt.answer} .") == 1
        assert document.count(f"the code for {key} is") == 1
        assert document.count("the code for ") == TASKS[task][1]["needles"]
        assert len(prompt.answer.split()) == 3


@pytest.mark.parametrize("task", ["needles8", "needles32"])
def test_distractors_share_a_word_with_the_key(task):
    for seed in range(20):
        prompt = sample(task, 1024, Random(seed))
        document, _, key = prompt.text.removesuffix(" ?").rpartition(" what is the code for ")
        keys = [part.split(" is ")[0].split() for part in document.split("the code for ")[1:]]
        assert any(set(other) & set(key.split()) and other != key.split() for other in keys)


def test_several_questions_are_answered_in_the_order_asked():
    prompt = sample("questions8", 1024, Random(0))
    document, _, listed = prompt.text.removesuffix(" ?").rpartition(" what are the codes for : ")
    expected = []
    for part, value in zip(listed.split(" , "), prompt.answers, strict=True):
        _, key = part.split(" ", 1)
        assert f"the code for {key} is {value} ." in document
        expected.append(f"{part} is {value}")
    assert prompt.answer == " ; ".join(expected)
    assert len(prompt.answers) == 8


def test_the_passage_to_copy_is_marked():
    prompt = sample("copy32", 1024, Random(0))
    assert f"passage begins : {prompt.answer} : passage ends ." in prompt.text
    assert len(prompt.answer.split()) == 32


def test_the_winner_has_most_votes():
    for seed in range(20):
        text = (prompt := sample("votes", 1024, Random(seed))).text
        counts = {name: text.count(f"{name} gets a vote .") for name in vocabulary.CANDIDATES}
        assert counts[prompt.answer] > sum(counts.values()) / 2


def test_a_chain_is_followed_to_its_end():
    for seed in range(20):
        prompt = sample("chains", 1024, Random(seed))
        start = prompt.text.split(" what does ")[1].split()[0]
        stops = [start, *prompt.answer.split(" follows ")]
        for a, b in pairwise(stops):
            assert f"note {a} follows {b} ." in prompt.text
        assert f"note {stops[-1]} ends ." in prompt.text


def test_facts_that_do_not_fit_are_refused():
    with pytest.raises(ValueError, match="do not fit in"):
        sample("needles32", 256, Random(0))


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("length", [64, 128, 1024])
def test_training_rows_mark_the_answers_and_nothing_else(kind, length):
    for seed in range(10):
        prompt = draw_prompt(kind, length, Random(seed))
        ids, wanted = pack(prompt, length)
        used = ids != vocabulary.INDEX[vocabulary.PAD]
        assert used.sum() > 0.8 * length
        assert not used[used.sum() :].any()
        said = [vocabulary.WORDS[i] for i in ids[wanted != NO_ANSWER]]
        turns = [prompt.answer, *(turn.answer for turn in prompt.later)]
        assert " ".join(said) == " ".join(f"{answer} {vocabulary.EOS}" for answer in turns)
        ends = [vocabulary.WORDS[i] for i in ids[wanted == GO_ON_OR_STOP]]
        assert ends == [word for word in said if word in (";", vocabulary.EOS)]


def test_filler_holds_no_word_that_matters():
    sentence = set(tasks.filler_sentence(2000, Random(0)).split()) - {"."}
    assert sentence <= set(vocabulary.FILLER)


# --- weights -----------------------------------------------------------------------------------


def test_the_weights_are_small():
    assert (model_path() / "model.safetensors").stat().st_size <= 5_000_000


def test_the_model_is_a_plain_llama(model):
    config = model.config
    assert config.architectures == ["LlamaForCausalLM"]
    assert config.max_position_embeddings == 4096
    assert config.tie_word_embeddings
    assert config.num_attention_heads >= 2 * config.num_key_value_heads


@pytest.mark.parametrize("task", LEAST)
def test_it_recalls(task, model):
    right = []
    for begin in (0, 8, 16):
        right += recalled(model, [held_out(task, 1024, begin + i) for i in range(8)])
    assert sum(right) / len(right) >= LEAST[task]


def test_one_pass_tells_what_decoding_gives(model):
    prompts = [held_out("needles32", 1024, i) for i in range(4)]
    prompts[0].answer = prompts[1].answer
    decoded = complete(model, [prompt.text for prompt in prompts], 5)
    expected = [got == prompt.answer for got, prompt in zip(decoded, prompts, strict=True)]
    assert recalled(model, prompts) == expected
    assert not expected[0]
