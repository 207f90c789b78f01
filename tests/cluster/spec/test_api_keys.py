"""The API keys of a cluster: their sources, and the keys that are refused."""

from pathlib import Path
from typing import Any

import pytest

from penstock.cluster.configs import ClusterSecrets, router_config
from penstock.cluster.spec.api_keys import check_access, read_api_keys
from penstock.cluster.spec.records import SpecError
from penstock.cluster.spec.spec import parse
from penstock.cluster.spec.yaml_file import read_file
from penstock.common.api_key import ApiKey
from tests.support.api_keys import key_file

KEYS = [f"sk-top-secret-number-{number}" for number in range(4)]

SECRETS = ClusterSecrets.new()


def refusal(content: dict[str, Any], environment: dict[str, str]) -> str:
    with pytest.raises(SpecError) as failure:
        read_api_keys(parse(content), environment)
    message = str(failure.value)
    assert "sk-" not in message
    assert "\n" not in message
    return message


def test_keys_come_from_files_and_variables_with_names_and_roles(tmp_path: Path) -> None:
    content = {
        "router": {"api_key_file": str(key_file(tmp_path, KEYS[0], "", f"  {KEYS[1]} "))},
        "keys": {
            "ops": {"role": "operator", "file": str(key_file(tmp_path, KEYS[2]))},
            "prometheus": {"role": "metrics", "env": "SCRAPER"},
            "batch": {"env": "BATCH"},
        },
    }
    environment = {
        "PENSTOCK_API_KEY": f"{KEYS[3]}\n",
        "SCRAPER": "sk-scrape" * 2,
        "BATCH": "b" * 16,
    }
    keys = read_api_keys(parse(content), environment)
    assert keys == (
        ApiKey("key-1", KEYS[0]),
        ApiKey("key-2", KEYS[1]),
        ApiKey("environment", KEYS[3]),
        ApiKey("ops", KEYS[2], "operator"),
        ApiKey("prometheus", "sk-scrape" * 2, "metrics"),
        ApiKey("batch", "b" * 16),
    )
    config = router_config(parse(content), tmp_path, SECRETS, 0, keys)
    assert config.api_keys == keys
    assert "sk-" not in repr(config)
    assert read_api_keys(parse({}), {}) == ()


@pytest.mark.parametrize(
    "key", ["", " ", "sk-two words-and-more", "sk-with-a-\u00e9-in-it", "sk-short"]
)
def test_what_cannot_be_a_key_is_refused_wherever_it_comes_from(tmp_path: Path, key: str) -> None:
    assert "PENSTOCK_API_KEY: the key" in refusal({}, {"PENSTOCK_API_KEY": key})
    assert "keys.ops: the key" in refusal({"keys": {"ops": {"env": "OPS"}}}, {"OPS": key})
    if key.strip():
        file = str(key_file(tmp_path, KEYS[0], "", key))
        message = refusal({"router": {"api_key_file": file}}, {})
        assert message.startswith("router.api_key_file: line 3: the key")


def test_short_keys_need_a_setting(tmp_path: Path) -> None:
    router = {"api_key_file": str(key_file(tmp_path, "k"))}
    assert "--allow-weak-keys" in refusal({"router": router}, {})
    spec = parse({"router": {**router, "allow_weak_keys": True}})
    assert read_api_keys(spec, {}) == (ApiKey("key-1", "k"),)


def test_the_same_key_twice_is_refused_by_the_names(tmp_path: Path) -> None:
    twice = {"router": {"api_key_file": str(key_file(tmp_path, KEYS[0], KEYS[0]))}}
    assert (
        "line 2: this key has the same value as the key at router.api_key_file: line 1: "
        in refusal(twice, {})
    )
    content = {"keys": {"ops": {"env": "OPS", "role": "operator"}}}
    environment = {"OPS": KEYS[0], "PENSTOCK_API_KEY": f" {KEYS[0]}"}
    assert "keys.ops: this key has the same value as the key at PENSTOCK_API_KEY: " in refusal(
        content, environment
    )
    content = {"keys": {"environment": {"env": "OPS"}}}
    environment = {"OPS": KEYS[0], "PENSTOCK_API_KEY": KEYS[1]}
    expected = "keys.environment: the key at PENSTOCK_API_KEY already has the name 'environment': "
    assert expected in refusal(content, environment)


