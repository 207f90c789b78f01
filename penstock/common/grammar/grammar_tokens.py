"""The tokens of a model in the form in which llguidance reads them."""

from collections.abc import Sequence

from penstock.common.text.continuing import continuing
from penstock.common.text.tokenizer import ModelTokenizer


class GrammarTokens:
    """The bytes of all tokens, and the tokenization of forced text; llguidance reads the fields.

    If llguidance reads `tokenizer.json` itself, it takes each added token of the form `<...>` for a
    control token, which no text can contain. Many models mark calls and reasoning by such tokens
    (Qwen, DeepSeek, GLM).

    Args:
        tokenizer: the tokenizer of the model.
        end_tokens: tokens that end an answer. No text contains them, even if the tokenizer does
            not mark them as special, as in some GGUF files.
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
