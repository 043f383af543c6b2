"""One distribution, three import packages: `megatron_credit`, `credit_kernels`, `credit_launch`.

`kernels/` itself must never become a package: a top-level `kernels` would shadow the PyPI package
of that name, which transformers imports.
"""

from setuptools import find_packages, setup

setup(
    packages=[
        *find_packages(include=["megatron_credit", "megatron_credit.*"]),
        *find_packages(where="kernels", include=["credit_kernels", "credit_kernels.*"]),
        "credit_launch",
    ],
    package_dir={
        "": ".",
        "credit_kernels": "kernels/credit_kernels",
        "credit_launch": "launch/credit_launch",
    },
    package_data={"megatron_credit.report.page": ["assets/*"]},
)
