import pytest

from penstock.common.value_text import value_text


@pytest.mark.parametrize(
    ("value", "text"),
    [
        (None, "null"),
        (True, "true"),
        (False, "false"),
        (3, "3"),
        (0.5, "0.5"),
        (10**40, "a number of more than 64 bits"),
        ("x" * 50, repr("x" * 40)),
        ("a\nb", r"'a\nb'"),
        ([1, 2], "a list of 2 items"),
        ({"a": 1}, "an object of 1 members"),
        (b"x", "a value of type bytes"),
    ],
)
def test_value_is_shown_in_few_characters(value: object, text: str) -> None:
    assert value_text(value) == text


def test_deeply_nested_value_is_shown_without_its_contents() -> None:
    value: list[object] = []
    for _ in range(100_000):
        value = [value]
    assert value_text(value) == "a list of 1 items"
    while value:  # free one level at a time, since freeing all levels at once recurses
        (value,) = value  # type: ignore[assignment]
