"""Renders chats in helper processes, which run the job of `render_job`.

The router's own process compiles no chat templates, because templates are untrusted code.
"""

from penstock.common.text.chat_source import TemplateOptions
from penstock.common.text.control_tokens import Segment
from penstock.router.helpers.pool import HelperPool
from penstock.router.requests.chat import Chat
from penstock.router.requests.json_text import dumps

KIND = "chat"
"""Name of the job that renders a chat."""

TEMPLATE = "the model's chat template"

NO_TEMPLATE = "this model has no chat template: send a prompt to the completions API instead"


async def render_chat(
    helpers: HelperPool, chat: Chat, options: TemplateOptions, max_chars: int, tenant: str
) -> list[Segment]:
    """Return the segments of the prompt for a chat.

    Raises:
        ServingError: INVALID if the template fails, exceeds the limits of a helper process, or
            makes more than `max_chars` characters.
    """
    head = dumps(
        [
            max_chars,
            options.add_generation_prompt,
            options.continue_final_message,
            options.variables,
        ]
    )
    job = [head.encode(), chat.messages, chat.tools, chat.documents]
    flags, *texts = await helpers.run(KIND, job, tenant, TEMPLATE, "messages")
    return [Segment(text.decode(), bool(flag)) for flag, text in zip(flags, texts, strict=True)]
