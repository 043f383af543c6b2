"""The kernels' packaging."""

import subprocess
import sys
from pathlib import Path

import credit_kernels

ROOT = Path(credit_kernels.__file__).parents[1]


def python(code):
    return subprocess.check_output([sys.executable, "-c", code], text=True).strip()


def test_kernels_is_not_a_package():
    # A top-level package `kernels` would shadow the one of that name that transformers imports.
    assert not (ROOT / "__init__.py").exists()


def test_transformers_still_imports_beside_the_package():
    assert python("import credit_kernels, transformers; print(transformers.__name__)") == (
        "transformers"
    )


def test_the_package_stands_alone():
    others = ("megatron", "vllm", "transformers", "megatron_credit", "triton", "numpy.testing")
    code = f"import sys, credit_kernels; print([name for name in {others} if name in sys.modules])"
    assert python(code) == "[]"
