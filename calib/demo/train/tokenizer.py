"""The demo model's tokenizer and chat template: lower-cased whole words, every word of every question and answer."""

import re

from tokenizers import Tokenizer, models, normalizers, pre_tokenizers
from transformers import PreTrainedTokenizerFast

from ..questions import ANSWERS, KINDS

PAD, BOS, EOS, UNK, USER, ASSISTANT, IMAGE = SPECIAL = (
    "<pad>", "<bos>", "<eos>", "<unk>", "<user>", "<assistant>", "<image>",
)  # fmt: skip

# The clip's placeholder stands once, in the first user turn: every frame's 16 tokens go there, without separators.
CHAT_TEMPLATE = (
    "{{ bos_token }}"
    "{% for message in messages %}"
    "{% if message.role == 'user' %}<user>{% else %}<assistant>{% endif %}"
    "{% if message.content is string %}{{ message.content }}{% else %}"
    "{% for item in message.content %}"
    "{% if item.type == 'text' %}{{ item.text }}{% else %}<image>{% endif %}"
    "{% endfor %}{% endif %}"
    "{% if message.role == 'assistant' %}{{ eos_token }}{% endif %}"
    "{% endfor %}"
    "{% if add_generation_prompt %}<assistant>{% endif %}"
)


def words() -> list[str]:
    """Every word and mark of every question and answer, sorted."""
    phrasings = (text for kind in KINDS.values() for text in kind.phrasings)
    texts = (*phrasings, *ANSWERS, "an")
    return sorted({word for text in texts for word in re.findall(r"\w+|\?", re.sub(r"<\w+>", "", text))})


def build_tokenizer() -> PreTrainedTokenizerFast:
    vocabulary = {word: index for index, word in enumerate((*SPECIAL, *words()))}
    tokenizer = Tokenizer(models.WordLevel(vocabulary, unk_token=UNK))
    tokenizer.normalizer = normalizers.Lowercase()
    tokenizer.pre_tokenizer = pre_tokenizers.Whitespace()
    return PreTrainedTokenizerFast(
        tokenizer_object=tokenizer,
        pad_token=PAD,
        bos_token=BOS,
        eos_token=EOS,
        unk_token=UNK,
        additional_special_tokens=[USER, ASSISTANT, IMAGE],
        chat_template=CHAT_TEMPLATE,
        clean_up_tokenization_spaces=False,
    )
