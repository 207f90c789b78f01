"""Formats numbers in clients' requests for error messages."""


def number_text(value: float) -> str:
    """Return a number as text. For an integer of more than 64 bits, return a description instead.

    A client may send an integer of thousands of digits. Python may refuse to convert such an
    integer, or the product of two of them, to text.
    """
    is_long = isinstance(value, int) and value.bit_length() > 64
    return "a number of more than 64 bits" if is_long else str(value)
