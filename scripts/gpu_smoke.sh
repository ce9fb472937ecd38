#!/usr/bin/env bash
# The first ten minutes with a GPU as one command: `scripts/gpu_smoke.sh --help` says what it does. It needs a Python with
# torch and numpy (PYTHON=…, else python3), what else pipeal imports installed or as a folder of wheels, and no network.
set -euo pipefail
root="$(cd "$(dirname "${BASH_SOURCE[0]}")/.." && pwd)"
export PYTHONPATH="$root/scripts:$root${PYTHONPATH:+:$PYTHONPATH}"
exec "${PYTHON:-python3}" -m gpu_smoke "$@"
