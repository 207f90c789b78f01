"""Label parsing follows Kubernetes' grammar and agrees with Ray's own validation."""

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
def test_valid_labels_are_accepted_by_the_parser_and_by_ray(key: str, value: str) -> None:
    assert parse(f"{key}={value}") == (key, value)
    assert label_utils.validate_label_selector({key: value}) is None
    assert label_utils.validate_label_selector(any_of(key, [value, "b"])) is None


def parsed_or_refused(text: str) -> tuple[str, str] | str:
    try:
        return parse(text)
    except BadLabel as refusal:
        return str(refusal)


@given(NEARLY)
def test_accepted_labels_are_valid_for_ray_and_others_give_a_one_line_error(text: str) -> None:
    found = parsed_or_refused(text)
    if isinstance(found, str):
        assert "\n" not in found
        return
    assert "=".join(found) == text
    assert label_utils.validate_label_selector(dict([found])) is None


@pytest.mark.parametrize(
    ("labels", "message"),
    [
        (["disk"], "invalid label 'disk': expected KEY=VALUE"),
        (["=ssd"], "invalid label key ''"),
        (["disk="], "invalid value '' of label disk"),
        (["disk=-ssd"], "invalid value '-ssd' of label disk: expected 1 to 63 letters, digits"),
        (["disk=in(a,b)"], "invalid value 'in(a,b)' of label disk"),
        (["disk=a=b"], "invalid value 'a=b' of label disk"),
        ([f"disk={'a' * 64}"], f"invalid value '{'a' * 64}' of"),
        (["_disk=ssd"], "invalid label key '_disk'"),
        (["/disk=ssd"], "invalid label key '/disk': the part before '/' must be"),
        (["Upper.io/disk=ssd"], "invalid label key 'Upper.io/disk': the part before"),
        ([f"{'a' * 254}/disk=ssd"], f"invalid label key '{'a' * 254}/disk'"),
        (
            ["disk=ssd", "zone=a", "disk=hdd"],
            "label disk is given 2 times: give it once",
        ),
    ],
)
def test_invalid_labels_are_refused_by_name(labels: list[str], message: str) -> None:
    with pytest.raises(BadLabel) as refusal:
        required_labels(labels, None)
    assert str(refusal.value).startswith(message)
    assert "\n" not in str(refusal.value)


def test_accelerator_becomes_a_label() -> None:
    assert required_labels(["disk=ssd"], "H100") == {"disk": "ssd", ACCELERATOR: "H100"}
    with pytest.raises(BadLabel, match=r"^invalid value 'H 100' of label ray\.io/acc"):
        required_labels([], "H 100")
    with pytest.raises(BadLabel, match=r"^label ray\.io/accelerator-type is also in 'labels'"):
        required_labels([f"{ACCELERATOR}=A100"], "H100")


def test_node_matches_if_it_has_all_required_labels() -> None:
    assert match({}, {})
    assert match({"a": "1"}, {"a": "1", "b": "2"})
    assert not match({"a": "1", "b": "2"}, {"a": "1"})
    assert not match({"a": "1"}, {"a": "2"})


def test_selector_of_several_values_lists_them_in_order() -> None:
    assert any_of("zone", ["b"]) == {"zone": "b"}
    assert any_of("zone", ["b", "a"]) == {"zone": "in(a,b)"}
