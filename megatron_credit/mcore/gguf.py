"""Unpacks a GGUF file into a Hugging Face model directory.

    python -m megatron_credit.mcore.gguf MODEL.gguf DIRECTORY

Needs the packages gguf and accelerate, which transformers reads such files with.
"""

import argparse
from pathlib import Path

import torch
from transformers import AutoModelForCausalLM, AutoTokenizer


def unpack_gguf(file: Path, directory: Path) -> None:
    """Writes the model as bfloat16 safetensors, with its tokenizer and chat template.

    ValueError: `directory` exists already, or there is no such file.
    """
    if directory.exists():
        raise ValueError(f"{directory} exists already; give a new directory")
    if not file.is_file():
        raise ValueError(f"{file} does not exist; give a GGUF file")
    source = {"gguf_file": file.name, "local_files_only": True}
    tokenizer = AutoTokenizer.from_pretrained(file.parent, **source)
    packed = AutoModelForCausalLM.from_pretrained(file.parent, dtype=torch.float32, **source)
    config = packed.config
    # transformers does not save a model that was quantised, so another one takes its numbers.
    del config.quantization_config
    model = AutoModelForCausalLM.from_config(config, dtype=torch.bfloat16)
    model.load_state_dict(packed.state_dict())
    model.save_pretrained(directory)
    tokenizer.save_pretrained(directory)


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("file", type=Path)
    parser.add_argument("directory", type=Path)
    arguments = parser.parse_args()
    unpack_gguf(arguments.file, arguments.directory)
