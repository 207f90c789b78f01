"""Numbers of clients in error messages."""


def number_text(value: float) -> str:
    """Return a number as text, without the digits of an integer of more than 64 bits.

    A client may send an integer of thousands of digits. Python refuses to convert longer integers
    to text, such as the product of two integers of this size.
    """
    is_long = isinstance(value, int) and value.bit_length() > 64
    return "a number of more than 64 bits" if is_long else str(value)