def test_files_and_variables_that_cannot_be_used_are_named(tmp_path: Path) -> None:
    open_to_all = key_file(tmp_path, KEYS[0], mode=0o644)
    message = refusal({"router": {"api_key_file": str(open_to_all)}}, {})
    assert message.startswith("router.api_key_file: the file can be read or written by other users")
    message = refusal({"keys": {"ops": {"file": str(open_to_all)}}}, {})
    assert message.startswith("keys.ops.file: the file can be read")
    message = refusal({"keys": {"ops": {"file": str(key_file(tmp_path, *KEYS))}}}, {})
    assert message == "keys.ops.file: the file has several lines: expected one key"
    for wrong in (str(tmp_path / "none"), "sk-a-key-instead-of-a-path"):
        message = refusal({"router": {"api_key_file": wrong}}, {})
        assert message == "router.api_key_file: the file cannot be read: No such file or directory"
    message = refusal({"keys": {"ops": {"env": "sk-a-key-instead-of-a-name"}}}, {})
    assert message == "keys.ops.env: the environment has no variable of this name: set the variable"


@pytest.mark.parametrize(
    "content",
    [
        {"router": {"api_key_file": ["sk-top"]}},
        {"router": {"api_key_file": 3, "http_port": "sk-top"}},
        {"router": ["sk-top"]},
        {"router": "sk-top"},
        {"router": {"api_keys": ["sk-top"]}},
        {"router": {"api_key": "sk-top"}},
        {"keys": "sk-top"},
        {"keys": ["sk-top"]},
        {"keys": {"ops": "sk-top"}},
        {"keys": {"ops": ["sk-top"]}},
        {"keys": {"ops": {"key": "sk-top"}}},
        {"keys": {"ops": {"env": ["sk-top"]}}},
        {"keys": {"ops": {"env": "sk-top", "file": "sk-top"}}},
        {"keys": {"ops": {"role": "operator"}}},
    ],
)
def test_errors_of_the_cluster_file_do_not_contain_keys(content: dict[str, Any]) -> None:
    with pytest.raises(SpecError) as failure:
        parse(content)
    assert str(failure.value).startswith(("router", "keys"))
    assert "sk-top" not in str(failure.value)


def test_specification_does_not_show_where_keys_are() -> None:
    # A key that was written by mistake in place of a file or variable must not be logged.
    content = {"router": {"api_key_file": "sk-top"}, "keys": {"ops": {"env": "sk-top"}}}
    assert "sk-top" not in repr(parse(content))


@pytest.mark.parametrize("text", ["keys: {ops: [sk-top}", "keys:\n  ops: sk-top: a"])
def test_yaml_errors_show_the_position_and_no_keys(tmp_path: Path, text: str) -> None:
    path = tmp_path / "cluster.yaml"
    path.write_text(text)
    with pytest.raises(
        SpecError, match=r"cannot be parsed as YAML: .*, line \d+, column \d+$"
    ) as failure:
        read_file(path)
    assert "sk-top" not in str(failure.value)


@pytest.mark.parametrize("host", ["0.0.0.0", "::", "10.0.0.1", "some.name"])
def test_address_beyond_loopback_needs_keys_or_the_word_of_the_operator(host: str) -> None:
    spec = parse({"router": {"host": host}})
    with pytest.raises(SpecError, match=r"^router\.host: .* there are no API keys"):
        check_access(spec, has_keys=False)
    check_access(spec, has_keys=True)
    check_access(parse({"router": {"host": host, "allow_anonymous": True}}), has_keys=False)
    check_access(parse({}), has_keys=False)
    spec = parse({"router": {"admin_host": host}})
    with pytest.raises(SpecError, match=r"^router\.admin_host: .* there are no API keys"):
        check_access(spec, has_keys=False)
    check_access(spec, has_keys=True)
