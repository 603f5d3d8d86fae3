"""Text decoded in chunks equals the text decoded at once."""

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from jaxtrain.data import ByteTokenizer, tokenizer
from jaxtrain.data.text.text_stream import decode_stream, replace_unprintable


class Counting:
    """A byte tokenizer that records how many tokens each call of `decode` gets."""

    def __init__(self):
        self.lengths = []

    def decode(self, tokens):
        self.lengths.append(len(tokens))
        return ByteTokenizer().decode(tokens)


@settings(deadline=None)
@given(st.text(), st.text())
def test_joined_chunks_equal_the_text(prompt, text):
    assert "".join(decode_stream(ByteTokenizer(), list(prompt.encode()), text.encode())) == prompt + text


@settings(deadline=None)
@given(st.binary() | st.lists(st.sampled_from(b"\xff\xff\xe2a"), min_size=20).map(bytes))
def test_invalid_bytes_decode_as_at_once_except_at_an_incomplete_end(content):
    text = "".join(decode_stream(ByteTokenizer(), list(b"> "), content))
    assert text.rstrip("\ufffd") == ("> " + content.decode("utf-8", "replace")).rstrip("\ufffd")


@pytest.mark.parametrize("content", ["any text é " * 100, b"\xff" * 1000, b"\xe2\x82" * 500])
def test_the_cost_of_a_token_does_not_depend_on_the_length_of_the_text(content):
    counting = Counting()
    content = content.encode() if isinstance(content, str) else content
    assert "".join(decode_stream(counting, list(b"prompt"), content))
    assert max(counting.lengths) <= 16
    assert len(counting.lengths) <= 3 * len(content) + 4


def test_a_tokenizer_that_joins_words_keeps_their_spaces(tmp_path):
    tokenizers = pytest.importorskip("tokenizers")
    words = {word: i for i, word in enumerate(["▁the", "▁fox", "▁", "é", "a", "b"])}
    model = tokenizers.Tokenizer(tokenizers.models.WordLevel(words, unk_token="▁"))
    model.decoder = tokenizers.decoders.Metaspace()
    model.save(str(tmp_path / "tokenizer.json"))
    texts = tokenizer(tmp_path / "tokenizer.json")
    tokens = [0, 1, 4, 3, 1, 5, 0, 0]
    for cut in range(1, len(tokens)):
        assert "".join(decode_stream(texts, tokens[:cut], tokens[cut:])) == texts.decode(tokens)


def test_unprintable_characters_become_dots():
    assert replace_unprintable("a\n\tb\x1b\ufffdé") == "a\n\tb··é"
