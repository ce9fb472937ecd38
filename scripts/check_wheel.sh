#!/usr/bin/env bash
# Installs a built wheel into an environment of its own and uses it there, outside the repository.
#
#   scripts/check_wheel.sh dist/pipeal-….whl          with the libraries that this environment has: seconds, no network
#   scripts/check_wheel.sh --bare dist/pipeal-….whl   with nothing but Python: also what the wheel asks for, several GB of
#                                                     PyTorch, and what is there without and with each extra
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
  "$own/pipeal" train-text toynews "$@" --epochs 1 --devices cpu,cpu --resume never --set engine.threads=1 \
    --set model.embedding_dim=16 --set model.x_hid=16 --set model.y_hid=16
}
# Runs a command and shows its last line; all of it, if it ends with another exit code than the first argument.
ends_with() {
  local wanted="$1" code=0
  shift
  "$@" > said.txt 2>&1 || code=$?
  [ "$code" = "$wanted" ] || { cat said.txt; echo "$*: exit code $code, expected $wanted"; exit 1; }
  tail -n 1 said.txt
}
"$own/pipeal" --help > /dev/null
"$own/pipeal" --version
if [ -n "$bare" ]; then
  ends_with 0 train lstm
  ends_with 2 train lstm --set train.tensorboard=true
  ends_with 2 train hf:bert
  "$own/pip" install --disable-pip-version-check -q "$wheel[tensorboard,hf]"
  "$own/python" - <<'EOF'
import tokenizers, transformers
words = ["[PAD]", "[UNK]", *"the a of in to and game market team stock science film".split()]
own = tokenizers.Tokenizer(tokenizers.models.WordLevel({word: number for number, word in enumerate(words)}, "[UNK]"))
own.pre_tokenizer = tokenizers.pre_tokenizers.Whitespace()
fast = transformers.PreTrainedTokenizerFast(tokenizer_object=own, pad_token="[PAD]", unk_token="[UNK]")
fast.save_pretrained("bert")
sizes = {"hidden_size": 16, "num_hidden_layers": 2, "num_attention_heads": 2, "intermediate_size": 16}
transformers.BertConfig(vocab_size=len(words), max_position_embeddings=64, **sizes).save_pretrained("bert")
EOF
  ends_with 0 train hf:bert
  ends_with 0 "$own/pipeal" export runs/toynews-hf-bert-al-001 --to hf --out exported
  ends_with 0 "$own/python" -c 'import transformers as library
library.AutoTokenizer.from_pretrained("exported")
print(type(library.AutoModelForSequenceClassification.from_pretrained("exported")).__name__, "loads what was exported")'
fi
ends_with 0 train lstm --set train.tensorboard=true
[ -n "$(find runs -name 'events.out.tfevents*')" ] || { echo "with the extra: no files for TensorBoard"; exit 1; }
"$own/pipeal" runs
echo "the wheel works: $(basename "$wheel"), $("$own/python" --version)$([ -z "$bare" ] || echo ", $(du -sh venv | cut -f 1) installed")"
