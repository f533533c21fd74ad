#!/usr/bin/env bash
# vLLM 0.33 for a machine without a network: a Hopper GPU, Python 3.12, PyTorch 2.11, torchvision, Triton, transformers.
#
#   bench/gpu_vllm.sh pack ARCHIVE [WHEEL]    with a package registry, without a GPU: downloads and packs 44 MiB
#   bench/gpu_vllm.sh unpack ARCHIVE FOLDER   on the GPU machine, in a copy of the checkout; then: source FOLDER/env.sh
#
# vLLM requires a later PyTorch, but a dense text model runs with this one. The archive has vLLM's Python, the kernels of
# _C, _moe_C and FlashAttention 3 for sm_90 alone, and the packages below. unpack also installs the checkout (editable).
# PYTHON is the Python to use, python3 by default.
set -euo pipefail
usage() { sed -n '4,5s/^#  *//p' "$0" >&2; exit 2; }
[ $# -ge 2 ] || usage
PYTHON=${PYTHON:-python3}
pip=("$PYTHON" -m pip --disable-pip-version-check)
archive=$(realpath -m "$2")
root=$(cd "$(dirname "$0")/.." && pwd)

# Imported by vLLM for text models, in process or as an OpenAI server, and missing beside PyTorch and transformers.
packages=(
    annotated-types==0.8.0 apache-tvm-ffi==0.1.15.post2 astor==0.8.1 blake3==1.0.11 cachetools==8.0.1 cbor2==6.2.1
    compressed-tensors==0.17.0 depyf==0.20.0 dill==0.4.1 dnspython==2.9.2 email-validator==2.4.0 fastapi==0.136.3
    httpcore2==2.16.2 httptools==0.9.0 httpx2==2.16.2 ijson==3.6.0 interegular==0.3.3 jiter==0.19.0 jmespath==1.1.0
    jsonschema-specifications==2025.9.1 jsonschema==4.26.0 lark==1.2.2 llguidance==1.7.6 lm-format-enforcer==0.11.3
    loguru==0.7.3 model-hosting-container-standards==0.1.16 msgspec==0.22.0 openai==3.54.0 opentelemetry-api==1.45.2
    opentelemetry-sdk==1.45.2 opentelemetry-semantic-conventions==0.66b2 orjson==3.13.0 oss-harmony==0.0.11
    partial-json-parser==0.2.1.1.post7 prometheus-fastapi-instrumentator==8.1.0 pybase64==1.5.1 pydantic-core==2.50.4
    pydantic-extra-types==2.11.1 pydantic-settings==2.16.3 pydantic==2.14.3 python-dotenv==1.2.4
    python-json-logger==4.2.0 python-multipart==0.0.34 pyzmq==27.3.0 referencing==0.37.0 rpds-py==2026.9.1
    setproctitle==1.3.8 sniffio==1.3.1 starlette==1.10.0 supervisor==4.3.0 truststore==0.10.5
    typing-inspection==0.4.5 uvicorn==0.54.0 watchfiles==1.3.0 websockets==17.4 xgrammar==0.2.8
)

pack() {
    work=$(mktemp -d)
    trap 'rm -rf "$work"' EXIT
    # pip compares the versions of platforms for equality, and accepts cp312 and abi3 wheels only if both are named.
    target=(--no-deps --only-binary=:all: --python-version 3.12 --implementation cp --abi cp312 --abi abi3 --abi none)
    for n in 5 12 17 24 26 27 28 31 34 35; do target+=(--platform "manylinux_2_${n}_x86_64"); done
    target+=(--platform manylinux1_x86_64 --platform manylinux2014_x86_64)
    "${pip[@]}" install -q --no-compile --target "$work/site" "${target[@]}" "${packages[@]}"
    [ -n "${1:-}" ] || "${pip[@]}" download -q "${target[@]}" -d "$work" vllm==0.33.0
    "$PYTHON" - "${1:-$(echo "$work"/vllm-*.whl)}" "$work/site" <<'PY'
"""Unpacks the files of a wheel that are needed, with GPU code for sm_90 alone."""

import struct
import sys
import zipfile
from pathlib import PurePosixPath

LIBRARIES = {"_C_stable_libtorch", "_moe_C_stable_libtorch", "_vllm_fa3_C", "cumem_allocator", "fs_io_C", "spinloop"}
LEFT_OUT = {".h", ".hpp", ".cuh", ".inl", ".cu", ".cpp", ".jpg", ".js", ".css", ".sh"}
CONTAINER, PTX, SM = 0xBA55ED50, 1, 90


def fatbin(data):
    """Offset and end of the section of an ELF file that contains GPU code; (0, 0) without."""
    headers, size, count, names = *struct.unpack_from("<Q", data, 40), *struct.unpack_from("<HHH", data, 58)
    sections = [struct.unpack_from("<IIQQQQ", data, headers + i * size) for i in range(count)]
    strings = sections[names][4]
    found = [s[4:6] for s in sections if data.startswith(b".nv_fatbin\0", strings + s[0])] if count else []
    return (found[0][0], sum(found[0])) if found else (0, 0)


def prune(data):
    """Replace GPU code for other GPUs by zeros, which compress to nothing. Containers keep their places."""
    (at, end), containers = fatbin(data), []
    while at + 16 <= end:
        magic, _, header, length = struct.unpack_from("<IHHQ", data, at)
        if magic != CONTAINER:  # padding
            at += 8
            continue
        entry, after, entries = at + header, at + header + length, []
        while entry < after:
            kind, _, entry_header, body, arch = *struct.unpack_from("<HHIQ", data, entry), data[entry + 28]
            code = bytes(data[entry : entry + entry_header + body])
            entries.append((code, kind != PTX and arch == SM))
            entry += len(code)
        containers.append((at, at + header, after, entries))
        at = after
    # A container must not be empty: one without code for this GPU, which is not used there, gets the smallest code.
    smallest = min((code for *_, entries in containers for code, fits in entries if fits), key=len, default=b"")
    for at, first, after, entries in containers:
        kept = b"".join(code for code, fits in entries if fits)
        if not kept:
            kept = smallest if smallest and len(smallest) <= after - first else min((c for c, _ in entries), key=len)
        struct.pack_into("<Q", data, at + 8, len(kept))
        data[first:after] = kept.ljust(after - first, b"\0")


wheel, site = zipfile.ZipFile(sys.argv[1]), sys.argv[2]
for name in wheel.namelist():
    path = PurePosixPath(name)
    parts = set(path.parts)
    if path.suffix in LEFT_OUT or path.name == "vllm-rs" or ("third_party" in parts and parts & {"include", "cutlass"}):
        continue
    if path.suffix != ".so":
        wheel.extract(name, site)
    elif path.name.split(".")[0] in LIBRARIES:
        data = bytearray(wheel.read(name))
        prune(data)
        with open(wheel.extract(name, site), "wb") as file:
            file.write(data)
PY
    # Similar files are beside each other, which compresses better.
    (cd "$work/site" && find . -type f ! -path '*/__pycache__/*' ! -path './bin/*' -printf '%P\n') |
        awk -F. '{print $NF "\t" $0}' | sort | cut -f2- > "$work/files"
    tar -C "$work/site" --owner=0 --group=0 -cf - -T "$work/files" | nice xz -T2 -6e > "$archive"
    du -h --apparent-size "$archive"
}

unpack() {
    "$PYTHON" -m tarfile --filter data -e "$archive" "$1"
    "${pip[@]}" install -q --no-index --no-deps --no-build-isolation --editable "$root"
    cat > "$1/env.sh" <<ENV
export PYTHONPATH="$(realpath "$1")\${PYTHONPATH:+:\$PYTHONPATH}"
export VLLM_USE_FLASHINFER_SAMPLER=0 VLLM_USE_DEEP_GEMM=0 VLLM_NO_USAGE_STATS=1 DO_NOT_TRACK=1
export HF_HUB_OFFLINE=1 TRANSFORMERS_OFFLINE=1 VLLM_HOST_IP=127.0.0.1 GLOO_SOCKET_IFNAME=lo NCCL_SOCKET_IFNAME=lo
ENV
    source "$1/env.sh"
    cd "$root"
    "$PYTHON" - <<'PY'
"""Smoke test: vLLM and the plugin are importable, and two of the packed kernels agree with PyTorch."""

from importlib.metadata import entry_points

import torch
import vllm._custom_ops as ops
from torch.nn import functional
from vllm import LLM  # noqa: F401
from vllm.platforms import current_platform
from vllm.vllm_flash_attn import flash_attn_varlen_func

(plugin,) = entry_points(group="vllm.logits_processors")
print(f"{type(current_platform).__name__}, {plugin.load().__name__}", flush=True)
with torch.device("cuda"):
    x, weight = torch.randn(7, 896, dtype=torch.bfloat16), torch.rand(896, dtype=torch.bfloat16)
    qkv, ends = torch.randn(3, 4, 64, 128, dtype=torch.bfloat16), torch.tensor([0, 64], dtype=torch.int32)
ops.rms_norm(out := torch.empty_like(x), x, weight, 1e-6)
torch.testing.assert_close(out, functional.rms_norm(x, (896,), weight, 1e-6), atol=0.05, rtol=0.02)
lens = dict(cu_seqlens_q=ends, cu_seqlens_k=ends, max_seqlen_q=64, max_seqlen_k=64)
out = flash_attn_varlen_func(*qkv.transpose(1, 2), **lens, causal=True, fa_version=3)
expected = functional.scaled_dot_product_attention(*qkv, is_causal=True).transpose(0, 1)
torch.testing.assert_close(out, expected, atol=0.05, rtol=0.02)
print("the kernels agree with PyTorch on", torch.cuda.get_device_name())
PY
}

case $1 in
    pack) pack "${3:-}" ;;
    unpack) [ $# -eq 3 ] || usage; mkdir -p "$3"; unpack "$3" ;;
    *) usage ;;
esac
