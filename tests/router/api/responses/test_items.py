"""Conversion of input items to the messages that chat templates read."""

from penstock.router.api.responses.items import InputItem, TextContent, messages_of


def reasoning(text: str) -> InputItem:
    return InputItem(type="reasoning", content=[TextContent(type="reasoning_text", text=text)])


def test_consecutive_reasoning_is_joined_in_the_message_to_which_it_belongs() -> None:
    call = InputItem(type="function_call", call_id="c", name="f", arguments="{}")
    result = InputItem(type="function_call_output", call_id="c", output="1")
    answer = InputItem(role="assistant", content="It is 1.")
    items = [reasoning("a"), reasoning("b"), call, result, reasoning("c"), answer, reasoning("d")]
    first, _, second, third = messages_of(items)
    assert (first["reasoning_content"], first["content"]) == ("a\nb", None)
    assert (second["reasoning_content"], second["content"]) == ("c", "It is 1.")
    assert (third["reasoning_content"], third["content"]) == ("d", "")
