"""The configuration of a GGUF file equals that of the checkpoint that the file was made from."""

import json
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from penstock.common.checkpoint_errors import BadCheckpoint, UnsupportedModel
from penstock.common.gguf.checkpoint import open_gguf
from penstock.common.gguf.documents import (
    config_of,
    generation_config_of,
    has_chat_template,
    tokenizer_config_of,
)
from penstock.common.gguf.metadata import shortest
from penstock.common.text.token_bytes import UnsupportedTokenizer
from penstock.common.text.tokenizer import ModelTokenizer
from penstock.workers.models.spec import ModelSpec, read_spec
from tests.support.checkpoints import CHAT_TEMPLATE, make_checkpoint
from tests.support.gguf_files import write_gguf

FAMILIES = (
    *("llama2", "llama3", "llama32", "qwen2", "qwen3", "gemma2", "gemma3"),
    *("phi3", "phi3-short", "phi3-long"),
)


def make_folder(folder: Path, family: str, **changes: Any) -> Path:
    """Write a checkpoint whose `config.json` has only values that a GGUF file can express."""
    make_checkpoint(folder, family)
    path = folder / "config.json"
    config = json.loads(path.read_text()) | changes
    if family.startswith("gemma"):
        config["query_pre_attn_scalar"] = config["head_dim"]
    path.write_text(json.dumps(config))
    return folder


@pytest.fixture(scope="module", params=FAMILIES)
def pair(
    request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory
) -> tuple[Path, Path]:
    """Return a checkpoint folder and its GGUF file."""
    base = tmp_path_factory.mktemp(request.param)
    folder = make_folder(base / "m", request.param)
    return folder, write_gguf(folder, base / "m.gguf", "F32")


def comparable(spec: ModelSpec) -> ModelSpec:
    """Return a spec without the values that a GGUF file expresses in another way.

    In place of Llama 3's scaling, a GGUF file has a list of divisors (tested below). In place of
    the fraction of features that RoPE rotates, a GGUF file has the number of these features.
    Control tokens determine the end tokens.
    """
    num_rotated = int(spec.head_dim * spec.rope.rotated_fraction)
    rope = replace(spec.rope, rotated_fraction=float(num_rotated))
    if spec.rope.kind == "llama3" or (spec.rope.kind == "longrope" and spec.family == "llama"):
        rope = replace(spec.rope, kind="", factor=0.0, original_max_len=0, divisors=(),
                       short_divisors=())  # fmt: skip
    return replace(spec, rope=rope, eos_tokens=())


def test_model_is_the_one_that_the_file_was_made_from(pair: tuple[Path, Path]) -> None:
    folder, path = pair
    assert comparable(read_spec(path)) == comparable(read_spec(folder))


def test_llama3_scaling_is_read_as_divisors(tmp_path: Path) -> None:
    folder = make_folder(tmp_path / "m", "llama3")
    rope = read_spec(write_gguf(folder, tmp_path / "m.gguf")).rope
    assert (rope.kind, rope.scale) == ("longrope", 1.0)
    # RoPE rotates the first pair 64 / (2 pi) = 10.2 times in 64 positions: this pair is not scaled.
    # With head_dim 20, the last pairs rotate 8 times slower than without scaling.
    assert rope.divisors == rope.short_divisors
    assert rope.divisors[:2] == (1.0, 1.0)
    assert rope.divisors[4:] == (8.0,) * 6
    assert 1.0 < rope.divisors[2] < rope.divisors[3] < 8.0


def test_control_tokens_that_end_a_turn_end_the_answer(tmp_path: Path) -> None:
    folder = make_folder(tmp_path / "m", "qwen2")
    config = config_of(write_gguf(folder, tmp_path / "m.gguf"))
    # Token 1, </s>, is named by a key of the file. Token 3, <|im_end|>, is recognized by its text.
    assert config["eos_token_id"] == [1, 3]


def test_chat_template_and_special_tokens_are_read(tmp_path: Path) -> None:
    folder = make_folder(tmp_path / "m", "qwen2")
    path = write_gguf(folder, tmp_path / "m.gguf")
    expected = {"bos_token": "<s>", "eos_token": "</s>", "chat_template": CHAT_TEMPLATE}
    assert tokenizer_config_of(path) == expected
    assert has_chat_template(path)


