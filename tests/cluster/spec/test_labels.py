"""Labels: Kubernetes' grammar, held against Ray's own; what is none is refused by name."""

import string

import pytest
from hypothesis import given
from hypothesis import strategies as st
from ray._private import label_utils

from penstock.cluster.spec.labels import (
    ACCELERATOR,
    BadLabel,
    any_of,
    match,
    parse,
    required_labels,
)

ENDS = string.ascii_letters + string.digits
NAMES = st.from_regex(r"[a-zA-Z0-9]([-_.a-zA-Z0-9]{0,61}[a-zA-Z0-9])?", fullmatch=True)
PARTS = st.from_regex(r"[a-z0-9]([-a-z0-9]{0,9}[a-z0-9])?", fullmatch=True)
PREFIXES = st.lists(PARTS, min_size=1, max_size=3).map(".".join)
KEYS = NAMES | st.builds("{}/{}".format, PREFIXES, NAMES)
NEARLY = st.text(ENDS[:3] + "-_./= (),!\n", max_size=8)


@given(KEYS, NAMES)
def test_what_the_grammar_allows_is_taken_and_ray_takes_it(key: str, value: str) -> None:
    assert parse(f"{key}={value}") == (key, value)
    assert label_utils.validate_label_selector({key: value}) is None
    assert label_utils.validate_label_selector(any_of(key, [value, "b"])) is None


def parsed_or_refused(text: str) -> tuple[str, str] | str:
    try:
        return parse(text)
    except BadLabel as refusal:
        return str(refusal)


@given(NEARLY)
def test_whatever_is_taken_ray_takes_too_and_the_rest_is_refused_in_a_line(text: str) -> None:
    found = parsed_or_refused(text)
    if isinstance(found, str):
        assert "\n" not in found
        return
    assert "=".join(found) == text
    assert label_utils.validate_label_selector(dict([found])) is None


@pytest.mark.parametrize(
    ("labels", "said"),
    [
        (["disk"], "'disk' is no KEY=VALUE"),
        (["=ssd"], "'' is no key of a label"),
        (["disk="], "'' is no value of a label (disk)"),
        (["disk=-ssd"], "'-ssd' is no value of a label (disk): up to 63 letters, digits"),
        (["disk=in(a,b)"], "'in(a,b)' is no value of a label (disk)"),
        (["disk=a=b"], "'a=b' is no value of a label (disk)"),
        ([f"disk={'a' * 64}"], f"'{'a' * 64}' is no value"),
        (["_disk=ssd"], "'_disk' is no key of a label"),
        (["/disk=ssd"], "'/disk' is no key of a label: '' before / is no domain"),
        (["Upper.io/disk=ssd"], "'Upper.io/disk' is no key of a label: 'Upper.io' before /"),
        ([f"{'a' * 254}/disk=ssd"], f"'{'a' * 254}/disk' is no key"),
        (["disk=ssd", "zone=a", "disk=hdd"], "disk is asked for twice, and a node has one value"),
    ],
)
def test_what_is_no_label_is_refused_by_name(labels: list[str], said: str) -> None:
    with pytest.raises(BadLabel) as refusal:
        required_labels(labels, None)
    assert str(refusal.value).startswith(said)
    assert "\n" not in str(refusal.value)


def test_an_accelerator_is_a_label_too() -> None:
    assert required_labels(["disk=ssd"], "H100") == {"disk": "ssd", ACCELERATOR: "H100"}
    with pytest.raises(BadLabel, match=r"^'H 100' is no value of a label \(ray\.io/acc"):
        required_labels([], "H 100")
    with pytest.raises(BadLabel, match=r"^ray\.io/accelerator-type is asked for twice"):
        required_labels([f"{ACCELERATOR}=A100"], "H100")


def test_a_node_matches_that_has_all_that_is_asked() -> None:
    assert match({}, {})
    assert match({"a": "1"}, {"a": "1", "b": "2"})
    assert not match({"a": "1", "b": "2"}, {"a": "1"})
    assert not match({"a": "1"}, {"a": "2"})


def test_a_selector_of_several_values_names_them_all() -> None:
    assert any_of("zone", ["b"]) == {"zone": "b"}
    assert any_of("zone", ["b", "a"]) == {"zone": "in(a,b)"}
