"""The grammar of answers in the harmony format (see `harmony`) whose calls fit a schema."""

from penstock.router.parsers.harmony import (
    CALL,
    CHANNEL,
    CONSTRAIN,
    END,
    FUNCTIONS,
    MESSAGE,
    RETURN,
    ROLE,
    START,
    begins_message,
)
from penstock.router.parsers.tools.call_grammar import CallGrammar


def harmony_grammar(grammar: CallGrammar, prompt_end: str) -> str:
    """Return the grammar in Lark's syntax; an empty text if a marker is not a special token.

    Each message has a header in one of the forms that gpt-oss writes. The recipient of a call is
    one of the request's functions, because other tools cannot be offered.

    Args:
        grammar: writes the parts that depend on functions and tokenizer.
        prompt_end: text at the end of the prompt. It shows whether the answer begins with the
            header of a message or continues the text of a message.
    """
    markers = (START, CHANNEL, MESSAGE, END, RETURN, CALL, CONSTRAIN)
    if not all(map(grammar.is_special, markers)):
        return ""
    start, channel, message, end, final, call, constrain = map(grammar.marker, markers)

    def called(head: str) -> str:
        return grammar.each(
            lambda name, arguments: f'" to={FUNCTIONS}{name}" {head} {message} {arguments}'
        )

    content_type = f'( " "? {constrain}? " "? ( "json" | "code" ) )?'
    rules = (
        "%llguidance {}",
        "TEXT: /(.|\\n)*/",
        f'plain: {channel} PLAIN ( " "? {constrain} /[a-z]{{1,16}}/ )? {message} TEXT',
        'PLAIN: "analysis" | "commentary" | "final"',
        f"channel_call: {channel} CALLING {called(content_type)}",
        'CALLING: "analysis" | "commentary"',
        f"role_call: {called(f'{channel} CALLING {content_type}')}",
        "called: channel_call | role_call",
        f"ended: {end} | {final} | {call}",
        f'next: ended {start} "{ROLE}"',
    )
    is_header = begins_message(prompt_end)
    if grammar.is_parallel:
        first = "( plain | called )" if is_header else "TEXT"
        answer = f"{first} ( next ( plain | called ) )*"
    else:
        first = "plain" if is_header else "TEXT"
        answer = f"{first} ( next plain )* ( next called )?"
        answer = f"( {answer} | called )" if is_header else answer
    return "\n".join((*rules, *grammar.rules, f"start: {answer} ended?")) + "\n"