def test_sampling_defaults_are_read(tmp_path: Path) -> None:
    folder = make_folder(tmp_path / "m", "qwen2")

    def add(writer: gguf.GGUFWriter) -> None:
        writer.add_float32("general.sampling.temp", 0.6)
        writer.add_int32("general.sampling.top_k", 20)

    path = write_gguf(folder, tmp_path / "m.gguf", extra=add)
    assert generation_config_of(path) == {"temperature": 0.6, "top_k": 20}


@pytest.mark.parametrize(
    ("kinds", "dtype"),
    [("F32", "float32"), ("F16", "float16"), ("BF16", "bfloat16"), ("F16 BF16", "bfloat16")],
)
def test_dtype_is_that_of_the_matrices(kinds: str, dtype: str, llama: Path, tmp_path: Path) -> None:
    first, last = kinds.split()[0], kinds.split()[-1]

    def kind_of(name: str) -> str:
        return first if name == "token_embd.weight" else last

    path = write_gguf(llama, tmp_path / "m.gguf", kind_of)
    assert config_of(path)["torch_dtype"] == dtype


@pytest.mark.parametrize("number", [1e-6, 1e-5, 500000.0, 0.1, 1.702, 0.25])
def test_numbers_are_those_of_the_json_file_before_rounding_to_float32(number: float) -> None:
    assert shortest(float(np.float32(number))) == number


def test_number_that_was_not_rounded_is_kept() -> None:
    assert shortest(1.23456789012) == 1.23456789012
    assert shortest(1e300) == 1e300


Change = Callable[[gguf.GGUFWriter], None]


def set_uint(key: str, value: int) -> Change:
    def change(writer: gguf.GGUFWriter) -> None:
        writer.kv_data[0].pop(key, None)
        writer.add_uint32(key, value)

    return change


def set_text(key: str, value: str) -> Change:
    def change(writer: gguf.GGUFWriter) -> None:
        writer.kv_data[0].pop(key, None)
        writer.add_string(key, value)

    return change


def drop(key: str) -> Change:
    return lambda writer: writer.kv_data[0].pop(key)


def set_list(key: str, values: list[int]) -> Change:
    def change(writer: gguf.GGUFWriter) -> None:
        writer.kv_data[0].pop(key, None)
        writer.add_array(key, values)

    return change


REFUSED: dict[str, tuple[Change, str]] = {
    "architecture": (
        set_text("general.architecture", "mamba"),
        "general.architecture 'mamba' is not supported: expected one of gemma2, gemma3, llama",
    ),
    "experts": (set_uint("llama.expert_count", 8), r"llama\.expert_count is 8; only 0 is"),
    "window": (
        set_uint("llama.attention.sliding_window", 100),
        r"llama\.attention\.sliding_window is 100: sliding windows are not .* length \(\d+\)",
    ),
    "unknown key": (
        set_uint("llama.attention.clamp_kqv", 8),
        r"llama\.attention\.clamp_kqv \(8\) is not supported, and ignoring it may change answers",
    ),
    "rope kind": (
        set_text("llama.rope.scaling.type", "spiral"), r"rope\.scaling\.type 'spiral' is not",
    ),
    "longrope without factors": (
        set_text("llama.rope.scaling.type", "longrope"), r"or 'longrope' with the tensors",
    ),
    "partial rotation": (
        set_uint("llama.rope.dimension_count", 6),
        r"rope\.dimension_count is 6: expected 12, the head dimension",
    ),
    "values of another length": (
        set_uint("llama.attention.value_length", 14),
        r"value_length is 14: expected 12, the head dimension",
    ),
    "heads differ": (
        set_list("llama.attention.head_count_kv", [4, 2]),
        r"head_count_kv has 2 different values",
    ),
    "no length": (
        drop("llama.context_length"),
        r"has no llama\.context_length: expected a whole number",
    ),
    "length of text": (
        set_text("llama.context_length", "many"),
        r"llama\.context_length is 'many': expected a whole number",
    ),
    "huge": (set_uint("llama.block_count", 1 << 31), r"llama\.block_count is 2147483648: expected"),
    "no layers": (set_uint("llama.block_count", 0), r"block_count is 0: expected a positive whole"),
    "vocabulary": (
        set_uint("llama.vocab_size", 300), r"vocab_size is 300: expected 307, the number of rows",
    ),
    "no architecture": (drop("general.architecture"), r"has no general\.architecture"),
}  # fmt: skip


