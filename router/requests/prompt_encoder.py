"""Encodes the texts of calls: checks their lengths, and encodes long texts in threads."""

from collections.abc import Callable, Sequence

from penstock.common.text.chat_source import DEFAULT_OPTIONS, TemplateOptions
from penstock.common.text.tokenizer import ModelTokenizer
from penstock.router.config import RouterConfig
from penstock.router.errors import invalid
from penstock.router.helpers.pool import HelperPool
from penstock.router.requests.chat import Chat
from penstock.router.requests.chat_rendering import NO_TEMPLATE, render_chat
from penstock.router.requests.cost_limits import check_text
from penstock.router.requests.encoding_line import EncodingLine
from penstock.router.requests.request import ModelLimits, check_bad_words
from penstock.router.requests.slices import Slices

INLINE_CHARS = 2048
"""Texts up to this length are encoded on the event loop, in about a millisecond."""


class PromptEncoder:
    """Encodes texts and chats, with the model's tokenizer and chat template.

    Args:
        tokenizer: tokenizer and chat template.
        config: limits on the texts of a call and on all texts that wait, and whether prompts may
            contain control tokens.
        model: returns the current limits of the model.
        helpers: the processes that render chats.
    """

    def __init__(
        self,
        tokenizer: ModelTokenizer,
        config: RouterConfig,
        model: Callable[[], ModelLimits],
        helpers: HelperPool,
    ) -> None:
        self._tokenizer = tokenizer
        self._bounds = config.bounds
        self._without_control = config.no_special_in_completions
        self._model = model
        self._helpers = helpers
        self._line = EncodingLine(config.bounds.max_encoding_chars)
        self.run_in_line = self._line.run  # runs other long work on prompts in the same threads

    @property
    def num_waiting(self) -> int:
        """Number of texts that wait for a thread."""
        return self._line.num_waiting

    async def encode(
        self,
        text: str,
        tenant: str,
        add_special_tokens: bool = True,
        name: str = "prompt",
    ) -> list[int]:
        """Return the token ids of the text of field `name`; raise INVALID if the text is too long.

        The limit also holds for a text whose tokens are truncated afterwards, because encoding 4 MB
        can take 8 s and 1 GB of memory.
        """
        self._check(len(text), name)
        without_control, tokenizer = self._without_control, self._tokenizer
        encode = tokenizer.encode_without_control if without_control else tokenizer.encode
        # Control tokens are encoded as text in a thread, because the second tokenizer that this
        # needs may not be loaded yet.
        if len(text) <= INLINE_CHARS and not (
            without_control and tokenizer.has_control_tokens(text)
        ):
            return encode(text, add_special_tokens)
        return await self._line.run(tenant, len(text), lambda: encode(text, add_special_tokens))

    async def encode_prompts(
        self,
        prompts: Sequence[str | list[int]],
        tenant: str,
        add_special_tokens: bool,
    ) -> list[list[int]]:
        """Return the token ids of all prompts of a call. Some prompts may already be token ids."""
        slices = Slices()
        encoded: list[list[int]] = []
        for prompt in prompts:
            if isinstance(prompt, str):
                prompt = await self.encode(prompt, tenant, add_special_tokens)
            encoded.append(prompt)
            await slices.pause()
        return encoded

    async def encode_bad_words(self, words: Sequence[str], tenant: str) -> list[list[int]]:
        """Return the token sequences that spell the bad words."""
        check_bad_words(words, self._bounds)
        num_chars = 2 * sum(map(len, words))
        if num_chars <= INLINE_CHARS:
            return self._tokenizer.encode_bad_words(words)
        return await self._line.run(
            tenant, num_chars, lambda: self._tokenizer.encode_bad_words(words)
        )

    async def encode_chat(
        self, chat: Chat, tenant: str, options: TemplateOptions = DEFAULT_OPTIONS
    ) -> list[int]:
        """Return the token ids of a conversation; raise INVALID if it cannot be rendered."""
        self._check(chat.num_chars, "messages")
        if self._tokenizer.chat_template is None:
            raise invalid(NO_TEMPLATE, "messages")
        self._check_is_read("tools", chat.tools)
        self._check_is_read("documents", chat.documents)
        max_chars = self._model().max_model_len * self._tokenizer.longest_token
        segments = await render_chat(self._helpers, chat, options, max_chars, tenant)
        num_chars = sum(len(segment.text) for segment in segments)
        # Plain segments are encoded in a thread, because the second tokenizer that they need may
        # not be loaded yet.
        if num_chars <= INLINE_CHARS and not any(segment.is_plain for segment in segments):
            return self._tokenizer.encode_segments(segments)
        return await self._line.run(
            tenant, num_chars, lambda: self._tokenizer.encode_segments(segments)
        )

    def close(self) -> None:
        """Drop waiting texts and stop the threads."""
        self._line.close()

    def _check_is_read(self, name: str, value: bytes) -> None:
        """Refuse a field that the model's chat template does not read."""
        if value and name not in self._helpers.template_variables:
            raise invalid(f"this model's chat template does not read {name}: leave it out", name)

    def _check(self, num_chars: int, name: str) -> None:
        check_text(num_chars, self._model(), self._tokenizer.longest_token, name)
