#!/usr/bin/env bash
# The GPU check: are the kernels right, do graphs change nothing, how fast is it?
#
#   tests/gpu/check.sh [--json PATH] [--parts kernels equality ...] [--dry]
#
# Takes less than 8 minutes on one CUDA device and writes one JSON. The exit
# code is 0 if everything that can be right or wrong was right. --dry runs the
# same parts on a CPU, with tiny shapes, Triton's interpreter and the recording
# back end, in less than 3 minutes.
#
# It needs Python 3.12 (or newer) with a CUDA build of PyTorch, triton,
# transformers, numpy and pytest, and two small wheels: msgspec and pyzmq. Where
# they are missing it takes them from $WHEELS, a folder (default build/wheels),
# without touching the installation. To fill that folder, on a machine with a
# network:
#
#   pip download --no-deps --only-binary :all: --python-version 3.12 \
#     --platform manylinux_2_28_x86_64 --platform manylinux2014_x86_64 \
#     -d build/wheels msgspec pyzmq
set -euo pipefail
root="$(cd "$(dirname "$0")/../.." && pwd)"
wheels="${WHEELS:-$root/build/wheels}"
python="${PYTHON:-python3}"
missing=()
for pair in msgspec:msgspec zmq:pyzmq; do
    "$python" -c "import ${pair%%:*}" 2>/dev/null || missing+=("${pair##*:}")
done
extra=""
if [ "${#missing[@]}" -gt 0 ]; then
    extra="$(mktemp -d)"
    trap 'rm -rf "$extra"' EXIT
    find=(); [ -d "$wheels" ] && find=(--no-index --find-links "$wheels")
    "$python" -m pip install --quiet --disable-pip-version-check --no-deps \
        --target "$extra" "${find[@]}" "${missing[@]}" || {
        echo "needed and not there: ${missing[*]}; put their wheels into $wheels" >&2
        exit 2
    }
fi
export PYTHONPATH="$root${extra:+:$extra}${PYTHONPATH:+:$PYTHONPATH}"
export MINENGINE_CACHE="${MINENGINE_CACHE:-$root/build/gpu-check-cache}"   # of compiled code
export TOKENIZERS_PARALLELISM=false HF_HUB_OFFLINE=1 PYTHONUNBUFFERED=1
status=0
"$python" "$root/tests/gpu/check.py" "$@" || status=$?
exit "$status"
