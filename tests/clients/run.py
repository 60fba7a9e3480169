"""make clients: each client's script in the virtual environment of its packages, made here on first use.

usage: run.py --wheel FILE [--environments FOLDER] [--instead REQUIREMENT] [CLIENT ...]     (default: all)

--instead takes another version of a package than the table's, such as
"megatron-core @ git+https://github.com/NVIDIA/Megatron-LM@main", in an environment of its own.
Environments are kept, so that the next run is quick, and lie outside the source tree. hdpcomm is installed from the
wheel, as a user has it: torch knows the backend by the entry point. PIP_EXTRA_INDEX_URL=https://download.pytorch.org/whl/cpu
brings a torch without CUDA. Exit code 1: a client failed; its output is printed.
"""

from __future__ import annotations

import argparse
import os
import re
import subprocess
import sys
import time
from pathlib import Path

FOLDER = Path(__file__).resolve().parent
TOP = FOLDER.parents[1]
#: Script: the packages of its environment, beside torch and hdpcomm, some without what they ask for. Clients with equal
#: packages share one.
CLIENTS: dict[str, tuple[str, ...]] = {
    "ddp": ("transformers", "accelerate"),
    "fsdp2": ("transformers", "accelerate"),
    "dtensor_tp": ("transformers", "accelerate"),
    "pipelining": ("transformers", "accelerate"),
    "dcp": ("transformers", "accelerate"),
    "transformers_trainer": ("transformers", "accelerate"),
    "planning_trainer": ("transformers", "accelerate"),
    "accelerate_launch": ("transformers", "accelerate"),
    "qlora": ("transformers", "accelerate", "peft", "torchao==0.18.0"),
    "float8": ("transformers", "accelerate", "peft", "torchao==0.18.0"),
    "trl_sft": ("transformers", "accelerate", "trl", "datasets", "peft"),
    "planning_trl": ("transformers", "accelerate", "trl", "datasets", "peft"),
    "lightning_fabric": ("transformers", "lightning==2.6.6"),
    "deepspeed_zero": ("transformers", "deepspeed==0.19.8", "setuptools", "ninja"),
    # Some modules of Megatron-Core import Triton, for which it does not ask; nor does torchtitan.
    "megatron_scheduler": ("megatron-core @ git+https://github.com/NVIDIA/Megatron-LM@dev", "triton"),
    "megatron_data": ("megatron-core==0.16.1",),
    "data_formats": ("mosaicml-streaming==0.13.0", "litdata==0.2.76", "transformers<5", "numpy<2.2"),
    "torchtitan_plans": ("torchtitan==0.3.0", "datasets<4.8", "triton"),
    # verl's workers import the last two, which it does not ask for.
    "verl_engine": ("transformers==5.10.4", "verl==0.9.1", "uvicorn", "fastapi"),
    "verl_uneven": ("transformers==5.10.4", "verl==0.9.1", "uvicorn", "fastapi"),
    "verl_routes": ("transformers==5.10.4", "verl==0.9.1", "uvicorn", "fastapi"),
    "verl_images": ("transformers==5.10.4", "verl==0.9.1", "uvicorn", "fastapi"),
    # What vLLM's weight transfer and reload import, without its kernels and its torch.
    "vllm_weights": (
        "transformers", "requests", "pyzmq", "cbor2", "aiohttp", "pybase64", "msgspec", "cloudpickle", "psutil",
        "pydantic", "regex", "cachetools", "blake3", "py-cpuinfo", "openai", "fastapi", "prometheus_client",
        "setproctitle", "pillow", "einops", "depyf", "python-json-logger", "ijson", "partial-json-parser",
        "openai_harmony", "uvloop", "xgrammar", "apache-tvm-ffi", "llguidance", "vllm==0.33.0 --no-deps",
    ),
}  # fmt: skip


def name_of(package: str) -> str:
    return re.split("[ =@<]", package)[0]


def environment(folder: Path, packages: tuple[str, ...], wheel: Path) -> Path:
    """The interpreter of an environment with these packages and this wheel."""
    python = folder / "bin" / "python"
    done = folder / "installed.txt"
    wanted = "\n".join(("torch", *packages))
    pip = [str(python), "-m", "pip", "install", "--quiet", "--progress-bar", "off", "--no-compile"]
    if not done.exists() or done.read_text() != wanted:
        subprocess.run([sys.executable, "-m", "venv", "--clear", str(folder)], check=True)
        own = {name_of(package) for package in packages if name_of(package) != package}
        lines = (TOP / "constraints.txt").read_text().splitlines()
        constraints = folder / "constraints.txt"
        constraints.write_text("\n".join(line for line in lines if line.split("==")[0] not in own))
        alone = [package.removesuffix(" --no-deps") for package in packages if package.endswith(" --no-deps")]
        whole = [package for package in packages if not package.endswith(" --no-deps")]
        subprocess.run([*pip, "-c", str(constraints), "torch", "numpy", "rich", "PyYAML", *whole], check=True)
        if alone:
            subprocess.run([*pip, "--no-deps", *alone], check=True)
        done.write_text(wanted)
    subprocess.run([*pip, "--force-reinstall", "--no-deps", str(wheel)], check=True)
    return python


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("clients", nargs="*", metavar="CLIENT", help=", ".join(CLIENTS))
    parser.add_argument("--wheel", type=Path, required=True)
    cache = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache")
    parser.add_argument("--environments", type=Path, default=cache / "hdpcomm" / "clients")
    parser.add_argument("--instead", default="", metavar="REQUIREMENT")
    given = parser.parse_args()
    instead = name_of(given.instead)
    if instead and not any(name_of(package) == instead for each in CLIENTS.values() for package in each):
        parser.error(f"--instead {given.instead}: no client has the package {instead}")
    if unknown := [name for name in given.clients if name not in CLIENTS]:
        parser.error(f"no client {unknown[0]!r}; known are {', '.join(CLIENTS)}")
    if TOP in (given.environments.resolve(), *given.environments.resolve().parents):
        parser.error(f"{given.environments} is inside the source tree; give another --environments")
    # What is not installed there must not come from here.
    outer = {k: v for k, v in os.environ.items() if k not in ("PYTHONPATH", "VIRTUAL_ENV")}
    ready: dict[tuple[str, ...], Path] = {}
    failed = []
    for name in given.clients or CLIENTS:
        packages, started = CLIENTS[name], time.monotonic()
        names = "-".join(dict.fromkeys(map(name_of, packages)))[:100]
        if instead in map(name_of, packages):
            packages = (given.instead, *(package for package in packages if name_of(package) != instead))
            names += "-instead"
        if packages not in ready:
            folder = given.environments.resolve() / names
            ready[packages] = environment(folder, packages, given.wheel.resolve())
            print(f"# {folder}: ready in {time.monotonic() - started:.0f} s", flush=True)
        done = subprocess.run(
            [str(ready[packages]), str(FOLDER / f"{name}.py")],
            env=outer,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            timeout=900,
            check=False,
        )
        last = done.stdout.strip().splitlines()[-1:] or [""]
        if done.returncode or not last[0].startswith("ok: "):
            failed.append(name)
            print(done.stdout)
        print(f"{name}: {last[0]}", flush=True)
    if failed:
        print(f"failed: {', '.join(failed)}")
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main())
