"""Compare generated protobuf code with its source: `python -m tests.generated [--write]`."""

import subprocess
import sys
import tempfile
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
PROTOS = ROOT / "protos"


def generate(target: Path) -> None:
    """Compile every .proto below `penstock/protos` into `target/penstock/protos`."""
    sources = sorted(f"penstock/protos/{path.name}" for path in PROTOS.glob("*.proto"))
    outputs = [f"--{kind}_out={target}" for kind in ("python", "pyi", "grpc_python")]
    command = [sys.executable, "-m", "grpc_tools.protoc", "-I.", *outputs, *sources]
    subprocess.run(command, cwd=ROOT, check=True)


def stale() -> list[str]:
    """Return the names of generated files that differ from newly generated ones."""
    with tempfile.TemporaryDirectory() as folder:
        generate(Path(folder))
        fresh = sorted((Path(folder) / "penstock" / "protos").glob("*_pb2*"))
        return [
            path.name
            for path in fresh
            if not (PROTOS / path.name).exists()
            or (PROTOS / path.name).read_bytes() != path.read_bytes()
        ]


def main() -> int:
    if "--write" in sys.argv[1:]:
        generate(ROOT)
        return 0
    names = stale()
    if names:
        print("out of date, run `make protos`:", ", ".join(names))
    return 1 if names else 0


if __name__ == "__main__":
    sys.exit(main())
