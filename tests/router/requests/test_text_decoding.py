"""Long lists of tokens are decoded in slices; the text is the same as without slices."""

from collections.abc import Callable

import pytest
from tokenizers import Tokenizer

from penstock.common.text.token_bytes import TOKENS_PER_TEXT, TokenBytes
from penstock.router.errors import ServingError
from penstock.router.requests.text_decoding import decoded_texts, encoded_texts
from tests.support.tokenizers import byte_fallback, byte_level, metaspace


@pytest.mark.parametrize("make", [byte_level, byte_fallback, metaspace])
@pytest.mark.parametrize("skip_special", [True, False])
@pytest.mark.parametrize("first", [[], [1] * (TOKENS_PER_TEXT + 1)])
async def test_text_of_slices_is_the_text_of_the_whole(
    make: Callable[[], Tokenizer], skip_special: bool, first: list[int]
) -> None:
    tokenizer = make()
    text = "the 日本 dog 😀</s>, über " * 700
    tokens = [*first, *tokenizer.encode(text, add_special_tokens=False).ids, 10**6]
    assert len(tokens) > 3 * TOKENS_PER_TEXT
    token_bytes = TokenBytes(tokenizer)
    texts = await decoded_texts(token_bytes, tokens, skip_special)
    assert len(texts) > 3
    found = "".join(texts)
    assert found == token_bytes.decode(tokens, skip_special)
    assert "dog" in found


async def test_text_with_more_than_the_maximum_of_bytes_is_refused() -> None:
    texts = ["aü", "b"]
    assert await encoded_texts(texts, 4) == [b"a\xc3\xbc", b"b"]
    with pytest.raises(ServingError, match="more than 3 bytes, the maximum") as error:
        await encoded_texts(texts, 3)
    assert error.value.param == "tokens"
