#!/usr/bin/env bash
# Installs a built wheel into an environment of its own and uses it there, outside the repository.
#
#   scripts/check_wheel.sh dist/pipeal-….whl          with the libraries that this environment has: seconds, no network
#   scripts/check_wheel.sh --bare dist/pipeal-….whl   with nothing but Python: also what the wheel asks for, several GB of
#                                                     PyTorch, and what is there without and with the extra tensorboard
#
# PYTHON is the interpreter to do it with.
set -euo pipefail
bare=""
if [ "${1:-}" = --bare ]; then
  bare=1
  shift
fi
wheel="$(realpath "${1:?"name the wheel, such as dist/pipeal-0.1.0-py3-none-any.whl"}")"
python="$(command -v "${PYTHON:-python3}")"
there="$(mktemp -d)"
trap 'rm -rf "$there"' EXIT
unset PYTHONPATH
"$python" -m venv "$there/venv"
own="$there/venv/bin"
if [ -n "$bare" ]; then
  "$own/pip" install --disable-pip-version-check -q "$wheel"
else
  "$own/pip" install --disable-pip-version-check -q --no-deps "$wheel"
  # Paths in a .pth file are searched, but .pth files there, such as that of an editable pipeal, are not read.
  "$python" -c 'import sysconfig; print(sysconfig.get_path("purelib"))' > "$("$own/python" -c 'import sysconfig; print(sysconfig.get_path("purelib"))')/libraries.pth"
fi
cd "$there"
"$own/python" - "$there" <<'EOF'
import pathlib, sys
import pipeal
found = pathlib.Path(pipeal.__file__)
assert found.is_relative_to(pathlib.Path(sys.argv[1]).resolve()), f"pipeal is that of {found}, not the wheel's"
assert (found.parent / "_configs" / "toynews-lstm.yaml").is_file(), "the wheel lacks its configurations"
assert (found.parent / "py.typed").is_file(), "the wheel lacks its types"
EOF
train() {
  "$own/pipeal" train-text toynews lstm --epochs 1 --devices cpu,cpu --resume never --set engine.threads=1 \
    --set model.embedding_dim=16 --set model.x_hid=16 --set model.y_hid=16 "$@"
}
"$own/pipeal" --help > /dev/null
"$own/pipeal" --version
if [ -n "$bare" ]; then
  train > without.txt 2>&1 || { cat without.txt; exit 1; }
  code=0
  train --set train.tensorboard=true > refused.txt 2>&1 || code=$?
  [ "$code" = 2 ] || { cat refused.txt; echo "without the extra: exit code $code, expected 2"; exit 1; }
  tail -n 1 refused.txt
  "$own/pip" install --disable-pip-version-check -q "$wheel[tensorboard]"
fi
train --set train.tensorboard=true > with.txt 2>&1 || { cat with.txt; exit 1; }
[ -n "$(find runs -name 'events.out.tfevents*')" ] || { echo "with the extra: no files for TensorBoard"; exit 1; }
"$own/pipeal" runs
echo "the wheel works: $(basename "$wheel"), $("$own/python" --version)$([ -z "$bare" ] || echo ", $(du -sh venv | cut -f 1) installed")"
