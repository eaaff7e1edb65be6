"""Prompts: token ids, and which of them count as yes and no."""

import copy

import pytest
from transformers import AddedToken, LlamaTokenizer

from cluster.errors import ModelError
from cluster.models.checkpoint import VOCABULARY
from cluster.models.loading import load_model


def test_the_prompt_reads_as_the_family_writes_it(model):
    decode = model.tokenizer.decode
    opening, answer = "<|im_start|>system\n", "<|im_end|>\n<|im_start|>assistant\n"
    if model.family == "llava_next_video":
        opening, answer = "<s>USER: ", " ASSISTANT:"
    assert decode(model.system_ids()).startswith(opening)
    asked = decode(model.question_ids("Is a bag left behind?"))
    assert "Is a bag left behind? Answer with yes or no" in asked
    assert asked.endswith(answer)
    if model.family in ("qwen2_5_vl", "qwen2_vl"):
        assert decode(model.system_ids()).endswith("<|vision_start|>")
        assert asked.startswith("<|vision_end|>")


@pytest.mark.parametrize("legacy", [False, True])
def test_a_word_behind_a_beginning_has_the_space_that_llamas_tokenizer_gives_it(legacy):
    """As the library tokenises the prompt. Behind ``<s>`` in one text, the first word was another token."""
    model = load_model("tiny-llava_next_video")
    pieces = ["<unk>", "<s>", "</s>", *"▁USER:", "▁U", "▁US", "▁USE", "▁USER", "<0x0A>", *"AINT?wnorsye."]
    vocabulary = {piece: number for number, piece in enumerate(pieces)}
    merges = [("▁", "U"), ("▁U", "S"), ("▁US", "E"), ("▁USE", "R")]
    model.tokenizer = LlamaTokenizer(vocab=vocabulary, merges=merges, legacy=legacy)
    model.tokenizer.add_tokens([AddedToken("<video>", special=True, normalized=False)])
    assert model.tokenizer.convert_ids_to_tokens(model.system_ids()) == ["<s>", "▁USER", ":", "▁"]
    # A question stands behind the frames. Where only a text's first word has the space, its new line had one, too.
    whole = model.tokenizer("<s>USER: <video>\nIs it? ASSISTANT:", add_special_tokens=False)["input_ids"]
    behind = whole.index(model.tokenizer.convert_tokens_to_ids("<video>")) + 1
    assert model.ask_ids("Is it?") == whole[behind:]


@pytest.mark.parametrize("text", ["Läuft dort jemand? 有人吗?", "", "<<>>\n\t\x07", "x" * 500])
def test_any_question_round_trips(model, text):
    ids = model.question_ids(text)
    assert max(ids) < model.text_config.vocab_size
    assert text in model.tokenizer.decode(ids)


def test_a_usual_question_is_about_as_long_as_with_a_real_tokenizer(model):
    assert len(model.question_ids("Is anyone climbing the fence?")) < 40


def test_yes_and_no(model):
    yes, no = model.yes_no_ids()
    assert yes
    assert no
    assert not set(yes) & set(no)
    read = (
        {model.tokenizer.decode([i]).strip().lower() for i in yes},
        {model.tokenizer.decode([i]).strip().lower() for i in no},
    )
    assert read == ({"yes"}, {"no"})


def test_a_tokenizer_that_cannot_tell_yes_from_no_is_refused():
    model = load_model("tiny-qwen2_5_vl")
    tokenizer = copy.deepcopy(model.tokenizer)

    class SharedFirstToken:
        unk_token_id = None

        def __call__(self, text, **_):
            return {"input_ids": [7, *tokenizer(text)["input_ids"]]}

    model.tokenizer = SharedFirstToken()
    with pytest.raises(ModelError, match="cannot tell yes from no"):
        model.yes_no_ids()


def test_a_letter_counts_only_where_no_token_is_the_word():
    model = load_model("tiny-qwen2_5_vl")

    class Vocabulary:
        unk_token_id = None

        def __init__(self, words):
            self.words = words

        def __call__(self, text, **_):
            return {"input_ids": [self.words[text]] if text in self.words else [ord(letter) for letter in text]}

    model.tokenizer = Vocabulary({"yes": 500, " Yes": 501, "No": 502})
    assert model.yes_no_ids() == ([500, 501], [502])
    model.tokenizer = Vocabulary({"yes": 500})
    assert model.yes_no_ids() == ([500], [ord("N"), ord("n")])


def test_preset_tokenizers_fit_the_preset_vocabulary(model):
    assert len(model.tokenizer) <= VOCABULARY
    assert model.text_config.vocab_size == VOCABULARY
