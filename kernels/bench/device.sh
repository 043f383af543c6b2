#!/usr/bin/env bash
# The whole session on a GPU in one command, under 10 minutes: first whether the kernels are right,
# then how fast they are. PYTHON needs torch and triton; --tiny rehearses it without a GPU.
set -euo pipefail
cd "$(dirname "$0")/../.."
python=${PYTHON:-.venv/bin/python}
[[ -x $python ]] || python=python3
export PYTHONPATH=kernels${PYTHONPATH:+:$PYTHONPATH}
[[ " $* " != *" --tiny "* ]] || export TRITON_INTERPRET=1 PYTHONWARNINGS=ignore::RuntimeWarning
exec timeout 590 "$python" kernels/bench/device.py "$@"