@pytest.fixture(scope="module")
def llama(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_folder(tmp_path_factory.mktemp("llama") / "m", "llama2")


@pytest.mark.parametrize("case", REFUSED)
def test_metadata_that_cannot_be_served_is_refused_by_name(
    case: str, llama: Path, tmp_path: Path
) -> None:
    change, words = REFUSED[case]
    path = write_gguf(llama, tmp_path / "m.gguf", extra=change)
    with pytest.raises((BadCheckpoint, UnsupportedModel), match=words) as raised:
        config_of(path)
    assert "\n" not in str(raised.value)
    assert str(path) in str(raised.value)


def test_more_tokens_than_embeddings_are_refused(llama: Path, tmp_path: Path) -> None:
    def add(writer: gguf.GGUFWriter) -> None:
        writer.add_uint32("tokenizer.ggml.mask_token_id", 0)
        for key in ("tokens", "token_type"):
            writer.kv_data[0].pop(f"tokenizer.ggml.{key}")
        writer.add_token_list([str(number) for number in range(400)])

    path = write_gguf(llama, tmp_path / "m.gguf", extra=add)
    with pytest.raises(
        BadCheckpoint, match=r"tokens is an array of 400 items: expected an array of at most"
    ):
        config_of(path)


def test_scaling_of_yarn_is_read(llama: Path, tmp_path: Path) -> None:
    def add(writer: gguf.GGUFWriter) -> None:
        writer.add_rope_scaling_type(gguf.RopeScalingType.YARN)
        writer.add_rope_scaling_factor(4.0)
        writer.add_rope_scaling_orig_ctx_len(48)
        writer.add_rope_scaling_yarn_beta_fast(16.0)

    rope = read_spec(write_gguf(llama, tmp_path / "m.gguf", extra=add)).rope
    assert (rope.kind, rope.factor, rope.original_max_len) == ("yarn", 4.0, 48)
    assert (rope.beta_fast, rope.beta_slow) == (16.0, 1.0)


def test_yarn_without_the_original_length_does_not_extend_the_context(
    llama: Path, tmp_path: Path
) -> None:
    """The context length of such a file may already be the extended one."""

    def add(writer: gguf.GGUFWriter) -> None:
        writer.add_rope_scaling_type(gguf.RopeScalingType.YARN)
        writer.add_rope_scaling_factor(4.0)

    spec = read_spec(write_gguf(llama, tmp_path / "m.gguf", extra=add))
    assert spec.rope.kind == "yarn"
    assert spec.max_model_len == read_spec(write_gguf(llama, tmp_path / "plain.gguf")).max_model_len


@pytest.fixture(scope="module")
def good(llama: Path, tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, bytes, int]:
    """Return a path to write to, the content of a valid file, and the size of its header."""
    path = write_gguf(llama, tmp_path_factory.mktemp("fuzz") / "m.gguf")
    return path, path.read_bytes(), open_gguf(path).headers[0].num_bytes


@settings(max_examples=150)
@given(data=st.data())
def test_changed_file_is_read_or_refused_in_one_line(
    data: st.DataObject, good: tuple[Path, bytes, int]
) -> None:
    path, content, num_bytes = good
    places = st.one_of(st.integers(0, num_bytes - 1), st.integers(0, 1500))
    changed = bytearray(content)
    for _ in range(data.draw(st.integers(1, 3))):
        at = data.draw(places)
        value = data.draw(
            st.one_of(st.sampled_from([b"\xff" * 4, bytes(4)]), st.binary(max_size=4))
        )
        changed[at : at + len(value)] = value
    path.write_bytes(changed)
    message = ""
    try:
        config_of(path)
        read_spec(path)
        tokenizer_config_of(path)
        ModelTokenizer(path).encode("the water")
    except (BadCheckpoint, UnsupportedModel, UnsupportedTokenizer) as error:
        message = str(error)
    assert "\n" not in message


def test_folder_with_only_a_gguf_file_names_the_file(llama: Path, tmp_path: Path) -> None:
    path = write_gguf(llama, tmp_path / "m.gguf")
    with pytest.raises(BadCheckpoint, match=f"give the path of the file, such as {path}$"):
        read_spec(tmp_path)
