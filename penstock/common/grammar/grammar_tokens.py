"""The tokens of a model, in the form in which llguidance reads them."""

from collections.abc import Sequence

from penstock.common.text.continuing import continuing
from penstock.common.text.tokenizer import ModelTokenizer


class GrammarTokens:
    """The bytes of all tokens, and a tokenizer for text that a grammar forces.

    llguidance reads the attributes of this object instead of `tokenizer.json`. From
    `tokenizer.json`, it would treat each added token of the form `<...>` as a control token, and
    text in a grammar cannot match control tokens. Many models (Qwen, DeepSeek, GLM) delimit tool
    calls and reasoning with added tokens of this form.

    Args:
        tokenizer: the tokenizer of the model.
        end_tokens: tokens that end an answer. They are treated as control tokens, although the
            tokenizer of some GGUF files does not mark them as special.
    """

    is_tokenizer_wrapper = True
    bos_token_id = None

    def __init__(self, tokenizer: ModelTokenizer, end_tokens: Sequence[int]) -> None:
        token_bytes = tokenizer.token_bytes
        self.eos_token_id = end_tokens[0]
        self.special_token_ids = sorted(token_bytes.special | set(end_tokens))
        self.tokens = list(map(token_bytes.bytes_of, range(tokenizer.vocab_size)))
        self._tokenizer = continuing(tokenizer.tokenizer)

    def __call__(self, text: str) -> list[int]:
        """Return the tokens of a text that continues an answer."""
        tokens: list[int] = self._tokenizer.encode(text, add_special_tokens=False).ids
        return tokens
