"""The word-level vocabulary of the recall model, and the tokenizer built from it.

Every token is one lower-case English word or one punctuation mark, so that a person can type a
document into a chat window and count its tokens by eye. Words are grouped by the part they
play; the order of the groups fixes the token ids, so a change here needs new weights.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from tokenizers import Tokenizer

PAD, BOS, EOS, UNK, ANSWER = "<pad>", "<bos>", "<eos>", "<unk>", "<answer>"
SPECIALS = [PAD, BOS, EOS, UNK, ANSWER]
PUNCTUATION = [".", ",", ":", ";", "?", "!"]


def _words(text: str) -> list[str]:
    return text.split()


# Words of the lines that carry facts and of the questions about them.
FUNCTION = _words(
    """
    what is are the code codes for please repeat passage begins ends gets a vote who has most votes
    note follows does follow and hello thanks yes no to of in it
    """
)
ORDINALS = _words("first second third fourth fifth sixth seventh eighth")

# A key is a colour and an animal: two keys can share one word.
COLOURS = _words(
    """
    red blue green yellow purple orange black white brown pink gray golden silver crimson scarlet
    violet indigo teal ivory copper bronze amber coral maroon olive navy tan lilac jade ruby azure
    beige
    """
)
ANIMALS = _words(
    """
    falcon otter tiger rabbit eagle dolphin badger panther wolf heron salmon beaver turtle camel
    lizard raven moose donkey hamster spider lobster penguin cheetah gorilla leopard walrus weasel
    sparrow buffalo ferret cobra zebra
    """
)

# What a code is made of: radio letters, numbers, fruit, metals, cloth, instruments, weather...
VALUES = _words(
    """
    alfa bravo charlie echo foxtrot golf hotel india juliet kilo lima mike november oscar papa
    quebec romeo sierra tango uniform victor whiskey xray yankee zulu zero one two three four five
    six seven eight nine ten eleven twelve twenty thirty forty fifty sixty seventy eighty ninety
    hundred thousand million apple banana cherry grape lemon mango melon peach pear plum berry fig
    iron zinc nickel cobalt carbon helium neon argon radon tin lead sulfur cotton silk wool linen
    velvet denim leather nylon piano violin guitar drum flute trumpet cello harp thunder breeze
    monsoon frost blizzard drizzle tornado cyclone saturn jupiter mars venus mercury neptune pluto
    comet hammer chisel wrench pliers shovel ladder anvil lever pepper ginger saffron basil thyme
    cumin clove garlic walnut almond
    """
)

CANDIDATES = _words("alice boris clara david emma frank grace henry")
VARIABLES = _words(
    """
    alpha beta gamma delta epsilon zeta eta theta iota kappa lambda mu nu xi omicron pi rho sigma
    tau upsilon phi chi psi omega aleph bet gimel dalet tav shin ayin lamed
    """
)

# Filler sentences read: determiner adjective noun verb preposition determiner adjective noun.
DETERMINERS = _words("this that every some another our their any")
ADJECTIVES = _words(
    """
    old quiet small large bright narrow wide gentle distant early late empty busy calm cold warm
    dusty heavy light simple young famous hidden local modern ordinary plain proud rough sharp
    smooth steady sudden thick thin tiny
    """
)
NOUNS = _words(
    """
    river village garden market street window letter teacher farmer sailor bridge mountain valley
    forest harbor station kitchen library painter doctor driver baker child neighbor visitor machine
    engine wagon ship train clock lamp table chair door wall roof floor road path hill lake island
    field meadow barn castle tower school church office shop boat basket bottle blanket curtain
    mirror pencil paper story song dance festival winter summer autumn spring morning evening
    journey lesson meeting picture promise question shadow
    """
)
VERBS = _words(
    """
    waits rests stands moves turns grows sleeps walks runs works sits lies stays travels wanders
    returns listens looks shines fades rises falls opens closes drifts leans points settles floats
    climbs hides gathers lingers pauses appears
    """
)
PREPOSITIONS = _words(
    """
    near behind beside under above across along around before beyond inside outside past through
    toward within without against between upon
    """
)

FILLER = DETERMINERS + ADJECTIVES + NOUNS + VERBS + PREPOSITIONS
WORDS = (
    SPECIALS + PUNCTUATION + FUNCTION + ORDINALS + COLOURS + ANIMALS + VALUES
    + CANDIDATES + VARIABLES + FILLER
)  # fmt: skip
WORDS += [f"<unused{i}>" for i in range(-len(WORDS) % 64)]
INDEX = {word: i for i, word in enumerate(WORDS)}
assert len(INDEX) == len(WORDS), "a word stands in two groups"

MAX_POSITIONS = 4096

# <bos> [system] user <answer> assistant <eos> user <answer> ... and <answer> to ask for a reply.
CHAT_TEMPLATE = (
    "{{ bos_token }}"
    "{%- for message in messages -%}"
    "{%- if message['content'] is string -%}"
    "{%- set content = message['content'] | trim -%}"
    "{%- else -%}"
    "{%- set content = message['content'] | map(attribute='text') | join(' ') | trim -%}"
    "{%- endif -%}"
    "{%- if message['role'] == 'assistant' -%}"
    "{{ ' <answer> ' + content + ' ' + eos_token }}"
    "{%- else -%}"
    "{{ ' ' + content }}"
    "{%- endif -%}"
    "{%- endfor -%}"
    "{%- if add_generation_prompt -%}{{ ' <answer>' }}{%- endif -%}"
)


def encode(text: str) -> list[int]:
    """Ids of a text whose words are in the vocabulary and separated by single spaces."""
    return [INDEX[word] for word in text.split()]


def render(text: str) -> str:
    """The prompt the chat template makes of one user message that asks for a reply."""
    return f"{BOS} {text} {ANSWER}"


SPECIAL_TOKENS = {
    "bos_token": BOS, "eos_token": EOS, "pad_token": PAD, "unk_token": UNK,
    "additional_special_tokens": [ANSWER],
}  # fmt: skip


def _core() -> Tokenizer:
    """The tokenizer of this vocabulary.

    Lower-cases, splits at white space and punctuation, maps other words to `<unk>`, and joins
    words with single spaces when decoding. `<bos>` is put first unless special tokens are off.
    """
    from tokenizers import AddedToken, Tokenizer, models, normalizers, pre_tokenizers, processors

    core = Tokenizer(models.WordLevel(INDEX, unk_token=UNK))
    core.add_special_tokens([AddedToken(word, special=True, normalized=False) for word in SPECIALS])
    core.normalizer = normalizers.Lowercase()
    core.pre_tokenizer = pre_tokenizers.Sequence(
        [pre_tokenizers.WhitespaceSplit(), pre_tokenizers.Punctuation()]
    )
    core.post_processor = processors.TemplateProcessing(
        single=f"{BOS} $A", pair=f"{BOS} $A $B", special_tokens=[(BOS, INDEX[BOS])]
    )
    return core


def save_tokenizer(folder: Path) -> None:
    """Write tokenizer.json, tokenizer_config.json and special_tokens_map.json to `folder`.

    Written here and not by `save_pretrained`, whose files differ between releases.
    """
    _core().save(str(folder / "tokenizer.json"))
    config = {
        "tokenizer_class": "PreTrainedTokenizerFast", "model_max_length": MAX_POSITIONS,
        "padding_side": "left", "clean_up_tokenization_spaces": False, **SPECIAL_TOKENS,
        "chat_template": CHAT_TEMPLATE,
    }  # fmt: skip
    for file, content in (
        ("tokenizer_config.json", config),
        ("special_tokens_map.json", SPECIAL_TOKENS),
    ):
        (folder / file).write_text(json.dumps(content, indent=2) + "\n")
