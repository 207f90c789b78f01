"""Finds out from the syntax tree of a chat template which forms of messages the template reads.

As in vLLM, a template reads lists of content parts if it has a loop over the content of a message,
such as `{% for part in message['content'] %}`. The variable `message` must come from a loop over
`messages`.
"""

from collections.abc import Iterator, Sequence
from typing import NamedTuple

from jinja2 import nodes

REASONING_NAMES = ("reasoning_content", "reasoning", "thinking")
"""Names by which templates read the reasoning of an assistant's message."""


class ContentForms(NamedTuple):
    """The forms of messages that a template reads.

    Attributes:
        string: whether the content of a message may be a string.
        lists: whether the content may be a list of parts.
        none: whether the content may be None.
        reasoning_names: names of the members from which the template reads the reasoning.
    """

    string: bool
    lists: bool
    none: bool = False
    reasoning_names: Sequence[str] = ()


def content_forms(template: nodes.Template) -> ContentForms:
    """Return the forms of messages that a parsed template reads.

    A template that loops over the content also reads strings if it contains the test `is string`.
    """
    messages = set(_loop_variables(template, _aliases(template, "messages")))
    loops = template.find_all(nodes.For)
    tests = list(template.find_all(nodes.Test))
    lists = any(_reads_content(loop.iter, messages) for loop in loops)
    words = {each.attr for each in template.find_all(nodes.Getattr)}
    words |= {str(each.value) for each in template.find_all(nodes.Const)}
    return ContentForms(
        string=not lists or any(test.name == "string" for test in tests),
        lists=lists,
        none=any(test.name == "none" and _reads_content(test.node, messages) for test in tests),
        reasoning_names=tuple(name for name in REASONING_NAMES if name in words),
    )


def _aliases(template: nodes.Template, name: str) -> set[str]:
    """Return `name` and all variables that are assigned from it.

    The assignment may apply filters or slices.
    """
    found = {name}
    assignments = [
        (each.target.name, each.node)
        for each in template.find_all(nodes.Assign)
        if isinstance(each.target, nodes.Name)
    ]
    is_complete = False
    while not is_complete:
        new = {target for target, node in assignments if _variable(node) in found}
        is_complete = new <= found
        found |= new
    return found


def _loop_variables(template: nodes.Template, lists: set[str]) -> Iterator[str]:
    for loop in template.find_all(nodes.For):
        if _variable(loop.iter) in lists and isinstance(loop.target, nodes.Name):
            yield loop.target.name


def _reads_content(node: nodes.Node, messages: set[str]) -> bool:
    """Return whether an expression reads `content` of a variable whose name is in `messages`."""
    match _unwrapped(node):
        case nodes.Getattr(node=owner, attr="content"):
            return _variable(owner) in messages
        case nodes.Getitem(node=owner, arg=nodes.Const(value="content")):
            return _variable(owner) in messages
    return False


def _variable(node: nodes.Node | None) -> str | None:
    """Return the name of the variable that an expression reads, or None.

    The expression may apply filters or slices to the variable.
    """
    inner = _unwrapped(node)
    return inner.name if isinstance(inner, nodes.Name) else None


def _unwrapped(node: nodes.Node | None) -> nodes.Node | None:
    """Return the inner part of an expression, without filters, tests and slices."""
    while True:
        match node:
            case nodes.Filter(node=inner) | nodes.Test(node=inner):
                node = inner
            case nodes.Getitem(node=inner, arg=nodes.Slice()):
                node = inner
            case _:
                return node
